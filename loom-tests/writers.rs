//! Writers that run at once: none of them loses what another one published,
//! and none is held up by one that panics.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use loom::sync::Arc;
use loom::thread;
use pinned_hosts::{Registry, Residency, global, is_pinned, live_count, register};

use crate::cells::{Flag, a, abc, at_once, b, bc, c, region};
use crate::model::Model;

pub(crate) const MODELS: [Model; 9] = [
    Model {
        name: "two_writers_register",
        promise: "of two registrations at once, both are there once both have returned",
        outcomes: &["left was first", "right was first"],
        furthest: None,
        body: |witness| {
            let left = Arc::new(Registry::new());
            let right = Arc::clone(&left);
            let registry = Arc::clone(&left);
            at_once(
                move || {
                    let _ = left.register(region(a()));
                    assert!(left.is_pinned(a()), "an update was lost");
                    if !left.is_pinned(b()) {
                        witness.saw("left was first");
                    }
                },
                move || {
                    let _ = right.register(region(b()));
                    assert!(right.is_pinned(b()), "an update was lost");
                    if !right.is_pinned(a()) {
                        witness.saw("right was first");
                    }
                },
            );
            assert!(registry.is_pinned(a()), "an update was lost");
            assert!(registry.is_pinned(b()), "an update was lost");
            assert_eq!(registry.live_count(), 2);
        },
    },
    Model {
        name: "a_writer_sees_its_own_changes",
        promise: "what a thread has registered is seen by its reader, wherever another writer has got to",
        outcomes: &["before the other", "after the other"],
        furthest: None,
        body: |witness| {
            let _ = global();
            at_once(
                || register(a().as_ptr(), a().len()),
                move || {
                    for next in [b(), c()] {
                        register(next.as_ptr(), next.len());
                        assert!(is_pinned(next), "a thread's own change was not seen");
                    }
                    witness.saw(if is_pinned(a()) {
                        "after the other"
                    } else {
                        "before the other"
                    });
                },
            );
        },
    },
    Model {
        name: "a_winner_sees_the_losers_change",
        promise: "what a writer that had to begin anew has registered is seen by the one that was first",
        outcomes: &["handed over", "not yet"],
        furthest: None,
        body: |witness| {
            let _ = global();
            let flag = Flag::new();
            let raised = flag.clone();
            at_once(
                move || {
                    register(b().as_ptr(), b().len());
                    flag.raise();
                },
                move || {
                    register(a().as_ptr(), a().len());
                    // So that this thread's reader has a snapshot to be misled by.
                    assert!(is_pinned(a()), "a thread's own change was not seen");
                    if raised.is_raised() {
                        assert!(is_pinned(b()), "the other writer's change was not seen");
                        witness.saw("handed over");
                    } else {
                        witness.saw("not yet");
                    }
                },
            );
        },
    },
    Model {
        name: "register_against_unregister",
        promise: "a registration and a removal at once both take effect",
        outcomes: &["the removal was first", "the registration was first"],
        furthest: None,
        body: |witness| {
            let registry = global();
            let registration = registry.register(region(a()));
            at_once(
                move || {
                    registration.unregister();
                    if !registry.is_pinned(b()) {
                        witness.saw("the removal was first");
                    }
                },
                move || {
                    let _ = registry.register(region(b()));
                    if registry.is_pinned(a()) {
                        witness.saw("the registration was first");
                    }
                },
            );
            assert!(!registry.is_pinned(a()), "a removal was lost");
            assert!(registry.is_pinned(b()), "an update was lost");
        },
    },
    Model {
        name: "three_writers_register",
        promise: "the same with three writers: one of them may have to begin anew more than once",
        outcomes: &["one was first", "one was second", "one was third"],
        furthest: Some(3),
        body: |witness| {
            let registry = Arc::new(Registry::new());
            let writers = [a(), b(), c()].map(|bytes| {
                let registry = Arc::clone(&registry);
                thread::spawn(move || {
                    let _ = registry.register(region(bytes));
                    witness.saw(match registry.live_count() {
                        1 => "one was first",
                        2 => "one was second",
                        _ => "one was third",
                    });
                })
            });
            for writer in writers {
                writer.join().unwrap();
            }
            assert_eq!(registry.live_count(), 3, "an update was lost");
        },
    },
    Model {
        name: "two_writers_of_one_base",
        promise: "of two that register one base at once, one replaces the other, and the base stays",
        outcomes: &["left was last", "right was last"],
        furthest: None,
        body: |witness| {
            let _ = global();
            at_once(
                || register(b().as_ptr(), b().len()),
                || register(b().as_ptr(), bc().len()),
            );
            assert!(is_pinned(b()), "a base was lost");
            assert_eq!(live_count(), 1, "two entries of one base");
            witness.saw(if is_pinned(bc()) {
                "right was last"
            } else {
                "left was last"
            });
        },
    },
    Model {
        name: "register_all_is_seen_whole",
        promise: "regions registered together are seen together, or not at all",
        outcomes: &["none", "all"],
        furthest: None,
        body: |witness| {
            let writer = Arc::new(Registry::new());
            let reader = Arc::clone(&writer);
            at_once(
                move || {
                    let _ = writer.register_all([region(b()), region(c())]);
                },
                move || match reader.residency(bc()) {
                    Residency::Pageable => witness.saw("none"),
                    Residency::Seam => witness.saw("all"),
                    part => panic!("register_all was seen in part: {part:?}"),
                },
            );
        },
    },
    Model {
        name: "register_all_against_others",
        promise: "a change of many that puts another writer's change into what it has built loses neither",
        outcomes: &["many were first", "many were last"],
        furthest: Some(3),
        body: |witness| {
            let registry = global();
            let removed = registry.register(region(abc()));
            at_once(
                move || {
                    let _ = registry.register_all([region(b()), region(c())]);
                },
                move || {
                    removed.unregister();
                    let were_first = registry.is_pinned(bc());
                    let _ = registry.register(region(a()));
                    witness.saw(if were_first {
                        "many were first"
                    } else {
                        "many were last"
                    });
                },
            );
            let left: Vec<_> = registry.regions().map(|it| it.region()).collect();
            let expected = [a(), b(), c()].map(region);
            assert_eq!(left, expected, "an update was lost, or a removal");
        },
    },
    Model {
        name: "a_writer_panics",
        promise: "a writer that panics half-way has registered nothing, and holds up nobody",
        outcomes: &["the other was first", "the other was not first"],
        // Without a bound loom leaves out that the other writer is first, which
        // it finds with one (the witnesses told). See the README.
        furthest: Some(3),
        body: |witness| {
            let registry = Arc::new(Registry::new());
            let (panicking, other) = (Arc::clone(&registry), Arc::clone(&registry));
            at_once(
                move || {
                    let half_way = [Some(b()), None].into_iter().map(|bytes| match bytes {
                        Some(bytes) => region(bytes),
                        // A panic without its message, which would be noise.
                        None => resume_unwind(Box::new("half-way")),
                    });
                    let register = AssertUnwindSafe(|| panicking.register_all(half_way));
                    assert!(catch_unwind(register).is_err());
                    witness.saw(if panicking.is_pinned(a()) {
                        "the other was first"
                    } else {
                        "the other was not first"
                    });
                },
                move || {
                    let _ = other.register(region(a()));
                },
            );
            assert!(
                registry.is_pinned(a()),
                "a panic lost another writer's update"
            );
            let count = registry.live_count();
            assert_eq!(count, 1, "a writer that panicked registered a part");
        },
    },
];
