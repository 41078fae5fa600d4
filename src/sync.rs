//! The one seam between this crate and its concurrency primitives.
//!
//! Everything in `src/` that another thread may touch is built from what this
//! file hands out. In a normal build that is `std` and `arc-swap`. Under
//! `cfg(loom)` it is what the model checker `loom` offers, and a stand-in for
//! `arc-swap`; the models in `loom-tests/` then run the rest of `src/` as it
//! is. Feature `cuda` is not modelled: it keeps its own locks and counters.
//!
//! It also says what becomes of the faults that `src/` can be built with, to
//! see that the models, or a test, find them: nothing in a normal build, which
//! has none. Under `cfg(loom)`, and in a build of the real thing under
//! `cfg(pinned_hosts_faults)`, the environment variable `PINNED_HOSTS_MUTANT`
//! puts one in by name. Both are given by `RUSTFLAGS`, and neither is a cargo
//! feature, which anybody's dependency could turn on.

#[cfg(not(loom))]
pub(crate) use real::*;

#[cfg(loom)]
pub(crate) use modelled::*;

#[cfg(any(loom, pinned_hosts_faults))]
pub(crate) use faults::*;

#[cfg(not(any(loom, pinned_hosts_faults)))]
pub(crate) use no_faults::*;

#[cfg(not(loom))]
mod real {
    pub(crate) use std::cell::{Cell, RefCell};
    pub(crate) use std::sync::Arc;
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
    use std::thread;
    use std::time::Duration;

    pub(crate) use arc_swap::ArcSwap;

    /// The contents of an `Arc`, without a hold on them.
    pub(crate) struct Unheld<T>(*const T);

    impl<T> Unheld<T> {
        pub(crate) fn of(arc: &Arc<T>) -> Self {
            Self(Arc::as_ptr(arc))
        }

        /// # Safety
        ///
        /// For as long as the reference is used, somebody holds the `Arc`, or a
        /// clone of it.
        #[inline]
        pub(crate) unsafe fn get<'a>(self) -> &'a T {
            // SAFETY: the pointer is to the contents of an `Arc`, and the caller
            // says that they are still there. Nobody writes them.
            unsafe { &*self.0 }
        }
    }

    /// Waits a little before looking again, the `round`-th time: spins, then
    /// lets other threads run, then sleeps, up to a millisecond.
    pub(crate) fn pause(round: u32) {
        match round {
            0..64 => std::hint::spin_loop(),
            64..256 => thread::yield_now(),
            _ => thread::sleep(Duration::from_micros(u64::from(round.min(1_000)))),
        }
    }

    /// A `static` that is made at its first use, or before if it is `const`.
    macro_rules! process_wide {
        (static $name:ident: $type:ty = const $init:expr;) => {
            static $name: $type = $init;
        };
        (static $name:ident: $type:ty = $init:expr;) => {
            static $name: std::sync::LazyLock<$type> = std::sync::LazyLock::new(|| $init);
        };
    }

