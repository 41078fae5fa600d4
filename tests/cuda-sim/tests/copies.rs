//! What copies read and write, and when.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{
    bench, code, device_alloc, device_bytes, dtoh, host_alloc, host_bytes, host_free, htod,
    htod_sync, null, overwrite, register, register_at, stream_wait, unregister,
};
use cuda_sim::{DeviceKind, Pageable};
use cudarc::driver::sys;

#[test]
fn a_page_locked_source_is_read_late() {
    let bench = bench();
    let stream = bench.stream();
    let source = host_alloc(64);
    overwrite(source, 64, 5);
    let target = device_alloc(64);
    assert_eq!(htod(target, source, 64, stream.cu_stream()), 0);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    let counters = bench.session.counters();
    assert_eq!((counters.late_reads, counters.torn_transfers), (1, 0));
    assert_eq!(device_bytes(target, 64), [5; 64]);
}

#[test]
fn rewriting_under_dma_is_counted_as_torn() {
    let bench = bench();
    let stream = bench.stream();
    let source = host_alloc(1 << 20);
    let target = device_alloc(1 << 20);
    assert_eq!(htod(target, source, 1 << 20, stream.cu_stream()), 0);
    overwrite(source.wrapping_add((1 << 20) - 1), 1, 1);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    let counters = bench.session.counters();
    assert_eq!((counters.torn_transfers, counters.dead_reads), (1, 0));
}

#[test]
fn torn_transfers_are_not_looked_for_when_that_is_off() {
    let bench = bench();
    let stream = bench.stream();
    bench.session.set_torn_detection(false);
    let source = host_alloc(64);
    let target = device_alloc(64);
    assert_eq!(htod(target, source, 64, stream.cu_stream()), 0);
    overwrite(source, 64, 1);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    let counters = bench.session.counters();
    assert_eq!((counters.late_reads, counters.torn_transfers), (1, 0));
    assert_eq!(device_bytes(target, 64), [1; 64]);
}

#[test]
fn freeing_under_dma_is_counted_as_dead_read() {
    let bench = bench();
    let stream = bench.stream();
    let source = host_alloc(64);
    let target = device_alloc(64);
    assert_eq!(htod(target, source, 64, stream.cu_stream()), 0);
    assert_eq!(host_free(source), 0);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    let counters = bench.session.counters();
    assert_eq!((counters.dead_reads, counters.torn_transfers), (1, 1));
    assert_eq!(device_bytes(target, 64), [0xdb; 64]);
}

#[test]
fn freeing_after_the_wait_is_not() {
    let bench = bench();
    let stream = bench.stream();
    let source = host_alloc(64);
    assert_eq!(htod(device_alloc(64), source, 64, stream.cu_stream()), 0);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    assert_eq!(host_free(source), 0);
    assert_eq!(bench.session.counters().dead_reads, 0);
}

#[test]
fn memory_that_a_late_transfer_needs_survives_a_reset_of_the_counters() {
    let bench = bench();
    let stream = bench.stream();
    let source = host_alloc(1 << 20);
    let target = device_alloc(1 << 20);
    assert_eq!(htod(target, source, 1 << 20, stream.cu_stream()), 0);
    assert_eq!(host_free(source), 0);
    bench.session.reset_counters();
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    assert_eq!(bench.session.counters().dead_reads, 1);
}

#[test]
fn unregistering_under_dma_is_counted_as_dead_read() {
    let bench = bench();
    let stream = bench.stream();
    let source = vec![1_u8; 64];
    assert_eq!(register(&source), 0);
    assert_eq!(
        htod(device_alloc(64), source.as_ptr(), 64, stream.cu_stream()),
        0
    );
    assert_eq!(unregister(source.as_ptr()), 0);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    let counters = bench.session.counters();
    assert_eq!((counters.dead_reads, counters.torn_transfers), (1, 0));
}

#[test]
fn unmapping_under_dma_is_a_dead_read_and_not_a_crash() {
    let bench = bench();
    let stream = bench.stream();
    let mapping = Mapping::new(4 * PAGE);
    assert_eq!(register_at(mapping.0, 4 * PAGE, 0), 0);
    let target = device_alloc(4 * PAGE);
    assert_eq!(htod(target, mapping.0, 4 * PAGE, stream.cu_stream()), 0);
    let base = mapping.0;
    drop(mapping);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    assert_eq!(bench.session.counters().dead_reads, 1);
    assert_eq!(unregister(base), 0);
}

