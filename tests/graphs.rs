//! Copies that are captured into graphs, through real `cudarc`, over the
//! simulated driver: the graph keeps the buffer that each launch reads again.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Weak, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use common::{Rig, in_child, is_child, logged, waiting_copier};
use cuda_sim::{Timing, code};
use cudarc::driver::sys::{self, CUstreamCaptureMode as Mode};
use cudarc::driver::{CudaGraph, CudaSlice, CudaStream, DevicePtrMut, DeviceSlice, SyncOnDrop};
use pinned_hosts::cuda::{Copier, CudaError, DeviceDestination, PinnedBuffer, PinnedPool, reclaim};
use pinned_hosts::live_count;

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
        // What the graphs of the test before have let go of, so that no count
        // taken here includes it. The end of its session was the last chance.
        reclaim();
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
        reclaim();
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
    // Had the graph let go of it, the drain would have seen to that.
    rig.0.sim.drain();
    reclaim();
    assert_eq!(kept.strong_count(), 1);
    assert!(live_count() > 0);
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
        reclaim();
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
                let before = (live_count(), rig.0.counters().live_host_allocations);
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
                reclaim();
                let copies = captured.is_ok();
                if let Some(graph) = &graph {
                    let _ = graph.launch();
                }
                rig.0.assert_sound();
                drop(graph);
                rig.0.sim.drain();
                reclaim();
                // The object was not released, or the copy may not be in the
                // graph: then the buffer is kept for good.
                let last = match call {
                    "cuUserObjectRelease" => nth == 1 && !acting,
                    "cuStreamGetCaptureInfo_v2" => nth == 3,
                    _ => false,
                };
                let what = format!("{call}, call {nth}, acting: {acting}");
                assert_eq!(kept.strong_count(), usize::from(last), "{what}");
                let after = (live_count(), rig.0.counters().live_host_allocations);
                assert_eq!(after.0 - before.0, kept.strong_count(), "{what}");
                assert_eq!(after.1 - before.1, u64::from(last), "{what}");
                if copies {
                    assert!(nth > 1, "{what}: not reached");
                    break;
                }
                let text = captured.unwrap_err().to_string();
                assert!(text.contains("CUDA_ERROR_UNKNOWN (999)"), "{what}: {text}");
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

/// Destroying what runs waits for nothing, and the references stay.
#[test]
fn a_launch_under_way_keeps_the_buffer_when_its_graph_is_gone() {
    let rig = Untracked::new();
    let mut on_device = rig.0.zeros::<u8>(LEN);
    let buffer = rig.buffer();
    let graph = rig.capture(&buffer, &mut on_device);
    let kept = Arc::downgrade(&buffer);
    drop(buffer);
    let transfers = rig.0.sim.counters().h2d_transfers;
    graph.launch().unwrap();
    drop(graph);
    reclaim();
    assert_eq!(rig.0.sim.counters().h2d_transfers, transfers);
    assert_eq!(kept.strong_count(), 1);
    assert_eq!(rig.0.read_back(&on_device), [7; LEN]);
    rig.0.assert_sound();
    assert_eq!(reclaim(), 1);
    assert_eq!(kept.strong_count(), 0);
}

#[test]
fn twin_without_that_a_buffer_is_written_between_launches() {
    let rig = Untracked::new();
    let mut on_device = rig.0.zeros::<u8>(LEN);
    let mut buffer = rig.buffer();
    rig.begin();
    rig.0
        .stream
        .memcpy_htod(buffer.as_slice(), &mut on_device)
        .unwrap();
    let graph = rig.end().unwrap();
    graph.launch().unwrap();
    let buffer = Arc::get_mut(&mut buffer).unwrap();
    buffer.as_mut_slice().unwrap().fill(8);
    rig.0.stream.synchronize().unwrap();
    assert_eq!(rig.0.counters().torn_transfers, 1);
}

