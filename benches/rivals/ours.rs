//! This crate's own ways to ask.

use std::ptr;

use pinned_hosts::{Region, Registration, Registry, global};

use super::{Bounds, Changeable, Contestant};

pub(crate) fn region(bounds: Bounds) -> Region {
    let base = ptr::without_provenance(bounds.start);
    Region::new(base, bounds.end - bounds.start).expect("a workload has no empty region")
}

/// `is_pinned`, the free function: the process-wide registry.
///
/// What one size needs stays for the next one, since to take a million regions
/// away one by one would take a million publishes. So sizes have to grow, and
/// larger workloads have to begin with the regions of smaller ones.
pub(crate) struct ProcessWide;

impl Contestant for ProcessWide {
    const NAME: &'static str = "is_pinned";

    fn holding(regions: &[Bounds]) -> Self {
        let standing = global().live_count();
        let _ = global().register_all(regions[standing..].iter().copied().map(region));
        Self
    }

    fn asker(&self) -> impl FnMut(&[u8]) -> bool {
        pinned_hosts::is_pinned
    }
}

impl Changeable for ProcessWide {
    type Key<'a> = Registration<'a>;

    fn insert(&self, bounds: Bounds) -> Registration<'_> {
        global().register(region(bounds))
    }

    fn remove(&self, registration: Registration<'_>) {
        registration.unregister();
    }
}

/// A registry of one's own, asked directly.
pub(crate) struct OwnRegistry(Registry);

impl Contestant for OwnRegistry {
    const NAME: &'static str = "Registry";

    fn holding(regions: &[Bounds]) -> Self {
        let registry = Registry::new();
        let _ = registry.register_all(regions.iter().copied().map(region));
        Self(registry)
    }

    fn asker(&self) -> impl FnMut(&[u8]) -> bool {
        |bytes| self.0.is_pinned(bytes)
    }
}

impl Changeable for OwnRegistry {
    type Key<'a> = Registration<'a>;

    fn insert(&self, bounds: Bounds) -> Registration<'_> {
        self.0.register(region(bounds))
    }

    fn remove(&self, registration: Registration<'_>) {
        registration.unregister();
    }
}

/// A registry of one's own, asked through a `Reader` per thread.
pub(crate) struct OwnReader(OwnRegistry);

impl Contestant for OwnReader {
    const NAME: &'static str = "Reader";

    fn holding(regions: &[Bounds]) -> Self {
        Self(OwnRegistry::holding(regions))
    }

    fn asker(&self) -> impl FnMut(&[u8]) -> bool {
        let mut reader = self.0.0.reader();
        move |bytes| reader.is_pinned(bytes)
    }
}

impl Changeable for OwnReader {
    type Key<'a> = Registration<'a>;

    fn insert(&self, bounds: Bounds) -> Registration<'_> {
        self.0.insert(bounds)
    }

    fn remove(&self, registration: Registration<'_>) {
        self.0.remove(registration);
    }
}
