//! Sections of one thread that overlap, and what a forked child may do with
//! sections, on real threads.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use common::in_child;

use pinned_hosts::{GraceError, Region, Registry, Section};

/// Enough for a wait that no section holds up, and for no other.
const NO_TIME: Option<Duration> = Some(Duration::ZERO);

/// Far longer than a wait takes that is not held up for ever.
const FOR_EVER: Option<Duration> = Some(Duration::from_secs(20));

fn timed_out(waited: Result<(), GraceError>) -> bool {
    matches!(waited, Err(GraceError::TimedOut { .. }))
}

/// The orders in which `count` sections can be dropped.
fn orders(count: usize) -> Vec<Vec<usize>> {
    if count == 0 {
        return vec![vec![]];
    }
    let shorter = orders(count - 1);
    (0..count)
        .flat_map(|at| {
            shorter.iter().map(move |order| {
                let mut order = order.clone();
                order.insert(at, count - 1);
                order
            })
        })
        .collect()
}

#[test]
fn a_grace_period_ends_while_a_chain_of_overlapping_sections_goes_on() {
    for at_once in [2, 3, 12] {
        let registry = Registry::new();
        let over = AtomicBool::new(false);
        let (tell, told) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut in_flight: VecDeque<Section<'_>> = VecDeque::new();
                while !over.load(Ordering::Relaxed) {
                    // The next one begins before the oldest ends.
                    in_flight.push_back(registry.enter());
                    if in_flight.len() == at_once {
                        let _ = tell.send(());
                        in_flight.pop_front();
                    }
                }
            });
            told.recv().unwrap();
            let waited = registry.wait_for_sections(FOR_EVER);
            let memory = [0u8; 64];
            let region = Region::of(&memory).unwrap();
            let pinned = registry.pin_within(FOR_EVER.unwrap(), region, || Ok::<(), ()>(()));
            over.store(true, Ordering::Relaxed);
            assert_eq!(waited, Ok(()), "{at_once} sections at once");
            let _ = pinned.unwrap();
        });
    }
}

#[test]
fn a_grace_period_waits_for_each_of_a_threads_overlapping_sections() {
    for order in orders(4) {
        let registry = Registry::new();
        let mut sections: Vec<_> = order.iter().map(|_| Some(registry.enter())).collect();
        thread::scope(|scope| {
            // The sections stay on this thread, so another one waits.
            let (ask, asked) = mpsc::channel();
            let (answer, answered) = mpsc::channel();
            let registry = &registry;
            scope.spawn(move || {
                for () in asked {
                    answer.send(registry.wait_for_sections(NO_TIME)).unwrap();
                }
            });
            let wait = || {
                ask.send(()).unwrap();
                answered.recv().unwrap()
            };
            for &next in &order {
                assert!(timed_out(wait()), "{order:?}: before {next} was dropped");
                assert_eq!(
                    registry.wait_for_sections(NO_TIME),
                    Err(GraceError::InsideSection),
                    "{order:?}: before {next} was dropped"
                );
                sections[next] = None;
            }
            assert_eq!(wait(), Ok(()), "{order:?}");
            assert_eq!(registry.wait_for_sections(NO_TIME), Ok(()), "{order:?}");
            drop(ask);
        });
    }
}

#[test]
fn what_a_thread_finds_in_an_overlapping_section_holds_until_that_one_ends() {
    let registry = Registry::new();
    let memory = &[0u8; 64];
    let region = Region::of(memory).unwrap();
    thread::scope(|scope| {
        let (go_on, gone_on) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        let registry = &registry;
        scope.spawn(move || {
            let first = registry.enter();
            let second = registry.enter();
            drop(first);
            assert!(!second.is_pinned(memory));
            tell.send(()).unwrap();
            gone_on.recv().unwrap();
            drop(second);
            tell.send(()).unwrap();
            // A thread that exits is in a section for a moment.
            gone_on.recv().unwrap();
        });
        told.recv().unwrap();
        for _ in 0..3 {
            let early = registry.pin_within(Duration::ZERO, region, || -> Result<(), ()> {
                panic!("the driver must not be called")
            });
            early.unwrap_err();
        }
        go_on.send(()).unwrap();
        told.recv().unwrap();
        let pinned = registry.pin_within(Duration::ZERO, region, || Ok::<(), ()>(()));
        go_on.send(()).unwrap();
        let _ = pinned.unwrap();
    });
}

