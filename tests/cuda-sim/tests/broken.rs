//! Contexts that break: errors that stay.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::alone::{Trap, in_a_process_of_its_own};
use common::{
    Bench, bench, code, code_of, device_alloc, dtoh, event_query, event_wait, host_alloc,
    host_free, htod, htod_sync, new_event, null, out, record, register_at, stream_query,
    stream_wait,
};
use cuda_sim::code;
use cudarc::driver::{CudaContext, sys};
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

const CODE: i32 = code::ILLEGAL_ADDRESS;

/// What each of some calls returns, of every chapter that a context has to do
/// with.
fn calls(stream: sys::CUstream, event: sys::CUevent, host: *mut u8, device: u64) -> Vec<i32> {
    fn failed(result: Result<usize, i32>) -> i32 {
        result.err().unwrap_or(0)
    }
    // SAFETY: places for what the calls hand out; the simulated driver looks
    // any handle up.
    unsafe {
        vec![
            failed(out(|it: *mut usize| sys::cuMemHostAlloc(it.cast(), 64, 0))),
            host_free(host),
            register_at([0_u8; 64].as_ptr(), 64, 0),
            failed(out(|it: *mut usize| sys::cuMemAlloc_v2(it.cast(), 64))),
            failed(out(|it: *mut usize| {
                sys::cuMemAllocAsync(it.cast(), 64, stream)
            })),
            code(sys::cuMemFree_v2(device)),
            code(sys::cuMemFreeAsync(device, stream)),
            code(sys::cuMemsetD8Async(device, 1, 64, stream)),
            htod(device, host, 64, stream),
            htod(device, [0; 64].as_ptr(), 64, stream),
            htod_sync(device, host, 64),
            dtoh(host, device, 64, stream),
            code(sys::cuMemcpyDtoDAsync_v2(device, device, 64, stream)),
            failed(out(|it: *mut usize| sys::cuEventCreate(it.cast(), 2))),
            record(event, stream),
            event_query(event),
            event_wait(event),
            code(sys::cuEventDestroy_v2(event)),
            failed(out(|it: *mut usize| sys::cuStreamCreate(it.cast(), 1))),
            stream_query(stream),
            stream_query(null().cast()),
            stream_wait(stream),
            code(sys::cuStreamWaitEvent(stream, event, 0)),
            failed(out(|it: *mut usize| {
                sys::cuStreamIsCapturing(stream, it.cast())
            })),
            code(sys::cuStreamDestroy_v2(stream)),
            code(sys::cuCtxSynchronize()),
        ]
    }
}

#[test]
fn every_call_on_a_broken_context_returns_its_error_and_nothing_is_transferred() {
    let bench = bench();
    let stream = bench.stream();
    let (host, device, event) = (host_alloc(64), device_alloc(64), new_event());
    assert_eq!(htod(device, host, 64, stream.cu_stream()), 0);
    assert_eq!(dtoh(host, device, 64, stream.cu_stream()), 0);
    assert_eq!(record(event, stream.cu_stream()), 0);
    bench.session.break_context(CODE);
    // The first error stays.
    bench.session.break_context(code::LAUNCH_FAILED);
    for _ in 0..2 {
        let returned = calls(stream.cu_stream(), event, host, device);
        assert_eq!(returned, vec![CODE; returned.len()]);
    }
    let counters = bench.session.counters();
    assert_eq!(
        (counters.pending_operations, counters.dropped_operations),
        (0, 3)
    );
    assert_eq!((counters.h2d_transfers, counters.d2h_transfers), (0, 0));
}

#[test]
fn an_operation_can_break_the_context() {
    let bench = bench();
    let stream = bench.stream();
    let (host, device) = (host_alloc(64), device_alloc(64));
    bench
        .session
        .break_at_nth("cuMemcpyHtoDAsync_v2", 2, code::TENSOR_MEMORY_LEAK);
    let copy = || htod(device, host, 64, stream.cu_stream());
    assert_eq!([copy(), copy(), copy()], [0, 721, 721]);
    assert_eq!(stream_wait(stream.cu_stream()), 721);
    assert_eq!(bench.session.counters().h2d_transfers, 0);
}

/// A function for a stream, which breaks the context of the bench it is given.
extern "C" fn break_it(data: *mut c_void) {
    // SAFETY: what `launch_break` passes.
    let bench = unsafe { &*data.cast::<Bench>() };
    bench.context.bind_to_thread().unwrap();
    bench.session.break_context(CODE);
}

/// The bench is waited for before it goes.
fn launch_break(bench: &Bench, stream: sys::CUstream) {
    let data = ptr::from_ref(bench).cast_mut().cast();
    // SAFETY: the function takes a bench, and gets one that lives.
    let launched = unsafe { sys::cuLaunchHostFunc(stream, Some(break_it), data) };
    assert_eq!(code(launched), 0);
}

