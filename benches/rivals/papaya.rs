//! A concurrent hash map by page: the lookup costs the same at any number of
//! regions, but a region costs as many entries as it has pages.

use std::collections::BTreeMap;

use foldhash::fast::FixedState;
use papaya::{HashMap, Operation};

use super::{Bounds, Changeable, Contestant, contains, with, without};

const PAGE_BYTES: usize = 4096;

/// `papaya`, from each page's number to the regions that lie on it, byte for
/// byte: several can share a page. The hash is a fast one, as no attacker
/// chooses the addresses.
///
/// A region that contains a slice lies on the page where the slice begins, so
/// one page has to be looked up.
pub(crate) struct PapayaPages(HashMap<usize, Box<[Bounds]>, FixedState>);

fn pages(region: Bounds) -> impl Iterator<Item = usize> {
    region.start / PAGE_BYTES..=(region.end - 1) / PAGE_BYTES
}

impl Contestant for PapayaPages {
    const NAME: &'static str = "papaya by page";

    fn holding(regions: &[Bounds]) -> Self {
        let mut on_pages = BTreeMap::<usize, Vec<Bounds>>::new();
        for &region in regions {
            for page in pages(region) {
                on_pages.entry(page).or_default().push(region);
            }
        }
        // At its full size from the start: a lookup in a map that still grows
        // may have to look in two tables.
        let map = HashMap::with_capacity_and_hasher(on_pages.len(), FixedState::default());
        for (page, on_it) in on_pages {
            map.pin().insert(page, on_it.into());
        }
        Self(map)
    }

    fn asker(&self) -> impl FnMut(&[u8]) -> bool {
        |bytes| {
            let page = bytes.as_ptr().addr() / PAGE_BYTES;
            let pages = self.0.pin();
            pages.get(&page).is_some_and(|on_it| contains(on_it, bytes))
        }
    }
}

impl Changeable for PapayaPages {
    type Key<'a> = Bounds;

    fn insert(&self, region: Bounds) -> Bounds {
        let map = self.0.pin();
        for page in pages(region) {
            map.update_or_insert_with(page, |on_it| with(on_it, region).into(), || [region].into());
        }
        region
    }

    fn remove(&self, region: Bounds) {
        let map = self.0.pin();
        for page in pages(region) {
            map.compute(page, |on_it| {
                let left = on_it.map(|(_, on_it)| without(on_it, region));
                match left {
                    None => Operation::Abort(()),
                    Some(left) if left.is_empty() => Operation::Remove,
                    Some(left) => Operation::Insert(left.into()),
                }
            });
        }
    }
}
