//! User objects: who refers to them, and when their destructors run.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{
    Bench, bench, code, device_alloc, event_query, host_alloc, htod, null, out, stream_query,
    stream_wait,
};
use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUstream, CUuserObject};
use std::ffi::c_void;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::thread::{self, ThreadId};
use std::{ptr, sync::Mutex};

const NO_SYNC: u32 = 1;
const MOVE: u32 = 1;

/// What a destructor leaves behind.
#[derive(Default)]
struct Trace {
    runs: AtomicU32,
    thread: Mutex<Option<ThreadId>>,
    /// What a driver call returned to it.
    call: AtomicI32,
}

impl Trace {
    /// Carries out what is outstanding, and counts how often it ran.
    fn runs(&self, bench: &Bench) -> u32 {
        bench.session.drain();
        // Relaxed: the drain has synchronised with the destructor.
        self.runs.load(Ordering::Relaxed)
    }

    fn address(&self) -> *mut c_void {
        ptr::from_ref(self).cast_mut().cast()
    }
}

unsafe extern "C" fn destroy(trace: *mut c_void) {
    // SAFETY: the tests keep the trace until no destructor is outstanding.
    let trace = unsafe { &*trace.cast::<Trace>() };
    *trace.thread.lock().unwrap() = Some(thread::current().id());
    // Relaxed: published by what follows.
    trace
        .call
        .store(event_query(null().cast()), Ordering::Relaxed);
    // Release: the last use of the trace, for whoever waits for it.
    trace.runs.fetch_add(1, Ordering::Release);
}

fn object(trace: &Trace, references: u32) -> CUuserObject {
    // SAFETY: an out pointer; the trace outlives the session's drain.
    out(|it| unsafe {
        sys::cuUserObjectCreate(it, trace.address(), Some(destroy), references, NO_SYNC)
    })
    .unwrap()
}

/// Returns when one that became due later than all others has run.
fn let_due_destructors_run() {
    let last = Trace::default();
    assert_eq!(release(object(&last, 1), 1), 0);
    // Acquire: `last` ends here, so its destructor must be through with it.
    while last.runs.load(Ordering::Acquire) == 0 {
        thread::yield_now();
    }
}

fn release(object: CUuserObject, count: u32) -> i32 {
    // SAFETY: the simulated driver looks any handle up.
    code(unsafe { sys::cuUserObjectRelease(object, count) })
}

fn retain(object: CUuserObject, count: u32) -> i32 {
    // SAFETY: as above.
    code(unsafe { sys::cuUserObjectRetain(object, count) })
}

fn graph_retain(graph: CUgraph, object: CUuserObject, count: u32, flags: u32) -> i32 {
    // SAFETY: as above.
    code(unsafe { sys::cuGraphRetainUserObject(graph, object, count, flags) })
}

fn graph_release(graph: CUgraph, object: CUuserObject, count: u32) -> i32 {
    // SAFETY: as above.
    code(unsafe { sys::cuGraphReleaseUserObject(graph, object, count) })
}

fn begin(stream: CUstream) {
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: as above.
    let begun = unsafe { sys::cuStreamBeginCapture_v2(stream, mode) };
    assert_eq!(code(begun), 0);
}

fn end(stream: CUstream) -> Result<CUgraph, i32> {
    // SAFETY: an out pointer.
    out(|graph| unsafe { sys::cuStreamEndCapture(stream, graph) })
}

fn instantiate(graph: CUgraph) -> CUgraphExec {
    // SAFETY: an out pointer.
    out(|it| unsafe { sys::cuGraphInstantiateWithFlags(it, graph, 0) }).unwrap()
}

fn launch(executable: CUgraphExec, stream: CUstream) {
    // SAFETY: the simulated driver looks any handle up.
    assert_eq!(code(unsafe { sys::cuGraphLaunch(executable, stream) }), 0);
}

fn destroy_graph(graph: CUgraph) {
    // SAFETY: as above.
    assert_eq!(code(unsafe { sys::cuGraphDestroy(graph) }), 0);
}

