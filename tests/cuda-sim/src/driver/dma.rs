//! The engine that moves bytes: the kernel.
//!
//! A device reads memory whatever the program does to it meanwhile: it may
//! have been rewritten, freed or unmapped. A Rust read of such memory would be
//! a data race, or a crash. So nothing here reads or writes it in Rust terms;
//! `process_vm_readv` and `process_vm_writev` on the own process do, and
//! report memory that is gone as an error. The same goes for device memory,
//! which two streams may write at once.
//!
//! Where a sandbox refuses these calls, bytes are copied plainly: the counters
//! stay right, but memory that is gone crashes, and race detectors complain.

use std::sync::atomic::{AtomicBool, Ordering};

/// Memory was not there.
#[derive(Debug)]
pub(super) struct Gone;

#[derive(Clone, Copy)]
enum Direction {
    /// From `far` to `near`.
    Pull,
    /// From `near` to `far`.
    Push,
}

/// Copies `len` bytes from `source`, which may be anything, to `target`.
///
/// # Safety
///
/// `target` is valid for writing `len` bytes, or may be overwritten by DMA.
pub(super) unsafe fn pull(target: usize, source: usize, len: usize) -> Result<(), Gone> {
    // SAFETY: passed on to the caller.
    unsafe { transfer(target, source, len, Direction::Pull) }
}

/// Copies `len` bytes from `source` to `target`, which may be anything.
///
/// # Safety
///
/// `target` may be overwritten by DMA.
pub(super) unsafe fn push(target: usize, source: usize, len: usize) -> Result<(), Gone> {
    // SAFETY: passed on to the caller.
    unsafe { transfer(source, target, len, Direction::Push) }
}

unsafe fn transfer(near: usize, far: usize, len: usize, direction: Direction) -> Result<(), Gone> {
    /// Set once the kernel has refused; it will not change its mind.
    static REFUSED: AtomicBool = AtomicBool::new(false);

    let mut done = 0;
    while done < len {
        if REFUSED.load(Ordering::Relaxed) {
            // SAFETY: passed on to the caller.
            unsafe { plain(near + done, far + done, len - done, direction) };
            return Ok(());
        }
        // SAFETY: passed on to the caller.
        match unsafe { through_the_kernel(near + done, far + done, len - done, direction) } {
            Ok(moved) => done += moved,
            Err(libc::EINTR) => {}
            Err(libc::EPERM | libc::ENOSYS) => REFUSED.store(true, Ordering::Relaxed),
            Err(_) => return Err(Gone),
        }
    }
    Ok(())
}

unsafe fn through_the_kernel(
    near: usize,
    far: usize,
    len: usize,
    direction: Direction,
) -> Result<usize, i32> {
    let near = libc::iovec {
        iov_base: near as *mut libc::c_void,
        iov_len: len,
    };
    let far = libc::iovec {
        iov_base: far as *mut libc::c_void,
        iov_len: len,
    };
    let call = match direction {
        Direction::Pull => libc::process_vm_readv,
        Direction::Push => libc::process_vm_writev,
    };
    // SAFETY: one entry in each vector, as said. The kernel checks both ranges
    // and touches nothing that is not mapped; that the one it writes may be
    // written is for the caller to ensure.
    let moved = unsafe { call(libc::getpid(), &raw const near, 1, &raw const far, 1, 0) };
    match usize::try_from(moved) {
        // No progress and no error: there is nothing to be had there.
        Ok(0) => Err(libc::EFAULT),
        Ok(moved) => Ok(moved),
        Err(_) => Err(std::io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EFAULT)),
    }
}

unsafe fn plain(near: usize, far: usize, len: usize, direction: Direction) {
    let (target, source) = match direction {
        Direction::Pull => (near, far),
        Direction::Push => (far, near),
    };
    // SAFETY: the target by the caller's promise; the source cannot be
    // checked here, which is why this is the last resort.
    unsafe { std::ptr::copy(source as *const u8, target as *mut u8, len) }
}
