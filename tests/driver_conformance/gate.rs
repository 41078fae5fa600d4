//! [`Gate`]: keeps a stream busy for exactly as long as a test wants.

use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use cudarc::driver::sys;

use crate::calls::code;
use crate::memory::Stream;

/// How long a call may keep a gate closed that may well wait for what is
/// behind it. No check passes or fails by this: whether the call waited, it
/// either measures or does not care.
pub(crate) const BRIEFLY: Duration = Duration::from_millis(50);

/// How long a call is given that must not wait for what is behind a gate. It
/// ends only a test that fails.
pub(crate) const LONG: Duration = Duration::from_secs(10);

/// A function on a stream that returns once the gate is opened: what is
/// enqueued behind it does not run before.
///
/// Declare it after all that its stream uses, so that a test that fails opens
/// it first.
pub(crate) struct Gate {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    open: Mutex<bool>,
    opened: Condvar,
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, bool> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Gate {
    /// Puts a closed gate on the stream.
    pub(crate) fn close(stream: &Stream) -> Self {
        let inner = Arc::<Inner>::default();
        let passed = Arc::into_raw(Arc::clone(&inner)).cast_mut().cast();
        // SAFETY: the function takes over the reference that it is passed,
        // and runs once at most. (If it never runs, a few bytes are leaked.)
        let result = unsafe { sys::cuLaunchHostFunc(stream.handle(), Some(pass), passed) };
        assert_eq!(code(result), 0, "a function can be put on a stream");
        Self { inner }
    }

    pub(crate) fn open(&self) {
        *self.inner.lock() = true;
        self.inner.opened.notify_all();
    }

    pub(crate) fn is_open(&self) -> bool {
        *self.inner.lock()
    }

    /// Makes a call behind the closed gate. If it has not returned after
    /// `patience`, the gate is opened: no test hangs. Also returns whether it
    /// was still closed when the call returned.
    pub(crate) fn during<T>(&self, patience: Duration, call: impl FnOnce() -> T) -> (T, bool) {
        thread::scope(|scope| {
            let (returned, wait) = mpsc::channel::<()>();
            scope.spawn(move || {
                if wait.recv_timeout(patience) == Err(mpsc::RecvTimeoutError::Timeout) {
                    self.open();
                }
            });
            let value = call();
            let did_not_wait = !self.is_open();
            drop(returned);
            (value, did_not_wait)
        })
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
    }
}

unsafe extern "C" fn pass(data: *mut c_void) {
    // SAFETY: what `close` made of an `Arc`, for this one call.
    let inner = unsafe { Arc::from_raw(data.cast_const().cast::<Inner>()) };
    let mut open = inner.lock();
    while !*open {
        open = inner
            .opened
            .wait(open)
            .unwrap_or_else(PoisonError::into_inner);
    }
}
