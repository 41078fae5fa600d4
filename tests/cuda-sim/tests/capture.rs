//! Stream capture and graphs.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{
    Bench, bench, code, device_alloc, device_bytes, dtoh, event_query, event_wait, host_alloc,
    host_bytes, host_free, htod, htod_sync, new_event, null, out, overwrite, record, stream_query,
    stream_wait,
};
use cudarc::driver::sys::{self, CUevent, CUgraphExec, CUstream};

const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;

fn mode(mode: u32) -> sys::CUstreamCaptureMode {
    use sys::CUstreamCaptureMode::*;
    match mode {
        GLOBAL => CU_STREAM_CAPTURE_MODE_GLOBAL,
        THREAD_LOCAL => CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        _ => CU_STREAM_CAPTURE_MODE_RELAXED,
    }
}

fn begin(stream: CUstream, with: u32) -> i32 {
    // SAFETY: the simulated driver looks any handle up.
    code(unsafe { sys::cuStreamBeginCapture_v2(stream, mode(with)) })
}

fn end(stream: CUstream) -> Result<sys::CUgraph, i32> {
    // SAFETY: an out pointer.
    out(|graph| unsafe { sys::cuStreamEndCapture(stream, graph) })
}

fn instantiate(graph: sys::CUgraph) -> CUgraphExec {
    // SAFETY: an out pointer.
    out(|it| unsafe { sys::cuGraphInstantiateWithFlags(it, graph, 0) }).unwrap()
}

fn launch(executable: CUgraphExec, stream: CUstream) -> i32 {
    // SAFETY: the simulated driver looks any handle up.
    code(unsafe { sys::cuGraphLaunch(executable, stream) })
}

fn wait_event(stream: CUstream, event: CUevent) -> i32 {
    // SAFETY: the simulated driver looks any handle up.
    code(unsafe { sys::cuStreamWaitEvent(stream, event, 0) })
}

fn status(stream: CUstream) -> u32 {
    // SAFETY: an out pointer.
    out(|it| unsafe { sys::cuStreamIsCapturing(stream, it) }).unwrap() as u32
}

/// Captures one copy, and gives what launches it.
fn captured_copy(bench: &Bench, target: u64, source: *const u8, bytes: usize) -> CUgraphExec {
    let stream = bench.stream();
    assert_eq!(begin(stream.cu_stream(), GLOBAL), 0);
    assert_eq!(htod(target, source, bytes, stream.cu_stream()), 0);
    instantiate(end(stream.cu_stream()).unwrap())
}

#[test]
fn capturing_runs_nothing() {
    let bench = bench();
    let source = host_alloc(64);
    captured_copy(&bench, device_alloc(64), source, 64);
    bench.session.drain();
    assert_eq!(bench.session.counters().h2d_transfers, 0);
}

#[test]
fn each_launch_reads_the_source_again_page_locked_or_not() {
    let mut memory = [0_u8; 64];
    for pageable in [false, true] {
        let bench = bench();
        let source = match pageable {
            true => memory.as_mut_ptr(),
            false => host_alloc(64),
        };
        let target = device_alloc(64);
        let copy = captured_copy(&bench, target, source, 64);
        let stream = bench.stream();
        for value in [1, 2] {
            overwrite(source, 64, value);
            assert_eq!(launch(copy, stream.cu_stream()), 0);
            assert_eq!(stream_wait(stream.cu_stream()), 0);
            assert_eq!(device_bytes(target, 64), [value; 64]);
        }
        let counters = bench.session.counters();
        assert_eq!((counters.late_reads, counters.torn_transfers), (2, 2));
        assert_eq!(counters.graph_launches, 2);
    }
}

#[test]
fn a_launch_after_the_source_was_freed_is_a_dead_read() {
    let bench = bench();
    let source = host_alloc(64);
    let copy = captured_copy(&bench, device_alloc(64), source, 64);
    assert_eq!(host_free(source), 0);
    bench.session.reset_counters();
    let stream = bench.stream();
    assert_eq!(launch(copy, stream.cu_stream()), 0);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    assert_eq!(bench.session.counters().dead_reads, 1);
}

