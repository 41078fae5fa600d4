//! What a reader sees is some snapshot that was published, whole, and never
//! an older one than it saw before.

use loom::sync::Arc;
use pinned_hosts::Residency::{Mixed, Pageable, Pinned, Seam};
use pinned_hosts::{Registry, Residency, global, is_pinned, live_count, register};

use crate::cells::{a, abc, at_once, b, bc, c, region};
use crate::model::{Model, Witness};

const WHOLE: &[&str] = &["pageable", "mixed", "seam", "pinned"];
const IN_ORDER: &[&str] = &["no, no", "no, yes", "yes, yes"];

pub(crate) const MODELS: [Model; 11] = [
    Model {
        name: "is_pinned_sees_a_whole_snapshot",
        promise: "the answer of a thread's own reader is that of one published snapshot, with all arrays of one generation",
        outcomes: WHOLE,
        furthest: None,
        body: |witness| {
            whole(witness, |_| {
                [
                    pinned_hosts::residency(abc()),
                    pinned_hosts::residency(abc()),
                ]
            });
        },
    },
    Model {
        name: "a_reader_sees_a_whole_snapshot",
        promise: "the answer of a Reader is that of one published snapshot, with all arrays of one generation",
        outcomes: WHOLE,
        furthest: None,
        body: |witness| {
            whole(witness, |registry| {
                let mut reader = registry.reader();
                [reader.residency(abc()), reader.residency(abc())]
            });
        },
    },
    Model {
        name: "a_registry_sees_a_whole_snapshot",
        promise: "the answer of a Registry is that of one published snapshot, with all arrays of one generation",
        outcomes: WHOLE,
        furthest: None,
        body: |witness| {
            whole(witness, |registry| {
                [registry.residency(abc()), registry.residency(abc())]
            });
        },
    },
    Model {
        name: "no_answer_from_two_snapshots",
        promise: "a slice is never answered for in part from one snapshot and in part from another",
        outcomes: &["mixed", "pageable"],
        furthest: None,
        body: |witness| {
            let registry = global();
            let first = registry.register(region(b()));
            at_once(
                move || {
                    first.unregister();
                    let _ = registry.register(region(c()));
                },
                move || {
                    // Either half was pinned at some time, both never.
                    let both = registry.is_pinned(bc());
                    assert!(!both, "not the answer of any published snapshot");
                    witness.saw(match registry.residency(bc()) {
                        Mixed => "mixed",
                        Pageable => "pageable",
                        other => panic!("not the answer of any published snapshot: {other:?}"),
                    });
                },
            );
        },
    },
    Model {
        name: "two_readers",
        promise: "threads that look up at once have readers of their own",
        outcomes: &["no, no", "yes, yes", "no, yes"],
        furthest: Some(3),
        body: |witness| {
            let _ = global();
            let readers = [(); 2].map(|()| {
                loom::thread::spawn(move || {
                    in_order(witness, [is_pinned(a()), is_pinned(a()), is_pinned(a())]);
                })
            });
            register(a().as_ptr(), a().len());
            for reader in readers {
                reader.join().unwrap();
            }
        },
    },
    Model {
        name: "segments_are_of_one_snapshot",
        promise: "the segments of a slice are those of one published snapshot",
        outcomes: &["none", "C", "all"],
        furthest: None,
        body: |witness| {
            let writer = Arc::new(Registry::new());
            let reader = Arc::clone(&writer);
            at_once(
                move || {
                    let _ = writer.register(region(c()));
                    let _ = writer.register_all([region(a()), region(b())]);
                },
                move || {
                    let parts: Vec<_> = reader
                        .segments(abc())
                        .map(|part| (part.residency(), part.bytes().len()))
                        .collect();
                    witness.saw(match parts.as_slice() {
                        [(Pageable, 48)] => "none",
                        [(Pageable, 32), (Pinned, 16)] => "C",
                        [(Pinned, 16), (Pinned, 16), (Pinned, 16)] => "all",
                        torn => panic!("not the segments of a published snapshot: {torn:?}"),
                    });
                },
            );
        },
    },
    Model {
        name: "is_pinned_never_goes_back",
        promise: "of two lookups through a thread's own reader, the second sees no older snapshot",
        outcomes: IN_ORDER,
        furthest: None,
        body: |witness| {
            let _ = global();
            at_once(
                || register(a().as_ptr(), a().len()),
                move || in_order(witness, [is_pinned(a()), is_pinned(a()), is_pinned(a())]),
            );
        },
    },
    Model {
        name: "a_reader_never_goes_back",
        promise: "of two lookups through a Reader, the second sees no older snapshot",
        outcomes: IN_ORDER,
        furthest: None,
        body: |witness| {
            let writer = Arc::new(Registry::new());
            let registry = Arc::clone(&writer);
            at_once(
                move || {
                    let _ = writer.register(region(a()));
                },
                move || {
                    let mut reader = registry.reader();
                    in_order(witness, std::array::from_fn(|_| reader.is_pinned(a())));
                },
            );
        },
    },
    Model {
        name: "a_registry_never_goes_back",
        promise: "of two lookups through a Registry, the second sees no older snapshot",
        outcomes: IN_ORDER,
        furthest: None,
        body: |witness| {
            let writer = Arc::new(Registry::new());
            let registry = Arc::clone(&writer);
            at_once(
                move || {
                    let _ = writer.register(region(a()));
                },
                move || in_order(witness, std::array::from_fn(|_| registry.is_pinned(a()))),
            );
        },
    },
    Model {
        name: "a_thread_never_goes_back",
        promise: "of two lookups of one thread, through whatever kinds of reader, the second sees no older snapshot",
        outcomes: IN_ORDER,
        furthest: None,
        body: |witness| {
            let registry = global();
            at_once(
                move || {
                    let _ = registry.register(region(a()));
                },
                move || {
                    // The first snapshot, for it to be misled by.
                    let mut reader = registry.reader();
                    let seen = [
                        registry.is_pinned(a()),
                        reader.is_pinned(a()),
                        is_pinned(a()),
                    ];
                    in_order(witness, seen);
                },
            );
        },
    },
    Model {
        name: "a_base_is_replaced_in_one_publish",
        promise: "registering a base again with another length leaves no moment without it",
        outcomes: &["old length", "new length"],
        furthest: None,
        body: |witness| {
            register(b().as_ptr(), bc().len());
            at_once(
                || register(b().as_ptr(), b().len()),
                move || {
                    assert!(is_pinned(b()), "a region that was only replaced is gone");
                    witness.saw(if is_pinned(bc()) {
                        "old length"
                    } else {
                        "new length"
                    });
                },
            );
            assert_eq!(live_count(), 1);
        },
    },
];

/// A writer takes the process-wide registry through four snapshots in which
/// the memory is first pageable, then mixed, then a seam, then in one region.
/// A look that is of one of them gives one of these answers, and two looks
/// give two of them in order: what is put together from the arrays of two
/// snapshots is out of order.
fn whole(witness: &'static Witness, look: impl FnOnce(&Registry) -> [Residency; 2] + 'static) {
    let registry = global();
    at_once(
        move || {
            for next in [bc(), a(), abc()] {
                let _ = registry.register(region(next));
            }
        },
        move || {
            let seen = look(registry);
            let ranks = seen.map(|residency| {
                let ranked = [Pageable, Mixed, Seam, Pinned];
                ranked.iter().position(|&it| it == residency)
            });
            assert!(
                ranks.is_sorted(),
                "not the answers of published snapshots: {seen:?}"
            );
            for rank in ranks.into_iter().flatten() {
                witness.saw(WHOLE[rank]);
            }
        },
    );
}

fn in_order(witness: &'static Witness, seen: [bool; 3]) {
    assert!(seen.is_sorted(), "went back in time: {seen:?}");
    witness.saw(match seen {
        [.., false] => "no, no",
        [false, .., true] => "no, yes",
        _ => "yes, yes",
    });
}
