//! The remote control: what tests link.
//!
//! It never touches the driver's own statics, of which a test binary has a
//! second, idle copy; everything goes through functions that are looked up in
//! the loaded object.

use crate::counters::Counters;
use crate::find::{self, LoadError};
use crate::{code, wire};
use libloading::os::unix::{Library, Symbol};
use std::ffi::{CString, c_char};
use std::fmt;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// When an operation that its stream's order lets run does run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Timing {
    /// At once, as on an idle device.
    Immediate,
    /// No earlier than this after it was enqueued.
    Delay(Duration),
    /// As late as possible: when a call waits for it, or has asked for it and
    /// been told that it is not ready, or when another operation that was
    /// asked for depends on it.
    #[default]
    UntilWaited,
}

/// What kind of device all devices are: what attributes 88
/// (`PAGEABLE_MEMORY_ACCESS`), 100 (`…_USES_HOST_PAGE_TABLES`) and 18
/// (`INTEGRATED`) say, and when a pageable source is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceKind {
    /// None of the attributes. Pageable sources are staged at the call.
    #[default]
    Discrete,
    /// 88 and 100. Pageable sources are read late.
    Coherent,
    /// 18 alone. Pageable sources are read late.
    Integrated,
    /// 88 alone. Pageable sources are staged at the call.
    Hmm,
}

/// When an asynchronous host-to-device copy reads a pageable source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pageable {
    /// During the call.
    #[default]
    StagedAtCall,
    /// During the call, once all earlier work of the stream is done.
    StagedAfterStreamWait,
    /// When the device gets to it, as if the source were page-locked.
    ReadLate,
}

/// The control functions of the loaded object.
struct Functions {
    reset: Symbol<extern "C" fn()>,
    set_timing: Symbol<extern "C" fn(u32, u64)>,
    set_device: Symbol<extern "C" fn(u32)>,
    set_attribute: Symbol<extern "C" fn(i32, i32)>,
    set_pageable: Symbol<extern "C" fn(u32)>,
    set_pageable_written_late: Symbol<extern "C" fn(bool)>,
    set_free_waits: Symbol<extern "C" fn(bool)>,
    set_torn_detection: Symbol<extern "C" fn(bool)>,
    set_call_counts: Symbol<extern "C" fn(bool)>,
    hold: Symbol<extern "C" fn() -> u64>,
    hold_stream: Symbol<extern "C" fn(usize) -> u64>,
    release: Symbol<extern "C" fn(u64)>,
    break_context: Symbol<extern "C" fn(i32) -> bool>,
    fail: Symbol<unsafe extern "C" fn(*const c_char, u64, i32, u32)>,
    clear_faults: Symbol<extern "C" fn()>,
    calls: Symbol<unsafe extern "C" fn(*const c_char) -> u64>,
    counters: Symbol<unsafe extern "C" fn(*mut Counters)>,
    reset_counters: Symbol<extern "C" fn()>,
    drain: Symbol<extern "C" fn()>,
}

impl Functions {
    fn look_up(library: &Library) -> Result<Self, libloading::Error> {
        macro_rules! look_up {
            ($($field:ident),* $(,)?) => {
                Ok(Self {
                    // SAFETY: the object's version is ours, so each function
                    // has the type that the field has.
                    $($field: unsafe {
                        library.get(concat!("cuda_sim_", stringify!($field), "\0").as_bytes())?
                    },)*
                })
            };
        }
        look_up!(
            reset,
            set_timing,
            set_device,
            set_attribute,
            set_pageable,
            set_pageable_written_late,
            set_free_waits,
            set_torn_detection,
            set_call_counts,
            hold,
            hold_stream,
            release,
            break_context,
            fail,
            clear_faults,
            calls,
            counters,
            reset_counters,
            drain,
        )
    }
}

/// The loaded driver.
pub struct Sim {
    functions: Functions,
    library: Library,
    path: PathBuf,
}

impl fmt::Debug for Sim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sim").field("path", &self.path).finish()
    }
}

/// Loads the simulated driver in place of `libcuda`, once for the process.
///
/// Call it before the first call of any CUDA function: from then on,
/// `dlopen("libcuda.so")` finds it, and so does `cudarc`.
pub fn load() -> Result<&'static Sim, LoadError> {
    static SIM: OnceLock<Result<Sim, LoadError>> = OnceLock::new();
    let sim = SIM.get_or_init(|| {
        let (library, path) = find::open()?;
        let functions = Functions::look_up(&library);
        match functions {
            Ok(functions) => Ok(Sim {
                functions,
                library,
                path,
            }),
            Err(_) => Err(LoadError::Stale { path }),
        }
    });
    sim.as_ref().map_err(Clone::clone)
}