fn destroy_executable(executable: CUgraphExec) {
    // SAFETY: as above.
    assert_eq!(code(unsafe { sys::cuGraphExecDestroy(executable) }), 0);
}

/// Status, number and graph of a stream's capture.
fn info(stream: CUstream) -> Result<(u32, u64, CUgraph), i32> {
    let (mut id, mut graph) = (7, ptr::null_mut());
    // SAFETY: out pointers, or null where nothing is wanted.
    let status = out(|status| unsafe {
        sys::cuStreamGetCaptureInfo_v2(
            stream,
            status,
            &raw mut id,
            &raw mut graph,
            ptr::null_mut(),
            ptr::null_mut(),
        )
    })?;
    Ok((status as u32, id, graph))
}

/// A graph of one copy, captured on `stream`.
fn captured_graph(stream: CUstream) -> CUgraph {
    let (target, source) = (device_alloc(8), host_alloc(8));
    begin(stream);
    assert_eq!(htod(target, source, 8, stream), 0);
    end(stream).unwrap()
}

#[test]
fn the_last_release_runs_the_destructor_once_on_a_thread_of_the_drivers() {
    let bench = bench();
    let trace = Trace::default();
    let object = object(&trace, 1);
    assert_eq!(retain(object, 2), 0);
    assert_eq!(release(object, 2), 0);
    assert_eq!(trace.runs(&bench), 0);
    assert_eq!(release(object, 1), 0);
    assert_eq!(trace.runs(&bench), 1);
    assert_ne!(*trace.thread.lock().unwrap(), Some(thread::current().id()));
    // It is gone.
    assert_eq!(release(object, 1), 1);
    assert_eq!(retain(object, 1), 1);
    assert_eq!(trace.runs(&bench), 1);
}

#[test]
fn a_destructor_may_not_call_the_driver() {
    let bench = bench();
    let trace = Trace::default();
    assert_eq!(release(object(&trace, 1), 1), 0);
    assert_eq!(trace.runs(&bench), 1);
    assert_eq!(trace.call.load(Ordering::Relaxed), 800);
}

#[test]
fn a_destructor_waits_for_the_end_of_a_hold() {
    let bench = bench();
    let trace = Trace::default();
    let hold = bench.session.hold();
    let other = bench.session.hold();
    assert_eq!(release(object(&trace, 1), 1), 0);
    drop(other);
    // Time for a destructor that does not wait. Relaxed: none has run.
    for _ in 0..10_000 {
        thread::yield_now();
    }
    assert_eq!(trace.runs.load(Ordering::Relaxed), 0);
    drop(hold);
    assert_eq!(trace.runs(&bench), 1);
}

#[test]
fn a_destructor_does_not_wait_for_the_end_of_a_hold_of_one_stream() {
    let bench = bench();
    let trace = Trace::default();
    let stream = bench.stream();
    let _hold = bench.session.hold_stream(stream.cu_stream());
    drop(bench.session.hold());
    assert_eq!(release(object(&trace, 1), 1), 0);
    // Relaxed: the count alone is of interest.
    while trace.runs.load(Ordering::Relaxed) == 0 {
        thread::yield_now();
    }
}

#[test]
fn nonsense_is_refused() {
    let bench = bench();
    let trace = Trace::default();
    let stream = bench.stream();
    let graph = captured_graph(stream.cu_stream());
    let create = |destructor, references, flags| {
        // SAFETY: an out pointer; no object is made.
        out(|it: *mut CUuserObject| unsafe {
            sys::cuUserObjectCreate(it, trace.address(), destructor, references, flags)
        })
        .unwrap_err()
    };
    assert_eq!(create(None, 1, NO_SYNC), 1);
    assert_eq!(create(Some(destroy), 0, NO_SYNC), 1);
    assert_eq!(create(Some(destroy), u32::MAX, NO_SYNC), 1);
    assert_eq!(create(Some(destroy), 1, 0), 1);
    let object = object(&trace, 1);
    assert_eq!(release(object, 2), 1);
    assert_eq!(retain(object, 0), 1);
    assert_eq!(graph_retain(graph, object, 1, 2), 1);
    assert_eq!(graph_retain(graph, object, 2, MOVE), 1);
    assert_eq!(graph_retain(graph, null().cast(), 1, 0), 1);
    assert_eq!(graph_retain(null().cast(), object, 1, MOVE), 1);
    assert_eq!(graph_release(graph, object, 1), 1);
    // None of that has taken the one reference.
    assert_eq!(trace.runs(&bench), 0);
    assert_eq!(release(object, 1), 0);
    assert_eq!(trace.runs(&bench), 1);
}

