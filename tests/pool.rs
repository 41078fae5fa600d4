//! `PinnedPool` over the simulated driver: no buffer is given out while a
//! transfer uses it, none is waited for while another will do, and the limit
//! holds.
#![allow(clippy::unwrap_used)]

mod common;

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::thread;
use std::time::Duration;

use common::{Rig, in_child};
use cuda_sim::code;
use cudarc::driver::{CudaSlice, CudaStream, DeviceRepr, ValidAsZeroBits, result};
use pinned_hosts::cuda::{Copier, CudaError, PinnedPool, Pooled};
use pinned_hosts::live_count;

/// A page: what the smallest buffers have.
const PAGE: usize = 4096;

/// As good as for ever: what it is given to has to come to an end by itself.
/// Only in a test that fails does this pass.
const LONG: Duration = Duration::from_secs(30);

fn pool(rig: &Rig, limit: usize) -> PinnedPool<u8> {
    PinnedPool::new(&rig.context, limit)
}

/// Fills a buffer with `value`, copies it to the device, and lets it go.
fn fill_and_copy(copier: &Copier, mut buffer: Pooled<u8>, value: u8, to: &mut CudaSlice<u8>) {
    buffer.as_mut_slice().unwrap().fill(value);
    copier.copy_h2d_from(&buffer, 0..buffer.len(), to).unwrap();
}

/// Keeps the stream from doing anything until it is dropped.
struct Stuck<'a> {
    stream: &'a CudaStream,
    open: Option<mpsc::Sender<()>>,
}

impl<'a> Stuck<'a> {
    fn new(stream: &'a CudaStream) -> Self {
        unsafe extern "C" fn wait(gate: *mut c_void) {
            // SAFETY: it is what `new` has boxed, and this runs once.
            let gate = unsafe { Box::from_raw(gate.cast::<mpsc::Receiver<()>>()) };
            let _ = gate.recv();
        }
        let (open, gate) = mpsc::channel::<()>();
        let gate = Box::into_raw(Box::new(gate));
        // SAFETY: the function frees what it is given, and is called once.
        unsafe { result::stream::launch_host_function(stream.cu_stream(), wait, gate.cast()) }
            .unwrap();
        Self {
            stream,
            open: Some(open),
        }
    }
}

impl Drop for Stuck<'_> {
    fn drop(&mut self) {
        drop(self.open.take());
        self.stream.synchronize().unwrap();
    }
}

