//! The process that is counted: it asks for the slices of one case, round by
//! round.

use std::hint::black_box;

use clap::ValueEnum;
use pinned_hosts::{Region, RegionError, global};

use crate::cases::{CASES, Case, Place, Question};

const REGION_BYTES: usize = 64;
/// One region and the gap behind it.
const STRIDE: usize = 2 * REGION_BYTES;
const SLICE_BYTES: usize = 16;

/// Who answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Asked {
    /// The free function of the case.
    Lookup,
    /// The same question without the thread's reader, which is slower.
    Twin,
    /// A function that returns at once: what is left is the loop.
    Nothing,
}

/// An answer as a number: for the loop to be the same whatever is asked.
type Ask = fn(&[u8]) -> u8;

/// One case, ready to be asked.
pub(crate) struct Child<'a> {
    slices: Vec<&'a [u8]>,
    ask: Ask,
}

impl<'a> Child<'a> {
    /// The bytes in which the regions and the slices of `case` lie.
    pub(crate) fn arena(case: &Case) -> Vec<u8> {
        // A stride is left free below the regions, and one above.
        vec![0; (case.regions + 2) * STRIDE]
    }

    /// Registers the regions, and asks for each slice once, so that the
    /// thread has its reader, with the snapshot of these regions.
    pub(crate) fn new(case: &Case, asked: Asked, arena: &'a [u8]) -> Result<Self, Mistake> {
        let regions: Result<Vec<_>, _> = (0..case.regions)
            .map(|k| Region::of(&arena[(k + 1) * STRIDE..][..REGION_BYTES]))
            .collect();
        let _ = global().register_all(regions.map_err(Mistake::Region)?);

        let slices: Vec<_> = (0..case.slices()).map(|i| slice(case, arena, i)).collect();
        let (lookup, twin): (Ask, Ask) = match case.question {
            Question::IsPinned => (is_pinned, is_pinned_twin),
            Question::Residency => (residency, residency_twin),
        };
        let right = match case.question {
            Question::IsPinned => u8::from(case.hits()),
            Question::Residency if case.hits() => pinned_hosts::Residency::Pinned as u8,
            Question::Residency => pinned_hosts::Residency::Pageable as u8,
        };
        for ask in [lookup, twin] {
            if slices.iter().any(|slice| ask(slice) != right) {
                return Err(Mistake::Answer);
            }
        }
        let ask = match asked {
            Asked::Lookup => lookup,
            Asked::Twin => twin,
            Asked::Nothing => nothing,
        };
        // So that the loop is compiled for all of them alike.
        let ask = black_box(ask);
        Ok(Self { slices, ask })
    }

    /// What is counted.
    #[inline(never)]
    pub(crate) fn run(&self, rounds: usize) {
        for _ in 0..rounds {
            for slice in &self.slices {
                black_box((self.ask)(slice));
            }
        }
    }
}

/// Why a child has nothing to count.
#[derive(Debug)]
pub(crate) enum Mistake {
    Case(usize),
    Region(RegionError),
    Answer,
}

impl std::fmt::Display for Mistake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Case(index) => write!(f, "case {index} is not one of the {}", CASES.len()),
            Self::Region(error) => write!(f, "the regions of the case are wrong: {error}"),
            Self::Answer => write!(f, "a lookup gives the wrong answer"),
        }
    }
}

impl std::error::Error for Mistake {}

/// The `i`-th slice to ask for: another one each time.
fn slice<'a>(case: &Case, arena: &'a [u8], i: usize) -> &'a [u8] {
    let regions = case.regions;
    let inside = i % (REGION_BYTES - SLICE_BYTES);
    let start = match case.place {
        Place::In(index) => (index + 1) * STRIDE + inside,
        Place::Anywhere => (i % regions + 1) * STRIDE + inside,
        Place::Between => (i % (regions - 1) + 1) * STRIDE + REGION_BYTES + inside,
        Place::Below => inside,
        Place::Above => (regions + 1) * STRIDE + inside,
    };
    &arena[start..][..SLICE_BYTES]
}

// One function each, not inlined: what is counted, and what there is to look
// at in the assembly, begins and ends with it.

#[inline(never)]
fn is_pinned(slice: &[u8]) -> u8 {
    pinned_hosts::is_pinned(slice).into()
}

#[inline(never)]
fn is_pinned_twin(slice: &[u8]) -> u8 {
    global().is_pinned(slice).into()
}

#[inline(never)]
fn residency(slice: &[u8]) -> u8 {
    pinned_hosts::residency(slice) as u8
}

#[inline(never)]
fn residency_twin(slice: &[u8]) -> u8 {
    global().residency(slice) as u8
}

#[inline(never)]
fn nothing(_: &[u8]) -> u8 {
    0
}
