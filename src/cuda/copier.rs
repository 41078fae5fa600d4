//! [`Copier`]: copies that are sound for any borrowed slice.
//!
//! # What a copy to the device does
//!
//! The driver stages a pageable source before the call returns, and lets the
//! device read a page-locked one later. So the source's residency is asked
//! first, and then:
//!
//! | residency | what the copy does |
//! |---|---|
//! | `Pageable` | enqueue, return |
//! | `Pinned` | by policy: copy it into the staging ring and enqueue that (`src/cuda/staging.rs`); or enqueue, and wait for an event recorded right behind it; or refuse |
//! | `Seam`, `Mixed` | the same; if the device is to read the source itself it is split at the boundaries (the driver refuses one copy across them), with one wait for all parts |
//!
//! The copy runs in a read-side section (`src/section.rs`), so that no other
//! thread pins or unpins the source between the question and the end. Memory
//! that is about to be unpinned the device is not let read at all: where the
//! staging ring is not to be had, the copy goes through the heap.
//!
//! On devices that read pageable memory directly, nothing is promised to be
//! staged, and every source counts as pinned.
//!
//! The destination's own code runs before the question, since it can change
//! everything. No step from the question to the end of the wait runs code of
//! the caller's, and none after the first part was enqueued returns early: an
//! error is kept until the wait is over. That includes an error of the copy
//! call itself, which may stem from earlier work and then says nothing about
//! whether the copy was enqueued.

use std::ops::Range;
use std::panic::Location;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaContext, CudaStream, DeviceRepr};

use super::context::{keep_tracking, reads_pageable_late};
use super::driver::{self, Event};
use super::late::LateCopy;
use super::options::{CopierOptions, Policy};
use super::pinned_buffer::PinnedBuffer;
use super::staging::StagingRing;
use super::stats::{CopyStats, Counts};
use super::{CudaError, DeviceDestination, DeviceSource};
use crate::span::Span;
use crate::{Residency, global, reader};

/// Makes copies on one stream, sound for whatever borrowed slice they are
/// given.
///
/// One copier may be used from several threads. Keep one per stream: making
/// it creates an event and asks the device what it is, and its staging ring
/// has to grow anew. Dropping it waits for the copies that still use the ring;
/// while the stream captures, up to one step of the ring is leaked instead, since
/// to wait would spoil the capture.
///
/// # Examples
///
/// ```no_run
/// use pinned_hosts::cuda::{self, Copier};
///
/// let context = cuda::context(0)?;
/// let copier = Copier::new(&context.new_stream()?)?;
/// let mut on_device = copier.stream().alloc_zeros::<u32>(4)?;
///
/// let tokens = [1, 2, 3, 4];
/// copier.copy_h2d_async(&tokens, &mut on_device)?;
/// // `tokens` may go: the driver has its own copy, or is done with ours.
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Copier {
    pub(super) stream: Arc<CudaStream>,
    pub(super) lane: Arc<Lane>,
}

/// All that a copier needs for one stream, but for the stream, which it keeps
/// from ending no longer than the program wants it.
#[derive(Debug)]
pub(super) struct Lane {
    context: Arc<CudaContext>,
    /// Events to record behind copies that have to be waited for, as many as
    /// threads have waited at once. They cannot share one: on the per-thread
    /// default stream, another thread's record is on another stream.
    idle_events: Mutex<Vec<Event>>,
    /// Whether the device may read a pageable source after the call.
    pub(super) reads_pageable_late: bool,
    pub(super) options: CopierOptions,
    pub(super) staging: StagingRing,
    pub(super) counts: Counts,
}

impl Lane {
    pub(super) fn new(
        context: &Arc<CudaContext>,
        options: CopierOptions,
    ) -> Result<Self, CudaError> {
        driver::require()?;
        keep_tracking(context)?;
        Ok(Self {
            context: Arc::clone(context),
            idle_events: Mutex::new(vec![Event::new(context)?]),
            reads_pageable_late: reads_pageable_late(context, options.trusts_pageable_access)?,
            options,
            staging: StagingRing::new(options),
            counts: Counts::default(),
        })
    }

    pub(super) fn is_of(&self, context: &Arc<CudaContext>) -> bool {
        Arc::ptr_eq(&self.context, context)
    }

    /// Whether anybody but the lanes `all`, of which this is one, has the context.
    pub(super) fn is_context_used_beside<'a>(&self, all: impl Iterator<Item = &'a Self>) -> bool {
        let same = all.filter(|it| it.is_of(&self.context));
        let ours = same.map(|it| 1 + it.idle_events().len() + it.staging.contexts());
        Arc::strong_count(&self.context) > ours.sum()
    }

    fn idle_events(&self) -> MutexGuard<'_, Vec<Event>> {
        self.idle_events
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn take_event(&self) -> Result<Event, CudaError> {
        let idle = self.idle_events().pop();
        idle.map_or_else(|| Event::new(&self.context), Ok)
    }

    pub(super) fn put_back(&self, event: Event) {
        self.idle_events().push(event);
    }
}

