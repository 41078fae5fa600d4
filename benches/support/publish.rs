//! What the benches `publish` and `publish_parked` share.

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;

use criterion::{BenchmarkId, Criterion, Throughput};

use super::workload::{Arena, Case, Workload};
use crate::rivals::{
    ArcSwapLoad, Changeable, EpochPointer, LeftRight, MutexTree, OwnRegistry, PapayaPages,
    ParkingLot, ProcessWide, SeizePointer, SkipList, StdRwLock, Ucx,
};

/// Above this, the old sets that wait to be freed would fill the memory.
const MOST_DEFERRED: usize = 64_000;

/// Adds one region and takes it away again, beside `threads` parked threads,
/// with every contestant, by how many regions there are already. `sizes` have
/// to grow, because the process-wide registry only can.
pub(crate) fn add_and_take_away(c: &mut Criterion, group: &str, sizes: &[usize], threads: usize) {
    let bench = Bench { group, threads };
    let arena = Arena::new(sizes.iter().copied().max().unwrap_or(0));
    for &n in sizes {
        let workload = arena.workload(n);
        let w = &workload;
        bench.contest::<ProcessWide>(c, w);
        bench.contest::<OwnRegistry>(c, w);
        bench.contest::<StdRwLock>(c, w);
        bench.contest::<ParkingLot>(c, w);
        bench.contest::<MutexTree>(c, w);
        bench.contest::<ArcSwapLoad>(c, w);
        if n <= MOST_DEFERRED {
            bench.contest::<EpochPointer>(c, w);
            bench.contest::<SeizePointer>(c, w);
        }
        bench.contest::<LeftRight>(c, w);
        bench.contest::<PapayaPages>(c, w);
        bench.contest::<SkipList>(c, w);
        match Ucx::load(w.regions()) {
            Ok(ucx) => bench.measure(c, w, &ucx),
            Err(why) => println!("{why}"),
        }
    }
}

struct Bench<'a> {
    group: &'a str,
    threads: usize,
}

impl Bench<'_> {
    fn contest<C: Changeable>(&self, c: &mut Criterion, workload: &Workload<'_>) {
        self.measure(c, workload, &C::holding(workload.regions()));
    }

    fn measure<C: Changeable>(&self, c: &mut Criterion, workload: &Workload<'_>, contestant: &C) {
        workload.check(contestant);
        let mut group = c.benchmark_group(self.group);
        // Two publishes: one that adds and one that takes away.
        group.throughput(Throughput::Elements(2));
        let slice = workload.slices(Case::Hit)[0];
        beside_parked(contestant, slice, self.threads, || {
            group.bench_function(BenchmarkId::new(C::NAME, workload.n()), |b| {
                b.iter(|| {
                    let key = contestant.insert(black_box(workload.one_more()));
                    contestant.remove(key);
                });
            });
        });
        group.finish();
        workload.check(contestant);
    }
}

/// Runs `measure` while `threads` threads are parked, each having looked up
/// once, in the process-wide registry too, and able to go on.
fn beside_parked<C: Changeable>(
    contestant: &C,
    slice: &[u8],
    threads: usize,
    measure: impl FnOnce(),
) {
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
