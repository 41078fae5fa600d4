//! The threads: one per stream, and one that pins and unpins.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use cudarc::driver::CudaContext;
use pinned_hosts::cuda::Policy;

use crate::measure::{Probe, Times};
use crate::mirror::Checks;
use crate::path::{CopyPath, Counts};
use crate::pinner::pin_and_unpin;
use crate::progress::Progress;
use crate::step::{ROUND, Server, Shared};
use crate::support::driver::Driver;

/// How often the progress is shown.
const TICK: Duration = Duration::from_millis(50);

/// What all threads together did.
pub(crate) struct Totals {
    pub(crate) counts: Counts,
    pub(crate) checks: Checks,
    pub(crate) times: Times,
    pub(crate) steps: u64,
    pub(crate) pins: u64,
    pub(crate) elapsed: Duration,
    /// Whether a stream had to go on past the time asked for.
    pub(crate) lengthened: bool,
}

/// What the threads tell each other. All accesses are relaxed: results are
/// handed over by joining the threads.
struct Board {
    deadline: Instant,
    /// Some thread failed: the others need not go on.
    failed: AtomicBool,
    /// All streams are done.
    streams_done: AtomicBool,
    copies: AtomicU64,
}

/// Runs the job for `duration`.
pub(crate) fn run<P: CopyPath>(
    driver: &Driver,
    context: &Arc<CudaContext>,
    policy: Policy,
    streams: u16,
    duration: Duration,
    progress: &Progress,
) -> anyhow::Result<Totals> {
    let shared = &Shared::<P>::new(context, policy)?;
    let started = Instant::now();
    let board = &Board {
        deadline: started + duration,
        failed: AtomicBool::new(false),
        streams_done: AtomicBool::new(false),
        copies: AtomicU64::new(0),
    };
    thread::scope(|scope| {
        let pinner = thread::Builder::new()
            .name("pinner".to_owned())
            .spawn_scoped(scope, move || {
                board.noting_failure(|| pin_and_unpin::<P::Pinned>(context, &board.streams_done))
            })
            .context("starting the pinning thread");
        let servers: Vec<_> = (0..streams)
            .map(|number| {
                thread::Builder::new()
                    .name(format!("stream {number}"))
                    .spawn_scoped(scope, move || {
                        board.noting_failure(|| serve(shared, board, number))
                    })
                    .context("starting a stream's thread; try fewer --streams")
            })
            .collect();
        if pinner.is_err() || servers.iter().any(Result::is_err) {
            board.failed.store(true, Ordering::Relaxed);
        }
        while servers.iter().flatten().any(|server| !server.is_finished()) {
            progress.show(
                started.elapsed().min(duration),
                board.copies.load(Ordering::Relaxed),
                driver.counters().map(|counters| counters.torn_transfers),
            );
            thread::sleep(TICK);
        }
        let elapsed = started.elapsed();
        board.streams_done.store(true, Ordering::Relaxed);

        let mut totals = Totals {
            counts: Counts::default(),
            checks: Checks::default(),
            times: Times::new()?,
            steps: 0,
            pins: 0,
            elapsed,
            lengthened: false,
        };
        for server in servers {
            totals.add(&join(server?, "a stream's thread")?)?;
        }
        totals.pins += join(pinner?, "the pinning thread")?;
        Ok(totals)
    })
}

impl Board {
    /// Sets `failed` if `work` fails or panics.
    fn noting_failure<T>(&self, work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
        // Nothing that a panic may have left half done is looked at again:
        // the run is over.
        let result = catch_unwind(AssertUnwindSafe(work))
            .unwrap_or_else(|_| Err(anyhow!("a panic; its message is above")));
        if result.is_err() {
            self.failed.store(true, Ordering::Relaxed);
        }
        result
    }
}

/// What one stream's thread did.
struct Served {
    counts: Counts,
    checks: Checks,
    times: Times,
    steps: u64,
    pins: u64,
    lengthened: bool,
}

/// The life of one stream's thread.
fn serve<P: CopyPath>(shared: &Shared<P>, board: &Board, number: u16) -> anyhow::Result<Served> {
    let stream = shared.context.new_stream().context("making a stream")?;
    let mut server = Server::new(shared, &stream, number)?;
    let mut probe = Probe::new(&shared.context, &stream)?;
    let mut reported = 0;
    let mut lengthened = false;
    while !board.failed.load(Ordering::Relaxed) {
        if Instant::now() >= board.deadline {
            // At least one round, so that each kind of copy was made however
            // short the run and slow the machine.
            if server.steps() >= ROUND {
                break;
            }
            lengthened = true;
        }
        server.step()?;
        probe.sample()?;
        let copies = server.counts().copies();
        board.copies.fetch_add(copies - reported, Ordering::Relaxed);
        reported = copies;
    }
    stream.synchronize().context("waiting for a stream")?;
    Ok(Served {
        counts: server.counts(),
        checks: server.checks(),
        times: probe.times,
        steps: server.steps(),
        pins: server.pins(),
        lengthened,
    })
}

impl Totals {
    fn add(&mut self, served: &Served) -> anyhow::Result<()> {
        self.counts.add(&served.counts);
        self.checks.add(served.checks);
        self.steps += served.steps;
        self.pins += served.pins;
        self.lengthened |= served.lengthened;
        self.times.add(&served.times)
    }
}

fn join<T>(thread: ScopedJoinHandle<'_, anyhow::Result<T>>, who: &str) -> anyhow::Result<T> {
    match thread.join() {
        Ok(result) => result.with_context(|| format!("in {who}")),
        Err(_) => Err(anyhow!("{who} panicked")),
    }
}
