//! The driver, as far as this crate calls it: every function behind a wrapper
//! that says why the call is sound.
//!
//! The calls go to `cudarc::driver::sys`, not through `cudarc`'s safe types
//! where it matters: those begin with `bind_to_thread`, which returns an error
//! that some earlier operation left in the context *instead of* doing what was
//! asked. A wait that is skipped so ends in freed memory under a transfer.

use std::ffi::{CStr, c_void};
use std::ptr::{self, NonNull};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{self, CUdeviceptr};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result};

use super::CudaError;
use crate::Region;
use crate::process::Process;

/// Every driver function that this crate calls, by itself or through
/// `cudarc` to open a context or explain an error. `cudarc` panics in the call
/// if one is missing, which must not happen between a copy and the wait for
/// it; so all are looked for before the first copy.
const FUNCTIONS: [&CStr; 27] = [
    c"cuCtxGetCurrent",
    c"cuCtxSetCurrent",
    c"cuCtxSynchronize",
    c"cuDeviceGet",
    c"cuDeviceGetAttribute",
    c"cuDevicePrimaryCtxRelease_v2",
    c"cuDevicePrimaryCtxRetain",
    c"cuEventCreate",
    c"cuEventDestroy_v2",
    c"cuEventQuery",
    c"cuEventRecord",
    c"cuEventSynchronize",
    c"cuGetErrorName",
    c"cuGetErrorString",
    c"cuInit",
    c"cuMemFreeHost",
    c"cuMemHostAlloc",
    c"cuMemHostRegister_v2",
    c"cuMemHostUnregister",
    c"cuMemcpyDtoHAsync_v2",
    c"cuMemcpyHtoDAsync_v2",
    c"cuStreamCreate",
    c"cuStreamDestroy_v2",
    c"cuStreamIsCapturing",
    c"cuStreamSynchronize",
    c"cuStreamWaitEvent",
    c"cuThreadExchangeStreamCaptureMode",
];

/// `CU_STREAM_PER_THREAD`: one handle for many streams, each thread's own. The
/// handles below it are those of the other default stream.
pub(super) const PER_THREAD_STREAM: usize = 2;

/// Fails if there is no driver, or one without the functions this crate
/// calls. Only a success is remembered.
pub(super) fn require() -> Result<(), CudaError> {
    static FOUND: OnceLock<()> = OnceLock::new();
    if FOUND.get().is_some() {
        return Ok(());
    }
    // SAFETY: loads libcuda, whose initialisers have no requirements; every
    // program that calls `cudarc` does the same.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    look_for(&FUNCTIONS)?;
    let _ = FOUND.set(());
    Ok(())
}

fn look_for(functions: &[&'static CStr]) -> Result<(), CudaError> {
    for function in functions {
        // SAFETY: the symbol is only looked for, and never called through
        // this type. The library stays loaded for the life of the process.
        let found = unsafe { sys::culib().get::<*const ()>(function.to_bytes_with_nul()) };
        if found.is_err() {
            let name = function.to_str().unwrap_or("(not UTF-8)");
            return Err(CudaError::MissingFunction { name });
        }
    }
    Ok(())
}

/// Makes `context` the current one of this thread, as every driver call on
/// memory or events wants it. Leaves a stored error where it is.
#[inline]
pub(super) fn make_current(context: &CudaContext) -> Result<(), CudaError> {
    let mut current = ptr::null_mut();
    // SAFETY: a place for the handle.
    unsafe { sys::cuCtxGetCurrent(&raw mut current) }
        .result()
        .map_err(CudaError::driver("cuCtxGetCurrent"))?;
    if current == context.cu_ctx() {
        return Ok(());
    }
    // SAFETY: the context is retained for as long as `context` lives.
    unsafe { result::ctx::set_current(context.cu_ctx()) }
        .map_err(CudaError::driver("cuCtxSetCurrent"))
}

/// Returns, and clears, an error that an earlier operation stored.
pub(super) fn take_stored_error(context: &CudaContext) -> Result<(), CudaError> {
    context
        .check_err()
        .map_err(|source| CudaError::Stored { source })
}

/// While it lives, this thread may make calls that the driver forbids while
/// *any* thread captures a graph in its default, global mode: they would fail,
/// and spoil that other thread's capture. The rule is there for work that
/// should have been captured; waiting for, making and freeing what no graph
/// knows of is none. (Driver reference, `cuThreadExchangeStreamCaptureMode`.)
struct OutsideOfCaptures {
    /// `None` if the mode could not be changed; then it is not changed back.
    before: Option<sys::CUstreamCaptureMode>,
}

impl OutsideOfCaptures {
    fn enter() -> Self {
        Self {
            before: exchange(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED),
        }
    }
}

impl Drop for OutsideOfCaptures {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            exchange(before);
        }
    }
}

