//! Streams.

use crate::code;
use crate::counters;
use crate::driver::call::{Out, driver_api, enter};
use crate::driver::capture;
use crate::driver::event::Record;
use crate::driver::operation::{Action, HostCall};
use crate::driver::process::check_initialized;
use crate::driver::schedule::{Role, Stream, is_quiet, wait};
use crate::driver::{Outcome, TALLY};
use std::ffi::c_void;

const CAPTURE_NONE: u32 = 0;
const CAPTURE_ACTIVE: u32 = 1;
const CAPTURE_INVALIDATED: u32 = 2;

driver_api! {
    fn cuStreamCreate(stream: Out<usize>, flags: u32) {
        create(stream, flags, 0)
    }

    fn cuStreamCreateWithPriority(stream: Out<usize>, flags: u32, priority: i32) {
        create(stream, flags, priority.clamp(-5, 0))
    }

    /// Returns at once; what is queued runs when it may.
    fn cuStreamDestroy_v2(stream: usize) {
        let mut state = enter()?;
        if stream <= 2 {
            return Err(code::INVALID_HANDLE);
        }
        let stream = state.stream(stream)?;
        state.leave_capture(stream);
        state.retire_stream(stream);
        Ok(())
    }

    fn cuStreamSynchronize(stream: usize) {
        let mut state = enter()?;
        let stream = usable(&mut state, stream)?;
        let end = state.end_of(stream);
        wait(state, &[end]).map(drop)
    }

    fn cuStreamQuery(stream: usize) {
        let mut state = enter()?;
        let stream = usable(&mut state, stream)?;
        let end = state.end_of(stream);
        if state.is_reached(end) {
            return Ok(());
        }
        state.demand(&[end]);
        Err(code::NOT_READY)
    }

    fn cuStreamWaitEvent(stream: usize, event: usize, _flags: u32) {
        let mut state = enter()?;
        state.current()?;
        let stream = state.stream(stream)?;
        match state.event(event)?.last.clone() {
            Record::Never => Ok(()),
            Record::Captured { capture, clock } => state.wait_captured(stream, capture, &clock),
            Record::At(point) => {
                let capturing = state.streams.get(&stream).and_then(|it| it.capture());
                if let Some(capture) = capturing {
                    state.invalidate(capture);
                    return Err(code::STREAM_CAPTURE_ISOLATION);
                }
                // A stream is always behind its own past.
                if point.stream != stream {
                    state.submit_after(stream, Action::Marker, vec![point])?;
                }
                Ok(())
            }
        }
    }

    fn cuStreamGetCtx(stream: usize, context: Out<usize>) {
        let mut state = enter()?;
        let stream = state.stream(stream)?;
        let found = state.streams.get(&stream).ok_or(code::INVALID_HANDLE)?;
        context.set(found.context)
    }

    fn cuStreamGetCtx_v2(stream: usize, context: Out<usize>, green: Out<usize>) {
        let mut state = enter()?;
        let stream = state.stream(stream)?;
        let found = state.streams.get(&stream).ok_or(code::INVALID_HANDLE)?;
        green.set_if_wanted(0);
        context.set(found.context)
    }

    fn cuStreamGetFlags(stream: usize, flags: Out<u32>) {
        let mut state = enter()?;
        let stream = state.stream(stream)?;
        flags.set(state.streams.get(&stream).ok_or(code::INVALID_HANDLE)?.flags)
    }

    fn cuStreamGetPriority(stream: usize, priority: Out<i32>) {
        let mut state = enter()?;
        let stream = state.stream(stream)?;
        priority.set(state.streams.get(&stream).ok_or(code::INVALID_HANDLE)?.priority)
    }

    fn cuStreamGetId(stream: usize, id: Out<u64>) {
        let mut state = enter()?;
        id.set(state.stream(stream)? as u64)
    }

    fn cuLaunchHostFunc(
        stream: usize,
        function: Option<unsafe extern "C" fn(*mut c_void)>,
        data: usize,
    ) {
        let function = function.ok_or(code::INVALID_VALUE)?;
        let mut state = enter()?;
        state.current()?;
        let stream = state.stream(stream)?;
        state.submit(stream, Action::Call(HostCall { function, data }))?;
        Ok(())
    }

    fn cuStreamBeginCapture_v2(stream: usize, mode: u32) {
        let mut state = enter()?;
        state.current()?;
        let stream = state.stream(stream)?;
        state.begin_capture(stream, mode)
    }

    fn cuStreamEndCapture(stream: usize, graph: Out<usize>) {
        let mut state = enter()?;
        graph.set(0)?;
        let stream = state.stream(stream)?;
        graph.set(state.end_capture(stream)?)
    }

    fn cuStreamIsCapturing(stream: usize, status: Out<u32>) {
        // A real driver does little to answer this, and copies ask it often.
        if is_quiet(stream) {
            return status.set(CAPTURE_NONE);
        }
        status.set(capture_of(stream)?.status)
    }

    fn cuStreamGetCaptureInfo(stream: usize, status: Out<u32>, id: Out<u64>) {
        let found = capture_of(stream)?;
        id.set_if_wanted(found.id);
        status.set(found.status)
    }

    fn cuStreamGetCaptureInfo_v2(
        stream: usize,
        status: Out<u32>,
        id: Out<u64>,
        graph: Out<usize>,
        dependencies: Out<usize>,
        count: Out<usize>,
    ) {
        let found = capture_of(stream)?;
        id.set_if_wanted(found.id);
        graph.set_if_wanted(found.graph);
        dependencies.set_if_wanted(0);
        count.set_if_wanted(0);
        status.set(found.status)
    }

    fn cuStreamGetCaptureInfo_v3(
        stream: usize,
        status: Out<u32>,
        id: Out<u64>,
        graph: Out<usize>,
        dependencies: Out<usize>,
        edges: Out<usize>,
        count: Out<usize>,
    ) {
        let found = capture_of(stream)?;
        id.set_if_wanted(found.id);
        graph.set_if_wanted(found.graph);
        dependencies.set_if_wanted(0);
        edges.set_if_wanted(0);
        count.set_if_wanted(0);
        status.set(found.status)
    }

    fn cuThreadExchangeStreamCaptureMode(mode: Out<u32>) {
        check_initialized()?;
        mode.check()?;
        let wanted = mode.get();
        if wanted > capture::RELAXED {
            return Err(code::INVALID_VALUE);
        }
        mode.set(capture::exchange_mode(wanted))
    }
}

