//! Arguments that mean the same everywhere.

use std::time::Duration;

use clap::error::ErrorKind;
use clap::{CommandFactory, ValueEnum};

const LONGEST: f64 = 86_400.0;

/// A wish for a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Choice {
    /// The real one if it has a device, else the simulated one.
    Auto,
    /// The installed driver.
    Real,
    /// The stand-in that comes with the tests; needs no GPU.
    Simulated,
}

/// Ends the process as for any other bad argument of `A`: with exit code 2.
pub(crate) fn refuse<A: CommandFactory>(kind: ErrorKind, message: &str) -> ! {
    A::command().error(kind, message).exit()
}

/// Reads a number of seconds.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let advice = || format!("give a number of seconds above 0 and up to {LONGEST}");
    let seconds: f64 = text.parse().map_err(|_| advice())?;
    // Written so that NaN is refused too.
    if !(seconds > 0.0 && seconds <= LONGEST) {
        return Err(advice());
    }
    Duration::try_from_secs_f64(seconds).map_err(|_| advice())
}
