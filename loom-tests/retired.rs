//! What writers do with superseded snapshots: `src/retired.rs` by itself. Values
//! stand for the snapshots; a reader has a hold on one from before it was
//! superseded.

use std::cell::Cell;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use pinned_hosts::{Hold, RetiredHolds};

use crate::cells::at_once;
use crate::model::{Model, Witness};

pub(crate) const MODELS: [Model; 2] = [
    Model {
        name: "a_reader_frees_nothing",
        promise: "of a superseded snapshot that a reader holds, a writer drops the last hold",
        outcomes: &["freed by a writer", "kept to the end"],
        furthest: None,
        body: |witness| {
            let stack = Arc::new(RetiredHolds::empty());
            let retired = Arc::clone(&stack);
            let first = Value::made(witness);
            let held = first.clone();
            at_once(
                move || read(held),
                move || {
                    retired.retire(first);
                    retired.retire(Value::made(witness));
                },
            );
            // With all that it has kept.
            AT_THE_END.with(|it| it.set(true));
            drop(stack);
        },
    },
    Model {
        name: "two_writers_retire",
        promise: "the same of what two writers supersede at once, of which none is lost",
        outcomes: &["freed by a writer", "kept to the end"],
        furthest: Some(2),
        body: |witness| {
            let stack = Arc::new(RetiredHolds::empty());
            let first = Value::made(witness);
            let held = first.clone();
            let reader = thread::spawn(move || read(held));
            let (left, right) = (Arc::clone(&stack), Arc::clone(&stack));
            at_once(
                move || left.retire(first),
                move || right.retire(Value::made(witness)),
            );
            reader.join().unwrap();
            AT_THE_END.with(|it| it.set(true));
            drop(stack);
        },
    },
];

loom::thread_local! {
    static IS_READER: Cell<bool> = Cell::new(false);
    static AT_THE_END: Cell<bool> = Cell::new(false);
}

/// What a reader does: it hands its hold on, as to a `Segments`, and drops both.
fn read(held: Hold<Value>) {
    IS_READER.with(|it| it.set(true));
    let more = held.clone();
    drop(held);
    drop(more);
}

/// Stands for a snapshot. It is written as it is made, and read as it is freed,
/// which is an error if the one is not ordered after the other.
struct Value {
    contents: UnsafeCell<u8>,
    witness: &'static Witness,
}

impl Value {
    fn made(witness: &'static Witness) -> Hold<Self> {
        let contents = UnsafeCell::new(0);
        // SAFETY: nobody else has the cell yet.
        contents.with_mut(|it| unsafe { *it = 1 });
        Hold::on(Self { contents, witness })
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        // SAFETY: whoever drops the value is the last to have it.
        self.contents.with(|it| unsafe { assert_eq!(*it, 1) });
        assert!(!IS_READER.with(Cell::get), "a reader freed a snapshot");
        let at_the_end = AT_THE_END.with(Cell::get);
        self.witness.saw(if at_the_end {
            "kept to the end"
        } else {
            "freed by a writer"
        });
    }
}
