//! When a copy uses the host's memory, and which memory it takes.

use std::ptr;

use cuda_sim::{DeviceKind, Pageable as Staging, Session, code};

use crate::answers::answer;
use crate::calls::{context_synchronize, dtod, dtoh, event_synchronize, htod, stream_synchronize};
use crate::conforms;
use crate::gate::{BRIEFLY, Gate};
use crate::memory::{Device, Event, Host, PAGE, Pageable, Pinned, Stream, seed_of};
use crate::rig::Rig;

const OLD: u8 = 1;
const NEW: u8 = 2;

/// From a byte to a mebibyte, most of them around the 64 KiB up to which
/// drivers have been seen to put a source into the command itself.
const SIZES: [usize; 25] = {
    const K: usize = 1 << 10;
    [
        1,
        2,
        63,
        64,
        K,
        4 * K - 1,
        4 * K,
        4 * K + 1,
        16 * K,
        32 * K,
        60 * K,
        64 * K - 64,
        64 * K - 1,
        64 * K,
        64 * K + 1,
        64 * K + 64,
        68 * K,
        128 * K - 1,
        128 * K,
        128 * K + 1,
        256 * K,
        256 * K + 1,
        512 * K,
        K * K - 1,
        K * K,
    ]
};

/// Relied on by: every copy that this crate makes.
fn page_locked_sources_arrive(_: &Rig) {
    let stream = Stream::new();
    for len in [1, PAGE + 1, 1 << 20] {
        let target = Device::new(len, &stream);
        let allocated = Pinned::filled(len, 3);
        stream.copy(target.at(0), &allocated);
        stream.wait();
        target.assert_holds(3);

        let registered = Pageable::filled(len, 4);
        let pin = registered.register(0, len, 0).unwrap();
        stream.copy(target.at(0), &registered);
        stream.wait();
        target.assert_holds(4);
        assert_eq!(pin.unregister(), 0);
    }
}
conforms!(
    page_locked_sources_arrive,
    lie: |sim| sim.fail_always("cuMemcpyHtoDAsync_v2", code::SUCCESS),
    noticed: "the device holds other contents"
);

/// What keeps the device busy in front of a copy.
#[derive(Clone, Copy, Debug)]
enum Front {
    /// A function that does not return.
    Gate,
    /// Work of its own.
    Copies,
}

/// Memory for the device to copy from and to, to be busy.
struct Work {
    from: Device,
    to: Device,
    len: usize,
    times: usize,
}

impl Work {
    /// Some milliseconds of it on a real device. The simulated one takes as
    /// long as it wants, and is not asked to move much.
    fn new(rig: &Rig, stream: &Stream) -> Self {
        let (len, times) = if rig.is_real() {
            (256 << 20, 64)
        } else {
            (64 << 10, 4)
        };
        Self {
            from: Device::new(len, stream),
            to: Device::new(len, stream),
            len,
            times,
        }
    }

    fn enqueue(&self, stream: &Stream) {
        for _ in 0..self.times {
            let queued = dtod(self.to.at(0), self.from.at(0), self.len, stream.handle());
            assert_eq!(queued, 0);
        }
    }
}

/// Copies from `source` behind other work, rewrites it as soon as the call has
/// returned, and says what arrived.
fn rewritten_after_the_call(
    source: &impl Host,
    target: &Device,
    stream: &Stream,
    front: Front,
    work: &Work,
) -> Result<u8, String> {
    source.fill(OLD);
    let gate = match front {
        Front::Gate => Some(Gate::close(stream)),
        Front::Copies => {
            work.enqueue(stream);
            None
        }
    };
    let copy = || {
        stream.copy(target.at(0), source);
        source.fill(NEW);
    };
    match gate {
        // A driver may well wait for the stream before it stages.
        Some(gate) => gate.during(BRIEFLY, copy).0,
        None => copy(),
    }
    stream.wait();
    seed_of(&target.contents())
}

/// Relied on by: `Copier::copy_h2d_async`, which neither waits nor keeps a
/// pageable source, where no attribute says that the device reads pageable
/// memory by itself. Elsewhere it waits, and this only measures.
fn a_pageable_source_may_be_rewritten_after_the_call(rig: &Rig) {
    let stream = Stream::new();
    let work = Work::new(rig, &stream);
    let mut late = Vec::new();
    for front in [Front::Gate, Front::Copies] {
        for len in SIZES {
            let source = Pageable::new(len);
            let target = Device::new(len, &stream);
            let arrived = rewritten_after_the_call(&source, &target, &stream, front, &work);
            if arrived != Ok(OLD) {
                late.push(format!("{len} bytes behind {front:?}: {arrived:?}"));
            }
        }
    }
    let seen = match late.first() {
        None => "no".to_owned(),
        Some(first) => format!("yes, {} of {}; {first}", late.len(), 2 * SIZES.len()),
    };
    answer(rig, "pageable source read after the call?", seen);
    assert!(
        late.is_empty() || rig.may_read_pageable_late(),
        "pageable sources were read after the call: {late:?}"
    );
}
conforms!(
    a_pageable_source_may_be_rewritten_after_the_call,
    lie: |sim| sim.set_pageable(Staging::ReadLate),
    noticed: "pageable sources were read after the call"
);

