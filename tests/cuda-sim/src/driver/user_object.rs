//! User objects: a destructor of the program's, and how many references there
//! are to it.
//!
//! What the programming guide says ("CUDA User Objects"), and what is made of
//! it here:
//!
//! - References are owned by the program or by graphs. An instantiated graph
//!   gets a copy of each reference of its source, as it is at that moment.
//! - "When a `cudaGraphExec_t` is destroyed without being synchronized, the
//!   references are retained until the execution is completed." So a launch
//!   holds references of its own, up to its last node and no longer.
//! - A graph that is launched into a capture becomes a child, which owns its
//!   references. Here a capture takes nodes and references over one by one.
//! - The destructor runs on a thread of the driver's, some time later; nothing
//!   waits for it. Here it runs as soon as no [hold](crate::Hold) is in force,
//!   and a drain waits for it: early is the harder time for a program that
//!   lets go of something too soon.
//! - It must not call the driver. Here every call that it makes fails.

use std::cell::Cell;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

/// One reference.
pub(super) type Reference = Arc<UserObject>;

/// When the last reference goes, its destructor is due.
pub(super) struct UserObject(Destructor);

#[derive(Clone, Copy)]
struct Destructor {
    function: unsafe extern "C" fn(*mut c_void),
    data: usize,
}

/// What the program itself has of an object.
pub(super) struct Handle {
    pub(super) object: Weak<UserObject>,
    pub(super) references: Vec<Reference>,
}

impl UserObject {
    /// An error if there is no thread for destructors.
    pub(super) fn new(
        function: unsafe extern "C" fn(*mut c_void),
        data: usize,
    ) -> std::io::Result<Reference> {
        start()?;
        Ok(Arc::new(Self(Destructor { function, data })))
    }
}

impl Drop for UserObject {
    fn drop(&mut self) {
        queue().due.push_back(self.0);
        CHANGED.notify_all();
    }
}

struct Queue {
    due: VecDeque<Destructor>,
    running: bool,
    held: bool,
    /// How many drains are under way.
    drains: u32,
}

/// Locked after the tables, if both are, and never while a destructor runs.
static QUEUE: Mutex<Queue> = Mutex::new(Queue {
    due: VecDeque::new(),
    running: false,
    held: false,
    drains: 0,
});
static CHANGED: Condvar = Condvar::new();

thread_local! {
    static IS_DESTRUCTOR_THREAD: Cell<bool> = const { Cell::new(false) };
}

fn queue() -> MutexGuard<'static, Queue> {
    QUEUE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn sleep(queue: MutexGuard<'static, Queue>) -> MutexGuard<'static, Queue> {
    CHANGED.wait(queue).unwrap_or_else(PoisonError::into_inner)
}

/// Whether the calling thread is the one that must not call the driver.
pub(super) fn is_destructor_thread() -> bool {
    IS_DESTRUCTOR_THREAD.try_with(Cell::get).unwrap_or(false)
}

/// Sets whether destructors wait for the end of a hold.
pub(super) fn set_held(held: bool) {
    queue().held = held;
    CHANGED.notify_all();
}

/// Waits until every destructor that is due has run, held or not.
pub(super) fn drain() {
    let mut queue = queue();
    queue.drains += 1;
    CHANGED.notify_all();
    while queue.running || !queue.due.is_empty() {
        queue = sleep(queue);
    }
    queue.drains -= 1;
}

/// Starts the thread, once.
fn start() -> std::io::Result<()> {
    static STARTED: Mutex<bool> = Mutex::new(false);
    let mut started = STARTED.lock().unwrap_or_else(PoisonError::into_inner);
    if !*started {
        std::thread::Builder::new()
            .name("simulated destructors".into())
            .spawn(work)?;
        *started = true;
    }
    Ok(())
}

fn work() {
    IS_DESTRUCTOR_THREAD.set(true);
    let mut queue = queue();
    loop {
        let may_run = queue.drains > 0 || !queue.held;
        let Some(next) = may_run.then(|| queue.due.pop_front()).flatten() else {
            queue = sleep(queue);
            continue;
        };
        queue.running = true;
        drop(queue);
        // SAFETY: whoever made the object vouched for one call with this
        // pointer, on any thread, once nobody refers to the object.
        unsafe { (next.function)(next.data as *mut c_void) };
        queue = self::queue();
        queue.running = false;
        CHANGED.notify_all();
    }
}
