//! [`PinnedBuffer`]: page-locked memory that is registered while it lives.

use std::fmt;
use std::mem;
use std::ops::Deref;
use std::ptr::NonNull;
use std::slice;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use cudarc::driver::{CudaContext, CudaStream, DeviceRepr, ValidAsZeroBits};

use super::CudaError;
use super::driver::{self, Event, PER_THREAD_STREAM};
use super::pinned_memory::{PinnedMemory, report_leak};
use super::released::{AT_ONCE, BUFFERS};
use super::wait::{Waited, wait_for_event, wait_for_stream};

/// A buffer of page-locked host memory, allocated by the driver, in the
/// process-wide registry from its making to its end.
///
/// The memory is portable (every context may use it) and not write-combined
/// (the CPU reads it at full speed). Pinning costs about 0.3 to 1 ms per MB:
/// make buffers ahead of time and use them again. To make one frees idle buffers
/// that graphs have kept ([`reclaim`](super::reclaim)), and waits for no transfer
/// from those in use.
///
/// It reads as a slice. To write, ask for [`as_mut_slice`](Self::as_mut_slice),
/// which waits until no transfer reads the buffer any more. Dropping waits
/// too; if the driver cannot say that the transfers are done, the memory is
/// leaked, not freed, and stays registered.
///
/// Only copies through a [`Copier`](super::Copier) are known to it. `cudarc`'s
/// own `memcpy_htod` takes it as a slice like any other, neither waits nor
/// says so, and is as unsound with it as with all page-locked memory
/// ([`CheckedCopies`](super::CheckedCopies) are not).
///
/// # Examples
///
/// ```no_run
/// use pinned_hosts::cuda::{self, Copier, PinnedBuffer};
///
/// let context = cuda::context(0)?;
/// let copier = Copier::new(&context.new_stream()?)?;
/// let mut on_device = copier.stream().alloc_zeros::<u32>(1024)?;
///
/// let mut buffer = PinnedBuffer::<u32>::zeroed(&context, 1024)?;
/// buffer.as_mut_slice()?.fill(7);
///
/// // Returns at once; the buffer knows that it is in use.
/// copier.copy_h2d_from(&buffer, 0..1024, &mut on_device)?;
/// // Waits for that copy, then writes.
/// buffer.as_mut_slice()?.fill(8);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct PinnedBuffer<T> {
    /// `None` if the buffer has no bytes.
    memory: Option<PinnedMemory>,
    /// Where the elements are; dangling if they have no bytes.
    elements: NonNull<T>,
    len: usize,
    context: Arc<CudaContext>,
    uses: Mutex<Uses>,
}

/// The transfers that may still use a buffer.
#[derive(Debug, Default)]
struct Uses {
    /// One for each stream that has used the buffer of late.
    streams: Vec<StreamUse>,
    /// Set once nobody can say any more whether a transfer is done.
    lost: Option<CudaError>,
}

/// The transfers on one stream. One event is enough: recorded behind the last
/// of them, it is behind all.
#[derive(Debug)]
struct StreamUse {
    /// Held, so that no new stream can get the same handle.
    stream: Arc<CudaStream>,
    /// The handle of the per-thread default stream is one handle for many
    /// streams: a thread's own.
    thread: Option<ThreadId>,
    event: Event,
}

// SAFETY: the buffer owns its memory as a `Box<[T]>` would.
unsafe impl<T: Send> Send for PinnedBuffer<T> {}
// SAFETY: through a shared buffer the memory is only read.
unsafe impl<T: Sync> Sync for PinnedBuffer<T> {}

/// The most bytes that an allocation can have.
pub(super) const LARGEST: usize = isize::MAX.unsigned_abs();

/// How many bytes `len` elements have.
pub(super) fn bytes_of<T>(len: usize) -> Result<usize, CudaError> {
    let bytes = len.checked_mul(size_of::<T>());
    bytes
        .filter(|&bytes| bytes <= LARGEST)
        .ok_or(CudaError::TooLarge {
            elements: len,
            element_bytes: size_of::<T>(),
        })
}

