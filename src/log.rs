//! Events for the program's log.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `event`, which emits one event. The subscriber is the program's code: a
/// panic of the subscriber ends here, so that the caller does its own work to
/// the end, in a drop during another panic too.
pub(crate) fn emit(event: impl FnOnce()) {
    let _ = catch_unwind(AssertUnwindSafe(event));
}
