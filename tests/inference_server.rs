//! The main job, run as a user runs it.

#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

/// The example's binary, which cargo puts beside the folder of the tests.
fn server() -> Command {
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().and_then(|deps| deps.parent()).unwrap();
    let server = profile.join("examples").join("inference_server");
    assert!(
        server.is_file(),
        "no {}: build it with `cargo build --example inference_server`, which `cargo test` does \
         unless told to run certain tests only",
        server.display()
    );
    Command::new(server)
}

fn run(arguments: &[&str]) -> Output {
    server().args(arguments).output().unwrap()
}

/// Runs it on the simulated driver; returns the JSON and standard output.
fn figures(name: &str, arguments: &[&str]) -> (Value, String) {
    let json = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let output = server()
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

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn count(figures: &Value, key: &str) -> u64 {
    figures[key]
        .as_u64()
        .unwrap_or_else(|| panic!("no count under {key}"))
}

fn refused(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    assert!(output.stdout.is_empty(), "it ran: {arguments:?}");
    text(&output.stderr)
}

#[test]
fn a_guarded_run_is_sound() {
    let (figures, out) = figures("guarded.json", &["--seconds", "1", "--streams", "3"]);
    assert_eq!(figures["driver"], "simulated");
    assert_eq!(count(&figures, "streams"), 3);
    assert_eq!(count(&figures, "torn_transfers"), 0);
    assert_eq!(count(&figures, "dead_reads"), 0);
    assert_eq!(count(&figures, "contents_wrong"), 0);
    for happened in [
        "pinned_sources",
        "pageable_sources",
        "guarded_copies",
        "split_copies",
        "owned_copies",
        "pins",
    ] {
        assert!(count(&figures, happened) > 0, "{happened}");
    }
    assert_eq!(
        count(&figures, "copies"),
        count(&figures, "pageable_sources") + count(&figures, "pinned_sources")
    );
    assert_eq!(
        count(&figures, "copies"),
        count(&figures, "contents_compared")
    );
    for time in [
        "lookup_ns_p50",
        "lookup_ns_p99",
        "copy_call_ns_p50",
        "unchecked_copy_call_ns_p50",
    ] {
        assert!(figures[time].as_f64().unwrap() > 0.0, "{time}");
    }
    assert!(out.starts_with("simulated driver"), "{out}");
    assert!(out.contains("Sound"), "{out}");
}

#[test]
fn an_unguarded_run_shows_what_the_check_prevents() {
    let (figures, out) = figures("unguarded.json", &["--seconds", "1", "--unguarded"]);
    assert_eq!(figures["unguarded"], true);
    assert!(count(&figures, "pinned_sources") > 0);
    assert!(count(&figures, "torn_transfers") > 0);
    assert!(count(&figures, "dead_reads") > 0);
    assert!(count(&figures, "contents_wrong") > 0);
    assert!(out.contains("what the check prevents"), "{out}");
}

#[test]
fn the_shortest_run_makes_each_kind_of_copy() {
    let (figures, _) = figures("shortest.json", &["--seconds", "0.001", "--unguarded"]);
    assert!(count(&figures, "torn_transfers") > 0);
    assert!(count(&figures, "dead_reads") > 0);
    assert!(count(&figures, "refused_copies") > 0);
}

#[test]
fn the_call_sites_that_wait_are_named_once_each() {
    let output = run(&["--driver", "simulated", "--seconds", "0.2"]);
    let warnings: Vec<String> = text(&output.stderr)
        .lines()
        .filter(|line| line.contains("WARN"))
        .map(str::to_owned)
        .collect();
    // The metadata, the temporary, the prompt and the spill.
    assert_eq!(warnings.len(), 4, "{warnings:?}");
    assert!(warnings.iter().all(|line| line.contains("step.rs")));
}

#[test]
fn a_pipe_gets_no_progress_bar() {
    let output = run(&["--driver", "simulated", "--seconds", "0.3"]);
    for stream in [output.stdout, output.stderr] {
        let shown = text(&stream);
        assert!(!shown.contains(['\u{1b}', '\r']), "{shown:?}");
    }
}

#[test]
fn the_file_that_was_there_is_replaced_whole() {
    let json = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("replaced.json");
    std::fs::write(&json, "x".repeat(100_000)).unwrap();
    let (figures, _) = figures("replaced.json", &["--seconds", "0.001"]);
    assert_eq!(count(&figures, "torn_transfers"), 0);
}

#[test]
fn numbers_out_of_range_are_refused_with_the_range() {
    for streams in ["0", "-1", "257", "99999999999", "four"] {
        assert!(
            refused(&["--streams", streams]).contains("--streams"),
            "{streams}"
        );
    }
    assert!(refused(&["--streams", "0"]).contains("1..=256"));
    for seconds in ["0", "-1", "NaN", "inf", "1e300", "86401", "five", ""] {
        let message = refused(&["--seconds", seconds]);
        assert!(message.contains("number of seconds above 0"), "{message}");
    }
}

#[test]
fn a_file_that_cannot_be_written_is_refused_before_the_run() {
    for path in ["/no/such/folder/figures.json", env!("CARGO_TARGET_TMPDIR")] {
        let message = refused(&["--driver", "simulated", "--json", path]);
        assert!(message.contains("name a file"), "{message}");
    }
}

#[test]
fn a_real_device_is_never_run_unguarded() {
    let message = refused(&["--unguarded", "--driver", "real"]);
    assert!(message.contains("--driver simulated"), "{message}");
}

#[test]
fn unknown_arguments_are_refused_with_the_usage() {
    assert!(refused(&["--stream", "2"]).contains("--help"));
}
