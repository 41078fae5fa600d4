//! [`Scope`]: copies from and to borrowed memory that overlap with what the
//! caller does meanwhile.
//!
//! The compiler keeps the memory borrowed for as long as the device may use
//! it, in the way of [`std::thread::scope`]: what is borrowed has to live
//! longer than the call of [`Copier::scope`], which does not return, nor
//! unwind, before the device is done. Nothing depends on a value that could be
//! leaked: the closure only ever has a reference to the scope.

use std::cell::Cell;
use std::marker::PhantomData;
use std::panic::Location;

use cudarc::driver::DeviceRepr;

use super::driver::{self, Event};
use super::late::{LateCopy, at};
use super::options::Policy;
use super::wait::{abort_unless_dead, wait_for_event, wait_for_stream};
use super::{Copier, CudaError, DeviceDestination, DeviceSource};
use crate::span::Span;
use crate::{Residency, Section, global};

impl Copier {
    /// Runs `copies`, in which borrowed memory, page-locked or not, can be
    /// copied without a wait at each copy; waits for all of them at the end,
    /// after a panic too.
    ///
    /// The whole of it is one read-side [section](Section): while it runs,
    /// another thread that makes or ends a
    /// [`HostRegistration`](super::HostRegistration) waits (for at most its
    /// limit), and on this thread that is an error. Keep scopes short. The
    /// copier's [`Policy`] does not apply: nothing is refused, nor staged
    /// (except from memory that is about to be unpinned).
    ///
    /// ```no_run
    /// use pinned_hosts::cuda::{self, Copier, PinnedBuffer};
    ///
    /// let context = cuda::context(0)?;
    /// let copier = Copier::new(&context.new_stream()?)?;
    /// let mut on_device = copier.stream().alloc_zeros::<u32>(1024)?;
    /// let first = PinnedBuffer::from_slice(&context, &[1u32; 512])?;
    /// let mut last = [0u32; 1024];
    ///
    /// copier.scope(|scope| {
    ///     scope.copy_h2d(&first, &mut on_device)?;
    ///     // Launch kernels, prepare the next batch, …
    ///     scope.copy_d2h(&on_device, &mut last)
    /// })?;
    /// println!("{last:?}");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// Memory that is in use cannot be touched before the end. This compiles:
    ///
    /// ```no_run
    /// # fn read(copier: &pinned_hosts::cuda::Copier,
    /// #     on_device: &pinned_hosts::cuda::cudarc::driver::CudaSlice<u8>,
    /// # ) -> Result<(), pinned_hosts::cuda::CudaError> {
    /// let mut bytes = [0u8; 4];
    /// copier.scope(|scope| scope.copy_d2h(on_device, &mut bytes))?;
    /// bytes[0] += 1;
    /// # Ok(()) }
    /// ```
    ///
    /// and this does not:
    ///
    /// ```compile_fail,E0503
    /// # fn read(copier: &pinned_hosts::cuda::Copier,
    /// #     on_device: &pinned_hosts::cuda::cudarc::driver::CudaSlice<u8>,
    /// # ) -> Result<(), pinned_hosts::cuda::CudaError> {
    /// let mut bytes = [0u8; 4];
    /// copier.scope(|scope| {
    ///     scope.copy_d2h(on_device, &mut bytes)?;
    ///     bytes[0] += 1;
    ///     Ok(())
    /// })?;
    /// # Ok(()) }
    /// ```
    ///
    /// nor can it be memory that ends within the scope. This compiles:
    ///
    /// ```no_run
    /// # fn write(copier: &pinned_hosts::cuda::Copier,
    /// #     on_device: &mut pinned_hosts::cuda::cudarc::driver::CudaSlice<u8>,
    /// # ) -> Result<(), pinned_hosts::cuda::CudaError> {
    /// let bytes = vec![0u8; 4];
    /// copier.scope(|scope| scope.copy_h2d(&bytes, on_device))?;
    /// # Ok(()) }
    /// ```
    ///
    /// and this does not:
    ///
    /// ```compile_fail,E0597
    /// # fn write(copier: &pinned_hosts::cuda::Copier,
    /// #     on_device: &mut pinned_hosts::cuda::cudarc::driver::CudaSlice<u8>,
    /// # ) -> Result<(), pinned_hosts::cuda::CudaError> {
    /// copier.scope(|scope| {
    ///     let bytes = vec![0u8; 4];
    ///     scope.copy_h2d(&bytes, on_device)
    /// })?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// What `copies` returns; else [`CudaError::Driver`] if the wait had
    /// something to report. The device is done with the memory in any case.
    ///
    /// # Aborts
    ///
    /// As [`copy_h2d_async`](Self::copy_h2d_async).
    pub fn scope<'env, R>(
        &'env self,
        copies: impl FnOnce(&Scope<'env>) -> Result<R, CudaError>,
    ) -> Result<R, CudaError> {
        let scope = Scope {
            copier: self,
            event: Some(self.lane.take_event()?),
            enqueued: Cell::new(false),
            _section: global().enter(),
            _env: PhantomData,
        };
        let result = copies(&scope);
        let waited = scope.end();
        result.and_then(|value| waited.map(|()| value))
    }
}

