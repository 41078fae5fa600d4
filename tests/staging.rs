//! Copies through the staging ring: of borrowed, page-locked sources, without
//! a wait, over the simulated driver, through real `cudarc`.
//!
//! While the device is held, whatever waits for it hangs; so that a copy
//! returns is the proof that it waits for nothing.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::sync::Arc;
use std::thread;

use common::{Registered, Rig};
use cuda_sim::{DeviceKind, Timing, code};
use cudarc::driver::sys::CUstreamCaptureMode as Mode;
use cudarc::driver::{CudaSlice, CudaStream};
use pinned_hosts::cuda::{Copier, CopierOptions, CudaError, PinnedBuffer, Policy};
use pinned_hosts::{Region, Residency, global, live_count, residency};

const LEN: usize = 4096;

fn copier(rig: &Rig, options: CopierOptions) -> Copier {
    Copier::with_options(&rig.stream, options).unwrap()
}

/// A ring of `blocks` blocks, each for four sources of `LEN` bytes.
fn small_ring(blocks: usize) -> CopierOptions {
    CopierOptions::default()
        .stage_limit(LEN)
        .ring_limit(blocks * 4 * LEN)
}

/// Calls of the driver that wait for it.
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

fn zeros(rig: &Rig, count: usize) -> Vec<CudaSlice<u8>> {
    (0..count).map(|_| rig.zeros(LEN)).collect()
}

fn arrived(rig: &Rig, on_device: &[CudaSlice<u8>]) -> bool {
    let expected = |value: usize| vec![u8::try_from(value % 256).unwrap(); LEN];
    let all = on_device.iter().enumerate();
    all.into_iter()
        .all(|(value, slice)| rig.read_back(slice) == expected(value))
}

/// Copies a page-locked source that is rewritten after each call.
fn copy_rewritten(rig: &Rig, copier: &Copier, on_device: &mut [CudaSlice<u8>]) {
    let mut source = Registered::new(vec![0; LEN]);
    for (value, slice) in on_device.iter_mut().enumerate() {
        source.memory.fill(u8::try_from(value % 256).unwrap());
        copier.copy_h2d_async(&source.memory, slice).unwrap();
    }
    drop(source);
    assert!(arrived(rig, on_device));
}

#[test]
fn nothing_waits_and_the_source_may_be_rewritten_and_unpinned_at_once() {
    let rig = Rig::new();
    let copier = Copier::new(&rig.stream).unwrap();
    let mut on_device = zeros(&rig, 20);
    let mut source = Registered::new(vec![0; LEN]);
    let hold = rig.sim.hold();
    let before = waits(&rig);
    for (value, slice) in on_device.iter_mut().enumerate() {
        source.memory.fill(u8::try_from(value).unwrap());
        copier.copy_h2d_async(&source.memory, slice).unwrap();
    }
    assert_eq!(waits(&rig), before);
    drop(source);
    drop(hold);
    assert!(arrived(&rig, &on_device));
    rig.assert_sound();
    assert!(rig.counters().late_reads >= 20, "the ring is page-locked");
    let stats = copier.stats();
    assert_eq!((stats.staged, stats.guarded, stats.ring_waits), (20, 0, 0));
    assert_eq!(stats.staged_bytes, 20 * LEN as u64);
    assert_eq!(stats.ring_bytes, 1 << 20, "one block of the default size");
}

#[test]
fn a_ring_at_its_limit_waits_for_its_oldest_block_and_not_for_the_stream() {
    for blocks in [1, 2, 3] {
        let rig = Rig::new();
        let copier = copier(&rig, small_ring(blocks));
        let mut on_device = zeros(&rig, 40);
        let whole = rig.sim.calls("cuCtxSynchronize");
        copy_rewritten(&rig, &copier, &mut on_device);
        let stats = copier.stats();
        assert_eq!(stats.staged, 40);
        assert_eq!(stats.ring_bytes, (blocks * 4 * LEN) as u64);
        // Ten blocks are filled. The device may be done with one before it has
        // to be waited for, since asking makes it go on.
        assert!((1..=10 - blocks as u64).contains(&stats.ring_waits));
        assert_eq!(rig.sim.calls("cuCtxSynchronize"), whole);
        rig.assert_sound();
    }
}

