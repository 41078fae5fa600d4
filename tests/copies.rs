//! Guarded copies, through real `cudarc`, over the simulated driver.
//!
//! For each way to break a copy there is a twin: the same scenario with the
//! plain copy of `cudarc`, which has to be seen broken. A scenario whose twin
//! came out whole would prove nothing.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Barrier;
use std::thread;

use common::{Registered, Rig};
use cuda_sim::DeviceKind;
use cudarc::driver::{CudaSlice, sys};
use pinned_hosts::cuda::{CheckedCopies, Copier, CudaError, PinnedBuffer};
use pinned_hosts::{Region, Residency, global, residency};

/// How a scenario copies: with this crate, or with `cudarc` alone.
#[derive(Clone, Copy)]
enum Copy {
    Guarded,
    Plain,
}

impl Copy {
    fn run(self, rig: &Rig, src: &[u8], dst: &mut CudaSlice<u8>) {
        match self {
            Self::Guarded => rig.copier.copy_h2d_async(src, dst).unwrap(),
            Self::Plain => rig.stream.memcpy_htod(src, dst).unwrap(),
        }
    }
}

const LEN: usize = 4096;

/// The transfers that a scenario tore, and those that read freed memory.
fn faults(scenario: impl Fn(&Rig, Copy), copy: Copy) -> (u64, u64) {
    faults_on(DeviceKind::Discrete, scenario, copy)
}

fn faults_on(kind: DeviceKind, scenario: impl Fn(&Rig, Copy), copy: Copy) -> (u64, u64) {
    let rig = Rig::with(|sim| sim.set_device(kind));
    scenario(&rig, copy);
    let counters = rig.counters();
    (counters.torn_transfers, counters.dead_reads)
}

fn rewrite_after_the_call(rig: &Rig, copy: Copy) {
    let mut source = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
    let mut on_device = rig.zeros(LEN);
    copy.run(rig, &source, &mut on_device);
    source.as_mut_slice().unwrap().fill(2);
    // The plain copy cannot promise what the device holds now.
    if matches!(copy, Copy::Guarded) {
        assert_eq!(rig.read_back(&on_device), [1; LEN]);
    }
    rig.sim.drain();
}

#[test]
fn a_pinned_source_may_be_rewritten_right_after_the_call() {
    assert_eq!(faults(rewrite_after_the_call, Copy::Guarded), (0, 0));
}

#[test]
fn twin_a_plain_copy_is_torn_by_a_rewrite() {
    assert_eq!(faults(rewrite_after_the_call, Copy::Plain), (1, 0));
}

fn drop_after_the_call(rig: &Rig, copy: Copy) {
    let source = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
    let mut on_device = rig.zeros(LEN);
    copy.run(rig, &source, &mut on_device);
    drop(source);
    if matches!(copy, Copy::Guarded) {
        assert_eq!(rig.read_back(&on_device), [1; LEN]);
    }
}

#[test]
fn a_pinned_source_may_be_dropped_right_after_the_call() {
    assert_eq!(faults(drop_after_the_call, Copy::Guarded), (0, 0));
}

#[test]
fn twin_a_plain_copy_reads_a_dropped_source() {
    assert_eq!(faults(drop_after_the_call, Copy::Plain).1, 1);
}

fn rewrite_a_sub_slice(rig: &Rig, copy: Copy) {
    let mut source = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
    let mut on_device = rig.zeros(100);
    copy.run(rig, &source[1000..1100], &mut on_device);
    source.as_mut_slice().unwrap()[1050] = 2;
    if matches!(copy, Copy::Guarded) {
        assert_eq!(rig.read_back(&on_device), [1; 100]);
    }
    rig.sim.drain();
}

#[test]
fn an_interior_slice_of_a_pinned_buffer_is_guarded() {
    assert_eq!(faults(rewrite_a_sub_slice, Copy::Guarded), (0, 0));
}

