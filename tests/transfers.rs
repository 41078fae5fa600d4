//! Owned transfers over the simulated driver: both ends live, and nobody reads
//! what the device may still write, until the device is done with them.
#![allow(clippy::unwrap_used)]

mod common;

use std::cell::Cell;
use std::future::{Future, IntoFuture};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;

use common::{Rig, in_child};
use cuda_sim::code;
use cudarc::driver::sys::{self, CUstreamCaptureMode as Mode};
use cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, DeviceSlice, DriverError,
    SyncOnDrop, ValidAsZeroBits,
};
use pinned_hosts::cuda::{
    Copier, CudaError, DeviceDestination, DeviceSource, PinnedBuffer, Transfer, TransferError,
};
use pinned_hosts::live_count;

const LEN: usize = 4096;

const WAITS: [&str; 3] = [
    "cuEventSynchronize",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
];

/// What a use cannot be noted or waited for without.
const NOTES: [&str; 3] = ["cuEventRecord", "cuStreamSynchronize", "cuCtxSynchronize"];

fn buffer_of(rig: &Rig, value: u8) -> PinnedBuffer<u8> {
    PinnedBuffer::from_slice(&rig.context, &[value; LEN]).unwrap()
}

fn device_of(rig: &Rig, value: u8) -> CudaSlice<u8> {
    let on_device = rig.stream.clone_htod(&[value; LEN]).unwrap();
    rig.stream.synchronize().unwrap();
    on_device
}

#[track_caller]
fn assert_sound(rig: &Rig) {
    rig.assert_sound();
    let counters = rig.counters();
    assert_eq!(
        (counters.dead_writes, counters.dead_device_accesses),
        (0, 0),
        "(dead writes, dead device accesses) of {counters:?}"
    );
}

#[test]
fn an_upload_returns_at_once_and_gives_both_ends_back_when_it_is_done() {
    let rig = Rig::new();
    let (buffer, on_device) = (buffer_of(&rig, 1), rig.zeros::<u8>(LEN));
    // Nothing runs, so what waited would never return.
    let hold = rig.sim.hold();
    let upload = rig.copier.upload(buffer, on_device).unwrap();
    let read = rig.sim.counters().late_reads;
    let done = upload.is_done();
    let seen = upload.buffer().map(|buffer| buffer.to_vec());
    drop(hold);
    assert_eq!((read, done), (0, false));
    assert_eq!(seen.unwrap(), [1; LEN], "it can be read meanwhile");
    let (mut buffer, on_device) = upload.wait().unwrap();
    assert_eq!(rig.sim.counters().late_reads, 1);
    buffer.as_mut_slice().unwrap().fill(2);
    assert_eq!(rig.read_back(&on_device), [1; LEN]);
    assert_eq!(rig.copier.stats().owned, 1);
    assert_sound(&rig);
}

#[test]
fn a_download_returns_at_once_and_shows_the_buffer_only_when_it_is_done() {
    let rig = Rig::new();
    let (buffer, on_device) = (buffer_of(&rig, 1), device_of(&rig, 2));
    let hold = rig.sim.hold();
    let download = rig.copier.download(on_device, buffer).unwrap();
    let written = rig.sim.counters().late_writes;
    let done = download.is_done();
    let seen = download.buffer().is_some();
    drop(hold);
    assert_eq!((written, done), (0, false));
    assert!(!seen, "the device may be writing it");
    rig.sim.drain();
    assert!(download.is_done());
    assert_eq!(**download.buffer().unwrap(), [2; LEN]);
    let (buffer, on_device) = download.wait().unwrap();
    assert_eq!(*buffer, [2; LEN]);
    assert_eq!(rig.counters().late_writes, 1);
    assert_eq!(rig.read_back(&on_device), [2; LEN]);
    assert_sound(&rig);
}

#[test]
fn waiting_for_a_download_waits_until_it_is_written() {
    let rig = Rig::new();
    let download = rig
        .copier
        .download(device_of(&rig, 2), buffer_of(&rig, 1))
        .unwrap();
    assert_eq!(rig.sim.counters().late_writes, 0);
    let (buffer, _on_device) = download.wait().unwrap();
    assert_eq!(*buffer, [2; LEN]);
}

#[test]
fn taking_gives_the_transfer_back_until_it_is_done() {
    let rig = Rig::new();
    let hold = rig.sim.hold();
    let download = rig
        .copier
        .download(rig.stream.null::<u8>().unwrap(), buffer_of(&rig, 1))
        .unwrap();
    assert!(download.is_done(), "there is nothing to copy");
    drop(hold);
    download.try_take().unwrap();

    let (buffer, on_device) = (buffer_of(&rig, 1), device_of(&rig, 2));
    let hold = rig.sim.hold();
    let mut taken = rig.copier.download(on_device, buffer).unwrap().try_take();
    for _ in 0..3 {
        taken = match taken {
            Err(TransferError::UnderWay {
                error: CudaError::NotDone,
                transfer,
            }) => transfer.try_take(),
            other => other,
        };
    }
    drop(hold);
    let (error, download) = under_way(taken);
    assert_eq!(error, CudaError::NotDone);
    rig.sim.drain();
    let (buffer, _on_device) = download.try_take().unwrap();
    assert_eq!(*buffer, [2; LEN]);
}

