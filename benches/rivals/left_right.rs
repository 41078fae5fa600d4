//! Two copies of the set: readers use one while the writer changes the other.

use std::sync::{Mutex, PoisonError};

use left_right::{Absorb, ReadHandleFactory, WriteHandle};

use super::{Bounds, Changeable, Contestant, contains, insert_sorted, remove_sorted};

/// `left-right` with a read handle per thread. A lookup writes to two counters
/// of its own thread; a publish waits for every lookup that is under way, and
/// each change is made twice.
pub(crate) struct LeftRight {
    writer: Mutex<WriteHandle<Set, Change>>,
    readers: ReadHandleFactory<Set>,
}

#[derive(Clone, Default)]
struct Set(Vec<Bounds>);

enum Change {
    All(Vec<Bounds>),
    Insert(Bounds),
    Remove(Bounds),
}

impl Absorb<Change> for Set {
    fn absorb_first(&mut self, change: &mut Change, _: &Self) {
        match change {
            Change::All(regions) => self.0.clone_from(regions),
            Change::Insert(region) => insert_sorted(&mut self.0, *region),
            Change::Remove(region) => remove_sorted(&mut self.0, *region),
        }
    }

    fn sync_with(&mut self, first: &Self) {
        self.0.clone_from(&first.0);
    }
}

impl LeftRight {
    fn change(&self, change: Change) {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        writer.append(change).publish();
    }
}

impl Contestant for LeftRight {
    const NAME: &'static str = "left-right";

    fn holding(regions: &[Bounds]) -> Self {
        let (writer, reader) = left_right::new();
        let this = Self {
            writer: Mutex::new(writer),
            readers: reader.factory(),
        };
        this.change(Change::All(regions.to_vec()));
        this
    }

    fn asker(&self) -> impl FnMut(&[u8]) -> bool {
        let reader = self.readers.handle();
        // There is nothing to enter only once the writer is gone.
        move |bytes| reader.enter().is_some_and(|set| contains(&set.0, bytes))
    }
}

impl Changeable for LeftRight {
    type Key<'a> = Bounds;

    fn insert(&self, region: Bounds) -> Bounds {
        self.change(Change::Insert(region));
        region
    }

    fn remove(&self, region: Bounds) {
        self.change(Change::Remove(region));
    }
}
