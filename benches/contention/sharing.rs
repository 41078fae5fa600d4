//! Several threads look up in one set, all the time.

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use crate::lane::Lane;
use crate::rivals::Contestant;
use crate::support::results::Sharing;
use crate::support::workload::{Case, Workload};
use crate::{Effort, median};

/// Lookups between two looks at the clock.
const BATCH: usize = 1024;

pub(crate) fn measure(lanes: &[Box<dyn Lane + '_>], effort: Effort) -> Vec<Sharing> {
    let mut settings: Vec<(usize, usize, Vec<f64>)> = thread_counts()
        .flat_map(|threads| (0..lanes.len()).map(move |lane| (lane, threads, Vec::new())))
        .collect();
    for _ in 0..effort.rounds {
        for (lane, threads, costs) in &mut settings {
            costs.push(lanes[*lane].shared_by(*threads, effort.stint));
        }
    }
    settings
        .into_iter()
        .map(|(lane, threads, costs)| Sharing {
            contestant: lanes[lane].name().to_owned(),
            threads,
            nanoseconds: median(costs),
        })
        .collect()
}

/// 1, 2, 4 and so on up to the number of cores, and twice that: more threads
/// than can run at once.
fn thread_counts() -> impl Iterator<Item = usize> {
    let cores = cores();
    let powers = (0..usize::BITS).map(|power| 1 << power);
    powers
        .take_while(move |&threads| threads < cores)
        .chain([cores, 2 * cores])
}

pub(crate) fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// What a lookup costs each thread, in nanoseconds.
pub(crate) fn shared_by<C: Contestant>(
    contestant: &C,
    workload: &Workload<'_>,
    threads: usize,
    stint: Duration,
) -> f64 {
    let slices = workload.slices(Case::Hit);
    let ready = Barrier::new(threads);
    let look_up = || {
        let mut ask = contestant.asker();
        let mut batches = slices.chunks_exact(BATCH).cycle();
        let mut one_batch = || {
            let batch = batches.next().unwrap_or_default();
            let hits = black_box(batch).iter().filter(|&&slice| ask(slice)).count();
            black_box(hits);
        };
        one_batch();
        ready.wait();
        let mut lookups = 0;
        let started = Instant::now();
        loop {
            one_batch();
            lookups += BATCH;
            let elapsed = started.elapsed();
            if elapsed >= stint {
                return elapsed.as_nanos() as f64 / lookups as f64;
            }
        }
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(look_up)).collect();
        let costs: Vec<f64> = threads
            .into_iter()
            .map(|thread| thread.join().expect("no contestant panics"))
            .collect();
        costs.iter().sum::<f64>() / costs.len() as f64
    })
}
