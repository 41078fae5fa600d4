//! A program's allocator may itself ask whether memory is pinned, on each
//! allocation and on each free: also while a lookup lets go of an old snapshot,
//! makes its thread's reader, or while a writer builds the next snapshot.

#![allow(clippy::unwrap_used, missing_docs)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;

use pinned_hosts::{Region, RegionId, global};

static REGISTERED: [u8; 64] = [1; 64];
static NEVER_REGISTERED: [u8; 64] = [2; 64];

thread_local! {
    /// Whether this thread's allocations and frees ask.
    static ASKS: Cell<bool> = const { Cell::new(false) };
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
            && pinned_hosts::live_count() > 0;
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
    id: RegionId,
    _one_at_a_time: MutexGuard<'static, ()>,
}

impl Registered {
    fn new() -> Self {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let guard = ONE_AT_A_TIME.lock();
        Self {
            _one_at_a_time: guard.unwrap_or_else(PoisonError::into_inner),
            id: global().register(Region::of(&REGISTERED).unwrap()),
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let _ = global().unregister(self.id);
    }
}

#[test]
fn a_lookup_from_inside_a_lookup_is_right() {
    let _registered = Registered::new();
    let buffer = [0u8; 64];
    assert!(pinned_hosts::is_pinned(&REGISTERED));

    // The registry holds the snapshot before the last. After two publishes,
    // nobody but this thread's reader holds its own: the next lookup frees it.
    let other = global().register(Region::of(&buffer).unwrap());
    let id = global().register(Region::of(&buffer).unwrap());
    let (is_pinned, answers) = answers_in(|| pinned_hosts::is_pinned(&buffer));
    assert!(is_pinned);
    assert!(answers.frees > 0, "the lookup freed the old snapshot");
    assert!(answers.are_right(), "{answers:?}");
    global().unregister(id).unwrap();
    global().unregister(other).unwrap();
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
        let mut ids = global().register_all(each.clone().take(2500));
        ids.extend(each.skip(2500).map(|region| global().register(region)));
        assert!(pinned_hosts::is_pinned(&buffer));
        for id in ids {
            global().unregister(id).unwrap();
        }
    });
    assert!(answers.allocations > 500 && answers.frees > 500);
    assert!(answers.are_right(), "{answers:?}");
    assert!(!pinned_hosts::is_pinned(&buffer));
}

/// The reader goes while the thread exits, and with it the snapshot: its frees
/// ask when there is no reader any more.
#[test]
fn a_thread_that_exits_with_the_last_hold_on_a_snapshot_may_ask_while_it_frees_it() {
    /// Of two, the one that is dropped first has the allocator ask, and the
    /// other one sends what it was told.
    struct Sends(Cell<Option<mpsc::Sender<Answers>>>);

    impl Drop for Sends {
        fn drop(&mut self) {
            let is_last = ASKS.replace(false);
            let send = self.0.take().unwrap();
            if is_last {
                let _ = send.send(ANSWERS.get());
            } else {
                drop(send);
                ASKS.set(true);
            }
        }
    }

    thread_local! {
        static FIRST: Sends = const { Sends(Cell::new(None)) };
        static LAST: Sends = const { Sends(Cell::new(None)) };
    }

    let _registered = Registered::new();
    let buffer = vec![0u8; 3000];
    let each = buffer.chunks(1).map(|byte| Region::of(byte).unwrap());
    let ids = global().register_all(each);

    let (send, answers) = mpsc::channel();
    let (looked_up, wait_for_lookup) = mpsc::channel();
    let (let_go, wait_for_main) = mpsc::channel::<()>();
    let thread = thread::spawn(move || {
        // One is dropped before the thread's reader, and one after it.
        FIRST.with(|it| it.0.set(Some(send.clone())));
        assert!(pinned_hosts::is_pinned(&REGISTERED));
        LAST.with(|it| it.0.set(Some(send)));
        looked_up.send(()).unwrap();
        let _ = wait_for_main.recv();
    });
    wait_for_lookup.recv().unwrap();
    for id in ids {
        global().unregister(id).unwrap();
    }
    let _ = pinned_hosts::live_count();
    let_go.send(()).unwrap();
    thread.join().unwrap();

    let answers = answers.recv().unwrap();
    // Each of some hundred nodes is two frees.
    assert!(answers.frees > 150, "{answers:?}");
    assert!(answers.are_right(), "{answers:?}");
}
