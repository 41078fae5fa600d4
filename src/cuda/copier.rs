//! [`Copier`]: copies to the device that are sound for any borrowed source.
//!
//! # What a copy does
//!
//! The driver stages a pageable source before the call returns, and lets the
//! device read a page-locked one later. So the source's residency is asked
//! first, and then:
//!
//! | residency | what the copy does |
//! |---|---|
//! | `Pageable` | enqueue, return |
//! | `Pinned` | enqueue, then wait for an event recorded right behind it |
//! | `Seam`, `Mixed` | split at the boundaries (the driver refuses one copy across them), each part enqueued; one wait for all if any part is pinned |
//!
//! The copy runs in a read-side section (`src/section.rs`), so that no other
//! thread pins or unpins the source between the question and the end. From
//! memory that is about to be unpinned the device is not let read at all: the
//! copy goes through the heap.
//!
//! On devices that read pageable memory directly, nothing is promised to be
//! staged, and every source counts as pinned.
//!
//! The destination's own code runs before the question, since it can change
//! everything. No step from the question to the end of the wait runs code of
//! the caller's, and none after the first part was enqueued returns early: an error is kept until the wait is
//! over. That includes an error of the copy call itself, which may stem from
//! earlier work and then says nothing about whether the copy was enqueued.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUdevice_attribute as Attribute, CUdeviceptr};
use cudarc::driver::{CudaContext, CudaStream, DevicePtrMut, DeviceRepr};

use super::CudaError;
use super::call_site;
use super::driver::{self, Event};
use super::pinned_buffer::PinnedBuffer;
use super::wait::wait_or_abort;
use crate::snapshot::Span;
use crate::{Residency, global, reader};

/// The largest piece that a copy from retiring memory allocates.
const BOUNCE_BYTES: usize = 1 << 20;

/// Makes host-to-device copies on one stream, sound for whatever borrowed
/// slice they are given.
///
/// One copier may be used from several threads. Keep one per stream: making
/// it creates an event and asks the device what it is.
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
    stream: Arc<CudaStream>,
    /// Events to record behind copies that have to be waited for, as many as
    /// threads have waited at once. They cannot share one: on the per-thread
    /// default stream, another thread's record is on another stream.
    idle_events: Mutex<Vec<Event>>,
    /// Whether the device may read a pageable source after the call.
    reads_pageable_late: bool,
    counts: Counts,
}

