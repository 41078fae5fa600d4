//! Read-side sections and grace periods: how memory is pinned and unpinned
//! while other threads copy from it.
//!
//! # Why a lookup alone is not enough
//!
//! To look up and then to copy is to check and then to act. Thread A finds its
//! source pageable; thread B pins that memory; A's copy reaches the driver,
//! which now takes the source for page-locked and reads it later; A returns,
//! and its caller frees the source.
//!
//! So a copy runs in a *read-side section*, from before its lookup until the
//! device no longer needs the borrowed source, and whoever is about to pin or
//! to unpin publishes that first, and then waits for a *grace period*: until
//! every section that began before the publish has ended.
//!
//! ```text
//! pin:    publish Pinning  → grace period → driver pins   → publish Live
//! unpin:  publish Retiring → grace period → driver unpins → retract
//! ```
//!
//! For each section there are two cases.
//!
//! - It began before the publish: it may have found the old answer, and the
//!   driver call waits for it to end.
//! - It began after: the epoch's entry and the publish are both on either side
//!   of a full fence, so its lookup finds the new answer. `Pinning` counts as
//!   pinned, though nothing is pinned yet: the copy is waited for, in vain.
//!   From `Retiring` memory, though it still is pinned, the device is not let
//!   read: the copy goes through other memory.
//!
//! The epochs are `crossbeam-epoch`'s, in a collector of the registry's own:
//! no other crate's pinned thread can hold up its grace periods. A function
//! that is deferred while sections run is called once they have ended; here
//! it raises a flag.
//!
//! A thread that waited for a grace period inside a section would wait for
//! itself. It gets an error. Two threads, each inside a section of one registry
//! and waiting for a grace period of the other's, would wait for each other, and
//! no registry can see it: so wait for no grace period inside any section.
//!
//! After `fork`, a child has a copy of the collector in which the sections of
//! the parent's other threads never end. There, a grace period is an error.

use std::error::Error;
use std::fmt;
use std::rc::Rc;
use std::time::{Duration, Instant};

use crossbeam_epoch::{Collector, Guard, LocalHandle};

use crate::listing::Segments;
use crate::log;
use crate::process::Process;
use crate::region::Region;
use crate::registry::Registry;
use crate::snapshot::Residency;
use crate::sync::{
    Alive, AliveElsewhere, Arc, AtomicBool, Ordering, RefCell, Tally, pause, per_thread, weakened,
};

/// How long a grace period may take before it is remarked on, again and again.
const LONG: Duration = Duration::from_secs(1);

/// The sections of one registry.
pub(crate) struct Sections {
    collector: Collector,
    /// How many threads have been in a section and have not exited. (One that is
    /// in a section while its locals are dropped is not counted.)
    threads: Tally,
    /// So that threads can tell which of their parts are of no use any more.
    alive: Alive,
    owner: Process,
}

/// A thread's part in one registry's sections.
struct Participant {
    handle: LocalHandle,
    threads: Tally,
    registry: AliveElsewhere,
}

impl Drop for Participant {
    fn drop(&mut self) {
        self.threads.less();
    }
}

per_thread! {
    /// This thread's part in the sections of each registry that it has been
    /// in. Those of registries that are gone are let go of once this thread
    /// enters its first section of yet another one, or exits.
    static PARTICIPANTS: RefCell<Vec<Rc<Participant>>> = RefCell::new(Vec::new());
}

impl Sections {
    pub(crate) fn new() -> Self {
        Self {
            collector: Collector::new(),
            threads: Tally::default(),
            alive: Alive::default(),
            owner: Process::current(),
        }
    }

    fn join(&self) -> Rc<Participant> {
        self.threads.more();
        Rc::new(Participant {
            handle: self.collector.register(),
            threads: self.threads.clone(),
            registry: self.alive.elsewhere(),
        })
    }

    /// Calls `with` with this thread's part, or with `None` if it cannot be had:
    /// in a thread-local destructor after the parts are gone, and while they
    /// are being looked through. A section is then entered with a part of its
    /// own, and a grace period is refused.
    fn with_participant<R>(&self, with: impl FnOnce(Option<&Rc<Participant>>) -> R) -> R {
        let participant = PARTICIPANTS.try_with(|all| {
            // Borrowed already if this is called from inside of itself: what is
            // below allocates and frees, now and then, and the program's
            // global allocator may enter a section. (One that only asks does
            // not come here.) No later wait on this thread would find that
            // section's own part, so the allocator must end it before it
            // returns to here.
            let mut all = all.try_borrow_mut().ok()?;
            let known = all
                .iter()
                .position(|it| *it.handle.collector() == self.collector);
            let index = known.unwrap_or_else(|| {
                all.retain(|it| it.registry.is_alive());
                all.push(self.join());
                all.len() - 1
            });
            all.get(index).cloned()
        });
        with(participant.ok().flatten().as_ref())
    }

    fn enter(&self) -> Guard {
        self.with_participant(|participant| match participant {
            Some(participant) => participant.handle.pin(),
            // The guard keeps what it needs of it.
            None => self.join().handle.pin(),
        })
    }

