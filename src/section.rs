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
//!   pinned, though nothing is pinned yet: the wait is unnecessary, but safe.
//!   From `Retiring` memory, though it still is pinned, the device is not let
//!   read: the copy goes through other memory.
//!
//! # Epochs
//!
//! The epochs are `crossbeam-epoch`'s, in a collector of the registry's own:
//! no other crate's pinned thread can hold up its grace periods. Each section
//! has a participant of its own, which is pinned in the epoch that the section
//! reads when it is entered. So sections of one thread may overlap as well as
//! nest: a thread that always enters the next one before it ends the last is
//! pinned in ever newer epochs.
//!
//! The epoch takes a step when no participant is pinned in an older one. A wait
//! defers a function that raises a flag. It is called two steps later:
//!
//! - The first step can be held up only by sections that were entered, or were
//!   being entered, before the function was deferred.
//! - The second step can be held up only by sections that were entered, or were
//!   being entered, before the first step was taken.
//!
//! So a grace period waits for every section that began before it. It waits for a
//! section that began later only if that one began before the first step, which
//! is taken at once unless an older section is in its way. It never waits for a
//! section that began after the first step, however many follow.
//!
//! A wait that gives up at its time limit leaves its deferred function behind.
//! While [`MOST_LEFT_BEHIND`] are left, a wait defers none: it first takes the
//! epoch on until one of them has run. Only then can a grace period wait for
//! sections that began after the call and are pinned in the epoch of that moment.
//!
//! # Where no grace period can be waited for
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
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crossbeam_epoch::{Collector, Guard, LocalHandle};

use crate::listing::Segments;
use crate::log;
use crate::process::Process;
use crate::region::Region;
use crate::registry::Registry;
use crate::snapshot::Residency;
use crate::sync::{
    Alive, AliveElsewhere, Arc, AtomicBool, Counted, Ordering, RefCell, Tally, pause, per_thread,
    weakened,
};

/// How long a grace period may take before it is remarked on, again and again.
const LONG: Duration = Duration::from_secs(1);

/// How many flags of waits that gave up may be left in the collector. Each takes
/// two kilobytes there until the sections that it is deferred for have ended.
const MOST_LEFT_BEHIND: u64 = if cfg!(loom) { 2 } else { 64 };

/// How many participants a thread keeps in any case. Each takes two kilobytes,
/// and a look at each step of the epoch. The last one beyond them is dropped
/// after [`A_WHILE`] without it, and not at once: what is dropped stays in the
/// collector until the sections of that moment have ended.
const KEPT: usize = 4;

/// How many times a thread's first participant is pinned, meanwhile.
const A_WHILE: u32 = 128;

/// The sections of one registry.
pub(crate) struct Sections {
    collector: Collector,
    /// How many threads have been in a section and have not exited. (One that is
    /// in a section while its locals are dropped is not counted.)
    threads: Tally,
    /// How many flags wait in the collector for nobody.
    left_behind: Tally,
    /// How many deferred functions the collector has run: see [`Participant`].
    run: Tally,
    /// By which a thread knows its part in this registry's sections, and that it
    /// is of no use any more.
    alive: Alive,
    owner: Process,
}

/// A thread's part in one registry's sections.
struct Part {
    registry: AliveElsewhere,
    /// At least one.
    participants: Vec<Participant>,
    /// How often the first of them was pinned since the last of them was.
    without_the_last: u32,
    _thread: Counted,
}

impl Part {
    fn is_inside(&self) -> bool {
        weakened!("only_the_first_section_counts" => {
            return self.participants[0].handle.is_pinned();
        });
        self.participants.iter().any(|it| it.handle.is_pinned())
    }

    /// Pins the first participant that is not pinned.
    #[inline]
    fn enter(&mut self, sections: &Sections) -> Guard {
        weakened!("one_participant_a_thread" => { return self.participants[0].handle.pin() });
        for (index, participant) in self.participants.iter().enumerate() {
            if !participant.handle.is_pinned() {
                let guard = participant.handle.pin();
                if self.participants.len() > KEPT {
                    self.tidy(index);
                }
                return guard;
            }
        }
        self.enter_as_another(sections)
    }

    #[cold]
    fn enter_as_another(&mut self, sections: &Sections) -> Guard {
        let participant = sections.join();
        let guard = participant.handle.pin();
        self.participants.push(participant);
        self.without_the_last = 0;
        guard
    }

