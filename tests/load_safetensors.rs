//! The example that loads a safetensors file, run as a user runs it.

#![allow(clippy::unwrap_used)]

mod common;

use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, serialize, serialize_to_file};
use serde_json::{Value, json};
use tempfile::TempDir;

use common::example::{Example, count, text};

const LOADER: Example = Example("load_safetensors");

/// Small, so that the tests are fast.
const SMALL: [&str; 4] = ["--mib", "4", "--chunk-mib", "1"];

fn figures(name: &str, arguments: &[&str]) -> (Value, String) {
    LOADER.figures(&format!("load_safetensors-{name}.json"), arguments)
}

#[track_caller]
fn assert_sound(figures: &Value) {
    for fault in ["mismatched_tensors", "torn_transfers", "dead_reads"] {
        assert_eq!(count(figures, fault), 0, "{fault} of {figures:#}");
    }
    let copies: u64 = ["pageable", "pinned", "split", "bounced"]
        .iter()
        .map(|kind| count(figures, &format!("{kind}_copies")))
        .sum();
    assert_eq!(copies, count(figures, "copies"));
    assert!(copies > 0);
}

#[test]
fn a_run_without_arguments_loads_a_model_of_its_own() {
    let (figures, out) = figures("default", &[]);
    assert_sound(&figures);
    assert_eq!(figures["driver"], "simulated");
    assert!(count(&figures, "tensors") > 40);
    let mib = count(&figures, "bytes") >> 20;
    assert!((60..=66).contains(&mib), "{mib}");
    assert!(figures["seconds"].as_f64().unwrap() > 0.0);
    assert_eq!(figures["pinning_error"], Value::Null);
    assert_eq!(count(&figures, "pinned_chunks"), 8);
    assert!(out.starts_with("simulated driver"), "{out}");
    assert!(out.contains("Sound: the device holds what"), "{out}");
}

#[test]
fn the_output_fits_80_columns() {
    let (_, out) = figures("columns", &["--seconds", "0.001", "--mib", "4"]);
    for line in out.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
}

#[test]
fn without_pinning_every_copy_is_from_pageable_memory() {
    let (figures, _) = figures("no_pin", &[&SMALL[..], &["--no-pin"]].concat());
    assert_sound(&figures);
    assert_eq!(count(&figures, "pinned_chunks"), 0);
    assert_eq!(
        count(&figures, "pageable_copies"),
        count(&figures, "copies")
    );
}

#[test]
fn copies_stay_sound_while_the_file_is_pinned_and_unpinned_all_the_time() {
    let arguments = ["--seconds", "1", "--streams", "8", "--mib", "32"];
    let (figures, out) = figures(
        "repeated",
        &[&arguments[..], &["--chunk-mib", "1"]].concat(),
    );
    assert_sound(&figures);
    assert_eq!(count(&figures, "streams"), 8);
    assert!(count(&figures, "loads") > 0);
    assert!(count(&figures, "pinned_chunks") >= 32);
    assert!(count(&figures, "private_copies") > 0);
    assert!(out.contains("Sound: the device holds what"), "{out}");
}

#[test]
fn tensors_of_any_size_arrive() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("odd.safetensors");
    let large: Vec<u8> = (0..(5 << 20) + 3_u32)
        .map(|n| (n.wrapping_mul(n) >> 7) as u8)
        .collect();
    let tensors = [
        ("large", Dtype::U8, vec![large.len()], &large[..]),
        ("one byte", Dtype::U8, vec![1], &large[1..2]),
        ("none", Dtype::F64, vec![3, 0], &[]),
        ("scalar", Dtype::F32, vec![], &large[4..8]),
        ("five", Dtype::BF16, vec![5], &large[10..20]),
    ]
    .map(|(name, dtype, shape, bytes)| (name, TensorView::new(dtype, shape, bytes).unwrap()));
    serialize_to_file(tensors, None, &path).unwrap();

    let path = path.to_str().unwrap();
    for pin in [&["--chunk-mib", "1"][..], &["--no-pin"]] {
        let (figures, out) = figures("any_size", &[&[path], pin].concat());
        assert_sound(&figures);
        assert_eq!(count(&figures, "tensors"), 5);
        assert_eq!(count(&figures, "bytes"), (5 << 20) + 3 + 1 + 4 + 10);
        // Three of up to 2 MiB, and one for each of the small ones.
        assert_eq!(count(&figures, "copies"), 3 + 3);
        assert!(out.contains(path), "{out}");
    }
}

