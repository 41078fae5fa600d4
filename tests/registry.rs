//! The typed interface: what a region is, what a lookup answers, and what
//! registering and unregistering change.

#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::HashSet;
use std::convert::Infallible;
use std::error::Error;
use std::fmt::Debug;
use std::hash::Hash;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::{Barrier, mpsc};
use std::thread;

use pinned_hosts::Residency::{Mixed, Pageable, Pinned, Seam};
use pinned_hosts::{
    Reader, Region, RegionEntry, RegionError, RegionId, RegionState, Regions, Registration,
    Registry, Residency, Segment, Segments, global,
};

/// An address that no memory of the test lies at.
fn address(address: usize) -> *const u8 {
    ptr::without_provenance(address)
}

fn region(bytes: &[u8]) -> Region {
    Region::of(bytes).unwrap()
}

/// A registry, a reader from before the first registration, and 100 bytes to
/// register parts of.
struct Scene {
    registry: &'static Registry,
    reader: Reader<'static>,
    buffer: Vec<u8>,
}

impl Scene {
    /// Nothing is registered.
    fn new() -> Self {
        // Leaked, so that the reader can live beside it.
        let registry: &'static Registry = Box::leak(Box::default());
        Self {
            registry,
            reader: registry.reader(),
            buffer: vec![0; 100],
        }
    }

    /// The parts `[start, end)` of the buffer are registered, in this order.
    fn with<const N: usize>(parts: [(usize, usize); N]) -> (Self, [Registration<'static>; N]) {
        let scene = Self::new();
        let registrations = parts.map(|(start, end)| scene.register(start, end));
        (scene, registrations)
    }

    fn register(&self, start: usize, end: usize) -> Registration<'static> {
        self.registry.register(region(&self.buffer[start..end]))
    }

    /// What the bytes `[start, end)` are, to everybody who can be asked.
    #[track_caller]
    fn residency(&mut self, start: usize, end: usize) -> Residency {
        let bytes = &self.buffer[start..end];
        let answer = self.registry.residency(bytes);
        let pinned = matches!(answer, Pinned | Seam);
        assert_eq!(self.registry.is_pinned(bytes), pinned);
        for reader in [&mut self.reader, &mut self.registry.reader()] {
            assert_eq!(reader.residency(bytes), answer);
            assert_eq!(reader.is_pinned(bytes), pinned);
        }
        answer
    }

    /// The part of the buffer that is the region containing `[start, end)`,
    /// to everybody who can be asked.
    #[track_caller]
    fn containing(&mut self, start: usize, end: usize) -> Option<(usize, usize)> {
        let bytes = &self.buffer[start..end];
        let answer = self.registry.region_containing(bytes);
        assert_eq!(self.reader.region_containing(bytes), answer);
        answer.map(|region| self.part(region))
    }

    /// The segments of `[start, end)`, to everybody who can be asked.
    #[track_caller]
    fn segments(&mut self, start: usize, end: usize) -> Vec<(usize, usize, Residency)> {
        let bytes = &self.buffer[start..end];
        // No more than there are bytes, lest a fault makes this endless.
        let answer: Vec<_> = self.registry.segments(bytes).take(101).collect();
        let readers: Vec<_> = self.reader.segments(bytes).take(101).collect();
        assert_eq!(readers, answer);
        answer.iter().map(|segment| self.place(segment)).collect()
    }

    fn place(&self, segment: &Segment<'_>) -> (usize, usize, Residency) {
        let (start, end) = self.part(region(segment.bytes()));
        (start, end, segment.residency())
    }

    fn part(&self, region: Region) -> (usize, usize) {
        let start = region.base().addr() - self.buffer.as_ptr().addr();
        (start, start + region.len())
    }
}

// What a region is.

#[test]
fn a_region_knows_its_base_length_and_end() {
    let region = Region::new(address(0x1000), 0x20).unwrap();
    assert_eq!(region.base(), address(0x1000));
    assert_eq!(region.len(), 0x20);
    assert_eq!(region.end(), address(0x1020));
}

#[test]
fn the_region_of_a_slice_has_its_address_and_length() {
    let buffer = [0u8; 64];
    let region = Region::of(&buffer[10..30]).unwrap();
    assert_eq!(region.base(), buffer[10..].as_ptr());
    assert_eq!(region.len(), 20);
    assert_eq!(region.end(), buffer[30..].as_ptr());
}

#[test]
fn regions_of_the_same_bytes_are_equal() {
    let region = Region::new(address(0x1000), 16);
    assert_eq!(region, Region::new(address(0x1000), 16));
    assert_ne!(region, Region::new(address(0x1000), 17));
    assert_ne!(region, Region::new(address(0x1001), 16));
}

#[test]
fn a_region_at_null_is_an_error() {
    assert_eq!(Region::new(ptr::null(), 16), Err(RegionError::Null));
    assert_eq!(Region::new(ptr::null(), 0), Err(RegionError::Null));
}

#[test]
fn a_region_without_bytes_is_an_error() {
    assert_eq!(Region::new(address(0x1000), 0), Err(RegionError::Empty));
    assert_eq!(Region::of(&[]), Err(RegionError::Empty));
}

