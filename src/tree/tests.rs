//! What holds of the nodes of every tree, after whatever edits; and which of
//! them one edit makes anew.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::ptr;

use super::*;
use crate::entry::{Owner, RegionState};
use crate::region::Region;

/// Numbers that look random, the same ones for the same seed.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

fn entry(start: usize, len: usize) -> RegionEntry {
    let region = Region::new(ptr::without_provenance(start), len).unwrap();
    RegionEntry::new(region, Owner::Handle)
}

/// Some long ones among short ones, of which some start alike.
fn any_entry(numbers: &mut Numbers) -> RegionEntry {
    let start = 1 + numbers.below(10_000);
    let len = if numbers.below(40) == 0 { 3000 } else { 20 };
    let entry = entry(start, 1 + numbers.below(len));
    match numbers.below(60) {
        0 => entry.in_state(RegionState::Retiring),
        1 => entry.that_is_write_combined(),
        _ => entry,
    }
}

fn any_entries(numbers: &mut Numbers, count: usize) -> Vec<RegionEntry> {
    (0..count).map(|_| any_entry(numbers)).collect()
}

fn is_marked(marks: Marks) -> (bool, bool) {
    (marks.retiring, marks.write_combined)
}

/// The nodes of a tree, level by level from the root down.
fn levels(tree: &Tree) -> Vec<Vec<Shared<Node>>> {
    let mut levels = vec![vec![Shared::clone(&tree.root)]];
    loop {
        let below: Vec<Shared<Node>> = levels
            .last()
            .unwrap()
            .iter()
            .flat_map(|node| match &node.items {
                Items::Entries(_) => Vec::new(),
                Items::Children(children) => {
                    children.iter().map(|it| Shared::clone(&it.node)).collect()
                }
            })
            .collect();
        if below.is_empty() {
            return levels;
        }
        levels.push(below);
    }
}

fn leaf_count(tree: &Tree) -> usize {
    levels(tree).last().unwrap().len()
}

/// Checks `node` and all below it, and returns their entries and how many
/// levels they are.
fn check_node(node: &Node) -> (Vec<RegionEntry>, usize) {
    assert!(node.items.len() <= WIDTH);
    let mut all = Vec::new();
    let mut height = 1;
    // Where each item starts, and its end.
    let mut bounds = Vec::new();
    match &node.items {
        Items::Entries(entries) => {
            all.extend_from_slice(entries);
            bounds.extend(
                entries
                    .iter()
                    .map(|it| (it.region().start_addr(), it.region().end_addr())),
            );
        }
        Items::Children(children) => {
            for (k, child) in children.iter().enumerate() {
                let (entries, height_below) = check_node(&child.node);
                assert!(!entries.is_empty(), "only the root may be empty");
                assert!(k == 0 || height == height_below + 1, "of uneven height");
                height = height_below + 1;

                let first = entries[0].key();
                let ends = entries.iter().map(|it| it.region().end_addr());
                let reach = ends.max().unwrap();
                assert_eq!((child.first, child.reach), (first, reach));
                let retiring = entries.iter().any(|it| it.marks().retiring);
                let write_combined = entries.iter().any(|it| it.marks().write_combined);
                assert_eq!(is_marked(child.marks), (retiring, write_combined));

                bounds.push((first.0, reach));
                all.extend(entries);
            }
        }
    }
    let starts = bounds.iter().map(|it| it.0);
    let padded = starts.chain(std::iter::repeat(usize::MAX)).take(WIDTH);
    assert!(padded.eq(node.starts));
    for count in 0..=bounds.len() {
        let ends = bounds[..count].iter().map(|it| it.1);
        assert_eq!(node.reaches[count], ends.max().unwrap_or(0));
    }
    (all, height)
}

/// Checks all that holds of every tree, and that its entries are `expected`.
fn check(tree: &Tree, expected: &[RegionEntry]) {
    let (entries, _) = check_node(&tree.root);
    assert_eq!(entries, expected);
    assert!(entries.is_sorted_by(|one, next| one.key() < next.key()));
    assert_eq!(tree.len(), expected.len());
    if let Items::Children(children) = &tree.root.items {
        assert!(children.len() > 1, "a root of one child is not needed");
    }
}

