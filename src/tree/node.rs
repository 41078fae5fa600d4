//! One node of the tree: what readers search.
//!
//! # What a node stores for its readers
//!
//! Each item of a node, a registration or a child, starts somewhere and has an
//! end; a child's end is the greatest of its registrations'. Beside its items a
//! node stores
//!
//! - `starts[k]`: where item `k` starts, and `usize::MAX` behind the last;
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

use std::hint::select_unpredictable;

use crate::entry::{Marks, RegionEntry};
use crate::region::Key;
use crate::sync::Shared;

/// How many items a node has at most. In models, so few that a handful of
/// regions makes a tree.
pub(super) const WIDTH: usize = if cfg!(loom) { 2 } else { 64 };

/// To count so many starts takes less time than a search's chain of dependent
/// steps: a third less for a whole lookup at three regions, even at about ten.
pub(super) const FEW: usize = if cfg!(loom) { 1 } else { 8 };

/// How many a node gets, about, when many registrations are made at once: room
/// is left to add more.
pub(super) const BULK: usize = if cfg!(loom) { 2 } else { 32 };

/// A node with fewer items is put together with one beside it, if that leaves
/// room to add more.
pub(super) const SPARSE: usize = if cfg!(loom) { 1 } else { 16 };

// In this order, the counts lie on a cache line with the first starts.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Node {
    pub(super) items: Items,
    pub(super) starts: [usize; WIDTH],
    pub(super) reaches: [usize; WIDTH + 1],
}

/// In order, of each kind. All leaves are equally far from the root.
#[derive(Clone, Debug)]
pub(super) enum Items {
    Entries(Vec<RegionEntry>),
    Children(Vec<Child>),
}

#[derive(Clone, Debug)]
pub(super) struct Child {
    /// The first of its keys.
    pub(super) first: Key,
    /// The greatest of its ends.
    pub(super) reach: usize,
    pub(super) marks: Marks,
    pub(super) node: Shared<Node>,
}

impl Child {
    /// A new node's.
    pub(super) fn holding(items: Items) -> Self {
        let node = Node::new(items);
        Self {
            first: node.items.first().unwrap_or_default(),
            reach: node.reach(),
            marks: node.items.marks(),
            node: Shared::new(node),
        }
    }
}

impl Node {
    pub(super) fn new(items: Items) -> Self {
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

    /// The items of a node, copied if another tree has the node too, with room
    /// for one more.
    pub(super) fn into_items(this: Shared<Self>) -> Items {
        fn copied<T: Clone>(items: &[T]) -> Vec<T> {
            let mut copy = Vec::with_capacity(items.len() + 1);
            copy.extend_from_slice(items);
            copy
        }
        match Shared::try_unwrap(this) {
            Ok(node) => node.items,
            Err(shared) => match &shared.items {
                Items::Entries(entries) => Items::Entries(copied(entries)),
                Items::Children(children) => Items::Children(copied(children)),
            },
        }
    }

    pub(super) fn reach(&self) -> usize {
        self.reaches[self.items.len()]
    }

    /// How many levels of nodes there are below this one.
    pub(super) fn height(&self) -> usize {
        match &self.items {
            Items::Children(children) => children.first().map_or(0, |it| 1 + it.node.height()),
            Items::Entries(_) => 0,
        }
    }

    /// How many items start at or before `address`; at the last address of all,
    /// which no region reaches, too many.
    #[inline]
    pub(super) fn started_by(&self, address: usize) -> usize {
        if self.items.len() <= BULK {
            count_up_to(&self.starts[..BULK], address)
        } else {
            count_up_to(&self.starts, address)
        }
    }

    /// Has the processor fetch what a search reads of this node, all at once
    /// rather than one cache line after the other. It saves a third of the time
    /// of a lookup in a million regions.
    #[inline]
    pub(super) fn prefetch(&self) {
        #[cfg(all(target_arch = "x86_64", not(loom)))]
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
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Entries(entries) => entries.len(),
            Self::Children(children) => children.len(),
        }
    }

    pub(super) fn first(&self) -> Option<Key> {
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

    pub(super) fn split_off(&mut self, at: usize) -> Self {
        match self {
            Self::Entries(entries) => Self::Entries(entries.split_off(at)),
            Self::Children(children) => Self::Children(children.split_off(at)),
        }
    }

    /// These and `others`, which are as far from the root.
    pub(super) fn followed_by(self, others: Self) -> Self {
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
