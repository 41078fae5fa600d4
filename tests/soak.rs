//! A server that uses everything at once: threads with a stream each make
//! every kind of copy, in random order and of random sizes, from memory that
//! they rewrite or free right after each call, and share a pool and a file
//! mapping; one more thread page-locks and unpins that mapping meanwhile, and
//! one captures graphs. Now and then an error is stored in the context. Over
//! the simulated driver, which counts transfers that read memory too late;
//! what arrived is compared with what was copied besides.
//!
//! An ordinary test run makes a number of operations.
//! `PINNED_HOSTS_SOAK_SECONDS=60` makes it go on for at least so long.
//!
//! The same run with one kind of copy replaced by `cudarc`'s own has to be
//! seen to fail.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::env;
use std::future::{Future, IntoFuture};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use common::Rig;
use cuda_sim::{Counters, DeviceKind, Pageable};
use cudarc::driver::sys::{self, CUresult, CUstreamCaptureMode as Mode};
use cudarc::driver::{CudaSlice, CudaStream, DriverError, result};
use memmap2::{Mmap, MmapMut};
use pinned_hosts::cuda::{
    CheckedCopies, Copier, CopierOptions, CopyStats, CudaError, HostRegistration, PinnedBuffer,
    PinnedPool, Policy, PoolStats, RegisterOptions, Transfer, TransferError,
};
use pinned_hosts::live_count;

/// The largest source that is staged, and the largest of all.
const STAGED: usize = 4096;
const LARGEST: usize = 8 * STAGED;
const NOISE: usize = 16 * LARGEST;
/// Bytes of a chunk of the mapping, so that some copies lie across two.
const CHUNK: usize = 2 * LARGEST;
/// Copies that a thread makes before it looks at what arrived. Only that makes
/// the device read what it has not read yet.
const BATCH: usize = 8;
/// One operation in so many stores an error first.
const STORES: usize = 64;
/// What is stored: nothing else in a run returns it.
const STORED: CUresult = CUresult::CUDA_ERROR_NOT_PERMITTED;
/// What memory is full of right after the device has written it.
const LEFT: u8 = 0x55;
const READ_ONLY_SUPPORTED: i32 = 113;

/// What a thread does with one place on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    /// A vector that is freed right after the call.
    Freed,
    /// Memory that is rewritten right after the call.
    Rewritten,
    /// The same, page-locked: it is staged if it is small,
    Staged,
    /// waited for,
    Waited,
    /// or refused.
    Denied,
    /// Page-locked memory that is freed right after the call.
    FreedPinned,
    /// The mapping, which may be pageable, page-locked in parts, or retiring.
    Shared,
    /// Memory that this thread page-locks where it is, and unpins again.
    Registered,
    /// A buffer of its own, without a wait before it is written again.
    Owned,
    Upload,
    Pooled,
    Checked,
    /// Several sources at once, and back again.
    Scope,
    /// Back to pageable memory,
    Back,
    /// to page-locked memory,
    BackPinned,
    /// and to a buffer that is handed over.
    Download,
}

const OPERATIONS: [Operation; 16] = [
    Operation::Freed,
    Operation::Rewritten,
    Operation::Staged,
    Operation::Waited,
    Operation::Denied,
    Operation::FreedPinned,
    Operation::Shared,
    Operation::Registered,
    Operation::Owned,
    Operation::Upload,
    Operation::Pooled,
    Operation::Checked,
    Operation::Scope,
    Operation::Back,
    Operation::BackPinned,
    Operation::Download,
];

/// Which operation is made with `cudarc` alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bare {
    Nothing,
    Staged,
    BackPinned,
}

/// How long a thread goes on.
#[derive(Clone, Copy, Debug)]
enum Until {
    Operations(u64),
    Passed(Duration),
}

impl Until {
    fn asked_for(operations: u64) -> Self {
        match env::var("PINNED_HOSTS_SOAK_SECONDS") {
            Ok(seconds) => {
                let seconds = seconds.parse().expect("a number of seconds");
                Self::Passed(Duration::from_secs(seconds))
            }
            Err(_) => Self::Operations(operations),
        }
    }
}

