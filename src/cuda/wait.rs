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

use cudarc::driver::sys::CUresult;
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

/// Whether `error` says that the context does no work any more. The driver's
/// reference says of these codes that the context is destroyed or the driver
/// shut down, or that the process must be ended and started anew to use CUDA
/// again. That nothing is transferred from then on is an inference: where
/// memory can be kept instead of trusting it, it is kept.
fn context_is_dead(error: &CudaError) -> bool {
    use CUresult as Code;
    let CudaError::Driver { source, .. } = error else {
        return false;
    };
    matches!(
        source.0,
        Code::CUDA_ERROR_DEINITIALIZED
            | Code::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | Code::CUDA_ERROR_ECC_UNCORRECTABLE
            | Code::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | Code::CUDA_ERROR_ILLEGAL_ADDRESS
            | Code::CUDA_ERROR_LAUNCH_TIMEOUT
            | Code::CUDA_ERROR_ASSERT
            | Code::CUDA_ERROR_HARDWARE_STACK_ERROR
            | Code::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | Code::CUDA_ERROR_MISALIGNED_ADDRESS
            | Code::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | Code::CUDA_ERROR_INVALID_PC
            | Code::CUDA_ERROR_LAUNCH_FAILED
    )
}
