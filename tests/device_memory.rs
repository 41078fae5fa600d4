//! The end of a copy that is on the device: no copy uses device memory that was
//! freed, or that belongs to another context. Over the simulated driver.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::sync::{Arc, mpsc};
use std::thread;

use common::Rig;
use cuda_sim::Session;
use cudarc::driver::sys::{self, CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{
    CudaContext, CudaEvent, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceSlice,
    SyncOnDrop, result,
};
use pinned_hosts::cuda::{
    self, CheckedCopies, Copier, CudaError, DeviceDestination, PinnedBuffer, RawDeviceMemory,
    TransferError,
};

const LEN: usize = 4096;

fn session() -> Session {
    cuda_sim::load().unwrap().session()
}

type Form = fn(&Copier, &PinnedBuffer<u8>, &mut CudaSlice<u8>);

/// Each form of copy to the device that returns before the device is done.
const FORMS: [Form; 5] = [
    |copier, _, dst| copier.copy_h2d_async(&[1; LEN], dst).unwrap(),
    |copier, source, dst| copier.copy_h2d_async(source, dst).unwrap(),
    |copier, source, dst| copier.copy_h2d_from(source, 0..LEN, dst).unwrap(),
    |copier, _, dst| copier.stream().memcpy_htod_checked(&[1; LEN], dst).unwrap(),
    |copier, _, dst| {
        let source = PinnedBuffer::from_slice(copier.stream().context(), &[1; LEN]).unwrap();
        // Leaked, with the buffer: the transfer waits for nothing.
        std::mem::forget(copier.upload(source, dst.slice_mut(..)).unwrap());
    },
];

/// Streams of another library.
fn borrowed_streams(context: &Arc<CudaContext>) -> [Arc<CudaStream>; 2] {
    context.bind_to_thread().unwrap();
    [(); 2].map(|()| {
        let mut raw = std::ptr::null_mut();
        // SAFETY: a place for the handle; 1 is NON_BLOCKING.
        let made = unsafe { sys::cuStreamCreate(&raw mut raw, 1) };
        assert_eq!(made, sys::CUresult::CUDA_SUCCESS);
        // SAFETY: the stream is never destroyed.
        unsafe { context.wrap_borrowed_stream(raw) }
    })
}

#[test]
fn memory_that_another_threads_default_stream_frees_is_free_once_the_copy_is_over() {
    let sim = session();
    // No stream is created in it.
    let context = CudaContext::new(0).unwrap();
    let stream = context.per_thread_stream();
    let copier = Copier::new(&stream).unwrap();
    let source = PinnedBuffer::from_slice(&context, &[1u8; LEN]).unwrap();
    for copy in FORMS {
        let (send, receive) = mpsc::channel();
        let (done, over) = mpsc::channel::<()>();
        thread::scope(|scope| {
            let (stream, copier, source) = (&stream, &copier, &source);
            scope.spawn(move || {
                let mut on_device = stream.alloc_zeros::<u8>(LEN).unwrap();
                stream.synchronize().unwrap();
                copy(copier, source, &mut on_device);
                send.send(on_device).unwrap();
                let _ = over.recv();
            });
            let on_device = receive.recv().unwrap();
            context.bind_to_thread().unwrap();
            drop(on_device);
            stream.synchronize().unwrap();
            drop(done);
        });
        sim.drain();
        assert_eq!(sim.counters().dead_device_accesses, 0);
    }
}

/// `cudarc` alone, in a context of its own: the twin of the test above.
#[test]
fn cudarc_alone_frees_it_under_the_copy() {
    let sim = session();
    let context = CudaContext::new(0).unwrap();
    let [freeing, copying] = borrowed_streams(&context);
    let mut on_device = freeing.alloc_zeros::<u8>(LEN).unwrap();
    freeing.synchronize().unwrap();
    copying.memcpy_htod(&[3u8; LEN], &mut on_device).unwrap();
    drop(on_device);
    freeing.synchronize().unwrap();
    sim.drain();
    assert_eq!(sim.counters().dead_device_accesses, 1);
}

#[test]
fn memory_of_another_librarys_stream_is_free_once_the_copy_is_over() {
    let sim = session();
    let context = CudaContext::new(0).unwrap();
    let [freeing, copying] = borrowed_streams(&context);
    let copier = Copier::new(&copying).unwrap();
    let source = PinnedBuffer::from_slice(&context, &[1u8; LEN]).unwrap();
    for copy in FORMS {
        let mut on_device = freeing.alloc_zeros::<u8>(LEN).unwrap();
        freeing.synchronize().unwrap();
        copy(&copier, &source, &mut on_device);
        drop(on_device);
        freeing.synchronize().unwrap();
        sim.drain();
        assert_eq!(sim.counters().dead_device_accesses, 0);
    }
}

/// The context no longer counts a created stream then.
#[test]
fn dropping_the_last_stream_ends_nothing() {
    for copy in FORMS {
        let sim = session();
        let context = CudaContext::new(0).unwrap();
        let default = context.default_stream();
        let stream = context.new_stream().unwrap();
        let source = PinnedBuffer::from_slice(&context, &[1u8; LEN]).unwrap();
        let mut on_device = default.alloc_zeros::<u8>(LEN).unwrap();
        default.synchronize().unwrap();
        let copier = Copier::new(&stream).unwrap();
        copy(&copier, &source, &mut on_device);
        // What the stream was asked to do is done, but for the copies.
        drop((copier, stream));
        drop(on_device);
        default.synchronize().unwrap();
        sim.drain();
        assert_eq!(sim.counters().dead_device_accesses, 0);
    }
}

/// The twin of the test above, with `cudarc` alone.
#[test]
fn with_cudarc_alone_it_does() {
    let sim = session();
    let context = CudaContext::new(0).unwrap();
    let default = context.default_stream();
    let stream = context.new_stream().unwrap();
    let mut on_device = default.alloc_zeros::<u8>(LEN).unwrap();
    default.synchronize().unwrap();
    stream.memcpy_htod(&[1u8; LEN], &mut on_device).unwrap();
    drop(stream);
    drop(on_device);
    default.synchronize().unwrap();
    sim.drain();
    assert_eq!(sim.counters().dead_device_accesses, 1);
}

/// To keep a context tracking keeps neither the context nor a stream.
#[test]
fn a_context_with_a_copier_ends_with_its_last_user() {
    let sim = session();
    let streams = sim.counters().live_streams;
    let context = CudaContext::new(0).unwrap();
    let ended = Arc::downgrade(&context);
    let stream = context.default_stream();
    drop(Copier::new(&stream).unwrap());
    assert!(context.is_managing_stream_synchronization());
    assert_eq!(sim.counters().live_streams, streams);
    drop((stream, context));
    assert!(ended.upgrade().is_none());
}

#[test]
fn an_error_that_is_stored_when_a_copier_is_made_stays() {
    let _sim = session();
    let context = CudaContext::new(0).unwrap();
    let stored = cudarc::driver::DriverError(sys::CUresult::CUDA_ERROR_UNKNOWN);
    context.record_err(Err::<(), _>(stored));
    Copier::new(&context.default_stream()).unwrap();
    assert_eq!(context.check_err(), Err(stored));
}

#[test]
fn a_device_has_one_context() {
    let _sim = session();
    let first = cuda::context(0).unwrap();
    let same = cuda::context(0).unwrap();
    assert!(Arc::ptr_eq(&first, &same));
    let other = cuda::context(1).unwrap();
    assert_eq!(other.ordinal(), 1);
    // It is current, as after `CudaContext::new`.
    cuda::context(0).unwrap();
    let current = result::ctx::get_current().unwrap();
    assert_eq!(current, Some(first.cu_ctx()));
}

/// Two objects of `cudarc`'s for one context: each counts streams by itself.
#[test]
fn memory_of_a_second_object_for_the_context_is_as_good() {
    let sim = session();
    let first = CudaContext::new(0).unwrap();
    let second = CudaContext::new(0).unwrap();
    let freeing = first.default_stream();
    let copier = Copier::new(&second.new_stream().unwrap()).unwrap();
    let source = PinnedBuffer::from_slice(&second, &[1u8; LEN]).unwrap();
    for copy in FORMS {
        let mut on_device = freeing.alloc_zeros::<u8>(LEN).unwrap();
        freeing.synchronize().unwrap();
        copy(&copier, &source, &mut on_device);
        drop(on_device);
        freeing.synchronize().unwrap();
        sim.drain();
        assert_eq!(sim.counters().dead_device_accesses, 0);
    }
}

#[test]
fn memory_of_another_context_is_refused_before_anything_is_enqueued() {
    type Open = fn() -> Arc<CudaContext>;
    let others: [(usize, Open); 2] = [
        (1, || cuda::context(1).unwrap()),
        (0, || CudaContext::new_non_primary(0, 0).unwrap()),
    ];
    for (memory, open) in others {
        let rig = Rig::new();
        let other = open();
        let stream = other.new_stream().unwrap();
        let mut on_device = stream.alloc_zeros::<u8>(LEN).unwrap();
        stream.synchronize().unwrap();
        let source = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
        let shared = Arc::new(PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap());
        let copier = &rig.copier;
        let mut host = [0u8; LEN];

        let copies = ["cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"];
        let before = copies.map(|call| rig.sim.calls(call));
        let refused = CudaError::OtherContext { copier: 0, memory };
        let results = [
            copier.copy_h2d_async(&[1u8; LEN], &mut on_device),
            copier.copy_h2d_async(&source, &mut on_device),
            copier.copy_h2d_from(&source, 0..LEN, &mut on_device),
            copier.copy_d2h_async(&on_device, &mut host),
            copier.scope(|scope| scope.copy_h2d(&source, &mut on_device)),
            copier.scope(|scope| scope.copy_d2h(&on_device, &mut host)),
            rig.stream.memcpy_htod_checked(&[1u8; LEN], &mut on_device),
            rig.stream.clone_dtoh_checked(&on_device).map(drop),
        ];
        for result in results {
            assert_eq!(result, Err(refused.clone()));
        }
        rig.stream
            .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .unwrap();
        let captured = copier.capture_h2d_from(&shared, 0..LEN, &mut on_device);
        rig.stream.end_capture(CUgraphInstantiate_flags(0)).unwrap();
        assert_eq!(captured, Err(refused.clone()));
        let upload = copier.upload(source, on_device);
        let Err(TransferError::Over {
            error,
            buffer,
            device,
        }) = upload
        else {
            panic!("{upload:?}");
        };
        assert_eq!(error, refused);
        let download = copier.download(device, buffer);
        assert_eq!(download.unwrap_err().error(), &refused);

        assert_eq!(copies.map(|call| rig.sim.calls(call)), before);
        // And the next copy is not blamed.
        let mut ours = rig.zeros::<u8>(LEN);
        copier.copy_h2d_async(&[1u8; LEN], &mut ours).unwrap();
        assert_eq!(rig.counters().dead_device_accesses, 0);
        assert_eq!(rig.context.check_err(), Ok(()));
        assert!(refused.to_string().contains("memory.stream()"));
    }
}

/// Managed memory, which `cudarc` waits for by one event: that it was recorded is
/// what the host's access relies on.
struct Managed {
    slice: CudaSlice<u8>,
    event: CudaEvent,
}

impl DeviceSlice<u8> for Managed {
    fn len(&self) -> usize {
        self.slice.len()
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.slice.stream()
    }
}

impl DevicePtrMut<u8> for Managed {
    fn device_ptr_mut<'a>(
        &'a mut self,
        stream: &'a CudaStream,
    ) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        stream.context().record_err(stream.wait(&self.event));
        let address = self.slice.device_ptr(stream).0;
        (address, SyncOnDrop::Record(Some((&self.event, stream))))
    }
}