fn sorted(mut entries: Vec<RegionEntry>) -> Vec<RegionEntry> {
    entries.sort_by_key(RegionEntry::key);
    entries
}

/// The numbers of items of the leaf where `key` belongs and of the one that it
/// may be joined with, if it has the same parent.
fn leaf_and_other(tree: &Tree, key: Key) -> (usize, Option<usize>) {
    let mut node = &tree.root;
    let mut other = None;
    while let Items::Children(children) = &node.items {
        let at = children.iter().rposition(|it| it.first <= key).unwrap_or(0);
        let beside = if at == 0 { 1 } else { at - 1 };
        other = children.get(beside).map(|it| it.node.items.len());
        node = &children[at].node;
    }
    (node.items.len(), other)
}

/// `tree` after `edit` gave the leaf of `key` so many more items. Checks that
/// the leaf was cut in two, joined with another or dropped if, and only if, it
/// was to be.
fn edited(tree: Tree, key: Key, more: isize, edit: impl FnOnce(Tree) -> Tree) -> Tree {
    let leaves = leaf_count(&tree);
    let (len, other) = leaf_and_other(&tree, key);
    let len = len.checked_add_signed(more).unwrap();
    let joins = other.is_some_and(|it| len < SPARSE && len + it <= WIDTH - SPARSE);
    let goes = joins || (len == 0 && leaves > 1);
    let tree = edit(tree);
    let expected = leaves + usize::from(len > WIDTH) - usize::from(goes);
    assert_eq!(leaf_count(&tree), expected);
    tree
}

/// How many nodes of `tree` are not in `old`.
fn made_anew(tree: &Tree, old: &Tree) -> usize {
    let old: Vec<Shared<Node>> = levels(old).into_iter().flatten().collect();
    let is_new = |node: &Shared<Node>| !old.iter().any(|it| Shared::ptr_eq(it, node));
    levels(tree)
        .iter()
        .flatten()
        .filter(|it| is_new(it))
        .count()
}

#[test]
fn a_tree_of_any_number_of_entries_at_once_is_sound() {
    let mut numbers = Numbers(1);
    let counts = [2047, 2048, 2049, 2080, 2081, 4096, 4097, 70_000];
    for count in (0..200).chain(counts) {
        let entries = any_entries(&mut numbers, count);
        check(&Tree::empty().with(&entries), &sorted(entries));
    }
}

/// There is room in its nodes to add more, and not much.
#[test]
fn a_tree_of_many_entries_at_once_is_half_full() {
    for count in [WIDTH + 1, 1000, 10_000] {
        let tree = Tree::empty().with(&any_entries(&mut Numbers(2), count));
        for level in &levels(&tree)[1..] {
            for node in level {
                let len = node.items.len();
                assert!((SPARSE + 1..=BULK).contains(&len), "{len} of {count}");
            }
        }
    }
}

#[test]
fn a_tree_of_up_to_a_node_full_is_one_node() {
    let mut entries = any_entries(&mut Numbers(3), WIDTH);
    let tree = Tree::empty().with(&entries);
    assert_eq!(levels(&tree).len(), 1);
    let one_by_one = entries
        .iter()
        .fold(Tree::empty(), |tree, &it| tree.with(&[it]));
    assert_eq!(levels(&one_by_one).len(), 1);

    let more = entry(500, 1);
    entries.push(more);
    let tree = tree.with(&[more]);
    assert_eq!(levels(&tree).len(), 2);
    check(&tree, &sorted(entries));
    let halves = levels(&tree).remove(1);
    let halves: Vec<_> = halves.iter().map(|it| it.items.len()).collect();
    assert_eq!(halves, [WIDTH / 2, WIDTH / 2 + 1]);
}

