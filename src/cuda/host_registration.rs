//! [`HostRegistration`]: memory that exists, page-locked where it is, while
//! other threads copy from it.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use super::host_memory::HostMemory;
use super::pinned_memory::is_end_of_driver;
use super::registration_error::{
    RegisterError, RegisterFailure, UnregisterError, UnregisterFailure, is_not_registered,
    is_refusal,
};
use super::released::{Freed, REGISTRATIONS, Released};
use super::{chunks, driver};
use crate::process::Process;
use crate::span::Span;
use crate::{GraceError, Region, RegionState, Registration, global, log, reader};

/// Memory that is page-locked where it is, in the process-wide registry while
/// it is.
///
/// Made for what exists and is in use: a memory-mapped file of weights, a
/// cache. Page-locking costs about 0.3 to 1 ms per MB, so the memory is
/// page-locked chunk by chunk, each usable as soon as it is done, while other
/// threads copy from any part of it through a [`Copier`](super::Copier). Their
/// copies are waited for where they have to be, before a chunk is page-locked
/// and before it is unpinned.
///
/// It owns the memory, and reads as bytes. Put an `Arc` of it in, to share it
/// with threads that copy from it. A copy across the boundary of two chunks is
/// made in two parts; [`RegisterOptions`] says where boundaries fall.
///
/// Dropping waits for copies, for at most
/// [`grace_limit`](RegisterOptions::grace_limit), and unpins.
///
/// - If it cannot wait, because it is dropped inside a section or a
///   [`scope`](super::Copier::scope) or the limit was reached, the memory stays
///   page-locked and registered for now, and a warning is logged. A later call
///   gives it back: the next registration that is made, unregistered or dropped,
///   which waits for it within its own limit, or [`reclaim`](super::reclaim),
///   which does not wait.
/// - If the driver fails, the memory is leaked, not freed, and stays registered;
///   an error is logged.
///
/// To be told instead, and to have the memory back, call
/// [`unregister`](Self::unregister).
///
/// # Examples
///
/// ```no_run
/// use std::sync::Arc;
///
/// use pinned_hosts::cuda::{self, Copier, HostRegistration};
///
/// let context = cuda::context(0)?;
/// let copier = Copier::new(&context.new_stream()?)?;
/// let mut on_device = copier.stream().alloc_zeros::<u8>(1 << 20)?;
///
/// let weights: Arc<[u8]> = vec![7; 1 << 30].into();
/// let pinning = std::thread::spawn({
///     let weights = Arc::clone(&weights);
///     move || HostRegistration::new(&context, weights)
/// });
/// // Meanwhile:
/// copier.copy_h2d_async(&weights[..1 << 20], &mut on_device)?;
///
/// match pinning.join().unwrap() {
///     Ok(registration) => drop(registration.unregister()?),
///     Err(error) => eprintln!("copying from pageable memory: {error}"),
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct HostRegistration<B: HostMemory> {
    /// Not dropped if the memory may still be page-locked.
    parts: ManuallyDrop<Parts<B>>,
}

/// What a registration is made of. Dropping it unpins nothing.
struct Parts<B> {
    /// The chunks that are page-locked, in order.
    chunks: Vec<Registration<'static>>,
    backing: B,
    /// Held, since a registration goes with its context.
    context: Arc<CudaContext>,
    grace_limit: Option<Duration>,
    /// Chunks of which the driver did not say whether they are page-locked.
    in_doubt: Vec<Region>,
    /// The process that pinned the memory. A child after `fork` has a copy of
    /// this, but not of the pinning: it must neither unpin nor free.
    owner: Process,
}

impl<B: HostMemory> HostRegistration<B> {
    /// Page-locks `backing`, with the default [`RegisterOptions`].
    ///
    /// # Errors
    ///
    /// As [`with_options`](Self::with_options).
    pub fn new(context: &Arc<CudaContext>, backing: B) -> Result<Self, RegisterError<B>> {
        Self::with_options(context, backing, RegisterOptions::default())
    }