#[test]
fn a_graph_launched_into_a_capture_brings_its_buffers() {
    let rig = Untracked::new();
    let mut on_device = rig.0.zeros::<u8>(LEN);
    let buffer = rig.buffer();
    let inner = rig.capture(&buffer, &mut on_device);
    let kept = Arc::downgrade(&buffer);
    drop(buffer);
    rig.begin();
    inner.launch().unwrap();
    let outer = rig.end().unwrap();
    drop(inner);
    rig.0.sim.drain();
    reclaim();
    for _ in 0..2 {
        rig.0.stream.memset_zeros(&mut on_device).unwrap();
        outer.launch().unwrap();
        assert_eq!(rig.0.read_back(&on_device), [7; LEN]);
    }
    rig.0.assert_sound();
    drop(outer);
    assert!(is_freed(&kept), "the buffer leaks");
}

/// A graph that is destroyed does not free what it kept: the thread that says
/// so must not call the driver.
#[test]
fn the_next_capture_and_the_next_buffer_free_what_graphs_have_let_go_of() {
    let rig = Untracked::new();
    let mut on_device = rig.0.zeros::<u8>(LEN);
    let before = (live_count(), rig.0.counters().live_host_allocations);
    let other = rig.buffer();
    for next_is_a_capture in [true, false] {
        let buffer = rig.buffer();
        drop(rig.capture(&buffer, &mut on_device));
        drop(buffer);
        rig.0.sim.drain();
        assert_eq!(live_count(), before.0 + 2, "nothing has freed it yet");
        if next_is_a_capture {
            // Not one that captures anything, so that it leaves nothing.
            let refused = rig
                .0
                .copier
                .capture_h2d_from(&other, 0..LEN, &mut on_device);
            assert_eq!(refused, Err(CudaError::StreamIsNotCapturing));
        } else {
            drop(rig.buffer());
        }
        assert_eq!(live_count(), before.0 + 1);
    }
    drop(other);
    let after = (live_count(), rig.0.counters().live_host_allocations);
    assert_eq!(after, before);
}

#[test]
fn one_graph_keeps_many_buffers_and_they_are_reclaimed_together() {
    let rig = Untracked::new();
    let mut on_device = rig.0.zeros::<u8>(LEN);
    let buffers = [rig.buffer(), rig.buffer()];
    let before = live_count();
    rig.begin();
    for buffer in [&buffers[0], &buffers[1], &buffers[0]] {
        rig.0
            .copier
            .capture_h2d_from(buffer, 0..LEN, &mut on_device)
            .unwrap();
    }
    let graph = rig.end().unwrap();
    drop(buffers);
    drop(graph);
    rig.0.sim.drain();
    assert_eq!(reclaim(), 2);
    assert_eq!(reclaim(), 0);
    assert_eq!(live_count(), before - 2);
}

/// The stream is destroyed while it captures: there is no graph, ever.
#[test]
fn an_abandoned_capture_lets_go_too() {
    let rig = Untracked::new();
    let mut on_device = rig.0.zeros::<u8>(LEN);
    let buffer = rig.buffer();
    let stream = rig.0.context.new_stream().unwrap();
    let copier = waiting_copier(&stream);
    let mode = Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    stream.begin_capture(mode).unwrap();
    copier
        .capture_h2d_from(&buffer, 0..LEN, &mut on_device)
        .unwrap();
    drop((copier, stream));
    let kept = Arc::downgrade(&buffer);
    drop(buffer);
    assert!(is_freed(&kept), "the buffer leaks");
}

