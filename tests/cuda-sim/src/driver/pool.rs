//! Buffers for staging and for scratch, used again and again.
//!
//! Fresh large buffers come from the operating system page by page, which
//! would cost a copy more than the copying does.

use super::dma::{self, Gone};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// No buffer is smaller, so that small copies share.
const SMALLEST: usize = 4096;
/// More than this is not kept.
const KEPT_BYTES: usize = 64 << 20;

#[derive(Default)]
struct Pool {
    free: Vec<Box<[u8]>>,
    bytes: usize,
}

static POOL: Mutex<Pool> = Mutex::new(Pool {
    free: Vec::new(),
    bytes: 0,
});

/// A buffer that goes back to the pool when it is dropped.
pub(super) struct Buffer {
    memory: Box<[u8]>,
    len: usize,
}

impl Buffer {
    /// A buffer of `len` bytes with anything in it.
    fn take(len: usize) -> Self {
        let size = len.next_power_of_two().max(SMALLEST);
        let mut pool = pool();
        let found = pool.free.iter().rposition(|memory| memory.len() == size);
        let memory = match found {
            Some(index) => {
                pool.bytes -= size;
                pool.free.swap_remove(index)
            }
            None => {
                drop(pool);
                vec![0; size].into_boxed_slice()
            }
        };
        Self { memory, len }
    }

    /// A copy of `source`.
    pub(super) fn copy_of(source: &[u8]) -> Self {
        let mut buffer = Self::take(source.len());
        buffer.memory[..source.len()].copy_from_slice(source);
        buffer
    }

    /// A buffer full of a repeated pattern.
    pub(super) fn filled(pattern: &[u8], len: usize) -> Self {
        let mut buffer = Self::take(len);
        for chunk in buffer.memory[..len].chunks_mut(pattern.len()) {
            chunk.copy_from_slice(&pattern[..chunk.len()]);
        }
        buffer
    }

    /// What lies at `address` now, as DMA finds it.
    pub(super) fn dma_from(address: usize, len: usize) -> Result<Self, Gone> {
        let mut buffer = Self::take(len);
        // SAFETY: the target is ours, and has `len` bytes.
        unsafe { dma::pull(buffer.memory.as_mut_ptr() as usize, address, len)? };
        Ok(buffer)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.memory[..self.len]
    }

    pub(super) fn address(&self) -> usize {
        self.memory.as_ptr() as usize
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let memory = std::mem::take(&mut self.memory);
        let mut pool = pool();
        if pool.bytes + memory.len() <= KEPT_BYTES {
            pool.bytes += memory.len();
            pool.free.push(memory);
        }
    }
}

fn pool() -> MutexGuard<'static, Pool> {
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}
