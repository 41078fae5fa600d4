//! Faults on demand: which call returns which code, and whether it acts.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

struct Fault {
    call: String,
    /// Calls left until it strikes; it strikes at 1. None: every call.
    countdown: Option<u64>,
    due: Due,
}

/// What a call that is to fail does.
#[derive(Clone, Copy)]
pub(super) struct Due {
    pub(super) code: i32,
    pub(super) way: Way,
}

#[derive(Clone, Copy)]
pub(super) enum Way {
    /// It does nothing.
    Instead,
    /// It acts all the same, as a call does that returns the error of earlier
    /// work.
    AfterActing,
    /// It does nothing, and breaks the current context.
    Breaking,
}

static FAULTS: Mutex<Vec<Fault>> = Mutex::new(Vec::new());

/// How many faults are ordered, so that a call on a healthy driver does not
/// lock. Relaxed: whoever orders a fault and then expects it to strike orders
/// the two for themselves.
static ORDERED: AtomicUsize = AtomicUsize::new(0);

/// What this call of `call` must do, if it is to fail.
#[inline]
pub(super) fn due(call: &str) -> Option<Due> {
    if ORDERED.load(Ordering::Relaxed) == 0 {
        return None;
    }
    strike(call)
}

#[cold]
fn strike(call: &str) -> Option<Due> {
    let mut faults = faults();
    let mut due = None;
    faults.retain_mut(|fault| {
        if fault.call != call {
            return true;
        }
        match &mut fault.countdown {
            None => {
                due = due.or(Some(fault.due));
                true
            }
            Some(1) => {
                due = Some(fault.due);
                false
            }
            Some(left) => {
                *left -= 1;
                true
            }
        }
    });
    ORDERED.store(faults.len(), Ordering::Relaxed);
    due
}

/// Orders a fault: the `nth` call from now, or with 0 every call.
pub(super) fn order(call: String, nth: u64, due: Due) {
    let mut faults = faults();
    faults.push(Fault {
        call,
        countdown: (nth > 0).then_some(nth),
        due,
    });
    ORDERED.store(faults.len(), Ordering::Relaxed);
}

/// Forgets all faults.
pub(super) fn clear() {
    let mut faults = faults();
    faults.clear();
    ORDERED.store(0, Ordering::Relaxed);
}

fn faults() -> MutexGuard<'static, Vec<Fault>> {
    FAULTS.lock().unwrap_or_else(PoisonError::into_inner)
}
