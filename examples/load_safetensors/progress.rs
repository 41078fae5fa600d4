//! How far the load is, as all threads see it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{BinaryBytes, HumanCount};

use crate::support::bar::Bar;

// All accesses are relaxed: they are numbers to show.
pub(crate) struct Progress {
    bar: Bar,
    started: OnceLock<Instant>,
    /// If the load is repeated, for how long.
    duration: Option<Duration>,
    copied: AtomicU64,
    pinned: AtomicU64,
    pins: AtomicU64,
    loads: AtomicU64,
}

impl Progress {
    pub(crate) fn new(duration: Option<Duration>) -> Self {
        Self {
            bar: Bar::new(duration.map_or(0, milliseconds)),
            started: OnceLock::new(),
            duration,
            copied: AtomicU64::new(0),
            pinned: AtomicU64::new(0),
            pins: AtomicU64::new(0),
            loads: AtomicU64::new(0),
        }
    }

    pub(crate) fn bar(&self) -> &Bar {
        &self.bar
    }

    /// From now on it is worked; one load is so many bytes.
    pub(crate) fn begin(&self, bytes: u64) {
        self.started.get_or_init(Instant::now);
        if self.duration.is_none() {
            self.bar.set_length(bytes);
        }
    }

    pub(crate) fn copied(&self, bytes: usize) {
        self.copied.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn loaded(&self) {
        self.loads.fetch_add(1, Ordering::Relaxed);
    }

    /// So much of the file is page-locked now, by one more chunk.
    pub(crate) fn pinned(&self, bytes: usize) {
        self.pinned.store(bytes as u64, Ordering::Relaxed);
        self.pins.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn unpinned(&self) {
        self.pinned.store(0, Ordering::Relaxed);
    }

    /// How many chunks have been page-locked.
    pub(crate) fn pins(&self) -> u64 {
        self.pins.load(Ordering::Relaxed)
    }

    pub(crate) fn show(&self) {
        let copied = self.copied.load(Ordering::Relaxed);
        // Of a fixed width, so that the bar's does not change all the time.
        let figures = format!(
            "{:>10} copied {:>10} pinned",
            BinaryBytes(copied).to_string(),
            BinaryBytes(self.pinned.load(Ordering::Relaxed)).to_string()
        );
        let Some(duration) = self.duration else {
            self.bar.show(copied, figures);
            return;
        };
        let started = *self.started.get_or_init(Instant::now);
        let passed = started.elapsed().min(duration);
        let loads = HumanCount(self.loads.load(Ordering::Relaxed));
        let seconds = passed.as_secs_f64();
        let message = format!("{seconds:.1} s {loads} loads {figures}");
        self.bar.show(milliseconds(passed), message);
    }

    pub(crate) fn end(&self) {
        self.bar.end();
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
