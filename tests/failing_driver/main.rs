//! A driver that is missing, incomplete, or fails at any call: a typed error,
//! and still no torn transfer and no dead read.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod every_call;
mod scenarios;

use std::os::unix::process::ExitStatusExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;

use common::{Rig, in_child, logged};
use cuda_sim::code;
use cudarc::driver::DriverError;
use cudarc::driver::sys::{self, CUresult, CUstreamCaptureMode as Mode};
use pinned_hosts::cuda::{self, Copier, CudaError, HostRegistration, PinnedBuffer, PinnedPool};
use pinned_hosts::live_count;

const LEN: usize = 4096;

#[test]
fn an_error_of_the_copy_call_itself_is_waited_for_all_the_same() {
    let rig = Rig::new();
    let mut pinned = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
    let mut on_device = rig.zeros::<u8>(LEN);
    let waits = rig.sim.calls("cuEventSynchronize");
    rig.sim
        .fail_nth("cuMemcpyHtoDAsync_v2", 1, code::LAUNCH_FAILED);
    rig.copier
        .copy_h2d_async(&pinned, &mut on_device)
        .unwrap_err();
    assert_eq!(rig.sim.calls("cuEventSynchronize"), waits + 1);
    pinned.as_mut_slice().unwrap().fill(2);
    rig.assert_sound();
}

#[test]
fn a_wait_that_fails_is_widened_and_its_error_returned() {
    for failing in [
        &["cuEventRecord"][..],
        &["cuEventSynchronize"],
        &["cuEventRecord", "cuStreamSynchronize"],
        &["cuEventSynchronize", "cuStreamSynchronize"],
    ] {
        let rig = Rig::new();
        let mut pinned = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
        let mut on_device = rig.zeros::<u8>(LEN);
        for call in failing {
            rig.sim.fail_always(call, code::UNKNOWN);
        }
        let error = rig
            .copier
            .copy_h2d_async(pinned.as_slice(), &mut on_device)
            .unwrap_err();
        rig.sim.clear_faults();
        pinned.as_mut_slice().unwrap().fill(2);
        assert!(error.to_string().starts_with(failing[0]), "{error}");
        // `cudarc` failed to record its own event for the destination.
        let _ = rig.context.check_err();
        assert_eq!(rig.read_back(&on_device), [1; LEN], "{failing:?}");
        rig.assert_sound();
    }
}

const WAITS: [&str; 3] = [
    "cuEventSynchronize",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
];

/// Has one wait for an event fail while another stream captures a graph, and
/// returns what came of `copy`, whether the graph was spoilt, and how many
/// regions were leaked.
fn with_a_failing_wait_beside_a_capture<R>(copy: impl FnOnce(&Rig) -> R) -> (R, bool, usize) {
    let rig = Rig::new();
    let capturing = rig.context.new_stream().unwrap();
    let regions = live_count();
    capturing
        .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_RELAXED)
        .unwrap();
    rig.sim.fail_nth("cuEventSynchronize", 1, code::UNKNOWN);
    let copied = copy(&rig);
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let spoilt = capturing.end_capture(flags).is_err();
    rig.assert_sound();
    (copied, spoilt, live_count() - regions)
}

#[test]
fn a_failing_wait_beside_a_capture_is_widened_to_the_stream() {
    let (copied, spoilt, leaked) = with_a_failing_wait_beside_a_capture(|rig| {
        let pinned = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
        let mut on_device = rig.zeros::<u8>(LEN);
        rig.copier.copy_h2d_async(&pinned, &mut on_device)
    });
    let error = copied.unwrap_err().to_string();
    assert!(error.starts_with("cuEventSynchronize"), "{error}");
    assert_eq!((spoilt, leaked), (false, 0));
}

