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
mod driver;
mod figures;
mod measure;
mod mirror;
mod path;
mod pinner;
mod progress;
mod run;
mod step;
mod table;

use std::fmt;
use std::io::{self, Write as _};
use std::process::ExitCode;

use anyhow::Context as _;
use tracing::Level;

use args::{Args, JsonFile};
use driver::Driver;
use figures::Figures;
use path::{Checked, Unchecked};
use progress::Progress;

fn main() -> ExitCode {
    let args = Args::read();
    let progress = Progress::new(args.seconds);
    // Shows the crate's warnings: each call site whose copies wait.
    tracing_subscriber::fmt()
        .compact()
        .without_time()
        .with_target(false)
        .with_ansi(false)
        .with_max_level(Level::WARN)
        .with_writer(progress.clone())
        .init();
    let driver = match Driver::choose(&args) {
        Ok(driver) => driver,
        Err(error) => return fail(&error),
    };
    let json = args.json.as_deref().map(JsonFile::open);
    let figures = measure_run(&args, &driver, &progress);
    progress.end();
    match figures {
        Ok(figures) => report(&figures, json),
        Err(error) => {
            if let Some(json) = json {
                json.discard();
            }
            fail(&error)
        }
    }
}

/// Runs the job; when this returns, all that belongs to the device is gone.
fn measure_run(args: &Args, driver: &Driver, progress: &Progress) -> anyhow::Result<Figures> {
    let context = pinned_hosts::cuda::context(0)?;
    let device = context.name()?;
    say(format_args!(
        "{} driver ({device}), {} streams, {} s, {}",
        driver.name(),
        args.streams,
        args.seconds.as_secs_f64(),
        if args.unguarded {
            "UNGUARDED"
        } else {
            "every copy checked"
        }
    ));
    let job = if args.unguarded {
        run::run::<Unchecked>
    } else {
        say(format_args!(
            "The crate warns once of each call site whose copies have to wait:"
        ));
        run::run::<Checked>
    };
    let totals = job(driver, &context, args.streams, args.seconds, progress)?;
    driver.drain();
    Ok(Figures::new(
        driver.name(),
        device,
        args.unguarded,
        args.streams,
        &totals,
        driver.counters(),
    ))
}

fn report(figures: &Figures, json: Option<JsonFile>) -> ExitCode {
    say(format_args!("{}", table::table(figures)));
    if let Some(json) = json {
        let written = serde_json::to_string_pretty(figures)
            .context("putting the figures into JSON")
            .and_then(|text| json.write(&text).context("writing the JSON file"));
        if let Err(error) = written {
            return fail(&error);
        }
    }
    match (figures.unguarded, figures.is_sound()) {
        (false, true) => {
            say(format_args!(
                "Sound: what the device read was what the sources held at the call."
            ));
            ExitCode::SUCCESS
        }
        (false, false) => {
            eprintln!(
                "UNSOUND: the device read memory that had changed or was gone, although each \
                 copy was checked. This is a bug in pinned-hosts; please report it."
            );
            ExitCode::FAILURE
        }
        (true, false) => {
            say(format_args!(
                "These faults are what the check prevents. Run it again without --unguarded."
            ));
            ExitCode::SUCCESS
        }
        (true, true) => {
            eprintln!(
                "error: no fault showed, though nothing was checked: this run proves nothing \
                 about the guarded one"
            );
            ExitCode::FAILURE
        }
    }
}

/// Prints to standard output. Whoever closed it does not want to read on, and
/// the exit code still tells.
fn say(text: fmt::Arguments<'_>) {
    let _ = writeln!(io::stdout(), "{text}");
}

fn fail(error: &anyhow::Error) -> ExitCode {
    eprintln!("error: {error:#}");
    ExitCode::FAILURE
}