/// Adds and removes at random, and now and then changes a state; first adds
/// more, then removes more. Each tree is changed with an old one held, or alone.
#[test]
fn a_tree_is_sound_after_any_edits() {
    for seed in 1..5 {
        let mut numbers = Numbers(seed);
        let mut expected: BTreeMap<Key, RegionEntry> = BTreeMap::new();
        let mut tree = Tree::empty();
        let mut held = tree.clone();
        let mut held_entries = Vec::new();
        for step in 0..9000 {
            let adds = numbers.below(10) < if step < 5000 { 8 } else { 1 };
            let key = (numbers.below(10_000), numbers.below(2) as u64);
            let known = expected.range(key..).next().map(|it| *it.1);
            match known {
                Some(entry) if !adds => {
                    tree = edited(tree, entry.key(), -1, |tree| tree.without(entry.key()));
                    expected.remove(&entry.key());
                }
                Some(entry) if numbers.below(20) == 0 => {
                    let entry = entry.in_state(RegionState::Retiring);
                    tree = edited(tree, entry.key(), 0, |tree| tree.replaced(entry));
                    expected.insert(entry.key(), entry);
                }
                _ => {
                    let entry = any_entry(&mut numbers);
                    tree = edited(tree, entry.key(), 1, |tree| tree.with(&[entry]));
                    expected.insert(entry.key(), entry);
                }
            }
            if step % 100 == 0 {
                let entries: Vec<_> = expected.values().copied().collect();
                check(&tree, &entries);
                check(&held, &held_entries);
                if numbers.below(2) == 0 {
                    held = tree.clone();
                    held_entries = entries;
                }
            }
        }
    }
}

#[test]
fn a_tree_from_which_all_was_removed_in_any_order_is_as_an_empty_one() {
    for order in 0..3 {
        let mut left = sorted(any_entries(&mut Numbers(4), 5000));
        let mut tree = Tree::empty().with(&left);
        assert_eq!(levels(&tree).len(), 3);
        let mut numbers = Numbers(5);
        while !left.is_empty() {
            let at = match order {
                0 => 0,
                1 => left.len() - 1,
                _ => numbers.below(left.len()),
            };
            tree = tree.without(left.remove(at).key());
            if left.len().is_multiple_of(500) || left.len() < 3 {
                check(&tree, &left);
            }
        }
        assert_eq!(levels(&tree).len(), 1);
        assert_eq!((tree.first_start(), tree.reach()), (usize::MAX, 0));
    }
}

/// Emptied nodes do not stay behind: what is left of a large tree takes about
/// the room of a small one.
#[test]
fn a_tree_from_which_nearly_all_was_removed_has_few_nodes() {
    let mut left = any_entries(&mut Numbers(6), 5000);
    let mut tree = Tree::empty().with(&left);
    let mut numbers = Numbers(7);
    while left.len() > WIDTH {
        tree = tree.without(left.swap_remove(numbers.below(left.len())).key());
    }
    check(&tree, &sorted(left));
    assert!(leaf_count(&tree) <= 2 * WIDTH / SPARSE, "{tree:?}");
    assert!(levels(&tree).len() <= 2);
}

/// There is nothing to join it with, since the one beside it has no room.
#[test]
fn a_leaf_that_is_emptied_beside_a_full_one_goes() {
    let all: Vec<_> = (1..=96).map(|k| entry(100 * k, 50)).collect();
    let thirds: Vec<_> = all.chunks(32).collect();
    for (full, emptied) in [(0, 1), (1, 0), (1, 2)] {
        let mut left = all.clone();
        let mut tree = Tree::empty().with(&all);
        let within = thirds[full][9].region().start_addr();
        for k in 1..=32 {
            let more = entry(within + k, 1);
            tree = tree.with(&[more]);
            left.push(more);
        }
        assert_eq!(leaf_count(&tree), 3);
        for entry in thirds[emptied] {
            assert_eq!(leaf_count(&tree), 3);
            tree = tree.without(entry.key());
            left.retain(|it| it.key() != entry.key());
        }
        assert_eq!(leaf_count(&tree), 2);
        check(&tree, &sorted(left));
    }
}

