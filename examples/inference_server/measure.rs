//! What a lookup and a copy call cost, taken on the streams' threads while
//! they work.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use hdrhistogram::Histogram;
use pinned_hosts::cuda::{Copier, PinnedBuffer};

/// Lookups in one sample: reading the clock takes as long as some ten.
pub(crate) const LOOKUPS: u32 = 64;
/// The source of the copies whose calls are timed.
pub(crate) const SOURCE_BYTES: usize = 4096;

const LONGEST_NS: u64 = 60_000_000_000;

/// Times, in nanoseconds.
pub(crate) struct Times {
    /// Of [`LOOKUPS`] lookups.
    pub(crate) lookups: Histogram<u64>,
    pub(crate) checked_call: Histogram<u64>,
    pub(crate) unchecked_call: Histogram<u64>,
    /// The most regions that there were when a sample was taken.
    pub(crate) most_regions: usize,
}

impl Times {
    pub(crate) fn new() -> anyhow::Result<Self> {
        let times = || Histogram::new_with_bounds(1, LONGEST_NS, 3);
        Ok(Self {
            lookups: times()?,
            checked_call: times()?,
            unchecked_call: times()?,
            most_regions: 0,
        })
    }

    pub(crate) fn add(&mut self, other: &Self) -> anyhow::Result<()> {
        self.lookups.add(&other.lookups)?;
        self.checked_call.add(&other.checked_call)?;
        self.unchecked_call.add(&other.unchecked_call)?;
        self.most_regions = self.most_regions.max(other.most_regions);
        Ok(())
    }

    /// The time of one lookup that so large a share of the samples kept to.
    pub(crate) fn lookup_ns(&self, quantile: f64) -> f64 {
        self.lookups.value_at_quantile(quantile) as f64 / f64::from(LOOKUPS)
    }
}

/// Takes samples on one stream, beside the job, and the same ones whether the
/// job is guarded or not.
pub(crate) struct Probe {
    copier: Copier,
    /// Never freed: an unchecked copy may be read late (on a device that reads
    /// pageable memory directly), and an error may end the run before that.
    pageable: &'static [u8],
    pinned: PinnedBuffer<u8>,
    on_device: CudaSlice<u8>,
    checked_first: bool,
    pub(crate) times: Times,
}

impl Probe {
    pub(crate) fn new(
        context: &Arc<CudaContext>,
        stream: &Arc<CudaStream>,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            copier: Copier::new(stream)?,
            pageable: vec![1; SOURCE_BYTES].leak(),
            pinned: PinnedBuffer::zeroed(context, SOURCE_BYTES)?,
            on_device: stream.alloc_zeros(SOURCE_BYTES)?,
            checked_first: false,
            times: Times::new()?,
        })
    }

    pub(crate) fn sample(&mut self) -> anyhow::Result<()> {
        self.time_lookups();
        // In turns, so that neither always finds the emptier queue.
        self.checked_first = !self.checked_first;
        if self.checked_first {
            self.time_checked_call()?;
            self.time_unchecked_call()
        } else {
            self.time_unchecked_call()?;
            self.time_checked_call()
        }
    }

    /// The question that each copy asks: pageable and page-locked sources, a
    /// part of them and all.
    fn time_lookups(&mut self) {
        let on_the_stack = [0_u8; 128];
        let sources: [&[u8]; 4] = [
            &on_the_stack,
            self.pageable,
            &self.pinned[1024..2048],
            &self.pinned,
        ];
        let started = Instant::now();
        for _ in 0..LOOKUPS as usize / sources.len() {
            for source in sources {
                black_box(pinned_hosts::residency(black_box(source)));
            }
        }
        self.times.lookups.saturating_record(nanoseconds(started));
        let regions = pinned_hosts::live_count();
        self.times.most_regions = self.times.most_regions.max(regions);
    }

    fn time_checked_call(&mut self) -> anyhow::Result<()> {
        let started = Instant::now();
        self.copier
            .copy_h2d_async(self.pageable, &mut self.on_device)?;
        self.times
            .checked_call
            .saturating_record(nanoseconds(started));
        Ok(())
    }

    /// Sound without a check: the source stays as it is, for ever.
    fn time_unchecked_call(&mut self) -> anyhow::Result<()> {
        let started = Instant::now();
        self.copier
            .stream()
            .memcpy_htod(self.pageable, &mut self.on_device)?;
        self.times
            .unchecked_call
            .saturating_record(nanoseconds(started));
        Ok(())
    }
}

fn nanoseconds(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
