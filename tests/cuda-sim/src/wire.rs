//! What the remote control and the shared object agree on.
//!
//! A test binary holds two copies of this crate: the library that it links,
//! and the shared object that it loads. They talk through exported C
//! functions, whose plain parameters mean what these constants say.

/// Changes with every change of an exported `cuda_sim_*` function.
pub(crate) const VERSION: u32 = 4;

pub(crate) const IMMEDIATE: u32 = 0;
pub(crate) const DELAY: u32 = 1;
pub(crate) const UNTIL_WAITED: u32 = 2;

pub(crate) const DISCRETE: u32 = 0;
pub(crate) const COHERENT: u32 = 1;
pub(crate) const INTEGRATED: u32 = 2;
pub(crate) const HMM: u32 = 3;

pub(crate) const INSTEAD: u32 = 0;
pub(crate) const AFTER_ACTING: u32 = 1;
pub(crate) const BREAKING: u32 = 2;

pub(crate) const STAGED_AT_CALL: u32 = 0;
pub(crate) const STAGED_AFTER_STREAM_WAIT: u32 = 1;
pub(crate) const READ_LATE: u32 = 2;
