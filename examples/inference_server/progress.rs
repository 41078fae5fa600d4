//! How far the run is.

use std::time::Duration;

use indicatif::HumanCount;

use crate::support::bar::Bar;

pub(crate) struct Progress(Bar);

impl Progress {
    pub(crate) fn new(duration: Duration) -> Self {
        Self(Bar::new(milliseconds(duration)))
    }

    pub(crate) fn bar(&self) -> &Bar {
        &self.0
    }

    pub(crate) fn show(&self, passed: Duration, copies: u64, torn: Option<u64>) {
        let mut message = format!(
            "{:.1} s  {} copies",
            passed.as_secs_f64(),
            HumanCount(copies)
        );
        if let Some(torn) = torn {
            message += &format!("  {} torn", HumanCount(torn));
        }
        self.0.show(milliseconds(passed), message);
    }

    pub(crate) fn end(&self) {
        self.0.end();
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
