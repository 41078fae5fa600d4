//! Device memory, and what it must hold.
//!
//! Beside each copy to the device, the same words are copied to an array on
//! the host, at the call. Once per step the device's memory is copied back and
//! compared. This is how a torn transfer shows on a driver that counts none.

use std::ops::Range;
use std::sync::Arc;

use anyhow::Context as _;
use cudarc::driver::{CudaSlice, CudaStream};

use crate::path::{CopyPath, Outcome, Pinned as _};

/// A stream's device memory with its expected contents.
pub(crate) struct Mirror {
    stream: Arc<CudaStream>,
    on_device: CudaSlice<u32>,
    expected: Vec<u32>,
    /// Never freed: if waiting for the device fails, it may still write here.
    read_back: &'static mut [u32],
    /// Where copies went since the last check.
    fresh: Vec<Range<usize>>,
    checks: Checks,
}

/// Outcomes of comparisons.
#[derive(Clone, Copy, Default)]
pub(crate) struct Checks {
    /// Copies whose contents on the device were looked at.
    pub(crate) compared: u64,
    /// Those that were not what the source held at the call.
    pub(crate) wrong: u64,
}

impl Checks {
    pub(crate) fn add(&mut self, other: Self) {
        self.compared += other.compared;
        self.wrong += other.wrong;
    }
}

impl Mirror {
    pub(crate) fn new(stream: &Arc<CudaStream>, words: usize) -> anyhow::Result<Self> {
        Ok(Self {
            stream: Arc::clone(stream),
            on_device: stream
                .alloc_zeros(words)
                .context("allocating device memory")?,
            expected: vec![0; words],
            read_back: vec![0; words].leak(),
            fresh: Vec::new(),
            checks: Checks::default(),
        })
    }

    /// Copies the borrowed `src` to the word `at`.
    #[track_caller]
    pub(crate) fn copy<P: CopyPath>(
        &mut self,
        path: &mut P,
        src: &[u32],
        at: usize,
    ) -> anyhow::Result<()> {
        let target = at..at + src.len();
        let mut on_device = self.on_device.slice_mut(target.clone());
        if path.copy(src, &mut on_device)? == Outcome::Copied {
            // Still borrowed, so it is what it was at the call.
            self.expected[target.clone()].copy_from_slice(src);
            self.fresh.push(target);
        }
        Ok(())
    }

    /// Copies all of `src`, which stays as it is meanwhile, to the word `at`.
    pub(crate) fn copy_from<P: CopyPath>(
        &mut self,
        path: &mut P,
        src: &P::Pinned,
        at: usize,
    ) -> anyhow::Result<()> {
        let words = src.words()?;
        let target = at..at + words.len();
        let mut on_device = self.on_device.slice_mut(target.clone());
        path.copy_from(src, &mut on_device)?;
        self.expected[target.clone()].copy_from_slice(words);
        self.fresh.push(target);
        Ok(())
    }

    /// Waits for the stream, and compares what arrived since the last check.
    pub(crate) fn check(&mut self) -> anyhow::Result<()> {
        // Once for all: what lies between two targets costs less than a call.
        let end = self.fresh.iter().map(|slot| slot.end).max().unwrap_or(0);
        self.stream
            .memcpy_dtoh(&self.on_device.slice(..end), &mut self.read_back[..end])
            .context("reading device memory back")?;
        // The call waits for pageable memory, as observed; nothing promises it.
        self.stream.synchronize().context("waiting for a stream")?;
        for slot in self.fresh.drain(..) {
            self.checks.compared += 1;
            if self.read_back[slot.clone()] != self.expected[slot] {
                self.checks.wrong += 1;
            }
        }
        Ok(())
    }

    pub(crate) fn checks(&self) -> Checks {
        self.checks
    }
}
