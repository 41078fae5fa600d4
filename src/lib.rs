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
/// It is made at its first use, which allocates. A global allocator that asks
/// it whether memory is pinned must therefore not do so while it allocates,
/// unless the program has called `global` before.
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
/// Call it *after* the memory was unpinned. Whoever pins memory through driver
/// calls of their own vouches for this order: once a region is gone, copies
/// from it are not waited for.
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
/// A few nanoseconds: a relaxed load, a compare and a search. No lock, no
/// shared write, no driver call; no allocation after this thread's first
/// lookup.
#[inline]
#[must_use]
pub fn is_pinned(src: &[u8]) -> bool {
    reader::is_pinned(Span::of(src))
}

/// What `src` is, as far as the process-wide registry knows. Costs what
/// [`is_pinned`] costs.
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
