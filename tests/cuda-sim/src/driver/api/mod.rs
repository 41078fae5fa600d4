//! The exported functions, by chapter of the driver interface.
//!
//! Handles and host addresses are plain integers here: nothing dereferences
//! them.
#![allow(
    non_snake_case,
    reason = "the names of the C interface are what they are"
)]

mod batch;
mod context;
mod copy;
mod device;
mod device_memory;
mod event;
mod graph;
mod host_memory;
mod pointer;
mod stream;
mod user_object;