// SAFETY: the memory is a `CudaSlice`'s, and the event is waited for before the
// slice is dropped.
unsafe impl DeviceDestination<u8> for Managed {}

#[test]
fn an_event_that_the_memory_gives_is_recorded_whatever_cudarc_tracks() {
    let sim = session();
    let context = CudaContext::new(0).unwrap();
    let stream = context.default_stream();
    let copier = Copier::new(&stream).unwrap();
    let source = PinnedBuffer::from_slice(&context, &[1u8; LEN]).unwrap();
    // SAFETY: all work is on one stream.
    unsafe { context.disable_event_tracking() };
    let slice = stream.alloc_zeros::<u8>(LEN).unwrap();
    let event = context.new_event(Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC));
    let mut managed = Managed {
        slice,
        event: event.unwrap(),
    };
    stream.synchronize().unwrap();
    let before = sim.counters().h2d_transfers;
    copier.copy_h2d_from(&source, 0..LEN, &mut managed).unwrap();
    managed.event.synchronize().unwrap();
    assert_eq!(sim.counters().h2d_transfers, before + 1);
}

/// If that record fails, the owner would free the memory under the copy.
#[test]
fn a_use_that_cannot_be_noted_is_waited_for() {
    let rig = Rig::new();
    let other = rig.context.new_stream().unwrap();
    let mut on_device = other.alloc_zeros::<u8>(LEN).unwrap();
    other.synchronize().unwrap();
    rig.sim
        .fail_nth("cuEventRecord", 1, cuda_sim::code::UNKNOWN);
    let copied = rig.copier.copy_h2d_async(&[1u8; LEN], &mut on_device);
    assert!(matches!(
        copied,
        Err(CudaError::Driver {
            call: "cuEventRecord",
            ..
        })
    ));
    rig.sim.clear_faults();
    drop(on_device);
    other.synchronize().unwrap();
    assert_eq!(rig.counters().dead_device_accesses, 0);
}

