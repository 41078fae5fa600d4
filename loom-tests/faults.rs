//! The faults that the models have to find.
//!
//! Each weakens one ordering or leaves out one step, by name, in a build for
//! the models only: `weakened!` in `src/`, [`is_asked_for`] in `debt.rs`. For
//! each the runner asks the models named here, at the bound that they are
//! explored at, and wants every one of them to fail with the reason named.

use std::sync::OnceLock;

/// The variable that asks for a fault.
pub(crate) const VARIABLE: &str = "PINNED_HOSTS_MUTANT";

pub(crate) struct Fault {
    pub(crate) name: &'static str,
    /// What is wrong with it in.
    pub(crate) what: &'static str,
    /// The models that have to fail.
    pub(crate) found_by: &'static [&'static str],
    /// A part of what each of them has to say; several, split by `|`, if it
    /// may be any of them.
    pub(crate) reason: &'static str,
}

/// What loom says of a value that is read without being ordered after its
/// making.
const UNORDERED: &str = "Causality violation";

/// What a reader says that uses what is gone; loom may say first that it is
/// not ordered after the poisoning.
const USED: &str = "value was used after|Causality violation";

pub(crate) const FAULTS: &[Fault] = &[
    Fault {
        name: "publish_relaxed",
        what: "a successful publish releases nothing",
        found_by: &[
            "register_then_hand_over_to_a_registry",
            "unregister_then_hand_over_to_a_registry",
            "two_writers_register",
            "three_writers_register",
        ],
        reason: UNORDERED,
    },
    Fault {
        name: "failed_publish_relaxed",
        what: "a publish that lost the race does not acquire what won it",
        found_by: &["two_writers_register", "register_against_unregister"],
        reason: UNORDERED,
    },
    Fault {
        name: "load_relaxed",
        what: "a load of the published snapshot acquires nothing",
        found_by: &[
            "register_all_is_seen_whole",
            "is_pinned_sees_a_whole_snapshot",
            "a_reader_sees_a_whole_snapshot",
            "a_registry_sees_a_whole_snapshot",
            "is_pinned_never_goes_back",
            "a_reader_never_goes_back",
            "a_registry_never_goes_back",
            "segments_are_of_one_snapshot",
            "two_readers",
        ],
        reason: UNORDERED,
    },
    Fault {
        name: "never_announced",
        what: "a writer publishes without announcing it",
        found_by: &[
            "register_then_hand_over_to_is_pinned",
            "unregister_then_hand_over_to_is_pinned",
            "register_then_hand_over_to_a_reader",
            "unregister_then_hand_over_to_a_reader",
        ],
        reason: "was not seen",
    },
    Fault {
        name: "announced_once_published",
        what: "a writer announces what it publishes only after it has",
        found_by: &["a_thread_never_goes_back"],
        reason: "went back in time",
    },
    Fault {
        name: "announcement_goes_back",
        what: "a writer announces its generation whatever another has announced by then",
        found_by: &["a_writer_sees_its_own_changes"],
        reason: "was not seen",
    },
    Fault {
        name: "announced_once",
        what: "a writer that begins anew announces nothing more",
        found_by: &["a_winner_sees_the_losers_change"],
        reason: "was not seen",
    },
    Fault {
        name: "generation_kept_on_retry",
        what: "a writer that begins anew keeps the generation of its first attempt",
        found_by: &["a_winner_sees_the_losers_change"],
        reason: "was not seen",
    },
    Fault {
        name: "reader_skips_compare",
        what: "a reader never looks whether a newer snapshot is there",
        found_by: &[
            "register_then_hand_over_to_is_pinned",
            "unregister_then_hand_over_to_is_pinned",
            "register_then_hand_over_to_a_reader",
            "unregister_then_hand_over_to_a_reader",
        ],
        reason: "was not seen",
    },
    Fault {
        name: "reader_goes_back",
        what: "a reader that took a newer snapshot answers from the old one once more",
        found_by: &["is_pinned_never_goes_back", "a_reader_never_goes_back"],
        reason: "went back in time",
    },
    Fault {
        name: "lost_update",
        what: "a publish stores, whatever is published by then",
        found_by: &["two_writers_register", "three_writers_register"],
        reason: "an update was lost|a removal was lost",
    },
    Fault {
        name: "no_retry",
        what: "a publish that lost the race is given up",
        found_by: &["two_writers_register", "register_against_unregister"],
        reason: "an update was lost|a removal was lost",
    },
    Fault {
        name: "rebase_forgets",
        what: "a change of many that lost the race publishes what it built, without the winner's change",
        found_by: &["register_all_against_others"],
        reason: "an update was lost, or a removal",
    },
    Fault {
        name: "torn_arrays",
        what: "a snapshot is published before all of its arrays are those of its regions",
        found_by: &[
            "is_pinned_sees_a_whole_snapshot",
            "a_reader_sees_a_whole_snapshot",
            "a_registry_sees_a_whole_snapshot",
        ],
        reason: "not the answers of published snapshots",
    },
    Fault {
        name: "register_all_one_by_one",
        what: "regions registered together are published one by one",
        found_by: &["register_all_is_seen_whole", "segments_are_of_one_snapshot"],
        reason: "seen in part|not the segments of a published snapshot",
    },
    Fault {
        name: "asks_twice",
        what: "a Registry answers for the two halves of a slice from two snapshots",
        found_by: &["no_answer_from_two_snapshots"],
        reason: "not the answer of any published snapshot",
    },
    Fault {
        name: "base_added_first",
        what: "a base that is registered again is first added, then its other entries are removed",
        found_by: &["two_writers_of_one_base"],
        reason: "a base was lost|two entries of one base",
    },
    Fault {
        name: "register_all_half_way",
        what: "regions are published while the caller's iterator still runs",
        found_by: &["a_writer_panics"],
        reason: "registered a part",
    },
    Fault {
        name: "replace_in_two_publishes",
        what: "a base that is registered again is first removed, then added",
        found_by: &["a_base_is_replaced_in_one_publish"],
        reason: "only replaced is gone",
    },
    Fault {
        name: "id_reuse",
        what: "an id is drawn again",
        found_by: &["a_handle_removes_its_own_entry"],
        reason: "a handle removed another's entry",
    },
    Fault {
        name: "id_drawn_in_two_steps",
        what: "the counter of ids is read and written in two steps",
        found_by: &["two_threads_draw_different_ids"],
        reason: "one id was drawn twice",
    },
    Fault {
        name: "erase_by_address",
        what: "a handle removes the first of what is registered at its address",
        found_by: &["a_handle_removes_its_own_entry"],
        reason: "a handle removed another's entry",
    },
    Fault {
        name: "reader_leaks",
        what: "a thread's reader is never dropped",
        found_by: &["a_threads_reader_is_dropped_with_it"],
        reason: "leaked",
    },
    Fault {
        name: "reader_frees",
        what: "a writer drops its hold on what it superseded, without keeping it for a later writer",
        found_by: &["a_reader_frees_nothing", "two_writers_retire"],
        reason: "a reader freed",
    },
    Fault {
        name: "held_is_dropped",
        what: "a walk drops its hold on what a reader still holds",
        found_by: &["a_reader_frees_nothing", "two_writers_retire"],
        reason: "a reader freed",
    },
    Fault {
        name: "retired_is_lost",
        what: "a writer gives up when another one put something on the stack at the same time",
        found_by: &["two_writers_retire"],
        reason: "leaked",
    },
    Fault {
        name: "retired_not_released",
        what: "what is put on the stack of superseded snapshots is not released",
        found_by: &["two_writers_retire"],
        reason: UNORDERED,
    },
    Fault {
        name: "no_answer_past_the_reader",
        what: "a lookup after the thread's reader is gone knows of nothing",
        found_by: &["a_lookup_in_a_destructor_is_right"],
        reason: "a lookup in a destructor missed a registration",
    },
    Fault {
        name: "no_grace_period_on_pin",
        what: "the driver pins without a grace period after the publish",
        found_by: &["pin_against_copy"],
        reason: "found pageable, and read late",
    },
    Fault {
        name: "publish_after_pin",
        what: "memory is published once the driver has pinned it",
        found_by: &["pin_against_copy"],
        reason: "found pageable, and read late",
    },
    Fault {
        name: "no_grace_period_on_unpin",
        what: "the driver unpins without a grace period after the publish",
        found_by: &["unpin_against_copy"],
        reason: "while the device reads it",
    },
    Fault {
        name: "retiring_skipped",
        what: "copies that begin while memory is being unpinned still let the device read it",
        found_by: &["unpin_against_copy"],
        reason: "while the device reads it",
    },
    Fault {
        name: "retract_before_unpin",
        what: "memory is retracted before the driver has unpinned it",
        found_by: &["unpin_against_copy"],
        reason: "found pageable, and read late",
    },
    Fault {
        name: "lookup_before_section",
        what: "the source is looked up before the section is entered",
        found_by: &["pin_against_copy", "pin_unpin_against_copy"],
        reason: "found pageable, and read late",
    },
    Fault {
        name: "grace_period_not_released",
        what: "the thread that ends a grace period releases nothing",
        found_by: &["a_grace_period_that_another_thread_ends"],
        reason: UNORDERED,
    },
    Fault {
        name: "grace_period_not_acquired",
        what: "the thread that waited for a grace period acquires nothing",
        found_by: &["a_grace_period_that_another_thread_ends"],
        reason: UNORDERED,
    },
    Fault {
        name: "inner_section_ends_outer",
        what: "(in the models' copy) the copy is made after the outer section has ended",
        found_by: &["nested_sections"],
        reason: "found pageable, and read late",
    },
    Fault {
        name: "section_ends_at_once",
        what: "a section ends where it begins",
        found_by: &["overlapping_sections"],
        reason: "found pageable, and read late",
    },
    Fault {
        name: "one_participant_a_thread",
        what: "all sections of a thread share one participant",
        found_by: &["overlapping_sections"],
        reason: "never saw: pinned while the third goes on",
    },
    Fault {
        name: "only_the_first_section_counts",
        what: "a thread counts as inside a section by its first participant alone",
        found_by: &["inside_a_section"],
        reason: "not told that it is inside a section",
    },
    Fault {
        name: "a_limit_ends_the_grace_period",
        what: "a wait that reaches its limit counts as one that went through",
        found_by: &["a_pin_that_gives_up"],
        reason: "found pageable, and read late",
    },
    Fault {
        name: "given_up_unpin_stays_retiring",
        what: "memory that was not unpinned, for lack of time, stays retiring",
        found_by: &["an_unpin_that_gives_up"],
        reason: "not in the state it was in",
    },
    Fault {
        name: "flags_without_bound",
        what: "a wait defers however many flags of others are left",
        found_by: &["waits_that_give_up"],
        reason: "more flags are left than the bound",
    },
    Fault {
        name: "alone_in_two_steps",
        what: "whether memory is registered is asked before the publish that registers it",
        found_by: &["two_that_register_alone"],
        reason: "both are registered, or none",
    },
    Fault {
        name: "unpin_all_retracts_all",
        what: "of memory that is unpinned together, what stays pinned is retracted too",
        found_by: &["unpin_all_against_copy"],
        reason: "pinned, and not registered",
    },
    Fault {
        name: "failed_pin_stays",
        what: "memory that the driver refused to pin stays registered",
        found_by: &[
            "a_pin_that_fails",
            "a_pin_that_gives_up",
            "inside_a_section",
            "two_pinners_of_one_range",
        ],
        reason: "a refused pin stays registered|more than one entry",
    },
    Fault {
        name: "failed_unpin_retracts",
        what: "memory that the driver failed to unpin is retracted",
        found_by: &["an_unpin_that_fails"],
        reason: "pinned, and not registered|found pageable, and read late",
    },
    Fault {
        name: "debt_reader_without_fence",
        what: "(debts) no fence between the debt and the second look",
        found_by: &["debts_keep_what_a_reader_uses", "debts_with_two_publishes"],
        reason: USED,
    },
    Fault {
        name: "debt_writer_without_fence",
        what: "(debts) no fence between the publish and the look into the slots",
        found_by: &["debts_keep_what_a_reader_uses", "debts_with_two_publishes"],
        reason: USED,
    },
    Fault {
        name: "debt_not_paid",
        what: "(debts) the writer does not look into the slots",
        found_by: &["debts_keep_what_a_reader_uses", "debts_with_two_publishes"],
        reason: USED,
    },
    Fault {
        name: "debt_not_confirmed",
        what: "(debts) the reader does not look again once its debt is written",
        found_by: &["debts_keep_what_a_reader_uses", "debts_with_two_publishes"],
        reason: USED,
    },
    Fault {
        name: "debt_struck_relaxed",
        what: "(debts) taking back a debt releases nothing",
        found_by: &["debts_keep_what_a_reader_uses"],
        reason: UNORDERED,
    },
    Fault {
        name: "model_cut_short",
        what: "(the runner) loom ends a model early, as its limits make it do, and calls it passed",
        found_by: &[
            "register_then_hand_over_to_is_pinned",
            "two_writers_register",
        ],
        reason: "was cut short",
    },
];

/// Whether the environment asks for the fault `name`.
pub(crate) fn is_asked_for(name: &str) -> bool {
    static ASKED_FOR: OnceLock<Option<String>> = OnceLock::new();
    let asked_for = ASKED_FOR.get_or_init(|| std::env::var(VARIABLE).ok());
    asked_for.as_deref() == Some(name)
}
