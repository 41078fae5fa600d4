//! The two ways that the same job copies: checked by `pinned-hosts`, and as
//! `cudarc` does by itself.

use std::slice;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, CudaStream, CudaViewMut, PinnedHostSlice};
use pinned_hosts::cuda::{Copier, CopierOptions, CudaError, PinnedBuffer, Policy};
use pinned_hosts::{Region, Registration, Residency};

/// Makes copies on one stream.
pub(crate) trait CopyPath: Sized {
    /// The page-locked memory that goes with it.
    type Pinned: Pinned;

    fn new(stream: &Arc<CudaStream>, policy: Policy) -> anyhow::Result<Self>;

    /// Copies from memory that the caller may do anything with afterwards.
    #[track_caller]
    fn copy(&mut self, src: &[u32], dst: &mut CudaViewMut<'_, u32>) -> anyhow::Result<Outcome>;

    /// Copies all of `src`, which is to stay as it is until the device has
    /// read it, without waiting for that.
    fn copy_from(
        &mut self,
        src: &Self::Pinned,
        dst: &mut CudaViewMut<'_, u32>,
    ) -> anyhow::Result<()>;

    /// Notes that the stream was waited for by others.
    fn drained(&mut self) {}

    fn counts(&self) -> Counts;
}

/// Page-locked memory.
pub(crate) trait Pinned: Sized + Send + Sync {
    fn zeroed(context: &Arc<CudaContext>, words: usize) -> anyhow::Result<Self>;
    fn words(&self) -> anyhow::Result<&[u32]>;
    fn words_mut(&mut self) -> anyhow::Result<&mut [u32]>;
}

/// What became of a copy.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Copied,
    /// The driver takes no source that is page-locked in part; or the policy
    /// is to deny what is page-locked.
    Refused,
}

/// Copies by the residency of their source and what was done about it.
#[derive(Clone, Copy, Default)]
pub(crate) struct Counts {
    /// Pageable: the driver staged it.
    pub(crate) pageable: u64,
    /// Page-locked and borrowed: copied through the staging ring.
    pub(crate) staged: u64,
    /// Page-locked and borrowed: waited for. The split ones are included.
    pub(crate) waited: u64,
    /// Page-locked in part: copied in parts.
    pub(crate) split: u64,
    /// Page-locked and borrowed: denied, not copied.
    pub(crate) denied: u64,
    /// Page-locked, in a buffer that knows that it is in use: no wait.
    pub(crate) owned: u64,
    /// Page-locked, and nobody sees to it that it stays as it is.
    pub(crate) unguarded: u64,
    /// Page-locked in part: refused by the driver.
    pub(crate) refused: u64,
    /// Time in copies that were waited for.
    pub(crate) waited_ns: u64,
    /// How often the stream was waited for and had nothing to do until the
    /// next copy, and for how long.
    pub(crate) drains: u64,
    pub(crate) idle_ns: u64,
}

impl Counts {
    pub(crate) fn copies(&self) -> u64 {
        self.pageable + self.pinned_sources()
    }

    /// Copies of page-locked memory.
    pub(crate) fn pinned_sources(&self) -> u64 {
        self.staged + self.waited + self.owned + self.unguarded
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.pageable += other.pageable;
        self.staged += other.staged;
        self.waited += other.waited;
        self.split += other.split;
        self.denied += other.denied;
        self.owned += other.owned;
        self.unguarded += other.unguarded;
        self.refused += other.refused;
        self.waited_ns += other.waited_ns;
        self.drains += other.drains;
        self.idle_ns += other.idle_ns;
    }
}

/// Copies that are sound for any source.
pub(crate) struct Checked {
    copier: Copier,
    /// Since when the stream has had nothing to do, if it has not.
    drained: Option<Instant>,
    drains: u64,
    idle: Duration,
}

impl Checked {
    /// To be called before a copy, which gives the stream something to do
    /// again. Returns what `after` wants.
    fn before(&mut self) -> u64 {
        if let Some(since) = self.drained.take() {
            self.drains += 1;
            self.idle += since.elapsed();
        }
        self.copier.stats().guarded
    }

    /// To be called after a copy, which may have waited for the stream.
    fn after(&mut self, waits: u64) {
        if self.copier.stats().guarded > waits {
            self.drained = Some(Instant::now());
        }
    }
}

impl CopyPath for Checked {
    type Pinned = PinnedBuffer<u32>;

    fn new(stream: &Arc<CudaStream>, policy: Policy) -> anyhow::Result<Self> {
        let options = CopierOptions::default().policy(policy);
        Ok(Self {
            copier: Copier::with_options(stream, options)?,
            drained: None,
            drains: 0,
            idle: Duration::ZERO,
        })
    }

