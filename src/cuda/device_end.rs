//! The end of a copy that is on the device: which memory it can be, and the
//! preconditions of a copy.

use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{
    CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop,
    UnifiedSlice, UnifiedView, UnifiedViewMut,
};

use super::driver::PER_THREAD_STREAM;
use super::wait::{abort_unless_dead, wait_for_stream, wait_or_abort};
use super::{Copier, CudaError, context, driver};

/// Device memory that a copy can read: `cudarc`'s slices and views, and
/// [`RawDeviceMemory`].
///
/// [`DevicePtr`] alone is not enough: safe code can implement it with any
/// address.
///
/// # Safety
///
/// For as long as the value lives:
///
/// 1. [`device_ptr`](DevicePtr::device_ptr) returns the address of
///    [`len`](DeviceSlice::len) valid elements of device memory, in the context
///    of [`stream`](DeviceSlice::stream). All three are the same at each call.
/// 2. It makes the given stream wait for what has to come before a read, and
///    the returned [`SyncOnDrop::Record`] has an event, to be recorded on the
///    given stream, that a write and the free of the memory wait for. A wait that
///    fails is stored in the context of the given stream
///    ([`record_err`](cudarc::driver::CudaContext::record_err)). A copy of memory
///    that returns no event is waited for; with [`SyncOnDrop::Sync`] it is not,
///    since somebody has promised that nobody writes or frees the memory before
///    the device has read it.
/// 3. Neither function does anything else with the driver or with a stream.
pub unsafe trait DeviceSource<T>: DevicePtr<T> {
    /// Whether the memory is freed in the order of
    /// [`stream`](DeviceSlice::stream), and reached by the host in no other way
    /// than by copies. If this cannot be said, it is `false`.
    fn is_freed_in_order(&self) -> bool {
        false
    }
}

/// Device memory that a copy can write: `cudarc`'s slices and mutable views,
/// and [`RawDeviceMemory`].
///
/// A type of one's own that only claims to be device memory is refused:
///
/// ```compile_fail,E0277
/// use std::sync::Arc;
///
/// use pinned_hosts::cuda::cudarc::driver::sys::CUdeviceptr;
/// use pinned_hosts::cuda::cudarc::driver::{CudaStream, DevicePtrMut, DeviceSlice, SyncOnDrop};
/// use pinned_hosts::cuda::{Copier, CudaError};
///
/// struct Claimed(Arc<CudaStream>);
///
/// impl DeviceSlice<u8> for Claimed {
///     fn len(&self) -> usize {
///         1 << 30
///     }
///     fn stream(&self) -> &Arc<CudaStream> {
///         &self.0
///     }
/// }
///
/// impl DevicePtrMut<u8> for Claimed {
///     fn device_ptr_mut<'a>(&'a mut self, _: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
///         (0x1000, SyncOnDrop::Sync(None))
///     }
/// }
///
/// fn write(copier: &Copier, claimed: &mut Claimed) -> Result<(), CudaError> {
///     copier.copy_h2d_async(&[7], claimed)
/// }
/// ```
///
/// Who implements the trait as well takes the responsibility, and this compiles:
///
/// ```
/// # use std::sync::Arc;
/// # use pinned_hosts::cuda::cudarc::driver::sys::CUdeviceptr;
/// # use pinned_hosts::cuda::cudarc::driver::{
/// #     CudaSlice, CudaStream, DevicePtrMut, DeviceSlice, SyncOnDrop,
/// # };
/// # use pinned_hosts::cuda::{Copier, CudaError};
/// use pinned_hosts::cuda::DeviceDestination;
///
/// struct Wrapped(CudaSlice<u8>);
///
/// impl DeviceSlice<u8> for Wrapped {
///     fn len(&self) -> usize {
///         self.0.len()
///     }
///     fn stream(&self) -> &Arc<CudaStream> {
///         self.0.stream()
///     }
/// }
///
/// impl DevicePtrMut<u8> for Wrapped {
///     fn device_ptr_mut<'a>(&'a mut self, on: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
///         self.0.device_ptr_mut(on)
///     }
/// }
///
/// // SAFETY: all of it is what `CudaSlice` does.
/// unsafe impl DeviceDestination<u8> for Wrapped {}
///
/// fn write(copier: &Copier, wrapped: &mut Wrapped) -> Result<(), CudaError> {
///     copier.copy_h2d_async(&[7], wrapped)
/// }
/// ```
///
/// # Safety
///
/// As for [`DeviceSource`], with [`device_ptr_mut`](DevicePtrMut::device_ptr_mut)
/// in place of `device_ptr`, memory that need not hold valid elements, and an
/// event that reads, other writes and the free wait for.
pub unsafe trait DeviceDestination<T>: DevicePtrMut<T> {
    /// As [`DeviceSource::is_freed_in_order`].
    fn is_freed_in_order(&self) -> bool {
        false
    }
}

