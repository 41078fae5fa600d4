//! Memory that its owner rewrites as soon as a copy call has returned, while
//! another thread pins and unpins it.

use std::sync::Arc;

use anyhow::{Context as _, anyhow};
use cudarc::driver::{CudaContext, sys};
use pinned_hosts::{Region, global};

use crate::support::numbers::Numbers;

/// A stream's private memory to copy from.
pub(crate) struct Scratch {
    /// Never freed: it may be page-locked, by a thread that does not own it.
    bytes: &'static mut [u8],
    numbers: Numbers,
}

impl Scratch {
    pub(crate) fn new(bytes: usize, seed: u64) -> Self {
        Self {
            bytes: vec![0; bytes].leak(),
            numbers: Numbers::new(seed),
        }
    }

    pub(crate) fn region(&self) -> anyhow::Result<Region> {
        Ok(Region::of(self.bytes)?)
    }

    /// Lends `copy` a private copy of `source`, and rewrites it as soon as
    /// that has returned.
    pub(crate) fn lend<R>(&mut self, source: &[u8], copy: impl FnOnce(&[u8]) -> R) -> R {
        let private = &mut self.bytes[..source.len()];
        private.copy_from_slice(source);
        let result = copy(private);
        private.fill(self.numbers.next() as u8);
        result
    }
}

/// Pins `region`, which belongs to a [`Scratch`], and unpins it again, through
/// driver calls of its own.
pub(crate) fn pin_and_unpin(context: &Arc<CudaContext>, region: Region) -> anyhow::Result<()> {
    context.bind_to_thread()?;
    let address = region.base().cast_mut().cast();
    let registration = global()
        .pin_with(region, || {
            // SAFETY: the memory is never freed, and the copies from it that
            // were under way are over.
            unsafe {
                sys::cuMemHostRegister_v2(address, region.len(), sys::CU_MEMHOSTREGISTER_PORTABLE)
            }
            .result()
        })
        .context("page-locking private memory")?;
    registration
        // SAFETY: page-locked above, and no copy reads it any more.
        .unpin_with(|| unsafe { sys::cuMemHostUnregister(address) }.result())
        .map_err(|error| anyhow!("{error}"))
}
