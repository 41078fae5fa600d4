//! So many regions that a snapshot is a tree of two and three levels, against
//! an oracle that keeps one number for each byte.
//!
//! `oracle.rs` tries more shapes of few regions. Here nodes split and join, and
//! the tree grows and loses levels: it has 64 items in a node at most, so that
//! some two thousand regions make three levels.

#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::ops::Range;

use pinned_hosts::Residency::{Mixed, Pageable, Pinned, Seam};
use pinned_hosts::{
    Reader, Region, RegionEntry, RegionId, RegionState, Registration, Registry, Residency, global,
};
use proptest::collection::vec;
use proptest::prelude::*;

const ARENA: usize = 20_000;

/// A part of the arena, as offsets.
type Part = Range<usize>;

/// Numbers that look random, the same ones for the same seed.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((bits ^ (bits >> 31)) % end as u64) as usize
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for k in (1..items.len()).rev() {
            items.swap(k, self.below(k + 1));
        }
    }
}

/// How the regions of a batch lie.
#[derive(Clone, Copy, Debug)]
enum Shape {
    Apart,
    Touching,
    Overlapping,
    Nested,
    SameStart,
    SameEnd,
    SameBytes,
    Scattered,
}

/// In what order they are registered.
#[derive(Clone, Copy, Debug)]
enum Order {
    Ascending,
    Descending,
    Random,
}

impl Order {
    /// Puts what is ascending in this order.
    fn put<T>(self, items: &mut [T]) {
        match self {
            Self::Ascending => {}
            Self::Descending => items.reverse(),
            Self::Random => Numbers(items.len() as u64).shuffle(items),
        }
    }
}

/// Many regions.
#[derive(Clone, Debug)]
struct Batch {
    shape: Shape,
    order: Order,
    from: usize,
    stride: usize,
    count: usize,
    seed: u64,
}

impl Batch {
    fn of(shape: Shape, order: Order, count: usize) -> Self {
        Self {
            shape,
            order,
            from: 10,
            stride: 6,
            count,
            seed: 1,
        }
    }

    fn parts(&self) -> Vec<Part> {
        let &Self {
            from,
            stride,
            count,
            ..
        } = self;
        let mut numbers = Numbers(self.seed);
        let part = |k: usize| match self.shape {
            Shape::Apart => from + k * stride..from + (k + 1) * stride - 1,
            Shape::Touching => from + k * stride..from + (k + 1) * stride,
            Shape::Overlapping => from + k * stride..from + (k + 3) * stride + k % 5,
            Shape::Nested => from + k..(from + 2 * count).max(from + k + 1) - k,
            Shape::SameStart => from..from + k + 1,
            Shape::SameEnd => from + k..from + count,
            Shape::SameBytes => from..from + stride,
            Shape::Scattered => {
                let start = numbers.below(ARENA);
                let lengths = if numbers.below(50) == 0 {
                    2000
                } else {
                    3 * stride
                };
                start..start + 1 + numbers.below(lengths)
            }
        };
        let cut = |part: Part| {
            let start = part.start.min(ARENA - 1);
            start..part.end.clamp(start + 1, ARENA)
        };
        let mut parts: Vec<Part> = (0..count).map(part).map(cut).collect();
        self.order.put(&mut parts);
        parts
    }
}

#[derive(Clone, Debug)]
struct Known {
    end: usize,
    state: RegionState,
    write_combined: bool,
    owner: Owner,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Id,
    Base,
    Handle,
}

/// What is registered.
#[derive(Default)]
struct Oracle {
    /// In the order in which they are to be listed.
    known: BTreeMap<(usize, RegionId), Known>,
}

/// What is known of each byte.
struct Painted {
    /// The greatest end of the regions around the byte; zero if there is none.
    furthest: Vec<usize>,
    retiring: Vec<bool>,
}

impl Oracle {
    fn paint(&self) -> Painted {
        let mut painted = Painted {
            furthest: vec![0; ARENA],
            retiring: vec![false; ARENA],
        };
        for (&(start, _), known) in &self.known {
            for furthest in &mut painted.furthest[start..known.end] {
                *furthest = known.end.max(*furthest);
            }
            if known.state == RegionState::Retiring {
                painted.retiring[start..known.end].fill(true);
            }
        }
        painted
    }