/// A file of this name and content, in a folder that lives as long.
struct Content {
    _folder: TempDir,
    path: PathBuf,
}

impl Content {
    fn new(bytes: &[u8]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        std::fs::write(&path, bytes).unwrap();
        Self {
            _folder: folder,
            path,
        }
    }

    /// A header that says this, and so many bytes behind it.
    fn with_header(header: &str, data: usize) -> Self {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 7);
        Self::new(&bytes)
    }
}

/// Says which file it is, says what to do, and does not panic.
#[track_caller]
fn assert_refused(path: &Path, what: &str, advice: &str) {
    let path = path.to_str().unwrap();
    let message = LOADER.refused(&["--driver", "simulated", path]);
    for part in [path, what, advice] {
        assert!(message.contains(part), "no '{part}' in: {message}");
    }
    assert!(!message.contains("panicked"), "{message}");
}

fn a_tensor(dtype: &str, elements: u64, start: u64, end: u64) -> Value {
    json!({ "dtype": dtype, "shape": [elements], "data_offsets": [start, end] })
}

#[test]
fn a_file_that_is_missing_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing.safetensors");
    assert_refused(&missing, "No such file", "give the path of");
}

#[test]
fn a_folder_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    assert_refused(folder.path(), "is a folder", "one .safetensors file in it");
}

#[test]
#[cfg(target_os = "linux")]
fn what_is_no_regular_file_is_refused() {
    assert_refused(Path::new("/dev/zero"), "no regular file", "only those");
}

#[test]
fn an_empty_file_is_refused() {
    assert_refused(&Content::new(b"").path, "is empty", "download");
}

#[test]
fn a_file_too_short_for_a_length_is_refused() {
    assert_refused(&Content::new(&[1; 7]).path, "7 bytes", "download");
}

#[test]
fn a_header_longer_than_the_file_is_refused() {
    for length in [93, 1 << 40, u64::MAX] {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.resize(100, b' ');
        let what = format!("a header of {length} bytes, but only 92 follow");
        assert_refused(&Content::new(&bytes).path, &what, "download");
    }
}

#[test]
fn a_header_that_is_no_json_object_is_refused() {
    for header in ["", "nonsense", "{\"a\": ", "\u{0}\u{0}\u{0}\u{0}"] {
        let file = Content::with_header(header, 16);
        assert_refused(&file.path, "header is no JSON", "download");
    }
    for header in ["[]", "7", "null"] {
        let file = Content::with_header(header, 16);
        assert_refused(&file.path, "no JSON object", "download");
    }
}

#[test]
fn a_header_that_describes_no_tensors_as_it_should_is_refused() {
    for tensor in [
        json!(7),
        json!({}),
        json!({ "dtype": "F32", "shape": [4], "data_offsets": "0 to 16" }),
        json!({ "dtype": "F32", "shape": [4], "data_offsets": [-16, 0] }),
        json!({ "dtype": "F32", "shape": [4], "data_offsets": [0] }),
        json!({ "dtype": "G32", "shape": [4], "data_offsets": [0, 16] }),
        // No such size, not from the beginning, not to the end, backwards.
        a_tensor("F32", 3, 0, 16),
        a_tensor("F32", 3, 4, 16),
        a_tensor("F32", 3, 0, 12),
        a_tensor("F32", 3, 16, 4),
        a_tensor("F32", u64::MAX, 0, 16),
    ] {
        let file = Content::with_header(&json!({ "weight": tensor }).to_string(), 16);
        assert_refused(&file.path, "damaged", "download");
    }
}

#[test]
fn tensors_past_the_end_of_the_file_are_refused_by_name() {
    for end in [17, 1 << 40, u64::MAX] {
        let header = json!({ "weight": a_tensor("U8", end, 0, end) });
        let file = Content::with_header(&header.to_string(), 16);
        assert_refused(&file.path, "\"weight\"", "copy it again");
    }
}

