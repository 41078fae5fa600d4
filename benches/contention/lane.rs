//! One contestant, in the two settings.

use std::time::Duration;

use crate::publishing::{Beside, beside_a_writer};
use crate::rivals::{Changeable, Contestant, OwnRegistry};
use crate::sharing::shared_by;
use crate::support::results::Rate;
use crate::support::workload::Workload;

pub(crate) trait Lane {
    fn name(&self) -> &'static str;

    /// What a lookup costs each of so many threads, in nanoseconds.
    fn shared_by(&self, threads: usize, stint: Duration) -> f64;

    /// How long a reader's batches take while a writer publishes.
    fn beside_a_writer(&self, rate: Rate, stint: Duration) -> Beside;
}

/// A contestant that the writer changes.
struct Changing<'w, C> {
    contestant: C,
    workload: &'w Workload<'w>,
}

pub(crate) fn changing<'w, C: Changeable + 'w>(workload: &'w Workload<'w>) -> Box<dyn Lane + 'w> {
    let contestant = C::holding(workload.regions());
    workload.check(&contestant);
    Box::new(Changing {
        contestant,
        workload,
    })
}

impl<C: Changeable> Lane for Changing<'_, C> {
    fn name(&self) -> &'static str {
        C::NAME
    }

    fn shared_by(&self, threads: usize, stint: Duration) -> f64 {
        shared_by(&self.contestant, self.workload, threads, stint)
    }

    fn beside_a_writer(&self, rate: Rate, stint: Duration) -> Beside {
        let same = &self.contestant;
        beside_a_writer(same, same, self.workload, rate, stint)
    }
}

/// A contestant that never changes. The writer beside it publishes to a
/// registry that nobody asks: the same load on the machine.
struct Fixed<'w, C> {
    contestant: C,
    unrelated: OwnRegistry,
    workload: &'w Workload<'w>,
}

pub(crate) fn fixed<'w, C: Contestant + 'w>(workload: &'w Workload<'w>) -> Box<dyn Lane + 'w> {
    Box::new(Fixed {
        contestant: C::holding(workload.regions()),
        unrelated: OwnRegistry::holding(workload.regions()),
        workload,
    })
}

impl<C: Contestant> Lane for Fixed<'_, C> {
    fn name(&self) -> &'static str {
        C::NAME
    }

    fn shared_by(&self, threads: usize, stint: Duration) -> f64 {
        shared_by(&self.contestant, self.workload, threads, stint)
    }

    fn beside_a_writer(&self, rate: Rate, stint: Duration) -> Beside {
        beside_a_writer(
            &self.contestant,
            &self.unrelated,
            self.workload,
            rate,
            stint,
        )
    }
}
