//! Faults on demand, call counts, and sessions.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{bench, device_alloc, event_query, host_alloc, htod, new_event, record, stream_wait};
use cuda_sim::{DeviceKind, Timing, code};
use cudarc::driver::{DriverError, sys};

#[test]
fn the_nth_call_fails_once_and_does_nothing() {
    let bench = bench();
    let stream = bench.stream();
    bench
        .session
        .fail_nth("cuEventRecord", 2, code::OUT_OF_MEMORY);
    let (one, two) = (new_event(), new_event());
    assert_eq!(record(one, stream.cu_stream()), 0);
    assert_eq!(record(two, stream.cu_stream()), 2);
    assert_eq!(event_query(two), 0);
    assert_eq!(record(two, stream.cu_stream()), 0);
    assert_eq!(event_query(two), 600);
}

#[test]
fn a_copy_that_fails_transfers_nothing() {
    let bench = bench();
    let stream = bench.stream();
    bench
        .session
        .fail_nth("cuMemcpyHtoDAsync_v2", 1, code::LAUNCH_FAILED);
    assert_eq!(
        htod(device_alloc(8), [0; 8].as_ptr(), 8, stream.cu_stream()),
        719
    );
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    assert_eq!(bench.session.counters().h2d_transfers, 0);
}

#[test]
fn a_copy_that_fails_after_acting_transfers_all_the_same() {
    let bench = bench();
    let stream = bench.stream();
    bench
        .session
        .fail_nth_after_acting("cuMemcpyHtoDAsync_v2", 1, code::LAUNCH_FAILED);
    let destination = device_alloc(8);
    for expected in [719, 0] {
        assert_eq!(
            htod(destination, [0; 8].as_ptr(), 8, stream.cu_stream()),
            expected
        );
    }
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    assert_eq!(bench.session.counters().h2d_transfers, 2);
}

#[test]
fn a_call_that_cannot_act_returns_its_own_error() {
    let bench = bench();
    bench
        .session
        .fail_nth_after_acting("cuEventRecord", 1, code::UNKNOWN);
    assert_ne!(record(std::ptr::null_mut(), std::ptr::null_mut()), 999);
}

#[test]
fn every_call_fails_until_faults_are_cleared() {
    let bench = bench();
    let stream = bench.stream();
    bench
        .session
        .fail_always("cuStreamSynchronize", code::UNKNOWN);
    for _ in 0..3 {
        assert_eq!(stream_wait(stream.cu_stream()), 999);
    }
    bench.session.clear_faults();
    assert_eq!(stream_wait(stream.cu_stream()), 0);
}

#[test]
fn faults_of_one_call_do_not_count_for_another() {
    let bench = bench();
    let stream = bench.stream();
    bench.session.fail_nth("cuEventRecord", 1, code::UNKNOWN);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    assert_eq!(record(new_event(), stream.cu_stream()), 999);
}

#[test]
fn faults_that_are_ordered_together_strike_one_by_one() {
    let bench = bench();
    let stream = bench.stream();
    bench
        .session
        .fail_nth("cuEventRecord", 1, code::OUT_OF_MEMORY);
    bench.session.fail_nth("cuEventRecord", 3, code::UNKNOWN);
    let event = new_event();
    let results = [(); 4].map(|()| record(event, stream.cu_stream()));
    assert_eq!(results, [2, 0, 999, 0]);
}

#[test]
fn calls_are_counted_by_name_failures_included() {
    let bench = bench();
    let stream = bench.stream();
    assert_eq!(bench.session.calls("cuEventRecord"), 0);
    let event = new_event();
    bench.session.fail_nth("cuEventRecord", 2, code::UNKNOWN);
    for _ in 0..3 {
        record(event, stream.cu_stream());
    }
    assert_eq!(bench.session.calls("cuEventRecord"), 3);
}

