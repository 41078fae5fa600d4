//! Questions that need more than a check: a process of their own, or a
//! function that not every driver has.

use std::mem;

use cuda_sim::code;
use cudarc::driver::sys::{
    self, CUmemLocation, CUmemLocationType, CUmemcpyAttributes, CUmemcpySrcAccessOrder,
};

use crate::answers::{answer, note};
use crate::calls::{code as number, context_synchronize, has, host_free, host_unregister, htod};
use crate::common::in_child;
use crate::conforms;
use crate::gate::{BRIEFLY, Gate};
use crate::memory::{Device, Host, PAGE, Pageable, Pinned, Stream};
use crate::rig::Rig;

/// Relied on by: nothing. This crate waits before it frees or unregisters,
/// since the documents do not say that the driver does.
///
/// In a process of its own: if the driver does not wait, the device reads
/// memory that is gone, and a real one may never be the same again.
#[test]
fn whether_freeing_and_unregistering_wait_for_transfers() {
    let name = "questions::whether_freeing_and_unregistering_wait_for_transfers";
    let Some(output) = in_child(name, |_| ()) else {
        let rig = Rig::new();
        freeing_under_a_transfer(|question, _, waited| {
            answer(&rig, question, if waited { "yes" } else { "no" });
        });
        return;
    };
    let text = String::from_utf8_lossy(&output.stdout);
    for question in [FREEING, UNREGISTERING] {
        let line = text.lines().find_map(|line| {
            line.strip_prefix(question)?
                .strip_prefix(": ")
                .map(str::to_owned)
        });
        let mut seen = line.unwrap_or_else(|| {
            panic!(
                "no answer to {question:?} in:\n{text}\n{}",
                String::from_utf8_lossy(&output.stderr)
            )
        });
        if !output.status.success() {
            seen += " (and the device failed)";
        }
        note(question, seen);
    }
}

const FREEING: &str = "cuMemFreeHost waits for transfers?";
const UNREGISTERING: &str = "cuMemHostUnregister waits for transfers?";

/// Calls `tell` with each question, the call's code, and whether it waited; at
/// once, as the device may not live to hear the next question.
fn freeing_under_a_transfer(mut tell: impl FnMut(&'static str, i32, bool)) {
    let stream = Stream::new();
    let target = Device::new(PAGE, &stream);
    let mut measure = |question, source: *mut u8, call: &dyn Fn() -> i32| {
        let gate = Gate::close(&stream);
        let copied = htod(target.at(0), source, PAGE, stream.handle());
        assert_eq!(copied, 0);
        let (result, at_once) = gate.during(BRIEFLY, call);
        tell(question, result, !at_once);
        gate.open();
        stream.wait();
    };
    let memory = Pageable::filled(PAGE, 1);
    let pin = memory.register(0, PAGE, 0).unwrap();
    let base = pin.base;
    measure(UNREGISTERING, base, &|| host_unregister(base));
    // Not a second time.
    mem::forget(pin);
    let pinned = Pinned::filled(PAGE, 1);
    let base = pinned.base();
    measure(FREEING, base, &|| host_free(base));
    mem::forget(pinned);
}

/// That the measurement can have either outcome.
#[test]
fn a_driver_that_waits_when_freeing_is_told_from_one_that_does_not() {
    for waits in [false, true] {
        let Some(_rig) = Rig::altered(|sim| sim.set_free_waits(waits)) else {
            return;
        };
        let mut seen = Vec::new();
        freeing_under_a_transfer(|_, result, waited| seen.push((result, waited)));
        assert_eq!(seen, [(0, waits); 2]);
    }
}

/// Seen on real drivers: it fails with 3, as before `cuInit`. (255 stands for
/// any greater code.)
///
/// Relied on by: nothing. This crate refuses work in a forked child by itself.
#[test]
fn what_a_call_returns_in_a_forked_child() {
    /// Seconds; only a child that hangs needs them.
    const PATIENCE: u32 = 20;

    let rig = Rig::new();
    // SAFETY: the child makes a call and ends, by a signal at the latest.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above.
        unsafe {
            libc::alarm(PATIENCE);
            libc::_exit(context_synchronize().min(255));
        }
    }
    let mut status = 0;
    // SAFETY: a place for the status.
    let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(ended, child, "a child could be made");
    let seen = match libc::WIFEXITED(status) {
        true => libc::WEXITSTATUS(status).to_string(),
        false => format!("none: it ended with status {status}"),
    };
    answer(&rig, "code of a call in a forked child?", seen);
}

/// Documented: all reads are done before the call returns, if no earlier work
/// of the stream uses the source. How it does that for a page-locked source
/// is not.
///
/// Relied on by: nothing yet.
fn a_source_accessed_during_the_call_may_be_rewritten_after_it(rig: &Rig) {
    let questions = [
        "DURING_API_CALL on a page-locked source waits for the stream?",
        "DURING_API_CALL on a pageable source waits for the stream?",
    ];
    if !has(c"cuMemcpyBatchAsync") {
        for question in questions {
            answer(
                rig,
                question,
                "not asked: the driver lacks cuMemcpyBatchAsync",
            );
        }
        return;
    }
    let stream = Stream::new();
    for (question, pinned) in questions.into_iter().zip([true, false]) {
        let mut seen = Vec::new();
        for len in [64, 64 << 10, 1 << 20] {
            let source: Box<dyn Host> = match pinned {
                true => Box::new(Pinned::filled(len, 1)),
                false => Box::new(Pageable::filled(len, 1)),
            };
            let target = Device::new(len, &stream);
            let gate = Gate::close(&stream);
            let (copied, at_once) = gate.during(BRIEFLY, || {
                let copied = copy_during_the_call(target.at(0), &*source, &stream);
                source.fill(2);
                copied
            });
            gate.open();
            stream.wait();
            let waited = if at_once { "no" } else { "yes" };
            if copied != 0 {
                seen.push(format!("refused with {copied} at {len} bytes"));
                continue;
            }
            seen.push(format!("{waited} at {len} bytes"));
            target.assert_holds(1);
        }
        answer(rig, question, seen.join(", "));
    }
}
conforms!(
    a_source_accessed_during_the_call_may_be_rewritten_after_it,
    lie: |sim| sim.fail_always("cuMemcpyBatchAsync", code::SUCCESS),
    noticed: "the device holds other contents"
);

fn copy_during_the_call(target: u64, source: &dyn Host, stream: &Stream) -> i32 {
    let nowhere = CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID,
        id: 0,
    };
    let mut attributes = CUmemcpyAttributes {
        srcAccessOrder: CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL,
        srcLocHint: nowhere,
        dstLocHint: nowhere,
        flags: 0,
    };
    let mut targets = [target];
    let mut sources = [source.base().addr() as u64];
    let mut sizes = [source.len()];
    let mut first_indices = [0];
    let mut failed = usize::MAX;
    // SAFETY: one copy, with one set of attributes; source and target are as
    // long as it says, and the caller keeps both until it has waited.
    number(unsafe {
        sys::cuMemcpyBatchAsync(
            targets.as_mut_ptr(),
            sources.as_mut_ptr(),
            sizes.as_mut_ptr(),
            1,
            &raw mut attributes,
            first_indices.as_mut_ptr(),
            1,
            &raw mut failed,
            stream.handle(),
        )
    })
}
