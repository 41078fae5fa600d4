//! The immutable, sorted set of all regions at one moment, and every question
//! that can be asked of it.
//!
//! # How one search answers everything
//!
//! Regions may touch, overlap and nest, so "the last region that starts at or
//! before the slice" is not the region that matters: a longer one may have
//! started earlier. The trick is to ask each start for more than its own
//! region. Sort the regions by start, and store for the `k`-th:
//!
//! - `starts[k]`: where it starts;
//! - `reaches[k]`: the greatest end among regions `0..=k`, that is, among all
//!   that start no later;
//! - `run_ends[k]`: where the *run* that it lies in ends. A run is a maximal
//!   range without a gap: regions that touch or overlap share one.
//!
//! ```text
//! address   0    10   20   30   40   50   60
//! region 0  [=========)                          reach 20   run end 40
//! region 1       [==)                            reach 20   run end 40
//! region 2            [=========)                reach 40   run end 40
//! region 3                           [====)      reach 60   run end 60
//! ```
//!
//! For a slice `[start, end)` let `k` be the last region with
//! `starts[k] <= start`, found by one binary search. Then:
//!
//! - `reaches[k] >= end`: the region that reaches that far starts no later
//!   than the slice and ends no earlier: it contains the slice. `Pinned`.
//! - else `run_ends[k] >= end`: the run has no gap from `starts[k]` to its
//!   end, so every byte of the slice is pinned, by more than one region.
//!   `Seam`.
//! - else `reaches[k] > start`, or `starts[k + 1] < end`: the first byte is
//!   pinned, or a region begins inside the slice; but not every byte is
//!   pinned. `Mixed`.
//! - else no region touches the slice. `Pageable`.
//!
//! The number of steps is fixed by the number of regions, whatever the
//! regions and the slice are.

use std::iter::FusedIterator;

use crate::region::{Region, RegionId};
use crate::sync::{Arc, modelled_only};

/// What the bytes of a slice are, as far as the registry knows.
///
/// The registry errs to one side: memory that somebody is pinning or
/// unpinning just now counts as pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Residency {
    /// No byte is page-locked. The empty slice is `Pageable` wherever it
    /// points.
    Pageable,
    /// One region contains the whole slice.
    Pinned,
    /// Every byte is page-locked, but no one region contains them all. The
    /// driver refuses one copy across two registrations.
    Seam,
    /// Some bytes are page-locked and some are not. The driver refuses one
    /// copy of such a slice.
    Mixed,
}

/// Who made a registration, and so who may take it away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The typed interface: removed by id.
    Id,
    /// The free functions: removed by base address.
    Base,
    /// A handle that keeps the memory pinned (a `PinnedBuffer`, a
    /// `Registration`), which alone may remove it: were it gone while the
    /// memory is pinned, a copy from it would not be waited for.
    Handle,
}

/// How far a registration is between being made and being gone. In each of
/// these states the memory counts as pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RegionState {
    /// About to be pinned: [`Registry::pin_with`](crate::Registry::pin_with)
    /// waits for copies that were told that it is pageable.
    Pinning,
    /// Pinned, or at least registered.
    Live,
    /// About to be unpinned:
    /// [`Registration::unpin_with`](crate::Registration::unpin_with) waits
    /// for copies that may let the device read it, and no copy that begins
    /// now does.
    Retiring,
}

/// One registration, as [`Registry::regions`](crate::Registry::regions) lists
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionEntry {
    id: RegionId,
    region: Region,
    owner: Owner,
    state: RegionState,
    write_combined: bool,
}

impl RegionEntry {
    pub(crate) fn new(id: RegionId, region: Region, owner: Owner) -> Self {
        Self {
            id,
            region,
            owner,
            state: RegionState::Live,
            write_combined: false,
        }
    }

    pub(crate) fn that_is_write_combined(self) -> Self {
        Self {
            write_combined: true,
            ..self
        }
    }

    pub(crate) fn in_state(self, state: RegionState) -> Self {
        Self { state, ..self }
    }