/// The subscriber is the program's own code, and runs in the middle of a wait.
#[test]
fn a_wait_whose_subscriber_enters_a_section_and_keeps_it_fails_instead_of_waiting_for_itself() {
    let registry: &'static Registry = Box::leak(Box::default());
    let _section = registry.enter();
    let waited = thread::spawn(move || {
        let writer = move || {
            std::mem::forget(registry.enter());
            std::io::sink()
        };
        let subscriber = tracing_subscriber::fmt().with_writer(writer).finish();
        tracing::subscriber::with_default(subscriber, || registry.wait_for_sections(FOR_EVER))
    });
    assert_eq!(waited.join().unwrap(), Err(GraceError::InsideSection));
}

// Forks

/// Runs `check` in a forked child, and tells how the child ended: with 0 if
/// `check` holds, with 1 if it does not or panics, or with what it exits with.
fn in_fork(check: impl FnOnce() -> bool) -> Option<i32> {
    // SAFETY: the child runs `check` alone, and leaves.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork");
    if child == 0 {
        // A panic must not go on into the parent's part of the stack.
        let holds = catch_unwind(AssertUnwindSafe(check)).unwrap_or(false);
        leave(i32::from(!holds));
    }
    let mut status = 0;
    // SAFETY: `child` is ours, and `status` a place for its status.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(waited, child);
    libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status))
}

/// Ends a child, without running what its parent owns.
fn leave(code: i32) -> ! {
    // SAFETY: ends this process.
    unsafe { libc::_exit(code) }
}

#[test]
fn a_forked_child_enters_and_ends_sections_and_looks_up() {
    let name = "a_forked_child_enters_and_ends_sections_and_looks_up";
    // In a process of its own, so that no other test runs while it forks.
    if let Some(output) = in_child(name, |_| ()) {
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let registry = Registry::new();
    let memory = &[0u8; 64];
    let _kept = registry.register(Region::of(&memory[..32]).unwrap());
    let (tell, told) = mpsc::channel();
    let (end, to_end) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let registry = &registry;
        scope.spawn(move || {
            let _sections = [registry.enter(), registry.enter()];
            tell.send(()).unwrap();
            let _ = to_end.recv();
        });
        told.recv().unwrap();
        let first = registry.enter();
        let second = registry.enter();
        let ended = in_fork(move || {
            // The parent's, of which the child has a copy.
            drop(first);
            let mut in_flight = VecDeque::from([second]);
            // Some of them take the epoch on, or try to.
            for _ in 0..1_000 {
                in_flight.push_back(registry.enter());
                in_flight.pop_front();
                let section = registry.enter();
                assert!(section.is_pinned(&memory[..32]) && !section.is_pinned(&memory[32..]));
            }
            drop(in_flight);
            let refused = registry.wait_for_sections(None) == Err(GraceError::ForkedChild);
            let region = Region::of(&memory[32..]).unwrap();
            let added = registry.register(region);
            let known = registry.is_pinned(memory);
            refused && known && added.unregister() == region
        });
        assert_eq!(ended, Some(0));
        drop(end);
    });
    assert_eq!(registry.wait_for_sections(FOR_EVER), Ok(()));
}

/// As the first process of a container that makes another container's.
#[test]
fn a_forked_child_with_its_parents_process_id_waits_for_no_grace_period() {
    const REFUSED: i32 = 77;
    let name = "a_forked_child_with_its_parents_process_id_waits_for_no_grace_period";
    if let Some(output) = in_child(name, |_| ()) {
        assert!(output.status.success(), "{output:?}");
        eprint!("{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    /// From here on, the first child of this process has the process id 1.
    fn begin_numbering_anew(flags: i32) {
        // SAFETY: concerns this process's rights, and the children that it makes.
        if unsafe { libc::unshare(flags | libc::CLONE_NEWPID) } != 0 {
            leave(REFUSED);
        }
    }
    let ended = in_fork(|| {
        // A user namespace of its own gives an ordinary user the right.
        begin_numbering_anew(libc::CLONE_NEWUSER);
        let parent = in_fork(|| {
            let registry = Registry::new();
            begin_numbering_anew(0);
            let child = in_fork(|| {
                std::process::id() == 1
                    && registry.wait_for_sections(NO_TIME) == Err(GraceError::ForkedChild)
            });
            let same = std::process::id() == 1;
            if child == Some(0) {
                same && registry.wait_for_sections(NO_TIME).is_ok()
            } else {
                leave(child.unwrap_or(1))
            }
        });
        leave(parent.unwrap_or(1))
    });
    if ended == Some(REFUSED) {
        // `process.rs` has a test that needs no namespace.
        eprintln!("not tested: the system makes no PID namespace for this user");
        return;
    }
    assert_eq!(ended, Some(0));
}