#[test]
fn a_graph_takes_a_reference_over_or_gets_one_more() {
    let bench = bench();
    let stream = bench.stream();
    for flags in [0, MOVE] {
        let trace = Trace::default();
        let object = object(&trace, 1);
        let graph = captured_graph(stream.cu_stream());
        assert_eq!(graph_retain(graph, object, 1, flags), 0);
        assert_eq!(release(object, 1), if flags == MOVE { 1 } else { 0 });
        assert_eq!(trace.runs(&bench), 0);
        destroy_graph(graph);
        assert_eq!(trace.runs(&bench), 1);
    }
}

#[test]
fn a_graph_lets_go_of_a_reference() {
    let bench = bench();
    let trace = Trace::default();
    let object = object(&trace, 2);
    let graph = captured_graph(bench.stream().cu_stream());
    assert_eq!(graph_retain(graph, object, 2, MOVE), 0);
    assert_eq!(graph_release(graph, object, 1), 0);
    assert_eq!(trace.runs(&bench), 0);
    assert_eq!(graph_release(graph, object, 1), 0);
    assert_eq!(trace.runs(&bench), 1);
    assert_eq!(graph_release(graph, object, 1), 1);
}

/// As it is when it is made: what the graph gets or gives later is its own.
#[test]
fn an_executable_has_references_of_its_own() {
    let bench = bench();
    let (before, after) = (Trace::default(), Trace::default());
    let graph = captured_graph(bench.stream().cu_stream());
    assert_eq!(graph_retain(graph, object(&before, 1), 1, MOVE), 0);
    let executable = instantiate(graph);
    assert_eq!(graph_retain(graph, object(&after, 1), 1, MOVE), 0);
    destroy_graph(graph);
    assert_eq!((before.runs(&bench), after.runs(&bench)), (0, 1));
    destroy_executable(executable);
    assert_eq!(before.runs(&bench), 1);
}

#[test]
fn a_launch_that_is_under_way_keeps_what_its_executable_had() {
    let bench = bench();
    let trace = Trace::default();
    let stream = bench.stream();
    let graph = captured_graph(stream.cu_stream());
    assert_eq!(graph_retain(graph, object(&trace, 1), 1, MOVE), 0);
    let executable = instantiate(graph);
    destroy_graph(graph);
    launch(executable, stream.cu_stream());
    destroy_executable(executable);
    // Nothing has asked for the launch, so it has not run.
    let_due_destructors_run();
    assert_eq!(trace.runs.load(Ordering::Relaxed), 0);
    assert_eq!(bench.session.counters().h2d_transfers, 0);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    assert_eq!(bench.session.counters().h2d_transfers, 1);
    assert_eq!(trace.runs(&bench), 1);
}

#[test]
fn the_graph_that_a_capture_makes_is_known_while_it_captures() {
    let bench = bench();
    let trace = Trace::default();
    let stream = bench.stream();
    let stream = stream.cu_stream();
    assert_eq!(info(stream), Ok((0, 0, ptr::null_mut())));
    begin(stream);
    let (status, id, graph) = info(stream).unwrap();
    assert_eq!(status, 1);
    assert!(id != 0 && !graph.is_null());
    assert_eq!(graph_retain(graph, object(&trace, 1), 1, MOVE), 0);
    assert_eq!(info(stream), Ok((1, id, graph)));
    assert_eq!(end(stream), Ok(graph));
    assert_eq!(trace.runs(&bench), 0);
    destroy_graph(graph);
    assert_eq!(trace.runs(&bench), 1);
    begin(stream);
    let (_, next_id, next_graph) = info(stream).unwrap();
    assert!(next_id != id && next_graph != graph);
}

