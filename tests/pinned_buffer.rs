//! `PinnedBuffer` over the simulated driver: it is registered while it lives,
//! and its memory outlives every transfer that was told of it.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::{Arc, Barrier};
use std::thread;

use common::Rig;
use cuda_sim::code;
use cudarc::driver::DeviceRepr;
use pinned_hosts::cuda::{Copier, CudaError, PinnedBuffer};
use pinned_hosts::{Residency, global, residency};

const LEN: usize = 4096;

fn ones(rig: &Rig) -> PinnedBuffer<u8> {
    PinnedBuffer::from_slice(&rig.context, &[1; LEN]).unwrap()
}

#[test]
fn it_is_registered_from_its_making_to_its_drop() {
    let rig = Rig::new();
    let buffer = ones(&rig);
    let (base, len) = (buffer.as_ptr(), buffer.len());
    assert_eq!(residency(&buffer), Residency::Pinned);
    assert_eq!(residency(&buffer[LEN - 1..]), Residency::Pinned);
    let live = rig.counters().live_host_allocations;
    assert_eq!(entry_at(base).unwrap().region().len(), len);
    drop(buffer);
    assert_eq!(entry_at(base), None);
    assert_eq!(rig.counters().live_host_allocations, live - 1);
}

/// The registration of the memory at `base`. What other tests leaked stays
/// registered, at other addresses.
fn entry_at(base: *const u8) -> Option<pinned_hosts::RegionEntry> {
    global()
        .regions()
        .find(|entry| entry.region().base() == base)
}

#[test]
fn nobody_else_can_take_its_registration_away() {
    let rig = Rig::new();
    let buffer = ones(&rig);
    pinned_hosts::unregister(buffer.as_ptr());
    pinned_hosts::register(buffer.as_ptr(), 1);
    pinned_hosts::unregister(buffer.as_ptr());
    assert!(entry_at(buffer.as_ptr()).is_some());
    assert!(pinned_hosts::is_pinned(&buffer));
}

#[test]
fn it_is_portable_and_not_write_combined() {
    let rig = Rig::new();
    let buffer = ones(&rig);
    let mut flags = 0;
    // SAFETY: a place for the flags, and memory of the driver's.
    let result = unsafe {
        cudarc::driver::sys::cuMemHostGetFlags(&raw mut flags, buffer.as_ptr().cast_mut().cast())
    };
    assert_eq!(result, cudarc::driver::sys::CUresult::CUDA_SUCCESS);
    assert_eq!(flags & 1, 1, "portable, in {flags:#x}");
    assert_eq!(flags & 4, 0, "write-combined, in {flags:#x}");
}

#[test]
fn it_holds_zeros_or_a_copy_and_can_be_written() {
    let rig = Rig::new();
    let mut buffer = PinnedBuffer::<u32>::zeroed(&rig.context, 3).unwrap();
    assert_eq!(*buffer, [0, 0, 0]);
    buffer.as_mut_slice().unwrap()[1] = 5;
    assert_eq!(*buffer, [0, 5, 0]);
    let copy = PinnedBuffer::from_slice(&rig.context, &buffer).unwrap();
    assert_eq!(*copy, *buffer);
}

#[test]
fn a_copy_from_it_returns_before_the_device_has_read_it() {
    let rig = Rig::new();
    let buffer = ones(&rig);
    let mut on_device = rig.zeros::<u8>(100);
    // Nothing runs, so a copy that waited would never return.
    let hold = rig.sim.hold();
    rig.copier
        .copy_h2d_from(&buffer, 10..110, &mut on_device)
        .unwrap();
    assert_eq!(rig.sim.counters().late_reads, 0);
    drop(hold);
    assert_eq!(rig.read_back(&on_device), [1; 100]);
    assert_eq!(rig.counters().late_reads, 1);
    assert_eq!(rig.copier.stats().owned, 1);
}

#[test]
fn writing_to_it_waits_for_the_copies_from_it() {
    let rig = Rig::new();
    let mut buffer = ones(&rig);
    let mut on_device = rig.zeros::<u8>(LEN);
    for value in 2..10 {
        rig.copier
            .copy_h2d_from(&buffer, 0..LEN, &mut on_device)
            .unwrap();
        buffer.as_mut_slice().unwrap().fill(value);
    }
    assert_eq!(rig.read_back(&on_device), [8; LEN]);
    rig.assert_sound();
}

