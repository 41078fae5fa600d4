//! What can go wrong in a copy or an allocation, and what to do about it.

use std::error::Error;
use std::fmt;

use cudarc::driver::DriverError;

use crate::Residency;

use super::driver;

/// Why a copy, an allocation or a wait failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no CUDA driver: the dynamic linker finds no `libcuda`.
    NoDriver,
    /// The driver is too old or not complete: it lacks a function.
    MissingFunction {
        /// The function's name.
        name: &'static str,
    },
    /// A driver call failed. What that means for the source of a copy stands
    /// with each function that returns it; no source is in use afterwards
    /// without its owner knowing.
    Driver {
        /// The driver function that was called.
        call: &'static str,
        /// What it returned.
        source: DriverError,
    },
    /// An earlier operation on this context failed where it could not say so
    /// (in a `drop`), and `cudarc` kept the error for the next call, which was
    /// this one. Nothing was enqueued, and the stored error is now cleared.
    Stored {
        /// The stored error.
        source: DriverError,
    },
    /// The destination has fewer elements than the source. Nothing was
    /// enqueued.
    DestinationTooShort {
        /// Elements in the source.
        source: usize,
        /// Elements in the destination.
        destination: usize,
    },
    /// The stream is capturing a graph. A captured copy reads the host
    /// address again at each launch of the graph, when a borrowed source may
    /// be long gone. Nothing was enqueued.
    StreamIsCapturing,
    /// The stream is capturing no graph, so there is nothing to capture a copy
    /// into. Nothing was enqueued.
    StreamIsNotCapturing,
    /// The stream's capture has been spoilt, and no graph will come of it: a
    /// call that is forbidden during captures was made, by this thread or
    /// another. No copy was captured. End the capture, and begin again.
    CaptureInvalidated,
    /// The stream's capture ended, or was spoilt, while a copy was being
    /// captured. Nobody can say what has become of the copy, so the buffer
    /// that it reads is kept for good.
    CaptureChanged,
    /// The source is memory that another thread is about to unpin, and so is
    /// all memory that the allocator gives out to copy it through. Nothing was
    /// enqueued; try again.
    NowhereToBounce,
    /// The device memory of a copy belongs to another context than the copier's
    /// stream. Nothing was enqueued.
    OtherContext {
        /// The device of the copier's stream.
        copier: usize,
        /// The device of the memory.
        memory: usize,
    },
    /// The copier's policy is [`Policy::Deny`](super::Policy::Deny), and the
    /// device may use the borrowed host memory after the call. Nothing was
    /// enqueued.
    Denied {
        /// What the host memory is.
        residency: Residency,
        /// How many bytes it has.
        bytes: usize,
    },
    /// A range of elements reaches past the end of the buffer it was taken
    /// from, or ends before it starts. Nothing was enqueued.
    RangeOutOfBounds {
        /// The first element of the range.
        start: usize,
        /// One past the last element of the range.
        end: usize,
        /// Elements in the buffer.
        len: usize,
    },
    /// A buffer of this many elements is larger than any allocation can be.
    TooLarge {
        /// Elements asked for.
        elements: usize,
        /// Bytes of one element.
        element_bytes: usize,
    },
    /// The transfer is not done yet.
    NotDone,
    /// A pool has no buffer to give out, and may pin no more memory.
    PoolExhausted {
        /// The bytes that the buffer would take.
        wanted: usize,
        /// Bytes of the pool's buffers that were taken, or that a transfer
        /// still uses, or that are lost.
        in_use: usize,
        /// The most bytes that the pool may pin.
        limit: usize,
    },
    /// The driver's page-locked memory is not aligned well enough for the
    /// element type.
    Misaligned {
        /// The alignment that the elements need, in bytes.
        wanted: usize,
    },
}

impl CudaError {
    pub(crate) fn driver(call: &'static str) -> impl FnOnce(DriverError) -> Self {
        move |source| Self::Driver { call, source }
    }
}

/// `CUDA_ERROR_OUT_OF_MEMORY (2): out of memory`, as far as the driver knows
/// the code.
struct Explained(DriverError);