#[test]
fn twin_a_plain_copy_of_an_interior_slice_is_torn() {
    assert_eq!(faults(rewrite_a_sub_slice, Copy::Plain), (1, 0));
}

fn rewrite_registered_memory(rig: &Rig, copy: Copy) {
    let mut source = Registered::new(vec![1; LEN]);
    let mut on_device = rig.zeros(LEN);
    copy.run(rig, &source.memory, &mut on_device);
    source.memory.fill(2);
    if matches!(copy, Copy::Guarded) {
        assert_eq!(rig.read_back(&on_device), [1; LEN]);
    }
    rig.sim.drain();
}

#[test]
fn memory_that_others_pinned_and_registered_is_guarded() {
    assert_eq!(faults(rewrite_registered_memory, Copy::Guarded), (0, 0));
}

#[test]
fn twin_a_plain_copy_of_registered_memory_is_torn() {
    assert_eq!(faults(rewrite_registered_memory, Copy::Plain), (1, 0));
}

fn unpin_after_the_call(rig: &Rig, copy: Copy) {
    let source = Registered::new(vec![1; LEN]);
    let mut on_device = rig.zeros(LEN);
    copy.run(rig, &source.memory, &mut on_device);
    drop(source);
}

#[test]
fn a_registered_source_may_be_unpinned_and_freed_right_after_the_call() {
    assert_eq!(faults(unpin_after_the_call, Copy::Guarded), (0, 0));
}

#[test]
fn twin_a_plain_copy_reads_unpinned_memory() {
    assert_eq!(faults(unpin_after_the_call, Copy::Plain).1, 1);
}

#[test]
fn a_pageable_source_may_be_dropped_right_after_the_call_and_nothing_waits() {
    let rig = Rig::new();
    let mut on_device = rig.zeros(LEN);
    // Nothing can be waited for while the device is held.
    let hold = rig.sim.hold();
    let waits = waits(&rig);
    for value in 0..10 {
        let source = vec![value; LEN];
        rig.copier.copy_h2d_async(&source, &mut on_device).unwrap();
    }
    rig.copier
        .copy_h2d_async(&[10u8; LEN], &mut on_device)
        .unwrap();
    assert_eq!(waits, self::waits(&rig), "calls of the driver that wait");
    drop(hold);
    assert_eq!(rig.read_back(&on_device), [10; LEN]);
    assert_eq!(rig.counters().late_reads, 0);
    rig.assert_sound();
    let stats = rig.copier.stats();
    assert_eq!((stats.pageable, stats.guarded), (11, 0));
}

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

fn rewrite_pageable_memory(rig: &Rig, copy: Copy) {
    let mut source = vec![1; LEN];
    let mut on_device = rig.zeros(LEN);
    copy.run(rig, &source, &mut on_device);
    source.fill(2);
    if matches!(copy, Copy::Guarded) {
        assert_eq!(rig.read_back(&on_device), [1; LEN]);
    }
    rig.sim.drain();
}

#[test]
fn on_a_device_that_reads_pageable_memory_directly_every_source_is_guarded() {
    for kind in [DeviceKind::Coherent, DeviceKind::Integrated] {
        assert_eq!(
            faults_on(kind, rewrite_pageable_memory, Copy::Guarded),
            (0, 0),
            "{kind:?}"
        );
    }
}

#[test]
fn twin_a_plain_copy_is_torn_on_such_a_device() {
    for kind in [DeviceKind::Coherent, DeviceKind::Integrated] {
        assert_eq!(
            faults_on(kind, rewrite_pageable_memory, Copy::Plain),
            (1, 0),
            "{kind:?}"
        );
    }
}

#[test]
fn a_device_that_can_access_pageable_memory_is_not_trusted_to_stage() {
    let rig = Rig::with(|sim| {
        sim.set_device(DeviceKind::Hmm);
        sim.set_pageable(cuda_sim::Pageable::ReadLate);
    });
    rewrite_pageable_memory(&rig, Copy::Guarded);
    rig.assert_sound();
    assert_eq!(rig.copier.stats().guarded, 1);
}

