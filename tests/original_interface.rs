//! The four free functions, as programs that used the module before this
//! crate know them.
//!
//! They act on the one process-wide registry, so the tests of this file take
//! turns ([`Turn`]).

#![allow(clippy::unwrap_used, missing_docs)]

use std::io;
use std::panic;
use std::ptr;
use std::sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError};
use std::thread;

use pinned_hosts::{
    Region, Registration, Residency, global, is_pinned, live_count, register, residency, unregister,
};

/// The process-wide registry to oneself, empty, and left empty.
struct Turn(#[expect(dead_code, reason = "held, not read")] MutexGuard<'static, ()>);

fn turn() -> Turn {
    static TURNS: Mutex<()> = Mutex::new(());
    let turn = Turn(TURNS.lock().unwrap_or_else(PoisonError::into_inner));
    assert_eq!(live_count(), 0);
    turn
}

impl Drop for Turn {
    /// Takes away what the free functions noted. A test takes its own typed
    /// registrations away ([`Typed`]).
    fn drop(&mut self) {
        for entry in global().regions() {
            unregister(entry.region().base());
        }
    }
}

/// Typed registrations, until the test ends.
struct Typed(Vec<Registration<'static>>);

impl Drop for Typed {
    fn drop(&mut self) {
        for registration in self.0.drain(..) {
            registration.unregister();
        }
    }
}

fn regions() -> Vec<Region> {
    global().regions().map(|entry| entry.region()).collect()
}

#[test]
fn a_buffer_that_nobody_registered_is_not_pinned() {
    let _turn = turn();
    let buffer = [0u8; 64];
    assert!(!is_pinned(&buffer));
    assert_eq!(residency(&buffer), Residency::Pageable);
}

#[test]
fn a_registered_region_is_pinned() {
    let _turn = turn();
    let buffer = [0u8; 64];
    register(buffer.as_ptr(), buffer.len());
    assert!(is_pinned(&buffer));
    assert_eq!(residency(&buffer), Residency::Pinned);
}

#[test]
fn a_prefix_of_a_registered_region_is_pinned() {
    let _turn = turn();
    let buffer = [0u8; 64];
    register(buffer.as_ptr(), buffer.len());
    assert!(is_pinned(&buffer[..1]));
    assert!(is_pinned(&buffer[..63]));
}

#[test]
fn the_interior_of_a_registered_region_is_pinned() {
    let _turn = turn();
    let buffer = [0u8; 64];
    register(buffer.as_ptr(), buffer.len());
    assert!(is_pinned(&buffer[20..40]));
}

#[test]
fn the_last_byte_of_a_registered_region_is_pinned() {
    let _turn = turn();
    let buffer = [0u8; 64];
    register(buffer.as_ptr(), buffer.len());
    assert!(is_pinned(&buffer[63..]));
}

#[test]
fn a_slice_that_leaves_its_region_by_one_byte_is_not_pinned() {
    let _turn = turn();
    let buffer = [0u8; 64];
    register(buffer[1..].as_ptr(), 62);
    assert!(is_pinned(&buffer[1..63]));
    assert!(!is_pinned(&buffer[..63]));
    assert!(!is_pinned(&buffer[1..]));
}

#[test]
fn a_slice_over_two_regions_that_touch_is_pinned() {
    let _turn = turn();
    let buffer = [0u8; 64];
    register(buffer.as_ptr(), 32);
    register(buffer[32..].as_ptr(), 32);
    assert!(is_pinned(&buffer));
    assert_eq!(residency(&buffer), Residency::Seam);
}

#[test]
fn an_unregistered_region_is_not_pinned() {
    let _turn = turn();
    let buffer = [0u8; 64];
    register(buffer.as_ptr(), buffer.len());
    unregister(buffer.as_ptr());
    assert!(!is_pinned(&buffer));
    assert!(!is_pinned(&buffer[20..40]));
    assert_eq!(live_count(), 0);
}

#[test]
fn a_region_can_be_registered_again() {
    let _turn = turn();
    let buffer = [0u8; 64];
    register(buffer.as_ptr(), buffer.len());
    unregister(buffer.as_ptr());
    register(buffer.as_ptr(), buffer.len());
    assert!(is_pinned(&buffer));
}

#[test]
fn a_neighbouring_allocation_is_not_pinned() {
    let _turn = turn();
    let registered = Box::new([0u8; 64]);
    let neighbour = Box::new([0u8; 64]);
    register(registered.as_ptr(), registered.len());
    assert!(!is_pinned(&*neighbour));
}

#[test]
fn neighbouring_bytes_of_one_allocation_are_not_pinned() {
    let _turn = turn();
    let buffer = [0u8; 96];
    register(buffer[32..].as_ptr(), 32);
    assert!(!is_pinned(&buffer[..32]));
    assert!(!is_pinned(&buffer[64..]));
}

#[test]
fn unregistering_one_region_leaves_its_neighbours() {
    let _turn = turn();
    let buffer = [0u8; 96];
    for start in [0, 32, 64] {
        register(buffer[start..].as_ptr(), 32);
    }
    unregister(buffer[32..].as_ptr());
    assert!(is_pinned(&buffer[..32]));
    assert!(!is_pinned(&buffer[32..64]));
    assert!(is_pinned(&buffer[64..]));
}

#[test]
fn registering_null_is_ignored() {
    let _turn = turn();
    register(ptr::null(), 64);
    assert_eq!(live_count(), 0);
}

#[test]
fn registering_zero_bytes_is_ignored() {
    let _turn = turn();
    let buffer = [0u8; 64];
    register(buffer.as_ptr(), 0);
    assert_eq!(live_count(), 0);
    assert!(!is_pinned(&buffer));
}

#[test]
fn registering_zero_bytes_at_a_known_base_leaves_the_region() {
    let _turn = turn();
    let buffer = [0u8; 64];
    register(buffer.as_ptr(), buffer.len());
    register(buffer.as_ptr(), 0);
    assert!(is_pinned(&buffer));
}

#[test]
fn unregistering_null_is_ignored() {
    let _turn = turn();
    let buffer = [0u8; 64];
    register(buffer.as_ptr(), buffer.len());
    unregister(ptr::null());
    assert!(is_pinned(&buffer));
}

#[test]
fn unregistering_an_unknown_base_is_ignored() {
    let _turn = turn();
    let buffer = [0u8; 64];
    let other = [0u8; 64];
    register(buffer.as_ptr(), buffer.len());
    unregister(other.as_ptr());
    assert!(is_pinned(&buffer));
    assert_eq!(live_count(), 1);
}

#[test]
fn unregistering_an_address_inside_a_region_is_ignored() {
    let _turn = turn();
    let buffer = [0u8; 64];
    register(buffer.as_ptr(), buffer.len());
    unregister(buffer[1..].as_ptr());
    assert!(is_pinned(&buffer));
}

#[test]
fn unregistering_twice_is_ignored_the_second_time() {
    let _turn = turn();
    let buffer = [0u8; 64];
    let other = [0u8; 64];
    register(buffer.as_ptr(), buffer.len());
    register(other.as_ptr(), other.len());
    unregister(buffer.as_ptr());
    unregister(buffer.as_ptr());
    assert!(is_pinned(&other));
    assert_eq!(live_count(), 1);
}

#[test]
fn the_empty_slice_is_not_pinned_inside_a_region() {
    let _turn = turn();
    let buffer = [0u8; 64];
    register(buffer.as_ptr(), buffer.len());
    for at in [0, 20, 64] {
        assert!(!is_pinned(&buffer[at..at]));
        assert_eq!(residency(&buffer[at..at]), Residency::Pageable);
    }
}

#[test]
fn the_empty_slice_is_not_pinned_with_nothing_registered() {
    let _turn = turn();
    assert!(!is_pinned(&[]));
    assert_eq!(residency(&[]), Residency::Pageable);
}

#[test]
fn live_count_counts_the_regions() {
    let _turn = turn();
    let buffer = [0u8; 64];
    register(buffer.as_ptr(), 32);
    assert_eq!(live_count(), 1);
    register(buffer[32..].as_ptr(), 32);
    assert_eq!(live_count(), 2);
    unregister(buffer.as_ptr());
    assert_eq!(live_count(), 1);
}

#[test]
fn registering_a_base_again_with_more_bytes_lengthens_the_region() {
    let _turn = turn();
    let buffer = [0u8; 64];
    register(buffer.as_ptr(), 32);
    register(buffer.as_ptr(), 64);
    assert_eq!(residency(&buffer), Residency::Pinned);
}

#[test]
fn registering_a_base_again_with_fewer_bytes_shortens_the_region() {
    let _turn = turn();
    let buffer = [0u8; 64];
    register(buffer.as_ptr(), 64);
    register(buffer.as_ptr(), 32);
    assert!(is_pinned(&buffer[..32]));
    assert!(!is_pinned(&buffer[..33]));
    assert_eq!(residency(&buffer[32..]), Residency::Pageable);
}

#[test]
fn registering_a_base_again_leaves_one_entry() {
    let _turn = turn();
    let buffer = [0u8; 64];
    for bytes in [64, 32, 64] {
        register(buffer.as_ptr(), bytes);
        assert_eq!(live_count(), 1);
    }
    unregister(buffer.as_ptr());
    assert!(!is_pinned(&buffer[..1]));
}

#[test]
fn registering_a_base_again_leaves_other_bases_alone() {
    let _turn = turn();
    let buffer = [0u8; 64];
    register(buffer.as_ptr(), 64);
    register(buffer[32..].as_ptr(), 32);
    register(buffer.as_ptr(), 16);
    assert_eq!(
        regions(),
        [&buffer[..16], &buffer[32..]].map(|bytes| Region::of(bytes).unwrap())
    );
}

#[test]
fn threads_that_register_one_base_together_leave_one_entry() {
    let _turn = turn();
    let buffer = [0u8; 64];
    // More regions make a publish slower, so that the threads do meet.
    let more = [0u8; 500];
    let more = more.chunks(1).map(|byte| Region::of(byte).unwrap());
    let _more = Typed(global().register_all(more));
    let start = Barrier::new(4);
    thread::scope(|scope| {
        for thread in 1..=4 {
            let (buffer, start) = (&buffer, &start);
            scope.spawn(move || {
                start.wait();
                for _ in 0..100 {
                    register(buffer.as_ptr(), 16 * thread);
                }
            });
        }
    });
    assert_eq!(live_count(), 500 + 1);
    assert!(is_pinned(&buffer[..16]));
}

#[test]
fn unregister_cannot_take_away_a_typed_registration_of_the_same_base() {
    let _turn = turn();
    let buffer = [0u8; 64];
    let registration = global().register(Region::of(&buffer).unwrap());
    unregister(buffer.as_ptr());
    assert!(is_pinned(&buffer));

    register(buffer.as_ptr(), buffer.len());
    assert_eq!(live_count(), 2);
    unregister(buffer.as_ptr());
    assert!(is_pinned(&buffer));
    assert_eq!(registration.unregister(), Region::of(&buffer).unwrap());
}

#[test]
fn register_cannot_replace_a_typed_registration_of_the_same_base() {
    let _turn = turn();
    let buffer = [0u8; 64];
    let registration = global().register(Region::of(&buffer).unwrap());
    let _typed = Typed(vec![registration]);
    register(buffer.as_ptr(), 16);
    assert!(is_pinned(&buffer));
    assert_eq!(live_count(), 2);
}

#[test]
fn removing_a_typed_registration_leaves_the_free_one_of_the_same_base() {
    let _turn = turn();
    let buffer = [0u8; 64];
    register(buffer.as_ptr(), 16);
    let registration = global().register(Region::of(&buffer).unwrap());
    registration.unregister();
    assert_eq!(regions(), [Region::of(&buffer[..16]).unwrap()]);
}

#[test]
fn a_length_that_wraps_is_cut_at_the_end_of_the_address_space() {
    let _turn = turn();
    let base = ptr::without_provenance::<u8>(usize::MAX - 10);
    for bytes in [11, 100, usize::MAX] {
        register(base, bytes);
        assert_eq!(regions(), [Region::new(base, 10).unwrap()]);
    }
}

#[test]
fn a_buffer_registered_with_a_length_that_wraps_is_pinned() {
    let _turn = turn();
    let buffer = [0u8; 64];
    register(buffer.as_ptr(), usize::MAX);
    assert!(is_pinned(&buffer));
    unregister(buffer.as_ptr());
    assert!(!is_pinned(&buffer));
}

#[test]
fn the_last_address_has_no_room_for_a_region_and_is_ignored() {
    let _turn = turn();
    register(ptr::without_provenance(usize::MAX), 1);
    assert_eq!(live_count(), 0);
}

#[test]
fn a_length_that_ends_exactly_at_the_last_address_is_kept() {
    let _turn = turn();
    let base = ptr::without_provenance::<u8>(usize::MAX - 10);
    register(base, 10);
    assert_eq!(regions(), [Region::new(base, 10).unwrap()]);
}

/// A subscriber that does nothing but `.0` on each event.
struct Acting<F>(F);

impl<F: Fn() + Send + Sync + 'static> tracing::Subscriber for Acting<F> {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        (self.0)();
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// The text of the fields of each event that `run` emits.
fn logged(run: impl FnOnce()) -> Vec<String> {
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, run);
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    text.lines().map(str::to_owned).collect()
}

/// As when the first block of an arena is registered by the arena's base.
#[test]
fn a_shorter_length_of_the_same_base_is_logged_with_both_lengths() {
    let _turn = turn();
    let buffer = [0u8; 64];
    register(buffer.as_ptr(), 64);
    let lines = logged(|| register(buffer.as_ptr(), 16));
    assert_eq!(lines.len(), 1, "{lines:#?}");
    let base = format!("base={:?}", buffer.as_ptr());
    for part in [
        "WARN",
        &base,
        "bytes=16",
        "bytes_before=64",
        "register the longer range again",
    ] {
        assert!(lines[0].contains(part), "no {part} in {}", lines[0]);
    }
}

#[test]
fn other_registrations_are_not_logged() {
    let _turn = turn();
    let buffer = [0u8; 64];
    let lines = logged(|| {
        register(buffer.as_ptr(), 16);
        register(buffer.as_ptr(), 16);
        register(buffer.as_ptr(), 64);
        register(buffer[32..].as_ptr(), 8);
        unregister(buffer.as_ptr());
        register(buffer.as_ptr(), 8);
        let typed = global().register(Region::of(&buffer).unwrap());
        register(buffer.as_ptr(), 16);
        typed.unregister();
    });
    assert_eq!(lines, [""; 0]);
}

#[test]
fn a_subscriber_that_panics_keeps_no_region_from_being_registered() {
    let _turn = turn();
    let buffer = [0u8; 64];
    // Without a message, which would be noise.
    let panicking = Acting(|| panic::resume_unwind(Box::new("the log is full")));
    tracing::subscriber::with_default(panicking, || register(buffer.as_ptr(), usize::MAX));
    assert!(is_pinned(&buffer));
    assert_eq!(live_count(), 1);
}

#[test]
fn a_subscriber_may_look_up_and_register() {
    static BUFFER: [u8; 64] = [0; 64];
    static OTHER: [u8; 64] = [0; 64];
    let _turn = turn();
    let acting = Acting(|| {
        // What the event is about is registered by then.
        assert!(is_pinned(&BUFFER));
        register(OTHER.as_ptr(), OTHER.len());
    });
    tracing::subscriber::with_default(acting, || register(BUFFER.as_ptr(), usize::MAX));
    // `emit` keeps a failed assertion of the subscriber to itself: then `OTHER`
    // is not registered.
    assert_eq!(live_count(), 2);
}
