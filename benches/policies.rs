//! What staging gains over waiting: eight streams that copy small page-locked
//! sources, over a simulated device that takes its time.
//!
//! Each policy runs for the same time in the same process; what counts is the
//! ratio. Ends with an error if staging is not at least five times as fast.

use std::process::ExitCode;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use cuda_sim::Timing;
use cudarc::driver::CudaContext;
use pinned_hosts::cuda::{self, Copier, CopierOptions, CopyStats, PinnedBuffer, Policy};

const STREAMS: usize = 8;
const BYTES: usize = 4096;
/// How long the device takes for each operation.
const DELAY: Duration = Duration::from_micros(200);
/// Copies between two waits for the stream, as for a step's result.
const STEP: usize = 32;
const WANTED: f64 = 5.0;

fn main() -> ExitCode {
    let session = cuda_sim::load()
        .expect("cargo builds the simulated driver beside the bench")
        .session();
    session.set_timing(Timing::Delay(DELAY));
    session.set_torn_detection(false);
    let context = cuda::context(0).expect("the simulated driver has a device");
    // `cargo bench` passes `--bench`, `cargo test --benches` does not.
    let quick = !std::env::args().any(|argument| argument == "--bench");
    let time = Duration::from_millis(if quick { 100 } else { 2_000 });

    println!("{STREAMS} streams, {BYTES} bytes page-locked, device takes {DELAY:?}");
    let rates = [("stage", Policy::Stage), ("wait", Policy::Wait)].map(|(name, policy)| {
        let stats = run(&context, policy, time);
        let copies: u64 = stats.iter().map(|it| it.staged + it.guarded).sum();
        let ring_waits: u64 = stats.iter().map(|it| it.ring_waits).sum();
        let rate = copies as f64 / time.as_secs_f64();
        println!("{name:>6}: {rate:>10.0} copies/s, waited {ring_waits} times for the ring");
        rate
    });
    session.drain();
    let ratio = rates[0] / rates[1];
    println!("stage / wait: {ratio:.1} (wanted: {WANTED})");
    if ratio < WANTED {
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

fn run(context: &std::sync::Arc<CudaContext>, policy: Policy, time: Duration) -> Vec<CopyStats> {
    let barrier = Barrier::new(STREAMS);
    thread::scope(|scope| {
        let threads = [(); STREAMS].map(|()| {
            scope.spawn(|| {
                let stream = context.new_stream().expect("a stream");
                let options = CopierOptions::default().policy(policy);
                let copier = Copier::with_options(&stream, options).expect("a copier");
                let source = PinnedBuffer::from_slice(context, &[1u8; BYTES]).expect("memory");
                let mut on_device = stream.alloc_zeros::<u8>(BYTES).expect("device memory");
                barrier.wait();
                let started = Instant::now();
                while started.elapsed() < time {
                    for _ in 0..STEP {
                        copier
                            .copy_h2d_async(&source, &mut on_device)
                            .expect("a copy");
                    }
                    stream.synchronize().expect("a wait");
                }
                copier.stats()
            })
        });
        threads
            .into_iter()
            .map(|thread| thread.join().expect("no thread panics"))
            .collect()
    })
}
