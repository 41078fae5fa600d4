//! One file mapping, copied from by several threads while others page-lock and
//! unpin it, and the private memory of those threads, over and over. Over the
//! simulated driver, which counts transfers that read memory too late.
//!
//! An ordinary test run goes on until there were copies of each kind.
//! `PINNED_HOSTS_LIVE_SECONDS=30` makes it 8 threads and a mapping of 256 MB,
//! for at least so long.
//!
//! In a build with `RUSTFLAGS="--cfg pinned_hosts_faults"` it can be made
//! without what makes it sound. `PINNED_HOSTS_MUTANT` names the fault
//! (`src/sync.rs` lists them), and then the long form goes on until it has seen
//! what comes of it. The other faults of pinning need a driver that fails, and
//! are left to the models.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::env;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::Rig;
use cudarc::driver::sys;
use cudarc::driver::{CudaContext, CudaSlice};
use memmap2::{Mmap, MmapMut};
use pinned_hosts::cuda::{Copier, CopyStats, HostRegistration, Policy, RegisterOptions};
use pinned_hosts::{Region, global};

const LARGEST_COPY: usize = 64 << 10;
/// How many copies a thread makes before it looks at what arrived. Only that
/// makes the device read what it has not read yet.
const BATCH: usize = 8;
const READ_ONLY_SUPPORTED: i32 = 113;

/// How much a run does at once, and for how long.
#[derive(Debug)]
struct Form {
    copying_threads: usize,
    mapping_bytes: usize,
    chunk_bytes: usize,
    until: Until,
}

#[derive(Debug)]
enum Until {
    /// Until there were copies of each kind, which takes some tens of rounds.
    EachKind { most_rounds: u64 },
    /// For so long.
    Passed(Duration),
    /// Until there was a fault.
    Fault { most_rounds: u64 },
}

impl Form {
    const LONG: Self = Self {
        copying_threads: 8,
        mapping_bytes: 256 << 20,
        chunk_bytes: 4 << 20,
        until: Until::Passed(Duration::ZERO),
    };

    fn asked_for() -> Self {
        if let Ok(seconds) = env::var("PINNED_HOSTS_LIVE_SECONDS") {
            let seconds = seconds.parse().expect("a number of seconds");
            return Self {
                until: Until::Passed(Duration::from_secs(seconds)),
                ..Self::LONG
            };
        }
        Self {
            copying_threads: 4,
            mapping_bytes: 4 << 20,
            chunk_bytes: 1 << 20,
            until: Until::EachKind { most_rounds: 400 },
        }
    }
}

/// What the threads count.
#[derive(Debug, Default)]
struct Tally {
    /// How often the private memory of a thread was pinned and unpinned.
    private_pins: AtomicU64,
    /// Copies from private memory.
    private: AtomicU64,
    /// Copies that the driver refused.
    failed: AtomicU64,
    /// Copies of which something else arrived than was copied.
    differing: AtomicU64,
}

/// How a run ended.
#[derive(Debug)]
struct Outcome {
    /// How often the whole mapping was pinned and unpinned.
    rounds: u64,
    private_pins: u64,
    elapsed: Duration,
    kinds: Kinds,
    private_copies: u64,
    failed_copies: u64,
    differing_copies: u64,
    late_reads: u64,
    torn_transfers: u64,
    dead_reads: u64,
}

impl Outcome {
    /// Copies for which the device read memory that it should not have read.
    /// (A copy that the driver refused did no harm.)
    fn faults(&self) -> u64 {
        self.torn_transfers + self.dead_reads + self.differing_copies
    }
}

/// Copies of the mapping, by what was done about their source.
#[derive(Debug)]
struct Kinds {
    /// The driver staged it.
    pageable: u64,
    /// The staging ring was used.
    staged: u64,
    /// The device read it, and was waited for,
    guarded: u64,
    /// some of them in parts, on either side of a boundary.
    split: u64,
    /// It was about to be unpinned, and other memory was used.
    bounced: u64,
}