#[test]
fn it_is_done_when_no_stream_uses_the_buffer_any_more() {
    let rig = Rig::new();
    let other = Copier::new(&rig.context.new_stream().unwrap()).unwrap();
    let (buffer, on_device) = (buffer_of(&rig, 1), rig.zeros::<u8>(LEN));
    let mut elsewhere = rig.zeros::<u8>(LEN);
    let hold = rig.sim.hold();
    other
        .copy_h2d_from(&buffer, 0..LEN, &mut elsewhere)
        .unwrap();
    let upload = rig.copier.upload(buffer, on_device).unwrap();
    drop(hold);
    other.stream().synchronize().unwrap();
    let hold = rig.sim.hold();
    let done = upload.is_done();
    drop(hold);
    assert!(!done, "only the other stream is done");
    upload.wait().unwrap();
    assert_sound(&rig);
}

#[test]
fn a_loop_that_asks_comes_to_an_end() {
    let rig = Rig::new();
    let mut upload = rig
        .copier
        .upload(buffer_of(&rig, 1), rig.zeros::<u8>(LEN))
        .unwrap();
    let on_device = loop {
        match upload.try_take() {
            Ok((_, on_device)) => break on_device,
            Err(TransferError::UnderWay { transfer, .. }) => upload = transfer,
            Err(other) => panic!("{other:?}"),
        }
    };
    assert_eq!(rig.read_back(&on_device), [1; LEN]);
}

#[test]
fn dropped_early_it_frees_nothing_that_the_device_uses() {
    let rig = Rig::new();
    let live = rig.counters().live_host_allocations;
    let upload = rig
        .copier
        .upload(buffer_of(&rig, 1), rig.zeros::<u8>(LEN))
        .unwrap();
    drop(upload);
    assert_eq!(rig.sim.counters().late_reads, 1, "it was waited for");
    let download = rig
        .copier
        .download(device_of(&rig, 2), buffer_of(&rig, 1))
        .unwrap();
    drop(download);
    assert_eq!(rig.sim.counters().late_writes, 1, "it was waited for");
    assert_sound(&rig);
    assert_eq!(rig.counters().live_host_allocations, live);
}

/// Device memory of the program's own, which does something when it is asked
/// for its address, and something when it is dropped. The traits are safe.
struct Acting<F: Fn(), G: Fn()> {
    inner: CudaSlice<u8>,
    act: F,
    end: G,
}

impl<F: Fn(), G: Fn()> Drop for Acting<F, G> {
    fn drop(&mut self) {
        (self.end)();
    }
}

impl<F: Fn(), G: Fn()> DeviceSlice<u8> for Acting<F, G> {
    fn len(&self) -> usize {
        self.inner.len()
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.inner.stream()
    }
}

impl<F: Fn(), G: Fn()> DevicePtrMut<u8> for Acting<F, G> {
    fn device_ptr_mut<'a>(
        &'a mut self,
        stream: &'a CudaStream,
    ) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        let got = self.inner.device_ptr_mut(stream);
        (self.act)();
        got
    }
}

impl<F: Fn(), G: Fn()> DevicePtr<u8> for Acting<F, G> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        let got = self.inner.device_ptr(stream);
        (self.act)();
        got
    }
}

// SAFETY: the memory is a `CudaSlice`'s. What `act` does beside that stands for
// another thread's doing.
unsafe impl<F: Fn(), G: Fn()> DeviceSource<u8> for Acting<F, G> {
    fn is_freed_in_order(&self) -> bool {
        DeviceSource::is_freed_in_order(&self.inner)
    }
}
// SAFETY: as above.
unsafe impl<F: Fn(), G: Fn()> DeviceDestination<u8> for Acting<F, G> {
    fn is_freed_in_order(&self) -> bool {
        DeviceDestination::is_freed_in_order(&self.inner)
    }
}

/// Nothing says that device memory of the program's own is freed in the order
/// of the stream, as `cudarc`'s is.
#[test]
fn device_memory_is_dropped_after_the_transfer() {
    let rig = Rig::new();
    let done = Cell::new(0);
    let watched = || Acting {
        inner: device_of(&rig, 2),
        act: || (),
        end: || {
            let counters = rig.sim.counters();
            done.set(counters.late_reads + counters.late_writes);
        },
    };
    drop(rig.copier.upload(buffer_of(&rig, 1), watched()).unwrap());
    assert_eq!(done.get(), 1);
    drop(rig.copier.download(watched(), buffer_of(&rig, 1)).unwrap());
    assert_eq!(done.get(), 2);
}

#[test]
fn leaked_it_leaks_its_ends_and_nothing_else() {
    let rig = Rig::new();
    let hosts = rig.counters().live_host_allocations;
    let devices = rig.counters().live_device_allocations;
    let regions = live_count();
    let upload = rig.copier.upload(buffer_of(&rig, 1), rig.zeros::<u8>(LEN));
    std::mem::forget(upload.unwrap());
    let download = rig.copier.download(device_of(&rig, 2), buffer_of(&rig, 1));
    std::mem::forget(download.unwrap());
    let counters = rig.counters();
    assert_eq!(counters.live_host_allocations, hosts + 2);
    assert_eq!(counters.live_device_allocations, devices + 2);
    assert_eq!(live_count(), regions + 2, "they are still page-locked");
    assert_eq!((counters.late_reads, counters.late_writes), (1, 1));
    assert_sound(&rig);
}

