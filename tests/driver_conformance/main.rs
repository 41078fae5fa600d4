//! What this crate relies on about the driver, stated as tests.
//!
//! They run over the simulated driver; with `PINNED_HOSTS_DRIVER=real`, over
//! the installed one, and then a missing driver or device is a failure. So on
//! a machine with a GPU they check that the simulated driver tells the truth:
//!
//! ```sh
//! PINNED_HOSTS_DRIVER=real cargo test --test driver_conformance -- --nocapture
//! ```
//!
//! Each check says what relies on it. Beside it stands a lie of a driver that
//! has to make it fail, told by the simulated one ([`conforms`]).
//!
//! What no document and no observation settles is not asserted but measured:
//! such a question is answered in a line `question: answer`, and, with
//! `--nocapture`, in a table at the end. What is asserted there is only what
//! this crate needs whatever the answer is.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod answers;
mod calls;
mod captures;
#[path = "../common/mod.rs"]
mod common;
mod contexts;
mod copies;
mod events;
mod gate;
mod host_memory;
mod memory;
mod pointers;
mod questions;
mod rig;

/// Makes two tests of a check: that it holds of the driver there is, and that
/// it fails if the driver lies. The lie is told to a rig that is set up, and
/// the check has to fail with a panic that says what the last argument says.
macro_rules! conforms {
    ($check:ident, lie: $lie:expr, noticed: $noticed:literal) => {
        mod $check {
            #[allow(unused_imports, reason = "a lie may need none of them")]
            use super::*;

            #[test]
            fn holds() {
                super::$check(&crate::rig::Rig::new());
            }

            #[test]
            fn a_lie_is_noticed() {
                crate::rig::assert_noticed($lie, super::$check, $noticed);
            }
        }
    };
}
use conforms;
