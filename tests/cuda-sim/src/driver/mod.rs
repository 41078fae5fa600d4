//! The driver that the shared object exports.
//!
//! # When may an operation run?
//!
//! The documents promise little: an operation runs some time after it was
//! enqueued, in the order of its stream, after what it was told to wait for.
//! A program is right only if it is right for *every* such time, and on a real
//! device nearly all runs use the early ones. This driver uses the late ones.
//!
//! Each stream has a queue and a worker thread. The n-th operation that was
//! ever put on a stream is the point `(stream, n)`; a point is reached when
//! that operation is done. The operation at the head of a queue runs as soon
//! as all three of these hold:
//!
//! 1. *Order.* Every point that it depends on is reached. Points come from
//!    `cuStreamWaitEvent` and from the implicit order between a context's
//!    legacy stream and its blocking streams. Points always lie in the past of
//!    the operation, so they cannot form a cycle.
//! 2. *Time.* The timing that is set allows it. `Immediate`: always.
//!    `Delay(d)`: once `d` has passed since it was enqueued. `UntilWaited`:
//!    once it has been *demanded*.
//! 3. *No hold* is in force, neither on all streams nor on this one.
//!
//! An operation is demanded when somebody can tell whether it ran: a call
//! that waits for it, a query that found it pending, or a demanded operation
//! that depends on it. A demand is passed on along the dependencies at once,
//! so it reaches every queue that must move. Under `UntilWaited` an operation
//! that nobody asks about never runs, until the session drains: that is as
//! late as a device can be, and it needs no clock, so a test that frees or
//! rewrites a source too early fails every time.
//!
//! The worker carries operations out, or a thread that waits for them does;
//! one at a time for each stream in either case.
//!
//! Nothing that is destroyed is waited for. Destroying a stream or a context
//! leaves its operations queued; they hold what they need (staging buffers,
//! device memory, the knowledge of where host memory was) and find what died
//! in the meantime to be dead.
//!
//! A context that breaks drops all that is queued in it, and every later call
//! on it returns the error that it broke with.
//!
//! # Locks
//!
//! One mutex guards all tables and queues ([`state::lock`]). It is held for
//! table look-ups and queue operations only, never while contents are copied,
//! so that threads on streams of their own copy in parallel.

mod api;
mod call;
mod capture;
mod context;
mod device;
mod dma;
mod event;
mod faults;
mod host;
mod maps;
mod operation;
mod pool;
mod process;
mod remote;
mod schedule;
mod settings;
mod state;
mod user_object;
mod worker;

use std::thread::LocalKey;

/// What a driver function comes to: a value, or the code it returns.
type Outcome<T = ()> = Result<T, i32>;

/// The counters of this copy of the driver.
static TALLY: crate::counters::Tally = crate::counters::Tally::new();

/// A number that tells this thread from every other, past ones included.
fn this_thread() -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering};

    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static MINE: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    let mine: &'static LocalKey<u64> = &MINE;
    // A thread that is being torn down has no number left; nothing it can
    // still call needs a unique one.
    mine.try_with(|number| *number).unwrap_or(0)
}
