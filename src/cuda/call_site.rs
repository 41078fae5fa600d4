//! Tells each call site once that its copy had to be slowed down.

use std::collections::HashSet;
use std::panic::Location;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

use super::CudaError;
use crate::{Region, Residency, log};

/// Whether this is the first time that `site` asks. Only slow copies ask, so
/// the lock costs nothing that shows.
pub(super) fn is_first_time(site: &Location<'static>) -> bool {
    // By value: each instance of a generic function has a location of its own.
    static SEEN: LazyLock<Mutex<HashSet<Location<'static>>>> = LazyLock::new(Mutex::default);
    SEEN.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .insert(*site)
}

/// Says at `site` that a copy had to be waited for.
pub(super) fn warn(
    site: &Location<'static>,
    region: Option<Region>,
    residency: Residency,
    cost: Duration,
    no_ring: Option<&CudaError>,
) {
    let no_ring = no_ring.map(tracing::field::display);
    log::emit(|| match residency {
        Residency::Pinned | Residency::Seam | Residency::Mixed => tracing::warn!(
            %site, region = region.map(tracing::field::display), ?residency, ?cost, no_ring,
            "a copy from page-locked memory waited for the device: Policy::Stage (for registered \
             sources within its limit), Copier::copy_h2d_from, upload and scope would not"
        ),
        Residency::Pageable => tracing::warn!(
            %site, ?residency, ?cost, no_ring,
            "a copy waited for the device, which may read pageable memory late: Policy::Stage (for \
             sources within its limit), Copier::copy_h2d_from and upload would not; if the driver \
             stages such memory on this device, see CopierOptions::trust_pageable_access"
        ),
    });
}
