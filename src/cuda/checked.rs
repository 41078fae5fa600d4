//! [`CheckedCopies`]: `cudarc`'s own copies, made sound by changing the name of
//! the function that is called.
//!
//! # Where the state of a stream is
//!
//! A checked copy is one of a [`Copier`], and a copier has a staging ring and
//! events for its stream. `cudarc`'s stream has no place for them. So they stand
//! in a list of this process, each with a weak handle of its stream, which ends
//! when the program drops it. The list is an immutable array, replaced when a
//! new stream comes: a copy reads it without a lock.

use std::mem;
use std::panic::Location;
use std::sync::{Arc, LazyLock, Weak};

use arc_swap::ArcSwap;
use cudarc::driver::{CudaSlice, CudaStream, DeviceRepr, HostSlice, SyncOnDrop};

use super::copier::Lane;
use super::device_end::has_room;
use super::driver::{self, PER_THREAD_STREAM};
use super::{Copier, CopierOptions, CudaError, DeviceDestination, DeviceSource};
use crate::span::Span;

/// The copies of `cudarc`'s streams, sound for whatever host memory they are
/// given: `memcpy_htod` becomes `memcpy_htod_checked`, and the error becomes a
/// [`CudaError`].
///
/// Each is a copy of a [`Copier`] with the default [`CopierOptions`]: pageable
/// memory costs little more than `cudarc`'s own call, page-locked memory that is
/// registered is staged or waited for. A stream's ring and events, and so its
/// context, live until a checked copy on another stream finds that the stream
/// was dropped (for a default stream: that nobody else uses its context). Each
/// staged copy records one event more than a copier's. The first checked copy in a
/// context may wait for all work there, as [`Copier::new`] does. So prefer a copier
/// where code can be changed more.
///
/// Host memory can be anything that `cudarc` takes. Memory that says that its
/// owner waits for the stream (`cudarc`'s
/// [`PinnedHostSlice`](cudarc::driver::PinnedHostSlice) and
/// [`UnifiedSlice`](cudarc::driver::UnifiedSlice)) counts as page-locked, and is
/// always waited for: the CPU must not read it before earlier work of the stream
/// is done, so it is not staged. Hand it over as it is: the slice that its
/// `as_slice` returns looks like any other, and page-locked memory that nobody has
/// registered is not recognised. Hand a [`PinnedBuffer`](super::PinnedBuffer) over
/// as the slice `&buffer[..]`.
///
/// ```no_run
/// use pinned_hosts::cuda::{self, CheckedCopies, PinnedBuffer};
///
/// let context = cuda::context(0)?;
/// let stream = context.new_stream()?;
/// let source = PinnedBuffer::from_slice(&context, &[7u32; 1024])?;
///
/// let mut on_device = stream.clone_htod_checked(&source[..])?;
/// stream.memcpy_htod_checked(&[1, 2, 3], &mut on_device)?;
/// // `source` may go, or be written.
/// let result = stream.clone_dtoh_checked(&on_device)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// Each function returns what [`Copier::new`] and
/// [`Copier::copy_h2d_async`], or [`Copier::copy_d2h_async`], return. A
/// destination that is too short is an error, not a panic as with `cudarc`.
///
/// # Aborts
///
/// As [`Copier::copy_h2d_async`].
pub trait CheckedCopies {
    /// Copies all of `src` to the beginning of `dst`. When this returns, the
    /// device will not read `src` any more.
    #[track_caller]
    fn memcpy_htod_checked<T, Src, Dst>(&self, src: &Src, dst: &mut Dst) -> Result<(), CudaError>
    where
        T: DeviceRepr,
        Src: HostSlice<T> + ?Sized,
        Dst: DeviceDestination<T>;

    /// Copies all of `src` to new device memory.
    #[track_caller]
    fn clone_htod_checked<T, Src>(&self, src: &Src) -> Result<CudaSlice<T>, CudaError>
    where
        T: DeviceRepr,
        Src: HostSlice<T> + ?Sized;