    /// How far it is between being made and being gone.
    #[must_use]
    pub fn state(&self) -> RegionState {
        self.state
    }

    /// Whether it was registered as
    /// [write-combined](crate::Registry::register_write_combined).
    #[must_use]
    pub fn is_write_combined(&self) -> bool {
        self.write_combined
    }

    /// The name of the registration.
    #[must_use]
    pub fn id(&self) -> RegionId {
        self.id
    }

    /// The bytes it covers.
    #[must_use]
    pub fn region(&self) -> Region {
        self.region
    }

    /// Whether the free functions registered this entry at `base`.
    pub(crate) fn is_at_base(&self, base: usize) -> bool {
        self.owner == Owner::Base && self.region.start_addr() == base
    }

    /// Whether only a handle may remove this entry.
    pub(crate) fn is_handles(&self) -> bool {
        self.owner == Owner::Handle
    }

    fn sort_key(&self) -> (usize, RegionId) {
        (self.region.start_addr(), self.id)
    }
}

/// See the head of this file. Its drop must stay trivial (no user code, no
/// lock), because the last thread to let go of a snapshot may be a reader.
#[derive(Debug)]
pub(crate) struct Snapshot {
    // The bounds come first, beside the arrays' addresses: the commonest
    // answer, "nowhere near", is given from this one cache line.
    min: usize,
    max: usize,
    starts: Box<[usize]>,
    run_ends: Box<[usize]>,
    reaches: Box<[usize]>,
    /// For each `reaches[k]`, the index of the region that reaches so far.
    reachers: Box<[usize]>,
    /// The registrations themselves, in the same order. Lookups do not read
    /// them.
    entries: Box<[RegionEntry]>,
    /// The regions that are about to be unpinned; mostly none.
    retiring: Box<[Region]>,
    /// The regions that are slow to read; mostly none.
    #[cfg(feature = "cuda")]
    write_combined: Box<[Region]>,
}

impl Snapshot {
    pub(crate) fn empty() -> Self {
        Self::from_sorted(Vec::new())
    }

    /// This set and `added`, which may be in any order.
    pub(crate) fn with(&self, added: &[RegionEntry]) -> Self {
        let mut entries = Vec::with_capacity(self.entries.len() + added.len());
        entries.extend_from_slice(&self.entries);
        entries.extend_from_slice(added);
        // A merge sort finds the sorted run that is already there.
        entries.sort_by_key(RegionEntry::sort_key);
        Self::from_sorted(entries)
    }

    /// This set without the entries that `goes` names, and the first of them;
    /// `None` if there is none.
    pub(crate) fn without(
        &self,
        goes: impl Fn(&RegionEntry) -> bool,
    ) -> Option<(Self, RegionEntry)> {
        let gone = *self.entries.iter().find(|&entry| goes(entry))?;
        let kept = self.entries.iter().filter(|&entry| !goes(entry)).copied();
        Some((Self::from_sorted(kept.collect()), gone))
    }

    /// This set with the state of the entries `ids`, which are in order,
    /// changed; `None` if there is none of them.
    pub(crate) fn with_state(&self, ids: &[RegionId], state: RegionState) -> Option<Self> {
        let mut entries = self.entries.to_vec();
        let mut known = false;
        for entry in &mut entries {
            if ids.binary_search(&entry.id).is_ok() {
                entry.state = state;
                known = true;
            }
        }
        known.then(|| Self::from_sorted(entries))
    }

    /// Whether `span` reaches into a region that is about to be unpinned.
    pub(crate) fn is_retiring(&self, span: Span) -> bool {
        span.reaches_into_any(&self.retiring)
    }