    /// Page-locks `backing`, chunk by chunk. Memory of no bytes is left alone.
    ///
    /// The memory is usable from every context (`PORTABLE`).
    ///
    /// # Errors
    ///
    /// [`RegisterError`], which says why and gives the memory back. If any
    /// chunk fails, those before it are unpinned, so that it is as it was, to
    /// be copied from as pageable memory; if that fails too, a registration of
    /// what is still page-locked is given back instead.
    ///
    /// # Panics
    ///
    /// Only with a panic of the progress function. What was page-locked is
    /// unpinned.
    pub fn with_options(
        context: &Arc<CudaContext>,
        backing: B,
        mut options: RegisterOptions<'_>,
    ) -> Result<Self, RegisterError<B>> {
        // The same memory may be among it.
        REGISTRATIONS.free(options.grace_limit);
        let mut registration = Self {
            parts: ManuallyDrop::new(Parts {
                chunks: Vec::new(),
                backing,
                context: Arc::clone(context),
                grace_limit: options.grace_limit,
                in_doubt: Vec::new(),
                owner: Process::current(),
            }),
        };
        match registration.parts.pin(&mut options) {
            Ok(()) => Ok(registration),
            Err(reason) => Err(RegisterError {
                memory: registration
                    .unregister()
                    .map_err(|error| Box::new(error.registration)),
                reason,
            }),
        }
    }

    /// The page-locked bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.parts.backing.as_bytes()
    }

    /// The memory's owner.
    #[must_use]
    pub fn backing(&self) -> &B {
        &self.parts.backing
    }

    /// The chunks that are page-locked, by address: all of the memory, except
    /// after an [`UnregisterError`].
    pub fn chunks(&self) -> impl ExactSizeIterator<Item = Region> {
        self.parts.chunks.iter().map(Registration::region)
    }

    /// Waits for copies from the memory, unpins it, and gives it back.
    ///
    /// # Errors
    ///
    /// [`UnregisterError`], which gives the registration back.
    pub fn unregister(self) -> Result<B, UnregisterError<B>> {
        // Kept whatever happens on the way, so that nothing is freed while it
        // is page-locked.
        let mut parts = ManuallyDrop::new(self.into_parts());
        let limit = parts.grace_limit;
        match parts.unpin(limit) {
            Ok(()) => {
                let Parts { backing, .. } = ManuallyDrop::into_inner(parts);
                REGISTRATIONS.free(limit);
                Ok(backing)
            }
            Err(reason) => Err(UnregisterError {
                registration: Self { parts },
                reason,
            }),
        }
    }

    fn into_parts(self) -> Parts<B> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not used again, nor dropped.
        unsafe { ManuallyDrop::take(&mut this.parts) }
    }
}

impl<B: HostMemory> Parts<B> {
    fn pin(&mut self, options: &mut RegisterOptions<'_>) -> Result<(), RegisterFailure> {
        let (chunk_bytes, element_bytes) = options.sizes()?;
        let bytes = self.backing.as_bytes();
        let Ok(whole) = Region::of(bytes) else {
            return Ok(());
        };
        driver::require().map_err(RegisterFailure::Driver)?;
        let overlaps = |registered| RegisterFailure::Overlaps {
            region: whole,
            registered,
        };
        // Before anything is page-locked. Each chunk is looked at again in the
        // step that registers it.
        let registered = reader::first_region(Span::of(bytes));
        if let Some(registered) = registered {
            return Err(overlaps(registered));
        }
        let flags = flags(&self.context, self.backing.is_read_only())?;

        let mut pinned_bytes = 0;
        for range in chunks::cut(
            bytes.as_ptr().addr(),
            bytes.len(),
            chunk_bytes,
            element_bytes,
        ) {
            let bytes = &bytes[range];
            let Ok(chunk) = Region::of(bytes) else {
                continue;
            };
            let registration = global()
                .register_alone(RegionState::Pinning, chunk)
                .map_err(overlaps)?;
            let mut doubt = None;
            let pin = || {
                // SAFETY: `self` owns the memory, and is neither dropped nor
                // gives it back before it was unpinned (`HostRegistration`'s
                // drop, `unregister`).
                let registered = unsafe { driver::register_host(&self.context, bytes, flags) };
                match registered {
                    Err(error) if !is_refusal(&error) => {
                        doubt = Some(error);
                        Ok(())
                    }
                    certain => certain,
                }
            };
            let registration = registration
                .pin(self.grace_limit, pin)
                .map_err(|error| RegisterFailure::of_pin(error, chunk, pinned_bytes))?;
            self.chunks.push(registration);
            if let Some(error) = doubt {
                self.in_doubt.push(chunk);
                return Err(RegisterFailure::Driver(error));
            }
            pinned_bytes += bytes.len();
            if let Some(progress) = &mut options.progress {
                progress(Progress {
                    pinned_bytes,
                    total_bytes: whole.len(),
                    chunk,
                });
            }
        }
        Ok(())
    }