    /// The first of those that reach furthest around a part.
    fn containing(&self, painted: &Painted, part: &Part) -> Option<Part> {
        let end = painted.furthest[part.start];
        let mut reaching = self.known.iter().filter(|(_, known)| known.end == end);
        let ((start, _), _) = reaching.next()?;
        (end >= part.end).then_some(*start..end)
    }
}

impl Painted {
    fn residency(&self, part: &Part) -> Residency {
        let bytes = &self.furthest[part.clone()];
        if bytes[0] >= part.end {
            Pinned
        } else if bytes.iter().all(|&it| it > 0) {
            Seam
        } else if bytes.iter().all(|&it| it == 0) {
            Pageable
        } else {
            Mixed
        }
    }

    fn segments(&self, part: &Part) -> Vec<(Part, Residency)> {
        let mut segments = Vec::new();
        let mut start = part.start;
        while start < part.end {
            let (end, residency) = match self.furthest[start] {
                0 => {
                    let gap = self.furthest[start..part.end]
                        .iter()
                        .take_while(|&&it| it == 0);
                    (start + gap.count(), Pageable)
                }
                end => (end.min(part.end), Pinned),
            };
            segments.push((start..end, residency));
            start = end;
        }
        segments
    }
}

/// A registry that is being changed, its readers, and what it is to answer.
struct World<'r> {
    arena: Vec<u8>,
    registry: &'r Registry,
    reader: Reader<'r>,
    /// Is asked seldom, so that it skips snapshots.
    idle_reader: Reader<'r>,
    /// Whether to ask the free functions too.
    is_process_wide: bool,
    oracle: Oracle,
    /// Of what was registered and not pinned.
    registered: HashMap<RegionId, Registration<'r>>,
    /// Of what was pinned.
    registrations: Vec<Registration<'r>>,
    /// All ids that were given out, with their parts.
    given_out: Vec<(RegionId, Part)>,
    numbers: Numbers,
}

impl<'r> World<'r> {
    fn new(registry: &'r Registry) -> Self {
        Self {
            arena: vec![0; ARENA],
            registry,
            reader: registry.reader(),
            idle_reader: registry.reader(),
            is_process_wide: false,
            oracle: Oracle::default(),
            registered: HashMap::new(),
            registrations: Vec::new(),
            given_out: Vec::new(),
            numbers: Numbers(7),
        }
    }

    fn with(registry: &'r Registry, batch: &Batch) -> Self {
        let mut world = Self::new(registry);
        world.register_each(&batch.parts());
        world
    }

    fn region(&self, part: &Part) -> Region {
        Region::of(&self.arena[part.clone()]).unwrap()
    }

    fn part(&self, region: Region) -> Part {
        let start = region.base().addr() - self.arena.as_ptr().addr();
        start..start + region.len()
    }

    fn note(&mut self, id: RegionId, part: &Part, owner: Owner) -> &mut Known {
        let known = Known {
            end: part.end,
            state: RegionState::Live,
            write_combined: false,
            owner,
        };
        self.given_out.push((id, part.clone()));
        self.oracle
            .known
            .entry((part.start, id))
            .insert_entry(known)
            .into_mut()
    }

    fn note_registered(&mut self, registration: Registration<'r>, part: &Part) -> &mut Known {
        let id = registration.id();
        self.registered.insert(id, registration);
        self.note(id, part, Owner::Id)
    }

    fn register_each(&mut self, parts: &[Part]) {
        for part in parts {
            let registration = self.registry.register(self.region(part));
            self.note_registered(registration, part);
        }
    }

    fn register_all(&mut self, parts: &[Part]) {
        let regions: Vec<Region> = parts.iter().map(|part| self.region(part)).collect();
        let registrations = self.registry.register_all(regions);
        assert_eq!(registrations.len(), parts.len());
        for (registration, part) in registrations.into_iter().zip(parts) {
            self.note_registered(registration, part);
        }
    }