#[track_caller]
fn assert_exhausted(result: Result<Pooled<u8>, CudaError>, wanted: usize, in_use: usize) {
    match result.unwrap_err() {
        CudaError::PoolExhausted {
            wanted: the_wanted,
            in_use: the_in_use,
            ..
        } => assert_eq!((the_wanted, the_in_use), (wanted, in_use)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_buffer_has_just_the_length_asked_for_and_zeros_at_first() {
    let rig = Rig::new();
    let pool = pool(&rig, 1 << 20);
    let mut buffer = pool.take(5000).unwrap();
    assert_eq!(buffer.len(), 5000);
    assert_eq!(**buffer, [0; 5000]);
    assert_eq!(buffer.as_mut_slice().unwrap().len(), 5000);
    assert_eq!(pool.stats().bytes, 8192, "a power of two");
    let mut on_device = rig.zeros::<u8>(8192);
    let copied = rig.copier.copy_h2d_from(&buffer, 0..5001, &mut on_device);
    assert_eq!(
        copied,
        Err(CudaError::RangeOutOfBounds {
            start: 0,
            end: 5001,
            len: 5000
        })
    );
}

#[test]
fn a_buffer_that_came_back_is_given_out_again_at_any_length_of_its_size() {
    let rig = Rig::new();
    let pool = pool(&rig, 1 << 20);
    let buffer = pool.take(5000).unwrap();
    let base = buffer.as_ptr();
    drop(buffer);
    for len in [8192, 4097, 6000] {
        let mut buffer = pool.take(len).unwrap();
        assert_eq!((buffer.as_ptr(), buffer.len()), (base, len));
        buffer.as_mut_slice().unwrap().fill(1);
    }
    assert_eq!(rig.sim.calls("cuMemHostAlloc"), 1);
    let other = pool.take(4096).unwrap();
    assert_ne!(other.as_ptr(), base);
}

#[test]
fn small_buffers_share_a_size() {
    let rig = Rig::new();
    let pool = PinnedPool::<[u8; 3]>::new(&rig.context, 1 << 20);
    for len in [1, 7, 1365] {
        drop(pool.take(len).unwrap());
    }
    let stats = pool.stats();
    assert_eq!((stats.made, stats.reused), (1, 2));
    assert_eq!(stats.bytes, 2048 * 3);
}

/// Larger than a page, so that less than one would do.
#[derive(Clone, Copy)]
#[repr(C)]
struct Large([u8; 5000]);
// SAFETY: plain bytes.
unsafe impl DeviceRepr for Large {}
// SAFETY: zeros are bytes.
unsafe impl ValidAsZeroBits for Large {}

#[test]
fn elements_larger_than_the_smallest_size_are_counted_in_full() {
    let rig = Rig::new();
    let pool = PinnedPool::<Large>::new(&rig.context, 15_000);
    let one = pool.take(1).unwrap();
    assert_eq!((one.len(), pool.stats().bytes), (1, 5000));
    drop(one);
    // Four would be a power of two, but not within the limit.
    let three = pool.take(3).unwrap();
    assert_eq!((three.len(), pool.stats().bytes), (3, 15_000));
    assert!(three.iter().all(|large| large.0 == [0; 5000]));
}

#[test]
fn all_of_the_limit_can_be_taken_at_once() {
    let rig = Rig::new();
    for limit in [100, 5000, PAGE, 10_000] {
        let pool = pool(&rig, limit);
        let whole = pool.take(limit).unwrap();
        assert_eq!((whole.len(), pool.stats().bytes), (limit, limit));
        assert_exhausted(pool.take(1), limit.min(PAGE), limit);
    }
}

#[test]
fn a_buffer_that_the_device_reads_is_passed_by() {
    let rig = Rig::new();
    let pool = pool(&rig, 1 << 20);
    let mut on_device = rig.zeros::<u8>(PAGE);
    let first = pool.take(PAGE).unwrap();
    let base = first.as_ptr();
    // Nothing runs, so what waited would never return.
    let hold = rig.sim.hold();
    fill_and_copy(&rig.copier, first, 1, &mut on_device);
    let second = pool.take(PAGE).unwrap();
    assert_ne!(second.as_ptr(), base);
    assert_eq!((pool.stats().in_flight, pool.stats().idle), (1, 0));
    drop(hold);
    rig.sim.drain();
    assert_eq!((pool.stats().in_flight, pool.stats().idle), (0, 1));
    let third = pool.take(PAGE).unwrap();
    assert_eq!(third.as_ptr(), base);
    rig.assert_sound();
}

#[test]
fn what_is_copied_is_never_overwritten() {
    let rig = Rig::new();
    let pool = pool(&rig, 4 * PAGE);
    let mut targets: Vec<_> = (0..50).map(|_| rig.zeros::<u8>(PAGE)).collect();
    for (value, on_device) in (0..).zip(&mut targets) {
        let buffer = pool.wait_and_take(PAGE, LONG).unwrap();
        fill_and_copy(&rig.copier, buffer, value, on_device);
    }
    for (value, on_device) in (0..).zip(&targets) {
        assert_eq!(rig.read_back(on_device), [value; PAGE]);
    }
    rig.assert_sound();
    let stats = pool.stats();
    assert_eq!(stats.taken, 50);
    assert!(stats.made <= 4, "{stats:?}");
}

#[test]
fn a_slow_stream_holds_up_nobody_while_another_buffer_is_free() {
    let rig = Rig::new();
    let pool = pool(&rig, 2 * PAGE);
    let slow = Copier::new(&rig.context.new_stream().unwrap()).unwrap();
    let (mut here, mut there) = (rig.zeros::<u8>(PAGE), rig.zeros::<u8>(PAGE));
    let (first, second) = (pool.take(PAGE).unwrap(), pool.take(PAGE).unwrap());
    let base = second.as_ptr();
    let stuck = Stuck::new(slow.stream());
    fill_and_copy(&slow, first, 1, &mut there);
    fill_and_copy(&rig.copier, second, 2, &mut here);
    for _ in 0..3 {
        let buffer = pool.wait_and_take(PAGE, LONG).unwrap();
        assert_eq!(buffer.as_ptr(), base);
        fill_and_copy(&rig.copier, buffer, 3, &mut here);
    }
    drop(stuck);
    rig.assert_sound();
}

#[test]
fn one_that_waits_gets_whichever_buffer_is_done_first() {
    let rig = Rig::new();
    let pool = pool(&rig, 2 * PAGE);
    let streams = [(); 2].map(|()| rig.context.new_stream().unwrap());
    let copiers = streams
        .each_ref()
        .map(|stream| Copier::new(stream).unwrap());
    let mut targets = [(); 2].map(|()| rig.zeros::<u8>(PAGE));
    let buffers = [(); 2].map(|()| pool.take(PAGE).unwrap());
    let base = buffers[1].as_ptr();
    let stuck = streams.each_ref().map(|stream| Stuck::new(stream));
    for ((buffer, copier), to) in buffers.into_iter().zip(&copiers).zip(&mut targets) {
        fill_and_copy(copier, buffer, 1, to);
    }
    assert_exhausted(pool.take(PAGE), PAGE, 2 * PAGE);
    let [first, second] = stuck;
    thread::scope(|scope| {
        let waiting = scope.spawn(|| pool.wait_and_take(PAGE, LONG).unwrap().as_ptr() as usize);
        drop(second);
        assert_eq!(waiting.join().unwrap(), base as usize);
    });
    drop(first);
    rig.assert_sound();
}

#[test]
fn one_that_waits_gets_what_another_thread_puts_back() {
    let rig = Rig::new();
    let pool = pool(&rig, PAGE);
    let taken = pool.take(PAGE).unwrap();
    let base = taken.as_ptr() as usize;
    thread::scope(|scope| {
        let waiting = scope.spawn(|| pool.wait_and_take(1, LONG).unwrap().as_ptr() as usize);
        drop(taken);
        assert_eq!(waiting.join().unwrap(), base);
    });
}

#[test]
fn one_that_waits_is_told_when_its_time_is_up() {
    let rig = Rig::new();
    let pool = pool(&rig, PAGE);
    let _taken = pool.take(PAGE).unwrap();
    for patience in [Duration::ZERO, Duration::from_millis(1)] {
        assert_exhausted(pool.wait_and_take(PAGE, patience), PAGE, PAGE);
    }
    // That never fits, so it is not waited for.
    assert_exhausted(pool.wait_and_take(PAGE + 1, LONG), PAGE + 1, PAGE);
}

/// A time so long that no clock has it is for ever.
#[test]
fn one_may_wait_for_ever() {
    let rig = Rig::new();
    let pool = pool(&rig, PAGE);
    let taken = pool.take(PAGE).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| pool.wait_and_take(1, Duration::MAX).map(drop));
        drop(taken);
        waiting.join().unwrap().unwrap();
    });
}

