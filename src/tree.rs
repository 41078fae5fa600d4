//! The sorted registrations, in a tree whose nodes snapshots share.
//!
//! # Why a tree
//!
//! A snapshot never changes. To publish one with one region more, all that is
//! unchanged has to be copied or shared. Copied, a publish among 64,000 regions
//! takes a millisecond, and a program that pins that many buffers one by one
//! the best part of a minute. So the sorted array is cut into *leaves* of at
//! most [`WIDTH`] registrations, with *branches* of as many children above
//! them; the next snapshot has new nodes along one path from the root to a
//! leaf, and shares all others with this one.
//!
//! A reader sees what it would see in one array. Up to [`WIDTH`] regions, which
//! is what most programs have, it *is* one: the root is a leaf.
//!
//! # What a node stores for its readers
//!
//! Each item of a node, a registration or a child, starts somewhere and has an
//! end; a child's end is the greatest of its registrations'. Beside its items a
//! node stores
//!
//! - `starts[k]`: where item `k` starts, and `usize::MAX` from the last on;
//! - `reaches[k]`: the greatest end among the first `k` items.
//!
//! To find how far any region reaches that starts no later than an address:
//! count the starts up to the address, say `k`. In a leaf, `reaches[k]` is it.
//! In a branch, all of the first `k - 1` children count, so `reaches[k - 1]`
//! does, and child `k - 1` is asked for the rest. What starts after the address
//! lies behind, and does not count.
//!
//! The number of steps depends on nothing but the height, and a node is
//! searched without a branch that depends on the address, which a processor
//! would guess wrongly half the time.

use std::fmt;
use std::hint::select_unpredictable;

use crate::entry::{Marks, RegionEntry};
use crate::region::Key;
use crate::sync::{Shared, modelled_only};

/// How many items a node has at most. In models, so few that a handful of
/// regions makes a tree.
const WIDTH: usize = if cfg!(loom) { 2 } else { 64 };

/// To count so many starts takes less time than a search's chain of dependent
/// steps: a third less for a whole lookup at three regions, even at about ten.
const FEW: usize = if cfg!(loom) { 1 } else { 8 };

/// How many a node gets, about, when many registrations are made at once: room
/// is left to add more.
const BULK: usize = if cfg!(loom) { 2 } else { 32 };

/// A node with fewer items is put together with one beside it, if that leaves
/// room to add more.
const SPARSE: usize = WIDTH / 4;

/// All registrations of one snapshot, by [`Key`].
#[derive(Clone)]
pub(crate) struct Tree {
    root: Shared<Node>,
    len: usize,
}

// In this order, the counts lie on a cache line with the first starts.
#[derive(Debug)]
#[repr(C)]
struct Node {
    items: Items,
    starts: [usize; WIDTH],
    reaches: [usize; WIDTH + 1],
}

/// In order, of each kind. All leaves are equally far from the root.
#[derive(Clone, Debug)]
enum Items {
    Entries(Vec<RegionEntry>),
    /// Never empty, except in an empty tree's making.
    Children(Vec<Child>),
}

#[derive(Clone, Debug)]
struct Child {
    first: Key,
    reach: usize,
    marks: Marks,
    node: Shared<Node>,
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
        Self {
            root: Self::root_of(level),
            len,
        }
    }

    /// The root above `level`, which is at most two nodes.
    fn root_of(mut level: Vec<Child>) -> Shared<Node> {
        match level.len() {
            0 => Shared::new(Node::new(Items::Entries(Vec::new()))),
            1 => level.remove(0).node,
            _ => Shared::new(Node::new(Items::Children(level))),
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

    /// Adds registrations, which may be in any order and have new keys.
    pub(crate) fn insert_all(&mut self, added: &[RegionEntry]) {
        // To make the tree anew takes some nanoseconds a registration, to
        // change a path some hundred.
        if added.len() > 1 && added.len() > self.len / 16 {
            let mut entries = Vec::with_capacity(self.len + added.len());
            entries.extend(self.iter());
            entries.extend_from_slice(added);
            // A merge sort finds the sorted run that is already there.
            entries.sort_by_key(RegionEntry::key);
            *self = Self::from_sorted(entries);
            return;
        }
        for &entry in added {
            let key = entry.key();
            self.edit(key, &mut |entries| {
                entries.insert(entries.partition_point(|it| it.key() < key), entry);
            });
            self.len += 1;
        }
    }

    /// Takes the registration `key` away, if it is there.
    pub(crate) fn remove(&mut self, key: Key) -> Option<RegionEntry> {
        let removed = self.get(key)?;
        self.edit(key, &mut |entries| entries.retain(|it| it.key() != key));
        self.len -= 1;
        Some(removed)
    }

    /// Puts `entry` in the place of the registration of the same key, which is
    /// there.
    pub(crate) fn replace(&mut self, entry: RegionEntry) {
        self.edit(entry.key(), &mut |entries| {
            let same = |it: &&mut RegionEntry| it.key() == entry.key();
            if let Some(place) = entries.iter_mut().find(same) {
                *place = entry;
            }
        });
    }

    /// Does `edit` to the leaf where `key` belongs.
    fn edit(&mut self, key: Key, edit: &mut impl FnMut(&mut Vec<RegionEntry>)) {
        let mut level = vec![Child::of(Shared::clone(&self.root))];
        edit_child(&mut level, 0, key, edit);
        self.root = Self::root_of(level);
        while let Items::Children(children) = &self.root.items
            && let [only] = children.as_slice()
        {
            self.root = Shared::clone(&only.node);
        }
    }

    pub(crate) fn get(&self, key: Key) -> Option<RegionEntry> {
        self.first_from(key).filter(|entry| entry.key() == key)
    }

    /// The first registration whose key is `key` or greater.
    fn first_from(&self, key: Key) -> Option<RegionEntry> {
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
                    reach: root.reaches[started],
                    next: root.starts[started],
                })
            }
            _ => None,
        }
    }

    /// What lies around `address`.
    #[inline]
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

    pub(crate) fn iter(&self) -> Entries {
        self.iter_from((0, 0))
    }

    /// Those whose key is `key` or greater.
    fn iter_from(&self, key: Key) -> Entries {
        Entries {
            tree: self.clone(),
            from: key,
        }
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
    match &mut items {
        Items::Entries(entries) => edit(entries),
        Items::Children(below) => {
            let at = place_of(below, key);
            edit_child(below, at, key, edit);
        }
    }
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
        children.insert(at, Child::of(Shared::new(Node::new(right))));
    }
    if items.len() > 0 {
        children.insert(at, Child::of(Shared::new(Node::new(items))));
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
            let items = kind(items.by_ref().take(size).collect());
            Child::of(Shared::new(Node::new(items)))
        })
        .collect()
}