    /// A `static` of which each thread has its own, made without a check at
    /// each access.
    macro_rules! per_thread {
        ($(#[$doc:meta])* static $name:ident: $type:ty = $init:expr;) => {
            std::thread_local! {
                $(#[$doc])*
                static $name: $type = const { $init };
            }
        };
    }

    pub(crate) use {per_thread, process_wide};
}

/// A build without faults.
#[cfg(not(any(loom, pinned_hosts_faults)))]
mod no_faults {
    /// A fault that can be put in by name. Not compiled, here.
    macro_rules! weakened {
        ($name:literal => $fault:block) => {};
    }

    /// What only the models and the faults use. Not compiled, here.
    macro_rules! modelled_only {
        ($($item:item)*) => {};
    }

    pub(crate) use {modelled_only, weakened};
}

/// A build with faults, of which at most one is put in.
#[cfg(any(loom, pinned_hosts_faults))]
mod faults {
    use std::sync::OnceLock;

    /// Runs `fault` if the environment asks for the fault `name`.
    #[cfg(loom)]
    macro_rules! weakened {
        ($name:literal => $fault:block) => {
            if crate::sync::is_weakened($name) {
                $fault
            }
        };
    }

    /// The same for those faults that a test finds. The others are left out:
    /// they are for the models, and some use what only those have.
    #[cfg(not(loom))]
    macro_rules! weakened {
        ("publish_after_pin" => $fault:block) => {
            weakened!(@"publish_after_pin" => $fault)
        };
        ("no_grace_period_on_pin" => $fault:block) => {
            weakened!(@"no_grace_period_on_pin" => $fault)
        };
        ("no_grace_period_on_unpin" => $fault:block) => {
            weakened!(@"no_grace_period_on_unpin" => $fault)
        };
        ("retiring_skipped" => $fault:block) => {
            weakened!(@"retiring_skipped" => $fault)
        };
        ("retract_before_unpin" => $fault:block) => {
            weakened!(@"retract_before_unpin" => $fault)
        };
        (@$name:literal => $fault:block) => {
            if crate::sync::is_weakened($name) {
                $fault
            }
        };
        ($name:literal => $fault:block) => {};
    }

    #[cfg(loom)]
    macro_rules! modelled_only {
        ($($item:item)*) => { $($item)* };
    }

    #[cfg(not(loom))]
    macro_rules! modelled_only {
        ($($item:item)*) => {};
    }

    pub(crate) use {modelled_only, weakened};

    pub(crate) fn is_weakened(name: &str) -> bool {
        static WANTED: OnceLock<Option<String>> = OnceLock::new();
        let wanted = WANTED.get_or_init(|| std::env::var("PINNED_HOSTS_MUTANT").ok());
        wanted.as_deref() == Some(name)
    }
}

/// What snapshots share among themselves, in models too. Like a `Box` it has
/// nothing that an interleaving could change: what is shared is no longer
/// written, and is reached through a snapshot, which is what the models watch.
pub(crate) use std::sync::Arc as Shared;

impl<T> Clone for Unheld<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Unheld<T> {}

/// A number, shared by its clones. It orders nothing, and no promise about
/// memory depends on it, so the models leave it out of what they explore.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally(std::sync::Arc<std::sync::atomic::AtomicU64>);

impl Tally {
    // Relaxed, all: no one concludes more from the number than the number.
    pub(crate) fn more(&self) {
        self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }

    /// Counts one more, for as long as what is returned lives.
    pub(crate) fn hold(&self) -> Counted {
        self.more();
        Counted(self.clone())
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.load(std::sync::atomic::Ordering::Relaxed)
    }
}

/// One in a [`Tally`].
#[derive(Debug)]
pub(crate) struct Counted(Tally);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
    }
}

/// Tells its owner from others, and whether the owner lives, to tidy up by. Like
/// a tally, it orders nothing, and the models leave it out.
#[derive(Debug, Default)]
pub(crate) struct Alive(std::sync::Arc<()>);

#[derive(Debug)]
pub(crate) struct AliveElsewhere(std::sync::Weak<()>);

impl Alive {
    pub(crate) fn elsewhere(&self) -> AliveElsewhere {
        AliveElsewhere(std::sync::Arc::downgrade(&self.0))
    }
}

impl AliveElsewhere {
    pub(crate) fn is_alive(&self) -> bool {
        self.0.strong_count() > 0
    }

    /// Whether this is about `alive`. No other owner can have its address: what
    /// is here keeps that taken.
    pub(crate) fn is_of(&self, alive: &Alive) -> bool {
        std::ptr::eq(self.0.as_ptr(), std::sync::Arc::as_ptr(&alive.0))
    }
}

/// What the models run on.
#[cfg(loom)]
mod modelled {
    use std::any::Any;
    pub(crate) use std::cell::{Cell, RefCell};
    use std::ops::Deref;
    use std::rc::Rc;
    use std::sync::{Mutex, PoisonError};

    use super::is_weakened;
    use loom::cell::UnsafeCell;
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

    /// Lets the other threads run: loom has no time to wait for.
    pub(crate) fn pause(_round: u32) {
        loom::thread::yield_now();
    }

    macro_rules! process_wide {
        (static $name:ident: $type:ty = const $init:expr;) => {
            loom::lazy_static! { static ref $name: $type = $init; }
        };
        (static $name:ident: $type:ty = $init:expr;) => {
            loom::lazy_static! { static ref $name: $type = $init; }
        };
    }

