//! Contexts, and handles that are not, or no longer, what they should be.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{
    bench, code, code_of, device_alloc, device_bytes, dtoh, event_query, event_wait, host_alloc,
    host_bytes, htod, new_event, null, out, overwrite, record, register_at, stream_query,
    stream_wait,
};
use cudarc::driver::{CudaContext, sys};
use std::ffi::c_void;

fn set_current(context: sys::CUcontext) -> i32 {
    // SAFETY: the simulated driver looks any handle up.
    code(unsafe { sys::cuCtxSetCurrent(context) })
}

fn new_context() -> sys::CUcontext {
    // SAFETY: an out pointer.
    out(|it| unsafe { sys::cuCtxCreate_v4(it, std::ptr::null_mut(), 0, 0) }).unwrap()
}

fn destroy(context: sys::CUcontext) -> i32 {
    // SAFETY: the simulated driver looks any handle up.
    code(unsafe { sys::cuCtxDestroy_v2(context) })
}

#[test]
fn without_a_current_context_calls_fail() {
    let bench = bench();
    let stream = bench.stream();
    let target = device_alloc(8);
    let event = new_event();
    assert_eq!(set_current(std::ptr::null_mut()), 0);
    assert_eq!(htod(target, [0; 8].as_ptr(), 8, stream.cu_stream()), 201);
    assert_eq!(register_at([0_u8; 8].as_ptr(), 8, 0), 201);
    assert_eq!(record(event, stream.cu_stream()), 201);
    assert_eq!(event_wait(event), 201);
    assert_eq!(stream_wait(stream.cu_stream()), 201);
    // SAFETY: an out pointer.
    assert_eq!(out(|it| unsafe { sys::cuMemHostAlloc(it, 8, 0) }), Err(201));
    // This one the documents do not tie to a context.
    assert_eq!(event_query(event), 0);
}

#[test]
fn the_current_context_is_the_threads_own() {
    let bench = bench();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: an out pointer.
            let current = out(|it| unsafe { sys::cuCtxGetCurrent(it) });
            assert_eq!(current, Ok(std::ptr::null_mut()));
        });
    });
    // SAFETY: an out pointer.
    let current = out(|it| unsafe { sys::cuCtxGetCurrent(it) });
    assert_eq!(current, Ok(bench.context.cu_ctx()));
}

#[test]
fn a_primary_context_lives_as_long_as_it_is_retained() {
    let bench = bench();
    let again = CudaContext::new(0).unwrap();
    assert_eq!(again.cu_ctx(), bench.context.cu_ctx());
    drop(again);
    assert_eq!(stream_wait(null().cast()), 0);
    let handle = bench.context.cu_ctx();
    drop(bench.context);
    assert_eq!(register_at([0_u8; 8].as_ptr(), 8, 0), 709);
    assert_eq!(set_current(handle), 709);
    let back = CudaContext::new(0).unwrap();
    assert_eq!(back.cu_ctx(), handle);
    assert_eq!(stream_wait(null().cast()), 0);
}

#[test]
fn what_belonged_to_a_destroyed_context_is_an_error_and_not_a_crash() {
    let bench = bench();
    let context = new_context();
    // SAFETY: an out pointer.
    let stream = out(|it| unsafe { sys::cuStreamCreate(it, 1) }).unwrap();
    let event = new_event();
    let memory = device_alloc(8);
    assert_eq!(destroy(context), 0);
    assert_eq!(destroy(context), 709);
    assert_eq!(set_current(context), 709);
    bench.context.bind_to_thread().unwrap();
    assert_eq!(stream_wait(stream), 400);
    assert_eq!(stream_query(stream), 400);
    assert_eq!(record(event, null().cast()), 400);
    assert_eq!(event_query(event), 400);
    assert_eq!(htod(memory, [0; 8].as_ptr(), 8, null().cast()), 1);
}

