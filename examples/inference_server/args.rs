//! The command line.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, ValueEnum};

const LONGEST: f64 = 86_400.0;

/// Runs the copies of an inference server, checked by `pinned-hosts`.
///
/// Each stream is a thread that makes decode steps: token ids and positions
/// from the stack, block tables from short-lived `Vec`s, slices of page-locked
/// blobs. Another thread pins and unpins memory meanwhile.
#[derive(Debug, Parser)]
#[command(
    name = "inference_server",
    after_help = "\
Exit code: 0 if all copies were sound (with --unguarded: if the faults showed), \
1 if not or if the run failed, 2 for bad arguments."
)]
pub(crate) struct Args {
    /// Streams to copy on, each with a thread of its own.
    #[arg(long, value_name = "N", default_value_t = 4, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) streams: u16,

    /// How long to run, in seconds; fractions are fine.
    #[arg(long, value_name = "S", default_value = "5", allow_negative_numbers = true,
          value_parser = duration)]
    pub(crate) seconds: Duration,

    /// Write the figures to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,

    /// Run the same job with the check off, to see what it prevents. Not on a
    /// real driver, where the faults would corrupt memory.
    #[arg(long)]
    pub(crate) unguarded: bool,

    /// Which CUDA driver to use.
    #[arg(long, value_enum, default_value_t = Choice::Auto)]
    pub(crate) driver: Choice,
}

/// A wish for a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Choice {
    /// The real one if it has a device (but never for --unguarded), else the
    /// simulated one.
    Auto,
    /// The installed driver.
    Real,
    /// The stand-in that comes with the tests; needs no GPU.
    Simulated,
}

impl Args {
    /// Reads the command line; ends the process if it is wrong.
    pub(crate) fn read() -> Self {
        let args = Self::parse();
        if args.unguarded && args.driver == Choice::Real {
            refuse(
                ErrorKind::ArgumentConflict,
                "--unguarded would let a real device read memory that has been freed or \
                 rewritten; run it with --driver simulated",
            );
        }
        args
    }
}

/// Ends the process as for any other bad argument: with exit code 2.
pub(crate) fn refuse(kind: ErrorKind, message: &str) -> ! {
    Args::command().error(kind, message).exit()
}

fn duration(text: &str) -> Result<Duration, String> {
    let advice = || format!("give a number of seconds above 0 and up to {LONGEST}");
    let seconds: f64 = text.parse().map_err(|_| advice())?;
    // Written so that NaN is refused too.
    if !(seconds > 0.0 && seconds <= LONGEST) {
        return Err(advice());
    }
    Duration::try_from_secs_f64(seconds).map_err(|_| advice())
}

/// The file that the figures go to: opened before the run, so that a wrong
/// path is noticed at once and not after it.
pub(crate) struct JsonFile {
    file: File,
    path: PathBuf,
    /// Made by this run, so taken away again if there is nothing to write.
    is_new: bool,
}

impl JsonFile {
    /// Opens the file; ends the process if that fails. What it holds stays
    /// until there are figures to replace it.
    pub(crate) fn open(path: &Path) -> Self {
        let is_new = !path.exists();
        let opened = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(path);
        match opened {
            Ok(file) => Self {
                file,
                path: path.to_owned(),
                is_new,
            },
            Err(error) => refuse(
                ErrorKind::Io,
                &format!(
                    "cannot write to '{}' for '--json': {error}; name a file in an existing \
                     folder that you may write to",
                    path.display()
                ),
            ),
        }
    }

    pub(crate) fn write(mut self, json: &str) -> io::Result<()> {
        // A pipe or a terminal has nothing to cut off.
        if self.file.metadata()?.is_file() {
            self.file.set_len(0)?;
        }
        self.file.write_all(json.as_bytes())?;
        self.file.write_all(b"\n")
    }

    /// Leaves things as they were: the run failed.
    pub(crate) fn discard(self) {
        if self.is_new {
            // The run's own error is what matters now.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