#[test]
fn a_captured_download_writes_pageable_memory_late() {
    let bench = bench();
    let stream = bench.stream();
    let memory = device_alloc(64);
    assert_eq!(htod_sync(memory, [8; 64].as_ptr(), 64), 0);
    let mut target = [0_u8; 64];
    let target = target.as_mut_ptr();
    assert_eq!(begin(stream.cu_stream(), GLOBAL), 0);
    assert_eq!(dtoh(target, memory, 64, stream.cu_stream()), 0);
    let download = instantiate(end(stream.cu_stream()).unwrap());
    assert_eq!(launch(download, stream.cu_stream()), 0);
    assert_eq!(host_bytes(target, 64), [0; 64]);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    assert_eq!(host_bytes(target, 64), [8; 64]);
}

#[test]
fn waiting_for_a_capturing_stream_fails_and_spoils_the_capture() {
    let bench = bench();
    for wait in [stream_wait, stream_query] {
        let stream = bench.stream();
        assert_eq!(begin(stream.cu_stream(), RELAXED), 0);
        assert_eq!(status(stream.cu_stream()), 1);
        assert_eq!(wait(stream.cu_stream()), 900);
        assert_eq!(status(stream.cu_stream()), 2);
        assert_eq!(
            htod(device_alloc(8), [0; 8].as_ptr(), 8, stream.cu_stream()),
            901
        );
        assert_eq!(end(stream.cu_stream()), Err(901));
        assert_eq!(status(stream.cu_stream()), 0);
        assert_eq!(stream_wait(stream.cu_stream()), 0);
    }
}

#[test]
fn waiting_for_the_context_of_a_capturing_stream_spoils_the_capture() {
    let bench = bench();
    let stream = bench.stream();
    assert_eq!(begin(stream.cu_stream(), RELAXED), 0);
    assert_eq!(common::code_of(bench.context.synchronize()), 900);
    assert_eq!(end(stream.cu_stream()), Err(901));
}

#[test]
fn events_are_off_limits_while_any_thread_captures_globally() {
    let bench = bench();
    let stream = bench.stream();
    let event = new_event() as usize;
    for ask in [event_query, event_wait] {
        assert_eq!(begin(stream.cu_stream(), GLOBAL), 0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                bench.context.bind_to_thread().unwrap();
                assert_eq!(ask(event as CUevent), 900);
            });
        });
        assert_eq!(end(stream.cu_stream()), Err(901));
    }
}

#[test]
fn a_relaxed_thread_may_ask_for_events_during_any_capture() {
    let bench = bench();
    let stream = bench.stream();
    let event = new_event();
    assert_eq!(begin(stream.cu_stream(), GLOBAL), 0);
    assert_eq!(exchange(RELAXED), GLOBAL);
    assert_eq!(event_query(event), 0);
    assert_eq!(event_wait(event), 0);
    assert_eq!(exchange(GLOBAL), RELAXED);
    assert!(end(stream.cu_stream()).is_ok());
}

fn exchange(with: u32) -> u32 {
    let mut value = mode(with);
    // SAFETY: valid for reading and writing.
    let result = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut value) };
    assert_eq!(code(result), 0);
    value as u32
}

#[test]
fn a_thread_local_capture_concerns_its_thread_only() {
    let bench = bench();
    let stream = bench.stream();
    let event = new_event() as usize;
    assert_eq!(begin(stream.cu_stream(), THREAD_LOCAL), 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            bench.context.bind_to_thread().unwrap();
            assert_eq!(event_query(event as CUevent), 0);
        });
    });
    assert_eq!(event_query(event as CUevent), 900);
    assert_eq!(end(stream.cu_stream()), Err(901));
}

