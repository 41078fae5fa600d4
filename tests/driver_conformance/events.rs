//! Events.

use std::thread;

use cuda_sim::code;
use cudarc::driver::sys::CUstreamCaptureMode as Mode;

use crate::answers::answer;
use crate::calls::{
    begin_capture, end_capture, event_query, event_synchronize, set_current, stream_query,
};
use crate::conforms;
use crate::copies::a_source_may_be_rewritten_after;
use crate::gate::{BRIEFLY, Gate, LONG};
use crate::memory::{Device, Event, Host, Pinned, Stream};
use crate::rig::Rig;

/// Relied on by: `PinnedBuffer`, whose event for a stream is made before the
/// copy, and is waited for even if it never came to a record.
fn an_event_that_was_never_recorded_is_complete(_: &Rig) {
    let event = Event::new();
    assert_eq!(event_query(event.handle()), 0, "asked");
    assert_eq!(event_synchronize(event.handle()), 0, "waited for");
}
conforms!(
    an_event_that_was_never_recorded_is_complete,
    lie: |sim| sim.fail_always("cuEventQuery", code::NOT_READY),
    noticed: "asked"
);

/// Relied on by: `Copier::copy_h2d_async` and `PinnedBuffer::wait`, the waits
/// that everything else stands on.
fn waiting_for_an_event_waits_for_the_copy_before_it(rig: &Rig) {
    a_source_may_be_rewritten_after(rig, |stream| {
        let event = Event::new();
        event.record(stream);
        event_synchronize(event.handle())
    });
}
conforms!(
    waiting_for_an_event_waits_for_the_copy_before_it,
    lie: |sim| sim.fail_always("cuEventSynchronize", code::SUCCESS),
    noticed: "the device holds other contents"
);

/// Relied on by: `PinnedBuffer`, which forgets a use whose event is said to be
/// complete.
fn an_event_is_complete_only_after_the_copy_before_it(_: &Rig) {
    let stream = Stream::new();
    let source = Pinned::filled(1 << 20, 1);
    let target = Device::new(1 << 20, &stream);
    let event = Event::new();
    let gate = Gate::close(&stream);
    stream.copy(target.at(0), &source);
    event.record(&stream);
    let held = event_query(event.handle());
    assert_eq!(held, code::NOT_READY, "the copy cannot have been made");
    gate.open();
    // No pass mark: only a driver that never says so takes for ever.
    while event_query(event.handle()) == code::NOT_READY {
        thread::yield_now();
    }
    source.fill(2);
    stream.wait();
    target.assert_holds(1);
}
conforms!(
    an_event_is_complete_only_after_the_copy_before_it,
    lie: |sim| sim.fail_always("cuEventQuery", code::SUCCESS),
    noticed: "the copy cannot have been made"
);

/// Relied on by: the staging ring, which uses a block again once its event is
/// complete, whatever the stream does then; and `PinnedBuffer`, which would wait
/// for ever on a stream that is kept busy.
fn waiting_for_an_event_waits_for_no_later_work(_: &Rig) {
    let stream = Stream::new();
    let source = Pinned::filled(1 << 20, 1);
    let target = Device::new(1 << 20, &stream);
    let event = Event::new();
    stream.copy(target.at(0), &source);
    event.record(&stream);
    let gate = Gate::close(&stream);
    let (waited, before_the_rest) = gate.during(LONG, || event_synchronize(event.handle()));
    assert_eq!(waited, 0);
    assert!(before_the_rest, "the wait was for later work too");
    let asked = event_query(event.handle());
    assert_eq!(asked, 0, "it is complete, whatever comes later");
    // On another stream, so what is later is still to come.
    target.assert_holds(1);
    gate.open();
    stream.wait();
}
conforms!(
    waiting_for_an_event_waits_for_no_later_work,
    lie: |sim| sim.fail_always("cuEventSynchronize", code::SUCCESS),
    noticed: "it is complete, whatever comes later"
);

/// Relied on by: `Copier`, which records the same events again and again, and
/// `PinnedBuffer`, which has one for all its copies on a stream.
fn a_record_replaces_the_one_before(_: &Rig) {
    let held = Stream::new();
    let free = Stream::new();
    let event = Event::new();
    let gate = Gate::close(&held);
    event.record(&held);
    assert_eq!(event_query(event.handle()), code::NOT_READY);
    event.record(&free);
    free.wait();
    let asked = event_query(event.handle());
    assert_eq!(asked, 0, "the second record is what counts");
    event.record(&held);
    let asked = event_query(event.handle());
    assert_eq!(asked, code::NOT_READY, "the third record is what counts");
    gate.open();
    held.wait();
    assert_eq!(event_query(event.handle()), 0);
}
conforms!(
    a_record_replaces_the_one_before,
    lie: |sim| sim.fail_nth("cuEventRecord", 2, code::SUCCESS),
    noticed: "the second record is what counts"
);

