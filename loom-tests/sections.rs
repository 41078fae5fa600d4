//! Pinning and unpinning of live memory, with the real `crossbeam-epoch`: no
//! copy lets the device read memory that its caller may free, and none is
//! under way when the driver unpins.
//!
//! What the driver does is modelled here: it knows whether the memory is
//! page-locked, decides by that, at the call, whether the device reads the
//! source late, and locks (as the real one does). `copy` is what
//! `src/cuda/copier.rs` does, in that order; its first step is the one that
//! runs there.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Mutex};
use loom::thread;
use pinned_hosts::GraceError::{InsideSection, TimedOut};
use pinned_hosts::Residency::Pageable;
use pinned_hosts::{
    PinError, RegionState, Registration, Registry, Residency, enter_and_ask_residency, global,
    residency,
};

use crate::cells::{Flag, a, abc, at_once, b, c, region};
use crate::faults::is_asked_for;
use crate::model::{Model, Witness};

pub(crate) const MODELS: [Model; 15] = [
    Model {
        name: "pin_against_copy",
        promise: "memory that a copy has found pageable is not page-locked until the copy is over",
        outcomes: &["pageable", "pinned"],
        furthest: Some(2),
        body: |witness| {
            let registry = global();
            let (driver, copier) = Driver::new();
            at_once(
                move || {
                    let _pinned = registry.pin_with(region(a()), || driver.pin()).unwrap();
                },
                move || copier.copy(witness),
            );
            assert_eq!(only_state(registry), Some(RegionState::Live));
        },
    },
    Model {
        name: "unpin_against_copy",
        promise: "memory that a copy lets the device read is not unpinned until the copy is over",
        outcomes: &["pageable", "pinned", "retiring"],
        furthest: Some(2),
        body: |witness| {
            let registry = global();
            let (driver, copier) = Driver::new();
            let pinned = pinned_already(registry, a(), &driver);
            at_once(
                move || pinned.unpin_with(|| driver.unpin()).unwrap(),
                move || copier.copy(witness),
            );
            assert_eq!(only_state(registry), None);
        },
    },
    Model {
        name: "pin_unpin_against_copy",
        promise: "the same while memory is pinned and unpinned again",
        outcomes: &["pageable", "pinned", "retiring"],
        furthest: Some(1),
        body: |witness| {
            let registry = global();
            let (driver, copier) = Driver::new();
            at_once(
                move || {
                    let pinned = registry.pin_with(region(a()), || driver.pin()).unwrap();
                    pinned.unpin_with(|| driver.unpin()).unwrap();
                },
                move || copier.copy(witness),
            );
            assert_eq!(only_state(registry), None);
        },
    },
    Model {
        name: "a_pin_that_fails",
        promise: "memory that the driver refused to pin is registered while it is asked, and not after",
        outcomes: &["pageable", "pinned"],
        furthest: Some(2),
        body: |witness| {
            let registry = global();
            let (_driver, copier) = Driver::new();
            at_once(
                move || {
                    let refused = registry.pin_with(region(a()), || Err("refused"));
                    assert!(matches!(refused, Err(PinError::Driver("refused"))));
                },
                move || copier.copy(witness),
            );
            assert_eq!(only_state(registry), None, "a refused pin stays registered");
        },
    },
    Model {
        name: "an_unpin_that_fails",
        promise: "memory that the driver failed to unpin is registered all the time, and live again after",
        outcomes: &["pinned", "retiring"],
        furthest: Some(2),
        body: |witness| {
            let registry = global();
            let (driver, copier) = Driver::new();
            let pinned = pinned_already(registry, a(), &driver);
            at_once(
                move || {
                    let kept = pinned.unpin_with(|| Err("failed")).unwrap_err();
                    let kept: Registration<'_> = kept.registration;
                    assert_eq!(kept.region(), region(a()));
                },
                move || copier.copy(witness),
            );
            let state = only_state(registry);
            assert_eq!(state, Some(RegionState::Live), "pinned, and not registered");
        },
    },
    Model {
        name: "two_pinners_of_one_range",
        promise: "of two that pin one range, the driver refuses one, whose failure leaves the other's entry",
        outcomes: &["left pinned it", "right pinned it"],
        furthest: Some(1),
        body: |witness| {
            let registry = global();
            let (left, right) = Driver::new();
            let (left, right) = at_once(
                move || registry.pin_with(region(a()), || left.pin()).is_ok(),
                move || registry.pin_with(region(a()), || right.pin()).is_ok(),
            );
            assert!(left != right);
            witness.saw(if left {
                "left pinned it"
            } else {
                "right pinned it"
            });
            let state = only_state(registry);
            assert_eq!(
                state,
                Some(RegionState::Live),
                "a loser took the winner's entry"
            );
        },
    },
    Model {
        name: "nested_sections",
        promise: "the end of an inner section does not end the outer one",
        outcomes: &["pageable", "pinned"],
        furthest: Some(2),
        body: |witness| {
            let registry = global();
            let (driver, copier) = Driver::new();
            at_once(
                move || {
                    let _pinned = registry.pin_with(region(a()), || driver.pin()).unwrap();
                },
                move || {
                    enter_twice_already(registry);
                    let outer = registry.enter();
                    drop(registry.enter());
                    let found = residency(a());
                    if is_asked_for("inner_section_ends_outer") {
                        drop(outer);
                        copier.copy_as(found, witness);
                    } else {
                        copier.copy_as(found, witness);
                        drop(outer);
                    }
                },
            );
        },
    },
    Model {
        name: "overlapping_sections",
        promise: "each of a thread's sections lasts until it is dropped, and holds up no grace period \
                  that took a step before it began",
        outcomes: &["pageable", "pinned", "pinned while the third goes on"],
        furthest: Some(2),
        body: |witness| {
            let registry = global();
            let (driver, copier) = Driver::new();
            let is_pinned = Flag::new();
            let pinned = is_pinned.clone();
            thread::spawn(move || {
                enter_twice_already(registry);
                let (mut section, mut found) = enter_and_ask_residency(a());
                let pins = thread::spawn(move || {
                    let _pinned = registry.pin_with(region(a()), || driver.pin()).unwrap();
                    is_pinned.raise();
                });
                for _ in 0..2 {
                    // So that the other thread takes a step, without an
                    // interruption.
                    thread::yield_now();
                    let next = enter_and_ask_residency(a());
                    copier.copy_as(found, witness);
                    (section, found) = next;
                }
                thread::yield_now();
                copier.copy_as(found, witness);
                if pinned.is_raised() {
                    witness.saw("pinned while the third goes on");
                }
                drop(section);
                pins.join().unwrap();
            })
            .join()
            .unwrap();
        },
    },
    Model {
        name: "inside_a_section",
        promise: "a thread inside any section is told so at once, and pins and unpins nothing",
        outcomes: &["pageable", "pinned"],
        furthest: Some(1),
        body: |witness| {
            let registry = global();
            let (driver, copier) = Driver::new();
            at_once(
                move || {
                    let first = registry.enter();
                    let second = registry.enter();
                    drop(first);
                    let refused = registry.pin_within(NO_TIME, region(a()), || driver.pin());
                    let inside = matches!(refused, Err(PinError::Grace(InsideSection)));
                    assert!(inside, "not told that it is inside a section");
                    drop(second);
                },
                move || copier.copy(witness),
            );
            assert_eq!(only_state(registry), None, "a refused pin stays registered");
        },
    },
    Model {
        name: "a_pin_that_gives_up",
        promise: "memory is not pinned by a wait that reached its limit, and not registered after",
        outcomes: &["pageable", "pinned", "gave up", "went through"],
        furthest: Some(2),
        body: |witness| {
            let registry = global();
            let (driver, copier) = Driver::new();
            let (state, ()) = at_once(
                move || match registry.pin_within(NO_TIME, region(a()), || driver.pin()) {
                    Ok(_) => {
                        witness.saw("went through");
                        Some(RegionState::Live)
                    }
                    Err(error) => {
                        assert!(matches!(error, PinError::Grace(TimedOut { .. })));
                        witness.saw("gave up");
                        None
                    }
                },
                move || copier.copy(witness),
            );
            assert_eq!(
                only_state(registry),
                state,
                "a refused pin stays registered"
            );
        },
    },
    Model {
        name: "an_unpin_that_gives_up",
        promise: "memory is not unpinned by a wait that reached its limit, and live again after",
        outcomes: &["pageable", "pinned", "retiring", "gave up", "went through"],
        furthest: Some(1),
        body: |witness| {
            let registry = global();
            let (driver, copier) = Driver::new();
            let pinned = pinned_already(registry, a(), &driver);
            let (state, ()) = at_once(
                move || match pinned.unpin_within(NO_TIME, || driver.unpin()) {
                    Ok(()) => {
                        witness.saw("went through");
                        None
                    }
                    Err(error) => {
                        assert!(matches!(error.reason, PinError::Grace(TimedOut { .. })));
                        witness.saw("gave up");
                        Some(RegionState::Live)
                    }
                },
                move || copier.copy(witness),
            );
            assert_eq!(only_state(registry), state, "not in the state it was in");
        },
    },
    Model {
        name: "waits_that_give_up",
        promise: "however many waits give up, they leave no more than the bound behind, and a later one ends",
        outcomes: &["at the bound", "none is left"],
        furthest: Some(2),
        body: |witness| {
            let registry = global();
            thread::spawn(move || {
                enter_twice_already(registry);
                let section = registry.enter();
                let waits = thread::spawn(move || {
                    for _ in 0..4 {
                        let _ = registry.wait_for_sections(Some(NO_TIME));
                        let left = registry.flags_left_behind();
                        assert!(left <= 2, "more flags are left than the bound");
                        if left == 2 {
                            witness.saw("at the bound");
                        }
                    }
                    registry.wait_for_sections(None).unwrap();
                    if registry.flags_left_behind() == 0 {
                        witness.saw("none is left");
                    }
                });
                // Each time, a wait can give up without an interruption.
                for _ in 0..4 {
                    thread::yield_now();
                }
                drop(section);
                waits.join().unwrap();
            })
            .join()
            .unwrap();
        },
    },
    Model {
        name: "two_that_register_alone",
        promise: "of two that register overlapping memory if none of it is registered, one is refused",
        outcomes: &["left is registered", "right is registered"],
        furthest: None,
        body: |witness| {
            let registry = global();
            let (left, right) = at_once(
                move || registry.is_registered_alone(region(abc())),
                move || registry.is_registered_alone(region(b())),
            );
            assert!(left != right, "both are registered, or none");
            witness.saw(if left {
                "left is registered"
            } else {
                "right is registered"
            });
            assert_eq!(only_state(registry), Some(RegionState::Live));
        },
    },
    Model {
        name: "unpin_all_against_copy",
        promise: "of memory that is unpinned together, what a copy lets the device read is not unpinned \
                  until the copy is over, and what the driver failed to unpin is live again",
        outcomes: &["pageable", "pinned", "retiring"],
        furthest: Some(1),
        body: |witness| {
            let registry = global();
            let (driver, copier) = Driver::new();
            let mut all = vec![
                pinned_already(registry, a(), &driver),
                pinned_already(registry, c(), &Driver::new().0),
            ];
            at_once(
                move || {
                    let unpin = |it| {
                        if it == region(a()) {
                            driver.unpin()
                        } else {
                            Err("failed")
                        }
                    };
                    let failed = registry.unpin_each(&mut all, unpin);
                    assert!(matches!(failed, Err(PinError::Driver("failed"))));
                    assert_eq!(all.len(), 1);
                },
                move || copier.copy(witness),
            );
            let state = only_state(registry);
            assert_eq!(state, Some(RegionState::Live), "pinned, and not registered");
        },
    },
    Model {
        name: "a_grace_period_that_another_thread_ends",
        promise: "what a section did happens-before what follows a grace period, whichever thread ends that",
        outcomes: &["another thread came by", "no other thread came by"],
        furthest: Some(3),
        body: |witness| {
            let registry = global();
            // What a section still uses, and is written to after the grace
            // period. Only the grace period orders the two.
            let memory = Arc::new(UnsafeCell::new(()));
            let used = Arc::clone(&memory);
            // A thread that exits takes part in a last grace period, which
            // would be explored in vain. Its own lock keeps this thread from
            // learning anything from the others.
            let stay = Arc::new(Mutex::new(()));
            let stays = [(); 2].map(|()| Arc::clone(&stay));
            let came_by = Rc::new(Cell::new(false));
            let comes_by = Rc::clone(&came_by);

            // A thread's first section takes the epoch on. Here it must be the
            // other thread that takes the last step, so the parts of these two
            // are made, and the section is entered, before.
            loom::stop_exploring();
            drop(registry.enter());
            let staying = stay.lock().unwrap();
            let uses_it = thread::spawn(move || {
                drop(registry.enter());
                let section = registry.enter();
                loom::explore();
                let [stay, others_stay] = stays;
                let ends_it = thread::spawn(move || {
                    comes_by.set(true);
                    drop(registry.enter());
                    drop(others_stay.lock());
                });
                thread::yield_now();
                used.with(|_| ());
                drop(section);
                drop(stay.lock());
                ends_it.join().unwrap();
            });
            // Until it is in its section.
            thread::yield_now();
            registry.wait_for_sections(None).unwrap();
            memory.with_mut(|_| ());
            // The rest shows nothing more.
            loom::skip_branch();
            witness.saw(if came_by.get() {
                "another thread came by"
            } else {
                "no other thread came by"
            });
            drop(staying);
            uses_it.join().unwrap();
        },
    },
];