    fn register_write_combined(&mut self, part: &Part) {
        let registration = self.registry.register_write_combined(self.region(part));
        self.note_registered(registration, part).write_combined = true;
    }

    /// The id of the newest registration that starts at `start`, for those
    /// whose id is not told.
    fn newest_at(&self, start: usize) -> RegionId {
        let base = self.arena[start..].as_ptr();
        let entries = self.registry.regions();
        let at_base = entries.filter(|entry| entry.region().base() == base);
        at_base.map(|entry| entry.id()).max().unwrap()
    }

    fn register_base(&mut self, part: &Part) {
        pinned_hosts::register(self.arena[part.start..].as_ptr(), part.len());
        self.unnote_base(part.start);
        let id = self.newest_at(part.start);
        self.note(id, part, Owner::Base);
    }

    fn unregister_base(&mut self, base: usize) {
        pinned_hosts::unregister(self.arena[base..].as_ptr());
        self.unnote_base(base);
    }

    fn unnote_base(&mut self, base: usize) {
        self.oracle
            .known
            .retain(|&(start, _), known| start != base || known.owner != Owner::Base);
    }

    /// Removes `id`, unless it was removed before, or is pinned.
    fn unregister(&mut self, id: RegionId, part: &Part) {
        let key = (part.start, id);
        let known = self.oracle.known.get(&key);
        if known.is_some_and(|known| known.owner == Owner::Base) {
            self.unregister_base(part.start);
        }
        if let Some(registration) = self.registered.remove(&id) {
            assert_eq!(registration.unregister(), self.region(part));
            self.oracle.known.remove(&key);
        }
    }

    /// What may be removed, by address.
    fn removable(&self) -> Vec<(RegionId, Part)> {
        let known = self.oracle.known.iter();
        known
            .filter(|(_, known)| known.owner != Owner::Handle)
            .map(|(&(start, id), known)| (id, start..known.end))
            .collect()
    }

    fn unregister_each(&mut self, which: &[(RegionId, Part)]) {
        for (id, part) in which {
            self.unregister(*id, part);
        }
    }

    /// Runs `inside` while `part` is about to be pinned.
    fn pin(&mut self, part: &Part, fails: bool, inside: impl FnOnce(&mut Self)) {
        let region = self.region(part);
        let registry = self.registry;
        let mut key = None;
        let pinned = registry.pin_with(region, || {
            let id = self.newest_at(part.start);
            self.note(id, part, Owner::Handle).state = RegionState::Pinning;
            key = Some((part.start, id));
            inside(self);
            if fails { Err(()) } else { Ok(()) }
        });
        let key = key.unwrap();
        match pinned {
            Ok(registration) => {
                assert!(!fails);
                assert_eq!((registration.id(), registration.region()), (key.1, region));
                self.oracle.known.get_mut(&key).unwrap().state = RegionState::Live;
                self.registrations.push(registration);
            }
            Err(_) => {
                assert!(fails);
                self.oracle.known.remove(&key);
            }
        }
    }

    /// Runs `inside` while a registration is about to be unpinned.
    fn unpin(&mut self, which: usize, fails: bool, inside: impl FnOnce(&mut Self)) {
        if self.registrations.is_empty() {
            return;
        }
        let registration = self
            .registrations
            .swap_remove(which % self.registrations.len());
        let key = (self.part(registration.region()).start, registration.id());
        let unpinned = registration.unpin_with(|| {
            self.oracle.known.get_mut(&key).unwrap().state = RegionState::Retiring;
            inside(self);
            if fails { Err(()) } else { Ok(()) }
        });
        match unpinned {
            Ok(()) => {
                assert!(!fails);
                self.oracle.known.remove(&key);
            }
            Err(error) => {
                assert!(fails);
                self.oracle.known.get_mut(&key).unwrap().state = RegionState::Live;
                self.registrations.push(error.registration);
            }
        }
    }

    /// Checks the lists, and the answers for about `count` parts.
    fn check(&mut self, count: usize) {
        self.check_lists();
        let painted = self.oracle.paint();
        let asked = self.parts_to_ask(count);
        for part in &asked {
            self.check_part(&painted, part);
        }
    }

