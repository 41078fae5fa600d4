//! Graph captures.

use std::thread;

use cuda_sim::code;
use cudarc::driver::sys::{
    self, CUdevice_attribute as Attribute, CUstreamCaptureMode as Mode,
    CUstreamCaptureStatus as Status,
};

use crate::answers::answer;
use crate::calls::{
    begin_capture, capture_status, code as number, context_synchronize, end_capture, event_query,
    event_record, event_synchronize, exchange_mode, host_alloc, host_free, host_register,
    host_unregister, htod, instantiate, launch, stream_synchronize, stream_wait_event,
};
use crate::conforms;
use crate::memory::{Device, Event, Host, PAGE, Pageable, Pinned, Stream};
use crate::rig::Rig;

const GLOBAL: Mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
const RELAXED: Mode = Mode::CU_STREAM_CAPTURE_MODE_RELAXED;

const NONE: Result<Status, i32> = Ok(Status::CU_STREAM_CAPTURE_STATUS_NONE);
const ACTIVE: Result<Status, i32> = Ok(Status::CU_STREAM_CAPTURE_STATUS_ACTIVE);
const INVALIDATED: Result<Status, i32> = Ok(Status::CU_STREAM_CAPTURE_STATUS_INVALIDATED);

/// A capture that ends, whatever became of it, before others are disturbed.
struct Capture<'a> {
    stream: &'a Stream,
    ended: bool,
}

impl<'a> Capture<'a> {
    fn begin(stream: &'a Stream, mode: Mode) -> Self {
        assert_eq!(begin_capture(stream.handle(), mode), 0, "a capture begins");
        Self {
            stream,
            ended: false,
        }
    }

    fn status(&self) -> Result<Status, i32> {
        capture_status(self.stream.handle())
    }

    fn end(mut self) -> Result<sys::CUgraph, i32> {
        self.ended = true;
        end_capture(self.stream.handle())
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if !self.ended {
            let _ = end_capture(self.stream.handle());
        }
    }
}

/// Relied on by: `Copier`, which refuses to copy into a stream that captures.
fn a_stream_says_whether_it_captures(_: &Rig) {
    let stream = Stream::new();
    let other = Stream::new();
    let status = || capture_status(stream.handle());
    assert_eq!(status(), NONE, "before");
    let capture = Capture::begin(&stream, RELAXED);
    assert_eq!(status(), ACTIVE, "during");
    assert_eq!(capture_status(other.handle()), NONE, "another stream");
    let special = [0, 2].map(|handle| capture_status(Stream::special(handle).handle()));
    assert_eq!(special, [NONE; 2], "the default streams");
    assert!(capture.end().is_ok());
    assert_eq!(status(), NONE, "after");
}
conforms!(
    a_stream_says_whether_it_captures,
    lie: |sim| sim.fail_nth("cuStreamIsCapturing", 2, code::SUCCESS),
    noticed: "during"
);

/// Relied on by: `Copier` on the default stream, which takes the error for a
/// refusal: its copy would make that stream wait for the capture.
fn the_legacy_stream_is_refused_beside_a_capture_of_a_blocking_stream(_: &Rig) {
    let blocking = Stream::blocking();
    let capture = Capture::begin(&blocking, RELAXED);
    let asked = capture_status(Stream::special(0).handle());
    let status = capture.status();
    let ended = capture.end();
    assert_eq!(
        asked,
        Err(code::STREAM_CAPTURE_IMPLICIT),
        "the legacy stream"
    );
    assert_eq!(status, ACTIVE, "the question spoils nothing");
    assert!(ended.is_ok(), "the question spoils nothing");
}
conforms!(
    the_legacy_stream_is_refused_beside_a_capture_of_a_blocking_stream,
    lie: |sim| sim.fail_nth("cuStreamIsCapturing", 1, code::SUCCESS),
    noticed: "the legacy stream"
);

/// Relied on by: `Copier`, which asks a second time once `cudarc` has made the
/// stream wait for the destination's last use.
fn a_stream_that_waits_for_an_event_of_a_capture_joins_it(_: &Rig) {
    let stream = Stream::new();
    let joins = Stream::new();
    let event = Event::new();
    let back = Event::new();
    let capture = Capture::begin(&stream, RELAXED);
    event.record(&stream);
    assert_eq!(stream_wait_event(joins.handle(), event.handle()), 0);
    let joined = capture_status(joins.handle());
    event_record(back.handle(), joins.handle());
    let rejoined = stream_wait_event(stream.handle(), back.handle());
    let ended = capture.end();
    assert_eq!(joined, ACTIVE, "it has joined");
    assert_eq!(rejoined, 0);
    assert!(ended.is_ok(), "{ended:?}");
    assert_eq!(capture_status(joins.handle()), NONE, "it has left");
}
conforms!(
    a_stream_that_waits_for_an_event_of_a_capture_joins_it,
    lie: |sim| sim.fail_nth("cuStreamWaitEvent", 1, code::SUCCESS),
    noticed: "it has joined"
);