#[test]
fn a_region_that_wraps_is_an_error() {
    for (base, len) in [(usize::MAX, 1), (usize::MAX - 9, 10), (1, usize::MAX)] {
        let wraps = RegionError::Wraps { base, len };
        assert_eq!(Region::new(address(base), len), Err(wraps));
    }
}

#[test]
fn a_region_may_end_at_the_last_address() {
    let region = Region::new(address(usize::MAX - 10), 10).unwrap();
    assert_eq!(region.end(), address(usize::MAX));
}

#[test]
fn a_region_shows_its_addresses_and_its_length() {
    let region = Region::new(address(0x7f00_0000), 4096).unwrap();
    assert_eq!(region.to_string(), "0x7f000000..0x7f001000 (4096 bytes)");
    assert_eq!(
        format!("{region:?}"),
        "Region(0x7f000000..0x7f001000 (4096 bytes))"
    );
}

#[test]
fn a_region_error_says_what_is_wrong_and_what_to_check() {
    let null = RegionError::Null.to_string();
    assert!(null.contains("null") && null.contains("allocation"));

    let empty = RegionError::Empty.to_string();
    assert!(empty.contains("no bytes") && empty.contains("skip"));

    let wraps = RegionError::Wraps {
        base: 0x1000,
        len: usize::MAX,
    };
    let wraps = wraps.to_string();
    assert!(wraps.contains("0x1000") && wraps.contains(&usize::MAX.to_string()));
    assert!(wraps.contains("negative"));
}

// The empty slice.

#[test]
fn the_empty_slice_is_pageable_wherever_it_points() {
    let (mut scene, _) = Scene::with([(10, 50), (50, 90)]);
    for at in [0, 10, 11, 50, 89, 90, 100] {
        assert_eq!(scene.residency(at, at), Pageable);
    }
}

#[test]
fn the_empty_slice_lies_in_no_region_wherever_it_points() {
    let (mut scene, _) = Scene::with([(10, 50), (50, 90)]);
    for at in [0, 10, 11, 50, 89, 90, 100] {
        assert_eq!(scene.containing(at, at), None);
    }
}

#[test]
fn the_empty_slice_has_no_segments_wherever_it_points() {
    let (mut scene, _) = Scene::with([(10, 50), (50, 90)]);
    for at in [0, 10, 11, 50, 89, 90, 100] {
        assert_eq!(scene.segments(at, at), []);
    }
}

#[test]
fn the_empty_slice_that_dangles_is_pageable() {
    let registry = Registry::new();
    let dangling: &[u8] = &Vec::new();
    // Regions that begin, end, and lie around where it points.
    let at = dangling.as_ptr().addr();
    let _ = registry.register(Region::new(address(at), 16).unwrap());
    let _ = registry.register(Region::new(address(1), usize::MAX - 1).unwrap());
    let mut reader = registry.reader();

    assert_eq!(registry.residency(dangling), Pageable);
    assert!(!registry.is_pinned(dangling));
    assert_eq!(registry.region_containing(dangling), None);
    assert_eq!(registry.segments(dangling).next(), None);
    assert_eq!(reader.residency(dangling), Pageable);
    assert!(!reader.is_pinned(dangling));
    assert_eq!(reader.region_containing(dangling), None);
    assert_eq!(reader.segments(dangling).next(), None);
}

#[test]
fn the_empty_slice_is_pageable_in_the_process_wide_registry() {
    let buffer = [0u8; 64];
    let registration = global().register(region(&buffer));
    for at in [0, 32, 64] {
        assert_eq!(pinned_hosts::residency(&buffer[at..at]), Pageable);
        assert!(!pinned_hosts::is_pinned(&buffer[at..at]));
    }
    registration.unregister();
}

// One region.

#[test]
fn with_nothing_registered_every_slice_is_pageable() {
    let mut scene = Scene::new();
    assert_eq!(scene.residency(0, 100), Pageable);
    assert_eq!(scene.containing(0, 100), None);
    assert_eq!(scene.segments(0, 100), [(0, 100, Pageable)]);
    assert_eq!(scene.registry.live_count(), 0);
}

#[test]
fn a_slice_that_is_a_region_is_pinned() {
    let (mut scene, _) = Scene::with([(20, 60)]);
    assert_eq!(scene.residency(20, 60), Pinned);
}

#[test]
fn a_slice_inside_a_region_is_pinned() {
    let (mut scene, _) = Scene::with([(20, 60)]);
    assert_eq!(scene.residency(30, 40), Pinned);
}

#[test]
fn a_slice_that_ends_at_the_regions_end_is_inside() {
    let (mut scene, _) = Scene::with([(20, 60)]);
    assert_eq!(scene.residency(59, 60), Pinned);
    assert_eq!(scene.residency(30, 60), Pinned);
}

#[test]
fn a_slice_that_begins_at_the_regions_base_is_inside() {
    let (mut scene, _) = Scene::with([(20, 60)]);
    assert_eq!(scene.residency(20, 21), Pinned);
}

#[test]
fn a_slice_that_ends_one_byte_past_the_region_is_mixed() {
    let (mut scene, _) = Scene::with([(20, 60)]);
    assert_eq!(scene.residency(20, 61), Mixed);
    assert_eq!(scene.residency(59, 61), Mixed);
}