#[test]
fn dropping_it_waits_for_the_copies_from_it_on_every_stream() {
    let rig = Rig::new();
    let other_stream = rig.context.new_stream().unwrap();
    let other = Copier::new(&other_stream).unwrap();
    let buffer = ones(&rig);
    let mut here = rig.zeros::<u8>(LEN);
    let mut there = rig.zeros::<u8>(LEN);
    for _ in 0..3 {
        rig.copier
            .copy_h2d_from(&buffer, 0..LEN, &mut here)
            .unwrap();
        other.copy_h2d_from(&buffer, 0..LEN, &mut there).unwrap();
    }
    drop(buffer);
    assert_eq!(rig.counters().late_reads, 6);
    rig.assert_sound();
}

#[test]
fn it_serves_other_devices_and_outlives_their_streams() {
    let rig = Rig::new();
    let buffer = ones(&rig);
    let other = pinned_hosts::cuda::context(1).unwrap();
    let stream = other.new_stream().unwrap();
    let copier = Copier::new(&stream).unwrap();
    let mut on_device = stream.alloc_zeros::<u8>(LEN).unwrap();
    copier
        .copy_h2d_from(&buffer, 0..LEN, &mut on_device)
        .unwrap();
    drop((copier, on_device, stream, other));
    drop(buffer);
    rig.assert_sound();
}

#[test]
fn one_event_serves_all_copies_on_a_stream() {
    let rig = Rig::new();
    let buffer = ones(&rig);
    let mut on_device = rig.zeros::<u8>(LEN);
    let events = rig.sim.calls("cuEventCreate");
    for _ in 0..20 {
        rig.copier
            .copy_h2d_from(&buffer, 0..LEN, &mut on_device)
            .unwrap();
    }
    assert_eq!(rig.sim.calls("cuEventCreate"), events + 1);
    drop(buffer);
    rig.assert_sound();
}

#[test]
fn on_the_per_thread_stream_each_threads_copies_are_waited_for() {
    const THREADS: usize = 3;
    let rig = Rig::new();
    let buffer = Arc::new(ones(&rig));
    let copier = Copier::new(&rig.context.per_thread_stream()).unwrap();
    let (copied, dropped) = (Barrier::new(THREADS + 1), Barrier::new(THREADS + 1));
    thread::scope(|scope| {
        for _ in 0..THREADS {
            let mut on_device = rig.zeros::<u8>(LEN);
            let buffer = Arc::clone(&buffer);
            let (copier, copied, dropped) = (&copier, &copied, &dropped);
            scope.spawn(move || {
                copier
                    .copy_h2d_from(&buffer, 0..LEN, &mut on_device)
                    .unwrap();
                drop(buffer);
                copied.wait();
                // A thread's end would let its stream finish.
                dropped.wait();
                drop(on_device);
            });
        }
        copied.wait();
        drop(buffer);
        let counters = rig.counters();
        dropped.wait();
        assert_eq!(counters.dead_reads, 0);
    });
}

#[test]
fn a_thread_that_has_never_used_the_driver_can_wait_for_the_copies_from_it() {
    let rig = Rig::new();
    let mut buffer = ones(&rig);
    let mut on_device = rig.zeros::<u8>(LEN);
    rig.copier
        .copy_h2d_from(&buffer, 0..LEN, &mut on_device)
        .unwrap();
    thread::scope(|scope| {
        scope.spawn(|| buffer.as_mut_slice().unwrap().fill(2));
    });
    assert_eq!(rig.read_back(&on_device), [1; LEN]);
    rig.assert_sound();
}