#[test]
fn a_relaxed_capture_concerns_nobody() {
    let bench = bench();
    let stream = bench.stream();
    assert_eq!(begin(stream.cu_stream(), RELAXED), 0);
    assert_eq!(event_query(new_event()), 0);
    assert_eq!(host_free(host_alloc(8)), 0);
    assert!(end(stream.cu_stream()).is_ok());
}

#[test]
fn page_locking_and_synchronous_copies_are_off_limits_during_a_global_capture() {
    let bench = bench();
    let memory = device_alloc(8);
    let source = [0_u8; 8];
    let calls: [&dyn Fn() -> i32; 3] = [
        // SAFETY: an out pointer.
        &|| out(|it| unsafe { sys::cuMemHostAlloc(it, 8, 0) }).unwrap_err(),
        &|| common::register(&source),
        &|| htod_sync(memory, source.as_ptr(), 8),
    ];
    for call in calls {
        let stream = bench.stream();
        assert_eq!(begin(stream.cu_stream(), GLOBAL), 0);
        assert_eq!(call(), 900);
        assert_eq!(end(stream.cu_stream()), Err(901));
    }
}

#[test]
fn an_event_of_a_capture_stands_for_nothing_that_runs() {
    let bench = bench();
    let stream = bench.stream();
    let event = new_event();
    assert_eq!(begin(stream.cu_stream(), RELAXED), 0);
    assert_eq!(record(event, stream.cu_stream()), 0);
    assert_eq!(event_query(event), 907);
    assert_eq!(event_wait(event), 907);
    assert!(end(stream.cu_stream()).is_ok());
    assert_eq!(event_query(event), 907);
    assert_eq!(record(event, stream.cu_stream()), 0);
    assert_eq!(event_wait(event), 0);
}

#[test]
fn a_stream_joins_a_capture_by_waiting_for_its_event() {
    let bench = bench();
    let (one, other) = (bench.stream(), bench.stream());
    let source = host_alloc(64);
    let target = device_alloc(64);
    let (fork, join) = (new_event(), new_event());
    assert_eq!(begin(one.cu_stream(), GLOBAL), 0);
    assert_eq!(record(fork, one.cu_stream()), 0);
    assert_eq!(wait_event(other.cu_stream(), fork), 0);
    assert_eq!(status(other.cu_stream()), 1);
    assert_eq!(htod(target, source, 64, other.cu_stream()), 0);
    assert_eq!(record(join, other.cu_stream()), 0);
    assert_eq!(wait_event(one.cu_stream(), join), 0);
    let graph = end(one.cu_stream()).unwrap();
    assert_eq!(status(other.cu_stream()), 0);
    assert_eq!(launch(instantiate(graph), one.cu_stream()), 0);
    assert_eq!(stream_wait(one.cu_stream()), 0);
    assert_eq!(bench.session.counters().h2d_transfers, 1);
}

#[test]
fn a_stream_that_joined_must_be_joined_again() {
    let bench = bench();
    let (one, other) = (bench.stream(), bench.stream());
    let (fork, join) = (new_event(), new_event());
    let source = host_alloc(64);
    let target = device_alloc(64);
    for work_after_the_join in [false, true] {
        assert_eq!(begin(one.cu_stream(), GLOBAL), 0);
        assert_eq!(record(fork, one.cu_stream()), 0);
        assert_eq!(wait_event(other.cu_stream(), fork), 0);
        if work_after_the_join {
            assert_eq!(record(join, other.cu_stream()), 0);
            assert_eq!(wait_event(one.cu_stream(), join), 0);
            assert_eq!(htod(target, source, 64, other.cu_stream()), 0);
        }
        assert_eq!(end(one.cu_stream()), Err(904));
    }
}

#[test]
fn a_capture_cannot_depend_on_work_outside() {
    let bench = bench();
    let (one, other) = (bench.stream(), bench.stream());
    let event = new_event();
    assert_eq!(record(event, other.cu_stream()), 0);
    assert_eq!(begin(one.cu_stream(), GLOBAL), 0);
    assert_eq!(wait_event(one.cu_stream(), event), 905);
    assert_eq!(end(one.cu_stream()), Err(901));
}

