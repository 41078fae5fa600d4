//! What a lookup costs, beside every other way to keep the same set, and beside
//! the search alone, with no synchronisation at all.
//!
//! All contestants hold the same regions and answer the same question, "does
//! every byte of this slice lie in a region?", for the same slices in the same
//! order. Each is checked before it is timed.

#[allow(dead_code, unused_imports, reason = "each bench uses a part")]
mod rivals;
#[allow(dead_code, unused_imports, reason = "each bench uses a part")]
mod support;

use std::fs;
use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

use rivals::{
    ArcSwapLoad, Contestant, Counted, EmptyLoop, EpochPointer, Eytzinger, Floor, LeftRight,
    MutexTree, OwnReader, OwnRegistry, PapayaPages, ParkingLot, ProcessWide, SeizePointer,
    SkipList, StaticTree, StdRwLock, Ucx,
};
use support::results::ByTurns;
use support::turns::{Lane, by_turns};
use support::workload::{Arena, Case, Workload};

/// They grow, because the process-wide registry only can.
const SIZES: [usize; 8] = [1, 3, 8, 16, 64, 1_000, 64_000, 1_000_000];
/// Above this, to compare every start takes longer than to search.
const MOST_COUNTED: usize = 16;
/// In one iteration. The next one goes on with the next slices.
const BATCH: usize = 1024;

/// Left out of a quick run, but for the contestants that a goal names.
const ONLY_IN_FULL: [usize; 4] = [1, 8, 16, 64_000];

fn lookups(c: &mut Criterion) {
    let hits = &[Case::Hit];
    let all = &Case::MEASURED;
    let arena = Arena::new(SIZES[SIZES.len() - 1]);
    let mut results = Vec::new();
    for n in SIZES {
        let workload = arena.workload(n);
        let w = &workload;
        results.extend(turns(w));
        measure(c, w, &EmptyLoop, all);
        contest::<Floor>(c, w, all);
        contest::<ProcessWide>(c, w, all);
        if n <= MOST_COUNTED {
            contest::<Counted>(c, w, hits);
        }
        contest::<Eytzinger>(c, w, hits);
        contest::<StaticTree>(c, w, hits);
        match Ucx::load(w.regions()) {
            Ok(ucx) => check_and_measure(c, w, &ucx, hits),
            Err(why) => println!("{why}"),
        }
        contest::<StdRwLock>(c, w, all);
        if support::is_quick() && ONLY_IN_FULL.contains(&n) {
            continue;
        }
        contest::<OwnReader>(c, w, hits);
        contest::<OwnRegistry>(c, w, hits);
        contest::<ParkingLot>(c, w, hits);
        contest::<ArcSwapLoad>(c, w, hits);
        contest::<EpochPointer>(c, w, hits);
        contest::<SeizePointer>(c, w, hits);
        contest::<LeftRight>(c, w, hits);
        contest::<PapayaPages>(c, w, hits);
        contest::<SkipList>(c, w, hits);
        contest::<MutexTree>(c, w, hits);
    }
    let directory = support::results::directory();
    let path = directory.join(support::results::BY_TURNS);
    let json = serde_json::to_vec_pretty(&results).expect("plain data");
    if let Err(error) = fs::create_dir_all(&directory).and_then(|()| fs::write(&path, json)) {
        eprintln!("{} was not written: {error}", path.display());
    }
}

/// The contestants that the goals name, by turns.
fn turns(w: &Workload<'_>) -> Vec<ByTurns> {
    let rounds = match (support::is_quick(), w.n()) {
        (true, _) => 10,
        (false, ..10_000) => 300,
        (false, _) => 40,
    };
    let ours = ProcessWide::holding(w.regions());
    let floor = Floor::holding(w.regions());
    let counted = Counted::holding(w.regions());
    let eytzinger = Eytzinger::holding(w.regions());
    let tree = StaticTree::holding(w.regions());
    let lock = StdRwLock::holding(w.regions());
    let ucx = Ucx::load(w.regions()).ok();
    let mut results = Vec::new();
    for case in [Case::Hit, Case::MissFar] {
        // Ours first: the ratios that count are those to it.
        let mut lanes = vec![
            Lane::of(&ours),
            Lane::of(&EmptyLoop),
            Lane::of(&floor),
            Lane::of(&eytzinger),
            Lane::of(&tree),
            Lane::of(&lock),
        ];
        if w.n() <= MOST_COUNTED {
            lanes.push(Lane::of(&counted));
        }
        lanes.extend(ucx.as_ref().map(Lane::of));
        results.extend(by_turns(w, case, &mut lanes, rounds));
    }
    results
}

fn contest<C: Contestant>(c: &mut Criterion, workload: &Workload<'_>, cases: &[Case]) {
    check_and_measure(c, workload, &C::holding(workload.regions()), cases);
}

fn check_and_measure<C: Contestant>(
    c: &mut Criterion,
    workload: &Workload<'_>,
    contestant: &C,
    cases: &[Case],
) {
    workload.check(contestant);
    measure(c, workload, contestant, cases);
}

fn measure<C: Contestant>(
    c: &mut Criterion,
    workload: &Workload<'_>,
    contestant: &C,
    cases: &[Case],
) {
    for &case in cases {
        let slices = workload.slices(case);
        let mut batches = slices.chunks_exact(BATCH).cycle();
        let mut ask = contestant.asker();
        let mut group = c.benchmark_group(format!("lookup/{}", case.name()));
        group.throughput(Throughput::Elements(BATCH as u64));
        group.bench_function(BenchmarkId::new(C::NAME, workload.n()), |b| {
            b.iter(|| {
                let batch = batches.next().unwrap_or_default();
                let mut hits = 0;
                for &slice in black_box(batch) {
                    hits += usize::from(ask(slice));
                }
                hits
            });
        });
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = support::criterion();
    targets = lookups
}
criterion_main!(benches);
