//! Snapshots that were superseded and that readers may still hold.
//!
//! # Why no reader frees a snapshot
//!
//! Whoever drops the last hold on a snapshot frees it: up to all nodes of a
//! tree, in an allocator that may lock. So a writer puts its hold on the snapshot
//! that it superseded onto a stack, before it drops any other hold, and only
//! writers take holds off the stack. Such a writer, in a *walk*, drops a hold only
//! if it is the last one, and puts the others back. So the hold that a reader
//! drops is never the last one.
//!
//! A walk asks whether a hold is the last one by the count of the `Arc`. That one
//! answer suffices because the count of a superseded snapshot never rises from
//! one again. To clone a hold takes a hold beside that of the stack. And no load
//! of the published snapshot takes a hold on one that is superseded: when
//! `compare_and_swap` of `arc-swap` returns to the writer, that crate has looked at
//! each place where a load may have written down a debt, and has paid each debt
//! for the superseded snapshot by raising its count. A load that writes such a
//! debt later looks again whether that snapshot is still the published one
//! before it uses it. It is not, and the load takes back its debt without having
//! touched the count. A load that turns its debt into a hold raises the count
//! before it strikes out the debt. So the writer, which found no debt,
//! has acquired that raise, and passes it on to the walk with the stack.
//!
//! # How many are kept
//!
//! A thread that is idle holds the snapshot that it saw last, and ten thousand
//! idle threads may hold as many. So that not each publish looks at all of them, a
//! walk is due once a quarter more are kept than the last walk left. Each publish
//! then looks at five of them on average. At most as many are kept as readers held
//! at the last walk, a quarter more, and one for each writer that is at it.
//!
//! A snapshot that a reader drops stays until a walk, so until some publish.

use std::marker::PhantomData;
use std::ptr;

use crate::sync::{Arc, AtomicPtr, AtomicUsize, Ordering, modelled_only, weakened};

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct Retired<T> {
    /// The top of the stack; null if it is empty.
    top: AtomicPtr<Room<T>>,
    /// How many are kept, those that a walk looks at included.
    kept: AtomicUsize,
    /// A walk is due once more are kept.
    walk_above: AtomicUsize,
    _holds: PhantomData<Arc<T>>,
}

/// Room for one hold on the stack. A writer makes it before it publishes, so that
/// it allocates nothing afterwards.
#[derive(Debug)]
pub(crate) struct Room<T> {
    hold: Option<Arc<T>>,
    /// The room below, which belongs to whoever this one belongs to; or null.
    below: *mut Self,
}

impl<T> Room<T> {
    pub(crate) fn new() -> Box<Self> {
        Box::new(Self {
            hold: None,
            below: ptr::null_mut(),
        })
    }

    fn has_last_hold(&self) -> bool {
        weakened!("held_is_dropped" => { return true });
        self.hold
            .as_ref()
            .is_none_or(|hold| Arc::strong_count(hold) == 1)
    }
}

impl<T> Retired<T> {
    pub(crate) fn new() -> Self {
        Self {
            top: AtomicPtr::new(ptr::null_mut()),
            kept: AtomicUsize::new(0),
            walk_above: AtomicUsize::new(0),
            _holds: PhantomData,
        }
    }

    /// Keeps `superseded`, the last hold of the writer that superseded it, until
    /// no reader holds it. If a walk is due, frees all that no reader holds.
    pub(crate) fn retire(&self, mut room: Box<Room<T>>, superseded: Arc<T>) {
        weakened!("reader_frees" => { return drop(superseded) });
        room.hold = Some(superseded);
        // Relaxed, here and in `walk`: the numbers say when a walk is due, and
        // order nothing.
        let kept = self.kept.fetch_add(1, Ordering::Relaxed) + 1;
        self.put(room);
        if kept > self.walk_above.load(Ordering::Relaxed) {
            self.walk();
        }
    }

    fn walk(&self) {
        let mut unheld = Chain::empty();
        let mut freed = 0;
        let mut all = self.take();
        while let Some(room) = all.pop() {
            if room.has_last_hold() {
                unheld.push(room);
                freed += 1;
            } else {
                self.put(room);
            }
        }
        let kept = self.kept.fetch_sub(freed, Ordering::Relaxed) - freed;
        self.walk_above.store(kept + kept / 4, Ordering::Relaxed);
        // Last, since to free may run code of the program's, an allocator that
        // publishes.
        drop(unheld);
    }

    /// Puts `room` on top of the stack.
    fn put(&self, mut room: Box<Room<T>>) {
        // Release: whoever takes the room reads it, and frees what is in it.
        let release = || {
            weakened!("retired_not_released" => { return Ordering::Relaxed });
            Ordering::Release
        };
        // Relaxed, and if the exchange fails: nothing is read through it.
        let mut top = self.top.load(Ordering::Relaxed);
        loop {
            room.below = top;
            let raw = Box::into_raw(room);
            let put = self
                .top
                .compare_exchange(top, raw, release(), Ordering::Relaxed);
            let Err(other) = put else {
                return;
            };
            weakened!("retired_is_lost" => { return });
            // SAFETY: `raw` comes from the box above, and nobody else has seen it.
            room = unsafe { Box::from_raw(raw) };
            top = other;
        }
    }

