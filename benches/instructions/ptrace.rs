//! Counts the instructions of a child by having the CPU stop behind each one.
//!
//! The child stops itself before and after what is to be counted
//! ([`between_stops`]). What it takes to stop is counted too: a count means
//! something only as a difference from another.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::ptr;

/// The C libraries differ in its type.
#[cfg(target_env = "musl")]
type Request = libc::c_int;
#[cfg(not(target_env = "musl"))]
type Request = libc::c_uint;

/// The child's exit code if it may not be traced.
const REFUSED: u8 = 77;

/// Why there is no count.
#[derive(Debug)]
pub(crate) enum Error {
    /// The system does not let a process trace its child.
    Refused(io::Error),
    Spawn(io::Error),
    Wait(io::Error),
    /// The child ended before it was done.
    Ended(ExitStatus),
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Refused(error) => write!(f, "ptrace was refused: {error}"),
            Self::Spawn(error) => write!(f, "the process to count could not be started: {error}"),
            Self::Wait(error) => write!(f, "the process to count was lost: {error}"),
            Self::Ended(status) => write!(f, "the process to count ended too early: {status}"),
        }
    }
}

impl std::error::Error for Error {}

/// In the child: runs `run` between two stops.
pub(crate) fn between_stops(run: impl FnOnce()) -> ExitCode {
    // SAFETY: this request looks at none of the other arguments.
    let traced = unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) };
    if traced == -1 {
        return ExitCode::from(REFUSED);
    }
    stop();
    run();
    stop();
    ExitCode::SUCCESS
}

fn stop() {
    // SAFETY: `raise` takes no pointers, and a stop has no handler to run.
    unsafe { libc::raise(libc::SIGSTOP) };
}

/// How many instructions `command` takes between its two stops.
pub(crate) fn count(command: &mut Command) -> Result<u64, Error> {
    let mut child = Stopping::spawn(command)?;
    let mut signal = child.next_stop()?;
    // Before the first stop, nothing is counted.
    while signal != libc::SIGSTOP {
        child.request(libc::PTRACE_CONT, signal)?;
        signal = child.next_stop()?;
    }
    // The child is not left behind if this process is interrupted.
    child.request(libc::PTRACE_SETOPTIONS, libc::PTRACE_O_EXITKILL)?;
    let mut instructions = 0;
    let mut deliver = 0;
    loop {
        child.request(libc::PTRACE_SINGLESTEP, deliver)?;
        match child.next_stop()? {
            libc::SIGTRAP => {
                instructions += 1;
                deliver = 0;
            }
            libc::SIGSTOP => break,
            // A signal for the child, say as the terminal changes its size. No
            // instruction was run; the child gets the signal.
            other => deliver = other,
        }
    }
    child.request(libc::PTRACE_DETACH, 0)?;
    child.end()?;
    Ok(instructions)
}

/// A child that stops itself. It does not outlive this.
struct Stopping {
    child: Child,
    /// Whether it has ended and was waited for, so that its process id may be
    /// another's by now.
    is_gone: bool,
}

impl Stopping {
    fn spawn(command: &mut Command) -> Result<Self, Error> {
        let child = command.spawn().map_err(Error::Spawn)?;
        let is_gone = false;
        Ok(Self { child, is_gone })
    }

    fn pid(&self) -> libc::pid_t {
        // A process id on Linux is below 2^22.
        self.child.id().cast_signed()
    }

    /// Waits for the child to stop, and says by which signal.
    fn next_stop(&mut self) -> Result<i32, Error> {
        let mut status = 0;
        // SAFETY: `status` is valid for the write.
        while unsafe { libc::waitpid(self.pid(), &raw mut status, 0) } == -1 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(Error::Wait(error));
            }
        }
        if libc::WIFSTOPPED(status) {
            return Ok(libc::WSTOPSIG(status));
        }
        self.is_gone = true;
        let status = ExitStatus::from_raw(status);
        if status.code() == Some(REFUSED.into()) {
            return Err(Error::Refused(io::Error::from_raw_os_error(libc::EPERM)));
        }
        Err(Error::Ended(status))
    }

    /// Waits for the child, which runs on by itself, to end well.
    fn end(&mut self) -> Result<(), Error> {
        let status = self.child.wait().map_err(Error::Wait)?;
        if !status.success() {
            return Err(Error::Ended(status));
        }
        Ok(())
    }

    /// A request about the stopped child, with a signal or an option.
    fn request(&mut self, request: Request, data: i32) -> Result<(), Error> {
        // SAFETY: of the requests made here, none has the kernel read or write
        // memory of this process: `data` is a signal or a set of flags.
        let done = unsafe {
            libc::ptrace(
                request,
                self.pid(),
                ptr::null_mut::<libc::c_void>(),
                libc::c_long::from(data),
            )
        };
        if done == -1 {
            return Err(Error::Refused(io::Error::last_os_error()));
        }
        Ok(())
    }
}

impl Drop for Stopping {
    fn drop(&mut self) {
        if !self.is_gone {
            // An error means that it has ended.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
