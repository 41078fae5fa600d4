//! The thread that pins and unpins memory while the streams copy: each time,
//! the registry publishes a new snapshot under the lookups.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use cudarc::driver::CudaContext;

use crate::path::Pinned;
use crate::support::numbers::Numbers;

/// How many buffers it holds at once.
const HELD: usize = 12;
const SMALLEST_WORDS: usize = 256;
const LARGEST_WORDS: usize = 64 << 10;
/// Between two buffers, so that pinning does not take a CPU for itself.
const PAUSE: Duration = Duration::from_micros(100);

/// Goes on until `stop` is set. Returns how many buffers were pinned.
pub(crate) fn pin_and_unpin<B: Pinned>(
    context: &Arc<CudaContext>,
    stop: &AtomicBool,
) -> anyhow::Result<u64> {
    let mut numbers = Numbers::new(1);
    let mut held = VecDeque::with_capacity(HELD);
    let mut pinned = 0;
    // Relaxed: the flag says nothing about other memory.
    while !stop.load(Ordering::Relaxed) {
        if held.len() == HELD {
            // Not always the oldest one, so that regions of all ages go.
            held.swap_remove_back(numbers.below(HELD));
        }
        let words = SMALLEST_WORDS + numbers.below(LARGEST_WORDS - SMALLEST_WORDS);
        held.push_back(B::zeroed(context, words)?);
        pinned += 1;
        thread::sleep(PAUSE);
    }
    Ok(pinned)
}
