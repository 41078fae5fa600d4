//! The end of a copy that is on the device: where it is, and what is to be
//! right around asking that.

use std::ptr;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};

use super::{Copier, CudaError, driver};

impl Copier {
    /// Calls `enqueue` with the beginning of `dst`, which has room for
    /// `elements` elements, unless there is nothing to copy. `dst` notes the
    /// use that `enqueue` makes of it.
    ///
    /// # Errors
    ///
    /// [`CudaError::DestinationTooShort`], as [`be_ready`](Self::be_ready), or
    /// those of `enqueue`.
    #[inline]
    pub(super) fn copy_to<T, D, E>(
        &self,
        dst: &mut D,
        elements: usize,
        enqueue: impl FnOnce(CUdeviceptr) -> Result<(), E>,
    ) -> Result<(), E>
    where
        D: DevicePtrMut<T>,
        E: From<CudaError>,
    {
        if !has_room(elements, dst.len(), size_of::<T>())? {
            return Ok(());
        }
        self.between_questions(|stream| dst.device_ptr_mut(stream), enqueue)
    }

    /// Calls `enqueue` with the beginning of `src`, of which `elements`
    /// elements are to be copied to a place for `room` of them, unless there is
    /// nothing to copy. `src` notes the use that `enqueue` makes of it.
    ///
    /// `elements` is the length of `src`, which is asked once: its type may be
    /// the program's own, and say something else the next time.
    ///
    /// # Errors
    ///
    /// As [`copy_to`](Self::copy_to).
    #[inline]
    pub(super) fn copy_from<T, D, E>(
        &self,
        src: &D,
        elements: usize,
        room: usize,
        enqueue: impl FnOnce(CUdeviceptr) -> Result<(), E>,
    ) -> Result<(), E>
    where
        D: DevicePtr<T>,
        E: From<CudaError>,
    {
        if !has_room(elements, room, size_of::<T>())? {
            return Ok(());
        }
        self.between_questions(|stream| src.device_ptr(stream), enqueue)
    }

    /// Asks for the address between two questions whether all is right.
    ///
    /// `cudarc` makes the stream wait for the last uses there. That would spoil
    /// a capture that has begun, and is left out while an error is stored: so
    /// it is asked before. It joins the stream to a capture that a last use is
    /// part of: so it is asked after. (What is not seen is an error that another
    /// thread both stores and takes in between.) The type may also be the program's own,
    /// and do anything: so neither question can be spared for any type.
    #[inline]
    fn between_questions<'a, E: From<CudaError>>(
        &'a self,
        address: impl FnOnce(&'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>),
        enqueue: impl FnOnce(CUdeviceptr) -> Result<(), E>,
    ) -> Result<(), E> {
        let stream = &*self.stream;
        self.be_ready()?;
        let (address, on_drop) = address(stream);
        let _noted = Noted { on_drop, stream };
        self.be_ready()?;
        enqueue(address)
    }

    /// What has to be so right before a copy is enqueued.
    fn be_ready(&self) -> Result<(), CudaError> {
        let context = self.stream.context();
        driver::take_stored_error(context)?;
        driver::make_current(context)?;
        if driver::is_capturing(&self.stream)? {
            return Err(CudaError::StreamIsCapturing);
        }
        Ok(())
    }
}

/// Notes the use of device memory once it was enqueued, so that later uses on
/// other streams come after it.
struct Noted<'a> {
    on_drop: SyncOnDrop<'a>,
    stream: &'a CudaStream,
}

/// Notes it by itself where `cudarc` would record an event. `cudarc` leaves that
/// out if another thread has stored an error meanwhile, and then no other
/// stream knows of the copy, or waits for it before the memory is freed.
impl Drop for Noted<'_> {
    #[inline]
    fn drop(&mut self) {
        let SyncOnDrop::Record(target) = &mut self.on_drop else {
            return;
        };
        let Some((event, stream)) = *target else {
            return;
        };
        let context = stream.context();
        // A type of the program's may have given other things. What is to come
        // of those is `cudarc`'s to say.
        if !ptr::eq(stream, self.stream) || event.context() != context {
            return;
        }
        *target = None;
        if context.is_managing_stream_synchronization() {
            context.record_err(driver::record_use(event, stream));
        }
    }
}

/// Whether there is anything to copy, and room for it.
#[inline]
pub(super) fn has_room(
    source: usize,
    destination: usize,
    element_bytes: usize,
) -> Result<bool, CudaError> {
    if destination < source {
        return Err(CudaError::DestinationTooShort {
            source,
            destination,
        });
    }
    Ok(source > 0 && element_bytes > 0)
}