    macro_rules! per_thread {
        ($(#[$doc:meta])* static $name:ident: $type:ty = $init:expr;) => {
            $(#[$doc])*
            static $name: crate::sync::PerThread<$type> =
                crate::sync::PerThread(|| $init);
        };
    }

    pub(crate) use {per_thread, process_wide};

    /// A `static` of which each thread has its own.
    ///
    /// Loom drops a thread's locals in no fixed order, and an execution that
    /// differs from the last for no reason is an error. So all of them are in
    /// one, which drops them in the order in which they were made.
    pub(crate) struct PerThread<T: 'static>(pub(crate) fn() -> T);

    impl<T: 'static> PerThread<T> {
        pub(crate) fn try_with<R>(
            &'static self,
            with: impl FnOnce(&T) -> R,
        ) -> Result<R, loom::thread::AccessError> {
            let value = LOCALS.try_with(|locals| locals.get(self))?;
            Ok(with(&value))
        }
    }

    loom::thread_local! {
        static LOCALS: Locals = Locals::default();
    }

    /// All locals of a thread, each with the address of its `static`.
    #[derive(Default)]
    struct Locals {
        values: RefCell<Vec<(usize, Rc<dyn Any>)>>,
        /// What a model wants done once they are gone.
        after: RefCell<Option<Box<dyn FnOnce()>>>,
    }

    impl Locals {
        fn get<T: 'static>(&self, key: &'static PerThread<T>) -> Rc<T> {
            let address = (&raw const *key).addr();
            let known = |values: &Vec<(usize, Rc<dyn Any>)>| {
                let value = values.iter().find(|it| it.0 == address)?;
                Rc::clone(&value.1).downcast().ok()
            };
            if let Some(value) = known(&self.values.borrow()) {
                return value;
            }
            let value = Rc::new((key.0)());
            let made: Rc<dyn Any> = value.clone();
            self.values.borrow_mut().push((address, made));
            value
        }
    }

    impl Drop for Locals {
        fn drop(&mut self) {
            for value in self.values.take() {
                drop(value);
            }
            if let Some(run) = self.after.take() {
                run();
            }
        }
    }

    /// Runs `run` on this thread once its locals are gone.
    pub(crate) fn after_the_locals(run: Box<dyn FnOnce()>) {
        LOCALS.with(|locals| *locals.after.borrow_mut() = Some(run));
    }

    /// `strong`, or `Relaxed` if the fault `name` is asked for.
    fn unless_weakened(strong: Ordering, name: &str) -> Ordering {
        if is_weakened(name) {
            Ordering::Relaxed
        } else {
            strong
        }
    }

    /// An `Arc` whose contents are in a cell that loom watches: reading them
    /// is an error unless their making happens-before the read.
    #[derive(Debug)]
    pub(crate) struct Arc<T>(loom::sync::Arc<UnsafeCell<T>>);

    // SAFETY: as for `std`'s: all that is shared is a `&T`, and a `T` to drop.
    unsafe impl<T: Send + Sync> Send for Arc<T> {}
    // SAFETY: as above.
    unsafe impl<T: Send + Sync> Sync for Arc<T> {}

