//! How long to measure.

use std::env;
use std::time::Duration;

use criterion::Criterion;

/// Whether this is a run with `--quick`: a first look, not figures to rely on.
pub(crate) fn is_quick() -> bool {
    env::args().any(|argument| argument == "--quick")
}

/// Short enough that all benches together end within a quarter of an hour, or
/// within two minutes if quick.
pub(crate) fn criterion() -> Criterion {
    let measurement = if is_quick() { 120 } else { 450 };
    Criterion::default()
        .without_plots()
        .sample_size(15)
        .nresamples(5_000)
        .warm_up_time(Duration::from_millis(150))
        .measurement_time(Duration::from_millis(measurement))
}