#[derive(Debug)]
struct Form {
    kind: DeviceKind,
    threads: u64,
    until: Until,
    bare: Bare,
}

/// What the threads count. Relaxed throughout: a count says nothing about
/// other memory, and is read when the threads are gone.
#[derive(Debug, Default)]
struct Tally {
    /// Operations that came to their end, by kind.
    done: [AtomicU64; OPERATIONS.len()],
    /// Operations that a stored error kept from being made.
    refused: AtomicU64,
    /// Operations that found the pool exhausted.
    exhausted: AtomicU64,
    /// Operations that ended with any other error, and the first of those.
    failed: AtomicU64,
    first_failure: Mutex<Option<String>>,
    /// Copies of which something else arrived than was copied.
    wrong: AtomicU64,
    /// Host memory that was written after the call that copied to it.
    clobbered: AtomicU64,
    /// How often the mapping was page-locked and unpinned.
    pins: AtomicU64,
    /// Graphs that were captured, and captures that something spoilt.
    graphs: AtomicU64,
    spoilt: AtomicU64,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

fn read(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// What all threads have.
struct Shared<'a> {
    stage: &'a Rig,
    bare: Bare,
    until: Until,
    started: Instant,
    noise: &'a [u8],
    mapping: &'a Arc<Mmap>,
    pool: &'a PinnedPool<u8>,
    tally: &'a Tally,
    stats: Mutex<Vec<CopyStats>>,
    /// How many threads still make operations. The others go on until none
    /// does.
    working: AtomicUsize,
}

/// Says that a thread has ended, after a panic too.
struct Working<'a>(&'a AtomicUsize);

impl Drop for Working<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Shared<'_> {
    fn is_over(&self, operations: u64) -> bool {
        match self.until {
            Until::Operations(most) => operations >= most,
            Until::Passed(time) => self.started.elapsed() >= time,
        }
    }

    /// Notes why an operation was not made.
    fn note(&self, operation: Operation, error: &CudaError) {
        let tally = self.tally;
        match error {
            CudaError::Stored { source } | CudaError::Driver { source, .. }
                if source.0 == STORED =>
            {
                count(&tally.refused);
            }
            CudaError::PoolExhausted { .. } => count(&tally.exhausted),
            _ => {
                count(&tally.failed);
                let mut first = tally.first_failure.lock().unwrap();
                first.get_or_insert_with(|| format!("{operation:?}: {error}"));
            }
        }
    }
}

/// A thread with a stream.
struct Worker<'a> {
    shared: &'a Shared<'a>,
    stream: Arc<CudaStream>,
    copier: Copier,
    waiting: Copier,
    /// Borrowed to copy from, and rewritten at once.
    pageable: Vec<u8>,
    pinned: PinnedBuffer<u8>,
    /// Copied from as what it is.
    owned: PinnedBuffer<u8>,
    /// Copied to, and [`LEFT`] in between.
    landing: PinnedBuffer<u8>,
    /// What was copied to since the last look, to be [`LEFT`] until then.
    kept: Vec<Vec<u8>>,
    seed: u64,
}

impl<'a> Worker<'a> {
    fn new(shared: &'a Shared<'a>, seed: u64) -> Self {
        let context = &shared.stage.context;
        let stream = loop {
            if let Ok(stream) = context.new_stream() {
                break stream;
            }
        };
        // Room for two sources, so that the ring comes round all the time.
        let options = CopierOptions::default()
            .stage_limit(STAGED)
            .ring_limit(2 * STAGED);
        let of = |options| Copier::with_options(&stream, options).unwrap();
        let buffer = |value| PinnedBuffer::from_slice(context, &[value; LARGEST]).unwrap();
        Self {
            shared,
            copier: of(options),
            waiting: of(options.policy(Policy::Wait)),
            pageable: vec![0; LARGEST],
            pinned: buffer(0),
            owned: buffer(0),
            landing: buffer(LEFT),
            kept: Vec::new(),
            stream,
            seed,
        }
    }

