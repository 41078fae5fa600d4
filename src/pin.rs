//! Pinning and unpinning of memory that other threads may be copying from:
//! [`Registry::pin_with`] and [`Registration::unpin_with`]. The protocol is
//! explained at the head of `section.rs`.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use crate::entry::RegionState;
use crate::region::{Region, RegionId};
use crate::registration::Registration;
use crate::registry::Registry;
use crate::section::GraceError;
use crate::sync::{modelled_only, weakened};

impl Registry {
    /// Pins `region` through `pin`, which calls the driver, while other
    /// threads may be copying from that memory in sections
    /// ([`enter`](Self::enter); every copy of this crate is one).
    ///
    /// The region counts as pinned from before the driver call on. `pin` runs
    /// once no copy is under way that was told otherwise.
    ///
    /// If `pin` panics, nobody knows what it did: the region stays registered.
    ///
    /// ```
    /// use pinned_hosts::{Region, global, is_pinned};
    ///
    /// let arena = vec![0u8; 4096];
    /// let driver_pins = || Ok::<(), std::io::Error>(()); // cuMemHostRegister
    /// let driver_unpins = || Ok::<(), std::io::Error>(()); // cuMemHostUnregister
    ///
    /// let registration = global().pin_with(Region::of(&arena)?, driver_pins)?;
    /// assert!(is_pinned(&arena));
    /// registration.unpin_with(driver_unpins)?;
    /// assert!(!is_pinned(&arena));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PinError::Grace`] if this thread is inside a section;
    /// [`PinError::Driver`] with the error of `pin`, which vouches that the
    /// memory is not pinned. The region is not registered then.
    pub fn pin_with<E>(
        &self,
        region: Region,
        pin: impl FnOnce() -> Result<(), E>,
    ) -> Result<Registration<'_>, PinError<E>> {
        self.pin(region, None, pin)
    }

    /// As [`pin_with`](Self::pin_with), waiting for other threads' copies for
    /// at most about `limit`.
    ///
    /// # Errors
    ///
    /// Also [`PinError::Grace`] if that was not enough; `pin` did not run.
    pub fn pin_within<E>(
        &self,
        limit: Duration,
        region: Region,
        pin: impl FnOnce() -> Result<(), E>,
    ) -> Result<Registration<'_>, PinError<E>> {
        self.pin(region, Some(limit), pin)
    }

    fn pin<E>(
        &self,
        region: Region,
        limit: Option<Duration>,
        pin: impl FnOnce() -> Result<(), E>,
    ) -> Result<Registration<'_>, PinError<E>> {
        weakened!("publish_after_pin" => {
            pin().map_err(PinError::Driver)?;
            return Ok(self.register(region));
        });
        self.register_as(RegionState::Pinning, region)
            .pin(limit, pin)
    }

    /// Makes the entries `ids` retiring, and waits until no copy is under way
    /// that may let the device read their memory. After an error they are live
    /// again.
    fn retire(&self, ids: &[RegionId], limit: Option<Duration>) -> Result<(), GraceError> {
        weakened!("retiring_skipped" => {
            return self.wait_for_sections(limit);
        });
        weakened!("retract_before_unpin" => {
            self.remove_handles(ids);
            return self.wait_for_sections(limit);
        });
        self.set_state(ids, RegionState::Retiring);
        weakened!("no_grace_period_on_unpin" => { return Ok(()) });
        let waited = self.wait_for_sections(limit);
        if waited.is_err() {
            weakened!("given_up_unpin_stays_retiring" => { return waited });
            self.set_state(ids, RegionState::Live);
        }
        waited
    }

    /// As [`Registration::unpin_within`] for each of `registrations`, with one
    /// grace period for all of them. Those that stay pinned stay in the list;
    /// the error is that of the first.
    #[cfg(any(feature = "cuda", loom))]
    pub(crate) fn unpin_all<E>(
        &self,
        registrations: &mut Vec<Registration<'_>>,
        limit: Option<Duration>,
        mut unpin: impl FnMut(Region) -> Result<(), E>,
    ) -> Result<(), PinError<E>> {
        let mut ids: Vec<RegionId> = registrations.iter().map(Registration::id).collect();
        ids.sort_unstable();
        self.retire(&ids, limit).map_err(PinError::Grace)?;
        let mut unpinned = Vec::with_capacity(ids.len());
        let mut first_error = None;
        registrations.retain(|registration| match unpin(registration.region()) {
            Ok(()) => {
                unpinned.push(registration.id());
                false
            }
            Err(error) => {
                first_error.get_or_insert(PinError::Driver(error));
                true
            }
        });
        weakened!("unpin_all_retracts_all" => { unpinned.clone_from(&ids) });
        unpinned.sort_unstable();
        self.remove_handles(&unpinned);
        // Those that are left.
        self.set_state(&ids, RegionState::Live);
        first_error.map_or(Ok(()), Err)
    }
}

