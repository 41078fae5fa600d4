//! What a copy pays to run in a read-side section, and what it costs to wait
//! for a grace period while other threads sit idle, or copy.

#[path = "support/config.rs"]
mod support;

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use pinned_hosts::{Region, Registry, global, residency};

/// The section beside the lookup that is made in it, and beside an
/// uncontended lock, the simplest other way to keep pinning and copying apart.
fn enter(c: &mut Criterion) {
    let source = vec![0u8; 64];
    let lock = std::sync::RwLock::new(());
    let mut group = c.benchmark_group("section/enter");
    group.bench_function("lookup", |b| b.iter(|| residency(black_box(&source))));
    group.bench_function("section", |b| b.iter(|| drop(global().enter())));
    group.bench_function("section + lookup", |b| {
        b.iter(|| {
            let _section = global().enter();
            residency(black_box(&source))
        });
    });
    group.bench_function("nested section", |b| {
        let _outer = global().enter();
        b.iter(|| drop(global().enter()));
    });
    group.bench_function("section entered before the last one ends", |b| {
        let mut last = global().enter();
        b.iter(|| last = global().enter());
        drop(last);
    });
    group.bench_function("RwLock::read", |b| {
        b.iter(|| drop(black_box(lock.read())));
    });
    group.finish();
}

/// Runs `measure` while `threads` threads, each having been in a section, do
/// `what` until it is over.
fn beside(
    registry: &Registry,
    threads: usize,
    what: impl Fn(&Registry) + Sync,
    measure: impl FnOnce(),
) {
    let over = AtomicBool::new(false);
    let ready = Barrier::new(threads + 1);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                drop(registry.enter());
                ready.wait();
                while !over.load(Ordering::Relaxed) {
                    what(registry);
                }
            });
        }
        ready.wait();
        measure();
        over.store(true, Ordering::Relaxed);
        for thread in PARKED.lock().expect("no thread panics").drain(..) {
            thread.unpark();
        }
    });
}

/// The threads that sit idle, to be woken in the end.
static PARKED: std::sync::Mutex<Vec<thread::Thread>> = std::sync::Mutex::new(Vec::new());

fn park(_: &Registry) {
    PARKED
        .lock()
        .expect("no thread panics")
        .push(thread::current());
    thread::park();
}

/// A copy: a lookup in a section, and some work before it ends.
fn copy(registry: &Registry) {
    let source = [1u8; 4096];
    let _section = registry.enter();
    let _ = black_box(registry.residency(&source));
    black_box(source.to_vec());
}

fn grace_period(c: &mut Criterion) {
    let mut group = c.benchmark_group("section/grace_period");
    for idle in [0, 4, 64] {
        let registry = Registry::new();
        group.bench_function(BenchmarkId::new("idle threads", idle), |b| {
            beside(&registry, idle, park, || {
                b.iter(|| registry.wait_for_sections(None));
            });
        });
    }
    for copying in [1, 4] {
        let registry = Registry::new();
        group.bench_function(BenchmarkId::new("copying threads", copying), |b| {
            beside(&registry, copying, copy, || {
                b.iter(|| registry.wait_for_sections(None));
            });
        });
    }
    let registry = Registry::new();
    let memory = vec![0u8; 64];
    let region = Region::of(&memory).expect("not empty");
    let driver = || Ok::<(), ()>(());
    group.bench_function("pin_with + unpin_with, no other thread", |b| {
        b.iter(|| {
            registry
                .pin_with(region, driver)
                .map(|it| it.unpin_with(driver).is_ok())
        });
    });
    group.finish();
}

criterion_group! {
    name = benches;
    config = support::criterion();
    targets = enter, grace_period
}
criterion_main!(benches);