impl Child {
    fn of(node: Shared<Node>) -> Self {
        Self {
            first: node.items.first().unwrap_or_default(),
            reach: node.reach(),
            marks: node.items.marks(),
            node,
        }
    }
}

impl Node {
    fn new(items: Items) -> Self {
        let mut starts = [usize::MAX; WIDTH];
        let mut reaches = [0; WIDTH + 1];
        let mut reach = 0;
        let mut note = |k: usize, start: usize, end: usize| {
            reach = end.max(reach);
            starts[k] = start;
            reaches[k + 1] = reach;
        };
        match &items {
            Items::Entries(entries) => {
                for (k, it) in entries.iter().enumerate() {
                    note(k, it.region().start_addr(), it.region().end_addr());
                }
            }
            Items::Children(children) => {
                for (k, it) in children.iter().enumerate() {
                    note(k, it.first.0, it.reach);
                }
            }
        }
        Self {
            items,
            starts,
            reaches,
        }
    }

    /// The items of a node, copied if another tree has the node too.
    fn into_items(this: Shared<Self>) -> Items {
        match Shared::try_unwrap(this) {
            Ok(node) => node.items,
            Err(shared) => shared.items.clone(),
        }
    }

    fn reach(&self) -> usize {
        self.reaches[self.items.len()]
    }

    /// How many items start at or before `address`.
    #[inline]
    fn started_by(&self, address: usize) -> usize {
        if self.items.len() <= BULK {
            count_up_to(&self.starts[..BULK], address)
        } else {
            count_up_to(&self.starts, address)
        }
    }

    /// Has the processor fetch what a search reads of this node, all at once
    /// rather than one cache line after the other. It is a third of the time of
    /// a lookup in a million regions.
    #[inline]
    fn prefetch(&self) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            const IN_A_LINE: usize = 64 / size_of::<usize>();
            for array in [self.starts.as_ptr(), self.reaches.as_ptr()] {
                for line in 0..BULK / IN_A_LINE {
                    let line = array.wrapping_add(line * IN_A_LINE);
                    // SAFETY: a prefetch reads nothing that the program can see,
                    // and does nothing for an address that it cannot read.
                    unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
                }
            }
        }
    }
}

impl Items {
    #[inline]
    fn len(&self) -> usize {
        match self {
            Self::Entries(entries) => entries.len(),
            Self::Children(children) => children.len(),
        }
    }

    fn first(&self) -> Option<Key> {
        match self {
            Self::Entries(entries) => entries.first().map(RegionEntry::key),
            Self::Children(children) => children.first().map(|child| child.first),
        }
    }

    fn marks(&self) -> Marks {
        match self {
            Self::Entries(entries) => all_marks(entries.iter().map(RegionEntry::marks)),
            Self::Children(children) => all_marks(children.iter().map(|child| child.marks)),
        }
    }

    fn split_off(&mut self, at: usize) -> Self {
        match self {
            Self::Entries(entries) => Self::Entries(entries.split_off(at)),
            Self::Children(children) => Self::Children(children.split_off(at)),
        }
    }

    /// These and `others`, which are as far from the root.
    fn followed_by(self, others: Self) -> Self {
        match (self, others) {
            (Self::Entries(mut these), Self::Entries(others)) => {
                these.extend(others);
                Self::Entries(these)
            }
            (Self::Children(mut these), Self::Children(others)) => {
                these.extend(others);
                Self::Children(these)
            }
            _ => unreachable!("all leaves are equally far from the root"),
        }
    }
}

fn all_marks(marks: impl Iterator<Item = Marks>) -> Marks {
    marks.fold(Marks::default(), Marks::or)
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

/// Registrations in order. It keeps no place in the tree, only the key it has
/// come to: so it needs no memory of its own.
#[derive(Clone)]
pub(crate) struct Entries {
    tree: Tree,
    from: Key,
}

impl Iterator for Entries {
    type Item = RegionEntry;

    fn next(&mut self) -> Option<RegionEntry> {
        let entry = self.tree.first_from(self.from)?;
        let (start, number) = entry.key();
        self.from = (start, number + 1);
        Some(entry)
    }
}

/// How many of `starts`, which are sorted and a power of two in number, are at
/// most `address`.
///
/// As `partition_point`. But the number is known where this is inlined, and with
/// it the number of steps: half as many instructions.
#[inline]
fn count_up_to(starts: &[usize], address: usize) -> usize {
    let mut count = 0;
    let mut step = starts.len() / 2;
    while step > 0 {
        let lower = starts[count + step - 1] <= address;
        count = select_unpredictable(lower, count + step, count);
        step /= 2;
    }
    count + usize::from(starts[count] <= address)
}