impl<T: DeviceRepr + Copy> PinnedBuffer<T> {
    /// Allocates `len` elements of zeros.
    ///
    /// # Errors
    ///
    /// [`CudaError::TooLarge`] if that many elements cannot be;
    /// [`CudaError::Driver`] if the driver cannot pin so much (a limit of the
    /// system is common: WSL2 pins about 1 GB at most. Fall back to ordinary
    /// memory); [`CudaError::Misaligned`].
    pub fn zeroed(context: &Arc<CudaContext>, len: usize) -> Result<Self, CudaError>
    where
        T: ValidAsZeroBits,
    {
        let buffer = Self::allocate(context, len)?;
        // SAFETY: the memory holds `len` elements, nobody else has it, and
        // zeros are valid elements (`ValidAsZeroBits`).
        unsafe { buffer.elements.as_ptr().write_bytes(0, len) };
        Ok(buffer)
    }

    /// Allocates a copy of `elements`.
    ///
    /// # Errors
    ///
    /// As [`zeroed`](Self::zeroed).
    pub fn from_slice(context: &Arc<CudaContext>, elements: &[T]) -> Result<Self, CudaError> {
        let buffer = Self::allocate(context, elements.len())?;
        // SAFETY: the memory holds as many elements, and is new, so it does
        // not overlap the source.
        unsafe {
            elements
                .as_ptr()
                .copy_to_nonoverlapping(buffer.elements.as_ptr(), elements.len());
        }
        Ok(buffer)
    }

    /// The elements are not initialised yet.
    fn allocate(context: &Arc<CudaContext>, len: usize) -> Result<Self, CudaError> {
        driver::require()?;
        // What graphs kept is freed first: the driver may need that memory.
        BUFFERS.free(AT_ONCE);
        let bytes = bytes_of::<T>(len)?;
        let mut buffer = Self {
            memory: None,
            elements: NonNull::dangling(),
            len,
            context: Arc::clone(context),
            uses: Mutex::default(),
        };
        if bytes == 0 {
            return Ok(buffer);
        }
        let memory = buffer
            .memory
            .insert(PinnedMemory::allocate(context, bytes)?);
        buffer.elements = memory.base().cast();
        if !buffer.elements.is_aligned() {
            return Err(CudaError::Misaligned {
                wanted: align_of::<T>(),
            });
        }
        Ok(buffer)
    }
}

impl<T> PinnedBuffer<T> {
    /// The elements. Also by `Deref`.
    #[must_use]
    pub fn as_slice(&self) -> &[T] {
        // SAFETY: the memory holds `len` initialised elements (every
        // constructor sees to it). The CPU writes it only through
        // `as_mut_slice`, which borrows it alone. The device only reads it,
        // except in a download, and a `Transfer` lets nobody borrow the buffer
        // before that is over.
        unsafe { slice::from_raw_parts(self.elements.as_ptr(), self.len) }
    }

    /// The elements, to write. Waits until no transfer reads them.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`] if the driver cannot say whether a transfer is
    /// done. The buffer can still be read, and is leaked when dropped.
    pub fn as_mut_slice(&mut self) -> Result<&mut [T], CudaError> {
        self.wait()?;
        // SAFETY: as in `as_slice`; and no transfer is in flight.
        Ok(unsafe { slice::from_raw_parts_mut(self.elements.as_ptr(), self.len) })
    }

    /// Waits until no transfer reads the buffer.
    ///
    /// # Errors
    ///
    /// As [`as_mut_slice`](Self::as_mut_slice).
    pub fn wait(&mut self) -> Result<(), CudaError> {
        match self.settle() {
            Waited::Done(result) => result,
            Waited::Unknown(error) => Err(error),
        }
    }

    /// The context that the memory was allocated in.
    #[must_use]
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Runs `enqueue`, which enqueues a copy of this buffer on `stream`, and
    /// notes the use, for [`wait`](Self::wait) and the drop to wait for. If it
    /// cannot be noted, it is waited for here and now.
    ///
    /// All that can fail for want of anything is done before `enqueue` runs.
    pub(super) fn use_in(
        &self,
        stream: &Arc<CudaStream>,
        enqueue: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let mut uses = self.uses();
        let event = uses.event_for(stream)?;
        let enqueued = enqueue();
        let noted = match event.record(stream) {
            Ok(()) => Ok(()),
            Err(error) => match wait_for_stream(error, stream) {
                Waited::Done(result) => result,
                Waited::Unknown(error) => {
                    uses.lost = Some(error.clone());
                    Err(error)
                }
            },
        };
        enqueued.and(noted)
    }

