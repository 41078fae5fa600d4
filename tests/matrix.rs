//! What a copy from borrowed memory does, for each policy, residency, kind of
//! device and state of the stream, against the table of the documentation; and
//! in each case the source may be rewritten at once.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::sync::Arc;

use common::Rig;
use cuda_sim::{DeviceKind, Pageable};
use cudarc::driver::sys::{self, CUstreamCaptureMode as Mode};
use cudarc::driver::{CudaSlice, CudaStream};
use pinned_hosts::cuda::{Copier, CopierOptions, CopyStats, CudaError, Policy};
use pinned_hosts::{Region, Registration, Residency, global, residency};

const LIMIT: usize = 4096;

/// What the source is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Pageable,
    Pinned,
    /// Larger than what is staged.
    LargePinned,
    Seam,
    Mixed,
    LargeSeam,
    Retiring,
    LargeRetiring,
    WriteCombined,
}

const SOURCES: [Source; 9] = [
    Source::Pageable,
    Source::Pinned,
    Source::LargePinned,
    Source::Seam,
    Source::Mixed,
    Source::LargeSeam,
    Source::Retiring,
    Source::LargeRetiring,
    Source::WriteCombined,
];

/// What the stream is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It has earlier work to do, which waits to be asked for.
    Busy,
    Capturing,
    /// It is the per-thread default stream.
    PerThread,
    /// It is the legacy default stream.
    Legacy,
}

const STATES: [State; 4] = [
    State::Busy,
    State::Capturing,
    State::PerThread,
    State::Legacy,
];

/// What becomes of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Pageable,
    Staged,
    Guarded,
    Bounced,
    Denied,
    Capturing,
}

/// The table of the documentation.
fn expected(policy: Policy, source: Source, kind: DeviceKind, state: State) -> Fate {
    let large = matches!(
        source,
        Source::LargePinned | Source::LargeSeam | Source::LargeRetiring
    );
    let retiring = matches!(source, Source::Retiring | Source::LargeRetiring);
    match (policy, source, kind, state) {
        (.., State::Capturing) => Fate::Capturing,
        (_, Source::Pageable, DeviceKind::Discrete, _) => Fate::Pageable,
        (Policy::Deny, ..) => Fate::Denied,
        (Policy::Stage, ..)
            if !large && source != Source::WriteCombined && state != State::PerThread =>
        {
            Fate::Staged
        }
        _ if retiring => Fate::Bounced,
        _ => Fate::Guarded,
    }
}

fn seen(before: CopyStats, after: CopyStats, result: &Result<(), CudaError>) -> Vec<Fate> {
    let counts = [
        (Fate::Pageable, after.pageable - before.pageable),
        (Fate::Staged, after.staged - before.staged),
        (Fate::Guarded, after.guarded - before.guarded),
        (Fate::Bounced, after.bounced - before.bounced),
        (Fate::Denied, after.denied - before.denied),
        (
            Fate::Capturing,
            u64::from(*result == Err(CudaError::StreamIsCapturing)),
        ),
    ];
    let all = counts.into_iter().filter(|&(_, count)| count > 0);
    all.map(|(fate, count)| {
        assert_eq!(count, 1);
        fate
    })
    .collect()
}

/// Memory that is page-locked in parts, as the driver and the registry know
/// it.
struct Memory {
    bytes: Vec<u8>,
    pinned: Vec<Registration<'static>>,
    write_combined: Option<Registration<'static>>,
}

fn register(bytes: &[u8]) -> Result<(), sys::CUresult> {
    // SAFETY: `Memory` unregisters the bytes before it frees them.
    let code =
        unsafe { sys::cuMemHostRegister_v2(bytes.as_ptr().cast_mut().cast(), bytes.len(), 1) };
    match code {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(code),
    }
}

fn unregister(base: *const u8) -> Result<(), sys::CUresult> {
    // SAFETY: registered by `register`, and nothing is in flight: what was
    // copied from it was staged or waited for.
    match unsafe { sys::cuMemHostUnregister(base.cast_mut().cast()) } {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(code),
    }
}

impl Memory {
    fn new(source: Source) -> Self {
        let large = matches!(
            source,
            Source::LargePinned | Source::LargeSeam | Source::LargeRetiring
        );
        let len = if large { 4 * LIMIT } else { LIMIT };
        let mut memory = Self {
            bytes: vec![1; len],
            pinned: Vec::new(),
            write_combined: None,
        };
        let half = len / 2 + 1;
        let parts: &[(usize, usize)] = match source {
            Source::Pageable => &[],
            Source::Seam | Source::LargeSeam => &[(0, half), (half, len)],
            Source::Mixed => &[(10, half), (half, len - 10)],
            _ => &[(0, len)],
        };
        for &(start, end) in parts {
            let part = &memory.bytes[start..end];
            let region = Region::of(part).unwrap();
            let pinned = global().pin_with(region, || register(part)).unwrap();
            memory.pinned.push(pinned);
        }
        if source == Source::WriteCombined {
            let region = Region::of(&memory.bytes).unwrap();
            memory.write_combined = Some(global().register_write_combined(region));
        }
        memory
    }

