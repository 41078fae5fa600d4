//! The tables of the driver, behind one lock.

use super::capture::{Capture, Graph};
use super::context::{Context, Primary};
use super::device::DeviceTable;
use super::event::Event;
use super::host::HostTable;
use super::schedule::Stream;
use super::settings::Settings;
use super::user_object;
use std::collections::{BTreeMap, HashMap};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// How many devices there are.
pub(super) const DEVICES: usize = 2;

/// Everything the driver knows.
///
/// Handles are keys of these tables and are never reused, so a stale or
/// invented handle is a failed look-up and nothing worse.
#[derive(Default)]
pub(super) struct State {
    pub(super) contexts: HashMap<usize, Context>,
    pub(super) primaries: [Primary; DEVICES],
    pub(super) streams: HashMap<usize, Stream>,
    pub(super) events: HashMap<usize, Event>,
    pub(super) captures: HashMap<usize, Capture>,
    pub(super) graphs: HashMap<usize, Graph>,
    pub(super) executables: HashMap<usize, Graph>,
    pub(super) user_objects: HashMap<usize, user_object::Handle>,
    pub(super) host: HostTable,
    pub(super) device: DeviceTable,
    pub(super) settings: Settings,
    /// Holds in force, by number: while there is one, nothing runs on the
    /// stream that it holds, or on any if it holds all (`None`).
    pub(super) holds: BTreeMap<u64, Option<usize>>,
    /// How many drains are under way: while there is one, neither holds nor
    /// timing keep anything from running.
    pub(super) drains: u32,
    handles: usize,
}

impl State {
    /// A handle that no call has returned before.
    ///
    /// Handles look like addresses, so that null, the special stream handles
    /// 1 and 2 and small invented numbers are none.
    pub(super) fn new_handle(&mut self) -> usize {
        self.handles += 1;
        FIRST_HANDLE + self.handles * HANDLE_STEP
    }
}

const FIRST_HANDLE: usize = 0x5100_0000_0000;
const HANDLE_STEP: usize = 0x10;

/// Which handle it is, counted in the order they are given out, if it is one.
pub(super) fn handle_number(handle: usize) -> Option<usize> {
    let offset = handle.checked_sub(FIRST_HANDLE)?;
    offset
        .is_multiple_of(HANDLE_STEP)
        .then_some(offset / HANDLE_STEP)
}

pub(super) type Guard = MutexGuard<'static, State>;

/// Locks the tables. A panic under the lock is turned into an error code by
/// the call wrapper; the tables are still worth using after one.
pub(super) fn lock() -> Guard {
    static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}
