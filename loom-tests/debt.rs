//! A second layer: that the contract which `src/sync.rs` states for `ArcSwap`
//! can be kept at all, by a protocol of the kind that `arc-swap` uses.
//!
//! **This is a model of an algorithm, in miniature. It is not the code of
//! `arc-swap`**, which loom cannot run, and says nothing about mistakes there.
//!
//! # The algorithm
//!
//! A value's count of holders must not drop to zero while a reader is about to
//! use it; but a reader must not touch the count, a line that all share. So it
//! writes down a *debt*: the value it is about to use, in a slot of its own.
//!
//! - A reader reads which value is published, writes it down as its debt, and
//!   looks again. If another value is published by now, it strikes the debt
//!   and begins anew; if it cannot, a writer has paid it, and the reader owns
//!   a count instead.
//! - A writer publishes another value, then looks into every slot. Where it
//!   finds the old value as a debt, it pays: adds a holder to the old value,
//!   and strikes the debt. Only then does it let go of its own hold.
//!
//! Between "write the debt, look again" and "publish, look into the slots"
//! stands a fence on either side. If the reader's fence is first, the writer
//! sees the debt and pays. If the writer's is first, the reader sees the new
//! value and does not use the old one. Without one of the fences both may
//! miss, and the reader uses a value that is gone.
//!
//! A value that is gone is poisoned, not freed: a real use after free would
//! wreck loom itself.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering, fence};

use crate::cells::at_once;
use crate::faults::is_asked_for;
use crate::model::{Model, Witness};

pub(crate) const MODELS: [Model; 2] = [
    Model {
        name: "debts_keep_what_a_reader_uses",
        promise: "(an algorithm, not this crate's code) what a load returns is not let go of while it is used",
        outcomes: &["old", "new", "paid"],
        furthest: None,
        body: |witness| {
            let cell = Arc::new(Cell::new());
            let (writer, reader) = (Arc::clone(&cell), Arc::clone(&cell));
            at_once(move || writer.publish(1), move || reader.read(witness));
            cell.check_counts();
        },
    },
    Model {
        name: "debts_with_two_publishes",
        promise: "(an algorithm, not this crate's code) the same while two values are published",
        outcomes: &["old", "new", "newest", "paid"],
        furthest: Some(3),
        body: |witness| {
            let cell = Arc::new(Cell::new());
            let (writer, reader) = (Arc::clone(&cell), Arc::clone(&cell));
            at_once(
                move || {
                    writer.publish(1);
                    writer.publish(2);
                },
                move || reader.read(witness),
            );
            cell.check_counts();
        },
    },
];

const VALUES: usize = 3;
const NO_DEBT: usize = VALUES;

/// A value that is published, or was.
struct Value {
    holders: AtomicUsize,
    /// Written when the last holder lets go. Loom reports a reader that is
    /// not ordered before that.
    gone: UnsafeCell<bool>,
}

impl Value {
    /// # Panics
    ///
    /// If it is gone.
    fn use_it(&self) {
        // SAFETY: nobody writes while anybody may read; loom checks it.
        let gone = self.gone.with(|gone| unsafe { *gone });
        assert!(!gone, "a value was used after its last holder let go of it");
    }

    fn let_go(&self) {
        // As an `Arc`: whoever is last sees what all others did before.
        if self.holders.fetch_sub(1, Ordering::AcqRel) == 1 {
            // SAFETY: no holder is left; loom checks it.
            self.gone.with_mut(|gone| unsafe { *gone = true });
        }
    }
}

/// What an `ArcSwap` is in this miniature, with one reader's slot.
struct Cell {
    published: AtomicUsize,
    debt: AtomicUsize,
    values: [Value; VALUES],
}

impl Cell {
    fn new() -> Self {
        Self {
            published: AtomicUsize::new(0),
            debt: AtomicUsize::new(NO_DEBT),
            // The cell holds each value until it publishes another.
            values: std::array::from_fn(|_| Value {
                holders: AtomicUsize::new(1),
                gone: UnsafeCell::new(false),
            }),
        }
    }

    fn read(&self, witness: &Witness) {
        let number = loop {
            let number = self.published.load(Ordering::Acquire);
            self.debt.store(number, Ordering::Relaxed);
            if !is_asked_for("debt_reader_without_fence") {
                fence(Ordering::SeqCst);
            }
            let confirmed = self.published.load(Ordering::Acquire) == number;
            if confirmed || is_asked_for("debt_not_confirmed") {
                break number;
            }
            if !self.strike(number) {
                // Paid by a writer: the count is this reader's to give back.
                self.values[number].let_go();
            }
        };
        let value = &self.values[number];
        value.use_it();
        witness.saw(["old", "new", "newest"][number]);
        if !self.strike(number) {
            witness.saw("paid");
            value.let_go();
        }
    }

    /// Takes back the debt, unless a writer has paid it.
    fn strike(&self, number: usize) -> bool {
        // Release: the writer that finds no debt lets go of the value after
        // the reader's use of it.
        let order = if is_asked_for("debt_struck_relaxed") {
            Ordering::Relaxed
        } else {
            Ordering::AcqRel
        };
        self.debt
            .compare_exchange(number, NO_DEBT, order, Ordering::Acquire)
            .is_ok()
    }

    fn publish(&self, number: usize) {
        let old = self.published.swap(number, Ordering::AcqRel);
        if !is_asked_for("debt_writer_without_fence") {
            fence(Ordering::SeqCst);
        }
        let value = &self.values[old];
        if self.debt.load(Ordering::Acquire) == old && !is_asked_for("debt_not_paid") {
            // The count first: once the debt is struck, the reader gives back.
            value.holders.fetch_add(1, Ordering::Relaxed);
            let paid =
                self.debt
                    .compare_exchange(old, NO_DEBT, Ordering::AcqRel, Ordering::Acquire);
            if paid.is_err() {
                value.let_go();
            }
        }
        value.let_go();
    }

    /// After all are done: the published value has one holder, the others
    /// none, or one if they were never published.
    fn check_counts(&self) {
        let published = self.published.load(Ordering::Acquire);
        for (number, value) in self.values.iter().enumerate() {
            let holders = value.holders.load(Ordering::Acquire);
            let expected = usize::from(number >= published);
            assert_eq!(holders, expected, "holders of value {number}");
        }
    }
}