/// The borrow of the device memory ends there, while it is written.
#[test]
fn a_leaked_transfer_to_a_view_is_ordered_with_what_follows() {
    let rig = Rig::new();
    let mut on_device = device_of(&rig, 2);
    let view = on_device.slice_mut(10..LEN);
    let buffer = PinnedBuffer::from_slice(&rig.context, &[1; LEN - 10]).unwrap();
    std::mem::forget(rig.copier.upload(buffer, view).unwrap());
    let other = rig.context.new_stream().unwrap();
    let back = other.clone_dtoh(&on_device).unwrap();
    assert_eq!(back[..10], [2; 10]);
    assert_eq!(back[10..], [1; LEN - 10]);
    drop(on_device);
    assert_sound(&rig);
}

#[test]
fn views_of_device_memory_will_do() {
    let rig = Rig::new();
    let mut on_device = device_of(&rig, 2);
    let buffer = PinnedBuffer::from_slice(&rig.context, &[1; 10]).unwrap();
    let upload = rig
        .copier
        .upload(buffer, on_device.slice_mut(5..15))
        .unwrap();
    let (buffer, _view) = upload.wait().unwrap();
    let download = rig
        .copier
        .download(on_device.slice(10..20), buffer)
        .unwrap();
    let (buffer, _view) = download.wait().unwrap();
    assert_eq!(*buffer, [1, 1, 1, 1, 1, 2, 2, 2, 2, 2]);
}

#[test]
fn a_source_that_is_too_long_is_an_error_with_both_ends() {
    let rig = Rig::new();
    let long = device_of(&rig, 2);
    let copies = copy_calls(&rig);
    let too_short = CudaError::DestinationTooShort {
        source: LEN,
        destination: LEN - 1,
    };
    let refused = rig
        .copier
        .upload(buffer_of(&rig, 1), rig.zeros::<u8>(LEN - 1));
    let (error, buffer, on_device) = over(refused);
    assert_eq!(error, too_short);
    assert_eq!((buffer.len(), on_device.len()), (LEN, LEN - 1));
    let buffer = PinnedBuffer::from_slice(&rig.context, &[1; LEN - 1]).unwrap();
    let refused = rig.copier.download(long, buffer);
    let (error, buffer, on_device) = over(refused);
    assert_eq!(error, too_short);
    assert_eq!((buffer.len(), on_device.len()), (LEN - 1, LEN));
    assert_eq!(*buffer, [1; LEN - 1]);
    assert_eq!(copy_calls(&rig), copies);
}

#[test]
fn a_shorter_source_leaves_the_rest_of_the_other_end_as_it_was() {
    let rig = Rig::new();
    let short = PinnedBuffer::from_slice(&rig.context, &[1; 10]).unwrap();
    let upload = rig.copier.upload(short, device_of(&rig, 2)).unwrap();
    let (_, on_device) = upload.wait().unwrap();
    let back = rig.read_back(&on_device);
    assert_eq!(
        (&back[..10], &back[10..]),
        (&[1; 10][..], &[2; LEN - 10][..])
    );
    let short = rig.stream.clone_htod(&[3u8; 10]).unwrap();
    let download = rig.copier.download(short, buffer_of(&rig, 1)).unwrap();
    let (buffer, _) = download.wait().unwrap();
    assert_eq!(
        (&buffer[..10], &buffer[10..]),
        (&[3; 10][..], &[1; LEN - 10][..])
    );
}

#[track_caller]
fn over<T, D>(
    result: Result<Transfer<T, D>, TransferError<T, D>>,
) -> (CudaError, PinnedBuffer<T>, D) {
    match result {
        Err(TransferError::Over {
            error,
            buffer,
            device,
        }) => (error, buffer, device),
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn under_way<O, T, D>(result: Result<O, TransferError<T, D>>) -> (CudaError, Transfer<T, D>) {
    match result {
        Err(TransferError::UnderWay { error, transfer }) => (error, transfer),
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("it is not under way"),
    }
}

fn copy_calls(rig: &Rig) -> u64 {
    rig.sim.calls("cuMemcpyHtoDAsync_v2") + rig.sim.calls("cuMemcpyDtoHAsync_v2")
}

#[test]
fn nothing_to_copy_is_done_at_once() {
    #[derive(Clone, Copy, Debug)]
    struct Nothing;
    // SAFETY: it has no bytes.
    unsafe impl DeviceRepr for Nothing {}
    // SAFETY: as above.
    unsafe impl ValidAsZeroBits for Nothing {}

    /// Device memory of as many elements as it says.
    struct Sizeless(CudaSlice<u8>);
    impl DeviceSlice<Nothing> for Sizeless {
        fn len(&self) -> usize {
            self.0.len()
        }
        fn stream(&self) -> &Arc<CudaStream> {
            self.0.stream()
        }
    }
    impl DevicePtr<Nothing> for Sizeless {
        fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
            self.0.device_ptr(stream)
        }
    }
    impl DevicePtrMut<Nothing> for Sizeless {
        fn device_ptr_mut<'a>(
            &'a mut self,
            stream: &'a CudaStream,
        ) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
            self.0.device_ptr_mut(stream)
        }
    }
    // SAFETY: its elements have no bytes.
    unsafe impl DeviceSource<Nothing> for Sizeless {}
    // SAFETY: as above.
    unsafe impl DeviceDestination<Nothing> for Sizeless {}

    let rig = Rig::new();
    let sizeless = Sizeless(rig.zeros(8));
    let empty = PinnedBuffer::<u8>::zeroed(&rig.context, 0).unwrap();
    let on_device = rig.zeros::<u8>(4);
    let nothings = PinnedBuffer::<Nothing>::zeroed(&rig.context, 8).unwrap();
    let copies = copy_calls(&rig);
    let hold = rig.sim.hold();
    let upload = rig.copier.upload(empty, on_device).unwrap();
    let (empty, _) = upload.try_take().unwrap();
    let none = rig.stream.null::<u8>().unwrap();
    let download = rig.copier.download(none, empty).unwrap();
    download.wait().unwrap();
    let upload = rig.copier.upload(nothings, sizeless).unwrap();
    let (nothings, sizeless) = upload.wait().unwrap();
    let download = rig.copier.download(sizeless, nothings).unwrap();
    let (nothings, _) = download.try_take().unwrap();
    assert_eq!(nothings.len(), 8);
    assert_eq!(copy_calls(&rig), copies);
    drop(hold);
}