    fn check_lists(&mut self) {
        let expected: Vec<_> = self
            .oracle
            .known
            .iter()
            .map(|(&(start, id), known)| (id, start..known.end, known.state, known.write_combined))
            .collect();
        let listed = |world: &Self, entries: &mut dyn ExactSizeIterator<Item = RegionEntry>| {
            assert_eq!(entries.len(), expected.len());
            let entries: Vec<_> = entries
                .map(|it| {
                    (
                        it.id(),
                        world.part(it.region()),
                        it.state(),
                        it.is_write_combined(),
                    )
                })
                .collect();
            assert_eq!(entries, expected);
        };
        listed(self, &mut self.registry.regions());
        let mut entries = self.reader.regions();
        listed(self, &mut entries);
        assert_eq!(self.registry.live_count(), expected.len());
        assert_eq!(self.reader.live_count(), expected.len());
        if self.is_process_wide {
            assert_eq!(pinned_hosts::live_count(), expected.len());
        }
    }

    /// Parts at the edges of regions, of all lengths.
    fn parts_to_ask(&mut self, count: usize) -> Vec<Part> {
        let known = self.oracle.known.iter();
        let edges: Vec<usize> = known
            .flat_map(|(&(start, _), known)| [start, known.end])
            .collect();
        let numbers = &mut self.numbers;
        let near = |numbers: &mut Numbers| {
            let edge = match numbers.below(4) {
                0 => numbers.below(ARENA),
                _ if edges.is_empty() => numbers.below(ARENA),
                _ => edges[numbers.below(edges.len())],
            };
            (edge + numbers.below(3)).saturating_sub(1).min(ARENA)
        };
        let any = |numbers: &mut Numbers| {
            let one = near(numbers);
            let other = match numbers.below(3) {
                0 => near(numbers),
                1 => one + 1 + numbers.below(4),
                _ => one + 1 + numbers.below(40),
            };
            let start = one.min(other).min(ARENA - 1);
            start..one.max(other).clamp(start + 1, ARENA)
        };
        let mut parts: Vec<Part> = (0..count).map(|_| any(numbers)).collect();
        // Few are retiring: at their edges a byte decides.
        for (&(start, _), known) in &self.oracle.known {
            if known.state == RegionState::Retiring {
                let bytes = [start.wrapping_sub(1), start, known.end - 1, known.end];
                let bytes = bytes.into_iter().filter(|&byte| byte < ARENA);
                parts.extend(bytes.map(|byte| byte..byte + 1));
            }
        }
        parts
    }

    fn check_part(&mut self, painted: &Painted, part: &Part) {
        let residency = painted.residency(part);
        let expected = Answers {
            residency,
            is_pinned: matches!(residency, Pinned | Seam),
            containing: self.oracle.containing(painted, part),
            segments: painted.segments(part),
        };
        let base = self.arena.as_ptr().addr();
        let bytes = &self.arena[part.clone()];

        let registry = self.registry;
        assert_eq!(Answers::of(base, bytes, registry), expected, "{part:?}");
        let is_retiring = painted.retiring[part.clone()].contains(&true);
        assert_eq!(registry.is_retiring(bytes), is_retiring, "{part:?}");
        assert_eq!(
            Answers::of(base, bytes, &mut self.reader),
            expected,
            "{part:?}"
        );
        if self.numbers.below(8) == 0 {
            assert_eq!(
                Answers::of(base, bytes, &mut self.idle_reader),
                expected,
                "{part:?}"
            );
        }
        if self.is_process_wide {
            assert_eq!(pinned_hosts::residency(bytes), residency, "{part:?}");
            assert_eq!(
                pinned_hosts::is_pinned(bytes),
                expected.is_pinned,
                "{part:?}"
            );
        }
    }
}

/// What there is to be told about a slice.
#[derive(Debug, PartialEq)]
struct Answers {
    residency: Residency,
    is_pinned: bool,
    containing: Option<Part>,
    segments: Vec<(Part, Residency)>,
}

trait Asked {
    fn ask(self, base: usize, bytes: &[u8]) -> Answers;
}

impl Answers {
    /// Of `bytes`, which lie in an arena at `base`.
    fn of(base: usize, bytes: &[u8], who: impl Asked) -> Self {
        who.ask(base, bytes)
    }
}

