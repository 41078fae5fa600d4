//! The sorted registrations, in a tree whose nodes snapshots share.
//!
//! # Why a tree
//!
//! A snapshot never changes. To publish one with one region more, all that is
//! unchanged has to be copied or shared. Copied, a publish among 64,000 regions
//! takes a millisecond, and a program that pins that many buffers one by one
//! the best part of a minute. So the sorted array is cut into *leaves* of at
//! most 64 registrations, with *branches* of as many children above them; the
//! next snapshot has new nodes along one path from the root to a leaf, and
//! shares all others with this one.
//!
//! Up to 64 regions, which is what most programs have, the tree *is* one array:
//! its root is a leaf. What a node stores for its readers, and how it is
//! searched, is in `tree/node.rs`.

mod diff;
mod node;
#[cfg(all(test, not(loom)))]
mod tests;

use std::{fmt, iter};

use crate::entry::{Marks, RegionEntry};
use crate::region::Key;
use crate::sync::{Shared, modelled_only};
use node::{BULK, Child, FEW, Items, Node, SPARSE, WIDTH};

/// All registrations of one snapshot, by [`Key`].
#[derive(Clone)]
pub(crate) struct Tree {
    root: Shared<Node>,
    len: usize,
}

/// What lies around an address.
#[derive(Clone, Copy)]
pub(crate) struct Around {
    /// The greatest end of all regions that start at or before the address;
    /// zero if there is none.
    pub(crate) reach: usize,
    /// Where the next region starts; `usize::MAX` if there is none.
    pub(crate) next: usize,
}

impl Tree {
    pub(crate) fn empty() -> Self {
        Self::from_sorted(Vec::new())
    }

