//! The wall between C and Rust: every exported function goes through it.

use super::faults::{self, Due, Way};
use super::process::{check_initialized, is_forked_child};
use super::{Outcome, context, state, user_object};
use crate::code;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// One exported function: its name and how often it was called.
pub(super) struct Site {
    name: &'static str,
    calls: AtomicU64,
    listed: AtomicBool,
}

static SITES: Mutex<Vec<&'static Site>> = Mutex::new(Vec::new());

impl Site {
    pub(super) const fn new(name: &'static str) -> Self {
        Self {
            name,
            calls: AtomicU64::new(0),
            listed: AtomicBool::new(false),
        }
    }

    /// Counts the call, lets an ordered fault take its place, or else runs
    /// `body`, whose panics become `CUDA_ERROR_UNKNOWN`. From a destructor, or
    /// in a forked child, nothing may be called.
    pub(super) fn run(&'static self, body: impl FnOnce() -> Outcome) -> i32 {
        // Before any lock.
        if is_forked_child() {
            return code::NOT_INITIALIZED;
        }
        if !self.listed.load(Ordering::Relaxed) && !self.listed.swap(true, Ordering::Relaxed) {
            sites().push(self);
        }
        if COUNTING.load(Ordering::Relaxed) {
            self.calls.fetch_add(1, Ordering::Relaxed);
        }
        if user_object::is_destructor_thread() {
            return code::NOT_PERMITTED;
        }
        let fault = faults::due(self.name);
        if let Some(Due { code, way }) = fault {
            match way {
                Way::AfterActing => {}
                Way::Instead => return code,
                Way::Breaking => {
                    context::break_current(code);
                    return code;
                }
            }
        }
        match catch_unwind(AssertUnwindSafe(body)) {
            Ok(Ok(())) => fault.map_or(code::SUCCESS, |fault| fault.code),
            Ok(Err(code)) => code,
            Err(_) => code::UNKNOWN,
        }
    }
}

fn sites() -> std::sync::MutexGuard<'static, Vec<&'static Site>> {
    SITES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How often the function of that name was called since the last reset.
pub(super) fn calls(name: &str) -> u64 {
    sites()
        .iter()
        .filter(|site| site.name == name)
        .map(|site| site.calls.load(Ordering::Relaxed))
        .sum()
}

/// Whether calls are counted. An atomic add takes as long as all else that
/// some calls do.
static COUNTING: AtomicBool = AtomicBool::new(true);

pub(super) fn set_counting(on: bool) {
    COUNTING.store(on, Ordering::Relaxed);
}

/// Sets all call counts to zero.
pub(super) fn reset_calls() {
    for site in sites().iter() {
        site.calls.store(0, Ordering::Relaxed);
    }
}

/// The tables, for a call that is an error before `cuInit`.
pub(super) fn enter() -> Outcome<state::Guard> {
    check_initialized()?;
    Ok(state::lock())
}

/// A pointer parameter through which a C caller wants a value.
///
/// The one way to make one is to be called from C with it, and every exported
/// function is `unsafe` to call for just that reason: a caller vouches that
/// the pointer is null or valid for writing a `T`.
#[repr(transparent)]
pub(super) struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// Writes the value; a null pointer is `CUDA_ERROR_INVALID_VALUE`.
    pub(super) fn set(self, value: T) -> Outcome {
        if self.0.is_null() {
            return Err(code::INVALID_VALUE);
        }
        self.set_if_wanted(value);
        Ok(())
    }

    /// Writes the value unless the pointer is null.
    pub(super) fn set_if_wanted(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not null, so by the type's invariant valid for writing
            // a `T`; unaligned because C makes no promise to Rust.
            unsafe { self.0.write_unaligned(value) }
        }
    }

    /// The same pointer, for another type that the call's documents name.
    pub(super) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// An error if the pointer is null, for a call that must not act then.
    pub(super) fn check(self) -> Outcome {
        if self.0.is_null() {
            Err(code::INVALID_VALUE)
        } else {
            Ok(())
        }
    }
}

impl Out<u8> {
    /// The element at `index` of an array of bytes that the caller vouched for.
    pub(super) fn at(self, index: usize) -> Self {
        Self(self.0.wrapping_add(index))
    }
}

impl Out<u32> {
    /// The value that a call is given in the place where it puts one; zero
    /// for a null pointer.
    pub(super) fn get(self) -> u32 {
        if self.0.is_null() {
            return 0;
        }
        // SAFETY: not null, and a caller of such a call vouches that there is
        // a value.
        unsafe { self.0.read_unaligned() }
    }
}

/// A pointer parameter through which a C caller hands over `T`s, by the same
/// promise as [`Out`].
#[repr(transparent)]
pub(super) struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// The value at `index`; a null pointer is `CUDA_ERROR_INVALID_VALUE`.
    ///
    /// # Safety
    ///
    /// The caller from C vouched for more than `index` values.
    pub(super) unsafe fn at(&self, index: usize) -> Outcome<T> {
        if self.0.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: not null, and the caller vouches for the element;
        // unaligned because C makes no promise to Rust.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }
}

/// Defines functions of the C interface. Each body is the inside of a
/// [`Site::run`].
macro_rules! driver_api {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            $(#[$doc])*
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($argument: $type),*) -> i32 {
                static SITE: $crate::driver::call::Site =
                    $crate::driver::call::Site::new(stringify!($name));
                SITE.run(|| $body)
            }
        )*
    };
}
pub(super) use driver_api;