#[test]
fn one_edit_of_a_large_tree_makes_anew_the_nodes_of_one_path() {
    let entries = any_entries(&mut Numbers(8), 5000);
    let tree = Tree::empty().with(&entries);
    let height = levels(&tree).len();
    assert_eq!(height, 3);
    assert!(levels(&tree).iter().flatten().count() > 150);
    for entry in entries.iter().step_by(50) {
        let with = tree.clone().with(&[any_entry(&mut Numbers(9))]);
        let without = tree.clone().without(entry.key());
        let replaced = tree.clone().replaced(entry.in_state(RegionState::Retiring));
        for edited in [with, without, replaced] {
            assert_eq!(made_anew(&edited, &tree), height);
        }
    }
    // All was made of clones: the tree itself is as it was.
    check(&tree, &sorted(entries));
}

#[test]
fn a_small_batch_into_a_large_tree_leaves_most_nodes_shared() {
    let tree = Tree::empty().with(&any_entries(&mut Numbers(10), 5000));
    let nodes = levels(&tree).iter().flatten().count();
    let batch = [entry(5000, 1), entry(5000, 2), entry(5001, 1)];
    assert!(made_anew(&tree.clone().with(&batch), &tree) < 8);
    assert_eq!(made_anew(&tree.clone(), &tree), 0);

    let large = any_entries(&mut Numbers(11), 1000);
    assert!(made_anew(&tree.clone().with(&large), &tree) >= nodes);
}

/// The search that only copies of retiring and of write-combined memory need,
/// against every entry asked by itself.
#[test]
fn marked_entries_are_found_where_they_are() {
    let mut numbers = Numbers(12);
    for count in [0, 1, 5, 64, 65, 500, 3000] {
        let entries = any_entries(&mut numbers, count);
        let tree = Tree::empty().with(&entries);
        for _ in 0..300 {
            let start = numbers.below(14_000);
            let end = start + 1 + numbers.below(30);
            for is_marked in [
                |marks: Marks| marks.retiring,
                |marks: Marks| marks.write_combined,
            ] {
                let expected = entries.iter().any(|it| {
                    let region = it.region();
                    let overlaps = region.start_addr() < end && start < region.end_addr();
                    is_marked(it.marks()) && overlaps
                });
                assert_eq!(tree.any_marked(start, end, is_marked), expected);
            }
        }
    }
}

/// The two searches, at and beside each edge, against a look at every entry.
#[test]
fn what_lies_around_an_address_is_what_a_look_at_every_entry_says() {
    let mut numbers = Numbers(13);
    for count in [0, 1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 200, 2200] {
        let entries = any_entries(&mut numbers, count);
        let tree = Tree::empty().with(&entries);
        let edges = entries
            .iter()
            .flat_map(|it| [it.region().start_addr(), it.region().end_addr()]);
        let step = 1 + count / 100;
        let near = edges.step_by(step).flat_map(|it| [it - 1, it, it + 1]);
        for address in near.chain([0, usize::MAX - 1]) {
            let bounds = entries.iter().map(RegionEntry::region);
            let (started, later): (Vec<_>, Vec<_>) =
                bounds.partition(|it| it.start_addr() <= address);
            let reach = started.iter().map(Region::end_addr).max().unwrap_or(0);
            let next = later.iter().map(Region::start_addr).min();
            let expected = (reach, next.unwrap_or(usize::MAX));

            let around = tree.around(address);
            assert_eq!((around.reach, around.next), expected);
            let few = tree.around_few(address);
            assert_eq!(few.is_some(), count <= FEW);
            let few = few.unwrap_or(around);
            assert_eq!((few.reach, few.next), expected);
            let furthest = entries.iter().filter(|it| it.region().end_addr() == reach);
            assert_eq!(
                tree.first_to_reach(reach).map(|it| it.key()),
                furthest.map(RegionEntry::key).min()
            );
        }
    }
}

