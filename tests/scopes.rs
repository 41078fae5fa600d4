//! Scopes and copies to the host, over the simulated driver.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use common::{Registered, Rig};
use cuda_sim::{DeviceKind, Pageable, code};
use cudarc::driver::sys::{self, CUstreamCaptureMode as Mode};
use pinned_hosts::cuda::{Copier, CudaError, HostRegistration, PinnedBuffer, RegisterOptions};
use pinned_hosts::{GraceError, PinError, Region, Registration, global};

const LEN: usize = 4096;

fn waits(rig: &Rig) -> u64 {
    [
        "cuEventSynchronize",
        "cuStreamSynchronize",
        "cuCtxSynchronize",
    ]
    .iter()
    .map(|call| rig.sim.calls(call))
    .sum()
}

#[test]
fn copies_in_a_scope_wait_once_at_its_end() {
    let rig = Rig::new();
    let source = Registered::new(vec![1; LEN]);
    let mut back = Registered::new(vec![0; LEN]);
    let mut on_device = rig.zeros::<u8>(LEN);
    let before = waits(&rig);
    let hold = rig.sim.hold();
    rig.copier
        .scope(|scope| {
            for _ in 0..5 {
                scope.copy_h2d(&source.memory, &mut on_device)?;
            }
            scope.copy_d2h(&on_device, &mut back.memory)?;
            assert_eq!(waits(&rig), before);
            drop(hold);
            Ok(())
        })
        .unwrap();
    assert_eq!(waits(&rig), before + 1);
    assert_eq!(back.memory, [1; LEN]);
    drop(source);
    drop(back);
    rig.assert_sound();
    assert_eq!(rig.copier.stats().scoped, 6);
}

#[test]
fn a_panic_in_a_scope_is_waited_for_too() {
    let rig = Rig::new();
    let mut source = Registered::new(vec![1; LEN]);
    let mut on_device = rig.zeros::<u8>(LEN);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        rig.copier.scope(|scope| -> Result<(), CudaError> {
            scope.copy_h2d(&source.memory, &mut on_device)?;
            panic!("as ordered")
        })
    }));
    assert!(panicked.is_err());
    source.memory.fill(2);
    drop(source);
    rig.assert_sound();
}

#[test]
fn an_error_in_a_scope_is_waited_for_too_and_returned() {
    let rig = Rig::new();
    let mut source = Registered::new(vec![1; LEN]);
    let mut on_device = rig.zeros::<u8>(LEN);
    let mut too_short = rig.zeros::<u8>(1);
    let result = rig.copier.scope(|scope| {
        scope.copy_h2d(&source.memory, &mut on_device)?;
        scope.copy_h2d(&source.memory, &mut too_short)
    });
    assert!(matches!(result, Err(CudaError::DestinationTooShort { .. })));
    source.memory.fill(2);
    drop(source);
    rig.assert_sound();
}

#[test]
fn a_pageable_source_is_not_waited_for_at_all() {
    let rig = Rig::new();
    let mut on_device = rig.zeros::<u8>(LEN);
    let source = vec![1; LEN];
    let hold = rig.sim.hold();
    rig.copier
        .scope(|scope| scope.copy_h2d(&source, &mut on_device))
        .unwrap();
    drop(hold);
    assert_eq!(rig.read_back(&on_device), [1; LEN]);
    let stats = rig.copier.stats();
    assert_eq!((stats.pageable, stats.scoped), (1, 0));
}

#[test]
fn on_a_device_that_reads_pageable_memory_late_it_is_waited_for() {
    let rig = Rig::with(|sim| {
        sim.set_device(DeviceKind::Coherent);
        sim.set_pageable(Pageable::ReadLate);
    });
    let mut on_device = rig.zeros::<u8>(LEN);
    let mut source = vec![1; LEN];
    rig.copier
        .scope(|scope| scope.copy_h2d(&source, &mut on_device))
        .unwrap();
    source.fill(2);
    rig.assert_sound();
}

