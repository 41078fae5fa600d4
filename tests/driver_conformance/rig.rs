//! The driver to oneself, whichever it is.

use std::cell::Cell;
use std::error::Error as _;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, Once, OnceLock, PoisonError};

use cuda_sim::Session;
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use cudarc::driver::{CudaContext, result};
use libloading::Library;

use crate::answers;
use crate::calls::{has, out, set_current};

/// A driver, and a context that is current.
///
/// The context goes first: what is left in it ends with it.
pub(crate) struct Rig {
    pub(crate) context: Arc<CudaContext>,
    /// The simulated driver was told to behave as it does not by itself.
    altered: bool,
    driver: Driver,
}

enum Driver {
    Real { _turn: MutexGuard<'static, ()> },
    Simulated(Session),
}

impl Rig {
    pub(crate) fn new() -> Self {
        Self::over(if wants_real() {
            real_driver()
        } else {
            simulated_driver()
        })
    }

    /// Over the simulated driver, told to be another one; none if the tests run
    /// over the real one, which takes no orders.
    pub(crate) fn altered(alter: impl FnOnce(&Session)) -> Option<Self> {
        if wants_real() {
            return None;
        }
        let mut rig = Self::over(simulated_driver());
        rig.altered = true;
        if let Driver::Simulated(session) = &rig.driver {
            alter(session);
        }
        Some(rig)
    }

    fn over(driver: Driver) -> Self {
        let context = pinned_hosts::cuda::context(0).expect("the device can be opened");
        let rig = Self {
            context,
            altered: false,
            driver,
        };
        rig.make_current();
        static SAID: Once = Once::new();
        SAID.call_once(|| rig.say_what_it_is());
        rig
    }

    /// Makes the context the current one of a thread that is not the rig's.
    pub(crate) fn make_current(&self) {
        assert_eq!(set_current(self.context.cu_ctx()), 0);
    }

    pub(crate) fn is_real(&self) -> bool {
        matches!(self.driver, Driver::Real { .. })
    }

    pub(crate) fn is_altered(&self) -> bool {
        self.altered
    }

    pub(crate) fn attribute(&self, attribute: Attribute) -> i32 {
        // SAFETY: the device of a live context.
        unsafe { result::device::get_attribute(self.context.cu_device(), attribute) }
            .expect("the device has the attribute")
    }

    /// As the copier decides it: whether the device may read pageable memory
    /// by itself, so that nobody promises that a source is staged.
    pub(crate) fn may_read_pageable_late(&self) -> bool {
        [
            Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
            Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED,
            Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS,
        ]
        .into_iter()
        .any(|attribute| self.attribute(attribute) != 0)
    }

    fn say_what_it_is(&self) {
        // SAFETY: a place for the version.
        let version: i32 = out(|it| unsafe { sys::cuDriverGetVersion(it) }).unwrap_or(0);
        let name = self.context.name().unwrap_or_default();
        let kind = if self.is_real() { "real" } else { "simulated" };
        answers::note(
            " driver",
            format!("{kind}, interface {version}, device {name:?}"),
        );
        use Attribute as It;
        let attributes = [
            It::CU_DEVICE_ATTRIBUTE_INTEGRATED,
            It::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS,
            It::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
            It::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED,
        ]
        .map(|attribute| format!("{} is {}", attribute as i32, self.attribute(attribute)));
        answers::note(" device attributes", attributes.join(", "));
    }
}

/// Runs `check` on a simulated driver that lies, and asserts that it fails,
/// with a panic that says `phrase`: not, say, because nothing works at all.
pub(crate) fn assert_noticed(lie: impl FnOnce(&Session), check: fn(&Rig), phrase: &str) {
    let Some(rig) = Rig::altered(lie) else {
        println!("a real driver cannot be made to lie");
        return;
    };
    let noticed = in_silence(|| catch_unwind(AssertUnwindSafe(|| check(&rig))));
    let panic = noticed.expect_err("the check did not notice the lie");
    let text = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or_default();
    assert!(
        text.contains(phrase),
        "the check failed, but for another reason than {phrase:?}: {text}"
    );
}

/// Keeps what is meant to fail from looking like a failure.
fn in_silence<T>(body: impl FnOnce() -> T) -> T {
    thread_local! {
        static SILENT: Cell<bool> = const { Cell::new(false) };
    }
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !SILENT.get() {
                before(info);
            }
        }));
    });
    SILENT.set(true);
    let returned = body();
    SILENT.set(false);
    returned
}

fn wants_real() -> bool {
    let wanted = std::env::var("PINNED_HOSTS_DRIVER").unwrap_or_default();
    match wanted.as_str() {
        "real" => true,
        "simulated" | "" => false,
        other => panic!("PINNED_HOSTS_DRIVER is {other:?}; it can be 'real' or 'simulated'"),
    }
}

fn simulated_driver() -> Driver {
    Driver::Simulated(cuda_sim::load().unwrap().session())
}

/// Captures of one test would reach into the others, so they take turns.
fn real_driver() -> Driver {
    static TURN: Mutex<()> = Mutex::new(());
    static FOUND: OnceLock<Result<(), String>> = OnceLock::new();
    let found = FOUND.get_or_init(find_real_device);
    if let Err(reason) = found {
        panic!("PINNED_HOSTS_DRIVER is 'real', but {reason}");
    }
    assert!(
        !has(c"cuda_sim_version"),
        "a simulated driver is in the real one's place"
    );
    Driver::Real {
        _turn: TURN.lock().unwrap_or_else(PoisonError::into_inner),
    }
}

/// Asks the installed driver past `cudarc`, which panics without saying why.
fn find_real_device() -> Result<(), String> {
    type Init = unsafe extern "C" fn(u32) -> i32;
    type DeviceGetCount = unsafe extern "C" fn(*mut i32) -> i32;
    // SAFETY: the driver's initialisers may run at any time; every program
    // that uses CUDA runs them.
    let library = unsafe { Library::new("libcuda.so.1") }
        .map_err(|error| format!("there is no driver: {error}: {:?}", error.source()))?;
    // SAFETY: the types are those of the driver's header.
    let calls = unsafe {
        library
            .get::<Init>(b"cuInit\0")
            .and_then(|init| Ok((init, library.get::<DeviceGetCount>(b"cuDeviceGetCount\0")?)))
    };
    let (init, count) = calls.map_err(|error| format!("this is no driver: {error}"))?;
    let mut devices = 0;
    // SAFETY: the only flags there are, and a place for the count.
    let results = unsafe { (init(0), count(&raw mut devices)) };
    let found = match (results, devices) {
        ((0, 0), 1..) => Ok(()),
        ((0, 0), _) => Err("there is no device".to_owned()),
        (codes, _) => Err(format!("cuInit and cuDeviceGetCount returned {codes:?}")),
    };
    // A driver that was initialised may have threads: it must stay.
    std::mem::forget(library);
    found
}
