//! The driver as `cudarc` uses it.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{bench, code_of};
use cudarc::driver::{CudaContext, CudaSlice};

#[test]
fn a_device_answers_for_itself() {
    let bench = bench();
    assert_eq!(CudaContext::device_count().unwrap(), 2);
    assert_eq!(bench.context.name().unwrap(), "Simulated device");
    assert_eq!(bench.context.compute_capability().unwrap(), (9, 0));
    let other = CudaContext::new(1).unwrap();
    assert_ne!(
        bench.context.uuid().unwrap().bytes,
        other.uuid().unwrap().bytes
    );
    assert_eq!(code_of(CudaContext::new(2)), 101);
}

#[test]
fn bytes_come_back_as_they_went() {
    let bench = bench();
    for stream in [
        bench.stream(),
        bench.context.default_stream(),
        bench.context.per_thread_stream(),
    ] {
        let sent: Vec<u32> = (0..100_000).collect();
        let on_device = stream.clone_htod(&sent).unwrap();
        assert_eq!(stream.clone_dtoh(&on_device).unwrap(), sent);
    }
    let counters = bench.session.counters();
    assert_eq!((counters.h2d_transfers, counters.h2d_bytes), (3, 1_200_000));
    assert_eq!((counters.d2h_transfers, counters.d2h_bytes), (3, 1_200_000));
}

#[test]
fn a_copy_within_the_device_and_a_fill_arrive() {
    let bench = bench();
    let stream = bench.stream();
    let ones = stream.clone_htod(&[1_u8; 1000]).unwrap();
    let mut zeros: CudaSlice<u8> = stream.alloc_zeros(1000).unwrap();
    assert_eq!(stream.clone_dtoh(&zeros).unwrap(), [0; 1000]);
    stream.memcpy_dtod(&ones, &mut zeros).unwrap();
    assert_eq!(stream.clone_dtoh(&zeros).unwrap(), [1; 1000]);
}

#[test]
fn a_pageable_source_may_be_dropped_after_the_call() {
    let bench = bench();
    let stream = bench.stream();
    let mut target = stream.alloc_zeros::<u8>(64).unwrap();
    let source = vec![7; 64];
    stream.memcpy_htod(&source, &mut target).unwrap();
    drop(source);
    assert_eq!(stream.clone_dtoh(&target).unwrap(), [7; 64]);
    assert_eq!(bench.session.counters().late_reads, 0);
}

#[test]
fn the_hole_is_there_a_slice_of_pinned_memory_is_read_late() {
    let bench = bench();
    let stream = bench.stream();
    // SAFETY: filled before it is read.
    let mut pinned = unsafe { bench.context.alloc_pinned::<u8>(64) }.unwrap();
    pinned.as_mut_slice().unwrap().fill(1);
    let mut target = stream.alloc_zeros::<u8>(64).unwrap();
    stream
        .memcpy_htod(pinned.as_slice().unwrap(), &mut target)
        .unwrap();
    pinned.as_mut_slice().unwrap().fill(2);
    stream.synchronize().unwrap();
    let counters = bench.session.counters();
    assert_eq!((counters.late_reads, counters.torn_transfers), (1, 1));
    assert_eq!(stream.clone_dtoh(&target).unwrap(), [2; 64]);
}

#[test]
fn the_hole_is_there_dropping_pinned_memory_frees_it_under_dma() {
    let bench = bench();
    let stream = bench.stream();
    // SAFETY: filled before it is read.
    let mut pinned = unsafe { bench.context.alloc_pinned::<u8>(64) }.unwrap();
    pinned.as_mut_slice().unwrap().fill(1);
    let mut target = stream.alloc_zeros::<u8>(64).unwrap();
    stream
        .memcpy_htod(pinned.as_slice().unwrap(), &mut target)
        .unwrap();
    drop(pinned);
    stream.synchronize().unwrap();
    assert_eq!(bench.session.counters().dead_reads, 1);
}

#[test]
fn pinned_memory_that_is_passed_whole_waits_before_it_is_read_or_freed() {
    let bench = bench();
    let stream = bench.stream();
    // SAFETY: filled before it is read.
    let mut pinned = unsafe { bench.context.alloc_pinned::<u8>(64) }.unwrap();
    pinned.as_mut_slice().unwrap().fill(1);
    let mut target = stream.alloc_zeros::<u8>(64).unwrap();
    stream.memcpy_htod(&pinned, &mut target).unwrap();
    pinned.as_mut_slice().unwrap().fill(2);
    stream.memcpy_htod(&pinned, &mut target).unwrap();
    drop(pinned);
    stream.synchronize().unwrap();
    let counters = bench.session.counters();
    assert_eq!(counters.late_reads, 2);
    assert_eq!((counters.torn_transfers, counters.dead_reads), (0, 0));
}

#[test]
fn a_recorded_event_is_complete_once_polled_for() {
    let bench = bench();
    let stream = bench.stream();
    let target = stream.clone_htod(&[1_u8; 16]).unwrap();
    let event = stream.record_event(None).unwrap();
    assert!(!event.is_complete());
    while !event.try_is_complete().unwrap() {
        std::thread::yield_now();
    }
    drop(target);
}

#[test]
fn a_second_device_has_memory_of_its_own() {
    let bench = bench();
    let stream = bench.stream();
    let here = stream.clone_htod(&[3_u8; 32]).unwrap();
    let other = CudaContext::new(1).unwrap();
    let there = other.new_stream().unwrap().clone_dtod(&here).unwrap();
    let back = there.stream().clone_dtoh(&there).unwrap();
    assert_eq!(back, [3; 32]);
}

#[test]
fn errors_have_names_and_texts() {
    let bench = bench();
    bench.session.fail_nth("cuStreamCreate", 1, 2);
    let error = bench.context.new_stream().unwrap_err();
    assert_eq!(
        error.error_name().unwrap().to_str(),
        Ok("CUDA_ERROR_OUT_OF_MEMORY")
    );
    assert_eq!(error.error_string().unwrap().to_str(), Ok("out of memory"));
}