#[test]
fn of_the_default_streams_a_threads_own_can_capture() {
    let rig = Untracked::new();
    let mut on_device = rig.0.zeros::<u8>(LEN);
    let buffer = rig.buffer();
    let legacy = waiting_copier(&rig.0.context.default_stream());
    let refused = legacy.capture_h2d_from(&buffer, 0..LEN, &mut on_device);
    assert_eq!(refused, Err(CudaError::StreamIsNotCapturing));

    let stream = rig.0.context.per_thread_stream();
    let own = waiting_copier(&stream);
    stream
        .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        .unwrap();
    // The same handle is another stream on another thread.
    let elsewhere = thread::scope(|scope| {
        let (own, buffer, on_device) = (&own, &buffer, &mut on_device);
        let capture = move || own.capture_h2d_from(buffer, 0..LEN, on_device);
        scope.spawn(capture).join().unwrap()
    });
    assert_eq!(elsewhere, Err(CudaError::StreamIsNotCapturing));
    own.capture_h2d_from(&buffer, 0..LEN, &mut on_device)
        .unwrap();
    let graph = stream.end_capture(FLAGS).unwrap().unwrap();
    let kept = Arc::downgrade(&buffer);
    drop(buffer);
    reclaim();
    graph.launch().unwrap();
    stream.synchronize().unwrap();
    assert_eq!(rig.0.read_back(&on_device), [7; LEN]);
    rig.0.assert_sound();
    drop(graph);
    assert!(is_freed(&kept), "the buffer leaks");
}

/// A buffer that a dead graph has let go of, while a plain copy of it is still
/// under way. No handle is left of it.
fn released_and_in_use(rig: &Untracked, copier: &Copier, on_device: &mut CudaSlice<u8>) {
    let buffer = rig.buffer();
    drop(rig.capture(&buffer, on_device));
    rig.0.sim.drain();
    copier.copy_h2d_from(&buffer, 0..LEN, on_device).unwrap();
}

/// How often the driver was told to wait for anything.
fn waits(rig: &Untracked) -> u64 {
    let calls = [
        "cuEventSynchronize",
        "cuStreamSynchronize",
        "cuCtxSynchronize",
    ];
    calls.iter().map(|call| rig.0.sim.calls(call)).sum()
}

/// The last handle may be the graph's while a plain copy of the same buffer is
/// still under way, on a stream that has nothing to do with the call.
#[test]
fn what_frees_released_buffers_passes_by_those_in_use() {
    let take = |rig: &Untracked| drop(PinnedPool::<u8>::new(&rig.0.context, LEN).take(LEN));
    let make = |rig: &Untracked| drop(rig.buffer());
    let capture = |rig: &Untracked| {
        let empty = Arc::new(PinnedBuffer::<u8>::from_slice(&rig.0.context, &[]).unwrap());
        let mut nothing = rig.0.stream.null::<u8>().unwrap();
        let copier = &rig.0.copier;
        copier.capture_h2d_from(&empty, 0..0, &mut nothing).unwrap();
    };
    let ask = |_: &Untracked| assert!(reclaim() <= 1);
    type Call = fn(&Untracked);
    let calls: [(&str, Call); 4] = [
        ("take", take),
        ("make", make),
        ("capture", capture),
        ("reclaim", ask),
    ];
    for (name, call) in calls {
        let rig = Untracked::new();
        let mut on_device = rig.0.zeros::<u8>(LEN);
        let slow = waiting_copier(&rig.0.context.new_stream().unwrap());
        let before = (live_count(), rig.0.counters().live_host_allocations);
        // Nothing runs before it was waited for, or asked for twice.
        released_and_in_use(&rig, &slow, &mut on_device);
        let so_far = waits(&rig);
        call(&rig);
        assert_eq!(waits(&rig), so_far, "{name} waited");
        assert_eq!(live_count(), before.0 + 1, "{name} freed what is in use");
        rig.0.sim.drain();
        call(&rig);
        let after = (live_count(), rig.0.counters().live_host_allocations);
        assert_eq!(after, before, "{name} does not free what is idle");
        assert_eq!(rig.0.read_back(&on_device), [7; LEN]);
        rig.0.assert_sound();
    }
}

