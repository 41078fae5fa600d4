//! [`checked`]: `cudarc`'s own copies, made sound by changing one expression.
//!
//! # How
//!
//! `CudaStream::memcpy_htod` takes anything that can hand out a slice
//! ([`HostSlice`]), enqueues a copy of what was handed out, and returns. The
//! wrapper hands out the borrowed slice itself only if the driver will stage
//! it at the call. Otherwise it hands out a copy of it on the heap, which it
//! owns. So the device never reads the borrowed slice late, and no wait has to
//! be relied on for that: not `cudarc`'s, which is skipped while an error is
//! stored in the context, nor one in the wrapper's drop, which safe code can
//! leave out. If the wrapper is leaked, its copy is.
//!
//! What is left for the drop is to free that copy once the device has read it.

use std::cell::{OnceCell, RefCell};
use std::fmt;
use std::io::{self, Write};
use std::mem::{self, MaybeUninit};
use std::process;
use std::slice;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, DeviceRepr, HostSlice, SyncOnDrop};

use super::CudaError;
use super::device::reads_pageable_late;
use super::driver;
use crate::span::Span;
use crate::{Residency, Section, global, reader};

/// Wraps `slice` for `cudarc`'s copies to the device:
///
/// ```no_run
/// use pinned_hosts::cuda::{self, PinnedBuffer, checked};
///
/// let context = cuda::context(0)?;
/// let stream = context.new_stream()?;
/// let mut on_device = stream.alloc_zeros::<u32>(1024)?;
/// let slice = PinnedBuffer::from_slice(&context, &[7u32; 1024])?;
///
/// stream.memcpy_htod(&checked(&slice), &mut on_device)?;
/// // `slice` may go.
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A pageable slice costs what it did. One of which any byte is page-locked is
/// copied to the heap first: the CPU copies it twice, and the device never
/// waits. On devices that may read pageable memory late (see the README's limits) every
/// slice is, and
/// the drop of the wrapper waits for all work of the context, which spoils
/// captures that other streams of it are making. A
/// [`Copier`](super::Copier) does all of this better; this is for code that
/// cannot be changed more.
///
/// A slice longer than the destination is a panic of `cudarc`'s; a `Copier`
/// returns an error.
///
/// Use it as a temporary, in the call. While it lives, it is a read-side
/// [section](Section): no other thread's memory is pinned or unpinned.
///
/// # Captures
///
/// On a stream that is capturing a graph, the graph gets a copy of the slice
/// that is never freed, since any launch of the graph reads it; a warning is
/// logged. One thing cannot be seen from here: a stream that is not capturing
/// when it is asked, and that `cudarc` then joins to another stream's capture
/// because the *destination* is part of it. The graph then holds the address
/// of a pageable slice, as with `cudarc` alone. A `Copier` refuses that.
pub fn checked<T: DeviceRepr>(slice: &[T]) -> Checked<'_, T> {
    Checked {
        slice,
        copy: OnceCell::new(),
        uses: RefCell::default(),
    }
}

/// A slice that `cudarc` can copy to the device soundly. From [`checked`].
pub struct Checked<'s, T: DeviceRepr> {
    slice: &'s [T],
    /// Elements that are copied bit by bit, and never dropped.
    copy: OnceCell<Box<[MaybeUninit<T>]>>,
    uses: RefCell<Uses>,
}

/// What the slices that were handed out are used for.
#[derive(Default)]
struct Uses {
    /// From before the first question to the drop, which is after the driver's
    /// call.
    section: Option<Section<'static>>,
    /// The contexts whose devices may be reading the copy.
    late: Vec<Arc<CudaContext>>,
    /// Whether a graph has the copy's address, or nobody can say.
    for_ever: bool,
}

