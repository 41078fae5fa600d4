//! The main job, run as a user runs it.

#![allow(clippy::unwrap_used)]

mod common;

use std::path::PathBuf;

use serde_json::Value;

use common::example::{Example, count, text};

const SERVER: Example = Example("inference_server");

#[test]
fn a_guarded_run_is_sound() {
    for (policy, happened, not) in [
        ("stage", &["staged", "waited"][..], &["split", "denied"][..]),
        ("wait", &["waited", "split"], &["staged", "denied"]),
        ("deny", &["denied"], &["staged", "waited", "split"]),
    ] {
        let arguments = ["--seconds", "1", "--streams", "3", "--policy", policy];
        let (figures, out) = SERVER.figures(&format!("{policy}.json"), &arguments);
        assert_eq!(figures["policy"], policy);
        for key in happened {
            assert!(count(&figures, key) > 0, "{policy}: {key}");
        }
        for key in not {
            assert_eq!(count(&figures, key), 0, "{policy}: {key}");
        }
        assert_sound(&figures, &out);
    }
}

/// Waiting for a page-locked source lets the stream run dry; staging does not.
#[test]
fn staging_leaves_the_stream_busier_than_waiting() {
    let drains = |policy| {
        let name = format!("drains-{policy}.json");
        let (figures, _) = SERVER.figures(&name, &["--seconds", "1", "--policy", policy]);
        let idle = figures["stream_idle_fraction"].as_f64().unwrap();
        assert!(0.0 < idle && idle < 1.0, "{policy}: {idle}");
        count(&figures, "stream_drains") as f64 / count(&figures, "steps") as f64
    };
    // By the wait at the end of each step, and by at least the metadata's copy.
    let (stage, wait) = (drains("stage"), drains("wait"));
    assert!(stage < 1.5 && wait > 1.9, "{stage}, {wait}");
}

#[track_caller]
fn assert_sound(figures: &Value, out: &str) {
    assert_eq!(figures["driver"], "simulated");
    assert_eq!(count(figures, "streams"), 3);
    assert_eq!(count(figures, "torn_transfers"), 0);
    assert_eq!(count(figures, "dead_reads"), 0);
    assert_eq!(count(figures, "contents_wrong"), 0);
    for happened in ["pinned_sources", "pageable_sources", "owned_copies", "pins"] {
        assert!(count(figures, happened) > 0, "{happened}");
    }
    assert_eq!(
        count(figures, "copies"),
        count(figures, "pageable_sources") + count(figures, "pinned_sources")
    );
    assert_eq!(
        count(figures, "copies"),
        count(figures, "contents_compared")
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
    let (figures, out) = SERVER.figures("unguarded.json", &["--seconds", "1", "--unguarded"]);
    assert_eq!(figures["unguarded"], true);
    assert!(count(&figures, "pinned_sources") > 0);
    assert!(count(&figures, "torn_transfers") > 0);
    assert!(count(&figures, "dead_reads") > 0);
    assert!(count(&figures, "contents_wrong") > 0);
    let wrong = count(&figures, "contents_wrong");
    let headline = out.find("UNSOUND: ").expect("a headline");
    let verdict = &out[headline..];
    assert!(digits(verdict).starts_with(&wrong.to_string()), "{verdict}");
    assert!(verdict.contains("what the check prevents"), "{verdict}");
    assert!(!out.contains("checked"), "as if it had: {out}");
}

fn digits(text: &str) -> String {
    text.chars().filter(char::is_ascii_digit).collect()
}

#[test]
fn the_shortest_run_makes_each_kind_of_copy_and_says_that_it_took_longer() {
    let (figures, out) = SERVER.figures("shortest.json", &["--seconds", "0.001", "--unguarded"]);
    assert_eq!(figures["lengthened"], true);
    assert!(out.contains("Ran longer than asked"), "{out}");
    assert!(count(&figures, "torn_transfers") > 0);
    assert!(count(&figures, "dead_reads") > 0);
    assert!(count(&figures, "refused_copies") > 0);
}

/// What the shortest guarded run writes to standard error.
fn warnings(arguments: &[&str]) -> Vec<String> {
    let output = SERVER
        .command()
        .args(["--driver", "simulated", "--seconds", "0.001"])
        .args(arguments)
        .output()
        .unwrap();
    let err = text(&output.stderr);
    let mut lines = err.lines().map(str::to_owned);
    let title = lines.next().expect("a title");
    assert!(title.contains("warns once of each call site"), "{title}");
    lines.collect()
}

#[test]
fn the_call_sites_that_wait_are_named_once_each_in_a_short_line() {
    let warnings = warnings(&["--policy", "wait"]);
    // The metadata, the temporary, the prompt and the spill.
    assert_eq!(warnings.len(), 4, "{warnings:#?}");
    for line in warnings {
        assert!(line.starts_with("warn: examples/"), "{line}");
        assert!(line.contains("step.rs:"), "{line}");
        assert!(line.contains(" waited "), "{line}");
        assert!(line.chars().count() <= 80, "{line}");
    }
}

#[test]
fn verbose_shows_the_warnings_in_full() {
    let warnings = warnings(&["--verbose", "--policy", "wait"]);
    assert_eq!(warnings.len(), 4, "{warnings:#?}");
    for line in warnings {
        assert!(line.contains("WARN"), "{line}");
        assert!(line.contains("region=0x"), "{line}");
        assert!(line.contains("copy_h2d_from"), "{line}");
    }
}

#[test]
fn figures_for_standard_output_have_it_to_themselves() {
    let folder = tempfile::tempdir().unwrap();
    let output = SERVER
        .command()
        .args(["--driver", "simulated", "--seconds", "0.001", "--json", "-"])
        .current_dir(&folder)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0));
    let figures: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(count(&figures, "torn_transfers"), 0);
    assert!(text(&output.stderr).contains("Sound"));
    assert_eq!(folder.path().read_dir().unwrap().count(), 0, "a file");
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_behind_standard_output_is_an_error() {
    for json in [None, Some("-")] {
        let output = SERVER
            .command()
            .args(["--driver", "simulated", "--seconds", "0.001"])
            .args(json.map(|path| format!("--json={path}")))
            .stdout(std::fs::File::create("/dev/full").unwrap())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1), "{json:?}");
        let err = text(&output.stderr);
        assert!(
            err.contains("error: cannot write to standard output"),
            "{err}"
        );
    }
}

