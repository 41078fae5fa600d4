//! A progress bar, and log lines that do not get into its way.

use std::io::{self, IsTerminal as _, Write};

use indicatif::{ProgressBar, ProgressStyle};
use tracing_subscriber::fmt::MakeWriter;

/// A bar on standard error if that is a terminal, else nothing.
#[derive(Clone)]
pub(crate) struct Bar(ProgressBar);

impl Bar {
    /// A bar that is full at `length`.
    pub(crate) fn new(length: u64) -> Self {
        if !io::stderr().is_terminal() {
            return Self(ProgressBar::hidden());
        }
        let bar = ProgressBar::new(length);
        if let Ok(style) = ProgressStyle::with_template("{wide_bar} {msg}") {
            bar.set_style(style);
        }
        Self(bar)
    }

    /// Says from now on when the bar is full.
    pub(crate) fn set_length(&self, length: u64) {
        self.0.set_length(length);
    }

    pub(crate) fn show(&self, position: u64, message: String) {
        self.0.set_message(message);
        self.0.set_position(position);
    }

    pub(crate) fn end(&self) {
        self.0.finish_and_clear();
    }
}

/// Writes log lines above the bar.
impl Write for Bar {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.suspend(|| io::stderr().write(line))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

impl<'a> MakeWriter<'a> for Bar {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}