#[test]
fn the_error_of_an_exhausted_pool_says_what_to_do() {
    let rig = Rig::new();
    let pool = pool(&rig, 2 * PAGE);
    let _taken = pool.take(2 * PAGE).unwrap();
    let text = pool.take(1).unwrap_err().to_string();
    for part in ["4096", "8192 bytes are in use", "wait_and_take", "limit"] {
        assert!(text.contains(part), "{text}");
    }
    let text = pool.take(3 * PAGE).unwrap_err().to_string();
    assert!(text.contains("does not fit"), "{text}");
}

#[test]
fn lengths_that_cannot_be_are_an_error() {
    let rig = Rig::new();
    let pool = PinnedPool::<u64>::new(&rig.context, 1 << 20);
    assert_eq!(
        pool.take(usize::MAX).unwrap_err(),
        CudaError::TooLarge {
            elements: usize::MAX,
            element_bytes: 8
        }
    );
    let boundless = PinnedPool::<u64>::new(&rig.context, usize::MAX);
    assert!(matches!(
        boundless.take(usize::MAX / 8),
        Err(CudaError::TooLarge { .. })
    ));
    assert_eq!(boundless.stats().bytes, 0);
}

/// Every length and limit at an edge, beside buffers that are out and beside
/// idle ones: a buffer, or an error of the right kind.
#[test]
fn no_length_and_no_limit_is_too_much_for_the_arithmetic() {
    fn edges() -> Vec<usize> {
        let powers = [12, 14, 62, 63].map(|bit| 1_usize << bit);
        let parts = powers.into_iter().flat_map(|it| [it, it / 3, it / 5000]);
        let near = parts.flat_map(|it| [it.saturating_sub(1), it, it + 1]);
        let largest = [1, 2, 3, 8].map(|it| usize::MAX / it);
        near.chain(largest).collect()
    }

    fn take<T: DeviceRepr + ValidAsZeroBits + Copy>(pool: &PinnedPool<T>, len: usize) {
        let (size, limit) = (size_of::<T>(), pool.limit());
        let case = format!("{len} of {size} bytes, limit {limit}");
        let before = pool.stats();
        let taken = pool.take(len);
        let bytes = len.checked_mul(size);
        let bytes = bytes.filter(|&bytes| isize::try_from(bytes).is_ok());
        let right = match (bytes, &taken) {
            (None, Err(error)) => {
                let (elements, element_bytes) = (len, size);
                *error
                    == CudaError::TooLarge {
                        elements,
                        element_bytes,
                    }
            }
            (Some(bytes), Ok(buffer)) => buffer.len() == len && bytes <= limit,
            (Some(bytes), Err(CudaError::PoolExhausted { in_use, .. })) => {
                bytes > limit || *in_use > 0
            }
            // More than the driver pins.
            (Some(bytes), Err(CudaError::Driver { .. })) => (1 << 30..=limit).contains(&bytes),
            _ => false,
        };
        assert!(right, "{case}: {taken:?}");
        let after = pool.stats();
        assert!(after.bytes <= limit, "{case}: {after:?}");
        assert!(
            taken.is_ok() || after.bytes <= before.bytes,
            "{case}: {after:?}"
        );
    }

    fn try_all<T: DeviceRepr + ValidAsZeroBits + Copy>(rig: &Rig) {
        let size = size_of::<T>();
        // The simulated driver does pin what is between.
        let small_or_huge = |&len: &usize| len <= (1 << 15) / size || len > (1 << 35) / size;
        for limit in edges() {
            let pool = PinnedPool::<T>::new(&rig.context, limit);
            for len in edges().into_iter().filter(small_or_huge) {
                let out = (pool.take(1), pool.take(PAGE / size + 1));
                take(&pool, len);
                drop(out);
                take(&pool, len);
                let stats = pool.stats();
                assert_eq!(pool.free_idle(), stats.bytes, "{len}, {limit}: {stats:?}");
            }
        }
    }

    let rig = Rig::new();
    try_all::<u8>(&rig);
    try_all::<u64>(&rig);
    try_all::<[u8; 3]>(&rig);
    try_all::<Large>(&rig);
}

