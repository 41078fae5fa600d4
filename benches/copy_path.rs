//! What the check adds to a copy call, over the simulated driver.
//!
//! The simulated driver does in software what the real one does, so absolute
//! times mean nothing here. The difference between a checked and an unchecked
//! call is this crate's own work, the same on any driver, and what it asks the
//! driver, which is not: the simulated one answers without a lock whether a
//! stream is capturing, and what a real one takes for that is not known here.
//! The first table tells the two apart. Other programs that run beside it make
//! all of it up to twice as slow.

#[path = "support/config.rs"]
mod support;

use std::env;
use std::error::Error;
use std::fs;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use comfy_table::Table;
use criterion::{BenchmarkId, Criterion, criterion_group};
use cuda_sim::{Session, Timing};
use cudarc::driver::{CudaSlice, CudaStream, result};
use pinned_hosts::cuda::{self, Copier, CopierOptions, PinnedBuffer, Policy};
use serde::Serialize;

const SIZES: [usize; 3] = [64, 4096, 64 * 1024];

fn session() -> Session {
    let session = cuda_sim::load()
        .expect("cargo builds the simulated driver beside the bench")
        .session();
    // Comparing sources would cost a copy of each page-locked one.
    session.set_torn_detection(false);
    // Nor does a real driver count its calls.
    session.set_call_counts(false);
    session
}

/// A copy call from pageable memory, in three ways.
struct Calls {
    stream: Arc<CudaStream>,
    copier: Copier,
    source: Vec<u8>,
    on_device: CudaSlice<u8>,
}

