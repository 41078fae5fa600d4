//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{Parser, ValueEnum};
use pinned_hosts::cuda::Policy;

use crate::step::ROUND;
use crate::support::args::{Choice, duration, refuse};

/// Runs the copies of an inference server, checked by `pinned-hosts`.
///
/// Each stream is a thread that makes decode steps: token ids and positions
/// from the stack, block tables from short-lived `Vec`s, slices of page-locked
/// blobs. Another thread pins and unpins memory meanwhile.
#[derive(Debug, Parser)]
#[command(
    name = "inference_server",
    version,
    after_help = "\
Exit code: 0 if all copies were sound (with --unguarded: if the faults showed), \
1 if not or if the run failed, 2 for bad arguments."
)]
pub(crate) struct Args {
    /// Streams to copy on, each with a thread of its own.
    #[arg(long, value_name = "N", default_value_t = 4, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) streams: u16,

    // Not a doc comment: those hold no numbers that are written elsewhere.
    #[arg(long, value_name = "S", default_value = "5", allow_negative_numbers = true,
          value_parser = duration,
          help = format!("How long to run, in seconds; fractions are fine. Longer if need be: \
                          each stream makes at least {ROUND} decode steps"))]
    pub(crate) seconds: Duration,

    /// Write the figures to this file, as JSON; with `-` to standard output,
    /// and everything else to standard error.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,

    /// What to do with borrowed memory that is page-locked.
    #[arg(long, value_enum, default_value_t = PolicyChoice::Stage, conflicts_with = "unguarded")]
    pub(crate) policy: PolicyChoice,

    /// Run the same job with the check off, to see what it prevents. Not on a
    /// real driver, where the faults would corrupt memory.
    #[arg(long)]
    pub(crate) unguarded: bool,

    /// Which CUDA driver to use. With --unguarded, 'auto' is 'simulated'.
    #[arg(long, value_enum, default_value_t = Choice::Auto)]
    pub(crate) driver: Choice,

    /// Show the crate's warnings in full.
    #[arg(long, short)]
    pub(crate) verbose: bool,
}

/// A policy, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PolicyChoice {
    /// Copy it through page-locked memory of the crate's, up to 256 KiB.
    Stage,
    /// Wait for the device.
    Wait,
    /// Refuse such copies; the job goes on without them.
    Deny,
}

impl PolicyChoice {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Stage => "stage",
            Self::Wait => "wait",
            Self::Deny => "deny",
        }
    }
}

impl From<PolicyChoice> for Policy {
    fn from(choice: PolicyChoice) -> Self {
        match choice {
            PolicyChoice::Stage => Self::Stage,
            PolicyChoice::Wait => Self::Wait,
            PolicyChoice::Deny => Self::Deny,
        }
    }
}

impl Args {
    /// Reads the command line; ends the process if it is wrong.
    pub(crate) fn read() -> Self {
        let args = Self::parse();
        if args.unguarded && args.driver == Choice::Real {
            refuse::<Self>(
                ErrorKind::ArgumentConflict,
                "--unguarded would let a real device read memory that has been freed or \
                 rewritten; run it with --driver simulated",
            );
        }
        args
    }
}