/// Relied on by: `unsafe impl Send for Event`: buffers are dropped, and events
/// waited for, on any thread.
fn an_event_can_be_waited_for_on_another_thread(rig: &Rig) {
    a_source_may_be_rewritten_after(rig, |stream| {
        let event = Event::new();
        event.record(stream);
        let event = &event;
        thread::scope(|scope| {
            let waiting = scope.spawn(move || {
                rig.make_current();
                let waited = event_synchronize(event.handle());
                (waited, event_query(event.handle()))
            });
            let (waited, asked) = waiting.join().unwrap();
            assert_eq!(asked, 0, "it is complete");
            waited
        })
    });
}
conforms!(
    an_event_can_be_waited_for_on_another_thread,
    lie: |sim| {
        sim.fail_always("cuEventSynchronize", code::SUCCESS);
        sim.fail_always("cuEventQuery", code::SUCCESS);
    },
    noticed: "the device holds other contents"
);

/// Relied on by: `PinnedBuffer::wait`, on a thread that never used CUDA. If it
/// is refused, the whole context is waited for, and the error reported.
#[test]
fn whether_an_event_can_be_waited_for_without_a_context() {
    let rig = &Rig::new();
    let stream = Stream::new();
    let event = Event::new();
    event.record(&stream);
    stream.wait();
    assert_eq!(set_current(std::ptr::null_mut()), 0);
    let results = (
        event_synchronize(event.handle()),
        event_query(event.handle()),
    );
    rig.make_current();
    let question = "codes of waiting for, and asking, an event without a context?";
    answer(rig, question, format!("{results:?}"));
    let codes = [0, code::INVALID_CONTEXT];
    assert!(codes.contains(&results.0), "{results:?}");
    assert!(codes.contains(&results.1), "{results:?}");
}

/// Relied on by: `Event`'s drop, after a copy that could not be noted.
fn an_event_can_be_destroyed_before_it_is_complete(rig: &Rig) {
    let stream = Stream::new();
    let event = Event::new();
    let gate = Gate::close(&stream);
    event.record(&stream);
    let (destroyed, at_once) = gate.during(BRIEFLY, || event.destroy());
    assert_eq!(destroyed, 0, "it is destroyed");
    answer(
        rig,
        "destroying an event waits for it?",
        if at_once { "no" } else { "yes" },
    );
    gate.open();
    stream.wait();
}
conforms!(
    an_event_can_be_destroyed_before_it_is_complete,
    lie: |sim| sim.fail_always("cuEventDestroy_v2", code::INVALID_HANDLE),
    noticed: "it is destroyed"
);

/// Relied on by: `is_done`, for which no error is a yes, and `wait.rs`, which
/// goes on to wait in a wider way.
fn an_event_of_a_capture_is_not_said_to_be_complete(rig: &Rig) {
    let stream = Stream::new();
    let event = Event::new();
    assert_eq!(
        begin_capture(stream.handle(), Mode::CU_STREAM_CAPTURE_MODE_RELAXED),
        0
    );
    event.record(&stream);
    let asked = event_query(event.handle());
    let waited = event_synchronize(event.handle());
    let ended = end_capture(stream.handle());
    assert_eq!(asked, code::CAPTURED_EVENT, "asked");
    assert_eq!(waited, code::CAPTURED_EVENT, "waited for");
    answer(
        rig,
        "asking an event of a capture spoils the capture?",
        match ended {
            Ok(_) => "no".to_owned(),
            Err(failed) => format!("yes, its end gives {failed}"),
        },
    );
}
conforms!(
    an_event_of_a_capture_is_not_said_to_be_complete,
    lie: |sim| sim.fail_always("cuEventSynchronize", code::SUCCESS),
    noticed: "waited for"
);

/// One handle, a stream for each thread.
///
/// Relied on by: `PinnedBuffer`, which keeps the uses on that handle apart by
/// thread, and `Copier`, whose threads do not share events.
fn the_per_thread_stream_is_each_threads_own(rig: &Rig) {
    let stream = &Stream::special(2);
    let event = &Event::new();
    let gate = Gate::close(stream);
    event.record(stream);
    thread::scope(|scope| {
        let elsewhere = scope.spawn(move || {
            rig.make_current();
            let own = Event::new();
            own.record(stream);
            // Before anybody asks for what is behind the gate.
            let (waited, at_once) = gate.during(LONG, || event_synchronize(own.handle()));
            let asked = stream_query(stream.handle());
            gate.open();
            (waited, at_once, asked)
        });
        let (waited, at_once, asked) = elsewhere.join().unwrap();
        assert_eq!((waited, asked), (0, 0), "the other thread's is idle");
        assert!(at_once, "the other thread's has nothing to wait for");
    });
    stream.wait();
    assert_eq!(event_query(event.handle()), 0);
}
conforms!(
    the_per_thread_stream_is_each_threads_own,
    lie: |sim| sim.fail_nth("cuStreamQuery", 1, code::NOT_READY),
    noticed: "the other thread's is idle"
);
