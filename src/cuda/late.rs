//! What a copy does with borrowed host memory that the device may use after
//! the call.
//!
//! Nothing here knows of element types: a part of a slice may begin and end
//! within an element, where a region does.

use std::mem::MaybeUninit;
use std::panic::Location;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::sys::CUdeviceptr;

use super::copier::Lane;
use super::driver::{self, Event, PER_THREAD_STREAM};
use super::options::Policy;
use super::staging::NotStaged;
use super::wait::wait_or_abort;
use super::{Copier, CudaError, call_site};
use crate::snapshot::Snapshot;
use crate::span::Span;
use crate::{Residency, Section, global};

/// The largest piece that a copy through the heap allocates.
const BOUNCE_BYTES: usize = 1 << 20;

/// What is done with a source that the device may read late.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Stage,
    Wait,
    ThroughTheHeap,
    Deny,
}

/// A copy to the device whose source the device may read late.
#[derive(Clone, Copy)]
pub(super) struct LateCopy {
    pub(super) source: *const u8,
    /// Where the source is: it begins at `source`.
    pub(super) span: Span,
    pub(super) residency: Residency,
    /// Whether the CPU may read it before earlier work of the stream is done.
    pub(super) is_plain: bool,
    pub(super) dst: CUdeviceptr,
}

impl Copier {
    /// Makes the copy, and returns once the device does not read its source any
    /// more, which ends `section`.
    ///
    /// # Safety
    ///
    /// The source must stay readable and unchanged until this returns, and the
    /// destination hold as many bytes and be usable on the stream.
    #[cold]
    pub(super) unsafe fn copy_late(
        &self,
        policy: Policy,
        copy: LateCopy,
        section: Section<'_>,
        site: &Location<'static>,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let copied = unsafe { self.copy_by_policy(policy, copy, section, site) };
        // After all is over, since it runs code of the program's.
        self.lane.staging.report_leaks();
        copied
    }

    /// # Safety
    ///
    /// As [`copy_late`](Self::copy_late).
    unsafe fn copy_by_policy(
        &self,
        policy: Policy,
        copy: LateCopy,
        section: Section<'_>,
        site: &Location<'static>,
    ) -> Result<(), CudaError> {
        let LateCopy {
            source,
            span,
            residency,
            is_plain,
            dst,
        } = copy;
        let bytes = span.len();
        // All further questions are asked of one snapshot.
        let snapshot = global().snapshot();
        let mut way = match self.way(policy, &snapshot, span) {
            Way::Stage if !is_plain => self.way(Policy::Wait, &snapshot, span),
            way => way,
        };
        if way == Way::Deny {
            self.lane.counts.denied.add(1);
            return Err(CudaError::Denied { residency, bytes });
        }
        let mut no_ring = None;
        if way == Way::Stage {
            let Lane {
                staging, counts, ..
            } = &*self.lane;
            // SAFETY: the caller's promise.
            match unsafe { staging.copy_h2d(dst, source, bytes, &self.stream, counts) } {
                Ok(()) => return Ok(()),
                Err(NotStaged::Failed(error)) => return Err(error),
                // Nothing is lost: it is slower without the ring.
                Err(NotStaged::NoRoom(error)) => {
                    no_ring = Some(error);
                    way = self.way(Policy::Wait, &snapshot, span);
                }
            }
        }
        let event = self.lane.take_event()?;
        if way == Way::ThroughTheHeap {
            self.lane.counts.bounced.add(1);
            let readable = if is_plain {
                Ok(())
            } else {
                wait_or_abort(&event, &self.stream)
            };
            // SAFETY: the caller's promise.
            let copied = readable
                .and_then(|()| unsafe { self.copy_through_the_heap(source, bytes, dst, &event) });
            self.lane.put_back(event);
            return copied;
        }
        let started = Instant::now();
        let mut copy = |offset: usize, bytes: usize| {
            // SAFETY: the source stays until this function returns, which is
            // after the wait; the part is within it, and within the
            // destination, which is at least as long.
            unsafe { driver::copy_h2d(at(dst, offset), source.add(offset), bytes, &self.stream) }
        };
        let enqueued = self.in_parts(&snapshot, span, &mut copy);
        let waited = wait_or_abort(&event, &self.stream);
        let cost = started.elapsed();
        // Before the warning, which runs code of the program's.
        drop(section);
        self.lane.put_back(event);
        self.lane.counts.guarded.add(1);
        self.lane.counts.waited_ns.add_time(cost);
        if call_site::is_first_time(site) {
            let region = snapshot.first_region(span);
            call_site::warn(site, region, residency, cost, no_ring.as_ref());
        }
        enqueued.and(waited)
    }

    /// Copies as many bytes as `span` has from `src` to `destination`, where it
    /// begins, and returns once the device does not write them any more.
    ///
    /// # Safety
    ///
    /// Nobody else may use the destination until this returns, and `src` must
    /// hold as many bytes and be usable on the stream.
    pub(super) unsafe fn copy_back(
        &self,
        snapshot: &Snapshot,
        src: CUdeviceptr,
        destination: *mut u8,
        span: Span,
    ) -> Result<(), CudaError> {
        let event = self.lane.take_event()?;
        let started = Instant::now();
        let copied = if snapshot.is_retiring(span) {
            // SAFETY: the caller's promise.
            unsafe { self.read_through_the_heap(src, destination, span.len(), &event) }
        } else {
            let mut copy = |offset: usize, bytes: usize| {
                // SAFETY: the destination stays until this function returns,
                // which is after the wait; the part is within it, and within
                // the source, which is at least as long.
                unsafe {
                    driver::copy_d2h(
                        destination.add(offset),
                        at(src, offset),
                        bytes,
                        &self.stream,
                    )
                }
            };
            let enqueued = self.in_parts(snapshot, span, &mut copy);
            let waited = wait_or_abort(&event, &self.stream);
            enqueued.and(waited)
        };
        self.lane.put_back(event);
        self.lane.counts.waited_ns.add_time(started.elapsed());
        copied
    }

