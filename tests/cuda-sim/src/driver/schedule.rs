//! Queues, and who may run next. The essay is at the head of the
//! [driver](super).

use super::operation::Action;
use super::settings::Timing;
use super::state::{self, Guard, State};
use super::{Outcome, TALLY, worker};
use crate::{code, counters};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, PoisonError};
use std::time::Instant;

/// The `seq`-th operation of a stream.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Point {
    pub(super) stream: usize,
    pub(super) seq: u64,
}

pub(super) struct Operation {
    pub(super) seq: u64,
    pub(super) action: Action,
    /// Points that must be reached first.
    after: Vec<Point>,
    enqueued_at: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// The default stream that orders itself with all blocking ones.
    Legacy,
    /// A thread's own default stream.
    PerThread,
    Created,
}

pub(super) struct Stream {
    pub(super) context: usize,
    pub(super) role: Role,
    pub(super) blocking: bool,
    pub(super) flags: u32,
    pub(super) priority: i32,
    /// Its handle is no more; what is queued still runs.
    destroyed: bool,
    /// Its context broke once. Whether it is broken, the context knows.
    broken: bool,
    /// The capture it takes part in.
    capture: Option<usize>,
    /// Where others see, without the lock, whether it is quiet.
    quiet: Option<&'static AtomicBool>,
    queue: VecDeque<Operation>,
    /// How many operations were ever enqueued, done and demanded.
    pub(super) enqueued: u64,
    done: u64,
    demanded: u64,
    /// The operation before the head of the queue is being carried out.
    running: bool,
    /// The worker is started with the first operation.
    has_worker: bool,
    /// The worker waits on `work`, and would not see a change by itself.
    parked: bool,
    work: Arc<Condvar>,
    /// How many threads wait on `progress`.
    waiters: usize,
    progress: Arc<Condvar>,
}

/// Whether a queue's head may run.
enum Readiness {
    Ready,
    NotBefore(Instant),
    /// Some call, some other stream or nothing at all will change that.
    Blocked,
}

/// What a worker finds to do.
pub(super) enum Next {
    Run(Operation),
    Park(Arc<Condvar>, Option<Instant>),
    Retire,
}

/// How many handles have a flag, counted from the first; streams beyond are
/// asked about under the lock.
const FLAGS: usize = 1 << 16;

static QUIET: [AtomicBool; FLAGS] = [const { AtomicBool::new(false) }; FLAGS];

fn quiet_flag(handle: usize) -> Option<&'static AtomicBool> {
    QUIET.get(state::handle_number(handle)?)
}

/// Whether the handle is that of a created stream that can be used and takes
/// part in no capture. `false` may mean that nobody knows: the tables do.
///
/// Relaxed: who has seen a call return that changed it, or has made that call,
/// sees the change, and any other thread may be told the one or the other, as
/// with the lock.
pub(super) fn is_quiet(handle: usize) -> bool {
    quiet_flag(handle).is_some_and(|quiet| quiet.load(Ordering::Relaxed))
}

impl Stream {
    pub(super) fn new(context: usize, role: Role, flags: u32, priority: i32) -> Self {
        const NON_BLOCKING: u32 = 1;
        Self {
            context,
            role,
            blocking: flags & NON_BLOCKING == 0,
            flags,
            priority,
            destroyed: false,
            broken: false,
            capture: None,
            quiet: None,
            queue: VecDeque::new(),
            enqueued: 0,
            done: 0,
            demanded: 0,
            running: false,
            has_worker: false,
            parked: false,
            work: Arc::default(),
            waiters: 0,
            progress: Arc::default(),
        }
    }

    /// The same stream, with the handle that it got.
    pub(super) fn known_as(mut self, handle: usize) -> Self {
        self.quiet = quiet_flag(handle);
        self.show_quiet();
        self
    }

    pub(super) fn is_destroyed(&self) -> bool {
        self.destroyed
    }

    pub(super) fn capture(&self) -> Option<usize> {
        self.capture
    }

    pub(super) fn set_capture(&mut self, capture: Option<usize>) {
        self.capture = capture;
        self.show_quiet();
    }

    fn destroy(&mut self) {
        self.destroyed = true;
        self.show_quiet();
    }

    /// After each change of what it depends on, under the lock.
    fn show_quiet(&self) {
        if let Some(quiet) = self.quiet {
            let usable = self.role == Role::Created && !self.destroyed && !self.broken;
            quiet.store(usable && self.capture.is_none(), Ordering::Relaxed);
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.done == self.enqueued
    }
}

impl State {
    /// Puts an operation on a stream, behind what is there and behind `after`.
    pub(super) fn enqueue(
        &mut self,
        id: usize,
        action: Action,
        mut after: Vec<Point>,
    ) -> Outcome<Point> {
        let stream = self.streams.get(&id).ok_or(code::INVALID_HANDLE)?;
        self.check_unbroken(stream.context)?;
        self.implicit_order(id, &mut after);
        let stream = self.streams.get_mut(&id).ok_or(code::INVALID_HANDLE)?;
        if !stream.has_worker {
            worker::start(id).map_err(|_| code::OUT_OF_MEMORY)?;
            stream.has_worker = true;
        }
        stream.enqueued += 1;
        let seq = stream.enqueued;
        stream.queue.push_back(Operation {
            seq,
            action,
            after,
            enqueued_at: Instant::now(),
        });
        counters::add(&TALLY.pending_operations, 1);
        self.nudge(id);
        Ok(Point { stream: id, seq })
    }

