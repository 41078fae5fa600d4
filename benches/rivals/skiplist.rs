//! A concurrent ordered map, changed in place.

use std::ops::Bound;

use crossbeam_skiplist::SkipMap;

use super::{Bounds, Changeable, Contestant};

/// `crossbeam-skiplist`, ends by starts. Nobody locks, and a change costs the
/// same at any size, nearly; each step of a search follows a pointer.
pub(crate) struct SkipList(SkipMap<usize, usize>);

impl Contestant for SkipList {
    const NAME: &'static str = "crossbeam-skiplist";

    fn holding(regions: &[Bounds]) -> Self {
        let ends = regions.iter().map(|region| (region.start, region.end));
        Self(ends.collect())
    }

    fn asker(&self) -> impl FnMut(&[u8]) -> bool {
        |bytes| {
            let wanted = Bounds::of(bytes);
            let last_started = self.0.upper_bound(Bound::Included(&wanted.start));
            !bytes.is_empty() && last_started.is_some_and(|entry| *entry.value() >= wanted.end)
        }
    }
}

impl Changeable for SkipList {
    type Key<'a> = Bounds;

    fn insert(&self, region: Bounds) -> Bounds {
        self.0.insert(region.start, region.end);
        region
    }

    fn remove(&self, region: Bounds) {
        self.0.remove(&region.start);
    }
}