#[test]
fn buffers_without_bytes_cost_nothing() {
    let rig = Rig::new();
    let calls = rig.sim.calls("cuMemHostAlloc");
    let pool = pool(&rig, 0);
    let mut empty = pool.take(0).unwrap();
    assert!(empty.as_mut_slice().unwrap().is_empty());
    drop(empty);

    #[derive(Clone, Copy)]
    struct Nothing;
    // SAFETY: it has no bytes.
    unsafe impl DeviceRepr for Nothing {}
    // SAFETY: as above.
    unsafe impl ValidAsZeroBits for Nothing {}
    let nothings = PinnedPool::<Nothing>::new(&rig.context, 0);
    assert_eq!(nothings.take(7).unwrap().len(), 7);
    assert_eq!(rig.sim.calls("cuMemHostAlloc"), calls);
    assert_eq!(pool.stats().taken + nothings.stats().taken, 0);
}

#[test]
fn idle_buffers_of_other_sizes_make_way_the_small_ones_first() {
    let rig = Rig::new();
    let pool = pool(&rig, 15 * PAGE);
    let buffers = [1, 2, 4, 8].map(|pages| pool.take(pages * PAGE).unwrap());
    drop(buffers);
    let live = rig.sim.counters().live_host_allocations;
    // The two smallest would not be enough by one page.
    let large = pool.take(4 * PAGE).unwrap();
    let larger = pool.take(4 * PAGE).unwrap();
    assert_eq!(pool.stats().freed, 3);
    assert_eq!(pool.stats().bytes, 8 * PAGE);
    assert_eq!(rig.sim.counters().live_host_allocations, live - 2);
    drop((large, larger));
    assert_eq!(pool.stats().high_water_bytes, 15 * PAGE);
}