/// What is enqueued behind the oldest block's last copy is not waited for.
#[test]
fn the_oldest_block_is_marked_right_behind_its_last_copy() {
    let rig = Rig::new();
    let copier = copier(&rig, small_ring(1));
    let mut on_device = zeros(&rig, 5);
    let mut behind = rig.zeros::<u8>(LEN);
    let source = Registered::new(vec![0; LEN]);
    for slice in &mut on_device[..4] {
        copier.copy_h2d_async(&source.memory, slice).unwrap();
    }
    // Work of the stream's that reads its source late: it must still be
    // unread once the ring has waited.
    let mut late = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
    rig.stream
        .memcpy_htod(late.as_slice(), &mut behind)
        .unwrap();
    copier
        .copy_h2d_async(&source.memory, &mut on_device[4])
        .unwrap();
    assert_eq!(copier.stats().ring_waits, 1);
    // `cudarc`'s plain copy is not known to the buffer, so this is a race that
    // only shows if the copy has not run yet.
    late.as_mut_slice().unwrap().fill(2);
    assert_eq!(rig.counters().torn_transfers, 1);
}

/// The largest source always has room in the open block: one more would be
/// written behind its end.
#[test]
fn a_block_is_closed_as_soon_as_the_largest_source_might_not_fit() {
    // The limits of a source and of the ring, a source, and how many of those
    // one block takes.
    for (limit, ring, bytes, sources) in [
        (LEN, 1 << 20, LEN, 4),
        (LEN, 1 << 20, LEN / 2, 7),
        (LEN - 1, 1 << 20, LEN - 1, 4),
        (LEN - 1, 1 << 20, 1, 3 * LEN / 64 + 1),
        (64, 1 << 20, 64, 4),
        (1, 1 << 20, 1, 4),
        (64, 191, 64, 2),
        (64, 192, 64, 3),
        (64, 0, 64, 1),
    ] {
        let rig = Rig::new();
        let options = CopierOptions::default().stage_limit(limit).ring_limit(ring);
        let copier = copier(&rig, options);
        let source = PinnedBuffer::from_slice(&rig.context, &vec![7u8; bytes]).unwrap();
        let mut on_device = rig.zeros::<u8>(bytes);
        for copy in 1..=3 * sources {
            let before = rig.sim.calls("cuEventRecord");
            copier.copy_h2d_async(&source, &mut on_device).unwrap();
            // One for the device memory, and one for a block that is closed.
            let records = rig.sim.calls("cuEventRecord") - before;
            let closed = copy % sources == 0;
            assert_eq!(records, 1 + u64::from(closed), "{limit} {ring} {copy}");
        }
        assert_eq!(rig.read_back(&on_device), vec![7; bytes]);
    }
}

#[test]
fn a_block_is_used_again_once_its_event_has_fired() {
    let rig = Rig::with(|sim| sim.set_timing(Timing::Immediate));
    let copier = copier(&rig, small_ring(100));
    let mut on_device = zeros(&rig, 40);
    let source = Registered::new(vec![0; LEN]);
    for slice in &mut on_device {
        copier.copy_h2d_async(&source.memory, slice).unwrap();
        rig.sim.drain();
    }
    let stats = copier.stats();
    assert_eq!((stats.staged, stats.ring_waits), (40, 0));
    assert_eq!(stats.ring_bytes, 4 * LEN as u64);
}

#[test]
fn the_ring_is_registered_and_freed_with_the_copier() {
    let rig = Rig::new();
    let before = (live_count(), rig.counters().live_host_allocations);
    let copier = copier(&rig, small_ring(3));
    assert_eq!(live_count(), before.0, "it begins empty");
    let mut on_device = zeros(&rig, 12);
    let source = PinnedBuffer::from_slice(&rig.context, &[7u8; LEN]).unwrap();
    let hold = rig.sim.hold();
    for slice in &mut on_device {
        copier.copy_h2d_async(&source, slice).unwrap();
    }
    drop(hold);
    assert_eq!(live_count(), before.0 + 3 + 1);
    drop(source);
    drop(copier);
    assert_eq!(
        (live_count(), rig.sim.counters().live_host_allocations),
        before
    );
    rig.assert_sound();
}

