//! The crate's warnings, in the examples' words.

use std::fmt;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::{Compact, Format, Writer};
use tracing_subscriber::fmt::{self as log, FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use super::bar::Bar;

/// Shows the crate's warnings from now on; `in_full` or in a short line each.
pub(crate) fn show(in_full: bool, bar: &Bar) {
    log::fmt()
        // It would tell standard error, and panic if that is what failed.
        .log_internal_errors(false)
        .event_format(Lines {
            in_full,
            full: log::format()
                .compact()
                .without_time()
                .with_target(false)
                .with_ansi(false),
        })
        .with_max_level(Level::WARN)
        .with_writer(bar.clone())
        .init();
}

struct Lines {
    in_full: bool,
    full: Format<Compact, ()>,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut wait = Wait::default();
        event.record(&mut wait);
        match (wait.site, wait.residency, wait.cost) {
            // Fits 80 columns.
            (Some(site), Some(residency), Some(cost)) if !self.in_full => {
                writeln!(writer, "warn: {site} waited {cost} ({residency})")
            }
            _ => self.full.format_event(context, writer, event),
        }
    }
}

/// What a warning of a copy that waited says.
#[derive(Default)]
struct Wait {
    site: Option<String>,
    residency: Option<&'static str>,
    cost: Option<String>,
}

impl Visit for Wait {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "site" => self.site = Some(format!("{value:?}")),
            "residency" => {
                self.residency = Some(match format!("{value:?}").as_str() {
                    "Pinned" => "pinned",
                    "Mixed" => "pinned in part",
                    _ => "pageable",
                });
            }
            "cost" => {
                let mut cost = format!("{value:.1?}");
                if let Some(unit) = cost.find(char::is_alphabetic) {
                    cost.insert(unit, ' ');
                }
                self.cost = Some(cost);
            }
            _ => {}
        }
    }
}