impl<T: DeviceRepr> Checked<'_, T> {
    /// The copy, as elements.
    fn copy(&self) -> &[T] {
        let copy = self.copy.get_or_init(|| copy_of(self.slice));
        // SAFETY: all elements were copied. They are never dropped, so it does
        // no harm that there are two of each.
        unsafe { slice::from_raw_parts(copy.as_ptr().cast(), copy.len()) }
    }

    /// The slice itself if the driver stages it at the call, else the copy.
    fn for_stream(&self, stream: &CudaStream) -> &[T] {
        let mut uses = self.uses.borrow_mut();
        let context = stream.context();
        uses.section.get_or_insert_with(|| global().enter());
        // What cannot be asked is taken for the worst.
        let ready = driver::require();
        let capturing = ready.and_then(|()| driver::is_capturing(stream));
        let reads_late = reads_pageable_late(context, false).unwrap_or(true);
        if capturing == Ok(false) && !reads_late && is_pageable(self.slice) {
            return self.slice;
        }
        let copy = self.copy();
        if capturing != Ok(false) {
            if !mem::replace(&mut uses.for_ever, true) {
                tracing::warn!(
                    bytes = size_of_val(self.slice),
                    "a copy from a borrowed slice is captured into a graph, which reads host \
                     memory again at every launch: the graph gets a copy of the slice that is \
                     never freed. Use Copier::capture_h2d_from"
                );
            }
        } else if reads_late || !is_pageable(copy) {
            uses.late.push(Arc::clone(context));
        }
        copy
    }
}

/// A copy of the elements on the heap, bit by bit; not where memory is about to
/// be unpinned, which the device must not be let read.
fn copy_of<T>(slice: &[T]) -> Box<[MaybeUninit<T>]> {
    let bits = slice.as_ptr().cast::<MaybeUninit<T>>();
    // Kept, so that the allocator gives other memory out.
    let mut retiring = Vec::new();
    for _ in 0..64 {
        let mut copy = Box::new_uninit_slice(slice.len());
        let span = Span::of(&copy);
        if reader::is_retiring(span) {
            retiring.push(copy);
            continue;
        }
        // SAFETY: both have as many elements, and the copy is new.
        unsafe { copy.as_mut_ptr().copy_from_nonoverlapping(bits, copy.len()) };
        return copy;
    }
    // There is no error to return, and no memory that may be read.
    // (`eprintln!` would panic if standard error is closed.)
    let _ = writeln!(
        io::stderr(),
        "pinned-hosts: all memory of the heap is about to be unpinned, and a checked slice has to \
         be copied to it; aborting"
    );
    process::abort()
}

fn is_pageable<T>(slice: &[T]) -> bool {
    let span = Span::of(slice);
    reader::residency(span) == Residency::Pageable
}

impl<T: DeviceRepr> HostSlice<T> for Checked<'_, T> {
    fn len(&self) -> usize {
        self.slice.len()
    }

    unsafe fn stream_synced_slice<'a>(
        &'a self,
        stream: &'a CudaStream,
    ) -> (&'a [T], SyncOnDrop<'a>) {
        (self.for_stream(stream), SyncOnDrop::Sync(None))
    }

    /// As a destination it is of no use: what the device writes goes to memory
    /// of its own, which is never read nor freed, and an error is logged. Use
    /// [`Copier::copy_d2h_async`](super::Copier::copy_d2h_async).
    unsafe fn stream_synced_mut_slice<'a>(
        &'a mut self,
        _stream: &'a CudaStream,
    ) -> (&'a mut [T], SyncOnDrop<'a>) {
        tracing::error!(
            bytes = size_of_val(self.slice),
            "a checked slice is for copies to the device; as a destination it takes nothing, and \
             what the device writes is lost. Use Copier::copy_d2h_async"
        );
        let copy = Box::leak(copy_of(self.slice));
        let elements = copy.as_mut_ptr().cast::<T>();
        // SAFETY: as in `copy`; and nobody else has it.
        let copy = unsafe { slice::from_raw_parts_mut(elements, copy.len()) };
        (copy, SyncOnDrop::Sync(None))
    }
}

/// Frees the copy, if there is one, once the device has read it; leaks it if
/// nobody can say.
impl<T: DeviceRepr> Drop for Checked<'_, T> {
    fn drop(&mut self) {
        let uses = self.uses.take();
        let Some(copy) = self.copy.take() else {
            return;
        };
        if uses.for_ever {
            mem::forget(copy);
            return;
        }
        for context in &uses.late {
            if let Err(error) = driver::synchronize_context(context) {
                leak(copy, &error);
                return;
            }
        }
    }
}

fn leak<T>(copy: Box<[MaybeUninit<T>]>, error: &CudaError) {
    let bytes = size_of_val(&*copy);
    mem::forget(copy);
    tracing::error!(
        %error,
        bytes,
        "the driver cannot say whether the device is done with a copy of a slice, which is leaked"
    );
}

impl<T: DeviceRepr> fmt::Debug for Checked<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checked")
            .field("len", &self.slice.len())
            .field("copied", &self.copy.get().is_some())
            .finish_non_exhaustive()
    }
}
