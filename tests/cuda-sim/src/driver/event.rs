//! Events: marks in streams that calls and other streams can wait for.

use super::Outcome;
use super::capture::Clock;
use super::schedule::Point;
use super::state::State;
use crate::code;
use std::time::Instant;

pub(super) struct Event {
    pub(super) context: usize,
    pub(super) timed: bool,
    pub(super) last: Record,
    /// When the last record was reached.
    pub(super) time: Option<Instant>,
}

/// What an event was last recorded as.
#[derive(Clone)]
pub(super) enum Record {
    /// Never: it counts as complete.
    Never,
    At(Point),
    /// In a capture, with what its stream had behind it there.
    Captured {
        capture: usize,
        clock: Clock,
    },
}

impl State {
    pub(super) fn event(&self, handle: usize) -> Outcome<&Event> {
        let event = self.events.get(&handle).ok_or(code::INVALID_HANDLE)?;
        self.check_unbroken(event.context)?;
        Ok(event)
    }

    /// The point to wait for; none if the event counts as complete. An event
    /// of a capture stands for nothing that ever ran.
    pub(super) fn event_point(&self, handle: usize) -> Outcome<Option<Point>> {
        match self.event(handle)?.last {
            Record::Never => Ok(None),
            Record::At(point) => Ok(Some(point)),
            Record::Captured { .. } => Err(code::CAPTURED_EVENT),
        }
    }
}

/// Notes when an event was reached, unless it has been recorded anew.
pub(super) fn note_time(state: &mut State, handle: usize, stream: usize, seq: u64) {
    if let Some(event) = state.events.get_mut(&handle)
        && matches!(event.last, Record::At(point) if point == (Point { stream, seq }))
    {
        event.time = Some(Instant::now());
    }
}
