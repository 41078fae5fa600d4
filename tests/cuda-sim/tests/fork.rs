//! Calls in a forked child.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::alone::{Trap, in_a_process_of_its_own};
use common::{
    bench, code, device_alloc, device_bytes, dtoh, event_query, event_wait, host_alloc, host_free,
    htod, htod_sync, new_event, null, out, overwrite, record, register_at, stream_query,
    stream_wait, unregister,
};
use cudarc::driver::sys;
use libc::{c_int, c_long, pid_t};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

const NOT_INITIALIZED: i32 = 3;

/// Runs `child` in a child that `fork` makes, and returns what it returned; or
/// the status of a child that crashed, or was killed since it hung.
fn in_forked_child(fork: fn() -> pid_t, child: impl FnOnce() -> i32) -> Result<i32, c_int> {
    /// Seconds; only a failure waits for them.
    const PATIENCE: u32 = 20;

    let pid = fork();
    if pid == 0 {
        // SAFETY: the process ends by this signal, or by `_exit`.
        unsafe { libc::alarm(PATIENCE) };
        let returned = catch_unwind(AssertUnwindSafe(child)).unwrap_or(101);
        // SAFETY: ends the child, without what a test run does at its end.
        unsafe { libc::_exit(returned) };
    }
    assert!(pid > 0, "no child could be made");
    let mut status = 0;
    // SAFETY: a place for the status.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    match libc::WIFEXITED(status) {
        true => Ok(libc::WEXITSTATUS(status)),
        false => Err(status),
    }
}

fn fork() -> pid_t {
    // SAFETY: the children of these tests make calls, and end.
    unsafe { libc::fork() }
}

/// As `fork`, but the C library does not know.
fn clone() -> pid_t {
    const NOTHING: c_long = 0;
    // SAFETY: as `fork`: nothing is shared, and the stack stays where it is.
    let pid = unsafe {
        libc::syscall(
            libc::SYS_clone,
            c_long::from(libc::SIGCHLD),
            NOTHING,
            NOTHING,
            NOTHING,
            NOTHING,
        )
    };
    pid as pid_t
}

/// Calls of every chapter, on what the parent has. Returns the place of the
/// first that did not fail as it should, counted from 1; else 0.
fn first_call_that_acts(things: &Things) -> i32 {
    let Things {
        context,
        stream,
        event,
        host,
        device,
        registered,
    } = *things;
    fn failed(result: Result<usize, i32>) -> i32 {
        result.err().unwrap_or(0)
    }
    // SAFETY: places for what the calls hand out; the simulated driver looks
    // any handle up.
    let results = unsafe {
        [
            code(sys::cuInit(0)),
            failed(out(|it: *mut usize| sys::cuDeviceGetCount(it.cast()))),
            failed(out(|it: *mut usize| {
                sys::cuDevicePrimaryCtxRetain(it.cast(), 0)
            })),
            code(sys::cuDevicePrimaryCtxRelease_v2(0)),
            code(sys::cuCtxSetCurrent(context)),
            failed(out(|it: *mut usize| sys::cuCtxGetCurrent(it.cast()))),
            code(sys::cuCtxSynchronize()),
            failed(out(|it: *mut usize| sys::cuMemHostAlloc(it.cast(), 64, 0))),
            host_free(host),
            register_at(host, 64, 0),
            unregister(registered),
            failed(out(|it: *mut usize| sys::cuMemAlloc_v2(it.cast(), 64))),
            code(sys::cuMemFree_v2(device)),
            code(sys::cuMemFreeAsync(device, stream)),
            code(sys::cuMemsetD8Async(device, 1, 64, stream)),
            htod(device, host, 64, stream),
            htod_sync(device, host, 64),
            dtoh(host, device, 64, stream),
            failed(out(|it: *mut usize| sys::cuEventCreate(it.cast(), 2))),
            record(event, stream),
            event_query(event),
            event_wait(event),
            code(sys::cuEventDestroy_v2(event)),
            failed(out(|it: *mut usize| sys::cuStreamCreate(it.cast(), 1))),
            failed(out(|it: *mut usize| {
                sys::cuStreamIsCapturing(stream, it.cast())
            })),
            stream_query(stream),
            stream_wait(stream),
            code(sys::cuStreamDestroy_v2(stream)),
        ]
    };
    let acted = results.iter().position(|it| *it != NOT_INITIALIZED);
    acted.map_or(0, |place| place as i32 + 1)
}

struct Things {
    context: sys::CUcontext,
    stream: sys::CUstream,
    event: sys::CUevent,
    host: *mut u8,
    device: sys::CUdeviceptr,
    registered: *const u8,
}

