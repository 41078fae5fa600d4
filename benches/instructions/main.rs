//! How many instructions one lookup takes, so that it cannot grow unnoticed.
//!
//! Nanoseconds differ from run to run and from machine to machine, so no check
//! can hold them to a limit that would notice a few instructions more. The
//! number of instructions is the same each time. Here a child process is
//! single-stepped through its lookups (`ptrace.rs`), and each kind of lookup
//! has a limit (`cases.rs`). Ends with an error if one is exceeded.
//!
//! What is counted is what a lookup takes beyond a call of a function that
//! returns at once: the same loop, over the same slices, is run with either,
//! and the difference is divided by the number of calls.
//!
//! Where `valgrind` is installed, callgrind counts the same (`callgrind.rs`)
//! and has to agree.
//!
//! With `--twin` the same limits are held against a slower lookup, and the run
//! passes only if it exceeds all of them.

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod callgrind;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod cases;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod check;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod child;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod ptrace;

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn main() -> std::process::ExitCode {
    check::main()
}

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
fn main() {
    println!("instructions are counted on Linux on x86-64 only: nothing checked");
}