    /// Runs `copy`, in the middle of unpinning if the source is to be retiring.
    fn with<R>(&mut self, source: Source, copy: impl FnOnce(&[u8]) -> R) -> R {
        let retiring = matches!(source, Source::Retiring | Source::LargeRetiring);
        let Some(pinned) = self.pinned.pop_if(|_| retiring) else {
            return copy(&self.bytes);
        };
        let base = pinned.region().base();
        let mut result = None;
        pinned
            .unpin_with(|| {
                result = Some(copy(&self.bytes));
                unregister(base)
            })
            .unwrap();
        result.unwrap()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        for pinned in self.pinned.drain(..) {
            let base = pinned.region().base();
            pinned.unpin_with(|| unregister(base)).unwrap();
        }
        if let Some(registration) = self.write_combined.take() {
            registration.unregister();
        }
    }
}

fn stream(rig: &Rig, state: State) -> Arc<CudaStream> {
    match state {
        State::Busy | State::Capturing => Arc::clone(&rig.stream),
        State::PerThread => rig.context.per_thread_stream(),
        State::Legacy => rig.context.default_stream(),
    }
}

fn copy_in_state(
    copier: &Copier,
    state: State,
    policy: Policy,
    bytes: &[u8],
    on_device: &mut CudaSlice<u8>,
) -> Result<(), CudaError> {
    if state != State::Capturing {
        return copier.copy_h2d_async_with(policy, bytes, on_device);
    }
    let stream = copier.stream();
    stream
        .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_RELAXED)
        .unwrap();
    let copied = copier.copy_h2d_async_with(policy, bytes, on_device);
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    stream.end_capture(flags).unwrap();
    copied
}

#[test]
fn every_policy_residency_device_and_stream_does_what_the_table_says() {
    let kinds = [
        DeviceKind::Discrete,
        DeviceKind::Coherent,
        DeviceKind::Integrated,
        DeviceKind::Hmm,
    ];
    let mut cases = 0;
    for kind in kinds {
        let rig = Rig::with(|sim| {
            sim.set_device(kind);
            if kind != DeviceKind::Discrete {
                sim.set_pageable(Pageable::ReadLate);
            }
        });
        for state in STATES {
            let stream = stream(&rig, state);
            let options = CopierOptions::default().stage_limit(LIMIT);
            let copier = Copier::with_options(&stream, options).unwrap();
            let mut on_device = rig.zeros::<u8>(4 * LIMIT);
            for source in SOURCES {
                for policy in [Policy::Stage, Policy::Wait, Policy::Deny] {
                    let case = format!("{policy:?}, {source:?}, {kind:?}, {state:?}");
                    let fate = expected(policy, source, kind, state);
                    stream.memset_zeros(&mut on_device).unwrap();
                    let mut memory = Memory::new(source);
                    let before = copier.stats();
                    let result = memory.with(source, |bytes| {
                        copy_in_state(&copier, state, policy, bytes, &mut on_device)
                    });
                    assert_eq!(seen(before, copier.stats(), &result), [fate], "{case}");
                    memory.bytes.fill(2);
                    let len = memory.bytes.len();
                    drop(memory);
                    let refused = matches!(fate, Fate::Denied | Fate::Capturing);
                    assert_eq!(result.is_err(), refused, "{case}");
                    stream.synchronize().unwrap();
                    let arrived = rig.read_back(&on_device);
                    let value = u8::from(!refused);
                    assert!(arrived[..len].iter().all(|&byte| byte == value), "{case}");
                    assert!(arrived[len..].iter().all(|&byte| byte == 0), "{case}");
                    cases += 1;
                }
            }
        }
        rig.assert_sound();
    }
    assert_eq!(cases, 3 * SOURCES.len() * 4 * STATES.len());
}

/// The sources are what they are called.
#[test]
fn the_sources_are_what_they_are_called() {
    let _rig = Rig::new();
    for source in SOURCES {
        let mut memory = Memory::new(source);
        let expected = match source {
            Source::Pageable => Residency::Pageable,
            Source::Seam | Source::LargeSeam => Residency::Seam,
            Source::Mixed => Residency::Mixed,
            _ => Residency::Pinned,
        };
        let (found, retiring) = memory.with(source, |bytes| {
            (residency(bytes), global().is_retiring(bytes))
        });
        assert_eq!(found, expected, "{source:?}");
        let expected = matches!(source, Source::Retiring | Source::LargeRetiring);
        assert_eq!(retiring, expected, "{source:?}");
    }
}
