//! The crate's warnings, in the examples' words.

use std::fmt;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::{Compact, Format, Writer};
use tracing_subscriber::fmt::{self as log, FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use super::bar::Bar;

/// What to show of the warnings that a copy waited.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waits {
    InFull,
    /// In a line that fits 80 columns.
    InShort,
    /// For a program whose copies are meant to wait.
    Hidden,
}

/// Shows the crate's warnings and errors from now on.
pub(crate) fn show(waits: Waits, bar: &Bar) {
    log::fmt()
        // It would tell standard error, and panic if that is what failed.
        .log_internal_errors(false)
        .event_format(Lines {
            waits,
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
    waits: Waits,
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
            (Some(_), Some(_), Some(_)) if self.waits == Waits::Hidden => Ok(()),
            (Some(site), Some(residency), Some(cost)) if self.waits == Waits::InShort => {
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
                    "Seam" => "pinned in two regions",
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