/// A limit that a wait reaches in its first rounds.
const NO_TIME: Duration = Duration::ZERO;

/// Joins the sections as often as this thread will have to. There is nothing to
/// explore in that: other models join while they explore.
fn enter_twice_already(registry: &Registry) {
    loom::stop_exploring();
    drop([registry.enter(), registry.enter()]);
    loom::explore();
}

/// Pins `bytes` before there is another thread; there is nothing to explore in
/// that.
fn pinned_already(
    registry: &'static Registry,
    bytes: &[u8],
    driver: &Driver,
) -> Registration<'static> {
    loom::stop_exploring();
    let pinned = registry.pin_with(region(bytes), || driver.pin()).unwrap();
    loom::explore();
    pinned
}

/// The state of the one entry that the models make, if it is there.
fn only_state(registry: &Registry) -> Option<RegionState> {
    let mut states = registry.regions().map(|entry| entry.state());
    let state = states.next();
    assert_eq!(states.next(), None, "more than one entry");
    state
}

/// What the driver knows of the memory at `a()`.
#[derive(Clone)]
struct Driver(Arc<Mutex<Known>>);

#[derive(Default)]
struct Known {
    page_locked: bool,
    /// Whether the device is reading the memory just now.
    device_reads: bool,
}

impl Driver {
    /// Two handles of one driver.
    fn new() -> (Self, Self) {
        let driver = Self(Arc::new(Mutex::new(Known::default())));
        (driver.clone(), driver)
    }

