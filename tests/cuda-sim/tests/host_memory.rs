//! Page-locking and unlocking, and what the calls return.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{
    bench, code, host_alloc, host_bytes, host_free, out, register, register_at, unregister,
};
use cuda_sim::Session;
use cudarc::driver::sys;

const READ_ONLY: u32 = 8;

#[test]
fn an_unaligned_range_can_be_registered() {
    let _bench = bench();
    let memory = vec![0_u8; 5000];
    assert_eq!(register(&memory[3..4001]), 0);
    assert_eq!(unregister(memory[3..].as_ptr()), 0);
}

#[test]
fn overlapping_a_registered_range_is_refused() {
    let _bench = bench();
    let memory = vec![0_u8; 3000];
    assert_eq!(register(&memory[1000..2000]), 0);
    for overlap in [999..1001, 1000..2000, 1200..1300, 1999..2001, 0..3000] {
        assert_eq!(register(&memory[overlap.clone()]), 712, "{overlap:?}");
    }
    assert_eq!(unregister(memory[1000..].as_ptr()), 0);
}

#[test]
fn registering_what_was_allocated_page_locked_is_refused() {
    let _bench = bench();
    let memory = host_alloc(100);
    assert_eq!(register_at(memory.wrapping_add(10), 10, 0), 712);
    assert_eq!(host_free(memory), 0);
}

#[test]
fn two_disjoint_ranges_on_one_page_can_be_registered() {
    let _bench = bench();
    let memory = [0_u8; 200];
    assert_eq!(register(&memory[..100]), 0);
    assert_eq!(register(&memory[100..]), 0);
    assert_eq!(unregister(memory.as_ptr()), 0);
    assert_eq!(unregister(memory[100..].as_ptr()), 0);
}

#[test]
fn a_range_can_be_registered_again_once_it_is_not() {
    let _bench = bench();
    let memory = vec![0_u8; 100];
    for _ in 0..2 {
        assert_eq!(register(&memory), 0);
        assert_eq!(unregister(memory.as_ptr()), 0);
    }
}

#[test]
fn unregistering_takes_the_base_of_a_registration() {
    let _bench = bench();
    let memory = vec![0_u8; 100];
    let allocated = host_alloc(100);
    assert_eq!(register(&memory), 0);
    assert_eq!(unregister(memory[1..].as_ptr()), 1);
    assert_eq!(unregister(allocated), 1);
    assert_eq!(unregister(allocated.wrapping_add(1)), 1);
    assert_eq!(unregister(std::ptr::null()), 1);
    assert_eq!(unregister(memory.as_ptr()), 0);
    assert_eq!(unregister(memory.as_ptr()), 713);
    assert_eq!(host_free(allocated), 0);
}

#[test]
fn freeing_takes_the_base_of_an_allocation() {
    let _bench = bench();
    let memory = vec![0_u8; 100];
    assert_eq!(register(&memory), 0);
    let allocated = host_alloc(100);
    assert_eq!(host_free(memory.as_ptr().cast_mut()), 1);
    assert_eq!(host_free(allocated.wrapping_add(1)), 1);
    assert_eq!(host_free(std::ptr::null_mut()), 1);
    assert_eq!(host_free(allocated), 0);
    assert_eq!(host_free(allocated), 1);
    assert_eq!(unregister(memory.as_ptr()), 0);
}

#[test]
fn zero_bytes_can_be_allocated() {
    let _bench = bench();
    let memory = host_alloc(0);
    assert_eq!(host_free(memory), 0);
}

#[test]
fn null_and_zero_bytes_cannot_be_registered() {
    let _bench = bench();
    let memory = [0_u8; 1];
    assert_eq!(register_at(std::ptr::null(), 16, 0), 1);
    assert_eq!(register_at(memory.as_ptr(), 0, 0), 1);
    assert_eq!(register_at(memory.as_ptr(), 1, 16), 1);
}

#[test]
fn what_is_not_mapped_cannot_be_registered() {
    let _bench = bench();
    assert_eq!(register_at(16 as *const u8, 16, 0), 1);
}