    /// Drops the last participant if it was not needed for a while. `entered` is
    /// the index of the one that was pinned just now.
    #[cold]
    fn tidy(&mut self, entered: usize) {
        if entered + 1 == self.participants.len() {
            self.without_the_last = 0;
        } else if entered == 0 {
            self.without_the_last += 1;
            if self.without_the_last == A_WHILE {
                self.without_the_last = 0;
                self.participants.pop_if(|last| !last.handle.is_pinned());
            }
        }
    }
}

/// What one section at a time is entered with.
struct Participant {
    handle: LocalHandle,
    run: Tally,
}

impl Drop for Participant {
    /// The collector gets a bag of deferred functions from each participant that
    /// goes. Many of them may lie before a flag, and they are run a few at a
    /// time, so each bag tells a wait that it has been got rid of.
    fn drop(&mut self) {
        // Not in the models, which leave such numbers out.
        if !cfg!(loom) {
            let run = self.run.clone();
            self.handle.pin().defer(move || run.more());
        }
    }
}

/// What a wait defers, to learn that the sections before it have ended.
#[derive(Default)]
struct Flag {
    is_up: AtomicBool,
    /// From when the wait is over. What then is left of the flag is counted.
    left_behind: OnceLock<Counted>,
}

impl Flag {
    /// Another thread may call this, one that enters or waits meanwhile.
    fn raise(&self) {
        weakened!("grace_period_not_released" => {
            return self.is_up.store(true, Ordering::Relaxed);
        });
        // Release, and Acquire below: what the sections did happens-before
        // what the waiting thread does next.
        self.is_up.store(true, Ordering::Release);
    }

    fn is_up(&self) -> bool {
        weakened!("grace_period_not_acquired" => { return self.is_up.load(Ordering::Relaxed) });
        self.is_up.load(Ordering::Acquire)
    }
}

/// A flag and the wait for it, which may be given up, by a panic too.
struct Awaited<'s> {
    flag: Arc<Flag>,
    left_behind: &'s Tally,
}

impl Drop for Awaited<'_> {
    fn drop(&mut self) {
        // Nobody else sets it. It is dropped with the flag.
        let _ = self.flag.left_behind.set(self.left_behind.hold());
    }
}

per_thread! {
    /// This thread's part in the sections of each registry that it has been in,
    /// the last one first. Parts in registries that are gone are dropped once
    /// this thread enters its first section of yet another one, or exits.
    static PARTS: RefCell<Vec<Part>> = RefCell::new(Vec::new());
}

impl Sections {
    pub(crate) fn new() -> Self {
        Self {
            collector: Collector::new(),
            threads: Tally::default(),
            left_behind: Tally::default(),
            run: Tally::default(),
            alive: Alive::default(),
            owner: Process::current(),
        }
    }

    fn join(&self) -> Participant {
        Participant {
            handle: self.collector.register(),
            run: self.run.clone(),
        }
    }

    /// Calls `with` with this thread's part. Returns `None` if the part cannot
    /// be had: in a thread-local destructor after the parts are gone, and inside
    /// of `with`. A section is then entered with a participant of its own, and a
    /// grace period is refused.
    ///
    /// `with` may allocate and free, and the program's global allocator may enter
    /// a section. (One that only asks does not come here.) No later wait on this
    /// thread would find that section's own participant, so the allocator must
    /// end the section before it returns.
    #[inline]
    fn with_part<R>(&self, with: impl FnOnce(&mut Part) -> R) -> Option<R> {
        let result = PARTS.try_with(|all| {
            let mut all = all.try_borrow_mut().ok()?;
            if !all.first().is_some_and(|it| it.registry.is_of(&self.alive)) {
                self.put_first(&mut all);
            }
            all.first_mut().map(with)
        });
        result.ok().flatten()
    }

    #[cold]
    fn put_first(&self, all: &mut Vec<Part>) {
        match all.iter().position(|it| it.registry.is_of(&self.alive)) {
            Some(index) => all[..=index].rotate_right(1),
            None => {
                all.retain(|it| it.registry.is_alive());
                let part = Part {
                    registry: self.alive.elsewhere(),
                    participants: vec![self.join()],
                    without_the_last: 0,
                    _thread: self.threads.hold(),
                };
                all.insert(0, part);
            }
        }
    }

    /// How many flags of waits that gave up are left.
    #[cfg(any(test, loom))]
    pub(crate) fn left_behind(&self) -> u64 {
        self.left_behind.count()
    }

