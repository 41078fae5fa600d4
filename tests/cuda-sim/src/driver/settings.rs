//! What a session can set.

use crate::wire;
use std::collections::BTreeMap;
use std::time::Duration;

/// When an operation may run; see [`Timing`](crate::Timing).
#[derive(Clone, Copy)]
pub(super) enum Timing {
    Immediate,
    Delay(Duration),
    UntilWaited,
}

/// When a pageable source is read; see [`Pageable`](crate::Pageable).
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Pageable {
    StagedAtCall,
    StagedAfterStreamWait,
    ReadLate,
}

pub(super) struct Settings {
    pub(super) timing: Timing,
    pub(super) pageable: Pageable,
    /// Whether a pageable target is written after the call.
    pub(super) write_late: bool,
    pub(super) free_waits: bool,
    pub(super) detect_torn: bool,
    /// Values that a session gave to device attributes.
    pub(super) attributes: BTreeMap<i32, i32>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            timing: Timing::UntilWaited,
            pageable: Pageable::StagedAtCall,
            write_late: false,
            free_waits: false,
            detect_torn: true,
            attributes: BTreeMap::new(),
        }
    }
}

pub(super) const INTEGRATED: i32 = 18;
pub(super) const PAGEABLE_MEMORY_ACCESS: i32 = 88;
pub(super) const USES_HOST_PAGE_TABLES: i32 = 100;
pub(super) const READ_ONLY_HOST_REGISTER_SUPPORTED: i32 = 113;

/// The last attribute that CUDA 12.8 knows, about: enough to refuse nonsense.
const LAST_ATTRIBUTE: i32 = 160;

impl Settings {
    pub(super) fn set_device(&mut self, kind: u32) {
        let (pageable_access, host_tables, integrated) = match kind {
            wire::COHERENT => (1, 1, 0),
            wire::INTEGRATED => (0, 0, 1),
            wire::HMM => (1, 0, 0),
            _ => (0, 0, 0),
        };
        self.attributes
            .insert(PAGEABLE_MEMORY_ACCESS, pageable_access);
        self.attributes.insert(USES_HOST_PAGE_TABLES, host_tables);
        self.attributes.insert(INTEGRATED, integrated);
        self.pageable = if host_tables == 1 || integrated == 1 {
            Pageable::ReadLate
        } else {
            Pageable::StagedAtCall
        };
    }

    /// The value of a device attribute, or nothing if there is none such.
    pub(super) fn attribute(&self, attribute: i32) -> Option<i32> {
        if !(1..=LAST_ATTRIBUTE).contains(&attribute) {
            return None;
        }
        let default = match attribute {
            1 => 1024, // MAX_THREADS_PER_BLOCK
            10 => 32,  // WARP_SIZE
            16 => 132, // MULTIPROCESSOR_COUNT
            19 => 1,   // CAN_MAP_HOST_MEMORY
            40 => 2,   // ASYNC_ENGINE_COUNT
            41 => 1,   // UNIFIED_ADDRESSING
            75 => 9,   // COMPUTE_CAPABILITY_MAJOR
            78 => 1,   // STREAM_PRIORITIES_SUPPORTED
            91 => 1,   // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
            99 => 1,   // HOST_REGISTER_SUPPORTED
            113 => 1,  // READ_ONLY_HOST_REGISTER_SUPPORTED
            115 => 1,  // MEMORY_POOLS_SUPPORTED
            _ => 0,
        };
        Some(*self.attributes.get(&attribute).unwrap_or(&default))
    }
}
