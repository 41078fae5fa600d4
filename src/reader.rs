//! The wait-free side: a [`Reader`] for any registry, and one that each
//! thread keeps for the process-wide registry.
//!
//! # Why a relaxed load is enough
//!
//! Each snapshot has a *generation*, one more than the snapshot it was made
//! from. A writer first announces the generation that it is about to publish,
//! in a counter that only grows, then publishes, then returns. A reader keeps
//! the snapshot it last took, and on each lookup compares its generation with
//! the counter.
//!
//! - *As great*: the snapshot in hand is as new as anything that was announced.
//!   It never changes, and its contents were acquired when it was taken.
//! - *Less*: a newer one is published, or about to be. The reader takes what is
//!   published, with acquire. In the moment between announcement and publish
//!   that may be the same again, at each lookup.
//! - A registration that happens-before the lookup is not missed: its
//!   announcement is a write to the very location that the relaxed load reads,
//!   and a load never returns a value older than a write that happens-before it
//!   (coherence, which holds for relaxed accesses too). So the counter is at
//!   least at that registration's generation. If it is as great as the
//!   snapshot's in hand, that one has the registration; if not, the reader
//!   takes one that has it, by coherence again.
//! - Nor does a thread go back in time between kinds of lookup. Whoever has
//!   found a snapshot published has acquired its announcement, which came
//!   before, so that the thread's readers look for it too. Were it announced
//!   after the publish, a [`Registry`] could see it and a reader, asked next,
//!   not yet.
//!
//! A lookup on the hit path is thus one load of a line that nobody writes
//! between publishes, one compare, and the search.
//!
//! # What a thread keeps
//!
//! Two thread-locals, so that the hit path is short. `KEPT` has this thread's
//! reader, and with it a hold on a snapshot; it has a destructor, so each access
//! has to ask whether that has run. `SEEN` has the same reader's numbers and the
//! snapshot's address, without a hold, and no destructor. `SEEN` never names a
//! snapshot that `KEPT` does not hold: it is set right after `KEPT` is, before
//! the old snapshot is let go of, and cleared when `KEPT` is dropped.

use std::fmt;

use crate::global;
use crate::listing::{Regions, Segments};
use crate::region::Region;
use crate::registry::Registry;
#[cfg(any(feature = "cuda", loom))]
use crate::section::Section;
use crate::snapshot::{Residency, Snapshot};
use crate::span::Span;
use crate::sync::{Arc, Cell, Unheld, modelled_only, per_thread, weakened};

/// The fast way to ask a [`Registry`] that is not the process-wide one: it
/// remembers the last snapshot, and looks only whether a newer one is there.
///
/// Make one per thread, ahead of time, and keep it; from
/// [`Registry::reader`]. A lookup takes no lock, writes nothing that another
/// thread reads, neither allocates nor frees, and is wait-free. (A lookup just
/// after a publish takes the new snapshot, which costs some tens of nanoseconds,
/// and a microsecond or two where another core has just written it. A writer frees
/// the old one. If that lookup is the thread's first one of any registry, it
/// allocates; and one lookup in a forked child may: see
/// [`is_pinned`](crate::is_pinned#what-a-lookup-does-and-what-it-does-not).)
///
/// The questions take `&mut self` because a lookup may replace the snapshot
/// the reader keeps. An idle reader keeps one old snapshot, which may be large,
/// until it is asked again or dropped.
///
/// ```
/// use pinned_hosts::{Region, Registry};
///
/// let registry = Registry::new();
/// let mut reader = registry.reader();
/// let buffer = vec![0u8; 64];
/// assert!(!reader.is_pinned(&buffer));
///
/// let registration = registry.register(Region::of(&buffer)?);
/// assert!(reader.is_pinned(&buffer[10..20]));
/// # registration.unregister();
/// # Ok::<(), pinned_hosts::RegionError>(())
/// ```
///
/// [`Registry`]: crate::Registry
/// [`Registry::reader`]: crate::Registry::reader
#[derive(Clone)]
pub struct Reader<'r> {
    registry: &'r Registry,
    snapshot: Arc<Snapshot>,
}

impl<'r> Reader<'r> {
    pub(crate) fn new(registry: &'r Registry) -> Self {
        Self {
            registry,
            snapshot: registry.newest(),
        }
    }

    #[inline]
    fn snapshot(&mut self) -> &Arc<Snapshot> {
        if !is_current(self.registry, self.snapshot.generation) {
            self.refresh();
            return &self.snapshot;
        }
        weakened!("reader_goes_back" => { self.snapshot = self.registry.before(&self.snapshot) });
        &self.snapshot
    }

