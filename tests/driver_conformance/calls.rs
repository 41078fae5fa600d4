//! The driver's calls, as numbers in and numbers out.

use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;
use std::ptr;

use cudarc::driver::sys::{
    self, CUcontext, CUdeviceptr, CUevent, CUgraph, CUgraphExec, CUpointer_attribute, CUresult,
    CUstream, CUstreamCaptureMode, CUstreamCaptureStatus,
};

pub(crate) fn code(result: CUresult) -> i32 {
    result as i32
}

/// What a call hands out, or its code.
pub(crate) fn out<T>(call: impl FnOnce(*mut T) -> CUresult) -> Result<T, i32> {
    let mut value = MaybeUninit::zeroed();
    match call(value.as_mut_ptr()) {
        // SAFETY: zeroed, which is valid for all types used here (numbers,
        // pointers, and enums that have a zero), or written by the call.
        CUresult::CUDA_SUCCESS => Ok(unsafe { value.assume_init() }),
        failed => Err(code(failed)),
    }
}

/// Whether the driver has a function. `cudarc` panics in the call if not.
pub(crate) fn has(function: &CStr) -> bool {
    // SAFETY: the symbol is only looked for.
    unsafe { sys::culib().get::<*const ()>(function.to_bytes_with_nul()) }.is_ok()
}

/// Copies at most as many bytes as both sides have: callers see to it, and
/// keep the source until the device has read it.
pub(crate) fn htod(target: CUdeviceptr, source: *const u8, bytes: usize, stream: CUstream) -> i32 {
    // SAFETY: as above.
    code(unsafe { sys::cuMemcpyHtoDAsync_v2(target, source.cast(), bytes, stream) })
}

pub(crate) fn dtoh(target: *mut u8, source: CUdeviceptr, bytes: usize, stream: CUstream) -> i32 {
    // SAFETY: as for `htod`, with the target in place of the source.
    code(unsafe { sys::cuMemcpyDtoHAsync_v2(target.cast(), source, bytes, stream) })
}

pub(crate) fn dtod(
    target: CUdeviceptr,
    source: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> i32 {
    // SAFETY: the callers' device memory is that long.
    code(unsafe { sys::cuMemcpyDtoDAsync_v2(target, source, bytes, stream) })
}

pub(crate) fn host_alloc(bytes: usize, flags: u32) -> Result<*mut u8, i32> {
    // SAFETY: a place for the address.
    out(|it| unsafe { sys::cuMemHostAlloc(it, bytes, flags) }).map(|it: *mut c_void| it.cast())
}

pub(crate) fn host_free(base: *mut u8) -> i32 {
    // SAFETY: an address that is no allocation is refused; whoever has one
    // frees it once, and does not use it after.
    code(unsafe { sys::cuMemFreeHost(base.cast()) })
}

pub(crate) fn host_register(base: *const u8, bytes: usize, flags: u32) -> i32 {
    // SAFETY: the callers keep the memory until it was unregistered.
    code(unsafe { sys::cuMemHostRegister_v2(base.cast_mut().cast(), bytes, flags) })
}

pub(crate) fn host_unregister(base: *const u8) -> i32 {
    // SAFETY: an address that is not registered is refused.
    code(unsafe { sys::cuMemHostUnregister(base.cast_mut().cast()) })
}

pub(crate) fn host_flags(base: *const u8) -> Result<u32, i32> {
    // SAFETY: a place for the flags.
    out(|it| unsafe { sys::cuMemHostGetFlags(it, base.cast_mut().cast()) })
}

pub(crate) fn event_record(event: CUevent, stream: CUstream) -> i32 {
    // SAFETY: both are kept by their owners.
    code(unsafe { sys::cuEventRecord(event, stream) })
}

pub(crate) fn event_query(event: CUevent) -> i32 {
    // SAFETY: kept by its owner.
    code(unsafe { sys::cuEventQuery(event) })
}

pub(crate) fn event_synchronize(event: CUevent) -> i32 {
    // SAFETY: kept by its owner.
    code(unsafe { sys::cuEventSynchronize(event) })
}

pub(crate) fn stream_synchronize(stream: CUstream) -> i32 {
    // SAFETY: kept by its owner.
    code(unsafe { sys::cuStreamSynchronize(stream) })
}

pub(crate) fn stream_query(stream: CUstream) -> i32 {
    // SAFETY: kept by its owner.
    code(unsafe { sys::cuStreamQuery(stream) })
}

pub(crate) fn stream_wait_event(stream: CUstream, event: CUevent) -> i32 {
    // SAFETY: both are kept by their owners.
    code(unsafe { sys::cuStreamWaitEvent(stream, event, 0) })
}

pub(crate) fn context_synchronize() -> i32 {
    // SAFETY: no arguments.
    code(unsafe { sys::cuCtxSynchronize() })
}

pub(crate) fn set_current(context: CUcontext) -> i32 {
    // SAFETY: null, or kept by its owner.
    code(unsafe { sys::cuCtxSetCurrent(context) })
}

pub(crate) fn begin_capture(stream: CUstream, mode: CUstreamCaptureMode) -> i32 {
    // SAFETY: kept by its owner.
    code(unsafe { sys::cuStreamBeginCapture_v2(stream, mode) })
}

pub(crate) fn end_capture(stream: CUstream) -> Result<CUgraph, i32> {
    // SAFETY: a place for the graph.
    out(|it| unsafe { sys::cuStreamEndCapture(stream, it) })
}

pub(crate) fn capture_status(stream: CUstream) -> Result<CUstreamCaptureStatus, i32> {
    // SAFETY: a place for the status, whose zero is "none".
    out(|it| unsafe { sys::cuStreamIsCapturing(stream, it) })
}

/// Sets this thread's capture mode; returns the one before.
pub(crate) fn exchange_mode(mode: CUstreamCaptureMode) -> CUstreamCaptureMode {
    let mut place = mode;
    // SAFETY: a place for the mode.
    let result = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut place) };
    assert_eq!(code(result), 0, "the thread's capture mode is exchanged");
    place
}

