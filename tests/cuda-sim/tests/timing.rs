//! When operations run.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{
    bench, device_alloc, device_bytes, dtoh, event_query, event_wait, host_alloc, host_bytes,
    host_free, htod, htod_sync, new_event, null, out, overwrite, record, stream_query, stream_wait,
};
use cuda_sim::{Hold, Session, Timing};
use cudarc::driver::{CudaStream, sys};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[test]
fn nothing_runs_until_somebody_waits() {
    let bench = bench();
    let stream = bench.stream();
    let source = host_alloc(64);
    let target = device_alloc(64);
    assert_eq!(htod(target, source, 64, stream.cu_stream()), 0);
    assert_eq!(bench.session.counters().pending_operations, 1);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    let counters = bench.session.counters();
    assert_eq!(
        (counters.pending_operations, counters.h2d_transfers),
        (0, 1)
    );
}

#[test]
fn waiting_for_an_event_runs_its_stream_up_to_it_and_no_further() {
    let bench = bench();
    let stream = bench.stream();
    let source = host_alloc(64);
    let target = device_alloc(64);
    let event = new_event();
    assert_eq!(htod(target, source, 64, stream.cu_stream()), 0);
    assert_eq!(record(event, stream.cu_stream()), 0);
    assert_eq!(htod(target, source, 64, stream.cu_stream()), 0);
    assert_eq!(event_wait(event), 0);
    assert_eq!(bench.session.counters().h2d_transfers, 1);
}

#[test]
fn waiting_for_one_stream_leaves_others_alone() {
    let bench = bench();
    let (one, other) = (bench.stream(), bench.stream());
    let source = host_alloc(64);
    let target = device_alloc(64);
    assert_eq!(htod(target, source, 64, one.cu_stream()), 0);
    assert_eq!(htod(target, source, 64, other.cu_stream()), 0);
    assert_eq!(stream_wait(one.cu_stream()), 0);
    assert_eq!(bench.session.counters().h2d_transfers, 1);
}

#[test]
fn a_demand_reaches_the_streams_that_it_depends_on() {
    let bench = bench();
    let (first, second, third) = (bench.stream(), bench.stream(), bench.stream());
    let source = host_alloc(64);
    let target = device_alloc(64);
    assert_eq!(htod(target, source, 64, first.cu_stream()), 0);
    second.join(&first).unwrap();
    third.join(&second).unwrap();
    assert_eq!(stream_wait(third.cu_stream()), 0);
    assert_eq!(bench.session.counters().h2d_transfers, 1);
}

#[test]
fn a_stream_runs_behind_the_event_that_it_waits_for() {
    let bench = bench();
    let (first, second) = (bench.stream(), bench.stream());
    let (from, to) = (host_alloc(64), host_alloc(64));
    overwrite(from, 64, 9);
    let memory = device_alloc(64);
    assert_eq!(htod(memory, from, 64, first.cu_stream()), 0);
    second.join(&first).unwrap();
    assert_eq!(dtoh(to, memory, 64, second.cu_stream()), 0);
    assert_eq!(stream_wait(second.cu_stream()), 0);
    assert_eq!(host_bytes(to, 64), [9; 64]);
}

#[test]
fn a_query_is_a_demand_so_that_polling_ends() {
    let bench = bench();
    let stream = bench.stream();
    let source = host_alloc(64);
    assert_eq!(htod(device_alloc(64), source, 64, stream.cu_stream()), 0);
    assert_eq!(stream_query(stream.cu_stream()), 600);
    while stream_query(stream.cu_stream()) == 600 {
        std::thread::yield_now();
    }
    assert_eq!(stream_query(stream.cu_stream()), 0);
    assert_eq!(bench.session.counters().h2d_transfers, 1);
}

#[test]
fn waiting_for_the_context_runs_everything_even_of_destroyed_streams() {
    let bench = bench();
    let source = host_alloc(64);
    let target = device_alloc(64);
    // `cudarc` waits for the context when it makes the only stream.
    let _other = bench.stream();
    for _ in 0..3 {
        let stream = bench.stream();
        assert_eq!(htod(target, source, 64, stream.cu_stream()), 0);
    }
    assert_eq!(bench.session.counters().h2d_transfers, 0);
    bench.context.synchronize().unwrap();
    assert_eq!(bench.session.counters().h2d_transfers, 3);
}

