//! Copies beside graph captures: none lands in a graph, which would read the
//! host address again at every launch, and none spoils another thread's
//! capture. Over the simulated driver.
#![allow(clippy::unwrap_used)]

mod common;

use std::io;
use std::sync::Arc;
use std::thread;

use common::Rig;
use cudarc::driver::sys::{self, CUstreamCaptureMode as Mode};
use cudarc::driver::{
    CudaGraph, CudaSlice, CudaStream, DevicePtrMut, DeviceSlice, DriverError, SyncOnDrop,
};
use pinned_hosts::cuda::{Copier, CudaError, DeviceDestination, PinnedBuffer};

const LEN: usize = 4096;

fn end_capture(stream: &Arc<CudaStream>) -> Result<Option<CudaGraph>, DriverError> {
    stream
        .end_capture(sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)
}

/// A graph that was captured with a copy from `source` in it reads `source`
/// again at each launch.
#[test]
fn a_capturing_stream_refuses_copies() {
    let rig = Rig::new();
    let mut on_device = rig.zeros::<u8>(4);
    let pinned = PinnedBuffer::from_slice(&rig.context, &[1u8; 4]).unwrap();
    rig.stream
        .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_RELAXED)
        .unwrap();
    let pageable = rig.copier.copy_h2d_async(&[1u8; 4], &mut on_device);
    let borrowed = rig.copier.copy_h2d_async(&pinned, &mut on_device);
    let owned = rig.copier.copy_h2d_from(&pinned, 0..4, &mut on_device);
    let graph = end_capture(&rig.stream).unwrap();
    for refused in [pageable, borrowed, owned] {
        assert_eq!(refused, Err(CudaError::StreamIsCapturing));
    }
    if let Some(graph) = graph {
        graph.launch().unwrap();
    }
    assert_eq!(rig.read_back(&on_device), [0; 4]);
    rig.assert_sound();
}

#[test]
fn twin_a_captured_plain_copy_reads_dead_memory_at_the_launch() {
    let rig = Rig::new();
    // SAFETY: one stream only; events cannot be recorded across a capture.
    unsafe { rig.context.disable_event_tracking() };
    let mut on_device = rig.zeros::<u8>(4);
    let pinned = PinnedBuffer::from_slice(&rig.context, &[1u8; 4]).unwrap();
    rig.stream
        .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_RELAXED)
        .unwrap();
    rig.stream
        .memcpy_htod(pinned.as_slice(), &mut on_device)
        .unwrap();
    let graph = end_capture(&rig.stream).unwrap().unwrap();
    drop(pinned);
    graph.launch().unwrap();
    assert_eq!(rig.counters().dead_reads, 1);
    // SAFETY: as it was before.
    unsafe { rig.context.enable_event_tracking() };
}

/// It has not ended: what is enqueued meanwhile is an error of the driver's.
#[test]
fn a_stream_whose_capture_was_spoilt_is_refused() {
    let rig = Rig::new();
    let mut on_device = rig.zeros::<u8>(LEN);
    rig.stream
        .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        .unwrap();
    rig.stream
        .synchronize()
        .expect_err("what spoils a capture fails");
    let copies = rig.sim.calls("cuMemcpyHtoDAsync_v2");
    let copied = rig.copier.copy_h2d_async(&[1u8; LEN], &mut on_device);
    assert_eq!(copied, Err(CudaError::StreamIsCapturing));
    assert_eq!(rig.sim.calls("cuMemcpyHtoDAsync_v2"), copies);
    let _ = end_capture(&rig.stream);
    rig.copier
        .copy_h2d_async(&[1u8; LEN], &mut on_device)
        .unwrap();
    rig.assert_sound();
}