#[test]
fn a_stream_that_was_dropped_is_kept_until_its_copies_are_done_and_no_longer() {
    let rig = Rig::new();
    let buffer = ones(&rig);
    let mut on_device = rig.zeros::<u8>(LEN);
    let streams = rig.sim.counters().live_streams;
    // To ask whether a copy is done sets it going.
    let hold = rig.sim.hold();
    for copies in 1..=3 {
        let stream = rig.context.new_stream().unwrap();
        let copier = Copier::new(&stream).unwrap();
        copier
            .copy_h2d_from(&buffer, 0..LEN, &mut on_device)
            .unwrap();
        drop((copier, stream));
        assert_eq!(rig.sim.counters().live_streams, streams + copies);
    }
    drop(hold);
    rig.sim.drain();
    // The next new stream takes the place of those that are done.
    let stream = rig.context.new_stream().unwrap();
    let copier = Copier::new(&stream).unwrap();
    copier
        .copy_h2d_from(&buffer, 0..LEN, &mut on_device)
        .unwrap();
    assert_eq!(rig.sim.counters().live_streams, streams + 1);
    drop(buffer);
    rig.assert_sound();
}

#[test]
fn an_event_is_not_used_again_for_another_context() {
    let rig = Rig::new();
    let buffer = ones(&rig);
    let mut here = rig.zeros::<u8>(LEN);
    rig.copier
        .copy_h2d_from(&buffer, 0..LEN, &mut here)
        .unwrap();
    rig.sim.drain();
    let other = pinned_hosts::cuda::context(1).unwrap();
    let stream = other.new_stream().unwrap();
    let copier = Copier::new(&stream).unwrap();
    let mut there = stream.alloc_zeros::<u8>(LEN).unwrap();
    copier.copy_h2d_from(&buffer, 0..LEN, &mut there).unwrap();
}

#[test]
fn no_event_outlives_the_buffer_and_the_copier() {
    let Rig {
        copier,
        stream,
        context,
        sim,
    } = Rig::new();
    let mut on_device = stream.alloc_zeros::<u8>(LEN).unwrap();
    let events = sim.counters().live_events;
    let second = Copier::new(&stream).unwrap();
    let buffer = PinnedBuffer::from_slice(&context, &[1u8; LEN]).unwrap();
    second.copy_h2d_async(&buffer, &mut on_device).unwrap();
    second
        .copy_h2d_from(&buffer, 0..LEN, &mut on_device)
        .unwrap();
    drop((second, buffer));
    assert_eq!(sim.counters().live_events, events);
    drop(copier);
}

#[test]
fn a_wait_that_failed_is_reported_once_and_the_buffer_can_be_written() {
    let rig = Rig::new();
    let mut buffer = ones(&rig);
    let mut on_device = rig.zeros::<u8>(LEN);
    rig.copier
        .copy_h2d_from(&buffer, 0..LEN, &mut on_device)
        .unwrap();
    rig.sim.fail_nth("cuEventSynchronize", 1, code::UNKNOWN);
    let error = buffer.as_mut_slice().unwrap_err().to_string();
    assert!(error.starts_with("cuEventSynchronize"), "{error}");
    buffer.as_mut_slice().unwrap().fill(2);
    assert_eq!(rig.read_back(&on_device), [1; LEN]);
    rig.assert_sound();
}

/// How often the driver was told to wait for a stream, and for a context.
fn wider_waits(rig: &Rig) -> [u64; 2] {
    ["cuStreamSynchronize", "cuCtxSynchronize"].map(|call| rig.sim.calls(call))
}

#[test]
fn a_wait_that_failed_is_widened_to_the_stream_and_no_further() {
    let rig = Rig::new();
    for stream in [rig.stream.clone(), rig.context.per_thread_stream()] {
        let copier = Copier::new(&stream).unwrap();
        let mut buffer = ones(&rig);
        let mut on_device = rig.zeros::<u8>(LEN);
        copier
            .copy_h2d_from(&buffer, 0..LEN, &mut on_device)
            .unwrap();
        let [streams, contexts] = wider_waits(&rig);
        rig.sim.fail_nth("cuEventSynchronize", 1, code::UNKNOWN);
        buffer.wait().unwrap_err();
        assert_eq!(wider_waits(&rig), [streams + 1, contexts]);
        buffer.as_mut_slice().unwrap().fill(2);
        rig.assert_sound();
    }
}

