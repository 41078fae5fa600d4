//! What streams carry out.

use super::TALLY;
use super::device::{DeviceMemory, Span};
use super::dma;
use super::host::HostRange;
use super::pool::Buffer;
use super::user_object::Reference;
use crate::counters;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// An operation. Cloning it is cheap: a graph launches clones of its nodes.
#[derive(Clone)]
pub(super) enum Action {
    /// Something to wait for, or to wait at.
    Marker,
    /// The end of a graph's launch, which lets go of what the graph refers to.
    /// Only held, and dropped once it was carried out.
    EndOfLaunch(#[allow(dead_code, reason = "held")] Vec<Reference>),
    /// The record of an event, whose time is to be noted.
    Record(usize),
    ToDevice {
        source: Source,
        target: Span,
    },
    ToHost {
        source: Span,
        target: Arc<Target>,
    },
    WithinDevice {
        source: Span,
        target: Span,
    },
    Fill {
        target: Span,
        pattern: Pattern,
    },
    /// The stream-ordered end of a device allocation.
    Free(Arc<DeviceMemory>),
    Call(HostCall),
}

/// Up to four bytes to repeat.
#[derive(Clone, Copy)]
pub(super) struct Pattern {
    pub(super) bytes: [u8; 4],
    pub(super) len: usize,
}

/// A function of the program's, to be called in stream order.
#[derive(Clone, Copy)]
pub(super) struct HostCall {
    pub(super) function: unsafe extern "C" fn(*mut c_void),
    pub(super) data: usize,
}

/// Where a host-to-device transfer gets its bytes.
#[derive(Clone)]
pub(super) enum Source {
    /// Staging memory, filled at call time.
    Staged(Arc<Buffer>),
    /// The caller's memory, at execution time.
    Late(Arc<LateSource>),
}

pub(super) struct LateSource {
    pub(super) address: usize,
    /// The page-locked range it lies in; none if it is pageable.
    pub(super) range: Option<Arc<HostRange>>,
    /// What it held at the call; none if nobody wants to know.
    pub(super) snapshot: Option<Buffer>,
    /// The call waits for the transfer, so nothing about it is late.
    pub(super) awaited: bool,
}

/// Where a device-to-host transfer puts its bytes.
pub(super) struct Target {
    pub(super) address: usize,
    pub(super) range: Option<Arc<HostRange>>,
    pub(super) awaited: bool,
}

impl Action {
    /// Whether it is a copy that names device memory of another context.
    pub(super) fn is_copy_beyond(&self, context: usize) -> bool {
        let beyond = |span: &Span| span.memory.context != context;
        match self {
            Action::ToDevice { target, .. } => beyond(target),
            Action::ToHost { source, .. } => beyond(source),
            Action::WithinDevice { source, target } => beyond(source) || beyond(target),
            _ => false,
        }
    }

    /// Carries the operation out, without the lock.
    pub(super) fn execute(&self) {
        match self {
            Action::Marker | Action::Record(_) | Action::EndOfLaunch(_) => {}
            Action::ToDevice { source, target } => to_device(source, target),
            Action::ToHost { source, target } => to_host(source, target),
            Action::WithinDevice { source, target } => {
                touch(source);
                touch(target);
                // SAFETY: a span is valid for DMA.
                let moved = unsafe { dma::pull(target.address(), source.address(), target.len) };
                debug_assert!(moved.is_ok(), "device memory is always there");
            }
            Action::Fill { target, pattern } => fill(target, *pattern),
            Action::Free(memory) => memory.freed.store(true, Ordering::Relaxed),
            Action::Call(call) => {
                // SAFETY: whoever enqueued the function vouched for calling it
                // with this pointer, once per execution, on any thread.
                unsafe { (call.function)(call.data as *mut c_void) }
            }
        }
    }
}

fn to_device(source: &Source, target: &Span) {
    touch(target);
    match source {
        Source::Staged(buffer) => {
            // SAFETY: a span is valid for DMA.
            let moved = unsafe { dma::push(target.address(), buffer.address(), target.len) };
            debug_assert!(moved.is_ok(), "staging memory is always there");
        }
        Source::Late(source) => read_late(source, target),
    }
    counters::add(&TALLY.h2d_transfers, 1);
    counters::add(&TALLY.h2d_bytes, target.len as u64);
}

/// Lets the device read the caller's memory, and notes in what state it is.
fn read_late(source: &LateSource, target: &Span) {
    let mut torn = false;
    let read = match &source.snapshot {
        None => {
            // SAFETY: a span is valid for DMA.
            unsafe { dma::pull(target.address(), source.address, target.len) }
        }
        // What is compared must be what is transferred, so it is read once.
        Some(snapshot) => Buffer::dma_from(source.address, target.len).and_then(|now| {
            torn = now.bytes() != snapshot.bytes();
            // SAFETY: a span is valid for DMA.
            unsafe { dma::push(target.address(), now.address(), target.len) }
        }),
    };
    if source.awaited {
        return;
    }
    counters::add(&TALLY.late_reads, 1);
    counters::add(&TALLY.torn_transfers, torn.into());
    // Looked at after the transfer: a range that ended while it ran was
    // ended too early as well.
    let dead = read.is_err() || is_dead(source.range.as_deref());
    counters::add(&TALLY.dead_reads, dead.into());
}

fn to_host(source: &Span, target: &Target) {
    touch(source);
    let mut dead = is_dead(target.range.as_deref());
    if !dead {
        // SAFETY: the caller handed the memory over to be written by DMA, and
        // the kernel refuses if it is gone.
        dead = unsafe { dma::push(target.address, source.address(), source.len) }.is_err();
        dead |= is_dead(target.range.as_deref());
    }
    counters::add(&TALLY.d2h_transfers, 1);
    counters::add(&TALLY.d2h_bytes, source.len as u64);
    if !target.awaited {
        counters::add(&TALLY.late_writes, 1);
        counters::add(&TALLY.dead_writes, dead.into());
    }
}

fn fill(target: &Span, pattern: Pattern) {
    const CHUNK: usize = 64 << 10;

    touch(target);
    let chunk = Buffer::filled(&pattern.bytes[..pattern.len], target.len.min(CHUNK));
    let mut done = 0;
    while done < target.len {
        let len = (target.len - done).min(CHUNK);
        // SAFETY: a span is valid for DMA, and this is a part of it.
        let moved = unsafe { dma::push(target.address() + done, chunk.address(), len) };
        debug_assert!(moved.is_ok(), "device memory is always there");
        done += len;
    }
}

fn is_dead(range: Option<&HostRange>) -> bool {
    range.is_some_and(|range| !range.is_live())
}

fn touch(span: &Span) {
    if span.memory.freed.load(Ordering::Relaxed) {
        counters::add(&TALLY.dead_device_accesses, 1);
    }
}