/// Sets this thread's mode and returns the one before.
fn exchange(mut mode: sys::CUstreamCaptureMode) -> Option<sys::CUstreamCaptureMode> {
    // SAFETY: a place for the mode.
    let result = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
    result.result().ok().map(|()| mode)
}

pub(super) fn attribute(
    context: &CudaContext,
    attribute: sys::CUdevice_attribute,
) -> Result<i32, CudaError> {
    // SAFETY: the device of a live context is a valid device.
    unsafe { result::device::get_attribute(context.cu_device(), attribute) }
        .map_err(CudaError::driver("cuDeviceGetAttribute"))
}

/// Whether a graph is being captured from `stream`. An invalidated capture
/// counts: it has not ended.
#[inline]
pub(super) fn is_capturing(stream: &CudaStream) -> Result<bool, CudaError> {
    // SAFETY: `stream` keeps its handle valid.
    let status = unsafe { result::stream::is_capturing(stream.cu_stream()) }
        .map_err(CudaError::driver("cuStreamIsCapturing"))?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// What captures into graphs need on top, all of it since CUDA 11.3.
const GRAPH_FUNCTIONS: [&CStr; 3] = [
    c"cuGraphRetainUserObject",
    c"cuUserObjectCreate",
    c"cuUserObjectRelease",
];

/// The question for the graph that a stream captures. `cudarc` has whichever
/// version its chosen CUDA does, and this crate must build with any, so it is
/// looked up here.
#[derive(Clone, Copy)]
enum CaptureInfo {
    V2(
        unsafe extern "C" fn(
            stream: sys::CUstream,
            status: *mut u32,
            id: *mut u64,
            graph: *mut sys::CUgraph,
            dependencies: *mut c_void,
            count: *mut usize,
        ) -> sys::CUresult,
    ),
    /// Since CUDA 12.3, with the data of edges.
    V3(
        unsafe extern "C" fn(
            stream: sys::CUstream,
            status: *mut u32,
            id: *mut u64,
            graph: *mut sys::CUgraph,
            dependencies: *mut c_void,
            edges: *mut c_void,
            count: *mut usize,
        ) -> sys::CUresult,
    ),
}

/// As [`require`], for captures into graphs.
fn look_for_capture_info() -> Result<CaptureInfo, CudaError> {
    static FOUND: OnceLock<CaptureInfo> = OnceLock::new();
    if let Some(found) = FOUND.get() {
        return Ok(*found);
    }
    require()?;
    look_for(&GRAPH_FUNCTIONS)?;
    // SAFETY: the symbols are functions of these types (`cuda.h`: enums are
    // 32 bits wide). The library stays loaded for the life of the process.
    let (second, third) = unsafe {
        (
            sys::culib().get(b"cuStreamGetCaptureInfo_v2\0"),
            sys::culib().get(b"cuStreamGetCaptureInfo_v3\0"),
        )
    };
    let second = second.map(|function| CaptureInfo::V2(*function));
    let third = third.map(|function| CaptureInfo::V3(*function));
    let found = second.or(third).map_err(|_| CudaError::MissingFunction {
        name: "cuStreamGetCaptureInfo_v2",
    })?;
    Ok(*FOUND.get_or_init(|| found))
}

/// A capture that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Capture {
    /// "Unique over the lifetime of the process."
    id: u64,
    graph: sys::CUgraph,
}