    // Out of line, so that the hit path stays short enough to be inlined.
    #[cold]
    #[inline(never)]
    fn refresh(&mut self) {
        *self = Self::new(self.registry);
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
        Regions::new(Arc::clone(self.snapshot()))
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

/// Whether no generation is announced that is newer than `generation`.
#[inline]
fn is_current(registry: &Registry, generation: u64) -> bool {
    weakened!("reader_skips_compare" => { return true });
    registry.announced() <= generation
}

/// What a lookup needs of this thread's reader.
#[derive(Clone, Copy)]
struct Seen {
    registry: &'static Registry,
    generation: u64,
    snapshot: Unheld<Snapshot>,
}

/// This thread's reader, made at its first lookup.
struct Kept(Cell<Option<Reader<'static>>>);

impl Kept {
    /// Keeps `reader` in place of the one before.
    fn keep(&self, reader: Reader<'static>) {
        let seen = Seen {
            registry: reader.registry,
            generation: reader.snapshot.generation,
            snapshot: Unheld::of(&reader.snapshot),
        };
        let before = self.0.replace(Some(reader));
        // An error: under `cfg(loom)`, on a thread that exits.
        let _ = SEEN.try_with(|it| it.set(Some(seen)));
        // Last, so that `SEEN` never names what is not held.
        drop(before);
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let _ = SEEN.try_with(|it| it.set(None));
    }
}

per_thread! {
    /// See the head of this file.
    static SEEN: Cell<Option<Seen>> = Cell::new(None);
}

per_thread! {
    /// See the head of this file.
    static KEPT: Kept = Kept(Cell::new(None));
}

// The questions that can be asked of the process-wide registry through this
// thread's reader. They are all of them, and `ask_global` is private, for the
// reason that it gives.

#[inline]
pub(crate) fn is_pinned(span: Span) -> bool {
    ask_global(|snapshot| snapshot.is_pinned(span))
}

#[inline]
pub(crate) fn residency(span: Span) -> Residency {
    ask_global(|snapshot| snapshot.residency(span))
}

pub(crate) fn live_count() -> usize {
    ask_global(Snapshot::len)
}

#[cfg(feature = "cuda")]
pub(crate) fn first_region(span: Span) -> Option<Region> {
    ask_global(|snapshot| snapshot.first_region(span))
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
pub(crate) fn enter_and_ask(span: Span) -> (Section<'static>, Residency) {
    weakened!("lookup_before_section" => {
        let answer = residency(span);
        return (global().enter(), answer);
    });
    let section = global().enter();
    let answer = residency(span);
    (section, answer)
}

/// Asks the process-wide registry through this thread's reader.
///
/// `ask` must not run another lookup, which could drop this thread's hold on the
/// snapshot that it is looking at: so it must not copy, log, or allocate (a global
/// allocator may ask).
#[inline]
fn ask_global<R>(ask: impl Fn(&Snapshot) -> R) -> R {
    if let Ok(Some(seen)) = SEEN.try_with(Cell::get)
        && is_current(seen.registry, seen.generation)
    {
        weakened!("reader_goes_back" => { return ask(&global().before(&global().snapshot())) });
        // SAFETY: `KEPT` holds every snapshot that `SEEN` names, and lets go of
        // none while `ask` runs: that happens only in another lookup of this
        // thread, and at its exit. The questions above run neither. (Nor may a
        // signal handler look up: a lookup may allocate.)
        return ask(unsafe { seen.snapshot.get() });
    }
    ask_anew(ask)
}

/// Asks the newest snapshot, and keeps it for this thread's next lookup.
// Out of line, so that the hit path stays short enough to be inlined.
#[cold]
#[inline(never)]
fn ask_anew<R>(ask: impl Fn(&Snapshot) -> R) -> R {
    let answer = KEPT.try_with(|kept| {
        let reader = global().reader();
        weakened!("reader_leaks" => { std::mem::forget(reader.clone()) });
        let answer = ask(&reader.snapshot);
        kept.keep(reader);
        answer
    });
    answer.unwrap_or_else(|_| ask_past_the_reader(ask))
}

/// A lookup from a thread-local destructor that runs after the reader is gone
/// loads the published snapshot, which is slower and just as right.
#[cold]
#[inline(never)]
fn ask_past_the_reader<R>(ask: impl Fn(&Snapshot) -> R) -> R {
    weakened!("no_answer_past_the_reader" => { return ask(&Snapshot::empty()) });
    global().ask(ask)
}

modelled_only! {
    /// What a checked copy does first.
    pub fn enter_and_ask_residency(bytes: &[u8]) -> (Section<'static>, Residency) {
        enter_and_ask(Span::of(bytes))
    }

    /// Runs `run` on this thread once its reader is gone.
    pub fn after_the_threads_reader(run: Box<dyn FnOnce()>) {
        crate::sync::after_the_locals(run);
    }
}
