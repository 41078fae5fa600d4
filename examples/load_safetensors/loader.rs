//! Copies all tensors to the device, on several streams, and compares them
//! there.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, CudaViewMut};
use indicatif::BinaryBytes;
use pinned_hosts::Region;
use pinned_hosts::cuda::Copier;

use crate::progress::Progress;
use crate::scratch::Scratch;
use crate::weights::Weights;

/// How much to copy in one call, at most: a copy holds up whoever waits to pin
/// or to unpin.
pub(crate) const PIECE: usize = 2 << 20;

/// Every so many pieces, one is copied from private memory, if at all,
const PRIVATE_EVERY: u64 = 4;
/// and in many small copies: they are what pinning may come between.
const PRIVATE_PIECE: usize = 64 << 10;

/// How often the progress is shown.
const TICK: Duration = Duration::from_millis(50);

/// Copies by what was done about their source.
#[derive(Clone, Copy, Default)]
pub(crate) struct Copies {
    pub(crate) all: u64,
    /// Staged by the driver.
    pub(crate) pageable: u64,
    /// Waited for, in one piece.
    pub(crate) pinned: u64,
    /// Waited for, and made in parts.
    pub(crate) split: u64,
    /// Made through other memory.
    pub(crate) bounced: u64,
    /// From memory that was rewritten right after the call.
    pub(crate) private: u64,
}

/// The weights' place on the device, and the streams that go there.
pub(crate) struct Loader<'w> {
    weights: &'w Weights,
    /// One for each tensor, except where it has no bytes.
    on_device: Vec<Option<CudaSlice<u8>>>,
    stream: Arc<CudaStream>,
    workers: Vec<Worker>,
}

impl<'w> Loader<'w> {
    /// With `private`, every so many copies are made from memory that is
    /// rewritten at once.
    pub(crate) fn new(
        context: &Arc<CudaContext>,
        weights: &'w Weights,
        streams: u16,
        private: bool,
    ) -> anyhow::Result<Self> {
        let stream = context.new_stream().context("making a stream")?;
        let on_device = weights
            .tensors()
            .map(|tensor| {
                if tensor.is_empty() {
                    return Ok(None);
                }
                stream.alloc_zeros(tensor.len()).map(Some)
            })
            .collect::<Result<_, _>>()
            .with_context(|| {
                format!(
                    "allocating device memory; the tensors need {}",
                    BinaryBytes(weights.bytes())
                )
            })?;
        stream.synchronize()?;
        let workers = (0..streams)
            .map(|number| Worker::new(context, number, private))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            weights,
            on_device,
            stream,
            workers,
        })
    }

    /// The private memory of all streams.
    pub(crate) fn private_regions(&self) -> anyhow::Result<Vec<Region>> {
        let scratches = self.workers.iter().filter_map(|it| it.scratch.as_ref());
        scratches.map(Scratch::region).collect()
    }

    /// Makes the place on the device as it was, so that it shows if a copy of
    /// the next load does not happen.
    pub(crate) fn clear(&mut self) -> anyhow::Result<()> {
        for on_device in self.on_device.iter_mut().flatten() {
            self.stream.memset_zeros(on_device)?;
        }
        Ok(self.stream.synchronize()?)
    }

    /// Copies every tensor. Returns how long that took.
    pub(crate) fn load(&mut self, progress: &Progress) -> anyhow::Result<Duration> {
        let tensors = self.weights.tensors().zip(&mut self.on_device);
        let queue = Mutex::new(tensors);
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
        let started = Instant::now();
        let ends = on_all(&mut self.workers, progress, |worker, failed| {
            // Relaxed: it says nothing about other memory.
            while !failed.load(Ordering::Relaxed)
                && let Some((tensor, on_device)) = next()
            {
                if let Some(on_device) = on_device {
                    worker.load(tensor, on_device, progress)?;
                }
            }
            worker.copier.stream().synchronize()?;
            Ok(Instant::now())
        })?;
        let end = ends.into_iter().max().unwrap_or(started);
        Ok(end - started)
    }

    /// Copies every tensor back, and compares it with the file. Returns how
    /// many differ.
    pub(crate) fn mismatched(&mut self, progress: &Progress) -> anyhow::Result<u64> {
        let tensors: Vec<_> = self.weights.tensors().zip(&self.on_device).collect();
        let next = AtomicUsize::new(0);
        let mismatched = on_all(&mut self.workers, progress, |worker, failed| {
            let mut mismatched = 0;
            // Relaxed, both: they say nothing about other memory.
            while !failed.load(Ordering::Relaxed)
                && let Some((tensor, on_device)) = tensors.get(next.fetch_add(1, Ordering::Relaxed))
            {
                if let Some(on_device) = on_device
                    && !worker.matches(tensor, on_device)?
                {
                    mismatched += 1;
                }
            }
            Ok(mismatched)
        })?;
        Ok(mismatched.into_iter().sum())
    }

    pub(crate) fn copies(&self) -> Copies {
        let mut copies = Copies::default();
        for worker in &self.workers {
            let stats = worker.copier.stats();
            copies.all += worker.copies;
            copies.private += worker.private_copies;
            copies.pageable += stats.pageable;
            copies.pinned += stats.staged + stats.guarded.saturating_sub(stats.split);
            copies.split += stats.split;
            copies.bounced += stats.bounced;
        }
        copies
    }
}