impl Copier {
    /// A copier on `stream`, with the default [`CopierOptions`].
    ///
    /// The first one of a context makes the context track the uses of device
    /// memory ([why](crate::cuda#device-memory)), and waits for all work in it,
    /// unless the program has created a stream. That would spoil a capture of a
    /// per-thread default stream: make the copier before.
    ///
    /// # Errors
    ///
    /// [`CudaError::MissingFunction`] or [`CudaError::Driver`].
    pub fn new(stream: &Arc<CudaStream>) -> Result<Self, CudaError> {
        Self::with_options(stream, CopierOptions::default())
    }

    /// A copier on `stream`.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_options(
        stream: &Arc<CudaStream>,
        options: CopierOptions,
    ) -> Result<Self, CudaError> {
        Ok(Self {
            stream: Arc::clone(stream),
            lane: Arc::new(Lane::new(stream.context(), options)?),
        })
    }

    /// The stream that the copies are enqueued on.
    #[must_use]
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Copies all of `src` to the beginning of `dst`, in the order of the
    /// stream. When this returns, the device will not read `src` any more.
    ///
    /// Page-locked memory is recognised if it is registered: memory of this crate
    /// is, the slice of a [`PinnedHostSlice`](cudarc::driver::PinnedHostSlice),
    /// or of anything else that other code has page-locked, is not by itself.
    ///
    /// A pageable source costs little more than the driver's own call. One of
    /// which any byte is page-locked, or any source on a device that reads
    /// pageable memory directly (see the README's limits), is staged, or
    /// waited for, or refused, as the copier's [`Policy`] says. Copies that
    /// were waited for are counted ([`stats`](Self::stats)), and the first one
    /// at each call site is logged as a warning. To copy from page-locked
    /// memory without either, see
    /// [which copy](crate::cuda#which-copy-do-i-want).
    ///
    /// # Errors
    ///
    /// [`CudaError::DestinationTooShort`], [`CudaError::OtherContext`],
    /// [`CudaError::StreamIsCapturing`], [`CudaError::Stored`] and
    /// [`CudaError::Denied`]: nothing was enqueued.
    /// [`CudaError::Driver`]: the copy may or may not have happened, and the
    /// device does not read the source any more.
    ///
    /// # Aborts
    ///
    /// If a page-locked source was not staged, and the driver can say in no
    /// way whether its copy is done, yet does not say that the context is dead
    /// either, the process is aborted: the caller may reuse the source once
    /// this returns. So it is for a `dst` that another stream frees, if that
    /// stream cannot be told of the copy.
    #[track_caller]
    pub fn copy_h2d_async<T, D>(&self, src: &[T], dst: &mut D) -> Result<(), CudaError>
    where
        T: DeviceRepr,
        D: DeviceDestination<T>,
    {
        self.copy_h2d_async_with(self.lane.options.policy, src, dst)
    }

    /// As [`copy_h2d_async`](Self::copy_h2d_async), with another policy.
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Aborts
    ///
    /// As there.
    #[track_caller]
    pub fn copy_h2d_async_with<T, D>(
        &self,
        policy: Policy,
        src: &[T],
        dst: &mut D,
    ) -> Result<(), CudaError>
    where
        T: DeviceRepr,
        D: DeviceDestination<T>,
    {
        let site = Location::caller();
        self.copy_to(dst, src.len(), |dst| {
            // SAFETY: `src` is borrowed until this function returns; `copy_to`
            // saw that the destination is long enough.
            unsafe { self.copy_borrowed(policy, src, true, dst, site) }
        })
    }

    /// Copies all of `src` to `dst`, and returns once the device will not read
    /// `src` any more. Unless it `is_plain` memory, its owner has ordered other
    /// work before the copy, on the stream alone: the CPU must not read it yet,
    /// and it counts as page-locked.
    ///
    /// # Safety
    ///
    /// As [`copy_late`](Self::copy_late).
    pub(super) unsafe fn copy_borrowed<T>(
        &self,
        policy: Policy,
        src: &[T],
        is_plain: bool,
        dst: CUdeviceptr,
        site: &Location<'static>,
    ) -> Result<(), CudaError> {
        let (source, span) = (src.as_ptr().cast(), Span::of(src));
        // From before the question until the device is done with the source.
        let (section, residency) = reader::enter_and_ask(span);

        if residency == Residency::Pageable && !self.lane.reads_pageable_late && is_plain {
            self.lane.counts.pageable.add(1);
            // SAFETY: the driver stages a pageable source before it returns;
            // the caller's promise for the rest.
            return unsafe { driver::copy_h2d(dst, source, span.len(), &self.stream) };
        }

        let copy = LateCopy {
            source,
            span,
            residency: match residency {
                Residency::Pageable if !is_plain => Residency::Pinned,
                known => known,
            },
            is_plain,
            dst,
        };
        // SAFETY: the caller's promise.
        unsafe { self.copy_late(policy, copy, section, site) }
    }

    /// Despite its name, which is that of the driver's call, it waits: copies
    /// all of `src` to the beginning of `dst`, in the order of the stream, and
    /// returns when it is there. Nothing is promised about when the
    /// driver writes borrowed host memory, so every such copy is waited for,
    /// whatever `dst` is. To copy without a wait, see
    /// [which copy](crate::cuda#which-copy-do-i-want).
    ///
    /// # Errors
    ///
    /// [`CudaError::DestinationTooShort`], [`CudaError::OtherContext`],
    /// [`CudaError::StreamIsCapturing`] and [`CudaError::Stored`]: nothing was
    /// enqueued, and `dst` is as it was. [`CudaError::Denied`] too: the copier's policy is
    /// [`Policy::Deny`], and some of `dst` is page-locked.
    /// [`CudaError::Driver`]: some of `dst` may have been written, and the
    /// device does not write it any more.
    ///
    /// # Aborts
    ///
    /// As [`copy_h2d_async`](Self::copy_h2d_async).
    pub fn copy_d2h_async<T, D>(&self, src: &D, dst: &mut [T]) -> Result<(), CudaError>
    where
        T: DeviceRepr,
        D: DeviceSource<T>,
    {
        let len = src.len();
        self.copy_from(src, dst.len(), |src| {
            let dst = &mut dst[..len];
            // SAFETY: `dst` is borrowed until this function returns, and the
            // source as long.
            unsafe { self.copy_to_borrowed(src, dst.as_mut_ptr().cast(), Span::of(dst)) }
        })
    }

    /// Copies as many bytes as `span` has from `src` to `destination`, where it
    /// begins, and returns once they are there.
    ///
    /// # Safety
    ///
    /// As [`copy_back`](Self::copy_back).
    pub(super) unsafe fn copy_to_borrowed(
        &self,
        src: CUdeviceptr,
        destination: *mut u8,
        span: Span,
    ) -> Result<(), CudaError> {
        let _section = global().enter();
        let snapshot = global().snapshot();
        let residency = snapshot.residency(span);
        if self.lane.options.policy == Policy::Deny && residency != Residency::Pageable {
            let bytes = span.len();
            self.lane.counts.denied.add(1);
            return Err(CudaError::Denied { residency, bytes });
        }
        self.lane.counts.downloads.add(1);
        // SAFETY: the caller's promise.
        unsafe { self.copy_back(&snapshot, src, destination, span) }
    }

    /// Copies `elements` of `src` to the beginning of `dst`, in the order of
    /// the stream, and returns at once.
    ///
    /// The buffer notes that it is in use: writing to it and dropping it wait
    /// until the device has read it.
    ///
    /// # Errors
    ///
    /// [`CudaError::RangeOutOfBounds`], [`CudaError::DestinationTooShort`],
    /// [`CudaError::OtherContext`], [`CudaError::StreamIsCapturing`] and
    /// [`CudaError::Stored`]: nothing was enqueued. [`CudaError::Driver`]: the copy may or may not happen, and
    /// the buffer stays noted as in use until the device is done with it.
    ///
    /// # Aborts
    ///
    /// Not for the buffer, which can be leaked where a borrowed source cannot.
    /// But `dst` is borrowed: if another stream frees it, that stream cannot be
    /// told of the copy, and the driver can say in no way whether the copy is
    /// done, yet does not say that the context is dead either, the process is
    /// aborted.
    pub fn copy_h2d_from<T, D>(
        &self,
        src: &PinnedBuffer<T>,
        elements: Range<usize>,
        dst: &mut D,
    ) -> Result<(), CudaError>
    where
        T: DeviceRepr,
        D: DeviceDestination<T>,
    {
        let part = src
            .get(elements.clone())
            .ok_or(CudaError::RangeOutOfBounds {
                start: elements.start,
                end: elements.end,
                len: src.len(),
            })?;
        self.copy_to(dst, part.len(), |dst| {
            self.lane.counts.owned.add(1);
            let source = part.as_ptr().cast();
            src.use_in(&self.stream, || {
                // SAFETY: the buffer keeps its memory, and keeps it from being
                // written, until this use of it is over; `copy_to` saw that the
                // destination is long enough.
                unsafe { driver::copy_h2d(dst, source, size_of_val(part), &self.stream) }
            })
        })
    }

    /// What this copier has done so far.
    #[must_use]
    pub fn stats(&self) -> CopyStats {
        self.lane.counts.read()
    }
}

/// Marks the copies that are in the open block of the ring, while the stream is
/// at hand.
impl Drop for Copier {
    fn drop(&mut self) {
        self.lane.staging.mark(&self.stream);
    }
}

/// As [`Copier::new`].
impl TryFrom<Arc<CudaStream>> for Copier {
    type Error = CudaError;

    fn try_from(stream: Arc<CudaStream>) -> Result<Self, CudaError> {
        Self::new(&stream)
    }
}

/// Waits for the copies that still use the staging ring, as dropping the
/// copier does.
impl From<Copier> for Arc<CudaStream> {
    fn from(copier: Copier) -> Self {
        Arc::clone(&copier.stream)
    }
}
