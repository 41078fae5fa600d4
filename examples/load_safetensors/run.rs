//! The threads: one for each stream, and those that pin meanwhile.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use cudarc::driver::CudaContext;
use memmap2::Mmap;
use pinned_hosts::cuda::{self, HostRegistration, RegisterError, RegisterOptions};

use crate::args::Args;
use crate::loader::{Copies, Loader};
use crate::progress::Progress;
use crate::scratch;
use crate::support::driver::Driver;
use crate::weights::Weights;

/// What all threads together did.
#[derive(Default)]
pub(crate) struct Totals {
    pub(crate) copies: Copies,
    pub(crate) loads: u64,
    /// Time in loads, without the comparisons.
    pub(crate) elapsed: Duration,
    /// Tensors that differed, in all loads.
    pub(crate) mismatched: u64,
    /// Chunks that were page-locked.
    pub(crate) pins: u64,
    pub(crate) pinning: Pinning,
}

/// What became of the page-locking in the background.
#[derive(Default)]
pub(crate) enum Pinning {
    #[default]
    NotAsked,
    /// In that time.
    Done(Duration),
    /// Again and again.
    Repeated,
    /// The load went on without it.
    Failed(String),
}

type Registration = HostRegistration<Arc<Mmap>>;

/// What a real driver takes to page-lock a MiB, about. The simulated one does
/// it at once, and would be done before the first copy.
const REAL_PACE: Duration = Duration::from_micros(500);
const MIB: f64 = (1 << 20) as f64;

/// Loads `weights` once.
pub(crate) fn once(
    args: &Args,
    driver: &Driver,
    context: &Arc<CudaContext>,
    weights: &Weights,
    progress: &Progress,
) -> anyhow::Result<Totals> {
    let mut loader = Loader::new(context, weights, args.streams, false)?;
    thread::scope(|scope| {
        let pinner = if args.no_pin {
            None
        } else {
            let pin = move || {
                let started = Instant::now();
                let registration = pin(args, context, weights, |pinned_bytes| {
                    progress.pinned(pinned_bytes);
                    // There may be nothing else left to show it.
                    progress.show();
                    if driver.is_simulated() {
                        let due = REAL_PACE.mul_f64(pinned_bytes as f64 / MIB);
                        thread::sleep(due.saturating_sub(started.elapsed()));
                    }
                });
                (registration, started.elapsed())
            };
            Some(spawn(scope, "pinner", pin)?)
        };
        let mut totals = Totals::default();
        load(&mut loader, progress, &mut totals)?;
        // The load is done; what was still to be pinned is pinned after it.
        totals.pinning = match pinner.map(join) {
            None => Pinning::NotAsked,
            Some((Ok(registration), elapsed)) => {
                unpin(registration, progress)?;
                Pinning::Done(elapsed)
            }
            Some((Err(error), _)) => Pinning::Failed(error.to_string()),
        };
        totals.pins = progress.pins();
        totals.copies = loader.copies();
        Ok(totals)
    })
}

/// Loads `weights` again and again for `duration`, while they, and private
/// memory that is copied from too, are pinned and unpinned all the time.
pub(crate) fn repeatedly(
    args: &Args,
    context: &Arc<CudaContext>,
    weights: &Weights,
    progress: &Progress,
    duration: Duration,
) -> anyhow::Result<Totals> {
    let deadline = Instant::now() + duration;
    let mut loader = Loader::new(context, weights, args.streams, true)?;
    let private = &loader.private_regions()?;
    // Relaxed: it says nothing about other memory.
    let stop = &AtomicBool::new(false);
    thread::scope(|scope| {
        // So that no thread goes on if another one fails, or panics.
        let stopping = OnDrop(|| stop.store(true, Ordering::Relaxed));
        let mut pinners = Vec::new();
        if !args.no_pin {
            let pin_weights = move || {
                let _stopping = OnDrop(|| stop.store(true, Ordering::Relaxed));
                loop {
                    let pinned = |pinned_bytes| progress.pinned(pinned_bytes);
                    unpin(pin(args, context, weights, pinned)?, progress)?;
                    if stop.load(Ordering::Relaxed) {
                        return Ok(());
                    }
                }
            };
            pinners.push(spawn(scope, "pinner", pin_weights)?);
            let pin_private = move || {
                let _stopping = OnDrop(|| stop.store(true, Ordering::Relaxed));
                for region in private.iter().cycle() {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    scratch::pin_and_unpin(context, *region)?;
                }
                Ok(())
            };
            pinners.push(spawn(scope, "private pinner", pin_private)?);
        }
        let mut totals = Totals::default();
        loop {
            load(&mut loader, progress, &mut totals)?;
            loader.clear()?;
            if Instant::now() >= deadline || stop.load(Ordering::Relaxed) {
                break;
            }
        }
        drop(stopping);
        if !pinners.is_empty() {
            totals.pinning = Pinning::Repeated;
        }
        for pinner in pinners {
            join::<anyhow::Result<()>>(pinner)?;
        }
        totals.pins = progress.pins();
        totals.copies = loader.copies();
        Ok(totals)
    })
}

fn load(loader: &mut Loader<'_>, progress: &Progress, totals: &mut Totals) -> anyhow::Result<()> {
    totals.elapsed += loader.load(progress)?;
    totals.mismatched += loader.mismatched(progress)?;
    totals.loads += 1;
    progress.loaded();
    Ok(())
}

/// Pins the whole mapping, chunk by chunk, and calls `pinned` after each.
fn pin(
    args: &Args,
    context: &Arc<CudaContext>,
    weights: &Weights,
    mut pinned: impl FnMut(usize),
) -> Result<Registration, RegisterError<Arc<Mmap>>> {
    let mut progress = |reached: cuda::Progress| pinned(reached.pinned_bytes);
    HostRegistration::with_options(
        context,
        Arc::clone(weights.mapping()),
        RegisterOptions::default()
            .chunk_bytes((args.chunk_mib as usize) << 20)
            .progress(&mut progress),
    )
}

fn unpin(registration: Registration, progress: &Progress) -> anyhow::Result<()> {
    registration.unregister()?;
    progress.unpinned();
    Ok(())
}

fn spawn<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    work: impl FnOnce() -> T + Send + 'scope,
) -> anyhow::Result<ScopedJoinHandle<'scope, T>> {
    thread::Builder::new()
        .name(name.to_owned())
        .spawn_scoped(scope, work)
        .context("starting a thread that pins")
}

fn join<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}

/// Calls the function when it is dropped.
struct OnDrop<F: Fn()>(F);

impl<F: Fn()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