impl Sim {
    /// The file that was loaded.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Starts a session: the driver to oneself, with defaults for everything.
    ///
    /// Tests of one binary run in parallel and share one driver; while one
    /// has a session, the others wait here. So would a thread that has one
    /// already, and for ever.
    pub fn session(&'static self) -> Session {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        (self.functions.reset)();
        Session {
            sim: self,
            _turn: turn,
        }
    }

    /// A name as the object has it. A typing error in a test would make it
    /// pass for the wrong reason, so it is a panic.
    #[track_caller]
    fn exported(&self, call: &str) -> CString {
        let name = CString::new(call).unwrap_or_default();
        // SAFETY: the symbol is only looked for.
        let found = unsafe {
            self.library
                .get::<unsafe extern "C" fn()>(name.as_bytes_with_nul())
        };
        assert!(
            found.is_ok() && call.starts_with("cu"),
            "the simulated driver has no function {call}"
        );
        name
    }
}

/// Exclusive use of the driver. When it ends, everything outstanding is
/// carried out, and settings, faults and counters go back to their defaults.
pub struct Session {
    sim: &'static Sim,
    _turn: MutexGuard<'static, ()>,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").finish_non_exhaustive()
    }
}

impl Deref for Session {
    type Target = Sim;

    fn deref(&self) -> &Sim {
        self.sim
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        (self.sim.functions.reset)();
    }
}

impl Session {
    /// Sets when operations run.
    pub fn set_timing(&self, timing: Timing) {
        let (kind, delay) = match timing {
            Timing::Immediate => (wire::IMMEDIATE, Duration::ZERO),
            Timing::Delay(delay) => (wire::DELAY, delay),
            Timing::UntilWaited => (wire::UNTIL_WAITED, Duration::ZERO),
        };
        let nanoseconds = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
        (self.sim.functions.set_timing)(kind, nanoseconds);
    }

    /// Sets what kind of device all devices are. This sets when pageable
    /// sources are read, too.
    pub fn set_device(&self, kind: DeviceKind) {
        (self.sim.functions.set_device)(match kind {
            DeviceKind::Discrete => wire::DISCRETE,
            DeviceKind::Coherent => wire::COHERENT,
            DeviceKind::Integrated => wire::INTEGRATED,
            DeviceKind::Hmm => wire::HMM,
        });
    }

    /// Sets what `cuDeviceGetAttribute` says of an attribute. Of these the
    /// driver itself heeds 113, `READ_ONLY_HOST_REGISTER_SUPPORTED`.
    pub fn set_attribute(&self, attribute: i32, value: i32) {
        (self.sim.functions.set_attribute)(attribute, value);
    }

    /// Sets when pageable sources are read.
    pub fn set_pageable(&self, pageable: Pageable) {
        (self.sim.functions.set_pageable)(match pageable {
            Pageable::StagedAtCall => wire::STAGED_AT_CALL,
            Pageable::StagedAfterStreamWait => wire::STAGED_AFTER_STREAM_WAIT,
            Pageable::ReadLate => wire::READ_LATE,
        });
    }

    /// Sets whether an asynchronous device-to-host copy into pageable memory
    /// returns at once, and the device writes when it gets to it, as if the
    /// memory were page-locked. The copy blocks unless told so, on every kind
    /// of device; the documents say only that it may.
    ///
    /// The device writes whatever is mapped there by then: a test keeps the
    /// memory, or unmaps it.
    pub fn set_pageable_written_late(&self, late: bool) {
        (self.sim.functions.set_pageable_written_late)(late);
    }

    /// Sets whether `cuMemFreeHost` and `cuMemHostUnregister` wait for all
    /// work. They do not unless told so, since nothing says that they do.
    pub fn set_free_waits(&self, waits: bool) {
        (self.sim.functions.set_free_waits)(waits);
    }

    /// Sets whether late sources are compared with what they held at the
    /// call. They are; without, a call costs no copy of the source, which is
    /// what a benchmark wants, and nothing counts as torn.
    pub fn set_torn_detection(&self, on: bool) {
        (self.sim.functions.set_torn_detection)(on);
    }

    /// Sets whether [`calls`](Self::calls) are counted. They are; a benchmark of
    /// small calls wants them not to be, since no real driver does so.
    pub fn set_call_counts(&self, on: bool) {
        (self.sim.functions.set_call_counts)(on);
    }

    /// Keeps every stream from running anything, even what is waited for,
    /// until the hold is dropped. [`drain`](Self::drain) does not heed it.
    pub fn hold(&self) -> Hold {
        Hold {
            sim: self.sim,
            number: (self.sim.functions.hold)(),
        }
    }

