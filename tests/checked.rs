//! `CheckedCopies`: `cudarc`'s own copies made sound, over the simulated driver.
//! Each scenario runs with `cudarc`'s call too, and has to be seen broken.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::sync::Arc;

use common::{Registered, Rig};
use cuda_sim::{DeviceKind, Pageable, code};
use cudarc::driver::sys::{self, CUgraphInstantiate_flags, CUstreamCaptureMode as Mode};
use cudarc::driver::{
    CudaContext, CudaEvent, CudaGraph, CudaSlice, CudaStream, DriverError, HostSlice,
    PinnedHostSlice, SyncOnDrop,
};
use pinned_hosts::cuda::{
    CheckedCopies, CudaError, HostRegistration, PinnedBuffer, RawDeviceMemory,
};
use pinned_hosts::{Residency, residency};

const LEN: usize = 4096;

/// How a scenario copies.
#[derive(Clone, Copy, PartialEq)]
enum Copy {
    Checked,
    CheckedClone,
    Bare,
}

impl Copy {
    fn run(self, stream: &Arc<CudaStream>, src: &[u8], dst: &mut CudaSlice<u8>) {
        match self {
            Self::Checked => stream.memcpy_htod_checked(src, dst).unwrap(),
            Self::CheckedClone => *dst = stream.clone_htod_checked(src).unwrap(),
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
    if copy != Copy::Bare {
        stream.synchronize().unwrap();
        assert_eq!(rig.read_back(&on_device), [1; LEN]);
    }
    let counters = rig.counters();
    (counters.torn_transfers, counters.dead_reads)
}

#[test]
fn a_page_locked_slice_may_be_rewritten_and_freed_right_after_the_call() {
    let rig = Rig::new();
    for checked in [Copy::Checked, Copy::CheckedClone] {
        assert_eq!(faults(&rig, &rig.stream, checked), (0, 0));
    }
    assert_ne!(faults(&rig, &rig.stream, Copy::Bare), (0, 0));
}

#[test]
fn it_is_staged_and_nobody_waits() {
    let rig = Rig::new();
    let source = Registered::new(vec![1; LEN]);
    let mut on_device = rig.zeros::<u8>(LEN);
    let hold = rig.sim.hold();
    for _ in 0..100 {
        rig.stream
            .memcpy_htod_checked(&source.memory, &mut on_device)
            .unwrap();
    }
    drop(source);
    drop(hold);
    assert_eq!(rig.read_back(&on_device), [1; LEN]);
    rig.assert_sound();
}

#[test]
fn every_stream_is_as_good() {
    let rig = Rig::new();
    let created = rig.context.new_stream().unwrap();
    // `cudarc` makes a new object for a default stream at each call.
    for _ in 0..2 {
        for stream in [
            rig.context.default_stream(),
            rig.context.per_thread_stream(),
            Arc::clone(&created),
        ] {
            assert_eq!(faults(&rig, &stream, Copy::Checked), (0, 0));
        }
    }
    assert_ne!(faults(&rig, &created, Copy::Bare), (0, 0));
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
            // Of its own: what the device is was asked once for each stream.
            let stream = rig.context.new_stream().unwrap();
            let mut source = vec![1; LEN];
            let mut on_device = rig.zeros::<u8>(LEN);
            copy.run(&stream, &source, &mut on_device);
            source.fill(2);
            drop(source);
            let counters = rig.counters();
            counters.torn_transfers + counters.dead_reads
        };
        assert_eq!(faults(Copy::Checked), 0, "{kind:?}");
        assert_ne!(faults(Copy::Bare), 0, "{kind:?}");
    }
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
        .memcpy_htod_checked(&*memory, &mut on_device)
        .unwrap();
    assert_eq!(rig.read_back(&on_device), *memory);
    rig.assert_sound();
}

/// `cudarc`'s own page-locked buffer, which no registry knows, holding ones.
fn pinned_host_slice(rig: &Rig) -> PinnedHostSlice<u8> {
    // SAFETY: written before it is read.
    let mut slice = unsafe { rig.context.alloc_pinned(LEN) }.unwrap();
    slice.as_mut_slice().unwrap().fill(1);
    slice
}