    /// Takes all that is on the stack.
    fn take(&self) -> Chain<T> {
        // Acquire: the counterpart of `put`. It acquires what was put below the
        // top, too: since then the top was written by read-modify-writes alone.
        Chain(self.top.swap(ptr::null_mut(), Ordering::Acquire))
    }
}

impl<T> Drop for Retired<T> {
    fn drop(&mut self) {
        drop(self.take());
    }
}

/// Rooms that belong to one thread: the top one, or null.
struct Chain<T>(*mut Room<T>);

impl<T> Chain<T> {
    fn empty() -> Self {
        Self(ptr::null_mut())
    }

    fn push(&mut self, mut room: Box<Room<T>>) {
        room.below = self.0;
        self.0 = Box::into_raw(room);
    }

    fn pop(&mut self) -> Option<Box<Room<T>>> {
        if self.0.is_null() {
            return None;
        }
        // SAFETY: each room of a chain comes from a box, and belongs to the chain
        // alone: `push` was given it, or `take` has taken the only pointer to the
        // top one and with it all that are below.
        let room = unsafe { Box::from_raw(self.0) };
        self.0 = room.below;
        Some(room)
    }
}

impl<T> Drop for Chain<T> {
    fn drop(&mut self) {
        while self.pop().is_some() {}
    }
}

modelled_only! {
    /// The stack by itself, with other things than snapshots.
    pub struct RetiredHolds<T>(Retired<T>);

    /// A hold on such a thing.
    pub struct Hold<T>(Arc<T>);

    impl<T> RetiredHolds<T> {
        /// An empty one.
        pub fn empty() -> Self {
            Self(Retired::new())
        }

        /// As a writer does.
        pub fn retire(&self, hold: Hold<T>) {
            self.0.retire(Room::new(), hold.0);
        }
    }

    impl<T> Clone for Hold<T> {
        fn clone(&self) -> Self {
            Self(Arc::clone(&self.0))
        }
    }

    impl<T> Hold<T> {
        /// The first one on `value`.
        pub fn on(value: T) -> Self {
            Self(Arc::new(value))
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// How many values are alive.
    struct Values(Arc<()>);

    struct Value {
        _one_of: Arc<()>,
    }

    impl Values {
        fn new() -> Self {
            Self(Arc::new(()))
        }

        fn value(&self) -> Arc<Value> {
            Arc::new(Value {
                _one_of: Arc::clone(&self.0),
            })
        }

        fn alive(&self) -> usize {
            Arc::strong_count(&self.0) - 1
        }
    }

    fn retire<T>(retired: &Retired<T>, value: Arc<T>) {
        retired.retire(Room::new(), value);
    }

    #[test]
    fn what_nobody_holds_is_freed_at_once() {
        let (values, retired) = (Values::new(), Retired::new());
        for _ in 0..10 {
            retire(&retired, values.value());
            assert_eq!(values.alive(), 0);
        }
    }

    #[test]
    fn what_is_held_is_kept_and_freed_by_a_later_writer() {
        let (values, retired) = (Values::new(), Retired::new());
        let held = values.value();
        retire(&retired, Arc::clone(&held));
        retire(&retired, values.value());
        drop(held);
        assert!(values.alive() > 0, "the last hold was a reader's");
        retire(&retired, values.value());
        retire(&retired, values.value());
        assert_eq!(values.alive(), 0);
    }

    #[test]
    fn at_most_a_quarter_more_are_kept_than_are_held_and_one() {
        let (values, retired) = (Values::new(), Retired::new());
        let mut held = Vec::new();
        for count in [0, 1, 2, 10, 100, 500] {
            while held.len() < count {
                held.push(values.value());
                retire(&retired, held[held.len() - 1].clone());
            }
            for _ in 0..2 * count + 2 {
                retire(&retired, values.value());
                assert!(values.alive() <= count + count / 4 + 1);
            }
        }
        held.clear();
        // The last walk left 500.
        for _ in 0..=500 / 4 {
            retire(&retired, values.value());
        }
        assert_eq!(values.alive(), 0);
    }

    /// Else ten thousand idle threads would make each publish slow.
    #[test]
    fn a_walk_is_due_once_a_quarter_more_are_kept_than_the_last_one_left() {
        let (values, retired) = (Values::new(), Retired::new());
        let held: Vec<_> = (0..1000).map(|_| values.value()).collect();
        for value in &held {
            retire(&retired, Arc::clone(value));
        }
        let mut walks = 0;
        for _ in 0..10_000 {
            let before = values.alive();
            retire(&retired, values.value());
            // A walk frees what was retired since the one before.
            walks += usize::from(values.alive() <= before);
        }
        assert!((38..=41).contains(&walks), "{walks} walks");
    }

    #[test]
    fn all_is_freed_with_the_stack() {
        let (values, retired) = (Values::new(), Retired::new());
        let held: Vec<_> = (0..100).map(|_| values.value()).collect();
        for value in &held {
            retire(&retired, Arc::clone(value));
        }
        drop(held);
        assert_eq!(values.alive(), 100);
        drop(retired);
        assert_eq!(values.alive(), 0);
    }
}