#[test]
fn a_slice_that_begins_one_byte_before_the_base_and_overlaps_is_mixed() {
    let (mut scene, _) = Scene::with([(20, 60)]);
    assert_eq!(scene.residency(19, 21), Mixed);
    assert_eq!(scene.residency(19, 60), Mixed);
}

#[test]
fn the_byte_before_the_base_is_pageable() {
    let (mut scene, _) = Scene::with([(20, 60)]);
    assert_eq!(scene.residency(19, 20), Pageable);
}

#[test]
fn the_byte_past_the_end_is_pageable() {
    let (mut scene, _) = Scene::with([(20, 60)]);
    assert_eq!(scene.residency(60, 61), Pageable);
}

#[test]
fn a_slice_around_a_region_is_mixed() {
    let (mut scene, _) = Scene::with([(20, 60)]);
    assert_eq!(scene.residency(0, 100), Mixed);
}

#[test]
fn a_slice_in_a_gap_is_pageable() {
    let (mut scene, _) = Scene::with([(0, 20), (60, 100)]);
    assert_eq!(scene.residency(20, 60), Pageable);
    assert_eq!(scene.residency(30, 50), Pageable);
}

#[test]
fn a_slice_over_a_gap_is_mixed() {
    let (mut scene, _) = Scene::with([(0, 49), (50, 100)]);
    assert_eq!(scene.residency(0, 100), Mixed);
    assert_eq!(scene.residency(48, 51), Mixed);
}

#[test]
fn a_removed_region_is_pageable() {
    let (mut scene, [registration]) = Scene::with([(20, 60)]);
    assert_eq!(registration.unregister().len(), 40);
    assert_eq!(scene.residency(20, 60), Pageable);
}

// Several regions.

#[test]
fn a_slice_across_two_regions_that_touch_is_a_seam() {
    let (mut scene, _) = Scene::with([(20, 50), (50, 80)]);
    assert_eq!(scene.residency(49, 51), Seam);
    assert_eq!(scene.residency(20, 80), Seam);
}

#[test]
fn a_slice_on_one_side_of_a_seam_is_pinned() {
    let (mut scene, _) = Scene::with([(20, 50), (50, 80)]);
    assert_eq!(scene.residency(20, 50), Pinned);
    assert_eq!(scene.residency(50, 80), Pinned);
}

#[test]
fn a_slice_that_leaves_regions_that_touch_is_mixed() {
    let (mut scene, _) = Scene::with([(20, 50), (50, 80)]);
    assert_eq!(scene.residency(19, 80), Mixed);
    assert_eq!(scene.residency(20, 81), Mixed);
}

#[test]
fn a_slice_that_two_overlapping_regions_share_is_pinned() {
    let (mut scene, _) = Scene::with([(20, 60), (40, 80)]);
    assert_eq!(scene.residency(40, 60), Pinned);
}

#[test]
fn a_slice_over_two_overlapping_regions_is_a_seam() {
    let (mut scene, _) = Scene::with([(20, 60), (40, 80)]);
    assert_eq!(scene.residency(20, 80), Seam);
    assert_eq!(scene.residency(39, 61), Seam);
}

#[test]
fn a_slice_past_a_nested_region_is_pinned_by_the_outer() {
    let (mut scene, _) = Scene::with([(10, 90), (20, 30), (40, 50)]);
    assert_eq!(scene.residency(25, 35), Pinned);
    assert_eq!(scene.residency(60, 70), Pinned);
    assert_eq!(scene.residency(10, 90), Pinned);
}

#[test]
fn a_region_that_touches_the_outer_of_two_nested_ones_makes_a_seam() {
    let (mut scene, _) = Scene::with([(10, 60), (20, 30), (60, 90)]);
    assert_eq!(scene.residency(10, 90), Seam);
}

#[test]
fn removing_the_outer_of_two_nested_regions_leaves_the_inner() {
    let (mut scene, [outer, _]) = Scene::with([(10, 90), (40, 60)]);
    outer.unregister();
    assert_eq!(scene.residency(40, 60), Pinned);
    assert_eq!(scene.residency(39, 60), Mixed);
    assert_eq!(scene.residency(10, 40), Pageable);
}

#[test]
fn removing_the_inner_of_two_nested_regions_leaves_the_outer() {
    let (mut scene, [_, inner]) = Scene::with([(10, 90), (40, 60)]);
    inner.unregister();
    assert_eq!(scene.residency(10, 90), Pinned);
    assert_eq!(scene.residency(40, 60), Pinned);
}

#[test]
fn removing_one_of_two_overlapping_regions_leaves_the_other() {
    let (mut scene, [first, _]) = Scene::with([(20, 60), (40, 80)]);
    first.unregister();
    assert_eq!(scene.residency(40, 80), Pinned);
    assert_eq!(scene.residency(20, 40), Pageable);

    let (mut scene, [_, second]) = Scene::with([(20, 60), (40, 80)]);
    second.unregister();
    assert_eq!(scene.residency(20, 60), Pinned);
    assert_eq!(scene.residency(60, 80), Pageable);
}

#[test]
fn removing_one_of_two_registrations_of_the_same_bytes_leaves_the_other() {
    for removed in [0, 1] {
        let (mut scene, registrations) = Scene::with([(20, 60), (20, 60)]);
        assert_eq!(scene.registry.live_count(), 2);
        let mut registrations = Vec::from(registrations);
        registrations.remove(removed).unregister();
        assert_eq!(scene.residency(20, 60), Pinned);
        assert_eq!(scene.registry.live_count(), 1);
        registrations.remove(0).unregister();
        assert_eq!(scene.residency(20, 60), Pageable);
    }
}

