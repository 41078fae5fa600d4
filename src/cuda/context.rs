//! The contexts that this process copies in, and what their devices do with
//! pageable memory.
//!
//! # Why a context is kept tracking
//!
//! `cudarc` keeps two events for each allocation of device memory: the drop
//! makes the allocation's stream wait for them, and frees the memory in the
//! order of that stream. Both happen only while the context counts at least one
//! stream that was created. A program with default streams alone has none; a
//! program that drops its last created stream has none any more. A copy on
//! another stream, or of another thread's default stream, could then still use
//! memory that is freed.
//!
//! So the first copier of a context makes the context count one stream more,
//! for good. The cost is `cudarc`'s own with a created stream: each use of
//! device memory waits for, and records, an event.

use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{CudaContext, result};

use super::{CudaError, driver};

/// A context that this crate has met.
struct Known {
    /// Also keeps another context from getting the same address.
    context: Weak<CudaContext>,
    /// Whether it counts a stream for this crate.
    tracks: bool,
}

fn known() -> MutexGuard<'static, Vec<Known>> {
    static KNOWN: Mutex<Vec<Known>> = Mutex::new(Vec::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    known.retain(|it| it.context.strong_count() > 0);
    known
}

/// Opens the primary context of the device `ordinal`, counted from 0, and makes
/// it current on this thread.
///
/// While a context from here, or one that a [`Copier`](super::Copier) was made
/// in, lives, this returns that one. So a program that opens all contexts here
/// has one for each device, and `cudarc` sees all uses of the device's memory.
///
/// [`CudaContext::new`] makes another object at each call, and panics where no
/// driver is installed; this returns an error.
///
/// # Errors
///
/// [`CudaError::NoDriver`], [`CudaError::MissingFunction`], or
/// [`CudaError::Driver`] if the driver finds no such device.
pub fn context(ordinal: usize) -> Result<Arc<CudaContext>, CudaError> {
    driver::require()?;
    let mut known = known();
    let open = known.iter().find_map(|it| {
        let context = it.context.upgrade()?;
        (context.is_primary() && context.ordinal() == ordinal).then_some(context)
    });
    if let Some(context) = open {
        driver::make_current(&context)?;
        return Ok(context);
    }
    let context =
        CudaContext::new(ordinal).map_err(CudaError::driver("opening the device's context"))?;
    known.push(Known {
        context: Arc::downgrade(&context),
        tracks: false,
    });
    Ok(context)
}

/// Makes `context` track the uses of its device memory for as long as it lives.
/// The first call for a context waits for all work in it, unless the program
/// has created a stream.
pub(super) fn keep_tracking(context: &Arc<CudaContext>) -> Result<(), CudaError> {
    let is_of = |it: &Known| Weak::as_ptr(&it.context) == Arc::as_ptr(context);
    if known().iter().any(|it| is_of(it) && it.tracks) {
        return Ok(());
    }
    // The lock is not held, since `new_stream` may wait for the device. Two threads
    // that come at once make the context count two streams, which does no harm.
    //
    // `new_stream` would return an error that is stored, instead of a stream.
    let stored = context.check_err();
    let stream = context.new_stream();
    context.record_err(stored);
    let stream = stream.map_err(CudaError::driver("creating a stream"))?;
    let handle = stream.cu_stream();
    // The object is forgotten, so that the context never counts it out.
    mem::forget(stream);
    // SAFETY: the forgotten stream, which nobody else has, holds one count of
    // this context, and never gives it up. Without it the context can end.
    unsafe { Arc::decrement_strong_count(Arc::as_ptr(context)) };
    // SAFETY: the stream is this function's own, and nothing uses it.
    let destroyed = unsafe { result::stream::destroy(handle) };
    let mut known = known();
    known.retain(|it| !is_of(it));
    known.push(Known {
        context: Arc::downgrade(context),
        tracks: true,
    });
    destroyed.map_err(CudaError::driver("cuStreamDestroy"))
}

/// Whether nothing promises that a pageable source is staged: devices that use
/// the host's page tables (Grace), integrated ones, and, since no document
/// says otherwise, those that can access pageable memory at all, unless the
/// program takes the responsibility.
pub(super) fn reads_pageable_late(
    context: &CudaContext,
    trusts_pageable_access: bool,
) -> Result<bool, CudaError> {
    let has = |attribute| driver::attribute(context, attribute).map(|value| value != 0);
    Ok(
        has(Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES)?
            || has(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)?
            || (!trusts_pageable_access
                && has(Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS)?),
    )
}
