//! `checked`: `cudarc`'s own copies made sound, over the simulated driver.
//! Each scenario runs with the bare slice too, and has to be seen broken.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::mem;
use std::sync::{Arc, Barrier};
use std::thread;

use common::{Registered, Rig};
use cuda_sim::{DeviceKind, Pageable, code};
use cudarc::driver::sys::{self, CUstreamCaptureMode as Mode};
use cudarc::driver::{CudaSlice, CudaStream};
use pinned_hosts::cuda::{HostRegistration, PinnedBuffer, checked};
use pinned_hosts::{Region, Residency, global, residency};

const LEN: usize = 4096;

/// How a scenario copies.
#[derive(Clone, Copy)]
enum Copy {
    Checked,
    /// The wrapper is leaked.
    Forgotten,
    Bare,
}

impl Copy {
    fn run(self, stream: &Arc<CudaStream>, src: &[u8], dst: &mut CudaSlice<u8>) {
        match self {
            Self::Checked => stream.memcpy_htod(&checked(src), dst).unwrap(),
            Self::Forgotten => {
                let wrapper = checked(src);
                stream.memcpy_htod(&wrapper, dst).unwrap();
                mem::forget(wrapper);
            }
            Self::Bare => stream.memcpy_htod(src, dst).unwrap(),
        }
    }
}

/// Copies page-locked memory, which is rewritten and freed at once. Returns
/// the torn transfers and dead reads.
fn faults(rig: &Rig, stream: &Arc<CudaStream>, copy: Copy) -> (u64, u64) {
    let mut source = Registered::new(vec![1; LEN]);
    let mut on_device = rig.zeros::<u8>(LEN);
    copy.run(stream, &source.memory, &mut on_device);
    source.memory.fill(2);
    drop(source);
    if !matches!(copy, Copy::Bare) {
        stream.synchronize().unwrap();
        assert_eq!(rig.read_back(&on_device), [1; LEN]);
    }
    let counters = rig.counters();
    (counters.torn_transfers, counters.dead_reads)
}

#[test]
fn a_page_locked_slice_may_be_rewritten_and_freed_right_after_the_call() {
    let rig = Rig::new();
    let waits = rig.sim.calls("cuCtxSynchronize");
    assert_eq!(faults(&rig, &rig.stream, Copy::Checked), (0, 0));
    assert_eq!(rig.sim.calls("cuCtxSynchronize"), waits);
    assert_ne!(faults(&rig, &rig.stream, Copy::Bare), (0, 0));
}

/// Soundness must not rest on a drop that safe code can leave out.
#[test]
fn a_wrapper_that_is_leaked_leaks_its_copy_and_nothing_else() {
    // In a process of its own: a section that never ends is leaked too.
    let name = "a_wrapper_that_is_leaked_leaks_its_copy_and_nothing_else";
    if let Some(output) = common::in_child(name, |_| ()) {
        assert!(output.status.success(), "{output:?}");
        return;
    }
    for kind in [DeviceKind::Discrete, DeviceKind::Coherent] {
        let rig = Rig::with(|sim| sim.set_device(kind));
        assert_eq!(faults(&rig, &rig.stream, Copy::Forgotten), (0, 0));
    }
}

#[test]
fn every_stream_is_as_good() {
    let rig = Rig::new();
    let mut all = vec![
        rig.context.default_stream(),
        rig.context.new_stream().unwrap(),
    ];
    // cudarc can use it only through a stream of its own making.
    all.push(rig.context.per_thread_stream());
    for stream in &all {
        assert_eq!(faults(&rig, stream, Copy::Checked), (0, 0));
    }
    assert_ne!(faults(&rig, &all[1], Copy::Bare), (0, 0));
}

#[test]
fn it_is_sound_without_event_tracking() {
    let rig = Rig::new();
    // SAFETY: device memory is used on one stream at a time.
    unsafe { rig.context.disable_event_tracking() };
    assert_eq!(faults(&rig, &rig.stream, Copy::Checked), (0, 0));
    assert_ne!(faults(&rig, &rig.stream, Copy::Bare), (0, 0));
    // SAFETY: as it was.
    unsafe { rig.context.enable_event_tracking() };
}

#[test]
fn a_device_that_reads_pageable_memory_late_reads_a_copy() {
    for kind in [
        DeviceKind::Coherent,
        DeviceKind::Integrated,
        DeviceKind::Hmm,
    ] {
        let faults = |copy: Copy| {
            let rig = Rig::with(|sim| {
                sim.set_device(kind);
                sim.set_pageable(Pageable::ReadLate);
            });
            let mut source = vec![1; LEN];
            let mut on_device = rig.zeros::<u8>(LEN);
            copy.run(&rig.stream, &source, &mut on_device);
            source.fill(2);
            drop(source);
            let counters = rig.counters();
            counters.torn_transfers + counters.dead_reads
        };
        assert_eq!(faults(Copy::Checked), 0, "{kind:?}");
        assert_ne!(faults(Copy::Bare), 0, "{kind:?}");
    }
}

/// `cudarc`'s own waits are skipped then.
#[test]
fn an_error_that_is_stored_meanwhile_skips_nothing() {
    let rig = Rig::with(|sim| sim.set_device(DeviceKind::Coherent));
    let source = vec![1; LEN];
    let mut on_device = rig.zeros::<u8>(LEN);
    let wrapper = checked(&source);
    rig.stream.memcpy_htod(&wrapper, &mut on_device).unwrap();
    rig.context
        .record_err(Err::<(), _>(cudarc::driver::DriverError(
            sys::CUresult::CUDA_ERROR_UNKNOWN,
        )));
    drop(wrapper);
    drop(source);
    assert!(rig.context.check_err().is_err(), "it is still to be told");
    assert_eq!(rig.read_back(&on_device), [1; LEN]);
    rig.assert_sound();
}