macro_rules! of_cudarc {
    ($name:ident: $($memory:ty),* => $in_order:expr) => {$(
        // SAFETY: `cudarc` allocated the memory. The type keeps an event for
        // each kind of use, and waits for both before the memory is written
        // or freed (`keep_tracking`); or it says that it has none. While events
        // are not tracked, the program has taken the responsibility
        // (`CudaContext::disable_event_tracking`).
        unsafe impl<T> $name<T> for $memory {
            fn is_freed_in_order(&self) -> bool {
                let in_order: fn(&CudaStream) -> bool = $in_order;
                in_order(DeviceSlice::<T>::stream(self))
            }
        }
    )*};
}

// Without memory pools, the drop waits for the stream, unless an error is stored.
of_cudarc!(DeviceSource: CudaSlice<T>, CudaView<'_, T>, CudaViewMut<'_, T>
    => |stream| stream.context().has_async_alloc());
of_cudarc!(DeviceDestination: CudaSlice<T>, CudaViewMut<'_, T>
    => |stream| stream.context().has_async_alloc());
// The host reaches it once an event has fired.
of_cudarc!(DeviceSource: UnifiedSlice<T>, UnifiedView<'_, T>, UnifiedViewMut<'_, T> => |_| false);
of_cudarc!(DeviceDestination: UnifiedSlice<T>, UnifiedViewMut<'_, T> => |_| false);

/// Device memory that neither `cudarc` nor this crate has allocated: an
/// address, a length and a stream.
///
/// ```no_run
/// use pinned_hosts::cuda::cudarc::driver::result;
/// use pinned_hosts::cuda::{self, Copier, RawDeviceMemory};
///
/// let context = cuda::context(0)?;
/// let stream = context.new_stream()?;
/// let copier = Copier::new(&stream)?;
/// // SAFETY: 4096 bytes, used in the order of `stream` alone, and freed in the
/// // same order.
/// unsafe {
///     let address = result::malloc_async(stream.cu_stream(), 4096)?;
///     let mut memory = RawDeviceMemory::<u32>::new(address, 1024, &stream);
///     copier.copy_h2d_async(&[7; 1024], &mut memory)?;
///     result::free_async(address, stream.cu_stream())?;
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct RawDeviceMemory<T> {
    address: CUdeviceptr,
    len: usize,
    stream: Arc<CudaStream>,
    elements: PhantomData<*mut T>,
}

// SAFETY: an address on the device, from which the host reads nothing.
unsafe impl<T: Send> Send for RawDeviceMemory<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for RawDeviceMemory<T> {}

impl<T> RawDeviceMemory<T> {
    /// The `len` elements at `address`.
    ///
    /// # Safety
    ///
    /// 1. `address` is aligned for `T`, and `len` elements of device memory in
    ///    the context of `stream` begin there. To copy from them, they hold
    ///    valid elements.
    /// 2. Copies neither wait for other uses of the memory, nor do other uses
    ///    wait for copies. The caller sees to the order: on one stream nothing
    ///    is to be done; between streams an event is.
    /// 3. The memory exists for as long as the value is used in copies, and is
    ///    freed once the device has made all of them, or in their order.
    #[must_use]
    pub unsafe fn new(address: CUdeviceptr, len: usize, stream: &Arc<CudaStream>) -> Self {
        Self {
            address,
            len,
            stream: Arc::clone(stream),
            elements: PhantomData,
        }
    }
}

impl<T> DeviceSlice<T> for RawDeviceMemory<T> {
    fn len(&self) -> usize {
        self.len
    }

    fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }
}