    /// Copies all of `src` to the beginning of `dst`, and returns when it is
    /// there.
    fn memcpy_dtoh_checked<T, Src, Dst>(&self, src: &Src, dst: &mut Dst) -> Result<(), CudaError>
    where
        T: DeviceRepr,
        Src: DeviceSource<T>,
        Dst: HostSlice<T> + ?Sized;

    /// Copies all of `src` to a new vector, and returns when it is there.
    fn clone_dtoh_checked<T, Src>(&self, src: &Src) -> Result<Vec<T>, CudaError>
    where
        T: DeviceRepr,
        Src: DeviceSource<T>;
}

impl CheckedCopies for Arc<CudaStream> {
    fn memcpy_htod_checked<T, Src, Dst>(&self, src: &Src, dst: &mut Dst) -> Result<(), CudaError>
    where
        T: DeviceRepr,
        Src: HostSlice<T> + ?Sized,
        Dst: DeviceDestination<T>,
    {
        let copier = copier_of(self)?;
        // SAFETY: the source is kept for `copy_all` alone.
        let source = unsafe { Source::of(src, &copier) }?;
        copier.copy_all(&source, dst, Location::caller())
    }

    fn clone_htod_checked<T, Src>(&self, src: &Src) -> Result<CudaSlice<T>, CudaError>
    where
        T: DeviceRepr,
        Src: HostSlice<T> + ?Sized,
    {
        let copier = copier_of(self)?;
        // SAFETY: as above.
        let source = unsafe { Source::of(src, &copier) }?;
        // SAFETY: nobody gets the memory before all of it was written.
        let allocated = unsafe { self.alloc::<T>(source.slice.len()) };
        let mut dst = allocated.map_err(CudaError::driver("allocating device memory"))?;
        copier.copy_all(&source, &mut dst, Location::caller())?;
        Ok(dst)
    }

    fn memcpy_dtoh_checked<T, Src, Dst>(&self, src: &Src, dst: &mut Dst) -> Result<(), CudaError>
    where
        T: DeviceRepr,
        Src: DeviceSource<T>,
        Dst: HostSlice<T> + ?Sized,
    {
        let copier = copier_of(self)?;
        // Before the destination is asked, which may make the stream wait.
        copier.be_ready()?;
        // SAFETY: the slice is used in a copy on this stream alone, and written
        // by the CPU only once the stream was waited for.
        let (dst, on_drop) = unsafe { dst.stream_synced_mut_slice(self) };
        not_noted(on_drop);
        driver::make_current(self.context())?;
        let len = src.len();
        if !has_room(len, dst.len(), size_of::<T>())? {
            return Ok(());
        }
        let dst = &mut dst[..len];
        copier.copy_from_ready(src, |src| {
            // SAFETY: `dst` is borrowed until this function returns, and the
            // source as long.
            unsafe { copier.copy_to_borrowed(src, dst.as_mut_ptr().cast(), Span::of(dst)) }
        })
    }

    fn clone_dtoh_checked<T, Src>(&self, src: &Src) -> Result<Vec<T>, CudaError>
    where
        T: DeviceRepr,
        Src: DeviceSource<T>,
    {
        let copier = copier_of(self)?;
        let len = src.len();
        let mut elements = Vec::with_capacity(len);
        let dst = &mut elements.spare_capacity_mut()[..len];
        copier.copy_from(src, len, |src| {
            // SAFETY: `dst` is borrowed until this function returns, and the
            // source as long.
            unsafe { copier.copy_to_borrowed(src, dst.as_mut_ptr().cast(), Span::of(dst)) }
        })?;
        // SAFETY: the device has written all elements, with valid ones of its
        // memory; or they have no bytes.
        unsafe { elements.set_len(len) };
        Ok(elements)
    }
}

/// Host memory to copy from, once the stream waits for what has to come before.
struct Source<'a, T> {
    slice: &'a [T],
    /// Whether no owner waits for the stream, as for a slice or a vector.
    is_plain: bool,
}

