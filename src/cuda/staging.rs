//! The staging ring: page-locked memory of ours, through which a borrowed
//! source is copied, so that the device never reads the source itself.
//!
//! # How blocks are used and used again
//!
//! The ring is made of blocks, each several times as large as the largest
//! source. Sources are packed into one block, the open one, one behind the
//! other. When the next source might not fit, the block is closed: an event is
//! recorded, right behind the copy that was put into it last, and marks all
//! copies from it, since they are in the order of one stream. That is one event
//! for many copies, and none that waits for work behind them.
//!
//! ```text
//! stream   copy copy copy EVENT kernel copy copy …
//! blocks   [closed: a b c ·····]       [open: d e ····]     [closed …]
//! ```
//!
//! Closed blocks stand in a queue in the order of the stream, so the one to
//! look at is always the first. If its event has fired it is opened again;
//! else the ring grows; else, at its limit, the copy waits for that event, and
//! not for the rest of the stream.
//!
//! A copier that ends marks the copies of its open block in the same way, while it
//! still has the stream. The ring can then be freed without the stream.
//!
//! Blocks are recycled by asking events, not by host functions in the stream,
//! which cost about 100 µs each.

use std::collections::VecDeque;
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::CudaStream;
use cudarc::driver::sys::CUdeviceptr;

use super::CudaError;
use super::driver::{self, Event};
use super::options::CopierOptions;
use super::pinned_memory::{PinnedMemory, report_leak};
use super::stats::Counts;
use super::wait::{Waited, wait_for_event, wait_for_stream};
use crate::process::Process;

/// Sources begin on cache lines of their own.
const ALIGN: usize = 64;

/// Blocks are so many times as large as the largest source.
const SOURCES_PER_BLOCK: usize = 4;

#[derive(Debug)]
pub(super) struct StagingRing {
    /// The largest source, rounded up.
    largest: usize,
    block_bytes: usize,
    limit: usize,
    /// In a forked child neither the memory nor the events nor, perhaps, the
    /// lock can be used.
    owner: Process,
    blocks: Mutex<Blocks>,
}

#[derive(Debug, Default)]
struct Blocks {
    /// Has room for the largest source.
    open: Option<Block>,
    /// In the order of the stream.
    closed: VecDeque<Block>,
    /// The memory of all blocks, in bytes; those that were leaked too.
    bytes: usize,
    /// Why blocks were leaked: not reported yet.
    leaks: Vec<CudaError>,
    /// Why the last one was, reported or not.
    last_leak: Option<CudaError>,
}

#[derive(Debug)]
struct Block {
    memory: PinnedMemory,
    /// How many of its bytes are in use, from its beginning.
    used: usize,
    /// Whether copies were made from it since the event was recorded.
    unmarked: bool,
    /// Recorded behind its copies.
    event: Event,
}

/// Why a source was not staged.
pub(super) enum NotStaged {
    /// No memory could be page-locked. Nothing was enqueued.
    NoRoom(CudaError),
    /// The driver failed the copy. The device does not read the source.
    Failed(CudaError),
}

impl StagingRing {
    pub(super) fn new(options: CopierOptions) -> Self {
        let largest = options.stage_limit.next_multiple_of(ALIGN);
        Self {
            largest,
            block_bytes: (largest * SOURCES_PER_BLOCK)
                .min(options.ring_limit)
                .max(largest),
            limit: options.ring_limit,
            owner: Process::current(),
            blocks: Mutex::default(),
        }
    }

