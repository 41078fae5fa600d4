//! Stream capture and graphs.
//!
//! While a stream captures, nothing that is put on it runs: it becomes a node
//! of a graph. What a node keeps of a host-to-device copy is the *address* of
//! the source, page-locked or not, and every launch reads it anew.
//!
//! A capture spreads from stream to stream through events, and all streams
//! must be joined again before it ends. Who is joined is told by clocks: each
//! stream counts what it captured, and knows up to where it is behind the
//! others. The nodes in the order of their capture are one legal order of the
//! graph, and a launch uses that order.

use super::operation::Action;
use super::schedule::{Point, Role};
use super::state::State;
use super::user_object::Reference;
use super::{Outcome, TALLY, this_thread};
use crate::{code, counters};
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;

pub(super) const GLOBAL: u32 = 0;
pub(super) const RELAXED: u32 = 2;

/// For each stream, how much of what it captured lies behind.
pub(super) type Clock = HashMap<usize, u64>;

pub(super) struct Capture {
    mode: u32,
    thread: u64,
    origin: usize,
    pub(super) invalid: bool,
    /// The handle of the graph to be.
    pub(super) graph: usize,
    nodes: Vec<Action>,
    references: Vec<Reference>,
    clocks: HashMap<usize, Clock>,
}

/// A graph, or an executable one: a copy of a graph as it was, references and
/// all.
#[derive(Clone)]
pub(super) struct Graph {
    nodes: Arc<Vec<Action>>,
    references: Vec<Reference>,
}

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

/// Sets the calling thread's mode and returns the one before.
pub(super) fn exchange_mode(mode: u32) -> u32 {
    MODE.with(|current| current.replace(mode))
}

