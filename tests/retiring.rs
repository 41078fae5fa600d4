//! Memory that is about to be unpinned: the device neither reads nor writes it,
//! whatever form the copy has. Over the simulated driver.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::mem;
use std::thread;
use std::time::Duration;

use common::Rig;
use cuda_sim::code;
use cudarc::driver::sys;
use cudarc::driver::{CudaSlice, DeviceRepr};
use pinned_hosts::cuda::{CheckedCopies, Copier, CopierOptions, CudaError};
use pinned_hosts::{GraceError, Region, global};

const LEN: usize = 4096;

/// What the host memory holds, and what the device memory does.
const ON_HOST: u8 = 1;
const ON_DEVICE: u8 = 2;

type Form = fn(&Rig, &mut [u8], &mut CudaSlice<u8>) -> Result<(), CudaError>;

fn with(rig: &Rig, options: CopierOptions) -> Copier {
    Copier::with_options(&rig.stream, options).unwrap()
}

const TO_THE_DEVICE: [(&str, Form); 5] = [
    ("waited for", |rig, host, device| {
        rig.copier.copy_h2d_async(host, device)
    }),
    ("staged", |rig, host, device| {
        with(rig, CopierOptions::default()).copy_h2d_async(host, device)
    }),
    ("without a ring", |rig, host, device| {
        rig.sim.fail_always("cuMemHostAlloc", code::OUT_OF_MEMORY);
        let copied = with(rig, CopierOptions::default()).copy_h2d_async(host, device);
        rig.sim.clear_faults();
        copied
    }),
    ("in a scope", |rig, host, device| {
        let copier = with(rig, CopierOptions::default().stage_limit(0));
        copier.scope(|scope| scope.copy_h2d(host, device))
    }),
    ("by a checked function", |rig, host, device| {
        rig.stream.memcpy_htod_checked(host, device)
    }),
];

const TO_THE_HOST: [(&str, Form); 3] = [
    ("a download", |rig, host, device| {
        rig.copier.copy_d2h_async(device, host)
    }),
    ("in a scope", |rig, host, device| {
        rig.copier.scope(|scope| scope.copy_d2h(device, host))
    }),
    ("by a checked function", |rig, host, device| {
        rig.stream.memcpy_dtoh_checked(device, host)
    }),
];

/// The call of `cudarc` alone, which uses the memory in place.
const BARE: [Form; 2] = [
    |rig, host, device| {
        rig.stream.memcpy_htod(host, device).unwrap();
        rig.stream.synchronize().unwrap();
        Ok(())
    },
    |rig, host, device| {
        rig.stream.memcpy_dtoh(device, host).unwrap();
        rig.stream.synchronize().unwrap();
        Ok(())
    },
];

/// What came of a copy in whose middle its memory was unpinned and unmapped.
#[derive(Debug, PartialEq)]
struct Outcome {
    dead: u64,
    host: Vec<u8>,
    device: Vec<u8>,
}

/// Makes the copy `form` from or to page-locked memory that is being unpinned,
/// and unpins it while the device is still held up. `late` says whether the driver
/// writes pageable memory after its call has returned.
fn run(form: Form, late: bool) -> Outcome {
    let rig = Rig::new();
    rig.sim.set_pageable_written_late(late);
    let mut device = rig.zeros::<u8>(LEN);
    rig.stream
        .memcpy_htod(&[ON_DEVICE; LEN], &mut device)
        .unwrap();
    rig.stream.synchronize().unwrap();
    let mut memory = vec![ON_HOST; LEN];
    let region = Region::of(&memory).unwrap();
    let base = memory.as_mut_ptr().cast();
    let pin = || {
        // SAFETY: the vector outlives the registration.
        unsafe { sys::cuMemHostRegister_v2(base, LEN, 1) }.result()
    };
    let registration = global().pin_with(region, pin).unwrap();
    let calls = || {
        let copies = ["cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"];
        copies.map(|call| rig.sim.calls(call))
    };
    let address = base.addr();
    let unpin = || {
        thread::scope(|threads| {
            let hold = rig.sim.hold();
            let before = calls();
            let (memory, device, rig) = (&mut memory, &mut device, &rig);
            let copy = threads.spawn(move || {
                rig.context.bind_to_thread().unwrap();
                form(rig, memory, device).unwrap();
            });
            while !copy.is_finished() && calls() == before {
                thread::yield_now();
            }
            rig.context.bind_to_thread().unwrap();
            let base = std::ptr::with_exposed_provenance_mut(address);
            // SAFETY: registered by `pin`. That a transfer may use it is what is
            // tested.
            let unpinned = unsafe { sys::cuMemHostUnregister(base) }.result();
            drop(hold);
            copy.join().unwrap();
            unpinned
        })
    };
    base.expose_provenance();
    registration.unpin_with(unpin).unwrap();
    let counters = rig.counters();
    Outcome {
        dead: counters.dead_reads + counters.dead_writes,
        device: rig.read_back(&device),
        host: mem::take(&mut memory),
    }
}

