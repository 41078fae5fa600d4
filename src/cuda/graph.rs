//! [`Copier::capture_h2d_from`]: copies captured into a graph, which keeps
//! their source.
//!
//! # Who keeps the buffer
//!
//! A captured copy stores the *address* of its source, and every launch reads
//! it again. So the graph must keep the source, not the caller: `cudarc`'s
//! `CudaGraph` has no place for it, but the driver has. A *user object* is a
//! destructor and a count of references, and graphs can own some. From the
//! programming guide, "CUDA User Objects":
//!
//! - "An instantiated `cudaGraphExec_t` retains a copy of every reference in
//!   the source `cudaGraph_t`", and so does a clone.
//! - "When a `cudaGraphExec_t` is destroyed without being synchronized, the
//!   references are retained until the execution is completed."
//! - "References owned by graphs in child graph nodes are associated to the
//!   child graphs": a graph launched into another capture brings its own.
//!
//! So each captured copy gives the graph a user object that holds a clone of
//! the buffer's `Arc`. While it does, nobody can get a `&mut PinnedBuffer` to
//! write what a launch may read, and the buffer is neither freed nor
//! unregistered. What the device reads is then the same at every launch.
//!
//! The graph has the object *before* the copy. If the copy then fails, the
//! buffer is kept longer than it need be, and that is all.
//!
//! The buffer's events have no part in this: one that was recorded in a capture
//! stands for nothing that runs, and waiting for it is an error.
//!
//! # Who drops it
//!
//! The destructor runs on a thread of the driver's that all graphs share, must
//! not call the driver, and "should avoid blocking behavior"
//! (`cuUserObjectCreate`). Dropping a buffer does both. So the destructor only
//! puts the clone on a list, without a lock and without allocating; `released.rs`
//! says who frees it. Other copies may still use the buffer then, on a stream that
//! is stuck: it is freed once none does.

use std::ffi::c_void;
use std::mem::{self, ManuallyDrop};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cudarc::driver::DeviceRepr;

use super::device_end::has_room;
use super::released::{AT_ONCE, BUFFERS, Entry, Freed, Released};
use super::{Copier, CudaError, DeviceDestination, PinnedBuffer, driver};