#[test]
fn a_pageable_slice_is_not_copied_and_nothing_waits() {
    let rig = Rig::new();
    let mut on_device = rig.zeros::<u8>(LEN);
    let hold = rig.sim.hold();
    let wrapper = checked(&[1u8; LEN][..]);
    rig.stream.memcpy_htod(&wrapper, &mut on_device).unwrap();
    assert!(format!("{wrapper:?}").contains("copied: false"));
    drop(wrapper);
    drop(hold);
    assert_eq!(rig.read_back(&on_device), [1; LEN]);
}

#[test]
fn a_slice_over_several_regions_arrives() {
    let rig = Rig::new();
    let memory: Arc<Vec<u16>> = Arc::new((0..3000).collect());
    let options = pinned_hosts::cuda::RegisterOptions::default().chunk_bytes(2000);
    let registration =
        HostRegistration::with_options(&rig.context, Arc::clone(&memory), options).unwrap();
    assert_eq!(residency(registration.as_bytes()), Residency::Seam);
    let mut on_device = rig.zeros::<u16>(3000);
    rig.stream
        .memcpy_htod(memory.as_slice(), &mut on_device)
        .expect_err("the driver refuses one copy of such a slice");
    rig.stream
        .memcpy_htod(&checked(&memory), &mut on_device)
        .unwrap();
    assert_eq!(rig.read_back(&on_device), *memory);
    rig.assert_sound();
}

#[test]
fn one_wrapper_serves_several_copies() {
    let rig = Rig::new();
    let source = PinnedBuffer::from_slice(&rig.context, &[7u8; LEN]).unwrap();
    let second = rig.context.new_stream().unwrap();
    let mut on_device = [rig.zeros::<u8>(LEN), rig.zeros::<u8>(LEN)];
    let wrapper = checked(&source);
    for (stream, slice) in [&rig.stream, &second].into_iter().zip(&mut on_device) {
        stream.memcpy_htod(&wrapper, slice).unwrap();
    }
    drop(wrapper);
    second.synchronize().unwrap();
    for slice in &on_device {
        assert_eq!(rig.read_back(slice), [7; LEN]);
    }
    rig.assert_sound();
}

#[test]
fn a_graph_gets_a_copy_that_is_never_freed() {
    let launch = |copy: Copy| {
        let rig = Rig::new();
        // SAFETY: one stream only; events cannot be recorded across a capture.
        unsafe { rig.context.disable_event_tracking() };
        let mut on_device = rig.zeros::<u8>(LEN);
        let source = Registered::new(vec![1; LEN]);
        rig.stream
            .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_RELAXED)
            .unwrap();
        copy.run(&rig.stream, &source.memory, &mut on_device);
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = rig.stream.end_capture(flags).unwrap().unwrap();
        drop(source);
        for _ in 0..3 {
            graph.launch().unwrap();
        }
        // SAFETY: as it was before.
        unsafe { rig.context.enable_event_tracking() };
        let counters = rig.counters();
        counters.torn_transfers + counters.dead_reads
    };
    assert_eq!(launch(Copy::Checked), 0);
    assert_ne!(launch(Copy::Bare), 0);
}

#[test]
fn pinning_waits_for_the_call() {
    let rig = Rig::new();
    let source: Arc<[u8]> = vec![7; LEN].into();
    let mut on_device = rig.zeros::<u8>(LEN);
    let barrier = Barrier::new(2);
    thread::scope(|scope| {
        let wrapper = checked(&source[..]);
        rig.stream.memcpy_htod(&wrapper, &mut on_device).unwrap();
        let pinning = scope.spawn(|| {
            barrier.wait();
            global()
                .pin_within(
                    std::time::Duration::from_millis(20),
                    Region::of(&source).unwrap(),
                    || Ok::<(), ()>(()),
                )
                .is_ok()
        });
        barrier.wait();
        assert!(!pinning.join().unwrap(), "pinned during the call");
        drop(wrapper);
        let pinned = global().pin_with(Region::of(&source).unwrap(), || Ok::<(), ()>(()));
        pinned.unwrap().unpin_with(|| Ok::<(), ()>(())).unwrap();
    });
}

#[test]
fn whichever_call_fails_nothing_is_torn_or_dead() {
    for kind in [DeviceKind::Discrete, DeviceKind::Coherent] {
        for call in [
            "cuStreamIsCapturing",
            "cuDeviceGetAttribute",
            "cuCtxGetCurrent",
            "cuCtxSynchronize",
            "cuMemcpyHtoDAsync_v2",
        ] {
            for nth in 1..4 {
                let rig = Rig::with(|sim| sim.set_device(kind));
                let mut source = Registered::new(vec![1; LEN]);
                let mut on_device = rig.zeros::<u8>(LEN);
                rig.sim.fail_nth_after_acting(call, nth, code::UNKNOWN);
                let _ = rig
                    .stream
                    .memcpy_htod(&checked(&source.memory), &mut on_device);
                rig.sim.clear_faults();
                source.memory.fill(2);
                drop(source);
                rig.assert_sound();
            }
        }
    }
}

#[test]
fn empty_slices_and_elements_without_bytes_are_nothing() {
    let rig = Rig::new();
    let mut on_device = rig.zeros::<u8>(1);
    rig.stream
        .memcpy_htod(&checked(&[0u8; 0]), &mut on_device)
        .unwrap();
    rig.assert_sound();
}
