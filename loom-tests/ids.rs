//! Ids name registrations, not addresses, and are drawn once.

use loom::sync::Arc;
use pinned_hosts::Registry;

use crate::cells::{a, at_once, region};
use crate::model::Model;

pub(crate) const MODELS: [Model; 2] = [
    Model {
        name: "an_old_id_does_not_remove_a_new_entry",
        promise: "once removed, an id cannot take away what is registered at its address later",
        outcomes: &["left removed it", "right removed it"],
        furthest: None,
        body: |witness| {
            let registry = Arc::new(Registry::new());
            let old = registry.register(region(a()));
            let (left, right) = (Arc::clone(&registry), Arc::clone(&registry));
            let ((removed_left, new), removed_right) = at_once(
                move || {
                    let removed = left.unregister(old).is_ok();
                    (removed, left.register(region(a())))
                },
                move || right.unregister(old).is_ok(),
            );
            assert!(registry.is_pinned(a()), "an old id removed a new entry");
            assert!(
                removed_left != removed_right,
                "an id was removed twice, or never"
            );
            witness.saw(if removed_left {
                "left removed it"
            } else {
                "right removed it"
            });
            assert!(registry.unregister(old).is_err());
            registry.unregister(new).unwrap();
            assert_eq!(registry.live_count(), 0);
        },
    },
    Model {
        name: "two_threads_draw_different_ids",
        promise: "ids that are drawn at once differ",
        outcomes: &["left drew first", "right drew first"],
        furthest: None,
        body: |witness| {
            // Two registries: the writers meet at the counter of ids alone. One
            // region: an id is more than the number only by its address.
            let (left, right) = at_once(
                || Registry::new().register(region(a())),
                || Registry::new().register(region(a())),
            );
            assert_ne!(left, right, "one id was drawn twice");
            witness.saw(if left < right {
                "left drew first"
            } else {
                "right drew first"
            });
        },
    },
];
