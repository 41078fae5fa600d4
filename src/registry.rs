//! The writing side: a [`Registry`] publishes snapshots.
//!
//! # Publishing
//!
//! A writer takes the published snapshot, builds the next one from it and puts
//! it in place with a compare-and-swap. If another writer was first, the swap
//! fails, nothing was changed, and the writer builds anew from what the other
//! one published: no update is lost and nobody waits for a lock. What is built
//! is a pure function of the old snapshot and the change, so building it again
//! is harmless; it shares with the old one all that is unchanged (`tree.rs`).
//!
//! To build anew would never end for a change of many registrations beside
//! writers of few, which are quicker. So what was built is kept, and what the
//! others have published meanwhile is put into it (`tree/diff.rs`), which takes
//! a time that depends on their changes alone.
//!
//! Whatever must happen once (drawing an id, running the caller's iterator, a
//! driver call) is done outside.
//!
//! A writer that stalls or panics half-way has published nothing and holds up
//! nobody.

use std::convert::Infallible;
use std::fmt;
use std::time::Duration;

use crate::entry::{Owner, RegionEntry, RegionState};
use crate::listing::{Regions, Segments};
use crate::process::Process;
use crate::reader::Reader;
use crate::region::{Key, Region, RegionId};
use crate::registration::Registration;
use crate::retired::{Retired, Room};
use crate::section::{GraceError, Section, Sections};
use crate::snapshot::{Residency, Snapshot};
use crate::span::Span;
use crate::sync::{Arc, ArcSwap, AtomicU64, Ordering, modelled_only, weakened};

/// A set of page-locked regions that is asked on every copy.
///
/// Most programs use the process-wide one ([`global`](crate::global) and the
/// free functions of this crate), because memory is page-locked for the whole
/// process. A registry of one's own is for tests, and for drivers other than
/// the process's CUDA driver.
///
/// Writers are lock-free. The questions asked of a `Registry` directly load
/// the published snapshot, some twenty nanoseconds; a [`Reader`] answers the
/// same in a few.
///
/// ```
/// use pinned_hosts::{Region, Registry, Residency};
///
/// let registry = Registry::new();
/// let buffer = vec![0u8; 4096];
/// let registration = registry.register(Region::of(&buffer[..1024])?);
///
/// assert_eq!(registry.residency(&buffer[..1024]), Residency::Pinned);
/// assert_eq!(registry.residency(&buffer[1000..1100]), Residency::Mixed);
/// assert_eq!(registry.residency(&buffer[1024..]), Residency::Pageable);
///
/// registration.unregister();
/// assert_eq!(registry.live_count(), 0);
/// # Ok::<(), pinned_hosts::RegionError>(())
/// ```
pub struct Registry {
    published: ArcSwap<Snapshot>,
    /// The greatest generation that a writer has published, or is about to
    /// publish. It is what readers look at: see `reader.rs`.
    announced: AtomicU64,
    retired: Retired<Snapshot>,
    /// The [`Process`] that made the registry, or the descendant that has caught
    /// up with the announcement since ([`catch_up`](Self::catch_up)).
    home: AtomicU64,
    sections: Sections,
}

impl Registry {
    /// An empty registry.
    #[must_use]
    pub fn new() -> Self {
        Self {
            published: ArcSwap::new(Arc::new(Snapshot::empty())),
            announced: AtomicU64::new(0),
            retired: Retired::new(),
            home: AtomicU64::new(Process::current().number()),
            sections: Sections::new(),
        }
    }

