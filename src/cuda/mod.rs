//! Copies and page-locked memory over `cudarc`, sound for any borrowed slice.
//!
//! A [`Copier`] makes the copies of one stream. [`PinnedBuffer`] is page-locked
//! memory that is registered while it lives; [`PinnedPool`] keeps such buffers
//! for a server. [`HostRegistration`] page-locks memory that exists, such as a
//! mapped file, while copies from it are running. [`context`] opens a device,
//! with an error instead of a panic where no driver is installed.
//!
//! # Which copy do I want?
//!
//! | what you have | call | waits for the device? |
//! |---|---|---|
//! | any slice, and no wish to think about it | [`copy_h2d_async`](Copier::copy_h2d_async) | no; yes if over 256 KiB and page-locked, or on a device that may read pageable memory late¹ |
//! | a page-locked buffer of your own, to be used again | [`copy_h2d_from`](Copier::copy_h2d_from) | no; writing the buffer again does |
//! | a buffer to hand over, and to have back | [`upload`](Copier::upload), [`download`](Copier::download) | no |
//! | many buffers for many requests, to copy from with `copy_h2d_from` | [`PinnedPool`] | no |
//! | several large slices, or results to read, and other work meanwhile | [`scope`](Copier::scope) | once, at its end |
//! | host memory to fill now | [`copy_d2h_async`](Copier::copy_d2h_async) | yes |
//! | a copy inside a CUDA graph | [`capture_h2d_from`](Copier::capture_h2d_from) | no |
//! | `cudarc` calls that are to stay nearly as they are | [`CheckedCopies`] | as the first line to the device, yes to the host |
//!
//! ¹ Grace, integrated GPUs, and, since nothing is promised, many x86 Linux systems
//! with HMM: see the README's limits.
//! [`CopierOptions::trust_pageable_access`] excepts the last for a `Copier`.
//!
//! Some words: *late* is after the call returned. A copy is *staged* if its
//! bytes are copied aside, by the driver or into the copier's ring, before it
//! returns; *guarded* if the call waits for the device, and with it for the
//! stream's earlier work; *bounced* if it goes through the heap, since the
//! memory is about to be unpinned.
//!
//! ## Any slice
//!
//! ```no_run
//! # use pinned_hosts::cuda::{self, Copier, CopierOptions, Policy};
//! # let context = cuda::context(0)?;
//! # let mut on_device = context.default_stream().alloc_zeros::<u32>(4)?;
//! let copier = Copier::new(&context.new_stream()?)?;
//! copier.copy_h2d_async(&[1, 2, 3], &mut on_device)?;
//!
//! // In tests: a copy that would be slower than it looks is an error.
//! let strict = CopierOptions::default().policy(Policy::Deny);
//! let copier = Copier::with_options(&context.new_stream()?, strict)?;
//! copier.copy_h2d_async(&[1, 2, 3], &mut on_device)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! ## A buffer to be used again
//!
//! ```no_run
//! # use pinned_hosts::cuda::{self, Copier, PinnedBuffer};
//! # let context = cuda::context(0)?;
//! # let copier = Copier::new(&context.new_stream()?)?;
//! # let mut on_device = copier.stream().alloc_zeros::<u32>(1024)?;
//! let mut tokens = PinnedBuffer::<u32>::zeroed(&context, 1024)?;
//! for step in 0..3 {
//!     tokens.as_mut_slice()?.fill(step); // waits for the copy before
//!     copier.copy_h2d_from(&tokens, 0..1024, &mut on_device)?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! ## A buffer to hand over
//!
//! ```no_run
//! # use pinned_hosts::cuda::{self, Copier, PinnedBuffer};
//! # let context = cuda::context(0)?;
//! # let copier = Copier::new(&context.new_stream()?)?;
//! # let on_device = copier.stream().alloc_zeros::<u32>(1024)?;
//! let tokens = PinnedBuffer::from_slice(&context, &[7u32; 1024])?;
//! let transfer = copier.upload(tokens, on_device)?;
//! // Other work, and then:
//! let (tokens, on_device) = transfer.wait()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! ## Buffers for many requests
//!
//! ```no_run
//! # use pinned_hosts::cuda::{self, Copier, PinnedPool};
//! # let context = cuda::context(0)?;
//! # let copier = Copier::new(&context.new_stream()?)?;
//! # let mut on_device = copier.stream().alloc_zeros::<u32>(1024)?;
//! let pool = PinnedPool::<u32>::new(&context, 64 << 20);
//! let mut request = pool.take(100)?;
//! request.as_mut_slice()?.fill(7);
//! copier.copy_h2d_from(&request, 0..100, &mut on_device)?;
//! drop(request); // back to the pool, which gives it out again once it is read
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! ## Several slices, and results
//!
//! ```no_run
//! # use pinned_hosts::cuda::{self, Copier};
//! # let context = cuda::context(0)?;
//! # let copier = Copier::new(&context.new_stream()?)?;
//! # let mut on_device = copier.stream().alloc_zeros::<u32>(1024)?;
//! # let (weights, mut logits) = (vec![0u32; 1024], vec![0u32; 1024]);
//! copier.scope(|scope| {
//!     scope.copy_h2d(&weights, &mut on_device)?;
//!     scope.copy_d2h(&on_device, &mut logits)
//! })?;
//! // `logits` has arrived.
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! ## Host memory to fill now
//!
//! ```no_run
//! # use pinned_hosts::cuda::{self, Copier};
//! # let context = cuda::context(0)?;
//! # let copier = Copier::new(&context.new_stream()?)?;
//! # let on_device = copier.stream().alloc_zeros::<u32>(4)?;
//! let mut token = [0u32; 4];
//! copier.copy_d2h_async(&on_device, &mut token)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! ## A copy inside a CUDA graph
//!
//! ```no_run
//! # use std::sync::Arc;
//! # use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
//! # use pinned_hosts::cuda::{self, Copier, PinnedBuffer};
//! # let context = cuda::context(0)?;
//! # let copier = Copier::new(&context.new_stream()?)?;
//! # let stream = copier.stream();
//! // SAFETY: all work is on one stream. (Else the wait for the last use of the
//! // destination, which lies before the capture, would spoil it.)
//! unsafe { context.disable_event_tracking() };
//! let mut on_device = stream.alloc_zeros::<u32>(1024)?;
//! let table = Arc::new(PinnedBuffer::from_slice(&context, &[7u32; 1024])?);
//! stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
//! let captured = copier.capture_h2d_from(&table, 0..1024, &mut on_device);
//! let graph = stream.end_capture(CUgraphInstantiate_flags(0))?;
//! captured?; // the graph keeps the table
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! ## `cudarc` calls that are to stay nearly as they are
//!
//! ```no_run
//! # use pinned_hosts::cuda::{self, CheckedCopies, PinnedBuffer};
//! # let context = cuda::context(0)?;
//! # let stream = context.new_stream()?;
//! # let mut on_device = stream.alloc_zeros::<u32>(4)?;
//! # let slice = [1, 2, 3, 4];
//! // The error is a `CudaError`, in place of `cudarc`'s `DriverError`.
//! stream.memcpy_htod_checked(&slice, &mut on_device)?; // was: memcpy_htod
//! let result = stream.clone_dtoh_checked(&on_device)?; // was: clone_dtoh
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Device memory
//!
//! The end on the device is a [`DeviceSource`] or a [`DeviceDestination`]:
//! `cudarc`'s slices and views are, and [`RawDeviceMemory`] is for memory from
//! elsewhere. It has to belong to the context of the copier's stream; a copy to
//! memory of another one is refused ([`CudaError::OtherContext`]).
//!
//! A copy notes its use of device memory, so that uses on other streams, and
//! the free, come after it. For that, the first copier of a context makes
//! `cudarc` track uses there for good, as a created stream does while it lives:
//! from then on each use of device memory costs two waits of the stream and the
//! record of an event (three driver calls), also in programs with default
//! streams alone; and an event from before a capture spoils the capture
//! ([`disable_event_tracking`](cudarc::driver::CudaContext::disable_event_tracking)
//! is `cudarc`'s way out).
//!
//! # Memory of others
//!
//! Memory that other code page-locks has to be made known with
//! [`register`](crate::register) or
//! [`Registry::register`](crate::Registry::register); see there for the order.
//! For `cudarc`'s `alloc_pinned`, which is write-combined, that is
//! [`Registry::register_write_combined`](crate::Registry::register_write_combined).
//! The slice that a [`PinnedHostSlice`](cudarc::driver::PinnedHostSlice) returns
//! from `as_slice` looks like any other: without a registration, every copy of
//! such a slice counts it as pageable, and the device may read it late. A
//! `PinnedHostSlice` as such can be handed to [`CheckedCopies`], which
//! recognises it.
//!
//! # Choosing a CUDA version
//!
//! This crate chooses none of `cudarc`'s `cuda-*` features, because two of
//! them at once do not compile. Choose one in your own program,
//!
//! ```toml
//! cudarc = { version = "0.19", default-features = false, features = ["std", "driver", "dynamic-loading", "cuda-12080"] }
//! ```
//!
//! and cargo builds one `cudarc` for both. If nobody chooses, `cudarc` asks
//! the toolkit that is installed, and takes its latest version if there is
//! none. `libcuda` is always loaded at run time, so nothing of CUDA need be
//! installed to build; `cudarc`'s features `dynamic-linking` and
//! `static-linking` do not go with this crate.
//!
//! # Waiting
//!
//! `Copier::stream().synchronize()` is `cudarc`'s, and skips the wait if an
//! earlier operation left an error in the context. What this crate waits for,
//! it waits for through the driver itself.

/// The `cudarc` that this crate's types are made of.
pub use cudarc;

mod call_site;
mod checked;
mod chunks;
mod context;
mod copier;
mod device_end;
mod driver;
mod error;
mod graph;
mod host_memory;
mod host_registration;
mod late;
mod options;
mod pinned_buffer;
mod pinned_memory;
mod pool;
mod registration_error;
mod released;
mod scope;
mod staging;
mod stats;
mod transfer;
mod wait;

pub use checked::CheckedCopies;
pub use context::context;
pub use copier::Copier;
pub use device_end::{DeviceDestination, DeviceSource, RawDeviceMemory};
pub use error::CudaError;
pub use host_memory::HostMemory;
pub use host_registration::{HostRegistration, Progress, RegisterOptions};
pub use options::{CopierOptions, Policy};
pub use pinned_buffer::PinnedBuffer;
pub use pool::{PinnedPool, PoolStats, Pooled};
pub use registration_error::{RegisterError, RegisterFailure, UnregisterError, UnregisterFailure};
pub use released::reclaim;
pub use scope::Scope;
pub use stats::CopyStats;
pub use transfer::{Transfer, TransferError, TransferFuture};
