//! What can be wrong with a report's input.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

#[derive(Debug)]
pub(crate) enum ReportError {
    /// A bench has to be run first.
    NotMeasured {
        /// As `cargo bench --bench` calls it.
        bench: &'static str,
        /// What is missing.
        what: String,
    },
    /// A file cannot be read or written.
    File { path: PathBuf, error: io::Error },
    /// A file holds something else than results.
    Json {
        path: PathBuf,
        error: serde_json::Error,
    },
    /// The document has no place for a table.
    NoMarkers { marker: String },
    /// A plot cannot be drawn.
    Plot { path: PathBuf, error: String },
}

impl ReportError {
    pub(crate) fn file(path: &Path, error: io::Error) -> Self {
        Self::File {
            path: path.to_owned(),
            error,
        }
    }
}

impl fmt::Display for ReportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotMeasured { bench, what } => write!(
                f,
                "{what} has not been measured; run `cargo bench --bench {bench}` first"
            ),
            Self::File { path, error } => write!(f, "{}: {error}", path.display()),
            Self::Json { path, error } => {
                write!(f, "{} holds no results: {error}", path.display())
            }
            Self::NoMarkers { marker } => write!(
                f,
                "the document has no line `<!-- {marker} -->` with a `<!-- /{marker} -->` after it"
            ),
            Self::Plot { path, error } => {
                write!(f, "{} cannot be drawn: {error}", path.display())
            }
        }
    }
}

impl Error for ReportError {}