    impl<T> Arc<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Arc::new(UnsafeCell::new(value)))
        }

        pub(crate) fn strong_count(this: &Self) -> usize {
            loom::sync::Arc::strong_count(&this.0)
        }

        pub(crate) fn ptr_eq(this: &Self, other: &Self) -> bool {
            loom::sync::Arc::ptr_eq(&this.0, &other.0)
        }
    }

    impl<T> Clone for Arc<T> {
        fn clone(&self) -> Self {
            Self(loom::sync::Arc::clone(&self.0))
        }
    }

    impl<T> Deref for Arc<T> {
        type Target = T;

        fn deref(&self) -> &T {
            // SAFETY: the value is never written after it was made, and this
            // `Arc` keeps it. That its making is visible here is what loom
            // checks.
            self.0.with(|value| unsafe { &*value })
        }
    }

    /// The contents of an `Arc`, without a hold on them. Loom watches how they
    /// are read, and not that they are still there.
    pub(crate) struct Unheld<T>(*const UnsafeCell<T>);

    impl<T> Unheld<T> {
        pub(crate) fn of(arc: &Arc<T>) -> Self {
            Self(&raw const *arc.0)
        }

        /// # Safety
        ///
        /// As for the real one.
        pub(crate) unsafe fn get<'a>(self) -> &'a T {
            // SAFETY: the caller says that the `Arc` is still held. The value is
            // never written after it was made.
            unsafe { (*self.0).with(|value| &*value) }
        }
    }

    /// How many values a model may publish in one cell.
    const CAPACITY: usize = 8;

    /// A stand-in for `arc_swap::ArcSwap`, which loom cannot look into. It
    /// gives what that crate documents, or states in its account of its internals,
    /// and nothing that it does not:
    ///
    /// - a load returns a value that was published, and acquires what its
    ///   publisher did before;
    /// - a compare-and-swap publishes only if the published value is the
    ///   expected one, and then releases what its thread did before; otherwise
    ///   it is a load.
    ///
    /// Each value has a place in a table, and the place's number is what is
    /// published. Places are not used again and hold their value until the
    /// cell is dropped, so that a load may return any value that the memory
    /// model allows, however old. (`arc-swap` may return fewer.) What is not
    /// part of the contract, such as who gets which place, uses `std`'s types:
    /// loom does not see them, so they order nothing.
    #[derive(Debug)]
    pub(crate) struct ArcSwap<T> {
        published: AtomicUsize,
        places: [UnsafeCell<Option<Arc<T>>>; CAPACITY],
        /// The address of each value that has a place, in order.
        addresses: Mutex<Vec<usize>>,
    }

    // SAFETY: a place is written once, before its number is published, and
    // read by whoever acquired the number. That it is so is what loom checks.
    unsafe impl<T: Send + Sync> Sync for ArcSwap<T> {}

    impl<T> ArcSwap<T> {
        pub(crate) fn new(value: Arc<T>) -> Self {
            let cell = Self {
                published: AtomicUsize::new(0),
                places: std::array::from_fn(|_| UnsafeCell::new(None)),
                addresses: Mutex::default(),
            };
            cell.place(value);
            cell
        }

        fn addresses(&self) -> std::sync::MutexGuard<'_, Vec<usize>> {
            self.addresses
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        }

        /// Gives `value` the next place.
        fn place(&self, value: Arc<T>) -> usize {
            let number = {
                let mut addresses = self.addresses();
                addresses.push(address(&value));
                addresses.len() - 1
            };
            assert!(number < CAPACITY, "a model publishes too often");
            // SAFETY: nobody else has this place's number yet.
            self.places[number].with_mut(|place| unsafe { *place = Some(value) });
            number
        }

        fn at(&self, number: usize) -> Arc<T> {
            self.places[number].with(|place| {
                // SAFETY: places are written before their number is published.
                let place = unsafe { &*place };
                place.clone().expect("published places are taken")
            })
        }

        pub(crate) fn load(&self) -> Arc<T> {
            self.load_full()
        }

        pub(crate) fn load_full(&self) -> Arc<T> {
            self.at(self
                .published
                .load(unless_weakened(Ordering::Acquire, "load_relaxed")))
        }

        /// What was published before `value`, if anything was.
        pub(crate) fn before(&self, value: &Arc<T>) -> Option<Arc<T>> {
            let number = self
                .addresses()
                .iter()
                .position(|&it| it == address(value))?;
            Some(self.at(number.checked_sub(1)?))
        }

        pub(crate) fn compare_and_swap(&self, current: &Arc<T>, new: Arc<T>) -> Arc<T> {
            let expected = self
                .addresses()
                .iter()
                .position(|&it| it == address(current));
            let expected = expected.expect("the current value was loaded from here");
            let number = self.place(new);
            if is_weakened("lost_update") {
                self.published.store(number, Ordering::Release);
                return current.clone();
            }
            let acquire = unless_weakened(Ordering::Acquire, "failed_publish_relaxed");
            // A swap that fails is no more than a load: what it finds may be
            // older than what loom's would find. Release suffices for one that
            // succeeds: what it finds was acquired with `current`.
            let seen = self.published.load(acquire);
            let swapped = if seen == expected {
                let release = unless_weakened(Ordering::Release, "publish_relaxed");
                self.published
                    .compare_exchange(expected, number, release, acquire)
            } else {
                Err(seen)
            };
            match swapped {
                Err(_) if is_weakened("no_retry") => current.clone(),
                Ok(previous) | Err(previous) => self.at(previous),
            }
        }
    }

    fn address<T>(value: &Arc<T>) -> usize {
        (&raw const *value.0).addr()
    }
}
