//! [`PinnedMemory`]: what a buffer and a staging ring are made of.

use std::mem;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::CudaContext;

use super::wait::driver_is_gone;
use super::{CudaError, driver};
use crate::process::Process;
use crate::{Region, Registration, global, log};

/// Page-locked memory from the driver, in the process-wide registry from its
/// making to its end.
///
/// Dropping it leaks it, and its context with it, since the memory would go
/// with the context: it does not know whether a transfer uses it. Whoever does
/// calls [`free`](Self::free).
#[derive(Debug)]
pub(super) struct PinnedMemory {
    base: NonNull<u8>,
    bytes: usize,
    context: Arc<CudaContext>,
    /// `None` once the memory was freed.
    registration: Option<Registration<'static>>,
    /// The process that pinned the memory. A child after `fork` has a copy of
    /// this, but not of the pinning: it must not free it.
    owner: Process,
}

// SAFETY: it owns the memory, as a `Box<[u8]>` would, and never touches it.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// Allocates `bytes` bytes, which are not 0 and not initialised.
    pub(super) fn allocate(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, CudaError> {
        let base = driver::alloc_host(context, bytes)?;
        // An allocation neither is null nor wraps. Were it to, it would be
        // left unused: memory that cannot be registered must not be copied.
        let region = Region::new(base.as_ptr(), bytes).map_err(|_| CudaError::TooLarge {
            elements: bytes,
            element_bytes: 1,
        })?;
        Ok(Self {
            base,
            bytes,
            context: Arc::clone(context),
            // Registered before anybody can hold a slice of it.
            registration: Some(global().register(region)),
            owner: Process::current(),
        })
    }

    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn is_of_this_process(&self) -> bool {
        self.owner.is_current()
    }

    /// Frees the memory, or leaks it: in a forked child in silence, since
    /// nothing went wrong, and with a word in the log if the driver fails.
    ///
    /// # Safety
    ///
    /// Nobody may use the memory afterwards, the device included.
    pub(super) unsafe fn free(mut self) {
        if !self.is_of_this_process() {
            return;
        }
        // SAFETY: the caller's promise.
        match unsafe { driver::free_host(&self.context, self.base) } {
            // Unpinned first, unregistered then: in between, the answer
            // "pinned" is wrong to the safe side.
            Ok(()) => {
                if let Some(registration) = self.registration.take() {
                    registration.unregister();
                }
            }
            Err(error) => report_leak(self.bytes, &error),
        }
    }
}

/// Reports that memory is leaked because of `error`.
pub(super) fn report_leak(bytes: usize, error: &CudaError) {
    if is_end_of_driver(error) {
        return;
    }
    log::emit(|| {
        tracing::error!(
            %error,
            bytes,
            "page-locked memory could not be freed and is leaked; it stays registered"
        );
    });
}

/// Whether memory is leaked because the driver has shut down, as it does while
/// the process exits. That is no fault, and there can be thousands of such
/// objects: only the first is logged.
pub(super) fn is_end_of_driver(error: &CudaError) -> bool {
    static LOGGED: AtomicBool = AtomicBool::new(false);
    if !driver_is_gone(error) {
        return false;
    }
    // Relaxed: it carries nothing but itself.
    if !LOGGED.swap(true, Ordering::Relaxed) {
        log::emit(|| {
            tracing::info!(
                %error,
                "the driver has shut down; page-locked memory that is left stays as it is"
            );
        });
    }
    true
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if self.registration.is_some() {
            mem::forget(Arc::clone(&self.context));
        }
    }
}
