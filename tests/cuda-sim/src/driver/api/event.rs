//! Events.

use crate::code;
use crate::counters;
use crate::driver::call::{Out, driver_api, enter};
use crate::driver::event::{Event, Record};
use crate::driver::operation::Action;
use crate::driver::schedule::wait;
use crate::driver::{Outcome, TALLY};

const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;
const ALL_FLAGS: u32 = 7;

driver_api! {
    fn cuEventCreate(event: Out<usize>, flags: u32) {
        if flags & !ALL_FLAGS != 0 || flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0 {
            return Err(code::INVALID_VALUE);
        }
        event.check()?;
        let mut state = enter()?;
        let context = state.current()?;
        let handle = state.new_handle();
        let new = Event {
            context,
            timed: flags & DISABLE_TIMING == 0,
            last: Record::Never,
            time: None,
        };
        state.events.insert(handle, new);
        counters::add(&TALLY.live_events, 1);
        event.set(handle)
    }

    /// Waits for nothing; who waits for the record goes on doing so.
    fn cuEventDestroy_v2(event: usize) {
        let mut state = enter()?;
        state.event(event)?;
        state.events.remove(&event);
        counters::take(&TALLY.live_events, 1);
        Ok(())
    }

    fn cuEventRecord(event: usize, stream: usize) {
        record(event, stream)
    }

    fn cuEventRecordWithFlags(event: usize, stream: usize, flags: u32) {
        if flags > 1 {
            return Err(code::INVALID_VALUE);
        }
        record(event, stream)
    }

    fn cuEventQuery(event: usize) {
        let mut state = enter()?;
        state.event(event)?;
        let point = state.event_point(event)?;
        state.potentially_unsafe()?;
        match point.filter(|point| !state.is_reached(*point)) {
            None => Ok(()),
            Some(point) => {
                state.demand(&[point]);
                Err(code::NOT_READY)
            }
        }
    }

    /// Waits for the record that is the last one now.
    fn cuEventSynchronize(event: usize) {
        let mut state = enter()?;
        state.current()?;
        let point = state.event_point(event)?;
        state.potentially_unsafe()?;
        match point {
            Some(point) => wait(state, &[point]).map(drop),
            None => Ok(()),
        }
    }

    fn cuEventElapsedTime(milliseconds: Out<f32>, start: usize, end: usize) {
        elapsed(milliseconds, start, end)
    }

    fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: usize, end: usize) {
        elapsed(milliseconds, start, end)
    }
}

fn record(event: usize, stream: usize) -> Outcome {
    let mut state = enter()?;
    state.current()?;
    let context = state.event(event)?.context;
    let stream = state.stream(stream)?;
    if state
        .streams
        .get(&stream)
        .is_none_or(|it| it.context != context)
    {
        return Err(code::INVALID_HANDLE);
    }
    let last = match state.clock(stream)? {
        Some((capture, clock)) => Record::Captured { capture, clock },
        None => match state.submit(stream, Action::Record(event))? {
            Some(point) => Record::At(point),
            None => Record::Never,
        },
    };
    if let Some(event) = state.events.get_mut(&event) {
        event.last = last;
        event.time = None;
    }
    Ok(())
}

fn elapsed(milliseconds: Out<f32>, start: usize, end: usize) -> Outcome {
    let mut state = enter()?;
    for event in [start, end] {
        let found = state.event(event)?;
        if !found.timed || matches!(found.last, Record::Never) {
            return Err(code::INVALID_HANDLE);
        }
    }
    for event in [start, end] {
        if let Some(point) = state.event_point(event)?
            && !state.is_reached(point)
        {
            state.demand(&[point]);
            return Err(code::NOT_READY);
        }
    }
    let (Some(start), Some(end)) = (state.event(start)?.time, state.event(end)?.time) else {
        return Err(code::NOT_READY);
    };
    let forwards = end.saturating_duration_since(start).as_secs_f32();
    let backwards = start.saturating_duration_since(end).as_secs_f32();
    milliseconds.set((forwards - backwards) * 1e3)
}