    fn copy(&mut self, src: &[u32], dst: &mut CudaViewMut<'_, u32>) -> anyhow::Result<Outcome> {
        let waits = self.before();
        let copied = self.copier.copy_h2d_async(src, dst);
        self.after(waits);
        match copied {
            Ok(()) => Ok(Outcome::Copied),
            Err(CudaError::Denied { .. }) => Ok(Outcome::Refused),
            Err(error) => Err(error.into()),
        }
    }

    fn copy_from(
        &mut self,
        src: &Self::Pinned,
        dst: &mut CudaViewMut<'_, u32>,
    ) -> anyhow::Result<()> {
        self.before();
        Ok(self.copier.copy_h2d_from(src, 0..src.len(), dst)?)
    }

    fn drained(&mut self) {
        self.drained = Some(Instant::now());
    }

    fn counts(&self) -> Counts {
        let stats = self.copier.stats();
        Counts {
            pageable: stats.pageable,
            staged: stats.staged,
            waited: stats.guarded,
            split: stats.split,
            denied: stats.denied,
            owned: stats.owned,
            waited_ns: u64::try_from(stats.waited.as_nanos()).unwrap_or(u64::MAX),
            drains: self.drains,
            idle_ns: u64::try_from(self.idle.as_nanos()).unwrap_or(u64::MAX),
            ..Counts::default()
        }
    }
}

impl Pinned for PinnedBuffer<u32> {
    fn zeroed(context: &Arc<CudaContext>, words: usize) -> anyhow::Result<Self> {
        Ok(PinnedBuffer::zeroed(context, words)?)
    }

    fn words(&self) -> anyhow::Result<&[u32]> {
        Ok(self.as_slice())
    }

    fn words_mut(&mut self) -> anyhow::Result<&mut [u32]> {
        Ok(self.as_mut_slice()?)
    }
}

/// `cudarc`'s own copies. Not a line here is unsafe but the allocation, and
/// yet the device reads memory that was freed or rewritten: which is why this
/// may run on the simulated driver only.
pub(crate) struct Unchecked {
    stream: Arc<CudaStream>,
    counts: Counts,
}

impl CopyPath for Unchecked {
    type Pinned = PlainPinned;

    fn new(stream: &Arc<CudaStream>, _policy: Policy) -> anyhow::Result<Self> {
        Ok(Self {
            stream: Arc::clone(stream),
            counts: Counts::default(),
        })
    }

    fn copy(&mut self, src: &[u32], dst: &mut CudaViewMut<'_, u32>) -> anyhow::Result<Outcome> {
        match self.stream.memcpy_htod(src, dst) {
            Ok(()) => {}
            Err(error) if error.0 == CUresult::CUDA_ERROR_INVALID_VALUE => {
                self.counts.refused += 1;
                return Ok(Outcome::Refused);
            }
            Err(error) => return Err(error.into()),
        }
        // Asked after the copy, for the table alone.
        if pinned_hosts::residency(bytes_of(src)) == Residency::Pageable {
            self.counts.pageable += 1;
        } else {
            self.counts.unguarded += 1;
        }
        Ok(Outcome::Copied)
    }

    fn copy_from(
        &mut self,
        src: &Self::Pinned,
        dst: &mut CudaViewMut<'_, u32>,
    ) -> anyhow::Result<()> {
        self.stream.memcpy_htod(src.words()?, dst)?;
        self.counts.unguarded += 1;
        Ok(())
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}

/// Page-locked memory as `cudarc` hands it out: it waits for an event that
/// copies from a slice of it never record.
pub(crate) struct PlainPinned {
    memory: PinnedHostSlice<u32>,
    /// The registry knows the memory in this mode too, so that lookups take as
    /// long; only, nobody asks it before a copy.
    /// Taken when this is dropped.
    registration: Option<Registration<'static>>,
}

impl Pinned for PlainPinned {
    fn zeroed(context: &Arc<CudaContext>, words: usize) -> anyhow::Result<Self> {
        // SAFETY: it is filled before anybody reads it.
        let mut memory =
            unsafe { context.alloc_pinned_with_flags(words, sys::CU_MEMHOSTALLOC_PORTABLE) }?;
        memory.as_mut_slice()?.fill(0);
        let region = Region::of(bytes_of(memory.as_slice()?))?;
        Ok(Self {
            memory,
            registration: Some(pinned_hosts::global().register(region)),
        })
    }

    fn words(&self) -> anyhow::Result<&[u32]> {
        Ok(self.memory.as_slice()?)
    }

    fn words_mut(&mut self) -> anyhow::Result<&mut [u32]> {
        Ok(self.memory.as_mut_slice()?)
    }
}

impl Drop for PlainPinned {
    fn drop(&mut self) {
        if let Some(registration) = self.registration.take() {
            registration.unregister();
        }
    }
}

/// The bytes of `words`.
pub(crate) fn bytes_of(words: &[u32]) -> &[u8] {
    // SAFETY: the same memory for the same time, and any byte of a `u32` is a
    // valid `u8`.
    unsafe { slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
}
