//! The immutable, sorted set of all regions at one moment, and every question
//! that can be asked of it.
//!
//! # How one search answers nearly everything
//!
//! Regions may touch, overlap and nest, so "the last region that starts at or
//! before the slice" is not the region that matters: a longer one may have
//! started earlier. So the search (`tree.rs`) finds two numbers:
//!
//! - `reach`: the greatest end among *all* regions that start at or before an
//!   address;
//! - `next`: where the first region starts behind it.
//!
//! ```text
//! address   0    10   20   30   40   50   60
//! region 0  [=========)
//! region 1       [==)                            at 15: reach 20, next 20
//! region 2            [=========)                at 25: reach 40, next 50
//! region 3                           [====)      at 45: reach 40, next 50
//! ```
//!
//! For a slice `[start, end)`, asked at `start`:
//!
//! - `reach >= end`: the region that reaches that far starts no later than the
//!   slice and ends no earlier: it contains the slice. `Pinned`.
//! - else `reach > start`: the slice begins in a region and ends beyond all
//!   that have begun. Asked again at `reach`, and so on, either a region goes
//!   on from there each time until one reaches `end`: every byte is pinned, by
//!   more than one region, `Seam`. Or there is a gap: `Mixed`. This takes one
//!   search for each region on the way, and only a slice over several has any.
//! - else `next < end`: a region begins inside the slice. `Mixed`.
//! - else no region touches the slice. `Pageable`.
//!
//! The number of steps is bounded by the number of regions.

use crate::entry::{RegionEntry, RegionState};
use crate::region::{Key, Region, RegionId};
use crate::span::Span;
use crate::sync::modelled_only;
use crate::tree::{Around, Tree};

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

/// See the head of this file.
#[derive(Clone, Debug)]
pub(crate) struct Snapshot {
    // The bounds come first: the commonest answer, "nowhere near", is given
    // from this one cache line.
    min: usize,
    max: usize,
    /// One more than that of the snapshot before. The registry sets it when it
    /// publishes.
    pub(crate) generation: u64,
    tree: Tree,
}

impl Snapshot {
    pub(crate) fn empty() -> Self {
        Self::of(Tree::empty())
    }

    fn of(tree: Tree) -> Self {
        Self {
            min: tree.first_start(),
            max: tree.reach(),
            generation: 0,
            tree,
        }
    }

    /// This set and `added`, which may be in any order.
    pub(crate) fn with(&self, added: &[RegionEntry]) -> Self {
        Self::of(self.tree.clone().with(added))
    }

    /// This set without the registrations `keys`, those of them that are in it;
    /// `None` if there is none of them.
    pub(crate) fn without(&self, keys: impl IntoIterator<Item = Key>) -> Option<Self> {
        let mut tree = self.tree.clone();
        let mut known = false;
        for key in keys {
            if tree.get(key).is_some() {
                tree = tree.without(key);
                known = true;
            }
        }
        known.then(|| Self::of(tree))
    }

    /// This set with the state of the registrations `ids` changed, those of
    /// them that are in it; `None` if there is none of them.
    pub(crate) fn with_state(&self, ids: &[RegionId], state: RegionState) -> Option<Self> {
        let mut tree = self.tree.clone();
        let mut known = false;
        for id in ids {
            if let Some(entry) = tree.get(id.key()) {
                tree = tree.replaced(entry.in_state(state));
                known = true;
            }
        }
        known.then(|| Self::of(tree))
    }

    /// This set with what makes `newer` of `older`; see [`Tree::rebased`].
    pub(crate) fn rebased(self, older: &Self, newer: &Self, limit: usize) -> Option<Self> {
        let tree = self.tree.rebased(&older.tree, &newer.tree, limit)?;
        Some(Self::of(tree))
    }

    /// What the free functions registered at `base`.
    pub(crate) fn at_base(&self, base: usize) -> Option<RegionEntry> {
        self.tree.starting_at(base).find(RegionEntry::is_bases)
    }