    /// The order between a context's legacy stream and its blocking streams.
    fn implicit_order(&self, id: usize, after: &mut Vec<Point>) {
        let Some(stream) = self.streams.get(&id).filter(|stream| stream.blocking) else {
            return;
        };
        let legacy = stream.role == Role::Legacy;
        if !legacy {
            let legacy = self.contexts.get(&stream.context).map(|it| it.legacy);
            if let Some(other) = legacy.and_then(|id| self.streams.get_key_value(&id)) {
                after.extend(last_point(other));
            }
            return;
        }
        let others = self
            .streams
            .iter()
            .filter(|(other, it)| **other != id && it.blocking && it.context == stream.context);
        after.extend(others.filter_map(last_point));
    }

    pub(super) fn is_reached(&self, point: Point) -> bool {
        // A stream leaves the table when all it had is done.
        self.streams
            .get(&point.stream)
            .is_none_or(|stream| stream.done >= point.seq)
    }

    /// The point that is reached when all of a stream's work is done.
    pub(super) fn end_of(&self, id: usize) -> Point {
        Point {
            stream: id,
            seq: self.streams.get(&id).map_or(0, |stream| stream.enqueued),
        }
    }

    /// Asks for everything up to these points, and for what that needs.
    pub(super) fn demand(&mut self, points: &[Point]) {
        for stream in self.mark_demanded(points) {
            self.nudge(stream);
        }
    }

    /// Marks what is asked for. Returns the streams that may move now, whose
    /// workers nobody has told.
    fn mark_demanded(&mut self, points: &[Point]) -> Vec<usize> {
        let mut moved = Vec::new();
        let mut wanted = points.to_vec();
        while let Some(point) = wanted.pop() {
            let Some(stream) = self.streams.get_mut(&point.stream) else {
                continue;
            };
            if stream.demanded >= point.seq {
                continue;
            }
            let old = std::mem::replace(&mut stream.demanded, point.seq);
            for operation in &stream.queue {
                if operation.seq > old && operation.seq <= point.seq {
                    wanted.extend(&operation.after);
                }
            }
            moved.push(point.stream);
        }
        moved
    }

    /// The stream whose head must run for this point to be reached, if it may
    /// run here and now.
    fn helpable(&self, point: Point) -> Option<usize> {
        let mut id = point.stream;
        // Dependencies lead into the past, so this ends.
        loop {
            let stream = self.streams.get(&id)?;
            if stream.running {
                return None;
            }
            let head = stream.queue.front()?;
            match head.after.iter().find(|point| !self.is_reached(**point)) {
                Some(point) => id = point.stream,
                None => {
                    let ready = matches!(self.readiness(id, stream), Readiness::Ready);
                    // The program's functions run on a thread of the driver's.
                    let ours = !matches!(head.action, Action::Call(_));
                    return (ready && ours).then_some(id);
                }
            }
        }
    }

    /// Takes the head of a queue to carry it out.
    fn take(&mut self, id: usize) -> Option<Operation> {
        let stream = self.streams.get_mut(&id)?;
        let operation = stream.queue.pop_front()?;
        stream.running = true;
        if operation.action.is_copy_beyond(stream.context) {
            counters::add(&TALLY.foreign_context_copies, 1);
        }
        Some(operation)
    }

    fn readiness(&self, id: usize, stream: &Stream) -> Readiness {
        let Some(head) = stream.queue.front() else {
            return Readiness::Blocked;
        };
        if stream.running {
            return Readiness::Blocked;
        }
        if !head.after.iter().all(|point| self.is_reached(*point)) {
            return Readiness::Blocked;
        }
        if self.drains > 0 {
            return Readiness::Ready;
        }
        let mut holds = self.holds.values();
        if holds.any(|held| held.is_none_or(|held| held == id)) {
            return Readiness::Blocked;
        }
        match self.settings.timing {
            Timing::Immediate => Readiness::Ready,
            Timing::UntilWaited if head.seq <= stream.demanded => Readiness::Ready,
            Timing::UntilWaited => Readiness::Blocked,
            Timing::Delay(delay) => {
                let due = head.enqueued_at + delay;
                if due <= Instant::now() {
                    Readiness::Ready
                } else {
                    Readiness::NotBefore(due)
                }
            }
        }
    }