/// The other ways in which a driver may be right.
#[test]
fn devices_that_read_pageable_memory_late_or_wait_for_the_stream_pass_too() {
    let kinds: [fn(&Session); 3] = [
        |sim| sim.set_pageable(Staging::StagedAfterStreamWait),
        |sim| sim.set_device(DeviceKind::Coherent),
        |sim| sim.set_device(DeviceKind::Hmm),
    ];
    for kind in kinds {
        if let Some(rig) = Rig::altered(kind) {
            a_pageable_source_may_be_rewritten_after_the_call(&rig);
        }
    }
}

/// More than any staging memory of the driver's is likely to hold.
///
/// Relied on by: `Copier::copy_h2d_async`, as above; and its copies through
/// the heap, which use one piece of memory again and again.
fn staging_does_not_run_out(rig: &Rig) {
    const COPIES: usize = 64;
    const LEN: usize = 256 << 10;
    if rig.may_read_pageable_late() {
        return;
    }
    let stream = Stream::new();
    let source = Pageable::new(LEN);
    let targets: Vec<Device> = (0..COPIES).map(|_| Device::new(LEN, &stream)).collect();
    let gate = Gate::close(&stream);
    gate.during(BRIEFLY, || {
        for (index, target) in targets.iter().enumerate() {
            source.fill(index as u8);
            stream.copy(target.at(0), &source);
        }
        source.fill(u8::MAX);
    });
    gate.open();
    stream.wait();
    for (index, target) in targets.iter().enumerate() {
        target.assert_holds(index as u8);
    }
}
conforms!(
    staging_does_not_run_out,
    lie: |sim| sim.set_pageable(Staging::ReadLate),
    noticed: "the device holds other contents"
);

/// Relied on by: nothing, it is what this crate is for. A driver that reads a
/// page-locked source during the call would make the waits superfluous, not
/// wrong, so what arrives is only measured.
#[test]
fn a_page_locked_source_may_be_read_after_the_call() {
    let rig = &Rig::new();
    let stream = Stream::new();
    let work = Work::new(rig, &stream);
    for len in [64, 64 << 10, 1 << 20] {
        let source = Pinned::new(len);
        let target = Device::new(len, &stream);
        let arrived = rewritten_after_the_call(&source, &target, &stream, Front::Gate, &work);
        let seen = match arrived {
            Ok(OLD) => "no".to_owned(),
            Ok(NEW) => "yes".to_owned(),
            torn => format!("in parts: {torn:?}"),
        };
        let question = format!("page-locked source of {len} bytes read after the call?");
        answer(rig, &question, seen);
    }
}

/// Relied on by: `Copier`, which enqueues the parts of a split copy one after
/// another, and promises the order of the stream.
fn copies_of_a_stream_arrive_in_its_order(_: &Rig) {
    let stream = Stream::new();
    let target = Device::new(1 << 20, &stream);
    let pinned = Pinned::filled(1 << 20, 3);
    let pageable = Pageable::filled(1 << 20, 4);
    stream.copy(target.at(0), &pinned);
    stream.copy(target.at(0), &pageable);
    stream.wait();
    target.assert_holds(4);
    stream.copy(target.at(0), &pageable);
    stream.copy(target.at(0), &pinned);
    stream.wait();
    target.assert_holds(3);
}
conforms!(
    copies_of_a_stream_arrive_in_its_order,
    lie: |sim| sim.fail_nth("cuMemcpyHtoDAsync_v2", 2, code::SUCCESS),
    noticed: "the device holds other contents"
);

/// Relied on by: nothing, as the copier makes no empty copies; it is why it
/// need not care where an empty slice points.
fn an_empty_copy_may_come_from_null_and_no_other_may(_: &Rig) {
    let stream = Stream::new();
    let target = Device::new(16, &stream);
    let copy = |bytes| htod(target.at(0), ptr::null(), bytes, stream.handle());
    assert_eq!(copy(16), code::INVALID_VALUE, "16 bytes from null");
    assert_eq!(copy(0), 0, "no bytes from null");
    stream.wait();
}
conforms!(
    an_empty_copy_may_come_from_null_and_no_other_may,
    lie: |sim| sim.fail_nth("cuMemcpyHtoDAsync_v2", 1, code::SUCCESS),
    noticed: "16 bytes from null"
);

