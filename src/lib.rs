#![doc = include_str!("../README.md")]
// On docs.rs, where the toolchain allows it: says beside each item which
// feature it needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "cuda")]
pub mod cuda;
mod entry;
mod listing;
mod log;
mod pin;
mod process;
mod reader;
mod region;
mod registration;
mod registry;
mod retired;
mod section;
mod snapshot;
mod span;
mod sync;
mod tree;

use span::Span;
use sync::{modelled_only, process_wide};

pub use entry::{RegionEntry, RegionState};
pub use listing::{Regions, Segment, Segments};
pub use pin::{PinError, UnpinError};
pub use reader::Reader;
pub use region::{Region, RegionError, RegionId};
pub use registration::Registration;
pub use registry::Registry;
pub use section::{GraceError, Section};
pub use snapshot::Residency;

modelled_only! {
    #[doc(hidden)]
    pub use reader::{after_the_threads_reader, enter_and_ask_residency};
    #[doc(hidden)]
    pub use retired::{Hold, RetiredHolds};
}

/// The process-wide registry: the one that the free functions of this crate
/// act on and that every checked copy asks.
///
/// There is one per process, however many crates of the program use this one:
/// the package has a `links` key, so cargo refuses to build a program with two
/// versions of it. What cargo cannot see is a shared library that was linked
/// on its own and is loaded at run time (a plugin, a Python extension): its
/// copy has a registry of its own. Let one side own the copies, and hand the
/// other side functions to call.
///
/// # In a global allocator
///
/// An allocator may ask the registry, on each allocation and on each free, if it
/// keeps to three rules:
///
/// - It asks only once the program has called `global`, which allocates.
/// - It does not ask from inside its own question, because a thread's first
///   lookup, and its first section, allocate. A thread-local flag tells, as below.
/// - It does not register or unregister at each allocation of this crate. A
///   publish allocates; another publish of the same thread in between makes it
///   begin anew, and if that happens each time, it never ends.
///
/// ```
/// use std::alloc::{GlobalAlloc, Layout, System};
/// use std::cell::Cell;
/// use std::sync::atomic::{AtomicBool, Ordering};
///
/// use pinned_hosts::{global, is_pinned};
///
/// struct Asking;
///
/// static READY: AtomicBool = AtomicBool::new(false);
/// thread_local! { static ASKS: Cell<bool> = const { Cell::new(false) }; }
///
/// // SAFETY: `System` does the work.
/// unsafe impl GlobalAlloc for Asking {
///     unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
///         // SAFETY: the caller promises what `System` asks.
///         unsafe { System.alloc(layout) }
///     }
///
///     unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
///         if READY.load(Ordering::Relaxed) && !ASKS.replace(true) {
///             // SAFETY: the memory is not freed yet. (No byte of it is read.)
///             let memory = unsafe { std::slice::from_raw_parts(ptr, layout.size()) };
///             assert!(!is_pinned(memory), "page-locked memory is freed");
///             ASKS.set(false);
///         }
///         // SAFETY: the caller promises what `System` asks.
///         unsafe { System.dealloc(ptr, layout) }
///     }
/// }
///
/// #[global_allocator]
/// static ALLOCATOR: Asking = Asking;
///
/// let _ = global();
/// READY.store(true, Ordering::Relaxed);
/// drop(vec![0u8; 100]);
/// std::thread::spawn(|| drop(vec![0u8; 100])).join().unwrap();
/// ```
///
/// # Example
///
/// ```
/// use pinned_hosts::{Region, global};
///
/// let buffer = vec![0u8; 64];
/// let registration = global().register(Region::of(&buffer)?);
/// assert!(pinned_hosts::is_pinned(&buffer));
/// registration.unregister();
/// # Ok::<(), pinned_hosts::RegionError>(())
/// ```
#[must_use]
pub fn global() -> &'static Registry {
    process_wide! {
        static GLOBAL: Registry = Registry::new();
    }
    &GLOBAL
}

