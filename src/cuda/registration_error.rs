//! Why memory was not page-locked where it is, or not given free, and what to
//! do about it.

use std::error::Error;
use std::fmt;

use cudarc::driver::sys::CUresult;

use super::host_memory::HostMemory;
use super::{CudaError, HostRegistration, chunks};
use crate::{GraceError, PinError, Region};

/// Memory was not page-locked.
#[non_exhaustive]
pub struct RegisterError<B: HostMemory> {
    /// The memory, to use as it is: copies from it are as right, only slower.
    ///
    /// The error is a registration of what is still page-locked of it, or may
    /// be, since it could not be unpinned again: copies of other threads could
    /// not be waited for within the limit, or the driver failed. Try
    /// [`unregister`](HostRegistration::unregister) later.
    pub memory: Result<B, Box<HostRegistration<B>>>,
    /// Why.
    pub reason: RegisterFailure,
}

/// Why memory was not page-locked.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegisterFailure {
    /// Chunks of no bytes were asked for.
    ZeroChunk,
    /// Elements of no bytes, or larger than the largest chunk.
    ElementSize {
        /// The size that was asked for, in bytes.
        bytes: usize,
    },
    /// Some of the memory is registered already. The driver was not asked.
    Overlaps {
        /// The memory.
        region: Region,
        /// The first registered region in it, or the part of it that lies in
        /// the memory.
        registered: Region,
    },
    /// The memory is mapped without the right to write it, and the device
    /// takes no such memory. The driver was not asked.
    ReadOnly,
    /// Other threads' copies could not be waited for. The driver was not
    /// asked.
    Grace(GraceError),
    /// The driver says that some of the chunk is page-locked already. This
    /// crate does not know by whom.
    AlreadyRegistered {
        /// The chunk.
        region: Region,
    },
    /// The driver cannot page-lock so much.
    TooMuch {
        /// The chunk.
        region: Region,
        /// How much of the memory had been page-locked before it, in bytes.
        pinned_bytes: usize,
    },
    /// The driver takes no memory of this kind.
    Invalid {
        /// The chunk.
        region: Region,
    },
    /// The driver or the device cannot page-lock existing memory so.
    NotSupported {
        /// The chunk.
        region: Region,
    },
    /// Any other failure of the driver.
    Driver(CudaError),
}

impl RegisterFailure {
    pub(super) fn of_pin(error: PinError<CudaError>, region: Region, pinned_bytes: usize) -> Self {
        let error = match error {
            PinError::Grace(error) => return Self::Grace(error),
            PinError::Driver(error) => error,
        };
        match code(&error) {
            Some(CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) => {
                Self::AlreadyRegistered { region }
            }
            Some(CUresult::CUDA_ERROR_OUT_OF_MEMORY) => Self::TooMuch {
                region,
                pinned_bytes,
            },
            Some(CUresult::CUDA_ERROR_INVALID_VALUE) => Self::Invalid { region },
            Some(CUresult::CUDA_ERROR_NOT_SUPPORTED) => Self::NotSupported { region },
            _ => Self::Driver(error),
        }
    }
}

/// What `cuMemHostRegister` or `cuMemHostUnregister` returned.
fn code(error: &CudaError) -> Option<CUresult> {
    match error {
        CudaError::Driver { call, source } if call.starts_with("cuMemHost") => Some(source.0),
        _ => None,
    }
}

/// Whether the driver says, by this error of `cuMemHostRegister`, that it took
/// nothing, or was not asked. Any other error may be that of earlier,
/// asynchronous work (so the driver's reference), and then says nothing about
/// the memory.
pub(super) fn is_refusal(error: &CudaError) -> bool {
    match code(error) {
        None => true,
        Some(code) => matches!(
            code,
            CUresult::CUDA_ERROR_INVALID_VALUE
                | CUresult::CUDA_ERROR_OUT_OF_MEMORY
                | CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
                | CUresult::CUDA_ERROR_NOT_PERMITTED
                | CUresult::CUDA_ERROR_NOT_SUPPORTED
        ),
    }
}

