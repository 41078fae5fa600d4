//! More than one context.

use cuda_sim::code;
use cudarc::driver::sys::{self, CUcontext};

use crate::answers::{answer, note};
use crate::calls::{code as number, event_query, event_record, has, htod, out, set_current};
use crate::conforms;
use crate::memory::{Device, Event, Host, PAGE, Pageable, Pinned, Stream};
use crate::rig::Rig;

/// A context beside the rig's, on the same device. It is current until the
/// rig's is made current again.
struct Second(CUcontext);

impl Second {
    fn new(rig: &Rig) -> Option<Self> {
        if !has(c"cuCtxCreate_v2") {
            note(
                "a second context?",
                "not asked: the driver lacks cuCtxCreate_v2".into(),
            );
            return None;
        }
        // SAFETY: a place for the context.
        let made = out(|it| unsafe { sys::cuCtxCreate_v2(it, 0, rig.context.cu_device()) });
        match made {
            Ok(context) => Some(Self(context)),
            Err(failed) => {
                note("a second context?", format!("not to be had: {failed}"));
                rig.make_current();
                None
            }
        }
    }

    fn end(self, rig: &Rig) {
        rig.make_current();
        // SAFETY: created by `new`, and not used after.
        assert_eq!(number(unsafe { sys::cuCtxDestroy_v2(self.0) }), 0);
        rig.make_current();
    }
}

/// Relied on by: `Event`, made in the stream's own context, whatever context
/// is current: an event of another one would mark nothing.
fn an_event_cannot_be_recorded_in_another_context(rig: &Rig) {
    let own = Event::new();
    let Some(second) = Second::new(rig) else {
        return;
    };
    let stream = Stream::new();
    let recorded = event_record(own.handle(), stream.handle());
    assert_eq!(
        recorded,
        code::INVALID_HANDLE,
        "an event of another context"
    );
    let fitting = Event::new();
    // The stream's context decides, not the current one.
    rig.make_current();
    let from_outside = event_record(fitting.handle(), stream.handle());
    answer(
        rig,
        "code of recording on a stream while another context is current?",
        from_outside.to_string(),
    );
    assert_eq!(event_query(own.handle()), 0, "it was not recorded");
    assert_eq!(set_current(second.0), 0);
    stream.wait();
    drop((fitting, stream));
    second.end(rig);
}
conforms!(
    an_event_cannot_be_recorded_in_another_context,
    lie: |sim| sim.fail_nth("cuEventRecord", 1, code::SUCCESS),
    noticed: "an event of another context"
);

/// Relied on by: the flag that this crate page-locks all memory with.
fn portable_memory_is_page_locked_in_every_context(rig: &Rig) {
    let allocated = Pinned::filled(PAGE, 3);
    let registered = Pageable::filled(PAGE, 4);
    let pin = registered.register(0, PAGE, sys::CU_MEMHOSTREGISTER_PORTABLE);
    let pin = pin.unwrap();
    let Some(second) = Second::new(rig) else {
        return;
    };
    let stream = Stream::new();
    let target = Device::new(PAGE, &stream);
    stream.copy(target.at(0), &allocated);
    stream.wait();
    target.assert_holds(3);
    stream.copy(target.at(0), &registered);
    stream.wait();
    target.assert_holds(4);
    drop((target, stream));
    second.end(rig);
    assert_eq!(pin.unregister(), 0);
    assert_eq!(allocated.free(), 0);
}
conforms!(
    portable_memory_is_page_locked_in_every_context,
    lie: |sim| sim.fail_nth("cuMemcpyHtoDAsync_v2", 2, code::SUCCESS),
    noticed: "the device holds other contents"
);

/// Documented: a copy finds the context of device memory by itself. Nothing
/// says so of filling it.
///
/// Relied on by: nothing. The simulated driver accepts and counts such copies,
/// and refuses to fill.
fn a_copy_to_device_memory_of_another_context_arrives_if_it_is_accepted(rig: &Rig) {
    let source = Pinned::filled(PAGE, 3);
    let own = Stream::new();
    let (target, other) = (Device::new(PAGE, &own), Device::new(PAGE, &own));
    own.wait();
    let Some(second) = Second::new(rig) else {
        return;
    };
    let stream = Stream::new();
    let copied = htod(target.at(0), source.base(), PAGE, stream.handle());
    // SAFETY: within the device memory.
    let filled = number(unsafe { sys::cuMemsetD8Async(other.at(0), 7, PAGE, stream.handle()) });
    stream.wait();
    drop(stream);
    second.end(rig);
    if copied == 0 {
        target.assert_holds(3);
    }
    for (call, code) in [("copying to", copied), ("filling", filled)] {
        let question = format!("code of {call} device memory of another context?");
        answer(rig, &question, code.to_string());
    }
    assert_eq!(source.free(), 0);
}
conforms!(
    a_copy_to_device_memory_of_another_context_arrives_if_it_is_accepted,
    lie: |sim| sim.fail_nth("cuMemcpyHtoDAsync_v2", 1, code::SUCCESS),
    noticed: "the device holds other contents"
);