/// `cudarc` makes a stream wait for the last use of a destination. If that use
/// is part of another stream's capture, the stream joins the capture.
#[test]
fn a_destination_that_joins_the_stream_to_a_capture_is_refused() {
    let rig = Rig::new();
    // Two streams: once one has joined the capture, it is refused for that.
    let copiers = [(); 2].map(|()| Copier::new(&rig.context.new_stream().unwrap()).unwrap());
    let pinned = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
    rig.stream
        .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_RELAXED)
        .unwrap();
    let mut captured = [(); 2].map(|()| rig.stream.alloc_zeros::<u8>(LEN).unwrap());
    let borrowed = copiers[0].copy_h2d_async(&[1u8; LEN], &mut captured[0]);
    let owned = copiers[1].copy_h2d_from(&pinned, 0..LEN, &mut captured[1]);
    assert_eq!(borrowed, Err(CudaError::StreamIsCapturing));
    assert_eq!(owned, Err(CudaError::StreamIsCapturing));
    drop(pinned);
    for copier in &copiers {
        rig.stream.join(copier.stream()).unwrap();
    }
    if let Ok(Some(graph)) = end_capture(&rig.stream) {
        graph.launch().unwrap();
    }
    assert_eq!(rig.counters().late_reads, 0);
    rig.assert_sound();
}

/// A destination during whose address something happens.
struct Acting<F> {
    inner: CudaSlice<u8>,
    act: F,
}

impl<F> DeviceSlice<u8> for Acting<F> {
    fn len(&self) -> usize {
        self.inner.len()
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.inner.stream()
    }
}

impl<F: Fn()> DevicePtrMut<u8> for Acting<F> {
    fn device_ptr_mut<'a>(
        &'a mut self,
        stream: &'a CudaStream,
    ) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        let got = self.inner.device_ptr_mut(stream);
        (self.act)();
        got
    }
}

// SAFETY: the memory is a `CudaSlice`'s. What `act` does beside that stands for
// another thread's doing.
unsafe impl<F: Fn()> DeviceDestination<u8> for Acting<F> {}

#[test]
fn a_destination_that_begins_a_capture_is_refused() {
    let rig = Rig::new();
    let mut on_device = Acting {
        inner: rig.zeros(LEN),
        act: || {
            rig.stream
                .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_RELAXED)
                .unwrap();
        },
    };
    let copied = rig.copier.copy_h2d_async(&[1u8; LEN], &mut on_device);
    assert_eq!(copied, Err(CudaError::StreamIsCapturing));
    let _ = end_capture(&rig.stream);
    rig.assert_sound();
}

/// On the default stream a copy goes to whichever context is current.
#[test]
fn a_destination_that_changes_the_current_context_changes_nothing() {
    let rig = Rig::new();
    let other = pinned_hosts::cuda::context(1).unwrap();
    let copier = Copier::new(&rig.context.default_stream()).unwrap();
    let mut on_device = Acting {
        inner: rig.zeros(LEN),
        act: || other.bind_to_thread().unwrap(),
    };
    let mut pinned = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
    // Twice: the first time, making an event makes the context current.
    for value in 2..4 {
        copier
            .copy_h2d_from(&pinned, 0..LEN, &mut on_device)
            .unwrap();
        pinned.as_mut_slice().unwrap().fill(value);
        copier.copy_h2d_async(&pinned, &mut on_device).unwrap();
        pinned.as_mut_slice().unwrap().fill(value + 10);
    }
    copier
        .copy_h2d_from(&pinned, 0..LEN, &mut on_device)
        .unwrap();
    drop(pinned);
    rig.assert_sound();
}

/// An error that is stored while the destination's address is asked for means
/// that a wait for the destination's last use was left out.
#[test]
fn an_error_stored_meanwhile_is_returned_before_anything_is_enqueued() {
    let rig = Rig::new();
    let mut on_device = Acting {
        inner: rig.zeros(LEN),
        act: || {
            let error = DriverError(sys::CUresult::CUDA_ERROR_UNKNOWN);
            rig.context.record_err(Err::<(), _>(error));
        },
    };
    let copies = rig.sim.calls("cuMemcpyHtoDAsync_v2");
    let copied = rig.copier.copy_h2d_async(&[1u8; LEN], &mut on_device);
    assert!(
        matches!(copied, Err(CudaError::Stored { .. })),
        "{copied:?}"
    );
    assert_eq!(rig.sim.calls("cuMemcpyHtoDAsync_v2"), copies);
}

