//! Every question, asked of random registrations, against an oracle that
//! looks at them one byte at a time.
//!
//! All regions and slices lie in one small arena, so that they meet often, and
//! so that every slice of it can be tried.

#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use pinned_hosts::Residency::{Mixed, Pageable, Pinned, Seam};
use pinned_hosts::{
    Reader, Region, RegionEntry, RegionId, Registration, Registry, Residency, Segment, global,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

/// Every slice of this many bytes is tried where a test says "every slice".
const SMALL: usize = 24;
/// The arena of the tests that try some slices.
const LARGE: usize = 64;

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        // A counterexample is printed in full: keep it as a test in
        // `registry.rs`, where it has a name.
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

/// A part of an arena, as offsets.
type Part = Range<usize>;

/// Any part with at least `min` bytes of an arena with `len`.
fn part(len: usize, min: usize) -> impl Strategy<Value = Part> {
    (0..=len - min).prop_flat_map(move |start| (start + min..=len).prop_map(move |end| start..end))
}

/// Mostly short parts, so that gaps remain between the regions.
fn region_part(len: usize) -> impl Strategy<Value = Part> {
    prop_oneof![
        4 => (0..len, 1..len / 4).prop_map(move |(at, n)| at..(at + n).min(len)),
        1 => part(len, 1),
    ]
}

/// The oracle: registrations in the order in which they were made.
#[derive(Clone, Debug, Default)]
struct Oracle {
    registered: Vec<(RegionId, Part)>,
}

impl Oracle {
    fn regions_around(&self, part: &Part) -> impl Iterator<Item = &Part> {
        self.registered
            .iter()
            .map(|(_, region)| region)
            .filter(|region| !part.is_empty() && part.clone().all(|byte| region.contains(&byte)))
    }

    fn is_pinned_byte(&self, byte: usize) -> bool {
        self.registered
            .iter()
            .any(|(_, region)| region.contains(&byte))
    }

    fn residency(&self, part: &Part) -> Residency {
        let pinned = part.clone().filter(|&byte| self.is_pinned_byte(byte));
        match pinned.count() {
            0 => Pageable,
            _ if self.regions_around(part).next().is_some() => Pinned,
            count if count == part.len() => Seam,
            _ => Mixed,
        }
    }

    /// Where the regions end that contain the part and reach furthest.
    fn furthest_around(&self, part: &Part) -> Option<usize> {
        self.regions_around(part).map(|region| region.end).max()
    }

    /// Grows each segment byte by byte while it stays in one region or in
    /// none.
    fn segments(&self, part: &Part) -> Vec<(Part, Residency)> {
        let mut segments = Vec::new();
        let mut start = part.start;
        while start < part.end {
            let residency = self.residency(&(start..start + 1));
            let mut end = start + 1;
            while end < part.end && self.residency(&(start..end + 1)) == residency {
                end += 1;
            }
            segments.push((start..end, residency));
            start = end;
        }
        segments
    }

    fn by_address(&self) -> Vec<(RegionId, Part)> {
        let mut sorted = self.registered.clone();
        sorted.sort_by_key(|(id, region)| (region.start, *id));
        sorted
    }
}

/// Memory, and the offsets in it.
struct Arena(Vec<u8>);

impl Arena {
    fn new(len: usize) -> Self {
        Self(vec![0; len])
    }

    fn bytes(&self, part: &Part) -> &[u8] {
        &self.0[part.clone()]
    }

    fn region(&self, part: &Part) -> Region {
        Region::of(self.bytes(part)).unwrap()
    }

    fn part(&self, region: Region) -> Part {
        let start = region.base().addr() - self.0.as_ptr().addr();
        start..start + region.len()
    }

    fn entry(&self, entry: RegionEntry) -> (RegionId, Part) {
        (entry.id(), self.part(entry.region()))
    }

    fn segment(&self, segment: Segment<'_>) -> (Part, Residency) {
        let bytes = segment.bytes();
        assert!(!bytes.is_empty());
        (self.part(Region::of(bytes).unwrap()), segment.residency())
    }

    fn every_part(&self) -> impl Iterator<Item = Part> + use<> {
        let len = self.0.len();
        (0..=len).flat_map(move |start| (start..=len).map(move |end| start..end))
    }
}

/// Somebody who can be asked.
trait Asked {
    fn is_pinned(&mut self, bytes: &[u8]) -> bool;
    fn residency(&mut self, bytes: &[u8]) -> Residency;
    fn region_containing(&mut self, bytes: &[u8]) -> Option<Region>;
    fn segments<'a>(&mut self, bytes: &'a [u8]) -> Vec<Segment<'a>>;
    fn regions(&mut self) -> Vec<RegionEntry>;
    fn live_count(&mut self) -> usize;
}

