//! The progress bar, and log lines that do not get into its way.

use std::io::{self, IsTerminal as _, Write};
use std::time::Duration;

use indicatif::{HumanCount, ProgressBar, ProgressStyle};
use tracing_subscriber::fmt::MakeWriter;

/// A bar on standard error if that is a terminal, else nothing.
#[derive(Clone)]
pub(crate) struct Progress(ProgressBar);

impl Progress {
    pub(crate) fn new(duration: Duration) -> Self {
        if !io::stderr().is_terminal() {
            return Self(ProgressBar::hidden());
        }
        let bar = ProgressBar::new(milliseconds(duration));
        if let Ok(style) = ProgressStyle::with_template("{wide_bar} {msg}") {
            bar.set_style(style);
        }
        Self(bar)
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
        self.0.set_message(message);
        self.0.set_position(milliseconds(passed));
    }

    pub(crate) fn end(&self) {
        self.0.finish_and_clear();
    }
}

/// Writes log lines above the bar.
impl Write for Progress {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.suspend(|| io::stderr().write(line))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

impl<'a> MakeWriter<'a> for Progress {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
