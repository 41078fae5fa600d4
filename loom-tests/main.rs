//! Runs the models and the faults; see `README.md` beside this file, and
//! `run`, which builds this with the flag that it needs.
//!
//! Each model, and each fault, gets a process of its own: a model that fails
//! leaves loom in a state that nothing should run on.
#![allow(clippy::unwrap_used, reason = "models are tests")]

#[cfg(loom)]
mod cells;
#[cfg(loom)]
mod debt;
#[cfg(loom)]
mod faults;
#[cfg(loom)]
mod hand_over;
#[cfg(loom)]
mod ids;
#[cfg(loom)]
mod model;
#[cfg(loom)]
mod retired;
#[cfg(loom)]
mod runner;
#[cfg(loom)]
mod sections;
#[cfg(loom)]
mod snapshots;
#[cfg(loom)]
mod threads;
#[cfg(loom)]
mod writers;

#[cfg(loom)]
fn main() -> std::process::ExitCode {
    runner::main()
}

#[cfg(not(loom))]
fn main() {
    eprintln!("the models need a build with `--cfg loom`: use loom-tests/run");
    std::process::exit(2);
}