/// `tree` after so many edits of others: never of `own`, which is sorted.
fn edited_by_others(tree: &Tree, own: &[Key], count: usize, numbers: &mut Numbers) -> Tree {
    (0..count).fold(tree.clone(), |tree, _| {
        let key = (numbers.below(10_000), 0);
        let known = tree.first_from(key);
        let known = known.filter(|it| own.binary_search(&it.key()).is_err());
        match known {
            Some(entry) if numbers.below(3) == 0 => tree.without(entry.key()),
            Some(entry) if numbers.below(2) == 0 => {
                let state = [RegionState::Retiring, RegionState::Live][numbers.below(2)];
                tree.replaced(entry.in_state(state))
            }
            _ => tree.with(&[any_entry(numbers)]),
        }
    })
}

/// Trees of any sizes, from empty ones to ones of three levels, which become higher
/// and lower meanwhile.
#[test]
fn to_rebase_a_tree_is_to_build_it_anew() {
    let mut numbers = Numbers(14);
    for round in 0..150 {
        let count = [0, 3, 60, 300, 3000][numbers.below(5)];
        let old = Tree::empty().with(&any_entries(&mut numbers, count));
        // What this writer changes.
        let count = [0, 1, 40, 1000][numbers.below(4)];
        let added = any_entries(&mut numbers, count);
        let known: Vec<_> = old.iter().collect();
        let kept = 1 + numbers.below(20);
        let own: Vec<_> = known
            .iter()
            .skip(numbers.below(200))
            .step_by(kept)
            .collect();
        let change = |tree: &Tree| match round % 3 {
            0 => tree.clone().with(&added),
            1 => own
                .iter()
                .fold(tree.clone(), |tree, it| tree.without(it.key())),
            _ => own.iter().fold(tree.clone(), |tree, it| {
                tree.replaced(it.in_state(RegionState::Pinning))
            }),
        };
        let keys: Vec<Key> = match round % 3 {
            0 => Vec::new(),
            _ => own.iter().map(|it| it.key()).collect(),
        };
        let count = [0, 1, 2, 30, 500, 4000][numbers.below(6)];
        let new = edited_by_others(&old, &keys, count, &mut numbers);

        let rebased = change(&old).rebased(&old, &new, usize::MAX).unwrap();
        let expected: Vec<_> = change(&new).iter().collect();
        check(&rebased, &expected);
        // The other way round it is the same, and to itself nothing.
        let rebased = new
            .clone()
            .rebased(&old, &change(&old), usize::MAX)
            .unwrap();
        check(&rebased, &expected);
        check(&old.clone().rebased(&new, &new, 0).unwrap(), &known);
    }
}

#[test]
fn the_same_change_on_both_sides_cannot_be_rebased() {
    let old = Tree::empty().with(&any_entries(&mut Numbers(15), 100));
    let entry = old.iter().nth(50).unwrap();
    let removed = old.clone().without(entry.key());
    assert!(removed.clone().rebased(&old, &removed, 100).is_none());
    let replaced = old.clone().replaced(entry.in_state(RegionState::Retiring));
    assert!(removed.clone().rebased(&old, &replaced, 100).is_none());
    let added = old.clone().with(&[self::entry(77, 1)]);
    assert!(added.clone().rebased(&old, &added, 100).is_none());
}

/// However many registrations there are that did not change.
#[test]
fn the_steps_to_rebase_depend_on_what_differs() {
    let mut numbers = Numbers(16);
    let old = Tree::empty().with(&any_entries(&mut numbers, 20_000));
    assert!(levels(&old).iter().flatten().count() > 600);
    for count in [1, 2, 10] {
        for _ in 0..20 {
            let new = edited_by_others(&old, &[], count, &mut numbers);
            // For each edit two paths of three nodes, and one beside where two
            // are joined.
            let steps = count * 10;
            assert!(old.clone().rebased(&old, &new, steps).is_some());
        }
    }
    let all = any_entries(&mut numbers, 20_000);
    let new = Tree::empty().with(&all);
    assert!(old.clone().rebased(&old, &new, 5000).is_none());
}
