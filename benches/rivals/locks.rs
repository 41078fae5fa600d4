//! The set behind a lock, changed in place. Each lookup writes to the lock,
//! which every other reader's core then has to fetch.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError, RwLock};

use super::{Bounds, Changeable, Contestant, contains, insert_sorted, remove_sorted};

/// `std`'s reader-writer lock around a sorted vector: what most programs would
/// write first.
pub(crate) struct StdRwLock(RwLock<Vec<Bounds>>);

impl Contestant for StdRwLock {
    const NAME: &'static str = "RwLock<Vec>";

    fn holding(regions: &[Bounds]) -> Self {
        Self(RwLock::new(regions.to_vec()))
    }

    fn asker(&self) -> impl FnMut(&[u8]) -> bool {
        |bytes| {
            let regions = self.0.read().unwrap_or_else(PoisonError::into_inner);
            contains(&regions, bytes)
        }
    }
}

impl Changeable for StdRwLock {
    type Key<'a> = Bounds;

    fn insert(&self, region: Bounds) -> Bounds {
        let mut regions = self.0.write().unwrap_or_else(PoisonError::into_inner);
        insert_sorted(&mut regions, region);
        region
    }

    fn remove(&self, region: Bounds) {
        let mut regions = self.0.write().unwrap_or_else(PoisonError::into_inner);
        remove_sorted(&mut regions, region);
    }
}

/// The same behind `parking_lot`'s lock.
pub(crate) struct ParkingLot(parking_lot::RwLock<Vec<Bounds>>);

impl Contestant for ParkingLot {
    const NAME: &'static str = "parking_lot";

    fn holding(regions: &[Bounds]) -> Self {
        Self(parking_lot::RwLock::new(regions.to_vec()))
    }

    fn asker(&self) -> impl FnMut(&[u8]) -> bool {
        |bytes| contains(&self.0.read(), bytes)
    }
}

impl Changeable for ParkingLot {
    type Key<'a> = Bounds;

    fn insert(&self, region: Bounds) -> Bounds {
        insert_sorted(&mut self.0.write(), region);
        region
    }

    fn remove(&self, region: Bounds) {
        remove_sorted(&mut self.0.write(), region);
    }
}

/// `std`'s tree behind a mutex: changes cost the same at any size, nearly.
pub(crate) struct MutexTree(Mutex<BTreeMap<usize, usize>>);

impl Contestant for MutexTree {
    const NAME: &'static str = "Mutex<BTreeMap>";

    fn holding(regions: &[Bounds]) -> Self {
        let ends = regions.iter().map(|region| (region.start, region.end));
        Self(Mutex::new(ends.collect()))
    }

    fn asker(&self) -> impl FnMut(&[u8]) -> bool {
        |bytes| {
            let wanted = Bounds::of(bytes);
            let ends = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let last_started = ends.range(..=wanted.start).next_back();
            !bytes.is_empty() && last_started.is_some_and(|(_, &end)| end >= wanted.end)
        }
    }
}

impl Changeable for MutexTree {
    type Key<'a> = Bounds;

    fn insert(&self, region: Bounds) -> Bounds {
        let mut ends = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ends.insert(region.start, region.end);
        region
    }

    fn remove(&self, region: Bounds) {
        let mut ends = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ends.remove(&region.start);
    }
}
