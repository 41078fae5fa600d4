//! Ordinary memory of which a part is page-locked, as when one library pins
//! what another one handed it. A slice across the boundary is neither the one
//! nor the other, and the driver refuses to copy it in one piece.

use std::sync::Arc;

use anyhow::Context as _;
use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUresult};
use pinned_hosts::{Region, Registration};

use crate::path::bytes_of;

/// Memory whose first half is page-locked while this lives.
pub(crate) struct HalfPinned {
    /// `None` once it had to be leaked.
    words: Option<Box<[u32]>>,
    context: Arc<CudaContext>,
    /// `None` once the memory was unpinned.
    registration: Option<Registration<'static>>,
}

impl HalfPinned {
    pub(crate) fn new(context: &Arc<CudaContext>, words: Box<[u32]>) -> anyhow::Result<Self> {
        context.bind_to_thread()?;
        let half = &words[..words.len() / 2];
        // Known before it is page-locked: in between, "pinned" is wrong to the
        // safe side.
        let registration = pinned_hosts::global().register(Region::of(bytes_of(half))?);
        // SAFETY: the memory stays where it is until `drop` has unpinned it,
        // or for ever.
        let pinned = unsafe {
            sys::cuMemHostRegister_v2(
                half.as_ptr().cast_mut().cast(),
                size_of_val(half),
                sys::CU_MEMHOSTREGISTER_PORTABLE,
            )
        };
        if let Err(error) = pinned.result() {
            registration.unregister();
            return Err(error).context("page-locking half of the arena");
        }
        Ok(Self {
            words: Some(words),
            context: Arc::clone(context),
            registration: Some(registration),
        })
    }

    /// All of it.
    pub(crate) fn words(&self) -> &[u32] {
        self.words.as_deref().unwrap_or_default()
    }
}

impl Drop for HalfPinned {
    fn drop(&mut self) {
        let base = self.words().as_ptr().cast_mut().cast();
        // Nothing says that unpinning waits for transfers, so wait first.
        let unpinned = self.context.synchronize().is_ok()
            // SAFETY: page-locked by `new` at this address; no transfer is in
            // flight, and none can begin: this is borrowed alone.
            && unsafe { sys::cuMemHostUnregister(base) } == CUresult::CUDA_SUCCESS;
        if unpinned {
            if let Some(registration) = self.registration.take() {
                registration.unregister();
            }
        } else {
            // Perhaps still page-locked: it stays known, and stays allocated.
            std::mem::forget(self.words.take());
        }
    }
}
