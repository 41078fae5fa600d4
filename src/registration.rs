//! [`Registration`]: the one thing that removes what was registered.

use std::fmt;

use crate::entry::RegionEntry;
use crate::region::{Region, RegionId};
use crate::registry::Registry;
use crate::sync::weakened;

/// One registration of a [`Registry`], and the only way to remove it.
///
/// From [`Registry::register`] and the functions beside it, and from
/// [`Registry::pin_with`]. It can be neither copied nor made from an id, so no
/// other code of the program can remove the registration, on which copies rely
/// for as long as the memory is pinned.
///
/// Whoever drops it leaves the memory registered for good, which is the safe
/// side.
///
/// An id only identifies a registration:
///
/// ```compile_fail,E0599
/// use pinned_hosts::{Region, global};
///
/// static BUFFER: [u8; 64] = [0; 64];
/// let registration = global().register(Region::of(&BUFFER)?);
/// for entry in global().regions() {
///     entry.id().unregister();
/// }
/// # Ok::<(), pinned_hosts::RegionError>(())
/// ```
///
/// ```
/// use pinned_hosts::{Region, global};
///
/// static BUFFER: [u8; 64] = [0; 64];
/// let registration = global().register(Region::of(&BUFFER)?);
/// for entry in global().regions() {
///     assert_eq!(entry.id(), registration.id());
/// }
/// registration.unregister();
/// # Ok::<(), pinned_hosts::RegionError>(())
/// ```
///
/// It removes once:
///
/// ```compile_fail,E0382
/// use pinned_hosts::{Region, global};
///
/// static BUFFER: [u8; 64] = [0; 64];
/// let registration = global().register(Region::of(&BUFFER)?);
/// registration.unregister();
/// registration.unregister();
/// # Ok::<(), pinned_hosts::RegionError>(())
/// ```
///
/// ```
/// use pinned_hosts::{Region, global};
///
/// static BUFFER: [u8; 64] = [0; 64];
/// let registration = global().register(Region::of(&BUFFER)?);
/// let again = global().register(Region::of(&BUFFER)?);
/// registration.unregister();
/// again.unregister();
/// # Ok::<(), pinned_hosts::RegionError>(())
/// ```
///
/// Nor can it be cloned:
///
/// ```compile_fail,E0599
/// use pinned_hosts::{Region, global};
///
/// static BUFFER: [u8; 64] = [0; 64];
/// let registration = global().register(Region::of(&BUFFER)?);
/// registration.clone().unregister();
/// # Ok::<(), pinned_hosts::RegionError>(())
/// ```
#[must_use = "without it the memory stays registered for ever"]
pub struct Registration<'r> {
    pub(crate) registry: &'r Registry,
    id: RegionId,
    region: Region,
}

impl<'r> Registration<'r> {
    /// That of `entry`, which `registry` has.
    pub(crate) fn of(registry: &'r Registry, entry: RegionEntry) -> Self {
        Self {
            registry,
            id: entry.id(),
            region: entry.region(),
        }
    }

    /// The name of the entry.
    #[must_use]
    pub fn id(&self) -> RegionId {
        self.id
    }

    /// The memory.
    #[must_use]
    pub fn region(&self) -> Region {
        self.region
    }

    /// Removes the registration and publishes. Other registrations of the same
    /// bytes stay. Returns the region.
    ///
    /// Unpin the memory *first*: once a region is gone, copies from it are not
    /// waited for. While other threads may copy from the memory, let
    /// [`unpin_with`](Self::unpin_with) unpin and remove it.
    ///
    /// The snapshot before, and what it does not share with the new one, is kept
    /// until no reader holds it.
    pub fn unregister(self) -> Region {
        weakened!("erase_by_address" => {
            self.registry.erase_by_address(self.region);
            return self.region;
        });
        self.registry.remove_handles(&[self.id]);
        self.region
    }
}

impl fmt::Debug for Registration<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration")
            .field("id", &self.id)
            .field("region", &self.region)
            .finish_non_exhaustive()
    }
}
