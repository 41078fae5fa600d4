//! A program's allocator may itself ask whether memory is pinned, on each
//! allocation and on each free: also while a lookup makes its thread's reader,
//! while a writer builds the next snapshot, and while it frees old ones.
//!
//! It must not ask again from inside its own question: a thread's first lookup
//! allocates.

#![allow(clippy::unwrap_used, missing_docs)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;

use pinned_hosts::{Region, Registration, global};

static REGISTERED: [u8; 64] = [1; 64];
static NEVER_REGISTERED: [u8; 64] = [2; 64];

thread_local! {
    /// Whether this thread's allocations and frees ask.
    static ASKS: Cell<bool> = const { Cell::new(false) };
    /// How many more of its questions also publish.
    static PUBLISHES: Cell<usize> = const { Cell::new(0) };
    static ANSWERS: Cell<Answers> = const { Cell::new(Answers::NONE) };
}

/// How many times an allocator has asked, and how many times it was told what
/// is right.
#[derive(Clone, Copy, Debug)]
struct Answers {
    allocations: usize,
    frees: usize,
    right: usize,
}

impl Answers {
    const NONE: Self = Self {
        allocations: 0,
        frees: 0,
        right: 0,
    };

    fn are_right(self) -> bool {
        self.right == self.allocations + self.frees
    }
}

struct Asking;

/// Asks, if this thread is to; but not again from within, should asking
/// allocate or free something.
fn ask(count: impl FnOnce(&mut Answers)) {
    if ASKS.replace(false) {
        let right = pinned_hosts::is_pinned(&REGISTERED)
            && !pinned_hosts::is_pinned(&NEVER_REGISTERED)
            && pinned_hosts::live_count() > 0
            && global().enter().is_pinned(&REGISTERED);
        if let Some(left) = PUBLISHES.get().checked_sub(1) {
            PUBLISHES.set(left);
            publish(1);
        }
        let mut answers = ANSWERS.get();
        count(&mut answers);
        answers.right += usize::from(right);
        ANSWERS.set(answers);
        ASKS.set(true);
    }
}

// SAFETY: every call is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Asking {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ask(|answers| answers.allocations += 1);
        // SAFETY: the caller promises what `System` asks.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        ask(|answers| answers.frees += 1);
        // SAFETY: the caller promises what `System` asks.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Asking = Asking;

/// What this thread's allocator was told while `f` ran.
fn answers_in<R>(f: impl FnOnce() -> R) -> (R, Answers) {
    ANSWERS.set(Answers::NONE);
    ASKS.set(true);
    let result = f();
    ASKS.set(false);
    (result, ANSWERS.get())
}

/// `REGISTERED` in the process-wide registry, and one test at a time: a hold
/// of another test's reader would keep an old snapshot.
struct Registered {
    registration: Option<Registration<'static>>,
    _one_at_a_time: MutexGuard<'static, ()>,
}

impl Registered {
    fn new() -> Self {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let guard = ONE_AT_A_TIME.lock();
        Self {
            _one_at_a_time: guard.unwrap_or_else(PoisonError::into_inner),
            registration: Some(global().register(Region::of(&REGISTERED).unwrap())),
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.registration.take().unwrap().unregister();
    }
}

#[test]
fn a_threads_first_lookup_may_come_from_inside_an_allocation() {
    let _registered = Registered::new();
    thread::spawn(|| {
        let (vec, answers) = answers_in(|| Vec::<u8>::with_capacity(10));
        assert!(vec.is_empty());
        assert_eq!(answers.allocations, 1);
        assert!(answers.are_right(), "{answers:?}");
        assert!(pinned_hosts::is_pinned(&REGISTERED));
    })
    .join()
    .unwrap();
}

/// A thread may take over what an ended one has left, and allocate nothing. So
/// many at once that this cannot be so for all of them.
#[test]
fn a_threads_first_lookup_may_allocate_through_an_allocator_that_looks_up() {
    let _registered = Registered::new();
    const THREADS: usize = 50;
    let together = std::sync::Barrier::new(THREADS);
    let allocations: usize = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(|| {
                    let (is_pinned, answers) = answers_in(|| pinned_hosts::is_pinned(&REGISTERED));
                    together.wait();
                    assert!(is_pinned);
                    assert!(answers.are_right(), "{answers:?}");
                    answers.allocations
                })
            })
            .collect();
        threads.into_iter().map(|it| it.join().unwrap()).sum()
    });
    assert!(allocations > 0);
}

/// From a tree of one node up to three levels, and down again.
#[test]
fn a_writer_may_allocate_and_free_through_an_allocator_that_looks_up() {
    let _registered = Registered::new();
    let buffer = vec![0u8; 3000];
    let (_, answers) = answers_in(|| {
        let each = buffer.chunks(1).map(|byte| Region::of(byte).unwrap());
        let mut registrations = global().register_all(each.clone().take(2500));
        registrations.extend(each.skip(2500).map(|region| global().register(region)));
        assert!(pinned_hosts::is_pinned(&buffer));
        for registration in registrations {
            registration.unregister();
        }
    });
    assert!(answers.allocations > 500 && answers.frees > 500);
    assert!(answers.are_right(), "{answers:?}");
    assert!(!pinned_hosts::is_pinned(&buffer));
}

/// What a thread held until it exited is left to a writer to free.
#[test]
fn a_writer_may_free_what_a_reader_held_through_an_allocator_that_looks_up() {
    let _registered = Registered::new();
    let buffer = vec![0u8; 3000];
    let each = buffer.chunks(1).map(|byte| Region::of(byte).unwrap());
    let registrations = global().register_all(each);

    let (looked_up, wait_for_lookup) = mpsc::channel();
    let (let_go, wait_for_main) = mpsc::channel::<()>();
    let thread = thread::spawn(move || {
        assert!(pinned_hosts::is_pinned(&REGISTERED));
        looked_up.send(()).unwrap();
        let _ = wait_for_main.recv();
    });
    wait_for_lookup.recv().unwrap();
    for registration in registrations {
        registration.unregister();
    }
    let _ = pinned_hosts::live_count();
    let_go.send(()).unwrap();
    thread.join().unwrap();

    // The frees of these publishes alone are some ten.
    let (_, answers) = answers_in(|| publish(4));
    // Each of some hundred nodes is two frees.
    assert!(answers.frees > 150, "{answers:?}");
    assert!(answers.are_right(), "{answers:?}");
}

/// Registers a byte and unregisters it, so many times.
fn publish(times: usize) {
    static BYTE: [u8; 1] = [3];
    for _ in 0..times {
        let registration = global().register(Region::of(&BYTE).unwrap());
        registration.unregister();
    }
}

/// Not each time: a publish that always finds another one of the same thread in
/// its way would never end.
#[test]
fn an_allocator_may_register_now_and_then_while_a_writer_allocates_and_frees() {
    let _registered = Registered::new();
    let buffer = vec![0u8; 3000];
    let each = buffer.chunks(1).map(|byte| Region::of(byte).unwrap());
    let registrations = global().register_all(each);
    // Holds an old snapshot, so that to let go of it leaves work for the writers.
    let reader = global().reader();
    for registration in registrations {
        registration.unregister();
    }
    drop(reader);
    PUBLISHES.set(100);
    let (_, answers) = answers_in(|| publish(4));
    assert_eq!(PUBLISHES.get(), 0);
    assert!(answers.frees > 0, "{answers:?}");
    assert!(answers.are_right(), "{answers:?}");
    assert_eq!(pinned_hosts::live_count(), 1);
}
