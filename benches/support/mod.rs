//! What the benches share.

mod config;
pub(crate) mod publish;
pub(crate) mod results;
pub(crate) mod turns;
pub(crate) mod workload;

pub(crate) use config::{criterion, is_quick};