#[test]
fn two_captures_cannot_be_merged() {
    let bench = bench();
    let (one, other) = (bench.stream(), bench.stream());
    let event = new_event();
    assert_eq!(begin(one.cu_stream(), GLOBAL), 0);
    assert_eq!(begin(other.cu_stream(), GLOBAL), 0);
    assert_eq!(record(event, one.cu_stream()), 0);
    assert_eq!(wait_event(other.cu_stream(), event), 902);
    assert_eq!(end(one.cu_stream()), Err(901));
    assert_eq!(end(other.cu_stream()), Err(901));
}

#[test]
fn a_capture_ends_where_it_began() {
    let bench = bench();
    let (one, other) = (bench.stream(), bench.stream());
    let fork = new_event();
    assert_eq!(end(one.cu_stream()), Err(401));
    assert_eq!(begin(one.cu_stream(), GLOBAL), 0);
    assert_eq!(begin(one.cu_stream(), GLOBAL), 401);
    assert_eq!(record(fork, one.cu_stream()), 0);
    assert_eq!(wait_event(other.cu_stream(), fork), 0);
    assert_eq!(end(other.cu_stream()), Err(903));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            bench.context.bind_to_thread().unwrap();
            assert_eq!(end(one.cu_stream()), Err(908));
        });
    });
    assert_eq!(end(one.cu_stream()), Err(904));
}

#[test]
fn the_legacy_stream_cannot_be_captured() {
    let _bench = bench();
    assert_eq!(begin(null().cast(), RELAXED), 900);
}

#[test]
fn asking_the_legacy_stream_is_refused_beside_a_blocking_capture_and_spoils_nothing() {
    let bench = bench();
    // SAFETY: an out pointer.
    let blocking = out(|it| unsafe { sys::cuStreamCreate(it, 0) }).unwrap();
    assert_eq!(begin(blocking, RELAXED), 0);
    // SAFETY: an out pointer.
    let asked = out(|it| unsafe { sys::cuStreamIsCapturing(null().cast(), it) });
    assert_eq!(asked, Err(906));
    assert_eq!(status(blocking), 1);
    assert!(end(blocking).is_ok());
    assert_eq!(status(null().cast()), 0);
    drop(bench);
}

/// The answer for a stream without a capture is given without the lock.
#[test]
fn asking_a_stream_tells_of_each_change_of_it() {
    // SAFETY: an out pointer.
    let ask = |stream: CUstream| out(|it| unsafe { sys::cuStreamIsCapturing(stream, it) });
    let status = |stream: CUstream| ask(stream).map(|status| status as u32);
    let bench = bench();
    // SAFETY: an out pointer.
    let [one, two] = [(); 2].map(|()| out(|it| unsafe { sys::cuStreamCreate(it, 1) }).unwrap());
    let event = new_event();
    assert_eq!((status(one), status(two)), (Ok(0), Ok(0)));
    assert_eq!(begin(one, RELAXED), 0);
    assert_eq!((status(one), status(two)), (Ok(1), Ok(0)));
    assert_eq!(record(event, one), 0);
    assert_eq!(wait_event(two, event), 0);
    assert_eq!(status(two), Ok(1));
    assert_eq!(end(one), Err(904));
    assert_eq!((status(one), status(two)), (Ok(0), Ok(0)));
    // SAFETY: the simulated driver looks any handle up.
    assert_eq!(code(unsafe { sys::cuStreamDestroy_v2(one) }), 0);
    assert_eq!((status(one), status(two)), (Err(400), Ok(0)));
    assert_eq!(status(event.cast()), Err(400));
    assert_eq!(status((two as usize + 1) as CUstream), Err(400));
    drop(bench);
}