macro_rules! asked {
    ($who:ty) => {
        impl Asked for $who {
            fn ask(self, base: usize, bytes: &[u8]) -> Answers {
                let part = |region: Region| {
                    let start = region.base().addr() - base;
                    start..start + region.len()
                };
                // No more than can be right, lest a fault makes this endless.
                let segments = self.segments(bytes).take(bytes.len() + 1);
                let segments = segments
                    .map(|it| (part(Region::of(it.bytes()).unwrap()), it.residency()))
                    .collect();
                Answers {
                    residency: self.residency(bytes),
                    is_pinned: self.is_pinned(bytes),
                    containing: self.region_containing(bytes).map(part),
                    segments,
                }
            }
        }
    };
}

asked!(&Registry);
asked!(&mut Reader<'_>);

#[derive(Clone, Debug)]
enum Op {
    Register(Part),
    RegisterEach(Batch),
    RegisterAll(Batch),
    RegisterWriteCombined(Part),
    /// By a free function.
    RegisterBase(Part),
    /// By a free function: the base of something that was ever registered.
    UnregisterBase(usize),
    /// One of the ids that were ever given out: some are stale.
    Unregister(usize),
    /// Some by address, from the one at so many hundredths.
    UnregisterRun(usize, usize),
    /// All but some, in an order.
    UnregisterAllBut(usize, Order),
    /// The operations that follow, so many of them, run while it is half-way.
    Pin(Part, bool, usize),
    Unpin(usize, bool, usize),
}

fn part() -> impl Strategy<Value = Part> {
    let len = prop_oneof![8 => 1..60usize, 1 => 1..ARENA];
    (0..ARENA, len).prop_map(|(start, len)| start..(start + len).min(ARENA))
}

fn order() -> impl Strategy<Value = Order> {
    proptest::sample::select(&ORDERS[..])
}

fn shape() -> impl Strategy<Value = Shape> {
    prop_oneof![
        1 => proptest::sample::select(&SHAPES[..]),
        1 => Just(Shape::Scattered),
    ]
}

fn batch(max: usize) -> impl Strategy<Value = Batch> {
    // Strides of 2 and more leave regions that are apart at least a byte.
    let count = prop_oneof![2 => 0..150usize, 1 => 0..max];
    (shape(), order(), 0..ARENA, 2..30usize, count, any::<u64>()).prop_map(
        |(shape, order, from, stride, count, seed)| Batch {
            shape,
            order,
            from,
            stride,
            count,
            seed,
        },
    )
}

fn common_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => part().prop_map(Op::Register),
        2 => batch(600).prop_map(Op::RegisterEach),
        3 => batch(2500).prop_map(Op::RegisterAll),
        1 => part().prop_map(Op::RegisterWriteCombined),
        4 => any::<usize>().prop_map(Op::Unregister),
        4 => (0..100usize, 0..500usize).prop_map(|(from, count)| Op::UnregisterRun(from, count)),
        1 => (0..150usize, order()).prop_map(|(left, order)| Op::UnregisterAllBut(left, order)),
    ]
}

/// What is done to a registry of one's own.
fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => common_op(),
        1 => (part(), any::<bool>(), 0..3usize).prop_map(|(part, fails, n)| Op::Pin(part, fails, n)),
        1 => (any::<usize>(), any::<bool>(), 0..3usize)
            .prop_map(|(which, fails, n)| Op::Unpin(which, fails, n)),
    ]
}

/// What is done to the process-wide registry: nothing that a case which failed
/// could not undo.
fn process_wide_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        2 => common_op(),
        // Few bases, so that they come again.
        2 => (0..4usize, 1..3000usize)
            .prop_map(|(base, len)| Op::RegisterBase(base * 4000..base * 4000 + len)),
        1 => any::<usize>().prop_map(Op::UnregisterBase),
    ]
}

