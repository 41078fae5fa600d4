//! What a [`Copier`](super::Copier) does with a page-locked borrowed source.

/// What a copy does with a borrowed source that the device may read after the
/// call: one that is page-locked, or any source on a device that reads
/// pageable memory directly.
///
/// | policy | costs the caller | costs the stream |
/// |---|---|---|
/// | `Stage` | a copy by the CPU: about 0.1 µs for 4 KB, 10 µs for 256 KB | nothing |
/// | `Wait` | the time until the device has done all earlier work of the stream, and the copy | it has nothing to do until the next call |
/// | `Deny` | an error | nothing |
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Policy {
    /// Copies the source into the copier's staging ring, which the device then
    /// reads: nobody waits, unless the ring is full of copies still to be read.
    /// What the device gets are the bytes of the moment
    /// of the call.
    ///
    /// A source larger than [`stage_limit`](CopierOptions::stage_limit) is
    /// waited for instead. So is write-combined memory that was registered as
    /// [such](crate::Registry::register_write_combined), since reading it is
    /// slow; any source on the per-thread default stream, which is another
    /// stream on each thread; and any source if the driver cannot page-lock
    /// memory for the ring.
    #[default]
    Stage,
    /// Waits until the device has read the source.
    Wait,
    /// Refuses the copy ([`CudaError::Denied`](super::CudaError::Denied)), and
    /// [`copy_d2h_async`](super::Copier::copy_d2h_async) into page-locked
    /// memory: for tests that are to show that a program has no such copies.
    ///
    /// A policy has no say in scopes, owned buffers and
    /// [`CheckedCopies`](super::CheckedCopies).
    Deny,
}

/// How a [`Copier`](super::Copier) copies.
///
/// ```
/// use pinned_hosts::cuda::{CopierOptions, Policy};
///
/// let options = CopierOptions::default()
///     .policy(Policy::Stage)
///     .stage_limit(128 << 10)
///     .ring_limit(8 << 20);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct CopierOptions {
    pub(super) policy: Policy,
    pub(super) stage_limit: usize,
    pub(super) ring_limit: usize,
    pub(super) trusts_pageable_access: bool,
}

/// Larger sources than this are never staged.
const LARGEST_STAGE_LIMIT: usize = 64 << 20;

impl Default for CopierOptions {
    /// [`Policy::Stage`] up to 256 KiB, in a ring of up to 16 MiB.
    fn default() -> Self {
        Self {
            policy: Policy::default(),
            stage_limit: 256 << 10,
            ring_limit: 16 << 20,
            trusts_pageable_access: false,
        }
    }
}

impl CopierOptions {
    /// What to do with page-locked borrowed sources, unless a call says
    /// otherwise.
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// The largest source to stage, in bytes: 256 KiB if not set, which the
    /// CPU copies in about the time that a copy by the device and a wait for
    /// it take on an idle stream; at most 64 MiB. With 0, none is staged.
    pub fn stage_limit(mut self, bytes: usize) -> Self {
        self.stage_limit = bytes.min(LARGEST_STAGE_LIMIT);
        self
    }

    /// How much memory to page-lock for the staging ring, at most, in bytes:
    /// 16 MiB if not set. At least one source of the largest size has room,
    /// whatever is set.
    ///
    /// The ring begins empty, and grows in steps of four times
    /// [`stage_limit`](Self::stage_limit) while the device keeps it in use.
    /// Once it may not grow, a copy waits for the oldest step of it.
    pub fn ring_limit(mut self, bytes: usize) -> Self {
        self.ring_limit = bytes;
        self
    }

    /// Takes pageable memory for staged by the driver on devices that can
    /// access it directly but do not use the host's page tables (attribute
    /// `PAGEABLE_MEMORY_ACCESS`, without `…_USES_HOST_PAGE_TABLES` and
    /// `INTEGRATED`: Linux' heterogeneous memory management on x86).
    ///
    /// Without it, every source counts as read late there, since no document
    /// promises that it is staged.
    ///
    /// # Safety
    ///
    /// The driver must stage pageable sources before the copy call returns.
    /// Measure it on your devices: `tests/driver_conformance` does.
    pub unsafe fn trust_pageable_access(mut self) -> Self {
        self.trusts_pageable_access = true;
        self
    }
}