impl Kinds {
    fn of(copiers: &[Copier]) -> Self {
        let sum = |count: fn(&CopyStats) -> u64| copiers.iter().map(|it| count(&it.stats())).sum();
        Self {
            pageable: sum(|stats| stats.pageable),
            staged: sum(|stats| stats.staged),
            guarded: sum(|stats| stats.guarded),
            split: sum(|stats| stats.split),
            bounced: sum(|stats| stats.bounced),
        }
    }

    /// How many there are of the rarest.
    fn least(&self) -> u64 {
        let Self {
            pageable,
            staged,
            guarded,
            split,
            bounced,
        } = *self;
        [pageable, staged, guarded, split, bounced]
            .into_iter()
            .min()
            .unwrap_or(0)
    }
}

/// A file in which no two places read alike.
fn mapped_file(bytes: usize) -> Arc<Mmap> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(bytes as u64).unwrap();
    // SAFETY: nobody else has the file.
    let mut mapping = unsafe { MmapMut::map_mut(&file) }.unwrap();
    for (number, word) in (1_u64..).zip(mapping.chunks_exact_mut(8)) {
        word.copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_ne_bytes());
    }
    Arc::new(mapping.make_read_only().unwrap())
}

/// Memory of one thread, that is never freed: another one page-locks it.
fn private_memory() -> (&'static mut [u8], Region) {
    let memory = vec![0; LARGEST_COPY].leak();
    let region = Region::of(memory).unwrap();
    (memory, region)
}

/// Xorshift.
fn random(seed: &mut u64) -> usize {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    usize::try_from(*seed >> 16).unwrap()
}