impl World<'_> {
    /// Runs the next of `ops`, and those that it wants run inside it.
    fn run(&mut self, ops: &mut std::vec::IntoIter<Op>) {
        let Some(op) = ops.next() else { return };
        let given_out = self.given_out.len();
        match op {
            Op::Register(part) => self.register_each(&[part]),
            Op::RegisterEach(batch) => self.register_each(&batch.parts()),
            Op::RegisterAll(batch) => self.register_all(&batch.parts()),
            Op::RegisterWriteCombined(part) => self.register_write_combined(&part),
            Op::RegisterBase(part) => self.register_base(&part),
            Op::UnregisterBase(which) if given_out > 0 => {
                let (_, part) = &self.given_out[which % given_out];
                self.unregister_base(part.start);
            }
            Op::Unregister(which) if given_out > 0 => {
                let (id, part) = self.given_out[which % given_out].clone();
                self.unregister(id, &part);
            }
            Op::UnregisterRun(from, count) => {
                let removable = self.removable();
                let from = removable.len() * from / 100;
                let to = (from + count).min(removable.len());
                self.unregister_each(&removable[from..to]);
            }
            Op::UnregisterAllBut(left, order) => {
                let mut removable = self.removable();
                order.put(&mut removable);
                let count = removable.len().saturating_sub(left);
                self.unregister_each(&removable[..count]);
            }
            Op::Pin(part, fails, inside) => {
                self.pin(&part, fails, |world| world.run_some(ops, inside));
            }
            Op::Unpin(which, fails, inside) => {
                self.unpin(which, fails, |world| world.run_some(ops, inside));
            }
            Op::Unregister(_) | Op::UnregisterBase(_) => {}
        }
        self.check(16);
    }

    fn run_some(&mut self, ops: &mut std::vec::IntoIter<Op>, count: usize) {
        self.check(8);
        for _ in 0..count {
            self.run(ops);
        }
    }

    fn run_all(&mut self, ops: Vec<Op>) {
        let count = ops.len();
        self.run_some(&mut ops.into_iter(), count);
    }
}

/// So that the process-wide registry is empty after a case, also after one that
/// failed.
impl Drop for World<'_> {
    fn drop(&mut self) {
        for (_, registration) in self.registered.drain() {
            registration.unregister();
        }
        for registration in self.registrations.drain(..) {
            registration.unregister();
        }
        if self.is_process_wide {
            for entry in global().regions() {
                pinned_hosts::unregister(entry.region().base());
            }
        }
    }
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config(16))]

    #[test]
    fn whatever_is_done_to_many_regions_all_is_answered_as_by_the_oracle(
        first in batch(3000),
        ops in vec(op(), 0..12),
    ) {
        let registry = Registry::new();
        let mut world = World::new(&registry);
        world.register_all(&first.parts());
        world.run_all(ops);
    }

    /// The only test of this binary that touches the process-wide registry.
    #[test]
    fn the_free_functions_answer_for_many_regions_as_the_oracle_does(
        first in batch(3000),
        ops in vec(process_wide_op(), 0..12),
    ) {
        let mut world = World::new(global());
        world.is_process_wide = true;
        world.register_all(&first.parts());
        world.run_all(ops);
    }
}

const SHAPES: [Shape; 8] = [
    Shape::Apart,
    Shape::Touching,
    Shape::Overlapping,
    Shape::Nested,
    Shape::SameStart,
    Shape::SameEnd,
    Shape::SameBytes,
    Shape::Scattered,
];

const ORDERS: [Order; 3] = [Order::Ascending, Order::Descending, Order::Random];

#[test]
fn regions_that_are_registered_one_by_one_are_found_in_whatever_order_they_come() {
    for shape in SHAPES {
        for order in ORDERS {
            let registry = Registry::new();
            let mut world = World::new(&registry);
            for (k, part) in Batch::of(shape, order, 700).parts().iter().enumerate() {
                world.register_each(std::slice::from_ref(part));
                // A root that is full, and one that has just been cut in two.
                if k.is_multiple_of(97) || (62..67).contains(&k) {
                    world.check(12);
                }
            }
            world.check(100);
        }
    }
}

#[test]
fn so_many_regions_that_the_tree_has_three_levels_are_found_one_by_one() {
    for order in ORDERS {
        let registry = Registry::new();
        let mut world = World::with(&registry, &Batch::of(Shape::Scattered, order, 4000));
        world.check(200);
    }
}

