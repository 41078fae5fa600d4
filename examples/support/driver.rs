//! The real driver if there is one, else the simulated one.

use std::mem;

use anyhow::Context as _;
use clap::CommandFactory;
use clap::error::ErrorKind;
use cuda_sim::{Counters, Session, Timing};
use libloading::Library;

use super::args::{Choice, refuse};

/// What `cudarc` will call.
pub(crate) enum Driver {
    /// The installed one.
    Real,
    /// The stand-in. Whatever belongs to a context has to be gone before the
    /// session.
    Simulated(Session),
}

impl Driver {
    /// Chooses, and loads the simulated driver if that is the choice. Must
    /// come before the first call of `cudarc`, which looks for the driver once
    /// and then stays with what it found.
    ///
    /// What a real device must not be given (`harmful`) goes to the simulated
    /// one, unless the real one was asked for by name.
    pub(crate) fn choose<A: CommandFactory>(choice: Choice, harmful: bool) -> anyhow::Result<Self> {
        let real = match choice {
            Choice::Real if !real_driver_has_a_device() => refuse::<A>(
                ErrorKind::InvalidValue,
                "there is no CUDA driver with a device here for '--driver real'; \
                 leave the option out to use the simulated one",
            ),
            Choice::Real => true,
            Choice::Simulated => false,
            Choice::Auto => !harmful && real_driver_has_a_device(),
        };
        if real {
            return Ok(Self::Real);
        }
        let session = cuda_sim::load()
            .context("loading the simulated driver")?
            .session();
        // The device reads page-locked memory only when something waits for
        // it. No device is later, so whatever can be torn is.
        session.set_timing(Timing::UntilWaited);
        Ok(Self::Simulated(session))
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Real => "real",
            Self::Simulated(_) => "simulated",
        }
    }

    pub(crate) fn is_simulated(&self) -> bool {
        matches!(self, Self::Simulated(_))
    }

    /// What the driver counted so far; a real one does not count.
    pub(crate) fn counters(&self) -> Option<Counters> {
        match self {
            Self::Real => None,
            Self::Simulated(session) => Some(session.counters()),
        }
    }

    /// Lets the simulated device carry out what nobody waited for.
    pub(crate) fn drain(&self) {
        if let Self::Simulated(session) = self {
            session.drain();
        }
    }
}

/// Asks the installed driver by itself, past `cudarc`: that would panic if
/// there is none, and would never look for another one again.
fn real_driver_has_a_device() -> bool {
    type Init = unsafe extern "C" fn(u32) -> i32;
    type DeviceGetCount = unsafe extern "C" fn(*mut i32) -> i32;
    // By its full name. The simulated driver is found under `libcuda.so`, so
    // a real one that has no device and stays loaded is not in its way.
    //
    // SAFETY: the driver's initialisers may run at any time; every program
    // that uses CUDA runs them.
    let Ok(library) = (unsafe { Library::new("libcuda.so.1") }) else {
        return false;
    };
    // SAFETY: the types are those of the driver's header.
    let calls = unsafe {
        (
            library.get::<Init>(b"cuInit\0"),
            library.get::<DeviceGetCount>(b"cuDeviceGetCount\0"),
        )
    };
    let has_device = if let (Ok(init), Ok(count)) = calls {
        let mut devices = 0;
        // SAFETY: the only flags there are, and a place for the count.
        unsafe { init(0) == 0 && count(&raw mut devices) == 0 && devices > 0 }
    } else {
        false
    };
    // A driver that was initialised may have threads: it must stay.
    mem::forget(library);
    has_device
}