#[test]
fn a_read_only_mapping_needs_its_flag() {
    static CONSTANT: [u8; 64] = [7; 64];
    let bench = bench();
    let at = |flags| register_at(CONSTANT.as_ptr(), CONSTANT.len(), flags);
    assert_eq!(at(0), 1);
    assert_eq!(at(READ_ONLY), 0);
    assert_eq!(unregister(CONSTANT.as_ptr()), 0);
    set_read_only_supported(&bench.session, 0);
    assert_eq!(at(READ_ONLY), 801);
}

fn set_read_only_supported(session: &Session, supported: i32) {
    use sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED as IT;
    session.set_attribute(IT as i32, supported);
}

#[test]
fn flags_of_an_allocation_always_say_that_it_is_mapped() {
    let _bench = bench();
    for (given, found) in [(0, 2), (1, 3), (2, 2), (4, 6), (7, 7)] {
        // SAFETY: an out pointer.
        let memory = out(|it| unsafe { sys::cuMemHostAlloc(it, 64, given) }).unwrap();
        // SAFETY: an out pointer.
        let flags = out(|it| unsafe { sys::cuMemHostGetFlags(it, memory) });
        assert_eq!(flags, Ok(found));
        assert_eq!(host_free(memory.cast()), 0);
    }
}

#[test]
fn unknown_flags_are_refused() {
    let _bench = bench();
    // SAFETY: an out pointer.
    assert_eq!(out(|it| unsafe { sys::cuMemHostAlloc(it, 64, 8) }), Err(1));
}

#[test]
fn the_device_sees_page_locked_memory_where_the_host_does() {
    let _bench = bench();
    let memory = host_alloc(64);
    let inside = memory.wrapping_add(5).cast();
    // SAFETY: an out pointer.
    let found = out(|it| unsafe { sys::cuMemHostGetDevicePointer_v2(it, inside, 0) });
    assert_eq!(found, Ok(inside as u64));
    let mut pageable = [0_u8; 1];
    let pageable = pageable.as_mut_ptr().cast();
    // SAFETY: an out pointer.
    let found = out(|it| unsafe { sys::cuMemHostGetDevicePointer_v2(it, pageable, 0) });
    assert_eq!(found, Err(1));
    assert_eq!(host_free(memory), 0);
}

#[test]
fn freed_memory_is_poisoned() {
    let _bench = bench();
    let memory = host_alloc(64);
    assert_eq!(host_free(memory), 0);
    // In quarantine until the session ends, so still there to look at.
    assert_eq!(host_bytes(memory, 64), [0xdb; 64]);
}

#[test]
fn page_locked_memory_ends_with_its_context() {
    let bench = bench();
    let memory = vec![0_u8; 100];
    let other = cudarc::driver::CudaContext::new(1).unwrap();
    let allocated = host_alloc(64);
    assert_eq!(register(&memory), 0);
    drop(other);
    bench.context.bind_to_thread().unwrap();
    assert_eq!(host_free(allocated), 1);
    assert_eq!(unregister(memory.as_ptr()), 713);
}

#[test]
fn gauges_follow_what_lives() {
    let bench = bench();
    let before = bench.session.counters();
    let memory = vec![0_u8; 100];
    let allocated = host_alloc(64);
    assert_eq!(register(&memory), 0);
    let event = common::new_event();
    let stream = bench.stream();
    let during = bench.session.counters();
    assert_eq!(
        during.live_host_allocations,
        before.live_host_allocations + 1
    );
    assert_eq!(during.live_registrations, before.live_registrations + 1);
    assert_eq!(during.live_events, before.live_events + 1);
    assert_eq!(during.live_streams, before.live_streams + 1);
    bench.session.reset_counters();
    assert_eq!(bench.session.counters(), during);
    assert_eq!(host_free(allocated), 0);
    assert_eq!(unregister(memory.as_ptr()), 0);
    // SAFETY: the simulated driver looks any handle up.
    assert_eq!(code(unsafe { sys::cuEventDestroy_v2(event) }), 0);
    drop(stream);
    assert_eq!(bench.session.counters(), before);
}