macro_rules! asked {
    ($who:ty, $of:ident) => {
        impl Asked for $who {
            fn is_pinned(&mut self, bytes: &[u8]) -> bool {
                $of::is_pinned(self, bytes)
            }
            fn residency(&mut self, bytes: &[u8]) -> Residency {
                $of::residency(self, bytes)
            }
            fn region_containing(&mut self, bytes: &[u8]) -> Option<Region> {
                $of::region_containing(self, bytes)
            }
            fn segments<'a>(&mut self, bytes: &'a [u8]) -> Vec<Segment<'a>> {
                // No more than can be right, lest a fault makes this endless.
                $of::segments(self, bytes).take(LARGE + 1).collect()
            }
            fn regions(&mut self) -> Vec<RegionEntry> {
                let regions = $of::regions(self);
                let len = regions.len();
                let regions: Vec<_> = regions.collect();
                assert_eq!(regions.len(), len);
                regions
            }
            fn live_count(&mut self) -> usize {
                $of::live_count(self)
            }
        }
    };
}

asked!(&Registry, Registry);
asked!(Reader<'_>, Reader);

/// The free functions; what they do not offer is asked of `global`.
struct ProcessWide;

impl Asked for ProcessWide {
    fn is_pinned(&mut self, bytes: &[u8]) -> bool {
        pinned_hosts::is_pinned(bytes)
    }
    fn residency(&mut self, bytes: &[u8]) -> Residency {
        pinned_hosts::residency(bytes)
    }
    fn region_containing(&mut self, bytes: &[u8]) -> Option<Region> {
        Asked::region_containing(&mut global(), bytes)
    }
    fn segments<'a>(&mut self, bytes: &'a [u8]) -> Vec<Segment<'a>> {
        Asked::segments(&mut global(), bytes)
    }
    fn regions(&mut self) -> Vec<RegionEntry> {
        Asked::regions(&mut global())
    }
    fn live_count(&mut self) -> usize {
        pinned_hosts::live_count()
    }
}

/// Asks `who` everything about `part`.
fn check_part(who: &mut impl Asked, arena: &Arena, oracle: &Oracle, part: &Part) {
    let bytes = arena.bytes(part);
    let residency = oracle.residency(part);
    assert_eq!(who.residency(bytes), residency, "residency of {part:?}");
    assert_eq!(
        who.is_pinned(bytes),
        matches!(residency, Pinned | Seam),
        "is_pinned of {part:?}"
    );

    let containing = who.region_containing(bytes).map(|r| arena.part(r));
    assert_eq!(
        containing.as_ref().map(|region| region.end),
        oracle.furthest_around(part),
        "end of the region containing {part:?}"
    );
    if let Some(region) = containing {
        assert!(
            oracle.regions_around(part).any(|around| *around == region),
            "{region:?} is to contain {part:?}"
        );
    }

    let segments: Vec<_> = who
        .segments(bytes)
        .into_iter()
        .map(|segment| arena.segment(segment))
        .collect();
    assert_eq!(segments, oracle.segments(part), "segments of {part:?}");
}

