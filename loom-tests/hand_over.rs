//! Visibility: what was registered or removed before a buffer was handed to
//! another thread is seen by that thread, through every kind of reader.

use pinned_hosts::{Reader, Residency, global, is_pinned, register, unregister};

use crate::cells::{Flag, a, at_once, region};
use crate::model::{Model, Witness};

const OUTCOMES: &[&str] = &["handed over", "not yet", "seen early"];

pub(crate) const MODELS: [Model; 6] = [
    Model {
        name: "register_then_hand_over_to_is_pinned",
        promise: "a registration that happens-before a lookup is seen by the thread's own reader",
        outcomes: OUTCOMES,
        furthest: None,
        body: |witness| {
            let _ = global();
            let change = || register(a().as_ptr(), a().len());
            hand_over(witness, change, || || is_pinned(a()));
        },
    },
    Model {
        name: "unregister_then_hand_over_to_is_pinned",
        promise: "a removal that happens-before a lookup is seen by the thread's own reader",
        outcomes: OUTCOMES,
        furthest: None,
        body: |witness| {
            register(a().as_ptr(), a().len());
            let change = || unregister(a().as_ptr());
            hand_over(witness, change, || || !is_pinned(a()));
        },
    },
    Model {
        name: "register_then_hand_over_to_a_reader",
        promise: "a registration that happens-before a lookup is seen by a Reader",
        outcomes: OUTCOMES,
        furthest: None,
        body: |witness| {
            let registry = global();
            let change = move || {
                let _ = registry.register(region(a()));
            };
            hand_over(witness, change, move || {
                let mut reader = registry.reader();
                move || ask_all(&mut reader).iter().all(|&sees| sees)
            });
        },
    },
    Model {
        name: "unregister_then_hand_over_to_a_reader",
        promise: "a removal that happens-before a lookup is seen by a Reader",
        outcomes: OUTCOMES,
        furthest: None,
        body: |witness| {
            let registry = global();
            let registration = registry.register(region(a()));
            let change = move || {
                registration.unregister();
            };
            hand_over(witness, change, move || {
                let mut reader = registry.reader();
                move || !ask_all(&mut reader).contains(&true)
            });
        },
    },
    Model {
        name: "register_then_hand_over_to_a_registry",
        promise: "a registration that happens-before a lookup is seen by the Registry",
        outcomes: OUTCOMES,
        furthest: None,
        body: |witness| {
            let registry = global();
            let change = move || {
                let _ = registry.register(region(a()));
            };
            hand_over(witness, change, move || move || registry.is_pinned(a()));
        },
    },
    Model {
        name: "unregister_then_hand_over_to_a_registry",
        promise: "a removal that happens-before a lookup is seen by the Registry",
        outcomes: OUTCOMES,
        furthest: None,
        body: |witness| {
            let registry = global();
            let registration = registry.register(region(a()));
            let change = move || {
                registration.unregister();
            };
            hand_over(witness, change, move || move || !registry.is_pinned(a()));
        },
    },
];

/// What every question of a reader says of `a()`.
fn ask_all(reader: &mut Reader<'_>) -> [bool; 6] {
    [
        reader.is_pinned(a()),
        reader.residency(a()) == Residency::Pinned,
        reader.region_containing(a()).is_some(),
        reader
            .segments(a())
            .any(|part| part.residency() == Residency::Pinned),
        reader.regions().count() > 0,
        reader.live_count() > 0,
    ]
}

/// One thread makes a change and raises a flag. Another looks for the change
/// once, so that its reader has an old snapshot to be misled by, and again if
/// it finds the flag raised.
///
/// `looker` makes, on the other thread, what looks: is the change seen?
fn hand_over<L: FnMut() -> bool>(
    witness: &'static Witness,
    change: impl FnOnce() + 'static,
    looker: impl FnOnce() -> L + 'static,
) {
    let flag = Flag::new();
    let raised = flag.clone();
    at_once(
        move || {
            change();
            flag.raise();
        },
        move || {
            let mut sees = looker();
            if sees() {
                witness.saw("seen early");
            }
            if raised.is_raised() {
                assert!(sees(), "a change that happens-before a lookup was not seen");
                witness.saw("handed over");
            } else {
                witness.saw("not yet");
            }
        },
    );
}