    /// Adds `region` and publishes. From here on every lookup that
    /// happens-after sees it, on every thread.
    ///
    /// To err to the safe side, register memory *before* it is pinned, or
    /// before anybody else can hold a slice of it.
    ///
    /// Regions may touch, overlap and nest, and the same bytes may be
    /// registered more than once: each registration stands by itself.
    ///
    /// Costs a third of a microsecond among a few regions, and a few
    /// microseconds among a million: the next snapshot shares nearly all of the
    /// one before. To that comes a tenth of a microsecond for each thread that has
    /// ever looked up. Use [`register_all`](Self::register_all) for many at once.
    pub fn register(&self, region: Region) -> Registration<'_> {
        self.register_as(RegionState::Live, region)
    }

    /// As [`register`](Self::register), for memory that is write-combined
    /// (`CU_MEMHOSTALLOC_WRITECOMBINED`, which `cudarc`'s `alloc_pinned` sets).
    ///
    /// The CPU reads such memory very slowly. So a copy to the device waits
    /// for the device rather than read it to stage it.
    pub fn register_write_combined(&self, region: Region) -> Registration<'_> {
        self.register_entry(RegionEntry::new(region, Owner::Handle).that_is_write_combined())
    }

    /// Adds all `regions` in one publish: a lookup sees all of them or none.
    /// The handles come in the order of the regions, with ascending ids.
    ///
    /// Other writers hold it up by what they change meanwhile, and not by how
    /// often they publish.
    ///
    /// If the iterator panics, nothing was registered.
    #[must_use = "without the handles the memory stays registered for ever"]
    pub fn register_all(&self, regions: impl IntoIterator<Item = Region>) -> Vec<Registration<'_>> {
        weakened!("register_all_half_way" => {
            return regions.into_iter().map(|it| self.register(it)).collect();
        });
        let regions: Vec<Region> = regions.into_iter().collect();
        let entries: Vec<RegionEntry> = RegionId::draw_all(&regions)
            .zip(&regions)
            .map(|(id, &region)| RegionEntry::known_by(id, region, Owner::Handle))
            .collect();
        weakened!("register_all_one_by_one" => {
            return entries.into_iter().map(|it| self.register_entry(it)).collect();
        });
        if !entries.is_empty() {
            self.add(&entries);
        }
        let handle = |entry| Registration::of(self, entry);
        entries.into_iter().map(handle).collect()
    }

    /// Whether every byte of `bytes` is page-locked: true for
    /// [`Residency::Pinned`] and [`Residency::Seam`], false for the empty
    /// slice.
    #[must_use]
    pub fn is_pinned(&self, bytes: &[u8]) -> bool {
        weakened!("asks_twice" => {
            let (left, right) = bytes.split_at(bytes.len() / 2);
            let left = self.ask(|snapshot| snapshot.is_pinned(Span::of(left)));
            return left && self.ask(|snapshot| snapshot.is_pinned(Span::of(right)));
        });
        self.ask(|snapshot| snapshot.is_pinned(Span::of(bytes)))
    }

    /// What `bytes` is.
    #[must_use]
    pub fn residency(&self, bytes: &[u8]) -> Residency {
        self.ask(|snapshot| snapshot.residency(Span::of(bytes)))
    }

    /// The region that contains all of `bytes`. Of several, the one that
    /// reaches furthest, and of those the one that starts first; `None` for
    /// the empty slice.
    #[must_use]
    pub fn region_containing(&self, bytes: &[u8]) -> Option<Region> {
        self.ask(|snapshot| snapshot.region_containing(Span::of(bytes)))
    }

    /// The maximal parts of `bytes` that lie in one region or in none, in
    /// order. Together they are exactly `bytes`; the empty slice has none.
    ///
    /// Where regions overlap, a part goes as far as one region reaches.
    ///
    /// ```
    /// use pinned_hosts::{Region, Registry, Residency::{Pageable, Pinned}};
    ///
    /// let registry = Registry::new();
    /// let buffer = vec![0u8; 100];
    /// registry.register(Region::of(&buffer[20..50])?);
    ///
    /// let parts: Vec<_> = registry
    ///     .segments(&buffer)
    ///     .map(|part| (part.residency(), part.bytes().len()))
    ///     .collect();
    /// assert_eq!(parts, [(Pageable, 20), (Pinned, 30), (Pageable, 50)]);
    /// # Ok::<(), pinned_hosts::RegionError>(())
    /// ```
    #[must_use]
    pub fn segments<'a>(&self, bytes: &'a [u8]) -> Segments<'a> {
        Segments::new(self.snapshot(), bytes)
    }

    /// All registrations of one moment, by address. What is registered while
    /// the iterator runs does not show in it.
    #[must_use]
    pub fn regions(&self) -> Regions {
        Regions::new(self.snapshot())
    }

    /// How many registrations there are.
    #[must_use]
    pub fn live_count(&self) -> usize {
        self.ask(Snapshot::len)
    }

    /// Enters a read-side section, in which to ask and to copy while other
    /// threads pin and unpin memory. See [`Section`].
    ///
    /// It costs some nanoseconds and takes no lock. (A thread's first section
    /// in each registry allocates, and each that makes it more sections at once
    /// than before.)
    pub fn enter(&self) -> Section<'_> {
        Section::new(self, &self.sections)
    }

    /// Waits for a grace period: until every section that began before this
    /// call has ended. For at most about `limit`, if there is one.
    ///
    /// It spins, then yields, then sleeps in bounded steps, and logs a warning
    /// if it takes long. [`pin_with`](Self::pin_with) and
    /// [`Registration::unpin_with`](crate::Registration::unpin_with) call it.
    ///
    /// # Errors
    ///
    /// [`GraceError::InsideSection`] at once if this thread is inside a
    /// section of this registry; [`GraceError::ForkedChild`];
    /// [`GraceError::TimedOut`].
    pub fn wait_for_sections(&self, limit: Option<Duration>) -> Result<(), GraceError> {
        self.sections.wait(limit)
    }

    /// Whether some of `bytes` is about to be unpinned, so that the device
    /// must not be let read it any more. See [`Section::is_retiring`].
    #[must_use]
    pub fn is_retiring(&self, bytes: &[u8]) -> bool {
        self.ask(|snapshot| snapshot.is_retiring(Span::of(bytes)))
    }

    /// A reader of this registry: the fast path. See [`Reader`].
    #[must_use]
    pub fn reader(&self) -> Reader<'_> {
        Reader::new(self)
    }

    pub(crate) fn ask<R>(&self, ask: impl FnOnce(&Snapshot) -> R) -> R {
        // What the load returned frees nothing as it is dropped: were that
        // snapshot superseded by now, a writer or `retired` would hold it too.
        ask(&self.published.load())
    }

    pub(crate) fn snapshot(&self) -> Arc<Snapshot> {
        self.published.load_full()
    }

    /// The published snapshot, for a reader that knows of a newer one than it has.
    pub(crate) fn newest(&self) -> Arc<Snapshot> {
        let newest = self.snapshot();
        // No process of the models forks.
        if !cfg!(loom) && newest.generation < self.announced() {
            return self.catch_up(newest);
        }
        newest
    }

    /// Sees to it that what is announced gets published. `newest` is older: a
    /// writer is about to publish, or it was when this process was forked, and is
    /// not in this process. Then this thread publishes the same set once more, or
    /// each lookup would look for a newer one for ever. So a lookup of a forked
    /// child may publish, once.
    #[cold]
    fn catch_up(&self, newest: Arc<Snapshot>) -> Arc<Snapshot> {
        let process = Process::current().number();
        // Relaxed, here and below: to publish once too often does no harm.
        if self.home.load(Ordering::Relaxed) == process {
            return newest;
        }
        // An error means that a writer of this process was first.
        let _ = self.publish(|old| {
            let is_behind = old.generation < self.announced();
            is_behind.then(|| (old.clone(), ())).ok_or(())
        });
        self.home.store(process, Ordering::Relaxed);
        self.snapshot()
    }

    #[inline]
    pub(crate) fn announced(&self) -> u64 {
        // Relaxed: the head of `reader.rs` says why that is enough.
        self.announced.load(Ordering::Relaxed)
    }

    fn announce(&self, generation: u64) {
        weakened!("never_announced" => { return });
        weakened!("announced_once_published" => { return });
        weakened!("announcement_goes_back" => {
            return self.announced.store(generation, Ordering::Relaxed);
        });
        // Relaxed: the publish that follows releases this too. The greatest,
        // since another writer may have announced, and published, more.
        self.announced.fetch_max(generation, Ordering::Relaxed);
    }

    pub(crate) fn register_as(&self, state: RegionState, region: Region) -> Registration<'_> {
        self.register_entry(RegionEntry::new(region, Owner::Handle).in_state(state))
    }

    fn register_entry(&self, entry: RegionEntry) -> Registration<'_> {
        self.add(&[entry]);
        Registration::of(self, entry)
    }

    /// As [`register_as`](Self::register_as), if none of `region` is registered.
    /// Otherwise the first such part is the error, and nothing is changed. That is
    /// one step: of two threads one is refused.
    #[cfg(any(feature = "cuda", loom))]
    pub(crate) fn register_alone(
        &self,
        state: RegionState,
        region: Region,
    ) -> Result<Registration<'_>, Region> {
        let entry = RegionEntry::new(region, Owner::Handle).in_state(state);
        weakened!("alone_in_two_steps" => {
            if let Some(registered) = self.ask(|old| old.first_region(Span::from(region))) {
                return Err(registered);
            }
            return Ok(self.register_entry(entry));
        });
        self.publish(|old| match old.first_region(Span::from(region)) {
            Some(registered) => Err(registered),
            None => Ok((old.with(&[entry]), ())),
        })?;
        Ok(Registration::of(self, entry))
    }

    /// Removes the entries of handles, in one publish. Whoever calls it has the
    /// handles, and uses them no more.
    pub(crate) fn remove_handles(&self, ids: &[RegionId]) {
        let keys = || ids.iter().map(|id| id.key());
        // An error means that there is nothing to remove.
        let _ = self.publish_own(ids.len(), |old| old.without(keys()).ok_or(()));
    }

    /// Changes the state of the entries `ids`, in one publish.
    pub(crate) fn set_state(&self, ids: &[RegionId], state: RegionState) {
        // An error means that there is nothing to change.
        let _ = self.publish_own(ids.len(), |old| old.with_state(ids, state).ok_or(()));
    }

    /// Adds what the free functions note, and returns what it replaces.
    pub(crate) fn register_base(&self, region: Region) -> Option<Region> {
        let entry = RegionEntry::new(region, Owner::Base);
        let base = region.start_addr();
        weakened!("base_added_first" => {
            self.add(&[entry]);
            let others = |old: &Snapshot| {
                let others = old.entries().filter(|it| it.is_bases() && it.key().0 == base);
                let others = others.map(|it| it.key()).filter(|&it| it != entry.key());
                others.collect::<Vec<_>>()
            };
            self.remove(others);
            return None;
        });
        weakened!("replace_in_two_publishes" => {
            self.unregister_base(region.base());
            self.add(&[entry]);
            return None;
        });
        let Ok(replaced) = self.publish(|old| {
            let replaced = old.at_base(base);
            let kept = old.without(replaced.map(|it| it.key()));
            let next = kept.as_ref().unwrap_or(old).with(&[entry]);
            Ok::<_, Infallible>((next, replaced.map(|it| it.region())))
        });
        replaced
    }

    pub(crate) fn unregister_base(&self, base: *const u8) {
        self.remove(|old| old.at_base(base.addr()).map(|entry| entry.key()));
    }

    fn add(&self, entries: &[RegionEntry]) {
        let Ok(()) = self.publish_own(entries.len(), |old| Ok::<_, Infallible>(old.with(entries)));
    }

    /// Removes the registrations that `which` finds, those of them that are
    /// there.
    fn remove<K: IntoIterator<Item = Key>>(&self, which: impl Fn(&Snapshot) -> K) {
        // An error means that there is nothing to remove.
        let _ = self.publish(|old| Ok::<_, ()>((old.without(which(old)).ok_or(())?, ())));
    }

    /// As [`publish`](Self::publish), for a change of `count` registrations that
    /// nobody else changes: new ones, or those of the caller's handles.
    fn publish_own<E>(
        &self,
        count: usize,
        change: impl Fn(&Snapshot) -> Result<Snapshot, E>,
    ) -> Result<(), E> {
        self.publish_rebasing(worth(count), |old| Ok((change(old)?, ())))
    }

    /// Replaces the published snapshot by the one that `change` makes of it,
    /// and returns what `change` returned beside it; publishes nothing if that
    /// is an error. `change` may be called several times.
    ///
    /// This is `ArcSwap::rcu`, with a way out for a change that is refused or
    /// has nothing to change.
    fn publish<R, E>(
        &self,
        change: impl Fn(&Snapshot) -> Result<(Snapshot, R), E>,
    ) -> Result<R, E> {
        self.publish_rebasing(0, change)
    }

    /// As [`publish`](Self::publish). If another writer was first, and what it has
    /// changed can be put into what was built, in up to `steps` steps, `change` is
    /// not called again.
    fn publish_rebasing<R, E>(
        &self,
        steps: usize,
        change: impl Fn(&Snapshot) -> Result<(Snapshot, R), E>,
    ) -> Result<R, E> {
        let mut current = self.published.load();
        let (mut next, mut result) = change(&current)?;
        let room = Room::new();
        loop {
            weakened!("torn_arrays" => {
                let mut torn = next.torn(&current);
                torn.generation = current.generation + 1;
                self.announce(torn.generation);
                let torn = Arc::new(torn);
                let _ = self.published.compare_and_swap(&current, torn.clone());
                current = torn;
            });
            let generation = current.generation + 1;
            next.generation = generation;
            let new = Arc::new(next);
            let built = (steps > 0).then(|| Arc::clone(&new));
            // Right before the publish: in between, lookups take the published
            // snapshot anew, each time. A writer that loses the race has
            // announced no more than the winner, which began with the same
            // snapshot.
            self.announce(generation);
            let previous = self.published.compare_and_swap(&current, new);
            weakened!("announced_once_published" => {
                self.announced.fetch_max(generation, Ordering::Relaxed);
            });
            // `current` is held, so no other snapshot can have its address:
            // equal addresses mean that nothing was published in between.
            if Arc::ptr_eq(&current, &previous) {
                let superseded = Arc::clone(&previous);
                // This writer keeps the one hold that it hands over.
                drop((current, previous));
                // The models leave it out: their stand-in for `arc-swap` holds each
                // snapshot to the end. There is a model of `Retired` by itself.
                if !cfg!(loom) {
                    self.retired.retire(room, superseded);
                }
                return Ok(result);
            }
            weakened!("announced_once" => {
                return self.publish_unannounced(&previous, previous.generation + 1, change);
            });
            weakened!("generation_kept_on_retry" => {
                return self.publish_unannounced(&previous, generation, change);
            });
            // By value, so that the tree is edited in place.
            let built = built.map(|it| Snapshot::clone(&it));
            let rebased = built.and_then(|it| {
                weakened!("rebase_forgets" => { return Some(it) });
                it.rebased(&current, &previous, steps)
            });
            (next, result) = match rebased {
                Some(next) => (next, result),
                None => change(&previous)?,
            };
            current = previous;
        }
    }
}