impl<T> DevicePtr<T> for RawDeviceMemory<T> {
    fn device_ptr<'a>(&'a self, _: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (self.address, SyncOnDrop::Sync(None))
    }
}

impl<T> DevicePtrMut<T> for RawDeviceMemory<T> {
    fn device_ptr_mut<'a>(&'a mut self, _: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (self.address, SyncOnDrop::Sync(None))
    }
}

// SAFETY: what the caller of `new` has promised.
unsafe impl<T> DeviceSource<T> for RawDeviceMemory<T> {}
// SAFETY: as above.
unsafe impl<T> DeviceDestination<T> for RawDeviceMemory<T> {}

impl Copier {
    /// Calls `enqueue` with the beginning of `dst`, which has room for
    /// `elements` elements, unless there is nothing to copy. `dst` notes the
    /// use that `enqueue` makes of it.
    ///
    /// # Errors
    ///
    /// [`CudaError::DestinationTooShort`], as [`be_ready`](Self::be_ready), as
    /// [`copy_to_ready`](Self::copy_to_ready), or those of `enqueue`.
    #[inline]
    pub(super) fn copy_to<T, D, E>(
        &self,
        dst: &mut D,
        elements: usize,
        enqueue: impl FnOnce(CUdeviceptr) -> Result<(), E>,
    ) -> Result<(), E>
    where
        D: DeviceDestination<T>,
        E: From<CudaError>,
    {
        if !has_room(elements, dst.len(), size_of::<T>())? {
            return Ok(());
        }
        self.be_ready()?;
        self.copy_to_ready(dst, enqueue)
    }

    /// The same once [`be_ready`](Self::be_ready) was called, for a `dst` that
    /// has room.
    ///
    /// # Errors
    ///
    /// [`CudaError::OtherContext`], [`CudaError::StreamIsCapturing`],
    /// [`CudaError::Stored`], or those of `enqueue`.
    #[inline]
    pub(super) fn copy_to_ready<T, D, E>(
        &self,
        dst: &mut D,
        enqueue: impl FnOnce(CUdeviceptr) -> Result<(), E>,
    ) -> Result<(), E>
    where
        D: DeviceDestination<T>,
        E: From<CudaError>,
    {
        self.be_in_context_of(dst.stream())?;
        let in_order = self.is_freed_in_order(dst.stream(), dst.is_freed_in_order());
        self.enqueue_noted(dst.device_ptr_mut(&self.stream), in_order, enqueue)
    }

    /// Calls `enqueue` with the beginning of `src`, all of which is to be copied
    /// to a place for `room` elements, unless there is nothing to copy. `src`
    /// notes the use that `enqueue` makes of it.
    ///
    /// # Errors
    ///
    /// As [`copy_to`](Self::copy_to).
    #[inline]
    pub(super) fn copy_from<T, D, E>(
        &self,
        src: &D,
        room: usize,
        enqueue: impl FnOnce(CUdeviceptr) -> Result<(), E>,
    ) -> Result<(), E>
    where
        D: DeviceSource<T>,
        E: From<CudaError>,
    {
        if !has_room(src.len(), room, size_of::<T>())? {
            return Ok(());
        }
        self.be_ready()?;
        self.copy_from_ready(src, enqueue)
    }

    /// As [`copy_to_ready`](Self::copy_to_ready).
    #[inline]
    pub(super) fn copy_from_ready<T, D, E>(
        &self,
        src: &D,
        enqueue: impl FnOnce(CUdeviceptr) -> Result<(), E>,
    ) -> Result<(), E>
    where
        D: DeviceSource<T>,
        E: From<CudaError>,
    {
        self.be_in_context_of(src.stream())?;
        let in_order = self.is_freed_in_order(src.stream(), src.is_freed_in_order());
        self.enqueue_noted(src.device_ptr(&self.stream), in_order, enqueue)
    }

