//! Every kind of copy at once, on several streams, while shared memory is
//! pinned and unpinned and other streams capture graphs: whatever the order,
//! nothing is torn, dead, wrong or lost. Over the simulated driver.
//!
//! Short here; `PINNED_HOSTS_SOAK_SECONDS=600 cargo test --test soak` is long.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use common::{Registered, Rig};
use cudarc::driver::CudaSlice;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode as Mode};
use pinned_hosts::cuda::{
    Copier, CopierOptions, CudaError, HostRegistration, PinnedBuffer, PinnedPool, Policy,
    RegisterOptions, checked,
};
use pinned_hosts::live_count;

const THREADS: u64 = 4;
/// More than is staged.
const LARGEST: usize = 12 << 10;
const STAGE_LIMIT: usize = 4 << 10;
const SHARED: usize = 256 << 10;

/// Numbers that look random, the same at each run (xorshift).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 16).unwrap() % end
    }

    /// Often one of the sizes at which something changes.
    fn len(&mut self) -> usize {
        match self.below(8) {
            0 => 0,
            1 => 1,
            2 => STAGE_LIMIT,
            3 => STAGE_LIMIT + 1,
            _ => self.below(LARGEST),
        }
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let first = self.below(256);
        let byte = |at: usize| u8::try_from((first + at) % 251).unwrap();
        (0..len).map(byte).collect()
    }
}

/// What all threads use.
struct Job<'a> {
    rig: &'a Rig,
    pool: PinnedPool<u8>,
    shared: Arc<Vec<u8>>,
    end: Instant,
    operations: AtomicU64,
    /// Whether each copy of borrowed memory is `cudarc`'s own.
    bare: bool,
    wrong: AtomicU64,
}

/// What one thread uses.
struct Worker<'a> {
    job: &'a Job<'a>,
    copier: Copier,
    on_device: CudaSlice<u8>,
    numbers: Numbers,
    table: Arc<PinnedBuffer<u8>>,
}

const KINDS: usize = 12;