    /// Whether `span` reaches into a region that is slow to read.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_write_combined(&self, span: Span) -> bool {
        span.reaches_into_any(&self.write_combined)
    }

    fn from_sorted(entries: Vec<RegionEntry>) -> Self {
        let starts: Box<[usize]> = entries.iter().map(|e| e.region.start_addr()).collect();

        let mut reach = 0;
        let mut reacher = 0;
        let mut reaches = Vec::with_capacity(entries.len());
        let mut reachers = Vec::with_capacity(entries.len());
        for (index, entry) in entries.iter().enumerate() {
            if entry.region.end_addr() > reach {
                reach = entry.region.end_addr();
                reacher = index;
            }
            reaches.push(reach);
            reachers.push(reacher);
        }

        // From the back: a run ends where the next region starts beyond the
        // reach of all before it. Regions that touch share a run.
        let mut run_ends = reaches.clone();
        for k in (1..entries.len()).rev() {
            if starts[k] <= reaches[k - 1] {
                run_ends[k - 1] = run_ends[k];
            }
        }

        Self {
            min: starts.first().copied().unwrap_or(usize::MAX),
            max: reach,
            starts,
            run_ends: run_ends.into(),
            reaches: reaches.into(),
            reachers: reachers.into(),
            retiring: regions_of(&entries, |entry| entry.state == RegionState::Retiring),
            #[cfg(feature = "cuda")]
            write_combined: regions_of(&entries, |entry| entry.write_combined),
            entries: entries.into(),
        }
    }

    /// How many regions start at or before `address`.
    #[inline]
    fn started_by(&self, address: usize) -> usize {
        // Few regions are the common case, and counting them all takes less
        // time than the binary search's chain of dependent steps: a third less
        // for a whole lookup at three regions, even at about ten.
        if self.starts.len() <= 8 {
            let started = self
                .starts
                .iter()
                .map(|&start| usize::from(start <= address));
            return started.sum();
        }
        self.starts.partition_point(|&start| start <= address)
    }

    /// The entry of `array` for the last region that starts at or before the
    /// address that gave `started`.
    #[inline]
    fn last_started(array: &[usize], started: usize) -> Option<usize> {
        array.get(started.checked_sub(1)?).copied()
    }

    /// Whether every byte of `span` lies in a region.
    #[inline]
    pub(crate) fn is_pinned(&self, span: Span) -> bool {
        let Span { start, end } = span;
        if start < self.min || end > self.max || span.is_empty() {
            return false;
        }
        Self::last_started(&self.run_ends, self.started_by(start)).is_some_and(|e| e >= end)
    }

    #[inline]
    pub(crate) fn residency(&self, span: Span) -> Residency {
        let Span { start, end } = span;
        if end <= self.min || start >= self.max || span.is_empty() {
            return Residency::Pageable;
        }
        let started = self.started_by(start);
        let reach = Self::last_started(&self.reaches, started).unwrap_or(0);
        let run_end = Self::last_started(&self.run_ends, started).unwrap_or(0);
        let starts_inside = self.starts.get(started).is_some_and(|&next| next < end);
        if reach >= end {
            Residency::Pinned
        } else if run_end >= end {
            Residency::Seam
        } else if reach > start || starts_inside {
            Residency::Mixed
        } else {
            Residency::Pageable
        }
    }

    /// The region that contains all of `span`; of several, the one that
    /// reaches furthest.
    pub(crate) fn region_containing(&self, span: Span) -> Option<Region> {
        if span.is_empty() {
            return None;
        }
        let reacher = Self::last_started(&self.reachers, self.started_by(span.start))?;
        let region = self.entries.get(reacher)?.region;
        (region.end_addr() >= span.end).then_some(region)
    }

    /// The first region that `span` lies in or reaches into.
    #[cfg(feature = "cuda")]
    pub(crate) fn first_region(&self, span: Span) -> Option<Region> {
        if span.is_empty() {
            return None;
        }
        let mut part = span;
        let (end, residency) = self.first_part(span);
        if residency == Residency::Pageable {
            part.start = end;
        }
        if part.is_empty() {
            return None;
        }
        part.end = self.first_part(part).0;
        self.region_containing(part)
    }

    /// Where the first part of `span`, which is not empty, ends, and what it
    /// is: up to the end of the region that reaches furthest, or up to the
    /// next region.
    pub(crate) fn first_part(&self, span: Span) -> (usize, Residency) {
        let started = self.started_by(span.start);
        let (end, residency) = match Self::last_started(&self.reaches, started) {
            Some(reach) if reach > span.start => (reach, Residency::Pinned),
            _ => (
                self.starts.get(started).copied().unwrap_or(usize::MAX),
                Residency::Pageable,
            ),
        };
        (end.min(span.end), residency)
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }
}