#[test]
fn a_slice_over_two_regions_and_pageable_memory_is_split_and_guarded() {
    let rig = Rig::new();
    let memory: Vec<u16> = (0..3000).collect();
    // SAFETY: the bytes of integers.
    let bytes = unsafe { std::slice::from_raw_parts(memory.as_ptr().cast::<u8>(), 6000) };
    // An odd seam: it cuts an element in two.
    let parts = [&bytes[1000..2001], &bytes[2001..3000]].map(|part| {
        let registration = global().register(Region::of(part).unwrap());
        // SAFETY: `memory` outlives the registration.
        let code =
            unsafe { sys::cuMemHostRegister_v2(part.as_ptr().cast_mut().cast(), part.len(), 1) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        (part, registration)
    });
    assert_eq!(residency(bytes), Residency::Mixed);
    assert_eq!(residency(&bytes[1000..3000]), Residency::Seam);

    let mut on_device = rig.zeros::<u16>(3000);
    rig.stream
        .memcpy_htod(memory.as_slice(), &mut on_device)
        .expect_err("the driver refuses one copy of such a slice");
    rig.copier.copy_h2d_async(&memory, &mut on_device).unwrap();
    assert_eq!(rig.read_back(&on_device), memory);
    rig.copier
        .copy_h2d_async(&memory[500..1500], &mut on_device)
        .unwrap();
    assert_eq!(rig.read_back(&on_device)[..1000], memory[500..1500]);

    let stats = rig.copier.stats();
    assert_eq!((stats.guarded, stats.split), (2, 2));
    for (part, registration) in parts {
        // SAFETY: registered above, and nothing is in flight.
        let code = unsafe { sys::cuMemHostUnregister(part.as_ptr().cast_mut().cast()) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        registration.unregister();
    }
    rig.assert_sound();
}

#[test]
fn each_attribute_of_reading_pageable_memory_is_heeded_by_itself() {
    for attribute in [88, 100, 18] {
        let rig = Rig::with(|sim| {
            sim.set_attribute(attribute, 1);
            sim.set_pageable(cuda_sim::Pageable::ReadLate);
        });
        rewrite_pageable_memory(&rig, Copy::Guarded);
        rig.assert_sound();
        assert_eq!(rig.copier.stats().guarded, 1, "attribute {attribute}");
    }
}

/// Each thread has a stream, and rewrites its source after each copy.
fn many_streams(rig: &Rig, copy: Copy) {
    const STREAMS: usize = 8;
    const STEPS: u8 = 50;
    let barrier = Barrier::new(STREAMS);
    thread::scope(|scope| {
        for _ in 0..STREAMS {
            scope.spawn(|| {
                let stream = rig.context.new_stream().unwrap();
                let copier = Copier::new(&stream).unwrap();
                let mut on_device = stream.alloc_zeros::<u8>(LEN).unwrap();
                let mut source = PinnedBuffer::zeroed(&rig.context, LEN).unwrap();
                barrier.wait();
                for step in 1..=STEPS {
                    source.as_mut_slice().unwrap().fill(step);
                    match copy {
                        Copy::Guarded => {
                            copier
                                .copy_h2d_async(source.as_slice(), &mut on_device)
                                .unwrap();
                        }
                        Copy::Plain => stream
                            .memcpy_htod(source.as_slice(), &mut on_device)
                            .unwrap(),
                    }
                    let temporary = PinnedBuffer::from_slice(&rig.context, &[step; 64]).unwrap();
                    if let Copy::Guarded = copy {
                        copier.copy_h2d_async(&temporary, &mut on_device).unwrap();
                    }
                }
                stream.synchronize().unwrap();
            });
        }
    });
}

#[test]
fn many_streams_that_rewrite_and_drop_their_sources_stay_whole() {
    assert_eq!(faults(many_streams, Copy::Guarded), (0, 0));
}

#[test]
fn twin_plain_copies_on_many_streams_are_torn() {
    assert!(faults(many_streams, Copy::Plain).0 > 0);
}

#[test]
fn the_default_streams_are_guarded_too() {
    let rig = Rig::new();
    for stream in [
        rig.context.default_stream(),
        rig.context.per_thread_stream(),
    ] {
        let copier = Copier::new(&stream).unwrap();
        // On the per-thread stream each thread waits for its own.
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut on_device = stream.alloc_zeros::<u8>(LEN).unwrap();
                    for value in 1..20 {
                        let source = PinnedBuffer::from_slice(&rig.context, &[value; LEN]).unwrap();
                        copier.copy_h2d_async(&source, &mut on_device).unwrap();
                    }
                    stream.synchronize().unwrap();
                });
            }
        });
    }
    rig.assert_sound();
}