/// `cudarc` records no event while an error is stored. Then other streams would
/// not wait for the copy, even before they free its destination.
#[test]
fn an_error_stored_after_the_copy_does_not_keep_it_from_being_noted() {
    let rig = Rig::new();
    let mut on_device = rig.zeros::<u8>(LEN);
    let pinned = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
    let context = Arc::clone(&rig.context);
    // The warning that this copy is waited for is the first that runs code of
    // the program's.
    let subscriber = tracing_subscriber::fmt().with_writer(move || {
        let error = DriverError(sys::CUresult::CUDA_ERROR_UNKNOWN);
        context.record_err(Err::<(), _>(error));
        io::sink()
    });
    let before = rig.sim.calls("cuEventRecord");
    tracing::subscriber::with_default(subscriber.finish(), || {
        rig.copier.copy_h2d_async(&pinned, &mut on_device).unwrap();
    });
    assert!(rig.context.check_err().is_err(), "it was stored");
    // One to wait for, and the destination's.
    assert_eq!(rig.sim.calls("cuEventRecord") - before, 2);
}

/// In its default mode, a capture on any thread forbids every thread to wait
/// for events or to allocate, and is spoilt by one that does.
#[test]
fn another_threads_capture_neither_stops_this_one_nor_is_spoilt_by_it() {
    let rig = Rig::new();
    let mut on_device = rig.zeros::<u8>(LEN);
    let buffer = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
    let capturing = rig.context.new_stream().unwrap();
    let second = Copier::new(&rig.context.new_stream().unwrap()).unwrap();
    let live = rig.sim.counters().live_host_allocations;
    capturing
        .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL)
        .unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            rig.copier
                .copy_h2d_async(&[1u8; LEN], &mut on_device)
                .unwrap();
            rig.copier.copy_h2d_async(&buffer, &mut on_device).unwrap();
            rig.copier
                .copy_h2d_from(&buffer, 0..LEN, &mut on_device)
                .unwrap();
            // Asks whether the copy on the first stream is over.
            second
                .copy_h2d_from(&buffer, 0..LEN, &mut on_device)
                .unwrap();
            drop(PinnedBuffer::<u8>::zeroed(&rig.context, LEN).unwrap());
            drop(buffer);
            drop(Copier::new(&rig.stream).unwrap());
        });
    });
    assert_eq!(rig.sim.counters().live_host_allocations, live - 1);
    end_capture(&capturing).expect("the capture is whole");
    rig.assert_sound();
}

/// The mode that the calls above are made in is the thread's own again after.
#[test]
fn a_threads_capture_mode_is_left_as_it_was() {
    let rig = Rig::new();
    let mut on_device = rig.zeros::<u8>(LEN);
    let buffer = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
    rig.copier.copy_h2d_async(&buffer, &mut on_device).unwrap();
    drop(buffer);
    let mut mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: a place for the mode.
    let result = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
    assert_eq!(mode, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL);
}

/// Waiting for the whole context, for want of a current one, would spoil the
/// capture and leak the buffer.
#[test]
fn a_buffer_is_waited_for_on_a_thread_that_never_used_the_driver() {
    let rig = Rig::new();
    let before = pinned_hosts::live_count();
    let pinned = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
    let mut on_device = rig.zeros::<u8>(LEN);
    rig.copier
        .copy_h2d_from(&pinned, 0..LEN, &mut on_device)
        .unwrap();
    let captured = rig.context.new_stream().unwrap();
    captured
        .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL)
        .unwrap();
    thread::spawn(move || drop(pinned)).join().unwrap();
    end_capture(&captured).unwrap();
    assert_eq!(pinned_hosts::live_count(), before);
    rig.assert_sound();
}
