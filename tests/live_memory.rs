//! One file mapping, copied from by several threads while another page-locks
//! and unpins it, over and over. Over the simulated driver, which counts
//! transfers that read memory too late.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use common::Rig;
use cudarc::driver::sys::{self, CUresult};
use memmap2::Mmap;
use pinned_hosts::cuda::{Copier, HostRegistration, RegisterOptions};
use pinned_hosts::{Region, Residency, global, residency};

const LEN: usize = 4 << 20;
const CHUNK: usize = 1 << 20;
const LARGEST_COPY: usize = 64 << 10;
const READ_ONLY_SUPPORTED: i32 = 113;

fn mapped_file() -> Arc<Mmap> {
    let bytes: Vec<u8> = (0..LEN as u32 / 4).flat_map(u32::to_ne_bytes).collect();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&bytes).unwrap();
    // SAFETY: nobody else has the file.
    Arc::new(unsafe { Mmap::map(&file) }.unwrap())
}

/// Xorshift.
fn random(seed: &mut u64) -> usize {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    usize::try_from(*seed >> 16).unwrap()
}

/// Copies slices of `shared` through `copier`, and private copies of them that
/// are rewritten at once through another, and compares what arrives, until
/// told to stop.
fn copy_until(stop: &AtomicBool, copier: &Copier, shared: &[u8], mut seed: u64) {
    let stream = copier.stream();
    let private_copier = common::waiting_copier(stream);
    let mut on_device = stream.alloc_zeros::<u8>(LARGEST_COPY).unwrap();
    let mut private = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let len = 1 + random(&mut seed) % LARGEST_COPY;
        let start = random(&mut seed) % (shared.len() - len);
        let source = &shared[start..start + len];
        if random(&mut seed).is_multiple_of(4) {
            private.clear();
            private.extend_from_slice(source);
            private_copier
                .copy_h2d_async(&private, &mut on_device)
                .unwrap();
            private.fill(0xff);
        } else {
            copier.copy_h2d_async(source, &mut on_device).unwrap();
        }
        let arrived = stream.clone_dtoh(&on_device.slice(..len)).unwrap();
        assert!(arrived == source, "{len} bytes at {start}");
    }
}

/// Tells the copying threads to stop, after a panic too.
struct StopAtTheEnd<'a>(&'a AtomicBool);

impl Drop for StopAtTheEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Copies of the mapping that were pageable, pinned, split at a boundary, and
/// made through other memory because their source was about to be unpinned.
fn kinds(copiers: &[Copier]) -> [u64; 4] {
    let mut kinds = [0; 4];
    for stats in copiers.iter().map(Copier::stats) {
        kinds[0] += stats.pageable;
        kinds[1] += stats.guarded;
        kinds[2] += stats.split;
        kinds[3] += stats.bounced;
    }
    kinds
}

#[test]
fn copies_are_sound_while_their_source_is_pinned_and_unpinned() {
    const COPIERS: usize = 4;
    /// Some tens are enough to see copies of each kind.
    const ROUNDS: usize = 400;
    let rig = Rig::with(|sim| sim.set_attribute(READ_ONLY_SUPPORTED, 1));
    let shared = mapped_file();
    let stop = AtomicBool::new(false);
    let copiers =
        [(); COPIERS].map(|()| common::waiting_copier(&rig.context.new_stream().unwrap()));
    thread::scope(|scope| {
        for (seed, copier) in (1..).zip(&copiers) {
            let (stop, shared) = (&stop, &shared);
            scope.spawn(move || copy_until(stop, copier, shared, seed));
        }
        let _stop = StopAtTheEnd(&stop);
        for round in 0..ROUNDS {
            if round >= 10 && kinds(&copiers).iter().all(|&count| count >= 5) {
                break;
            }
            let options = RegisterOptions::default().chunk_bytes(CHUNK);
            let registration =
                HostRegistration::with_options(&rig.context, Arc::clone(&shared), options).unwrap();
            assert_eq!(registration.chunks().len(), LEN.div_ceil(CHUNK));
            registration.unregister().unwrap();
        }
    });
    rig.assert_sound();
    let kinds = kinds(&copiers);
    assert!(kinds.iter().all(|&count| count > 0), "{kinds:?}");
    assert!(rig.sim.counters().late_reads > 0);
}

/// A copy is caught between its lookup and its call, while another thread pins
/// its source and then unpins it.
#[test]
fn twin_without_a_grace_period_a_copy_reads_dead_memory() {
    let rig = Rig::new();
    let source: Arc<[u8]> = vec![7; 4096].into();
    let (looked_up, go_on) = (Barrier::new(2), Barrier::new(2));
    let mut on_device = rig.zeros::<u8>(4096);
    thread::scope(|scope| {
        let copying = scope.spawn(|| {
            // A checked copy, in no section.
            assert_eq!(residency(&source), Residency::Pageable);
            looked_up.wait();
            go_on.wait();
            rig.stream.memcpy_htod(&*source, &mut on_device).unwrap();
        });
        looked_up.wait();
        let id = global().register(Region::of(&source).unwrap());
        let base = source.as_ptr().cast_mut().cast();
        // SAFETY: the memory outlives its registration.
        let pinned = unsafe { sys::cuMemHostRegister_v2(base, source.len(), 1) };
        assert_eq!(pinned, CUresult::CUDA_SUCCESS);
        go_on.wait();
        copying.join().unwrap();
        // SAFETY: unsound on purpose, but the simulated driver only counts.
        let unpinned = unsafe { sys::cuMemHostUnregister(base) };
        assert_eq!(unpinned, CUresult::CUDA_SUCCESS);
        global().unregister(id).unwrap();
    });
    assert_eq!(rig.counters().dead_reads, 1);
}

#[test]
fn with_it_the_driver_is_called_once_the_copy_is_over() {
    let rig = Rig::new();
    let source: Arc<[u8]> = vec![7; 4096].into();
    let (looked_up, go_on) = (Barrier::new(2), Barrier::new(2));
    let mut on_device = rig.zeros::<u8>(4096);
    thread::scope(|scope| {
        let copying = scope.spawn(|| {
            let section = global().enter();
            assert_eq!(section.residency(&source), Residency::Pageable);
            looked_up.wait();
            go_on.wait();
            rig.stream.memcpy_htod(&*source, &mut on_device).unwrap();
        });
        looked_up.wait();
        let pinning = scope.spawn(|| {
            HostRegistration::new(&rig.context, Arc::clone(&source))
                .unwrap()
                .unregister()
                .unwrap()
        });
        // It publishes, and then it waits. Asserted at the end: before, a
        // failure would leave the copy waiting.
        let deadline = Instant::now() + Duration::from_secs(5);
        while residency(&source) == Residency::Pageable && Instant::now() < deadline {
            thread::yield_now();
        }
        let published = residency(&source);
        thread::sleep(Duration::from_millis(50));
        let driver_calls = rig.sim.calls("cuMemHostRegister_v2");
        go_on.wait();
        copying.join().unwrap();
        assert_eq!((published, driver_calls), (Residency::Pinned, 0));
        pinning.join().unwrap();
    });
    assert_eq!(rig.counters().staged_copies, 1);
    rig.assert_sound();
}
