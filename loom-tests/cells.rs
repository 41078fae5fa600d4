//! The memory that the models register, and the flag they hand it over with.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use pinned_hosts::Region;

/// Some memory. Its address is the same in every execution, as loom needs it.
static MEMORY: [u8; 48] = [0; 48];

/// Three slices that touch: `A`, then `B`, then `C`.
pub(crate) fn a() -> &'static [u8] {
    &MEMORY[..16]
}

pub(crate) fn b() -> &'static [u8] {
    &MEMORY[16..32]
}

pub(crate) fn c() -> &'static [u8] {
    &MEMORY[32..]
}

/// `A`, `B` and `C` in one.
pub(crate) fn abc() -> &'static [u8] {
    &MEMORY
}

/// `B` and `C` in one.
pub(crate) fn bc() -> &'static [u8] {
    &MEMORY[16..]
}

pub(crate) fn region(bytes: &[u8]) -> Region {
    Region::of(bytes).unwrap()
}

/// Runs both at once, and returns what both return. Each gets a thread of its
/// own: a race with the thread that spawns the other is explored in part only
/// (a lookup there is never overtaken by the thread it spawned).
pub(crate) fn at_once<L: 'static, R: 'static>(
    left: impl FnOnce() -> L + 'static,
    right: impl FnOnce() -> R + 'static,
) -> (L, R) {
    let (left, right) = (thread::spawn(left), thread::spawn(right));
    (left.join().unwrap(), right.join().unwrap())
}

/// "It is done", from one thread to another.
#[derive(Clone)]
pub(crate) struct Flag(Arc<AtomicBool>);

impl Flag {
    pub(crate) fn new() -> Self {
        Self(Arc::new(AtomicBool::new(false)))
    }

    pub(crate) fn raise(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub(crate) fn is_raised(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}