/// How many steps it is worth to put the changes of others into one that changes
/// `count` registrations, rather than build it anew. Of one or a few, never: to
/// build takes no longer than to look at the difference.
fn worth(count: usize) -> usize {
    match count {
        0 | 1 => 0,
        _ if cfg!(loom) => 16 * count,
        _ => count / 16,
    }
}

modelled_only! {
    impl Registry {
        /// Registers the memory of a `HostRegistration`, if none of it is.
        #[doc(hidden)]
        pub fn is_registered_alone(&self, region: Region) -> bool {
            self.register_alone(RegionState::Live, region).is_ok()
        }

        /// How many flags of waits that gave up are left in the collector.
        #[doc(hidden)]
        pub fn flags_left_behind(&self) -> u64 {
            self.sections.left_behind()
        }

        /// What was published before `snapshot`, or else itself.
        pub(crate) fn before(&self, snapshot: &Arc<Snapshot>) -> Arc<Snapshot> {
            self.published.before(snapshot).unwrap_or_else(|| snapshot.clone())
        }

        /// Publishes what `change` makes of `current`, with `generation` and
        /// without an announcement. The models have no third writer.
        fn publish_unannounced<R, E>(
            &self,
            current: &Arc<Snapshot>,
            generation: u64,
            change: impl Fn(&Snapshot) -> Result<(Snapshot, R), E>,
        ) -> Result<R, E> {
            let (mut next, result) = change(current)?;
            next.generation = generation;
            let previous = self.published.compare_and_swap(current, Arc::new(next));
            assert!(Arc::ptr_eq(current, &previous), "a third writer");
            Ok(result)
        }

        pub(crate) fn erase_by_address(&self, region: Region) {
            let base = region.start_addr();
            self.remove(|old| {
                let first = old.entries().find(|it| it.key().0 == base);
                first.map(|it| it.key())
            });
        }
    }
}