/// The stream has not waited for the copy that the event marks: to mark the copy
/// that was refused would make the free overtake the one under way.
#[test]
fn a_copy_that_is_refused_leaves_the_notes_of_others() {
    let rig = Rig::new();
    let [freeing, other] = [(); 2].map(|()| rig.context.new_stream().unwrap());
    let mut on_device = freeing.alloc_zeros::<u8>(LEN).unwrap();
    freeing.synchronize().unwrap();
    let source = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
    let copier = Copier::new(&other).unwrap();
    copier
        .copy_h2d_from(&source, 0..LEN, &mut on_device)
        .unwrap();
    // The wait for that copy fails, and `cudarc` stores the error.
    rig.sim
        .fail_always("cuStreamWaitEvent", cuda_sim::code::UNKNOWN);
    let refused = rig.copier.copy_h2d_async(&[2u8; LEN], &mut on_device);
    assert!(matches!(refused, Err(CudaError::Stored { .. })));
    rig.sim.clear_faults();
    drop(on_device);
    freeing.synchronize().unwrap();
    assert_eq!(rig.counters().dead_device_accesses, 0);
}

/// Such as a global variable of a module, or memory from a time when events were
/// not tracked.
#[test]
fn memory_without_an_event_is_waited_for() {
    let rig = Rig::new();
    let freeing = rig.context.new_stream().unwrap();
    let source = PinnedBuffer::from_slice(&rig.context, &[1u8; LEN]).unwrap();
    for copy in FORMS {
        // SAFETY: the memory that is allocated meanwhile is freed once it is not
        // used: that is what is tested.
        unsafe { rig.context.disable_event_tracking() };
        let mut on_device = freeing.alloc_zeros::<u8>(LEN).unwrap();
        // SAFETY: as it was.
        unsafe { rig.context.enable_event_tracking() };
        freeing.synchronize().unwrap();
        copy(&rig.copier, &source, &mut on_device);
        drop(on_device);
        freeing.synchronize().unwrap();
        assert_eq!(rig.counters().dead_device_accesses, 0);
    }
}