#[test]
fn a_capturing_stream_refuses_transfers() {
    let rig = Rig::new();
    let (buffer, on_device) = (buffer_of(&rig, 1), device_of(&rig, 2));
    rig.stream
        .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_RELAXED)
        .unwrap();
    let (error, buffer, on_device) = over(rig.copier.upload(buffer, on_device));
    assert_eq!(error, CudaError::StreamIsCapturing);
    let (error, buffer, on_device) = over(rig.copier.download(on_device, buffer));
    assert_eq!(error, CudaError::StreamIsCapturing);
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    if let Some(graph) = rig.stream.end_capture(flags).expect("it is not spoilt") {
        graph.launch().unwrap();
    }
    assert_eq!(rig.read_back(&on_device), [2; LEN]);
    assert_eq!(*buffer, [1; LEN]);
    let counters = rig.counters();
    assert_eq!((counters.late_reads, counters.late_writes), (0, 0));
}

/// What happens while the address of the device memory is asked for is seen.
#[test]
fn a_capture_or_an_error_that_comes_up_meanwhile_is_seen() {
    let capturing = |rig: &Rig| {
        let mode = Mode::CU_STREAM_CAPTURE_MODE_RELAXED;
        rig.stream.begin_capture(mode).unwrap();
    };
    let failing = |rig: &Rig| {
        let error = DriverError(sys::CUresult::CUDA_ERROR_UNKNOWN);
        rig.context.record_err(Err::<(), _>(error));
    };
    let acts: [fn(&Rig); 2] = [capturing, failing];
    for (index, act) in acts.into_iter().enumerate() {
        for upload in [true, false] {
            let rig = Rig::new();
            let copies = copy_calls(&rig);
            let device = Acting {
                inner: rig.zeros(LEN),
                act: || act(&rig),
                end: || (),
            };
            let buffer = buffer_of(&rig, 1);
            let (error, buffer, _) = over(match upload {
                true => rig.copier.upload(buffer, device),
                false => rig.copier.download(device, buffer),
            });
            match index {
                0 => assert_eq!(error, CudaError::StreamIsCapturing),
                _ => assert!(matches!(error, CudaError::Stored { .. }), "{error:?}"),
            }
            assert_eq!(copy_calls(&rig), copies);
            let flags =
                sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            let _ = rig.stream.end_capture(flags);
            assert_eq!(*buffer, [1; LEN]);
            let _ = rig.context.check_err();
        }
    }
}

#[test]
fn an_error_that_others_stored_is_returned_and_spoils_no_wait() {
    let rig = Rig::new();
    let store = || {
        let error = DriverError(sys::CUresult::CUDA_ERROR_UNKNOWN);
        rig.context.record_err(Err::<(), _>(error));
    };
    let (buffer, on_device) = (buffer_of(&rig, 1), device_of(&rig, 2));
    store();
    let (error, buffer, on_device) = over(rig.copier.upload(buffer, on_device));
    assert!(matches!(error, CudaError::Stored { .. }), "{error:?}");
    let upload = rig.copier.upload(buffer, on_device).unwrap();
    store();
    let (buffer, on_device) = upload.wait().expect("the stored error is another's");
    assert_eq!(rig.sim.counters().late_reads, 1);
    rig.context.check_err().expect_err("it is still stored");
    let download = rig.copier.download(on_device, buffer).unwrap();
    store();
    drop(download);
    assert_eq!(rig.sim.counters().late_writes, 1);
    let _ = rig.context.check_err();
    assert_sound(&rig);
}

#[test]
fn a_panic_on_the_way_loses_nothing() {
    for upload in [true, false] {
        let rig = Rig::new();
        let live = rig.counters().live_host_allocations;
        let copies = copy_calls(&rig);
        let dropped = Cell::new(false);
        let device = Acting {
            inner: rig.zeros(LEN),
            act: || panic!("on purpose"),
            end: || dropped.set(true),
        };
        let buffer = buffer_of(&rig, 1);
        let unwound = catch_unwind(AssertUnwindSafe(|| match upload {
            true => drop(rig.copier.upload(buffer, device)),
            false => drop(rig.copier.download(device, buffer)),
        }));
        unwound.unwrap_err();
        assert!(dropped.get());
        assert_eq!(copy_calls(&rig), copies);
        assert_eq!(rig.counters().live_host_allocations, live);
    }
}

/// Copies from the buffer on other streams may not have been read yet when it
/// is given away to be written.
#[test]
fn a_download_comes_after_the_copies_from_its_buffer_on_other_streams() {
    let rig = Rig::new();
    let other = Copier::new(&rig.context.new_stream().unwrap()).unwrap();
    let mut uploaded = rig.zeros::<u8>(LEN);
    let (buffer, on_device) = (buffer_of(&rig, 1), device_of(&rig, 2));
    let hold = rig.sim.hold();
    other.copy_h2d_from(&buffer, 0..LEN, &mut uploaded).unwrap();
    let download = rig.copier.download(on_device, buffer).unwrap();
    drop(hold);
    // Only the download's stream is waited for.
    rig.stream.synchronize().unwrap();
    let (buffer, _) = download.wait().unwrap();
    assert_eq!(*buffer, [2; LEN]);
    assert_eq!(other.stream().clone_dtoh(&uploaded).unwrap(), [1; LEN]);
    assert_sound(&rig);
}

