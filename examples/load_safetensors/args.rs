//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;

use crate::support::args::{Choice, duration};

/// Loads a safetensors file onto the device while it is being page-locked.
///
/// The file is memory-mapped and pinned chunk by chunk in the background,
/// while its tensors are already copied straight from the mapping. Then every
/// tensor is copied back and compared.
#[derive(Debug, Parser)]
#[command(
    name = "load_safetensors",
    version,
    after_help = "\
Exit code: 0 if the device holds what the file holds and read nothing that had \
changed or was gone, 1 if not or if the load failed, 2 for bad arguments or a \
FILE that is no whole safetensors file."
)]
pub(crate) struct Args {
    /// The file to load. Nothing may write to it meanwhile. Without one, a
    /// small model is made in the temporary folder, and taken away afterwards.
    pub(crate) file: Option<PathBuf>,

    /// How large to make the small model, in MiB.
    #[arg(long, value_name = "N", default_value_t = 64, allow_negative_numbers = true,
          conflicts_with = "file", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) mib: u32,

    /// Streams to copy on, each with a thread of its own.
    #[arg(long, value_name = "N", default_value_t = 4, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) streams: u16,

    /// How much to pin at a time, in MiB.
    #[arg(long, value_name = "N", default_value_t = 8, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) chunk_mib: u32,

    /// Do not pin, for comparison.
    #[arg(long)]
    pub(crate) no_pin: bool,

    /// Load the file again and again for so many seconds, while it is pinned
    /// and unpinned all the time; at least once. Copies are also made from
    /// memory that is rewritten right after the call.
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = duration)]
    pub(crate) seconds: Option<Duration>,

    /// Write the figures to this file, as JSON; with `-` to standard output,
    /// and everything else to standard error.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,

    /// Which CUDA driver to use.
    #[arg(long, value_enum, default_value_t = Choice::Auto)]
    pub(crate) driver: Choice,

    /// Show the crate's warnings of copies that waited. Here they are meant to.
    #[arg(long, short)]
    pub(crate) verbose: bool,
}
