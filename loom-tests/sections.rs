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

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Mutex};
use loom::thread;
use pinned_hosts::Residency::Pageable;
use pinned_hosts::{
    PinError, RegionState, Registration, Registry, Residency, enter_and_ask_residency, global,
    residency,
};

use crate::cells::{a, at_once, region};
use crate::faults::is_asked_for;
use crate::model::{Model, Witness};

pub(crate) const MODELS: [Model; 8] = [
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
            let pinned = pinned_already(registry, &driver);
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
            let pinned = pinned_already(registry, &driver);
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

/// Pins the memory before there is another thread; there is nothing to explore
/// in that.
fn pinned_already(registry: &'static Registry, driver: &Driver) -> Registration<'static> {
    loom::stop_exploring();
    let pinned = registry.pin_with(region(a()), || driver.pin()).unwrap();
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