/// Their streams have one handle.
#[test]
fn a_download_comes_after_another_threads_copies_on_the_per_thread_stream() {
    let rig = Rig::new();
    let copier = Copier::new(&rig.context.per_thread_stream()).unwrap();
    let (buffer, on_device) = (buffer_of(&rig, 1), device_of(&rig, 2));
    let (moved, taken) = mpsc::channel();
    let ready = Barrier::new(2);
    thread::scope(|scope| {
        let (copier, ready) = (&copier, &ready);
        let mut uploaded = rig.zeros::<u8>(LEN);
        scope.spawn(move || {
            copier
                .copy_h2d_from(&buffer, 0..LEN, &mut uploaded)
                .unwrap();
            moved.send(buffer).unwrap();
            ready.wait();
            assert_eq!(copier.stream().clone_dtoh(&uploaded).unwrap(), [1; LEN]);
        });
        let buffer = taken.recv().unwrap();
        let download = copier.download(on_device, buffer).unwrap();
        copier.stream().synchronize().unwrap();
        let (buffer, _) = download.wait().unwrap();
        assert_eq!(*buffer, [2; LEN]);
        ready.wait();
    });
    assert_sound(&rig);
}

#[test]
fn a_transfer_may_be_waited_for_on_another_thread_than_its_own() {
    let rig = Rig::new();
    let copier = Copier::new(&rig.context.per_thread_stream()).unwrap();
    let (buffer, on_device) = (buffer_of(&rig, 1), device_of(&rig, 2));
    let (begun, taken) = mpsc::channel();
    let done = Barrier::new(2);
    thread::scope(|scope| {
        let (copier, done) = (&copier, &done);
        scope.spawn(move || {
            begun
                .send(copier.download(on_device, buffer).unwrap())
                .unwrap();
            // A thread's end would let its stream finish.
            done.wait();
        });
        let download = taken.recv().unwrap();
        assert_eq!(rig.sim.counters().late_writes, 0);
        let (buffer, on_device) = download.wait().unwrap();
        assert_eq!(*buffer, [2; LEN]);
        drop((buffer, on_device));
        done.wait();
    });
    assert_sound(&rig);
}

#[test]
fn a_thread_that_has_never_used_the_driver_can_ask() {
    let rig = Rig::new();
    let download = rig.copier.download(device_of(&rig, 2), buffer_of(&rig, 1));
    let download = download.unwrap();
    rig.sim.drain();
    thread::scope(|scope| {
        let asked = scope.spawn(|| download.is_done() && download.buffer().is_some());
        assert!(asked.join().unwrap());
    });
}

#[test]
fn threads_transfer_side_by_side() {
    let rig = Rig::new();
    thread::scope(|scope| {
        for value in 1..4 {
            let rig = &rig;
            let (mut buffer, mut on_device) = (buffer_of(rig, value), device_of(rig, 0));
            scope.spawn(move || {
                for round in 0..20 {
                    let upload = rig.copier.upload(buffer, on_device).unwrap();
                    (buffer, on_device) = upload.wait().unwrap();
                    buffer.as_mut_slice().unwrap().fill(0);
                    let download = rig.copier.download(on_device, buffer).unwrap();
                    (buffer, on_device) = download.wait().unwrap();
                    assert_eq!(*buffer, [value; LEN], "round {round}");
                }
            });
        }
    });
    assert_sound(&rig);
}

/// The error may be one of earlier work: the copy was enqueued all the same.
#[test]
fn a_copy_call_that_failed_keeps_both_ends_until_it_is_waited_for() {
    for acts in [true, false] {
        let rig = Rig::new();
        let fail = |call: &str| match acts {
            true => rig.sim.fail_nth_after_acting(call, 1, code::UNKNOWN),
            false => rig.sim.fail_nth(call, 1, code::UNKNOWN),
        };
        let (buffer, on_device) = (buffer_of(&rig, 1), device_of(&rig, 2));
        fail("cuMemcpyHtoDAsync_v2");
        let (error, upload) = under_way(rig.copier.upload(buffer, on_device));
        assert!(error.to_string().starts_with("cuMemcpyHtoDAsync"));
        let (mut buffer, on_device) = upload.wait().unwrap();
        buffer.as_mut_slice().unwrap().fill(3);
        let expected = if acts { 1 } else { 2 };
        assert_eq!(rig.read_back(&on_device), [expected; LEN]);

        fail("cuMemcpyDtoHAsync_v2");
        let hold = rig.sim.hold();
        let (error, download) = under_way(rig.copier.download(on_device, buffer));
        assert!(error.to_string().starts_with("cuMemcpyDtoHAsync"));
        if acts {
            assert!(download.buffer().is_none(), "the device may be writing it");
        }
        drop(hold);
        let (buffer, _) = download.wait().unwrap();
        assert_eq!(*buffer, [if acts { expected } else { 3 }; LEN]);
        assert_sound(&rig);
    }
}

