//! The beginning and the end of a thread: its reader is made at its first
//! lookup and dropped when it exits, and nothing is leaked or answered from
//! what is gone. That nothing is leaked is checked by loom, at the end of
//! every execution of every model.

use loom::thread;
use pinned_hosts::{after_the_threads_reader, global, is_pinned, live_count, register, unregister};

use crate::cells::{Flag, a, at_once};
use crate::model::Model;

pub(crate) const MODELS: [Model; 2] = [
    Model {
        name: "a_threads_reader_is_dropped_with_it",
        promise: "a thread that exits lets go of its snapshot, whatever is published meanwhile",
        outcomes: &["pinned", "pageable"],
        furthest: None,
        body: |witness| {
            let _ = global();
            at_once(
                || {
                    register(a().as_ptr(), a().len());
                    unregister(a().as_ptr());
                },
                move || witness.saw(if is_pinned(a()) { "pinned" } else { "pageable" }),
            );
            assert_eq!(live_count(), 0);
        },
    },
    Model {
        name: "a_lookup_in_a_destructor_is_right",
        promise: "a lookup on a thread that exits, after the thread's reader is gone, sees what happens-before it",
        outcomes: &["handed over", "not yet", "seen early"],
        furthest: None,
        body: |witness| {
            let _ = global();
            let (registered, done) = (Flag::new(), Flag::new());
            let (raise_registered, raise_done) = (registered.clone(), done.clone());
            at_once(
                move || {
                    register(a().as_ptr(), a().len());
                    raise_registered.raise();
                },
                move || {
                    let _ = is_pinned(a());
                    after_the_threads_reader(Box::new(move || {
                        if is_pinned(a()) {
                            witness.saw("seen early");
                        }
                        if registered.is_raised() {
                            let sees = is_pinned(a());
                            assert!(sees, "a lookup in a destructor missed a registration");
                            witness.saw("handed over");
                        } else {
                            witness.saw("not yet");
                        }
                        raise_done.raise();
                    }));
                },
            );
            // Loom joins a thread before its destructors have run.
            while !done.is_raised() {
                thread::yield_now();
            }
        },
    },
];