/// The last block is not marked yet when the copier is dropped.
#[test]
fn dropping_the_copier_waits_for_copies_from_its_ring() {
    for copies in 1..=9 {
        let rig = Rig::new();
        let copier = copier(&rig, small_ring(3));
        let mut on_device = zeros(&rig, copies);
        copy_rewritten(&rig, &copier, &mut on_device);
        copier
            .copy_h2d_async(
                &PinnedBuffer::from_slice(&rig.context, &[9u8; LEN]).unwrap(),
                &mut on_device[0],
            )
            .unwrap();
        drop(copier);
        assert_eq!(rig.read_back(&on_device[0]), [9; LEN]);
        rig.assert_sound();
    }
}

#[test]
fn sources_up_to_the_limit_are_staged_and_larger_ones_waited_for() {
    let rig = Rig::new();
    let mut on_device = rig.zeros::<u8>(2 * LEN);
    let source = PinnedBuffer::from_slice(&rig.context, &[7u8; 2 * LEN]).unwrap();
    for (limit, len, staged) in [
        (LEN, LEN, true),
        (LEN, LEN + 1, false),
        (LEN + 1, LEN + 1, true),
        (0, 1, false),
        (1, 1, true),
        (usize::MAX, 2 * LEN, true),
    ] {
        let options = CopierOptions::default().stage_limit(limit).ring_limit(0);
        let copier = copier(&rig, options);
        copier
            .copy_h2d_async(&source[..len], &mut on_device)
            .unwrap();
        let stats = copier.stats();
        assert_eq!(
            (stats.staged, stats.guarded),
            (u64::from(staged), u64::from(!staged)),
            "limit {limit}, {len} bytes"
        );
    }
    rig.assert_sound();
}

#[test]
fn odd_sizes_and_elements_arrive_whole() {
    let rig = Rig::new();
    let copier = copier(
        &rig,
        CopierOptions::default().stage_limit(1000).ring_limit(4000),
    );
    let numbers: Vec<u16> = (0..500).collect();
    let source = PinnedBuffer::from_slice(&rig.context, &numbers).unwrap();
    for len in [1, 2, 3, 31, 32, 33, 63, 64, 65, 499, 500] {
        let mut on_device = rig.zeros::<u16>(len);
        let part = &source[500 - len..];
        copier.copy_h2d_async(part, &mut on_device).unwrap();
        assert_eq!(rig.read_back(&on_device), numbers[500 - len..], "{len}");
    }
    assert_eq!(copier.stats().staged, 11);
}

#[test]
fn a_source_over_several_regions_is_staged_in_one_piece() {
    let rig = Rig::new();
    let copier = Copier::new(&rig.stream).unwrap();
    let memory: Vec<u8> = (0..=255).cycle().take(3000).collect();
    let registrations = [&memory[100..1001], &memory[1001..2000]]
        .map(|part| global().register(Region::of(part).unwrap()));
    assert_eq!(residency(&memory), Residency::Mixed);
    let mut on_device = rig.zeros::<u8>(3000);
    let copies = rig.sim.calls("cuMemcpyHtoDAsync_v2");
    copier.copy_h2d_async(&memory, &mut on_device).unwrap();
    assert_eq!(rig.sim.calls("cuMemcpyHtoDAsync_v2"), copies + 1);
    assert_eq!(rig.read_back(&on_device), memory);
    let stats = copier.stats();
    assert_eq!((stats.staged, stats.split), (1, 0));
    for registration in registrations {
        registration.unregister();
    }
}