modelled_only! {
    impl Registry {
        /// What gives a `HostRegistration` back.
        #[doc(hidden)]
        pub fn unpin_each<E>(
            &self,
            registrations: &mut Vec<Registration<'_>>,
            unpin: impl FnMut(Region) -> Result<(), E>,
        ) -> Result<(), PinError<E>> {
            self.unpin_all(registrations, None, unpin)
        }
    }
}

impl<'r> Registration<'r> {
    /// Pins the memory, whose entry is in the state `Pinning`.
    pub(crate) fn pin<E>(
        self,
        limit: Option<Duration>,
        pin: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, PinError<E>> {
        let ids = [self.id()];
        weakened!("no_grace_period_on_pin" => {
            let pinned = pin();
            self.registry.set_state(&ids, RegionState::Live);
            return pinned.map(|()| self).map_err(PinError::Driver);
        });
        let pinned = match self.registry.wait_for_sections(limit) {
            Ok(()) => pin().map_err(PinError::Driver),
            Err(error) => Err(PinError::Grace(error)),
        };
        match pinned {
            Ok(()) => {
                self.registry.set_state(&ids, RegionState::Live);
                Ok(self)
            }
            Err(error) => {
                weakened!("failed_pin_stays" => { return Err(error) });
                self.unregister();
                Err(error)
            }
        }
    }

    /// Unpins the memory through `unpin`, which calls the driver, while other
    /// threads may be copying from it in sections, and removes the registration.
    /// It does not matter who pinned the memory.
    ///
    /// The region counts as pinned, and as
    /// [retiring](crate::RegionState::Retiring), until after the driver call.
    /// `unpin` runs once no copy is under way that may let the device read the
    /// memory.
    ///
    /// If `unpin` panics, nobody knows what it did: the region stays
    /// registered, as retiring.
    ///
    /// # Errors
    ///
    /// [`UnpinError`], which gives the registration back: the memory is still
    /// pinned. Keep it from being freed.
    pub fn unpin_with<E>(
        self,
        unpin: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), UnpinError<'r, E>> {
        self.unpin(None, unpin)
    }

    /// As [`unpin_with`](Self::unpin_with), waiting for other threads' copies
    /// for at most about `limit`.
    ///
    /// # Errors
    ///
    /// Also if that was not enough; `unpin` did not run.
    pub fn unpin_within<E>(
        self,
        limit: Duration,
        unpin: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), UnpinError<'r, E>> {
        self.unpin(Some(limit), unpin)
    }

    fn unpin<E>(
        self,
        limit: Option<Duration>,
        unpin: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), UnpinError<'r, E>> {
        let ids = [self.id()];
        let reason = match self.registry.retire(&ids, limit) {
            Ok(()) => match unpin() {
                Ok(()) => {
                    self.unregister();
                    return Ok(());
                }
                Err(error) => {
                    weakened!("failed_unpin_retracts" => { self.registry.remove_handles(&ids) });
                    self.registry.set_state(&ids, RegionState::Live);
                    PinError::Driver(error)
                }
            },
            // Live again.
            Err(error) => PinError::Grace(error),
        };
        Err(UnpinError {
            registration: self,
            reason,
        })
    }
}

/// Why memory was not pinned, or not unpinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PinError<E> {
    /// The driver was not called: other threads' copies could not be waited
    /// for.
    Grace(GraceError),
    /// What the closure that calls the driver returned.
    Driver(E),
}

impl<E: fmt::Display> fmt::Display for PinError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Grace(error) => error.fmt(f),
            Self::Driver(error) => error.fmt(f),
        }
    }
}

impl<E: fmt::Debug + fmt::Display> Error for PinError<E> {}

/// The memory of a [`Registration`] is still pinned; here it is again.
#[derive(Debug)]
pub struct UnpinError<'r, E> {
    /// To try again with.
    pub registration: Registration<'r>,
    /// Why it was not unpinned.
    pub reason: PinError<E>,
}

impl<E: fmt::Display> fmt::Display for UnpinError<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} is still page-locked: {}",
            self.registration.region(),
            self.reason
        )
    }
}

impl<E: fmt::Debug + fmt::Display> Error for UnpinError<'_, E> {}