#[test]
fn any_number_of_regions_may_be_registered_at_once() {
    let few = 0..200;
    let full_levels = [
        2046, 2047, 2048, 2049, 2080, 2081, 4095, 4096, 4097, 4128, 4500,
    ];
    for count in few.chain(full_levels) {
        let registry = Registry::new();
        let mut world = World::new(&registry);
        world.register_all(&Batch::of(Shape::Scattered, Order::Random, count).parts());
        world.check(if count < 200 { 8 } else { 100 });
    }
}

/// Few are put in one by one, more have the tree made anew.
#[test]
fn batches_of_any_size_join_what_was_registered_before() {
    for count in [1, 2, 3, 30, 60, 61, 62, 63, 64, 65, 66, 300, 1000, 2000] {
        let registry = Registry::new();
        let mut world = World::new(&registry);
        world.register_all(&Batch::of(Shape::Scattered, Order::Random, 1000).parts());
        let batch = Batch {
            seed: 3,
            ..Batch::of(Shape::Scattered, Order::Random, count)
        };
        world.register_all(&batch.parts());
        world.check(50);
    }
}

#[test]
fn regions_are_removed_one_by_one_in_any_order_until_none_is_left() {
    for shape in [Shape::Touching, Shape::SameStart, Shape::Scattered] {
        for order in ORDERS {
            let registry = Registry::new();
            let mut world = World::new(&registry);
            world.register_all(&Batch::of(shape, Order::Random, 2200).parts());
            let mut removable = world.removable();
            order.put(&mut removable);
            for (k, (id, part)) in removable.iter().enumerate() {
                world.unregister(*id, part);
                let left = removable.len() - k - 1;
                if left.is_multiple_of(199) || left < 4 || (62..67).contains(&left) {
                    world.check(12);
                }
            }
            assert_eq!(registry.live_count(), 0);
            assert_eq!(registry.regions().next(), None);
            world.register_each(&[3..5, 5..7]);
            world.check(10);
        }
    }
}

#[test]
fn a_run_of_neighbours_may_be_removed_anywhere() {
    for from in [0, 31, 32, 700, 1400, 1980] {
        let registry = Registry::new();
        let mut world = World::new(&registry);
        world.register_all(&Batch::of(Shape::Overlapping, Order::Random, 2100).parts());
        let run = world.removable()[from..from + 120].to_vec();
        for (id, part) in &run {
            world.unregister(*id, part);
        }
        world.check(60);
        for (id, part) in &run {
            world.unregister(*id, part);
            world.register_each(std::slice::from_ref(part));
        }
        world.check(60);
    }
}

/// So that the rest of a node cannot be joined with the one beside it, which
/// is too full. So many at once are in nodes of 32.
#[test]
fn a_gap_may_be_made_beside_where_many_more_were_registered() {
    let gaps = [
        (1000, 1024..1100),
        (1000, 940..992),
        (20, 32..70),
        (40, 0..32),
    ];
    for (filled, emptied) in gaps {
        for order in ORDERS {
            let registry = Registry::new();
            let mut world = World::new(&registry);
            world.register_all(&Batch::of(Shape::Touching, Order::Ascending, 2080).parts());
            let mut run = world.removable()[emptied.clone()].to_vec();
            let filled = world.removable()[filled].1.clone();
            for _ in 0..31 {
                world.register_each(std::slice::from_ref(&filled));
            }
            order.put(&mut run);
            for (k, (id, part)) in run.iter().enumerate() {
                world.unregister(*id, part);
                if k.is_multiple_of(8) {
                    world.check(8);
                }
            }
            world.check(50);
        }
    }
}

#[test]
fn each_of_hundreds_of_regions_at_one_address_is_removed_by_its_id() {
    let registry = Registry::new();
    let mut world = World::with(&registry, &Batch::of(Shape::SameBytes, Order::Random, 500));
    world.register_each(&[9..10, 11..12, 16..18]);
    let mut removable = world.removable();
    Numbers(9).shuffle(&mut removable);
    for (k, (id, part)) in removable.iter().enumerate() {
        world.unregister(*id, part);
        if k.is_multiple_of(50) {
            world.check(20);
        }
    }
    assert_eq!(registry.live_count(), 0);
}

