//! The figures of a run, as a person reads them. Fits 80 columns.

use indicatif::{BinaryBytes, HumanCount};

use crate::figures::Figures;
use crate::loader::PIECE;
use crate::support::table::{self as shared, Row, count, time};

/// The table for a terminal of so many columns, or for no terminal.
pub(crate) fn table(figures: &Figures, columns: Option<usize>) -> String {
    let groups = [load(figures), copies(figures), faults(figures)];
    shared::table(&groups, columns)
}

fn load(figures: &Figures) -> Vec<Row> {
    let tensors = if figures.loads == 1 {
        String::new()
    } else {
        format!("loaded {} times", HumanCount(figures.loads))
    };
    vec![
        ("driver", figures.driver.to_owned(), figures.device.clone()),
        ("tensors", count(figures.tensors as u64), tensors),
        (
            "bytes",
            BinaryBytes(figures.bytes).to_string(),
            format!("{} bytes", HumanCount(figures.bytes)),
        ),
        (
            "time",
            time(figures.seconds * 1e9),
            "until all were on the device".to_owned(),
        ),
        (
            "rate",
            format!("{:.2} GB/s", figures.gigabytes_per_second),
            rate_note(figures),
        ),
        ("pinned chunks", count(figures.pinned_chunks), pins(figures)),
    ]
}

fn rate_note(figures: &Figures) -> String {
    if figures.is_simulated {
        "of the simulated driver: says nothing".to_owned()
    } else {
        format!("on {} streams together", figures.streams)
    }
}

fn pins(figures: &Figures) -> String {
    match (figures.pinning_seconds, &figures.pinning_error) {
        (Some(seconds), _) => format!(
            "in {}, meanwhile{}",
            time(seconds * 1e9),
            if figures.is_simulated {
                "; slowed down"
            } else {
                ""
            }
        ),
        (None, Some(_)) => "unpinned again: see below".to_owned(),
        (None, None) if figures.pinned_chunks > 0 => "meanwhile, and unpinned".to_owned(),
        (None, None) => "pinning was off".to_owned(),
    }
}

fn copies(figures: &Figures) -> Vec<Row> {
    let mut rows = vec![
        (
            "copies",
            count(figures.copies),
            format!("of up to {} each", BinaryBytes(PIECE as u64)),
        ),
        (
            "  pageable",
            count(figures.pageable_copies),
            "staged by the driver, no wait".to_owned(),
        ),
        (
            "  pinned",
            count(figures.pinned_copies),
            "waited for; small ones staged instead".to_owned(),
        ),
        (
            "  split",
            count(figures.split_copies),
            "waited for, across the end of a chunk".to_owned(),
        ),
        (
            "  bounced",
            count(figures.bounced_copies),
            "about to be unpinned: through the heap".to_owned(),
        ),
    ];
    if figures.private_copies > 0 {
        rows.push((
            "of these, private",
            count(figures.private_copies),
            "rewritten as soon as the call returned".to_owned(),
        ));
    }
    rows
}

fn faults(figures: &Figures) -> Vec<Row> {
    let (torn_note, dead, dead_note) = match figures.dead_reads {
        Some(dead) => (
            "changed before the device read it",
            count(dead),
            "gone or unpinned before it was read",
        ),
        None => (
            "as the contents show",
            "-".to_owned(),
            "not to be seen on a real driver",
        ),
    };
    vec![
        (
            "mismatched tensors",
            count(figures.mismatched_tensors),
            format!(
                "of {} read back",
                HumanCount(figures.tensors as u64 * figures.loads)
            ),
        ),
        (
            "torn transfers",
            count(figures.torn_transfers),
            torn_note.to_owned(),
        ),
        ("dead reads", dead, dead_note.to_owned()),
    ]
}
