//! How a [`HostRegistration`](super::HostRegistration) cuts its memory.
//!
//! A chunk is pinned by one driver call, and a copy across a boundary takes
//! two. So boundaries fall between elements, and, where both are possible, on
//! pages, so that no page is locked twice.

use std::ops::Range;

/// The page sizes to heed, in bytes: the largest that systems with CUDA have,
/// which is a multiple of the others, and the smallest, for small chunks.
const PAGES: [usize; 2] = [64 << 10, 4 << 10];

/// The largest chunk. The driver refuses one of 512 GiB.
pub(super) const LARGEST: usize = 256 << 30;

/// The ranges of bytes, in order, into which `len` bytes at the address `base`
/// are cut. All but the last have whole elements. None is longer than
/// `chunk_bytes`, except that each has at least one element.
///
/// Neither of the sizes is 0, nor is an element larger than [`LARGEST`].
pub(super) fn cut(
    base: usize,
    len: usize,
    chunk_bytes: usize,
    element_bytes: usize,
) -> impl Iterator<Item = Range<usize>> {
    let chunk_bytes = chunk_bytes.clamp(element_bytes, LARGEST);
    let on_pages = PAGES
        .iter()
        .find_map(|&page| first_on_page(base, chunk_bytes, element_bytes, page));
    // Every boundary is `step` after the one before.
    let (step, first) = on_pages.unwrap_or_else(|| {
        let step = chunk_bytes - chunk_bytes % element_bytes;
        (step, step)
    });
    let mut start = 0_usize;
    std::iter::from_fn(move || {
        let end = if start == 0 {
            first
        } else {
            start.saturating_add(step)
        };
        let chunk = start..end.min(len);
        start = chunk.end;
        Some(chunk).filter(|chunk| !chunk.is_empty())
    })
}

/// The length of chunks that begin and end on pages and between elements, and
/// where the first ends; `None` if there are none so short, or if no element
/// begins on a page.
fn first_on_page(
    base: usize,
    chunk_bytes: usize,
    element_bytes: usize,
    page: usize,
) -> Option<(usize, usize)> {
    // Pages are powers of two, and so is what they have in common with an
    // element. The least common multiple of both:
    let common = 1 << element_bytes.trailing_zeros().min(page.trailing_zeros());
    let grain = (element_bytes / common).checked_mul(page)?;
    let step = chunk_bytes - chunk_bytes % grain;
    if step == 0 {
        return None;
    }
    // The first element that begins on a page, if one does.
    let lead = (0..page / common)
        .map(|elements| elements * element_bytes)
        .find(|lead| base.wrapping_add(*lead).is_multiple_of(page))?;
    let first = if lead == 0 { step } else { lead + step - grain };
    Some((step, first))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = PAGES[1];

    fn lengths(base: usize, len: usize, chunk_bytes: usize, element_bytes: usize) -> Vec<usize> {
        let mut at = 0;
        cut(base, len, chunk_bytes, element_bytes)
            .map(|chunk| {
                assert_eq!(chunk.start, at, "no gap");
                at = chunk.end;
                chunk.len()
            })
            .collect()
    }

    #[test]
    fn nothing_has_no_chunks() {
        assert_eq!(lengths(PAGE, 0, PAGE, 1), [0; 0]);
    }

    #[test]
    fn pages_are_cut_into_pages_and_a_rest() {
        assert_eq!(lengths(8 * PAGE, 2 * PAGE + 5, PAGE, 16), [PAGE, PAGE, 5]);
        assert_eq!(
            lengths(8 * PAGE, 5 * PAGE, 2 * PAGE + 9, 16),
            [2 * PAGE, 2 * PAGE, PAGE]
        );
    }

    #[test]
    fn the_first_chunk_ends_on_a_page() {
        let base = 8 * PAGE + 64;
        assert_eq!(
            lengths(base, 3 * PAGE, PAGE, 16),
            [PAGE - 64, PAGE, PAGE, 64]
        );
        assert_eq!(
            lengths(base, 4 * PAGE, 2 * PAGE, 16),
            [2 * PAGE - 64, 2 * PAGE, 64]
        );
    }

    #[test]
    fn large_pages_are_heeded_where_a_chunk_has_room_for_them() {
        let (base, large) = (33 * PAGE, PAGES[0]);
        let chunks = lengths(base, 3 * large, large, 16);
        assert_eq!(chunks, [large - PAGE, large, large, PAGE]);
        assert_eq!(lengths(base, large, large / 2, 16), [large / 2; 2]);
    }

    #[test]
    fn elements_are_not_cut_even_where_none_begins_on_a_page() {
        let base = 8 * PAGE + 8;
        assert_eq!(lengths(base, 2 * PAGE, PAGE, 16), [PAGE, PAGE]);
        assert_eq!(lengths(8 * PAGE, 2 * PAGE, PAGE, 24), [4080, 4080, 32]);
    }

    #[test]
    fn a_chunk_has_at_least_one_element() {
        assert_eq!(lengths(PAGE, 250, 1, 100), [100, 100, 50]);
    }

    #[test]
    fn elements_of_odd_size_end_on_a_page_if_the_chunk_is_long_enough() {
        assert_eq!(
            lengths(8 * PAGE, 7 * PAGE, 3 * PAGE, 3),
            [3 * PAGE, 3 * PAGE, PAGE]
        );
    }

    #[test]
    fn no_chunk_is_larger_than_the_driver_takes() {
        let chunks = lengths(PAGE, 600 << 30, usize::MAX, 16);
        assert!(chunks.iter().all(|&len| len <= LARGEST), "{chunks:?}");
        assert_eq!(lengths(PAGE, 10, usize::MAX, LARGEST), [10]);
    }

    #[test]
    fn chunks_cover_the_memory_and_keep_the_rules_whatever_the_sizes() {
        for base in [0, 16, 24, 4000, 4096, 65536] {
            for chunk_bytes in [1, 100, 4096, 5000, 65536, 200_000] {
                for element_bytes in [1, 2, 3, 16, 24, 4096, 6000] {
                    let len = 300_000;
                    let chunks = lengths(base, len, chunk_bytes, element_bytes);
                    assert_eq!(chunks.iter().sum::<usize>(), len);
                    let longest = chunk_bytes.max(element_bytes);
                    assert!(chunks.iter().all(|&chunk| chunk <= longest));
                    let whole = &chunks[..chunks.len() - 1];
                    assert!(
                        whole
                            .iter()
                            .all(|chunk| chunk.is_multiple_of(element_bytes))
                    );
                }
            }
        }
    }
}