    /// Whether `span` reaches into a region that is about to be unpinned.
    pub(crate) fn is_retiring(&self, span: Span) -> bool {
        !span.is_empty()
            && self
                .tree
                .any_marked(span.start, span.end, |marks| marks.retiring)
    }

    /// Whether `span` reaches into a region that is slow to read.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_write_combined(&self, span: Span) -> bool {
        !span.is_empty()
            && self
                .tree
                .any_marked(span.start, span.end, |marks| marks.write_combined)
    }

    /// Whether every byte of `span` lies in a region.
    #[inline]
    pub(crate) fn is_pinned(&self, span: Span) -> bool {
        if span.start < self.min || span.end > self.max || span.is_empty() {
            return false;
        }
        match self.tree.around_few(span.start) {
            Some(around) => self.is_pinned_given(around, span),
            None => self.is_pinned_of_many(span),
        }
    }

    // Out of line, like its twin below, so that what is asked on every copy is
    // short where regions are few.
    #[inline(never)]
    fn is_pinned_of_many(&self, span: Span) -> bool {
        self.is_pinned_given(self.tree.around(span.start), span)
    }

    #[inline]
    fn is_pinned_given(&self, around: Around, Span { start, end }: Span) -> bool {
        around.reach >= end || (around.reach > start && self.goes_on_to(end, around.reach))
    }

    #[inline]
    pub(crate) fn residency(&self, span: Span) -> Residency {
        if span.end <= self.min || span.start >= self.max || span.is_empty() {
            return Residency::Pageable;
        }
        match self.tree.around_few(span.start) {
            Some(around) => self.residency_given(around, span),
            None => self.residency_of_many(span),
        }
    }

    #[inline(never)]
    fn residency_of_many(&self, span: Span) -> Residency {
        self.residency_given(self.tree.around(span.start), span)
    }

    #[inline]
    fn residency_given(&self, around: Around, Span { start, end }: Span) -> Residency {
        let Around { reach, next } = around;
        if reach >= end {
            Residency::Pinned
        } else if reach > start && self.goes_on_to(end, reach) {
            Residency::Seam
        } else if reach > start || next < end {
            Residency::Mixed
        } else {
            Residency::Pageable
        }
    }

    /// Whether every byte of `from..end` lies in a region.
    // Out of line, so that what is asked on every copy stays short.
    #[cold]
    #[inline(never)]
    fn goes_on_to(&self, end: usize, mut from: usize) -> bool {
        while from < end {
            let reach = self.tree.around(from).reach;
            if reach <= from {
                return false;
            }
            from = reach;
        }
        true
    }

    /// The region that contains all of `span`; of several, the one that
    /// reaches furthest.
    pub(crate) fn region_containing(&self, span: Span) -> Option<Region> {
        let Around { reach, .. } = self.tree.around(span.start);
        if span.is_empty() || reach < span.end {
            return None;
        }
        Some(self.tree.first_to_reach(reach)?.region())
    }

    /// The first region that `span` lies in or reaches into.
    #[cfg(any(feature = "cuda", loom))]
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
        let Around { reach, next } = self.tree.around(span.start);
        let (end, residency) = if reach > span.start {
            (reach, Residency::Pinned)
        } else {
            (next, Residency::Pageable)
        };
        (end.min(span.end), residency)
    }

    pub(crate) fn len(&self) -> usize {
        self.tree.len()
    }

    /// The first registration whose key is `key` or greater.
    pub(crate) fn first_from(&self, key: Key) -> Option<RegionEntry> {
        self.tree.first_from(key)
    }
}

modelled_only! {
    impl Snapshot {
        pub(crate) fn entries(&self) -> impl Iterator<Item = RegionEntry> {
            self.tree.iter()
        }

        /// These regions, with the reaches of others.
        pub(crate) fn torn(&self, old: &Self) -> Self {
            Self::of(self.tree.torn(&old.tree))
        }
    }
}
