//! The figures of a run, as they are written to the JSON file.

use serde::Serialize;

use crate::run::{Pinning, Totals};
use crate::support::driver::Driver;
use crate::weights::Weights;

/// One run.
#[derive(Debug, Serialize)]
pub(crate) struct Figures {
    /// `real` or `simulated`.
    pub(crate) driver: &'static str,
    #[serde(skip)]
    pub(crate) is_simulated: bool,
    /// The device's name.
    pub(crate) device: String,
    pub(crate) streams: u16,
    /// Tensors in the file.
    pub(crate) tensors: usize,
    /// How many times they were loaded.
    pub(crate) loads: u64,
    /// Bytes of all loads.
    pub(crate) bytes: u64,
    /// Time in loads: until the device had the tensors, without comparing.
    pub(crate) seconds: f64,
    pub(crate) gigabytes_per_second: f64,
    /// Each copy is one of the four that follow.
    pub(crate) copies: u64,
    pub(crate) pageable_copies: u64,
    /// Waited for. On a device that reads pageable memory late, all are.
    pub(crate) pinned_copies: u64,
    pub(crate) split_copies: u64,
    pub(crate) bounced_copies: u64,
    /// Copies from memory that was rewritten right after the call.
    pub(crate) private_copies: u64,
    /// Chunks of the file that were page-locked.
    pub(crate) pinned_chunks: u64,
    /// How long that took, if it was done once. The simulated driver is slowed
    /// down to the pace of a real one.
    pub(crate) pinning_seconds: Option<f64>,
    /// Why the file was not page-locked, if it should have been.
    pub(crate) pinning_error: Option<String>,
    /// Tensors that were not on the device what they are in the file.
    pub(crate) mismatched_tensors: u64,
    pub(crate) torn_transfers: u64,
    /// `driver`: counted by the simulated driver at each transfer.
    /// `contents`: a real driver does not count; this is `mismatched_tensors`.
    pub(crate) torn_transfers_from: &'static str,
    /// Null on a real driver, where nothing can count them.
    pub(crate) dead_reads: Option<u64>,
}

impl Figures {
    pub(crate) fn new(
        driver: &Driver,
        device: String,
        streams: u16,
        weights: &Weights,
        totals: &Totals,
    ) -> Self {
        let bytes = weights.bytes() * totals.loads;
        let seconds = totals.elapsed.as_secs_f64();
        let copies = &totals.copies;
        let counted = driver.counters();
        Self {
            driver: driver.name(),
            is_simulated: driver.is_simulated(),
            device,
            streams,
            tensors: weights.tensors().len(),
            loads: totals.loads,
            bytes,
            seconds,
            gigabytes_per_second: if seconds > 0.0 {
                bytes as f64 / 1e9 / seconds
            } else {
                0.0
            },
            copies: copies.all,
            pageable_copies: copies.pageable,
            pinned_copies: copies.pinned,
            split_copies: copies.split,
            bounced_copies: copies.bounced,
            private_copies: copies.private,
            pinned_chunks: totals.pins,
            pinning_seconds: match &totals.pinning {
                Pinning::Done(elapsed) => Some(elapsed.as_secs_f64()),
                _ => None,
            },
            pinning_error: match &totals.pinning {
                Pinning::Failed(error) => Some(error.clone()),
                _ => None,
            },
            mismatched_tensors: totals.mismatched,
            torn_transfers: counted.map_or(totals.mismatched, |counted| counted.torn_transfers),
            torn_transfers_from: counted.map_or("contents", |_| "driver"),
            dead_reads: counted.map(|counted| counted.dead_reads),
        }
    }

    /// Whether the device holds what the file holds, and read nothing that had
    /// changed or was gone.
    pub(crate) fn is_sound(&self) -> bool {
        self.mismatched_tensors == 0
            && self.torn_transfers == 0
            && self.dead_reads.unwrap_or(0) == 0
    }
}