#[test]
fn a_call_that_waits_when_the_context_breaks_returns_the_error() {
    let bench = bench();
    let stream = bench.stream();
    let (host, device, event) = (host_alloc(64), device_alloc(64), new_event());
    // It runs once something waits for what is behind it.
    launch_break(&bench, stream.cu_stream());
    assert_eq!(htod(device, host, 64, stream.cu_stream()), 0);
    assert_eq!(record(event, stream.cu_stream()), 0);
    assert_eq!(event_wait(event), CODE);
    let counters = bench.session.counters();
    assert_eq!(
        (counters.h2d_transfers, counters.dropped_operations),
        (0, 2)
    );
}

#[test]
fn freeing_that_waits_when_the_context_breaks_frees_nothing() {
    let bench = bench();
    let stream = bench.stream();
    let host = host_alloc(64);
    bench.session.set_free_waits(true);
    launch_break(&bench, stream.cu_stream());
    assert_eq!(host_free(host), CODE);
    assert_eq!(bench.session.counters().live_host_allocations, 1);
}

/// Between its checks and its place in the queue, a copy stages its source
/// without the driver's lock.
#[test]
fn a_copy_that_stages_when_the_context_breaks_returns_the_error() {
    if in_a_process_of_its_own("a_copy_that_stages_when_the_context_breaks_returns_the_error") {
        return;
    }
    let bench = bench();
    let stream = bench.stream();
    let target = device_alloc(64);
    let trap = Trap::set();
    let copied = std::thread::scope(|scope| {
        let copy = scope.spawn(|| {
            bench.context.bind_to_thread().unwrap();
            htod(target, trap.place().cast(), 64, stream.cu_stream())
        });
        trap.wait_until_entered();
        bench.session.break_context(CODE);
        trap.open();
        copy.join().unwrap()
    });
    assert_eq!(copied, CODE);
    assert_eq!(bench.session.counters().pending_operations, 0);
}

#[test]
fn a_function_of_the_program_is_not_called_in_a_broken_context() {
    extern "C" fn count(calls: *mut c_void) {
        // SAFETY: the count outlives the session's last wait.
        unsafe { &*calls.cast::<AtomicU32>() }.fetch_add(1, Ordering::SeqCst);
    }
    let bench = bench();
    let stream = bench.stream();
    let calls = AtomicU32::new(0);
    let data = (&raw const calls).cast_mut().cast();
    // SAFETY: the stream is drained before the count goes.
    let launched = unsafe { sys::cuLaunchHostFunc(stream.cu_stream(), Some(count), data) };
    assert_eq!(common::code(launched), 0);
    bench.session.break_context(CODE);
    bench.session.drain();
    assert_eq!(calls.load(Ordering::SeqCst), 0);
}

#[test]
fn another_context_works_on_but_cannot_use_what_the_broken_one_has() {
    let bench = bench();
    let (host, broken) = (host_alloc(64), device_alloc(64));
    // A capture in the broken context would forbid calls elsewhere.
    let stream = bench.stream();
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    stream.begin_capture(mode).unwrap();
    bench.session.break_context(CODE);
    let other = CudaContext::new(1).unwrap();
    let stream = other.new_stream().unwrap();
    let device = device_alloc(64);
    assert_eq!(htod(device, host, 64, stream.cu_stream()), 0);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    assert_eq!(bench.session.counters().h2d_transfers, 1);
    assert_eq!(htod(broken, host, 64, stream.cu_stream()), CODE);
}

/// `cudarc` stores the errors and ends the context all the same.
#[test]
fn a_broken_context_can_be_ended_with_all_that_it_has() {
    let bench = bench();
    let stream = bench.stream();
    let target = stream.alloc_zeros::<u8>(64).unwrap();
    // SAFETY: read by nobody.
    let pinned = unsafe { bench.context.alloc_pinned::<u8>(64) }.unwrap();
    let event = stream.record_event(None).unwrap();
    bench.session.break_context(CODE);
    assert_eq!(code_of(stream.synchronize()), CODE);
    drop((event, pinned, target, stream));
    let Bench { context, session } = bench;
    drop(context);
    let counters = session.counters();
    assert_eq!(
        (
            counters.live_events,
            counters.live_streams,
            counters.live_host_allocations,
            counters.live_device_allocations
        ),
        (0, 0, 0, 0)
    );
}

#[test]
fn the_next_session_finds_the_context_whole() {
    let sim = cuda_sim::load().unwrap();
    let session = sim.session();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    session.break_context(CODE);
    assert_eq!(code_of(stream.synchronize()), CODE);
    drop(session);
    let _session = sim.session();
    let sent = stream.clone_htod(&[5_u8; 64]).unwrap();
    assert_eq!(stream.clone_dtoh(&sent).unwrap(), [5; 64]);
    drop((sent, stream, context));
}

#[test]
#[should_panic(expected = "no current context")]
fn without_a_context_there_is_nothing_to_break() {
    let session = cuda_sim::load().unwrap().session();
    std::thread::scope(|scope| scope.spawn(|| session.break_context(CODE)).join())
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}
