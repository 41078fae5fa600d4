//! What the examples share: which driver they run on, and how they talk to
//! people and programs.
#![allow(dead_code, reason = "each example uses its own part of it")]

pub(crate) mod args;
pub(crate) mod bar;
pub(crate) mod driver;
pub(crate) mod numbers;
pub(crate) mod output;
pub(crate) mod table;
pub(crate) mod warnings;