#[test]
fn a_hold_keeps_even_what_is_waited_for() {
    let bench = bench();
    let stream = bench.stream();
    let source = host_alloc(64);
    assert_eq!(htod(device_alloc(64), source, 64, stream.cu_stream()), 0);
    let event = new_event();
    assert_eq!(record(event, stream.cu_stream()), 0);
    let hold = bench.session.hold();
    for _ in 0..100 {
        assert_eq!(event_query(event), 600);
    }
    let released = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            bench.context.bind_to_thread().unwrap();
            stream.synchronize().unwrap();
            released.load(Ordering::SeqCst)
        });
        assert_eq!(bench.session.counters().h2d_transfers, 0);
        released.store(true, Ordering::SeqCst);
        drop(hold);
        assert!(waiter.join().unwrap());
    });
}

#[test]
fn two_holds_end_one_by_one() {
    let bench = bench();
    let stream = bench.stream();
    let source = host_alloc(64);
    assert_eq!(htod(device_alloc(64), source, 64, stream.cu_stream()), 0);
    let (one, other) = (bench.session.hold(), bench.session.hold());
    drop(one);
    assert_eq!(stream_query(stream.cu_stream()), 600);
    assert_eq!(bench.session.counters().h2d_transfers, 0);
    drop(other);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
}

#[test]
fn draining_heeds_neither_timing_nor_hold() {
    let bench = bench();
    let stream = bench.stream();
    let source = host_alloc(64);
    bench
        .session
        .set_timing(Timing::Delay(Duration::from_secs(3600)));
    assert_eq!(htod(device_alloc(64), source, 64, stream.cu_stream()), 0);
    let _hold = bench.session.hold();
    bench.session.drain();
    assert_eq!(bench.session.counters().h2d_transfers, 1);
}

#[test]
fn immediate_runs_without_being_asked() {
    let bench = bench();
    let stream = bench.stream();
    bench.session.set_timing(Timing::Immediate);
    let source = host_alloc(64);
    assert_eq!(htod(device_alloc(64), source, 64, stream.cu_stream()), 0);
    while bench.session.counters().h2d_transfers == 0 {
        std::thread::yield_now();
    }
}

#[test]
fn a_delayed_operation_starts_no_earlier_than_set() {
    let bench = bench();
    let stream = bench.stream();
    let delay = Duration::from_millis(20);
    bench.session.set_timing(Timing::Delay(delay));
    let source = host_alloc(64);
    let before = Instant::now();
    assert_eq!(htod(device_alloc(64), source, 64, stream.cu_stream()), 0);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    assert!(before.elapsed() >= delay);
}

#[test]
fn a_change_of_timing_concerns_what_is_queued() {
    let bench = bench();
    let stream = bench.stream();
    let source = host_alloc(64);
    assert_eq!(htod(device_alloc(64), source, 64, stream.cu_stream()), 0);
    bench.session.set_timing(Timing::Immediate);
    while bench.session.counters().h2d_transfers == 0 {
        std::thread::yield_now();
    }
}

#[test]
fn a_synchronous_copy_is_not_ordered_with_non_blocking_streams() {
    let bench = bench();
    let stream = bench.stream();
    let source = host_alloc(64);
    overwrite(source, 64, 1);
    let memory = device_alloc(64);
    assert_eq!(htod(memory, source, 64, stream.cu_stream()), 0);
    // Enqueued later, carried out earlier: the stream's copy overwrites it.
    assert_eq!(htod_sync(memory, [2; 64].as_ptr(), 64), 0);
    assert_eq!(bench.session.counters().h2d_transfers, 1);
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    assert_eq!(device_bytes(memory, 64), [1; 64]);
}

