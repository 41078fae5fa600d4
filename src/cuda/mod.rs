//! Copies and page-locked memory over `cudarc`, sound for any borrowed slice.
//!
//! - [`Copier::copy_h2d_async`] copies from any slice; if the slice turns out
//!   to be page-locked, it waits for the device.
//! - [`PinnedBuffer`] is page-locked memory that is registered while it lives.
//!   [`Copier::copy_h2d_from`] copies from it without a wait.
//! - [`HostRegistration`] page-locks memory that exists, such as a mapped file,
//!   while copies from it are running.
//! - [`context`] opens a device, with an error instead of a panic where no
//!   driver is installed.
//!
//! Memory that other code page-locks has to be made known with
//! [`register`](crate::register) or
//! [`Registry::register`](crate::Registry::register); see there for the order.
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
mod copier;
mod device;
mod driver;
mod error;
mod host_memory;
mod host_registration;
mod late;
mod options;
mod pinned_buffer;
mod pinned_memory;
mod registration_error;
mod scope;
mod staging;
mod stats;
mod wait;

pub use checked::{Checked, checked};
pub use copier::Copier;
pub use driver::context;
pub use error::CudaError;
pub use host_memory::HostMemory;
pub use host_registration::{HostRegistration, Progress, RegisterOptions};
pub use options::{CopierOptions, Policy};
pub use pinned_buffer::PinnedBuffer;
pub use registration_error::{RegisterError, RegisterFailure, UnregisterError, UnregisterFailure};
pub use scope::Scope;
pub use stats::CopyStats;