#[test]
fn a_thread_whose_current_context_is_another_one_copies_all_the_same() {
    let rig = Rig::new();
    let other = pinned_hosts::cuda::context(1).unwrap();
    let mut on_device = rig.zeros::<u8>(LEN);
    other.bind_to_thread().unwrap();
    let copier = Copier::new(&rig.stream).unwrap();
    other.bind_to_thread().unwrap();
    let source = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
    other.bind_to_thread().unwrap();
    copier.copy_h2d_async(&source, &mut on_device).unwrap();
    other.bind_to_thread().unwrap();
    copier
        .copy_h2d_from(&source, 0..LEN, &mut on_device)
        .unwrap();
    other.bind_to_thread().unwrap();
    drop((source, copier));
    rig.assert_sound();
    assert_eq!(rig.read_back(&on_device), [1; LEN]);
}

#[test]
fn one_event_serves_all_guarded_copies_of_a_thread() {
    let rig = Rig::new();
    let source = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
    let mut on_device = rig.zeros::<u8>(LEN);
    let events = rig.sim.calls("cuEventCreate");
    for _ in 0..10 {
        rig.copier.copy_h2d_async(&source, &mut on_device).unwrap();
    }
    assert_eq!(rig.sim.calls("cuEventCreate"), events);
}

#[test]
fn elements_of_every_size_and_padding_arrive() {
    #[derive(Clone, Copy, Debug, Default, PartialEq)]
    #[repr(C)]
    struct Padded(u8, u32);
    // SAFETY: plain numbers.
    unsafe impl cudarc::driver::DeviceRepr for Padded {}
    // SAFETY: zeros are numbers.
    unsafe impl cudarc::driver::ValidAsZeroBits for Padded {}

    let rig = Rig::new();
    let source = PinnedBuffer::from_slice(&rig.context, &[Padded(1, 2), Padded(3, 4)]).unwrap();
    let mut on_device = rig.zeros::<Padded>(2);
    rig.copier.copy_h2d_async(&source, &mut on_device).unwrap();
    assert_eq!(rig.read_back(&on_device), *source);
}

#[test]
fn nothing_is_copied_from_an_empty_slice_or_of_no_size() {
    let rig = Rig::new();
    let calls = rig.sim.calls("cuMemcpyHtoDAsync_v2");
    let mut on_device = rig.zeros::<u8>(1);
    rig.copier.copy_h2d_async(&[], &mut on_device).unwrap();
    assert_eq!(rig.sim.calls("cuMemcpyHtoDAsync_v2"), calls);
}