#[test]
fn the_legacy_stream_is_ordered_with_blocking_streams_both_ways() {
    let bench = bench();
    // SAFETY: an out pointer.
    let blocking = out(|it| unsafe { sys::cuStreamCreate(it, 0) }).unwrap();
    let (one, two) = (host_alloc(64), host_alloc(64));
    overwrite(one, 64, 1);
    overwrite(two, 64, 2);
    let memory = device_alloc(64);
    assert_eq!(htod(memory, one, 64, blocking), 0);
    assert_eq!(htod(memory, two, 64, null().cast()), 0);
    assert_eq!(stream_wait(null().cast()), 0);
    assert_eq!(bench.session.counters().h2d_transfers, 2);
    assert_eq!(device_bytes(memory, 64), [2; 64]);

    assert_eq!(htod(memory, two, 64, null().cast()), 0);
    assert_eq!(htod(memory, one, 64, blocking), 0);
    assert_eq!(stream_wait(blocking), 0);
    assert_eq!(bench.session.counters().h2d_transfers, 4);
    assert_eq!(device_bytes(memory, 64), [1; 64]);
}

#[test]
fn handle_one_is_the_legacy_stream_and_two_is_the_threads_own() {
    let bench = bench();
    let source = host_alloc(64);
    let target = device_alloc(64);
    assert_eq!(htod(target, source, 64, 1 as sys::CUstream), 0);
    assert_eq!(stream_wait(null().cast()), 0);
    assert_eq!(bench.session.counters().h2d_transfers, 1);

    assert_eq!(htod(target, source, 64, 2 as sys::CUstream), 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            bench.context.bind_to_thread().unwrap();
            assert_eq!(stream_wait(2 as sys::CUstream), 0);
        });
    });
    assert_eq!(bench.session.counters().h2d_transfers, 1);
    assert_eq!(stream_wait(2 as sys::CUstream), 0);
    assert_eq!(bench.session.counters().h2d_transfers, 2);
    assert_eq!(host_free(source), 0);
}

#[test]
fn a_host_function_runs_in_stream_order() {
    extern "C" fn set(flag: *mut std::ffi::c_void) {
        // SAFETY: the flag outlives the session's last wait.
        unsafe { &*flag.cast::<AtomicBool>() }.store(true, Ordering::SeqCst);
    }
    let bench = bench();
    let stream = bench.stream();
    let flag = AtomicBool::new(false);
    let data = (&raw const flag).cast_mut().cast();
    // SAFETY: the stream is waited for before the flag goes.
    let result = unsafe { sys::cuLaunchHostFunc(stream.cu_stream(), Some(set), data) };
    assert_eq!(common::code(result), 0);
    assert!(!flag.load(Ordering::SeqCst));
    assert_eq!(stream_wait(stream.cu_stream()), 0);
    assert!(flag.load(Ordering::SeqCst));
}

#[test]
fn threads_on_streams_of_their_own_do_not_disturb_one_another() {
    let bench = bench();
    std::thread::scope(|scope| {
        for value in 0..4_u8 {
            let bench = &bench;
            scope.spawn(move || {
                let stream = bench.stream();
                for round in 0..50 {
                    let sent = vec![value ^ round; 10_000];
                    let memory = stream.clone_htod(&sent).unwrap();
                    assert_eq!(stream.clone_dtoh(&memory).unwrap(), sent);
                }
            });
        }
    });
    assert_eq!(bench.session.counters().h2d_transfers, 200);
}