/// As with `cudarc`'s own call. The slice of it is the twin.
#[test]
fn a_buffer_of_cudarcs_counts_as_page_locked() {
    let torn = |copy: fn(&Rig, &PinnedHostSlice<u8>, &mut CudaSlice<u8>)| {
        let rig = Rig::new();
        let mut source = pinned_host_slice(&rig);
        let mut on_device = rig.zeros::<u8>(LEN);
        copy(&rig, &source, &mut on_device);
        source.as_mut_slice().unwrap().fill(2);
        rig.counters().torn_transfers
    };
    assert_eq!(
        torn(|rig, source, dst| rig.stream.memcpy_htod_checked(source, dst).unwrap()),
        0
    );
    assert_eq!(
        torn(|rig, source, dst| *dst = rig.stream.clone_htod_checked(source).unwrap()),
        0
    );
    assert_eq!(
        torn(|rig, source, dst| {
            let slice = source.as_slice().unwrap();
            rig.stream.memcpy_htod_checked(slice, dst).unwrap();
        }),
        1
    );
}

/// Page-locked memory that no registry knows, with an event that its owner does
/// not wait for.
struct Noted {
    memory: Vec<u8>,
    event: CudaEvent,
    says: bool,
}

impl HostSlice<u8> for Noted {
    fn len(&self) -> usize {
        self.memory.len()
    }

    unsafe fn stream_synced_slice<'a>(
        &'a self,
        stream: &'a CudaStream,
    ) -> (&'a [u8], SyncOnDrop<'a>) {
        let noted = self.says.then_some((&self.event, stream));
        let on_drop = noted.map_or(SyncOnDrop::Sync(None), |it| SyncOnDrop::Record(Some(it)));
        (&self.memory, on_drop)
    }

    unsafe fn stream_synced_mut_slice<'a>(
        &'a mut self,
        _: &'a CudaStream,
    ) -> (&'a mut [u8], SyncOnDrop<'a>) {
        (&mut self.memory, SyncOnDrop::Sync(None))
    }
}

/// What it says of itself is all that there is to go by: the twin says nothing.
#[test]
fn memory_that_says_that_somebody_waits_counts_as_page_locked() {
    for says in [true, false] {
        let rig = Rig::new();
        let mut noted = Noted {
            memory: vec![1; LEN],
            event: rig.context.new_event(None).unwrap(),
            says,
        };
        let mut on_device = rig.zeros::<u8>(LEN);
        let base = noted.memory.as_mut_ptr().cast();
        // SAFETY: unregistered below, before the vector ends.
        let locked = unsafe { sys::cuMemHostRegister_v2(base, LEN, 1) };
        assert_eq!(locked, sys::CUresult::CUDA_SUCCESS);
        rig.stream
            .memcpy_htod_checked(&noted, &mut on_device)
            .unwrap();
        noted.memory.fill(2);
        assert_eq!(rig.counters().torn_transfers, u64::from(!says));
        // SAFETY: registered above.
        let unlocked = unsafe { sys::cuMemHostUnregister(base) };
        assert_eq!(unlocked, sys::CUresult::CUDA_SUCCESS);
    }
}

/// The stream waits for the work that fills it; the CPU must not read it before.
#[test]
fn a_buffer_of_cudarcs_is_read_in_the_order_of_the_stream() {
    let rig = Rig::new();
    let other = rig.context.new_stream().unwrap();
    let sevens = other.clone_htod(&[7u8; LEN]).unwrap();
    other.synchronize().unwrap();
    let mut buffer = pinned_host_slice(&rig);
    let mut on_device = rig.zeros::<u8>(LEN);
    other.memcpy_dtoh(&sevens, &mut buffer).unwrap();
    rig.stream
        .memcpy_htod_checked(&buffer, &mut on_device)
        .unwrap();
    // (The simulated driver counts the device's own write as a change.)
    assert_eq!(rig.read_back(&on_device), [7; LEN]);
}

