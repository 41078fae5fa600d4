//! Whether this process called `cuInit`, or was forked from one that did.
//!
//! A real driver does not work in a forked child, where every call fails with
//! `CUDA_ERROR_NOT_INITIALIZED`. A call decides that here before it takes any
//! lock: a thread that held a lock at the fork does not exist in the child, so
//! the child would wait for ever.
//!
//! Process ids do not tell a child from its parent: in another PID namespace
//! both can have the same one. So `cuInit` marks a page that the kernel wipes
//! in each child, by whatever call the child was made. Where the kernel refuses
//! (before Linux 4.14, and in some sandboxes), a handler of `fork` does it.

use super::Outcome;
use crate::code;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

const PAGE: usize = 4096;

/// Null before `cuInit`. Then a byte that is 1 in the process that called it,
/// and 0 in all children that were forked since.
///
/// Stored with release and loaded with acquire, so that whoever finds the byte
/// finds it marked. The byte itself is accessed relaxed: within one process it
/// never changes again.
static MARK: AtomicPtr<AtomicU8> = AtomicPtr::new(null_mut());

fn mark() -> Option<&'static AtomicU8> {
    let mark = NonNull::new(MARK.load(Ordering::Acquire))?;
    // SAFETY: the page that `initialize` stored, which is never unmapped.
    Some(unsafe { mark.as_ref() })
}

/// Whether a process that had called `cuInit` forked this one.
pub(super) fn is_forked_child() -> bool {
    mark().is_some_and(|mark| mark.load(Ordering::Relaxed) == 0)
}

/// Lets every other call act from now on.
///
/// Without a lock: a fork can happen at any time, and a child of an earlier
/// time can use the driver.
pub(super) fn initialize() -> Outcome {
    if mark().is_some() {
        return Ok(());
    }
    let (access, kind) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
    );
    // SAFETY: a new mapping, wherever there is room.
    let page = unsafe { libc::mmap(null_mut(), PAGE, access, kind, -1, 0) };
    if page == libc::MAP_FAILED {
        return Err(code::OUT_OF_MEMORY);
    }
    // SAFETY: the mapping is ours. The handler stays, since the object is never
    // unloaded, and may run in a child, since it only stores to an atomic.
    let wiped = unsafe {
        libc::madvise(page, PAGE, libc::MADV_WIPEONFORK) == 0
            || libc::pthread_atfork(None, None, Some(wipe)) == 0
    };
    if !wiped {
        // SAFETY: the mapping is ours, and nobody else knows it.
        unsafe { libc::munmap(page, PAGE) };
        return Err(code::OUT_OF_MEMORY);
    }
    let new = page.cast::<AtomicU8>();
    // SAFETY: mapped, zeroed, and known to nobody else yet.
    unsafe { (*new).store(1, Ordering::Relaxed) };
    let won = MARK.compare_exchange(null_mut(), new, Ordering::Release, Ordering::Relaxed);
    if won.is_err() {
        // SAFETY: another thread's page is the mark; nobody knows this one.
        unsafe { libc::munmap(page, PAGE) };
    }
    Ok(())
}

/// An error before `cuInit`.
pub(super) fn check_initialized() -> Outcome {
    mark().map(drop).ok_or(code::NOT_INITIALIZED)
}

extern "C" fn wipe() {
    if let Some(mark) = mark() {
        mark.store(0, Ordering::Relaxed);
    }
}