/// The capture that `stream` takes part in.
///
/// # Errors
///
/// [`CudaError::StreamIsNotCapturing`], [`CudaError::CaptureInvalidated`],
/// [`CudaError::MissingFunction`] if the driver has not all that captures into
/// graphs need, or the driver's.
pub(super) fn capture_of(stream: &CudaStream) -> Result<Capture, CudaError> {
    use sys::CUstreamCaptureStatus as Status;
    let function = look_for_capture_info()?;
    let handle = stream.cu_stream();
    let (mut status, mut id, mut graph) = (0, 0, ptr::null_mut());
    let none = ptr::null_mut();
    // SAFETY: `stream` keeps its handle valid; places for what is asked, and
    // null, as the reference allows, for what is not.
    let result = unsafe {
        match function {
            CaptureInfo::V2(ask) => ask(
                handle,
                &raw mut status,
                &raw mut id,
                &raw mut graph,
                none,
                none.cast(),
            ),
            CaptureInfo::V3(ask) => ask(
                handle,
                &raw mut status,
                &raw mut id,
                &raw mut graph,
                none,
                none,
                none.cast(),
            ),
        }
    };
    result
        .result()
        .map_err(CudaError::driver("cuStreamGetCaptureInfo"))?;
    if status == Status::CU_STREAM_CAPTURE_STATUS_ACTIVE as u32 {
        Ok(Capture { id, graph })
    } else if status == Status::CU_STREAM_CAPTURE_STATUS_NONE as u32 {
        Err(CudaError::StreamIsNotCapturing)
    } else {
        Err(CudaError::CaptureInvalidated)
    }
}

/// Makes the graph of `capture` call `let_go` with `data`, once, when neither
/// the graph nor anything made of it can run or is running any more.
///
/// If this fails, `let_go` is called sooner, or, if the driver gives no way to
/// take a reference back, never.
///
/// # Safety
///
/// It must be sound to call `let_go` with `data` once, on any thread, from now
/// on. It must not call the driver. `capture` must be under way on a
/// stream of this thread's choosing, and no other thread may use its graph
/// meanwhile: the driver does not lock graphs.
pub(super) unsafe fn keep_for_graph(
    capture: Capture,
    data: NonNull<c_void>,
    let_go: unsafe extern "C" fn(*mut c_void),
) -> Result<(), CudaError> {
    const CREATE: &str = "cuUserObjectCreate";
    const NO_DESTRUCTOR_SYNC: u32 =
        sys::CUuserObject_flags_enum::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32;
    let mut object = ptr::null_mut();
    // SAFETY: a place for the handle; the caller's promise for the rest.
    let created = unsafe {
        sys::cuUserObjectCreate(
            &raw mut object,
            data.as_ptr(),
            Some(let_go),
            1,
            NO_DESTRUCTOR_SYNC,
        )
    }
    .result();
    if object.is_null() {
        // SAFETY: the driver has made nothing that could call it.
        unsafe { let_go(data.as_ptr()) };
        let nothing = DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        return Err(CudaError::Driver {
            call: CREATE,
            source: created.err().unwrap_or(nothing),
        });
    }
    // The graph gets a reference of its own (flags 0), and ours is given back
    // in any case. Handing ours over (`CU_GRAPH_USER_OBJECT_MOVE`) would save
    // the second call, but leaves open who has it if the first one fails.
    let created = created.map_err(CudaError::driver(CREATE));
    let retained = created.and_then(|()| {
        // SAFETY: the object is alive, since a reference is ours; the caller's
        // promise for the graph.
        unsafe { sys::cuGraphRetainUserObject(capture.graph, object, 1, 0) }
            .result()
            .map_err(CudaError::driver("cuGraphRetainUserObject"))
    });
    // SAFETY: this reference is ours, and not used afterwards.
    let released = unsafe { sys::cuUserObjectRelease(object, 1) }
        .result()
        .map_err(CudaError::driver("cuUserObjectRelease"));
    retained.and(released)
}

