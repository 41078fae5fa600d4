//! Contexts, the current one of each thread, and the streams they come with.

use super::device::Span;
use super::host::{self, Owner};
use super::schedule::{Role, Stream};
use super::state::{self, Guard, State};
use super::{Outcome, TALLY, this_thread};
use crate::{code, counters};
use std::cell::RefCell;
use std::collections::HashMap;

pub(super) struct Context {
    pub(super) device: usize,
    pub(super) flags: u32,
    /// Cleared when it is destroyed or, for a primary context, released as
    /// often as it was retained. The entry stays, so that its handle is known
    /// for what it was.
    pub(super) active: bool,
    pub(super) primary: bool,
    pub(super) legacy: usize,
    /// What every call returns since the context broke.
    broken: Option<i32>,
    per_thread: HashMap<u64, usize>,
}

/// A device's primary context. Its handle stays the same for good.
#[derive(Default)]
pub(super) struct Primary {
    pub(super) context: Option<usize>,
    pub(super) retained: u32,
}

thread_local! {
    /// This thread's contexts; the last is current.
    static STACK: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The handle of the current context, whatever became of it; 0 if none.
pub(super) fn current_handle() -> usize {
    with_stack(|stack| stack.last().copied()).unwrap_or(0)
}

/// Replaces the current context; 0 removes it.
pub(super) fn set_current(handle: usize) {
    with_stack(|stack| {
        stack.pop();
        if handle != 0 {
            stack.push(handle);
        }
    });
}

pub(super) fn push_current(handle: usize) {
    with_stack(|stack| stack.push(handle));
}

pub(super) fn pop_current() -> Option<usize> {
    with_stack(Vec::pop)
}

fn with_stack<T: Default>(f: impl FnOnce(&mut Vec<usize>) -> T) -> T {
    // A thread that is being torn down has no contexts any more.
    STACK
        .try_with(|stack| f(&mut stack.borrow_mut()))
        .unwrap_or_default()
}

impl State {
    pub(super) fn create_context(&mut self, device: usize, flags: u32, primary: bool) -> usize {
        let handle = self.new_handle();
        let legacy = self.add_stream(Stream::new(handle, Role::Legacy, 0, 0));
        let context = Context {
            device,
            flags,
            active: true,
            primary,
            legacy,
            broken: None,
            per_thread: HashMap::new(),
        };
        self.contexts.insert(handle, context);
        handle
    }

    /// Makes a primary context usable again after its last release.
    pub(super) fn revive(&mut self, handle: usize) {
        if self.contexts.get(&handle).is_none_or(|it| it.active) {
            return;
        }
        let legacy = self.add_stream(Stream::new(handle, Role::Legacy, 0, 0));
        if let Some(context) = self.contexts.get_mut(&handle) {
            context.active = true;
            context.legacy = legacy;
        }
    }

    pub(super) fn add_stream(&mut self, stream: Stream) -> usize {
        let handle = self.new_handle();
        self.streams.insert(handle, stream.known_as(handle));
        handle
    }

    /// The context of a handle that a call was given.
    pub(super) fn context(&self, handle: usize) -> Outcome<&Context> {
        let context = self.contexts.get(&handle).ok_or(code::INVALID_CONTEXT)?;
        if context.active {
            Ok(context)
        } else {
            Err(code::CONTEXT_IS_DESTROYED)
        }
    }

    /// The current context of the calling thread, which must be usable.
    pub(super) fn current(&self) -> Outcome<usize> {
        let handle = current_handle();
        self.context(handle)?;
        self.check_unbroken(handle)?;
        Ok(handle)
    }

    /// The error of a context that broke.
    pub(super) fn check_unbroken(&self, context: usize) -> Outcome {
        match self.contexts.get(&context).and_then(|it| it.broken) {
            Some(code) => Err(code),
            None => Ok(()),
        }
    }

    /// Device memory that a call names.
    pub(super) fn span(&self, address: u64, len: usize) -> Outcome<Span> {
        let span = self.device.span(address, len)?;
        self.check_unbroken(span.memory.context)?;
        Ok(span)
    }

    /// Breaks a context, unless it is broken already. Waits for nothing.
    pub(super) fn break_context(&mut self, handle: usize, code: i32) {
        if let Some(context) = self.contexts.get_mut(&handle) {
            context.broken.get_or_insert(code);
        }
        for stream in self.streams_of(handle) {
            self.leave_capture(stream);
            self.break_stream(stream);
        }
    }

    /// Makes broken contexts usable again.
    pub(super) fn mend_contexts(&mut self) {
        for context in self.contexts.values_mut() {
            context.broken = None;
        }
    }

    /// Who owns what the calling thread allocates or registers now.
    pub(super) fn new_owner(&mut self) -> Outcome<Owner> {
        let context = self.current()?;
        let device = self.context(context)?.device;
        let id = self.new_handle() as u64;
        Ok(Owner {
            context,
            device,
            id,
        })
    }

    /// The stream of a handle: 0 and 1 are the current context's legacy
    /// stream, 2 is the calling thread's own default stream.
    pub(super) fn stream(&mut self, handle: usize) -> Outcome<usize> {
        match handle {
            0 | 1 => Ok(self.context(self.current()?)?.legacy),
            2 => self.per_thread_stream(),
            _ => match self.streams.get(&handle) {
                Some(stream) if stream.role == Role::Created && !stream.is_destroyed() => {
                    self.check_unbroken(stream.context)?;
                    Ok(handle)
                }
                _ => Err(code::INVALID_HANDLE),
            },
        }
    }

    fn per_thread_stream(&mut self) -> Outcome<usize> {
        let context = self.current()?;
        let thread = this_thread();
        if let Some(stream) = self.context(context)?.per_thread.get(&thread) {
            return Ok(*stream);
        }
        let stream = self.add_stream(Stream::new(context, Role::PerThread, 0, 0));
        if let Some(context) = self.contexts.get_mut(&context) {
            context.per_thread.insert(thread, stream);
        }
        Ok(stream)
    }

    pub(super) fn streams_of(&self, context: usize) -> Vec<usize> {
        self.streams
            .iter()
            .filter(|(_, stream)| stream.context == context)
            .map(|(id, _)| *id)
            .collect()
    }
}

/// Breaks the calling thread's current context. Returns whether there is one.
pub(super) fn break_current(code: i32) -> bool {
    let mut state = state::lock();
    let handle = current_handle();
    let found = state.context(handle).is_ok();
    if found {
        state.break_context(handle, code);
    }
    found
}

/// Ends a context and all that belongs to it. Waits for nothing: work that is
/// pending finds its memory dead.
pub(super) fn end_context(mut state: Guard, handle: usize) {
    if let Some(context) = state.contexts.get_mut(&handle) {
        context.active = false;
        context.per_thread.clear();
    }
    for stream in state.streams_of(handle) {
        state.leave_capture(stream);
        if state
            .streams
            .get(&stream)
            .is_some_and(|it| !it.is_destroyed())
        {
            state.retire_stream(stream);
        }
    }
    let before = state.events.len();
    state.events.retain(|_, event| event.context != handle);
    let ended = before - state.events.len();
    counters::take(&TALLY.live_events, ended as u64);
    state.device.remove_context(handle);
    let freed = state.host.end_context(handle);
    drop(state);
    for range in freed {
        host::poison(&range);
    }
}
