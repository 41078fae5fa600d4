//! Things that could not be freed where their owner ended.
//!
//! Some owners end where nothing may be freed: the graph that kept a buffer ends
//! on a thread of the driver's, which must not call the driver; a registration
//! that is dropped inside a read-side section would wait for itself. What they
//! leave is put on a list, and ordinary calls of this crate free it later.
//!
//! | list | put there by | freed by |
//! |---|---|---|
//! | [`BUFFERS`] | the end of a graph (`graph.rs`) | [`reclaim`], the making of a buffer, the next capture of a copy |
//! | [`REGISTRATIONS`] | a drop of a registration that could not wait (`host_registration.rs`) | [`reclaim`], the making and the end of a registration |
//!
//! Who frees takes the whole list, tries each thing once, and puts back what is
//! still in use. So several threads may free at the same time: each thing is with
//! one of them, or on the list.

use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::{Duration, Instant};

/// Buffers that graphs have kept.
pub(super) static BUFFERS: List = List::new();

/// Memory that was page-locked where it is, by its chunks.
pub(super) static REGISTRATIONS: List = List::new();

/// The limit of calls that wait for nothing.
pub(super) const AT_ONCE: Option<Duration> = Some(Duration::ZERO);

/// Frees what this crate could not free when its owner ended, and returns how
/// many things were freed: buffers, and registrations of memory.
///
/// Two kinds of things are freed late.
///
/// - A [`PinnedBuffer`](super::PinnedBuffer) that a graph kept
///   ([`Copier::capture_h2d_from`](super::Copier::capture_h2d_from)). The driver
///   says that the graph needs the buffer no more on a thread where nothing can
///   be freed, some time after the graph's last launch. The next capture of a
///   copy and the next buffer that is made free it too; a program that does
///   neither calls this.
/// - A [`HostRegistration`](super::HostRegistration) that was dropped where it
///   could not wait for copies. The next registration that is made, unregistered
///   or dropped gives it back too.
///
/// This waits for no transfer and for no other thread: what is still in use stays
/// for a later call. But the driver may wait for the device while it frees or
/// unpins memory, as it may at every such call.
///
/// Costs two loads if there is nothing to do. In a forked child it frees nothing.
pub fn reclaim() -> usize {
    BUFFERS.free(AT_ONCE) + REGISTRATIONS.free(AT_ONCE)
}

/// A thing that is to be freed.
pub(super) trait Released: Send {
    /// Frees itself if it is not in use, waiting for at most `limit` where it has
    /// to wait for other threads' sections.
    fn free(self: Box<Self>, limit: Option<Duration>) -> Freed;
}

pub(super) enum Freed {
    Now,
    /// Somebody else has it too, and frees it; or it is leaked for good.
    NotByUs,
    /// It is still in use.
    NotYet(Box<dyn Released>),
}

/// Things to free, the last first.
pub(super) struct List {
    first: AtomicPtr<Entry>,
}

/// A thing, and its place on a list.
pub(super) struct Entry {
    next: *mut Entry,
    thing: Box<dyn Released>,
}

impl Entry {
    /// Made ahead of time, since [`List::put`] must not allocate.
    pub(super) fn new(thing: Box<dyn Released>) -> Box<Self> {
        let next = ptr::null_mut();
        Box::new(Self { next, thing })
    }

    pub(super) fn into_raw(entry: Box<Self>) -> NonNull<Self> {
        NonNull::from(Box::leak(entry))
    }
}

impl List {
    const fn new() -> Self {
        Self {
            first: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Puts a thing on the list. It takes no lock, neither allocates nor frees,
    /// and does not call the driver.
    ///
    /// # Safety
    ///
    /// `entry` comes from [`Entry::into_raw`], and nobody else uses it from now on.
    pub(super) unsafe fn put(&self, entry: NonNull<Entry>) {
        // Relaxed: the entry that is there is not looked into, only linked to.
        let mut first = self.first.load(Ordering::Relaxed);
        loop {
            // SAFETY: the caller's promise.
            unsafe { (*entry.as_ptr()).next = first };
            // Release: for the swap in `free`. Relaxed on failure, as above.
            match self.first.compare_exchange_weak(
                first,
                entry.as_ptr(),
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return,
                Err(now) => first = now,
            }
        }
    }

    /// As [`put`](Self::put), and allocates the place.
    pub(super) fn put_thing(&self, thing: Box<dyn Released>) {
        // SAFETY: the entry is new.
        unsafe { self.put(Entry::into_raw(Entry::new(thing))) };
    }

    /// Frees what is not in use, and returns how many things that were. For
    /// sections it waits for about `limit` in all, or as long as it takes.
    pub(super) fn free(&self, limit: Option<Duration>) -> usize {
        // Relaxed: a thing that is missed now is found by a later call.
        if self.first.load(Ordering::Relaxed).is_null() {
            return 0;
        }
        // Acquire: pairs with each `put` (their exchanges continue one another's
        // release), so that the links and all that was done with the things
        // before lie behind. The whole list is taken at once, so an address that
        // comes back cannot be mistaken for one that never left.
        let first = self.first.swap(ptr::null_mut(), Ordering::Acquire);
        let mut taken = Taken { list: self, first };
        // A limit that no clock can tell is none.
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let left = || deadline.map(|end| end.saturating_duration_since(Instant::now()));
        let mut count = 0;
        while let Some(thing) = taken.next() {
            match thing.free(left()) {
                Freed::Now => count += 1,
                Freed::NotByUs => {}
                // Not on `taken`, so each thing is tried once.
                Freed::NotYet(thing) => self.put_thing(thing),
            }
        }
        count
    }
}

/// Things that one thread has taken off a list. Those that are left go back on
/// it: to free one runs code of the program's, which may panic.
struct Taken<'a> {
    list: &'a List,
    first: *mut Entry,
}

impl Taken<'_> {
    fn next(&mut self) -> Option<Box<dyn Released>> {
        let entry = NonNull::new(self.first)?;
        // SAFETY: it was on the list, so it comes from `Entry::into_raw`; it was
        // taken off, so nobody else has it.
        let entry = unsafe { Box::from_raw(entry.as_ptr()) };
        self.first = entry.next;
        Some(entry.thing)
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        while let Some(thing) = self.next() {
            self.list.put_thing(thing);
        }
    }
}