/// Enqueues a copy of the `bytes` bytes at the address `source`.
///
/// # Safety
///
/// The source must stay readable and unchanged until the device has read it,
/// which may be after this returned, and even if this returned an error. The
/// destination must hold `bytes` bytes, and be usable on `stream`.
pub(super) unsafe fn copy_h2d(
    destination: CUdeviceptr,
    source: *const u8,
    bytes: usize,
    stream: &CudaStream,
) -> Result<(), CudaError> {
    // SAFETY: the caller's promise; `stream` keeps its handle valid.
    unsafe {
        sys::cuMemcpyHtoDAsync_v2(
            destination,
            source.cast::<c_void>(),
            bytes,
            stream.cu_stream(),
        )
    }
    .result()
    .map_err(CudaError::driver("cuMemcpyHtoDAsync"))
}

/// Enqueues a copy of `bytes` bytes to the address `destination`.
///
/// # Safety
///
/// Nobody may read or write the destination before the device has written it,
/// which may be after this returned, and even if this returned an error. The
/// source must hold `bytes` bytes, and be usable on `stream`.
pub(super) unsafe fn copy_d2h(
    destination: *mut u8,
    source: CUdeviceptr,
    bytes: usize,
    stream: &CudaStream,
) -> Result<(), CudaError> {
    // SAFETY: the caller's promise; `stream` keeps its handle valid.
    unsafe {
        sys::cuMemcpyDtoHAsync_v2(
            destination.cast::<c_void>(),
            source,
            bytes,
            stream.cu_stream(),
        )
    }
    .result()
    .map_err(CudaError::driver("cuMemcpyDtoHAsync"))
}

pub(super) fn synchronize_stream(stream: &CudaStream) -> Result<(), CudaError> {
    // The handle of the legacy stream stands for the current context's.
    make_current(stream.context())?;
    // SAFETY: `stream` keeps its handle valid.
    unsafe { result::stream::synchronize(stream.cu_stream()) }
        .map_err(CudaError::driver("cuStreamSynchronize"))
}

/// Waits for all work in `context`, of every stream.
pub(super) fn synchronize_context(context: &CudaContext) -> Result<(), CudaError> {
    make_current(context)?;
    result::ctx::synchronize().map_err(CudaError::driver("cuCtxSynchronize"))
}

/// Allocates `bytes` bytes of page-locked memory: usable from every context
/// (`PORTABLE`), and cached like any other memory (not `WRITECOMBINED`, which
/// is slow for the CPU to read).
pub(super) fn alloc_host(context: &CudaContext, bytes: usize) -> Result<NonNull<u8>, CudaError> {
    const CALL: &str = "cuMemHostAlloc";
    make_current(context)?;
    let _outside = OutsideOfCaptures::enter();
    let mut memory = ptr::null_mut();
    // SAFETY: `memory` is a place for the address.
    unsafe { sys::cuMemHostAlloc(&raw mut memory, bytes, sys::CU_MEMHOSTALLOC_PORTABLE) }
        .result()
        .map_err(CudaError::driver(CALL))?;
    NonNull::new(memory.cast()).ok_or(CudaError::Driver {
        call: CALL,
        source: DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY),
    })
}

/// Frees what [`alloc_host`] returned.
///
/// # Safety
///
/// Nobody may use the memory afterwards, the device included. The driver is
/// not documented to wait for transfers in flight.
pub(super) unsafe fn free_host(
    context: &CudaContext,
    memory: NonNull<u8>,
) -> Result<(), CudaError> {
    make_current(context)?;
    let _outside = OutsideOfCaptures::enter();
    // SAFETY: the caller's promise.
    unsafe { sys::cuMemFreeHost(memory.as_ptr().cast()) }
        .result()
        .map_err(CudaError::driver("cuMemFreeHost"))
}

/// Page-locks `bytes` where they are.
///
/// # Safety
///
/// The memory must stay allocated or mapped until it was unregistered again,
/// and the context until then too.
pub(super) unsafe fn register_host(
    context: &CudaContext,
    bytes: &[u8],
    flags: u32,
) -> Result<(), CudaError> {
    make_current(context)?;
    let _outside = OutsideOfCaptures::enter();
    let base = bytes.as_ptr().cast_mut().cast::<c_void>();
    // SAFETY: the caller's promise. The driver does not write the memory.
    unsafe { sys::cuMemHostRegister_v2(base, bytes.len(), flags) }
        .result()
        .map_err(CudaError::driver("cuMemHostRegister"))
}