/// Notes in the process-wide registry that `bytes` bytes at `ptr` are
/// page-locked.
///
/// A null `ptr` or zero `bytes` is ignored. The same `ptr` again replaces the
/// length; a shorter one is logged as a warning, since copies from the rest are
/// not waited for any more. A length that runs past the end of the address space
/// is cut there: when unsure, the answer is "pinned".
///
/// Call it *before* the memory is pinned, or before anybody else can hold a
/// slice of it.
///
/// This function and [`unregister`] are for programs that know memory by its
/// address alone. Any safe code of the program can undo what they noted: by
/// `unregister`, and by `register` with another length. [`Registry::register`]
/// is the typed form, with errors; it gives a [`Registration`], and nothing
/// else removes what it registered.
///
/// ```
/// let buffer = vec![0u8; 64];
/// pinned_hosts::register(buffer.as_ptr(), buffer.len());
/// assert!(pinned_hosts::is_pinned(&buffer[10..]));
/// pinned_hosts::unregister(buffer.as_ptr());
/// assert!(!pinned_hosts::is_pinned(&buffer));
/// ```
pub fn register(ptr: *const u8, bytes: usize) {
    let Ok(region) = Region::saturating(ptr, bytes) else {
        return;
    };
    let replaced = global().register_base(region);
    if region.len() < bytes {
        log::emit(|| {
            tracing::warn!(
                base = ?ptr,
                bytes,
                "a registration runs past the end of the address space and was cut there; \
                 check the length for a negative number cast to unsigned"
            );
        });
    }
    if let Some(replaced) = replaced
        && replaced.len() > region.len()
    {
        log::emit(|| {
            tracing::warn!(
                base = ?ptr,
                bytes = region.len(),
                bytes_before = replaced.len(),
                "a registration was replaced by a shorter one of the same base, and the rest \
                 counts as pageable now; if the rest is still page-locked, register the longer \
                 range again, and parts of it with Registry::register, which replaces nothing"
            );
        });
    }
}

/// Removes what [`register`] noted at exactly this `ptr`, whichever code of the
/// program has noted it.
///
/// A null or unknown `ptr` is ignored, an address inside a region too. It
/// cannot remove what the typed interface or a buffer registered.
///
/// Call it *after* the memory was unpinned. If you pin memory through driver
/// calls of your own, you are responsible for this order: once a region is gone,
/// copies from it are not waited for.
pub fn unregister(ptr: *const u8) {
    global().unregister_base(ptr);
}

/// Whether every byte of `src` is page-locked, as far as the process-wide
/// registry knows; false for an empty slice.
///
/// If it is, the device may read `src` after an asynchronous copy call
/// returned. If it is not, the device may still read a *part* of it late: to
/// decide whether a copy has to be waited for, ask whether [`residency`] is
/// [`Residency::Pageable`].
///
/// ```
/// let buffer = vec![0u8; 64];
/// assert!(!pinned_hosts::is_pinned(&buffer));
/// ```
///
/// For elements other than bytes, ask with the bytes that they occupy; they
/// are not read. With `T: bytemuck::NoUninit` that is `bytemuck::cast_slice`.
///
/// A few nanoseconds: a relaxed load, a compare and a search.
///
/// # What a lookup does, and what it does not
///
/// A lookup takes no lock, writes nothing that another thread reads, calls no
/// driver function, and neither allocates nor frees. There are these exceptions:
///
/// - A thread's *first* lookup allocates: a place in a list that writers look
///   through (`arc-swap`'s), and what the thread-local's destructor needs. That
///   place is used again once the thread has ended. A publish visits each such
///   place, which takes some hundred nanoseconds a thread: a millisecond beside
///   10,000 threads that have looked up, parked ones too.
/// - The first lookup *after a publish* takes the new snapshot: it counts one
///   holder more, and one fewer of the old. A writer frees the old one.
/// - One lookup *in a forked child* may publish, and so allocate: if another
///   thread was about to publish when the process was forked.
///
/// # Where not to call it
///
/// In a signal handler: the handler's lookup may allocate, and it may take from
/// the interrupted lookup the snapshot that this one is reading. For a global
/// allocator, see [`global`].
///
/// # What a thread keeps
///
/// A thread keeps the snapshot that it saw last, until its next lookup or its end,
/// and a writer frees that snapshot at a publish after it. A thread that is
/// parked thus keeps what its snapshot does not share with the newer ones: after
/// one registration some kilobytes; after a [`Registry::register_all`] into
/// 100,000 regions, which makes everything anew, 8 MB. To give that back, let the
/// thread look up once more, any slice.
#[inline]
#[must_use]
pub fn is_pinned(src: &[u8]) -> bool {
    reader::is_pinned(Span::of(src))
}

/// What `src` is, as far as the process-wide registry knows. It costs what
/// [`is_pinned`] costs, and what is said there of a lookup holds for it.
///
/// ```
/// use pinned_hosts::{Residency, residency};
///
/// assert_eq!(residency(&[1, 2, 3]), Residency::Pageable);
/// ```
#[inline]
#[must_use]
pub fn residency(src: &[u8]) -> Residency {
    reader::residency(Span::of(src))
}

/// How many registrations the process-wide registry holds, from whichever
/// interface, page-locked buffers of this crate included.
#[must_use]
pub fn live_count() -> usize {
    reader::live_count()
}
