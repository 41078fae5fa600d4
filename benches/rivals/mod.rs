//! The contestants: every way to keep the same set of regions that a careful
//! program might choose instead of this crate, and the searches that none of
//! them can beat.
//!
//! A contestant is built from regions that neither touch nor overlap. Most
//! rivals need no more than a search by start for those; the registry answers
//! for any regions.

mod floor;
mod left_right;
mod locks;
mod ours;
mod papaya;
mod pointers;
mod skiplist;
mod static_search;
mod ucx;

pub(crate) use floor::{Counted, EmptyLoop, Floor};
pub(crate) use left_right::LeftRight;
pub(crate) use locks::{MutexTree, ParkingLot, StdRwLock};
pub(crate) use ours::{OwnReader, OwnRegistry, ProcessWide, region};
pub(crate) use papaya::PapayaPages;
pub(crate) use pointers::{ArcSwapLoad, EpochPointer, SeizePointer};
pub(crate) use skiplist::SkipList;
pub(crate) use static_search::{Eytzinger, StaticTree};
pub(crate) use ucx::Ucx;

/// The addresses of one region, start inclusive and end exclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Bounds {
    pub(crate) start: usize,
    pub(crate) end: usize,
}

impl Bounds {
    #[inline]
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let range = bytes.as_ptr_range();
        Self {
            start: range.start.addr(),
            end: range.end.addr(),
        }
    }
}

/// One way to keep the set, and to ask it.
pub(crate) trait Contestant: Sync {
    /// As tables and plots call it.
    const NAME: &'static str;

    /// Holds `regions`, which are sorted and apart.
    fn holding(regions: &[Bounds]) -> Self;

    /// One thread's way to ask whether every byte of a slice lies in a region.
    /// It is made once per thread, so that what a careful user would keep per
    /// thread is kept.
    fn asker(&self) -> impl FnMut(&[u8]) -> bool;
}

/// A contestant whose regions come and go while others ask.
pub(crate) trait Changeable: Contestant {
    /// What an added region is known by.
    type Key<'a>
    where
        Self: 'a;

    /// Adds a region that touches no other one.
    fn insert(&self, region: Bounds) -> Self::Key<'_>;

    /// Takes away a region that [`insert`](Self::insert) added.
    fn remove(&self, key: Self::Key<'_>);
}

/// The search of all rivals that keep a vector: pairs, sorted by start.
#[inline]
fn contains(regions: &[Bounds], bytes: &[u8]) -> bool {
    let wanted = Bounds::of(bytes);
    let started = regions.partition_point(|region| region.start <= wanted.start);
    started > 0 && !bytes.is_empty() && regions[started - 1].end >= wanted.end
}

fn insert_sorted(regions: &mut Vec<Bounds>, region: Bounds) {
    let at = regions.partition_point(|&other| other < region);
    regions.insert(at, region);
}

fn remove_sorted(regions: &mut Vec<Bounds>, region: Bounds) {
    if let Ok(at) = regions.binary_search(&region) {
        regions.remove(at);
    }
}

/// A copy of `regions` with `region` added, made in one allocation.
fn with(regions: &[Bounds], region: Bounds) -> Vec<Bounds> {
    let at = regions.partition_point(|&other| other < region);
    let mut next = Vec::with_capacity(regions.len() + 1);
    next.extend_from_slice(&regions[..at]);
    next.push(region);
    next.extend_from_slice(&regions[at..]);
    next
}

/// A copy of `regions` without `region`, made in one allocation.
fn without(regions: &[Bounds], region: Bounds) -> Vec<Bounds> {
    let at = regions.partition_point(|&other| other < region);
    let mut next = Vec::with_capacity(regions.len());
    next.extend_from_slice(&regions[..at]);
    next.extend(regions[at..].iter().filter(|&&other| other != region));
    next
}