#[track_caller]
fn assert_that_no_call_acts_in_a_child(fork: fn() -> pid_t) {
    let bench = bench();
    let stream = bench.stream();
    let memory = vec![1; 64];
    assert_eq!(common::register(&memory), 0);
    let things = Things {
        context: bench.context.cu_ctx(),
        stream: stream.cu_stream(),
        event: new_event(),
        host: host_alloc(64),
        device: device_alloc(64),
        registered: memory.as_ptr(),
    };
    overwrite(things.host, 64, 7);
    let copy = || htod(things.device, things.host, 64, things.stream);
    assert_eq!(copy(), 0);
    let before = bench.session.counters();

    let acted = in_forked_child(fork, || first_call_that_acts(&things));
    assert_eq!(acted, Ok(0), "the place of a call that did not return 3");

    assert_eq!(bench.session.counters(), before);
    assert_eq!(record(things.event, things.stream), 0);
    assert_eq!(event_wait(things.event), 0);
    assert_eq!(device_bytes(things.device, 64), [7; 64]);
    assert_eq!(copy(), 0);
    assert_eq!(stream_wait(things.stream), 0);
    assert_eq!(bench.session.counters().dead_reads, 0);
    assert_eq!(host_free(things.host), 0);
    assert_eq!(unregister(things.registered), 0);
}

#[test]
fn in_a_forked_child_every_call_fails_and_the_parent_keeps_what_it_has() {
    assert_that_no_call_acts_in_a_child(fork);
}

#[test]
fn a_child_is_known_for_one_however_it_was_made() {
    assert_that_no_call_acts_in_a_child(clone);
}

#[test]
fn a_child_is_known_for_one_where_the_kernel_wipes_no_page() {
    if in_a_process_of_its_own("a_child_is_known_for_one_where_the_kernel_wipes_no_page") {
        return;
    }
    refuse_to_wipe_pages();
    assert_that_no_call_acts_in_a_child(fork);
}

/// A child that was forked before the driver was initialised has a driver of
/// its own.
#[test]
fn a_child_of_a_process_without_a_driver_can_use_one() {
    if in_a_process_of_its_own("a_child_of_a_process_without_a_driver_can_use_one") {
        return;
    }
    let sim = cuda_sim::load().unwrap();
    let initialised = in_forked_child(fork, || {
        let session = sim.session();
        // SAFETY: no arguments but the flags.
        let results = unsafe { [code(sys::cuCtxSynchronize()), code(sys::cuInit(0))] };
        assert_eq!(results, [NOT_INITIALIZED, 0]);
        drop((cudarc::driver::CudaContext::new(0).unwrap(), session));
        0
    });
    assert_eq!(initialised, Ok(0));
}

/// Another thread of the parent is inside a call, under the driver's lock, at
/// the fork; the child makes calls, and ends its hold and its session.
#[test]
fn a_child_does_not_wait_for_a_lock_that_was_held_at_the_fork() {
    if in_a_process_of_its_own("a_child_does_not_wait_for_a_lock_that_was_held_at_the_fork") {
        return;
    }
    let bench = bench();
    let (hold, stream) = (bench.session.hold(), bench.stream());
    let trap = Trap::set();
    std::thread::scope(|scope| {
        let inside = scope.spawn(|| {
            bench.context.bind_to_thread().unwrap();
            let mut total = 0_usize;
            // SAFETY: a place for the one; the other can be written once the
            // trap is open.
            code(unsafe { sys::cuMemGetInfo_v2(trap.place(), &raw mut total) })
        });
        trap.wait_until_entered();
        let result = in_forked_child(fork, || {
            let results = [stream_query(stream.cu_stream()), host_free(null().cast())];
            bench.session.drain();
            // SAFETY: the child's copies, which nothing in the child uses or
            // drops after this.
            unsafe { drop((ptr::read(&hold), ptr::read(&stream), ptr::read(&bench))) };
            i32::from(results != [NOT_INITIALIZED; 2])
        });
        trap.open();
        assert_eq!(inside.join().unwrap(), 0);
        assert_eq!(result, Ok(0));
    });
}

/// From now on `madvise` refuses `MADV_WIPEONFORK` to this thread.
fn refuse_to_wipe_pages() {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const SKIP_UNLESS: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    /// Where the kernel's record of a call has its number and its third
    /// argument (the lower half, on a little-endian machine).
    const NUMBER: u32 = 0;
    const ADVICE: u32 = 32;

    let step = |code, k, jf| libc::sock_filter { code, jt: 0, jf, k };
    let mut steps = [
        step(LOAD, NUMBER, 0),
        step(SKIP_UNLESS, libc::SYS_madvise as u32, 3),
        step(LOAD, ADVICE, 0),
        step(SKIP_UNLESS, libc::MADV_WIPEONFORK as u32, 1),
        step(RETURN, libc::SECCOMP_RET_ERRNO | libc::EINVAL as u32, 0),
        step(RETURN, libc::SECCOMP_RET_ALLOW, 0),
    ];
    let program = libc::sock_fprog {
        len: steps.len() as u16,
        filter: steps.as_mut_ptr(),
    };
    // SAFETY: a filter of as many steps as it says.
    let results = unsafe {
        [
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
            libc::prctl(
                libc::PR_SET_SECCOMP,
                libc::SECCOMP_MODE_FILTER,
                &raw const program,
            ),
        ]
    };
    assert_eq!(results, [0, 0]);
}
