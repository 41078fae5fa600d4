#![doc = include_str!("../README.md")]

pub mod code;
mod control;
mod counters;
mod driver;
mod find;
mod wire;

pub use control::{DeviceKind, Hold, Pageable, Session, Sim, Timing, load};
pub use counters::Counters;
pub use find::LoadError;