#[test]
fn the_order_of_registering_does_not_matter() {
    let (mut scene, _) = Scene::with([(50, 80), (0, 10), (20, 50)]);
    assert_eq!(scene.residency(20, 80), Seam);
    assert_eq!(scene.residency(0, 10), Pinned);
    assert_eq!(scene.residency(10, 20), Pageable);
}

// The ends of the address space.

#[test]
fn a_region_at_the_first_address_does_not_overflow() {
    let mut scene = Scene::new();
    let _ = scene.registry.register(Region::new(address(1), 1).unwrap());
    assert_eq!(scene.residency(0, 100), Pageable);
    assert_eq!(scene.containing(0, 100), None);
    assert_eq!(scene.segments(0, 100), [(0, 100, Pageable)]);
}

#[test]
fn a_region_at_the_last_address_does_not_overflow() {
    let mut scene = Scene::new();
    let last = Region::new(address(usize::MAX - 1), 1).unwrap();
    let _ = scene.registry.register(last);
    assert_eq!(scene.residency(0, 100), Pageable);
    assert_eq!(scene.containing(0, 100), None);
    assert_eq!(scene.segments(0, 100), [(0, 100, Pageable)]);
}

#[test]
fn regions_at_both_ends_of_the_address_space_do_not_touch_a_slice_between() {
    let (mut scene, _) = Scene::with([(20, 60)]);
    let below = Region::new(address(1), 1).unwrap();
    let above = Region::new(address(usize::MAX - 1), 1).unwrap();
    let _ = scene.registry.register_all([above, below]);
    assert_eq!(scene.residency(20, 60), Pinned);
    assert_eq!(scene.residency(0, 20), Pageable);
    assert_eq!(scene.residency(60, 100), Pageable);
    assert_eq!(scene.residency(0, 100), Mixed);
}

#[test]
fn a_region_of_the_whole_address_space_contains_every_slice() {
    let mut scene = Scene::new();
    let everything = Region::new(address(1), usize::MAX - 1).unwrap();
    let _ = scene.registry.register(everything);
    assert_eq!(scene.residency(0, 100), Pinned);
    assert_eq!(
        scene.registry.region_containing(&scene.buffer),
        Some(everything)
    );
    assert_eq!(scene.segments(0, 100), [(0, 100, Pinned)]);
}

#[test]
fn two_halves_of_the_address_space_are_a_seam_where_they_meet() {
    let mut scene = Scene::new();
    let middle = scene.buffer[50..].as_ptr();
    let below = Region::new(address(1), middle.addr() - 1).unwrap();
    let above = Region::new(middle, usize::MAX - middle.addr()).unwrap();
    let _ = scene.registry.register_all([below, above]);
    assert_eq!(scene.residency(0, 100), Seam);
    assert_eq!(scene.segments(0, 100), [(0, 50, Pinned), (50, 100, Pinned)]);
}

// Removing, and the ids.

#[test]
fn unregistering_returns_the_region() {
    let (scene, [first, second]) = Scene::with([(20, 60), (0, 10)]);
    assert_eq!(second.unregister(), region(&scene.buffer[0..10]));
    assert_eq!(first.unregister(), region(&scene.buffer[20..60]));
    assert_eq!(scene.registry.live_count(), 0);
}

#[test]
fn a_handle_removes_its_own_registration_of_the_same_bytes() {
    for removed in [0, 1, 2] {
        let (scene, registrations) = Scene::with([(20, 60), (20, 60), (20, 60)]);
        let mut registrations = Vec::from(registrations);
        registrations.remove(removed).unregister();
        let listed: Vec<_> = scene.registry.regions().map(|it| it.id()).collect();
        let left: Vec<_> = registrations.iter().map(Registration::id).collect();
        assert_eq!(listed, left);
    }
}

#[test]
fn a_handle_removes_from_its_own_registry() {
    let (mut scene, [_stays]) = Scene::with([(20, 60)]);
    let other = Registry::new();
    let registration = other.register(region(&scene.buffer[20..60]));
    registration.unregister();
    assert_eq!(scene.residency(20, 60), Pinned);
    assert_eq!(other.live_count(), 0);
}

#[test]
fn a_handle_that_is_dropped_leaves_its_registration() {
    let (mut scene, [dropped]) = Scene::with([(20, 60)]);
    drop(dropped);
    assert_eq!(scene.residency(20, 60), Pinned);
    assert_eq!(scene.registry.live_count(), 1);
}

#[test]
fn a_handle_knows_its_id_and_its_region_and_shows_them() {
    let (scene, [registration]) = Scene::with([(20, 60)]);
    let entry = scene.registry.regions().next().unwrap();
    assert_eq!(registration.id(), entry.id());
    assert_eq!(registration.region(), entry.region());
    let shown = format!("{registration:?}");
    assert!(shown.contains(&format!("{:?}", entry.id())));
    assert!(shown.contains(&format!("{:?}", entry.region())));
}