#[test]
fn sizes_whose_sum_overflows_are_refused() {
    let most = u64::MAX / 8;
    let tensors: serde_json::Map<_, _> = (0..8)
        .map(|n| {
            let tensor = a_tensor("U8", most, n * most, (n + 1) * most);
            (n.to_string(), tensor)
        })
        .collect();
    let file = Content::with_header(&Value::from(tensors).to_string(), 16);
    assert_refused(&file.path, "behind the end", "copy it again");
}

#[test]
fn a_file_cut_off_anywhere_is_refused() {
    let bytes: Vec<u8> = (0..64).collect();
    let view = || TensorView::new(Dtype::F32, vec![8], &bytes[..32]).unwrap();
    let whole = serialize([("weight", view()), ("bias", view())], None).unwrap();
    for length in 0..whole.len() {
        let file = Content::new(&whole[..length]);
        assert_refused(&file.path, "cannot load", "download");
    }
    let (figures, _) = figures("whole", &[Content::new(&whole).path.to_str().unwrap()]);
    assert_sound(&figures);
}

#[test]
fn bytes_behind_the_last_tensor_are_refused() {
    let header = json!({ "weight": a_tensor("U8", 16, 0, 16) });
    let file = Content::with_header(&header.to_string(), 17);
    assert_refused(&file.path, "damaged", "download");
}

#[test]
fn a_pointer_to_a_large_file_is_recognised() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n";
    assert_refused(&Content::new(pointer).path, "LFS pointer", "git lfs pull");
}

#[test]
fn a_file_without_tensors_is_refused() {
    for header in ["{}", "{\"__metadata__\": {\"format\": \"pt\"}}"] {
        let file = Content::with_header(header, 0);
        assert_refused(&file.path, "no tensors", "give a file");
    }
}

#[test]
fn figures_for_standard_output_have_it_to_themselves() {
    let output = LOADER.run(&[&SMALL[..], &["--driver", "simulated", "--json", "-"]].concat());
    assert_eq!(output.status.code(), Some(0));
    assert_sound(&serde_json::from_slice(&output.stdout).unwrap());
    assert!(text(&output.stderr).contains("Sound"));
}

#[test]
fn a_pipe_gets_no_progress_bar() {
    for more in [&[][..], &["--seconds", "0.3"]] {
        let output = LOADER.run(&[&SMALL[..], &["--driver", "simulated"], more].concat());
        for stream in [output.stdout, output.stderr] {
            let shown = text(&stream);
            let control = shown.chars().find(|c| c.is_control() && *c != '\n');
            assert_eq!(control, None, "{shown:?}");
        }
    }
}

#[test]
fn the_model_it_made_is_taken_away() {
    let folder = tempfile::tempdir().unwrap();
    let output = LOADER
        .command()
        .args(SMALL)
        .args(["--driver", "simulated"])
        .env("TMPDIR", folder.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(folder.path().read_dir().unwrap().count(), 0);
}

#[test]
fn a_model_that_cannot_be_made_is_an_error_and_leaves_no_figures() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("figures.json");
    let output = LOADER
        .command()
        .args(["--driver", "simulated", "--json"])
        .arg(&json)
        .env("TMPDIR", folder.path().join("missing"))
        .output()
        .unwrap();
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(err.contains("set TMPDIR"), "{err}");
    assert!(!json.exists());
}

#[test]
fn waits_are_logged_only_if_asked_for() {
    let output = LOADER.run(&[&SMALL[..], &["--driver", "simulated"]].concat());
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn arguments_out_of_range_are_refused() {
    for option in ["--mib", "--chunk-mib", "--streams"] {
        for number in ["0", "-1", "99999999999", "four"] {
            let message = LOADER.refused(&[option, number]);
            assert!(message.contains(option), "{message}");
        }
    }
    for seconds in ["0", "-1", "NaN", "86401", "five", ""] {
        let message = LOADER.refused(&["--seconds", seconds]);
        assert!(message.contains("number of seconds above 0"), "{message}");
    }
}

#[test]
fn a_size_is_for_the_model_it_makes() {
    let message = LOADER.refused(&["model.safetensors", "--mib", "4"]);
    assert!(message.contains("cannot be used with"), "{message}");
}

#[test]
fn it_says_its_version() {
    assert_eq!(
        text(&LOADER.run(&["--version"]).stdout).trim_end(),
        concat!("load_safetensors ", env!("CARGO_PKG_VERSION"))
    );
}
