//! The functions through which a test steers the driver. The other end is
//! [`control`](crate::control).

use super::faults::Way;
use super::schedule::{Point, settle};
use super::settings::{Pageable, Settings, Timing};
use super::{TALLY, call, context, faults, process, state, user_object};
use crate::counters::Counters;
use crate::wire;
use std::ffi::{CStr, c_char};
use std::time::Duration;

/// Which control functions this object has.
#[unsafe(no_mangle)]
extern "C" fn cuda_sim_version() -> u32 {
    wire::VERSION
}

/// Carries out what is outstanding, then forgets all settings, faults, holds,
/// captures, broken contexts and counts. In a forked child, which has no
/// threads to carry anything out, it does nothing.
#[unsafe(no_mangle)]
extern "C" fn cuda_sim_reset() {
    if process::is_forked_child() {
        return;
    }
    faults::clear();
    drain();
    let mut state = state::lock();
    state.holds.clear();
    state.settings = Settings::default();
    state.abandon_captures();
    state.mend_contexts();
    state.nudge_all();
    drop(state);
    user_object::set_held(false);
    // Those of the captures.
    user_object::drain();
    reset_counters();
    call::reset_calls();
    call::set_counting(true);
}

/// Sets the timing; `nanoseconds` is the delay, if it is one.
#[unsafe(no_mangle)]
extern "C" fn cuda_sim_set_timing(kind: u32, nanoseconds: u64) {
    let mut state = state::lock();
    state.settings.timing = match kind {
        wire::IMMEDIATE => Timing::Immediate,
        wire::DELAY => Timing::Delay(Duration::from_nanos(nanoseconds)),
        _ => Timing::UntilWaited,
    };
    state.nudge_all();
}

/// Sets what kind of device all devices are.
#[unsafe(no_mangle)]
extern "C" fn cuda_sim_set_device(kind: u32) {
    state::lock().settings.set_device(kind);
}

/// Sets the value of a device attribute.
#[unsafe(no_mangle)]
extern "C" fn cuda_sim_set_attribute(attribute: i32, value: i32) {
    state::lock().settings.attributes.insert(attribute, value);
}

/// Sets when pageable sources are read.
#[unsafe(no_mangle)]
extern "C" fn cuda_sim_set_pageable(kind: u32) {
    state::lock().settings.pageable = match kind {
        wire::STAGED_AFTER_STREAM_WAIT => Pageable::StagedAfterStreamWait,
        wire::READ_LATE => Pageable::ReadLate,
        _ => Pageable::StagedAtCall,
    };
}

/// Sets whether pageable targets are written late.
#[unsafe(no_mangle)]
extern "C" fn cuda_sim_set_pageable_written_late(late: bool) {
    state::lock().settings.write_late = late;
}

/// Sets whether freeing and unregistering wait for all work.
#[unsafe(no_mangle)]
extern "C" fn cuda_sim_set_free_waits(waits: bool) {
    state::lock().settings.free_waits = waits;
}

/// Sets whether late sources are compared with what they were.
#[unsafe(no_mangle)]
extern "C" fn cuda_sim_set_torn_detection(on: bool) {
    state::lock().settings.detect_torn = on;
}

/// Sets whether calls are counted.
#[unsafe(no_mangle)]
extern "C" fn cuda_sim_set_call_counts(on: bool) {
    call::set_counting(on);
}

/// Puts a hold on all streams in force and returns its number.
#[unsafe(no_mangle)]
extern "C" fn cuda_sim_hold() -> u64 {
    let mut state = state::lock();
    let hold = state.new_handle() as u64;
    state.holds.insert(hold, None);
    user_object::set_held(true);
    hold
}

/// Puts a hold on one stream in force and returns its number, or 0 if no call
/// could use the stream.
#[unsafe(no_mangle)]
extern "C" fn cuda_sim_hold_stream(stream: usize) -> u64 {
    let mut state = state::lock();
    let Ok(stream) = state.stream(stream) else {
        return 0;
    };
    let hold = state.new_handle() as u64;
    state.holds.insert(hold, Some(stream));
    hold
}

/// Ends a hold. One that a reset has ended before is ignored, and so is all in
/// a forked child.
#[unsafe(no_mangle)]
extern "C" fn cuda_sim_release(hold: u64) {
    if process::is_forked_child() {
        return;
    }
    let mut state = state::lock();
    state.holds.remove(&hold);
    user_object::set_held(state.holds.values().any(Option::is_none));
    state.nudge_all();
}

/// Breaks the calling thread's current context. Returns whether there is one.
#[unsafe(no_mangle)]
extern "C" fn cuda_sim_break_context(code: i32) -> bool {
    context::break_current(code)
}

/// Orders a fault: the `nth` call from now, or with 0 every call, returns
/// `code`.
///
/// # Safety
///
/// `call` is a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuda_sim_fail(call: *const c_char, nth: u64, code: i32, way: u32) {
    // SAFETY: passed on to the caller.
    let call = unsafe { CStr::from_ptr(call) };
    let way = match way {
        wire::AFTER_ACTING => Way::AfterActing,
        wire::BREAKING => Way::Breaking,
        _ => Way::Instead,
    };
    let due = faults::Due { code, way };
    faults::order(call.to_string_lossy().into_owned(), nth, due);
}

/// Forgets all faults.
#[unsafe(no_mangle)]
extern "C" fn cuda_sim_clear_faults() {
    faults::clear();
}

/// How often a function was called.
///
/// # Safety
///
/// `call` is a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuda_sim_calls(call: *const c_char) -> u64 {
    // SAFETY: passed on to the caller.
    let call = unsafe { CStr::from_ptr(call) };
    call::calls(&call.to_string_lossy())
}

/// Reads the counters.
///
/// # Safety
///
/// `counters` is valid for writing.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuda_sim_counters(counters: *mut Counters) {
    // SAFETY: passed on to the caller.
    unsafe { counters.write(TALLY.read()) }
}

/// Sets the counters to zero.
#[unsafe(no_mangle)]
extern "C" fn cuda_sim_reset_counters() {
    reset_counters();
}

/// Carries out what is outstanding, whatever hold or timing is in force. In a
/// forked child it does nothing.
#[unsafe(no_mangle)]
extern "C" fn cuda_sim_drain() {
    if !process::is_forked_child() {
        drain();
    }
}

fn reset_counters() {
    TALLY.reset();
    state::lock().host.purge();
}

fn drain() {
    let mut state = state::lock();
    state.drains += 1;
    state.nudge_all();
    let ids: Vec<usize> = state.streams.keys().copied().collect();
    let ends: Vec<Point> = ids.into_iter().map(|id| state.end_of(id)).collect();
    settle(state, &ends).drains -= 1;
    user_object::drain();
}
