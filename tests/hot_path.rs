//! After a thread's first lookup, a lookup neither allocates nor frees.
//!
//! An allocator counts, for each thread by itself, so that tests that run
//! beside each other do not disturb the counts.

#![allow(clippy::unwrap_used, missing_docs)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use pinned_hosts::{Reader, Region, Registry, global};

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
    let parts = [20..50, 50..80].map(|part| Region::of(&buffer[part]).unwrap());
    let _ = registry.register_all(parts);
}

#[test]
fn a_lookup_by_the_free_functions_neither_allocates_nor_frees() {
    let buffer = [0u8; 100];
    register(global(), &buffer);
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

/// Asks in every way of `registry`: of it, of `reader`, in a section, and of what
/// lists.
fn ask_in_every_way(registry: &Registry, reader: &mut Reader<'_>, buffer: &[u8]) {
    ask(buffer, |bytes| registry.is_pinned(bytes));
    ask(buffer, |bytes| registry.residency(bytes));
    ask(buffer, |bytes| registry.region_containing(bytes));
    ask(buffer, |bytes| registry.is_retiring(bytes));
    black_box(registry.live_count());
    ask(buffer, |bytes| reader.is_pinned(bytes));
    ask(buffer, |bytes| reader.residency(bytes));
    ask(buffer, |bytes| reader.region_containing(bytes));
    black_box(reader.live_count());
    let section = registry.enter();
    ask(buffer, |bytes| section.is_pinned(bytes));
    ask(buffer, |bytes| section.residency(bytes));
    ask(buffer, |bytes| section.region_containing(bytes));
    ask(buffer, |bytes| section.is_retiring(bytes));
    drop(section);
    ask(buffer, |bytes| registry.segments(bytes).count());
    ask(buffer, |bytes| reader.segments(bytes).count());
    black_box(registry.regions().count());
    black_box(reader.regions().count());
    drop(black_box(reader.clone()));
}

/// Asks by the free functions.
fn ask_the_process_wide(buffer: &[u8]) {
    ask(buffer, pinned_hosts::is_pinned);
    ask(buffer, pinned_hosts::residency);
    black_box(pinned_hosts::live_count());
}

/// What is superseded is left to a writer to free, however many publishes a
/// reader skips.
#[test]
fn lookups_after_any_number_of_publishes_neither_allocate_nor_free() {
    let buffer = [0u8; 100];
    let registry = Registry::new();
    let mut reader = registry.reader();
    ask_in_every_way(&registry, &mut reader, &buffer);
    for publishes in [1, 2, 3, 10, 1, 1, 50, 2] {
        for _ in 0..publishes {
            register(&registry, &buffer);
        }
        let counts = counts_of(|| ask_in_every_way(&registry, &mut reader, &buffer));
        assert_eq!(counts, Counts::ZERO, "after {publishes} publishes");
    }
}

#[test]
fn lookups_by_the_free_functions_after_any_number_of_publishes_neither_allocate_nor_free() {
    let buffer = [0u8; 100];
    ask_the_process_wide(&buffer);
    for publishes in [1, 2, 3, 10, 1, 1, 50, 2] {
        for _ in 0..publishes {
            register(global(), &buffer);
        }
        let counts = counts_of(|| ask_the_process_wide(&buffer));
        assert_eq!(counts, Counts::ZERO, "after {publishes} publishes");
    }
}

#[test]
fn what_was_listed_from_an_old_snapshot_is_dropped_without_a_free() {
    let buffer = [0u8; 100];
    let registry = Registry::new();
    register(&registry, &buffer);
    let listed = (registry.regions(), registry.segments(&buffer));
    for _ in 0..10 {
        register(&registry, &buffer);
    }
    assert_eq!(counts_of(|| drop(listed)), Counts::ZERO);
}

/// Each lookup may find that several writers have published since the last.
#[test]
fn lookups_beside_several_writers_neither_allocate_nor_free() {
    let buffer = [0u8; 100];
    let registry = Registry::new();
    let writers = AtomicUsize::new(2);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..2000 {
                    let registration = registry.register(Region::of(&buffer[20..50]).unwrap());
                    let other = global().register(Region::of(&buffer[20..50]).unwrap());
                    registration.unregister();
                    other.unregister();
                }
                writers.fetch_sub(1, Ordering::Relaxed);
            });
        }
        let mut reader = registry.reader();
        ask_in_every_way(&registry, &mut reader, &buffer);
        ask_the_process_wide(&buffer);
        let counts = counts_of(|| {
            while writers.load(Ordering::Relaxed) > 0 {
                ask_in_every_way(&registry, &mut reader, &buffer);
                ask_the_process_wide(&buffer);
            }
        });
        assert_eq!(counts, Counts::ZERO);
    });
}

#[test]
fn to_register_nothing_does_not_allocate() {
    let registry = Registry::new();
    let counts = counts_of(|| registry.register_all([]));
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
    let registration = registry.register(Region::of(&buffer).unwrap());
    let counts = counts_of(|| registration.unregister());
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