    fn enter(&self) -> Guard {
        self.with_part(|part| part.enter(self))
            // The guard keeps what it needs of it.
            .unwrap_or_else(|| self.join().handle.pin())
    }

    /// Waits until every section that began before this call has ended.
    pub(crate) fn wait(&self, limit: Option<Duration>) -> Result<(), GraceError> {
        // Before all else: to end this thread's section first, as the next
        // error says, would help nobody here.
        if !self.owner.is_current() {
            return Err(GraceError::ForkedChild);
        }
        let started = Instant::now();
        let mut remark_at = LONG;
        let mut awaited: Option<Awaited<'_>> = None;
        let mut idle_rounds = 0_u32;
        loop {
            let run_before = self.run.count();
            if awaited.is_none() && self.may_defer() {
                let flag = Arc::new(Flag::default());
                self.step(Some(&flag))?;
                awaited = Some(Awaited {
                    flag,
                    left_behind: &self.left_behind,
                });
                // One step is never enough.
                continue;
            }
            self.step(None)?;
            if awaited.as_ref().is_some_and(|it| it.flag.is_up()) {
                return Ok(());
            }
            // More can be run at once, a few functions at a time: no sleep, and no
            // look at the time. While a section is in the way, little can be run.
            if self.run.count() != run_before {
                idle_rounds = 0;
                pause(idle_rounds);
                continue;
            }
            let waited = started.elapsed();
            // Not in the first round that ran nothing. What can be run may be one
            // step away: this thread's pin may have taken a step by itself, and
            // then counts as pinned in the epoch before.
            if idle_rounds > 0 && limit.is_some_and(|limit| waited >= limit) {
                weakened!("a_limit_ends_the_grace_period" => { return Ok(()) });
                return Err(GraceError::TimedOut { waited });
            }
            if waited >= remark_at {
                remark_at += waited;
                remark(waited, self.threads.count());
            }
            pause(idle_rounds);
            idle_rounds = idle_rounds.saturating_add(1);
        }
    }

    /// Whether a wait may leave one more flag behind if it gives up.
    fn may_defer(&self) -> bool {
        weakened!("flags_without_bound" => { return true });
        self.left_behind.count() < MOST_LEFT_BEHIND
    }