#[test]
fn a_failing_wait_at_the_end_of_a_scope_beside_a_capture_does_not_abort() {
    let name = "a_failing_wait_at_the_end_of_a_scope_beside_a_capture_does_not_abort";
    if let Some(output) = in_child(name, |_| ()) {
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let (copied, spoilt, leaked) = with_a_failing_wait_beside_a_capture(|rig| {
        let pinned = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
        let mut on_device = rig.zeros::<u8>(LEN);
        rig.copier
            .scope(|scope| scope.copy_h2d(&pinned, &mut on_device))
    });
    let error = copied.unwrap_err().to_string();
    assert!(error.starts_with("cuEventSynchronize"), "{error}");
    assert_eq!((spoilt, leaked), (false, 0));
}

#[test]
fn a_failing_wait_at_the_end_of_a_buffer_beside_a_capture_leaks_nothing() {
    let ((), spoilt, leaked) = with_a_failing_wait_beside_a_capture(|rig| {
        let pinned = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
        let mut on_device = rig.zeros::<u8>(LEN);
        rig.copier
            .copy_h2d_from(&pinned, 0..LEN, &mut on_device)
            .unwrap();
    });
    assert_eq!((spoilt, leaked), (false, 0));
}

#[test]
fn memory_that_was_unpinned_after_all_is_given_back() {
    let rig = Rig::new();
    let regions = live_count();
    let registration = HostRegistration::new(&rig.context, vec![1u8; LEN]).unwrap();
    rig.sim
        .fail_nth_after_acting("cuMemHostUnregister", 1, code::UNKNOWN);
    let failed = registration.unregister().unwrap_err();
    let memory = failed.registration.unregister().unwrap();
    assert_eq!(memory, [1; LEN]);
    assert_eq!(live_count(), regions);
}

#[test]
fn a_copy_that_nobody_can_wait_for_aborts_rather_than_return() {
    let name = "a_copy_that_nobody_can_wait_for_aborts_rather_than_return";
    if let Some(output) = in_child(name, |_| ()) {
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{output:?}");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(
            text.contains("pinned-hosts: the driver can no longer say"),
            "{text}"
        );
        return;
    }
    copy_that_nobody_can_wait_for();
}

/// Leaves the process with a code of its own if the copy returns or unwinds.
fn copy_that_nobody_can_wait_for() {
    let rig = Rig::new();
    let pinned = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
    let mut on_device = rig.zeros::<u8>(LEN);
    for call in WAITS {
        rig.sim.fail_always(call, code::UNKNOWN);
    }
    let copy = AssertUnwindSafe(|| rig.copier.copy_h2d_async(&pinned, &mut on_device));
    let _ = catch_unwind(copy);
    std::process::exit(7);
}

/// The subscriber is the program's own code.
#[test]
fn a_subscriber_that_panics_does_not_keep_the_process_from_aborting() {
    struct Panics;
    impl tracing::Subscriber for Panics {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }
        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
        fn event(&self, _: &tracing::Event<'_>) {
            panic!("a subscriber's own panic");
        }
        fn enter(&self, _: &tracing::span::Id) {}
        fn exit(&self, _: &tracing::span::Id) {}
    }

    let name = "a_subscriber_that_panics_does_not_keep_the_process_from_aborting";
    if let Some(output) = in_child(name, |_| ()) {
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{output:?}");
        return;
    }
    tracing::subscriber::with_default(Panics, copy_that_nobody_can_wait_for);
}

#[test]
fn a_closed_stderr_does_not_keep_the_process_from_aborting() {
    let name = "a_closed_stderr_does_not_keep_the_process_from_aborting";
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    if let Some(output) = in_child(name, |command| {
        command.stderr(writer);
    }) {
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{output:?}");
        return;
    }
    copy_that_nobody_can_wait_for();
}

/// Makes objects of each kind that owns page-locked memory, some of it in use,
/// drops them while every call of the driver fails with `code`, and returns the
/// log's lines.
fn log_of_drops(code: i32) -> Vec<String> {
    const OBJECTS: usize = 50;
    let rig = Rig::new();
    let mut on_device = rig.zeros::<u8>(LEN);
    let pool = PinnedPool::<u8>::new(&rig.context, 2 * OBJECTS * LEN);
    let buffers = [(); OBJECTS].map(|()| PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]));
    let pooled = [(); OBJECTS].map(|()| pool.take(LEN).unwrap());
    let registrations =
        [(); OBJECTS].map(|()| HostRegistration::new(&rig.context, vec![1u8; LEN]).unwrap());
    let staging = Copier::new(&rig.stream).unwrap();
    staging
        .copy_h2d_async(&pooled[0][..], &mut on_device)
        .unwrap();
    for buffer in &buffers[..OBJECTS / 2] {
        let buffer = buffer.as_ref().unwrap();
        staging
            .copy_h2d_from(buffer, 0..LEN, &mut on_device)
            .unwrap();
    }
    let calls = [
        "cuCtxGetCurrent",
        "cuCtxSetCurrent",
        "cuEventQuery",
        "cuEventRecord",
        "cuMemFreeHost",
        "cuMemHostUnregister",
        "cuThreadExchangeStreamCaptureMode",
    ];
    for call in calls.into_iter().chain(WAITS) {
        rig.sim.fail_always(call, code);
    }
    let log = logged(|| {
        drop((buffers, pooled, pool));
        drop((registrations, staging));
    });
    rig.sim.clear_faults();
    log.lines().map(str::to_owned).collect()
}