/// Asks `who` what is registered.
fn check_list(who: &mut impl Asked, arena: &Arena, oracle: &Oracle) {
    let listed: Vec<_> = who
        .regions()
        .into_iter()
        .map(|entry| arena.entry(entry))
        .collect();
    assert_eq!(listed, oracle.by_address());
    assert_eq!(who.live_count(), oracle.registered.len());
}

#[derive(Clone, Debug)]
enum Op {
    Register(Part),
    RegisterAll(Vec<Part>),
    /// Removes one of the ids that were ever given out: some are stale.
    Unregister(Index),
    Ask(Part),
}

fn op(len: usize) -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => region_part(len).prop_map(Op::Register),
        1 => vec(region_part(len), 0..4).prop_map(Op::RegisterAll),
        3 => any::<Index>().prop_map(Op::Unregister),
        2 => part(len, 0).prop_map(Op::Ask),
    ]
}

proptest! {
    #![proptest_config(config(500))]

    /// Whatever is registered, the answer for every slice is the oracle's.
    #[test]
    fn every_slice_of_a_small_arena_is_answered_as_by_the_oracle(
        parts in vec(region_part(SMALL), 0..7),
    ) {
        let arena = Arena::new(SMALL);
        let registry = Registry::new();
        let mut oracle = Oracle::default();
        for part in parts {
            let registration = registry.register(arena.region(&part));
            oracle.registered.push((registration.id(), part));
        }
        check_list(&mut &registry, &arena, &oracle);
        for part in arena.every_part() {
            check_part(&mut &registry, &arena, &oracle, &part);
        }
    }
}

proptest! {
    #![proptest_config(config(3000))]

    /// With more regions in more room.
    #[test]
    fn a_slice_of_a_larger_arena_is_answered_as_by_the_oracle(
        parts in vec(region_part(LARGE), 0..20),
        asked in vec(part(LARGE, 0), 12),
    ) {
        let arena = Arena::new(LARGE);
        let registry = Registry::new();
        let mut reader = registry.reader();
        let registrations = registry.register_all(parts.iter().map(|part| arena.region(part)));
        let ids = registrations.iter().map(Registration::id);
        let oracle = Oracle { registered: ids.zip(parts).collect() };
        check_list(&mut reader, &arena, &oracle);
        for part in asked {
            check_part(&mut reader, &arena, &oracle, &part);
        }
    }

    /// A run of registering, removing and asking. One reader looks after each
    /// step, and one only now and then, so that it skips snapshots.
    #[test]
    fn a_sequence_of_operations_is_answered_as_by_the_oracle(
        ops in vec(op(LARGE), 0..24),
        asked in vec(part(LARGE, 0), 6),
    ) {
        let arena = Arena::new(LARGE);
        let registry = Registry::new();
        let mut reader = registry.reader();
        let mut idle_reader = registry.reader();
        let mut oracle = Oracle::default();
        let mut given_out = HashSet::new();
        let mut registrations: Vec<Registration<'_>> = Vec::new();
        for op in ops {
            match op {
                Op::Register(part) => {
                    let registration = registry.register(arena.region(&part));
                    prop_assert!(given_out.insert(registration.id()));
                    oracle.registered.push((registration.id(), part));
                    registrations.push(registration);
                }
                Op::RegisterAll(parts) => {
                    let regions = parts.iter().map(|part| arena.region(part));
                    let new = registry.register_all(regions);
                    prop_assert_eq!(new.len(), parts.len());
                    for registration in &new {
                        prop_assert!(given_out.insert(registration.id()));
                    }
                    oracle.registered.extend(new.iter().map(Registration::id).zip(parts));
                    registrations.extend(new);
                }
                Op::Unregister(index) => if !registrations.is_empty() {
                    let registration = registrations.swap_remove(index.index(registrations.len()));
                    let (id, region) = (registration.id(), registration.region());
                    oracle.registered.retain(|(registered, _)| *registered != id);
                    prop_assert_eq!(registration.unregister(), region);
                }
                Op::Ask(part) => check_part(&mut idle_reader, &arena, &oracle, &part),
            }
            check_list(&mut &registry, &arena, &oracle);
            check_list(&mut reader, &arena, &oracle);
            for part in &asked {
                check_part(&mut reader, &arena, &oracle, part);
            }
        }
        for part in &asked {
            check_part(&mut &registry, &arena, &oracle, part);
            check_part(&mut registry.reader(), &arena, &oracle, part);
            check_part(&mut idle_reader, &arena, &oracle, part);
        }
    }
}