/// The event behind the copies must not become part of the capture.
#[test]
fn a_capture_that_begins_in_a_scope_is_not_spoilt() {
    let rig = Rig::new();
    let source = Registered::new(vec![1; LEN]);
    let mut on_device = rig.zeros::<u8>(LEN);
    rig.copier
        .scope(|scope| {
            scope.copy_h2d(&source.memory, &mut on_device)?;
            rig.stream
                .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL)
                .unwrap();
            let refused = scope.copy_h2d(&source.memory, &mut on_device);
            assert_eq!(refused, Err(CudaError::StreamIsCapturing));
            Ok(())
        })
        .unwrap();
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    rig.stream.end_capture(flags).unwrap();
    drop(source);
    rig.assert_sound();
}

#[test]
fn a_slice_over_several_regions_is_split_both_ways() {
    let rig = Rig::new();
    let memory: Arc<Vec<u16>> = Arc::new((0..3000).collect());
    let options = RegisterOptions::default().chunk_bytes(2000);
    let registration =
        HostRegistration::with_options(&rig.context, Arc::clone(&memory), options).unwrap();
    let mut on_device = rig.zeros::<u16>(3000);
    rig.copier
        .scope(|scope| scope.copy_h2d(&memory, &mut on_device))
        .unwrap();
    assert_eq!(rig.read_back(&on_device), *memory);
    drop(registration);

    let mut back = vec![0u16; 3000];
    let base = back.as_ptr();
    // SAFETY: the bytes of integers.
    let bytes = unsafe { std::slice::from_raw_parts(base.cast::<u8>(), 6000) };
    // An odd seam: it cuts an element in two.
    let parts = [&bytes[1000..2001], &bytes[2001..3000]].map(|part| {
        let registration = global().register(Region::of(part).unwrap());
        let at = part.as_ptr().cast_mut().cast();
        // SAFETY: `back` outlives the registration.
        let code = unsafe { sys::cuMemHostRegister_v2(at, part.len(), 1) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        (at, registration)
    });
    for scoped in [true, false] {
        back.fill(0);
        if scoped {
            rig.copier
                .scope(|scope| scope.copy_d2h(&on_device, &mut back))
                .unwrap();
        } else {
            rig.copier.copy_d2h_async(&on_device, &mut back).unwrap();
        }
        assert_eq!(back, *memory);
    }
    for (at, registration) in parts {
        // SAFETY: registered above, and nothing is in flight.
        let code = unsafe { sys::cuMemHostUnregister(at) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        registration.unregister();
    }
    rig.assert_sound();
}

#[test]
fn while_it_runs_nothing_is_unpinned() {
    let rig = Rig::new();
    let memory: Arc<[u8]> = vec![7; LEN].into();
    let options = RegisterOptions::default().grace_limit(Duration::from_millis(20));
    let registration =
        HostRegistration::with_options(&rig.context, Arc::clone(&memory), options).unwrap();
    let mut on_device = rig.zeros::<u8>(LEN);
    let unregister = || {
        let pinned = global().pin_within(
            Duration::from_millis(20),
            Region::of(&[0u8; 8]).unwrap(),
            || Ok::<(), ()>(()),
        );
        matches!(pinned, Err(PinError::Grace(GraceError::TimedOut { .. })))
    };
    rig.copier
        .scope(|scope| {
            scope.copy_h2d(&memory, &mut on_device)?;
            assert!(thread::scope(|threads| threads
                .spawn(unregister)
                .join()
                .unwrap()));
            Ok(())
        })
        .unwrap();
    registration.unregister().unwrap();
    rig.assert_sound();
}

#[test]
fn whichever_call_fails_a_scope_is_sound() {
    for acting in [false, true] {
        for call in [
            "cuCtxGetCurrent",
            "cuStreamIsCapturing",
            "cuEventRecord",
            "cuEventSynchronize",
            "cuMemcpyHtoDAsync_v2",
            "cuMemcpyDtoHAsync_v2",
            "cuThreadExchangeStreamCaptureMode",
        ] {
            for nth in 1..8 {
                let rig = Rig::new();
                let mut source = Registered::new(vec![1; LEN]);
                let mut back = Registered::new(vec![0; LEN]);
                let mut on_device = rig.zeros::<u8>(LEN);
                if acting {
                    rig.sim.fail_nth_after_acting(call, nth, code::UNKNOWN);
                } else {
                    rig.sim.fail_nth(call, nth, code::UNKNOWN);
                }
                let calls = rig.sim.calls(call);
                let result = rig.copier.scope(|scope| {
                    scope.copy_h2d(&source.memory, &mut on_device)?;
                    scope.copy_d2h(&on_device, &mut back.memory)
                });
                let reached = rig.sim.calls(call) - calls >= nth;
                rig.sim.clear_faults();
                let _ = rig.context.check_err();
                source.memory.fill(2);
                drop(source);
                drop(back);
                rig.assert_sound();
                if !reached {
                    break;
                }
                let of_copies = call.starts_with("cuMemcpy") || call == "cuStreamIsCapturing";
                assert!(result.is_err() || !of_copies, "{call}, {nth}");
            }
        }
    }
}

// Copies to the host outside of scopes

#[test]
fn a_copy_to_the_host_has_arrived_when_it_returns() {
    for kind in [DeviceKind::Discrete, DeviceKind::Coherent] {
        let rig = Rig::with(|sim| sim.set_device(kind));
        let on_device = rig.stream.clone_htod(&[7u8; LEN]).unwrap();
        let mut pageable = vec![0; LEN + 1];
        rig.copier
            .copy_d2h_async(&on_device, &mut pageable)
            .unwrap();
        assert_eq!(pageable[..LEN], [7; LEN]);
        assert_eq!(pageable[LEN], 0, "the rest is as it was");
        let mut pinned = Registered::new(vec![0; LEN]);
        rig.copier
            .copy_d2h_async(&on_device, &mut pinned.memory)
            .unwrap();
        assert_eq!(pinned.memory, [7; LEN]);
        drop(pinned);
        assert_eq!(rig.copier.stats().downloads, 2);
        rig.assert_sound();
    }
}

/// The twin: `cudarc`'s own returns before.
#[test]
fn twin_a_plain_copy_to_page_locked_memory_arrives_late() {
    let rig = Rig::new();
    let on_device = rig.stream.clone_htod(&[7u8; LEN]).unwrap();
    rig.stream.synchronize().unwrap();
    let mut pinned = Registered::new(vec![0; LEN]);
    let hold = rig.sim.hold();
    rig.stream
        .memcpy_dtoh(&on_device, &mut pinned.memory)
        .unwrap();
    let at_return = pinned.memory[0];
    drop(hold);
    rig.stream.synchronize().unwrap();
    assert_eq!((at_return, pinned.memory[0]), (0, 7));
}

/// Memory that the driver has page-locked, and that is going to be unpinned.
fn pinned(memory: &[u8]) -> Registration<'static> {
    let base = memory.as_ptr().cast_mut().cast();
    // SAFETY: the memory outlives the registration: `unpinned_after` ends it.
    let pin = || unsafe { sys::cuMemHostRegister_v2(base, memory.len(), 1) }.result();
    global().pin_with(Region::of(memory).unwrap(), pin).unwrap()
}

/// Makes `copy` while the memory is about to be unpinned, and then unpins it.
fn unpinned_after(pinned: Registration<'_>, copy: impl FnOnce() -> Result<(), CudaError>) {
    let base = pinned.region().base().cast_mut().cast();
    let copy_and_unpin = || {
        copy().unwrap();
        // SAFETY: registered by `pinned`, and nothing is in flight.
        unsafe { sys::cuMemHostUnregister(base) }.result()
    };
    pinned.unpin_with(copy_and_unpin).unwrap();
}

/// How often the device itself has read or written host memory late, which it
/// does with page-locked memory alone.
fn late_accesses(rig: &Rig) -> u64 {
    let counters = rig.counters();
    counters.late_reads + counters.late_writes
}

#[test]
fn a_destination_that_is_about_to_be_unpinned_is_written_through_the_heap() {
    let rig = Rig::new();
    let on_device = rig.stream.clone_htod(&[7u8; LEN]).unwrap();
    let mut memory = vec![0u8; LEN];
    let pinned = pinned(&memory);
    let before = late_accesses(&rig);
    unpinned_after(pinned, || {
        rig.copier.copy_d2h_async(&on_device, &mut memory)
    });
    assert_eq!(memory, [7; LEN]);
    assert_eq!(late_accesses(&rig), before, "the device wrote it itself");
    rig.assert_sound();
}

/// The twin: memory that stays pinned is written by the device.
#[test]
fn twin_a_destination_that_stays_pinned_is_written_by_the_device() {
    let rig = Rig::new();
    let on_device = rig.stream.clone_htod(&[7u8; LEN]).unwrap();
    let mut pinned = Registered::new(vec![0; LEN]);
    let before = late_accesses(&rig);
    rig.copier
        .copy_d2h_async(&on_device, &mut pinned.memory)
        .unwrap();
    assert_eq!(late_accesses(&rig), before + 1);
}

#[test]
fn a_source_longer_than_the_destination_is_an_error() {
    let rig = Rig::new();
    let on_device = rig.zeros::<u8>(3);
    let mut back = [0u8; 2];
    let error = rig.copier.copy_d2h_async(&on_device, &mut back);
    let expected = CudaError::DestinationTooShort {
        source: 3,
        destination: 2,
    };
    assert_eq!(error, Err(expected));
    rig.copier
        .copy_d2h_async(&rig.zeros::<u8>(0), &mut back)
        .unwrap();
}

#[test]
fn a_capturing_stream_is_refused() {
    let rig = Rig::new();
    let on_device = rig.zeros::<u8>(LEN);
    let mut back = [0u8; LEN];
    rig.stream
        .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL)
        .unwrap();
    let error = rig.copier.copy_d2h_async(&on_device, &mut back);
    assert_eq!(error, Err(CudaError::StreamIsCapturing));
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    rig.stream.end_capture(flags).unwrap();
}