#[test]
fn both_versions_of_the_question_agree() {
    let bench = bench();
    let stream = bench.stream();
    begin(stream.cu_stream());
    let (mut id, mut graph) = (0, ptr::null_mut());
    // SAFETY: out pointers, or null where nothing is wanted.
    let status = out(|status| unsafe {
        sys::cuStreamGetCaptureInfo_v3(
            stream.cu_stream(),
            status,
            &raw mut id,
            &raw mut graph,
            ptr::null_mut(),
            ptr::null_mut(),
            ptr::null_mut(),
        )
    })
    .unwrap();
    assert_eq!(Ok((status as u32, id, graph)), info(stream.cu_stream()));
}

/// Whichever way a capture comes to nothing.
#[test]
fn a_capture_that_makes_no_graph_lets_go_of_its_references() {
    let bench = bench();
    for ended in [false, true] {
        let trace = Trace::default();
        let stream = bench.stream();
        begin(stream.cu_stream());
        let (_, _, graph) = info(stream.cu_stream()).unwrap();
        let object = object(&trace, 1);
        assert_eq!(graph_retain(graph, object, 1, MOVE), 0);
        if ended {
            assert_eq!(stream_query(stream.cu_stream()), 900);
            assert_eq!(info(stream.cu_stream()), Ok((2, 0, ptr::null_mut())));
            // Gone before the capture has ended, and its graph is known no more.
            assert_eq!(trace.runs(&bench), 1);
            let other_trace = Trace::default();
            let other = self::object(&other_trace, 1);
            assert_eq!(graph_retain(graph, other, 1, MOVE), 1);
            assert_eq!(release(other, 1), 0);
            assert_eq!(other_trace.runs(&bench), 1);
            assert_eq!(end(stream.cu_stream()), Err(901));
        }
        drop(stream);
        assert_eq!(trace.runs(&bench), 1);
    }
}

#[test]
fn a_graph_that_is_launched_into_a_capture_brings_its_references() {
    let bench = bench();
    let trace = Trace::default();
    let stream = bench.stream();
    let inner = captured_graph(stream.cu_stream());
    assert_eq!(graph_retain(inner, object(&trace, 1), 1, MOVE), 0);
    let executable = instantiate(inner);
    begin(stream.cu_stream());
    launch(executable, stream.cu_stream());
    let outer = end(stream.cu_stream()).unwrap();
    destroy_executable(executable);
    destroy_graph(inner);
    assert_eq!(trace.runs(&bench), 0);
    destroy_graph(outer);
    assert_eq!(trace.runs(&bench), 1);
}

#[test]
fn the_legacy_stream_cannot_be_asked_while_a_blocking_stream_captures() {
    let _bench = bench();
    // SAFETY: an out pointer.
    let blocking = out(|it| unsafe { sys::cuStreamCreate(it, 0) }).unwrap();
    begin(blocking);
    assert_eq!(info(null().cast()), Err(906));
    // The question spoils nothing.
    assert!(end(blocking).is_ok());
    assert_eq!(info(null().cast()), Ok((0, 0, ptr::null_mut())));
}

#[test]
fn a_session_ends_with_the_destructors_of_the_captures_that_a_test_left() {
    let trace = Trace::default();
    let bench = bench();
    let stream = bench.stream();
    begin(stream.cu_stream());
    let (_, _, graph) = info(stream.cu_stream()).unwrap();
    assert_eq!(graph_retain(graph, object(&trace, 1), 1, MOVE), 0);
    let Bench { context, session } = bench;
    drop(session);
    assert_eq!(trace.runs.load(Ordering::Relaxed), 1);
    drop((stream, context));
}