    /// Wakes a parked worker that has something to do.
    fn nudge(&mut self, id: usize) {
        let Some(stream) = self.streams.get(&id) else {
            return;
        };
        let retire = stream.destroyed && stream.is_idle();
        if stream.parked && (retire || !matches!(self.readiness(id, stream), Readiness::Blocked)) {
            let work = stream.work.clone();
            if let Some(stream) = self.streams.get_mut(&id) {
                stream.parked = false;
            }
            work.notify_one();
        }
    }

    /// Wakes every worker that has something to do, after a change that
    /// concerns all of them.
    pub(super) fn nudge_all(&mut self) {
        let ids: Vec<usize> = self.streams.keys().copied().collect();
        for id in ids {
            self.nudge(id);
        }
    }

    /// What the worker of a stream does next.
    pub(super) fn next(&mut self, id: usize) -> Next {
        let Some(stream) = self.streams.get(&id) else {
            return Next::Retire;
        };
        if stream.destroyed && stream.is_idle() {
            self.streams.remove(&id);
            return Next::Retire;
        }
        let until = match self.readiness(id, stream) {
            Readiness::Ready => match self.take(id) {
                Some(operation) => return Next::Run(operation),
                None => None,
            },
            Readiness::NotBefore(due) => Some(due),
            Readiness::Blocked => None,
        };
        match self.streams.get_mut(&id) {
            None => Next::Retire,
            Some(stream) => {
                stream.parked = true;
                Next::Park(stream.work.clone(), until)
            }
        }
    }

    /// Notes that the operation which ran is done.
    pub(super) fn finish(&mut self, id: usize) {
        counters::take(&TALLY.pending_operations, 1);
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.running = false;
            self.advance(id);
        }
    }

    /// Drops what is queued on a stream whose context broke. An operation that
    /// is being carried out ends by itself.
    pub(super) fn break_stream(&mut self, id: usize) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        stream.broken = true;
        stream.show_quiet();
        let dropped = std::mem::take(&mut stream.queue).len() as u64;
        counters::take(&TALLY.pending_operations, dropped);
        counters::add(&TALLY.dropped_operations, dropped);
        if !stream.running {
            self.advance(id);
            self.nudge(id);
        }
    }

    /// Notes how far a stream got, and wakes whoever waited for that.
    fn advance(&mut self, id: usize) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        stream.done = stream.enqueued - stream.queue.len() as u64;
        if stream.waiters > 0 {
            stream.progress.notify_all();
        }
        let dependents: Vec<usize> = self
            .streams
            .iter()
            .filter(|(_, it)| it.parked)
            .filter(|(_, it)| it.queue.front().is_some_and(|head| !head.after.is_empty()))
            .map(|(id, _)| *id)
            .collect();
        for dependent in dependents {
            self.nudge(dependent);
        }
    }

    /// Marks a stream's handle as gone. What is queued runs when it may.
    pub(super) fn retire_stream(&mut self, id: usize) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        stream.destroy();
        if stream.role == Role::Created {
            counters::take(&TALLY.live_streams, 1);
        }
        if stream.has_worker {
            self.nudge(id);
        } else {
            self.streams.remove(&id);
        }
    }

    pub(super) fn unpark(&mut self, id: usize) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.parked = false;
        }
    }
}

fn last_point((id, stream): (&usize, &Stream)) -> Option<Point> {
    (!stream.is_idle()).then_some(Point {
        stream: *id,
        seq: stream.enqueued,
    })
}

/// Demands the points and blocks until they are reached: an error if a context
/// that they lie in is broken then, so that they will never be.
pub(super) fn wait(state: Guard, points: &[Point]) -> Outcome<Guard> {
    let streams = points.iter().filter_map(|it| state.streams.get(&it.stream));
    let contexts: Vec<usize> = streams.map(|it| it.context).collect();
    let state = settle(state, points);
    for context in contexts {
        state.check_unbroken(context)?;
    }
    Ok(state)
}

/// As [`wait`], but operations that were dropped are as good as done.
///
/// Whoever waits carries out what it waits for, as far as it may run at once:
/// waking a worker and being woken by it costs far more than a small copy.
pub(super) fn settle(mut state: Guard, points: &[Point]) -> Guard {
    let mut touched = state.mark_demanded(points);
    for point in points {
        while !state.is_reached(*point) {
            let helped = state.helpable(*point);
            match helped.and_then(|id| Some((id, state.take(id)?))) {
                Some((id, operation)) => {
                    state = worker::carry_out(state, id, operation);
                    touched.push(id);
                }
                None => state = sleep(state, *point),
            }
        }
    }
    // What else may run now is for the workers.
    for id in touched {
        state.nudge(id);
    }
    state
}

/// Leaves the point to the workers until its stream has made some progress.
fn sleep(mut state: Guard, point: Point) -> Guard {
    state.nudge_all();
    let Some(stream) = state.streams.get_mut(&point.stream) else {
        return state;
    };
    stream.waiters += 1;
    let progress = stream.progress.clone();
    state = progress.wait(state).unwrap_or_else(PoisonError::into_inner);
    if let Some(stream) = state.streams.get_mut(&point.stream) {
        stream.waiters -= 1;
    }
    state
}