/// The copy that fills it is still under way, and the one that was refused has not
/// waited for it.
#[test]
fn a_copy_that_is_refused_leaves_what_a_buffer_of_cudarcs_waits_for() {
    let rig = Rig::new();
    let other = rig.context.new_stream().unwrap();
    let sevens = other.clone_htod(&[7u8; LEN]).unwrap();
    let mut on_device = rig.zeros::<u8>(LEN);
    rig.stream
        .memcpy_htod_checked(&[0], &mut on_device)
        .unwrap();
    let mut buffer = pinned_host_slice(&rig);
    other.memcpy_dtoh(&sevens, &mut buffer).unwrap();
    rig.sim.fail_nth("cuStreamWaitEvent", 1, code::UNKNOWN);
    let refused = rig.stream.memcpy_htod_checked(&buffer, &mut on_device);
    assert!(
        matches!(refused, Err(CudaError::Stored { .. })),
        "{refused:?}"
    );
    rig.sim.clear_faults();
    assert_eq!(buffer.as_slice().unwrap(), [7; LEN]);
}

/// Its event cannot be recorded on a stream of another context.
#[test]
fn a_buffer_of_another_context_is_copied_and_blames_no_later_copy() {
    let rig = Rig::new();
    let other = pinned_hosts::cuda::context(1).unwrap();
    // SAFETY: written before it is read.
    let mut buffer = unsafe { other.alloc_pinned::<u8>(LEN) }.unwrap();
    buffer.as_mut_slice().unwrap().fill(7);
    let on_device = rig.stream.clone_htod_checked(&buffer).unwrap();
    buffer.as_mut_slice().unwrap().fill(8);
    assert_eq!(rig.context.check_err(), Ok(()));
    rig.stream
        .memcpy_dtoh_checked(&on_device, &mut buffer)
        .unwrap();
    assert_eq!(rig.context.check_err(), Ok(()));
    assert_eq!(buffer.as_slice().unwrap(), [7; LEN]);
}

/// Makes another context current when it is asked.
struct Elsewhere(Registered, Arc<CudaContext>);

impl HostSlice<u8> for Elsewhere {
    fn len(&self) -> usize {
        LEN
    }

    unsafe fn stream_synced_slice<'a>(&'a self, _: &'a CudaStream) -> (&'a [u8], SyncOnDrop<'a>) {
        self.1.bind_to_thread().unwrap();
        (&self.0.memory, SyncOnDrop::Sync(None))
    }

    unsafe fn stream_synced_mut_slice<'a>(
        &'a mut self,
        _: &'a CudaStream,
    ) -> (&'a mut [u8], SyncOnDrop<'a>) {
        self.1.bind_to_thread().unwrap();
        (&mut self.0.memory, SyncOnDrop::Sync(None))
    }
}

/// The handle of a default stream stands for the current context's.
#[test]
fn a_source_that_makes_another_context_current_is_copied_where_it_should_be() {
    let rig = Rig::new();
    let other = pinned_hosts::cuda::context(1).unwrap();
    let stream = rig.context.default_stream();
    let on_device = rig.zeros::<u8>(LEN);
    let address = cudarc::driver::DevicePtr::device_ptr(&on_device, &stream).0;
    // SAFETY: the slice lives, and is used on that stream alone.
    let mut memory = unsafe { RawDeviceMemory::<u8>::new(address, LEN, &stream) };
    let mut source = Elsewhere(Registered::new(vec![7; LEN]), other);
    rig.context.bind_to_thread().unwrap();
    stream.memcpy_htod_checked(&source, &mut memory).unwrap();
    source.0.memory.fill(0);
    stream.memcpy_dtoh_checked(&memory, &mut source).unwrap();
    assert_eq!(source.0.memory, [7; LEN]);
    assert_eq!(rig.counters().foreign_context_copies, 0);
    rig.context.bind_to_thread().unwrap();
    rig.assert_sound();
}

