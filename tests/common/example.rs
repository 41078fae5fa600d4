//! Runs an example as a user runs it.

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

/// An example's binary, which cargo puts beside the folder of the tests.
pub(crate) struct Example(pub(crate) &'static str);

impl Example {
    pub(crate) fn command(&self) -> Command {
        let test = std::env::current_exe().unwrap();
        let profile = test.parent().and_then(|deps| deps.parent()).unwrap();
        let example = profile.join("examples").join(self.0);
        assert!(
            example.is_file(),
            "no {}: build it with `cargo build --example {}`, which `cargo test` does unless told \
             to run certain tests only",
            example.display(),
            self.0
        );
        Command::new(example)
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Output {
        self.command().args(arguments).output().unwrap()
    }

    /// Runs it on the simulated driver; returns the JSON, which goes to a file
    /// of this `name`, and standard output.
    pub(crate) fn figures(&self, name: &str, arguments: &[&str]) -> (Value, String) {
        let json = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        let output = self
            .command()
            .args(["--driver", "simulated", "--json"])
            .arg(&json)
            .args(arguments)
            .output()
            .unwrap();
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(0), "{out}{err}");
        let figures = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
        (figures, out)
    }

    /// What it says about arguments that it does not run with.
    pub(crate) fn refused(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(output.stdout.is_empty(), "it ran: {arguments:?}");
        text(&output.stderr)
    }
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

pub(crate) fn count(figures: &Value, key: &str) -> u64 {
    figures[key]
        .as_u64()
        .unwrap_or_else(|| panic!("no count under {key}"))
}