/// The name of each way, and the function that makes so many calls: never
/// inlined, so that callgrind finds it by its name.
type Way = (&'static str, fn(&mut Calls, usize));

const WAYS: [Way; 3] = [
    ("plain_calls", plain_calls),
    ("checked_calls", checked_calls),
    ("queried_calls", queried_calls),
];

#[inline(never)]
fn plain_calls(on: &mut Calls, calls: usize) {
    for _ in 0..calls {
        on.stream
            .memcpy_htod(black_box(&on.source), &mut on.on_device)
            .expect("a copy");
    }
}

#[inline(never)]
fn checked_calls(on: &mut Calls, calls: usize) {
    for _ in 0..calls {
        on.copier
            .copy_h2d_async(black_box(&on.source), &mut on.on_device)
            .expect("a copy");
    }
}

/// What a checked call asks the driver on top of an unchecked one: twice
/// whether the stream is capturing.
#[inline(never)]
fn queried_calls(on: &mut Calls, calls: usize) {
    for _ in 0..calls {
        for _ in 0..2 {
            // SAFETY: the stream keeps its handle valid.
            let status = unsafe { result::stream::is_capturing(on.stream.cu_stream()) };
            black_box(status).expect("a status");
        }
        on.stream
            .memcpy_htod(black_box(&on.source), &mut on.on_device)
            .expect("a copy");
    }
}

impl Calls {
    fn new(bytes: usize) -> Self {
        let context = cuda::context(0).expect("the simulated driver has a device");
        let stream = context.new_stream().expect("a stream");
        let on_device = stream.alloc_zeros::<u8>(bytes).expect("device memory");
        Self {
            copier: Copier::new(&stream).expect("a copier"),
            stream,
            source: vec![1; bytes],
            on_device,
        }
    }
}

/// Medians over the rounds. Differences are those of one round, each from the
/// unchecked call.
#[derive(Serialize)]
struct Overhead {
    bytes: usize,
    unchecked_ns: f64,
    checked_ns: f64,
    /// What a checked call adds,
    difference_ns: f64,
    /// what two questions to the driver add by themselves,
    queries_ns: f64,
    /// and what is left of the difference without those: this crate's work.
    own_ns: f64,
    /// Of one call, where callgrind is installed.
    unchecked_instructions: Option<u64>,
    checked_instructions: Option<u64>,
    queried_instructions: Option<u64>,
}

/// Measures the three ways by turns, so that whatever slows the machine down
/// meanwhile slows all three.
///
/// The device carries nothing out while calls are timed: its threads would
/// contend with the calls for the simulated driver's one lock, and more time
/// would be lost and won so than is measured.
fn overhead(bytes: usize, rounds: usize) -> Overhead {
    const CALLS: usize = 64;

    let session = session();
    session.set_timing(Timing::UntilWaited);
    let mut calls = Calls::new(bytes);
    let mut times = [const { Vec::new() }; WAYS.len()];
    for round in 0..rounds {
        for turn in 0..WAYS.len() {
            // Each way is first, second and last equally often.
            let way = (round + turn) % WAYS.len();
            let started = Instant::now();
            WAYS[way].1(&mut calls, CALLS);
            let time = started.elapsed();
            session.drain();
            times[way].push(time.as_nanos() as f64 / CALLS as f64);
        }
    }
    // The first rounds make buffers and threads.
    let times = times.map(|times| times[rounds / 10..].to_vec());
    let [unchecked, checked, queried] = &times;
    let [with_check, with_queries, own] = [
        (checked, unchecked),
        (queried, unchecked),
        (checked, queried),
    ]
    .map(|(more, less)| median(more.iter().zip(less).map(|(more, less)| more - less)));
    drop(calls);
    drop(session);
    let [
        unchecked_instructions,
        checked_instructions,
        queried_instructions,
    ] = WAYS.map(|(name, _)| instructions(name, bytes));
    Overhead {
        bytes,
        unchecked_ns: median(unchecked.iter().copied()),
        checked_ns: median(checked.iter().copied()),
        difference_ns: with_check,
        queries_ns: with_queries,
        own_ns: own,
        unchecked_instructions,
        checked_instructions,
        queried_instructions,
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let tenths = values[values.len() / 2] * 10.0;
    tenths.round() / 10.0
}

/// How many calls callgrind counts the instructions of.
const COUNTED: usize = 256;
/// What this program is told when it runs under callgrind: a way and a size.
const COUNTED_WAY: &str = "PINNED_HOSTS_COUNTED_WAY";
const COUNTED_BYTES: &str = "PINNED_HOSTS_COUNTED_BYTES";

/// The instructions of one call, as callgrind counts them; nothing where there
/// is no callgrind.
fn instructions(way: &str, bytes: usize) -> Option<u64> {
    let profile = tempfile::NamedTempFile::new().ok()?;
    let run = Command::new("valgrind")
        .args(["--tool=callgrind", "--collect-atstart=no"])
        .arg(format!("--toggle-collect=*{way}*"))
        .arg(format!("--callgrind-out-file={}", profile.path().display()))
        .arg(env::current_exe().ok()?)
        .env(COUNTED_WAY, way)
        .env(COUNTED_BYTES, bytes.to_string())
        .output()
        .ok()?;
    let said = String::from_utf8_lossy(&run.stderr);
    let count = said
        .lines()
        .find_map(|line| line.split_once("Collected :"))?;
    let count: u64 = count.1.trim().parse().ok()?;
    Some(count / COUNTED as u64)
}

/// Makes the calls that are counted, and nothing else in the function that
/// callgrind looks for.
fn run_counted(way: &str) {
    let bytes = env::var(COUNTED_BYTES).ok().and_then(|it| it.parse().ok());
    let (_, run) = WAYS.into_iter().find(|it| it.0 == way).expect("a way");
    let session = session();
    session.set_timing(Timing::UntilWaited);
    let mut calls = Calls::new(bytes.expect("a size"));
    // Makes buffers and threads, and looks up what is called; another way's
    // calls, since callgrind would count these.
    for (name, other) in WAYS {
        if name != way {
            other(&mut calls, COUNTED);
        }
    }
    session.drain();
    run(&mut calls, COUNTED);
}

fn report(rows: &[Overhead]) -> Result<PathBuf, Box<dyn Error>> {
    let mut table = Table::new();
    table.set_header([
        "bytes",
        "unchecked",
        "checked",
        "ratio",
        "difference",
        "two queries",
        "own",
        "instructions: unchecked",
        "checked",
        "two queries",
    ]);
    for row in rows {
        let ns = |time: f64| format!("{time:.1} ns");
        let count = |count: Option<u64>| count.map_or("?".into(), |count| count.to_string());
        table.add_row([
            row.bytes.to_string(),
            ns(row.unchecked_ns),
            ns(row.checked_ns),
            format!("{:.3}", row.checked_ns / row.unchecked_ns),
            ns(row.difference_ns),
            ns(row.queries_ns),
            ns(row.own_ns),
            count(row.unchecked_instructions),
            count(row.checked_instructions),
            count(row.queried_instructions),
        ]);
    }
    println!("a copy call from pageable memory, over the simulated driver\n{table}");
    // The program is in `release/deps` of the target directory.
    let program = env::current_exe()?;
    let target = program.ancestors().nth(3).unwrap_or(Path::new("target"));
    let file = target.join("criterion/copy_path_overhead.json");
    fs::create_dir_all(target.join("criterion"))?;
    fs::write(&file, serde_json::to_string_pretty(rows)? + "\n")?;
    Ok(file)
}

fn copies(c: &mut Criterion) {
    let session = session();
    session.set_timing(Timing::Immediate);
    let context = cuda::context(0).expect("the simulated driver has a device");
    let stream = context.new_stream().expect("a stream");
    let copier = Copier::new(&stream).expect("a copier");
    let waiting = CopierOptions::default().policy(Policy::Wait);
    let waiting = Copier::with_options(&stream, waiting).expect("a copier");

    for bytes in SIZES {
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
    config = support::criterion();
    targets = copies
}

fn main() -> Result<(), Box<dyn Error>> {
    if let Ok(way) = env::var(COUNTED_WAY) {
        run_counted(&way);
        return Ok(());
    }
    let rounds = if support::is_quick() { 300 } else { 3000 };
    let rows = SIZES.map(|bytes| overhead(bytes, rounds));
    let file = report(&rows)?;
    println!("written to {}\n", file.display());

    benches();
    Criterion::default().configure_from_args().final_summary();
    Ok(())
}