#[test]
fn freeing_waits_when_told_to() {
    let bench = bench();
    let stream = bench.stream();
    bench.session.set_free_waits(true);
    let source = host_alloc(64);
    let memory = vec![1_u8; 64];
    assert_eq!(register(&memory), 0);
    let target = device_alloc(64);
    assert_eq!(htod(target, source, 64, stream.cu_stream()), 0);
    assert_eq!(host_free(source), 0);
    assert_eq!(htod(target, memory.as_ptr(), 64, stream.cu_stream()), 0);
    assert_eq!(unregister(memory.as_ptr()), 0);
    let counters = bench.session.counters();
    assert_eq!((counters.late_reads, counters.dead_reads), (2, 0));
}

#[test]
fn a_pageable_source_is_staged_at_the_call() {
    let bench = bench();
    let stream = bench.stream();
    let mut source = [1_u8; 64];
    let target = device_alloc(64);
    assert_eq!(htod(target, source.as_ptr(), 64, stream.cu_stream()), 0);
    source.fill(2);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    let counters = bench.session.counters();
    assert_eq!((counters.staged_copies, counters.late_reads), (1, 0));
    assert_eq!(device_bytes(target, 64), [1; 64]);
}

#[test]
fn staging_at_the_call_waits_for_nothing() {
    let bench = bench();
    assert_eq!(transfers_before_a_staged_copy_returns(&bench), 0);
}

#[test]
fn staging_after_the_stream_waits_for_what_the_stream_has() {
    let bench = bench();
    bench.session.set_pageable(Pageable::StagedAfterStreamWait);
    assert_eq!(transfers_before_a_staged_copy_returns(&bench), 1);
}

fn transfers_before_a_staged_copy_returns(bench: &common::Bench) -> u64 {
    let stream = bench.stream();
    let memory = device_alloc(64);
    let earlier = host_alloc(64);
    assert_eq!(dtoh(earlier, memory, 64, stream.cu_stream()), 0);
    assert_eq!(htod(memory, [1; 64].as_ptr(), 64, stream.cu_stream()), 0);
    bench.session.counters().d2h_transfers
}

#[test]
fn a_pageable_source_is_read_late_when_set() {
    let bench = bench();
    let stream = bench.stream();
    bench.session.set_pageable(Pageable::ReadLate);
    let mut source = [1_u8; 64];
    let target = device_alloc(64);
    assert_eq!(htod(target, source.as_ptr(), 64, stream.cu_stream()), 0);
    source.fill(2);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    assert_eq!(bench.session.counters().torn_transfers, 1);
    assert_eq!(device_bytes(target, 64), [2; 64]);
}

#[test]
fn unmapping_a_pageable_source_that_is_read_late_is_a_dead_read() {
    let bench = bench();
    let stream = bench.stream();
    bench.session.set_pageable(Pageable::ReadLate);
    let mapping = Mapping::new(PAGE);
    assert_eq!(
        htod(device_alloc(PAGE), mapping.0, PAGE, stream.cu_stream()),
        0
    );
    drop(mapping);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    assert_eq!(bench.session.counters().dead_reads, 1);
}

#[test]
fn kinds_of_devices_differ_in_attributes_and_in_when_they_read() {
    for (kind, attributes, late) in [
        (DeviceKind::Discrete, [0, 0, 0], 0),
        (DeviceKind::Coherent, [1, 1, 0], 1),
        (DeviceKind::Integrated, [0, 0, 1], 1),
        (DeviceKind::Hmm, [1, 0, 0], 0),
    ] {
        let bench = bench();
        bench.session.set_device(kind);
        use sys::CUdevice_attribute::*;
        let found = [
            CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS,
            CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
            CU_DEVICE_ATTRIBUTE_INTEGRATED,
        ]
        .map(|attribute| bench.context.attribute(attribute).unwrap());
        assert_eq!(found, attributes, "{kind:?}");
        let stream = bench.stream();
        assert_eq!(
            htod(device_alloc(8), [1; 8].as_ptr(), 8, stream.cu_stream()),
            0
        );
        assert_eq!(stream_wait(stream.cu_stream()), 0);
        assert_eq!(bench.session.counters().late_reads, late, "{kind:?}");
    }
}