/// Relied on by: `Residency::Mixed`: the copier splits such a copy, because
/// the driver would refuse it; and where memory is pinned behind its back, it
/// relies on the refusal, since a copy that was half staged would be unsound.
fn a_source_that_is_page_locked_in_part_is_refused_whole(_: &Rig) {
    let stream = Stream::new();
    let source = Pageable::filled(3 * PAGE, 3);
    let target = Device::new(3 * PAGE, &stream);
    let pin = source.register(PAGE, PAGE, 0).unwrap();
    for (start, end) in [
        (0, 3 * PAGE),
        (0, 2 * PAGE),
        (PAGE, 3 * PAGE),
        (PAGE - 1, PAGE + 1),
        (2 * PAGE - 1, 2 * PAGE + 1),
    ] {
        let part = source.base().wrapping_add(start);
        let copied = htod(target.at(start), part, end - start, stream.handle());
        assert_eq!(copied, code::INVALID_VALUE, "a copy of {start}..{end}");
    }
    for start in [0, PAGE, 2 * PAGE] {
        let part = source.base().wrapping_add(start);
        let copied = htod(target.at(start), part, PAGE, stream.handle());
        assert_eq!(copied, 0, "the part at {start} by itself");
    }
    stream.wait();
    target.assert_holds(3);
    assert_eq!(pin.unregister(), 0);
}
conforms!(
    a_source_that_is_page_locked_in_part_is_refused_whole,
    lie: |sim| sim.fail_nth("cuMemcpyHtoDAsync_v2", 4, code::SUCCESS),
    noticed: "a copy of 4095..4097"
);

/// Relied on by: `Residency::Seam`: the copier splits such a copy. Whether it
/// has to is the question; that it may is what it relies on.
fn a_source_in_two_registrations_can_be_copied_in_two_parts(rig: &Rig) {
    let stream = Stream::new();
    for (where_, seam) in [("on a page", PAGE), ("within a page", PAGE + 100)] {
        let source = Pageable::filled(3 * PAGE, 3);
        let target = Device::new(3 * PAGE, &stream);
        let pins = [
            source.register(0, seam, 0).unwrap(),
            source.register(seam, 3 * PAGE - seam, 0).unwrap(),
        ];
        let whole = htod(target.at(0), source.base(), 3 * PAGE, stream.handle());
        stream.wait();
        let seen = match whole {
            0 => {
                target.assert_holds(3);
                "accepted".to_owned()
            }
            failed => format!("refused with {failed}"),
        };
        let question = format!("copy over two registrations that meet {where_}?");
        answer(rig, &question, seen);

        let second = source.base().wrapping_add(seam);
        let copied = [
            htod(target.at(0), source.base(), seam, stream.handle()),
            htod(target.at(seam), second, 3 * PAGE - seam, stream.handle()),
        ];
        assert_eq!(copied, [0, 0], "each part by itself");
        stream.wait();
        target.assert_holds(3);
        assert_eq!(pins.map(|pin| pin.unregister()), [0, 0]);
    }
}
conforms!(
    a_source_in_two_registrations_can_be_copied_in_two_parts,
    lie: |sim| sim.fail_nth("cuMemcpyHtoDAsync_v2", 3, code::INVALID_VALUE),
    noticed: "each part by itself"
);

/// Relied on by: nothing, as the copier waits for every copy to the host; but
/// the documentation of `Scope::copy_d2h` says it, and tests and examples read
/// results with `cudarc`'s `clone_dtoh`.
fn a_copy_to_pageable_memory_is_complete_when_the_call_returns(_: &Rig) {
    let stream = Stream::new();
    let mut waited = Vec::new();
    for len in [1, PAGE, 64 << 10, (64 << 10) + 1, 1 << 20] {
        let source = Pinned::filled(len, 3);
        let on_device = Device::new(len, &stream);
        let target = Pageable::filled(len, OLD);
        let gate = Gate::close(&stream);
        stream.copy(on_device.at(0), &source);
        let download = || {
            let copied = dtoh(target.base(), on_device.at(0), len, stream.handle());
            (copied, seed_of(&target.contents()))
        };
        let ((copied, arrived), at_once) = gate.during(BRIEFLY, download);
        assert_eq!(copied, 0);
        assert_eq!(arrived, Ok(3), "{len} bytes when the call returned");
        waited.push(!at_once);
        gate.open();
        stream.wait();
    }
    assert!(
        waited.iter().all(|&waited| waited),
        "what had arrived cannot have been there: {waited:?}"
    );
}
conforms!(
    a_copy_to_pageable_memory_is_complete_when_the_call_returns,
    lie: |sim| sim.set_pageable_written_late(true),
    noticed: "1 bytes when the call returned"
);

