//! Copies that are captured into graphs, through real `cudarc`, over the
//! simulated driver: the graph keeps the buffer that each launch reads again.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::sync::{Arc, Weak, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use common::Rig;
use cuda_sim::code;
use cudarc::driver::sys::{self, CUstreamCaptureMode as Mode};
use cudarc::driver::{CudaGraph, CudaSlice};
use pinned_hosts::cuda::{CudaError, PinnedBuffer, reclaim_captured};

const LEN: usize = 4096;
const FLAGS: sys::CUgraphInstantiate_flags =
    sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;

/// A rig without event tracking: events cannot be recorded across a capture.
struct Untracked(Rig);

impl Untracked {
    fn new() -> Self {
        let rig = Rig::new();
        // SAFETY: one stream only.
        unsafe { rig.context.disable_event_tracking() };
        Self(rig)
    }

    fn begin(&self) {
        let mode = Mode::CU_STREAM_CAPTURE_MODE_RELAXED;
        self.0.stream.begin_capture(mode).unwrap();
    }

    fn end(&self) -> Option<CudaGraph> {
        self.0.stream.end_capture(FLAGS).ok().flatten()
    }

    fn capture(&self, buffer: &Arc<PinnedBuffer<u8>>, dst: &mut CudaSlice<u8>) -> CudaGraph {
        self.begin();
        let captured = self.0.copier.capture_h2d_from(buffer, 0..LEN, dst);
        let graph = self.end().unwrap();
        captured.unwrap();
        graph
    }

    fn buffer(&self) -> Arc<PinnedBuffer<u8>> {
        Arc::new(PinnedBuffer::from_slice(&self.0.context, &[7u8; LEN]).unwrap())
    }
}

impl Drop for Untracked {
    fn drop(&mut self) {
        // SAFETY: as it was before.
        unsafe { self.0.context.enable_event_tracking() };
    }
}

/// The driver says on a thread of its own that a buffer is not needed any
/// more. Returns whether it has within a generous time.
fn is_freed(buffer: &Weak<PinnedBuffer<u8>>) -> bool {
    let deadline = Instant::now() + Duration::from_secs(20);
    while Instant::now() < deadline {
        reclaim_captured();
        if buffer.strong_count() == 0 {
            return true;
        }
        thread::yield_now();
    }
    false
}

#[test]
fn a_graph_keeps_the_buffer_that_its_launches_read() {
    let rig = Untracked::new();
    let mut on_device = rig.0.zeros::<u8>(LEN);
    let buffer = rig.buffer();
    let graph = rig.capture(&buffer, &mut on_device);
    let kept = Arc::downgrade(&buffer);
    drop(buffer);
    reclaim_captured();
    assert_eq!(kept.strong_count(), 1);
    assert!(pinned_hosts::live_count() > 0);
    for _ in 0..3 {
        rig.0.stream.memset_zeros(&mut on_device).unwrap();
        graph.launch().unwrap();
        assert_eq!(rig.0.read_back(&on_device), [7; LEN]);
    }
    // The last launch is not waited for.
    graph.launch().unwrap();
    drop(graph);
    rig.0.assert_sound();
    assert!(is_freed(&kept), "the buffer leaks");
}

/// The twin: a raw captured copy reads whatever is at the address.
#[test]
fn twin_without_that_the_launch_reads_freed_memory() {
    let rig = Untracked::new();
    let mut on_device = rig.0.zeros::<u8>(LEN);
    let buffer = rig.buffer();
    rig.begin();
    rig.0
        .stream
        .memcpy_htod(buffer.as_slice(), &mut on_device)
        .unwrap();
    let graph = rig.end().unwrap();
    drop(buffer);
    graph.launch().unwrap();
    assert_eq!(rig.0.counters().dead_reads, 1);
}

#[test]
fn a_buffer_that_a_graph_has_cannot_be_written() {
    let rig = Untracked::new();
    let mut on_device = rig.0.zeros::<u8>(LEN);
    let mut buffer = rig.buffer();
    assert!(Arc::get_mut(&mut buffer).is_some());
    let graph = rig.capture(&buffer, &mut on_device);
    assert!(Arc::get_mut(&mut buffer).is_none());
    graph.launch().unwrap();
    drop(graph);
    rig.0.sim.drain();
    let deadline = Instant::now() + Duration::from_secs(20);
    while Arc::get_mut(&mut buffer).is_none() && Instant::now() < deadline {
        reclaim_captured();
        thread::yield_now();
    }
    let buffer = Arc::get_mut(&mut buffer).expect("the graph is gone");
    buffer.as_mut_slice().unwrap().fill(8);
    rig.0.assert_sound();
}