#[test]
fn buffers_that_are_used_do_not_make_way() {
    let rig = Rig::new();
    let pool = pool(&rig, 6 * PAGE);
    let mut on_device = rig.zeros::<u8>(2 * PAGE);
    let (idle, used) = (pool.take(PAGE).unwrap(), pool.take(2 * PAGE).unwrap());
    drop(idle);
    let hold = rig.sim.hold();
    fill_and_copy(&rig.copier, used, 1, &mut on_device);
    assert_exhausted(pool.take(5 * PAGE), 6 * PAGE, 2 * PAGE);
    assert_eq!(pool.stats().idle, 1, "nothing is freed in vain");
    let four = pool.take(4 * PAGE).unwrap();
    assert_eq!(pool.stats().freed, 1);
    assert_eq!(pool.stats().bytes, 6 * PAGE);
    drop((four, hold));
    assert_eq!(rig.read_back(&on_device), [1; 2 * PAGE]);
    rig.assert_sound();
}

#[test]
fn one_that_waits_makes_way_too() {
    let rig = Rig::new();
    let pool = pool(&rig, 2 * PAGE);
    let mut on_device = rig.zeros::<u8>(PAGE);
    for _ in 0..2 {
        let buffer = pool.wait_and_take(PAGE, LONG).unwrap();
        fill_and_copy(&rig.copier, buffer, 1, &mut on_device);
    }
    let whole = pool.wait_and_take(2 * PAGE, LONG).unwrap();
    assert_eq!(whole.len(), 2 * PAGE);
    rig.assert_sound();
}

#[test]
fn idle_buffers_are_freed_when_asked() {
    let rig = Rig::new();
    let pool = pool(&rig, 8 * PAGE);
    let mut on_device = rig.zeros::<u8>(PAGE);
    let live = rig.counters().live_host_allocations;
    let (a, b, c) = (
        pool.take(PAGE).unwrap(),
        pool.take(PAGE).unwrap(),
        pool.take(2 * PAGE).unwrap(),
    );
    drop((b, c));
    let hold = rig.sim.hold();
    fill_and_copy(&rig.copier, a, 1, &mut on_device);
    assert_eq!(pool.free_idle(), 3 * PAGE);
    assert_eq!(pool.free_idle(), 0);
    let stats = pool.stats();
    assert_eq!((stats.bytes, stats.freed), (PAGE, 2));
    drop(hold);
    assert_eq!(rig.counters().live_host_allocations, live + 1);
    rig.assert_sound();
}

#[test]
fn a_buffer_outlives_its_pool() {
    let rig = Rig::new();
    let live = rig.counters().live_host_allocations;
    let pool = pool(&rig, 8 * PAGE);
    let mut on_device = rig.zeros::<u8>(PAGE);
    let (buffer, idle) = (pool.take(PAGE).unwrap(), pool.take(PAGE).unwrap());
    drop((idle, pool));
    assert_eq!(rig.counters().live_host_allocations, live + 1);
    fill_and_copy(&rig.copier, buffer, 1, &mut on_device);
    assert_eq!(rig.counters().live_host_allocations, live);
    assert_eq!(rig.read_back(&on_device), [1; PAGE]);
    rig.assert_sound();
}

#[test]
fn a_pool_waits_at_its_end_for_what_is_in_flight() {
    let rig = Rig::new();
    let live = rig.counters().live_host_allocations;
    let pool = pool(&rig, 8 * PAGE);
    let mut on_device = rig.zeros::<u8>(PAGE);
    fill_and_copy(&rig.copier, pool.take(PAGE).unwrap(), 1, &mut on_device);
    assert_eq!(rig.sim.counters().late_reads, 0);
    drop(pool);
    assert_eq!(rig.sim.counters().late_reads, 1);
    assert_eq!(rig.counters().live_host_allocations, live);
    rig.assert_sound();
}

#[test]
fn a_buffer_that_is_leaked_goes_on_counting() {
    let rig = Rig::new();
    let pool = pool(&rig, PAGE);
    std::mem::forget(pool.take(PAGE).unwrap());
    assert_exhausted(pool.take(PAGE), PAGE, PAGE);
    assert_eq!(pool.stats().out, 1);
}