#[test]
fn memory_that_was_registered_before_it_was_pinned_is_unpinned_live() {
    let (mut scene, [registration]) = Scene::with([(20, 60)]);
    let registry = scene.registry;
    let id = registration.id();
    let state = || {
        registry
            .regions()
            .find(|it| it.id() == id)
            .map(|it| it.state())
    };
    let refused = registration.unpin_with(|| Err("the driver refused"));
    let registration = refused.unwrap_err().registration;
    assert_eq!(state(), Some(RegionState::Live));
    registration
        .unpin_with(|| {
            assert_eq!(state(), Some(RegionState::Retiring));
            Ok::<_, Infallible>(())
        })
        .unwrap();
    assert_eq!(scene.residency(20, 60), Pageable);
}

#[test]
fn an_id_is_never_used_again() {
    let registry = Registry::new();
    let buffer = [0u8; 64];
    let mut seen = HashSet::new();
    for _ in 0..1000 {
        let registration = registry.register(region(&buffer));
        assert!(seen.insert(registration.id()));
        registration.unregister();
    }
    for registration in registry.register_all([region(&buffer); 10]) {
        assert!(seen.insert(registration.id()));
    }
    assert!(seen.insert(registry.register(region(&buffer)).id()));
}

#[test]
fn an_id_is_never_used_again_on_another_thread_or_by_another_registry() {
    let buffer = [0u8; 64];
    let ids: Vec<RegionId> = thread::scope(|scope| {
        let threads = [(); 4].map(|()| {
            scope.spawn(|| {
                let registry = Registry::new();
                let ids = (0..1000).map(|_| {
                    let registration = registry.register(region(&buffer));
                    let id = registration.id();
                    registration.unregister();
                    id
                });
                ids.collect::<Vec<_>>()
            })
        });
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap())
            .collect()
    });
    assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 4000);
}

// Many at once.

#[test]
fn register_all_gives_the_handles_in_the_order_of_the_regions() {
    let scene = Scene::new();
    let parts = [60..80, 0..20, 30..50].map(|part| region(&scene.buffer[part]));
    let registrations = scene.registry.register_all(parts);
    assert_eq!(registrations.len(), 3);
    for (registration, part) in registrations.into_iter().zip(parts) {
        assert_eq!(registration.region(), part);
        assert_eq!(registration.unregister(), part);
    }
    assert_eq!(scene.registry.live_count(), 0);
}

#[test]
fn register_all_is_seen_whole_or_not_at_all_while_its_iterator_runs() {
    let mut scene = Scene::new();
    let registry = scene.registry;
    let parts = [0..50, 50..100].map(|part| region(&scene.buffer[part]));
    let _ = registry.register_all(parts.into_iter().inspect(|_| {
        assert_eq!(registry.live_count(), 0);
    }));
    assert_eq!(scene.residency(0, 100), Seam);
}

#[test]
fn register_all_of_nothing_changes_nothing() {
    let (scene, _) = Scene::with([(20, 60)]);
    let before: Vec<_> = scene.registry.regions().collect();
    assert!(scene.registry.register_all([]).is_empty());
    assert_eq!(scene.registry.regions().collect::<Vec<_>>(), before);
}

#[test]
fn register_all_keeps_what_was_registered_before() {
    let (mut scene, _) = Scene::with([(20, 60)]);
    let part = region(&scene.buffer[60..80]);
    let _ = scene.registry.register_all([part]);
    assert_eq!(scene.residency(20, 80), Seam);
    assert_eq!(scene.registry.live_count(), 2);
}

#[test]
fn register_all_may_register_the_same_bytes_more_than_once() {
    let mut scene = Scene::new();
    let part = region(&scene.buffer[20..60]);
    let mut registrations = scene.registry.register_all([part, part]);
    assert_eq!(scene.registry.live_count(), 2);
    registrations.remove(0).unregister();
    assert_eq!(scene.residency(20, 60), Pinned);
}

#[test]
fn the_iterator_of_register_all_may_itself_register() {
    let mut scene = Scene::new();
    let registry = scene.registry;
    let parts = [0..50, 50..100].map(|part| region(&scene.buffer[part]));
    let _ = registry.register_all(parts.into_iter().inspect(|&part| {
        let _ = registry.register(part);
    }));
    assert_eq!(registry.live_count(), 4);
    assert_eq!(scene.residency(0, 100), Seam);
}

#[test]
fn a_panicking_iterator_leaves_the_last_published_snapshot_in_force() {
    let (mut scene, _) = Scene::with([(20, 60)]);
    let part = region(&scene.buffer[60..80]);
    let registry = scene.registry;
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        registry.register_all([part, part].into_iter().enumerate().map(|(n, part)| {
            assert_eq!(n, 0, "the second region is not to be had");
            part
        }))
    }));
    assert!(panicked.is_err());
    assert_eq!(scene.residency(20, 60), Pinned);
    assert_eq!(scene.residency(60, 80), Pageable);
    assert_eq!(registry.live_count(), 1);
}

#[test]
fn a_registry_is_usable_after_a_panic_in_register_all() {
    let (mut scene, [registration]) = Scene::with([(20, 60)]);
    let registry = scene.registry;
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        registry.register_all([()].map(|()| panic!("no region is to be had")))
    }));
    assert!(panicked.is_err());
    let _ = scene.register(60, 80);
    assert_eq!(scene.residency(20, 80), Seam);
    registration.unregister();
    assert_eq!(scene.residency(20, 60), Pageable);
}

