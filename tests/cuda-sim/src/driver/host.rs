//! Page-locked host memory: what is, what was, and what a range is now.
//!
//! Tracking is byte-exact. Live ranges never overlap, so one look-up answers
//! for any range: if any live range touches it, then the last one that starts
//! before its end does, and if any contains it, then that one does.
//!
//! Memory that was allocated here and freed is not given back at once. It is
//! filled with [`POISON`] and put in quarantine, so that a transfer that comes
//! too late finds it, and can be counted.

use super::device::FIRST;
use super::{Outcome, TALLY};
use crate::{code, counters};
use std::alloc::Layout;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What freed memory is filled with.
pub(super) const POISON: u8 = 0xdb;
/// Memory in quarantine that nothing refers to is given back beyond this.
const QUARANTINE_BYTES: usize = 256 << 20;
/// Larger allocations are refused.
const LARGEST: usize = 16 << 30;
const PAGE: usize = 4096;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    Allocated,
    Registered,
}

/// A page-locked range. It outlives its table entry in whatever refers to it.
pub(super) struct HostRange {
    pub(super) base: usize,
    pub(super) len: usize,
    pub(super) origin: Origin,
    pub(super) flags: u32,
    pub(super) context: usize,
    pub(super) device: usize,
    pub(super) id: u64,
    /// Cleared when the range is freed or unregistered, under the lock.
    live: AtomicBool,
    /// Memory of the driver's own; none if it is the program's.
    backing: Option<Backing>,
}

impl HostRange {
    pub(super) fn is_live(&self) -> bool {
        self.live.load(Ordering::Acquire)
    }

    fn end(&self) -> usize {
        self.base + self.len
    }
}

/// Page-aligned memory that is no allocation yet. Clearing it takes time, so
/// it is made without the lock.
pub(super) struct Backing {
    address: usize,
    len: usize,
    layout: Layout,
}

impl Backing {
    pub(super) fn new(len: usize) -> Outcome<Self> {
        if len > LARGEST {
            return Err(code::OUT_OF_MEMORY);
        }
        let layout = Layout::from_size_align(len.max(1), PAGE).map_err(|_| code::OUT_OF_MEMORY)?;
        // SAFETY: the layout is not empty.
        let memory = unsafe { std::alloc::alloc_zeroed(layout) };
        if memory.is_null() {
            return Err(code::OUT_OF_MEMORY);
        }
        Ok(Self {
            address: memory as usize,
            len,
            layout,
        })
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; freed by the program since, and
        // no operation refers to it any more.
        unsafe { std::alloc::dealloc(self.address as *mut u8, self.layout) }
    }
}

/// Who a new range belongs to.
#[derive(Clone, Copy)]
pub(super) struct Owner {
    pub(super) context: usize,
    pub(super) device: usize,
    pub(super) id: u64,
}

#[derive(Default)]
pub(super) struct HostTable {
    live: BTreeMap<usize, Arc<HostRange>>,
    quarantine: VecDeque<Arc<HostRange>>,
    quarantined_bytes: usize,
}

impl HostTable {
    /// Makes memory an allocation, and returns where it is.
    pub(super) fn allocate(&mut self, backing: Backing, flags: u32, owner: Owner) -> usize {
        let (base, len) = (backing.address, backing.len);
        self.insert(base, len, Origin::Allocated, flags, owner, Some(backing));
        counters::add(&TALLY.live_host_allocations, 1);
        base
    }

