//! The fastest searches known for a large set that never changes. Their
//! layouts take long to build, which a set that never changes does not mind.

use super::{Bounds, Contestant};

/// What cannot be: no region starts at the last address.
const NONE: usize = usize::MAX;

/// The starts in the order in which a binary search visits them (Eytzinger's),
/// so that later visits can be prefetched: a place's 8 great-grandchildren share
/// a cache line.
pub(crate) struct Eytzinger {
    /// The root is at 1, the children of `k` at `2k` and `2k + 1`.
    starts: Lines,
    /// In the same order.
    ends: Vec<usize>,
}

impl Contestant for Eytzinger {
    const NAME: &'static str = "floor, Eytzinger";

    fn holding(regions: &[Bounds]) -> Self {
        let mut starts = vec![NONE; regions.len() + 1];
        let mut ends = vec![0; regions.len() + 1];
        let mut sorted = regions.iter();
        in_order(1, regions.len(), &mut |place| {
            if let Some(region) = sorted.next() {
                starts[place] = region.start;
                ends[place] = region.end;
            }
        });
        Self {
            starts: Lines::of(&starts),
            ends,
        }
    }

    fn asker(&self) -> impl FnMut(&[u8]) -> bool {
        let starts = self.starts.keys();
        let n = self.ends.len() - 1;
        move |bytes| {
            let wanted = Bounds::of(bytes);
            let mut place = 1;
            while place <= n {
                prefetch(starts, place * KEYS);
                place = 2 * place + usize::from(starts[place] <= wanted.start);
            }
            // Each turn to the right passed a start that is not greater; the
            // last such turn passed the greatest one.
            let last_started = place >> (place.trailing_zeros() + 1);
            last_started > 0 && !bytes.is_empty() && self.ends[last_started] >= wanted.end
        }
    }
}

/// Calls `visit` with the places of a tree of `n` places, in the order of
/// their keys.
fn in_order(place: usize, n: usize, visit: &mut impl FnMut(usize)) {
    if place <= n {
        in_order(2 * place, n, visit);
        visit(place);
        in_order(2 * place + 1, n, visit);
    }
}

/// A B+ tree without pointers, each node one cache line: a ninth of the set is
/// left after each line. With AVX2, where the machine has it, the keys of a
/// node are compared all at once.
pub(crate) struct StaticTree {
    /// The sorted starts, then the layer above them, and so on.
    nodes: Lines,
    /// Where each layer begins, in nodes, from the root's down to the leaves'.
    layers: Vec<usize>,
    ends: Vec<usize>,
    #[cfg(target_arch = "x86_64")]
    has_avx2: bool,
}

impl Contestant for StaticTree {
    const NAME: &'static str = "floor, B+ tree";

    fn holding(regions: &[Bounds]) -> Self {
        let mut keys: Vec<usize> = regions.iter().map(|region| region.start).collect();
        keys.resize(keys.len().next_multiple_of(KEYS).max(KEYS), NONE);
        let mut layers = vec![0];
        // The leaves below one node of the layer last made.
        let mut leaves_below = 1;
        let leaves = keys.len() / KEYS;
        while leaves_below < leaves {
            layers.push(keys.len() / KEYS);
            // A node has one child more than keys. Each key is the first start
            // below the child behind it.
            let nodes = leaves.div_ceil(leaves_below * (KEYS + 1));
            for node in 0..nodes {
                for child in 1..=KEYS {
                    let leaf = (node * (KEYS + 1) + child) * leaves_below;
                    let first = (leaf < leaves).then(|| keys[leaf * KEYS]);
                    keys.push(first.unwrap_or(NONE));
                }
            }
            leaves_below *= KEYS + 1;
        }
        layers.reverse();
        Self {
            nodes: Lines::of(&keys),
            layers,
            ends: regions.iter().map(|region| region.end).collect(),
            #[cfg(target_arch = "x86_64")]
            has_avx2: is_x86_feature_detected!("avx2"),
        }
    }

    fn asker(&self) -> impl FnMut(&[u8]) -> bool {
        |bytes| {
            let wanted = Bounds::of(bytes);
            let started = self.started_by(wanted.start);
            started > 0 && !bytes.is_empty() && self.ends[started - 1] >= wanted.end
        }
    }
}

impl StaticTree {
    fn started_by(&self, address: usize) -> usize {
        #[cfg(target_arch = "x86_64")]
        if self.has_avx2 {
            // Safety: the machine has AVX2.
            return unsafe { self.started_by_avx2(address) };
        }
        self.descend(address, |keys, address| {
            keys.iter().map(|&key| usize::from(key <= address)).sum()
        })
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn started_by_avx2(&self, address: usize) -> usize {
        self.descend(address, |keys, address| not_above_avx2(keys, address))
    }

    /// How many starts are not above `address`, by how many keys of a node are
    /// not.
    #[inline(always)]
    fn descend(&self, address: usize, not_above: impl Fn(&[usize; KEYS], usize) -> usize) -> usize {
        let nodes = &self.nodes.0;
        let Some((&leaves, inner)) = self.layers.split_last() else {
            return 0;
        };
        let mut node = 0;
        for &layer in inner {
            node = node * (KEYS + 1) + not_above(&nodes[layer + node].0, address);
        }
        node * KEYS + not_above(&nodes[leaves + node].0, address)
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn not_above_avx2(keys: &[usize; KEYS], address: usize) -> usize {
    use std::arch::x86_64::{
        __m256i, _mm256_castsi256_pd, _mm256_cmpgt_epi64, _mm256_load_si256, _mm256_movemask_pd,
        _mm256_set1_epi64x, _mm256_xor_si256,
    };
    // AVX2 compares signed numbers: with the top bit turned, unsigned ones
    // have the same order.
    let turn = _mm256_set1_epi64x(i64::MIN);
    let address = _mm256_xor_si256(_mm256_set1_epi64x(address as i64), turn);
    let half: *const __m256i = keys.as_ptr().cast();
    let above = [0, 1].map(|which| {
        // Safety: two halves of 32 bytes are a node's 64, and a node is
        // aligned to 64.
        let keys = unsafe { _mm256_load_si256(half.add(which)) };
        let above = _mm256_cmpgt_epi64(_mm256_xor_si256(keys, turn), address);
        _mm256_movemask_pd(_mm256_castsi256_pd(above)).count_ones() as usize
    });
    KEYS - above[0] - above[1]
}

const KEYS: usize = 8;

/// One cache line of keys.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([usize; KEYS]);

struct Lines(Vec<Line>);

impl Lines {
    fn of(keys: &[usize]) -> Self {
        let lines = keys.chunks(KEYS).map(|keys| {
            let mut line = [NONE; KEYS];
            line[..keys.len()].copy_from_slice(keys);
            Line(line)
        });
        Self(lines.collect())
    }

    fn keys(&self) -> &[usize] {
        // Safety: a line is its keys and has no padding.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * KEYS) }
    }
}

#[inline(always)]
fn prefetch(keys: &[usize], at: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // Safety: prefetching any address is allowed; nothing is read.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(keys.as_ptr().wrapping_add(at).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (keys, at);
}
