//! The results as tables for a terminal.

use comfy_table::{Table, presets};

use crate::support::results::{Publishing, Rate, Sharing};

pub(crate) fn sharing(rows: &[Sharing]) -> String {
    let mut table = with_header(&["contestant", "threads", "ns a lookup, each"]);
    for row in rows {
        table.add_row([
            row.contestant.clone(),
            row.threads.to_string(),
            format!("{:.1}", row.nanoseconds),
        ]);
    }
    table.to_string()
}

pub(crate) fn publishing(rows: &[Publishing]) -> String {
    let mut table = with_header(&[
        "contestant",
        "publishes wanted",
        "made, a second",
        "ns a batch: median",
        "99 %",
        "99.9 %",
        "longest",
    ]);
    for row in rows {
        let wanted = match row.rate {
            Rate::Never => "none".to_owned(),
            Rate::PerSecond(times) => format!("{times} a second"),
            Rate::Unlimited => "no limit".to_owned(),
        };
        let figures = [row.publishes, row.median, row.p99, row.p999, row.max];
        let figures = figures.map(|figure| format!("{figure:.0}"));
        table.add_row([row.contestant.clone(), wanted].into_iter().chain(figures));
    }
    table.to_string()
}

fn with_header(names: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(names.iter().copied());
    table
}