/// Relied on by: `Copier`, which therefore refuses instead of waiting; and
/// `is_capturing`, for which a spoilt capture has not ended.
fn waiting_for_a_capturing_stream_is_refused_and_spoils_the_capture(rig: &Rig) {
    let stream = Stream::new();
    let source = Pageable::filled(8, 3);
    let target = Device::new(8, &stream);
    stream.wait();
    let capture = Capture::begin(&stream, RELAXED);
    let waited = stream_synchronize(stream.handle());
    let status = capture.status();
    let copied = htod(target.at(0), source.base(), 8, stream.handle());
    let ended = capture.end();
    answer(
        rig,
        "a capture whose stream was waited for?",
        format!("{status:?}; a copy gives {copied}, its end {ended:?}"),
    );
    assert_eq!(waited, code::STREAM_CAPTURE_UNSUPPORTED, "the wait");
    assert_eq!(status, INVALIDATED, "the capture");
    assert_eq!(copied, code::STREAM_CAPTURE_INVALIDATED, "a copy after it");
    assert_eq!(ended, Err(code::STREAM_CAPTURE_INVALIDATED), "its end");
    assert_eq!(capture_status(stream.handle()), NONE, "it has ended");
    stream.wait();
}
conforms!(
    waiting_for_a_capturing_stream_is_refused_and_spoils_the_capture,
    lie: |sim| sim.fail_nth("cuStreamSynchronize", 2, code::SUCCESS),
    noticed: "the wait"
);

/// Relied on by: the refusal of copies into captures: no wait makes them sound.
fn a_captured_copy_reads_the_host_address_at_every_launch(_: &Rig) {
    for pageable in [false, true] {
        let stream = Stream::new();
        let memory: Box<dyn Host> = match pageable {
            true => Box::new(Pageable::filled(PAGE, 1)),
            false => Box::new(Pinned::filled(PAGE, 1)),
        };
        let target = Device::new(PAGE, &stream);
        stream.wait();
        let capture = Capture::begin(&stream, RELAXED);
        let copied = htod(target.at(0), memory.base(), PAGE, stream.handle());
        let ended = capture.end();
        assert_eq!(copied, 0, "a copy is captured; pageable: {pageable}");
        let graph = ended.expect("the capture is whole");
        let executable = instantiate(graph);
        for seed in [2, 3] {
            memory.fill(seed);
            assert_eq!(launch(executable, stream.handle()), 0);
            stream.wait();
            target.assert_holds(seed);
        }
        // SAFETY: made above, and not used after.
        let ended = unsafe {
            (
                sys::cuGraphExecDestroy(executable),
                sys::cuGraphDestroy(graph),
            )
        };
        assert_eq!((number(ended.0), number(ended.1)), (0, 0));
    }
}
conforms!(
    a_captured_copy_reads_the_host_address_at_every_launch,
    lie: |sim| sim.fail_nth("cuMemcpyHtoDAsync_v2", 2, code::SUCCESS),
    noticed: "the device holds other contents"
);