    /// Unpins all chunks, or all that can be: the others stay, with the first
    /// error.
    fn unpin(&mut self, limit: Option<Duration>) -> Result<(), UnregisterFailure> {
        if self.chunks.is_empty() {
            return Ok(());
        }
        if !self.owner.is_current() {
            return Err(UnregisterFailure::ForkedChild);
        }
        let Self {
            chunks,
            context,
            in_doubt,
            ..
        } = self;
        let unpin = |region| {
            // SAFETY: of this crate's copies none reads the chunk any more
            // (the grace period), and all that the memory is lent to are over.
            let Err(error) = (unsafe { driver::unregister_host(context, region) }) else {
                return Ok(());
            };
            if is_not_registered(&error) && in_doubt.contains(&region) {
                // It never was page-locked, or is not any more.
                return Ok(());
            }
            if !is_not_registered(&error) && !in_doubt.contains(&region) {
                in_doubt.push(region);
            }
            Err((error, region))
        };
        global()
            .unpin_all(chunks, limit, unpin)
            .map_err(UnregisterFailure::of_unpin)
    }

    fn report_delay(&self, error: GraceError) {
        log::emit(|| {
            tracing::warn!(
                %error,
                chunks = self.chunks.len(),
                bytes = self.backing.as_bytes().len(),
                "page-locked memory cannot be unpinned yet; it stays registered until a later \
                 call unpins it"
            );
        });
    }

    fn report_leak(&self, error: &UnregisterFailure) {
        if matches!(error, UnregisterFailure::Driver(error) if is_end_of_driver(error)) {
            return;
        }
        log::emit(|| {
            tracing::error!(
                %error,
                chunks = self.chunks.len(),
                bytes = self.backing.as_bytes().len(),
                "page-locked memory could not be unpinned and is leaked; it stays registered"
            );
        });
    }
}

/// The flags to page-lock with.
fn flags(context: &CudaContext, read_only: bool) -> Result<u32, RegisterFailure> {
    if !read_only {
        return Ok(sys::CU_MEMHOSTREGISTER_PORTABLE);
    }
    let supported = driver::attribute(
        context,
        Attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED,
    )
    .map_err(RegisterFailure::Driver)?;
    if supported == 0 {
        return Err(RegisterFailure::ReadOnly);
    }
    Ok(sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_READ_ONLY)
}

impl<B: HostMemory> Drop for HostRegistration<B> {
    fn drop(&mut self) {
        // All is leaked in a forked child, in silence: nothing went wrong.
        if !self.parts.owner.is_current() {
            return;
        }
        // SAFETY: taken once, here, and not used afterwards.
        let mut parts = ManuallyDrop::new(unsafe { ManuallyDrop::take(&mut self.parts) });
        let limit = parts.grace_limit;
        match parts.unpin(limit) {
            Ok(()) => {
                drop(ManuallyDrop::into_inner(parts));
                REGISTRATIONS.free(limit);
            }
            Err(UnregisterFailure::Grace(error)) => {
                parts.report_delay(error);
                REGISTRATIONS.put_thing(Box::new(parts));
            }
            Err(error) => parts.report_leak(&error),
        }
    }
}

