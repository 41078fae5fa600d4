//! The results as Markdown tables. A time stands only beside a ratio, because
//! ratios carry over to other machines.

use std::fmt::Write as _;

use crate::error::ReportError;
use crate::measured::{ALONE, Group, HIT, MISS_FAR, MISS_NEAR, Measured, PARKED, REGISTER_ALL};
use crate::results::Rate;

/// Each table, with the marker of its place in the document.
pub(crate) fn all(measured: &Measured) -> Result<Vec<(&'static str, String)>, ReportError> {
    Ok(vec![
        ("machine", machine(measured)),
        ("hit", by_size(measured, HIT, "floor")?),
        ("miss near", by_size(measured, MISS_NEAR, "floor")?),
        ("miss far", by_size(measured, MISS_FAR, "floor")?),
        ("threads", by_threads(measured)?),
        ("writer", beside_a_writer(measured)?),
        ("publish", by_size(measured, ALONE, "is_pinned")?),
        ("parked", by_size(measured, PARKED, "is_pinned")?),
        ("register_all", by_size(measured, REGISTER_ALL, "Vec sort")?),
    ])
}

fn machine(measured: &Measured) -> String {
    let machine = &measured.contention.machine;
    format!(
        "{}, {} cores, {}.",
        machine.processor, machine.cores, machine.system
    )
}

/// A row for each contestant, a column for each size; ratios to `base`.
fn by_size(measured: &Measured, group: Group, base: &str) -> Result<String, ReportError> {
    let sizes = measured.sizes(group);
    let header = sizes.iter().map(|&n| format!("n = {}", size(n)));
    let mut table = header_row("", header);
    // Says which bench to run where there is nothing.
    measured.cost(group, base, sizes.first().copied().unwrap_or_default())?;
    for contestant in measured.contestants(group) {
        let cells = sizes.iter().map(|&n| {
            let cost = measured.optional(group, contestant, n);
            match cost.zip(measured.optional(group, base, n)) {
                Some((cost, base)) => format!("{} ({})", ratio(cost / base), time(cost)),
                None => "–".to_owned(),
            }
        });
        add_row(&mut table, contestant, cells);
    }
    Ok(table)
}

/// What a lookup costs each thread, against the same contestant's one thread.
fn by_threads(measured: &Measured) -> Result<String, ReportError> {
    let rows = &measured.contention.sharing;
    let counts = in_order(rows.iter().map(|row| row.threads));
    let header = counts.iter().map(|threads| match threads {
        1 => "1 thread".to_owned(),
        more => format!("{more} threads"),
    });
    let mut table = header_row("", header);
    for contestant in in_order(rows.iter().map(|row| row.contestant.as_str())) {
        let alone = measured.shared(contestant, 1)?;
        let mut cells = Vec::new();
        for &threads in &counts {
            let cost = measured.shared(contestant, threads)?;
            cells.push(format!("{} ({})", ratio(cost / alone), time(cost)));
        }
        add_row(&mut table, contestant, cells.into_iter());
    }
    Ok(table)
}

/// A reader's median and 99.9 % by how often a writer publishes, against the
/// floor's under the same load.
fn beside_a_writer(measured: &Measured) -> Result<String, ReportError> {
    let rows = &measured.contention.publishing;
    let rates = in_order(rows.iter().map(|row| row.rate));
    let mut table = header_row("", rates.iter().map(|&rate| rate_name(rate)));
    for contestant in in_order(rows.iter().map(|row| row.contestant.as_str())) {
        let mut cells = Vec::new();
        for &rate in &rates {
            let (row, floor) = (
                measured.beside(contestant, rate)?,
                measured.beside("floor", rate)?,
            );
            cells.push(format!(
                "{}, {} ({}, {})",
                ratio(row.median / floor.median),
                ratio(row.p999 / floor.p999),
                time(row.median),
                time(row.p999)
            ));
        }
        add_row(&mut table, contestant, cells.into_iter());
    }
    Ok(table)
}

pub(crate) fn rate_name(rate: Rate) -> String {
    match rate {
        Rate::Never => "no publish".to_owned(),
        Rate::PerSecond(times) => format!("{} a second", size(times as usize)),
        Rate::Unlimited => "as often as it can".to_owned(),
    }
}

/// Each once, in the order in which they come.
pub(crate) fn in_order<T: PartialEq>(items: impl Iterator<Item = T>) -> Vec<T> {
    let mut once = Vec::new();
    for item in items {
        if !once.contains(&item) {
            once.push(item);
        }
    }
    once
}

fn header_row(first: &str, names: impl ExactSizeIterator<Item = String>) -> String {
    let columns = names.len();
    let mut table = String::new();
    add_row(&mut table, first, names);
    table.push_str("|---");
    table.push_str(&"|---:".repeat(columns));
    table.push_str("|\n");
    table
}

fn add_row(table: &mut String, first: &str, cells: impl Iterator<Item = String>) {
    // Writing to a `String` cannot fail.
    let _ = write!(table, "| {first} |");
    for cell in cells {
        let _ = write!(table, " {cell} |");
    }
    table.push('\n');
}

fn ratio(ratio: f64) -> String {
    if ratio < 0.001 {
        return "< 0.001 ×".to_owned();
    }
    let decimals = match ratio {
        ..0.1 => 3,
        ..1.0 => 2,
        ..10.0 => 1,
        _ => 0,
    };
    format!("{ratio:.decimals$} ×")
}

pub(crate) fn time(nanoseconds: f64) -> String {
    let (number, unit) = match nanoseconds.abs() {
        ..1e3 => (nanoseconds, "ns"),
        ..1e6 => (nanoseconds / 1e3, "µs"),
        ..1e9 => (nanoseconds / 1e6, "ms"),
        _ => (nanoseconds / 1e9, "s"),
    };
    let decimals = if number.abs() < 10.0 { 1 } else { 0 };
    format!("{number:.decimals$} {unit}")
}

/// With a comma between thousands.
pub(crate) fn size(n: usize) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measured::tests::measured;

    #[test]
    fn a_table_has_ratios_first_and_gaps_where_nothing_was_measured() {
        let measured = measured(&[
            (HIT, "floor", 3, 2.0),
            (HIT, "floor", 1_000, 8.0),
            (HIT, "is_pinned", 3, 3.0),
        ]);
        let table = by_size(&measured, HIT, "floor").expect("the base is there");
        assert_eq!(
            table,
            "|  | n = 3 | n = 1,000 |\n\
             |---|---:|---:|\n\
             | floor | 1.0 × (2.0 ns) | 1.0 × (8.0 ns) |\n\
             | is_pinned | 1.5 × (3.0 ns) | – |\n"
        );
    }

    #[test]
    fn an_empty_group_names_the_bench_to_run() {
        let error = by_size(&measured(&[]), PARKED, "is_pinned");
        let error = error.expect_err("nothing was measured").to_string();
        assert!(error.contains("publish_parked"), "{error}");
    }

    #[test]
    fn figures_are_readable() {
        assert_eq!(size(1_000_000), "1,000,000");
        assert_eq!(size(64), "64");
        assert_eq!(time(1_234.0), "1.2 µs");
        assert_eq!(time(-3.25), "-3.2 ns");
        assert_eq!(ratio(0.0512), "0.051 ×");
        assert_eq!(ratio(17.3), "17 ×");
        assert_eq!(ratio(0.000_01), "< 0.001 ×");
    }
}