impl Default for Registry {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.regions()).finish()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn region(start: usize) -> Region {
        Region::new(std::ptr::without_provenance(start), 1).expect("not null, and short")
    }

    /// How many times a change of `count` registrations is built if `others`
    /// registrations are published while it is built the first time.
    fn builds(registry: &Registry, count: usize, others: usize) -> usize {
        let entries: Vec<_> = (1..=count)
            .map(|k| RegionEntry::new(region(10 * k), Owner::Handle))
            .collect();
        let before = registry.live_count();
        let builds = std::cell::Cell::new(0);
        let Ok(()) = registry.publish_own(count, |old| {
            builds.set(builds.get() + 1);
            if builds.get() == 1 {
                for k in 1..=others {
                    let _ = registry.register(region(10 * k + 5));
                }
            }
            Ok::<_, Infallible>(old.with(&entries))
        });
        assert_eq!(registry.live_count(), before + count + others);
        let starts: Vec<_> = registry
            .regions()
            .map(|it| it.region().start_addr())
            .collect();
        assert!(starts.is_sorted());
        builds.get()
    }

    #[test]
    fn a_change_of_many_is_built_once_beside_changes_of_few() {
        for others in [1, 2, 10, 100] {
            assert_eq!(builds(&Registry::new(), 10_000, others), 1);
        }
        let registry = Registry::new();
        let _ = registry.register_all((1..5000).map(|k| region(10 * k + 3)));
        assert_eq!(builds(&registry, 10_000, 10), 1);
    }

    #[test]
    fn beside_a_change_of_as_many_a_change_is_built_anew() {
        assert_eq!(builds(&Registry::new(), 1000, 500), 2);
        assert_eq!(builds(&Registry::new(), 1, 1), 2);
    }

    #[test]
    fn what_others_change_meanwhile_is_in_what_many_handles_change() {
        let registry = Registry::new();
        let many = registry.register_all((1..=2000).map(|k| region(10 * k)));
        let ids: Vec<_> = many.iter().map(Registration::id).collect();
        let others = std::cell::Cell::new(Some(registry.register(region(7))));
        let builds = std::cell::Cell::new(0);
        let Ok(()) = registry.publish_own(ids.len(), |old| {
            builds.set(builds.get() + 1);
            if let Some(other) = others.take() {
                other.unregister();
                let _ = registry.register(region(8));
            }
            let next = old.without(ids.iter().map(|id| id.key()));
            Ok::<_, Infallible>(next.expect("they are there"))
        });
        assert_eq!(builds.get(), 1);
        let left: Vec<_> = registry.regions().map(|it| it.region()).collect();
        assert_eq!(left, [region(8)]);
    }
}