impl Copier {
    /// Captures a copy of `elements` of `src` to the beginning of `dst` into
    /// the graph that the stream is capturing. Each launch of the graph reads
    /// the buffer anew.
    ///
    /// The graph keeps the buffer: until the graph, everything instantiated
    /// from it, and every launch of those is over, one `Arc` of it is the
    /// graph's. So it cannot be written meanwhile
    /// ([`Arc::get_mut`] gives `None`). It is freed some time after the graph
    /// was: see [`reclaim`](super::reclaim).
    ///
    /// `dst` is not kept, just as `cudarc` keeps no device memory that a
    /// captured call uses: it has to live for as long as the graph is launched.
    /// `cudarc` also makes the stream wait for the last uses of `dst`, which
    /// spoils a capture if they lie before it; see
    /// [`disable_event_tracking`](cudarc::driver::CudaContext::disable_event_tracking).
    ///
    /// Buffers that other graphs have kept, and that are idle, are freed; those in
    /// use are not waited for.
    ///
    /// The driver does not lock graphs. Let one thread at a time capture into
    /// one, and end the capture when the others are through.
    ///
    /// # Errors
    ///
    /// Nothing was captured if this returns
    /// [`CudaError::RangeOutOfBounds`], [`CudaError::DestinationTooShort`],
    /// [`CudaError::OtherContext`], [`CudaError::Stored`], [`CudaError::StreamIsNotCapturing`],
    /// [`CudaError::CaptureInvalidated`] or [`CudaError::MissingFunction`]
    /// (the driver is older than CUDA 11.3).
    ///
    /// [`CudaError::Driver`]: the copy may or may not be in the graph; if it
    /// is, the graph keeps the buffer. [`CudaError::CaptureChanged`]: the
    /// buffer is kept for good, as it may be after a failed
    /// `cuStreamGetCaptureInfo` or `cuUserObjectRelease`.
    ///
    /// End the capture after an error, too.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use std::sync::Arc;
    ///
    /// use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
    /// use pinned_hosts::cuda::{self, Copier, PinnedBuffer};
    ///
    /// let context = cuda::context(0)?;
    /// // SAFETY: all work is on one stream: there is nothing to track.
    /// unsafe { context.disable_event_tracking() };
    /// let copier = Copier::new(&context.new_stream()?)?;
    /// let stream = copier.stream();
    /// let mut on_device = stream.alloc_zeros::<f32>(1024)?;
    /// let table = Arc::new(PinnedBuffer::from_slice(&context, &[0.5f32; 1024])?);
    ///
    /// stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    /// let captured = copier.capture_h2d_from(&table, 0..1024, &mut on_device);
    /// let graph = stream.end_capture(CUgraphInstantiate_flags(0))?;
    /// captured?;
    ///
    /// // The graph has an `Arc` of its own.
    /// drop(table);
    /// if let Some(graph) = graph {
    ///     graph.launch()?;
    ///     graph.launch()?;
    /// }
    /// stream.synchronize()?;
    /// // The graph is gone, and the table soon.
    /// cuda::reclaim();
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn capture_h2d_from<T, D>(
        &self,
        src: &Arc<PinnedBuffer<T>>,
        elements: Range<usize>,
        dst: &mut D,
    ) -> Result<(), CudaError>
    where
        T: DeviceRepr + Send + Sync + 'static,
        D: DeviceDestination<T>,
    {
        BUFFERS.free(AT_ONCE);
        let part = src
            .get(elements.clone())
            .ok_or(CudaError::RangeOutOfBounds {
                start: elements.start,
                end: elements.end,
                len: src.len(),
            })?;
        if !has_room(part.len(), dst.len(), size_of::<T>())? {
            return Ok(());
        }
        self.be_capturing()?;
        self.be_in_context_of(dst.stream())?;
        let (dst_address, written) = dst.device_ptr_mut(self.stream());
        // Dropped, it is recorded: not before the copy is.
        let written = ManuallyDrop::new(written);
        let kept = Entry::new(Box::new(Arc::clone(src)));
        // Until the end, for those other threads that come this way too.
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let capture = self.be_capturing()?;
        // SAFETY: `let_go` takes `kept`, which is handed over here, and may do
        // so on any thread; it does not call the driver. The capture was under
        // way just now, and it is the caller's to see that no other thread
        // ends it or uses its graph.
        unsafe { driver::keep_for_graph(capture, Entry::into_raw(kept).cast(), let_go) }?;
        // SAFETY: the graph keeps the buffer, and so keeps it from being
        // written, for as long as this copy can run; `has_room` saw that the
        // destination is long enough.
        let captured = unsafe {
            driver::copy_h2d(
                dst_address,
                part.as_ptr().cast(),
                size_of_val(part),
                self.stream(),
            )
        };
        drop(ManuallyDrop::into_inner(written));
        let after = driver::capture_of(self.stream());
        if after == Ok(capture) {
            return captured;
        }
        // Another thread may have ended the capture before the copy, which was
        // then not captured but enqueued, and which no graph keeps anything for.
        mem::forget(Arc::clone(src));
        captured?;
        match after {
            Err(error @ CudaError::Driver { .. }) => Err(error),
            _ => Err(CudaError::CaptureChanged),
        }
    }

    /// What has to be so right before a copy is captured. Asked before and
    /// after the destination's address is, for the reasons that there are when
    /// a copy is enqueued.
    fn be_capturing(&self) -> Result<driver::Capture, CudaError> {
        let context = self.stream().context();
        driver::take_stored_error(context)?;
        driver::make_current(context)?;
        driver::capture_of(self.stream())
    }
}

/// A graph's hold on a buffer.
impl<T: Send + Sync + 'static> Released for Arc<PinnedBuffer<T>> {
    fn free(self: Box<Self>, limit: Option<Duration>) -> Freed {
        match Arc::into_inner(*self) {
            Some(buffer) => Box::new(buffer).free(limit),
            None => Freed::NotByUs,
        }
    }
}

/// A buffer that no handle is left of, but that transfers may still use.
impl<T: Send + Sync + 'static> Released for PinnedBuffer<T> {
    fn free(self: Box<Self>, _: Option<Duration>) -> Freed {
        // In a forked child, neither the memory nor the events are ours.
        if !self.is_of_this_process() {
            return Freed::NotYet(self);
        }
        match self.is_idle() {
            Ok(true) => Freed::Now,
            // It leaks itself, and says so.
            Err(_) if self.lost().is_some() => Freed::NotByUs,
            Ok(false) | Err(_) => Freed::NotYet(self),
        }
    }
}

/// The destructor of the user objects.
///
/// # Safety
///
/// `kept` comes from [`Entry::into_raw`], and is not used by anybody else from now on.
unsafe extern "C" fn let_go(kept: *mut c_void) {
    if let Some(entry) = NonNull::new(kept.cast::<Entry>()) {
        // SAFETY: the caller's promise.
        unsafe { BUFFERS.put(entry) };
    }
}
