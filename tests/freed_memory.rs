//! No lookup reads a snapshot that was freed under it.
//!
//! The allocator overwrites what is freed, and keeps it for a while from being
//! used again, so that whoever reads it crashes, or is told that there is no
//! region. And the questions take long: a slice over thousands of regions that
//! touch is gone through region by region, while another thread publishes and
//! so lets go of what was published before.

#![allow(clippy::unwrap_used, missing_docs)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::{Cell, OnceCell};
use std::hint;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;

use pinned_hosts::{Region, Registration, global};

struct Overwriting;

thread_local! {
    /// Whether what this thread frees is counted.
    static COUNTS: Cell<bool> = const { Cell::new(false) };
}

/// How many bytes threads that count have freed.
static FREED: AtomicUsize = AtomicUsize::new(0);

/// What was freed last, in a ring.
struct Kept {
    freed: [Option<Freed>; 5000],
    next: usize,
}

struct Freed(*mut u8, Layout);

// SAFETY: nobody uses it any more, and any thread may free it.
unsafe impl Send for Freed {}

static KEPT: Mutex<Kept> = Mutex::new(Kept {
    freed: [const { None }; 5000],
    next: 0,
});

// SAFETY: every call is passed on to the system's allocator as it came, a free
// later. What is overwritten is no longer used.
unsafe impl GlobalAlloc for Overwriting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller promises what `System` asks.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        if COUNTS.get() {
            FREED.fetch_add(layout.size(), Ordering::Relaxed);
        }
        // SAFETY: the caller hands over so many bytes.
        unsafe { ptr.write_bytes(0, layout.size()) };
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        let next = kept.next;
        kept.next = (next + 1) % kept.freed.len();
        let oldest = kept.freed[next].replace(Freed(ptr, layout));
        drop(kept);
        if let Some(Freed(ptr, layout)) = oldest {
            // SAFETY: the caller of then promised what `System` asks.
            unsafe { System.dealloc(ptr, layout) }
        }
    }
}

#[global_allocator]
static ALLOCATOR: Overwriting = Overwriting;

/// As many bytes, each a region of its own.
static SEAMS: [u8; 6000] = [1; 6000];

/// `SEAMS` in the process-wide registry, and one test at a time.
struct Registered {
    registrations: Vec<Registration<'static>>,
    _one_at_a_time: MutexGuard<'static, ()>,
}

impl Registered {
    fn new() -> Self {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let guard = ONE_AT_A_TIME.lock();
        let regions = SEAMS.chunks(1).map(|byte| Region::of(byte).unwrap());
        Self {
            _one_at_a_time: guard.unwrap_or_else(PoisonError::into_inner),
            registrations: global().register_all(regions),
        }
    }

    fn unregister_all(&mut self) {
        for registration in self.registrations.drain(..) {
            registration.unregister();
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.unregister_all();
    }
}

/// Publishes again and again, until dropped: what was published before is
/// freed as soon as nobody holds it.
struct Publishing {
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Publishing {
    fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let other = vec![0u8; 64];
            while !seen.load(Ordering::Relaxed) {
                let registration = global().register(Region::of(&other).unwrap());
                registration.unregister();
                // Whoever shares the processor gets to ask.
                thread::yield_now();
            }
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for Publishing {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

#[test]
fn what_a_thread_asks_is_not_freed_while_others_publish() {
    let _registered = Registered::new();
    let _publishing = Publishing::start();
    let mut reader = global().reader();
    for _ in 0..20 {
        assert!(pinned_hosts::is_pinned(&SEAMS));
        assert!(reader.is_pinned(&SEAMS));
        assert!(global().is_pinned(&SEAMS));
        assert_eq!(global().segments(&SEAMS).count(), SEAMS.len());
        assert!(global().regions().count() >= SEAMS.len());
    }
}

/// Of two thread-locals, one that is first used before the thread's reader and
/// one that is first used after it, the one that is dropped last outlives it.
#[test]
fn what_a_thread_asks_once_its_reader_is_gone_is_not_freed_while_others_publish() {
    /// The last of two sends that it asks, and then the answer.
    struct AsksWhenDropped(OnceCell<Asker>);

    type Asker = (Arc<AtomicBool>, mpsc::Sender<bool>);

    impl Drop for AsksWhenDropped {
        fn drop(&mut self) {
            let (asks, answer) = self.0.get().unwrap();
            if IS_LAST.replace(true) {
                asks.store(true, Ordering::Relaxed);
                let _ = answer.send(pinned_hosts::is_pinned(&SEAMS));
            }
        }
    }

    thread_local! {
        static IS_LAST: Cell<bool> = const { Cell::new(false) };
        static FIRST: AsksWhenDropped = const { AsksWhenDropped(OnceCell::new()) };
        static LAST: AsksWhenDropped = const { AsksWhenDropped(OnceCell::new()) };
    }

    let _registered = Registered::new();
    let other = vec![0u8; 64];
    for _ in 0..50 {
        let asks = Arc::new(AtomicBool::new(false));
        let (send, answers) = mpsc::channel();
        let asker = (Arc::clone(&asks), send);
        let thread = thread::spawn(move || {
            let set = |it: &AsksWhenDropped| it.0.set(asker.clone()).is_ok();
            assert!(FIRST.with(set));
            // The newest snapshot until the last moment.
            assert!(pinned_hosts::is_pinned(&SEAMS[..1]));
            assert!(LAST.with(set));
        });
        while !asks.load(Ordering::Relaxed) {
            hint::spin_loop();
        }
        let answer = loop {
            let registration = global().register(Region::of(&other).unwrap());
            registration.unregister();
            match answers.try_recv() {
                Err(mpsc::TryRecvError::Empty) => {}
                answer => break answer,
            }
        };
        assert_eq!(answer, Ok(true));
        thread.join().unwrap();
    }
}

#[test]
fn a_thread_that_exits_leaves_the_snapshot_that_it_alone_held_to_a_writer_to_free() {
    let mut registered = Registered::new();
    let (looked_up, wait_for_lookup) = mpsc::channel();
    let (let_go, wait_for_main) = mpsc::channel::<()>();
    let freed_in = |run: &mut dyn FnMut()| {
        let before = FREED.load(Ordering::Relaxed);
        run();
        FREED.load(Ordering::Relaxed) - before
    };
    let thread = thread::spawn(move || {
        assert!(pinned_hosts::is_pinned(&SEAMS));
        looked_up.send(()).unwrap();
        let _ = wait_for_main.recv();
        COUNTS.set(true);
    });
    wait_for_lookup.recv().unwrap();
    registered.unregister_all();
    let mut thread = Some(thread);
    let by_the_thread = freed_in(&mut || {
        let_go.send(()).unwrap();
        thread.take().unwrap().join().unwrap();
    });
    assert!(by_the_thread < 10_000, "{by_the_thread} bytes");

    let by_a_writer = freed_in(&mut || {
        COUNTS.set(true);
        for _ in 0..4 {
            let registration = global().register(Region::of(&SEAMS).unwrap());
            registration.unregister();
        }
        COUNTS.set(false);
    });
    // Some hundred nodes.
    assert!(by_a_writer > 100_000, "{by_a_writer} bytes");
}