#[test]
#[should_panic(expected = "no function cuEventRekord")]
fn a_misspelt_call_is_not_overlooked() {
    bench().session.fail_nth("cuEventRekord", 1, 1);
}

#[test]
#[should_panic(expected = "not a known result code")]
fn a_code_that_cudarc_does_not_know_is_not_accepted() {
    bench().session.fail_always("cuEventRecord", 12345);
}

#[test]
fn a_session_leaves_nothing_set() {
    let sim = cuda_sim::load().unwrap();
    {
        let first = sim.session();
        first.set_timing(Timing::Immediate);
        first.set_device(DeviceKind::Coherent);
        first.fail_always("cuStreamCreate", code::UNKNOWN);
        std::mem::forget(first.hold());
    }
    let bench = bench();
    let stream = bench.stream();
    let source = host_alloc(64);
    let target = device_alloc(64);
    assert_eq!(htod(target, source, 64, stream.cu_stream()), 0);
    assert_eq!(bench.session.counters().h2d_transfers, 0);
    assert_eq!(htod(target, [0; 64].as_ptr(), 64, stream.cu_stream()), 0);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    let counters = bench.session.counters();
    assert_eq!((counters.h2d_transfers, counters.staged_copies), (2, 1));
}

#[test]
fn a_session_ends_when_everything_is_done() {
    let sim = cuda_sim::load().unwrap();
    let session = sim.session();
    let context = cudarc::driver::CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let source = host_alloc(64);
    assert_eq!(htod(device_alloc(64), source, 64, stream.cu_stream()), 0);
    drop(session);
    let session = sim.session();
    assert_eq!(session.counters().pending_operations, 0);
    assert_eq!(session.counters().h2d_transfers, 0);
    assert_eq!(session.calls("cuStreamCreate"), 0);
    drop((stream, context, session));
}

#[test]
fn loading_again_finds_the_same_driver() {
    let (one, two) = (cuda_sim::load().unwrap(), cuda_sim::load().unwrap());
    assert!(std::ptr::eq(one, two));
    assert!(one.path().ends_with("libcuda_sim.so"));
}

/// The numbers in the words of `cuda.h` for a context that does no work any
/// more, and all others.
#[test]
fn every_code_can_be_returned_and_has_the_name_that_cudarc_gives_it() {
    let bench = bench();
    let stream = bench.stream();
    let named = [
        (code::DEINITIALIZED, 4),
        (code::ECC_UNCORRECTABLE, 214),
        (code::NVLINK_UNCORRECTABLE, 220),
        (code::CONTAINED, 226),
        (code::ILLEGAL_ADDRESS, 700),
        (code::LAUNCH_TIMEOUT, 702),
        (code::CONTEXT_IS_DESTROYED, 709),
        (code::ASSERT, 710),
        (code::HARDWARE_STACK_ERROR, 714),
        (code::ILLEGAL_INSTRUCTION, 715),
        (code::MISALIGNED_ADDRESS, 716),
        (code::INVALID_ADDRESS_SPACE, 717),
        (code::INVALID_PC, 718),
        (code::LAUNCH_FAILED, 719),
        (code::TENSOR_MEMORY_LEAK, 721),
        (code::MPS_CLIENT_TERMINATED, 810),
        (code::EXTERNAL_DEVICE, 911),
    ];
    for (code, number) in named {
        assert!(code == number && code::is_known(code), "{number}");
    }
    for code in (1..1000).filter(|code| code::is_known(*code)) {
        bench.session.fail_nth("cuStreamSynchronize", 1, code);
        // SAFETY: the simulated driver looks any handle up.
        let returned = unsafe { sys::cuStreamSynchronize(stream.cu_stream()) };
        let error = DriverError(returned);
        let name = error.error_name().unwrap().to_str().unwrap();
        assert_eq!((returned as i32, name), (code, &*format!("{returned:?}")));
        assert!(!error.error_string().unwrap().is_empty());
    }
}
