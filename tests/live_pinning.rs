//! Sections, grace periods, and the pinning of live memory, without a driver:
//! the closures stand in for its calls.
#![allow(clippy::unwrap_used)]

mod common;

use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use common::in_child;

use pinned_hosts::{GraceError, PinError, Region, RegionState, Registration, Registry, Residency};

fn region(bytes: &[u8]) -> Region {
    Region::of(bytes).unwrap()
}

fn done() -> Result<(), Infallible> {
    Ok(())
}

fn states(registry: &Registry) -> Vec<RegionState> {
    registry.regions().map(|entry| entry.state()).collect()
}

#[test]
fn a_region_is_pinning_then_live_then_retiring_then_gone() {
    let registry = Registry::new();
    let memory = [0u8; 64];
    let registration = registry
        .pin_with(region(&memory), || {
            assert_eq!(states(&registry), [RegionState::Pinning]);
            assert_eq!(registry.residency(&memory), Residency::Pinned);
            done()
        })
        .unwrap();
    assert_eq!(states(&registry), [RegionState::Live]);
    assert_eq!(registration.region(), region(&memory));
    assert!(!registry.is_retiring(&memory));
    registration
        .unpin_with(|| {
            assert_eq!(states(&registry), [RegionState::Retiring]);
            assert_eq!(registry.residency(&memory), Residency::Pinned);
            assert!(registry.is_retiring(&memory[10..20]));
            assert!(!registry.is_retiring(&memory[..0]));
            done()
        })
        .unwrap();
    assert_eq!(states(&registry), []);
    assert_eq!(registry.residency(&memory), Residency::Pageable);
}

#[test]
fn retiring_is_what_reaches_into_a_retiring_region_and_nothing_else() {
    let registry = Registry::new();
    let memory = [0u8; 64];
    registry
        .pin_with(region(&memory[16..32]), done)
        .unwrap()
        .unpin_with(|| {
            assert!(!registry.is_retiring(&memory[..16]));
            assert!(registry.is_retiring(&memory[..17]));
            assert!(registry.is_retiring(&memory[31..]));
            assert!(!registry.is_retiring(&memory[32..]));
            done()
        })
        .unwrap();
}

#[test]
fn a_pin_that_fails_leaves_nothing_and_returns_the_error() {
    let registry = Registry::new();
    let memory = [0u8; 64];
    let error = registry
        .pin_with(region(&memory), || Err("the driver's error"))
        .unwrap_err();
    assert_eq!(error, PinError::Driver("the driver's error"));
    assert_eq!(states(&registry), []);
}

#[test]
fn a_pin_that_panics_leaves_the_region_registered() {
    let registry = Registry::new();
    let memory = [0u8; 64];
    let pin = AssertUnwindSafe(|| {
        registry.pin_with(region(&memory), || -> Result<(), Infallible> {
            panic!("half-way")
        })
    });
    assert!(catch_unwind(pin).is_err());
    assert!(registry.is_pinned(&memory));
}

#[test]
fn an_unpin_that_fails_gives_the_registration_back_to_try_again() {
    let registry = Registry::new();
    let memory = [0u8; 64];
    let registration = registry.pin_with(region(&memory), done).unwrap();
    let error = registration.unpin_with(|| Err("busy")).unwrap_err();
    assert!(
        error.to_string().contains("still page-locked: busy"),
        "{error}"
    );
    assert_eq!(states(&registry), [RegionState::Live]);
    error.registration.unpin_with(done).unwrap();
    assert_eq!(states(&registry), []);
}

#[test]
fn an_unpin_that_panics_leaves_the_region_retiring() {
    let registry = Registry::new();
    let memory = [0u8; 64];
    let registration = registry.pin_with(region(&memory), done).unwrap();
    let unpin = AssertUnwindSafe(|| {
        registration.unpin_with(|| -> Result<(), Infallible> { panic!("half-way") })
    });
    assert!(catch_unwind(unpin).is_err());
    assert_eq!(states(&registry), [RegionState::Retiring]);
    assert!(registry.is_pinned(&memory));
}

#[test]
fn a_registration_that_is_dropped_keeps_the_memory_registered() {
    let registry = Registry::new();
    let memory = [0u8; 64];
    let registration = registry.pin_with(region(&memory), done).unwrap();
    {
        let _dropped_here = registration;
    }
    assert!(registry.is_pinned(&memory));
}

