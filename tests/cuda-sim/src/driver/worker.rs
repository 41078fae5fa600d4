//! The thread that carries out a stream's operations, unless somebody who
//! waits for one is quicker.

use super::event;
use super::operation::Action;
use super::schedule::{Next, Operation};
use super::state::{self, Guard};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, PoisonError};
use std::time::Instant;

/// Starts the worker of a stream. It ends when the stream is destroyed and
/// has nothing left to do.
pub(super) fn start(stream: usize) -> std::io::Result<()> {
    std::thread::Builder::new()
        .name("simulated stream".into())
        .spawn(move || work(stream))
        .map(drop)
}

fn work(stream: usize) {
    let mut state = state::lock();
    loop {
        match state.next(stream) {
            Next::Retire => return,
            Next::Park(work, until) => {
                state = park(state, &work, until);
                state.unpark(stream);
            }
            Next::Run(operation) => state = carry_out(state, stream, operation),
        }
    }
}

/// Carries an operation out, without the lock.
pub(super) fn carry_out(state: Guard, stream: usize, operation: Operation) -> Guard {
    drop(state);
    // A panic in here must not leave others waiting for ever.
    let ran = catch_unwind(AssertUnwindSafe(|| operation.action.execute()));
    debug_assert!(ran.is_ok(), "an operation panicked");
    let seq = operation.seq;
    let recorded = match operation.action {
        Action::Record(event) => Some(event),
        _ => None,
    };
    // Gives back buffers and memory before the lock is taken.
    drop(operation);
    let mut state = state::lock();
    if let Some(event) = recorded {
        event::note_time(&mut state, event, stream, seq);
    }
    state.finish(stream);
    state
}

fn park(state: Guard, work: &Condvar, until: Option<Instant>) -> Guard {
    match until {
        None => work.wait(state).unwrap_or_else(PoisonError::into_inner),
        Some(until) => {
            let left = until.saturating_duration_since(Instant::now());
            work.wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0
        }
    }
}