/// A default stream of each thread's own can capture.
#[test]
fn the_first_copy_of_a_stream_does_not_spoil_its_capture() {
    let _sim = cuda_sim::load().unwrap().session();
    let context = CudaContext::new(0).unwrap();
    let stream = context.per_thread_stream();
    stream
        .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        .unwrap();
    let refused = stream.clone_htod_checked(&[1u8; 8]).map(drop);
    assert_eq!(refused, Err(CudaError::StreamIsCapturing));
    stream.end_capture(CUgraphInstantiate_flags(0)).unwrap();
    stream.clone_htod_checked(&[1u8; 8]).unwrap();
}

/// A source may say one length and hand out another.
struct SaysAnotherLength(usize);

impl HostSlice<u8> for SaysAnotherLength {
    fn len(&self) -> usize {
        self.0
    }

    unsafe fn stream_synced_slice<'a>(&'a self, _: &'a CudaStream) -> (&'a [u8], SyncOnDrop<'a>) {
        (&[3; 8], SyncOnDrop::Sync(None))
    }

    unsafe fn stream_synced_mut_slice<'a>(
        &'a mut self,
        _: &'a CudaStream,
    ) -> (&'a mut [u8], SyncOnDrop<'a>) {
        (&mut [], SyncOnDrop::Sync(None))
    }
}

#[test]
fn the_length_is_that_of_the_slice() {
    let rig = Rig::new();
    for says in [2, 100] {
        let mut host = SaysAnotherLength(says);
        let on_device = rig.stream.clone_htod_checked(&host).unwrap();
        assert_eq!(rig.read_back(&on_device), [3; 8]);
        let copied = rig.stream.memcpy_dtoh_checked(&on_device, &mut host);
        assert!(matches!(copied, Err(CudaError::DestinationTooShort { .. })));
    }
    rig.assert_sound();
}

/// A stream that `cudarc` joins to another stream's capture, since the
/// destination is part of it: the graph would keep the address of the source.
#[test]
fn a_copy_that_would_be_captured_is_refused() {
    fn run(copy: Copy, pinned: bool) -> Result<u64, CudaError> {
        let rig = Rig::new();
        let second = rig.context.new_stream().unwrap();
        let source = pinned.then(|| Registered::new(vec![5; LEN]));
        let pageable = vec![5; LEN];
        let bytes = source.as_ref().map_or(&pageable, |it| &it.memory);
        rig.stream
            .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .unwrap();
        let mut inner = rig.stream.alloc_zeros::<u8>(LEN).unwrap();
        let copied = match copy {
            Copy::Bare => second.memcpy_htod(bytes, &mut inner).map_err(bare),
            _ => second.memcpy_htod_checked(bytes, &mut inner),
        };
        rig.stream.join(&second).unwrap();
        let graph: Option<CudaGraph> = rig
            .stream
            .end_capture(CUgraphInstantiate_flags(0))
            .unwrap_or_default();
        drop((source, pageable));
        // The graph allocated it.
        std::mem::forget(inner);
        copied?;
        graph.unwrap().launch().unwrap();
        let counters = rig.counters();
        Ok(counters.torn_transfers + counters.dead_reads)
    }
    for pinned in [false, true] {
        assert_eq!(
            run(Copy::Checked, pinned),
            Err(CudaError::StreamIsCapturing)
        );
        assert_ne!(run(Copy::Bare, pinned).unwrap(), 0);
    }
}

fn bare(source: DriverError) -> CudaError {
    CudaError::Driver {
        call: "bare",
        source,
    }
}

#[test]
fn a_capture_of_its_own_refuses_it_and_goes_on() {
    let rig = Rig::new();
    let mut on_device = rig.zeros::<u8>(LEN);
    let mut host = pinned_host_slice(&rig);
    rig.stream
        .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        .unwrap();
    let refused = Err(CudaError::StreamIsCapturing);
    let stream = &rig.stream;
    assert_eq!(
        stream.memcpy_htod_checked(&[1; LEN], &mut on_device),
        refused
    );
    assert_eq!(stream.memcpy_htod_checked(&host, &mut on_device), refused);
    assert_eq!(stream.memcpy_dtoh_checked(&on_device, &mut host), refused);
    assert!(stream.clone_dtoh_checked(&on_device).is_err());
    // None of them has spoilt the capture.
    stream.end_capture(CUgraphInstantiate_flags(0)).unwrap();
    rig.assert_sound();
}