#[test]
fn a_range_that_is_page_locked_in_part_is_refused() {
    let bench = bench();
    let stream = bench.stream();
    let memory = vec![0_u8; 4096];
    assert_eq!(register_at(memory[100..].as_ptr(), 1000, 0), 0);
    let target = device_alloc(4096);
    let copy = |from: usize, to: usize| {
        htod(
            target,
            memory[from..].as_ptr(),
            to - from,
            stream.cu_stream(),
        )
    };
    assert_eq!(copy(99, 101), 1);
    assert_eq!(copy(1099, 1101), 1);
    assert_eq!(copy(0, 4096), 1);
    assert_eq!(copy(0, 100), 0);
    assert_eq!(copy(100, 1100), 0);
    assert_eq!(copy(1100, 4096), 0);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    assert_eq!(bench.session.counters().late_reads, 1);
    assert_eq!(
        dtoh(
            memory[99..].as_ptr().cast_mut(),
            target,
            2,
            stream.cu_stream()
        ),
        1
    );
    assert_eq!(unregister(memory[100..].as_ptr()), 0);
}

#[test]
fn a_range_over_two_adjacent_registrations_is_refused() {
    let bench = bench();
    let stream = bench.stream();
    let memory = [0_u8; 200];
    assert_eq!(register(&memory[..100]), 0);
    assert_eq!(register(&memory[100..]), 0);
    let target = device_alloc(200);
    assert_eq!(htod(target, memory.as_ptr(), 200, stream.cu_stream()), 1);
    assert_eq!(htod_sync(target, memory.as_ptr(), 200), 1);
    assert_eq!(htod(target, memory.as_ptr(), 100, stream.cu_stream()), 0);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    assert_eq!(unregister(memory.as_ptr()), 0);
    assert_eq!(unregister(memory[100..].as_ptr()), 0);
}

#[test]
fn null_is_refused_unless_nothing_is_copied_from_it() {
    let bench = bench();
    let stream = bench.stream();
    let target = device_alloc(16);
    assert_eq!(htod(target, std::ptr::null(), 16, stream.cu_stream()), 1);
    assert_eq!(htod(target, std::ptr::null(), 0, stream.cu_stream()), 0);
    assert_eq!(bench.session.counters().pending_operations, 0);
}

#[test]
fn a_device_address_is_no_host_address() {
    let bench = bench();
    let stream = bench.stream();
    let memory = device_alloc(64);
    let mistaken = memory as *mut u8;
    assert_eq!(htod(memory, mistaken, 64, stream.cu_stream()), 1);
    assert_eq!(dtoh(mistaken, memory, 64, stream.cu_stream()), 1);
}

#[test]
fn copies_past_the_end_of_device_memory_are_refused() {
    let bench = bench();
    let stream = bench.stream();
    let memory = device_alloc(64);
    let neighbour = device_alloc(64);
    assert!(neighbour > memory);
    let mut host = [0_u8; 65];
    let cu_stream = stream.cu_stream();
    assert_eq!(htod(memory, host.as_ptr(), 65, cu_stream), 1);
    assert_eq!(htod(memory + 1, host.as_ptr(), 64, cu_stream), 1);
    assert_eq!(htod(memory + 64, host.as_ptr(), 1, cu_stream), 1);
    assert_eq!(dtoh(host.as_mut_ptr(), memory, 65, cu_stream), 1);
    // SAFETY: the simulated driver looks any address up.
    let fill = |bytes| code(unsafe { sys::cuMemsetD8Async(memory, 0, bytes, cu_stream) });
    assert_eq!((fill(64), fill(65)), (0, 1));
    // SAFETY: as above.
    let copy =
        |bytes| code(unsafe { sys::cuMemcpyDtoDAsync_v2(neighbour, memory, bytes, cu_stream) });
    assert_eq!((copy(64), copy(65)), (0, 1));
    // SAFETY: as above.
    assert_eq!(code(unsafe { sys::cuMemFree_v2(neighbour) }), 0);
    assert_eq!(
        (copy(64), htod(neighbour, host.as_ptr(), 1, cu_stream)),
        (1, 1)
    );
}