#[derive(Clone, Debug)]
enum FreeOp {
    /// Possibly of zero bytes.
    Register(Part),
    Unregister(usize),
    RegisterTyped(Part),
    UnregisterTyped(Index),
}

fn free_op(len: usize) -> impl Strategy<Value = FreeOp> {
    // Few bases, so that they repeat.
    let base = || (0..len / 8).prop_map(|n| n * 8);
    let at_base = move || (base(), 0..=len).prop_map(move |(at, bytes)| at..(at + bytes).min(len));
    prop_oneof![
        4 => at_base().prop_map(FreeOp::Register),
        3 => base().prop_map(FreeOp::Unregister),
        2 => (base(), 1..=len).prop_map(move |(at, n)| FreeOp::RegisterTyped(at..(at + n).min(len))),
        2 => any::<Index>().prop_map(FreeOp::UnregisterTyped),
    ]
}

/// What is registered in the process-wide registry by the typed interface. Leaves
/// that registry empty, also after a case that failed.
#[derive(Default)]
struct Typed(Vec<(Registration<'static>, Part)>);

impl Drop for Typed {
    fn drop(&mut self) {
        for (registration, _) in self.0.drain(..) {
            registration.unregister();
        }
        for entry in global().regions() {
            pinned_hosts::unregister(entry.region().base());
        }
    }
}

proptest! {
    #![proptest_config(config(1000))]

    /// The free functions against a map from base to length, with typed
    /// registrations of the same bases beside them.
    ///
    /// The only test of this binary that touches the process-wide registry.
    #[test]
    fn the_free_functions_are_a_map_from_base_to_length_beside_the_typed_registrations(
        ops in vec(free_op(LARGE), 0..24),
        asked in vec(part(LARGE, 0), 6),
    ) {
        let arena = Arena::new(LARGE);
        let mut by_base: BTreeMap<usize, usize> = BTreeMap::new();
        let mut typed = Typed::default();
        for op in ops {
            match op {
                FreeOp::Register(part) => {
                    let bytes = arena.bytes(&part);
                    pinned_hosts::register(bytes.as_ptr(), bytes.len());
                    if !part.is_empty() {
                        by_base.insert(part.start, part.len());
                    }
                }
                FreeOp::Unregister(base) => {
                    pinned_hosts::unregister(arena.0[base..].as_ptr());
                    by_base.remove(&base);
                }
                FreeOp::RegisterTyped(part) => {
                    typed.0.push((global().register(arena.region(&part)), part));
                }
                FreeOp::UnregisterTyped(index) => if !typed.0.is_empty() {
                    let (registration, part) = typed.0.swap_remove(index.index(typed.0.len()));
                    prop_assert_eq!(registration.unregister(), arena.region(&part));
                }
            }

            // The ids of what the free functions registered are not to be
            // known beforehand.
            let free = global()
                .regions()
                .map(|entry| arena.entry(entry))
                .filter(|(id, _)| typed.0.iter().all(|(other, _)| other.id() != *id));
            let mut oracle = Oracle { registered: free.collect() };
            let listed: Vec<_> = oracle
                .registered
                .iter()
                .map(|(_, part)| (part.start, part.len()))
                .collect();
            let expected: Vec<_> = by_base.iter().map(|(&base, &len)| (base, len)).collect();
            prop_assert_eq!(listed, expected);

            let typed = typed.0.iter().map(|(it, part)| (it.id(), part.clone()));
            oracle.registered.extend(typed);
            check_list(&mut ProcessWide, &arena, &oracle);
            for part in &asked {
                check_part(&mut ProcessWide, &arena, &oracle, part);
            }
        }
    }
}
