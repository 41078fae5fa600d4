//! What a model is, and how it is explored.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::faults::is_asked_for;

/// How many times a thread may be interrupted while it could go on, in one
/// execution; `None` for any number.
pub(crate) type Bound = Option<usize>;

/// One promise, as a program that loom runs in every order that the bound
/// allows.
pub(crate) struct Model {
    pub(crate) name: &'static str,
    /// What it shows, in a sentence.
    pub(crate) promise: &'static str,
    /// What has to be seen in some execution each. A model in which the
    /// reader never met the writer would show nothing.
    pub(crate) outcomes: &'static [&'static str],
    /// The furthest bound that ends in reasonable time: it is not explored
    /// further, whatever is asked for.
    pub(crate) furthest: Bound,
    pub(crate) body: fn(&'static Witness),
}

/// What the executions of a model saw. Loom does not see it: it uses `std`'s
/// types, so it adds no order.
#[derive(Default)]
pub(crate) struct Witness {
    executions: AtomicU64,
    seen: Mutex<BTreeMap<&'static str, u64>>,
}

impl Witness {
    pub(crate) fn saw(&self, outcome: &'static str) {
        *self.seen.lock().unwrap().entry(outcome).or_default() += 1;
    }
}

/// Waits for the word that loom says only of a model that it has explored to
/// its end. One that ends at a limit returns like any other.
#[derive(Clone, Default)]
struct Completed(Arc<AtomicBool>);

impl tracing::Subscriber for Completed {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() == tracing::Level::INFO
    }

    fn event(&self, event: &tracing::Event<'_>) {
        event.record(
            &mut |field: &tracing::field::Field, value: &dyn fmt::Debug| {
                if field.name() == "message" && format!("{value:?}").starts_with("Completed in") {
                    self.0.store(true, Ordering::Relaxed);
                }
            },
        );
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// What exploring a model came to.
pub(crate) struct Explored {
    pub(crate) executions: u64,
    pub(crate) time: Duration,
    /// The declared outcomes that no execution saw.
    pub(crate) unseen: Vec<&'static str>,
}

impl Model {
    /// `bound`, or the furthest one if that is nearer.
    pub(crate) fn at_most(&self, bound: Bound) -> Bound {
        match (bound, self.furthest) {
            (Some(asked), Some(furthest)) => Some(asked.min(furthest)),
            (asked, furthest) => asked.or(furthest),
        }
    }

    /// Explores the model up to `bound`, to the end: loom's own limits on
    /// time and number, which end a model as if it had passed, are off.
    /// Panics if an execution fails.
    pub(crate) fn explore(&self, bound: Bound) -> Explored {
        let witness: &'static Witness = Box::leak(Box::default());
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = bound;
        builder.max_duration = None;
        builder.max_permutations = None;
        builder.checkpoint_file = None;
        builder.max_branches = 10_000;
        if is_asked_for("model_cut_short") {
            builder.checkpoint_interval = 1;
            builder.max_permutations = Some(40);
        }

        let started = Instant::now();
        let body = self.body;
        let completed = Completed::default();
        tracing::subscriber::with_default(completed.clone(), || {
            builder.check(move || {
                witness.executions.fetch_add(1, Ordering::Relaxed);
                body(witness);
            });
        });
        assert!(
            completed.0.load(Ordering::Relaxed),
            "{} was cut short: loom did not say that it completed",
            self.name
        );

        let seen = witness.seen.lock().unwrap();
        for outcome in seen.keys() {
            assert!(
                self.outcomes.contains(outcome),
                "{} saw \"{outcome}\", which it does not declare",
                self.name
            );
        }
        Explored {
            executions: witness.executions.load(Ordering::Relaxed),
            time: started.elapsed(),
            unseen: self
                .outcomes
                .iter()
                .filter(|outcome| !seen.contains_key(*outcome))
                .copied()
                .collect(),
        }
    }
}