pub(crate) fn instantiate(graph: CUgraph) -> CUgraphExec {
    // SAFETY: a place for the executable graph.
    out(|it| unsafe { sys::cuGraphInstantiateWithFlags(it, graph, 0) })
        .expect("the graph can be instantiated")
}

pub(crate) fn launch(graph: CUgraphExec, stream: CUstream) -> i32 {
    // SAFETY: the callers keep what the graph reads and writes.
    code(unsafe { sys::cuGraphLaunch(graph, stream) })
}

/// The value of one pointer attribute, by the call that asks for one.
pub(crate) fn attribute_alone(attribute: CUpointer_attribute, pointer: u64) -> Result<u64, i32> {
    // As many zero bytes as the widest of the attributes asked for here; on
    // the machines with this driver, narrower ones are its first bytes.
    //
    // SAFETY: a place wide enough.
    out(|it: *mut u64| unsafe { sys::cuPointerGetAttribute(it.cast(), attribute, pointer) })
}

/// The values of pointer attributes, by the call that asks for several.
pub(crate) fn attributes<const N: usize>(
    mut attributes: [CUpointer_attribute; N],
    pointer: u64,
) -> Result<[u64; N], i32> {
    // Not zero, so that zeros are an answer.
    let mut values = [0xAAAA_AAAA_AAAA_AAAA_u64; N];
    for (attribute, value) in attributes.iter().zip(&mut values) {
        if is_narrow(*attribute) {
            *value &= 0xAAAA_AAAA;
        }
    }
    let mut places = values.each_mut().map(|it| ptr::from_mut(it).cast());
    // SAFETY: as many attributes and places as said, each wide enough.
    let result = unsafe {
        sys::cuPointerGetAttributes(
            N as u32,
            attributes.as_mut_ptr(),
            places.as_mut_ptr(),
            pointer,
        )
    };
    match code(result) {
        0 => Ok(values),
        failed => Err(failed),
    }
}

/// Whether an attribute's value has four bytes.
fn is_narrow(attribute: CUpointer_attribute) -> bool {
    attribute == CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE
}