#[test]
fn work_on_the_legacy_stream_spoils_the_capture_of_a_blocking_stream() {
    let bench = bench();
    let target = device_alloc(8);
    // SAFETY: an out pointer.
    let blocking = out(|it| unsafe { sys::cuStreamCreate(it, 0) }).unwrap();
    assert_eq!(begin(blocking, RELAXED), 0);
    assert_eq!(htod(target, [0; 8].as_ptr(), 8, null().cast()), 906);
    assert_eq!(end(blocking), Err(901));
    let non_blocking = bench.stream();
    assert_eq!(begin(non_blocking.cu_stream(), RELAXED), 0);
    assert_eq!(htod(target, [0; 8].as_ptr(), 8, null().cast()), 0);
    assert!(end(non_blocking.cu_stream()).is_ok());
}

#[test]
fn a_batch_is_refused_in_a_capture_and_leaves_it_as_it_was() {
    let bench = bench();
    let stream = bench.stream();
    let mut target = device_alloc(8);
    let memory = [0_u8; 8];
    let (mut source, mut size) = (memory.as_ptr() as u64, 8_usize);
    let (mut first, mut failed) = (0_usize, 0_usize);
    // An access order, two locations and flags.
    let mut attributes = [1_u32, 0, 0, 0, 0, 0];
    assert_eq!(begin(stream.cu_stream(), GLOBAL), 0);
    // SAFETY: one of each, all valid.
    let result = unsafe {
        sys::cuMemcpyBatchAsync(
            &raw mut target,
            &raw mut source,
            &raw mut size,
            1,
            attributes.as_mut_ptr().cast(),
            &raw mut first,
            1,
            &raw mut failed,
            stream.cu_stream(),
        )
    };
    assert_eq!(code(result), 900);
    assert!(end(stream.cu_stream()).is_ok());
}

#[test]
fn a_session_ends_the_captures_that_a_test_left() {
    let session = cuda_sim::load().unwrap().session();
    let context = cudarc::driver::CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    assert_eq!(begin(stream.cu_stream(), GLOBAL), 0);
    drop(session);
    let _session = cuda_sim::load().unwrap().session();
    assert_eq!(status(stream.cu_stream()), 0);
    assert_eq!(event_query(new_event()), 0);
    drop((stream, context));
}

#[test]
fn graphs_work_through_cudarc() {
    let bench = bench();
    let stream = bench.stream();
    // SAFETY: one stream, so there is nothing to track.
    unsafe { bench.context.disable_event_tracking() };
    let mut memory = stream.clone_htod(&[1_u8; 64]).unwrap();
    stream.synchronize().unwrap();
    stream.begin_capture(mode(THREAD_LOCAL)).unwrap();
    stream.memset_zeros(&mut memory).unwrap();
    let graph = stream
        .end_capture(sys::CUgraphInstantiate_flags(0))
        .unwrap()
        .unwrap();
    assert_eq!(stream.clone_dtoh(&memory).unwrap(), [1; 64]);
    graph.upload().unwrap();
    graph.launch().unwrap();
    assert_eq!(stream.clone_dtoh(&memory).unwrap(), [0; 64]);
}

#[test]
fn executables_outlive_their_graph_and_die_once() {
    let bench = bench();
    let stream = bench.stream();
    assert_eq!(begin(stream.cu_stream(), GLOBAL), 0);
    let graph = end(stream.cu_stream()).unwrap();
    let executable = instantiate(graph);
    // SAFETY: the simulated driver looks any handle up.
    unsafe {
        assert_eq!(code(sys::cuGraphDestroy(graph)), 0);
        assert_eq!(code(sys::cuGraphDestroy(graph)), 400);
        assert_eq!(launch(executable, stream.cu_stream()), 0);
        assert_eq!(code(sys::cuGraphExecDestroy(executable)), 0);
        assert_eq!(code(sys::cuGraphExecDestroy(executable)), 400);
    }
    assert_eq!(launch(executable, stream.cu_stream()), 400);
}
