//! What the check adds to a copy call, over the simulated driver.
//!
//! The simulated driver does in software what the real one does, so absolute
//! times mean nothing here. The difference between a checked and an unchecked
//! call is this crate's own work, and the same on any driver.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use cuda_sim::Timing;
use pinned_hosts::cuda::{self, Copier, CopierOptions, PinnedBuffer, Policy};

fn copies(c: &mut Criterion) {
    let session = cuda_sim::load()
        .expect("cargo builds the simulated driver beside the bench")
        .session();
    session.set_timing(Timing::Immediate);
    // Comparing sources would cost a copy of each page-locked one.
    session.set_torn_detection(false);
    let context = cuda::context(0).expect("the simulated driver has a device");
    let stream = context.new_stream().expect("a stream");
    let copier = Copier::new(&stream).expect("a copier");
    let waiting = CopierOptions::default().policy(Policy::Wait);
    let waiting = Copier::with_options(&stream, waiting).expect("a copier");

    for bytes in [64, 4096, 64 * 1024] {
        let mut on_device = stream.alloc_zeros::<u8>(bytes).expect("device memory");

        let pageable = vec![1u8; bytes];
        let mut group = c.benchmark_group("copy_path/pageable");
        group.bench_function(BenchmarkId::new("unchecked", bytes), |b| {
            b.iter(|| stream.memcpy_htod(black_box(&pageable), &mut on_device));
        });
        group.bench_function(BenchmarkId::new("checked", bytes), |b| {
            b.iter(|| copier.copy_h2d_async(black_box(&pageable), &mut on_device));
        });
        group.finish();

        let pinned = PinnedBuffer::from_slice(&context, &pageable).expect("pinned memory");
        let mut group = c.benchmark_group("copy_path/pinned");
        group.bench_function(BenchmarkId::new("unchecked", bytes), |b| {
            b.iter(|| stream.memcpy_htod(black_box(pinned.as_slice()), &mut on_device));
        });
        session.drain();
        group.bench_function(BenchmarkId::new("unchecked, then waited for", bytes), |b| {
            b.iter(|| {
                stream.memcpy_htod(black_box(pinned.as_slice()), &mut on_device)?;
                stream.synchronize()
            });
        });
        group.bench_function(BenchmarkId::new("borrowed, waited for", bytes), |b| {
            b.iter(|| waiting.copy_h2d_async(black_box(pinned.as_slice()), &mut on_device));
        });
        group.bench_function(BenchmarkId::new("borrowed, staged", bytes), |b| {
            b.iter(|| copier.copy_h2d_async(black_box(pinned.as_slice()), &mut on_device));
        });
        // What staging adds to a call, at least.
        let mut elsewhere = vec![0u8; bytes];
        group.bench_function(BenchmarkId::new("copied by the CPU alone", bytes), |b| {
            b.iter(|| black_box(&mut elsewhere).copy_from_slice(black_box(&pinned)));
        });
        group.bench_function(BenchmarkId::new("owned", bytes), |b| {
            b.iter(|| copier.copy_h2d_from(black_box(&pinned), 0..bytes, &mut on_device));
        });
        session.drain();
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(std::time::Duration::from_millis(200))
        .measurement_time(std::time::Duration::from_millis(800));
    targets = copies
}
criterion_main!(benches);