#[test]
fn a_thread_whose_context_was_destroyed_elsewhere_is_told_so() {
    let bench = bench();
    let number = new_context() as usize;
    std::thread::scope(|scope| {
        scope.spawn(move || assert_eq!(destroy(number as sys::CUcontext), 0));
    });
    assert_eq!(stream_wait(null().cast()), 709);
    assert_eq!(register_at([0_u8; 8].as_ptr(), 8, 0), 709);
    bench.context.bind_to_thread().unwrap();
}

#[test]
fn destroying_a_context_under_dma_leaves_a_dead_read() {
    let bench = bench();
    let context = new_context();
    // SAFETY: an out pointer.
    let stream = out(|it| unsafe { sys::cuStreamCreate(it, 1) }).unwrap();
    let source = host_alloc(64);
    assert_eq!(htod(device_alloc(64), source, 64, stream), 0);
    assert_eq!(destroy(context), 0);
    bench.session.drain();
    let counters = bench.session.counters();
    assert_eq!((counters.dead_reads, counters.dead_device_accesses), (1, 1));
}

#[test]
fn the_last_of_the_streams_of_a_context_can_be_waited_for_by_polling_after_it_is_destroyed() {
    let bench = bench();
    let stream = bench.stream();
    let source = host_alloc(64);
    assert_eq!(htod(device_alloc(64), source, 64, stream.cu_stream()), 0);
    let event = new_event();
    assert_eq!(record(event, stream.cu_stream()), 0);
    drop(stream);
    while event_query(event) == 600 {
        std::thread::yield_now();
    }
    assert_eq!(bench.session.counters().h2d_transfers, 1);
}

#[test]
fn invented_handles_are_errors() {
    let _bench = bench();
    for invented in [3_usize, 0xdead_beef, usize::MAX] {
        let handle = invented as *mut c_void;
        assert_eq!(stream_wait(handle.cast()), 400);
        assert_eq!(stream_query(handle.cast()), 400);
        assert_eq!(event_query(handle.cast()), 400);
        assert_eq!(event_wait(handle.cast()), 400);
        assert_eq!(record(handle.cast(), null().cast()), 400);
        assert_eq!(record(new_event(), handle.cast()), 400);
        assert_eq!(set_current(handle.cast()), 201);
        // SAFETY: the simulated driver looks any handle up.
        unsafe {
            assert_eq!(code(sys::cuStreamDestroy_v2(handle.cast())), 400);
            assert_eq!(code(sys::cuEventDestroy_v2(handle.cast())), 400);
            assert_eq!(code(sys::cuGraphLaunch(handle.cast(), null().cast())), 400);
            assert_eq!(code(sys::cuCtxDestroy_v2(handle.cast())), 201);
        }
    }
}

#[test]
fn a_handle_of_one_kind_is_none_of_another() {
    let bench = bench();
    let stream = bench.stream();
    let event = new_event();
    assert_eq!(event_query(stream.cu_stream().cast()), 400);
    assert_eq!(stream_wait(event.cast()), 400);
}

#[test]
fn default_streams_cannot_be_destroyed() {
    let _bench = bench();
    for handle in 0..=2_usize {
        // SAFETY: the simulated driver looks any handle up.
        let result = unsafe { sys::cuStreamDestroy_v2(handle as sys::CUstream) };
        assert_eq!(code(result), 400);
    }
}

#[test]
fn a_stream_knows_its_context() {
    let bench = bench();
    let other = CudaContext::new(1).unwrap();
    let stream = other.new_stream().unwrap();
    // SAFETY: an out pointer.
    let context = |stream| out(|it| unsafe { sys::cuStreamGetCtx(stream, it) });
    assert_eq!(context(stream.cu_stream()), Ok(other.cu_ctx()));
    bench.context.bind_to_thread().unwrap();
    assert_eq!(context(null().cast()), Ok(bench.context.cu_ctx()));
}

#[test]
fn contexts_other_than_the_primary_one_work_through_cudarc() {
    let _bench = bench();
    let context = CudaContext::new_non_primary(0, 0).unwrap();
    let stream = context.new_stream().unwrap();
    let memory = stream.clone_htod(&[5_u8; 64]).unwrap();
    assert_eq!(stream.clone_dtoh(&memory).unwrap(), [5; 64]);
}

