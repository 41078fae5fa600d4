//! `HostRegistration` over the simulated driver: memory that exists is
//! page-locked where it is, while other threads copy from it.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::Rig;
use pinned_hosts::cuda::HostRegistration;
use pinned_hosts::{Residency, residency};

#[test]
fn memory_is_pinned_and_registered_while_it_lives() {
    let rig = Rig::new();
    let memory = vec![7u8; 10_000];
    let live = rig.sim.counters().live_registrations;
    let registration = HostRegistration::new(&rig.context, memory).unwrap();
    assert_eq!(residency(registration.as_bytes()), Residency::Pinned);
    assert_eq!(rig.sim.counters().live_registrations, live + 1);
    let memory = registration.unregister().unwrap();
    assert_eq!(residency(&memory), Residency::Pageable);
    assert_eq!(rig.sim.counters().live_registrations, live);
}