    /// Xorshift.
    fn random(&mut self) -> usize {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        usize::try_from(self.seed >> 16).unwrap()
    }

    fn len(&mut self) -> usize {
        let random = self.random();
        match self.random() % 8 {
            0 => random % 2,
            1 => (random % 64) | 1,
            2 => STAGED - 1 + random % 3,
            3 => (random % LARGEST) | 1,
            4 => LARGEST,
            _ => random % STAGED,
        }
    }

    /// Bytes that no other source is likely to have.
    fn noise(&mut self) -> &'a [u8] {
        let len = self.len();
        &self.shared.noise[self.random() % (NOISE - LARGEST)..][..len]
    }

    fn policy(&mut self) -> Policy {
        [Policy::Stage, Policy::Wait][self.random() % 2]
    }

    fn run(&mut self) {
        let _working = Working(&self.shared.working);
        let mut places: Vec<CudaSlice<u8>> = (0..BATCH)
            .map(|_| again(|| self.stream.alloc_zeros(LARGEST)).unwrap())
            .collect();
        let mut operations = 0;
        while !self.shared.is_over(operations) {
            let mut copied = Vec::with_capacity(BATCH);
            for place in &mut places {
                if self.random().is_multiple_of(STORES) {
                    let context = self.stream.context();
                    context.record_err(Err::<(), _>(DriverError(STORED)));
                }
                let operation = OPERATIONS[self.random() % OPERATIONS.len()];
                match self.operate(operation, place) {
                    Ok(source) => {
                        count(&self.shared.tally.done[operation as usize]);
                        copied.push(source);
                    }
                    Err(error) => {
                        self.shared.note(operation, &error);
                        copied.push(&[]);
                    }
                }
                operations += 1;
            }
            for (source, place) in copied.into_iter().zip(&places) {
                self.look_at(source, place);
            }
            let tally = self.shared.tally;
            for kept in self.kept.drain(..) {
                if kept.iter().any(|byte| *byte != LEFT) {
                    count(&tally.clobbered);
                }
            }
        }
        let stats = [self.copier.stats(), self.waiting.stats()];
        self.shared.stats.lock().unwrap().extend(stats);
    }

    fn look_at(&self, source: &[u8], place: &CudaSlice<u8>) {
        if source.is_empty() {
            return;
        }
        let place = place.slice(..source.len());
        let arrived = again(|| self.stream.clone_dtoh(&place)).unwrap();
        self.compare(&arrived, source);
    }

    fn compare(&self, arrived: &[u8], source: &[u8]) {
        if arrived != source {
            count(&self.shared.tally.wrong);
        }
    }

    /// The bytes that are to be on the device now, from the beginning of
    /// `place`.
    fn operate(
        &mut self,
        operation: Operation,
        place: &mut CudaSlice<u8>,
    ) -> Result<&'a [u8], CudaError> {
        let source = self.noise();
        let len = source.len();
        let context = self.stream.context();
        match operation {
            Operation::Freed => {
                let freed = source.to_vec();
                let copied = self.copier.copy_h2d_async(&freed, place);
                drop(freed);
                copied?;
            }
            Operation::Rewritten => {
                let pageable = &mut self.pageable[..len];
                pageable.copy_from_slice(source);
                let copied = self.copier.copy_h2d_async(pageable, place);
                pageable.fill(LEFT);
                copied?;
            }
            Operation::Staged => {
                self.pinned.as_mut_slice()?[..len].copy_from_slice(source);
                let copied = match self.shared.bare {
                    Bare::Staged => self.bare_copy(&self.pinned[..len], place),
                    _ => self.copier.copy_h2d_async(&self.pinned[..len], place),
                };
                self.pinned.as_mut_slice()?[..len].fill(LEFT);
                copied?;
            }
            Operation::Waited => {
                self.pinned.as_mut_slice()?[..len].copy_from_slice(source);
                let copied = self.waiting.copy_h2d_async(&self.pinned[..len], place);
                self.pinned.as_mut_slice()?[..len].fill(LEFT);
                copied?;
            }
            Operation::Denied => {
                let pinned = &self.pinned[..len];
                match self.copier.copy_h2d_async_with(Policy::Deny, pinned, place) {
                    Err(CudaError::Denied { .. }) => {}
                    Ok(()) if len == 0 => {}
                    Ok(()) => count(&self.shared.tally.wrong),
                    Err(error) => return Err(error),
                }
                return Ok(&[]);
            }
            Operation::FreedPinned => {
                let pinned = PinnedBuffer::from_slice(context, source)?;
                self.copier.copy_h2d_async(&pinned, place)?;
            }
            Operation::Shared => {
                let start = self.random() % (self.shared.mapping.len() - LARGEST);
                let shared = &self.shared.mapping[start..start + len];
                let policy = self.policy();
                self.copier.copy_h2d_async_with(policy, shared, place)?;
                return Ok(shared);
            }
            Operation::Registered => {
                let options = RegisterOptions::default().chunk_bytes(STAGED);
                let policy = self.policy();
                let context = self.stream.context();
                let registered =
                    HostRegistration::with_options(context, source.to_vec(), options).unwrap();
                let bytes = registered.as_bytes();
                let copied = self.copier.copy_h2d_async_with(policy, bytes, place);
                registered.unregister().unwrap().fill(LEFT);
                copied?;
            }
            Operation::Owned => {
                self.owned.as_mut_slice()?[..len].copy_from_slice(source);
                self.copier.copy_h2d_from(&self.owned, 0..len, place)?;
            }
            Operation::Upload => {
                let buffer = PinnedBuffer::from_slice(context, source)?;
                let transfer = self.copier.upload(buffer, place.as_view_mut());
                let transfer = transfer.map_err(CudaError::from)?;
                if self.random().is_multiple_of(4) {
                    drop(transfer);
                } else {
                    let mut buffer = self.end(transfer)?;
                    buffer.as_mut_slice()?.fill(LEFT);
                }
            }
            Operation::Pooled => {
                let patience = Duration::from_millis(1);
                let mut buffer = self.shared.pool.wait_and_take(len, patience)?;
                buffer.as_mut_slice()?.copy_from_slice(source);
                self.copier.copy_h2d_from(&buffer, 0..len, place)?;
            }
            Operation::Checked => {
                self.pinned.as_mut_slice()?[..len].copy_from_slice(source);
                let freed = source.to_vec();
                let copied = match self.random() % 2 {
                    0 => self.checked_copy(&self.pinned[..len], place),
                    _ => self.checked_copy(&freed, place),
                };
                drop(freed);
                self.pinned.as_mut_slice()?[..len].fill(LEFT);
                copied?;
            }
            Operation::Scope => self.scope(source, place)?,
            Operation::Back => {
                self.copier.copy_h2d_async(source, place)?;
                let mut back = vec![LEFT; len];
                self.copier.copy_d2h_async(&place.slice(..len), &mut back)?;
                self.compare(&back, source);
                back.fill(LEFT);
                self.kept.push(back);
            }
            Operation::BackPinned => {
                if self.landing.iter().any(|byte| *byte != LEFT) {
                    count(&self.shared.tally.clobbered);
                }
                self.copier.copy_h2d_async(source, place)?;
                let landing = &mut self.landing.as_mut_slice()?[..len];
                let from = place.slice(..len);
                let copied = match self.shared.bare {
                    Bare::BackPinned => self.stream.memcpy_dtoh(&from, landing).map_err(by_cudarc),
                    _ => self.copier.copy_d2h_async(&from, landing),
                };
                let arrived = copied.is_err() || landing == source;
                landing.fill(LEFT);
                copied?;
                if !arrived {
                    count(&self.shared.tally.wrong);
                }
            }
            Operation::Download => {
                self.copier.copy_h2d_async(source, place)?;
                let buffer = PinnedBuffer::from_slice(context, &vec![LEFT; len])?;
                let transfer = self.copier.download(place.slice(..len), buffer);
                let transfer = transfer.map_err(CudaError::from)?;
                let buffer = self.end(transfer)?;
                self.compare(&buffer, source);
            }
        }
        Ok(source)
    }

    fn bare_copy(&self, source: &[u8], place: &mut CudaSlice<u8>) -> Result<(), CudaError> {
        self.stream.memcpy_htod(source, place).map_err(by_cudarc)
    }

    fn checked_copy(&self, source: &[u8], place: &mut CudaSlice<u8>) -> Result<(), CudaError> {
        self.stream.memcpy_htod_checked(source, place)
    }

    /// Copies `source` in two parts from two kinds of memory, and back to two.
    fn scope(&mut self, source: &[u8], place: &mut CudaSlice<u8>) -> Result<(), CudaError> {
        let (first, second) = source.split_at(source.len() / 2);
        self.pinned.as_mut_slice()?[..first.len()].copy_from_slice(first);
        let mut pageable = second.to_vec();
        let mut back = vec![LEFT; source.len()];
        let mut landing = PinnedBuffer::from_slice(self.stream.context(), &back)?;
        let landed = landing.as_mut_slice()?;
        let pinned = &self.pinned[..first.len()];
        let copied = self.copier.scope(|scope| {
            let (mut front, mut rest) = place.split_at_mut(first.len());
            scope.copy_h2d(pinned, &mut front)?;
            scope.copy_h2d(&pageable, &mut rest)?;
            scope.copy_d2h(&place.slice(..source.len()), &mut back)?;
            scope.copy_d2h(&place.slice(..source.len()), landed)
        });
        self.pinned.as_mut_slice()?[..first.len()].fill(LEFT);
        pageable.fill(LEFT);
        if copied.is_ok() {
            self.compare(&back, source);
            self.compare(&landing, source);
        }
        back.fill(LEFT);
        self.kept.push(back);
        copied
    }

    /// Brings a transfer to its end in one of three ways.
    fn end<D>(&mut self, transfer: Transfer<u8, D>) -> Result<PinnedBuffer<u8>, CudaError> {
        let ended = match self.random() % 3 {
            0 => transfer.wait(),
            1 => {
                let mut taken = transfer.try_take();
                loop {
                    taken = match taken {
                        Err(TransferError::UnderWay {
                            error: CudaError::NotDone,
                            transfer,
                        }) => transfer.try_take(),
                        taken => break taken,
                    };
                }
            }
            _ => {
                let mut future = pin!(transfer.into_future());
                let mut context = Context::from_waker(Waker::noop());
                loop {
                    if let Poll::Ready(ended) = future.as_mut().poll(&mut context) {
                        break ended;
                    }
                }
            }
        };
        ended.map(|(buffer, _)| buffer).map_err(CudaError::from)
    }
}

