//! Figures as a person reads them, in rows of three cells: what, how much, and
//! a note.

use comfy_table::{CellAlignment, Table, presets};
use indicatif::HumanCount;

pub(crate) type Row = (&'static str, String, String);

/// The table for a terminal of so many columns, or for no terminal. Without
/// its notes, if they do not fit.
pub(crate) fn table(groups: &[Vec<Row>], columns: Option<usize>) -> String {
    let whole = draw(groups, true);
    match columns {
        Some(columns) if columns < width(&whole) => draw(groups, false),
        _ => whole,
    }
}

fn width(table: &str) -> usize {
    // All of its characters are one column wide.
    table
        .lines()
        .map(|line| line.chars().count())
        .max()
        .unwrap_or(0)
}

fn draw(groups: &[Vec<Row>], with_notes: bool) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    let cells = if with_notes { 3 } else { 2 };
    for (number, group) in groups.iter().enumerate() {
        if number > 0 {
            table.add_row([""; 3].into_iter().take(cells));
        }
        for (what, figure, note) in group {
            table.add_row([*what, figure, note].into_iter().take(cells));
        }
    }
    if let Some(column) = table.column_mut(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

pub(crate) fn count(number: u64) -> String {
    HumanCount(number).to_string()
}

/// With one decimal, or none where it would say nothing.
pub(crate) fn time(nanoseconds: f64) -> String {
    let (number, unit) = match nanoseconds {
        ..1e3 => (nanoseconds, "ns"),
        ..1e6 => (nanoseconds / 1e3, "µs"),
        ..1e9 => (nanoseconds / 1e6, "ms"),
        _ => (nanoseconds / 1e9, "s"),
    };
    let decimals = if number < 100.0 { 1 } else { 0 };
    format!("{number:.decimals$} {unit}")
}