// Which region.

#[test]
fn the_region_containing_a_slice_is_the_one_around_it() {
    let (mut scene, _) = Scene::with([(0, 20), (30, 60), (70, 90)]);
    assert_eq!(scene.containing(35, 60), Some((30, 60)));
    assert_eq!(scene.containing(30, 31), Some((30, 60)));
    assert_eq!(scene.containing(70, 90), Some((70, 90)));
}

#[test]
fn no_region_contains_a_slice_that_is_partly_or_not_pinned() {
    let (mut scene, _) = Scene::with([(30, 60)]);
    assert_eq!(scene.containing(29, 31), None);
    assert_eq!(scene.containing(59, 61), None);
    assert_eq!(scene.containing(0, 30), None);
    assert_eq!(scene.containing(60, 100), None);
}

#[test]
fn no_region_contains_a_slice_across_a_seam() {
    let (mut scene, _) = Scene::with([(20, 50), (50, 80)]);
    assert_eq!(scene.containing(49, 51), None);
}

#[test]
fn of_several_regions_around_a_slice_the_one_that_reaches_furthest_is_told() {
    let (mut scene, _) = Scene::with([(10, 50), (20, 90), (30, 60)]);
    assert_eq!(scene.containing(35, 40), Some((20, 90)));
    assert_eq!(scene.containing(10, 50), Some((10, 50)));
}

#[test]
fn a_short_region_does_not_hide_the_long_one_that_began_before_it() {
    let (mut scene, _) = Scene::with([(10, 90), (40, 50)]);
    assert_eq!(scene.containing(60, 70), Some((10, 90)));
}

// The parts of a slice.

#[test]
fn a_slice_inside_a_region_is_one_pinned_segment() {
    let (mut scene, _) = Scene::with([(20, 60)]);
    assert_eq!(scene.segments(20, 60), [(20, 60, Pinned)]);
    assert_eq!(scene.segments(30, 40), [(30, 40, Pinned)]);
}

#[test]
fn a_slice_in_a_gap_is_one_pageable_segment() {
    let (mut scene, _) = Scene::with([(0, 20), (60, 100)]);
    assert_eq!(scene.segments(20, 60), [(20, 60, Pageable)]);
}

#[test]
fn segments_split_where_regions_begin_and_end() {
    let (mut scene, _) = Scene::with([(20, 40), (60, 80)]);
    assert_eq!(
        scene.segments(0, 100),
        [
            (0, 20, Pageable),
            (20, 40, Pinned),
            (40, 60, Pageable),
            (60, 80, Pinned),
            (80, 100, Pageable),
        ]
    );
}

#[test]
fn segments_are_cut_at_the_ends_of_the_slice() {
    let (mut scene, _) = Scene::with([(20, 40), (60, 80)]);
    assert_eq!(
        scene.segments(30, 61),
        [(30, 40, Pinned), (40, 60, Pageable), (60, 61, Pinned)]
    );
}

#[test]
fn segments_split_at_a_seam() {
    let (mut scene, _) = Scene::with([(20, 50), (50, 80)]);
    assert_eq!(scene.segments(20, 80), [(20, 50, Pinned), (50, 80, Pinned)]);
}

#[test]
fn a_segment_goes_as_far_as_one_overlapping_region_reaches() {
    let (mut scene, _) = Scene::with([(20, 60), (40, 80), (50, 70)]);
    assert_eq!(scene.segments(20, 80), [(20, 60, Pinned), (60, 80, Pinned)]);
}

#[test]
fn a_nested_region_does_not_split_a_segment() {
    let (mut scene, _) = Scene::with([(10, 90), (40, 60)]);
    assert_eq!(scene.segments(10, 90), [(10, 90, Pinned)]);
}

#[test]
fn segments_are_of_one_snapshot_whatever_is_registered_meanwhile() {
    let (scene, [registration]) = Scene::with([(20, 40)]);
    let mut segments = scene.registry.segments(&scene.buffer);
    let first = segments.next().unwrap();
    assert_eq!(scene.place(&first), (0, 20, Pageable));

    registration.unregister();
    let _ = scene.register(50, 100);
    let rest = segments.take(3).map(|segment| scene.place(&segment));
    assert_eq!(
        rest.collect::<Vec<_>>(),
        [(20, 40, Pinned), (40, 100, Pageable)]
    );
}

#[test]
fn segments_stay_ended() {
    let (scene, _) = Scene::with([(0, 100)]);
    let mut segments = scene.registry.segments(&scene.buffer);
    assert!(segments.next().is_some());
    assert_eq!(segments.next(), None);
    assert_eq!(segments.next(), None);
}

// The list of registrations.

#[test]
fn regions_are_listed_by_address() {
    let (scene, registrations) = Scene::with([(60, 80), (0, 20), (30, 50)]);
    let ids = registrations.map(|it| it.id());
    let listed: Vec<_> = scene
        .registry
        .regions()
        .map(|entry| (scene.part(entry.region()), entry.id()))
        .collect();
    assert_eq!(
        listed,
        [((0, 20), ids[1]), ((30, 50), ids[2]), ((60, 80), ids[0])]
    );
}