    /// The preconditions of asking for an address: `cudarc` makes the stream
    /// wait for the last uses then, which spoils a capture that has begun, and
    /// leaves the wait out while an error is stored.
    #[inline]
    pub(super) fn be_ready(&self) -> Result<(), CudaError> {
        let context = self.stream.context();
        driver::take_stored_error(context)?;
        driver::make_current(context)?;
        self.refuse_capture()
    }

    #[inline]
    fn refuse_capture(&self) -> Result<(), CudaError> {
        if driver::is_capturing(&self.stream)? {
            return Err(CudaError::StreamIsCapturing);
        }
        Ok(())
    }

    /// Whether `stream` is of the copier's context. Two objects for one context
    /// of the driver count as the same.
    #[inline]
    pub(super) fn be_in_context_of(&self, stream: &CudaStream) -> Result<(), CudaError> {
        let (ours, theirs) = (self.stream.context(), stream.context());
        if Arc::ptr_eq(ours, theirs) {
            return Ok(());
        }
        if ours != theirs {
            return Err(CudaError::OtherContext {
                copier: ours.ordinal(),
                memory: theirs.ordinal(),
            });
        }
        context::keep_tracking(theirs)
    }

    /// Calls `enqueue` with the address, and notes the use, so that later uses on
    /// other streams, and the free, come after it. Memory without an event to note
    /// it by is waited for.
    ///
    /// To ask for an address can join the stream to a capture that a last use
    /// is part of, and can store an error. So both are looked at again. (An
    /// error that another thread stores and takes in between is not seen.)
    #[inline]
    fn enqueue_noted<E: From<CudaError>>(
        &self,
        (address, on_drop): (CUdeviceptr, SyncOnDrop<'_>),
        in_order: bool,
        enqueue: impl FnOnce(CUdeviceptr) -> Result<(), E>,
    ) -> Result<(), E> {
        // Its drop would record the event, and so delete what the event says of a
        // use that this stream may not have waited for.
        let on_drop = ManuallyDrop::new(on_drop);
        let context = self.stream.context();
        driver::take_stored_error(context)?;
        self.refuse_capture()?;
        let noted_by = match *on_drop {
            SyncOnDrop::Record(None) if context.is_event_tracking() => {
                return self.enqueue_and_wait(address, enqueue);
            }
            SyncOnDrop::Record(target) => target,
            SyncOnDrop::Sync(_) => None,
        };
        let enqueued = enqueue(address);
        let noted = noted_by.map_or(Ok(()), |(event, stream)| driver::record_use(event, stream));
        let noted = match noted {
            // The next call tells it, as with `cudarc`.
            Err(CudaError::Driver { source, .. }) if in_order => {
                context.record_err(Err::<(), _>(source));
                Ok(())
            }
            // The owner of the memory would free it under the copy.
            Err(error) => abort_unless_dead(wait_for_stream(error, &self.stream)),
            Ok(()) => Ok(()),
        };
        enqueued?;
        Ok(noted?)
    }

    #[cold]
    fn enqueue_and_wait<E: From<CudaError>>(
        &self,
        address: CUdeviceptr,
        enqueue: impl FnOnce(CUdeviceptr) -> Result<(), E>,
    ) -> Result<(), E> {
        let event = self.lane.take_event()?;
        let enqueued = enqueue(address);
        let waited = wait_or_abort(&event, &self.stream);
        self.lane.put_back(event);
        self.lane.counts.guarded.add(1);
        enqueued?;
        Ok(waited?)
    }

    /// Whether memory that is `freed_in_order` of `stream` is freed behind all
    /// copies. (The handle of the per-thread default stream stands for another
    /// stream on each thread.)
    #[inline]
    fn is_freed_in_order(&self, stream: &CudaStream, freed_in_order: bool) -> bool {
        let handle = stream.cu_stream();
        freed_in_order && handle == self.stream.cu_stream() && handle as usize != PER_THREAD_STREAM
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
