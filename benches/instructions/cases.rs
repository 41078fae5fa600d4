//! The kinds of lookup, and what each may take.

use std::fmt;

use Place::{Above, Anywhere, Below, Between, In};
use Question::{IsPinned, Residency};

/// The last number of a row is the count that its limit is made of. To change
/// the limit, put there what a run shows.
pub(crate) const CASES: &[Case] = &[
    case(IsPinned, 3, In(0), 47),
    case(IsPinned, 3, In(1), 47),
    case(IsPinned, 3, In(2), 47),
    case(IsPinned, 3, Between, 50),
    case(IsPinned, 3, Below, 18),
    case(IsPinned, 3, Above, 20),
    case(IsPinned, 16, Anywhere, 63),
    case(IsPinned, 64, Anywhere, 64),
    case(Residency, 3, In(1), 47),
    case(Residency, 3, Between, 52),
    case(Residency, 3, Above, 20),
    case(Residency, 64, Anywhere, 71),
];

/// One kind of lookup.
pub(crate) struct Case {
    pub(crate) question: Question,
    /// How many regions are registered.
    pub(crate) regions: usize,
    pub(crate) place: Place,
    /// The instructions that a call took when the row was last changed.
    pub(crate) counted: u64,
}

const fn case(question: Question, regions: usize, place: Place, counted: u64) -> Case {
    Case {
        question,
        regions,
        place,
        counted,
    }
}

/// The free function that is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Question {
    IsPinned,
    Residency,
}

/// Where the slices lie that are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In the region of this index.
    In(usize),
    /// In each region in turn.
    Anywhere,
    /// In each gap between two regions in turn.
    Between,
    /// Before all regions.
    Below,
    /// Behind all regions.
    Above,
}

impl Case {
    /// The most instructions that a run may count. A compiler other than the
    /// one that the rows were counted with may keep one register more on the
    /// stack, or lay out a branch the other way round, and should not fail the
    /// check for that.
    pub(crate) fn limit(&self) -> u64 {
        self.counted + (self.counted / 10).max(2)
    }

    /// How many slices are asked for: as many in each region, or in each of two
    /// gaps, for a mean over them to be exact.
    pub(crate) fn slices(&self) -> usize {
        self.regions.max(6)
    }

    /// Whether the slices lie in a region each.
    pub(crate) fn hits(&self) -> bool {
        matches!(self.place, In(_) | Anywhere)
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let question = match self.question {
            IsPinned => "is_pinned",
            Residency => "residency",
        };
        write!(f, "{question}, n = {}, ", self.regions)?;
        match self.place {
            In(index) => write!(f, "hit in region {}", index + 1),
            Anywhere => write!(f, "hit, mean of all regions"),
            Between => write!(f, "miss between regions"),
            Below => write!(f, "miss below"),
            Above => write!(f, "miss above"),
        }
    }
}