#[test]
fn regions_are_of_one_snapshot_whatever_is_registered_meanwhile() {
    let (scene, [_, second, _]) = Scene::with([(0, 20), (30, 50), (60, 80)]);
    let mut regions = scene.registry.regions();
    regions.next();

    second.unregister();
    let _ = scene.register(90, 100);
    let rest: Vec<_> = regions.map(|entry| scene.part(entry.region())).collect();
    assert_eq!(rest, [(30, 50), (60, 80)]);
}

#[test]
fn regions_know_how_many_are_left() {
    let (scene, _) = Scene::with([(0, 20), (30, 50), (60, 80)]);
    let mut regions = scene.registry.regions();
    for left in [3, 2, 1, 0] {
        assert_eq!(regions.len(), left);
        assert_eq!(regions.next().is_some(), left > 0);
    }
    assert_eq!(regions.len(), 0);
    assert_eq!(regions.next(), None);
}

#[test]
fn a_reader_lists_the_same_regions() {
    let (mut scene, _) = Scene::with([(60, 80), (0, 20), (30, 50)]);
    let of_reader: Vec<_> = scene.reader.regions().collect();
    assert_eq!(of_reader, scene.registry.regions().collect::<Vec<_>>());
    assert_eq!(of_reader.len(), 3);
}

#[test]
fn live_count_counts_every_registration() {
    let (mut scene, [registration, _, _]) = Scene::with([(0, 20), (0, 20), (10, 30)]);
    assert_eq!(scene.registry.live_count(), 3);
    assert_eq!(scene.reader.live_count(), 3);
    registration.unregister();
    assert_eq!(scene.registry.live_count(), 2);
    assert_eq!(scene.reader.live_count(), 2);
}

// Who can be asked.

#[test]
fn a_reader_sees_what_was_registered_after_it_was_made() {
    let registry = Registry::new();
    let buffer = [0u8; 64];
    let mut reader = registry.reader();
    assert!(!reader.is_pinned(&buffer));
    let registration = registry.register(region(&buffer));
    assert!(reader.is_pinned(&buffer));
    registration.unregister();
    assert!(!reader.is_pinned(&buffer));
}

#[test]
fn a_cloned_reader_sees_what_was_registered_after_it_was_made() {
    let registry = Registry::new();
    let buffer = [0u8; 64];
    let mut reader = registry.reader();
    let mut clone = reader.clone();
    let _ = registry.register(region(&buffer));
    assert!(reader.is_pinned(&buffer));
    assert!(clone.is_pinned(&buffer));
}

#[test]
fn a_registration_on_one_thread_is_seen_on_another() {
    let registry = Registry::new();
    let buffer = [0u8; 64];
    let step = Barrier::new(2);
    // Nothing is asserted while the other thread may be waiting.
    let answers = thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let mut reader = registry.reader();
            [(); 3].map(|()| {
                let answer = (reader.is_pinned(&buffer), registry.is_pinned(&buffer));
                step.wait();
                step.wait();
                answer
            })
        });
        step.wait();
        let registration = registry.register(region(&buffer));
        step.wait();
        step.wait();
        registration.unregister();
        step.wait();
        step.wait();
        step.wait();
        asking.join().unwrap()
    });
    assert_eq!(answers, [(false, false), (true, true), (false, false)]);
}

#[test]
fn registries_do_not_see_each_others_regions() {
    let (mut one, _) = Scene::with([(20, 60)]);
    let other = Registry::new();
    assert_eq!(one.residency(20, 60), Pinned);
    assert!(!other.is_pinned(&one.buffer[20..60]));
    assert!(!pinned_hosts::is_pinned(&one.buffer[20..60]));
}

#[test]
fn the_free_functions_ask_the_process_wide_registry() {
    let buffer = [0u8; 100];
    let parts = [20..50, 50..80].map(|part| region(&buffer[part]));
    let registrations = global().register_all(parts);
    let mut reader = global().reader();
    for (part, answer) in [
        (0..20, Pageable),
        (20..50, Pinned),
        (49..51, Seam),
        (79..81, Mixed),
    ] {
        let bytes = &buffer[part];
        let pinned = matches!(answer, Pinned | Seam);
        assert_eq!(pinned_hosts::residency(bytes), answer);
        assert_eq!(global().residency(bytes), answer);
        assert_eq!(reader.residency(bytes), answer);
        assert_eq!(pinned_hosts::is_pinned(bytes), pinned);
        assert_eq!(global().is_pinned(bytes), pinned);
        assert_eq!(reader.is_pinned(bytes), pinned);
    }
    for registration in registrations {
        registration.unregister();
    }
    assert_eq!(pinned_hosts::residency(&buffer), Pageable);
}