#[cfg(all(test, target_os = "linux", not(loom)))]
mod fork_tests {
    use super::*;
    use crate::process::tests::in_child;

    static BYTES: [u8; 64] = [0; 64];

    /// A registry of one region, of which a writer has announced the next
    /// generation, and has yet to publish it.
    fn announced() -> Registry {
        let registry = Registry::new();
        let _ = Region::of(&BYTES).map(|region| registry.register(region));
        registry.announce(2);
        registry
    }

    /// Whether a reader that has the published snapshot is told of no newer one.
    fn is_caught_up(registry: &Registry) -> bool {
        registry.announced() <= registry.snapshot().generation
    }

    #[test]
    fn a_child_that_lost_a_writer_catches_up_at_its_first_lookup() {
        let registry = announced();
        let mut reader = registry.reader();
        assert!(in_child(|| {
            let is_pinned = reader.is_pinned(&BYTES);
            is_pinned && is_caught_up(&registry) && registry.live_count() == 1
        }));
        assert!(in_child(|| in_child(|| {
            registry.reader().is_pinned(&BYTES) && is_caught_up(&registry)
        })));
    }

    #[test]
    fn a_child_catches_up_once() {
        let registry = announced();
        assert!(in_child(|| {
            let _ = registry.reader();
            // A writer of the child's own.
            registry.announce(3);
            registry.reader().is_pinned(&BYTES) && registry.snapshot().generation == 2
        }));
    }

    #[test]
    fn beside_a_living_writer_no_lookup_publishes() {
        let registry = announced();
        assert!(registry.reader().is_pinned(&BYTES));
        assert_eq!(registry.snapshot().generation, 1);
    }
}