fn create(stream: Out<usize>, flags: u32, priority: i32) -> Outcome {
    if flags > 1 {
        return Err(code::INVALID_VALUE);
    }
    stream.check()?;
    let mut state = enter()?;
    let context = state.current()?;
    let handle = state.add_stream(Stream::new(context, Role::Created, flags, priority));
    counters::add(&TALLY.live_streams, 1);
    stream.set(handle)
}

/// The stream, if a call may wait for it or ask about it. It may not while
/// the stream captures, and the attempt spoils the capture.
fn usable(state: &mut crate::driver::state::State, handle: usize) -> Outcome<usize> {
    state.current()?;
    let stream = state.stream(handle)?;
    state.check_implicit(stream)?;
    if let Some(capture) = state.streams.get(&stream).and_then(|it| it.capture()) {
        state.invalidate(capture);
        return Err(code::STREAM_CAPTURE_UNSUPPORTED);
    }
    Ok(stream)
}

/// What a stream's capture says of itself. Only an active one says more than
/// its status; 0 is none.
#[derive(Default)]
struct Found {
    status: u32,
    id: u64,
    graph: usize,
}

fn capture_of(handle: usize) -> Outcome<Found> {
    let mut state = enter()?;
    let stream = state.stream(handle)?;
    // As documented, and without harm to the capture.
    if state.implicit_capture(stream).is_some() {
        return Err(code::STREAM_CAPTURE_IMPLICIT);
    }
    let Some(id) = state.streams.get(&stream).and_then(|it| it.capture()) else {
        return Ok(Found::default());
    };
    Ok(match state.captures.get(&id) {
        Some(capture) if !capture.invalid => Found {
            status: CAPTURE_ACTIVE,
            id: id as u64,
            graph: capture.graph,
        },
        _ => Found {
            status: CAPTURE_INVALIDATED,
            ..Found::default()
        },
    })
}
