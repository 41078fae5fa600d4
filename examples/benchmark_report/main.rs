//! Turns the results of the last `cargo bench` into `BENCHMARKS.md`'s tables and
//! plots, and says which of the project's goals they meet.
//!
//! ```text
//! cargo bench
//! cargo run --release --example benchmark_report
//! ```
//!
//! Every figure in the tables is computed here: none is copied by hand.

mod error;
mod goals;
mod markers;
mod measured;
mod plots;
#[path = "../../benches/support/results.rs"]
#[allow(dead_code, reason = "the bench writes, the report reads")]
mod results;
mod tables;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;

use error::ReportError;
use measured::Measured;

/// Writes the tables of BENCHMARKS.md and its plots from the results of the
/// last `cargo bench`.
#[derive(Debug, Parser)]
#[command(name = "benchmark_report", version)]
struct Args {
    /// Where criterion wrote its results.
    #[arg(long, value_name = "DIR", default_value_os_t = results::directory())]
    from: PathBuf,

    /// The document, with a pair of markers for each table.
    #[arg(long, value_name = "FILE", default_value_os_t = in_repository("BENCHMARKS.md"))]
    document: PathBuf,

    /// Where the plots go.
    #[arg(long, value_name = "DIR", default_value_os_t = in_repository("benches/results"))]
    plots: PathBuf,

    /// Only print the goals, and write nothing.
    #[arg(long)]
    goals: bool,
}

fn in_repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn main() -> ExitCode {
    match report(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn report(args: &Args) -> Result<(), ReportError> {
    let measured = Measured::read(&args.from)?;
    let goals = goals::table(&measured)?;
    println!("{goals}");
    if args.goals {
        return Ok(());
    }

    let mut document = read(&args.document)?;
    for (marker, table) in tables::all(&measured)? {
        document = markers::fill(&document, marker, &table)?;
    }
    document = markers::fill(&document, "goals", &goals)?;

    fs::create_dir_all(&args.plots).map_err(|error| ReportError::file(&args.plots, error))?;
    plots::draw(&measured, &args.plots)?;
    fs::write(&args.document, document).map_err(|error| ReportError::file(&args.document, error))
}

fn read(path: &Path) -> Result<String, ReportError> {
    fs::read_to_string(path).map_err(|error| ReportError::file(path, error))
}