#[test]
fn memory_that_is_slow_to_read_is_waited_for() {
    let rig = Rig::new();
    let copier = Copier::new(&rig.stream).unwrap();
    let memory = vec![7u8; LEN];
    let registration = global().register_write_combined(Region::of(&memory).unwrap());
    let mut on_device = rig.zeros::<u8>(LEN);
    copier.copy_h2d_async(&memory, &mut on_device).unwrap();
    let stats = copier.stats();
    assert_eq!((stats.staged, stats.guarded), (0, 1));
    registration.unregister();
}

#[test]
fn on_the_per_thread_stream_nothing_is_staged() {
    let rig = Rig::new();
    let copier = Copier::new(&rig.context.per_thread_stream()).unwrap();
    let source = PinnedBuffer::from_slice(&rig.context, &[7u8; LEN]).unwrap();
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let stream = copier.stream();
                let mut on_device = stream.alloc_zeros::<u8>(LEN).unwrap();
                copier.copy_h2d_async(&source, &mut on_device).unwrap();
                assert_eq!(stream.clone_dtoh(&on_device).unwrap(), [7; LEN]);
            });
        }
    });
    let stats = copier.stats();
    assert_eq!((stats.staged, stats.guarded), (0, 2));
    rig.assert_sound();
}

#[test]
fn a_call_can_have_a_policy_of_its_own() {
    let rig = Rig::new();
    let source = PinnedBuffer::from_slice(&rig.context, &[7u8; LEN]).unwrap();
    let mut on_device = rig.zeros::<u8>(LEN);
    for own in [Policy::Stage, Policy::Wait, Policy::Deny] {
        let copier = copier(&rig, CopierOptions::default().policy(own));
        let mut seen = [0; 3];
        for policy in [Policy::Stage, Policy::Wait, Policy::Deny] {
            let copied = copier.copy_h2d_async_with(policy, &source, &mut on_device);
            assert_eq!(copied.is_err(), policy == Policy::Deny);
            let stats = copier.stats();
            seen = [stats.staged, stats.guarded, stats.denied];
        }
        assert_eq!(seen, [1, 1, 1]);
        let _ = copier.copy_h2d_async(&source, &mut on_device);
        let stats = copier.stats();
        let after = [stats.staged, stats.guarded, stats.denied];
        let expected = match own {
            Policy::Stage => [2, 1, 1],
            Policy::Wait => [1, 2, 1],
            _ => [1, 1, 2],
        };
        assert_eq!(after, expected, "{own:?}");
    }
}

#[test]
fn a_denied_copy_says_what_to_do_and_enqueues_nothing() {
    let rig = Rig::new();
    let copier = copier(&rig, CopierOptions::default().policy(Policy::Deny));
    let source = PinnedBuffer::from_slice(&rig.context, &[7u8; LEN]).unwrap();
    let mut on_device = rig.zeros::<u8>(LEN);
    let denied = CudaError::Denied {
        residency: Residency::Pinned,
        bytes: LEN,
    };
    let error = copier.copy_h2d_async(&source, &mut on_device).unwrap_err();
    assert_eq!(error, denied);
    assert!(error.to_string().contains("copy_h2d_from"), "{error}");
    assert_eq!(rig.sim.calls("cuMemcpyHtoDAsync_v2"), 0);
    // And what needs no policy is copied.
    copier.copy_h2d_async(&[1u8; LEN], &mut on_device).unwrap();
    copier
        .copy_h2d_from(&source, 0..LEN, &mut on_device)
        .unwrap();
    assert_eq!(rig.read_back(&on_device), [7; LEN]);

    let mut back = Registered::new(vec![0; LEN]);
    let error = copier.copy_d2h_async(&on_device, &mut back.memory);
    assert_eq!(error, Err(denied));
    assert_eq!(back.memory, [0; LEN]);
    let mut back = vec![0; LEN];
    copier.copy_d2h_async(&on_device, &mut back).unwrap();
    assert_eq!(back, [7; LEN]);
}