#[test]
fn a_call_that_failed_before_the_copy_gives_both_ends_back() {
    let rig = Rig::new();
    let other = Copier::new(&rig.context.new_stream().unwrap()).unwrap();
    let (buffer, on_device) = (buffer_of(&rig, 1), device_of(&rig, 2));
    let mut elsewhere = rig.zeros::<u8>(LEN);
    let copies = copy_calls(&rig);
    rig.sim.fail_nth("cuEventCreate", 1, code::UNKNOWN);
    let (error, buffer, on_device) = over(rig.copier.upload(buffer, on_device));
    assert!(error.to_string().starts_with("cuEventCreate"), "{error}");
    rig.sim.fail_nth("cuEventCreate", 1, code::UNKNOWN);
    let (error, buffer, on_device) = over(rig.copier.download(on_device, buffer));
    assert!(error.to_string().starts_with("cuEventCreate"), "{error}");
    assert_eq!(copy_calls(&rig), copies);

    let hold = rig.sim.hold();
    other
        .copy_h2d_from(&buffer, 0..LEN, &mut elsewhere)
        .unwrap();
    // `cudarc` has the stream wait for the last write of the source first.
    rig.sim.fail_nth("cuStreamWaitEvent", 2, code::UNKNOWN);
    let refused = rig.copier.download(on_device, buffer);
    drop(hold);
    let (error, buffer, _) = over(refused);
    assert!(
        error.to_string().starts_with("cuStreamWaitEvent"),
        "{error}"
    );
    assert_eq!(copy_calls(&rig), copies + 1);
    assert_eq!(*buffer, [1; LEN]);
    drop(buffer);
    assert_sound(&rig);
}

/// In its default mode, a capture on any thread forbids every thread to ask
/// about events, and is spoilt by one that does.
#[test]
fn another_threads_capture_neither_stops_a_transfer_nor_is_spoilt_by_it() {
    let rig = Rig::new();
    let other = Copier::new(&rig.context.new_stream().unwrap()).unwrap();
    let (buffer, on_device) = (buffer_of(&rig, 1), device_of(&rig, 2));
    let mut elsewhere = rig.zeros::<u8>(LEN);
    let capturing = rig.context.new_stream().unwrap();
    capturing
        .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL)
        .unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            other
                .copy_h2d_from(&buffer, 0..LEN, &mut elsewhere)
                .unwrap();
            let mut download = rig.copier.download(on_device, buffer).unwrap();
            let (buffer, on_device) = loop {
                match download.try_take() {
                    Ok(both) => break both,
                    Err(error) => download = under_way(Err::<(), _>(error)).1,
                }
            };
            assert_eq!(*buffer, [2; LEN]);
            rig.copier
                .upload(buffer, on_device)
                .unwrap()
                .wait()
                .unwrap();
        });
    });
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    capturing.end_capture(flags).expect("the capture is whole");
    assert_sound(&rig);
}

#[test]
fn a_transfer_that_is_lost_never_gives_its_buffer_out() {
    for upload in [true, false] {
        let rig = Rig::new();
        let dropped = Cell::new(false);
        let device = Acting {
            inner: device_of(&rig, 2),
            act: || (),
            end: || dropped.set(true),
        };
        let buffer = buffer_of(&rig, 1);
        let base = buffer.as_ptr();
        for call in NOTES {
            rig.sim.fail_always(call, code::UNKNOWN);
        }
        let begun = match upload {
            true => rig.copier.upload(buffer, device),
            false => rig.copier.download(device, buffer),
        };
        let (error, transfer) = under_way(begun);
        rig.sim.clear_faults();
        assert!(!transfer.is_done());
        assert_eq!(transfer.buffer().is_some(), upload, "it is not written");
        let (again, transfer) = under_way(transfer.try_take());
        assert_eq!(again, error);
        let (again, transfer) = under_way(transfer.wait());
        assert_eq!(again, error);
        let live = rig.sim.counters().live_host_allocations;
        drop(transfer);
        assert_eq!(rig.counters().live_host_allocations, live);
        assert!(!dropped.get(), "the device may be using it");
        assert!(is_registered(base), "it is still page-locked");
        let _ = rig.context.check_err();
        assert_sound(&rig);
    }
}

fn is_registered(base: *const u8) -> bool {
    pinned_hosts::global()
        .regions()
        .any(|entry| entry.region().base() == base)
}

#[test]
fn a_lost_buffer_is_not_taken() {
    let rig = Rig::new();
    let buffer = buffer_of(&rig, 1);
    let mut on_device = rig.zeros::<u8>(LEN);
    for call in NOTES {
        rig.sim.fail_always(call, code::UNKNOWN);
    }
    let lost = rig
        .copier
        .copy_h2d_from(&buffer, 0..LEN, &mut on_device)
        .unwrap_err();
    rig.sim.clear_faults();
    let _ = rig.context.check_err();
    let copies = copy_calls(&rig);
    let (error, buffer, on_device) = over(rig.copier.download(on_device, buffer));
    assert_eq!(error, lost);
    let (error, buffer, _) = over(rig.copier.upload(buffer, on_device));
    assert_eq!(error, lost);
    assert_eq!(copy_calls(&rig), copies);
    assert_eq!(*buffer, [1; LEN]);
    drop(buffer);
    assert_sound(&rig);
}

#[test]
fn a_transfer_that_nobody_can_wait_for_can_be_asked_again() {
    let rig = Rig::new();
    let download = rig.copier.download(device_of(&rig, 2), buffer_of(&rig, 1));
    for call in WAITS {
        rig.sim.fail_always(call, code::UNKNOWN);
    }
    let (error, download) = under_way(download.unwrap().wait());
    assert!(error.to_string().starts_with("cuCtxSynchronize"));
    rig.sim.clear_faults();
    let (buffer, _) = download.wait().unwrap();
    assert_eq!(*buffer, [2; LEN]);
    assert_sound(&rig);
}

