//! What it costs to add one region and to take it away again while other
//! threads are parked, each of which has looked up once.
//!
//! It is a bench of its own, because what a thread leaves behind in a process
//! can outlive the thread: `arc-swap` keeps a node for each.

#[allow(dead_code, unused_imports, reason = "each bench uses a part")]
mod rivals;
#[allow(dead_code, unused_imports, reason = "each bench uses a part")]
mod support;

use criterion::{Criterion, criterion_group, criterion_main};

use support::publish::add_and_take_away;

const PARKED: usize = 64;

fn one(c: &mut Criterion) {
    add_and_take_away(c, "publish/parked", &[3, 64], PARKED);
}

criterion_group! {
    name = benches;
    config = support::criterion();
    targets = one
}
criterion_main!(benches);