#[test]
fn on_a_device_that_reads_pageable_memory_late_it_is_staged_too() {
    for kind in [
        DeviceKind::Coherent,
        DeviceKind::Integrated,
        DeviceKind::Hmm,
    ] {
        let rig = Rig::with(|sim| {
            sim.set_device(kind);
            sim.set_pageable(cuda_sim::Pageable::ReadLate);
        });
        let copier = Copier::new(&rig.stream).unwrap();
        let mut source = vec![1u8; LEN];
        let mut on_device = rig.zeros::<u8>(LEN);
        let before = waits(&rig);
        copier.copy_h2d_async(&source, &mut on_device).unwrap();
        source.fill(2);
        assert_eq!(waits(&rig), before);
        drop(source);
        assert_eq!(rig.read_back(&on_device), [1; LEN]);
        assert_eq!(copier.stats().staged, 1, "{kind:?}");
        rig.assert_sound();
    }
}

#[test]
fn pageable_access_alone_can_be_vouched_for() {
    let staged = |kind| {
        let rig = Rig::with(|sim| sim.set_device(kind));
        // SAFETY: the simulated device stages pageable sources then.
        let options = unsafe { CopierOptions::default().trust_pageable_access() };
        let copier = copier(&rig, options);
        let mut on_device = rig.zeros::<u8>(LEN);
        copier.copy_h2d_async(&[1; LEN], &mut on_device).unwrap();
        assert_eq!(rig.read_back(&on_device), [1; LEN]);
        let stats = copier.stats();
        assert_eq!(stats.pageable + stats.staged, 1);
        stats.staged == 1
    };
    assert!(!staged(DeviceKind::Hmm));
    // What is read through the host's page tables is nobody's to vouch for.
    assert!(staged(DeviceKind::Coherent));
    assert!(staged(DeviceKind::Integrated));
}

#[test]
fn what_the_device_does_and_the_options_show_in_debug() {
    let rig = Rig::with(|sim| sim.set_device(DeviceKind::Coherent));
    let shown = format!("{:?}", Copier::new(&rig.stream).unwrap());
    assert!(shown.contains("reads_pageable_late: true"), "{shown}");
    assert!(shown.contains("policy: Stage"), "{shown}");
}

#[test]
fn a_driver_that_page_locks_no_more_makes_copies_wait() {
    let rig = Rig::new();
    let copier = copier(&rig, small_ring(3));
    let source = PinnedBuffer::from_slice(&rig.context, &[7u8; LEN]).unwrap();
    let mut on_device = rig.zeros::<u8>(LEN);
    rig.sim.fail_always("cuMemHostAlloc", code::OUT_OF_MEMORY);
    copier.copy_h2d_async(&source, &mut on_device).unwrap();
    let stats = copier.stats();
    assert_eq!((stats.staged, stats.guarded), (0, 1));

    // What the ring has, it uses.
    rig.sim.clear_faults();
    copier.copy_h2d_async(&source, &mut on_device).unwrap();
    rig.sim.fail_always("cuMemHostAlloc", code::OUT_OF_MEMORY);
    for _ in 0..10 {
        copier.copy_h2d_async(&source, &mut on_device).unwrap();
    }
    let stats = copier.stats();
    assert_eq!((stats.staged, stats.guarded), (11, 1));
    assert_eq!(stats.ring_bytes, 4 * LEN as u64);
    assert_eq!(rig.read_back(&on_device), [7; LEN]);
    rig.assert_sound();
}

#[test]
fn a_block_whose_copies_cannot_be_marked_is_waited_for() {
    let rig = Rig::new();
    let copier = copier(&rig, small_ring(1));
    let mut source = Registered::new(vec![1u8; LEN]);
    let mut on_device = zeros(&rig, 8);
    rig.sim.fail_nth("cuEventRecord", 4, code::UNKNOWN);
    // `cudarc` records an event of its own behind each copy, so which call
    // fails is looked for.
    let mut errors = 0;
    for (value, slice) in on_device.iter_mut().enumerate() {
        source.memory.fill(u8::try_from(value).unwrap());
        if copier.copy_h2d_async(&source.memory, slice).is_err() {
            errors += 1;
            let _ = rig.context.check_err();
            copier.copy_h2d_async(&source.memory, slice).unwrap();
        }
    }
    assert!(errors <= 1);
    assert!(arrived(&rig, &on_device));
    rig.assert_sound();
}