    /// Copies the `bytes` bytes at `source`, which are not more than the
    /// options' limit nor 0, into the ring, and enqueues their copy to the
    /// device from there. The source is not read after this returned.
    ///
    /// # Safety
    ///
    /// The source must be readable, and the destination hold as many bytes and
    /// be usable on the stream. All copies of one ring are on one stream.
    pub(super) unsafe fn copy_h2d(
        &self,
        destination: CUdeviceptr,
        source: *const u8,
        bytes: usize,
        stream: &CudaStream,
        counts: &Counts,
    ) -> Result<(), NotStaged> {
        // Held until the copy is enqueued: the order of the blocks is that of
        // the stream.
        let mut blocks = self.lock();
        let block = self.open_block(&mut blocks, stream, counts)?;
        let offset = block.used;
        block.used = (offset + bytes).next_multiple_of(ALIGN);
        block.unmarked = true;
        // SAFETY: the open block has room for the largest source behind what
        // is in use, which the device may be reading. The source is no part of
        // the block, which nobody else has a slice of. Padding in the source is
        // copied as what it is.
        let copied = unsafe {
            let staged = block.memory.base().as_ptr().add(offset);
            source.copy_to_nonoverlapping(staged, bytes);
            // The memory stays as it is until an event behind the copy has
            // fired; that an error says nothing about the copy does no harm.
            driver::copy_h2d(destination, staged, bytes, stream)
        };
        counts.staged.add(1);
        counts.staged_bytes.add_size(bytes);
        let full = block.used + self.largest > block.memory.bytes();
        let closed = if full {
            self.close(&mut blocks, stream)
        } else {
            Ok(())
        };
        copied.and(closed).map_err(NotStaged::Failed)
    }