#[test]
fn there_are_two_devices() {
    let _bench = bench();
    // SAFETY: an out pointer.
    let device = |ordinal| out(|it| unsafe { sys::cuDeviceGet(it, ordinal) });
    assert_eq!(
        [0, 1, 2, -1].map(device),
        [Ok(0), Ok(1), Err(101), Err(101)]
    );
    assert_eq!(code_of(CudaContext::new(7)), 101);
}

/// "A memory copy will succeed even if it is issued to a stream that is not
/// associated to the current device" (Programming Guide); with unified
/// addressing the driver finds the memory's context by itself.
#[test]
fn copies_of_another_contexts_device_memory_are_counted_and_in_no_order_with_its_streams() {
    let bench = bench();
    let source = host_alloc(64);
    overwrite(source, 64, 1);
    let memory = device_alloc(64);
    // Pending on the legacy stream of the memory's own context.
    assert_eq!(htod(memory, source, 64, null().cast()), 0);
    let other = CudaContext::new(1).unwrap();
    let stream = other.new_stream().unwrap();
    let (own, back) = (device_alloc(64), host_alloc(64));
    assert_eq!(htod(own, source, 64, stream.cu_stream()), 0);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    assert_eq!(bench.session.counters().foreign_context_copies, 0);

    assert_eq!(htod(memory, [2; 64].as_ptr(), 64, stream.cu_stream()), 0);
    assert_eq!(dtoh(back, memory, 64, stream.cu_stream()), 0);
    // SAFETY: the simulated driver looks the addresses up.
    let within = |to, from| unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, 64, stream.cu_stream()) };
    assert_eq!(code(within(own, memory)), 0);
    assert_eq!(code(within(memory, own)), 0);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    assert_eq!(bench.session.counters().foreign_context_copies, 4);
    assert_eq!(host_bytes(back, 64), [2; 64]);
    // The copy that was first is the last one to be carried out.
    bench.context.bind_to_thread().unwrap();
    assert_eq!(device_bytes(memory, 64), [1; 64]);
    assert_eq!(bench.session.counters().foreign_context_copies, 4);
}

#[test]
fn another_contexts_device_memory_cannot_be_filled() {
    let bench = bench();
    let memory = device_alloc(64);
    let other = CudaContext::new(1).unwrap();
    let stream = other.new_stream().unwrap();
    // SAFETY: the simulated driver looks the address up.
    let results = unsafe {
        [
            sys::cuMemsetD8Async(memory, 7, 64, stream.cu_stream()),
            sys::cuMemsetD32Async(memory, 7, 16, null().cast()),
            sys::cuMemsetD8_v2(memory, 7, 64),
        ]
    };
    assert_eq!(results.map(code), [1; 3]);
    bench.context.bind_to_thread().unwrap();
    assert_ne!(device_bytes(memory, 64), [7; 64]);
}

#[test]
fn a_peer_copy_names_the_contexts_that_the_memory_is_in() {
    let bench = bench();
    let from = device_alloc(64);
    let here = bench.context.cu_ctx();
    let other = CudaContext::new(1).unwrap();
    let there = other.cu_ctx();
    let stream = other.new_stream().unwrap();
    let to = device_alloc(64);
    let copy = |(to, there), (from, here), bytes| {
        let stream = stream.cu_stream();
        // SAFETY: the simulated driver looks addresses and handles up.
        code(unsafe { sys::cuMemcpyPeerAsync(to, there, from, here, bytes, stream) })
    };
    assert_eq!(copy((to, there), (from, here), 64), 0);
    assert_eq!(copy((to, here), (from, here), 64), 1);
    assert_eq!(copy((to, there), (from, there), 64), 1);
    assert_eq!(copy((0, there), (0, here), 0), 0);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    assert_eq!(bench.session.counters().foreign_context_copies, 1);
}
