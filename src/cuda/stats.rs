//! [`CopyStats`]: what a copier has done.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What a [`Copier`](super::Copier) has done since it was made. Copies count
/// once they got as far as the driver, whether or not they succeeded; those
/// denied never do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CopyStats {
    /// Copies whose source the driver staged: no wait.
    pub pageable: u64,
    /// Copies through the staging ring: no wait, except for room in it.
    pub staged: u64,
    /// Copies that had to be waited for, because the device may read their
    /// borrowed source late, or because their device memory has no event to note
    /// the use by (those count among their own kind, too).
    pub guarded: u64,
    /// Copies that were split at region boundaries.
    pub split: u64,
    /// Copies that [`Policy::Deny`](super::Policy::Deny) refused.
    pub denied: u64,
    /// Copies from and to a [`PinnedBuffer`](super::PinnedBuffer) that keeps
    /// itself alive: no wait.
    pub owned: u64,
    /// Copies in a [`scope`](super::Copier::scope), which waits for them at
    /// its end.
    pub scoped: u64,
    /// Copies from memory that was about to be unpinned, made through the
    /// heap.
    pub bounced: u64,
    /// Calls of [`copy_d2h_async`](super::Copier::copy_d2h_async): all are
    /// waited for. ([`Copier::download`](super::Copier::download) counts as
    /// owned.)
    pub downloads: u64,
    /// Time spent in guarded copies and in downloads; not in waits for the
    /// ring.
    pub waited: Duration,
    /// Bytes copied through the staging ring.
    pub staged_bytes: u64,
    /// How often a copy waited for room in the staging ring.
    pub ring_waits: u64,
    /// Bytes that the staging ring has grown to. It does not shrink, so this
    /// is the most that was in use, in steps.
    pub ring_bytes: u64,
}

#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) pageable: Count,
    pub(super) staged: Count,
    pub(super) guarded: Count,
    pub(super) split: Count,
    pub(super) denied: Count,
    pub(super) owned: Count,
    pub(super) scoped: Count,
    pub(super) bounced: Count,
    pub(super) downloads: Count,
    pub(super) waited_ns: Count,
    pub(super) staged_bytes: Count,
    pub(super) ring_waits: Count,
    pub(super) ring_bytes: Count,
}

impl Counts {
    pub(super) fn read(&self) -> CopyStats {
        CopyStats {
            pageable: self.pageable.get(),
            staged: self.staged.get(),
            guarded: self.guarded.get(),
            split: self.split.get(),
            denied: self.denied.get(),
            owned: self.owned.get(),
            scoped: self.scoped.get(),
            bounced: self.bounced.get(),
            downloads: self.downloads.get(),
            waited: Duration::from_nanos(self.waited_ns.get()),
            staged_bytes: self.staged_bytes.get(),
            ring_waits: self.ring_waits.get(),
            ring_bytes: self.ring_bytes.get(),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Count(AtomicU64);

impl Count {
    // Relaxed, both: each count stands alone, and orders nothing.
    pub(super) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(super) fn add_size(&self, n: usize) {
        self.add(u64::try_from(n).unwrap_or(u64::MAX));
    }

    pub(super) fn add_time(&self, time: Duration) {
        self.add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