impl<'a, T> Source<'a, T> {
    /// # Safety
    ///
    /// Unless the memory is plain, the slice may be used on the copier's stream
    /// alone, or once that was waited for.
    unsafe fn of<S>(src: &'a S, copier: &'a Copier) -> Result<Self, CudaError>
    where
        S: HostSlice<T> + ?Sized,
    {
        // Before the source is asked, which may make the stream wait.
        copier.be_ready()?;
        // SAFETY: the caller's promise.
        let (slice, on_drop) = unsafe { src.stream_synced_slice(&copier.stream) };
        let is_plain = matches!(on_drop, SyncOnDrop::Sync(None));
        not_noted(on_drop);
        // The type's own code may have made another context current.
        driver::make_current(copier.stream.context())?;
        Ok(Self { slice, is_plain })
    }
}

/// Leaves the events of host memory as they are. A copy that uses such memory late
/// is waited for, so there is nothing to note; and a record would delete what the
/// event says of earlier uses, which a copy that failed has not waited for.
fn not_noted(on_drop: SyncOnDrop<'_>) {
    mem::forget(on_drop);
}

impl Copier {
    fn copy_all<T, D>(
        &self,
        source: &Source<'_, T>,
        dst: &mut D,
        site: &Location<'static>,
    ) -> Result<(), CudaError>
    where
        D: DeviceDestination<T>,
    {
        let src = source.slice;
        if !has_room(src.len(), dst.len(), size_of::<T>())? {
            return Ok(());
        }
        let policy = self.lane.options.policy;
        self.copy_to_ready(dst, |dst| {
            // SAFETY: the source is borrowed until this function returns, and
            // the destination is long enough.
            unsafe { self.copy_borrowed(policy, src, source.is_plain, dst, site) }
        })
    }
}

/// What a stream needs for checked copies.
struct Known {
    /// Also keeps another stream from getting the same address.
    stream: Weak<CudaStream>,
    /// The handle of a default stream. `cudarc` makes a new object for it at
    /// each call, and it ends with its context.
    default: Option<usize>,
    lane: Arc<Lane>,
}

impl Known {
    fn new(stream: &Arc<CudaStream>) -> Result<Self, CudaError> {
        let handle = stream.cu_stream() as usize;
        Ok(Self {
            stream: Arc::downgrade(stream),
            default: (handle <= PER_THREAD_STREAM).then_some(handle),
            lane: Arc::new(Lane::new(stream.context(), CopierOptions::default())?),
        })
    }

    fn is_of(&self, stream: &Arc<CudaStream>) -> bool {
        match self.default {
            None => Weak::as_ptr(&self.stream) == Arc::as_ptr(stream),
            Some(handle) => {
                handle == stream.cu_stream() as usize && self.lane.is_of(stream.context())
            }
        }
    }

    /// Whether a copy may still come, or reads the ring. `all` are those that have
    /// the context, too, without a use for it.
    fn is_needed(&self, all: &[Arc<Self>]) -> bool {
        let lives = match self.default {
            None => self.stream.strong_count() > 0,
            Some(_) => self
                .lane
                .is_context_used_beside(all.iter().map(|it| &*it.lane)),
        };
        lives || !self.lane.staging.is_idle()
    }
}

/// A copier for one call.
fn copier_of(stream: &Arc<CudaStream>) -> Result<Copier, CudaError> {
    static KNOWN: LazyLock<ArcSwap<Vec<Arc<Known>>>> = LazyLock::new(ArcSwap::default);
    let known = KNOWN.load();
    let lane = match known.iter().find(|it| it.is_of(stream)) {
        Some(known) => Arc::clone(&known.lane),
        None => {
            driver::require()?;
            driver::make_current(stream.context())?;
            // What is made for a stream would spoil its capture.
            if driver::is_capturing(stream)? {
                return Err(CudaError::StreamIsCapturing);
            }
            let new = Arc::new(Known::new(stream)?);
            // Two threads that come with one stream at once have a ring each.
            KNOWN.rcu(|old| {
                let needed = old.iter().filter(|it| it.is_needed(old));
                needed.chain([&new]).cloned().collect::<Vec<_>>()
            });
            Arc::clone(&new.lane)
        }
    };
    Ok(Copier {
        stream: Arc::clone(stream),
        lane,
    })
}
