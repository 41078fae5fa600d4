//! The figures of a run, as they are written to the JSON file.

use cuda_sim::Counters;
use serde::Serialize;

use crate::run::Totals;

/// One run.
#[derive(Debug, Serialize)]
pub(crate) struct Figures {
    /// `real` or `simulated`.
    pub(crate) driver: &'static str,
    /// The device's name.
    pub(crate) device: String,
    pub(crate) unguarded: bool,
    /// `stage`, `wait` or `deny`.
    pub(crate) policy: &'static str,
    pub(crate) streams: u16,
    pub(crate) seconds: f64,
    /// Whether that is more than was asked for, to make all kinds of copies.
    pub(crate) lengthened: bool,
    pub(crate) steps: u64,
    /// All copies of the job, by the residency of their source.
    pub(crate) copies: u64,
    pub(crate) pageable_sources: u64,
    pub(crate) pinned_sources: u64,
    /// Page-locked, borrowed sources: copied through the staging ring; waited
    /// for, those split included; split; and denied, so not copied.
    pub(crate) staged: u64,
    pub(crate) waited: u64,
    pub(crate) split: u64,
    pub(crate) denied: u64,
    pub(crate) owned_copies: u64,
    /// With `--unguarded`: page-locked sources that nobody looked after, and
    /// copies of sources page-locked in part, which the driver refused.
    pub(crate) unguarded_copies: u64,
    pub(crate) refused_copies: u64,
    pub(crate) torn_transfers: u64,
    /// `driver`: counted by the simulated driver at each transfer.
    /// `contents`: a real driver does not count; this is `contents_wrong`.
    pub(crate) torn_transfers_from: &'static str,
    /// Null on a real driver, where nothing can count them.
    pub(crate) dead_reads: Option<u64>,
    /// Copies that were read back from the device and compared with what the
    /// source held at the call.
    pub(crate) contents_compared: u64,
    pub(crate) contents_wrong: u64,
    /// Mean of a batch of lookups; the quantiles are over batches.
    pub(crate) lookup_ns_p50: f64,
    pub(crate) lookup_ns_p99: f64,
    /// The call alone, for one and the same pageable source.
    pub(crate) copy_call_ns_p50: u64,
    pub(crate) unchecked_copy_call_ns_p50: u64,
    pub(crate) waited_copy_ns_mean: u64,
    /// How often a stream had nothing to do, because it had been waited for,
    /// until the next copy, and for how much of the time. (Each step ends with
    /// such a wait.) It may idle more than that, where it is faster than the
    /// host.
    pub(crate) stream_drains: u64,
    pub(crate) stream_idle_fraction: f64,
    /// Buffers pinned and unpinned while the streams copied, by the pinning
    /// thread and as temporaries of the steps.
    pub(crate) pins: u64,
    pub(crate) most_regions: usize,
}

impl Figures {
    pub(crate) fn new(
        driver: &'static str,
        device: String,
        unguarded: bool,
        policy: &'static str,
        streams: u16,
        totals: &Totals,
        counted: Option<Counters>,
    ) -> Self {
        let (counts, checks, times) = (&totals.counts, &totals.checks, &totals.times);
        Self {
            driver,
            device,
            unguarded,
            policy,
            streams,
            seconds: totals.elapsed.as_secs_f64(),
            lengthened: totals.lengthened,
            steps: totals.steps,
            copies: counts.copies(),
            pageable_sources: counts.pageable,
            pinned_sources: counts.pinned_sources(),
            staged: counts.staged,
            waited: counts.waited,
            split: counts.split,
            denied: counts.denied,
            owned_copies: counts.owned,
            unguarded_copies: counts.unguarded,
            refused_copies: counts.refused,
            torn_transfers: counted.map_or(checks.wrong, |counted| counted.torn_transfers),
            torn_transfers_from: counted.map_or("contents", |_| "driver"),
            dead_reads: counted.map(|counted| counted.dead_reads),
            contents_compared: checks.compared,
            contents_wrong: checks.wrong,
            lookup_ns_p50: times.lookup_ns(0.5),
            lookup_ns_p99: times.lookup_ns(0.99),
            copy_call_ns_p50: times.checked_call.value_at_quantile(0.5),
            unchecked_copy_call_ns_p50: times.unchecked_call.value_at_quantile(0.5),
            waited_copy_ns_mean: counts.waited_ns.checked_div(counts.waited).unwrap_or(0),
            stream_drains: counts.drains,
            stream_idle_fraction: counts.idle_ns as f64
                / (totals.elapsed.as_nanos() as f64 * f64::from(streams)),
            pins: totals.pins,
            most_regions: times.most_regions,
        }
    }

    /// Whether the device read nothing that had changed or was gone.
    pub(crate) fn is_sound(&self) -> bool {
        self.torn_transfers == 0 && self.dead_reads.unwrap_or(0) == 0 && self.contents_wrong == 0
    }
}