    /// Lets `stream` do nothing that is enqueued on it from now on before the
    /// uses of this buffer on other streams are over. The calling thread does
    /// not wait.
    pub(super) fn hold_back(&self, stream: &Arc<CudaStream>) -> Result<(), CudaError> {
        let uses = self.uses();
        let thread = thread_of(stream);
        uses.streams
            .iter()
            .filter(|known| known.stream != *stream || known.thread != thread)
            .try_for_each(|known| known.event.hold_back(stream))
    }

    /// Waits until no transfer uses the buffer.
    pub(super) fn settle(&mut self) -> Waited {
        self.uses_mut().settle()
    }

    /// Whether no transfer uses the buffer, as far as the driver can say.
    /// Never waits.
    pub(super) fn is_idle(&self) -> Result<bool, CudaError> {
        self.uses().is_over()
    }

    /// The error with which it was lost whether a transfer is done, for good.
    pub(super) fn lost(&self) -> Option<CudaError> {
        self.uses().lost.clone()
    }

    /// How many elements the memory holds, of which `len` are in use. They are
    /// all initialised.
    pub(super) fn capacity(&self) -> usize {
        match &self.memory {
            Some(memory) => memory.bytes() / size_of::<T>(),
            None => self.len,
        }
    }

    /// Makes the buffer as long as `len`, or as its capacity if that is less.
    pub(super) fn set_len(&mut self, len: usize) {
        self.len = len.min(self.capacity());
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut T {
        self.elements.as_ptr()
    }

    pub(super) fn is_of_this_process(&self) -> bool {
        self.memory
            .as_ref()
            .is_none_or(PinnedMemory::is_of_this_process)
    }

    fn uses(&self) -> MutexGuard<'_, Uses> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn uses_mut(&mut self) -> &mut Uses {
        self.uses.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Uses {
    /// The event of `stream`; if it is new, in place of those that are over.
    fn event_for(&mut self, stream: &Arc<CudaStream>) -> Result<&Event, CudaError> {
        let thread = thread_of(stream);
        let known = self
            .streams
            .iter()
            .position(|known| known.stream == *stream && known.thread == thread);
        let index = match known {
            Some(index) => index,
            None => {
                self.streams.retain(|known| !known.event.is_done());
                self.streams.push(StreamUse {
                    stream: Arc::clone(stream),
                    thread,
                    event: Event::new(stream.context())?,
                });
                self.streams.len() - 1
            }
        };
        Ok(&self.streams[index].event)
    }

    fn is_over(&self) -> Result<bool, CudaError> {
        if let Some(error) = &self.lost {
            return Err(error.clone());
        }
        for known in &self.streams {
            if !known.event.ask()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn settle(&mut self) -> Waited {
        // However long the others took, the answer would stay the same.
        if let Some(error) = &self.lost {
            return Waited::Unknown(error.clone());
        }
        let mut result = Ok(());
        while let Some(last) = self.streams.last() {
            let here = last.thread == thread_of(&last.stream);
            let stream = here.then_some(&*last.stream);
            match wait_for_event(&last.event, stream) {
                Waited::Done(this) => result = result.and(this),
                // The entry stays, and can be asked again.
                unknown @ Waited::Unknown(_) => return unknown,
            }
            self.streams.pop();
        }
        Waited::Done(result)
    }
}

/// Whose stream it is, if its handle stands for a stream of each thread's own.
fn thread_of(stream: &CudaStream) -> Option<ThreadId> {
    let per_thread = stream.cu_stream() as usize == PER_THREAD_STREAM;
    per_thread.then(|| thread::current().id())
}

impl<T> Deref for PinnedBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.as_slice()
    }
}

impl<T> Drop for PinnedBuffer<T> {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else {
            return;
        };
        // In a forked child, the events are not ours either.
        if !memory.is_of_this_process() {
            mem::forget(mem::take(self.uses_mut()));
            return;
        }
        match self.uses_mut().settle() {
            // An error of a transfer that is over was for `wait` to report.
            //
            // SAFETY: nobody borrows the buffer, and no transfer uses it:
            // each was noted by `use_in`, and waited for.
            Waited::Done(_) => unsafe { memory.free() },
            Waited::Unknown(error) => {
                mem::forget(mem::take(self.uses_mut()));
                report_leak(memory.bytes(), &error);
            }
        }
    }
}

impl<T> fmt::Debug for PinnedBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedBuffer")
            .field("len", &self.len)
            .field("bytes", &(self.len * size_of::<T>()))
            .field("memory", &self.memory)
            .finish_non_exhaustive()
    }
}
