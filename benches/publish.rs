//! What it costs to register one region and take it away again, by how many
//! regions there are already.
//!
//! A publish rebuilds the snapshot, so its cost grows with the number of
//! regions; the rivals change a vector or a tree in place, behind a lock that
//! every reader pays for. Registering happens when memory is allocated,
//! looking up on every copy.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::{Mutex, PoisonError, RwLock};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use pinned_hosts::{Region, Registry};

const REGION_BYTES: usize = 64;

/// `n` regions with a gap before each, and one more in the middle that comes
/// and goes.
fn regions(n: usize) -> (Vec<Region>, Region) {
    let region = |k: usize| {
        let base = std::ptr::without_provenance((2 * k + 1) * REGION_BYTES);
        Region::new(base, REGION_BYTES).expect("neither null nor wrapping")
    };
    let middle = n / 2;
    let standing = (0..=n).filter(|&k| k != middle).map(region).collect();
    (standing, region(middle))
}

fn bounds(region: Region) -> (usize, usize) {
    (region.base().addr(), region.end().addr())
}

fn register_and_unregister(c: &mut Criterion) {
    let mut group = c.benchmark_group("publish/register+unregister");
    for n in [3, 64, 1_000, 64_000] {
        let (standing, changing) = regions(n);

        let registry = Registry::new();
        registry.register_all(standing.iter().copied());
        group.bench_function(BenchmarkId::new("Registry", n), |b| {
            b.iter(|| {
                let id = registry.register(black_box(changing));
                registry.unregister(id)
            });
        });

        let sorted: Vec<_> = standing.iter().copied().map(bounds).collect();
        let changing = bounds(changing);
        let rw_lock = RwLock::new(sorted.clone());
        group.bench_function(BenchmarkId::new("RwLock<Vec>", n), |b| {
            b.iter(|| {
                let changing = black_box(changing);
                let mut bounds = rw_lock.write().unwrap_or_else(PoisonError::into_inner);
                let at = bounds.partition_point(|&b| b < changing);
                bounds.insert(at, changing);
                drop(bounds);
                let mut bounds = rw_lock.write().unwrap_or_else(PoisonError::into_inner);
                bounds.binary_search(&changing).map(|at| bounds.remove(at))
            });
        });

        let tree = Mutex::new(sorted.iter().copied().collect::<BTreeMap<_, _>>());
        group.bench_function(BenchmarkId::new("Mutex<BTreeMap>", n), |b| {
            b.iter(|| {
                let (start, end) = black_box(changing);
                let mut bounds = tree.lock().unwrap_or_else(PoisonError::into_inner);
                bounds.insert(start, end);
                drop(bounds);
                let mut bounds = tree.lock().unwrap_or_else(PoisonError::into_inner);
                bounds.remove(&start)
            });
        });
    }
    group.finish();
}

fn register_all(c: &mut Criterion) {
    let mut group = c.benchmark_group("publish/register_all");
    for n in [1_000, 64_000] {
        let (standing, _) = regions(n);
        group.throughput(Throughput::Elements(n as u64));
        group.bench_function(BenchmarkId::new("Registry", n), |b| {
            b.iter(|| {
                let registry = Registry::new();
                registry.register_all(black_box(&standing).iter().copied())
            });
        });
        group.bench_function(BenchmarkId::new("Vec sort", n), |b| {
            b.iter(|| {
                let mut sorted: Vec<_> = black_box(&standing).iter().copied().map(bounds).collect();
                sorted.sort_unstable();
                sorted
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(std::time::Duration::from_millis(200))
        .measurement_time(std::time::Duration::from_millis(800));
    targets = register_and_unregister, register_all
}
criterion_main!(benches);