fn by_cudarc(source: DriverError) -> CudaError {
    let call = "a call of cudarc's";
    CudaError::Driver { call, source }
}

/// Calls `cudarc` until it does not return what was stored instead of doing
/// what was asked.
fn again<T>(call: impl Fn() -> Result<T, DriverError>) -> Result<T, DriverError> {
    loop {
        match call() {
            Err(DriverError(STORED)) => {}
            other => return other,
        }
    }
}

/// Page-locks and unpins the mapping while the threads copy from it.
fn pin_and_unpin(shared: &Shared<'_>) {
    loop {
        let options = RegisterOptions::default().chunk_bytes(CHUNK);
        let mapping = Arc::clone(shared.mapping);
        let context = &shared.stage.context;
        let registration = HostRegistration::with_options(context, mapping, options).unwrap();
        registration.unregister().unwrap();
        count(&shared.tally.pins);
        if shared.working.load(Ordering::Relaxed) == 0 {
            return;
        }
    }
}

/// Captures graphs on a stream of its own, which refuses copies meanwhile.
fn capture(shared: &Shared<'_>) {
    let context = &shared.stage.context;
    let stream = again(|| context.new_stream()).unwrap();
    let mut on_device = again(|| stream.alloc_zeros::<u8>(STAGED)).unwrap();
    let copier = Copier::new(&stream).unwrap();
    let (address, _) = cudarc::driver::DevicePtr::device_ptr(&on_device, &stream);
    let modes = [
        Mode::CU_STREAM_CAPTURE_MODE_GLOBAL,
        Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        Mode::CU_STREAM_CAPTURE_MODE_RELAXED,
    ];
    for mode in modes.into_iter().cycle() {
        again(|| stream.begin_capture(mode)).unwrap();
        // SAFETY: the memory lives as long as the graph, on the one stream.
        unsafe { result::memset_d8_async(address, 1, STAGED, stream.cu_stream()) }.unwrap();
        match copier.copy_h2d_async(&shared.noise[..STAGED], &mut on_device) {
            Err(CudaError::StreamIsCapturing | CudaError::Stored { .. }) => {}
            _ => count(&shared.tally.wrong),
        }
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        match again(|| stream.end_capture(flags)) {
            Ok(Some(graph)) => {
                again(|| graph.launch()).unwrap();
                again(|| stream.synchronize()).unwrap();
                count(&shared.tally.graphs);
            }
            _ => count(&shared.tally.spoilt),
        }
        if shared.working.load(Ordering::Relaxed) == 0 {
            return;
        }
    }
}