#[test]
fn a_pinned_buffer_can_be_the_source_of_a_scope() {
    let rig = Rig::new();
    let copier = Copier::new(&rig.stream).unwrap();
    let source = PinnedBuffer::from_slice(&rig.context, &[7u8; LEN]).unwrap();
    let mut on_device = rig.zeros::<u8>(LEN);
    copier
        .scope(|scope| scope.copy_h2d(&source, &mut on_device))
        .unwrap();
    drop(source);
    assert_eq!(rig.read_back(&on_device), [7; LEN]);
    rig.assert_sound();
}

#[test]
fn an_error_of_the_last_wait_is_that_of_the_scope() {
    let rig = Rig::new();
    let source = Registered::new(vec![7; LEN]);
    let mut on_device = rig.zeros::<u8>(LEN);
    let scoped = rig.copier.scope(|scope| {
        scope.copy_h2d(&source.memory, &mut on_device)?;
        rig.sim
            .fail_nth("cuEventSynchronize", 1, cuda_sim::code::UNKNOWN);
        Ok(())
    });
    rig.sim.clear_faults();
    assert!(matches!(
        scoped,
        Err(CudaError::Driver {
            call: "cuEventSynchronize",
            ..
        })
    ));
    assert_eq!(rig.read_back(&on_device), [7; LEN]);
    rig.assert_sound();
}

/// More than one piece goes through the heap, both ways.
#[test]
fn large_memory_that_is_about_to_be_unpinned_goes_through_the_heap_in_pieces() {
    let rig = Rig::new();
    let len = (2 << 20) + 12_345;
    let mut memory: Vec<u8> = (0..=250).cycle().take(len).collect();
    let expected = memory.clone();
    let mut on_device = rig.zeros::<u8>(len);
    let before = late_accesses(&rig);
    let registration = pinned(&memory);
    unpinned_after(registration, || {
        rig.copier.copy_h2d_async(&memory, &mut on_device)
    });
    assert_eq!(rig.copier.stats().bounced, 1);
    assert!(rig.read_back(&on_device) == expected);
    memory.fill(255);
    let registration = pinned(&memory);
    unpinned_after(registration, || {
        rig.copier.copy_d2h_async(&on_device, &mut memory)
    });
    assert!(memory == expected);
    assert_eq!(late_accesses(&rig), before, "the device used it itself");
    rig.assert_sound();
}