#[test]
fn results_have_arrived_when_the_call_returns() {
    let rig = Rig::new();
    let on_device = rig.stream.clone_htod_checked(&[9u8; LEN]).unwrap();
    let mut array = [0u8; LEN];
    rig.stream
        .memcpy_dtoh_checked(&on_device, &mut array)
        .unwrap();
    assert_eq!(array, [9; LEN]);
    assert_eq!(rig.stream.clone_dtoh_checked(&on_device).unwrap(), [9; LEN]);
    let mut pinned = pinned_host_slice(&rig);
    rig.stream
        .memcpy_dtoh_checked(&on_device, &mut pinned)
        .unwrap();
    assert_eq!(pinned.as_slice().unwrap(), [9; LEN]);
    let mut registered = Registered::new(vec![0; LEN]);
    rig.stream
        .memcpy_dtoh_checked(&on_device, &mut registered.memory)
        .unwrap();
    assert_eq!(registered.memory, [9; LEN]);

    // The twin.
    rig.stream
        .memcpy_dtoh(&on_device, &mut registered.memory)
        .unwrap();
    drop(registered);
    assert_ne!(rig.counters().dead_writes, 0);
}

#[test]
fn a_destination_that_is_too_short_is_an_error() {
    let rig = Rig::new();
    let mut on_device = rig.zeros::<u8>(3);
    let too_short = Err(CudaError::DestinationTooShort {
        source: 4,
        destination: 3,
    });
    assert_eq!(
        rig.stream.memcpy_htod_checked(&[0; 4], &mut on_device),
        too_short
    );
    let on_device = rig.zeros::<u8>(4);
    assert_eq!(
        rig.stream.memcpy_dtoh_checked(&on_device, &mut [0; 3]),
        too_short
    );
}

#[test]
fn empty_slices_and_elements_without_bytes_are_nothing() {
    let rig = Rig::new();
    let mut on_device = rig.zeros::<u8>(1);
    let copies = rig.sim.calls("cuMemcpyHtoDAsync_v2");
    rig.stream
        .memcpy_htod_checked(&[0u8; 0], &mut on_device)
        .unwrap();
    let nothings = [[0u8; 0]; 4];
    assert_eq!(rig.stream.clone_htod_checked(&nothings).unwrap().len(), 4);
    assert_eq!(rig.sim.calls("cuMemcpyHtoDAsync_v2"), copies);
    rig.assert_sound();
}

/// It has no place to keep what checked copies need, and is not kept for it.
#[test]
fn a_stream_ends_when_the_program_drops_it() {
    let rig = Rig::new();
    let source = PinnedBuffer::from_slice(&rig.context, &[7u8; LEN]).unwrap();
    let frees = rig.sim.calls("cuMemFreeHost");
    for _ in 0..10 {
        let stream = rig.context.new_stream().unwrap();
        let mut on_device = rig.zeros::<u8>(LEN);
        stream
            .memcpy_htod_checked(&source[..], &mut on_device)
            .unwrap();
        let ended = rig.sim.calls("cuStreamDestroy_v2");
        stream.synchronize().unwrap();
        drop(stream);
        assert_eq!(rig.sim.calls("cuStreamDestroy_v2"), ended + 1);
    }
    // Each was found gone, and its ring idle, by the next.
    assert!(rig.sim.calls("cuMemFreeHost") >= frees + 9);
    rig.assert_sound();
}

#[test]
fn a_stream_that_lives_keeps_its_ring_though_others_come() {
    let rig = Rig::new();
    let source = PinnedBuffer::from_slice(&rig.context, &[7u8; LEN]).unwrap();
    let copy = |stream: &Arc<CudaStream>| {
        stream.clone_htod_checked(&source[..]).unwrap();
        stream.synchronize().unwrap();
    };
    for stream in [&rig.stream, &rig.context.default_stream()] {
        copy(stream);
        copy(&rig.context.new_stream().unwrap());
        let before = rig.sim.calls("cuMemHostAlloc");
        copy(stream);
        assert_eq!(rig.sim.calls("cuMemHostAlloc"), before);
    }
}