    fn from_sorted(entries: Vec<RegionEntry>) -> Self {
        let len = entries.len();
        let mut level = in_nodes(entries, Items::Entries);
        while level.len() > 1 {
            level = in_nodes(level, Items::Children);
        }
        let empty = || Shared::new(Node::new(Items::Entries(Vec::new())));
        Self {
            root: level.pop().map_or_else(empty, |only| only.node),
            len,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Where the first region starts; `usize::MAX` if there is none.
    pub(crate) fn first_start(&self) -> usize {
        self.root.starts[0]
    }

    /// The greatest end.
    pub(crate) fn reach(&self) -> usize {
        self.root.reach()
    }

    /// These registrations and `added`, which may be in any order and have new
    /// keys.
    pub(crate) fn with(self, added: &[RegionEntry]) -> Self {
        // To make the tree anew takes some nanoseconds a registration, to
        // change a path some hundred.
        if added.len() > 1 && added.len() > self.len / 16 {
            let mut entries = Vec::with_capacity(self.len + added.len());
            entries.extend(self.iter());
            entries.extend_from_slice(added);
            // A merge sort finds the sorted run that is already there.
            entries.sort_by_key(RegionEntry::key);
            return Self::from_sorted(entries);
        }
        added.iter().fold(self, |tree, &entry| {
            let len = tree.len + 1;
            let key = entry.key();
            let root = tree.edited(key, &mut |entries| {
                entries.insert(entries.partition_point(|it| it.key() < key), entry);
            });
            Self { root, len }
        })
    }

    /// These registrations without `key`, which is one of them.
    pub(crate) fn without(self, key: Key) -> Self {
        let len = self.len - 1;
        let root = self.edited(key, &mut |entries| entries.retain(|it| it.key() != key));
        Self { root, len }
    }

    /// These registrations with `entry` in the place of the one of the same
    /// key.
    pub(crate) fn replaced(self, entry: RegionEntry) -> Self {
        let len = self.len;
        let root = self.edited(entry.key(), &mut |entries| {
            for it in entries.iter_mut().filter(|it| it.key() == entry.key()) {
                *it = entry;
            }
        });
        Self { root, len }
    }

    /// The root once `edit` was done to the leaf where `key` belongs.
    fn edited(self, key: Key, edit: &mut impl FnMut(&mut Vec<RegionEntry>)) -> Shared<Node> {
        let mut items = Node::into_items(self.root);
        edit_items(&mut items, key, edit);
        if items.len() > WIDTH {
            let right = items.split_off(items.len() / 2);
            items = Items::Children(vec![Child::holding(items), Child::holding(right)]);
        }
        while let Items::Children(children) = &mut items
            && children.len() == 1
        {
            items = Node::into_items(children.remove(0).node);
        }
        Shared::new(Node::new(items))
    }

    pub(crate) fn get(&self, key: Key) -> Option<RegionEntry> {
        self.first_from(key).filter(|entry| entry.key() == key)
    }

    /// The first registration whose key is `key` or greater.
    pub(crate) fn first_from(&self, key: Key) -> Option<RegionEntry> {
        let mut node = &*self.root;
        let mut behind = None;
        loop {
            match &node.items {
                Items::Entries(entries) => {
                    let at = entries.partition_point(|it| it.key() < key);
                    let entry = entries.get(at).copied();
                    return entry.or_else(|| self.get(behind?));
                }
                Items::Children(children) => {
                    let at = place_of(children, key);
                    behind = children.get(at + 1).map(|it| it.first).or(behind);
                    node = &children[at].node;
                }
            }
        }
    }

    /// What lies around `address`, if there are so few regions that to count
    /// them all takes less time than to search. Short enough to be inlined.
    #[inline]
    pub(crate) fn around_few(&self, address: usize) -> Option<Around> {
        let root = &*self.root;
        match &root.items {
            Items::Entries(entries) if entries.len() <= FEW => {
                let starts = root.starts[..entries.len()].iter();
                let started: usize = starts.map(|&it| usize::from(it <= address)).sum();
                Some(Around {
                    reach: root.reaches.get(started).copied()?,
                    next: root.starts.get(started).copied()?,
                })
            }
            _ => None,
        }
    }

    /// What lies around `address`.
    // Always: half of what a caller asks for is often left out.
    #[inline(always)]
    pub(crate) fn around(&self, address: usize) -> Around {
        let mut node = &*self.root;
        let mut reach = 0;
        let mut next = usize::MAX;
        loop {
            let started = node.started_by(address);
            next = node.starts.get(started).map_or(next, |&it| next.min(it));
            match &node.items {
                Items::Entries(_) => {
                    reach = reach.max(node.reaches[started]);
                    return Around { reach, next };
                }
                Items::Children(children) => {
                    let Some(child) = started.checked_sub(1).and_then(|at| children.get(at)) else {
                        return Around { reach, next };
                    };
                    reach = reach.max(node.reaches[started - 1]);
                    node = &child.node;
                    node.prefetch();
                }
            }
        }
    }

    /// Of the registrations that reach as far as `reach`, which
    /// [`around`](Self::around) gave, the first.
    pub(crate) fn first_to_reach(&self, reach: usize) -> Option<RegionEntry> {
        let mut node = &*self.root;
        loop {
            // All that reach less far lie before it.
            let before = node.reaches[..=node.items.len()].partition_point(|&it| it < reach);
            let at = before.checked_sub(1)?;
            match &node.items {
                Items::Entries(entries) => return entries.get(at).copied(),
                Items::Children(children) => node = &children.get(at)?.node,
            }
        }
    }

    /// Whether any registration that overlaps `start..end` is `marked`.
    pub(crate) fn any_marked(
        &self,
        start: usize,
        end: usize,
        marked: impl Fn(Marks) -> bool,
    ) -> bool {
        fn search(node: &Node, start: usize, end: usize, marked: &impl Fn(Marks) -> bool) -> bool {
            let overlaps = |first: usize, reach: usize| first < end && start < reach;
            match &node.items {
                Items::Entries(entries) => entries.iter().any(|it| {
                    marked(it.marks()) && overlaps(it.region().start_addr(), it.region().end_addr())
                }),
                Items::Children(children) => children.iter().any(|it| {
                    marked(it.marks)
                        && overlaps(it.first.0, it.reach)
                        && search(&it.node, start, end, marked)
                }),
            }
        }
        search(&self.root, start, end, &marked)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = RegionEntry> {
        self.iter_from((0, 0))
    }

    /// Those whose key is `key` or greater. The iterator keeps no place in the
    /// tree, only the key it has come to: so it needs no memory.
    fn iter_from(&self, mut key: Key) -> impl Iterator<Item = RegionEntry> {
        iter::from_fn(move || {
            let entry = self.first_from(key)?;
            key = entry.key_after();
            Some(entry)
        })
    }

    /// Those that start at `address`.
    pub(crate) fn starting_at(&self, address: usize) -> impl Iterator<Item = RegionEntry> {
        self.iter_from((address, 0))
            .take_while(move |entry| entry.region().start_addr() == address)
    }
}

impl fmt::Debug for Tree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// Does `edit` to the leaf at or below these items where `key` belongs.
fn edit_items(items: &mut Items, key: Key, edit: &mut impl FnMut(&mut Vec<RegionEntry>)) {
    match items {
        Items::Entries(entries) => edit(entries),
        Items::Children(children) => edit_child(children, place_of(children, key), key, edit),
    }
}

/// Does `edit` to the leaf below `children[at]` where `key` belongs, and leaves
/// in the child's place what has become of it: nothing, it, or two nodes. It may
/// be joined with the one beside it.
fn edit_child(
    children: &mut Vec<Child>,
    mut at: usize,
    key: Key,
    edit: &mut impl FnMut(&mut Vec<RegionEntry>),
) {
    let mut items = Node::into_items(children.remove(at).node);
    edit_items(&mut items, key, edit);
    let beside = at.saturating_sub(1);
    if items.len() < SPARSE
        && let Some(other) = children.get(beside)
        && items.len() + other.node.items.len() <= WIDTH - SPARSE
    {
        let other = Node::into_items(children.remove(beside).node);
        items = if beside < at {
            other.followed_by(items)
        } else {
            items.followed_by(other)
        };
        at = beside;
    }
    if items.len() > WIDTH {
        let right = items.split_off(items.len() / 2);
        children.insert(at, Child::holding(right));
    }
    if items.len() > 0 {
        children.insert(at, Child::holding(items));
    }
}

/// Which of `children` has `key`, or would have it.
fn place_of(children: &[Child], key: Key) -> usize {
    let not_after = children.partition_point(|child| child.first <= key);
    not_after.saturating_sub(1)
}

/// `items` in nodes of even size.
fn in_nodes<T>(items: Vec<T>, kind: fn(Vec<T>) -> Items) -> Vec<Child> {
    let nodes = match items.len() {
        0 => 0,
        1..=WIDTH => 1,
        len => len.div_ceil(BULK),
    };
    let len = items.len();
    let mut items = items.into_iter();
    (0..nodes)
        .map(|k| {
            let size = len * (k + 1) / nodes - len * k / nodes;
            Child::holding(kind(items.by_ref().take(size).collect()))
        })
        .collect()
}

modelled_only! {
    impl Tree {
        /// These registrations, with the reaches of others.
        pub(crate) fn torn(&self, old: &Self) -> Self {
            let mut root = Node::new(self.root.items.clone());
            root.reaches = old.root.reaches;
            Self { root: Shared::new(root), len: self.len }
        }
    }
}
