//! Each scenario over a driver of which one call fails: for each function that
//! this crate calls, and each `n`, its `n`th call, once without acting and
//! once after it has acted.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use cuda_sim::{Counters, DeviceKind, Pageable, code};
use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaSlice, CudaStream};
use pinned_hosts::cuda::{CheckedCopies, CudaError, PinnedBuffer};
use pinned_hosts::live_count;

use crate::common::{Rig, in_child};
use crate::scenarios::{
    BY_CUDARC, LEN, Means, Memory, Notes, ON_DEVICE, PLACES, SCENARIOS, Scenario, leave_context,
};

/// Attribute 113: whether read-only memory can be page-locked.
const READ_ONLY_SUPPORTED: i32 = 113;

/// The driver functions that the crate calls, by itself or through `cudarc`,
/// as its own source lists them.
fn functions() -> Vec<&'static str> {
    let source = include_str!("../../src/cuda/driver.rs");
    let named = |line: &'static str| line.trim().strip_prefix("c\"")?.strip_suffix("\",");
    // What captures into graphs need on top has its own table, in
    // `tests/graphs.rs`.
    let list = source
        .lines()
        .skip_while(|line| !line.contains("const FUNCTIONS"));
    let list = list.take_while(|line| !line.contains("];"));
    list.filter_map(named).collect()
}

/// Frees memory, and says that it has not. The memory stays registered, so what
/// the allocator puts there next is taken for page-locked, by whatever runs in
/// the same process.
const FREES_IN_SECRET: (&str, Failing) = ("cuMemFreeHost", Failing::AfterActing);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failing {
    /// The call does nothing.
    Refusing,
    /// The call does its work, and then returns an error.
    AfterActing,
}

/// A call that fails.
#[derive(Clone, Copy, Debug)]
struct Fault {
    function: &'static str,
    nth: u64,
    failing: Failing,
}

impl Fault {
    fn order(self, rig: &Rig) {
        let Self { function, nth, .. } = self;
        match self.failing {
            Failing::Refusing => rig.sim.fail_nth(function, nth, code::UNKNOWN),
            Failing::AfterActing => rig.sim.fail_nth_after_acting(function, nth, code::UNKNOWN),
        }
    }
}

/// What stays behind of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Left {
    /// Page-locked, as the driver knows it.
    allocations: u64,
    registrations: u64,
    /// Page-locked, as the registry knows it.
    regions: u64,
    events: u64,
}

const NOTHING: Left = Left {
    allocations: 0,
    registrations: 0,
    regions: 0,
    events: 0,
};

impl Left {
    fn since(before: (Counters, usize), after: (Counters, usize)) -> Self {
        let (then, now) = (before.0, after.0);
        Self {
            allocations: now.live_host_allocations - then.live_host_allocations,
            registrations: now.live_registrations - then.live_registrations,
            regions: u64::try_from(after.1 - before.1).unwrap(),
            events: now.live_events - then.live_events,
        }
    }

    /// What may stay behind after `fault`, at most once in a run. Everything
    /// else is given back, whatever fails.
    fn excused(fault: Fault) -> Self {
        use Failing::{AfterActing, Refusing};
        match (fault.function, fault.failing) {
            // An event that cannot be destroyed, or that was made without a
            // word of its name.
            ("cuEventDestroy_v2", Refusing) | ("cuEventCreate", AfterActing) => Self {
                events: 1,
                ..NOTHING
            },
            // Memory that was allocated without a word of its address. Nobody
            // can copy from it.
            ("cuMemHostAlloc", AfterActing) => Self {
                allocations: 1,
                ..NOTHING
            },
            // Memory that the driver will not free, or for which the context
            // to free it in cannot be made current.
            ("cuMemFreeHost" | "cuCtxGetCurrent" | "cuCtxSetCurrent", Refusing)
            | ("cuCtxGetCurrent" | "cuCtxSetCurrent", AfterActing) => Self {
                allocations: 1,
                regions: 1,
                ..NOTHING
            },
            // Memory that was freed, although the driver said that it was not.
            ("cuMemFreeHost", AfterActing) => Self {
                regions: 1,
                ..NOTHING
            },
            _ => NOTHING,
        }
    }

    /// The same of memory that is page-locked where it is. A registration that
    /// is dropped cannot try again; one that is given back can.
    fn excused_where_it_is(fault: Fault) -> Self {
        use Failing::{AfterActing, Refusing};
        match (fault.function, fault.failing) {
            ("cuMemHostUnregister", Refusing)
            | ("cuCtxGetCurrent" | "cuCtxSetCurrent", Refusing | AfterActing) => Self {
                registrations: 1,
                regions: 1,
                ..NOTHING
            },
            // It was unpinned, although the driver said that it was not.
            ("cuMemHostUnregister", AfterActing) => Self {
                regions: 1,
                ..NOTHING
            },
            _ => NOTHING,
        }
    }
}

