//! The regions that all contestants hold, and the slices that they are asked
//! about: the same for each, in the same order.

use crate::rivals::{Bounds, Contestant};

const REGION_BYTES: usize = 64;
/// One region and the gap behind it.
const STRIDE: usize = 2 * REGION_BYTES;
const SLICE_BYTES: usize = 16;
const PAGE_BYTES: usize = 4096;

/// Enough that no branch predictor learns the answers by heart, and few enough
/// that the list stays in the second-level cache.
const LOOKUPS: usize = 1 << 13;
/// For sets that do not fit in a cache: enough that the searched lines do not
/// either.
const LOOKUPS_OF_MANY: usize = 1 << 18;
const MANY: usize = 10_000;

/// The memory of all workloads of a bench. It is never written, so it takes up
/// addresses rather than memory.
pub(crate) struct Arena {
    bytes: Vec<u8>,
    /// Of the first page that begins in it.
    first_page: usize,
    far: Vec<u8>,
}

/// Where a slice lies, and so what the answer is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Case {
    /// Inside a region.
    Hit,
    /// In the gap behind a region.
    MissNear,
    /// Far from all regions: what most copies of a program find.
    MissFar,
    /// Begins in a region and ends behind it. Only checked, not measured.
    Across,
}

impl Case {
    pub(crate) const MEASURED: [Self; 3] = [Self::Hit, Self::MissNear, Self::MissFar];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Hit => "hit",
            Self::MissNear => "miss_near",
            Self::MissFar => "miss_far",
            Self::Across => "across",
        }
    }

    /// Of a slice, behind the start of its region.
    fn offset(self) -> usize {
        match self {
            Self::Hit | Self::MissFar => REGION_BYTES / 2,
            Self::MissNear => REGION_BYTES + SLICE_BYTES,
            Self::Across => REGION_BYTES - SLICE_BYTES / 2,
        }
    }
}

impl Arena {
    /// For workloads of up to `n` regions.
    pub(crate) fn new(n: usize) -> Self {
        let bytes = vec![0; n * STRIDE + PAGE_BYTES];
        let first_page = bytes.as_ptr().align_offset(PAGE_BYTES);
        Self {
            bytes,
            first_page,
            far: vec![0; SLICE_BYTES],
        }
    }

    /// The first `n` regions.
    pub(crate) fn workload(&self, n: usize) -> Workload<'_> {
        let bytes = &self.bytes[self.first_page..];
        let regions = (0..n).map(|k| Bounds::of(&bytes[k * STRIDE..][..REGION_BYTES]));
        Workload {
            bytes,
            far: &self.far,
            regions: regions.collect(),
        }
    }
}

/// Some regions, and slices in and beside them.
pub(crate) struct Workload<'a> {
    bytes: &'a [u8],
    far: &'a [u8],
    regions: Vec<Bounds>,
}

impl<'a> Workload<'a> {
    /// How many regions there are.
    pub(crate) fn n(&self) -> usize {
        self.regions.len()
    }

    /// Sorted and apart.
    pub(crate) fn regions(&self) -> &[Bounds] {
        &self.regions
    }

    /// One more region, in the middle, that touches no other one.
    pub(crate) fn one_more(&self) -> Bounds {
        let gap = self.n() / 2 * STRIDE + REGION_BYTES;
        Bounds::of(&self.bytes[gap + SLICE_BYTES..][..2 * SLICE_BYTES])
    }

    /// Slices in or beside regions that are drawn by chance, the same ones each
    /// time.
    pub(crate) fn slices(&self, case: Case) -> Vec<&'a [u8]> {
        // What is far from all regions is not searched for.
        if let Case::MissFar = case {
            return vec![self.far; LOOKUPS];
        }
        let count = if self.n() < MANY {
            LOOKUPS
        } else {
            LOOKUPS_OF_MANY
        };
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        (0..count)
            .map(|_| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                let k = (state >> 33) as usize % self.n();
                &self.bytes[k * STRIDE + case.offset()..][..SLICE_BYTES]
            })
            .collect()
    }

    /// Ends the bench if `contestant` gives a wrong answer: what is wrong has
    /// no speed.
    pub(crate) fn check<C: Contestant>(&self, contestant: &C) {
        let mut ask = contestant.asker();
        for case in [Case::Hit, Case::MissNear, Case::MissFar, Case::Across] {
            let expected = matches!(case, Case::Hit);
            for slice in self.slices(case).into_iter().take(LOOKUPS) {
                let answer = ask(slice);
                assert_eq!(
                    answer,
                    expected,
                    "{} is wrong: {case:?}, n = {}",
                    C::NAME,
                    self.n()
                );
            }
        }
        assert!(!ask(&[]), "{} is wrong about the empty slice", C::NAME);
    }
}
