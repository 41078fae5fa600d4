//! Waiting that cannot be skipped.
//!
//! A copy from page-locked memory that has been enqueued is a promise to keep
//! the source alive. Where the source is borrowed, the promise can be kept in
//! one way only: not returning before the device is done. So a wait here tries
//! everything the driver offers, and each step waits for at least what the one
//! before would have:
//!
//! 1. an event recorded right behind the copy (this waits for no later work);
//! 2. the stream;
//! 3. the context;
//! 4. if all of that failed, and the driver says that the context is dead,
//!    nothing runs on it any more;
//! 5. else the process is aborted: the device may be reading memory that the
//!    caller is about to reuse, and there is no one left to ask.
//!
//! An owned buffer needs neither of the last two: it is leaked.
//!
//! An error on the way is returned after the wait, never instead of it.

use std::io::{self, Write};
use std::process;

use cudarc::driver::{CudaContext, CudaStream};

use super::CudaError;
use super::driver::{Event, synchronize_context, synchronize_stream};
use crate::log;

/// Whether the device is done with the work that was waited for.
pub(super) enum Waited {
    /// It is. There may still be an error to report.
    Done(Result<(), CudaError>),
    /// Nobody knows: every way to ask failed, the last one with this.
    Unknown(CudaError),
}

/// Waits for all that was enqueued on `stream` before the call.
pub(super) fn wait_for_enqueued(event: &Event, stream: &CudaStream) -> Waited {
    match event.record(stream).and_then(|()| event.synchronize()) {
        Ok(()) => Waited::Done(Ok(())),
        Err(error) => wait_for_stream(error, stream),
    }
}

/// Waits for the work that `event`, last recorded on a stream of its own
/// context, marks. That stream comes next if it is named; another thread's
/// per-thread default stream cannot be.
pub(super) fn wait_for_event(event: &Event, stream: Option<&CudaStream>) -> Waited {
    match (event.synchronize(), stream) {
        (Ok(()), _) => Waited::Done(Ok(())),
        (Err(error), Some(stream)) => wait_for_stream(error, stream),
        (Err(error), None) => wait_for_context(error, event.context()),
    }
}

/// Waits for `stream`, after `error` left no narrower way.
pub(super) fn wait_for_stream(error: CudaError, stream: &CudaStream) -> Waited {
    match synchronize_stream(stream) {
        Ok(()) => Waited::Done(Err(error)),
        Err(_) => wait_for_context(error, stream.context()),
    }
}

fn wait_for_context(error: CudaError, context: &CudaContext) -> Waited {
    match synchronize_context(context) {
        Ok(()) => Waited::Done(Err(error)),
        Err(last) => Waited::Unknown(last),
    }
}

/// As [`wait_for_enqueued`], for a borrowed source.
pub(super) fn wait_or_abort(event: &Event, stream: &CudaStream) -> Result<(), CudaError> {
    abort_unless_dead(wait_for_enqueued(event, stream))
}

/// The error of a wait for borrowed memory that is over; if nobody knows
/// whether it is, the process ends, unless the context is dead.
pub(super) fn abort_unless_dead(waited: Waited) -> Result<(), CudaError> {
    match waited {
        Waited::Done(result) => result,
        Waited::Unknown(error) if context_is_dead(&error) => Err(error),
        Waited::Unknown(error) => abort(&error),
    }
}

/// Ends the process.
fn abort(error: &CudaError) -> ! {
    // To both, since a subscriber may not write the event out any more.
    // (`eprintln!` panics if standard error is closed.)
    let _ = writeln!(
        io::stderr(),
        "pinned-hosts: the driver can no longer say whether it is still reading host memory \
         that is about to be reused ({error}); aborting"
    );
    log::emit(|| tracing::error!(%error, "aborting: no way left to wait for a transfer"));
    process::abort();
}

/// The codes with which the driver says that the context does no work any more,
/// in the words of `cuda.h`. That nothing is transferred from then on is an
/// inference: where memory can be kept instead of trusting it, it is kept.
///
/// They are numbers, since `cudarc` knows some only for some versions of CUDA.
const DEAD: [u32; 17] = [
    // "The CUDA driver is in the process of shutting down."
    DEINITIALIZED,
    // "The context … has been destroyed."
    709, // CONTEXT_IS_DESTROYED
    // "The context cannot be used anymore, and must be destroyed."
    710, // ASSERT
    // "The process must be terminated and relaunched."
    226, // CONTAINED
    700, // ILLEGAL_ADDRESS
    702, // LAUNCH_TIMEOUT
    714, // HARDWARE_STACK_ERROR
    715, // ILLEGAL_INSTRUCTION
    716, // MISALIGNED_ADDRESS
    717, // INVALID_ADDRESS_SPACE
    718, // INVALID_PC
    719, // LAUNCH_FAILED
    721, // TENSOR_MEMORY_LEAK
    810, // MPS_CLIENT_TERMINATED
    911, // EXTERNAL_DEVICE
    // "An uncorrectable … error was detected"; no more is said.
    214, // ECC_UNCORRECTABLE
    220, // NVLINK_UNCORRECTABLE
];

/// What every call returns once the driver shuts down, as it does when the
/// process exits.
const DEINITIALIZED: u32 = 4;

fn context_is_dead(error: &CudaError) -> bool {
    code(error).is_some_and(|code| DEAD.contains(&code))
}

/// Whether `error` says that the driver is shutting down. All its memory goes
/// with it.
pub(super) fn driver_is_gone(error: &CudaError) -> bool {
    code(error) == Some(DEINITIALIZED)
}

/// What the driver returned.
fn code(error: &CudaError) -> Option<u32> {
    match error {
        CudaError::Driver { source, .. } => Some(source.0 as u32),
        _ => None,
    }
}
