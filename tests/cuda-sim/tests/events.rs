//! Events.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{
    bench, code, device_alloc, event_query, event_wait, host_alloc, htod, new_event, null, out,
    record, stream_wait,
};
use cudarc::driver::{CudaContext, sys};

#[test]
fn an_event_that_was_never_recorded_is_complete() {
    let bench = bench();
    let stream = bench.stream();
    let event = new_event();
    assert_eq!(event_query(event), 0);
    assert_eq!(event_wait(event), 0);
    // SAFETY: the simulated driver looks any handle up.
    let waits = unsafe { sys::cuStreamWaitEvent(stream.cu_stream(), event, 0) };
    assert_eq!(code(waits), 0);
    assert_eq!(bench.session.counters().pending_operations, 0);
}

#[test]
fn recording_overwrites() {
    let bench = bench();
    let (one, other) = (bench.stream(), bench.stream());
    let source = host_alloc(64);
    let target = device_alloc(64);
    let event = new_event();
    assert_eq!(htod(target, source, 64, one.cu_stream()), 0);
    assert_eq!(record(event, one.cu_stream()), 0);
    assert_eq!(record(event, other.cu_stream()), 0);
    assert_eq!(event_wait(event), 0);
    assert_eq!(bench.session.counters().h2d_transfers, 0);
}

#[test]
fn a_wait_of_a_stream_keeps_to_the_record_that_it_found() {
    let bench = bench();
    let (one, other) = (bench.stream(), bench.stream());
    let source = host_alloc(64);
    let target = device_alloc(64);
    let event = new_event();
    assert_eq!(htod(target, source, 64, one.cu_stream()), 0);
    assert_eq!(record(event, one.cu_stream()), 0);
    // SAFETY: the simulated driver looks any handle up.
    let waits = unsafe { sys::cuStreamWaitEvent(other.cu_stream(), event, 0) };
    assert_eq!(code(waits), 0);
    assert_eq!(htod(target, source, 64, one.cu_stream()), 0);
    assert_eq!(record(event, one.cu_stream()), 0);
    assert_eq!(stream_wait(other.cu_stream()), 0);
    assert_eq!(bench.session.counters().h2d_transfers, 1);
}

#[test]
fn an_event_and_its_stream_share_a_context() {
    let bench = bench();
    let event = new_event();
    let other = CudaContext::new(1).unwrap();
    let stream = other.new_stream().unwrap();
    assert_eq!(record(event, stream.cu_stream()), 400);
    // The legacy stream is the current context's, which is the other one.
    assert_eq!(record(event, null().cast()), 400);
    bench.context.bind_to_thread().unwrap();
    assert_eq!(record(event, null().cast()), 0);
}

#[test]
fn a_stream_can_wait_for_an_event_of_another_context() {
    let bench = bench();
    let here = bench.stream();
    let source = host_alloc(64);
    let event = new_event();
    assert_eq!(htod(device_alloc(64), source, 64, here.cu_stream()), 0);
    assert_eq!(record(event, here.cu_stream()), 0);
    let other = CudaContext::new(1).unwrap();
    let there = other.new_stream().unwrap();
    // SAFETY: the simulated driver looks any handle up.
    let waits = unsafe { sys::cuStreamWaitEvent(there.cu_stream(), event, 0) };
    assert_eq!(code(waits), 0);
    assert_eq!(stream_wait(there.cu_stream()), 0);
    assert_eq!(bench.session.counters().h2d_transfers, 1);
}

#[test]
fn destroying_an_event_does_not_undo_what_waits_for_it() {
    let bench = bench();
    let (one, other) = (bench.stream(), bench.stream());
    let source = host_alloc(64);
    assert_eq!(htod(device_alloc(64), source, 64, one.cu_stream()), 0);
    let event = new_event();
    assert_eq!(record(event, one.cu_stream()), 0);
    // SAFETY: the simulated driver looks any handle up.
    unsafe {
        assert_eq!(code(sys::cuStreamWaitEvent(other.cu_stream(), event, 0)), 0);
        assert_eq!(code(sys::cuEventDestroy_v2(event)), 0);
    }
    assert_eq!(event_query(event), 400);
    assert_eq!(stream_wait(other.cu_stream()), 0);
    assert_eq!(bench.session.counters().h2d_transfers, 1);
}

#[test]
fn an_event_of_a_destroyed_stream_can_be_waited_for() {
    let bench = bench();
    let _keeps_cudarc_from_waiting = bench.stream();
    let stream = bench.stream();
    let source = host_alloc(64);
    assert_eq!(htod(device_alloc(64), source, 64, stream.cu_stream()), 0);
    let event = new_event();
    assert_eq!(record(event, stream.cu_stream()), 0);
    drop(stream);
    assert_eq!(event_query(event), 600);
    assert_eq!(event_wait(event), 0);
    assert_eq!(event_query(event), 0);
    assert_eq!(bench.session.counters().h2d_transfers, 1);
}

#[test]
fn time_passes_between_timed_events_only() {
    let bench = bench();
    let stream = bench.stream();
    // SAFETY: an out pointer.
    let timed = || out(|event| unsafe { sys::cuEventCreate(event, 0) }).unwrap();
    let (start, end, untimed) = (timed(), timed(), new_event());
    // SAFETY: an out pointer.
    let between = |start, end| out(|it| unsafe { sys::cuEventElapsedTime(it, start, end) });
    assert_eq!(between(start, end), Err(400));
    for event in [start, end, untimed] {
        assert_eq!(record(event, stream.cu_stream()), 0);
    }
    let hold = bench.session.hold();
    assert_eq!(between(start, end), Err(600));
    drop(hold);
    assert_eq!(event_wait(end), 0);
    assert!(between(start, end).unwrap() >= 0.0);
    assert_eq!(between(start, untimed), Err(400));
}

#[test]
fn unknown_flags_are_refused() {
    let _bench = bench();
    // SAFETY: an out pointer.
    let create = |flags| out(|event| unsafe { sys::cuEventCreate(event, flags) }).map(drop);
    for flags in [0, 1, 2, 3, 6] {
        assert_eq!(create(flags), Ok(()));
    }
    assert_eq!(create(8), Err(1));
    assert_eq!(create(4), Err(1));
}