#[test]
fn a_block_that_nobody_can_ask_about_is_leaked_and_replaced() {
    let rig = Rig::new();
    let before = live_count();
    let copier = copier(&rig, small_ring(1));
    let source = PinnedBuffer::from_slice(&rig.context, &[7u8; LEN]).unwrap();
    let mut on_device = zeros(&rig, 4);
    for slice in &mut on_device {
        copier.copy_h2d_async(&source, slice).unwrap();
    }
    for call in [
        "cuEventSynchronize",
        "cuStreamSynchronize",
        "cuCtxSynchronize",
    ] {
        rig.sim.fail_always(call, code::UNKNOWN);
    }
    copier.copy_h2d_async(&source, &mut on_device[0]).unwrap();
    rig.sim.clear_faults();
    assert_eq!(copier.stats().ring_bytes, 2 * 4 * LEN as u64);
    drop(source);
    drop(copier);
    assert_eq!(
        live_count(),
        before + 1,
        "the leaked block stays registered"
    );
    rig.assert_sound();
}

/// The error may be of earlier work, and the copy enqueued all the same.
#[test]
fn a_copy_call_that_fails_leaves_its_source_unused() {
    let rig = Rig::new();
    let copier = copier(&rig, small_ring(1));
    let mut source = Registered::new(vec![1u8; LEN]);
    let mut on_device = rig.zeros::<u8>(LEN);
    for acting in [false, true] {
        if acting {
            rig.sim
                .fail_nth_after_acting("cuMemcpyHtoDAsync_v2", 1, code::LAUNCH_FAILED);
        } else {
            rig.sim
                .fail_nth("cuMemcpyHtoDAsync_v2", 1, code::LAUNCH_FAILED);
        }
        copier
            .copy_h2d_async(&source.memory, &mut on_device)
            .unwrap_err();
        source.memory.fill(2);
    }
    drop(source);
    drop(copier);
    rig.assert_sound();
}

#[test]
fn another_threads_capture_is_not_spoilt() {
    let rig = Rig::new();
    let copier = copier(&rig, small_ring(2));
    let source = PinnedBuffer::from_slice(&rig.context, &[7u8; LEN]).unwrap();
    let mut on_device = rig.zeros::<u8>(LEN);
    let captured = rig.context.new_stream().unwrap();
    captured
        .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL)
        .unwrap();
    for _ in 0..20 {
        copier.copy_h2d_async(&source, &mut on_device).unwrap();
    }
    assert!(copier.stats().ring_waits > 0);
    drop(copier);
    let flags = cudarc::driver::sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    captured.end_capture(flags).unwrap();
    rig.assert_sound();
}

/// To mark the copies of the last block on a stream that is capturing by now
/// would spoil the capture.
#[test]
fn a_copier_that_is_dropped_during_a_capture_leaks_its_open_block() {
    let rig = Rig::new();
    let before = live_count();
    let copier = copier(&rig, small_ring(2));
    let source = PinnedBuffer::from_slice(&rig.context, &[7u8; LEN]).unwrap();
    let mut on_device = rig.zeros::<u8>(LEN);
    copier.copy_h2d_async(&source, &mut on_device).unwrap();
    rig.stream
        .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL)
        .unwrap();
    drop(copier);
    let flags = cudarc::driver::sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    rig.stream.end_capture(flags).unwrap();
    drop(source);
    assert_eq!(live_count(), before + 1);
    rig.assert_sound();
}

#[test]
fn threads_can_share_a_copier() {
    let rig = Rig::new();
    let copier = copier(&rig, small_ring(2));
    thread::scope(|scope| {
        for thread in 0..4u8 {
            let (copier, rig) = (&copier, &rig);
            scope.spawn(move || {
                rig.context.bind_to_thread().unwrap();
                let mut source = Registered::new(vec![thread; LEN]);
                let mut on_device = rig.zeros::<u8>(LEN);
                for round in 0..50u8 {
                    let value = thread.wrapping_mul(50).wrapping_add(round);
                    source.memory.fill(value);
                    copier
                        .copy_h2d_async(&source.memory, &mut on_device)
                        .unwrap();
                    source.memory.fill(255);
                    assert_eq!(rig.read_back(&on_device), [value; LEN]);
                }
            });
        }
    });
    assert_eq!(copier.stats().staged, 200);
    rig.assert_sound();
}

