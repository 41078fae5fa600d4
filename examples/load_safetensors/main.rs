//! Loads a safetensors file onto the device while it is being page-locked.
//!
//! A server that pins its weights before it copies them waits for minutes.
//! Here the file is memory-mapped, and pinned chunk by chunk in the
//! background, while its tensors are already copied straight from the mapping:
//! each copy does what suits the memory it finds, and no chunk is pinned or
//! unpinned under a copy. Then every tensor is copied back and compared.
//!
//! Runs on the CUDA driver if there is one, else on the simulated driver,
//! which reads page-locked memory as late as a device may and counts what it
//! finds changed or gone.
//!
//! ```text
//! cargo run --release --example load_safetensors -- model.safetensors
//! cargo run --release --example load_safetensors -- --no-pin
//! cargo run --release --example load_safetensors -- --seconds 30 --streams 8 --mib 256
//! ```
//!
//! `run.rs` has the pinning, `loader.rs` the copies.

mod args;
mod figures;
mod loader;
mod model;
mod progress;
mod run;
mod scratch;
#[path = "../support/mod.rs"]
mod support;
mod table;
mod weights;

use std::io::{self, Write as _};
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser as _;
use clap::error::ErrorKind;
use indicatif::{BinaryBytes, HumanCount};

use args::Args;
use figures::Figures;
use progress::Progress;
use support::args::refuse;
use support::driver::Driver;
use support::output::{self, Json, Output};
use support::warnings::{self, Waits};
use weights::Weights;

fn main() -> ExitCode {
    let args = Args::parse();
    let output = match &args.json {
        Some(path) if output::is_stdout(path) => Output::Stderr,
        _ => Output::Stdout,
    };
    let given = args.file.as_deref().map(open_or_refuse);
    let progress = Progress::new(args.seconds);
    let waits = if args.verbose {
        Waits::InFull
    } else {
        Waits::Hidden
    };
    warnings::show(waits, progress.bar());
    let driver = match Driver::choose::<Args>(args.driver, false) {
        Ok(driver) => driver,
        Err(error) => return fail(&error),
    };
    let json = args.json.as_deref().map(Json::open::<Args>);
    let figures = given
        .map_or_else(|| make_model(&args), Ok)
        .and_then(|weights| run_load(&args, &driver, &weights, output, &progress));
    progress.end();
    match figures {
        Ok(figures) => report(&figures, output, json),
        Err(error) => {
            if let Some(json) = json {
                json.discard();
            }
            fail(&error)
        }
    }
}

fn open_or_refuse(path: &Path) -> Weights {
    Weights::open(path).unwrap_or_else(|error| {
        refuse::<Args>(
            ErrorKind::ValueValidation,
            &format!("cannot load '{}': {error:#}", path.display()),
        )
    })
}

fn make_model(args: &Args) -> anyhow::Result<Weights> {
    let folder = tempfile::tempdir().context(
        "making a temporary folder for the model; set TMPDIR to a folder that you may write to",
    )?;
    let path = folder.path().join("model.safetensors");
    model::write(&path, (args.mib as usize) << 20)?;
    // The folder may go: the file stays for as long as it is mapped.
    Weights::open(&path).context("opening the model just made")
}

/// Loads the weights; when this returns, all that belongs to the device is
/// gone.
fn run_load(
    args: &Args,
    driver: &Driver,
    weights: &Weights,
    output: Output,
    progress: &Progress,
) -> anyhow::Result<Figures> {
    let context = pinned_hosts::cuda::context(0)?;
    let device = context.name()?;
    let file = match &args.file {
        Some(path) => format!("of '{}'", path.display()),
        None => "made for this".to_owned(),
    };
    output.say(&format!(
        "{} driver, {} streams, {} {file}, {}",
        driver.name(),
        args.streams,
        BinaryBytes(weights.bytes()),
        if args.no_pin {
            "not pinned"
        } else {
            "pinned meanwhile"
        }
    ))?;
    progress.begin(weights.bytes());
    let totals = match args.seconds {
        None => run::once(args, driver, &context, weights, progress),
        Some(duration) => run::repeatedly(args, &context, weights, progress, duration),
    }?;
    driver.drain();
    Ok(Figures::new(driver, device, args.streams, weights, &totals))
}

fn report(figures: &Figures, output: Output, json: Option<Json>) -> ExitCode {
    // Both, even if one fails: each may be all that somebody looks at.
    let verdict = show(figures, output);
    let written = json.map_or(Ok(()), |json| json.write(figures));
    match (verdict, written) {
        (Ok(code), Ok(())) => code,
        (Err(error), Ok(())) | (Ok(_), Err(error)) => fail(&error),
        (Err(error), Err(other)) => {
            fail(&error);
            fail(&other)
        }
    }
}

fn show(figures: &Figures, output: Output) -> anyhow::Result<ExitCode> {
    output.say(&table::table(figures, output.columns()))?;
    if let Some(error) = &figures.pinning_error {
        output.say(&format!(
            "Not pinned, and loaded all the same, but slower: {error}."
        ))?;
    }
    if figures.is_sound() {
        output.say("Sound: the device holds what the file holds.")?;
        return Ok(ExitCode::SUCCESS);
    }
    complain(&format!(
        "UNSOUND: {} tensors differ on the device, {} transfers were torn and {} read memory \
         that was gone, although each copy was checked. If nobody wrote to the file meanwhile, \
         this is a bug in pinned-hosts; please report it.",
        HumanCount(figures.mismatched_tensors),
        HumanCount(figures.torn_transfers),
        HumanCount(figures.dead_reads.unwrap_or(0))
    ));
    Ok(ExitCode::FAILURE)
}

fn fail(error: &anyhow::Error) -> ExitCode {
    complain(&format!("error: {error:#}"));
    ExitCode::FAILURE
}

/// Prints to standard error. If that fails there is nowhere left to say so.
fn complain(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}