#[test]
fn a_destination_may_be_longer_and_must_not_be_shorter() {
    let rig = Rig::new();
    let mut on_device = rig.zeros::<u32>(3);
    rig.copier.copy_h2d_async(&[1, 2], &mut on_device).unwrap();
    assert_eq!(rig.read_back(&on_device), [1, 2, 0]);

    let error = rig
        .copier
        .copy_h2d_async(&[1, 2, 3, 4], &mut on_device)
        .unwrap_err();
    assert_eq!(
        error,
        CudaError::DestinationTooShort {
            source: 4,
            destination: 3
        }
    );
    assert_eq!(rig.read_back(&on_device), [1, 2, 0]);
}

#[test]
fn a_copy_into_a_part_of_a_device_buffer_lands_there() {
    let rig = Rig::new();
    let source = PinnedBuffer::from_slice(&rig.context, &[7u32, 8]).unwrap();
    let mut on_device = rig.zeros::<u32>(4);
    let mut part = on_device.slice_mut(1..3);
    rig.copier.copy_h2d_async(&source, &mut part).unwrap();
    assert_eq!(rig.read_back(&on_device), [0, 7, 8, 0]);
}

/// No document says when the driver writes pageable memory.
#[test]
fn results_have_arrived_though_the_driver_writes_pageable_memory_late() {
    type Download = fn(&Rig, &CudaSlice<u8>, &mut [u8]);
    let downloads: [Download; 3] = [
        |rig, from, to| rig.copier.copy_d2h_async(from, to).unwrap(),
        |rig, from, to| rig.copier.scope(|it| it.copy_d2h(from, to)).unwrap(),
        |rig, from, to| rig.stream.memcpy_dtoh_checked(from, to).unwrap(),
    ];
    let arrives = |download: Download| {
        let rig = Rig::new();
        rig.sim.set_pageable_written_late(true);
        let on_device = rig.stream.clone_htod(&[7u8; LEN]).unwrap();
        let mut back = vec![0; LEN];
        download(&rig, &on_device, &mut back);
        let arrived = back == [7; LEN];
        rig.sim.drain();
        arrived
    };
    for download in downloads {
        assert!(arrives(download));
    }
    assert!(!arrives(|rig, from, to| {
        rig.stream.memcpy_dtoh(from, to).unwrap()
    }));
}

/// Each call is a lock and more in a real driver.
#[test]
fn a_copy_from_pageable_memory_makes_these_calls_and_no_other() {
    let made = |copy: fn(&Rig, &mut CudaSlice<u8>)| {
        let rig = Rig::new();
        let mut on_device = rig.zeros(LEN);
        copy(&rig, &mut on_device);
        let calls = [
            "cuMemcpyHtoDAsync_v2",
            // Before and after the address is asked for.
            "cuStreamIsCapturing",
            // By this crate, before and behind the copy; the others by `cudarc`.
            "cuCtxGetCurrent",
            // By `cudarc`, for the last read and the last write.
            "cuStreamWaitEvent",
            // The use of the device memory.
            "cuEventRecord",
            "cuCtxSetCurrent",
            "cuDeviceGetAttribute",
            "cuEventCreate",
            "cuEventDestroy_v2",
            "cuEventQuery",
            "cuEventSynchronize",
            "cuPointerGetAttributes",
            "cuStreamSynchronize",
            "cuCtxSynchronize",
            "cuThreadExchangeStreamCaptureMode",
        ];
        let before = calls.map(|call| rig.sim.calls(call));
        copy(&rig, &mut on_device);
        std::iter::zip(calls, before)
            .map(|(call, before)| rig.sim.calls(call) - before)
            .collect::<Vec<_>>()
    };
    let mut expected = [1, 2, 4, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let by_copier = made(|rig, on_device| {
        rig.copier.copy_h2d_async(&[1; LEN], on_device).unwrap();
    });
    assert_eq!(by_copier, expected);
    let checked = made(|rig, on_device| {
        rig.stream
            .memcpy_htod_checked(&[1; LEN], on_device)
            .unwrap();
    });
    // Once more after the source was asked, which may be code of the program's.
    expected[2] += 1;
    assert_eq!(checked, expected);
}
