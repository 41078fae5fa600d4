//! What lookups cost when others are at the same set: several threads that look
//! up, and a reader beside a writer that publishes.
//!
//! The contestants take turns in many short rounds, so that whatever else the
//! machine does hits all of them alike; each figure is the median of its
//! rounds. Prints tables, and writes what it measured for the report.

#[path = "../rivals/mod.rs"]
#[allow(dead_code, unused_imports, reason = "each bench uses a part")]
mod rivals;
#[path = "../support/mod.rs"]
#[allow(dead_code, unused_imports, reason = "each bench uses a part")]
mod support;

mod lane;
mod machine;
mod publishing;
mod sharing;
mod table;

use std::process::ExitCode;
use std::time::Duration;
use std::{env, fs, io};

use lane::{Lane, changing, fixed};
use rivals::{
    ArcSwapLoad, EmptyLoop, EpochPointer, Floor, LeftRight, MutexTree, OwnReader, PapayaPages,
    ParkingLot, ProcessWide, SeizePointer, SkipList, StdRwLock, Ucx,
};
use support::results::{self, Contention};
use support::workload::{Arena, Workload};

/// A server with that many page-locked buffers.
const REGIONS: usize = 64;

/// How long to measure.
#[derive(Clone, Copy)]
struct Effort {
    rounds: usize,
    /// For one contestant in one setting of one round.
    stint: Duration,
}

impl Effort {
    fn asked_for() -> Self {
        // `cargo bench` passes `--bench`, `cargo test --benches` does not.
        let is_bench = env::args().any(|argument| argument == "--bench");
        let (rounds, stint) = match (is_bench, support::is_quick()) {
            (true, false) => (15, 60),
            (true, true) => (3, 20),
            (false, _) => (1, 1),
        };
        Self {
            rounds,
            stint: Duration::from_millis(stint),
        }
    }
}

fn main() -> ExitCode {
    let effort = Effort::asked_for();
    let arena = Arena::new(REGIONS);
    let workload = arena.workload(REGIONS);
    let lanes = lanes(&workload);

    let sharing = sharing::measure(&lanes, effort);
    println!("{}", table::sharing(&sharing));
    let publishing = publishing::measure(&lanes, effort);
    println!("{}", table::publishing(&publishing));

    let results = Contention {
        machine: machine::this_one(),
        sharing,
        publishing,
    };
    match write(&results) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("the results cannot be written: {error}");
            ExitCode::FAILURE
        }
    }
}

fn lanes<'w>(workload: &'w Workload<'w>) -> Vec<Box<dyn Lane + 'w>> {
    let mut lanes = vec![
        fixed::<EmptyLoop>(workload),
        fixed::<Floor>(workload),
        changing::<ProcessWide>(workload),
        changing::<OwnReader>(workload),
        changing::<StdRwLock>(workload),
        changing::<ParkingLot>(workload),
        changing::<MutexTree>(workload),
        changing::<ArcSwapLoad>(workload),
        changing::<EpochPointer>(workload),
        changing::<SeizePointer>(workload),
        changing::<LeftRight>(workload),
        changing::<PapayaPages>(workload),
        changing::<SkipList>(workload),
    ];
    match Ucx::load(&[]) {
        Ok(_) => lanes.push(changing::<Ucx>(workload)),
        Err(why) => println!("{why}"),
    }
    lanes
}

fn write(results: &Contention) -> io::Result<()> {
    let directory = results::directory();
    fs::create_dir_all(&directory)?;
    let json = serde_json::to_vec_pretty(results)?;
    fs::write(directory.join(results::CONTENTION), json)
}

/// The middle of several rounds: half of them disturbed change nothing.
fn median(mut rounds: Vec<f64>) -> f64 {
    rounds.sort_unstable_by(f64::total_cmp);
    rounds.get(rounds.len() / 2).copied().unwrap_or(f64::NAN)
}
