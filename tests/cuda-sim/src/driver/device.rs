//! Device memory: host memory of the driver's own, under addresses of its own.
//!
//! The addresses lie where no process can map anything. So a device pointer
//! that is dereferenced by mistake crashes, and none is ever mistaken for a
//! host pointer.

use super::host::Owner;
use super::{Outcome, TALLY};
use crate::code;
use crate::counters;
use std::alloc::Layout;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The first device address.
pub(super) const FIRST: u64 = 1 << 52;
/// Allocations start at multiples of this, and between two there is at least
/// as much that belongs to neither.
const GRAIN: u64 = 512;
/// What a device of this make has.
pub(super) const TOTAL_BYTES: usize = 80 << 30;
/// More than this is out of memory: it is host memory after all.
const LARGEST: usize = 16 << 30;
/// Fresh memory is filled with this, up to a length, since fresh memory of a
/// real device is not zero either.
const GARBAGE: u8 = 0xa5;
const GARBAGE_BYTES: usize = 64 << 20;

/// One allocation.
pub(super) struct DeviceMemory {
    pub(super) base: u64,
    pub(super) len: usize,
    pub(super) context: usize,
    pub(super) device: usize,
    pub(super) id: u64,
    /// Freed: operations that still hold it touch dead memory.
    pub(super) freed: AtomicBool,
    backing: Backing,
}

/// Memory that is no allocation yet. Getting it takes time, so it is made
/// without the lock.
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
        let layout = Layout::from_size_align(len.max(1), 256).map_err(|_| code::OUT_OF_MEMORY)?;
        // SAFETY: the layout is not empty.
        let memory = unsafe { std::alloc::alloc(layout) };
        if memory.is_null() {
            return Err(code::OUT_OF_MEMORY);
        }
        // SAFETY: inside the allocation, which nobody else knows yet.
        unsafe { memory.write_bytes(GARBAGE, len.min(GARBAGE_BYTES)) };
        Ok(Self {
            address: memory as usize,
            len,
            layout,
        })
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and this is its owner.
        unsafe { std::alloc::dealloc(self.address as *mut u8, self.layout) }
    }
}

/// A range inside one allocation.
#[derive(Clone)]
pub(super) struct Span {
    pub(super) memory: Arc<DeviceMemory>,
    offset: usize,
    pub(super) len: usize,
}

impl Span {
    /// Where its bytes are, for the DMA engine: valid for reading and writing
    /// `len` bytes as long as the span lives, by DMA only.
    pub(super) fn address(&self) -> usize {
        self.memory.backing.address + self.offset
    }
}

pub(super) struct DeviceTable {
    live: BTreeMap<u64, Arc<DeviceMemory>>,
    next: u64,
}

impl Default for DeviceTable {
    fn default() -> Self {
        Self {
            live: BTreeMap::new(),
            next: FIRST,
        }
    }
}

impl DeviceTable {
    /// Gives memory an address.
    pub(super) fn insert(&mut self, backing: Backing, owner: Owner) -> u64 {
        let (base, len) = (self.next, backing.len);
        self.next += (len as u64).next_multiple_of(GRAIN) + GRAIN;
        let memory = DeviceMemory {
            base,
            len,
            context: owner.context,
            device: owner.device,
            id: owner.id,
            freed: AtomicBool::new(false),
            backing,
        };
        self.live.insert(base, Arc::new(memory));
        counters::add(&TALLY.live_device_allocations, 1);
        base
    }

    /// Takes the allocation at `base` out of the table.
    pub(super) fn remove(&mut self, base: u64) -> Outcome<Arc<DeviceMemory>> {
        let memory = self.live.remove(&base).ok_or(code::INVALID_VALUE)?;
        counters::take(&TALLY.live_device_allocations, 1);
        Ok(memory)
    }

    /// Frees everything that belongs to a context.
    pub(super) fn remove_context(&mut self, context: usize) {
        self.live.retain(|_, memory| {
            let keep = memory.context != context;
            if !keep {
                memory.freed.store(true, Ordering::Relaxed);
                counters::take(&TALLY.live_device_allocations, 1);
            }
            keep
        });
    }

    /// The allocation that an address lies in.
    pub(super) fn find(&self, address: u64) -> Option<&Arc<DeviceMemory>> {
        let (base, memory) = self.live.range(..=address).next_back()?;
        (address - base < memory.len as u64).then_some(memory)
    }

    /// A range that must lie in one allocation.
    pub(super) fn span(&self, address: u64, len: usize) -> Outcome<Span> {
        let memory = self.find(address).ok_or(code::INVALID_VALUE)?;
        let offset = (address - memory.base) as usize;
        if len > memory.len - offset {
            return Err(code::INVALID_VALUE);
        }
        Ok(Span {
            memory: memory.clone(),
            offset,
            len,
        })
    }

    /// Bytes in use on a device.
    pub(super) fn used(&self, device: usize) -> usize {
        self.live
            .values()
            .filter(|memory| memory.device == device)
            .map(|memory| memory.len)
            .sum()
    }
}