#[test]
fn a_forked_child_leaves_the_ring_alone() {
    let name = "a_forked_child_leaves_the_ring_alone";
    // In a process of its own, so that no other test runs while it forks.
    if let Some(output) = common::in_child(name, |_| ()) {
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let rig = Rig::new();
    let copier = copier(&rig, small_ring(1));
    let source = PinnedBuffer::from_slice(&rig.context, &[7u8; LEN]).unwrap();
    let mut on_device = zeros(&rig, 5);
    for slice in &mut on_device {
        copier.copy_h2d_async(&source, slice).unwrap();
    }
    let calls = |rig: &Rig| {
        rig.sim.calls("cuMemFreeHost") + rig.sim.calls("cuEventDestroy_v2") + waits(rig)
    };
    let before = calls(&rig);
    // SAFETY: the child only drops the copier, and leaves.
    match unsafe { libc::fork() } {
        0 => {
            drop(copier);
            let right = calls(&rig) == before;
            // SAFETY: ends the child, without running what the parent owns.
            unsafe { libc::_exit(i32::from(!right)) }
        }
        child => {
            assert!(child > 0, "fork");
            let mut status = -1;
            // SAFETY: `child` is ours, and `status` a place for its status.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0, "the child freed or waited");
        }
    }
    drop(copier);
    rig.assert_sound();
}

/// A copy of retiring memory goes through the ring, whoever unpins it.
#[test]
fn retiring_memory_is_staged() {
    let rig = Rig::new();
    let copier = Arc::new(Copier::new(&rig.stream).unwrap());
    let memory: Arc<[u8]> = vec![7u8; LEN].into();
    let mut on_device = rig.zeros::<u8>(LEN);
    let pinned = global()
        .pin_with(Region::of(&memory).unwrap(), || Ok::<(), CudaError>(()))
        .unwrap();
    pinned
        .unpin_with(|| copier.copy_h2d_async(&memory, &mut on_device))
        .unwrap();
    let stats = copier.stats();
    assert_eq!((stats.staged, stats.bounced), (1, 0));
    assert_eq!(rig.read_back(&on_device), [7; LEN]);
}

#[test]
fn a_copier_is_made_of_a_stream_and_gives_it_back() {
    let rig = Rig::new();
    let stream = rig.context.new_stream().unwrap();
    let handle = stream.cu_stream();
    let copier = Copier::try_from(stream).unwrap();
    let source = PinnedBuffer::from_slice(&rig.context, &[7u8; LEN]).unwrap();
    let mut on_device = rig.zeros::<u8>(LEN);
    copier.copy_h2d_async(&source, &mut on_device).unwrap();
    let stream: Arc<CudaStream> = copier.into();
    assert_eq!(stream.cu_stream(), handle);
    assert_eq!(stream.clone_dtoh(&on_device).unwrap(), [7; LEN]);
    rig.assert_sound();
}

/// Page-locked memory is usable from every context, whichever made it.
#[test]
fn memory_and_streams_may_be_of_different_contexts() {
    let rig = Rig::new();
    let other = pinned_hosts::cuda::context(1).unwrap();
    let copier = Copier::new(&other.new_stream().unwrap()).unwrap();
    let mut source = PinnedBuffer::from_slice(&rig.context, &[7u8; LEN]).unwrap();
    let mut on_device = copier.stream().alloc_zeros::<u8>(LEN).unwrap();
    let arrived = |on_device: &CudaSlice<u8>| copier.stream().clone_dtoh(on_device).unwrap();
    for policy in [Policy::Stage, Policy::Wait] {
        copier
            .copy_h2d_async_with(policy, &source, &mut on_device)
            .unwrap();
        source.as_mut_slice().unwrap().fill(8);
        assert_eq!(arrived(&on_device), [7; LEN]);
        source.as_mut_slice().unwrap().fill(7);
    }
    copier
        .copy_h2d_from(&source, 0..LEN, &mut on_device)
        .unwrap();
    copier
        .scope(|scope| scope.copy_h2d(&source, &mut on_device))
        .unwrap();
    // The thread's context is now the other one; the buffer's drop sees to it.
    drop(source);
    assert_eq!(arrived(&on_device), [7; LEN]);
    let mut back = vec![0; LEN];
    copier.copy_d2h_async(&on_device, &mut back).unwrap();
    assert_eq!(back, [7; LEN]);
    drop((on_device, copier));
    rig.context.bind_to_thread().unwrap();
    rig.assert_sound();
}

/// The handle of the legacy stream stands for that of the current context.
#[test]
fn a_ring_on_the_legacy_stream_is_waited_for_in_its_own_context() {
    for failing in [false, true] {
        let rig = Rig::new();
        let other = pinned_hosts::cuda::context(1).unwrap();
        rig.context.bind_to_thread().unwrap();
        let legacy = rig.context.default_stream();
        let copier = Copier::new(&legacy).unwrap();
        let source = PinnedBuffer::from_slice(&rig.context, &[7u8; LEN]).unwrap();
        let mut on_device = legacy.alloc_zeros::<u8>(LEN).unwrap();
        legacy.synchronize().unwrap();
        copier.copy_h2d_async(&source, &mut on_device).unwrap();
        assert_eq!(copier.stats().staged, 1);
        other.bind_to_thread().unwrap();
        if failing {
            rig.sim.fail_nth("cuCtxSetCurrent", 1, code::UNKNOWN);
        }
        drop(copier);
        rig.sim.clear_faults();
        rig.context.bind_to_thread().unwrap();
        assert_eq!(legacy.clone_dtoh(&on_device).unwrap(), [7; LEN]);
        drop(source);
        rig.assert_sound();
    }
}

#[test]
fn a_buffer_on_the_legacy_stream_is_waited_for_in_its_own_context() {
    let rig = Rig::new();
    let other = pinned_hosts::cuda::context(1).unwrap();
    rig.context.bind_to_thread().unwrap();
    let legacy = rig.context.default_stream();
    let copier = Copier::new(&legacy).unwrap();
    let source = PinnedBuffer::from_slice(&rig.context, &[7u8; LEN]).unwrap();
    let mut on_device = legacy.alloc_zeros::<u8>(LEN).unwrap();
    legacy.synchronize().unwrap();
    copier
        .copy_h2d_from(&source, 0..LEN, &mut on_device)
        .unwrap();
    other.bind_to_thread().unwrap();
    rig.sim.fail_nth("cuCtxSetCurrent", 1, code::UNKNOWN);
    rig.sim.fail_nth("cuEventSynchronize", 1, code::UNKNOWN);
    drop(source);
    rig.sim.clear_faults();
    rig.context.bind_to_thread().unwrap();
    assert_eq!(legacy.clone_dtoh(&on_device).unwrap(), [7; LEN]);
    rig.assert_sound();
}

#[test]
fn a_driver_that_fails_every_wait_does_not_make_the_ring_grow_for_ever() {
    let rig = Rig::new();
    let copier = copier(&rig, small_ring(1));
    let source = PinnedBuffer::from_slice(&rig.context, &[7u8; LEN]).unwrap();
    let mut on_device = zeros(&rig, 100);
    for call in [
        "cuEventQuery",
        "cuEventSynchronize",
        "cuStreamSynchronize",
        "cuCtxSynchronize",
    ] {
        rig.sim.fail_always(call, code::UNKNOWN);
    }
    let copies = on_device
        .iter_mut()
        .map(|slice| copier.copy_h2d_async(&source, slice));
    let failed = copies.filter(Result::is_err).count();
    rig.sim.clear_faults();
    assert!(failed > 0);
    assert!(copier.stats().ring_bytes <= 2 * 4 * LEN as u64);
    drop(source);
    drop(copier);
    rig.assert_sound();
}