#[test]
fn a_lost_buffer_is_leaked_and_goes_on_counting() {
    let rig = Rig::new();
    let pool = pool(&rig, 2 * PAGE);
    let buffer = lost_buffer(&rig, &pool);
    let live = (live_count(), rig.sim.counters().live_host_allocations);
    drop(buffer);
    assert_eq!(pool.free_idle(), 0);
    let stats = pool.stats();
    assert_eq!((stats.lost_bytes, stats.bytes), (PAGE, PAGE));
    assert_eq!((stats.out, stats.idle, stats.in_flight), (0, 0, 0));
    assert_exhausted(pool.take(2 * PAGE), 2 * PAGE, PAGE);
    let other = pool.take(PAGE).unwrap();
    drop((other, pool));
    assert_eq!(
        (live_count(), rig.counters().live_host_allocations),
        live,
        "it is still page-locked"
    );
    rig.assert_sound();
}

#[test]
fn a_buffer_of_which_the_driver_cannot_say_is_not_given_out() {
    let rig = Rig::new();
    let pool = pool(&rig, PAGE);
    let mut on_device = rig.zeros::<u8>(PAGE);
    fill_and_copy(&rig.copier, pool.take(PAGE).unwrap(), 1, &mut on_device);
    rig.sim.drain();
    rig.sim.fail_always("cuEventQuery", code::UNKNOWN);
    assert_exhausted(pool.take(PAGE), PAGE, PAGE);
    rig.sim.clear_faults();
    pool.take(PAGE).unwrap();
}

#[test]
fn memory_that_cannot_be_pinned_does_not_count() {
    let rig = Rig::new();
    let pool = pool(&rig, 2 * PAGE);
    drop(pool.take(PAGE).unwrap());
    rig.sim.fail_nth("cuMemHostAlloc", 1, code::OUT_OF_MEMORY);
    let error = pool.take(2 * PAGE).unwrap_err();
    assert!(error.to_string().starts_with("cuMemHostAlloc"), "{error}");
    let stats = pool.stats();
    assert_eq!((stats.bytes, stats.out, stats.made), (0, 0, 1));
    assert_eq!(stats.high_water_bytes, PAGE);
    pool.take(2 * PAGE).unwrap();
}

/// A subscriber is the program's code, runs when memory is leaked, and may do
/// anything then.
struct Acting<F>(F);
impl<F: Fn() + Send + Sync + 'static> tracing::Subscriber for Acting<F> {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        (self.0)();
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// Calls `act` whenever something is logged in `run`.
fn when_logging<R>(act: impl Fn() + Send + Sync + 'static, run: impl FnOnce() -> R) -> R {
    tracing::subscriber::with_default(Acting(act), run)
}

/// Takes a buffer of the pool's, and makes the driver unable to say whether a
/// copy from it is done.
fn lost_buffer(rig: &Rig, pool: &PinnedPool<u8>) -> Pooled<u8> {
    let mut on_device = rig.zeros::<u8>(PAGE);
    let buffer = pool.take(PAGE).unwrap();
    for call in ["cuEventRecord", "cuStreamSynchronize", "cuCtxSynchronize"] {
        rig.sim.fail_always(call, code::UNKNOWN);
    }
    rig.copier
        .copy_h2d_from(&buffer, 0..PAGE, &mut on_device)
        .unwrap_err();
    rig.sim.clear_faults();
    let _ = rig.context.check_err();
    rig.sim.drain();
    buffer
}

/// And what is being freed counts until it is free.
#[test]
fn the_programs_own_code_may_use_the_pool_while_room_is_made() {
    let rig = Rig::new();
    let pool = Arc::new(pool(&rig, 4 * PAGE));
    drop(pool.take(4 * PAGE).unwrap());
    let (seen, bytes) = mpsc::channel();
    rig.sim.fail_nth("cuMemFreeHost", 1, code::UNKNOWN);
    let looked_at = Arc::clone(&pool);
    let look = move || seen.send(looked_at.stats().bytes).unwrap();
    let taken = when_logging(look, || pool.take(PAGE));
    taken.unwrap();
    assert_eq!(bytes.recv().unwrap(), 4 * PAGE);
    assert_eq!(pool.stats().bytes, PAGE);
}

#[test]
fn the_programs_own_code_may_use_the_pool_while_a_lost_buffer_comes_back() {
    let rig = Rig::new();
    let pool = Arc::new(pool(&rig, 2 * PAGE));
    let buffer = lost_buffer(&rig, &pool);
    let (seen, bytes) = mpsc::channel();
    let looked_at = Arc::clone(&pool);
    let look = move || seen.send(looked_at.stats().lost_bytes).unwrap();
    when_logging(look, || drop(buffer));
    assert_eq!(bytes.recv().unwrap(), PAGE);
}

