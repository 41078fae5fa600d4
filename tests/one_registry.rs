//! Cargo refuses a program with two versions of this package, so there is one
//! process-wide registry, whoever uses it.
//!
//! The packages that the tests write keep the `[package]` table of the real
//! manifest and have no dependencies, so that cargo resolves them without a
//! network.

#![allow(clippy::unwrap_used, missing_docs)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

/// This package's manifest, cut down to its `[package]` table, with another
/// version.
fn manifest(version: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    let real = fs::read_to_string(path).unwrap();
    let package: Vec<&str> = real
        .lines()
        .skip_while(|line| *line != "[package]")
        .skip(1)
        .take_while(|line| !line.starts_with('['))
        .filter(|line| !line.starts_with("version") && !line.contains(".workspace"))
        .collect();
    assert!(package.contains(&format!("name = \"{}\"", env!("CARGO_PKG_NAME")).as_str()));
    format!(
        "[package]\nedition = \"2024\"\nversion = \"{version}\"\n{}\n\n[workspace]\n",
        package.join("\n")
    )
}

fn write_package(at: &Path, manifest: &str) {
    fs::create_dir_all(at.join("src")).unwrap();
    fs::write(at.join("Cargo.toml"), manifest).unwrap();
    fs::write(at.join("build.rs"), "fn main() {}\n").unwrap();
    fs::write(at.join("src/lib.rs"), "").unwrap();
}

/// Asks cargo for the dependency graph of a program that uses these versions
/// of this package.
fn resolve(versions: &[&str]) -> Output {
    let dir = TempDir::new().unwrap();
    let mut program = String::from(
        "[package]\nname = \"program\"\nedition = \"2024\"\n\n[workspace]\n\n[dependencies]\n",
    );
    for (n, version) in versions.iter().enumerate() {
        write_package(&dir.path().join(format!("copy{n}")), &manifest(version));
        program += &format!(
            "copy{n} = {{ package = \"{}\", path = \"../copy{n}\" }}\n",
            env!("CARGO_PKG_NAME")
        );
    }
    let at = dir.path().join("program");
    write_package(&at, &program);
    Command::new(env!("CARGO"))
        .args(["metadata", "--offline", "--format-version", "1"])
        .current_dir(at)
        .output()
        .unwrap()
}

#[test]
fn cargo_refuses_a_program_with_two_versions_of_this_package() {
    let output = resolve(&["7.0.0", "8.0.0"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    // This value for good: a version with another one would not be refused.
    let refusal = "links to the native library `pinned_hosts_registry`";
    assert!(said.contains(refusal), "{said}");
}

#[test]
fn cargo_accepts_a_program_with_one_version_of_this_package() {
    let output = resolve(&["7.0.0"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
}
