//! [`HostMemory`]: what can be page-locked where it is.

use std::sync::Arc;

/// Memory that can be page-locked where it is, by a
/// [`HostRegistration`](super::HostRegistration) that owns it.
///
/// Vectors, boxed slices and `Arc`ed slices of numbers are, in a `Box` or an
/// `Arc` too; so, with the feature `memmap2`, are memory-mapped files.
///
/// # Safety
///
/// For as long as the value lives and nobody borrows it mutably, even while it
/// is moved:
///
/// 1. `as_bytes` returns the same address and length at every call. (So an
///    array is none: its bytes move with it.)
/// 2. Those bytes stay allocated or mapped, and are written by nobody.
///
/// ```
/// use pinned_hosts::cuda::HostMemory;
///
/// struct Weights(Box<[u8]>);
///
/// // SAFETY: the bytes are on the heap and do not move with the box, which is
/// // private and never written.
/// unsafe impl HostMemory for Weights {
///     fn as_bytes(&self) -> &[u8] {
///         &self.0
///     }
/// }
/// ```
pub unsafe trait HostMemory: Send + Sync + 'static {
    /// The bytes to page-lock: all of them.
    fn as_bytes(&self) -> &[u8];

    /// Whether the memory is mapped without the right to write it. The driver
    /// has to be told.
    fn is_read_only(&self) -> bool {
        false
    }
}

macro_rules! numbers {
    ($($number:ty)*) => {$(
        // SAFETY: the bytes of a slice are where the slice is, and it cannot
        // be written through a shared borrow.
        unsafe impl HostMemory for [$number] {
            fn as_bytes(&self) -> &[u8] {
                // SAFETY: numbers have no padding: all `size_of_val` bytes are
                // initialised.
                unsafe { std::slice::from_raw_parts(self.as_ptr().cast(), size_of_val(self)) }
            }
        }

        // SAFETY: the elements are on the heap, and stay there while nobody
        // borrows the vector mutably.
        unsafe impl HostMemory for Vec<$number> {
            fn as_bytes(&self) -> &[u8] {
                self.as_slice().as_bytes()
            }
        }
    )*};
}

numbers! { u8 u16 u32 u64 u128 usize i8 i16 i32 i64 i128 isize f32 f64 }

// SAFETY: what is in a box does not move with it; else as for `M`.
unsafe impl<M: HostMemory + ?Sized> HostMemory for Box<M> {
    fn as_bytes(&self) -> &[u8] {
        (**self).as_bytes()
    }

    fn is_read_only(&self) -> bool {
        (**self).is_read_only()
    }
}

// SAFETY: what is in an `Arc` does not move with it, and is not borrowed
// mutably while this `Arc` is not; else as for `M`.
unsafe impl<M: HostMemory + ?Sized> HostMemory for Arc<M> {
    fn as_bytes(&self) -> &[u8] {
        (**self).as_bytes()
    }

    fn is_read_only(&self) -> bool {
        (**self).is_read_only()
    }
}

/// That nobody writes the file meanwhile, nor makes it shorter, is what the
/// caller of [`Mmap::map`](memmap2::Mmap::map) vouched for.
#[cfg(feature = "memmap2")]
// SAFETY: the mapping stays where it is until it is dropped.
unsafe impl HostMemory for memmap2::Mmap {
    fn as_bytes(&self) -> &[u8] {
        self
    }

    fn is_read_only(&self) -> bool {
        true
    }
}

/// Map it shared ([`map_mut`](memmap2::MmapMut::map_mut)): page-locking a
/// private, writable mapping copies every page of it.
#[cfg(feature = "memmap2")]
// SAFETY: as for `Mmap`.
unsafe impl HostMemory for memmap2::MmapMut {
    fn as_bytes(&self) -> &[u8] {
        self
    }
}