    fn pin(&self) -> Result<(), &'static str> {
        let mut known = self.0.lock().unwrap();
        if known.page_locked {
            return Err("already page-locked");
        }
        known.page_locked = true;
        Ok(())
    }

    fn unpin(&self) -> Result<(), &'static str> {
        let mut known = self.0.lock().unwrap();
        assert!(!known.device_reads, "unpinned while the device reads it");
        known.page_locked = false;
        Ok(())
    }

    fn copy(&self, witness: &Witness) {
        let (_section, found) = enter_and_ask_residency(a());
        self.copy_as(found, witness);
    }

    /// Copies by what was found, and returns once the device is done with the
    /// source, as far as the copy can know.
    fn copy_as(&self, found: Residency, witness: &Witness) {
        if found == Pageable {
            witness.saw("pageable");
            let read_late = self.0.lock().unwrap().page_locked;
            assert!(!read_late, "found pageable, and read late");
        } else if global().is_retiring(a()) {
            witness.saw("retiring");
        } else {
            witness.saw("pinned");
            let read_late = {
                let mut known = self.0.lock().unwrap();
                known.device_reads = known.page_locked;
                known.page_locked
            };
            let mut known = self.0.lock().unwrap();
            assert!(
                known.page_locked || !read_late,
                "unpinned while the device reads it"
            );
            known.device_reads = false;
        }
    }
}