/// `cudarc` makes a new object for a default stream at each call.
#[test]
fn a_default_stream_has_one_ring_of_its_own_in_each_context() {
    let rig = Rig::new();
    let other = pinned_hosts::cuda::context(1).unwrap();
    let source = PinnedBuffer::from_slice(&rig.context, &[7u8; LEN]).unwrap();
    let copy = |stream: Arc<CudaStream>| {
        let on_device = stream.clone_htod_checked(&source[..]).unwrap();
        assert_eq!(stream.clone_dtoh_checked(&on_device).unwrap(), [7; LEN]);
    };
    let all = || {
        for context in [&rig.context, &other] {
            copy(context.default_stream());
            copy(context.per_thread_stream());
        }
    };
    all();
    let made = ["cuMemHostAlloc", "cuEventCreate"];
    let before = made.map(|call| rig.sim.calls(call));
    let device_memory = 2 * 4 * 3;
    for _ in 0..3 {
        all();
    }
    assert_eq!(rig.sim.calls(made[0]), before[0]);
    // `cudarc` makes two for each allocation of device memory.
    assert_eq!(rig.sim.calls(made[1]), before[1] + device_memory);
    rig.assert_sound();
}

#[test]
fn the_ring_of_a_stream_that_ended_is_kept_while_the_device_reads_it() {
    let rig = Rig::new();
    let source = PinnedBuffer::from_slice(&rig.context, &[7u8; LEN]).unwrap();
    let mut on_device = [rig.zeros::<u8>(LEN), rig.zeros::<u8>(LEN)];
    let hold = rig.sim.hold();
    for dst in &mut on_device {
        let stream = rig.context.new_stream().unwrap();
        stream.memcpy_htod_checked(&source[..], dst).unwrap();
    }
    drop(hold);
    rig.sim.drain();
    for dst in &on_device {
        assert_eq!(rig.read_back(dst), [7; LEN]);
    }
    rig.assert_sound();
}

#[test]
fn a_context_ends_though_its_default_stream_was_used() {
    let rig = Rig::new();
    let source = PinnedBuffer::from_slice(&rig.context, &[7u8; LEN]).unwrap();
    let ended = {
        let context = CudaContext::new(0).unwrap();
        for stream in [context.default_stream(), context.per_thread_stream()] {
            stream.clone_htod_checked(&source[..]).unwrap();
            stream.synchronize().unwrap();
        }
        Arc::downgrade(&context)
    };
    // The next new stream finds that nobody uses it.
    let stream = rig.context.new_stream().unwrap();
    stream.clone_htod_checked(&[1u8; 8]).unwrap();
    assert!(ended.upgrade().is_none());
}

#[test]
fn whichever_call_fails_nothing_is_torn_or_dead() {
    for kind in [DeviceKind::Discrete, DeviceKind::Coherent] {
        for call in [
            "cuStreamIsCapturing",
            "cuDeviceGetAttribute",
            "cuCtxGetCurrent",
            "cuEventRecord",
            "cuEventCreate",
            "cuStreamWaitEvent",
            "cuMemHostAlloc",
            "cuMemcpyHtoDAsync_v2",
        ] {
            for nth in 1..6 {
                let rig = Rig::with(|sim| sim.set_device(kind));
                let stream = rig.context.new_stream().unwrap();
                let mut source = Registered::new(vec![1; LEN]);
                let mut on_device = rig.zeros::<u8>(LEN);
                rig.sim.fail_nth_after_acting(call, nth, code::UNKNOWN);
                let _ = stream.memcpy_htod_checked(&source.memory, &mut on_device);
                rig.sim.clear_faults();
                source.memory.fill(2);
                drop(source);
                let _ = rig.context.check_err();
                rig.assert_sound();
            }
        }
    }
}