#[test]
fn device_memory_that_is_freed_under_an_operation_is_counted() {
    let bench = bench();
    let stream = bench.stream();
    let memory = device_alloc(64);
    assert_eq!(htod(memory, [1; 64].as_ptr(), 64, stream.cu_stream()), 0);
    // SAFETY: the simulated driver looks any address up.
    assert_eq!(code(unsafe { sys::cuMemFree_v2(memory) }), 0);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    assert_eq!(bench.session.counters().dead_device_accesses, 1);
}

#[test]
fn device_memory_that_is_freed_in_stream_order_is_not() {
    let bench = bench();
    let stream = bench.stream();
    let memory = stream.clone_htod(&[1_u8; 64]).unwrap();
    drop(memory);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    let counters = bench.session.counters();
    assert_eq!(
        (counters.h2d_transfers, counters.dead_device_accesses),
        (1, 0)
    );
}

#[test]
fn fresh_device_memory_is_not_zero() {
    let _bench = bench();
    assert_ne!(device_bytes(device_alloc(64), 64), [0; 64]);
}

#[test]
fn writing_pageable_memory_blocks() {
    let bench = bench();
    let stream = bench.stream();
    let memory = device_alloc(64);
    assert_eq!(htod(memory, [6; 64].as_ptr(), 64, stream.cu_stream()), 0);
    let mut target = [0_u8; 64];
    assert_eq!(dtoh(target.as_mut_ptr(), memory, 64, stream.cu_stream()), 0);
    assert_eq!(target, [6; 64]);
    let counters = bench.session.counters();
    assert_eq!((counters.d2h_transfers, counters.late_writes), (1, 0));
}

#[test]
fn writing_pageable_memory_blocks_on_every_kind_of_device() {
    for kind in [
        DeviceKind::Coherent,
        DeviceKind::Integrated,
        DeviceKind::Hmm,
    ] {
        let bench = bench();
        bench.session.set_device(kind);
        let stream = bench.stream();
        let mut target = [0_u8; 64];
        let pointer = target.as_mut_ptr();
        assert_eq!(dtoh(pointer, device_alloc(64), 64, stream.cu_stream()), 0);
        assert_eq!(bench.session.counters().d2h_transfers, 1, "{kind:?}");
    }
}

#[test]
fn pageable_memory_is_written_late_when_set() {
    let bench = bench();
    let stream = bench.stream();
    let memory = device_alloc(64);
    assert_eq!(htod(memory, [6; 64].as_ptr(), 64, stream.cu_stream()), 0);
    bench.session.set_pageable_written_late(true);
    let target = Mapping::new(PAGE);
    assert_eq!(dtoh(target.0, memory, 64, stream.cu_stream()), 0);
    assert_eq!(host_bytes(target.0, 64), [0; 64]);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    assert_eq!(host_bytes(target.0, 64), [6; 64]);
    // The synchronous call waits, whatever is set.
    assert_eq!(device_bytes(memory, 64), [6; 64]);
    let counters = bench.session.counters();
    assert_eq!((counters.late_writes, counters.dead_writes), (1, 0));
}

#[test]
fn unmapping_pageable_memory_that_is_written_late_is_a_dead_write() {
    let bench = bench();
    let stream = bench.stream();
    bench.session.set_pageable_written_late(true);
    let target = Mapping::new(PAGE);
    assert_eq!(dtoh(target.0, device_alloc(64), 64, stream.cu_stream()), 0);
    drop(target);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    let counters = bench.session.counters();
    assert_eq!((counters.late_writes, counters.dead_writes), (1, 1));
}

