//! How one tree differs from another that shares most of its nodes.
//!
//! Both are gone through in order, side by side. Where both go on with the same
//! node, all below it is skipped. Else a node is opened: the higher of the two, or
//! of two that are as high the one that begins first. So no more nodes are opened
//! than are not shared, but for a few beside them.

use std::cmp::Ordering;

use super::Tree;
use super::node::{Items, Node};
use crate::entry::RegionEntry;
use crate::region::Key;
use crate::sync::Shared;

/// A change of one registration.
#[derive(Clone, Copy, Debug)]
enum Edit {
    Add(RegionEntry),
    Remove(RegionEntry),
    /// The entry takes the place of the one of the same key.
    Replace(RegionEntry),
}

impl Tree {
    /// This tree with what makes `newer` of `older`. `None` if to find that out
    /// takes more than `limit` steps, each of them an edit or a node to open; or
    /// if this tree differs from `older` in the same registrations.
    pub(crate) fn rebased(self, older: &Self, newer: &Self, limit: usize) -> Option<Self> {
        let edits = edits(older, newer, limit)?;
        edits.into_iter().try_fold(self, |tree, edit| {
            let (Edit::Add(entry) | Edit::Remove(entry) | Edit::Replace(entry)) = edit;
            let key = entry.key();
            let is_there = tree.get(key).is_some();
            match edit {
                Edit::Add(entry) => (!is_there).then(|| tree.with(&[entry])),
                Edit::Remove(_) => is_there.then(|| tree.without(key)),
                Edit::Replace(entry) => is_there.then(|| tree.replaced(entry)),
            }
        })
    }
}

fn edits(older: &Tree, newer: &Tree, limit: usize) -> Option<Vec<Edit>> {
    let (mut older, mut newer) = (Rest::of(older), Rest::of(newer));
    let mut edits = Vec::new();
    while edits.len() + older.opened + newer.opened <= limit {
        match (older.next(), newer.next()) {
            (None, None) => return Some(edits),
            (Some(Next::Below(old)), Some(Next::Below(new))) => {
                if Shared::ptr_eq(old.node, new.node) {
                    older.skip();
                    newer.skip();
                    continue;
                }
                // The higher first, then the one that begins first.
                let order = new.height.cmp(&old.height).then(old.first.cmp(&new.first));
                if order.is_le() {
                    older.open(old);
                }
                if order.is_ge() {
                    newer.open(new);
                }
            }
            (Some(Next::Entry(old)), Some(Next::Entry(new))) => {
                let order = old.key().cmp(&new.key());
                if order.is_le() {
                    older.skip();
                }
                if order.is_ge() {
                    newer.skip();
                }
                match order {
                    Ordering::Less => edits.push(Edit::Remove(old)),
                    Ordering::Greater => edits.push(Edit::Add(new)),
                    Ordering::Equal if old != new => edits.push(Edit::Replace(new)),
                    Ordering::Equal => {}
                }
            }
            (Some(Next::Entry(old)), new) => match new {
                Some(Next::Below(new)) if new.first <= old.key() => newer.open(new),
                _ => {
                    older.skip();
                    edits.push(Edit::Remove(old));
                }
            },
            (old, Some(Next::Entry(new))) => match old {
                Some(Next::Below(old)) if old.first <= new.key() => older.open(old),
                _ => {
                    newer.skip();
                    edits.push(Edit::Add(new));
                }
            },
            (Some(Next::Below(old)), None) => older.open(old),
            (None, Some(Next::Below(new))) => newer.open(new),
        }
    }
    None
}

/// What is left to go through of a tree.
struct Rest<'t> {
    /// The next one last.
    left: Vec<Next<'t>>,
    /// How many nodes were opened.
    opened: usize,
}

#[derive(Clone, Copy)]
enum Next<'t> {
    Entry(RegionEntry),
    Below(Below<'t>),
}

/// A node, and all below it.
#[derive(Clone, Copy)]
struct Below<'t> {
    node: &'t Shared<Node>,
    first: Key,
    height: usize,
}

impl<'t> Rest<'t> {
    fn of(tree: &'t Tree) -> Self {
        let root = Below {
            node: &tree.root,
            first: tree.root.items.first().unwrap_or_default(),
            height: tree.root.height(),
        };
        Self {
            left: vec![Next::Below(root)],
            opened: 0,
        }
    }

    fn next(&self) -> Option<Next<'t>> {
        self.left.last().copied()
    }

    fn skip(&mut self) {
        self.left.pop();
    }

    /// Puts what is right below the next one, `top`, in its place.
    fn open(&mut self, top: Below<'t>) {
        self.left.pop();
        self.opened += 1;
        match &top.node.items {
            Items::Entries(entries) => {
                let entries = entries.iter().rev().copied();
                self.left.extend(entries.map(Next::Entry));
            }
            Items::Children(children) => {
                let below = children.iter().rev().map(|child| Below {
                    node: &child.node,
                    first: child.first,
                    height: top.height - 1,
                });
                self.left.extend(below.map(Next::Below));
            }
        }
    }
}
