//! A reader looks up all the time while a writer publishes.

use std::hint::{self, black_box};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use crate::lane::Lane;
use crate::rivals::{Bounds, Changeable, Contestant};
use crate::support::results::{Publishing, Rate};
use crate::support::workload::{Case, Workload};
use crate::{Effort, median};

const RATES: [Rate; 4] = [
    Rate::Never,
    Rate::PerSecond(100),
    Rate::PerSecond(10_000),
    Rate::Unlimited,
];

/// Lookups that are timed together: enough that the clock is a small part of
/// their time, and few enough that at 10,000 publishes a second the first
/// lookup after each is in one batch of some hundreds, well within 99.9 %.
const BATCH: usize = 32;

/// What a reader saw in one stint.
pub(crate) struct Beside {
    /// How long each batch took, in nanoseconds.
    batches: Histogram<u64>,
    /// By the writer, in a second.
    publishes: f64,
}

pub(crate) fn measure(lanes: &[Box<dyn Lane + '_>], effort: Effort) -> Vec<Publishing> {
    let mut settings: Vec<(usize, Rate, Vec<Beside>)> = RATES
        .into_iter()
        .flat_map(|rate| (0..lanes.len()).map(move |lane| (lane, rate, Vec::new())))
        .collect();
    for _ in 0..effort.rounds {
        for (lane, rate, stints) in &mut settings {
            stints.push(lanes[*lane].beside_a_writer(*rate, effort.stint));
        }
    }
    settings
        .into_iter()
        .map(|(lane, rate, stints)| summary(lanes[lane].name(), rate, &stints))
        .collect()
}

fn summary(name: &str, rate: Rate, stints: &[Beside]) -> Publishing {
    let middle = |of: &dyn Fn(&Beside) -> f64| median(stints.iter().map(of).collect());
    let quantile = |at| middle(&move |stint| stint.batches.value_at_quantile(at) as f64);
    let max = stints.iter().map(|stint| stint.batches.max()).max();
    Publishing {
        contestant: name.to_owned(),
        rate,
        publishes: middle(&|stint| stint.publishes),
        batch: BATCH,
        median: quantile(0.5),
        p99: quantile(0.99),
        p999: quantile(0.999),
        max: max.unwrap_or(0) as f64,
    }
}

/// Times a reader of `asked` while a writer publishes to `changed`.
pub(crate) fn beside_a_writer<C: Contestant, W: Changeable>(
    asked: &C,
    changed: &W,
    workload: &Workload<'_>,
    rate: Rate,
    stint: Duration,
) -> Beside {
    let slices = workload.slices(Case::Hit);
    let ready = Barrier::new(2);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        // It runs, and looks at the clock, also if it never publishes.
        let writer = scope.spawn(|| {
            ready.wait();
            publish(changed, workload.one_more(), rate, &over)
        });
        let reader = scope.spawn(|| {
            let mut ask = asked.asker();
            black_box(ask(slices[0]));
            ready.wait();
            let batches = time_batches(&slices, &mut ask, stint);
            over.store(true, Ordering::Relaxed);
            batches
        });
        Beside {
            batches: reader.join().expect("no contestant panics"),
            publishes: writer.join().expect("no contestant panics"),
        }
    })
}

fn time_batches(
    slices: &[&[u8]],
    ask: &mut impl FnMut(&[u8]) -> bool,
    stint: Duration,
) -> Histogram<u64> {
    let mut times = Histogram::new(3).expect("three digits are allowed");
    let mut batches = slices.chunks_exact(BATCH).cycle();
    let end = Instant::now() + stint;
    loop {
        let batch = black_box(batches.next().unwrap_or_default());
        let started = Instant::now();
        let hits = batch.iter().filter(|&&slice| ask(slice)).count();
        let ended = Instant::now();
        black_box(hits);
        let nanoseconds = ended.duration_since(started).as_nanos();
        times += u64::try_from(nanoseconds).unwrap_or(u64::MAX);
        if ended >= end {
            return times;
        }
    }
}

/// Adds `region` and takes it away, in turn, at the pace of the clock: a late
/// publish does not put off the next ones. Returns how often, in a second.
fn publish<W: Changeable>(changed: &W, region: Bounds, rate: Rate, over: &AtomicBool) -> f64 {
    let interval = match rate {
        Rate::Never => Duration::MAX,
        Rate::PerSecond(times) => Duration::from_secs(1) / times,
        Rate::Unlimited => Duration::ZERO,
    };
    let started = Instant::now();
    let mut due = started.checked_add(interval);
    let mut standing = None;
    let mut publishes = 0;
    while !over.load(Ordering::Relaxed) {
        if due.is_none_or(|due| Instant::now() < due) {
            hint::spin_loop();
            continue;
        }
        due = due.and_then(|due| due.checked_add(interval));
        standing = match standing {
            None => Some(changed.insert(region)),
            Some(key) => {
                changed.remove(key);
                None
            }
        };
        publishes += 1;
    }
    let elapsed = started.elapsed();
    if let Some(key) = standing {
        changed.remove(key);
    }
    f64::from(publishes) / elapsed.as_secs_f64()
}
