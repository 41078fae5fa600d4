//! Copies.

use crate::code;
use crate::counters;
use crate::driver::call::{driver_api, enter};
use crate::driver::host::HostRange;
use crate::driver::operation::{Action, LateSource, Source, Target};
use crate::driver::pool::Buffer;
use crate::driver::schedule::wait;
use crate::driver::settings::Pageable;
use crate::driver::state;
use crate::driver::{Outcome, TALLY};
use std::sync::Arc;

driver_api! {
    fn cuMemcpyHtoDAsync_v2(target: u64, source: usize, bytes: usize, stream: usize) {
        // SAFETY: whoever calls this from C vouches that a pageable source can
        // be read during the call.
        unsafe { to_device(target, source, bytes, stream, Staging::AsSet) }
    }

    /// On the legacy stream, hence not ordered with non-blocking ones.
    fn cuMemcpyHtoD_v2(target: u64, source: usize, bytes: usize) {
        let mut state = enter()?;
        state.current()?;
        let stream = state.stream(0)?;
        if bytes == 0 {
            return Ok(());
        }
        let target = state.span(target, bytes)?;
        let range = state.host.classify(source, bytes)?;
        state.potentially_unsafe()?;
        let source = Source::Late(Arc::new(LateSource {
            address: source,
            range,
            snapshot: None,
            awaited: true,
        }));
        await_submitted(state, stream, Action::ToDevice { source, target })
    }

    fn cuMemcpyDtoHAsync_v2(target: usize, source: u64, bytes: usize, stream: usize) {
        let mut state = enter()?;
        state.current()?;
        let stream = state.stream(stream)?;
        if bytes == 0 {
            return Ok(());
        }
        let source = state.span(source, bytes)?;
        let range = state.host.classify(target, bytes)?;
        let capturing = state.streams.get(&stream).is_some_and(|it| it.capture().is_some());
        let awaited = range.is_none() && !capturing && !state.settings.write_late;
        let target = Arc::new(Target {
            address: target,
            range,
            awaited,
        });
        let action = Action::ToHost { source, target };
        if awaited {
            return await_submitted(state, stream, action);
        }
        state.submit(stream, action)?;
        Ok(())
    }

    fn cuMemcpyDtoH_v2(target: usize, source: u64, bytes: usize) {
        let mut state = enter()?;
        state.current()?;
        let stream = state.stream(0)?;
        if bytes == 0 {
            return Ok(());
        }
        let source = state.span(source, bytes)?;
        let range = state.host.classify(target, bytes)?;
        state.potentially_unsafe()?;
        let target = Arc::new(Target {
            address: target,
            range,
            awaited: true,
        });
        await_submitted(state, stream, Action::ToHost { source, target })
    }

    fn cuMemcpyDtoDAsync_v2(target: u64, source: u64, bytes: usize, stream: usize) {
        within_device(target, source, bytes, stream, None)
    }

    /// Returns before the copy is done: within a device nothing waits.
    fn cuMemcpyDtoD_v2(target: u64, source: u64, bytes: usize) {
        within_device(target, source, bytes, 0, None)
    }

    /// Memory that lies elsewhere than the caller says is an error.
    fn cuMemcpyPeerAsync(
        target: u64,
        target_context: usize,
        source: u64,
        source_context: usize,
        bytes: usize,
        stream: usize,
    ) {
        within_device(target, source, bytes, stream, Some([target_context, source_context]))
    }
}

/// What a copy does with a pageable source.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Staging {
    /// What the session set.
    AsSet,
    /// Any source is read during the call.
    Always,
    /// Any source is read late.
    Never,
}

/// A host-to-device copy on a stream.
///
/// # Safety
///
/// A pageable source is valid for reading during this call.
pub(super) unsafe fn to_device(
    target: u64,
    source: usize,
    bytes: usize,
    stream: usize,
    staging: Staging,
) -> Outcome {
    let mut state = enter()?;
    state.current()?;
    let stream = state.stream(stream)?;
    if bytes == 0 {
        return Ok(());
    }
    let target = state.span(target, bytes)?;
    let range = state.host.classify(source, bytes)?;
    state.check_implicit(stream)?;
    let capturing = state
        .streams
        .get(&stream)
        .is_some_and(|it| it.capture().is_some());
    let pageable = state.settings.pageable;
    let staged = match staging {
        Staging::AsSet => range.is_none() && !capturing && pageable != Pageable::ReadLate,
        Staging::Always => true,
        Staging::Never => false,
    };
    if staged && staging == Staging::AsSet && pageable == Pageable::StagedAfterStreamWait {
        let end = state.end_of(stream);
        state = wait(state, &[end])?;
    }
    let detect_torn = state.settings.detect_torn;
    drop(state);
    let source = if staged {
        counters::add(&TALLY.staged_copies, 1);
        // SAFETY: passed on to the caller.
        let contents = unsafe { std::slice::from_raw_parts(source as *const u8, bytes) };
        Source::Staged(Arc::new(Buffer::copy_of(contents)))
    } else {
        late_source(source, bytes, range, detect_torn)?
    };
    let action = Action::ToDevice { source, target };
    state::lock().submit(stream, action)?;
    Ok(())
}

fn late_source(
    address: usize,
    bytes: usize,
    range: Option<Arc<HostRange>>,
    detect_torn: bool,
) -> Outcome<Source> {
    let snapshot = match detect_torn {
        // A source that is not even there yet is an error of the call.
        true => Some(Buffer::dma_from(address, bytes).map_err(|_| code::INVALID_VALUE)?),
        false => None,
    };
    Ok(Source::Late(Arc::new(LateSource {
        address,
        range,
        snapshot,
        awaited: false,
    })))
}

/// A copy between device memories; `contexts` are those that the caller says
/// they lie in.
fn within_device(
    target: u64,
    source: u64,
    bytes: usize,
    stream: usize,
    contexts: Option<[usize; 2]>,
) -> Outcome {
    let mut state = enter()?;
    state.current()?;
    let stream = state.stream(stream)?;
    if bytes == 0 {
        return Ok(());
    }
    let target = state.span(target, bytes)?;
    let source = state.span(source, bytes)?;
    let found = [target.memory.context, source.memory.context];
    if contexts.is_some_and(|contexts| contexts != found) {
        return Err(code::INVALID_VALUE);
    }
    state.submit(stream, Action::WithinDevice { source, target })?;
    Ok(())
}

fn await_submitted(mut state: state::Guard, stream: usize, action: Action) -> Outcome {
    match state.submit(stream, action)? {
        Some(point) => wait(state, &[point]).map(drop),
        None => Ok(()),
    }
}