#[test]
fn a_lookup_in_a_thread_local_destructor_is_right_after_the_threads_own_reader_is_gone() {
    thread_local! {
        static FIRST: AsksWhenDropped = const { AsksWhenDropped::new() };
        static LAST: AsksWhenDropped = const { AsksWhenDropped::new() };
    }
    static REGISTERED: [u8; 64] = [1; 64];
    static NEVER_REGISTERED: [u8; 64] = [2; 64];

    /// Set up with a channel, sends what it is answered when it is dropped.
    struct AsksWhenDropped(std::cell::OnceCell<mpsc::Sender<(bool, Residency, bool)>>);

    impl AsksWhenDropped {
        const fn new() -> Self {
            Self(std::cell::OnceCell::new())
        }
    }

    impl Drop for AsksWhenDropped {
        fn drop(&mut self) {
            let answer = (
                pinned_hosts::is_pinned(&REGISTERED),
                pinned_hosts::residency(&REGISTERED),
                pinned_hosts::is_pinned(&NEVER_REGISTERED),
            );
            let _ = self.0.get().unwrap().send(answer);
        }
    }

    let (send, answers) = mpsc::channel();
    let registration = global().register(region(&REGISTERED));
    // Thread-locals are dropped in the order, or in the reverse order, in
    // which they were first used: so one of these two outlives the thread's
    // reader, which is first used between them.
    let thread = thread::spawn(move || {
        FIRST.with(|asks| asks.0.set(send.clone()).unwrap());
        assert!(pinned_hosts::is_pinned(&REGISTERED));
        LAST.with(|asks| asks.0.set(send).unwrap());
    });
    thread.join().unwrap();
    assert_eq!(
        answers.iter().collect::<Vec<_>>(),
        [(true, Pinned, false), (true, Pinned, false)]
    );
    registration.unregister();
}

#[test]
fn a_threads_first_lookup_may_be_in_a_thread_local_destructor() {
    static REGISTERED: [u8; 64] = [1; 64];
    static ANSWER: std::sync::OnceLock<bool> = std::sync::OnceLock::new();

    struct AsksWhenDropped;

    impl Drop for AsksWhenDropped {
        fn drop(&mut self) {
            ANSWER.set(pinned_hosts::is_pinned(&REGISTERED)).unwrap();
        }
    }

    thread_local! {
        static ASKS: AsksWhenDropped = const { AsksWhenDropped };
    }

    let registration = global().register(region(&REGISTERED));
    thread::spawn(|| ASKS.with(|_| ())).join().unwrap();
    assert_eq!(ANSWER.get(), Some(&true));
    registration.unregister();
}

// Several writers.

#[test]
fn writers_at_once_lose_no_registration_and_no_removal() {
    let registry = Registry::new();
    // Many regions make a publish slow, so that the writers do meet.
    let crowd = vec![0u8; 1000];
    let _ = registry.register_all(crowd.chunks(1).map(region));
    let buffer = [0u8; 64];
    let parts: Vec<Region> = buffer.chunks(16).map(region).collect();
    let together = Barrier::new(parts.len());
    for _ in 0..50 {
        let registrations: Vec<Vec<Registration<'_>>> = thread::scope(|scope| {
            let spawn = |&part| {
                let (registry, together) = (&registry, &together);
                scope.spawn(move || {
                    together.wait();
                    let mut registrations = vec![registry.register(part)];
                    registrations.extend(registry.register_all([part, part]));
                    registrations
                })
            };
            let threads: Vec<_> = parts.iter().map(spawn).collect();
            let registrations = threads.into_iter().map(|thread| thread.join().unwrap());
            registrations.collect()
        });
        assert_eq!(registry.live_count(), 1000 + 3 * parts.len());
        assert_eq!(registry.residency(&buffer), Seam);

        thread::scope(|scope| {
            for registrations in registrations {
                let together = &together;
                scope.spawn(move || {
                    together.wait();
                    for registration in registrations {
                        registration.unregister();
                    }
                });
            }
        });
        assert_eq!(registry.live_count(), 1000);
        assert_eq!(registry.residency(&buffer), Pageable);
    }
    assert!(crowd.chunks(1).all(|byte| registry.is_pinned(byte)));
}

// What the types promise.

#[test]
fn a_registry_shows_its_regions() {
    let registry = Registry::new();
    assert_eq!(format!("{registry:?}"), "[]");

    let region = Region::new(address(0x1000), 0x20).unwrap();
    let registration = registry.register(region);
    let shown = format!("{registry:?}");
    assert!(shown.contains(&format!("{region:?}")));
    assert!(shown.contains(&format!("{:?}", registration.id())));
}

#[test]
fn a_reader_can_be_shown() {
    assert_eq!(format!("{:?}", Registry::new().reader()), "Reader { .. }");
}

#[test]
fn a_residency_shows_its_name() {
    let shown = [Pageable, Pinned, Seam, Mixed].map(|residency| format!("{residency:?}"));
    assert_eq!(shown, ["Pageable", "Pinned", "Seam", "Mixed"]);
}

#[test]
fn a_default_registry_is_empty() {
    assert_eq!(Registry::default().live_count(), 0);
}

#[test]
fn the_types_have_the_traits_that_their_users_need() {
    fn value<T: Copy + Eq + Hash + Debug + Send + Sync + 'static>() {}
    fn error<T: Error + Copy + Eq + Send + Sync + 'static>() {}
    fn shared<T: Send + Sync + Debug>() {}
    fn sent<T: Send + Clone + Debug>() {}
    fn entry<T: Copy + Eq + Debug + Send + Sync>() {}

    value::<Residency>();
    value::<RegionId>();
    value::<Region>();
    error::<RegionError>();
    shared::<Registry>();
    shared::<Registration<'static>>();
    sent::<Reader<'static>>();
    sent::<Segments<'static>>();
    sent::<Regions>();
    entry::<Segment<'static>>();
    entry::<RegionEntry>();
}
