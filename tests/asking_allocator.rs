//! A program's allocator may itself ask whether memory is pinned, even while
//! a lookup lets go of an old snapshot.

#![allow(clippy::unwrap_used, missing_docs)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use pinned_hosts::{Region, global};

static REGISTERED: [u8; 64] = [1; 64];

thread_local! {
    /// Whether this thread's frees ask.
    static ASKS: Cell<bool> = const { Cell::new(false) };
    /// How many times a free has asked, and how many times it was told
    /// "pinned".
    static ANSWERS: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

struct Asking;

// SAFETY: every call is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Asking {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller promises what `System` asks.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // Not again from within, should asking free something.
        if ASKS.replace(false) {
            let (asked, pinned) = ANSWERS.get();
            let answer = pinned_hosts::is_pinned(&REGISTERED);
            ANSWERS.set((asked + 1, pinned + usize::from(answer)));
            ASKS.set(true);
        }
        // SAFETY: the caller promises what `System` asks.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Asking = Asking;

#[test]
fn a_lookup_from_inside_a_lookup_is_right() {
    let buffer = [0u8; 64];
    global().register(Region::of(&REGISTERED).unwrap());
    assert!(pinned_hosts::is_pinned(&REGISTERED));

    // After this, nobody but this thread's reader holds the snapshot before:
    // the next lookup frees it.
    global().register(Region::of(&buffer).unwrap());
    ASKS.set(true);
    assert!(pinned_hosts::is_pinned(&buffer));
    ASKS.set(false);

    let (asked, pinned) = ANSWERS.get();
    assert!(asked > 0, "the lookup freed the old snapshot");
    assert_eq!(pinned, asked);
}
