//! Ids name registrations, not addresses, and are drawn once.

use pinned_hosts::{Registry, global};

use crate::cells::{a, at_once, region};
use crate::model::Model;

pub(crate) const MODELS: [Model; 2] = [
    Model {
        name: "a_handle_removes_its_own_entry",
        promise: "of several registrations of the same bytes, a handle removes its own",
        outcomes: &["alone", "beside a new one"],
        furthest: None,
        body: |witness| {
            let registry = global();
            let kept = registry.register(region(a())).id();
            let removed = registry.register(region(a()));
            let ((), new) = at_once(
                move || {
                    removed.unregister();
                    witness.saw(match registry.live_count() {
                        1 => "alone",
                        _ => "beside a new one",
                    });
                },
                move || registry.register(region(a())).id(),
            );
            let left: Vec<_> = registry.regions().map(|it| it.id()).collect();
            assert_eq!(left, [kept, new], "a handle removed another's entry");
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
                || Registry::new().register(region(a())).id(),
                || Registry::new().register(region(a())).id(),
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
