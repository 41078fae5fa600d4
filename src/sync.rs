//! The one seam between this crate and its concurrency primitives.
//!
//! Everything in `src/` that another thread may touch is built from what this
//! file hands out, so that a model checker needs to replace this file alone.

pub(crate) use std::cell::RefCell;
pub(crate) use std::sync::atomic::{AtomicU64, Ordering};
pub(crate) use std::sync::{Arc, LazyLock};
pub(crate) use std::thread_local;

pub(crate) use arc_swap::{ArcSwap, Cache};