    /// The open block, which has room for the largest source.
    fn open_block<'a>(
        &self,
        blocks: &'a mut Blocks,
        stream: &CudaStream,
        counts: &Counts,
    ) -> Result<&'a mut Block, NotStaged> {
        let block = match blocks.open.take() {
            Some(block) => block,
            None => self.empty_block(blocks, stream, counts)?,
        };
        Ok(blocks.open.insert(block))
    }

    fn empty_block(
        &self,
        blocks: &mut Blocks,
        stream: &CudaStream,
        counts: &Counts,
    ) -> Result<Block, NotStaged> {
        if let Some(mut first) = blocks.closed.pop_front_if(|first| first.event.is_done()) {
            first.used = 0;
            return Ok(first);
        }
        let may_grow = blocks.bytes == 0 || blocks.bytes + self.block_bytes <= self.limit;
        let mut no_growth = None;
        if may_grow {
            match self.new_block(blocks, stream, counts) {
                Ok(block) => return Ok(block),
                Err(error) => no_growth = Some(error),
            }
        }
        while let Some(mut first) = blocks.closed.pop_front() {
            counts.ring_waits.add(1);
            match wait_for_event(&first.event, Some(stream)) {
                // What the driver had to say was about the event, not about
                // this copy.
                Waited::Done(_) => {
                    first.used = 0;
                    return Ok(first);
                }
                Waited::Unknown(error) => {
                    first.leak();
                    blocks.note_leak(error);
                }
            }
        }
        if let Some(error) = no_growth {
            return Err(NotStaged::NoRoom(error));
        }
        // All that there was is leaked. It is replaced once; a driver that goes
        // on so is not to be relied on for a wait either.
        match &blocks.last_leak {
            Some(error) if blocks.bytes > self.limit.max(self.block_bytes) => {
                Err(NotStaged::Failed(error.clone()))
            }
            _ => self
                .new_block(blocks, stream, counts)
                .map_err(NotStaged::NoRoom),
        }
    }

    fn new_block(
        &self,
        blocks: &mut Blocks,
        stream: &CudaStream,
        counts: &Counts,
    ) -> Result<Block, CudaError> {
        let context = stream.context();
        // In this order: an event that is not used is no loss.
        let event = Event::new(context)?;
        let memory = PinnedMemory::allocate(context, self.block_bytes)?;
        blocks.bytes += self.block_bytes;
        counts.ring_bytes.add_size(self.block_bytes);
        Ok(Block {
            memory,
            used: 0,
            unmarked: false,
            event,
        })
    }

    /// Closes the open block.
    fn close(&self, blocks: &mut Blocks, stream: &CudaStream) -> Result<(), CudaError> {
        let marked = Self::mark_open(blocks, stream);
        // Copies that were waited for, since they could not be marked, are over.
        if marked.is_ok() {
            blocks.closed.extend(blocks.open.take());
        }
        marked
    }

    /// Marks the copies from the open block, so that no stream is needed to wait
    /// for them. To be called when nothing is under way.
    pub(super) fn mark(&self, stream: &CudaStream) {
        if !self.owner.is_current() {
            return;
        }
        let mut blocks = self.lock();
        if !blocks.open.as_ref().is_some_and(|block| block.unmarked) {
            return;
        }
        // To mark or wait for anything on a capturing stream would spoil the
        // capture.
        let marked = match driver::is_capturing(stream) {
            Ok(true) => Err(CudaError::StreamIsCapturing),
            Ok(false) | Err(_) => Self::mark_open(&mut blocks, stream),
        };
        if let Err(error) = marked
            && let Some(block) = blocks.open.take_if(|block| block.unmarked)
        {
            block.leak();
            blocks.note_leak(error);
        }
        drop(blocks);
        self.report_leaks();
    }

    /// Marks the copies from the open block. If that fails, they are waited for
    /// here and now, and the block is empty, or it is leaked.
    fn mark_open(blocks: &mut Blocks, stream: &CudaStream) -> Result<(), CudaError> {
        let Some(block) = &mut blocks.open else {
            return Ok(());
        };
        let Err(error) = block.event.record(stream) else {
            block.unmarked = false;
            return Ok(());
        };
        match wait_for_stream(error, stream) {
            Waited::Done(result) => {
                block.used = 0;
                block.unmarked = false;
                result
            }
            Waited::Unknown(error) => {
                if let Some(block) = blocks.open.take() {
                    block.leak();
                }
                blocks.note_leak(error.clone());
                Err(error)
            }
        }
    }

    /// Whether the driver says that no copy from the ring is under way.
    pub(super) fn is_idle(&self) -> bool {
        let blocks = self.lock();
        let mut all = blocks.closed.iter().chain(&blocks.open);
        all.all(|block| !block.unmarked && block.event.is_done())
    }

    /// How many handles of the context the ring has: each block has one for its
    /// memory and one for its event.
    pub(super) fn contexts(&self) -> usize {
        let blocks = self.lock();
        2 * blocks.closed.iter().chain(&blocks.open).count()
    }

    /// Says which blocks were leaked. To be called when nothing is under way:
    /// the subscriber is the program's code.
    pub(super) fn report_leaks(&self) {
        // The lock is not held for the loop.
        let leaks = mem::take(&mut self.lock().leaks);
        for error in &leaks {
            report_leak(self.block_bytes, error);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Blocks {
    fn note_leak(&mut self, error: CudaError) {
        self.last_leak = Some(error.clone());
        self.leaks.push(error);
    }
}

impl Block {
    /// Frees the memory if the device is done with it.
    fn end(self, waited: Waited) {
        match waited {
            // SAFETY: nobody but the ring has the memory, and the copies from
            // it are over.
            Waited::Done(_) => unsafe { self.memory.free() },
            Waited::Unknown(error) => {
                let bytes = self.memory.bytes();
                self.leak();
                report_leak(bytes, &error);
            }
        }
    }

    /// Keeps the memory, and what it needs, for ever.
    fn leak(self) {
        // Dropping the memory leaks it.
        mem::forget(self.event);
    }
}

/// Waits for the copies from the ring, all of which are marked, and frees it.
impl Drop for StagingRing {
    fn drop(&mut self) {
        let blocks = self
            .blocks
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        let Blocks { open, closed, .. } = mem::take(blocks);
        if !self.owner.is_current() {
            mem::forget((open, closed));
            return;
        }
        for block in closed.into_iter().chain(open) {
            let waited = wait_for_event(&block.event, None);
            block.end(waited);
        }
    }
}