fn noise() -> Vec<u8> {
    let words = (1..=NOISE as u64 / 8).map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    words.flat_map(u64::to_ne_bytes).collect()
}

fn mapped(bytes: &[u8]) -> Arc<Mmap> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(bytes.len() as u64).unwrap();
    // SAFETY: nobody else has the file.
    let mut mapping = unsafe { MmapMut::map_mut(&file) }.unwrap();
    mapping.copy_from_slice(bytes);
    Arc::new(mapping.make_read_only().unwrap())
}

/// How a run ended.
#[derive(Debug)]
struct Outcome {
    tally: Tally,
    /// Copies of each way, of all copiers.
    ways: [(&'static str, u64); 9],
    pool: PoolStats,
    counters: Counters,
    /// What is alive, in the driver and in the registry, before and after.
    alive: [[u64; 6]; 2],
}

impl Outcome {
    /// Copies for which memory was used too late.
    fn faults(&self) -> u64 {
        let Self {
            tally, counters, ..
        } = self;
        counters.torn_transfers
            + counters.dead_reads
            + counters.dead_writes
            + counters.dead_device_accesses
            + read(&tally.wrong)
            + read(&tally.clobbered)
    }

    fn operations(&self) -> u64 {
        self.tally.done.iter().map(read).sum()
    }
}

fn ways(stats: &[CopyStats]) -> [(&'static str, u64); 9] {
    let sum = |count: fn(&CopyStats) -> u64| stats.iter().map(count).sum();
    [
        ("pageable", sum(|stats| stats.pageable)),
        ("staged", sum(|stats| stats.staged)),
        ("ring waits", sum(|stats| stats.ring_waits)),
        ("guarded", sum(|stats| stats.guarded)),
        ("split", sum(|stats| stats.split)),
        ("bounced", sum(|stats| stats.bounced)),
        ("owned", sum(|stats| stats.owned)),
        ("scoped", sum(|stats| stats.scoped)),
        ("downloads", sum(|stats| stats.downloads)),
    ]
}

fn alive(rig: &Rig) -> [u64; 6] {
    rig.sim.drain();
    // A new stream takes the place of what checked copies keep for streams that
    // have ended.
    let stream = rig.context.new_stream().unwrap();
    stream.clone_htod_checked(&[0u8]).unwrap();
    let counters = rig.counters();
    [
        counters.live_host_allocations,
        counters.live_registrations,
        counters.live_events,
        counters.live_streams,
        counters.live_device_allocations,
        live_count() as u64,
    ]
}

fn soak(form: &Form) -> Outcome {
    let rig = Rig::with(|sim| {
        sim.set_device(form.kind);
        sim.set_attribute(READ_ONLY_SUPPORTED, 1);
        if form.kind != DeviceKind::Discrete {
            sim.set_pageable(Pageable::ReadLate);
        }
    });
    let noise = noise();
    let mapping = mapped(&noise);
    let tally = Tally::default();
    let before = alive(&rig);
    // Too small for all that is asked of it.
    let pool = PinnedPool::<u8>::new(&rig.context, LARGEST + STAGED);
    let shared = &Shared {
        stage: &rig,
        bare: form.bare,
        until: form.until,
        started: Instant::now(),
        noise: &noise,
        mapping: &mapping,
        pool: &pool,
        tally: &tally,
        stats: Mutex::default(),
        working: AtomicUsize::new(usize::try_from(form.threads).unwrap()),
    };
    thread::scope(|threads| {
        for seed in 1..=form.threads {
            threads.spawn(move || Worker::new(shared, seed.wrapping_mul(0x2545_f491)).run());
        }
        threads.spawn(|| pin_and_unpin(shared));
        threads.spawn(|| capture(shared));
    });
    let ways = ways(&shared.stats.lock().unwrap());
    let pooled = pool.stats();
    drop(pool);
    let _ = rig.context.check_err();
    Outcome {
        ways,
        pool: pooled,
        counters: rig.counters(),
        alive: [before, alive(&rig)],
        tally,
    }
}

fn assert_sound(form: &Form) -> Outcome {
    let outcome = soak(form);
    println!("{form:?}: {} operations, {outcome:?}", outcome.operations());
    assert_eq!(outcome.faults(), 0, "{outcome:#?}");
    assert_eq!(read(&outcome.tally.failed), 0, "{outcome:#?}");
    assert_eq!(read(&outcome.tally.spoilt), 0, "{outcome:#?}");
    assert_eq!(outcome.alive[0], outcome.alive[1], "{outcome:#?}");
    // That all of it was there.
    for (operation, done) in OPERATIONS.into_iter().zip(&outcome.tally.done) {
        assert!(read(done) > 0, "no {operation:?} in {outcome:#?}");
    }
    for (way, copies) in outcome.ways {
        // Whether a copy finds its source just being unpinned is chance; and
        // some devices stage nothing.
        let may_be_missing = way == "bounced" || way == "pageable";
        assert!(copies > 0 || may_be_missing, "none {way} in {outcome:#?}");
    }
    assert!(read(&outcome.tally.refused) > 0, "{outcome:#?}");
    assert!(read(&outcome.tally.pins) > 0, "{outcome:#?}");
    let pool = outcome.pool;
    assert!(pool.reused > 0 && pool.freed > 0, "{outcome:#?}");
    assert_eq!((pool.out, pool.lost_bytes), (0, 0), "{outcome:#?}");
    assert!(outcome.counters.late_reads > 0, "{outcome:#?}");
    assert!(outcome.counters.late_writes > 0, "{outcome:#?}");
    outcome
}

#[test]
fn everything_at_once_is_sound() {
    let outcome = assert_sound(&Form {
        kind: DeviceKind::Discrete,
        threads: 4,
        until: Until::asked_for(1000),
        bare: Bare::Nothing,
    });
    assert!(read(&outcome.tally.graphs) > 0, "{outcome:#?}");
    assert!(outcome.ways[0].1 > 0, "{outcome:#?}");
}

#[test]
fn so_it_is_on_a_device_that_reads_pageable_memory_late() {
    assert_sound(&Form {
        kind: DeviceKind::Coherent,
        threads: 4,
        until: Until::asked_for(300),
        bare: Bare::Nothing,
    });
}

/// The run is able to see what it is there for.
#[test]
fn twin_with_one_copy_of_cudarcs_own_is_seen_to_fail() {
    for bare in [Bare::Staged, Bare::BackPinned] {
        let outcome = soak(&Form {
            kind: DeviceKind::Discrete,
            threads: 2,
            until: Until::Operations(500),
            bare,
        });
        println!("{bare:?}: {} faults", outcome.faults());
        assert!(outcome.faults() > 0, "{bare:?}: {outcome:#?}");
        assert!(read(&outcome.tally.wrong) > 0, "{bare:?}: {outcome:#?}");
    }
}