    /// Defers to raise `flag`, if there is one. Then takes the epoch on by a
    /// step, if no section is in the way, and runs some of what was deferred two
    /// steps ago.
    fn step(&self, flag: Option<&Arc<Flag>>) -> Result<(), GraceError> {
        let stepped = self.with_part(|part| {
            // Each time: a subscriber may have entered one, and kept it.
            if part.is_inside() {
                return Err(GraceError::InsideSection);
            }
            let guard = part.participants[0].handle.pin();
            if let Some(flag) = flag {
                let (flag, run) = (Arc::clone(flag), self.run.clone());
                guard.defer(move || {
                    flag.raise();
                    run.more();
                });
            }
            guard.flush();
            Ok(())
        });
        // Without its part, nobody knows whether this thread is in a section.
        stepped.unwrap_or(Err(GraceError::InsideSection))
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
/// (drop it) once the device no longer needs the borrowed source.
///
/// Sections of one thread may nest and overlap, in any order: each of them lasts
/// until it is dropped. A thread may enter the next one before it ends the last,
/// again and again, as a copy loop with two buffers does. A section that is
/// entered inside another one costs as much as the outer one, some nanoseconds.
/// (A thread allocates when it is in more sections at once than before, and
/// looks through those that it is in.)
///
/// Keep sections short: a grace period waits for those that began before it. It
/// may also wait for some that began while it waited for those, and for no later
/// one. And wait for no grace period inside a section, not of another registry
/// either: two threads could wait for each other.
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
        weakened!("section_ends_at_once" => {
            drop(sections.enter());
            let _guard = Collector::new().register().pin();
            return Self { registry, _guard };
        });
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
                 would wait for itself: end the Section or the Copier::scope first",
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
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    use std::sync::mpsc;
    use std::thread;

    /// How many participants this thread has for its last section's registry.
    fn participants() -> usize {
        PARTS.with(|all| all.borrow()[0].participants.len())
    }

    #[test]
    fn a_thread_keeps_no_part_in_registries_that_are_gone() {
        let parts = || PARTS.with(|all| all.borrow().len());
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

    #[test]
    fn a_thread_finds_its_part_again_among_many() {
        let all = [(); 10].map(|()| Sections::new());
        for (index, sections) in all.iter().enumerate() {
            let guards: Vec<Guard> = (0..=index).map(|_| sections.enter()).collect();
            drop(guards);
        }
        for (index, sections) in all.iter().enumerate() {
            drop(sections.enter());
            assert_eq!(participants(), index + 1);
        }
    }

    #[test]
    fn a_thread_drops_the_participants_that_it_no_longer_needs() {
        let sections = Sections::new();
        let guards: Vec<Guard> = (0..100).map(|_| sections.enter()).collect();
        assert_eq!(participants(), 100);
        drop(guards);
        for _ in 0..100 * A_WHILE {
            drop(sections.enter());
        }
        assert_eq!(participants(), KEPT);
    }

    /// Each that is dropped stays in the collector while any section goes on.
    #[test]
    fn a_thread_keeps_the_participants_that_it_needs_again() {
        let sections = Sections::new();
        for _ in 0..10 * A_WHILE {
            let guards: Vec<Guard> = (0..KEPT + 6).map(|_| sections.enter()).collect();
            drop(guards);
        }
        sections.wait(None).unwrap();
        assert_eq!(participants(), KEPT + 6);
        // The one wait's function, and no participant's.
        assert_eq!(sections.run.count(), 1);
    }

    /// Calls `with` while another thread is in a section, which `with` can end.
    fn beside_a_section<R>(sections: &Sections, with: impl FnOnce(&dyn Fn()) -> R) -> R {
        let (entered, has_entered) = mpsc::channel();
        let (end, to_end) = mpsc::channel::<()>();
        let (ended, has_ended) = mpsc::channel::<()>();
        thread::scope(|scope| {
            scope.spawn(move || {
                let guard = sections.enter();
                entered.send(()).unwrap();
                // An error: `with` has returned, or panicked.
                let _ = to_end.recv();
                drop(guard);
                drop(ended);
                // A thread that exits is in a section for a moment.
                let _ = to_end.recv();
            });
            has_entered.recv().unwrap();
            let result = with(&|| {
                end.send(()).unwrap();
                has_ended.recv().unwrap_err();
            });
            drop(end);
            result
        })
    }

    const NO_TIME: Option<Duration> = Some(Duration::ZERO);

    #[test]
    fn waits_that_gave_up_leave_a_bounded_number_of_flags_and_the_next_one_ends() {
        let sections = Sections::new();
        beside_a_section(&sections, |end_it| {
            for _ in 0..10 * MOST_LEFT_BEHIND {
                let gave_up = sections.wait(NO_TIME);
                assert!(matches!(gave_up, Err(GraceError::TimedOut { .. })));
                assert!(sections.left_behind() <= MOST_LEFT_BEHIND);
            }
            assert_eq!(sections.left_behind(), MOST_LEFT_BEHIND);
            end_it();
            // No time at all is enough: each round gets some out of the way.
            assert_eq!(sections.wait(NO_TIME), Ok(()));
        });
        assert_eq!(sections.left_behind(), 0);
    }

    #[test]
    fn at_the_bound_a_wait_still_waits_for_the_sections_before_it() {
        let sections = Sections::new();
        beside_a_section(&sections, |end_it| {
            for _ in 0..MOST_LEFT_BEHIND {
                sections.wait(NO_TIME).unwrap_err();
            }
            beside_a_section(&sections, |end_another| {
                end_it();
                for _ in 0..10 {
                    sections.wait(NO_TIME).unwrap_err();
                }
                end_another();
                sections.wait(NO_TIME).unwrap();
            });
        });
    }

    /// A participant takes the epoch on by itself now and then, when it is
    /// pinned: it is then one step behind.
    #[test]
    fn without_a_section_a_wait_needs_no_time_at_all() {
        let sections = Sections::new();
        for pins_before in 0..300 {
            for _ in 0..pins_before {
                drop(sections.enter());
            }
            assert_eq!(sections.wait(NO_TIME), Ok(()), "{pins_before}");
        }
    }

    /// They leave a bag each in the collector, which is in the way of a flag.
    #[test]
    fn threads_that_exited_beside_a_section_are_out_of_the_way_without_a_pause() {
        const THREADS: u64 = 200;
        let sections = Sections::new();
        beside_a_section(&sections, |end_it| {
            for _ in 0..THREADS {
                thread::scope(|scope| {
                    scope.spawn(|| drop(sections.enter())).join().unwrap();
                });
            }
            end_it();
            sections.wait(NO_TIME).unwrap();
            assert!(sections.run.count() >= THREADS);
        });
    }
}
