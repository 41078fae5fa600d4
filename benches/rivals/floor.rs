//! The floors: a search in plain arrays that nobody may change while others
//! ask. No synchronisation can be cheaper than none.

use super::{Bounds, Contestant};

/// What the loop around every lookup costs by itself.
pub(crate) struct EmptyLoop;

impl Contestant for EmptyLoop {
    const NAME: &'static str = "empty loop";

    fn holding(_: &[Bounds]) -> Self {
        Self
    }

    fn asker(&self) -> impl FnMut(&[u8]) -> bool {
        // Looks at the slice, as every lookup has to, and answers `false`.
        |bytes| bytes.is_empty()
    }
}

/// Starts and ends in arrays of their own, so that the search touches few
/// cache lines, and `std`'s branch-free `partition_point`.
pub(crate) struct Floor {
    starts: Vec<usize>,
    ends: Vec<usize>,
}

impl Contestant for Floor {
    const NAME: &'static str = "floor";

    fn holding(regions: &[Bounds]) -> Self {
        Self {
            starts: regions.iter().map(|region| region.start).collect(),
            ends: regions.iter().map(|region| region.end).collect(),
        }
    }

    fn asker(&self) -> impl FnMut(&[u8]) -> bool {
        |bytes| {
            let wanted = Bounds::of(bytes);
            let started = self.starts.partition_point(|&start| start <= wanted.start);
            started > 0 && !bytes.is_empty() && self.ends[started - 1] >= wanted.end
        }
    }
}

/// The same arrays, but every start is compared and the compares are counted:
/// no step waits for the one before it, which is the fastest for few regions.
pub(crate) struct Counted(Floor);

impl Contestant for Counted {
    const NAME: &'static str = "floor, counted";

    fn holding(regions: &[Bounds]) -> Self {
        Self(Floor::holding(regions))
    }

    fn asker(&self) -> impl FnMut(&[u8]) -> bool {
        |bytes| {
            let wanted = Bounds::of(bytes);
            let compares = self.0.starts.iter().map(|&start| start <= wanted.start);
            let started: usize = compares.map(usize::from).sum();
            started > 0 && !bytes.is_empty() && self.0.ends[started - 1] >= wanted.end
        }
    }
}