#[test]
fn writing_page_locked_memory_happens_late() {
    let bench = bench();
    let stream = bench.stream();
    let memory = device_alloc(64);
    assert_eq!(htod(memory, [6; 64].as_ptr(), 64, stream.cu_stream()), 0);
    let target = host_alloc(64);
    assert_eq!(dtoh(target, memory, 64, stream.cu_stream()), 0);
    assert_eq!(host_bytes(target, 64), [0; 64]);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    assert_eq!(host_bytes(target, 64), [6; 64]);
    let counters = bench.session.counters();
    assert_eq!((counters.late_writes, counters.dead_writes), (1, 0));
}

#[test]
fn unregistering_under_a_write_is_counted_and_the_write_is_not_done() {
    let bench = bench();
    let stream = bench.stream();
    let target = vec![0_u8; 64];
    assert_eq!(register(&target), 0);
    assert_eq!(
        dtoh(
            target.as_ptr().cast_mut(),
            device_alloc(64),
            64,
            stream.cu_stream()
        ),
        0
    );
    assert_eq!(unregister(target.as_ptr()), 0);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    assert_eq!(bench.session.counters().dead_writes, 1);
    assert_eq!(target, [0; 64]);
}

#[test]
fn a_synchronous_copy_is_done_when_it_returns_and_never_late() {
    let bench = bench();
    let source = host_alloc(64);
    overwrite(source, 64, 3);
    let target = device_alloc(64);
    assert_eq!(htod_sync(target, source, 64), 0);
    let counters = bench.session.counters();
    assert_eq!((counters.h2d_transfers, counters.late_reads), (1, 0));
    assert_eq!(host_free(source), 0);
    assert_eq!(device_bytes(target, 64), [3; 64]);
}

#[test]
fn a_batch_reads_its_sources_in_the_order_that_it_is_given() {
    const STREAM: u32 = 1;
    const DURING_CALL: u32 = 2;
    for (order, seen) in [(STREAM, 2), (DURING_CALL, 1)] {
        let bench = bench();
        let stream = bench.stream();
        let mut source = [1_u8; 64];
        let target = device_alloc(64);
        assert_eq!(
            batch(target, source.as_ptr(), 64, order, stream.cu_stream()),
            0
        );
        source.fill(2);
        std::hint::black_box(&mut source);
        assert_eq!(stream_wait(stream.cu_stream()), 0);
        assert_eq!(device_bytes(target, 64), [seen; 64]);
    }
}

#[test]
fn a_batch_refuses_null_nothing_and_the_legacy_stream() {
    let bench = bench();
    let stream = bench.stream();
    let target = device_alloc(64);
    let source = [0_u8; 64];
    let cu_stream = stream.cu_stream();
    assert_eq!(batch(target, std::ptr::null(), 64, 1, cu_stream), 1);
    assert_eq!(batch(target, source.as_ptr(), 0, 1, cu_stream), 1);
    assert_eq!(batch(target, source.as_ptr(), 64, 0, cu_stream), 1);
    assert_eq!(batch(target, source.as_ptr(), 64, 1, null().cast()), 1);
}

fn batch(target: u64, source: *const u8, bytes: usize, order: u32, stream: sys::CUstream) -> i32 {
    #[repr(C)]
    struct Attributes([u32; 6]);
    let mut attributes = Attributes([order, 0, 0, 0, 0, 0]);
    assert_eq!(
        size_of::<Attributes>(),
        size_of::<sys::CUmemcpyAttributes>()
    );
    let (mut target, mut source, mut bytes) = (target, source as u64, bytes);
    let (mut first, mut failed) = (0_usize, 0_usize);
    // SAFETY: one of each, all valid; the source as the tests say.
    code(unsafe {
        sys::cuMemcpyBatchAsync(
            &raw mut target,
            &raw mut source,
            &raw mut bytes,
            1,
            (&raw mut attributes).cast(),
            &raw mut first,
            1,
            &raw mut failed,
            stream,
        )
    })
}

const PAGE: usize = 4096;

/// Memory that can be taken from under a device.
struct Mapping(*mut u8, usize);

impl Mapping {
    fn new(bytes: usize) -> Self {
        // SAFETY: a mapping of its own, wherever there is room.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(base, libc::MAP_FAILED);
        Self(base.cast(), bytes)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: its own mapping.
        assert_eq!(unsafe { libc::munmap(self.0.cast(), self.1) }, 0);
    }
}