/// Unpins `region`, which [`register_host`] has page-locked as it is.
///
/// # Safety
///
/// No transfer may be reading the memory. The driver is not documented to wait
/// for those in flight.
pub(super) unsafe fn unregister_host(
    context: &CudaContext,
    region: Region,
) -> Result<(), CudaError> {
    make_current(context)?;
    let _outside = OutsideOfCaptures::enter();
    // SAFETY: the caller's promise.
    unsafe { sys::cuMemHostUnregister(region.base().cast_mut().cast()) }
        .result()
        .map_err(CudaError::driver("cuMemHostUnregister"))
}

/// Records an event of `cudarc`'s as [`CudaEvent::record`] does, but whether or
/// not an error is stored, which stays where it is. Both are of one context.
pub(super) fn record_use(event: &CudaEvent, stream: &CudaStream) -> Result<(), CudaError> {
    make_current(stream.context())?;
    // SAFETY: both handles are kept valid by their owners.
    unsafe { result::event::record(event.cu_event(), stream.cu_stream()) }
        .map_err(CudaError::driver("cuEventRecord"))
}

/// An event of this crate's own: its calls are never skipped because of an
/// error that the context keeps.
#[derive(Debug)]
pub(super) struct Event {
    handle: sys::CUevent,
    context: Arc<CudaContext>,
    /// The process that made it. A child after `fork` must leave it alone.
    owner: Process,
}

// SAFETY: an event handle may be used from any thread; the driver locks.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        make_current(context)?;
        let handle = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
            .map_err(CudaError::driver("cuEventCreate"))?;
        Ok(Self {
            handle,
            context: Arc::clone(context),
            owner: Process::current(),
        })
    }

    pub(super) fn context(&self) -> &CudaContext {
        &self.context
    }

    /// Marks the work enqueued on `stream` so far. A later record replaces
    /// the mark.
    pub(super) fn record(&self, stream: &CudaStream) -> Result<(), CudaError> {
        // SAFETY: both handles are kept valid by their owners.
        unsafe { result::event::record(self.handle, stream.cu_stream()) }
            .map_err(CudaError::driver("cuEventRecord"))
    }

    /// Waits for the work marked last.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        // The thread may be one that has never used the driver, and this call
        // wants a context, as its list of errors has it. Should there be none
        // to be had, the call itself says so.
        let _ = make_current(&self.context);
        let _outside = OutsideOfCaptures::enter();
        // SAFETY: the handle is valid while `self` lives.
        unsafe { result::event::synchronize(self.handle) }
            .map_err(CudaError::driver("cuEventSynchronize"))
    }

    /// Whether the marked work is done, as far as the driver can say.
    pub(super) fn ask(&self) -> Result<bool, CudaError> {
        let _outside = OutsideOfCaptures::enter();
        // SAFETY: the handle is valid while `self` lives.
        match unsafe { result::event::query(self.handle) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(source) => Err(CudaError::driver("cuEventQuery")(source)),
        }
    }

    /// Whether the driver says that the marked work is done. An error is no
    /// such word.
    pub(super) fn is_done(&self) -> bool {
        matches!(self.ask(), Ok(true))
    }

    /// Lets `stream` do nothing that is enqueued on it from now on before the
    /// marked work is done. The calling thread does not wait.
    pub(super) fn hold_back(&self, stream: &CudaStream) -> Result<(), CudaError> {
        // SAFETY: both handles are kept valid by their owners. They may be of
        // different contexts.
        unsafe {
            result::stream::wait_event(
                stream.cu_stream(),
                self.handle,
                sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT,
            )
        }
        .map_err(CudaError::driver("cuStreamWaitEvent"))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if !self.owner.is_current() {
            return;
        }
        // An event that cannot be destroyed is leaked: it is a few bytes of
        // the driver's, and nothing waits for it any more.
        let _ = make_current(&self.context);
        // SAFETY: the handle was made by `new`, and is not used afterwards.
        let _ = unsafe { result::event::destroy(self.handle) };
    }
}