#[test]
fn threads_that_reclaim_at_once_free_each_buffer_once() {
    const THREADS: usize = 4;
    const BUFFERS: usize = 100;
    let rig = Untracked::new();
    let mut on_device = rig.0.zeros::<u8>(LEN);
    let before = (live_count(), rig.0.counters().live_host_allocations);
    let buffers: Vec<_> = (0..BUFFERS).map(|_| rig.buffer()).collect();
    let copier = &rig.0.copier;
    rig.begin();
    for buffer in &buffers {
        copier
            .capture_h2d_from(buffer, 0..LEN, &mut on_device)
            .unwrap();
    }
    drop(rig.end().unwrap());
    rig.0.sim.drain();
    let hold = rig.0.sim.hold();
    for buffer in &buffers {
        copier
            .copy_h2d_from(buffer, 0..LEN, &mut on_device)
            .unwrap();
    }
    drop(buffers);
    let all_tried = Barrier::new(THREADS + 1);
    let deadline = Instant::now() + Duration::from_secs(20);
    // Relaxed: it carries nothing but itself.
    let freed = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let in_vain: usize = (0..20).map(|_| reclaim()).sum();
                assert_eq!(in_vain, 0);
                all_tried.wait();
                while freed.load(Ordering::Relaxed) < BUFFERS && Instant::now() < deadline {
                    freed.fetch_add(reclaim(), Ordering::Relaxed);
                }
            });
        }
        all_tried.wait();
        drop(hold);
    });
    assert_eq!(freed.load(Ordering::Relaxed), BUFFERS);
    let after = (live_count(), rig.0.counters().live_host_allocations);
    assert_eq!(after, before);
    rig.0.assert_sound();
}

#[test]
fn a_released_buffer_of_which_the_driver_cannot_say_is_kept_until_it_can() {
    let rig = Untracked::new();
    let mut on_device = rig.0.zeros::<u8>(LEN);
    released_and_in_use(&rig, &rig.0.copier, &mut on_device);
    rig.0.sim.fail_always("cuEventQuery", code::UNKNOWN);
    let so_far = waits(&rig);
    assert_eq!((reclaim(), waits(&rig)), (0, so_far));
    rig.0.sim.clear_faults();
    rig.0.sim.drain();
    assert_eq!(reclaim(), 1);
    rig.0.assert_sound();
}

/// It is leaked, as it is where its owner drops it.
#[test]
fn a_released_buffer_that_is_lost_is_not_asked_for_again() {
    let rig = Untracked::new();
    let mut on_device = rig.0.zeros::<u8>(LEN);
    let before = live_count();
    let buffer = rig.buffer();
    drop(rig.capture(&buffer, &mut on_device));
    rig.0.sim.drain();
    let failing = ["cuEventRecord", "cuStreamSynchronize", "cuCtxSynchronize"];
    for call in failing {
        rig.0.sim.fail_always(call, code::UNKNOWN);
    }
    let copied = rig.0.copier.copy_h2d_from(&buffer, 0..LEN, &mut on_device);
    copied.unwrap_err();
    rig.0.sim.clear_faults();
    drop(buffer);
    let log = logged(|| assert_eq!(reclaim() + reclaim(), 0));
    assert_eq!(log.matches("leaked").count(), 1, "{log}");
    assert_eq!(live_count(), before + 1, "it stays registered");
    rig.0.assert_sound();
}

#[test]
fn a_forked_child_reclaims_nothing() {
    let name = "a_forked_child_reclaims_nothing";
    // In a process of its own, so that no other test runs while it forks.
    if let Some(output) = in_child(name, |_| ()) {
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let rig = Untracked::new();
    let mut on_device = rig.0.zeros::<u8>(LEN);
    let buffer = rig.buffer();
    drop(rig.capture(&buffer, &mut on_device));
    drop(buffer);
    rig.0.sim.drain();
    let calls = || {
        let calls = ["cuMemFreeHost", "cuEventQuery", "cuEventDestroy_v2"];
        calls.iter().map(|call| rig.0.sim.calls(call)).sum::<u64>()
    };
    let before = calls();
    // SAFETY: the child only reclaims, twice, reads counters and leaves.
    match unsafe { libc::fork() } {
        0 => {
            let nothing = reclaim() + reclaim() == 0 && calls() == before;
            // SAFETY: ends the child, without running what the parent owns.
            unsafe { libc::_exit(i32::from(!nothing)) }
        }
        child => {
            assert!(child > 0, "fork");
            let mut status = -1;
            // SAFETY: `child` is ours, and `status` a place for its status.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0, "the child freed memory of its parent's");
        }
    }
    assert_eq!(reclaim(), 1);
}

/// In its default mode, a capture forbids every thread to free memory and to
/// wait for events, and is spoilt by one that does.
#[test]
fn reclaiming_spoils_no_capture() {
    let rig = Untracked::new();
    let mut on_device = rig.0.zeros::<u8>(LEN);
    let lasting = rig.buffer();
    let passing = rig.buffer();
    drop(rig.capture(&passing, &mut on_device));
    rig.0
        .copier
        .copy_h2d_from(&passing, 0..LEN, &mut on_device)
        .unwrap();
    let kept = Arc::downgrade(&passing);
    drop(passing);
    rig.0.sim.drain();
    rig.0
        .stream
        .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL)
        .unwrap();
    rig.0
        .copier
        .capture_h2d_from(&lasting, 0..LEN, &mut on_device)
        .unwrap();
    assert_eq!(kept.strong_count(), 0, "the capture has reclaimed it");
    let graph = rig.0.stream.end_capture(FLAGS).unwrap().unwrap();
    graph.launch().unwrap();
    assert_eq!(rig.0.read_back(&on_device), [7; LEN]);
    rig.0.assert_sound();
}