/// A registration that could not wait when it was dropped.
impl<B: HostMemory> Released for ManuallyDrop<Parts<B>> {
    fn free(mut self: Box<Self>, limit: Option<Duration>) -> Freed {
        match self.unpin(limit) {
            Ok(()) => {
                drop(ManuallyDrop::into_inner(*self));
                Freed::Now
            }
            Err(UnregisterFailure::Grace(_) | UnregisterFailure::ForkedChild) => {
                Freed::NotYet(self)
            }
            Err(error) => {
                self.report_leak(&error);
                Freed::NotByUs
            }
        }
    }
}

impl<B: HostMemory> fmt::Debug for HostRegistration<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostRegistration")
            .field("bytes", &self.as_bytes().len())
            .field("chunks", &self.parts.chunks)
            .finish_non_exhaustive()
    }
}

/// How memory is page-locked.
///
/// ```
/// use std::time::Duration;
/// use pinned_hosts::cuda::{Progress, RegisterOptions};
///
/// let mut show = |progress: Progress| {
///     eprintln!("{} of {} bytes", progress.pinned_bytes, progress.total_bytes);
/// };
/// let options = RegisterOptions::default()
///     .chunk_bytes(16 << 20)
///     .grace_limit(Duration::from_secs(10))
///     .progress(&mut show);
/// ```
#[must_use]
pub struct RegisterOptions<'a> {
    chunk_bytes: usize,
    element_bytes: usize,
    grace_limit: Option<Duration>,
    progress: Option<&'a mut (dyn FnMut(Progress) + 'a)>,
}

impl Default for RegisterOptions<'_> {
    /// Chunks of 64 MiB, elements of 16 bytes, no limit, and no progress.
    fn default() -> Self {
        Self {
            chunk_bytes: 64 << 20,
            element_bytes: 16,
            grace_limit: None,
            progress: None,
        }
    }
}

impl<'a> RegisterOptions<'a> {
    /// How many bytes to page-lock in one driver call, at most: 64 MiB, which
    /// is some tens of milliseconds, if not set. More than 256 GiB count as
    /// 256 GiB (the driver refuses 512 GiB).
    ///
    /// Chunks are shortened to end between elements, and on pages where that
    /// is possible too. A chunk has at least one element.
    pub fn chunk_bytes(mut self, bytes: usize) -> Self {
        self.chunk_bytes = bytes;
        self
    }

    /// The size of what must not be cut, counted from the beginning of the
    /// memory: 16 bytes if not set, the largest of common element types, and
    /// a divisor of the page size, so that it costs nothing.
    ///
    /// Copies of whole elements in different chunks are made in parts, and
    /// each part has whole elements.
    pub fn element_bytes(mut self, bytes: usize) -> Self {
        self.element_bytes = bytes;
        self
    }

    /// How long to wait, at most, for the copies of other threads: before
    /// each chunk is page-locked, and before all are unpinned, by
    /// [`unregister`](HostRegistration::unregister), by dropping, or after an
    /// error; and as long again for registrations that could not wait when they
    /// were dropped. As long as it takes, if not set.
    pub fn grace_limit(mut self, limit: Duration) -> Self {
        self.grace_limit = Some(limit);
        self
    }

    /// A function to call after each chunk, on the same thread. The chunk is
    /// page-locked, and in use by copies, from before the call.
    pub fn progress(mut self, progress: &'a mut (dyn FnMut(Progress) + 'a)) -> Self {
        self.progress = Some(progress);
        self
    }

    fn sizes(&self) -> Result<(usize, usize), RegisterFailure> {
        if self.chunk_bytes == 0 {
            return Err(RegisterFailure::ZeroChunk);
        }
        if self.element_bytes == 0 || self.element_bytes > chunks::LARGEST {
            return Err(RegisterFailure::ElementSize {
                bytes: self.element_bytes,
            });
        }
        Ok((self.chunk_bytes, self.element_bytes))
    }
}

impl fmt::Debug for RegisterOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegisterOptions")
            .field("chunk_bytes", &self.chunk_bytes)
            .field("element_bytes", &self.element_bytes)
            .field("grace_limit", &self.grace_limit)
            .finish_non_exhaustive()
    }
}

/// How far memory is page-locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// How much is page-locked.
    pub pinned_bytes: usize,
    /// How much there is.
    pub total_bytes: usize,
    /// The chunk that was page-locked last.
    pub chunk: Region,
}