/// Copies slices of `shared` through `copier`, and copies of them in `private`,
/// which is rewritten at once, through another, and compares what arrives,
/// until told to stop.
fn copy_until(
    stop: &AtomicBool,
    tally: &Tally,
    copier: &Copier,
    shared: &[u8],
    private: &mut [u8],
    mut seed: u64,
) {
    let stream = copier.stream();
    let private_copier = common::waiting_copier(stream);
    let mut on_device: Vec<CudaSlice<u8>> = (0..BATCH)
        .map(|_| stream.alloc_zeros(LARGEST_COPY).unwrap())
        .collect();
    // Relaxed, all here: they say nothing about other memory.
    while !stop.load(Ordering::Relaxed) {
        let mut sources: Vec<Option<&[u8]>> = Vec::with_capacity(BATCH);
        for target in &mut on_device {
            let len = 1 + random(&mut seed) % LARGEST_COPY;
            let start = random(&mut seed) % (shared.len() - len);
            let source = &shared[start..start + len];
            let copied = match random(&mut seed) % 4 {
                0 => {
                    let private = &mut private[..len];
                    private.copy_from_slice(source);
                    let copied = private_copier.copy_h2d_async(private, target);
                    private.fill(0xff);
                    tally.private.fetch_add(1, Ordering::Relaxed);
                    copied
                }
                1 => copier.copy_h2d_async_with(Policy::Stage, source, target),
                _ => copier.copy_h2d_async(source, target),
            };
            if copied.is_err() {
                tally.failed.fetch_add(1, Ordering::Relaxed);
            }
            sources.push(copied.is_ok().then_some(source));
        }
        for (source, target) in sources.into_iter().zip(&on_device) {
            let Some(source) = source else {
                continue;
            };
            let arrived = stream.clone_dtoh(&target.slice(..source.len())).unwrap();
            if arrived != source {
                tally.differing.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// Pins and unpins the whole mapping, chunk by chunk.
fn pin_and_unpin(context: &Arc<CudaContext>, shared: &Arc<Mmap>, chunk_bytes: usize) {
    let options = RegisterOptions::default().chunk_bytes(chunk_bytes);
    let registration =
        HostRegistration::with_options(context, Arc::clone(shared), options).unwrap();
    assert_eq!(
        registration.chunks().len(),
        shared.len().div_ceil(chunk_bytes)
    );
    registration.unregister().unwrap();
}

/// Pins and unpins memory that its owner goes on rewriting, through driver
/// calls of its own, as a [`HostRegistration`] does not.
fn pin_and_unpin_private(context: &CudaContext, region: Region) {
    context.bind_to_thread().unwrap();
    let (base, len) = (region.base().cast_mut().cast(), region.len());
    let pin = || {
        // SAFETY: the memory is never freed.
        unsafe { sys::cuMemHostRegister_v2(base, len, 1) }.result()
    };
    let unpin = || {
        // SAFETY: page-locked by `pin`.
        unsafe { sys::cuMemHostUnregister(base) }.result()
    };
    let registration = global().pin_with(region, pin).unwrap();
    registration.unpin_with(unpin).unwrap();
}

/// Tells the other threads to stop, after a panic too.
struct StopAtTheEnd<'a>(&'a AtomicBool);

impl Drop for StopAtTheEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn run(rig: &Rig, form: &Form) -> Outcome {
    let context = &rig.context;
    let shared = &mapped_file(form.mapping_bytes);
    let (memory, regions): (Vec<_>, Vec<_>) =
        (0..form.copying_threads).map(|_| private_memory()).unzip();
    let copiers: &Vec<Copier> = &(0..form.copying_threads)
        .map(|_| common::waiting_copier(&context.new_stream().unwrap()))
        .collect();
    let (stop, tally) = (&AtomicBool::new(false), &Tally::default());
    let outcome = |rounds, elapsed| {
        let counters = rig.sim.counters();
        Outcome {
            rounds,
            private_pins: tally.private_pins.load(Ordering::Relaxed),
            elapsed,
            kinds: Kinds::of(copiers),
            private_copies: tally.private.load(Ordering::Relaxed),
            failed_copies: tally.failed.load(Ordering::Relaxed),
            differing_copies: tally.differing.load(Ordering::Relaxed),
            late_reads: counters.late_reads,
            torn_transfers: counters.torn_transfers,
            dead_reads: counters.dead_reads,
        }
    };
    let started = Instant::now();
    let mut rounds = 0;
    thread::scope(|scope| {
        let _stop = StopAtTheEnd(stop);
        for ((copier, private), seed) in copiers.iter().zip(memory).zip(1..) {
            scope.spawn(move || copy_until(stop, tally, copier, shared, private, seed));
        }
        scope.spawn(|| {
            for &region in regions.iter().cycle() {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                pin_and_unpin_private(context, region);
                tally.private_pins.fetch_add(1, Ordering::Relaxed);
            }
        });
        loop {
            pin_and_unpin(context, shared, form.chunk_bytes);
            rounds += 1;
            let sofar = outcome(rounds, started.elapsed());
            let is_over = match form.until {
                Until::EachKind { most_rounds } => {
                    rounds >= most_rounds || (rounds >= 10 && sofar.kinds.least() >= 5)
                }
                Until::Passed(duration) => sofar.elapsed >= duration,
                Until::Fault { most_rounds } => rounds >= most_rounds || sofar.faults() > 0,
            };
            if is_over {
                break;
            }
        }
    });
    rig.sim.drain();
    outcome(rounds, started.elapsed())
}

/// The fault that this run is to be made with.
fn mutant() -> Option<String> {
    let name = env::var("PINNED_HOSTS_MUTANT").ok()?;
    if cfg!(not(pinned_hosts_faults)) {
        panic!("{name}: to have faults, build with RUSTFLAGS=\"--cfg pinned_hosts_faults\"");
    }
    Some(name)
}

#[test]
fn copies_are_sound_while_their_source_is_pinned_and_unpinned() {
    let rig = Rig::with(|sim| sim.set_attribute(READ_ONLY_SUPPORTED, 1));
    if let Some(mutant) = mutant() {
        let form = Form {
            // Mostly one or two are enough, and without a grace period before
            // pinning, which is the rarest to be seen, some tens.
            until: Until::Fault { most_rounds: 300 },
            ..Form::LONG
        };
        let outcome = run(&rig, &form);
        println!("{mutant}: {outcome:#?}");
        assert!(
            outcome.faults() > 0,
            "{mutant} survived {} rounds",
            outcome.rounds
        );
        return;
    }
    let outcome = run(&rig, &Form::asked_for());
    println!("{outcome:#?}");
    assert_eq!(outcome.faults(), 0, "{outcome:#?}");
    assert_eq!(outcome.failed_copies, 0, "{outcome:#?}");
    assert!(outcome.kinds.least() > 0, "{outcome:#?}");
    assert!(outcome.private_copies > 0, "{outcome:#?}");
    assert!(outcome.private_pins > 0, "{outcome:#?}");
    assert!(outcome.late_reads > 0, "{outcome:#?}");
}

/// One copy, held in place. Left out of a build with faults, which is for the
/// run above: with one in, some of these would fail.
#[cfg(not(pinned_hosts_faults))]
mod one_copy {
    use std::sync::{Arc, Barrier};
    use std::thread;
    use std::time::Duration;

    use cudarc::driver::sys::{self, CUresult};
    use pinned_hosts::cuda::{HostRegistration, RegisterFailure, RegisterOptions};
    use pinned_hosts::{GraceError, Region, Residency, global, residency};

    use crate::common::Rig;

    /// A copy is caught between its lookup and its call, while another thread
    /// pins its source and then unpins it.
    #[test]
    fn twin_without_a_grace_period_a_copy_reads_dead_memory() {
        let rig = Rig::new();
        let source: Arc<[u8]> = vec![7; 4096].into();
        let (looked_up, go_on) = (Barrier::new(2), Barrier::new(2));
        let mut on_device = rig.zeros::<u8>(4096);
        thread::scope(|scope| {
            let copying = scope.spawn(|| {
                // A checked copy, in no section.
                assert_eq!(residency(&source), Residency::Pageable);
                looked_up.wait();
                go_on.wait();
                rig.stream.memcpy_htod(&*source, &mut on_device).unwrap();
            });
            looked_up.wait();
            let registration = global().register(Region::of(&source).unwrap());
            let base = source.as_ptr().cast_mut().cast();
            // SAFETY: the memory outlives its registration.
            let pinned = unsafe { sys::cuMemHostRegister_v2(base, source.len(), 1) };
            assert_eq!(pinned, CUresult::CUDA_SUCCESS);
            go_on.wait();
            copying.join().unwrap();
            // SAFETY: unsound on purpose, but the simulated driver only counts.
            let unpinned = unsafe { sys::cuMemHostUnregister(base) };
            assert_eq!(unpinned, CUresult::CUDA_SUCCESS);
            registration.unregister();
        });
        assert_eq!(rig.counters().dead_reads, 1);
    }

    #[test]
    fn with_it_the_driver_is_called_once_the_copy_is_over() {
        let rig = Rig::new();
        let source: Arc<[u8]> = vec![7; 4096].into();
        let (looked_up, go_on) = (Barrier::new(2), Barrier::new(2));
        let mut on_device = rig.zeros::<u8>(4096);
        thread::scope(|scope| {
            let copying = scope.spawn(|| {
                let section = global().enter();
                assert_eq!(section.residency(&source), Residency::Pageable);
                looked_up.wait();
                go_on.wait();
                rig.stream.memcpy_htod(&*source, &mut on_device).unwrap();
            });
            looked_up.wait();
            // The copy does not end before it is let go on, so no limit is
            // long enough.
            let options = RegisterOptions::default().grace_limit(Duration::from_millis(1));
            let pinned = HostRegistration::with_options(&rig.context, Arc::clone(&source), options);
            let driver_calls = rig.sim.calls("cuMemHostRegister_v2");
            go_on.wait();
            copying.join().unwrap();
            // Asserted only now: before, a failure would leave the copy waiting.
            let reason = pinned.unwrap_err().reason;
            assert!(
                matches!(reason, RegisterFailure::Grace(GraceError::TimedOut { .. })),
                "{reason:?}"
            );
            assert_eq!(driver_calls, 0);
        });
        assert_eq!(rig.counters().staged_copies, 1);

        let registration = HostRegistration::new(&rig.context, source).unwrap();
        assert_eq!(rig.sim.calls("cuMemHostRegister_v2"), 1);
        registration.unregister().unwrap();
        rig.assert_sound();
    }
}