    pub(super) fn register(
        &mut self,
        base: usize,
        len: usize,
        flags: u32,
        owner: Owner,
    ) -> Outcome {
        let end = base.checked_add(len).ok_or(code::INVALID_VALUE)?;
        if self.overlapping(base, end).is_some() {
            return Err(code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        self.insert(base, len, Origin::Registered, flags, owner, None);
        counters::add(&TALLY.live_registrations, 1);
        Ok(())
    }

    fn insert(
        &mut self,
        base: usize,
        len: usize,
        origin: Origin,
        flags: u32,
        owner: Owner,
        backing: Option<Backing>,
    ) {
        let range = HostRange {
            base,
            len,
            origin,
            flags,
            context: owner.context,
            device: owner.device,
            id: owner.id,
            live: AtomicBool::new(true),
            backing,
        };
        self.live.insert(base, Arc::new(range));
    }

    /// Ends an allocation. The caller poisons it.
    pub(super) fn free(&mut self, base: usize) -> Outcome<Arc<HostRange>> {
        match self.live.get(&base) {
            Some(range) if range.origin == Origin::Allocated => {}
            _ => return Err(code::INVALID_VALUE),
        }
        self.end(base).ok_or(code::INVALID_VALUE)
    }

    /// Ends a registration.
    pub(super) fn unregister(&mut self, base: usize) -> Outcome {
        match self.containing(base) {
            None => Err(code::HOST_MEMORY_NOT_REGISTERED),
            Some(range) if range.base != base || range.origin == Origin::Allocated => {
                Err(code::INVALID_VALUE)
            }
            Some(_) => self.end(base).map(drop).ok_or(code::INVALID_VALUE),
        }
    }

    /// Ends whatever belongs to a context; returns what there is to poison.
    pub(super) fn end_context(&mut self, context: usize) -> Vec<Arc<HostRange>> {
        let bases: Vec<usize> = self
            .live
            .values()
            .filter(|range| range.context == context)
            .map(|range| range.base)
            .collect();
        bases
            .into_iter()
            .filter_map(|base| self.end(base))
            .filter(|range| range.origin == Origin::Allocated)
            .collect()
    }

    fn end(&mut self, base: usize) -> Option<Arc<HostRange>> {
        let range = self.live.remove(&base)?;
        range.live.store(false, Ordering::Release);
        if range.origin == Origin::Allocated {
            counters::take(&TALLY.live_host_allocations, 1);
            self.quarantined_bytes += range.len;
            self.quarantine.push_back(range.clone());
            while self.quarantined_bytes > QUARANTINE_BYTES && self.quarantine.len() > 1 {
                let Some(oldest) = self.quarantine.pop_front() else {
                    break;
                };
                self.quarantined_bytes -= oldest.len;
            }
        } else {
            counters::take(&TALLY.live_registrations, 1);
        }
        Some(range)
    }

    /// Lets go of the quarantine. What operations still refer to stays with
    /// them.
    pub(super) fn purge(&mut self) {
        self.quarantine.clear();
        self.quarantined_bytes = 0;
    }

    /// The live range that an address lies in.
    pub(super) fn containing(&self, address: usize) -> Option<&Arc<HostRange>> {
        self.overlapping(address, address.checked_add(1)?)
    }

    /// What a host range is: page-locked (`Some`), pageable (`None`), or
    /// neither, which no copy may use.
    pub(super) fn classify(&self, base: usize, len: usize) -> Outcome<Option<Arc<HostRange>>> {
        if base == 0 {
            return Err(code::INVALID_VALUE);
        }
        let end = base.checked_add(len).ok_or(code::INVALID_VALUE)?;
        if end as u64 > FIRST {
            // A device address, or none at all.
            return Err(code::INVALID_VALUE);
        }
        match self.overlapping(base, end) {
            None => Ok(None),
            Some(range) if range.base <= base && end <= range.end() => Ok(Some(range.clone())),
            Some(_) => Err(code::INVALID_VALUE),
        }
    }

    /// The last live range that shares a byte with `[base, end)`.
    fn overlapping(&self, base: usize, end: usize) -> Option<&Arc<HostRange>> {
        self.live
            .range(..end)
            .rev()
            .map(|(_, range)| range)
            .find(|range| range.len > 0)
            .filter(|range| range.end() > base)
    }
}

/// Fills freed memory, so that whoever reads it late can tell.
pub(super) fn poison(range: &HostRange) {
    if range.backing.is_some() {
        // SAFETY: the driver's own allocation, at least `len` long, whose
        // owner has freed it; devices touch it through the kernel only.
        unsafe { std::ptr::write_bytes(range.base as *mut u8, POISON, range.len) }
    }
}
