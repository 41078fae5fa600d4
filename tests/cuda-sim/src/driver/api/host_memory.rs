//! Page-locked host memory.

use crate::code;
use crate::driver::Outcome;
use crate::driver::call::{Out, driver_api, enter};
use crate::driver::host::{self, Backing, Origin};
use crate::driver::maps::{self, Mapping};
use crate::driver::schedule::{Point, settle};
use crate::driver::settings::READ_ONLY_HOST_REGISTER_SUPPORTED;
use crate::driver::state::Guard;

const DEVICEMAP: u32 = 2;
const ALLOC_FLAGS: u32 = 7;
const READ_ONLY: u32 = 8;
const REGISTER_FLAGS: u32 = 15;

driver_api! {
    /// Zero bytes succeed, with an address of their own.
    fn cuMemHostAlloc(pointer: Out<usize>, bytes: usize, flags: u32) {
        allocate(pointer, bytes, flags)
    }

    fn cuMemAllocHost_v2(pointer: Out<usize>, bytes: usize) {
        allocate(pointer, bytes, 0)
    }

    fn cuMemFreeHost(pointer: usize) {
        let mut state = enter()?;
        state.current()?;
        state.potentially_unsafe()?;
        state = wait_if_set(state)?;
        let freed = state.host.free(pointer)?;
        drop(state);
        host::poison(&freed);
        Ok(())
    }

    fn cuMemHostRegister_v2(pointer: usize, bytes: usize, flags: u32) {
        if pointer == 0 || bytes == 0 || flags & !REGISTER_FLAGS != 0 {
            return Err(code::INVALID_VALUE);
        }
        let mapping = maps::mapping(pointer, bytes);
        let mut state = enter()?;
        let owner = state.new_owner()?;
        state.potentially_unsafe()?;
        let read_only = flags & READ_ONLY != 0;
        if read_only && state.settings.attribute(READ_ONLY_HOST_REGISTER_SUPPORTED) != Some(1) {
            return Err(code::NOT_SUPPORTED);
        }
        match mapping {
            Mapping::Writable => {}
            Mapping::ReadOnly if read_only => {}
            Mapping::ReadOnly | Mapping::Missing => return Err(code::INVALID_VALUE),
        }
        state.host.register(pointer, bytes, flags, owner)
    }

    fn cuMemHostUnregister(pointer: usize) {
        let mut state = enter()?;
        state.current()?;
        if pointer == 0 {
            return Err(code::INVALID_VALUE);
        }
        state.potentially_unsafe()?;
        wait_if_set(state)?.host.unregister(pointer)
    }

    /// For allocations only, as documented. Unified addressing maps them all.
    fn cuMemHostGetFlags(flags: Out<u32>, pointer: usize) {
        let state = enter()?;
        state.current()?;
        match state.host.containing(pointer) {
            Some(range) if range.origin == Origin::Allocated => flags.set(range.flags | DEVICEMAP),
            _ => Err(code::INVALID_VALUE),
        }
    }

    fn cuMemHostGetDevicePointer_v2(device: Out<u64>, pointer: usize, flags: u32) {
        let state = enter()?;
        state.current()?;
        if flags != 0 || state.host.containing(pointer).is_none() {
            return Err(code::INVALID_VALUE);
        }
        device.set(pointer as u64)
    }
}

fn allocate(pointer: Out<usize>, bytes: usize, flags: u32) -> Outcome {
    if flags & !ALLOC_FLAGS != 0 {
        return Err(code::INVALID_VALUE);
    }
    pointer.check()?;
    let backing = Backing::new(bytes);
    let mut state = enter()?;
    let owner = state.new_owner()?;
    state.potentially_unsafe()?;
    pointer.set(state.host.allocate(backing?, flags, owner))
}

/// Waits for all work there is, if freeing was set to wait.
fn wait_if_set(state: Guard) -> Outcome<Guard> {
    if !state.settings.free_waits {
        return Ok(state);
    }
    let ids: Vec<usize> = state.streams.keys().copied().collect();
    let ends: Vec<Point> = ids.into_iter().map(|id| state.end_of(id)).collect();
    let state = settle(state, &ends);
    // It may have broken meanwhile.
    state.current()?;
    Ok(state)
}