/// Relied on by: `OutsideOfCaptures`, which leaves a thread as it was.
fn a_threads_capture_mode_is_exchanged_for_the_one_before(_: &Rig) {
    let modes = || {
        [
            exchange_mode(RELAXED),
            exchange_mode(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
            exchange_mode(GLOBAL),
            exchange_mode(GLOBAL),
        ]
    };
    let expected = [
        GLOBAL,
        RELAXED,
        Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        GLOBAL,
    ];
    assert_eq!(modes(), expected, "on this thread");
    exchange_mode(RELAXED);
    let elsewhere = thread::scope(|scope| scope.spawn(modes).join().unwrap());
    exchange_mode(GLOBAL);
    assert_eq!(elsewhere, expected, "on another thread");
}
conforms!(
    a_threads_capture_mode_is_exchanged_for_the_one_before,
    lie: |sim| sim.fail_nth("cuThreadExchangeStreamCaptureMode", 2, code::SUCCESS),
    noticed: "on this thread"
);

/// Runs `calls` on a thread of its own while this one has a capture in the
/// default mode. Returns what they returned, and what became of the capture.
fn beside_a_global_capture<T: Send>(
    rig: &Rig,
    calls: impl FnOnce() -> T + Send,
) -> (T, Result<Status, i32>) {
    let stream = Stream::new();
    let capture = Capture::begin(&stream, GLOBAL);
    let returned = thread::scope(|scope| {
        scope
            .spawn(|| {
                rig.make_current();
                calls()
            })
            .join()
            .unwrap()
    });
    let status = capture.status();
    let ended = capture.end();
    assert_eq!(ended.is_ok(), status == ACTIVE, "{ended:?}, {status:?}");
    (returned, status)
}

/// Relied on by: `OutsideOfCaptures`, which would not be needed otherwise.
fn some_calls_are_forbidden_while_another_thread_captures(rig: &Rig) {
    let event = Event::new();
    let (asked, status) = beside_a_global_capture(rig, || event_query(event.handle()));
    answer(
        rig,
        "a global capture beside which another thread asked an event?",
        format!("{status:?}; the question gave {asked}"),
    );
    assert_eq!(asked, code::STREAM_CAPTURE_UNSUPPORTED, "asking an event");
    let (allocated, status) = beside_a_global_capture(rig, || host_alloc(8, 0).map(host_free));
    answer(
        rig,
        "a global capture beside which another thread page-locked memory?",
        format!("{status:?}; the allocation gave {allocated:?}"),
    );
}
conforms!(
    some_calls_are_forbidden_while_another_thread_captures,
    lie: |sim| sim.fail_nth("cuEventQuery", 1, code::SUCCESS),
    noticed: "asking an event"
);

/// Relied on by: `OutsideOfCaptures`, in which this crate makes these calls.
fn those_calls_are_allowed_in_the_relaxed_mode(rig: &Rig) {
    let event = Event::new();
    let memory = Pageable::new(PAGE);
    let memory = &memory;
    let event = &event;
    let (results, status) = beside_a_global_capture(rig, || {
        let before = exchange_mode(RELAXED);
        let results = [
            ("cuEventQuery", event_query(event.handle())),
            ("cuEventSynchronize", event_synchronize(event.handle())),
            (
                "cuMemHostAlloc and cuMemFreeHost",
                host_alloc(8, 0).map_or_else(|failed| failed, host_free),
            ),
            ("cuMemHostRegister", host_register(memory.base(), PAGE, 0)),
            ("cuMemHostUnregister", host_unregister(memory.base())),
        ];
        exchange_mode(before);
        results
    });
    assert_eq!(
        results.map(|it| it.1),
        [0; 5],
        "in relaxed mode: {results:?}"
    );
    assert_eq!(status, ACTIVE, "the capture is not spoilt");
}
conforms!(
    those_calls_are_allowed_in_the_relaxed_mode,
    lie: |sim| sim.fail_nth("cuThreadExchangeStreamCaptureMode", 1, code::SUCCESS),
    noticed: "in relaxed mode"
);

/// Relied on by: `Copier`, which makes these calls in whatever mode its thread
/// has.
fn other_calls_are_allowed_while_another_thread_captures(rig: &Rig) {
    let stream = &Stream::new();
    let target = &Device::new(PAGE, stream);
    let pinned = &Pinned::filled(PAGE, 3);
    let pageable = &Pageable::filled(PAGE, 4);
    stream.wait();
    let (results, status) = beside_a_global_capture(rig, || {
        let copy = |source: *mut u8| htod(target.at(0), source, PAGE, stream.handle());
        let event = Event::new();
        [
            ("cuStreamIsCapturing", capture_status(stream.handle()).err()),
            ("cuMemcpyHtoDAsync, pinned", Some(copy(pinned.base()))),
            ("cuMemcpyHtoDAsync, pageable", Some(copy(pageable.base()))),
            (
                "cuEventRecord",
                Some(event_record(event.handle(), stream.handle())),
            ),
            ("cuEventDestroy", Some(event.destroy())),
        ]
        .map(|(call, result)| (call, result.unwrap_or(0)))
    });
    assert_eq!(
        results.map(|it| it.1),
        [0; 5],
        "all are allowed: {results:?}"
    );
    assert_eq!(status, ACTIVE, "the capture is not spoilt");
    stream.wait();
    target.assert_holds(4);
    let attribute = Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED;
    let (_, status) = beside_a_global_capture(rig, || rig.attribute(attribute));
    assert_eq!(status, ACTIVE, "asking the device spoils nothing");

    // Only after every narrower way to wait has failed.
    let (waited, status) = beside_a_global_capture(rig, || stream_synchronize(stream.handle()));
    answer(
        rig,
        "a global capture beside which another thread waited for a stream?",
        format!("{status:?}; the wait gave {waited}"),
    );
    let (waited, status) = beside_a_global_capture(rig, context_synchronize);
    answer(
        rig,
        "a global capture beside which another thread waited for the context?",
        format!("{status:?}; the wait gave {waited}"),
    );
}
conforms!(
    other_calls_are_allowed_while_another_thread_captures,
    lie: |sim| sim.fail_nth("cuEventRecord", 1, code::STREAM_CAPTURE_UNSUPPORTED),
    noticed: "all are allowed"
);