/// On this thread, the handle of the per-thread stream is another stream.
#[test]
fn a_wait_that_failed_for_another_threads_own_stream_is_widened_to_the_context() {
    let rig = Rig::new();
    let copier = Copier::new(&rig.context.per_thread_stream()).unwrap();
    let buffer = Arc::new(ones(&rig));
    let mut on_device = rig.zeros::<u8>(LEN);
    let (copied, waited) = (Barrier::new(2), Barrier::new(2));
    let (result, counters) = thread::scope(|scope| {
        let theirs = Arc::clone(&buffer);
        let (copier, copied, waited, on_device) = (&copier, &copied, &waited, &mut on_device);
        scope.spawn(move || {
            copier.copy_h2d_from(&theirs, 0..LEN, on_device).unwrap();
            drop(theirs);
            copied.wait();
            // A thread's end would let its stream finish.
            waited.wait();
        });
        copied.wait();
        let mut buffer = Arc::into_inner(buffer).unwrap();
        let [streams, contexts] = wider_waits(&rig);
        rig.sim.fail_nth("cuEventSynchronize", 1, code::UNKNOWN);
        let result = buffer.wait();
        let waits = wider_waits(&rig);
        if let Ok(memory) = buffer.as_mut_slice() {
            memory.fill(2);
        }
        drop(buffer);
        let counters = rig.counters();
        waited.wait();
        assert_eq!(waits, [streams, contexts + 1]);
        (result, counters)
    });
    result.unwrap_err();
    assert_eq!((counters.torn_transfers, counters.dead_reads), (0, 0));
}

#[test]
fn memory_that_cannot_be_freed_is_leaked_and_stays_registered() {
    let rig = Rig::new();
    let buffer = ones(&rig);
    let base = buffer.as_ptr();
    rig.sim.fail_nth("cuMemFreeHost", 1, code::UNKNOWN);
    let live = rig.sim.counters().live_host_allocations;
    drop(buffer);
    assert!(entry_at(base).is_some(), "it is still page-locked");
    assert_eq!(rig.counters().live_host_allocations, live);
}

#[test]
fn memory_that_a_copy_may_still_read_is_leaked_and_stays_registered() {
    let rig = Rig::new();
    let buffer = ones(&rig);
    let base = buffer.as_ptr();
    let mut on_device = rig.zeros::<u8>(LEN);
    rig.copier
        .copy_h2d_from(&buffer, 0..LEN, &mut on_device)
        .unwrap();
    for call in [
        "cuEventSynchronize",
        "cuStreamSynchronize",
        "cuCtxSynchronize",
    ] {
        rig.sim.fail_always(call, code::UNKNOWN);
    }
    drop(buffer);
    rig.sim.clear_faults();
    assert_eq!(rig.read_back(&on_device), [1; LEN]);
    rig.assert_sound();
    assert!(entry_at(base).is_some(), "it is still page-locked");
}

#[test]
fn leaked_memory_outlives_its_context() {
    let rig = Rig::new();
    let other = pinned_hosts::cuda::context(1).unwrap();
    let buffer = PinnedBuffer::from_slice(&other, &[1u8; LEN]).unwrap();
    let mut on_device = rig.zeros::<u8>(LEN);
    rig.copier
        .copy_h2d_from(&buffer, 0..LEN, &mut on_device)
        .unwrap();
    for call in [
        "cuEventSynchronize",
        "cuStreamSynchronize",
        "cuCtxSynchronize",
    ] {
        rig.sim.fail_always(call, code::UNKNOWN);
    }
    drop((buffer, other));
    rig.sim.clear_faults();
    assert_eq!(rig.read_back(&on_device), [1; LEN]);
    rig.assert_sound();
}

#[test]
fn memory_of_a_context_that_died_is_not_given_back_on_its_word() {
    let rig = Rig::new();
    let buffer = ones(&rig);
    let mut on_device = rig.zeros::<u8>(LEN);
    rig.copier
        .copy_h2d_from(&buffer, 0..LEN, &mut on_device)
        .unwrap();
    for call in ["cuEventSynchronize", "cuCtxSynchronize"] {
        rig.sim.fail_always(call, code::LAUNCH_FAILED);
    }
    drop(buffer);
    rig.sim.clear_faults();
    rig.assert_sound();
}