#[test]
fn dropped_while_nobody_can_wait_for_it_it_is_leaked() {
    for upload in [true, false] {
        let rig = Rig::new();
        let dropped = Cell::new(false);
        let device = Acting {
            inner: device_of(&rig, 2),
            act: || (),
            end: || dropped.set(true),
        };
        let buffer = buffer_of(&rig, 1);
        let live = rig.counters().live_host_allocations;
        let transfer = match upload {
            true => rig.copier.upload(buffer, device),
            false => rig.copier.download(device, buffer),
        };
        let transfer = transfer.unwrap();
        for call in WAITS {
            rig.sim.fail_always(call, code::UNKNOWN);
        }
        drop(transfer);
        rig.sim.clear_faults();
        assert_eq!(rig.counters().live_host_allocations, live);
        assert!(!dropped.get());
        assert_sound(&rig);
    }
}

#[test]
fn a_wait_that_failed_but_was_made_good_gives_both_ends_with_its_error() {
    let rig = Rig::new();
    let download = rig.copier.download(device_of(&rig, 2), buffer_of(&rig, 1));
    rig.sim.fail_nth("cuEventSynchronize", 1, code::UNKNOWN);
    let result = download.unwrap().wait();
    let Err(TransferError::Over { error, buffer, .. }) = result else {
        panic!("{result:?}");
    };
    assert!(error.to_string().starts_with("cuEventSynchronize"));
    assert_eq!(*buffer, [2; LEN]);
}

#[test]
fn a_driver_that_cannot_say_counts_as_not_done() {
    let rig = Rig::new();
    let download = rig.copier.download(device_of(&rig, 2), buffer_of(&rig, 1));
    let download = download.unwrap();
    rig.sim.drain();
    rig.sim.fail_always("cuEventQuery", code::UNKNOWN);
    assert!(!download.is_done());
    assert!(download.buffer().is_none());
    let (error, download) = under_way(download.try_take());
    assert!(error.to_string().starts_with("cuEventQuery"), "{error}");
    rig.sim.clear_faults();
    assert!(download.is_done());
    download.try_take().unwrap();
}

/// Counts how often it is woken.
#[derive(Default)]
struct Alarm(AtomicUsize);

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_future_is_pending_until_the_transfer_is_done_and_asks_to_be_polled() {
    let rig = Rig::new();
    let alarm = Arc::new(Alarm::default());
    let waker = Waker::from(Arc::clone(&alarm));
    let mut context = Context::from_waker(&waker);
    let (buffer, on_device) = (buffer_of(&rig, 1), device_of(&rig, 2));
    let hold = rig.sim.hold();
    let download = rig.copier.download(on_device, buffer).unwrap();
    let mut future = pin!(download.into_future());
    for polls in 1..4 {
        assert!(future.as_mut().poll(&mut context).is_pending());
        assert_eq!(alarm.0.load(Ordering::Relaxed), polls);
    }
    drop(hold);
    rig.sim.drain();
    let Poll::Ready(Ok((buffer, _on_device))) = future.as_mut().poll(&mut context) else {
        panic!("the transfer is done");
    };
    assert_eq!(*buffer, [2; LEN]);
    let again = catch_unwind(AssertUnwindSafe(|| {
        let _ = future.as_mut().poll(&mut context);
    }));
    again.unwrap_err();
}

#[test]
fn awaited_in_a_loop_it_comes_to_an_end() {
    let rig = Rig::new();
    let (buffer, on_device) = (buffer_of(&rig, 1), rig.zeros::<u8>(LEN));
    let copier = &rig.copier;
    let mut both_ways = pin!(async move {
        let (buffer, on_device) = copier.upload(buffer, on_device)?.await?;
        let (buffer, _) = copier.download(on_device, buffer)?.await?;
        Ok::<_, CudaError>(buffer)
    });
    let mut context = Context::from_waker(Waker::noop());
    let buffer = loop {
        if let Poll::Ready(result) = both_ways.as_mut().poll(&mut context) {
            break result.unwrap();
        }
    };
    assert_eq!(*buffer, [1; LEN]);
    assert_sound(&rig);
}

#[test]
fn a_future_that_cannot_ask_waits_instead() {
    let rig = Rig::new();
    let download = rig.copier.download(device_of(&rig, 2), buffer_of(&rig, 1));
    let mut future = pin!(download.unwrap().into_future());
    rig.sim.fail_always("cuEventQuery", code::UNKNOWN);
    let mut context = Context::from_waker(Waker::noop());
    let Poll::Ready(Ok((buffer, _))) = future.as_mut().poll(&mut context) else {
        panic!("it was waited for");
    };
    assert_eq!(*buffer, [2; LEN]);
}

#[test]
fn a_future_that_is_dropped_early_frees_nothing_that_the_device_uses() {
    let rig = Rig::new();
    let download = rig.copier.download(device_of(&rig, 2), buffer_of(&rig, 1));
    drop(download.unwrap().into_future());
    assert_eq!(rig.sim.counters().late_writes, 1);
    assert_sound(&rig);
}

/// Every driver function on the way. Those for device memory are `cudarc`'s
/// own business.
const CALLS: [&str; 12] = [
    "cuCtxGetCurrent",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuMemFreeHost",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuStreamIsCapturing",
    "cuStreamWaitEvent",
    "cuThreadExchangeStreamCaptureMode",
];