/// What a run came to.
struct Ran {
    /// Which of the calls that were to fail were made.
    reached: Vec<bool>,
    errors: usize,
    copies: usize,
    left: Left,
}

/// Where the scenarios run: one device, used again for each run.
struct Stage {
    // What uses the driver goes before the rig.
    places: CudaSlice<u8>,
    on_device: CudaSlice<u8>,
    other: Arc<CudaStream>,
    memory: Memory,
    kind: DeviceKind,
    rig: Rig,
}

impl Stage {
    fn new(kind: DeviceKind) -> Self {
        let rig = Rig::with(|sim| {
            sim.set_device(kind);
            sim.set_attribute(READ_ONLY_SUPPORTED, 1);
            if kind != DeviceKind::Discrete {
                sim.set_pageable(Pageable::ReadLate);
            }
        });
        let source = vec![ON_DEVICE; LEN];
        let on_device = rig.stream.clone_htod(&source).unwrap();
        let other = rig.context.new_stream().unwrap();
        // What checked copies keep for a stream is there before the first run.
        let pinned = PinnedBuffer::from_slice(&rig.context, &source).unwrap();
        for stream in [&rig.stream, &other] {
            stream.clone_htod_checked(&pinned[..]).unwrap();
        }
        drop(pinned);
        rig.sim.drain();
        Self {
            places: rig.zeros(PLACES * LEN),
            on_device,
            other,
            memory: Memory::new(&rig.context),
            kind,
            rig,
        }
    }

    /// Runs `scenario` with `faults`, and checks what has to hold whatever
    /// fails.
    fn run(&mut self, scenario: &Scenario, faults: &[Fault]) -> Ran {
        let case = format!("{} on {:?} with {faults:?}", scenario.name, self.kind);
        let Self { rig, memory, .. } = self;
        rig.stream.memset_zeros(&mut self.places).unwrap();
        rig.sim.drain();
        let before = (rig.sim.counters(), live_count());

        let means = Means {
            context: &rig.context,
            stream: &rig.stream,
            other: &self.other,
            on_device: &self.on_device,
        };
        let mut notes = Notes::new(self.places.as_view_mut());
        let calls = |fault: &Fault| rig.sim.calls(fault.function);
        let earlier: Vec<u64> = faults.iter().map(calls).collect();
        leave_context();
        for fault in faults {
            fault.order(rig);
        }
        let running = AssertUnwindSafe(|| (scenario.run)(&means, memory, &mut notes));
        let ended = catch_unwind(running);
        let all = faults.iter().zip(earlier);
        let reached = all.map(|(fault, earlier)| calls(fault) - earlier >= fault.nth);
        let reached = reached.collect();
        rig.sim.clear_faults();
        let ended = ended.unwrap_or_else(|_| panic!("{case}: panicked"));
        let mut seen = notes.seen;
        seen.errors.extend(ended.err());

        let counters = rig.counters();
        let faults_of_copies = |counters: &Counters| {
            [
                counters.torn_transfers,
                counters.dead_reads,
                counters.dead_writes,
                counters.dead_device_accesses,
            ]
        };
        assert_eq!(
            faults_of_copies(&counters),
            faults_of_copies(&before.0),
            "{case}: (torn, dead reads, dead writes, dead device accesses)"
        );
        memory.check(&case);
        // An error that `cudarc` has kept for the next call.
        let _ = rig.context.check_err();
        seen.check(&rig.read_back(&self.places), &case);
        for error in &seen.errors {
            check_error(error, faults, &case);
        }
        Ran {
            reached,
            errors: seen.errors.len(),
            copies: seen.copies(),
            left: Left::since(before, (rig.sim.counters(), live_count())),
        }
    }

    /// Runs each scenario with the first call of `function` failing, with the
    /// second, and so on until there is none, and checks that no more is lost than
    /// has to be.
    fn run_with_each_call_failing(&mut self, function: &'static str, failing: Failing) -> Tally {
        let mut tally = Tally::default();
        for scenario in SCENARIOS {
            for nth in 1.. {
                let fault = Fault {
                    function,
                    nth,
                    failing,
                };
                let ran = self.run(scenario, &[fault]);
                let case = format!("{} on {:?} with {fault:?}", scenario.name, self.kind);
                let excused = [
                    NOTHING,
                    Left::excused(fault),
                    Left::excused_where_it_is(fault),
                ];
                assert!(excused.contains(&ran.left), "{case}: {:?}", ran.left);
                if !ran.reached[0] {
                    assert_eq!((ran.errors, ran.left), (0, NOTHING), "{case}");
                    break;
                }
                // Without which there is no copy.
                if function.starts_with("cuMemcpy") {
                    assert!(ran.errors > 0, "{case}: nobody was told");
                }
                tally.add(Tally {
                    runs: 1,
                    copies: ran.copies,
                    errors: ran.errors,
                });
            }
        }
        tally
    }
}

