//! One registration as the registry keeps it: the region, whose it is, and how
//! far it is between being made and being gone.

use crate::region::{Key, Region, RegionId};

/// Who made a registration, and so who may take it away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The typed interface: removed by its [`Registration`](crate::Registration)
    /// alone. Were it gone while the memory is pinned, a copy from it would not be
    /// waited for.
    Handle,
    /// The free functions: removed by base address.
    Base,
}

/// How far a registration is between being made and being gone. In each of
/// these states the memory counts as pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RegionState {
    /// About to be pinned: [`Registry::pin_with`](crate::Registry::pin_with)
    /// waits for copies that were told that it is pageable.
    Pinning,
    /// Pinned, or at least registered.
    Live,
    /// About to be unpinned:
    /// [`Registration::unpin_with`](crate::Registration::unpin_with) waits
    /// for copies that may let the device read it, and no copy that begins
    /// now does.
    Retiring,
}

/// One registration, as [`Registry::regions`](crate::Registry::regions) lists
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionEntry {
    id: RegionId,
    region: Region,
    owner: Owner,
    state: RegionState,
    write_combined: bool,
}

impl RegionEntry {
    /// A new one, with an id that nobody has had before.
    pub(crate) fn new(region: Region, owner: Owner) -> Self {
        Self::known_by(RegionId::draw(region), region, owner)
    }

    pub(crate) fn known_by(id: RegionId, region: Region, owner: Owner) -> Self {
        Self {
            id,
            region,
            owner,
            state: RegionState::Live,
            write_combined: false,
        }
    }

    pub(crate) fn that_is_write_combined(self) -> Self {
        Self {
            write_combined: true,
            ..self
        }
    }

    pub(crate) fn in_state(self, state: RegionState) -> Self {
        Self { state, ..self }
    }

    /// How far it is between being made and being gone.
    #[must_use]
    pub fn state(&self) -> RegionState {
        self.state
    }

    /// Whether it was registered as
    /// [write-combined](crate::Registry::register_write_combined).
    #[must_use]
    pub fn is_write_combined(&self) -> bool {
        self.write_combined
    }

    /// The name of the registration.
    #[must_use]
    pub fn id(&self) -> RegionId {
        self.id
    }

    /// The bytes it covers.
    #[must_use]
    pub fn region(&self) -> Region {
        self.region
    }

    /// Whether the free functions registered this entry.
    pub(crate) fn is_bases(&self) -> bool {
        self.owner == Owner::Base
    }

    pub(crate) fn key(&self) -> Key {
        self.id.key()
    }

    /// The least key that is greater.
    pub(crate) fn key_after(&self) -> Key {
        let (start, number) = self.key();
        (start, number + 1)
    }

    pub(crate) fn marks(&self) -> Marks {
        Marks {
            retiring: self.state == RegionState::Retiring,
            write_combined: self.write_combined,
        }
    }
}

/// What is seldom true of a region, and matters to a copy if it is. Of many
/// regions: whether it is true of any.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Marks {
    /// About to be unpinned.
    pub(crate) retiring: bool,
    /// Slow to read.
    pub(crate) write_combined: bool,
}

impl Marks {
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            retiring: self.retiring || other.retiring,
            write_combined: self.write_combined || other.write_combined,
        }
    }
}