#[test]
fn inside_a_section_pinning_and_unpinning_fail_at_once() {
    let registry = Registry::new();
    let memory = [0u8; 64];
    let registration = registry.pin_with(region(&memory[..32]), done).unwrap();
    let outer = registry.enter();
    let inner = registry.enter();
    drop(inner);
    let called = || -> Result<(), Infallible> { panic!("the driver must not be called") };
    let pinned = registry.pin_with(region(&memory[32..]), called);
    assert_eq!(
        pinned.unwrap_err(),
        PinError::Grace(GraceError::InsideSection)
    );
    let unpinned = registration.unpin_with(called).unwrap_err();
    assert_eq!(unpinned.reason, PinError::Grace(GraceError::InsideSection));
    assert_eq!(states(&registry), [RegionState::Live]);
    drop(outer);
    unpinned.registration.unpin_with(done).unwrap();
}

#[test]
fn a_section_of_another_registry_holds_nothing_up() {
    let (one, other) = (Registry::new(), Registry::new());
    let _section = other.enter();
    one.wait_for_sections(None).unwrap();
}

/// The default collector of `crossbeam-epoch` is what other crates use.
#[test]
fn another_crates_epoch_holds_nothing_up() {
    let _guard = crossbeam_epoch::pin();
    Registry::new().wait_for_sections(None).unwrap();
}

/// Runs `wait` on another thread while this one is in a section; shows that
/// it has not returned before the section ends.
fn must_wait_for_a_section(registry: &Registry, wait: impl FnOnce() + Send) {
    let (tell, told) = mpsc::channel();
    thread::scope(|scope| {
        let section = registry.enter();
        let outer = registry.enter();
        drop(section);
        scope.spawn(move || {
            wait();
            tell.send(()).unwrap();
        });
        // Time passes in which it could return, were it not to wait.
        let early = told.recv_timeout(Duration::from_millis(50));
        assert_eq!(early, Err(mpsc::RecvTimeoutError::Timeout));
        drop(outer);
        told.recv().unwrap();
    });
}

#[test]
fn a_grace_period_waits_for_a_section_that_began_before() {
    let registry = Registry::new();
    must_wait_for_a_section(&registry, || registry.wait_for_sections(None).unwrap());
}

#[test]
fn pinning_and_unpinning_wait_for_a_section_that_began_before() {
    let registry = Registry::new();
    let memory = [0u8; 64];
    must_wait_for_a_section(&registry, || {
        let _ = registry.pin_with(region(&memory), done).unwrap();
    });
    let registration = registry.pin_with(region(&memory), done).unwrap();
    must_wait_for_a_section(&registry, || registration.unpin_with(done).unwrap());
}

#[test]
fn a_time_limit_ends_the_wait_with_the_driver_not_called() {
    let registry = Registry::new();
    let memory = [0u8; 64];
    let registration = registry.pin_with(region(&memory[..32]), done).unwrap();
    let limit = Duration::from_millis(1);
    let section = registry.enter();
    thread::scope(|scope| {
        scope.spawn(|| {
            let called = || -> Result<(), Infallible> { panic!("the driver must not be called") };
            let pinned = registry.pin_within(limit, region(&memory[32..]), called);
            let Err(PinError::Grace(GraceError::TimedOut { waited })) = pinned else {
                panic!("{pinned:?}");
            };
            assert!(waited >= limit);
            let unpinned = registration.unpin_within(limit, called).unwrap_err();
            assert!(matches!(
                unpinned.reason,
                PinError::Grace(GraceError::TimedOut { .. })
            ));
        });
    });
    drop(section);
    assert_eq!(states(&registry), [RegionState::Live]);
}

#[test]
fn a_long_wait_is_logged_with_its_length_and_the_number_of_threads() {
    let registry = Registry::new();
    let section = registry.enter();
    let log = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    thread::scope(|scope| {
        scope.spawn(|| {
            let writer = {
                let log = std::sync::Arc::clone(&log);
                move || Log(std::sync::Arc::clone(&log))
            };
            let subscriber = tracing_subscriber::fmt()
                .with_ansi(false)
                .with_writer(writer);
            tracing::subscriber::with_default(subscriber.finish(), || {
                let limit = Some(Duration::from_millis(1_200));
                registry.wait_for_sections(limit).unwrap_err();
            });
        });
    });
    drop(section);
    let text = String::from_utf8(log.lock().unwrap().clone()).unwrap();
    assert!(
        text.contains("WARN") && text.contains("threads=2"),
        "{text}"
    );
    assert!(text.contains("waited=1."), "{text}");
}