impl Copier {
    /// A copier on `stream`.
    ///
    /// # Errors
    ///
    /// [`CudaError::MissingFunction`] or [`CudaError::Driver`].
    pub fn new(stream: &Arc<CudaStream>) -> Result<Self, CudaError> {
        driver::require()?;
        let context = stream.context();
        Ok(Self {
            stream: Arc::clone(stream),
            idle_events: Mutex::new(vec![Event::new(context)?]),
            reads_pageable_late: reads_pageable_late(context)?,
            counts: Counts::default(),
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
    /// A pageable source costs little more than the driver's own call, unless
    /// the device can read pageable memory directly (see the README's limits):
    /// then every source is waited for. A source of
    /// which any byte is page-locked has to be waited for, and with it all
    /// earlier work of the stream: such a call is counted
    /// ([`stats`](Self::stats)), and the first one at each call site is logged
    /// as a warning. To copy from page-locked memory without waiting, use
    /// [`copy_h2d_from`](Self::copy_h2d_from).
    ///
    /// # Errors
    ///
    /// [`CudaError::DestinationTooShort`], [`CudaError::StreamIsCapturing`]
    /// and [`CudaError::Stored`]: nothing was enqueued.
    /// [`CudaError::Driver`]: the copy may or may not have happened, and the
    /// device does not read the source any more.
    ///
    /// # Aborts
    ///
    /// If the source is page-locked, and the driver can say in no way whether
    /// its copy is done, yet does not say that the context is dead either, the
    /// process is aborted: the caller may reuse the source once this returns.
    #[track_caller]
    pub fn copy_h2d_async<T, D>(&self, src: &[T], dst: &mut D) -> Result<(), CudaError>
    where
        T: DeviceRepr,
        D: DevicePtrMut<T>,
    {
        let site = Location::caller();
        if !has_work(src, dst)? {
            return Ok(());
        }
        self.be_ready()?;
        let (dst_address, _written) = dst.device_ptr_mut(&self.stream);
        self.be_ready()?;
        // From before the question until the device is done with the source.
        let section = global().enter();
        let span = Span::of(src);
        let residency = reader::ask_global(|snapshot| snapshot.residency(span));

        if residency == Residency::Pageable && !self.reads_pageable_late {
            self.counts.pageable.add(1);
            // SAFETY: the driver stages a pageable source before it returns;
            // `has_work` saw that the destination is long enough.
            return unsafe {
                driver::copy_h2d(
                    dst_address,
                    src.as_ptr().cast(),
                    size_of_val(src),
                    &self.stream,
                )
            };
        }

        let event = self.take_event()?;
        if reader::ask_global(|snapshot| snapshot.is_retiring(span)) {
            self.counts.bounced.add(1);
            // SAFETY: `has_work` saw that the destination is long enough.
            let copied = unsafe { self.copy_bounced(src, dst_address, &event) };
            self.idle_events().push(event);
            return copied;
        }
        let started = Instant::now();
        // SAFETY: `src` is borrowed until this function returns, which is
        // after the wait; `has_work` saw that the destination is long enough.
        let enqueued = unsafe { self.enqueue_parts(src, residency, dst_address) };
        let waited = wait_or_abort(&event, &self.stream);
        // Before the warning, which runs code of the program's.
        drop(section);
        self.idle_events().push(event);
        self.count_guarded(site, span, residency, started.elapsed());
        enqueued.and(waited)
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
    /// [`CudaError::StreamIsCapturing`] and [`CudaError::Stored`]: nothing was
    /// enqueued. [`CudaError::Driver`]: the copy may or may not happen, and
    /// the buffer stays noted as in use until the device is done with it. It
    /// never aborts: a buffer can be leaked where a borrowed source cannot.
    pub fn copy_h2d_from<T, D>(
        &self,
        src: &PinnedBuffer<T>,
        elements: Range<usize>,
        dst: &mut D,
    ) -> Result<(), CudaError>
    where
        T: DeviceRepr,
        D: DevicePtrMut<T>,
    {
        let part = src
            .get(elements.clone())
            .ok_or(CudaError::RangeOutOfBounds {
                start: elements.start,
                end: elements.end,
                len: src.len(),
            })?;
        if !has_work(part, dst)? {
            return Ok(());
        }
        self.be_ready()?;
        let (dst_address, _written) = dst.device_ptr_mut(&self.stream);
        self.be_ready()?;
        self.counts.owned.add(1);
        src.use_in(&self.stream, || {
            // SAFETY: the buffer keeps its memory, and keeps it from being
            // written, until this use of it is over; `has_work` saw that the
            // destination is long enough.
            unsafe {
                driver::copy_h2d(
                    dst_address,
                    part.as_ptr().cast(),
                    size_of_val(part),
                    &self.stream,
                )
            }
        })
    }

    /// What this copier has done so far.
    #[must_use]
    pub fn stats(&self) -> CopyStats {
        CopyStats {
            pageable: self.counts.pageable.get(),
            guarded: self.counts.guarded.get(),
            split: self.counts.split.get(),
            owned: self.counts.owned.get(),
            bounced: self.counts.bounced.get(),
            waited: Duration::from_nanos(self.counts.waited_ns.get()),
        }
    }

    /// What has to be so right before a copy is enqueued.
    ///
    /// Asked before and after the destination's address is: `cudarc` then
    /// makes the stream wait for the destination's last uses, which would
    /// spoil a capture that has begun, leaves out those waits while an error
    /// is stored, and joins the stream to a capture that a last use is part
    /// of. The destination's type may also be the program's own, and do
    /// anything there.
    fn be_ready(&self) -> Result<(), CudaError> {
        let context = self.stream.context();
        driver::take_stored_error(context)?;
        driver::make_current(context)?;
        if driver::is_capturing(&self.stream)? {
            return Err(CudaError::StreamIsCapturing);
        }
        Ok(())
    }

    /// Enqueues `src` in parts that each lie in one region or in none.
    ///
    /// # Safety
    ///
    /// As [`driver::copy_h2d`], for all of `src`.
    unsafe fn enqueue_parts<T>(
        &self,
        src: &[T],
        residency: Residency,
        dst: CUdeviceptr,
    ) -> Result<(), CudaError> {
        let base = src.as_ptr().cast::<u8>();
        if matches!(residency, Residency::Pageable | Residency::Pinned) {
            // SAFETY: the caller's promise.
            return unsafe { driver::copy_h2d(dst, base, size_of_val(src), &self.stream) };
        }
        let whole = Span::of(src);
        let snapshot = global().snapshot();
        let mut start = whole.start;
        while start < whole.end {
            let (end, _) = snapshot.first_part(Span { start, ..whole });
            let offset = start - whole.start;
            // SAFETY: `offset` is within `src`, and within the destination,
            // which is at least as long; else the caller's promise.
            unsafe {
                driver::copy_h2d(
                    dst.wrapping_add(offset as CUdeviceptr),
                    base.add(offset),
                    end - start,
                    &self.stream,
                )
            }?;
            start = end;
        }
        Ok(())
    }

    /// Copies through memory of the heap, a piece at a time, so that the device
    /// does not read `src` itself.
    ///
    /// # Safety
    ///
    /// `dst` must hold as many bytes as `src`, and be usable on the stream.
    unsafe fn copy_bounced<T>(
        &self,
        src: &[T],
        dst: CUdeviceptr,
        event: &Event,
    ) -> Result<(), CudaError> {
        let bytes = size_of_val(src);
        let base = src.as_ptr().cast::<MaybeUninit<u8>>();
        let mut piece = vec![MaybeUninit::<u8>::uninit(); bytes.min(BOUNCE_BYTES)];
        let span = Span::of(&piece);
        let (retiring, pinned) = reader::ask_global(|snapshot| {
            let pinned = snapshot.residency(span) != Residency::Pageable;
            (snapshot.is_retiring(span), pinned)
        });
        if retiring {
            return Err(CudaError::NowhereToBounce);
        }
        for offset in (0..bytes).step_by(piece.len()) {
            let length = piece.len().min(bytes - offset);
            // SAFETY: `offset + length` is within `src`, and the piece, which
            // is new, does not overlap it. Padding is copied as what it is.
            unsafe { piece.as_mut_ptr().copy_from(base.add(offset), length) };
            // SAFETY: the piece is not written again before the device has
            // read it: the driver stages it, or it is waited for.
            let enqueued = unsafe {
                driver::copy_h2d(
                    dst.wrapping_add(offset as CUdeviceptr),
                    piece.as_ptr().cast(),
                    length,
                    &self.stream,
                )
            };
            let waited = if pinned || self.reads_pageable_late {
                wait_or_abort(event, &self.stream)
            } else {
                Ok(())
            };
            enqueued.and(waited)?;
        }
        Ok(())
    }

    fn idle_events(&self) -> MutexGuard<'_, Vec<Event>> {
        self.idle_events
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn take_event(&self) -> Result<Event, CudaError> {
        let idle = self.idle_events().pop();
        idle.map_or_else(|| Event::new(self.stream.context()), Ok)
    }

    fn count_guarded(
        &self,
        site: &Location<'static>,
        span: Span,
        residency: Residency,
        cost: Duration,
    ) {
        self.counts.guarded.add(1);
        if matches!(residency, Residency::Seam | Residency::Mixed) {
            self.counts.split.add(1);
        }
        self.counts
            .waited_ns
            .add(u64::try_from(cost.as_nanos()).unwrap_or(u64::MAX));
        if !call_site::is_first_time(site) {
            return;
        }
        match reader::ask_global(|snapshot| snapshot.first_region(span)) {
            Some(region) => tracing::warn!(
                %site, %region, ?residency, ?cost,
                "a copy from page-locked memory waited for the device; \
                 Copier::copy_h2d_from would not"
            ),
            None => tracing::warn!(
                %site, ?residency, ?cost,
                "a copy waited for the device, which reads pageable memory directly"
            ),
        }
    }
}

/// Whether there is anything to copy, and room for it.
fn has_work<T, D: DevicePtrMut<T>>(src: &[T], dst: &D) -> Result<bool, CudaError> {
    if dst.len() < src.len() {
        return Err(CudaError::DestinationTooShort {
            source: src.len(),
            destination: dst.len(),
        });
    }
    Ok(size_of_val(src) > 0)
}

/// Whether nothing promises that a pageable source is staged: devices that use
/// the host's page tables (Grace), integrated ones, and, since no document
/// says otherwise, those that can access pageable memory at all.
fn reads_pageable_late(context: &CudaContext) -> Result<bool, CudaError> {
    for attribute in [
        Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
        Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED,
        Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS,
    ] {
        if driver::attribute(context, attribute)? != 0 {
            return Ok(true);
        }
    }
    Ok(false)
}

/// What a [`Copier`] has done since it was made. Copies count once they got as
/// far as the driver, whether or not they succeeded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CopyStats {
    /// Copies whose source the driver staged: no wait.
    pub pageable: u64,
    /// Copies that had to be waited for, because the device may read their
    /// borrowed source late.
    pub guarded: u64,
    /// Those of the guarded copies that were split at region boundaries.
    pub split: u64,
    /// Copies from a [`PinnedBuffer`] that keeps itself alive: no wait.
    pub owned: u64,
    /// Copies from memory that was about to be unpinned, made through other
    /// memory.
    pub bounced: u64,
    /// Time spent in guarded copies.
    pub waited: Duration,
}

#[derive(Debug, Default)]
struct Counts {
    pageable: Count,
    guarded: Count,
    split: Count,
    owned: Count,
    bounced: Count,
    waited_ns: Count,
}

#[derive(Debug, Default)]
struct Count(AtomicU64);

impl Count {
    // Relaxed, both: each count stands alone, and orders nothing.
    fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
