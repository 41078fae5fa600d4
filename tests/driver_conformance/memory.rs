//! Memory, streams and events, each ended by its owner.
//!
//! While a test is failing, they are left as they are: the device may be using
//! them, and waiting for it might wait for a gate.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::thread;

use cudarc::driver::sys::{self, CUdeviceptr, CUevent, CUstream};

use crate::calls::{self, code, host_alloc, host_free, host_register, host_unregister, out};

pub(crate) const PAGE: usize = 4096;

/// The byte at `index` of contents that are known by their seed. Any two
/// seeds differ in every byte.
fn byte(seed: u8, index: usize) -> u8 {
    ((index * 7 + (index >> 8)) as u8).wrapping_add(seed)
}

/// Which contents the bytes are, by seed; else how they begin.
pub(crate) fn seed_of(bytes: &[u8]) -> Result<u8, String> {
    let seed = bytes[0].wrapping_sub(byte(0, 0));
    match (0..bytes.len()).find(|&index| bytes[index] != byte(seed, index)) {
        None => Ok(seed),
        Some(index) => Err(format!("contents {seed} up to byte {index}, others after")),
    }
}

/// What can hold contents on the host.
pub(crate) trait Host {
    fn base(&self) -> *mut u8;
    fn len(&self) -> usize;

    /// Writes as a program does that thinks nobody reads any more.
    fn fill(&self, seed: u8) {
        for index in 0..self.len() {
            // SAFETY: within the memory, which this owns. A device that reads
            // it meanwhile is what these tests are about.
            unsafe { self.base().add(index).write(byte(seed, index)) };
        }
    }

    fn contents(&self) -> Vec<u8> {
        // SAFETY: within the memory, which this owns and which is initialised;
        // callers have waited for a device that writes it.
        unsafe { std::slice::from_raw_parts(self.base(), self.len()) }.to_vec()
    }
}

/// Pageable memory, on pages of its own.
pub(crate) struct Pageable {
    base: *mut u8,
    layout: Layout,
}

// SAFETY: it owns its memory, and threads of a test take turns.
unsafe impl Sync for Pageable {}

impl Pageable {
    pub(crate) fn new(len: usize) -> Self {
        let layout = Layout::from_size_align(len, PAGE).unwrap();
        assert!(len > 0);
        // SAFETY: the layout is not empty.
        let base = unsafe { alloc_zeroed(layout) };
        if base.is_null() {
            handle_alloc_error(layout);
        }
        Self { base, layout }
    }

    pub(crate) fn filled(len: usize, seed: u8) -> Self {
        let this = Self::new(len);
        this.fill(seed);
        this
    }

    /// Page-locks a part of it.
    pub(crate) fn register(&self, offset: usize, len: usize, flags: u32) -> Result<Pin<'_>, i32> {
        assert!(offset + len <= self.len());
        let base = self.base.wrapping_add(offset);
        match host_register(base, len, flags) {
            0 => Ok(Pin { base, _of: self }),
            failed => Err(failed),
        }
    }
}

impl Host for Pageable {
    fn base(&self) -> *mut u8 {
        self.base
    }

    fn len(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Pageable {
    fn drop(&mut self) {
        if !thread::panicking() {
            // SAFETY: allocated with this layout; pins of it are gone.
            unsafe { dealloc(self.base, self.layout) }
        }
    }
}

/// A page-locked part of pageable memory.
#[must_use]
pub(crate) struct Pin<'a> {
    pub(crate) base: *mut u8,
    _of: &'a Pageable,
}

impl Pin<'_> {
    pub(crate) fn unregister(self) -> i32 {
        let base = self.base;
        std::mem::forget(self);
        host_unregister(base)
    }
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        if !thread::panicking() {
            host_unregister(self.base);
        }
    }
}

/// Page-locked memory from the driver.
pub(crate) struct Pinned {
    base: *mut u8,
    len: usize,
}

// SAFETY: it owns its memory, and threads of a test take turns.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub(crate) fn new(len: usize) -> Self {
        Self {
            base: host_alloc(len, sys::CU_MEMHOSTALLOC_PORTABLE)
                .expect("page-locked memory can be had"),
            len,
        }
    }

    pub(crate) fn filled(len: usize, seed: u8) -> Self {
        let this = Self::new(len);
        this.fill(seed);
        this
    }

    pub(crate) fn free(self) -> i32 {
        let base = self.base;
        std::mem::forget(self);
        host_free(base)
    }
}