    /// Keeps one stream from running anything, even what is waited for, until
    /// the hold is dropped. Other streams run, up to what depends on this one.
    /// `stream` is a handle as calls take it: null is the legacy stream of the
    /// calling thread's current context.
    ///
    /// # Panics
    ///
    /// If calls could not use the stream.
    #[track_caller]
    pub fn hold_stream<T>(&self, stream: *mut T) -> Hold {
        let number = (self.sim.functions.hold_stream)(stream as usize);
        assert!(number != 0, "no stream that can be used: {stream:?}");
        Hold {
            sim: self.sim,
            number,
        }
    }

    /// Breaks the calling thread's current context, as an exception on the
    /// device does: until the session ends, every call on the context that is
    /// not about contexts themselves does nothing and returns `code`. What is
    /// pending is dropped and counted; what is being carried out ends.
    ///
    /// # Panics
    ///
    /// If there is no current context, or `code` is not one of [`code`].
    #[track_caller]
    pub fn break_context(&self, code: i32) {
        assert_is_failure(code);
        let found = (self.sim.functions.break_context)(code);
        assert!(found, "the thread has no current context");
    }

    /// Makes the `nth` call of `call` from now (1 is the next) return `code`
    /// and do nothing.
    ///
    /// # Panics
    ///
    /// If there is no such function, `nth` is 0, or `code` is not one of
    /// [`code`].
    #[track_caller]
    pub fn fail_nth(&self, call: &str, nth: u64, code: i32) {
        assert!(nth > 0, "calls are counted from 1");
        self.order_fault(call, nth, code, wire::INSTEAD);
    }

    /// Makes the `nth` call of `call` from now do its work, if it can, and
    /// then return `code`, as the driver's calls do where the error is one of
    /// earlier, asynchronous work.
    ///
    /// # Panics
    ///
    /// As [`fail_nth`](Self::fail_nth).
    #[track_caller]
    pub fn fail_nth_after_acting(&self, call: &str, nth: u64, code: i32) {
        assert!(nth > 0, "calls are counted from 1");
        self.order_fault(call, nth, code, wire::AFTER_ACTING);
    }

    /// Makes the `nth` call of `call` from now return `code`, do nothing, and
    /// [break](Self::break_context) the context that is current then.
    ///
    /// # Panics
    ///
    /// As [`fail_nth`](Self::fail_nth).
    #[track_caller]
    pub fn break_at_nth(&self, call: &str, nth: u64, code: i32) {
        assert!(nth > 0, "calls are counted from 1");
        assert_is_failure(code);
        self.order_fault(call, nth, code, wire::BREAKING);
    }

    /// Makes every call of `call` return `code` and do nothing.
    ///
    /// # Panics
    ///
    /// As [`fail_nth`](Self::fail_nth).
    #[track_caller]
    pub fn fail_always(&self, call: &str, code: i32) {
        self.order_fault(call, 0, code, wire::INSTEAD);
    }

    #[track_caller]
    fn order_fault(&self, call: &str, nth: u64, code: i32, way: u32) {
        assert!(code::is_known(code), "{code} is not a known result code");
        let name = self.sim.exported(call);
        // SAFETY: a C string that outlives the call.
        unsafe { (self.sim.functions.fail)(name.as_ptr(), nth, code, way) }
    }

    /// Forgets all faults.
    pub fn clear_faults(&self) {
        (self.sim.functions.clear_faults)();
    }

    /// How often `call` was called since the session began, failures
    /// included, unless calls are not counted.
    ///
    /// # Panics
    ///
    /// If there is no such function.
    #[track_caller]
    pub fn calls(&self, call: &str) -> u64 {
        let name = self.sim.exported(call);
        // SAFETY: a C string that outlives the call.
        unsafe { (self.sim.functions.calls)(name.as_ptr()) }
    }

    /// Reads the counters.
    pub fn counters(&self) -> Counters {
        let mut counters = Counters::default();
        // SAFETY: valid for writing, and of the type that the object's
        // version has.
        unsafe { (self.sim.functions.counters)(&raw mut counters) }
        counters
    }

    /// Sets the counters to zero, except for the gauges, and gives back freed
    /// memory that was kept for late transfers and that none can reach.
    pub fn reset_counters(&self) {
        (self.sim.functions.reset_counters)();
    }

    /// Carries out everything outstanding, whatever the timing, and whatever
    /// is held. Returns when it is done.
    pub fn drain(&self) {
        (self.sim.functions.drain)();
    }
}

/// While it lives, no stream runs anything, or one stream does not.
#[must_use = "dropping it ends the hold"]
pub struct Hold {
    sim: &'static Sim,
    number: u64,
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold").finish_non_exhaustive()
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        (self.sim.functions.release)(self.number);
    }
}

#[track_caller]
fn assert_is_failure(code: i32) {
    assert!(
        code::is_known(code) && code != code::SUCCESS,
        "{code} is not a known error code"
    );
}
