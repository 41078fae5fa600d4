//! The wait-free side: a [`Reader`] for any registry, and one that each
//! thread keeps for the process-wide registry.
//!
//! # Why a relaxed load is enough
//!
//! A reader keeps the snapshot it last saw, as an `Arc`, and on each lookup
//! compares that snapshot's address with the one that is published now. That
//! one load is relaxed (`arc_swap::Cache::load`). It suffices:
//!
//! - *Equal* means that the snapshot in hand is the published one. The
//!   reader's own `Arc` keeps the snapshot allocated, so no other snapshot can
//!   have the same address. Its contents never change, and were acquired when
//!   the reader took it.
//! - *Different* means a newer one: the reader then takes it with an
//!   acquiring load, which makes its contents visible.
//! - A registration that happens-before the lookup is not missed: its publish
//!   is a store to the very location that the relaxed load reads, and a load
//!   never returns a value older than a store that happens-before it
//!   (coherence, which holds for relaxed accesses too).
//!
//! A lookup on the hit path is thus one load of a line that nobody writes
//! between publishes, one compare, and the search.

use std::fmt;

use crate::global;
use crate::listing::{Regions, Segments};
use crate::region::Region;
#[cfg(any(feature = "cuda", loom))]
use crate::section::Section;
use crate::snapshot::{Residency, Snapshot};
use crate::span::Span;
use crate::sync::{Arc, ArcSwap, Cache, RefCell, modelled_only, per_thread, weakened};

/// The fast way to ask a [`Registry`] that is not the process-wide one: it
/// remembers the last snapshot, and looks only whether a newer one is there.
///
/// Make one per thread, ahead of time, and keep it; from
/// [`Registry::reader`]. A lookup takes no lock, writes nothing that another
/// thread reads, allocates nothing and is wait-free. (A lookup just after a
/// publish takes the new snapshot, which costs some tens of nanoseconds; it
/// may free the old one if this reader was its last holder.)
///
/// The questions take `&mut self` because a lookup may replace the snapshot
/// the reader keeps. An idle reader keeps one old snapshot alive.
///
/// ```
/// use pinned_hosts::{Region, Registry};
///
/// let registry = Registry::new();
/// let mut reader = registry.reader();
/// let buffer = vec![0u8; 64];
/// assert!(!reader.is_pinned(&buffer));
///
/// let id = registry.register(Region::of(&buffer)?);
/// assert!(reader.is_pinned(&buffer[10..20]));
/// # registry.unregister(id)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// [`Registry`]: crate::Registry
/// [`Registry::reader`]: crate::Registry::reader
#[derive(Clone)]
pub struct Reader<'r> {
    cache: Cache<&'r ArcSwap<Snapshot>, Arc<Snapshot>>,
}

impl<'r> Reader<'r> {
    pub(crate) fn new(published: &'r ArcSwap<Snapshot>) -> Self {
        Self {
            cache: Cache::new(published),
        }
    }

    #[inline]
    fn snapshot(&mut self) -> &Arc<Snapshot> {
        self.cache.load()
    }

    /// Whether every byte of `bytes` is page-locked. See
    /// [`Registry::is_pinned`][r].
    ///
    /// [r]: crate::Registry::is_pinned
    #[inline]
    #[must_use]
    pub fn is_pinned(&mut self, bytes: &[u8]) -> bool {
        self.snapshot().is_pinned(Span::of(bytes))
    }

    /// What `bytes` is. See [`Registry::residency`][r].
    ///
    /// [r]: crate::Registry::residency
    #[inline]
    #[must_use]
    pub fn residency(&mut self, bytes: &[u8]) -> Residency {
        self.snapshot().residency(Span::of(bytes))
    }

    /// The region that contains all of `bytes`. See
    /// [`Registry::region_containing`][r].
    ///
    /// [r]: crate::Registry::region_containing
    #[must_use]
    pub fn region_containing(&mut self, bytes: &[u8]) -> Option<Region> {
        self.snapshot().region_containing(Span::of(bytes))
    }

