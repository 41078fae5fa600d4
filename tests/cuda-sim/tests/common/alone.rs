//! What a test can do only in a process of its own.

use libc::{c_int, c_void};
use std::process::Command;
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

/// Runs this test in a process of its own, unless this is that process.
pub(crate) fn in_a_process_of_its_own(name: &str) -> bool {
    const MARK: &str = "CUDA_SIM_TEST_ALONE";

    if std::env::var_os(MARK).is_some() {
        return false;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env(MARK, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    true
}

/// Memory that cannot be accessed, and keeps a thread that tries until it is
/// opened: then it holds zeros. One for a process.
pub(crate) struct Trap;

static PLACE: AtomicUsize = AtomicUsize::new(0);
static ENTERED: [AtomicI32; 2] = [const { AtomicI32::new(0) }; 2];
static OPENED: [AtomicI32; 2] = [const { AtomicI32::new(0) }; 2];
const PAGE: usize = 4096;

impl Trap {
    pub(crate) fn set() -> Self {
        for pipe in [&ENTERED, &OPENED] {
            let mut ends = [0; 2];
            // SAFETY: a place for the two ends.
            assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
            for (place, end) in pipe.iter().zip(ends) {
                place.store(end, Ordering::SeqCst);
            }
        }
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, wherever there is room.
        let page = unsafe { libc::mmap(ptr::null_mut(), PAGE, libc::PROT_NONE, kind, -1, 0) };
        assert_ne!(page, libc::MAP_FAILED);
        PLACE.store(page as usize, Ordering::SeqCst);
        let handler: extern "C" fn(c_int) = wait_in_the_trap;
        // SAFETY: the handler makes only calls that a handler may make.
        unsafe { libc::signal(libc::SIGSEGV, handler as libc::sighandler_t) };
        Self
    }

    pub(crate) fn place(&self) -> *mut usize {
        PLACE.load(Ordering::SeqCst) as *mut usize
    }

    pub(crate) fn wait_until_entered(&self) {
        receive(&ENTERED);
    }

    pub(crate) fn open(&self) {
        send(&OPENED);
    }
}

extern "C" fn wait_in_the_trap(_signal: c_int) {
    send(&ENTERED);
    receive(&OPENED);
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the trap's own page.
    unsafe { libc::mprotect(PLACE.load(Ordering::SeqCst) as *mut c_void, PAGE, access) };
}

fn send(pipe: &[AtomicI32; 2]) {
    // SAFETY: one byte to write.
    unsafe { libc::write(pipe[1].load(Ordering::SeqCst), [1_u8].as_ptr().cast(), 1) };
}

fn receive(pipe: &[AtomicI32; 2]) {
    // SAFETY: a place for one byte.
    unsafe {
        libc::read(
            pipe[0].load(Ordering::SeqCst),
            [0_u8].as_mut_ptr().cast(),
            1,
        )
    };
}