#[test]
fn a_graph_that_is_never_made_lets_go_too() {
    let rig = Untracked::new();
    let mut on_device = rig.0.zeros::<u8>(LEN);
    let buffer = rig.buffer();
    rig.begin();
    rig.0
        .copier
        .capture_h2d_from(&buffer, 0..LEN, &mut on_device)
        .unwrap();
    // Waiting for a capturing stream spoils the capture.
    assert!(rig.0.stream.synchronize().is_err());
    let spoilt = rig
        .0
        .copier
        .capture_h2d_from(&buffer, 0..LEN, &mut on_device);
    assert_eq!(spoilt, Err(CudaError::CaptureInvalidated));
    assert!(rig.end().is_none());
    let _ = rig.0.context.check_err();
    let kept = Arc::downgrade(&buffer);
    drop(buffer);
    assert!(is_freed(&kept), "the buffer leaks");
}

#[test]
fn a_stream_that_is_not_capturing_is_refused() {
    let rig = Untracked::new();
    let mut on_device = rig.0.zeros::<u8>(LEN);
    let buffer = rig.buffer();
    let refused = rig
        .0
        .copier
        .capture_h2d_from(&buffer, 0..LEN, &mut on_device);
    assert_eq!(refused, Err(CudaError::StreamIsNotCapturing));
    assert_eq!(Arc::strong_count(&buffer), 1);
    assert_eq!(rig.0.sim.calls("cuMemcpyHtoDAsync_v2"), 0);
}

#[test]
fn ranges_and_lengths_are_checked() {
    let rig = Untracked::new();
    let mut on_device = rig.0.zeros::<u8>(10);
    let buffer = rig.buffer();
    rig.begin();
    let copier = &rig.0.copier;
    let outside = copier.capture_h2d_from(&buffer, 0..LEN + 1, &mut on_device);
    let long = copier.capture_h2d_from(&buffer, 0..11, &mut on_device);
    let nothing = copier.capture_h2d_from(&buffer, 5..5, &mut on_device);
    let part = copier.capture_h2d_from(&buffer, 5..15, &mut on_device);
    let graph = rig.end().unwrap();
    assert!(matches!(outside, Err(CudaError::RangeOutOfBounds { .. })));
    assert!(matches!(long, Err(CudaError::DestinationTooShort { .. })));
    assert_eq!((nothing, part), (Ok(()), Ok(())));
    graph.launch().unwrap();
    assert_eq!(rig.0.read_back(&on_device), [7; 10]);
    rig.0.assert_sound();
}

#[test]
fn whichever_call_fails_nothing_is_read_late_and_nothing_is_lost() {
    let calls = [
        "cuCtxGetCurrent",
        "cuStreamGetCaptureInfo_v2",
        "cuUserObjectCreate",
        "cuGraphRetainUserObject",
        "cuUserObjectRelease",
        "cuMemcpyHtoDAsync_v2",
    ];
    for acting in [false, true] {
        for call in calls {
            for nth in 1..5 {
                let rig = Untracked::new();
                let mut on_device = rig.0.zeros::<u8>(LEN);
                let buffer = rig.buffer();
                rig.begin();
                if acting {
                    rig.0.sim.fail_nth_after_acting(call, nth, code::UNKNOWN);
                } else {
                    rig.0.sim.fail_nth(call, nth, code::UNKNOWN);
                }
                let captured = rig
                    .0
                    .copier
                    .capture_h2d_from(&buffer, 0..LEN, &mut on_device);
                rig.0.sim.clear_faults();
                let graph = rig.end();
                let kept = Arc::downgrade(&buffer);
                drop(buffer);
                reclaim_captured();
                let copies = captured.is_ok();
                if let Some(graph) = &graph {
                    let _ = graph.launch();
                }
                rig.0.assert_sound();
                drop(graph);
                // Who cannot say whether the driver still has the object keeps
                // the buffer.
                let kept_for_good = matches!(
                    &captured,
                    Err(CudaError::CaptureChanged
                        | CudaError::Driver {
                            call: "cuUserObjectRelease" | "cuStreamGetCaptureInfo",
                            ..
                        })
                );
                if !kept_for_good {
                    assert!(is_freed(&kept), "{call}, {nth}, {acting}: leaks");
                }
                if copies {
                    break;
                }
                assert!(captured.is_err());
            }
        }
    }
}

#[test]
fn a_capture_of_another_thread_is_not_in_the_way() {
    let rig = Untracked::new();
    let mut on_device = rig.0.zeros::<u8>(LEN);
    let other = rig.0.context.new_stream().unwrap();
    let buffer = rig.buffer();
    let (begun, wait) = mpsc::channel();
    let (captured, end) = mpsc::channel::<()>();
    let graph = thread::scope(|scope| {
        let other = &other;
        let others = scope.spawn(move || {
            other
                .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL)
                .unwrap();
            begun.send(()).unwrap();
            end.recv().unwrap();
            other.end_capture(FLAGS).map(drop)
        });
        wait.recv().unwrap();
        rig.begin();
        let result = rig
            .0
            .copier
            .capture_h2d_from(&buffer, 0..LEN, &mut on_device);
        captured.send(()).unwrap();
        others.join().unwrap().unwrap();
        result.unwrap();
        rig.end().unwrap()
    });
    graph.launch().unwrap();
    assert_eq!(rig.0.read_back(&on_device), [7; LEN]);
    rig.0.assert_sound();
}
