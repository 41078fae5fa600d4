//! Ways in which safe code over `cudarc` 0.19.10 alone lets the device use memory
//! whose borrow has ended, each beside the same code with this crate's types.
//! The last one stays open. Over the simulated driver.
#![allow(clippy::unwrap_used)]

mod common;

use common::Rig;
use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, CudaSlice, DriverError, PinnedHostSlice};
use pinned_hosts::cuda::{Copier, CudaError, PinnedBuffer};

const LEN: usize = 4096;

/// `cudarc`'s own page-locked buffer, holding ones.
fn pinned_host_slice(rig: &Rig) -> PinnedHostSlice<u8> {
    // SAFETY: written before it is read.
    let mut slice = unsafe { rig.context.alloc_pinned(LEN) }.unwrap();
    slice.as_mut_slice().unwrap().fill(1);
    slice
}

/// Hole 1: `memcpy_htod` of a borrowed slice neither waits nor records an
/// event, whatever the slice points into.
#[test]
fn hole_1_a_borrowed_slice_of_a_pinned_buffer_is_copied_without_a_wait() {
    let rig = Rig::new();
    let mut source = pinned_host_slice(&rig);
    let mut on_device = rig.zeros::<u8>(LEN);
    rig.stream
        .memcpy_htod(source.as_slice().unwrap(), &mut on_device)
        .unwrap();
    source.as_mut_slice().unwrap().fill(2);
    rig.sim.drain();
    assert_eq!(rig.counters().torn_transfers, 1);
}

#[test]
fn hole_1_is_closed_by_the_copier() {
    let rig = Rig::new();
    let mut source = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
    let mut on_device = rig.zeros::<u8>(LEN);
    rig.copier
        .copy_h2d_async(source.as_slice(), &mut on_device)
        .unwrap();
    source.as_mut_slice().unwrap().fill(2);
    assert_eq!(rig.read_back(&on_device), [1; LEN]);
    rig.assert_sound();
}

/// Hole 2: while only default streams are in use, `cudarc` records no events,
/// so the drop of its buffer has nothing to wait for.
#[test]
fn hole_2_dropping_a_pinned_buffer_frees_it_under_a_copy_on_the_default_stream() {
    let sim = cuda_sim::load().unwrap().session();
    // One in which no copier was made.
    let context = CudaContext::new(0).unwrap();
    let source = {
        // SAFETY: written before it is read.
        let mut slice = unsafe { context.alloc_pinned::<u8>(LEN) }.unwrap();
        slice.as_mut_slice().unwrap().fill(1);
        slice
    };
    let stream = context.default_stream();
    let mut on_device = stream.alloc_zeros::<u8>(LEN).unwrap();
    stream.memcpy_htod(&source, &mut on_device).unwrap();
    drop(source);
    sim.drain();
    assert_eq!(sim.counters().dead_reads, 1);
}

#[test]
fn hole_2_is_closed_by_the_buffer() {
    let Rig {
        copier,
        stream,
        context,
        sim,
    } = Rig::new();
    drop((copier, stream));
    let source = PinnedBuffer::from_slice(&context, &[1u8; LEN]).unwrap();
    let stream = context.default_stream();
    let copier = Copier::new(&stream).unwrap();
    let mut on_device = stream.alloc_zeros::<u8>(LEN).unwrap();
    copier
        .copy_h2d_from(&source, 0..LEN, &mut on_device)
        .unwrap();
    drop(source);
    sim.drain();
    assert_eq!(sim.counters().dead_reads, 0);
    assert_eq!(stream.clone_dtoh(&on_device).unwrap(), [1; LEN]);
}

/// Leaves an error in the context, as a failed drop of anything does.
fn store_an_error(rig: &Rig) {
    rig.context.record_err(Err::<(), _>(DriverError(
        CUresult::CUDA_ERROR_INVALID_VALUE,
    )));
}

/// Hole 3: the drop's wait begins with a look at the stored error, and is left
/// out if there is one; the free is not.
#[test]
fn hole_3_a_stored_error_makes_the_drop_skip_its_wait() {
    let rig = Rig::new();
    let source = pinned_host_slice(&rig);
    let mut on_device = rig.zeros::<u8>(LEN);
    rig.stream.memcpy_htod(&source, &mut on_device).unwrap();
    store_an_error(&rig);
    drop(source);
    assert_eq!(rig.counters().dead_reads, 1);
}

#[test]
fn hole_3_is_closed_by_the_buffer() {
    let rig = Rig::new();
    let source = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
    let mut on_device = rig.zeros::<u8>(LEN);
    rig.copier
        .copy_h2d_from(&source, 0..LEN, &mut on_device)
        .unwrap();
    store_an_error(&rig);
    drop(source);
    // The error is still there for whoever asks.
    assert!(rig.context.check_err().is_err());
    assert_eq!(rig.read_back(&on_device), [1; LEN]);
    rig.assert_sound();
}

/// The copy reports the stored error, once, instead of losing it or leaving
/// out a wait because of it.
#[test]
fn a_stored_error_is_returned_by_the_next_copy_which_enqueues_nothing() {
    let rig = Rig::new();
    let source = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
    let mut on_device = rig.zeros::<u8>(LEN);
    let copies = rig.sim.calls("cuMemcpyHtoDAsync_v2");
    store_an_error(&rig);
    let error = rig
        .copier
        .copy_h2d_async(&source, &mut on_device)
        .unwrap_err();
    assert!(matches!(error, CudaError::Stored { .. }), "{error:?}");
    assert_eq!(rig.sim.calls("cuMemcpyHtoDAsync_v2"), copies);
    rig.copier.copy_h2d_async(&source, &mut on_device).unwrap();
    drop(source);
    rig.assert_sound();
}

/// Hole 4, which this crate cannot close: the drop of device memory makes the
/// memory's stream wait for copies on other streams, unless an error is stored
/// at that moment; the free is not left out.
#[test]
fn hole_4_stays_open_a_stored_error_frees_device_memory_under_a_copy() {
    let dead = |store: bool| {
        let rig = Rig::new();
        let source = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
        let other = rig.context.new_stream().unwrap();
        let mut on_device: CudaSlice<u8> = other.alloc_zeros(LEN).unwrap();
        other.synchronize().unwrap();
        rig.copier
            .copy_h2d_from(&source, 0..LEN, &mut on_device)
            .unwrap();
        if store {
            store_an_error(&rig);
        }
        drop(on_device);
        let _ = rig.context.check_err();
        other.synchronize().unwrap();
        drop(source);
        rig.counters().dead_device_accesses
    };
    assert_eq!(dead(false), 0);
    assert_eq!(dead(true), 1);
}