/// The calls without which the memory cannot be given back.
const FREES: [&str; 2] = ["cuMemFreeHost", "cuCtxGetCurrent"];

/// Goes on with whatever a transfer gives back, and gives up if it is lost.
fn parts<T, D>(
    begun: Result<Transfer<T, D>, TransferError<T, D>>,
    errors: &mut Vec<CudaError>,
) -> Option<(PinnedBuffer<T>, D)> {
    let waited = match begun {
        Ok(transfer) => {
            let _ = transfer.is_done();
            transfer.wait()
        }
        Err(TransferError::UnderWay { error, transfer }) => {
            errors.push(error);
            transfer.wait()
        }
        Err(over) => Err(over),
    };
    match waited {
        Ok(both) => Some(both),
        Err(TransferError::Over {
            error,
            buffer,
            device,
        }) => {
            errors.push(error);
            Some((buffer, device))
        }
        Err(lost) => {
            errors.push(lost.error().clone());
            None
        }
    }
}

#[test]
fn whichever_call_fails_nothing_is_torn_and_nothing_is_lost() {
    let mut seen_errors = 0;
    for call in CALLS {
        for nth in 1.. {
            let rig = Rig::new();
            let other = Copier::new(&rig.context.new_stream().unwrap()).unwrap();
            let (buffer, on_device) = (buffer_of(&rig, 1), device_of(&rig, 2));
            let mut uploaded = rig.zeros::<u8>(LEN);
            let before = (live_count(), rig.counters().live_host_allocations);
            let calls = rig.sim.calls(call);
            rig.sim.fail_nth(call, nth, code::UNKNOWN);

            let mut errors = Vec::new();
            let copied = other.copy_h2d_from(&buffer, 0..LEN, &mut uploaded);
            errors.extend(copied.err());
            let mut read = None;
            if let Some((buffer, on_device)) =
                parts(rig.copier.download(on_device, buffer), &mut errors)
            {
                read = errors.is_empty().then(|| buffer.to_vec());
                if let Some((mut buffer, on_device)) =
                    parts(rig.copier.upload(buffer, on_device), &mut errors)
                {
                    let written = buffer.as_mut_slice().map(|buffer| buffer.fill(3));
                    errors.extend(written.err());
                    // Dropped early.
                    match rig.copier.download(on_device, buffer) {
                        Ok(download) => drop(download),
                        Err(error) => errors.push(error.into()),
                    }
                }
            }
            let reached = rig.sim.calls(call) - calls >= nth;
            rig.sim.clear_faults();
            let _ = rig.context.check_err();
            assert_sound(&rig);
            if let Some(read) = read {
                assert_eq!(read, [2; LEN], "{call}, call {nth}");
            }
            let after = (live_count(), rig.counters().live_host_allocations);
            let lost = before.1 - after.1;
            assert_eq!(before.0 - after.0, usize::try_from(lost).unwrap());
            if lost != 1 {
                assert!(FREES.contains(&call), "{call}, call {nth} leaked");
            }
            if !reached {
                break;
            }
            if call.starts_with("cuMemcpy") || call == "cuStreamIsCapturing" {
                assert!(!errors.is_empty(), "{call}, call {nth} is a copy's own");
            }
            seen_errors += errors.len();
        }
    }
    assert!(seen_errors > CALLS.len(), "{seen_errors}");
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
    let upload = rig.copier.upload(buffer_of(&rig, 1), device_of(&rig, 2));
    let download = rig.copier.download(device_of(&rig, 2), buffer_of(&rig, 1));
    let (upload, download) = (upload.unwrap(), download.unwrap());
    rig.sim.drain();
    let before = ending_calls(&rig);
    // SAFETY: the child only drops the transfers, reads counters and leaves.
    match unsafe { libc::fork() } {
        0 => {
            drop((upload, download));
            let calls = ending_calls(&rig) - before;
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
    drop((upload, download));
    assert!(ending_calls(&rig) > before);
}

fn ending_calls(rig: &Rig) -> u64 {
    [
        "cuMemFreeHost",
        "cuMemFreeAsync",
        "cuEventDestroy_v2",
        "cuEventSynchronize",
    ]
    .iter()
    .map(|call| rig.sim.calls(call))
    .sum()
}

#[test]
fn errors_say_what_went_wrong_and_show_what_they_hold() {
    let rig = Rig::new();
    let refused = rig.copier.upload(buffer_of(&rig, 1), rig.zeros::<u8>(1));
    let error = refused.unwrap_err();
    assert!(
        error.to_string().contains("allocate a larger one"),
        "{error}"
    );
    assert!(format!("{error:?}").contains("PinnedBuffer"), "{error:?}");
    let (buffer, on_device) = (buffer_of(&rig, 1), rig.zeros::<u8>(LEN));
    let hold = rig.sim.hold();
    let error = rig
        .copier
        .upload(buffer, on_device)
        .unwrap()
        .try_take()
        .unwrap_err();
    assert!(error.to_string().contains("not done yet"), "{error}");
    assert!(format!("{error:?}").contains("Upload"), "{error:?}");
    drop(hold);
    let error = CudaError::from(error);
    assert_eq!(error, CudaError::NotDone);
    assert_eq!(rig.sim.counters().late_reads, 1, "it was waited for");
}

#[test]
fn transfers_may_move_between_threads() {
    fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<Transfer<u8, CudaSlice<u8>>>();
    is_send_and_sync::<TransferError<u8, CudaSlice<u8>>>();
}