#[test]
fn a_use_that_can_neither_be_noted_nor_waited_for_keeps_the_memory_for_ever() {
    let rig = Rig::new();
    let mut buffer = ones(&rig);
    let base = buffer.as_ptr();
    let mut on_device = rig.zeros::<u8>(LEN);
    let calls = ["cuEventRecord", "cuStreamSynchronize", "cuCtxSynchronize"];
    for call in calls {
        rig.sim.fail_always(call, code::UNKNOWN);
    }
    let error = rig
        .copier
        .copy_h2d_from(&buffer, 0..LEN, &mut on_device)
        .unwrap_err();
    assert!(matches!(error, CudaError::Driver { .. }), "{error:?}");
    rig.sim.clear_faults();
    assert_eq!(buffer.as_mut_slice().unwrap_err(), error);
    assert_eq!(*buffer, [1; LEN], "it can still be read");
    let live = rig.sim.counters().live_host_allocations;
    drop(buffer);
    assert_eq!(rig.counters().live_host_allocations, live);
    rig.assert_sound();
    assert!(entry_at(base).is_some(), "it is still page-locked");
}

#[test]
fn an_empty_buffer_needs_no_driver_call_and_is_pageable() {
    let rig = Rig::new();
    let calls = rig.sim.calls("cuMemHostAlloc");
    let mut empty = PinnedBuffer::<u64>::zeroed(&rig.context, 0).unwrap();
    assert_eq!(empty.as_mut_slice().unwrap(), &mut [0u64; 0]);
    assert!(empty.is_empty());
    drop(empty);
    assert_eq!(rig.sim.calls("cuMemHostAlloc"), calls);
}

#[test]
fn a_range_outside_of_it_is_an_error() {
    let rig = Rig::new();
    let buffer = ones(&rig);
    let mut on_device = rig.zeros::<u8>(LEN);
    #[expect(clippy::reversed_empty_ranges, reason = "bad input is the point")]
    for range in [0..LEN + 1, 5..4, LEN + 1..LEN + 2] {
        assert_eq!(
            rig.copier
                .copy_h2d_from(&buffer, range.clone(), &mut on_device),
            Err(CudaError::RangeOutOfBounds {
                start: range.start,
                end: range.end,
                len: LEN
            })
        );
    }
}

#[test]
fn sizes_that_no_allocation_can_have_are_an_error() {
    let rig = Rig::new();
    for elements in [usize::MAX, usize::MAX / 8 + 1, isize::MAX as usize / 8 + 1] {
        assert_eq!(
            PinnedBuffer::<u64>::zeroed(&rig.context, elements).unwrap_err(),
            CudaError::TooLarge {
                elements,
                element_bytes: 8
            }
        );
    }
}

#[test]
fn memory_that_the_driver_cannot_pin_is_an_error_with_its_name() {
    let rig = Rig::new();
    rig.sim.fail_nth("cuMemHostAlloc", 1, code::OUT_OF_MEMORY);
    let live = rig.sim.counters().live_host_allocations;
    let error = PinnedBuffer::<u8>::zeroed(&rig.context, LEN).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("cuMemHostAlloc"), "{text}");
    assert!(text.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{text}");
    assert_eq!(rig.counters().live_host_allocations, live);
}

#[test]
fn memory_not_aligned_for_the_elements_is_given_back() {
    #[derive(Clone, Copy)]
    #[repr(align(1048576))]
    #[expect(dead_code, reason = "only its alignment matters")]
    struct Huge(u8);
    // SAFETY: plain bytes.
    unsafe impl DeviceRepr for Huge {}
    // SAFETY: zero is a byte.
    unsafe impl cudarc::driver::ValidAsZeroBits for Huge {}

    let rig = Rig::new();
    let live = rig.sim.counters().live_host_allocations;
    // One of several is bound to lie off the alignment.
    let buffers: Vec<_> = (0..4)
        .map(|_| PinnedBuffer::<Huge>::zeroed(&rig.context, 1))
        .collect();
    let refused = buffers.iter().filter(|buffer| buffer.is_err()).count();
    assert!(refused > 0);
    for buffer in &buffers {
        match buffer {
            Ok(buffer) => assert!(buffer.as_ptr().is_aligned()),
            Err(error) => assert_eq!(*error, CudaError::Misaligned { wanted: 1 << 20 }),
        }
    }
    let kept = (buffers.len() - refused) as u64;
    assert_eq!(rig.counters().live_host_allocations, live + kept);
}