#[test]
fn a_panic_of_a_subscriber_while_room_is_made_is_nothing_to_the_pool() {
    let rig = Rig::new();
    let pool = pool(&rig, 2 * PAGE);
    drop(pool.take(PAGE).unwrap());
    rig.sim.fail_nth("cuMemFreeHost", 1, code::UNKNOWN);
    let whole = when_logging(|| panic!("on purpose"), || pool.take(2 * PAGE));
    drop(whole.unwrap());
    let whole = pool.take(2 * PAGE).unwrap();
    assert_eq!(pool.stats().bytes, 2 * PAGE);
    drop(whole);
}

#[test]
fn a_panic_of_a_subscriber_while_a_lost_buffer_comes_back_is_nothing_to_the_pool() {
    let rig = Rig::new();
    let pool = pool(&rig, 2 * PAGE);
    let buffer = lost_buffer(&rig, &pool);
    when_logging(|| panic!("on purpose"), || drop(buffer));
    assert_eq!(pool.stats().lost_bytes, PAGE);
    pool.take(PAGE).unwrap();
}

#[test]
fn an_error_that_others_stored_is_nothing_to_a_pool() {
    let rig = Rig::new();
    let pool = pool(&rig, PAGE);
    let mut on_device = rig.zeros::<u8>(PAGE);
    fill_and_copy(&rig.copier, pool.take(PAGE).unwrap(), 1, &mut on_device);
    let error = cudarc::driver::DriverError(cudarc::driver::sys::CUresult::CUDA_ERROR_UNKNOWN);
    rig.context.record_err(Err::<(), _>(error));
    let mut buffer = pool.wait_and_take(PAGE, LONG).unwrap();
    buffer.as_mut_slice().unwrap().fill(2);
    assert_eq!(rig.context.check_err(), Err(error));
    assert_eq!(rig.read_back(&on_device), [1; PAGE]);
    rig.assert_sound();
}

#[test]
fn copies_on_the_per_thread_stream_are_heeded_on_other_threads() {
    let rig = Rig::new();
    let pool = pool(&rig, PAGE);
    let copier = Copier::new(&rig.context.per_thread_stream()).unwrap();
    let (copied, done) = (Barrier::new(2), Barrier::new(2));
    let mut on_device = rig.zeros::<u8>(PAGE);
    thread::scope(|scope| {
        scope.spawn(|| {
            fill_and_copy(&copier, pool.take(PAGE).unwrap(), 1, &mut on_device);
            copied.wait();
            // A thread's end would let its stream finish.
            done.wait();
        });
        copied.wait();
        let hold = rig.sim.hold();
        assert_exhausted(pool.take(PAGE), PAGE, PAGE);
        drop(hold);
        let mut buffer = pool.wait_and_take(PAGE, LONG).unwrap();
        buffer.as_mut_slice().unwrap().fill(2);
        done.wait();
    });
    assert_eq!(rig.read_back(&on_device), [1; PAGE]);
    rig.assert_sound();
}

#[test]
fn threads_share_a_pool_and_its_limit() {
    const THREADS: u8 = 4;
    const LIMIT: usize = 6 * PAGE;
    let rig = Rig::new();
    let pool = Arc::new(pool(&rig, LIMIT));
    let live = rig.counters().live_host_allocations;
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (pool, over, rig) = (Arc::clone(&pool), &over, &rig);
            let copier = Copier::new(&rig.context.new_stream().unwrap()).unwrap();
            let mut on_device = rig.zeros::<u8>(4 * PAGE);
            scope.spawn(move || {
                for round in 0..40 {
                    let pages = [1, 2, 4, 1][(round + usize::from(thread)) % 4];
                    let buffer = pool.wait_and_take(pages * PAGE, LONG).unwrap();
                    let value = thread * 40 + u8::try_from(round).unwrap();
                    fill_and_copy(&copier, buffer, value, &mut on_device);
                    let pinned = rig.sim.counters().live_host_allocations - live;
                    if pool.stats().bytes > LIMIT || pinned > 6 {
                        over.store(true, Ordering::Relaxed);
                    }
                    if round % 8 == 0 {
                        let back = copier.stream().clone_dtoh(&on_device).unwrap();
                        assert_eq!(back[..pages * PAGE], vec![value; pages * PAGE]);
                    }
                }
            });
        }
    });
    assert!(!over.load(Ordering::Relaxed), "the limit was exceeded");
    rig.assert_sound();
    let stats = pool.stats();
    assert_eq!(stats.taken, u64::from(THREADS) * 40);
    assert!(stats.high_water_bytes <= LIMIT);
    assert_eq!(stats.out, 0);
    pool.free_idle();
    assert_eq!(rig.counters().live_host_allocations, live);
    assert_eq!(pool.stats().bytes, 0);
}