#[test]
#[cfg(target_os = "linux")]
fn warnings_that_cannot_be_written_fail_nothing() {
    let output = SERVER
        .command()
        .args(["--driver", "simulated", "--seconds", "0.001"])
        .stderr(std::fs::File::create("/dev/full").unwrap())
        .output()
        .unwrap();
    let out = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{out}");
    assert!(out.contains("Sound"), "{out}");
}

#[test]
fn a_reader_that_went_away_is_no_error() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = SERVER
        .command()
        .args(["--driver", "simulated", "--seconds", "0.001"])
        .stdout(writer)
        .output()
        .unwrap();
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert!(!err.contains("error"), "{err}");
}

#[test]
fn it_says_its_version_and_that_short_runs_take_longer() {
    let version = text(&SERVER.run(&["--version"]).stdout);
    assert_eq!(
        version.trim_end(),
        concat!("inference_server ", env!("CARGO_PKG_VERSION"))
    );
    assert!(text(&SERVER.run(&["--help"]).stdout).contains("at least 50 decode steps"));
}

#[test]
fn a_pipe_gets_no_progress_bar() {
    let output = SERVER.run(&["--driver", "simulated", "--seconds", "0.3"]);
    for stream in [output.stdout, output.stderr] {
        let shown = text(&stream);
        assert!(!shown.contains(['\u{1b}', '\r']), "{shown:?}");
    }
}

#[test]
fn the_file_that_was_there_is_replaced_whole() {
    let json = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("replaced.json");
    std::fs::write(&json, "x".repeat(100_000)).unwrap();
    let (figures, _) = SERVER.figures("replaced.json", &["--seconds", "0.001"]);
    assert_eq!(count(&figures, "torn_transfers"), 0);
}

#[test]
fn numbers_out_of_range_are_refused_with_the_range() {
    for streams in ["0", "-1", "257", "99999999999", "four"] {
        assert!(
            SERVER
                .refused(&["--streams", streams])
                .contains("--streams"),
            "{streams}"
        );
    }
    assert!(SERVER.refused(&["--streams", "0"]).contains("1..=256"));
    for seconds in ["0", "-1", "NaN", "inf", "1e300", "86401", "five", ""] {
        let message = SERVER.refused(&["--seconds", seconds]);
        assert!(message.contains("number of seconds above 0"), "{message}");
    }
}

#[test]
fn a_file_that_cannot_be_written_is_refused_before_the_run() {
    for path in ["/no/such/folder/figures.json", env!("CARGO_TARGET_TMPDIR")] {
        let message = SERVER.refused(&["--driver", "simulated", "--json", path]);
        assert!(message.contains("name a file"), "{message}");
    }
}

#[test]
fn a_real_device_is_never_run_unguarded() {
    let message = SERVER.refused(&["--unguarded", "--driver", "real"]);
    assert!(message.contains("--driver simulated"), "{message}");
}

#[test]
fn unknown_arguments_are_refused_with_the_usage() {
    assert!(SERVER.refused(&["--stream", "2"]).contains("--help"));
}
