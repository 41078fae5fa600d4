//! What is registered: [`Region`], the error of making one, and the [`RegionId`]
//! that a registration is known by.

use std::error::Error;
use std::fmt;
use std::ops::Range;
use std::ptr;

use crate::sync::{AtomicU64, Ordering, process_wide, weakened};

/// One page-locked byte range, `[base, base + len)`, as the driver knows it.
///
/// A region is byte-exact: it is never rounded to pages, because the driver
/// tracks bytes too (two disjoint ranges on one page can be pinned and
/// unpinned apart). It is a pair of numbers and keeps nothing alive.
///
/// ```
/// use pinned_hosts::Region;
///
/// let buffer = vec![0u8; 64];
/// let region = Region::of(&buffer)?;
/// assert_eq!((region.base(), region.len()), (buffer.as_ptr(), 64));
/// # Ok::<(), pinned_hosts::RegionError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Region {
    start: usize,
    // Exclusive, always greater than `start`: a region is never empty and
    // never wraps, so no arithmetic on its bounds can overflow.
    end: usize,
}

impl Region {
    /// The region of `len` bytes at `base`.
    ///
    /// # Errors
    ///
    /// [`RegionError::Null`] for a null `base`, [`RegionError::Empty`] for a
    /// `len` of zero, [`RegionError::Wraps`] if `base + len` is greater than
    /// `usize::MAX`. Such ranges cannot be page-locked either.
    pub fn new(base: *const u8, len: usize) -> Result<Self, RegionError> {
        if base.is_null() {
            return Err(RegionError::Null);
        }
        if len == 0 {
            return Err(RegionError::Empty);
        }
        let start = base.addr();
        match start.checked_add(len) {
            Some(end) => Ok(Self { start, end }),
            None => Err(RegionError::Wraps { base: start, len }),
        }
    }

    /// The region that `bytes` occupies.
    ///
    /// # Errors
    ///
    /// [`RegionError::Empty`] for an empty slice.
    pub fn of(bytes: &[u8]) -> Result<Self, RegionError> {
        Self::new(bytes.as_ptr(), bytes.len())
    }

    /// The same `base`, with the length cut so that the range ends at the
    /// last address at the latest.
    pub(crate) fn saturating(base: *const u8, len: usize) -> Result<Self, RegionError> {
        Self::new(base, len.min(usize::MAX - base.addr()))
    }

    /// The first byte's address.
    #[must_use]
    pub fn base(&self) -> *const u8 {
        ptr::without_provenance(self.start)
    }

    /// The number of bytes, at least 1.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> usize {
        self.end - self.start
    }

    /// The address one past the last byte.
    #[must_use]
    pub fn end(&self) -> *const u8 {
        ptr::without_provenance(self.end)
    }

    pub(crate) fn start_addr(&self) -> usize {
        self.start
    }

    pub(crate) fn end_addr(&self) -> usize {
        self.end
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({self})")
    }
}

/// `0x7f00_0000..0x7f00_1000 (4096 bytes)`, without the underscores.
impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:#x}..{:#x} ({} bytes)",
            self.start,
            self.end,
            self.len()
        )
    }
}

/// Why a byte range is not a [`Region`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegionError {
    /// The base address is null: usually an allocation that failed and was
    /// not checked.
    Null,
    /// The range has no bytes, so there is nothing to pin.
    Empty,
    /// The range would run past the end of the address space: usually a
    /// negative length cast to `usize`.
    Wraps {
        /// The base address.
        base: usize,
        /// The length in bytes that does not fit behind it.
        len: usize,
    },
}

impl fmt::Display for RegionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str(
                "the base address of the region is null; check the allocation it came from",
            ),
            Self::Empty => f.write_str("the region has no bytes; skip empty buffers"),
            Self::Wraps { base, len } => write!(
                f,
                "{len} bytes at {base:#x} run past the end of the address space; \
                 check the length for a negative number cast to unsigned"
            ),
        }
    }
}

impl Error for RegionError {}

/// The name of one registration. It only identifies: a
/// [`Registration`](crate::Registration) removes.
///
/// Ids are unique in the process, over all registries, and are never used again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionId {
    number: u64,
    /// Where the region starts: by it the registration is found.
    start: usize,
}

/// What orders the registrations of a snapshot: the start, and of those that
/// start alike the id's number.
pub(crate) type Key = (usize, u64);

impl RegionId {
    /// An id for `region` that nobody has had before.
    pub(crate) fn draw(region: Region) -> Self {
        Self::of(draw_numbers(1).start, region)
    }

    /// An id for each of `regions` that nobody has had before, in a row.
    pub(crate) fn draw_all(regions: &[Region]) -> impl Iterator<Item = Self> {
        let numbers = draw_numbers(regions.len());
        numbers
            .zip(regions)
            .map(|(number, &it)| Self::of(number, it))
    }

    fn of(number: u64, region: Region) -> Self {
        Self {
            number,
            start: region.start,
        }
    }

    pub(crate) fn key(self) -> Key {
        (self.start, self.number)
    }
}

/// Draws `count` numbers that nobody has had before, in a row.
fn draw_numbers(count: usize) -> Range<u64> {
    process_wide! {
        static NEXT: AtomicU64 = const AtomicU64::new(1);
    }
    let count = count as u64;
    weakened!("id_reuse" => { return 1..1 + count });
    weakened!("id_drawn_in_two_steps" => {
        let first = NEXT.load(Ordering::Relaxed);
        NEXT.store(first + count, Ordering::Relaxed);
        return first..first + count;
    });
    // Relaxed: a read-modify-write never gives one value twice, and
    // uniqueness is all that is asked. Whoever is told an id learns of it
    // together with the publish that the id stands for.
    //
    // The counter does not come round: at one id a nanosecond that would
    // take 584 years.
    let first = NEXT.fetch_add(count, Ordering::Relaxed);
    first..first.wrapping_add(count)
}

impl fmt::Debug for RegionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RegionId").field(&self.number).finish()
    }
}
