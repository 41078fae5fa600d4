//! What can be gone through piece by piece: the parts of a slice, and the
//! registrations of a snapshot.

use std::fmt;
use std::iter::FusedIterator;

use crate::entry::RegionEntry;
use crate::region::Key;
use crate::snapshot::{Residency, Snapshot};
use crate::span::Span;
use crate::sync::Arc;

/// A part of a slice, from [`Registry::segments`](crate::Registry::segments).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment<'a> {
    bytes: &'a [u8],
    residency: Residency,
}

impl<'a> Segment<'a> {
    /// The part itself, never empty.
    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// [`Residency::Pinned`] if one region contains the part,
    /// [`Residency::Pageable`] if no region touches it; never another.
    #[must_use]
    pub fn residency(&self) -> Residency {
        self.residency
    }
}

/// The parts of a slice, in order, all from one snapshot. From
/// [`Registry::segments`](crate::Registry::segments).
#[derive(Clone, Debug)]
pub struct Segments<'a> {
    snapshot: Arc<Snapshot>,
    rest: &'a [u8],
}

impl<'a> Segments<'a> {
    pub(crate) fn new(snapshot: Arc<Snapshot>, bytes: &'a [u8]) -> Self {
        Self {
            snapshot,
            rest: bytes,
        }
    }
}

impl<'a> Iterator for Segments<'a> {
    type Item = Segment<'a>;

    fn next(&mut self) -> Option<Segment<'a>> {
        if self.rest.is_empty() {
            return None;
        }
        let span = Span::of(self.rest);
        let (part_end, residency) = self.snapshot.first_part(span);
        let (bytes, rest) = self.rest.split_at(part_end - span.start);
        self.rest = rest;
        Some(Segment { bytes, residency })
    }
}

impl FusedIterator for Segments<'_> {}

/// The registrations of one snapshot, by address. From
/// [`Registry::regions`](crate::Registry::regions).
#[derive(Clone)]
pub struct Regions {
    snapshot: Arc<Snapshot>,
    /// No key of those that are left is less.
    from: Key,
    left: usize,
}

impl Regions {
    pub(crate) fn new(snapshot: Arc<Snapshot>) -> Self {
        Self {
            from: (0, 0),
            left: snapshot.len(),
            snapshot,
        }
    }
}

impl fmt::Debug for Regions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.clone()).finish()
    }
}

impl Iterator for Regions {
    type Item = RegionEntry;

    fn next(&mut self) -> Option<RegionEntry> {
        let entry = self.snapshot.first_from(self.from)?;
        self.from = entry.key_after();
        self.left -= 1;
        Some(entry)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Regions {}
impl FusedIterator for Regions {}