/// One stream.
struct Worker {
    copier: Copier,
    /// Never freed: if waiting for the device fails, it may still write here.
    read_back: &'static mut [u8],
    scratch: Option<Scratch>,
    pieces: u64,
    copies: u64,
    private_copies: u64,
}

impl Worker {
    fn new(context: &Arc<CudaContext>, number: u16, private: bool) -> anyhow::Result<Self> {
        let stream = context
            .new_stream()
            .context("making a stream; try fewer --streams")?;
        Ok(Self {
            copier: Copier::new(&stream)?,
            read_back: vec![0; PIECE].leak(),
            scratch: private.then(|| Scratch::new(PRIVATE_PIECE, number.into())),
            pieces: 0,
            copies: 0,
            private_copies: 0,
        })
    }

    fn load(
        &mut self,
        tensor: &[u8],
        on_device: &mut CudaSlice<u8>,
        progress: &Progress,
    ) -> anyhow::Result<()> {
        let mut start = 0;
        for piece in tensor.chunks(PIECE) {
            let end = start + piece.len();
            let mut target = on_device.slice_mut(start..end);
            self.pieces += 1;
            match &mut self.scratch {
                Some(scratch) if self.pieces.is_multiple_of(PRIVATE_EVERY) => {
                    let copies = copy_privately(&self.copier, scratch, piece, &mut target)?;
                    self.copies += copies;
                    self.private_copies += copies;
                }
                _ => {
                    self.copier.copy_h2d_async(piece, &mut target)?;
                    self.copies += 1;
                }
            }
            progress.copied(piece.len());
            start = end;
        }
        Ok(())
    }

    fn matches(&mut self, tensor: &[u8], on_device: &CudaSlice<u8>) -> anyhow::Result<bool> {
        let stream = self.copier.stream();
        let mut start = 0;
        for piece in tensor.chunks(PIECE) {
            let source = on_device.slice(start..start + piece.len());
            let read_back = &mut self.read_back[..piece.len()];
            // So that it shows if nothing is copied.
            read_back.fill(!piece[0]);
            stream
                .memcpy_dtoh(&source, read_back)
                .context("reading device memory back")?;
            // The call waits for pageable memory, as observed; nothing
            // promises it.
            stream.synchronize().context("waiting for a stream")?;
            if read_back != piece {
                return Ok(false);
            }
            start += piece.len();
        }
        Ok(true)
    }
}

/// Copies `piece` from private copies of its parts. Returns how many.
fn copy_privately(
    copier: &Copier,
    scratch: &mut Scratch,
    piece: &[u8],
    on_device: &mut CudaViewMut<'_, u8>,
) -> anyhow::Result<u64> {
    let mut start = 0;
    let mut copies = 0;
    for part in piece.chunks(PRIVATE_PIECE) {
        let end = start + part.len();
        let mut target = on_device.slice_mut(start..end);
        scratch.lend(part, |private| copier.copy_h2d_async(private, &mut target))?;
        copies += 1;
        start = end;
    }
    Ok(copies)
}

/// Lets each worker work on a thread of its own, and shows the progress. The
/// others are told if one of them fails.
fn on_all<R: Send>(
    workers: &mut [Worker],
    progress: &Progress,
    work: impl Fn(&mut Worker, &AtomicBool) -> anyhow::Result<R> + Sync,
) -> anyhow::Result<Vec<R>> {
    let (work, failed) = (&work, &AtomicBool::new(false));
    thread::scope(|scope| {
        // Nothing is sent: it is disconnected once all threads are done, in
        // whatever way.
        let (at_work, all_done) = mpsc::channel::<()>();
        let threads: Vec<_> = workers
            .iter_mut()
            .enumerate()
            .map(|(number, worker)| {
                let at_work = at_work.clone();
                let run = move || {
                    let _at_work = at_work;
                    let result = work(worker, failed);
                    if result.is_err() {
                        failed.store(true, Ordering::Relaxed);
                    }
                    result
                };
                let thread = thread::Builder::new()
                    .name(format!("stream {number}"))
                    .spawn_scoped(scope, run);
                if thread.is_err() {
                    failed.store(true, Ordering::Relaxed);
                }
                thread
            })
            .collect();
        drop(at_work);
        while all_done.recv_timeout(TICK) == Err(mpsc::RecvTimeoutError::Timeout) {
            progress.show();
        }
        threads
            .into_iter()
            .map(|thread| {
                let thread = thread.context("starting a stream's thread; try fewer --streams")?;
                thread.join().unwrap_or_else(|panic| resume_unwind(panic))
            })
            .collect()
    })
}
