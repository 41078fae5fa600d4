//! Counts the instructions of a whole child under `valgrind`'s callgrind.
//!
//! That takes in the start of the process, which varies by some hundred
//! instructions: the child has to ask often enough for that not to matter.

use std::io;
use std::process::{Command, ExitStatus, Stdio};

/// Why there is no count.
#[derive(Debug)]
pub(crate) enum Error {
    Run(io::Error),
    Ended(ExitStatus, String),
    /// It printed no total.
    NoTotal(String),
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Run(error) => write!(f, "valgrind could not be run: {error}"),
            Self::Ended(status, output) => write!(f, "valgrind failed: {status}\n{output}"),
            Self::NoTotal(output) => write!(f, "valgrind printed no total:\n{output}"),
        }
    }
}

impl std::error::Error for Error {}

/// Whether `valgrind` can be run.
pub(crate) fn is_installed() -> bool {
    let version = Command::new("valgrind")
        .arg("--version")
        .stdin(Stdio::null())
        .output();
    version.is_ok_and(|output| output.status.success())
}

/// How many instructions `command` takes, from its start to its end.
pub(crate) fn count(command: &Command) -> Result<u64, Error> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(command.get_program())
        .args(command.get_args())
        // With this it would ask a server for the symbols of the C library.
        .env_remove("DEBUGINFOD_URLS")
        .stdin(Stdio::null())
        .output()
        .map_err(Error::Run)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if !output.status.success() {
        return Err(Error::Ended(output.status, said));
    }
    total(&said).ok_or(Error::NoTotal(said))
}

/// The number in `==123== Collected : 456`.
fn total(said: &str) -> Option<u64> {
    let (_, number) = said
        .lines()
        .find_map(|line| line.split_once(" Collected : "))?;
    number.trim().parse().ok()
}