    /// Waits until every section that began before this call has ended.
    pub(crate) fn wait(&self, limit: Option<Duration>) -> Result<(), GraceError> {
        // Before all else: to end this thread's section first, as the next
        // error says, would help nobody here.
        if !self.owner.is_current() {
            return Err(GraceError::ForkedChild);
        }
        let participant = self.with_participant(|participant| participant.cloned());
        // Without its part, nobody knows whether this thread is in a section.
        let participant = participant.ok_or(GraceError::InsideSection)?;
        let handle = &participant.handle;
        if handle.is_pinned() {
            return Err(GraceError::InsideSection);
        }

        let ended = Arc::new(AtomicBool::new(false));
        let guard = handle.pin();
        guard.defer({
            let ended = Arc::clone(&ended);
            // Another thread may call this, one that pins or waits meanwhile.
            // Release, and Acquire below: what the sections did happens-before
            // what the waiting thread does next.
            move || {
                weakened!("grace_period_not_released" => {
                    return ended.store(true, Ordering::Relaxed);
                });
                ended.store(true, Ordering::Release);
            }
        });
        guard.flush();
        drop(guard);

        let has_ended = || {
            weakened!("grace_period_not_acquired" => { return ended.load(Ordering::Relaxed) });
            ended.load(Ordering::Acquire)
        };

        let started = Instant::now();
        let mut remark_at = LONG;
        let mut round = 0_u32;
        loop {
            // Each time takes the epoch on by a step, if no section is in the
            // way, and calls what was deferred two steps ago.
            handle.pin().flush();
            if has_ended() {
                return Ok(());
            }
            let waited = started.elapsed();
            if limit.is_some_and(|limit| waited >= limit) {
                return Err(GraceError::TimedOut { waited });
            }
            if waited >= remark_at {
                remark_at += waited;
                remark(waited, self.threads.count());
            }
            pause(round);
            round = round.saturating_add(1);
        }
    }
}

/// Says that a grace period takes long.
fn remark(waited: Duration, threads: u64) {
    log::emit(|| {
        tracing::warn!(
            ?waited,
            threads,
            "still waiting for a read-side section to end, on one of the threads that have \
             been in one: a copy that waits for a stalled stream, or a Section that is kept"
        );
    });
}

/// A read-side section of a [`Registry`]: while it lives, no memory that it
/// has found pageable is pinned, and none that it has found pinned is
/// unpinned, by [`Registry::pin_with`] and [`Registration::unpin_with`].
///
/// From [`Registry::enter`]. Enter first, ask then, copy, and end the section
/// (drop it) once the device no longer needs the borrowed source. Sections
/// nest. Keep them short: a grace period waits for them. And wait for no grace
/// period inside one, not of another registry either: two threads could wait
/// for each other.
///
/// It stays on the thread that entered it:
///
/// ```compile_fail,E0277
/// let registry = pinned_hosts::Registry::new();
/// let section = registry.enter();
/// std::thread::scope(|scope| { scope.spawn(|| drop(section)); });
/// ```
///
/// [`Registration::unpin_with`]: crate::Registration::unpin_with
#[must_use = "a section that is not kept ends at once"]
pub struct Section<'r> {
    registry: &'r Registry,
    _guard: Guard,
}

impl<'r> Section<'r> {
    pub(crate) fn new(registry: &'r Registry, sections: &Sections) -> Self {
        Self {
            registry,
            _guard: sections.enter(),
        }
    }

    /// See [`Registry::residency`].
    #[must_use]
    pub fn residency(&self, bytes: &[u8]) -> Residency {
        self.registry.residency(bytes)
    }

    /// See [`Registry::is_pinned`].
    #[must_use]
    pub fn is_pinned(&self, bytes: &[u8]) -> bool {
        self.registry.is_pinned(bytes)
    }

    /// Whether some of `bytes` is about to be unpinned: the device must not be
    /// let read it any more, although it is pinned. Copy the bytes elsewhere,
    /// and let it read those.
    #[must_use]
    pub fn is_retiring(&self, bytes: &[u8]) -> bool {
        self.registry.is_retiring(bytes)
    }

    /// See [`Registry::segments`].
    #[must_use]
    pub fn segments<'a>(&self, bytes: &'a [u8]) -> Segments<'a> {
        self.registry.segments(bytes)
    }

    /// See [`Registry::region_containing`].
    #[must_use]
    pub fn region_containing(&self, bytes: &[u8]) -> Option<Region> {
        self.registry.region_containing(bytes)
    }
}

impl fmt::Debug for Section<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Section").finish_non_exhaustive()
    }
}

/// Why a grace period was not waited for to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GraceError {
    /// This thread is inside a section of the same registry, or is exiting:
    /// it would wait for itself.
    InsideSection,
    /// This process was forked from the one that made the registry, whose
    /// other threads' sections it has copies of that never end.
    ForkedChild,
    /// The time limit was reached first.
    TimedOut {
        /// How long it was waited.
        waited: Duration,
    },
}

impl fmt::Display for GraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InsideSection => f.write_str(
                "this thread is inside a read-side section of the registry (or is exiting) and \
                 would wait for itself: end the Section, the Copier::scope or the checked slice first",
            ),
            Self::ForkedChild => f.write_str(
                "this process was forked from the one that made the registry: only that one can \
                 pin and unpin live memory. Start a new process instead (exec)",
            ),
            Self::TimedOut { waited } => write!(
                f,
                "a read-side section had not ended after {waited:?}: look for a copy on a \
                 stalled stream, a long Copier::scope, or a Section that is kept"
            ),
        }
    }
}

impl Error for GraceError {}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_keeps_no_part_in_registries_that_are_gone() {
        let parts = || PARTICIPANTS.with(|all| all.borrow().len());
        let kept = Registry::new();
        for _ in 0..1000 {
            drop(kept.enter());
            let registry = Registry::new();
            drop(registry.enter());
        }
        // The one that is kept, and the last.
        assert_eq!(parts(), 2);
        drop(kept.enter());
    }
}
