//! Which process this code runs in.
//!
//! A child after `fork` has a copy of every value, but owns none of the
//! page-locked memory, the events and the threads that the values stand for.
//! So a value that stands for such a thing keeps the [`Process`] that made it.
//!
//! The process id alone does not tell: parent and child have the same id if
//! each is the first process of its own PID namespace. So there is also a page
//! of memory that the kernel fills with zeros in each child.

use std::process;

/// One process, as told from its ancestors and descendants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    id: u32,
    generation: u64,
}

impl Process {
    /// The process that runs this.
    pub(crate) fn current() -> Self {
        Self {
            id: process::id(),
            generation: generation(),
        }
    }

    pub(crate) fn is_current(self) -> bool {
        self == Self::current()
    }

    /// All of it in one number, for an atomic.
    pub(crate) fn number(self) -> u64 {
        (self.generation << 32) | u64::from(self.id)
    }
}

/// A number that differs between a process and each of its descendants; 0 in
/// all of them if the kernel offers no such page (Linux before 4.14). The
/// process id is then the only difference.
#[cfg(all(target_os = "linux", not(loom)))]
fn generation() -> u64 {
    use std::ptr;
    use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

    // A child inherits the counter, so its number is greater than its
    // ancestors' numbers.
    static LAST: AtomicU64 = AtomicU64::new(0);
    static PAGE: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());

    // Not a lock or a `Once`: a child could inherit one that is taken.
    let mut page = PAGE.load(Ordering::Acquire);
    if page.is_null() {
        let Some(mapped) = map_page() else {
            return 0;
        };
        // AcqRel, and Acquire above: the page is mapped before it is used. If
        // two threads map one, the loser's page stays unused.
        page = match PAGE.compare_exchange(
            ptr::null_mut(),
            mapped,
            Ordering::AcqRel,
            Ordering::Acquire,
        ) {
            Ok(_) => mapped,
            Err(first) => first,
        };
    }
    // SAFETY: the page is never unmapped, is aligned to more than 8 bytes, and
    // zeros are a valid number.
    let number = unsafe { &*page };
    // Relaxed, all: the numbers order nothing, and each thread of a process
    // reads the one that the exchange has put in place.
    let known = number.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    let new = LAST.fetch_add(1, Ordering::Relaxed) + 1;
    match number.compare_exchange(0, new, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => new,
        Err(first) => first,
    }
}

/// A page of zeros, which is one of zeros again in each child.
#[cfg(all(target_os = "linux", not(loom)))]
fn map_page() -> Option<*mut std::sync::atomic::AtomicU64> {
    const BYTES: usize = 8;
    // SAFETY: maps new memory, where the kernel likes.
    let page = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            BYTES,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if page == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the page was mapped just now, and holds nothing yet.
    if unsafe { libc::madvise(page, BYTES, libc::MADV_WIPEONFORK) } == 0 {
        return Some(page.cast());
    }
    // SAFETY: as above; nobody uses the page.
    unsafe { libc::munmap(page, BYTES) };
    None
}

#[cfg(not(all(target_os = "linux", not(loom))))]
fn generation() -> u64 {
    0
}

#[cfg(all(test, target_os = "linux", not(loom)))]
pub(crate) mod tests {
    use super::*;

    /// Whether `check` holds in a child.
    pub(crate) fn in_child(check: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child runs nothing but `check`, which takes no lock.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = i32::from(!check());
            // SAFETY: ends the child without the parent's exit handlers.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: a place for the status of this process's own child.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(waited, child);
        status == 0
    }

    #[test]
    fn a_child_is_another_process_whatever_its_id() {
        let parent = Process::current();
        assert!(parent.is_current());
        assert!(in_child(|| {
            let child = Process::current();
            let differs = child.generation != parent.generation;
            let numbers_differ = child.number() != parent.number();
            differs && numbers_differ && !parent.is_current() && child.is_current()
        }));
        assert!(parent.is_current());
    }

    #[test]
    fn a_grandchild_is_neither() {
        let parent = Process::current();
        assert!(in_child(|| {
            let child = Process::current();
            in_child(|| {
                let own = Process::current().generation;
                own != parent.generation && own != child.generation
            })
        }));
    }
}
