//! The copies of an inference server, each checked by the registry.
//!
//! Several streams make decode steps and copy what a server copies, from the
//! stack, from short-lived `Vec`s and from page-locked memory that is written
//! again or freed right after the call, while another thread pins and unpins.
//! Runs on the CUDA driver if there is one, else on the simulated driver,
//! which reads page-locked memory as late as a device may and counts what it
//! finds changed or freed.
//!
//! ```text
//! cargo run --release --example inference_server
//! cargo run --release --example inference_server -- --unguarded
//! ```
//!
//! `step.rs` has the copies. `path.rs` has the two ways to make them.

mod arena;
mod args;
mod figures;
mod measure;
mod mirror;
mod path;
mod pinner;
mod progress;
mod run;
mod step;
#[path = "../support/mod.rs"]
mod support;
mod table;

use std::io::{self, Write as _};
use std::process::ExitCode;

use indicatif::HumanCount;

use args::{Args, PolicyChoice};
use figures::Figures;
use path::{Checked, Unchecked};
use progress::Progress;
use step::ROUND;
use support::driver::Driver;
use support::output::{self, Json, Output};
use support::warnings::{self, Waits};

fn main() -> ExitCode {
    let args = Args::read();
    let output = match &args.json {
        Some(path) if output::is_stdout(path) => Output::Stderr,
        _ => Output::Stdout,
    };
    let progress = Progress::new(args.seconds);
    let waits = if args.verbose {
        Waits::InFull
    } else {
        Waits::InShort
    };
    warnings::show(waits, progress.bar());
    let driver = match Driver::choose::<Args>(args.driver, args.unguarded) {
        Ok(driver) => driver,
        Err(error) => return fail(&error),
    };
    let json = args.json.as_deref().map(Json::open::<Args>);
    let figures = measure_run(&args, &driver, output, &progress);
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

/// Runs the job; when this returns, all that belongs to the device is gone.
fn measure_run(
    args: &Args,
    driver: &Driver,
    output: Output,
    progress: &Progress,
) -> anyhow::Result<Figures> {
    let context = pinned_hosts::cuda::context(0)?;
    let device = context.name()?;
    output.say(&format!(
        "{} driver, {} streams, {} s, {}",
        driver.name(),
        args.streams,
        args.seconds.as_secs_f64(),
        if args.unguarded {
            "UNGUARDED".to_owned()
        } else {
            format!("every copy checked, policy {}", args.policy.name())
        }
    ))?;
    let job = if args.unguarded {
        run::run::<Unchecked>
    } else {
        // Where the warnings go, so that it is never seen without them.
        if args.policy != PolicyChoice::Deny {
            complain("The crate warns once of each call site that has to wait:");
        }
        run::run::<Checked>
    };
    let policy = args.policy.into();
    let totals = job(
        driver,
        &context,
        policy,
        args.streams,
        args.seconds,
        progress,
    )?;
    driver.drain();
    Ok(Figures::new(
        driver.name(),
        device,
        args.unguarded,
        args.policy.name(),
        args.streams,
        &totals,
        driver.counters(),
    ))
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
    if figures.lengthened {
        output.say(&format!(
            "Ran longer than asked: each stream makes at least {ROUND} steps."
        ))?;
    }
    Ok(match (figures.unguarded, figures.is_sound()) {
        (false, true) => {
            output.say("Sound: the device read what the sources held at the call.")?;
            ExitCode::SUCCESS
        }
        (false, false) => {
            complain(
                "UNSOUND: the device read memory that had changed or was gone, although each \
                 copy was checked. This is a bug in pinned-hosts; please report it.",
            );
            ExitCode::FAILURE
        }
        (true, false) => {
            output.say(&format!(
                "UNSOUND: {} of {} copies gave wrong bytes; {} read freed memory.\n\
                 These faults are what the check prevents.\n\
                 Run it again without --unguarded.",
                HumanCount(figures.contents_wrong),
                HumanCount(figures.contents_compared),
                HumanCount(figures.dead_reads.unwrap_or(0))
            ))?;
            ExitCode::SUCCESS
        }
        (true, true) => {
            complain(
                "error: no fault showed, though nothing was checked: this run proves nothing \
                 about the guarded one",
            );
            ExitCode::FAILURE
        }
    })
}

fn fail(error: &anyhow::Error) -> ExitCode {
    complain(&format!("error: {error:#}"));
    ExitCode::FAILURE
}

/// Prints to standard error. If that fails there is nowhere left to say so.
fn complain(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}