/// Then the drop waits for the stream, unless an error is stored: so the error of
/// a note that failed must not be.
#[test]
fn a_use_that_cannot_be_noted_is_waited_for_where_no_stream_frees() {
    const MEMORY_POOLS_SUPPORTED: i32 = 115;
    let sim = session();
    sim.set_attribute(MEMORY_POOLS_SUPPORTED, 0);
    let context = CudaContext::new(0).unwrap();
    assert!(!context.has_async_alloc());
    let stream = context.new_stream().unwrap();
    let copier = Copier::new(&stream).unwrap();
    let source = PinnedBuffer::from_slice(&context, &[1u8; LEN]).unwrap();
    let mut on_device = stream.alloc_zeros::<u8>(LEN).unwrap();
    stream.synchronize().unwrap();
    sim.fail_nth("cuEventRecord", 2, cuda_sim::code::UNKNOWN);
    let copied = copier.copy_h2d_from(&source, 0..LEN, &mut on_device);
    assert!(copied.is_err());
    sim.clear_faults();
    drop(on_device);
    sim.drain();
    assert_eq!(sim.counters().dead_device_accesses, 0);
}

/// Nobody else waits while the first copier of a context waits for the device.
#[test]
fn other_devices_can_be_opened_meanwhile() {
    let sim = session();
    let context = CudaContext::new(0).unwrap();
    let stream = context.default_stream();
    let mut on_device = stream.alloc_zeros::<u8>(LEN).unwrap();
    let hold = sim.hold();
    stream.memcpy_htod(&[1u8; LEN], &mut on_device).unwrap();
    let waits = sim.calls("cuCtxSynchronize");
    thread::scope(|threads| {
        let making = threads.spawn(|| drop(Copier::new(&stream).unwrap()));
        while !making.is_finished() && sim.calls("cuCtxSynchronize") == waits {
            thread::yield_now();
        }
        let (opened, told) = mpsc::channel();
        threads.spawn(move || opened.send(cuda::context(1).is_ok()));
        let opened = told.recv_timeout(std::time::Duration::from_secs(20));
        drop(hold);
        assert_eq!(opened, Ok(true));
        making.join().unwrap();
    });
}

#[test]
fn memory_that_is_not_cudarcs_is_copied_to_and_from() {
    let rig = Rig::new();
    let handle = rig.stream.cu_stream();
    let source = PinnedBuffer::from_slice(&rig.context, &[7u16; 8]).unwrap();
    let mut back = [0u16; 8];
    rig.context.bind_to_thread().unwrap();
    // SAFETY: 16 bytes, used and freed in the order of one stream.
    unsafe {
        let address = result::malloc_async(handle, 16).unwrap();
        let mut memory = RawDeviceMemory::<u16>::new(address, 8, &rig.stream);
        rig.copier
            .copy_h2d_from(&source, 0..8, &mut memory)
            .unwrap();
        rig.copier.copy_d2h_async(&memory, &mut back).unwrap();
        result::free_async(address, handle).unwrap();
    }
    assert_eq!(back, [7; 8]);
    rig.assert_sound();
}