impl Worker<'_> {
    fn new<'a>(job: &'a Job<'a>, number: u64) -> Worker<'a> {
        let stream = job.rig.context.new_stream().unwrap();
        let options = CopierOptions::default()
            .stage_limit(STAGE_LIMIT)
            .ring_limit(8 * STAGE_LIMIT);
        Worker {
            job,
            on_device: stream.alloc_zeros(LARGEST).unwrap(),
            copier: Copier::with_options(&stream, options).unwrap(),
            numbers: Numbers(number + 1),
            table: Arc::new(PinnedBuffer::from_slice(&job.rig.context, &[7; 100]).unwrap()),
        }
    }

    fn run(&mut self) {
        // Every kind at least once, however slow the machine.
        for round in 0.. {
            if round >= 4 * KINDS && Instant::now() >= self.job.end {
                break;
            }
            let kind = if round < KINDS {
                round
            } else {
                self.numbers.below(KINDS)
            };
            self.operate(kind);
            self.job.operations.fetch_add(1, Ordering::Relaxed);
        }
        self.copier.stream().synchronize().unwrap();
    }

    /// Counts it if the device does not have `expected`.
    fn check(&mut self, expected: &[u8]) {
        let mut arrived = vec![0; LARGEST];
        self.copier
            .copy_d2h_async(&self.on_device, &mut arrived)
            .unwrap();
        if arrived[..expected.len()] != *expected {
            self.job.wrong.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Copies borrowed memory that is freed or rewritten at once.
    fn copy(&mut self, policy: Policy, source: &[u8]) {
        if self.job.bare {
            // Refused where the source is pinned in part, or as it is pinned.
            let _ = self
                .copier
                .stream()
                .memcpy_htod(source, &mut self.on_device);
            return;
        }
        self.copier
            .copy_h2d_async_with(policy, source, &mut self.on_device)
            .unwrap();
    }

    fn pinned(&mut self, bytes: &[u8]) -> PinnedBuffer<u8> {
        PinnedBuffer::from_slice(&self.job.rig.context, bytes).unwrap()
    }

    fn operate(&mut self, kind: usize) {
        let len = self.numbers.len();
        let mut bytes = self.numbers.bytes(len);
        let expected = bytes.clone();
        match kind {
            0 => {
                self.copy(Policy::Stage, &bytes);
                bytes.fill(255);
                drop(bytes);
            }
            1 | 2 => {
                let policy = [Policy::Stage, Policy::Wait][kind - 1];
                let mut source = self.pinned(&bytes);
                self.copy(policy, &source);
                source.as_mut_slice().unwrap().fill(255);
                drop(source);
            }
            3 => {
                // Of memory that is being pinned and unpinned.
                let shared = Arc::clone(&self.job.shared);
                let start = self.numbers.below(SHARED - LARGEST);
                let source = &shared[start..start + len];
                self.copy(Policy::Stage, source);
                self.check(source);
                return;
            }
            4 => {
                let source = self.pinned(&bytes);
                self.copier
                    .copy_h2d_from(&source, 0..len, &mut self.on_device)
                    .unwrap();
                drop(source);
            }
            5 => {
                let Ok(mut source) = self.job.pool.wait_and_take(len, Duration::from_secs(20))
                else {
                    panic!("the pool is exhausted");
                };
                source.as_mut_slice().unwrap().copy_from_slice(&bytes);
                self.copier
                    .copy_h2d_from(&source, 0..len, &mut self.on_device)
                    .unwrap();
            }
            6 => {
                let stream = Arc::clone(self.copier.stream());
                let on_device = stream.alloc_zeros::<u8>(len.max(1)).unwrap();
                let source = self.pinned(&bytes);
                let transfer = self.copier.upload(source, on_device).unwrap();
                let (buffer, on_device) = transfer.wait().unwrap();
                let empty = self.pinned(&vec![0; len.max(1)]);
                let mut back = self.copier.download(on_device, empty);
                if self.numbers.below(2) == 0 {
                    // Dropped early.
                    drop(back);
                    return;
                }
                let (arrived, _) = loop {
                    match back.unwrap().try_take() {
                        Ok(both) => break both,
                        Err(error) => match error {
                            pinned_hosts::cuda::TransferError::UnderWay { transfer, .. } => {
                                back = Ok(transfer);
                            }
                            error => panic!("{error}"),
                        },
                    }
                };
                if arrived[..len] != buffer[..] {
                    self.job.wrong.fetch_add(1, Ordering::Relaxed);
                }
                return;
            }
            7 => {
                let source = self.pinned(&bytes);
                let mut back = vec![0; len];
                let on_device = &mut self.on_device;
                self.copier
                    .scope(|scope| {
                        scope.copy_h2d(&source, on_device)?;
                        scope.copy_h2d(&bytes, on_device)?;
                        scope.copy_d2h(&on_device.slice(..len), &mut back)
                    })
                    .unwrap();
                if back != expected {
                    self.job.wrong.fetch_add(1, Ordering::Relaxed);
                }
            }
            8 => {
                let mut source = self.pinned(&bytes);
                let stream = Arc::clone(self.copier.stream());
                stream
                    .memcpy_htod(&checked(&source), &mut self.on_device)
                    .unwrap();
                source.as_mut_slice().unwrap().fill(255);
            }
            9 => {
                let source = self.pinned(&bytes);
                let denied =
                    self.copier
                        .copy_h2d_async_with(Policy::Deny, &source, &mut self.on_device);
                let refused = matches!(denied, Err(CudaError::Denied { .. }));
                assert_eq!(refused, len > 0);
                return;
            }
            10 => {
                // To page-locked memory, which is freed at once.
                self.copier
                    .copy_h2d_async(&bytes, &mut self.on_device)
                    .unwrap();
                let mut back = Registered::new(vec![0; len + 1]);
                let part = self.on_device.slice(..len);
                self.copier.copy_d2h_async(&part, &mut back.memory).unwrap();
                if back.memory[..len] != expected {
                    self.job.wrong.fetch_add(1, Ordering::Relaxed);
                }
            }
            _ => {
                self.capture();
                return;
            }
        }
        self.check(&expected);
    }

    /// Captures a copy on a stream of its own, and launches it.
    fn capture(&mut self) {
        let stream = self.job.rig.context.new_stream().unwrap();
        let copier = Copier::new(&stream).unwrap();
        let mut on_device = stream.alloc_zeros::<u8>(100).unwrap();
        stream
            .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_RELAXED)
            .unwrap();
        let captured = copier.capture_h2d_from(&self.table, 0..100, &mut on_device);
        let graph = stream.end_capture(CUgraphInstantiate_flags(0));
        if let (Ok(()), Ok(Some(graph))) = (captured, graph) {
            graph.launch().unwrap();
            let mut arrived = [0; 100];
            copier.copy_d2h_async(&on_device, &mut arrived).unwrap();
            if arrived != [7; 100] {
                self.job.wrong.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// Runs everything for `duration`, and returns the faults.
fn soak(rig: &Rig, duration: Duration, bare: bool) -> u64 {
    let numbers = &mut Numbers(99);
    let job = &Job {
        rig,
        pool: PinnedPool::new(&rig.context, 1 << 20),
        shared: Arc::new(numbers.bytes(SHARED)),
        end: Instant::now() + duration,
        operations: AtomicU64::new(0),
        bare,
        wrong: AtomicU64::new(0),
    };
    let done = &AtomicBool::new(false);
    let panicked = Mutex::new(Vec::new());
    thread::scope(|scope| {
        let pinning = scope.spawn(move || {
            let mut rounds = 0;
            while !done.load(Ordering::Relaxed) || rounds == 0 {
                let options = RegisterOptions::default().chunk_bytes(64 << 10);
                let shared = Arc::clone(&job.shared);
                let registration =
                    HostRegistration::with_options(&rig.context, shared, options).unwrap();
                drop(registration.unregister().unwrap());
                rounds += 1;
            }
        });
        let workers: Vec<_> = (0..THREADS)
            .map(|number| scope.spawn(move || Worker::new(job, number).run()))
            .collect();
        for worker in workers {
            if let Err(panic) = worker.join() {
                panicked.lock().unwrap().push(panic);
            }
        }
        done.store(true, Ordering::Relaxed);
        pinning.join().unwrap();
    });
    assert!(
        panicked.into_inner().unwrap().is_empty(),
        "a thread panicked"
    );
    let counters = rig.counters();
    println!(
        "{} operations, {} late reads, {counters:?}",
        job.operations.load(Ordering::Relaxed),
        counters.late_reads
    );
    let dead = counters.dead_reads + counters.dead_writes;
    counters.torn_transfers + dead + job.wrong.load(Ordering::Relaxed)
}

/// An untracked rig, since captured copies cannot have events.
fn rig() -> Rig {
    let rig = Rig::new();
    // SAFETY: each thread has device memory of its own, on one stream.
    unsafe { rig.context.disable_event_tracking() };
    rig
}

#[test]
fn every_kind_of_copy_at_once_is_sound() {
    let seconds = std::env::var("PINNED_HOSTS_SOAK_SECONDS");
    let seconds = seconds.map_or(2, |seconds| seconds.parse().unwrap());
    let rig = rig();
    let before = (live_count(), rig.counters().live_host_allocations);
    assert_eq!(soak(&rig, Duration::from_secs(seconds), false), 0);
    assert!(rig.counters().late_reads > 0);
    // What graphs have kept is let go of on a thread of the driver's.
    let deadline = Instant::now() + Duration::from_secs(20);
    let now = || (live_count(), rig.sim.counters().live_host_allocations);
    while now() != before && Instant::now() < deadline {
        pinned_hosts::cuda::reclaim_captured();
        thread::yield_now();
    }
    assert_eq!(now(), before, "(registrations, allocations) are lost");
    // SAFETY: as it was before.
    unsafe { rig.context.enable_event_tracking() };
}

/// The same with `cudarc`'s own copies of borrowed memory.
#[test]
fn twin_with_bare_copies_faults_are_seen() {
    let rig = rig();
    assert!(soak(&rig, Duration::from_millis(500), true) > 0);
    // SAFETY: as it was before.
    unsafe { rig.context.enable_event_tracking() };
}