    /// The parts of `bytes` by residency. See [`Registry::segments`][r].
    ///
    /// [r]: crate::Registry::segments
    #[must_use]
    pub fn segments<'a>(&mut self, bytes: &'a [u8]) -> Segments<'a> {
        Segments::new(Arc::clone(self.snapshot()), bytes)
    }

    /// All registrations of one moment. See [`Registry::regions`][r].
    ///
    /// [r]: crate::Registry::regions
    #[must_use]
    pub fn regions(&mut self) -> Regions {
        Regions::new(self.snapshot())
    }

    /// How many registrations there are. See [`Registry::live_count`][r].
    ///
    /// [r]: crate::Registry::live_count
    #[must_use]
    pub fn live_count(&mut self) -> usize {
        self.snapshot().len()
    }
}

impl fmt::Debug for Reader<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader").finish_non_exhaustive()
    }
}

per_thread! {
    /// This thread's reader of the process-wide registry, made at the
    /// thread's first lookup.
    static THREAD_READER: RefCell<Option<Reader<'static>>> = RefCell::new(None);
}

/// Asks the process-wide registry through this thread's reader.
#[inline]
pub(crate) fn ask_global<R>(ask: impl Fn(&Snapshot) -> R) -> R {
    let answer = THREAD_READER.try_with(|slot| {
        let mut slot = slot.try_borrow_mut().ok()?;
        let reader = slot.get_or_insert_with(first_lookup);
        Some(ask(reader.snapshot()))
    });
    match answer {
        Ok(Some(answer)) => answer,
        _ => ask_past_the_reader(ask),
    }
}

/// Enters a section of the process-wide registry, and then asks: the first
/// step of a copy, which is to keep the section until the device is done.
///
/// The order is what makes the answer hold. To enter is a full fence; a thread
/// that pins or unpins publishes, and makes one at the start of its grace
/// period. Of two such fences one is first:
///
/// - the section's, and the grace period waits for the section, whatever the
///   question found;
/// - the grace period's, and the publish before it is seen by the question
///   after the section's, though what it compares with is loaded relaxed.
///
/// A question before the section could find the old answer, and the grace
/// period be over before the section begins.
#[cfg(any(feature = "cuda", loom))]
#[inline]
pub(crate) fn enter_and_ask<R>(ask: impl Fn(&Snapshot) -> R) -> (Section<'static>, R) {
    weakened!("lookup_before_section" => {
        let answer = ask_global(&ask);
        return (global().enter(), answer);
    });
    let section = global().enter();
    let answer = ask_global(ask);
    (section, answer)
}

// Out of line, so that the hit path stays short enough to be inlined.
#[cold]
#[inline(never)]
fn first_lookup() -> Reader<'static> {
    weakened!("reader_leaks" => { std::mem::forget(global().reader()) });
    global().reader()
}

/// Two lookups cannot use the thread's reader: one from a thread-local
/// destructor after the reader is gone, and one from inside another lookup (a
/// global allocator that asks, called when the reader lets go of a snapshot).
/// They load the published snapshot, which is slower and just as right.
#[cold]
#[inline(never)]
fn ask_past_the_reader<R>(ask: impl Fn(&Snapshot) -> R) -> R {
    weakened!("no_answer_past_the_reader" => { return ask(&Snapshot::empty()) });
    global().ask(ask)
}

modelled_only! {
    /// What a checked copy does first.
    pub fn enter_and_ask_residency(bytes: &[u8]) -> (Section<'static>, Residency) {
        enter_and_ask(|snapshot| snapshot.residency(Span::of(bytes)))
    }

    /// Runs `run` on this thread once its reader is gone.
    pub fn after_the_threads_reader(run: Box<dyn FnOnce()>) {
        crate::sync::after_the_locals(run);
    }
}
