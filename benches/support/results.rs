//! What the benches `contention` and `lookup` write beside criterion's results,
//! and where, for the report to read.

use std::env;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The file's name, in [`directory`].
pub(crate) const CONTENTION: &str = "contention.json";

/// What the bench `lookup` has measured by turns: a list of [`ByTurns`].
pub(crate) const BY_TURNS: &str = "lookup_by_turns.json";

/// What one lookup costs, measured by turns with other contestants.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct ByTurns {
    pub(crate) group: String,
    pub(crate) contestant: String,
    pub(crate) n: usize,
    pub(crate) nanoseconds: f64,
}

/// Where criterion writes its results: beside the folder that a bench or an
/// example was built in.
pub(crate) fn directory() -> PathBuf {
    if let Some(home) = env::var_os("CRITERION_HOME") {
        return home.into();
    }
    // The program is in `release/deps` or `release/examples` of the target
    // directory.
    let program = env::current_exe().unwrap_or_default();
    let target = program.ancestors().nth(3).unwrap_or(Path::new("target"));
    target.join("criterion")
}

#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Contention {
    pub(crate) machine: Machine,
    pub(crate) sharing: Vec<Sharing>,
    pub(crate) publishing: Vec<Publishing>,
}

/// What the benches ran on.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Machine {
    pub(crate) processor: String,
    pub(crate) cores: usize,
    pub(crate) system: String,
}

/// What a lookup costs each of several threads that look up all the time.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Sharing {
    pub(crate) contestant: String,
    pub(crate) threads: usize,
    pub(crate) nanoseconds: f64,
}

/// How long a reader's lookups take, by the batch, beside a writer.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Publishing {
    pub(crate) contestant: String,
    pub(crate) rate: Rate,
    /// How often the writer did publish, in a second.
    pub(crate) publishes: f64,
    /// How many lookups were timed together.
    pub(crate) batch: usize,
    // Of a batch, in nanoseconds.
    pub(crate) median: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
    pub(crate) max: f64,
}

/// How often a writer publishes.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Rate {
    /// Not at all.
    Never,
    /// So many times a second.
    PerSecond(u32),
    /// Again at once.
    Unlimited,
}