    /// What `policy` says of a source that the device may read late.
    fn way(&self, policy: Policy, snapshot: &Snapshot, span: Span) -> Way {
        let small = span.len() <= self.lane.options.stage_limit;
        // On that handle, the ring's copies would be on many streams.
        let one_stream = self.stream.cu_stream() as usize != PER_THREAD_STREAM;
        let stages = policy == Policy::Stage && small && one_stream;
        if policy == Policy::Deny {
            Way::Deny
        } else if stages && !snapshot.is_write_combined(span) {
            Way::Stage
        } else if snapshot.is_retiring(span) {
            Way::ThroughTheHeap
        } else {
            Way::Wait
        }
    }

    /// Calls `copy` with the offset and the length, in bytes, of each part of
    /// `span` that lies in one region or in none.
    pub(super) fn in_parts(
        &self,
        snapshot: &Snapshot,
        span: Span,
        copy: &mut dyn FnMut(usize, usize) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let mut start = span.start;
        while start < span.end {
            let (end, _) = snapshot.first_part(Span { start, ..span });
            if (start, end) == (span.start, span.end) {
                return copy(0, span.len());
            }
            if start == span.start {
                self.lane.counts.split.add(1);
            }
            copy(start - span.start, end - start)?;
            start = end;
        }
        Ok(())
    }

    /// Copies through memory of the heap, a piece at a time, so that the device
    /// does not read `src` itself.
    ///
    /// # Safety
    ///
    /// `src` must be readable for `bytes` bytes, and `dst` hold as many and be
    /// usable on the stream.
    unsafe fn copy_through_the_heap(
        &self,
        src: *const u8,
        bytes: usize,
        dst: CUdeviceptr,
        event: &Event,
    ) -> Result<(), CudaError> {
        let base = src.cast::<MaybeUninit<u8>>();
        let (mut piece, snapshot) = bounce_buffer(bytes)?;
        for offset in (0..bytes).step_by(piece.len()) {
            let piece = &mut piece[..(bytes - offset).min(BOUNCE_BYTES)];
            // SAFETY: the piece of `src` is within it, and the buffer, which
            // is new, does not overlap it. Padding is copied as what it is.
            unsafe { piece.as_mut_ptr().copy_from(base.add(offset), piece.len()) };
            let span = Span::of(piece);
            let staged =
                snapshot.residency(span) == Residency::Pageable && !self.lane.reads_pageable_late;
            let mut copy = |within: usize, bytes: usize| {
                // SAFETY: the piece is not written again before the device has
                // read it: the driver stages it, or it is waited for.
                unsafe {
                    let part = piece.as_ptr().cast::<u8>().add(within);
                    driver::copy_h2d(at(dst, offset + within), part, bytes, &self.stream)
                }
            };
            let enqueued = self.in_parts(&snapshot, span, &mut copy);
            let waited = if staged {
                Ok(())
            } else {
                wait_or_abort(event, &self.stream)
            };
            enqueued.and(waited)?;
        }
        Ok(())
    }

    /// Copies to the host through memory of the heap, a piece at a time, so
    /// that the device does not write `dst` itself.
    ///
    /// # Safety
    ///
    /// `dst` must be writable for `bytes` bytes, and `src` hold as many and be
    /// usable on the stream.
    unsafe fn read_through_the_heap(
        &self,
        src: CUdeviceptr,
        dst: *mut u8,
        bytes: usize,
        event: &Event,
    ) -> Result<(), CudaError> {
        let (mut piece, snapshot) = bounce_buffer(bytes)?;
        for offset in (0..bytes).step_by(piece.len()) {
            let piece = &mut piece[..(bytes - offset).min(BOUNCE_BYTES)];
            let span = Span::of(piece);
            let base = piece.as_mut_ptr().cast::<u8>();
            let mut copy = |within: usize, bytes: usize| {
                // SAFETY: the piece is neither read nor freed before the wait
                // is over.
                unsafe {
                    let part = base.add(within);
                    driver::copy_d2h(part, at(src, offset + within), bytes, &self.stream)
                }
            };
            let enqueued = self.in_parts(&snapshot, span, &mut copy);
            let waited = wait_or_abort(event, &self.stream);
            enqueued.and(waited)?;
            // SAFETY: `dst` is writable there, and the buffer, which the device
            // has written, does not overlap it.
            unsafe { dst.add(offset).copy_from_nonoverlapping(base, piece.len()) };
        }
        Ok(())
    }
}

/// Memory of the heap for up to `bytes` bytes, and the snapshot that knows what
/// it is.
fn bounce_buffer(bytes: usize) -> Result<(Vec<MaybeUninit<u8>>, Arc<Snapshot>), CudaError> {
    let buffer = vec![MaybeUninit::uninit(); bytes.min(BOUNCE_BYTES)];
    let snapshot = global().snapshot();
    if snapshot.is_retiring(Span::of(&buffer)) {
        return Err(CudaError::NowhereToBounce);
    }
    Ok((buffer, snapshot))
}

/// The address `offset` bytes behind `base`.
pub(super) fn at(base: CUdeviceptr, offset: usize) -> CUdeviceptr {
    base.wrapping_add(offset as CUdeviceptr)
}