/// Where borrowed memory is copied without a wait at each copy. From
/// [`Copier::scope`].
#[derive(Debug)]
pub struct Scope<'env> {
    copier: &'env Copier,
    /// Recorded behind each copy: the last record is behind all. Taken by the
    /// end.
    event: Option<Event>,
    /// Whether the event was recorded.
    enqueued: Cell<bool>,
    /// From before the first question until the device is done. It keeps the
    /// scope on this thread too, and with it the per-thread default stream.
    _section: Section<'static>,
    // `'env` is the caller's and so longer than the call; were it not
    // invariant, it could be shortened to less than that.
    _env: PhantomData<&'env mut &'env ()>,
}

impl<'env> Scope<'env> {
    /// Copies all of `src` to the beginning of `dst`, in the order of the
    /// stream, and returns at once.
    ///
    /// What other code has page-locked without a registration (such as the slice
    /// of a [`PinnedHostSlice`](cudarc::driver::PinnedHostSlice)) counts as
    /// pageable, and is not waited for.
    ///
    /// # Errors
    ///
    /// [`CudaError::DestinationTooShort`], [`CudaError::OtherContext`],
    /// [`CudaError::StreamIsCapturing`] and [`CudaError::Stored`]: nothing was
    /// enqueued.
    /// [`CudaError::Driver`]: the copy may or may not happen.
    ///
    /// # Aborts
    ///
    /// As [`Copier::copy_h2d_async`].
    #[track_caller]
    pub fn copy_h2d<T, D>(&self, src: &'env [T], dst: &mut D) -> Result<(), CudaError>
    where
        T: DeviceRepr,
        D: DeviceDestination<T>,
    {
        let copier = self.copier;
        let site = Location::caller();
        copier.copy_to(dst, src.len(), |dst| {
            let span = Span::of(src);
            let source = src.as_ptr().cast::<u8>();
            let snapshot = global().snapshot();
            let residency = snapshot.residency(span);
            if snapshot.is_retiring(span) {
                let copy = LateCopy {
                    source,
                    span,
                    residency,
                    is_plain: true,
                    dst,
                };
                let section = global().enter();
                // SAFETY: `src` is borrowed until after this returns; `copy_to`
                // saw that the destination is long enough.
                return unsafe { copier.copy_late(Policy::Stage, copy, section, site) };
            }
            let mut copy = |offset: usize, bytes: usize| {
                // SAFETY: `src` is borrowed until the scope has waited for the
                // device (`mark`, `end`); the part is within it, and within the
                // destination, which is at least as long.
                unsafe {
                    let part = source.add(offset);
                    driver::copy_h2d(at(dst, offset), part, bytes, &copier.stream)
                }
            };
            if residency == Residency::Pageable && !copier.lane.reads_pageable_late {
                copier.lane.counts.pageable.add(1);
                return copy(0, span.len());
            }
            copier.lane.counts.scoped.add(1);
            let enqueued = copier.in_parts(&snapshot, span, &mut copy);
            enqueued.and(self.mark())
        })
    }

    /// Copies all of `src` to the beginning of `dst`, in the order of the
    /// stream, and returns at once if `dst` is page-locked; the driver waits
    /// for copies to other memory.
    ///
    /// # Errors
    ///
    /// As [`copy_h2d`](Self::copy_h2d).
    ///
    /// # Aborts
    ///
    /// As [`Copier::copy_h2d_async`].
    pub fn copy_d2h<T, D>(&self, src: &D, dst: &'env mut [T]) -> Result<(), CudaError>
    where
        T: DeviceRepr,
        D: DeviceSource<T>,
    {
        let copier = self.copier;
        let len = src.len();
        copier.copy_from(src, dst.len(), |src| {
            let dst = &mut dst[..len];
            let span = Span::of(dst);
            let destination = dst.as_mut_ptr().cast::<u8>();
            let snapshot = global().snapshot();
            copier.lane.counts.scoped.add(1);
            if snapshot.is_retiring(span) {
                // SAFETY: `dst` is borrowed until after this returns, and the
                // source as long.
                return unsafe { copier.copy_back(&snapshot, src, destination, span) };
            }
            let mut copy = |offset: usize, bytes: usize| {
                // SAFETY: `dst` is borrowed until the scope has waited for the
                // device (`mark`, `end`); the part is within it, and within the
                // source, which is as long.
                unsafe {
                    let part = destination.add(offset);
                    driver::copy_d2h(part, at(src, offset), bytes, &copier.stream)
                }
            };
            let enqueued = copier.in_parts(&snapshot, span, &mut copy);
            enqueued.and(self.mark())
        })
    }

    /// Marks what was enqueued so far, to be waited for at the end; or waits
    /// for it here and now. (An event of its own, recorded at the end, would
    /// become part of a capture that `copies` has begun by then.)
    fn mark(&self) -> Result<(), CudaError> {
        let Some(event) = &self.event else {
            return Ok(());
        };
        match event.record(&self.copier.stream) {
            Ok(()) => {
                self.enqueued.set(true);
                Ok(())
            }
            Err(error) => abort_unless_dead(wait_for_stream(error, &self.copier.stream)),
        }
    }

    fn end(mut self) -> Result<(), CudaError> {
        self.wait()
    }

    fn wait(&mut self) -> Result<(), CudaError> {
        let Some(event) = self.event.take() else {
            return Ok(());
        };
        let waited = if self.enqueued.get() {
            abort_unless_dead(wait_for_event(&event, Some(&self.copier.stream)))
        } else {
            Ok(())
        };
        self.copier.lane.put_back(event);
        waited
    }
}

/// Waits after a panic too. What the wait had to report is lost then; the
/// panic says more.
impl Drop for Scope<'_> {
    fn drop(&mut self) {
        let _ = self.wait();
    }
}
