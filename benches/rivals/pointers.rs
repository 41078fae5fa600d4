//! Immutable sets behind a pointer, as this crate has them, with other ways to
//! keep a set alive while somebody searches it. A change copies the set.

use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use crossbeam_epoch::{self as epoch, Atomic, Owned};
use seize::{Collector, Guard as _, reclaim};

use super::{Bounds, Changeable, Contestant, contains, with, without};

/// `ArcSwap::load`, without a cache per thread: a debt is noted and paid back
/// for each lookup.
pub(crate) struct ArcSwapLoad(ArcSwap<Vec<Bounds>>);

impl Contestant for ArcSwapLoad {
    const NAME: &'static str = "ArcSwap::load";

    fn holding(regions: &[Bounds]) -> Self {
        Self(ArcSwap::from_pointee(regions.to_vec()))
    }

    fn asker(&self) -> impl FnMut(&[u8]) -> bool {
        |bytes| contains(&self.0.load(), bytes)
    }
}

impl Changeable for ArcSwapLoad {
    type Key<'a> = Bounds;

    fn insert(&self, region: Bounds) -> Bounds {
        self.0.rcu(|regions| Arc::new(with(regions, region)));
        region
    }

    fn remove(&self, region: Bounds) {
        self.0.rcu(|regions| Arc::new(without(regions, region)));
    }
}

/// A pointer that `crossbeam-epoch` guards: the thread is pinned for each
/// lookup. Writers take turns.
pub(crate) struct EpochPointer {
    published: Atomic<Vec<Bounds>>,
    writing: Mutex<()>,
}

impl EpochPointer {
    fn publish(&self, next: impl FnOnce(&[Bounds]) -> Vec<Bounds>) {
        let _alone = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let guard = epoch::pin();
        let now = self.published.load(Ordering::Relaxed, &guard);
        // Safety: never null, and only a writer, who is alone, retires it.
        let next = next(unsafe { now.deref() });
        self.published.store(Owned::new(next), Ordering::Release);
        // Safety: no longer published, so nobody can find it from here on.
        unsafe { guard.defer_destroy(now) };
    }
}

impl Contestant for EpochPointer {
    const NAME: &'static str = "crossbeam-epoch";

    fn holding(regions: &[Bounds]) -> Self {
        Self {
            published: Atomic::new(regions.to_vec()),
            writing: Mutex::new(()),
        }
    }

    fn asker(&self) -> impl FnMut(&[u8]) -> bool {
        |bytes| {
            let guard = epoch::pin();
            let regions = self.published.load(Ordering::Acquire, &guard);
            // Safety: never null, and destroyed only after the guard is gone.
            contains(unsafe { regions.deref() }, bytes)
        }
    }
}

impl Changeable for EpochPointer {
    type Key<'a> = Bounds;

    fn insert(&self, region: Bounds) -> Bounds {
        self.publish(|regions| with(regions, region));
        region
    }

    fn remove(&self, region: Bounds) {
        self.publish(|regions| without(regions, region));
    }
}

impl Drop for EpochPointer {
    fn drop(&mut self) {
        // Safety: never null, and nobody else is left.
        drop(unsafe { std::mem::take(&mut self.published).into_owned() });
    }
}

/// A pointer that `seize` guards: the collector is entered for each lookup.
/// Writers take turns.
pub(crate) struct SeizePointer {
    published: AtomicPtr<Vec<Bounds>>,
    collector: Collector,
    writing: Mutex<()>,
}

impl SeizePointer {
    fn publish(&self, next: impl FnOnce(&[Bounds]) -> Vec<Bounds>) {
        let _alone = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.published.load(Ordering::Relaxed);
        // Safety: never null, and only a writer, who is alone, retires it.
        let next = next(unsafe { &*now });
        let next = Box::into_raw(Box::new(next));
        self.published.store(next, Ordering::Release);
        // Safety: it came from a box and is no longer published, so nobody can
        // find it from here on.
        unsafe { self.collector.retire(now, reclaim::boxed) };
    }
}

impl Contestant for SeizePointer {
    const NAME: &'static str = "seize";

    fn holding(regions: &[Bounds]) -> Self {
        Self {
            published: AtomicPtr::new(Box::into_raw(Box::new(regions.to_vec()))),
            collector: Collector::new(),
            writing: Mutex::new(()),
        }
    }

    fn asker(&self) -> impl FnMut(&[u8]) -> bool {
        |bytes| {
            let guard = self.collector.enter();
            let regions = guard.protect(&self.published, Ordering::Acquire);
            // Safety: never null, and freed only after the guard is gone.
            contains(unsafe { &*regions }, bytes)
        }
    }
}

impl Changeable for SeizePointer {
    type Key<'a> = Bounds;

    fn insert(&self, region: Bounds) -> Bounds {
        self.publish(|regions| with(regions, region));
        region
    }

    fn remove(&self, region: Bounds) {
        self.publish(|regions| without(regions, region));
    }
}

impl Drop for SeizePointer {
    fn drop(&mut self) {
        // Safety: never null, from a box, and nobody else is left.
        drop(unsafe { Box::from_raw(*self.published.get_mut()) });
    }
}