/// What runs with a failing call came to.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    runs: usize,
    copies: usize,
    errors: usize,
}

impl Tally {
    fn add(&mut self, other: Self) {
        self.runs += other.runs;
        self.copies += other.copies;
        self.errors += other.errors;
    }
}

/// An error says which call failed, and with what. It is the ordered one; or
/// one of a call that wants a current context, if there was none.
fn check_error(error: &CudaError, faults: &[Fault], case: &str) {
    let named = |call: &str| {
        let function = |fault: &Fault| fault.function.trim_end_matches("_v2");
        faults.iter().any(|fault| function(fault) == call)
    };
    let expected = match error {
        CudaError::Stored { source } => source.0 == CUresult::CUDA_ERROR_UNKNOWN,
        CudaError::Driver { call, source } => match source.0 {
            CUresult::CUDA_ERROR_UNKNOWN => BY_CUDARC.contains(call) || named(call),
            CUresult::CUDA_ERROR_INVALID_CONTEXT => {
                named("cuCtxGetCurrent") || named("cuCtxSetCurrent")
            }
            _ => false,
        },
        _ => false,
    };
    assert!(expected, "{case}: {error:?}");
    let text = error.to_string();
    assert!(
        text.contains("CUDA_ERROR_UNKNOWN (999)") || text.contains("INVALID_CONTEXT (201)"),
        "{case}: {text}"
    );
}

const KINDS: [DeviceKind; 2] = [DeviceKind::Discrete, DeviceKind::Coherent];

#[test]
fn whichever_call_fails_nothing_is_torn_and_nothing_is_lost() {
    let functions = functions();
    let mut total = Tally::default();
    let mut reached = vec![0; functions.len()];
    for kind in KINDS {
        let mut stage = Stage::new(kind);
        for (function, reached) in functions.iter().zip(&mut reached) {
            let ways = ways(function).iter();
            for &failing in ways.filter(|&&failing| (*function, failing) != FREES_IN_SECRET) {
                let tally = stage.run_with_each_call_failing(function, failing);
                *reached += tally.runs;
                total.add(tally);
            }
        }
    }
    println!("{total:?}");
    for (function, reached) in functions.into_iter().zip(reached) {
        println!("{reached:6} {function}");
        assert!(reached > 0, "no scenario calls {function}");
    }
    assert!(total.errors > 0);
}

/// During a session, the simulated driver keeps what was freed, so nothing else is
/// put there. A process has one session.
#[test]
fn if_memory_is_freed_in_secret_nothing_is_torn_and_nothing_else_is_lost() {
    let name = "every_call::if_memory_is_freed_in_secret_nothing_is_torn_and_nothing_else_is_lost";
    let (function, failing) = FREES_IN_SECRET;
    for (number, kind) in KINDS.into_iter().enumerate() {
        let number = number.to_string();
        if let Some(output) = in_child(name, |command| {
            command.env("KIND", &number);
        }) {
            assert!(output.status.success(), "{kind:?}: {output:?}");
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(text.contains("1 passed"), "{text}");
        } else if std::env::var("KIND").as_ref() == Ok(&number) {
            let tally = Stage::new(kind).run_with_each_call_failing(function, failing);
            assert!(tally.runs > 0, "{tally:?}");
        }
    }
}

/// Questions that change nothing: whether they were acted on before they
/// failed makes no difference.
const QUESTIONS: [&str; 3] = [
    "cuCtxGetCurrent",
    "cuDeviceGetAttribute",
    "cuStreamIsCapturing",
];

fn ways(function: &str) -> &'static [Failing] {
    match QUESTIONS.contains(&function) {
        true => &[Failing::Refusing],
        false => &[Failing::Refusing, Failing::AfterActing],
    }
}

/// A failure that leads to a wider wait, and then that fails too.
#[test]
fn whichever_wait_fails_as_well_nothing_is_torn_and_nothing_is_lost() {
    let mut runs = 0;
    for kind in KINDS {
        let mut stage = Stage::new(kind);
        for function in ["cuEventRecord", "cuEventSynchronize"] {
            for scenario in SCENARIOS {
                for nth in 1.. {
                    let failing = Failing::Refusing;
                    let faults = [(function, nth), ("cuStreamSynchronize", 1)];
                    let faults = faults.map(|(function, nth)| Fault {
                        function,
                        nth,
                        failing,
                    });
                    let ran = stage.run(scenario, &faults);
                    assert_eq!(ran.left, NOTHING, "{} with {faults:?}", scenario.name);
                    if !ran.reached[0] {
                        break;
                    }
                    runs += usize::from(ran.reached[1]);
                }
            }
        }
    }
    println!("{runs} runs with two failing calls");
    assert!(runs > 0);
}