/// So no other thread pins the memory meanwhile.
#[test]
fn a_copy_to_the_host_is_a_section_until_it_has_arrived() {
    for (name, form) in TO_THE_HOST {
        let rig = Rig::new();
        let mut device = rig.zeros::<u8>(LEN);
        let mut memory = vec![ON_HOST; LEN];
        let before = rig.sim.calls("cuMemcpyDtoHAsync_v2");
        let hold = rig.sim.hold();
        thread::scope(|threads| {
            let (device, rig, memory) = (&mut device, &rig, &mut memory);
            let copy = threads.spawn(move || form(rig, memory, device).unwrap());
            while !copy.is_finished() && rig.sim.calls("cuMemcpyDtoHAsync_v2") == before {
                thread::yield_now();
            }
            let limit = Some(Duration::from_millis(20));
            let waited = global().wait_for_sections(limit);
            assert!(
                matches!(waited, Err(GraceError::TimedOut { .. })),
                "{name}: {waited:?}"
            );
            drop(hold);
            copy.join().unwrap();
        });
        global().wait_for_sections(None).unwrap();
    }
}

/// A buffer of `cudarc`'s that the device still has to fill, in the order of the
/// stream: the CPU must not read it before.
#[test]
fn the_cpu_reads_a_buffer_of_cudarcs_only_once_it_is_filled() {
    let rig = Rig::new();
    let other = rig.context.new_stream().unwrap();
    let sevens = other.clone_htod(&[7u8; LEN]).unwrap();
    other.synchronize().unwrap();
    let mut device = rig.zeros::<u8>(LEN);
    // SAFETY: written before it is read.
    let mut buffer = unsafe { rig.context.alloc_pinned::<u8>(LEN) }.unwrap();
    buffer.as_mut_slice().unwrap().fill(ON_HOST);
    let region = Region::of(buffer.as_slice().unwrap()).unwrap();
    let pinned = global().pin_with(region, || Ok::<(), CudaError>(()));
    other.memcpy_dtoh(&sevens, &mut buffer).unwrap();
    let copy = || rig.stream.memcpy_htod_checked(&buffer, &mut device);
    pinned.unwrap().unpin_with(copy).unwrap();
    assert_eq!(rig.read_back(&device), [7; LEN]);
}

/// The heap is about to be unpinned as well.
#[test]
fn where_nothing_may_be_used_nothing_is_enqueued() {
    let rig = Rig::new();
    let mut device = rig.zeros::<u8>(LEN);
    let mut memory = vec![ON_HOST; LEN];
    let everything = Region::new(std::ptr::without_provenance(1 << 12), usize::MAX >> 1);
    let pinned = global().pin_with(everything.unwrap(), || Ok::<(), CudaError>(()));
    let copies = ["cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"];
    let before = copies.map(|call| rig.sim.calls(call));
    let unpin = || {
        let refused = Err(CudaError::NowhereToBounce);
        assert_eq!(rig.copier.copy_h2d_async(&memory, &mut device), refused);
        assert_eq!(rig.copier.copy_d2h_async(&device, &mut memory), refused);
        Ok::<(), CudaError>(())
    };
    pinned.unwrap().unpin_with(unpin).unwrap();
    assert_eq!(copies.map(|call| rig.sim.calls(call)), before);
    rig.copier.copy_h2d_async(&memory, &mut device).unwrap();
    rig.assert_sound();
}

fn all<T: Clone + DeviceRepr>(value: T) -> Vec<T> {
    vec![value; LEN]
}

#[test]
fn the_device_does_not_read_it() {
    for (name, form) in TO_THE_DEVICE {
        let expected = Outcome {
            dead: 0,
            host: all(ON_HOST),
            device: all(ON_HOST),
        };
        assert_eq!(run(form, false), expected, "{name}");
    }
}

#[test]
fn the_device_does_not_write_it() {
    for (name, form) in TO_THE_HOST {
        for late in [false, true] {
            let expected = Outcome {
                dead: 0,
                host: all(ON_DEVICE),
                device: all(ON_DEVICE),
            };
            assert_eq!(run(form, late), expected, "{name}, {late}");
        }
    }
}

#[test]
fn with_cudarc_alone_it_does() {
    for form in BARE {
        assert_ne!(run(form, false).dead, 0);
    }
}