impl State {
    pub(super) fn begin_capture(&mut self, id: usize, mode: u32) -> Outcome {
        if mode > RELAXED {
            return Err(code::INVALID_VALUE);
        }
        let stream = self.streams.get(&id).ok_or(code::INVALID_HANDLE)?;
        if stream.role == Role::Legacy {
            return Err(code::STREAM_CAPTURE_UNSUPPORTED);
        }
        if stream.capture().is_some() {
            return Err(code::ILLEGAL_STATE);
        }
        let capture = self.new_handle();
        let graph = self.new_handle();
        let clocks = HashMap::from([(id, Clock::from([(id, 0)]))]);
        self.captures.insert(
            capture,
            Capture {
                mode,
                thread: this_thread(),
                origin: id,
                invalid: false,
                graph,
                nodes: Vec::new(),
                references: Vec::new(),
                clocks,
            },
        );
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.set_capture(Some(capture));
        }
        Ok(())
    }

    pub(super) fn end_capture(&mut self, id: usize) -> Outcome<usize> {
        let stream = self.streams.get(&id).ok_or(code::INVALID_HANDLE)?;
        let handle = stream.capture().ok_or(code::ILLEGAL_STATE)?;
        let capture = self.captures.get(&handle).ok_or(code::ILLEGAL_STATE)?;
        if capture.origin != id {
            return Err(code::STREAM_CAPTURE_UNMATCHED);
        }
        if capture.mode != RELAXED && capture.thread != this_thread() {
            return Err(code::STREAM_CAPTURE_WRONG_THREAD);
        }
        let Some(capture) = self.forget_capture(handle) else {
            return Err(code::ILLEGAL_STATE);
        };
        if capture.invalid {
            return Err(code::STREAM_CAPTURE_INVALIDATED);
        }
        let joined = |stream: &usize, clock: &Clock| {
            capture.clocks[&id].get(stream).unwrap_or(&0) >= clock.get(stream).unwrap_or(&0)
        };
        if !capture.clocks.iter().all(|(it, clock)| joined(it, clock)) {
            return Err(code::STREAM_CAPTURE_UNJOINED);
        }
        let graph = Graph {
            nodes: Arc::new(capture.nodes),
            references: capture.references,
        };
        self.graphs.insert(capture.graph, graph);
        Ok(capture.graph)
    }

    fn forget_capture(&mut self, handle: usize) -> Option<Capture> {
        let capture = self.captures.remove(&handle)?;
        for stream in capture.clocks.keys() {
            if let Some(stream) = self.streams.get_mut(stream) {
                stream.set_capture(None);
            }
        }
        Some(capture)
    }

    /// Ends all captures, without graphs.
    pub(super) fn abandon_captures(&mut self) {
        let captures: Vec<usize> = self.captures.keys().copied().collect();
        for capture in captures {
            self.forget_capture(capture);
        }
    }

    pub(super) fn invalidate(&mut self, capture: usize) {
        if let Some(capture) = self.captures.get_mut(&capture) {
            capture.spoil();
        }
    }

    /// A stream that captures is destroyed: its capture cannot be ended well,
    /// and without the stream that began it, not at all.
    pub(super) fn leave_capture(&mut self, id: usize) {
        let Some(capture) = self.streams.get(&id).and_then(|it| it.capture()) else {
            return;
        };
        self.invalidate(capture);
        if self
            .captures
            .get(&capture)
            .is_some_and(|it| it.origin == id)
        {
            self.forget_capture(capture);
        }
    }

    /// Puts an operation on a stream, or into its capture: then no point.
    pub(super) fn submit(&mut self, id: usize, action: Action) -> Outcome<Option<Point>> {
        self.submit_after(id, action, Vec::new())
    }

    pub(super) fn submit_after(
        &mut self,
        id: usize,
        action: Action,
        after: Vec<Point>,
    ) -> Outcome<Option<Point>> {
        self.check_implicit(id)?;
        let Some(handle) = self.streams.get(&id).and_then(|stream| stream.capture()) else {
            return self.enqueue(id, action, after).map(Some);
        };
        let capture = self.captures.get_mut(&handle).ok_or(code::ILLEGAL_STATE)?;
        if capture.invalid {
            return Err(code::STREAM_CAPTURE_INVALIDATED);
        }
        capture.nodes.push(action);
        capture.advance(id);
        Ok(None)
    }

    /// Work on the legacy stream would wait for blocking streams, which a
    /// capture on one of those cannot allow.
    pub(super) fn check_implicit(&mut self, id: usize) -> Outcome {
        match self.implicit_capture(id) {
            None => Ok(()),
            Some(capture) => {
                self.invalidate(capture);
                Err(code::STREAM_CAPTURE_IMPLICIT)
            }
        }
    }

    /// If the stream is the legacy one, a capture of a blocking stream that it
    /// would have to wait for.
    pub(super) fn implicit_capture(&self, id: usize) -> Option<usize> {
        if self.captures.is_empty() {
            return None;
        }
        let legacy = self.streams.get(&id).filter(|it| it.role == Role::Legacy)?;
        self.streams
            .values()
            .filter(|it| it.context == legacy.context && it.blocking)
            .find_map(|it| it.capture())
    }

    /// The references that a graph owns, or one that is being captured. The
    /// handle of a spoilt capture's graph "may be invalidated before end of
    /// capture" (`cuStreamGetCaptureInfo`), and here it is.
    pub(super) fn references(&mut self, graph: usize) -> Outcome<&mut Vec<Reference>> {
        let capture = self.captures.values_mut();
        let mut capture = capture.filter(|it| it.graph == graph && !it.invalid);
        match (self.graphs.get_mut(&graph), capture.next()) {
            (Some(graph), _) => Ok(&mut graph.references),
            (None, Some(capture)) => Ok(&mut capture.references),
            (None, None) => Err(code::INVALID_VALUE),
        }
    }

    /// The calling thread does what could disturb a capture.
    pub(super) fn potentially_unsafe(&mut self) -> Outcome {
        let mode = MODE.with(Cell::get);
        if self.captures.is_empty() || mode == RELAXED {
            return Ok(());
        }
        let thread = this_thread();
        let mut disturbed = false;
        for capture in self.captures.values_mut() {
            let mine = capture.thread == thread && capture.mode != RELAXED;
            if mine || (mode == GLOBAL && capture.mode == GLOBAL) {
                capture.spoil();
                disturbed = true;
            }
        }
        if disturbed {
            Err(code::STREAM_CAPTURE_UNSUPPORTED)
        } else {
            Ok(())
        }
    }

    /// The clock of a capturing stream, for the record of an event.
    pub(super) fn clock(&self, id: usize) -> Outcome<Option<(usize, Clock)>> {
        let Some(handle) = self.streams.get(&id).and_then(|stream| stream.capture()) else {
            return Ok(None);
        };
        let capture = self.captures.get(&handle).ok_or(code::ILLEGAL_STATE)?;
        if capture.invalid {
            return Err(code::STREAM_CAPTURE_INVALIDATED);
        }
        Ok(Some((handle, capture.clocks[&id].clone())))
    }

    /// A stream waits for an event of a capture: it joins, or falls in step.
    pub(super) fn wait_captured(&mut self, id: usize, event: usize, clock: &Clock) -> Outcome {
        let mine = self.streams.get(&id).ok_or(code::INVALID_HANDLE)?.capture();
        if let Some(mine) = mine.filter(|mine| *mine != event) {
            self.invalidate(mine);
            self.invalidate(event);
            return Err(code::STREAM_CAPTURE_MERGE);
        }
        let capture = self.captures.get_mut(&event).ok_or(code::CAPTURED_EVENT)?;
        if capture.invalid {
            return Err(code::STREAM_CAPTURE_INVALIDATED);
        }
        let own = capture.clocks.entry(id).or_default();
        for (stream, count) in clock {
            let known = own.entry(*stream).or_default();
            *known = (*known).max(*count);
        }
        if mine.is_none() {
            // A stream that joined must be joined again, even without work.
            capture.advance(id);
            if let Some(stream) = self.streams.get_mut(&id) {
                stream.set_capture(Some(event));
            }
        }
        Ok(())
    }

    /// Puts a graph's nodes on a stream, or into its capture.
    pub(super) fn launch(&mut self, graph: &Graph, id: usize) -> Outcome {
        if graph.nodes.is_empty() {
            self.submit(id, Action::Marker)?;
        }
        for node in graph.nodes.iter() {
            self.submit(id, node.clone())?;
        }
        let references = graph.references.clone();
        let capture = self.streams.get(&id).and_then(|stream| stream.capture());
        match capture.and_then(|it| self.captures.get_mut(&it)) {
            Some(capture) => capture.references.extend(references),
            None if references.is_empty() => {}
            None => drop(self.submit(id, Action::EndOfLaunch(references))?),
        }
        counters::add(&TALLY.graph_launches, 1);
        Ok(())
    }
}

impl Graph {
    /// How many nodes it has.
    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }
}

impl Capture {
    fn spoil(&mut self) {
        self.invalid = true;
        self.references.clear();
    }

    fn advance(&mut self, stream: usize) {
        let clock = self.clocks.entry(stream).or_default();
        *clock.entry(stream).or_default() += 1;
    }
}