struct Log(std::sync::Arc<std::sync::Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The subscriber is the program's own code.
#[test]
fn a_subscriber_that_panics_at_the_warning_leaves_the_registry_true() {
    let registry = Registry::new();
    let memory = [0u8; 64];
    let registration = registry.pin_with(region(&memory[..32]), done).unwrap();
    let section = registry.enter();
    thread::scope(|scope| {
        scope.spawn(|| {
            let writer = || -> Log { panic!("a subscriber's own panic") };
            let subscriber = tracing_subscriber::fmt().with_writer(writer);
            tracing::subscriber::with_default(subscriber.finish(), || {
                let limit = Duration::from_millis(1_200);
                let pinned = registry.pin_within(limit, region(&memory[32..]), done);
                assert!(matches!(pinned, Err(PinError::Grace(_))));
                registration.unpin_within(limit, done).unwrap_err();
            });
        });
    });
    drop(section);
    assert_eq!(states(&registry), [RegionState::Live]);
}

/// A thread-local destructor runs after the thread's part in the sections is
/// gone: it can still enter one, and is told that it cannot wait.
#[test]
fn a_section_in_a_thread_local_destructor_holds_up_grace_periods_too() {
    use std::cell::RefCell;
    thread_local! {
        static LATE: RefCell<Option<Late>> = const { RefCell::new(None) };
    }
    struct Late(&'static Registry, mpsc::Sender<Result<(), GraceError>>);
    impl Drop for Late {
        fn drop(&mut self) {
            let _section = self.0.enter();
            self.1.send(self.0.wait_for_sections(None)).unwrap();
        }
    }
    let (tell, told) = mpsc::channel();
    thread::spawn(move || {
        LATE.with(|late| *late.borrow_mut() = Some(Late(pinned_hosts::global(), tell)));
        drop(pinned_hosts::global().enter());
    })
    .join()
    .unwrap();
    assert_eq!(told.recv().unwrap(), Err(GraceError::InsideSection));
}

// Forks

/// The child has a copy of a section whose thread it does not have.
#[test]
fn a_forked_child_waits_for_no_grace_period() {
    let name = "a_forked_child_waits_for_no_grace_period";
    // In a process of its own, so that no other test runs while it forks.
    if let Some(output) = in_child(name, |_| ()) {
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let registry = Registry::new();
    let memory = [0u8; 64];
    let registration = registry.pin_with(region(&memory[..32]), done).unwrap();
    let (tell, told) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let reader = &registry;
        scope.spawn(move || {
            let _section = reader.enter();
            tell.send(()).unwrap();
            // Until `end` is dropped.
            let _ = ended.recv();
        });
        told.recv().unwrap();
        // SAFETY: the child only waits, pins and unpins, and leaves.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let right = is_refused_as_a_forked_child(&registry, registration, &memory);
            // SAFETY: ends the child, without running what the parent owns.
            unsafe { libc::_exit(i32::from(!right)) }
        }
        assert!(child > 0, "fork");
        let status = status_within(Duration::from_secs(20), child);
        drop(end);
        assert_eq!(status, Some(0), "(none: it was still waiting)");
    });
    registry.wait_for_sections(None).unwrap();
}

/// Whether all that waits is refused and changes nothing, and all else works.
fn is_refused_as_a_forked_child(
    registry: &Registry,
    registration: Registration<'_>,
    memory: &[u8],
) -> bool {
    let refused = GraceError::ForkedChild;
    let waited = registry.wait_for_sections(None);
    let pinned = registry.pin_with(region(&memory[32..]), done).err();
    let unpinned = registration.unpin_with(done).err();
    let section = registry.enter();
    let inside = registry.wait_for_sections(None);
    waited == Err(refused)
        && inside == Err(refused)
        && pinned == Some(PinError::Grace(refused))
        && unpinned.is_some_and(|error| error.reason == PinError::Grace(refused))
        && section.is_pinned(&memory[..32])
        && states(registry) == [RegionState::Live]
        && refused.to_string().contains("exec")
        && Registry::new().wait_for_sections(None).is_ok()
}

/// The status that `child` ends with, or `None` after `limit`, by which it is
/// killed.
fn status_within(limit: Duration, child: libc::pid_t) -> Option<i32> {
    let started = Instant::now();
    let mut status = -1;
    loop {
        // SAFETY: `child` is ours, and `status` a place for its status.
        match unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } {
            0 if started.elapsed() < limit => thread::yield_now(),
            0 => break,
            waited => {
                assert_eq!(waited, child);
                return Some(status);
            }
        }
    }
    // SAFETY: `child` is ours and was not waited for, so the number is its own.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, &raw mut status, 0);
    }
    None
}
