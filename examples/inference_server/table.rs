//! The figures of a run, as a person reads them. Fits 80 columns, and the
//! terminal if that has fewer.

use indicatif::HumanCount;

use crate::figures::Figures;
use crate::measure::{LOOKUPS, SOURCE_BYTES};
use crate::support::table::{self as shared, Row, count, time};

/// The table for a terminal of so many columns, or for no terminal.
pub(crate) fn table(figures: &Figures, columns: Option<usize>) -> String {
    let mut groups = vec![run(figures), copies(figures), faults(figures)];
    // They are taken beside the job and do not depend on how it copies: under
    // the title of an unguarded run they would read as if it had checked.
    if !figures.unguarded {
        groups.push(times(figures));
    }
    shared::table(&groups, columns)
}

fn run(figures: &Figures) -> Vec<Row> {
    vec![
        ("driver", figures.driver.to_owned(), figures.device.clone()),
        (
            "streams",
            figures.streams.to_string(),
            format!(
                "{} decode steps in {}",
                HumanCount(figures.steps),
                time(figures.seconds * 1e9)
            ),
        ),
        (
            "pins",
            count(figures.pins),
            format!("meanwhile; up to {} regions at once", figures.most_regions),
        ),
    ]
}

fn copies(figures: &Figures) -> Vec<Row> {
    let mut rows = vec![
        (
            "copies",
            count(figures.copies),
            format!(
                "{} a second",
                HumanCount((figures.copies as f64 / figures.seconds) as u64)
            ),
        ),
        (
            "  pageable",
            count(figures.pageable_sources),
            "staged by the driver, no wait".to_owned(),
        ),
    ];
    if figures.unguarded {
        rows.push((
            "  page-locked",
            count(figures.pinned_sources),
            "read late, and nothing waits".to_owned(),
        ));
        rows.push((
            "refused copies",
            count(figures.refused_copies),
            "page-locked in part, driver's error".to_owned(),
        ));
    } else {
        rows.push((
            "  page-locked, owned",
            count(figures.owned_copies),
            "no wait, the buffer keeps itself".to_owned(),
        ));
        rows.push((
            "  page-locked, staged",
            count(figures.staged),
            "no wait, through the staging ring".to_owned(),
        ));
        rows.push((
            "  page-locked, waited",
            count(figures.waited),
            format!(
                "{} each, with the wait",
                time(figures.waited_copy_ns_mean as f64)
            ),
        ));
        rows.push((
            "    of these split",
            count(figures.split),
            "page-locked in part".to_owned(),
        ));
        rows.push((
            "denied copies",
            count(figures.denied),
            "page-locked, and not copied".to_owned(),
        ));
        rows.push((
            "stream idle",
            format!("{:.1} %", 100.0 * figures.stream_idle_fraction),
            format!(
                "of the time, drained {} times",
                HumanCount(figures.stream_drains)
            ),
        ));
    }
    rows
}

fn faults(figures: &Figures) -> Vec<Row> {
    let (torn_note, dead, dead_note) = match figures.dead_reads {
        Some(dead) => (
            "changed before the device read it",
            count(dead),
            "freed before the device read it",
        ),
        None => (
            "as the contents show",
            "-".to_owned(),
            "not to be seen on a real driver",
        ),
    };
    vec![
        (
            "torn transfers",
            count(figures.torn_transfers),
            torn_note.to_owned(),
        ),
        ("dead reads", dead, dead_note.to_owned()),
        (
            "wrong contents",
            count(figures.contents_wrong),
            format!(
                "of {} copies read back",
                HumanCount(figures.contents_compared)
            ),
        ),
    ]
}

fn times(figures: &Figures) -> Vec<Row> {
    let (checked, unchecked) = (
        figures.copy_call_ns_p50 as f64,
        figures.unchecked_copy_call_ns_p50 as f64,
    );
    vec![
        (
            "lookup, median",
            time(figures.lookup_ns_p50),
            format!("per lookup, in batches of {LOOKUPS}"),
        ),
        (
            "lookup, p99",
            time(figures.lookup_ns_p99),
            "likewise".to_owned(),
        ),
        (
            "copy call, checked",
            time(checked),
            format!("median, {SOURCE_BYTES} bytes, pageable"),
        ),
        (
            "copy call, unchecked",
            time(unchecked),
            format!("likewise; checked / unchecked: {:.2}", checked / unchecked),
        ),
    ]
}
