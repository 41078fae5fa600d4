//! Device memory.

use crate::code;
use crate::driver::Outcome;
use crate::driver::call::{Out, driver_api, enter};
use crate::driver::device::{Backing, TOTAL_BYTES};
use crate::driver::operation::{Action, Pattern};
use crate::driver::schedule::wait;
use std::sync::atomic::Ordering;

driver_api! {
    fn cuMemAlloc_v2(pointer: Out<u64>, bytes: usize) {
        if bytes == 0 {
            return Err(code::INVALID_VALUE);
        }
        pointer.check()?;
        let backing = Backing::new(bytes);
        let mut state = enter()?;
        let owner = state.new_owner()?;
        state.potentially_unsafe()?;
        pointer.set(state.device.insert(backing?, owner))
    }

    /// Waits for nothing: the documents do not say that it does.
    fn cuMemFree_v2(pointer: u64) {
        let mut state = enter()?;
        state.current()?;
        if pointer == 0 {
            return Ok(());
        }
        state.potentially_unsafe()?;
        state.device.remove(pointer)?.freed.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// The memory can be used in calls at once; zero bytes are null.
    fn cuMemAllocAsync(pointer: Out<u64>, bytes: usize, stream: usize) {
        pointer.check()?;
        let backing = Backing::new(bytes);
        let mut state = enter()?;
        state.stream(stream)?;
        let owner = state.new_owner()?;
        if bytes == 0 {
            return pointer.set(0);
        }
        pointer.set(state.device.insert(backing?, owner))
    }

    /// No call may use the memory from now on; what the stream has before
    /// this still may.
    fn cuMemFreeAsync(pointer: u64, stream: usize) {
        let mut state = enter()?;
        state.current()?;
        let stream = state.stream(stream)?;
        if pointer == 0 {
            return Ok(());
        }
        let memory = state.device.remove(pointer)?;
        state.submit(stream, Action::Free(memory))?;
        Ok(())
    }

    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let state = enter()?;
        let current = state.current()?;
        let used = state.device.used(state.context(current)?.device);
        total.set(TOTAL_BYTES)?;
        free.set(TOTAL_BYTES.saturating_sub(used))
    }

    fn cuMemGetAddressRange_v2(base: Out<u64>, size: Out<usize>, pointer: u64) {
        let state = enter()?;
        let memory = state.device.find(pointer).ok_or(code::NOT_FOUND)?;
        state.check_unbroken(memory.context)?;
        base.set_if_wanted(memory.base);
        size.set_if_wanted(memory.len);
        Ok(())
    }

    fn cuMemsetD8Async(pointer: u64, value: u8, count: usize, stream: usize) {
        fill(pointer, &[value], count, Some(stream))
    }

    fn cuMemsetD16Async(pointer: u64, value: u16, count: usize, stream: usize) {
        fill(pointer, &value.to_ne_bytes(), count, Some(stream))
    }

    fn cuMemsetD32Async(pointer: u64, value: u32, count: usize, stream: usize) {
        fill(pointer, &value.to_ne_bytes(), count, Some(stream))
    }

    fn cuMemsetD8_v2(pointer: u64, value: u8, count: usize) {
        fill(pointer, &[value], count, None)
    }

    fn cuMemsetD32_v2(pointer: u64, value: u32, count: usize) {
        fill(pointer, &value.to_ne_bytes(), count, None)
    }
}

/// Fills on a stream, or without one on the legacy stream, and waits then.
///
/// The documents let copies alone find the context of the memory by themselves.
fn fill(pointer: u64, value: &[u8], count: usize, stream: Option<usize>) -> Outcome {
    let mut state = enter()?;
    state.current()?;
    let id = state.stream(stream.unwrap_or(0))?;
    if count == 0 {
        return Ok(());
    }
    if !pointer.is_multiple_of(value.len() as u64) {
        return Err(code::INVALID_VALUE);
    }
    let bytes = count.checked_mul(value.len()).ok_or(code::INVALID_VALUE)?;
    let target = state.span(pointer, bytes)?;
    let context = state.streams.get(&id).map(|it| it.context);
    if context != Some(target.memory.context) {
        return Err(code::INVALID_VALUE);
    }
    if stream.is_none() {
        state.potentially_unsafe()?;
    }
    let mut pattern = Pattern {
        bytes: [0; 4],
        len: value.len(),
    };
    pattern.bytes[..value.len()].copy_from_slice(value);
    let point = state.submit(id, Action::Fill { target, pattern })?;
    match (stream, point) {
        (None, Some(point)) => wait(state, &[point]).map(drop),
        _ => Ok(()),
    }
}
