//! Tells each call site once that its copy had to be slowed down.

use std::collections::HashSet;
use std::panic::Location;
use std::sync::{LazyLock, Mutex, PoisonError};

/// Whether this is the first time that `site` asks. Only slow copies ask, so
/// the lock costs nothing that shows.
pub(super) fn is_first_time(site: &Location<'static>) -> bool {
    // By value: each instance of a generic function has a location of its own.
    static SEEN: LazyLock<Mutex<HashSet<Location<'static>>>> = LazyLock::new(Mutex::default);
    SEEN.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .insert(*site)
}