/// One that starts before thousands, and ends behind some.
#[test]
fn a_long_region_is_found_behind_any_number_of_short_ones_while_it_is_there() {
    for long in [0..ARENA, 9..9000, 3000..3200, 6001..12_500, 0..11] {
        let registry = Registry::new();
        let mut world = World::new(&registry);
        world.register_all(&Batch::of(Shape::Apart, Order::Random, 2100).parts());
        world.register_each(std::slice::from_ref(&long));
        world.check(80);
        let (id, _) = world.given_out.last().unwrap().clone();
        world.unregister(id, &long);
        world.check(80);
    }
}

#[test]
fn one_that_is_retiring_among_thousands_is_found_exactly_where_it_is() {
    let registry = Registry::new();
    let mut world = World::new(&registry);
    world.register_all(&Batch::of(Shape::Apart, Order::Random, 2100).parts());
    for part in [0..3, 5000..5003, 4000..9000, ARENA - 2..ARENA] {
        world.pin(&part, false, |world| world.check(10));
        world.unpin(0, true, |world| {
            world.check(100);
            // What changes around it leaves it retiring.
            world.register_all(&Batch::of(Shape::Scattered, Order::Random, 50).parts());
            world.check(100);
            let removable = world.removable();
            world.unregister_each(&removable[..300]);
            world.check(100);
        });
        world.check(50);
        world.unpin(0, false, |world| world.check(50));
        world.check(50);
    }
}

#[test]
fn what_was_asked_for_before_a_change_is_of_the_old_snapshot() {
    let registry = Registry::new();
    let mut world = World::new(&registry);
    world.register_all(&Batch::of(Shape::Apart, Order::Random, 2100).parts());
    let before: Vec<RegionEntry> = registry.regions().collect();
    let mut listed = registry.regions();
    let parts = registry.segments(&world.arena).count();
    let mut segments = registry.segments(&world.arena);
    assert_eq!(listed.by_ref().take(500).collect::<Vec<_>>(), before[..500]);
    assert_eq!(segments.by_ref().take(500).count(), 500);

    for entry in before.iter().skip(400).step_by(3) {
        world.registered.remove(&entry.id()).unwrap().unregister();
    }
    for start in (10..ARENA - 6).step_by(31) {
        let _ = registry.register(Region::of(&world.arena[start..start + 5]).unwrap());
    }

    assert_eq!(listed.collect::<Vec<_>>(), before[500..]);
    assert_eq!(segments.count(), parts - 500);
}

/// However many of them are registered in one step.
#[test]
fn ids_of_many_regions_are_given_out_in_their_order_and_once() {
    let registry = Registry::new();
    let world = World::new(&registry);
    let parts = Batch::of(Shape::SameBytes, Order::Ascending, 1000).parts();
    let regions = parts.iter().map(|part| world.region(part));
    let mut registrations = registry.register_all(regions.clone());
    registrations.push(registry.register(world.region(&parts[0])));
    registrations.extend(registry.register_all(regions));
    let ids: Vec<RegionId> = registrations.iter().map(Registration::id).collect();
    assert!(ids.is_sorted_by(|one, next| one < next));
    let listed: Vec<RegionId> = registry.regions().map(|entry| entry.id()).collect();
    assert_eq!(listed, ids);
}

#[test]
fn thousands_of_handles_are_pinned_and_unpinned() {
    let registry = Registry::new();
    let mut world = World::new(&registry);
    for part in Batch::of(Shape::Scattered, Order::Random, 600).parts() {
        let pinned = registry.pin_with(world.region(&part), || Ok::<_, Infallible>(()));
        let registration = pinned.unwrap();
        world.note(registration.id(), &part, Owner::Handle);
        world.registrations.push(registration);
    }
    world.check(100);
    assert!(world.removable().is_empty());
    for which in 0..600 {
        world.unpin(which * 7, false, |_| ());
    }
    world.check(10);
    assert_eq!(registry.live_count(), 0);
}
