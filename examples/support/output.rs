//! Where the results go: text for people to one place, figures to another.

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal as _, Write};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::CommandFactory;
use clap::error::ErrorKind;
use serde::Serialize;

use super::args::refuse;

/// A stream for text.
#[derive(Clone, Copy)]
pub(crate) enum Output {
    Stdout,
    Stderr,
}

impl Output {
    /// Writes `text` and ends the line. Whoever closed a pipe does not want to
    /// read on, and the exit code still tells; any other failure is one.
    pub(crate) fn say(self, text: &str) -> anyhow::Result<()> {
        let written = match self {
            Self::Stdout => write_line(&mut io::stdout().lock(), text),
            Self::Stderr => write_line(&mut io::stderr().lock(), text),
        };
        match written {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            written => written.with_context(|| format!("cannot write to {}", self.name())),
        }
    }

    /// The columns of the terminal that this is, if it is one.
    pub(crate) fn columns(self) -> Option<usize> {
        match self {
            Self::Stdout if io::stdout().is_terminal() => terminal_columns(&io::stdout()),
            Self::Stderr if io::stderr().is_terminal() => terminal_columns(&io::stderr()),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Stdout => "standard output",
            Self::Stderr => "standard error",
        }
    }
}

#[cfg(unix)]
fn terminal_columns(terminal: &impl std::os::fd::AsRawFd) -> Option<usize> {
    let mut size = libc::winsize {
        ws_row: 0,
        ws_col: 0,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: this request writes one `winsize`, and there is room for it.
    let asked = unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCGWINSZ, &raw mut size) };
    // A terminal that does not know its size says 0.
    (asked == 0 && size.ws_col > 0).then(|| size.ws_col.into())
}

#[cfg(not(unix))]
fn terminal_columns<T>(_terminal: &T) -> Option<usize> {
    None
}

/// Where the figures go.
pub(crate) enum Json {
    Stdout,
    File(JsonFile),
}

/// Opened before the run, so that a wrong path is noticed at once and not
/// after it.
pub(crate) struct JsonFile {
    file: File,
    path: PathBuf,
    /// Made by this run, so taken away again if there is nothing to write.
    is_new: bool,
}

impl Json {
    /// Opens the file, if `path` is one; ends the process if that fails. What
    /// the file holds stays until there are figures to replace it.
    pub(crate) fn open<A: CommandFactory>(path: &Path) -> Self {
        if is_stdout(path) {
            return Self::Stdout;
        }
        let is_new = !path.exists();
        let opened = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(path);
        match opened {
            Ok(file) => Self::File(JsonFile {
                file,
                path: path.to_owned(),
                is_new,
            }),
            Err(error) => refuse::<A>(
                ErrorKind::Io,
                &format!(
                    "cannot write to '{}' for '--json': {error}; name a file in an existing \
                     folder that you may write to",
                    path.display()
                ),
            ),
        }
    }

    pub(crate) fn write(self, figures: &impl Serialize) -> anyhow::Result<()> {
        let json =
            serde_json::to_string_pretty(figures).context("putting the figures into JSON")?;
        match self {
            Self::Stdout => Output::Stdout.say(&json),
            Self::File(file) => {
                let path = file.path.clone();
                file.write(&json)
                    .with_context(|| format!("cannot write to '{}'", path.display()))
            }
        }
    }

    /// Leaves things as they were: the run failed.
    pub(crate) fn discard(self) {
        if let Self::File(JsonFile {
            path, is_new: true, ..
        }) = self
        {
            // The run's own error is what matters now.
            let _ = std::fs::remove_file(path);
        }
    }
}

impl JsonFile {
    fn write(mut self, json: &str) -> io::Result<()> {
        // A pipe or a terminal has nothing to cut off.
        if self.file.metadata()?.is_file() {
            self.file.set_len(0)?;
        }
        write_line(&mut self.file, json)
    }
}

/// As for most programs; a file of this name is `./-`.
pub(crate) fn is_stdout(path: &Path) -> bool {
    path.as_os_str() == "-"
}

fn write_line(to: &mut impl Write, text: &str) -> io::Result<()> {
    to.write_all(text.as_bytes())?;
    to.write_all(b"\n")?;
    to.flush()
}
