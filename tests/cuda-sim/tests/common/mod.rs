//! What the tests share: a device with one context, and raw calls.
#![allow(dead_code, reason = "no test file uses all of it")]

pub(crate) mod alone;

use cuda_sim::Session;
use cudarc::driver::sys::{self, CUdeviceptr, CUevent, CUresult, CUstream};
use cudarc::driver::{CudaContext, CudaStream, DriverError};
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::Arc;

/// A session, and a context that is current on this thread.
///
/// Fields are dropped in order: the context first, so that no test leaves one
/// behind for the next.
pub(crate) struct Bench {
    pub(crate) context: Arc<CudaContext>,
    pub(crate) session: Session,
}

pub(crate) fn bench() -> Bench {
    let session = cuda_sim::load().unwrap().session();
    let context = CudaContext::new(0).unwrap();
    Bench { context, session }
}

impl Bench {
    /// A non-blocking stream.
    pub(crate) fn stream(&self) -> Arc<CudaStream> {
        self.context.new_stream().unwrap()
    }
}

/// The number of a result.
pub(crate) fn code(result: CUresult) -> i32 {
    result as i32
}

/// The number of a failure.
pub(crate) fn code_of<T: std::fmt::Debug>(result: Result<T, DriverError>) -> i32 {
    result.unwrap_err().0 as i32
}

/// A value that a call hands out.
pub(crate) fn out<T>(call: impl FnOnce(*mut T) -> CUresult) -> Result<T, i32> {
    let mut value = MaybeUninit::zeroed();
    match call(value.as_mut_ptr()) {
        // SAFETY: zeroed, which all types used here allow, or set.
        CUresult::CUDA_SUCCESS => Ok(unsafe { value.assume_init() }),
        failed => Err(code(failed)),
    }
}

pub(crate) fn host_alloc(bytes: usize) -> *mut u8 {
    // SAFETY: an out pointer.
    out(|pointer| unsafe { sys::cuMemHostAlloc(pointer, bytes, 0) })
        .unwrap()
        .cast()
}

pub(crate) fn host_free(pointer: *mut u8) -> i32 {
    // SAFETY: the simulated driver looks any pointer up.
    code(unsafe { sys::cuMemFreeHost(pointer.cast()) })
}

pub(crate) fn register(memory: &[u8]) -> i32 {
    register_at(memory.as_ptr(), memory.len(), 0)
}

pub(crate) fn register_at(pointer: *const u8, bytes: usize, flags: u32) -> i32 {
    // SAFETY: the simulated driver touches registered memory by DMA only.
    code(unsafe { sys::cuMemHostRegister_v2(pointer.cast_mut().cast(), bytes, flags) })
}

pub(crate) fn unregister(pointer: *const u8) -> i32 {
    // SAFETY: the simulated driver looks any pointer up.
    code(unsafe { sys::cuMemHostUnregister(pointer.cast_mut().cast()) })
}

pub(crate) fn device_alloc(bytes: usize) -> CUdeviceptr {
    // SAFETY: an out pointer.
    out(|pointer| unsafe { sys::cuMemAlloc_v2(pointer, bytes) }).unwrap()
}

pub(crate) fn htod(target: CUdeviceptr, source: *const u8, bytes: usize, stream: CUstream) -> i32 {
    // SAFETY: the tests pass sources that can be read now.
    code(unsafe { sys::cuMemcpyHtoDAsync_v2(target, source.cast(), bytes, stream) })
}

pub(crate) fn htod_sync(target: CUdeviceptr, source: *const u8, bytes: usize) -> i32 {
    // SAFETY: as above.
    code(unsafe { sys::cuMemcpyHtoD_v2(target, source.cast(), bytes) })
}

pub(crate) fn dtoh(target: *mut u8, source: CUdeviceptr, bytes: usize, stream: CUstream) -> i32 {
    // SAFETY: the tests pass targets that may be written until they say so.
    code(unsafe { sys::cuMemcpyDtoHAsync_v2(target.cast(), source, bytes, stream) })
}

/// What device memory holds, once the default stream gets to look.
pub(crate) fn device_bytes(source: CUdeviceptr, bytes: usize) -> Vec<u8> {
    let mut target = vec![0; bytes];
    // SAFETY: the call waits, and the target is as long as it says.
    let result = unsafe { sys::cuMemcpyDtoH_v2(target.as_mut_ptr().cast(), source, bytes) };
    assert_eq!(code(result), 0);
    target
}

pub(crate) fn new_event() -> CUevent {
    // SAFETY: an out pointer.
    out(|event| unsafe { sys::cuEventCreate(event, 2) }).unwrap()
}

pub(crate) fn record(event: CUevent, stream: CUstream) -> i32 {
    // SAFETY: the simulated driver looks any handle up.
    code(unsafe { sys::cuEventRecord(event, stream) })
}

pub(crate) fn event_query(event: CUevent) -> i32 {
    // SAFETY: as above.
    code(unsafe { sys::cuEventQuery(event) })
}

pub(crate) fn event_wait(event: CUevent) -> i32 {
    // SAFETY: as above.
    code(unsafe { sys::cuEventSynchronize(event) })
}

pub(crate) fn stream_wait(stream: CUstream) -> i32 {
    // SAFETY: as above.
    code(unsafe { sys::cuStreamSynchronize(stream) })
}

pub(crate) fn stream_query(stream: CUstream) -> i32 {
    // SAFETY: as above.
    code(unsafe { sys::cuStreamQuery(stream) })
}

/// Writes through a pointer that a device may be reading: what the callers of
/// an unguarded copy do.
pub(crate) fn overwrite(memory: *mut u8, bytes: usize, value: u8) {
    // SAFETY: the tests own the memory; devices read it through the kernel.
    unsafe { memory.write_bytes(value, bytes) }
}

/// What host memory holds.
pub(crate) fn host_bytes(memory: *const u8, bytes: usize) -> Vec<u8> {
    // SAFETY: the tests own the memory and have waited for writers.
    unsafe { std::slice::from_raw_parts(memory, bytes) }.to_vec()
}

pub(crate) fn null() -> *mut c_void {
    std::ptr::null_mut()
}