/// Relied on by: `Copier::copy_d2h_async` and `Scope::copy_d2h`, which wait for
/// an event behind the copy. That the call itself does not wait is why there is
/// a scope; it is measured.
fn a_copy_to_page_locked_memory_is_complete_after_the_wait_for_an_event(rig: &Rig) {
    let stream = Stream::new();
    let source = Pinned::filled(1 << 20, 3);
    let on_device = Device::new(1 << 20, &stream);
    let target = Pinned::filled(1 << 20, OLD);
    let event = Event::new();
    let gate = Gate::close(&stream);
    stream.copy(on_device.at(0), &source);
    let download = || dtoh(target.base(), on_device.at(0), 1 << 20, stream.handle());
    let (copied, at_once) = gate.during(BRIEFLY, download);
    assert_eq!(copied, 0);
    let seen = if at_once { "yes" } else { "no" };
    answer(
        rig,
        "copy to page-locked memory returns before it is made?",
        seen,
    );
    event.record(&stream);
    let ((waited, arrived), _) = gate.during(BRIEFLY, || {
        let waited = event_synchronize(event.handle());
        (waited, seed_of(&target.contents()))
    });
    assert_eq!(waited, 0);
    assert_eq!(arrived, Ok(3), "after the wait");
    gate.open();
    stream.wait();
}
conforms!(
    a_copy_to_page_locked_memory_is_complete_after_the_wait_for_an_event,
    lie: |sim| sim.fail_always("cuEventSynchronize", code::SUCCESS),
    noticed: "after the wait"
);

/// Relied on by: the splitting of copies to the host, as of those from it.
fn a_target_that_is_page_locked_in_part_is_refused_whole(_: &Rig) {
    let stream = Stream::new();
    let source = Pinned::filled(2 * PAGE, 3);
    let on_device = Device::new(2 * PAGE, &stream);
    stream.copy(on_device.at(0), &source);
    stream.wait();
    let target = Pageable::filled(2 * PAGE, OLD);
    let pin = target.register(0, PAGE, 0).unwrap();
    let copy = |start: usize, end: usize| {
        let part = target.base().wrapping_add(start);
        let copied = dtoh(part, on_device.at(start), end - start, stream.handle());
        stream.wait();
        copied
    };
    for (start, end) in [(0, 2 * PAGE), (PAGE - 1, PAGE + 1)] {
        let copied = copy(start, end);
        assert_eq!(copied, code::INVALID_VALUE, "a copy to {start}..{end}");
    }
    assert_eq!(seed_of(&target.contents()), Ok(OLD), "none of it was made");
    let copied = [copy(0, PAGE), copy(PAGE, 2 * PAGE)];
    assert_eq!(copied, [0, 0], "each part by itself");
    assert_eq!(seed_of(&target.contents()), Ok(3), "both parts arrive");
    assert_eq!(pin.unregister(), 0);
}
conforms!(
    a_target_that_is_page_locked_in_part_is_refused_whole,
    lie: |sim| sim.fail_nth("cuMemcpyDtoHAsync_v2", 2, code::SUCCESS),
    noticed: "a copy to 4095..4097"
);

/// Relied on by: the last ways to wait, in `src/cuda/wait.rs`.
fn waiting_for_the_stream_waits_for_its_copies(rig: &Rig) {
    a_source_may_be_rewritten_after(rig, |stream| stream_synchronize(stream.handle()));
}
conforms!(
    waiting_for_the_stream_waits_for_its_copies,
    lie: |sim| sim.fail_nth("cuStreamSynchronize", 1, code::SUCCESS),
    noticed: "the device holds other contents"
);

/// Relied on by: the last way to wait, in `src/cuda/wait.rs`.
fn waiting_for_the_context_waits_for_the_copies_of_its_streams(rig: &Rig) {
    a_source_may_be_rewritten_after(rig, |_| context_synchronize());
}
conforms!(
    waiting_for_the_context_waits_for_the_copies_of_its_streams,
    lie: |sim| sim.fail_always("cuCtxSynchronize", code::SUCCESS),
    noticed: "the device holds other contents"
);

/// Copies from page-locked memory on a stream that is held up, waits as told,
/// rewrites the source, and asserts that the device had read it.
pub(crate) fn a_source_may_be_rewritten_after(_: &Rig, wait: impl FnOnce(&Stream) -> i32) {
    let stream = Stream::new();
    let source = Pinned::filled(1 << 20, OLD);
    let target = Device::new(1 << 20, &stream);
    let gate = Gate::close(&stream);
    stream.copy(target.at(0), &source);
    let (waited, _) = gate.during(BRIEFLY, || {
        let waited = wait(&stream);
        source.fill(NEW);
        waited
    });
    assert_eq!(waited, 0, "the wait succeeds");
    gate.open();
    stream.wait();
    target.assert_holds(OLD);
}
