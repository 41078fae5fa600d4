//! The addresses of a slice.

use crate::region::Region;

/// The addresses that a slice occupies, `[start, end)`. A lookup needs no
/// more: it never reads the bytes, so it works for elements with padding too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) start: usize,
    pub(crate) end: usize,
}

impl From<Region> for Span {
    fn from(region: Region) -> Self {
        Self {
            start: region.start_addr(),
            end: region.end_addr(),
        }
    }
}

impl Span {
    #[inline]
    pub(crate) fn of<T>(slice: &[T]) -> Self {
        let range = slice.as_ptr_range();
        Self {
            start: range.start.addr(),
            end: range.end.addr(),
        }
    }

    #[inline]
    pub(crate) fn is_empty(self) -> bool {
        self.start == self.end
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn len(self) -> usize {
        self.end - self.start
    }
}
