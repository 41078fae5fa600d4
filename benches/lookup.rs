//! What a lookup costs, beside every simpler way to keep the same set.
//!
//! All contestants hold the same regions and answer the same question, "does
//! every byte of this slice lie in a region?", for the same slices in the same
//! order. `floor` is the search alone, over plain arrays that nobody may
//! change: no synchronisation can be cheaper than none.
//!
//! The regions do not touch here, so that the rivals need no more than a
//! search by start.

use std::hint::black_box;
use std::ops::Range;
use std::sync::{Arc, RwLock};

use arc_swap::ArcSwap;
use criterion::measurement::WallTime;
use criterion::{
    BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main,
};
use pinned_hosts::{Region, Registry, global};

const REGION_BYTES: usize = 64;
/// One region and the gap behind it.
const STRIDE: usize = 2 * REGION_BYTES;
const SLICE_BYTES: usize = 16;
const LOOKUPS: usize = 1024;

/// `n` regions in one arena, with memory far from all of them beside it.
struct Workload {
    arena: Vec<u8>,
    far: Vec<u8>,
    n: usize,
}

impl Workload {
    fn new(n: usize) -> Self {
        Self {
            arena: vec![0; n * STRIDE + REGION_BYTES],
            far: vec![0; SLICE_BYTES],
            n,
        }
    }

    fn regions(&self) -> Vec<Region> {
        (0..self.n)
            .map(|k| Region::of(&self.arena[k * STRIDE..][..REGION_BYTES]).expect("not empty"))
            .collect()
    }

    /// The same bounds for the rivals.
    fn bounds(&self) -> Vec<(usize, usize)> {
        self.regions()
            .iter()
            .map(|region| (region.base().addr(), region.end().addr()))
            .collect()
    }

    /// `LOOKUPS` slices, each `offset` bytes behind the start of a region
    /// drawn by chance.
    fn slices(&self, offset: usize) -> Vec<&[u8]> {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        (0..LOOKUPS)
            .map(|_| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                let k = (state >> 33) as usize % self.n;
                &self.arena[k * STRIDE + offset..][..SLICE_BYTES]
            })
            .collect()
    }

    fn cases(&self) -> [(&'static str, Vec<&[u8]>); 3] {
        [
            ("hit", self.slices(REGION_BYTES / 2)),
            ("miss_near", self.slices(REGION_BYTES + SLICE_BYTES)),
            ("miss_far", vec![self.far.as_slice(); LOOKUPS]),
        ]
    }
}

fn address_range(bytes: &[u8]) -> Range<usize> {
    let range = bytes.as_ptr_range();
    range.start.addr()..range.end.addr()
}

/// The rivals' search: regions as pairs, sorted by start.
fn contains(bounds: &[(usize, usize)], bytes: &[u8]) -> bool {
    let wanted = address_range(bytes);
    let started = bounds.partition_point(|&(start, _)| start <= wanted.start);
    started > 0 && !bytes.is_empty() && bounds[started - 1].1 >= wanted.end
}

/// The floor: the same search as the snapshot's, starts and ends apart.
struct Floor {
    starts: Vec<usize>,
    ends: Vec<usize>,
}

impl Floor {
    fn contains(&self, bytes: &[u8]) -> bool {
        let wanted = address_range(bytes);
        let started = self.starts.partition_point(|&start| start <= wanted.start);
        started > 0 && !bytes.is_empty() && self.ends[started - 1] >= wanted.end
    }
}

fn contestant<'a>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    n: usize,
    slices: &[&'a [u8]],
    mut ask: impl FnMut(&'a [u8]) -> bool,
) {
    group.bench_function(BenchmarkId::new(name, n), |b| {
        b.iter(|| {
            let mut hits = 0;
            for &bytes in black_box(slices) {
                hits += usize::from(ask(bytes));
            }
            hits
        });
    });
}

fn lookups(c: &mut Criterion) {
    for n in [1, 3, 16, 64, 1_000, 64_000] {
        let workload = Workload::new(n);
        let bounds = workload.bounds();

        let floor = Floor {
            starts: bounds.iter().map(|b| b.0).collect(),
            ends: bounds.iter().map(|b| b.1).collect(),
        };
        let rw_lock = RwLock::new(bounds.clone());
        let parking_lot = parking_lot::RwLock::new(bounds.clone());
        let arc_swap = ArcSwap::new(Arc::new(bounds.clone()));
        let registry = Registry::new();
        registry.register_all(workload.regions());
        let mut reader = registry.reader();
        let process_wide = global().register_all(workload.regions());

        for (case, slices) in &workload.cases() {
            let mut group = c.benchmark_group(format!("lookup/{case}"));
            group.throughput(Throughput::Elements(LOOKUPS as u64));
            contestant(&mut group, "floor", n, slices, |s| floor.contains(s));
            contestant(&mut group, "is_pinned", n, slices, pinned_hosts::is_pinned);
            contestant(&mut group, "Reader", n, slices, |s| reader.is_pinned(s));
            contestant(&mut group, "Registry", n, slices, |s| registry.is_pinned(s));
            contestant(&mut group, "ArcSwap::load", n, slices, |s| {
                contains(&arc_swap.load(), s)
            });
            contestant(&mut group, "RwLock<Vec>", n, slices, |s| {
                rw_lock.read().is_ok_and(|bounds| contains(&bounds, s))
            });
            contestant(&mut group, "parking_lot", n, slices, |s| {
                contains(&parking_lot.read(), s)
            });
            group.finish();
        }

        for id in process_wide {
            global().unregister(id).expect("registered above");
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(std::time::Duration::from_millis(200))
        .measurement_time(std::time::Duration::from_millis(600));
    targets = lookups
}
criterion_main!(benches);
