//! Contexts.

use super::device::checked;
use crate::code;
use crate::driver::call::{Out, driver_api, enter};
use crate::driver::context::{current_handle, end_context, pop_current, push_current, set_current};
use crate::driver::process::check_initialized;
use crate::driver::schedule::{Point, wait};

driver_api! {
    fn cuDevicePrimaryCtxRetain(context: Out<usize>, device: i32) {
        let mut state = enter()?;
        let device = checked(device)?;
        context.check()?;
        let handle = match state.primaries[device].context {
            Some(handle) => handle,
            None => state.create_context(device, 0, true),
        };
        state.revive(handle);
        let primary = &mut state.primaries[device];
        primary.context = Some(handle);
        primary.retained += 1;
        context.set(handle)
    }

    fn cuDevicePrimaryCtxRelease_v2(device: i32) {
        let mut state = enter()?;
        let device = checked(device)?;
        let primary = &mut state.primaries[device];
        let handle = primary.context.ok_or(code::INVALID_CONTEXT)?;
        if primary.retained == 0 {
            return Err(code::INVALID_CONTEXT);
        }
        primary.retained -= 1;
        if primary.retained == 0 {
            end_context(state, handle);
        }
        Ok(())
    }

    fn cuDevicePrimaryCtxGetState(device: i32, flags: Out<u32>, active: Out<i32>) {
        let state = enter()?;
        let device = checked(device)?;
        flags.set(0)?;
        active.set((state.primaries[device].retained > 0).into())
    }

    fn cuCtxCreate_v2(context: Out<usize>, flags: u32, device: i32) {
        create(context, flags, device)
    }

    fn cuCtxCreate_v3(
        context: Out<usize>,
        _affinity: usize,
        _affinities: i32,
        flags: u32,
        device: i32,
    ) {
        create(context, flags, device)
    }

    fn cuCtxCreate_v4(context: Out<usize>, _parameters: usize, flags: u32, device: i32) {
        create(context, flags, device)
    }

    /// Waits for nothing; what belongs to the context ends with it.
    fn cuCtxDestroy_v2(context: usize) {
        let state = enter()?;
        if state.context(context)?.primary {
            return Err(code::INVALID_CONTEXT);
        }
        if current_handle() == context {
            pop_current();
        }
        end_context(state, context);
        Ok(())
    }

    fn cuCtxGetCurrent(context: Out<usize>) {
        check_initialized()?;
        context.set(current_handle())
    }

    fn cuCtxSetCurrent(context: usize) {
        let state = enter()?;
        if context != 0 {
            state.context(context)?;
        }
        set_current(context);
        Ok(())
    }

    fn cuCtxPushCurrent_v2(context: usize) {
        let state = enter()?;
        state.context(context)?;
        push_current(context);
        Ok(())
    }

    fn cuCtxPopCurrent_v2(context: Out<usize>) {
        check_initialized()?;
        let popped = pop_current().ok_or(code::INVALID_CONTEXT)?;
        context.set_if_wanted(popped);
        Ok(())
    }

    fn cuCtxGetDevice(device: Out<i32>) {
        let state = enter()?;
        let current = state.current()?;
        device.set(state.context(current)?.device as i32)
    }

    fn cuCtxGetFlags(flags: Out<u32>) {
        let state = enter()?;
        let current = state.current()?;
        flags.set(state.context(current)?.flags)
    }

    fn cuCtxSetFlags(flags: u32) {
        let mut state = enter()?;
        let current = state.current()?;
        if let Some(context) = state.contexts.get_mut(&current) {
            context.flags = flags;
        }
        Ok(())
    }

    fn cuCtxGetId(context: usize, id: Out<u64>) {
        let state = enter()?;
        let handle = if context == 0 { state.current()? } else { context };
        state.context(handle)?;
        id.set(handle as u64)
    }

    fn cuCtxGetApiVersion(context: usize, version: Out<u32>) {
        let state = enter()?;
        let handle = if context == 0 { state.current()? } else { context };
        state.context(handle)?;
        version.set(3020)
    }

    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) {
        enter()?.current()?;
        least.set_if_wanted(0);
        greatest.set_if_wanted(-5);
        Ok(())
    }

    /// Waits for all work of the current context, that of destroyed streams
    /// included.
    fn cuCtxSynchronize() {
        let mut state = enter()?;
        let current = state.current()?;
        let streams = state.streams_of(current);
        let captures: Vec<usize> = streams
            .iter()
            .filter_map(|id| state.streams.get(id)?.capture())
            .collect();
        if !captures.is_empty() {
            for capture in captures {
                state.invalidate(capture);
            }
            return Err(code::STREAM_CAPTURE_UNSUPPORTED);
        }
        let ends: Vec<Point> = streams.into_iter().map(|id| state.end_of(id)).collect();
        wait(state, &ends).map(drop)
    }
}

fn create(context: Out<usize>, flags: u32, device: i32) -> crate::driver::Outcome {
    let mut state = enter()?;
    let device = checked(device)?;
    context.check()?;
    let handle = state.create_context(device, flags, false);
    push_current(handle);
    context.set(handle)
}