#[test]
fn drops_after_the_driver_has_shut_down_are_logged_once_and_as_no_error() {
    let name = "drops_after_the_driver_has_shut_down_are_logged_once_and_as_no_error";
    // In a process of its own, since it is once for a process.
    if let Some(output) = in_child(name, |_| ()) {
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let lines = log_of_drops(code::DEINITIALIZED);
    assert_eq!(lines.len(), 1, "{lines:#?}");
    assert!(lines[0].contains("INFO") && lines[0].contains("shut down"));
    let again = log_of_drops(code::DEINITIALIZED);
    assert_eq!(again, [""; 0]);
    // The twin: with any other code, each is an error.
    let lines = log_of_drops(code::UNKNOWN);
    assert_eq!(lines.len(), 151, "{lines:#?}");
    assert!(lines.iter().all(|line| line.contains("ERROR")));
}

/// The codes of which `cuda.h` says that the context does no work any more.
const DEAD: [i32; 17] = [
    code::DEINITIALIZED,
    code::ECC_UNCORRECTABLE,
    code::NVLINK_UNCORRECTABLE,
    code::CONTAINED,
    code::ILLEGAL_ADDRESS,
    code::LAUNCH_TIMEOUT,
    code::CONTEXT_IS_DESTROYED,
    code::ASSERT,
    code::HARDWARE_STACK_ERROR,
    code::ILLEGAL_INSTRUCTION,
    code::MISALIGNED_ADDRESS,
    code::INVALID_ADDRESS_SPACE,
    code::INVALID_PC,
    code::LAUNCH_FAILED,
    code::TENSOR_MEMORY_LEAK,
    code::MPS_CLIENT_TERMINATED,
    code::EXTERNAL_DEVICE,
];

/// A copy from page-locked memory, and every way to wait for it fails so.
fn copy_with_failing_waits(code: i32) -> CudaError {
    let rig = Rig::new();
    let pinned = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
    let mut on_device = rig.zeros::<u8>(LEN);
    for call in WAITS {
        rig.sim.fail_always(call, code);
    }
    let copied = rig.copier.copy_h2d_async(&pinned, &mut on_device);
    rig.sim.clear_faults();
    rig.sim.drain();
    copied.unwrap_err()
}

#[test]
fn a_copy_on_a_dead_context_returns_its_error() {
    let name = "a_copy_on_a_dead_context_returns_its_error";
    // In a process of its own, since it aborts where a code is not known.
    if let Some(output) = in_child(name, |_| ()) {
        assert!(output.status.success(), "{output:?}");
        return;
    }
    for code in DEAD {
        eprintln!("code {code}");
        let error = copy_with_failing_waits(code);
        assert!(error.to_string().contains(&format!("({code})")), "{error}");
    }
}

/// The twin: each other code that the simulated driver has.
#[test]
fn a_copy_on_a_context_that_is_not_dead_aborts_whatever_the_code() {
    let name = "a_copy_on_a_context_that_is_not_dead_aborts_whatever_the_code";
    let alive = |&code: &i32| code::is_known(code) && !DEAD.contains(&code);
    for code in (code::SUCCESS + 1..1000).filter(alive) {
        let Some(output) = in_child(name, |command| {
            command.env("CODE", code.to_string());
        }) else {
            let code = std::env::var("CODE").unwrap().parse().unwrap();
            copy_with_failing_waits(code);
            return;
        };
        let aborted = output.status.signal() == Some(libc::SIGABRT);
        assert!(aborted, "code {code}: {output:?}");
    }
}

#[test]
fn no_driver_is_an_error_and_not_a_panic() {
    let name = "no_driver_is_an_error_and_not_a_panic";
    if let Some(output) = in_child(name, |command| {
        command
            .env_remove("LD_LIBRARY_PATH")
            .env_remove("LD_PRELOAD");
    }) {
        assert!(output.status.success(), "{output:?}");
        return;
    }
    match cuda::context(0) {
        Err(CudaError::NoDriver) => {
            let text = CudaError::NoDriver.to_string();
            assert!(text.contains("install the NVIDIA driver"), "{text}");
        }
        // A machine with a real driver: it answers, whatever it says.
        Ok(_) | Err(CudaError::Driver { .. }) => eprintln!("there is a real driver here"),
        Err(other) => panic!("{other:?}"),
    }
}

#[test]
fn no_such_device_is_an_error_with_the_drivers_name_for_it() {
    let _rig = Rig::new();
    let text = cuda::context(1000).unwrap_err().to_string();
    assert!(text.contains("CUDA_ERROR_INVALID_DEVICE (101)"), "{text}");
}

/// Builds a shared object of `source` as `libcuda.so` in `folder`.
fn build_libcuda(folder: &std::path::Path, source: &str) {
    let file = folder.join("libcuda.rs");
    std::fs::write(&file, source).unwrap();
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let status = Command::new(rustc)
        .args(["--edition", "2024", "--crate-type", "cdylib", "-o"])
        .args([folder.join("libcuda.so"), file])
        .status()
        .unwrap();
    assert!(status.success());
}

#[test]
fn a_driver_without_a_function_that_is_needed_is_an_error_and_not_a_panic() {
    let name = "a_driver_without_a_function_that_is_needed_is_an_error_and_not_a_panic";
    let folder = tempfile::tempdir().unwrap();
    if !common::is_child() {
        build_libcuda(
            folder.path(),
            "#[unsafe(no_mangle)] pub extern \"C\" fn cuCtxGetCurrent() -> i32 { 3 }",
        );
    }
    if let Some(output) = in_child(name, |command| {
        command.env("LD_LIBRARY_PATH", folder.path());
    }) {
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let error = cuda::context(0).unwrap_err();
    assert_eq!(
        error,
        CudaError::MissingFunction {
            name: "cuCtxSetCurrent"
        }
    );
    assert!(error.to_string().contains("update the driver"), "{error}");
}

#[test]
fn an_error_can_be_told_where_there_is_no_driver_to_explain_it() {
    let name = "an_error_can_be_told_where_there_is_no_driver_to_explain_it";
    if let Some(output) = in_child(name, |command| {
        command
            .env_remove("LD_LIBRARY_PATH")
            .env_remove("LD_PRELOAD");
    }) {
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let error = CudaError::Driver {
        call: "cuMemHostAlloc",
        source: DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY),
    };
    let text = error.to_string();
    assert!(text.starts_with("cuMemHostAlloc failed with"), "{text}");
    assert!(text.contains('2'), "{text}");
}

#[test]
fn a_forked_child_frees_nothing() {
    let name = "a_forked_child_frees_nothing";
    // In a process of its own, so that no other test runs while it forks.
    if let Some(output) = in_child(name, |_| ()) {
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let rig = Rig::new();
    let buffer = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
    let mut on_device = rig.zeros::<u8>(LEN);
    rig.copier
        .copy_h2d_from(&buffer, 0..LEN, &mut on_device)
        .unwrap();
    rig.sim.drain();
    let frees = freeing_calls(&rig);
    // SAFETY: the child only drops the buffer, reads a counter and leaves.
    match unsafe { libc::fork() } {
        0 => {
            drop(buffer);
            let freed = freeing_calls(&rig) - frees;
            // SAFETY: ends the child, without running what the parent owns.
            unsafe { libc::_exit(i32::try_from(freed).unwrap_or(100)) }
        }
        child => {
            assert!(child > 0, "fork");
            let mut status = -1;
            // SAFETY: `child` is ours, and `status` a place for its status.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0, "the child freed memory of its parent's");
        }
    }
    drop(buffer);
    assert_eq!(freeing_calls(&rig), frees + 2);
}

fn freeing_calls(rig: &Rig) -> u64 {
    rig.sim.calls("cuMemFreeHost") + rig.sim.calls("cuEventDestroy_v2")
}