impl fmt::Display for Explained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let code = self.0.0 as u32;
        // `cudarc` would panic where there is no driver to ask for the name.
        if driver::require().is_err() {
            return write!(f, "error {code}");
        }
        match self.0.error_name() {
            Ok(name) => write!(f, "{} ({code})", name.to_string_lossy())?,
            Err(_) => write!(f, "error {code}")?,
        }
        match self.0.error_string() {
            Ok(text) => write!(f, ": {}", text.to_string_lossy()),
            Err(_) => Ok(()),
        }
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDriver => f.write_str(
                "no CUDA driver found: install the NVIDIA driver, or put the folder of its \
                 libcuda.so into LD_LIBRARY_PATH",
            ),
            Self::MissingFunction { name } => write!(
                f,
                "the CUDA driver lacks the function {name}: update the driver"
            ),
            Self::Driver { call, source } => {
                write!(f, "{call} failed with {}", Explained(*source))
            }
            Self::Stored { source } => write!(
                f,
                "an earlier operation on this context had failed with {}; \
                 nothing was copied by this call. The error is cleared now: look for its cause, \
                 and make the call again",
                Explained(*source)
            ),
            Self::DestinationTooShort {
                source,
                destination,
            } => write!(
                f,
                "the destination has {destination} elements, but the source has {source}: \
                 allocate a larger one, or copy a part"
            ),
            Self::StreamIsCapturing => f.write_str(
                "the stream is capturing a graph, which would use the host memory again at \
                 every launch: copy before the capture begins, or on another stream; to the \
                 device, an owned buffer can be captured with capture_h2d_from",
            ),
            Self::StreamIsNotCapturing => f.write_str(
                "the stream is capturing no graph: begin a capture first, or copy with \
                 copy_h2d_from",
            ),
            Self::CaptureInvalidated => f.write_str(
                "the capture was spoilt by a call that is forbidden during captures: end it, \
                 and begin again",
            ),
            Self::CaptureChanged => f.write_str(
                "the capture ended or was spoilt while a copy was being captured; the buffer is \
                 kept for good: let one thread capture at a time",
            ),
            Self::NowhereToBounce => f.write_str(
                "the source is about to be unpinned, and so is the heap that the copy would go \
                 through: try again",
            ),
            Self::OtherContext { copier, memory } => write!(
                f,
                "the device memory belongs to another context (device {memory}) than the \
                 copier's stream (device {copier}): make the copier on a stream of the memory's \
                 context, such as memory.stream()"
            ),
            Self::Denied { residency, bytes } => write!(
                f,
                "Policy::Deny refused a copy of {bytes} borrowed bytes that the device may use \
                 after the call ({}): use a PinnedBuffer with copy_h2d_from, upload or download, \
                 or a scope, or another policy",
                match residency {
                    Residency::Pageable => "pageable, on a device that may read such memory late",
                    Residency::Pinned | Residency::Seam => "page-locked",
                    Residency::Mixed => "page-locked in part",
                }
            ),
            Self::RangeOutOfBounds { start, end, len } => write!(
                f,
                "elements {start}..{end} are not in a buffer of {len} elements"
            ),
            Self::TooLarge {
                elements,
                element_bytes,
            } => write!(
                f,
                "{elements} elements of {element_bytes} bytes are more than an allocation can \
                 hold; check the length for a negative number cast to unsigned"
            ),
            Self::NotDone => f.write_str("the transfer is not done yet: ask later, or wait for it"),
            Self::PoolExhausted { wanted, limit, .. } if wanted > limit => write!(
                f,
                "a buffer of {wanted} bytes does not fit in a pool of {limit} bytes: make the \
                 pool with a higher limit, or take less"
            ),
            Self::PoolExhausted {
                wanted,
                in_use,
                limit,
            } => write!(
                f,
                "no buffer of {wanted} bytes is free, and {in_use} of the pool's {limit} bytes \
                 are in use: drop buffers that were taken, or wait with wait_and_take, or make \
                 the pool with a higher limit"
            ),
            Self::Misaligned { wanted } => write!(
                f,
                "the driver's page-locked memory is not aligned to the {wanted} bytes that the \
                 elements need"
            ),
        }
    }
}

// No `source`: the text above already says all that the driver's error does.
impl Error for CudaError {}