/// Waits, polls, cross-stream waits, holds and destruction, all at once: what
/// must come out is that everything ends, and that all transfers were made.
#[test]
fn nothing_hangs_whatever_threads_do_at_once() {
    const ROUNDS: u64 = 200;
    let bench = bench();
    let shared = bench.stream();
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (bench, shared) = (&bench, &shared);
            scope.spawn(move || {
                bench.context.bind_to_thread().unwrap();
                let source = host_alloc(256);
                let target = device_alloc(256);
                let mut own = bench.stream();
                for round in 0..ROUNDS {
                    assert_eq!(htod(target, source, 256, own.cu_stream()), 0);
                    assert_eq!(htod(target, source, 256, shared.cu_stream()), 0);
                    match (round + thread) % 6 {
                        0 => own.join(shared).unwrap(),
                        1 => shared.join(&own).unwrap(),
                        2 => shared.synchronize().unwrap(),
                        3 => {
                            while stream_query(own.cu_stream()) == 600 {
                                std::thread::yield_now();
                            }
                        }
                        4 => own = bench.stream(),
                        _ => drop(bench.session.hold()),
                    }
                }
                own.synchronize().unwrap();
            });
        }
    });
    bench.session.drain();
    let counters = bench.session.counters();
    assert_eq!(
        (counters.pending_operations, counters.h2d_transfers),
        (0, 8 * ROUNDS)
    );
    assert_eq!((counters.torn_transfers, counters.dead_reads), (0, 0));
}

#[test]
fn a_held_stream_runs_nothing_while_others_run() {
    struct Release<'a> {
        session: &'a Session,
        hold: Mutex<Option<Hold>>,
        seen: AtomicU64,
    }

    extern "C" fn release(data: *mut std::ffi::c_void) {
        // SAFETY: what the test passes, which outlives its waits.
        let this = unsafe { &*data.cast::<Release<'_>>() };
        let transfers = this.session.counters().h2d_transfers;
        this.seen.store(transfers, Ordering::SeqCst);
        drop(this.hold.lock().unwrap().take());
    }

    let bench = bench();
    let (held, other) = (bench.stream(), bench.stream());
    let source = host_alloc(64);
    let target = device_alloc(64);
    let release_later = Release {
        session: &bench.session,
        hold: Mutex::new(Some(bench.session.hold_stream(held.cu_stream()))),
        seen: AtomicU64::new(0),
    };
    let copy_on = |stream: &CudaStream| htod(target, source, 64, stream.cu_stream());
    assert_eq!((copy_on(&held), copy_on(&other)), (0, 0));
    assert_eq!(stream_wait(other.cu_stream()), 0);
    assert_eq!(bench.session.counters().h2d_transfers, 1);

    // The wait needs the function as well, but first what comes before it on
    // the stream, unless that is held.
    let data = (&raw const release_later).cast_mut().cast();
    // SAFETY: waited for before the data goes.
    let launched = unsafe { sys::cuLaunchHostFunc(other.cu_stream(), Some(release), data) };
    assert_eq!(common::code(launched), 0);
    held.join(&other).unwrap();
    assert_eq!(stream_wait(held.cu_stream()), 0);
    assert_eq!(release_later.seen.load(Ordering::SeqCst), 1);
    assert_eq!(bench.session.counters().h2d_transfers, 2);
}

#[test]
fn a_stream_is_held_as_long_as_any_hold_holds_it() {
    let bench = bench();
    let stream = bench.stream();
    let source = host_alloc(64);
    assert_eq!(htod(device_alloc(64), source, 64, stream.cu_stream()), 0);
    let session = &bench.session;
    let held_alone = || session.hold_stream(stream.cu_stream());
    let (all, one, another) = (session.hold(), held_alone(), held_alone());
    for hold in [one, all, another] {
        assert_eq!(stream_query(stream.cu_stream()), 600);
        assert_eq!(session.counters().h2d_transfers, 0);
        drop(hold);
    }
    assert_eq!(stream_wait(stream.cu_stream()), 0);
}

#[test]
fn the_default_stream_can_be_held_by_the_handle_that_calls_take() {
    let bench = bench();
    let source = host_alloc(64);
    assert_eq!(htod(device_alloc(64), source, 64, null().cast()), 0);
    let hold = bench.session.hold_stream(null());
    assert_eq!(stream_query(null().cast()), 600);
    bench.session.drain();
    assert_eq!(stream_query(null().cast()), 0);
    drop(hold);
}

#[test]
#[should_panic(expected = "no stream that can be used")]
fn a_handle_that_is_no_stream_cannot_be_held() {
    let bench = bench();
    let _hold = bench.session.hold_stream(new_event());
}
