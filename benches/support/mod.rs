//! What the benches share.

pub(crate) mod publish;
pub(crate) mod results;
pub(crate) mod workload;

use std::time::Duration;

use criterion::Criterion;

/// Short enough that all benches together end within a quarter of an hour.
pub(crate) fn criterion() -> Criterion {
    Criterion::default()
        .without_plots()
        .sample_size(15)
        .nresamples(5_000)
        .warm_up_time(Duration::from_millis(150))
        .measurement_time(Duration::from_millis(450))
}