#[test]
fn threads_that_capture_at_once_lose_no_buffer() {
    const THREADS: usize = 4;
    const CAPTURES: usize = 50;
    let rig = Untracked::new();
    rig.0.sim.set_timing(Timing::Immediate);
    let before = (live_count(), rig.0.counters().live_host_allocations);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let stream = rig.0.context.new_stream().unwrap();
                let copier = waiting_copier(&stream);
                let mut on_device = stream.alloc_zeros::<u8>(LEN).unwrap();
                for _ in 0..CAPTURES {
                    let buffer = rig.buffer();
                    stream
                        .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
                        .unwrap();
                    copier
                        .capture_h2d_from(&buffer, 0..LEN, &mut on_device)
                        .unwrap();
                    let graph = stream.end_capture(FLAGS).unwrap().unwrap();
                    drop(buffer);
                    graph.launch().unwrap();
                    drop(graph);
                    assert_eq!(stream.clone_dtoh(&on_device).unwrap(), [7; LEN]);
                }
            });
        }
    });
    rig.0.assert_sound();
    reclaim();
    let after = (live_count(), rig.0.counters().live_host_allocations);
    assert_eq!(after, before);
}

/// Another thread ends the capture in the middle of the call: the copy may
/// then be no part of any graph, and run at once.
#[test]
fn a_capture_that_another_thread_ends_meanwhile_leaves_no_dead_read() {
    /// One round is enough, unless the threads share a processor.
    const ROUNDS: usize = 10_000;
    const ROUND: usize = 100;
    let rig = Untracked::new();
    let mut on_device = rig.0.zeros::<u8>(LEN);
    let before = rig.0.counters().h2d_transfers;
    // The last call of the driver before the copy.
    let released = || rig.0.sim.calls("cuUserObjectRelease");
    let (mut changed, mut ran) = (0, 0);
    let (capturing, is_capturing) = mpsc::channel::<u64>();
    let (ended, has_ended) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| {
            for so_far in is_capturing {
                while released() == so_far {
                    thread::yield_now();
                }
                drop(rig.end());
                ended.send(()).unwrap();
            }
        });
        for _ in 0..ROUNDS {
            for _ in 0..ROUND {
                let buffer = rig.buffer();
                rig.begin();
                capturing.send(released()).unwrap();
                let copier = &rig.0.copier;
                let captured = copier.capture_h2d_from(&buffer, 0..LEN, &mut on_device);
                has_ended.recv().unwrap();
                match captured {
                    Ok(()) => {}
                    Err(CudaError::CaptureChanged) => changed += 1,
                    Err(other) => panic!("{other}"),
                }
            }
            // No graph is launched, so these are copies that were not captured.
            ran = rig.0.counters().h2d_transfers - before;
            if ran > 0 {
                break;
            }
        }
        drop(capturing);
    });
    let _ = rig.0.context.check_err();
    rig.0.assert_sound();
    reclaim();
    assert!(ran > 0 && changed >= ran, "{changed} changed, {ran} ran");
}

