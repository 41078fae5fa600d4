//! What it costs to add one region and to take it away again, by how many
//! regions there are already, and by how many other threads have looked up
//! before.
//!
//! This crate publishes a new set each time; most rivals change one in place,
//! behind a lock or with a search that every lookup pays for. Registering
//! happens when memory is page-locked, looking up on every copy.

#[allow(dead_code, unused_imports, reason = "each bench uses a part")]
mod rivals;
#[allow(dead_code, reason = "each bench uses a part")]
mod support;

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use pinned_hosts::Registry;

use rivals::{
    ArcSwapLoad, Changeable, EpochPointer, LeftRight, MutexTree, OwnRegistry, PapayaPages,
    ParkingLot, ProcessWide, SeizePointer, SkipList, StdRwLock, Ucx, region,
};
use support::workload::{Arena, Case, Workload};

/// They grow, because the process-wide registry only can.
const SIZES: [usize; 5] = [3, 64, 1_000, 64_000, 1_000_000];
const LARGEST: usize = SIZES[SIZES.len() - 1];
const PARKED: usize = 64;
/// Above this, the old sets that wait to be freed would fill the memory.
const MOST_DEFERRED: usize = 64_000;

fn add_and_take_away(c: &mut Criterion) {
    let arena = Arena::new(LARGEST);
    for n in SIZES {
        let workload = arena.workload(n);
        let w = &workload;
        contest::<ProcessWide>(c, w);
        contest::<OwnRegistry>(c, w);
        contest::<StdRwLock>(c, w);
        contest::<ParkingLot>(c, w);
        contest::<MutexTree>(c, w);
        contest::<ArcSwapLoad>(c, w);
        if n <= MOST_DEFERRED {
            contest::<EpochPointer>(c, w);
            contest::<SeizePointer>(c, w);
        }
        contest::<LeftRight>(c, w);
        contest::<PapayaPages>(c, w);
        contest::<SkipList>(c, w);
        match Ucx::load(w.regions()) {
            Ok(ucx) => measure(c, w, &ucx),
            Err(why) => println!("{why}"),
        }
    }
}

fn contest<C: Changeable>(c: &mut Criterion, workload: &Workload<'_>) {
    measure(c, workload, &C::holding(workload.regions()));
}

fn measure<C: Changeable>(c: &mut Criterion, workload: &Workload<'_>, contestant: &C) {
    workload.check(contestant);
    for (case, threads) in [("alone", 0), ("parked", PARKED)] {
        let mut group = c.benchmark_group(format!("publish/{case}"));
        // Two publishes: one that adds and one that takes away.
        group.throughput(Throughput::Elements(2));
        beside_parked(contestant, workload, threads, || {
            group.bench_function(BenchmarkId::new(C::NAME, workload.n()), |b| {
                b.iter(|| {
                    let key = contestant.insert(black_box(workload.one_more()));
                    contestant.remove(key);
                });
            });
        });
        group.finish();
    }
    workload.check(contestant);
}

/// Runs `measure` while `threads` threads are parked, each having looked up
/// once, in the process-wide registry too, and able to go on.
fn beside_parked<C: Changeable>(
    contestant: &C,
    workload: &Workload<'_>,
    threads: usize,
    measure: impl FnOnce(),
) {
    let slice = workload.slices(Case::Hit)[0];
    let ready = Barrier::new(threads + 1);
    let over = Barrier::new(threads + 1);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut ask = contestant.asker();
                black_box((ask(slice), pinned_hosts::is_pinned(slice)));
                ready.wait();
                over.wait();
                black_box(ask(slice));
            });
        }
        ready.wait();
        measure();
        over.wait();
    });
}

/// All regions at once, into a registry that has none.
fn register_all(c: &mut Criterion) {
    let arena = Arena::new(LARGEST);
    let mut group = c.benchmark_group("publish/register_all");
    for n in [1_000, 64_000, 1_000_000] {
        let workload = arena.workload(n);
        group.throughput(Throughput::Elements(n as u64));
        group.bench_function(BenchmarkId::new("Registry", n), |b| {
            b.iter_batched(
                Registry::new,
                |registry| {
                    let regions = black_box(workload.regions());
                    registry.register_all(regions.iter().copied().map(region));
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
    targets = add_and_take_away, register_all
}
criterion_main!(benches);
