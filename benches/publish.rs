//! What it costs to add one region and to take it away again, by how many
//! regions there are already, and to add many at once. No other thread is
//! there.
//!
//! This crate publishes a new set each time; most rivals change one in place,
//! behind a lock or with a search that every lookup pays for. Registering
//! happens when memory is page-locked, looking up on every copy.

#[allow(dead_code, unused_imports, reason = "each bench uses a part")]
mod rivals;
#[allow(dead_code, unused_imports, reason = "each bench uses a part")]
mod support;

use std::hint::black_box;

use criterion::{BatchSize, BenchmarkId, Criterion, criterion_group, criterion_main};
use pinned_hosts::Registry;

use rivals::region;
use support::publish::add_and_take_away;
use support::workload::Arena;

fn one(c: &mut Criterion) {
    let sizes = [3, 64, 1_000, 64_000, 1_000_000];
    add_and_take_away(c, "publish/alone", &sizes, 0);
}

/// All regions at once, into a registry that has none.
fn many(c: &mut Criterion) {
    let sizes = [1_000, 64_000, 1_000_000];
    let arena = Arena::new(sizes[sizes.len() - 1]);
    let mut group = c.benchmark_group("publish/register_all");
    for n in sizes {
        let workload = arena.workload(n);
        group.bench_function(BenchmarkId::new("Registry", n), |b| {
            b.iter_batched(
                Registry::new,
                |registry| {
                    let regions = black_box(workload.regions());
                    let _ = registry.register_all(regions.iter().copied().map(region));
                    registry
                },
                BatchSize::PerIteration,
            );
        });
        group.bench_function(BenchmarkId::new("Vec sort", n), |b| {
            b.iter_batched(
                || (),
                |()| {
                    let mut regions = black_box(workload.regions()).to_vec();
                    regions.sort_unstable();
                    regions
                },
                BatchSize::PerIteration,
            );
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = support::criterion();
    targets = one, many
}
criterion_main!(benches);