/// Copies the simulated driver to `folder`, without some of its functions.
fn driver_without(folder: &Path, names: &[&str]) -> PathBuf {
    let mut object = fs::read(cuda_sim::load().unwrap().path()).unwrap();
    for name in names {
        // As the table of symbols has it.
        let symbol = format!("\0{name}\0").into_bytes();
        let places: Vec<usize> = object
            .windows(symbol.len())
            .enumerate()
            .filter_map(|(place, bytes)| (bytes == symbol).then_some(place))
            .collect();
        assert!(!places.is_empty(), "{name}");
        for place in places {
            object[place + 1] = b'_';
        }
    }
    let path = folder.join("libcuda_without.so");
    fs::write(&path, object).unwrap();
    path
}

#[test]
fn what_an_old_driver_lacks_is_an_error_of_captures_alone() {
    let name = "what_an_old_driver_lacks_is_an_error_of_captures_alone";
    let cases: [(&[&str], Option<&str>); 5] = [
        (
            &["cuGraphRetainUserObject"],
            Some("cuGraphRetainUserObject"),
        ),
        (&["cuUserObjectCreate"], Some("cuUserObjectCreate")),
        (&["cuUserObjectRelease"], Some("cuUserObjectRelease")),
        (
            &["cuStreamGetCaptureInfo_v2", "cuStreamGetCaptureInfo_v3"],
            Some("cuStreamGetCaptureInfo_v2"),
        ),
        // Of these two, either will do.
        (&["cuStreamGetCaptureInfo_v2"], None),
    ];
    if !is_child() {
        for (names, missing) in cases {
            let folder = tempfile::tempdir().unwrap();
            let path = driver_without(folder.path(), names);
            let output = in_child(name, |command| {
                command.env("CUDA_SIM_PATH", path);
                command.env("MISSING", missing.unwrap_or_default());
            });
            let output = output.unwrap();
            assert!(output.status.success(), "{names:?}: {output:?}");
        }
        return;
    }
    let missing = std::env::var("MISSING").unwrap();
    let rig = Untracked::new();
    let mut on_device = rig.0.zeros::<u8>(LEN);
    let buffer = rig.buffer();
    let copier = &rig.0.copier;
    copier
        .copy_h2d_from(&buffer, 0..LEN, &mut on_device)
        .unwrap();
    rig.begin();
    let captured = copier.capture_h2d_from(&buffer, 0..LEN, &mut on_device);
    let graph = rig.end().unwrap();
    match captured {
        Ok(()) => {
            assert_eq!(missing, "");
            drop(buffer);
            reclaim();
            graph.launch().unwrap();
            assert_eq!(rig.0.read_back(&on_device), [7; LEN]);
            rig.0.assert_sound();
        }
        Err(CudaError::MissingFunction { name }) => assert_eq!(name, missing),
        Err(other) => panic!("{other}"),
    }
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

/// The buffer goes to the graph that the copy goes to.
#[test]
fn a_destination_that_changes_captures_is_noticed() {
    let rig = Untracked::new();
    for begins_another in [false, true] {
        let mut on_device = Acting {
            inner: rig.0.zeros(LEN),
            act: || {
                drop(rig.end());
                if begins_another {
                    rig.begin();
                }
            },
        };
        let buffer = rig.buffer();
        rig.begin();
        let captured = rig
            .0
            .copier
            .capture_h2d_from(&buffer, 0..LEN, &mut on_device);
        let kept = Arc::downgrade(&buffer);
        drop(buffer);
        reclaim();
        if !begins_another {
            assert_eq!(captured, Err(CudaError::StreamIsNotCapturing));
            assert_eq!(kept.strong_count(), 0);
            continue;
        }
        captured.unwrap();
        let graph = rig.end().unwrap();
        graph.launch().unwrap();
        assert_eq!(rig.0.read_back(&on_device.inner), [7; LEN]);
        rig.0.assert_sound();
        drop(graph);
        assert!(is_freed(&kept), "the buffer leaks");
    }
}