fn regions_of(entries: &[RegionEntry], wanted: impl Fn(&RegionEntry) -> bool) -> Box<[Region]> {
    let wanted = entries.iter().filter(|&entry| wanted(entry));
    wanted.map(|entry| entry.region).collect()
}

modelled_only! {
    impl Snapshot {
        /// These regions, with the runs and reaches of others.
        pub(crate) fn torn(&self, old: &Self) -> Self {
            let new = Self::from_sorted(self.entries.to_vec());
            Self { run_ends: old.run_ends.clone(), reaches: old.reaches.clone(), ..new }
        }
    }
}

/// The addresses that a slice occupies, `[start, end)`. A lookup needs no
/// more: it never reads the bytes, so it works for elements with padding too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) start: usize,
    pub(crate) end: usize,
}

impl From<Region> for Span {
    fn from(region: Region) -> Self {
        Self {
            start: region.start_addr(),
            end: region.end_addr(),
        }
    }
}

impl Span {
    #[inline]
    pub(crate) fn of<T>(slice: &[T]) -> Self {
        let range = slice.as_ptr_range();
        Self {
            start: range.start.addr(),
            end: range.end.addr(),
        }
    }

    #[inline]
    pub(crate) fn is_empty(self) -> bool {
        self.start == self.end
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn len(self) -> usize {
        self.end - self.start
    }

    fn reaches_into_any(self, regions: &[Region]) -> bool {
        let overlaps =
            |region: &Region| region.start_addr() < self.end && self.start < region.end_addr();
        !self.is_empty() && regions.iter().any(overlaps)
    }
}

/// A part of a slice, from [`Registry::segments`](crate::Registry::segments).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment<'a> {
    bytes: &'a [u8],
    residency: Residency,
}

impl<'a> Segment<'a> {
    /// The part itself, never empty.
    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// [`Residency::Pinned`] if one region contains the part,
    /// [`Residency::Pageable`] if no region touches it; never another.
    #[must_use]
    pub fn residency(&self) -> Residency {
        self.residency
    }
}

/// The parts of a slice, in order, all from one snapshot. From
/// [`Registry::segments`](crate::Registry::segments).
#[derive(Clone, Debug)]
pub struct Segments<'a> {
    snapshot: Arc<Snapshot>,
    rest: &'a [u8],
}

impl<'a> Segments<'a> {
    pub(crate) fn new(snapshot: Arc<Snapshot>, bytes: &'a [u8]) -> Self {
        Self {
            snapshot,
            rest: bytes,
        }
    }
}

impl<'a> Iterator for Segments<'a> {
    type Item = Segment<'a>;

    fn next(&mut self) -> Option<Segment<'a>> {
        if self.rest.is_empty() {
            return None;
        }
        let span = Span::of(self.rest);
        let (part_end, residency) = self.snapshot.first_part(span);
        let (bytes, rest) = self.rest.split_at(part_end - span.start);
        self.rest = rest;
        Some(Segment { bytes, residency })
    }
}

impl FusedIterator for Segments<'_> {}

/// The registrations of one snapshot, by address. From
/// [`Registry::regions`](crate::Registry::regions).
#[derive(Clone, Debug)]
pub struct Regions {
    snapshot: Arc<Snapshot>,
    next: usize,
}

impl Regions {
    pub(crate) fn new(snapshot: Arc<Snapshot>) -> Self {
        Self { snapshot, next: 0 }
    }
}

impl Iterator for Regions {
    type Item = RegionEntry;

    fn next(&mut self) -> Option<RegionEntry> {
        let entry = self.snapshot.entries.get(self.next).copied()?;
        self.next += 1;
        Some(entry)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.snapshot.len() - self.next;
        (left, Some(left))
    }
}

impl ExactSizeIterator for Regions {}
impl FusedIterator for Regions {}