/// Whether `cuMemHostUnregister` says that the memory is not page-locked.
pub(super) fn is_not_registered(error: &CudaError) -> bool {
    code(error) == Some(CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
}

impl fmt::Display for RegisterFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ZeroChunk => f.write_str("a chunk must have at least one byte"),
            Self::ElementSize { bytes } => write!(
                f,
                "elements of {bytes} bytes: give a size from 1 to {}",
                chunks::LARGEST
            ),
            Self::Overlaps { region, registered } => write!(
                f,
                "{registered} is registered already, and lies in {region}: drop the buffer or \
                 registration that holds it first, or share that one"
            ),
            Self::ReadOnly => f.write_str(
                "the memory is mapped read-only, and this device (attribute 113, \
                 READ_ONLY_HOST_REGISTER_SUPPORTED) page-locks writable memory only: copy from \
                 it as it is, or map it shared and writable",
            ),
            Self::Grace(error) => error.fmt(f),
            Self::AlreadyRegistered { region } => write!(
                f,
                "the driver says that some of {region} is page-locked already, by code that did \
                 not make it known: make it known with pinned_hosts::register before it is \
                 pinned, and do not pin it twice"
            ),
            Self::TooMuch {
                region,
                pinned_bytes,
            } => write!(
                f,
                "the driver cannot page-lock {region} beyond the {pinned_bytes} bytes before it: \
                 the system limits page-locked memory (see `ulimit -l`; WSL2 pins about 1 GB at \
                 most). Copy from the memory as it is, or page-lock less of it"
            ),
            Self::Invalid { region } => write!(
                f,
                "the driver takes no memory such as {region}: if it is mapped read-only, \
                 HostMemory::is_read_only has to say so; memory of devices cannot be page-locked"
            ),
            Self::NotSupported { region } => write!(
                f,
                "the driver or the device cannot page-lock {region} where it is: copy from it \
                 as it is, or through a PinnedBuffer"
            ),
            Self::Driver(error) => error.fmt(f),
        }
    }
}

impl Error for RegisterFailure {}

impl<B: HostMemory> fmt::Debug for RegisterError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegisterError")
            .field("reason", &self.reason)
            .field("still_pinned", &self.memory.as_ref().err())
            .finish_non_exhaustive()
    }
}

impl<B: HostMemory> fmt::Display for RegisterError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.reason.fmt(f)?;
        if self.memory.is_err() {
            f.write_str(
                " (some of the memory is still page-locked, and could not be unpinned: \
                 unregister it later)",
            )?;
        }
        Ok(())
    }
}

impl<B: HostMemory> Error for RegisterError<B> {}

/// Memory was not given free; here is its registration again.
#[non_exhaustive]
pub struct UnregisterError<B: HostMemory> {
    /// To try again with. Some of its chunks may not be page-locked any more;
    /// [`chunks`](HostRegistration::chunks) has the others.
    pub registration: HostRegistration<B>,
    /// Why.
    pub reason: UnregisterFailure,
}

/// Why memory was not given free.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum UnregisterFailure {
    /// This process was forked from the one that page-locked the memory.
    ForkedChild,
    /// Other threads' copies could not be waited for. The driver was not
    /// asked.
    Grace(GraceError),
    /// The driver says that the chunk is not page-locked: somebody has
    /// unpinned it behind this crate's back, while copies may have been
    /// reading it.
    NotRegistered {
        /// The chunk.
        region: Region,
    },
    /// Any other failure of the driver.
    Driver(CudaError),
}

impl UnregisterFailure {
    pub(super) fn of_unpin(error: PinError<(CudaError, Region)>) -> Self {
        match error {
            PinError::Grace(error) => Self::Grace(error),
            PinError::Driver((error, region)) if is_not_registered(&error) => {
                Self::NotRegistered { region }
            }
            PinError::Driver((error, _)) => Self::Driver(error),
        }
    }
}

impl fmt::Display for UnregisterFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ForkedChild => f.write_str(
                "this process was forked from the one that page-locked the memory: only that \
                 one can unpin it",
            ),
            Self::Grace(error) => error.fmt(f),
            Self::NotRegistered { region } => write!(
                f,
                "the driver says that {region} is not page-locked: look for a \
                 cuMemHostUnregister elsewhere in the program"
            ),
            Self::Driver(error) => error.fmt(f),
        }
    }
}

impl Error for UnregisterFailure {}

impl<B: HostMemory> fmt::Debug for UnregisterError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnregisterError")
            .field("registration", &self.registration)
            .field("reason", &self.reason)
            .finish()
    }
}

impl<B: HostMemory> fmt::Display for UnregisterError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the memory stays page-locked: {}", self.reason)
    }
}

impl<B: HostMemory> Error for UnregisterError<B> {}