impl Host for Pinned {
    fn base(&self) -> *mut u8 {
        self.base
    }

    fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if !thread::panicking() {
            host_free(self.base);
        }
    }
}

/// Device memory.
pub(crate) struct Device {
    base: CUdeviceptr,
    len: usize,
}

impl Device {
    /// Cleared on the stream: what earlier tests left there might pass for
    /// what did not arrive.
    pub(crate) fn new(len: usize, stream: &Stream) -> Self {
        // SAFETY: a place for the address.
        let base = out(|it| unsafe { sys::cuMemAlloc_v2(it, len) })
            .expect("the device has memory to spare");
        // SAFETY: that many bytes.
        let cleared = unsafe { sys::cuMemsetD8Async(base, 0xEE, len, stream.handle()) };
        assert_eq!(code(cleared), 0);
        Self { base, len }
    }

    pub(crate) fn at(&self, offset: usize) -> CUdeviceptr {
        self.base + offset as CUdeviceptr
    }

    pub(crate) fn contents(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        // On the legacy stream, which non-blocking streams do not hold up:
        // whoever asks has waited.
        //
        // SAFETY: the call waits, and the target is as long.
        let result =
            unsafe { sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), self.base, self.len) };
        assert_eq!(code(result), 0, "device memory can be read");
        bytes
    }

    #[track_caller]
    pub(crate) fn assert_holds(&self, seed: u8) {
        let held = seed_of(&self.contents());
        assert_eq!(held, Ok(seed), "the device holds other contents");
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if !thread::panicking() {
            // SAFETY: allocated by `new`; the test has waited for its users.
            unsafe { sys::cuMemFree_v2(self.base) };
        }
    }
}

/// A non-blocking stream, as all of `cudarc`'s are; or a special handle.
pub(crate) struct Stream {
    handle: CUstream,
    owned: bool,
}

// SAFETY: stream handles may be used from any thread; the driver locks.
unsafe impl Sync for Stream {}

impl Stream {
    pub(crate) fn new() -> Self {
        Self::with_flags(sys::CUstream_flags::CU_STREAM_NON_BLOCKING)
    }

    /// One that is ordered with the legacy stream.
    pub(crate) fn blocking() -> Self {
        Self::with_flags(sys::CUstream_flags::CU_STREAM_DEFAULT)
    }

    fn with_flags(flags: sys::CUstream_flags) -> Self {
        Self {
            // SAFETY: a place for the handle.
            handle: out(|it| unsafe { sys::cuStreamCreate(it, flags as u32) })
                .expect("a stream can be had"),
            owned: true,
        }
    }

    /// 0 is the legacy default stream, 2 a thread's own.
    pub(crate) fn special(handle: usize) -> Self {
        Self {
            handle: handle as CUstream,
            owned: false,
        }
    }

    pub(crate) fn handle(&self) -> CUstream {
        self.handle
    }

    #[track_caller]
    pub(crate) fn copy(&self, target: CUdeviceptr, source: &impl Host) {
        let copied = calls::htod(target, source.base(), source.len(), self.handle);
        assert_eq!(copied, 0, "the copy is accepted");
    }

    #[track_caller]
    pub(crate) fn wait(&self) {
        assert_eq!(calls::stream_synchronize(self.handle), 0, "waiting works");
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned && !thread::panicking() {
            // SAFETY: created by this, and not used after.
            unsafe { sys::cuStreamDestroy_v2(self.handle) };
        }
    }
}

/// An event as this crate makes them: without timing.
pub(crate) struct Event(CUevent);

// SAFETY: event handles may be used from any thread; the driver locks.
unsafe impl Sync for Event {}

impl Event {
    pub(crate) fn new() -> Self {
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: a place for the handle.
        Self(out(|it| unsafe { sys::cuEventCreate(it, flags) }).expect("an event can be had"))
    }

    pub(crate) fn handle(&self) -> CUevent {
        self.0
    }

    #[track_caller]
    pub(crate) fn record(&self, stream: &Stream) {
        let recorded = calls::event_record(self.0, stream.handle());
        assert_eq!(recorded, 0, "the event is recorded");
    }

    pub(crate) fn destroy(self) -> i32 {
        let handle = self.0;
        std::mem::forget(self);
        // SAFETY: created by this, and not used after.
        code(unsafe { sys::cuEventDestroy_v2(handle) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if !thread::panicking() {
            // SAFETY: created by this, and not used after.
            unsafe { sys::cuEventDestroy_v2(self.0) };
        }
    }
}