/// Every driver function on the way.
const CALLS: [&str; 9] = [
    "cuCtxGetCurrent",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuMemFreeHost",
    "cuMemHostAlloc",
    "cuThreadExchangeStreamCaptureMode",
];

#[test]
fn whichever_call_fails_nothing_is_torn_and_the_counts_are_right() {
    let mut seen_errors = 0;
    for call in CALLS {
        for nth in 1.. {
            let rig = Rig::new();
            let mut on_device = rig.zeros::<u8>(2 * PAGE);
            let before = (live_count(), rig.counters().live_host_allocations);
            let calls = rig.sim.calls(call);
            rig.sim.fail_nth(call, nth, code::UNKNOWN);
            let pool = pool(&rig, 2 * PAGE);
            let mut errors = Vec::new();
            for (value, pages) in (1..).zip([1, 1, 2, 1, 2]) {
                let used = pool
                    .wait_and_take(pages * PAGE, LONG)
                    .and_then(|mut buffer| {
                        buffer.as_mut_slice()?.fill(value);
                        rig.copier
                            .copy_h2d_from(&buffer, 0..pages * PAGE, &mut on_device)
                    });
                errors.extend(used.err());
                let _ = rig.context.check_err();
            }
            rig.sim.drain();
            pool.free_idle();
            let reached = rig.sim.calls(call) - calls >= nth;
            rig.sim.clear_faults();
            pool.free_idle();
            let stats = pool.stats();
            assert_eq!((stats.bytes, stats.out), (0, 0), "{call}, call {nth}");
            drop(pool);
            rig.assert_sound();
            let after = (live_count(), rig.counters().live_host_allocations);
            let leaked = after.1 - before.1;
            assert_eq!(after.0 - before.0, usize::try_from(leaked).unwrap());
            if leaked > 0 {
                let frees = ["cuMemFreeHost", "cuCtxGetCurrent"];
                assert!(frees.contains(&call), "{call}, call {nth} leaked");
            }
            if !reached {
                break;
            }
            if call == "cuMemHostAlloc" {
                assert!(!errors.is_empty(), "{call}, call {nth}");
            }
            seen_errors += errors.len();
        }
    }
    assert!(seen_errors > CALLS.len() / 2, "{seen_errors}");
}

#[test]
fn a_forked_child_frees_nothing_and_is_not_held_up() {
    let name = "a_forked_child_frees_nothing_and_is_not_held_up";
    // In a process of its own, so that no other test runs while it forks.
    if let Some(output) = in_child(name, |_| ()) {
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let rig = Rig::new();
    let pool = pool(&rig, 4 * PAGE);
    let mut on_device = rig.zeros::<u8>(PAGE);
    fill_and_copy(&rig.copier, pool.take(PAGE).unwrap(), 1, &mut on_device);
    rig.sim.drain();
    let idle = pool.take(PAGE).unwrap();
    let out = pool.take(PAGE).unwrap();
    drop(idle);
    let freeing = |rig: &Rig| rig.sim.calls("cuMemFreeHost") + rig.sim.calls("cuEventDestroy_v2");
    let before = freeing(&rig);
    // SAFETY: the child only drops the buffer and the pool, reads counters and
    // leaves.
    match unsafe { libc::fork() } {
        0 => {
            drop(out);
            let is_back = pool.stats().idle == 2;
            drop(pool);
            let calls = freeing(&rig) - before + u64::from(is_back);
            // SAFETY: ends the child, without running what the parent owns.
            unsafe { libc::_exit(i32::try_from(calls).unwrap_or(100)) }
        }
        child => {
            assert!(child > 0, "fork");
            let mut status = -1;
            // SAFETY: `child` is ours, and `status` a place for its status.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0, "the child ended something of its parent's");
        }
    }
    drop((out, pool));
    assert!(freeing(&rig) > before);
}

#[test]
fn pools_and_their_buffers_may_be_shared_and_moved() {
    fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<PinnedPool<u8>>();
    is_send_and_sync::<Pooled<u8>>();
}
