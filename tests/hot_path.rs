//! After a thread's first lookup, a lookup neither allocates nor frees.
//!
//! An allocator counts, for each thread by itself, so that tests that run
//! beside each other do not disturb the counts.

#![allow(clippy::unwrap_used, missing_docs)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;
use std::sync::Barrier;
use std::thread;

use pinned_hosts::{Region, Registry, global};

struct Counting;

/// What a thread asked of its allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Counts {
    allocations: usize,
    frees: usize,
}

impl Counts {
    const ZERO: Self = Self {
        allocations: 0,
        frees: 0,
    };
}

thread_local! {
    static COUNTS: Cell<Counts> = const { Cell::new(Counts::ZERO) };
}

fn count(change: impl FnOnce(&mut Counts)) {
    let mut counts = COUNTS.get();
    change(&mut counts);
    COUNTS.set(counts);
}

// SAFETY: every call is passed on to the system's allocator as it came. The
// counts are a thread-local without a destructor and do not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(|counts| counts.allocations += 1);
        // SAFETY: the caller promises what `System` asks.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(|counts| counts.frees += 1);
        // SAFETY: the caller promises what `System` asks.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(|counts| {
            counts.allocations += 1;
            counts.frees += 1;
        });
        // SAFETY: the caller promises what `System` asks.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What this thread asks of its allocator while `f` runs.
fn counts_of<R>(f: impl FnOnce() -> R) -> Counts {
    let before = COUNTS.get();
    black_box(f());
    let after = COUNTS.get();
    Counts {
        allocations: after.allocations - before.allocations,
        frees: after.frees - before.frees,
    }
}

/// Asks once of each kind of answer: pinned, seam, mixed, pageable, empty.
fn ask<R>(buffer: &[u8], mut ask: impl FnMut(&[u8]) -> R) {
    for part in [20..50, 40..60, 0..100, 0..20, 30..30] {
        black_box(ask(black_box(&buffer[part])));
    }
}

/// Registers `[20, 50)` and `[50, 80)` of the buffer.
fn register(registry: &Registry, buffer: &[u8]) {
    registry.register_all([20..50, 50..80].map(|part| Region::of(&buffer[part]).unwrap()));
}

#[test]
fn a_lookup_by_the_free_functions_neither_allocates_nor_frees() {
    let buffer = [0u8; 100];
    register(global(), &buffer);
    // Tests beside this one publish to other registries only: no lookup here
    // finds a newer snapshot.
    let _ = pinned_hosts::is_pinned(&buffer);
    let counts = counts_of(|| {
        for _ in 0..1000 {
            ask(&buffer, pinned_hosts::is_pinned);
            ask(&buffer, pinned_hosts::residency);
            black_box(pinned_hosts::live_count());
        }
    });
    assert_eq!(counts, Counts::ZERO);
}

#[test]
fn a_lookup_by_a_reader_neither_allocates_nor_frees() {
    let buffer = [0u8; 100];
    let registry = Registry::new();
    register(&registry, &buffer);
    let mut reader = registry.reader();
    let counts = counts_of(|| {
        for _ in 0..1000 {
            ask(&buffer, |bytes| reader.is_pinned(bytes));
            ask(&buffer, |bytes| reader.residency(bytes));
            ask(&buffer, |bytes| reader.region_containing(bytes));
            ask(&buffer, |bytes| reader.segments(bytes).take(100).count());
            black_box(reader.regions().count());
            black_box(reader.live_count());
        }
    });
    assert_eq!(counts, Counts::ZERO);
}

#[test]
fn a_lookup_by_a_registry_neither_allocates_nor_frees() {
    let buffer = [0u8; 100];
    let registry = Registry::new();
    register(&registry, &buffer);
    let _ = registry.is_pinned(&buffer);
    let counts = counts_of(|| {
        for _ in 0..1000 {
            ask(&buffer, |bytes| registry.is_pinned(bytes));
            ask(&buffer, |bytes| registry.residency(bytes));
            ask(&buffer, |bytes| registry.region_containing(bytes));
            ask(&buffer, |bytes| registry.is_retiring(bytes));
            ask(&buffer, |bytes| registry.segments(bytes).take(100).count());
            black_box(registry.regions().count());
            black_box(registry.live_count());
        }
    });
    assert_eq!(counts, Counts::ZERO);
}

/// It may free: the thread can be the last to hold its old snapshot, if it
/// skipped some.
#[test]
fn the_first_lookup_after_a_publish_does_not_allocate() {
    let buffer = [0u8; 100];
    let registry = Registry::new();
    let mut reader = registry.reader();
    for _ in 0..100 {
        register(&registry, &buffer);
        let counts = counts_of(|| reader.is_pinned(&buffer));
        assert_eq!(counts.allocations, 0);
    }
}

/// That is left to the next writer.
#[test]
fn a_lookup_after_each_publish_frees_nothing() {
    let buffer = [0u8; 100];
    let registry = Registry::new();
    let mut reader = registry.reader();
    for _ in 0..100 {
        register(&registry, &buffer);
        let counts = counts_of(|| reader.is_pinned(&buffer));
        assert_eq!(counts, Counts::ZERO);
    }
}

#[test]
fn a_lookup_that_skipped_a_publish_frees_the_old_snapshot_if_nobody_else_holds_it() {
    let buffer = [0u8; 100];
    let registry = Registry::new();
    register(&registry, &buffer);
    let mut reader = registry.reader();
    register(&registry, &buffer);
    register(&registry, &buffer);
    let counts = counts_of(|| reader.is_pinned(&buffer));
    assert!(counts.frees > 0);
}

#[test]
fn a_call_that_changes_nothing_does_not_allocate() {
    let buffer = [0u8; 100];
    let registry = Registry::new();
    register(&registry, &buffer);
    let id = registry.regions().next().unwrap().id();
    registry.unregister(id).unwrap();
    let counts = counts_of(|| {
        let _ = registry.register_all([]);
        let _ = registry.unregister(id);
    });
    assert_eq!(counts, Counts::ZERO);
}

// The allocator does count.

#[test]
fn registering_is_seen_to_allocate() {
    let buffer = [0u8; 100];
    let registry = Registry::new();
    let counts = counts_of(|| register(&registry, &buffer));
    assert!(counts.allocations > 0);
}

#[test]
fn unregistering_is_seen_to_free() {
    let buffer = [0u8; 100];
    let registry = Registry::new();
    let id = registry.register(Region::of(&buffer).unwrap());
    let counts = counts_of(|| registry.unregister(id).unwrap());
    assert!(counts.frees > 0);
}

#[test]
fn a_threads_first_lookup_is_seen_to_allocate() {
    // A thread may take over what an ended one has left, and allocate
    // nothing. So many at once that this cannot be so for all of them.
    const THREADS: usize = 100;
    let together = Barrier::new(THREADS);
    let allocations: usize = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(|| {
                    let counts = counts_of(|| pinned_hosts::is_pinned(&[1]));
                    together.wait();
                    counts.allocations
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .sum()
    });
    assert!(allocations > 0);
}
