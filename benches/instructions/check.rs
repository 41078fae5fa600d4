//! Counts each case, and holds the count against its limit.

use std::collections::HashMap;
use std::env;
use std::io;
use std::process::{Command, ExitCode};

use clap::{Parser, ValueEnum};
use comfy_table::{CellAlignment, Table, presets};

use crate::cases::{CASES, Case};
use crate::child::{Asked, Child, Mistake};
use crate::{callgrind, ptrace};

/// By so much may the two ways to count differ, for a call.
const AGREEMENT: f64 = 1.0;

/// Counts the instructions of lookups, and fails if there are more than a
/// limit.
#[derive(Debug, Parser)]
#[command(
    name = "instructions",
    after_help = "Exit code: 0 if no limit is exceeded (with --twin: if all are), 1 if not or if \
                  nothing could be counted, 2 for bad arguments."
)]
struct Args {
    /// Count only the cases whose names contain this.
    filter: Option<String>,

    /// Hold the same limits against a slower lookup, to see them exceeded.
    #[arg(long)]
    twin: bool,

    /// Ignored: cargo passes it.
    #[arg(long, hide = true)]
    bench: bool,

    /// Ignored: cargo passes it.
    #[arg(long, hide = true)]
    test: bool,

    /// Ignored: the run is short, and a shorter one would count the same.
    #[arg(long, hide = true)]
    quick: bool,

    /// Be the process that is counted, for the case of this index.
    #[arg(long, hide = true, requires = "asked")]
    child: Option<usize>,

    #[arg(long, hide = true, value_enum)]
    asked: Option<Asked>,

    /// How often the child asks for all of its slices.
    #[arg(long, hide = true, default_value_t = 1)]
    rounds: usize,

    /// Whether the child is stepped through.
    #[arg(long, hide = true)]
    stepped: bool,
}

pub(crate) fn main() -> ExitCode {
    let args = Args::parse();
    let done = match (args.child, args.asked) {
        (Some(index), Some(asked)) => be_counted(&args, index, asked).map_err(Failure::Child),
        _ => check(&args),
    };
    done.unwrap_or_else(|failure| {
        eprintln!("error: {failure}");
        ExitCode::FAILURE
    })
}

fn be_counted(args: &Args, index: usize, asked: Asked) -> Result<ExitCode, Mistake> {
    let case = CASES.get(index).ok_or(Mistake::Case(index))?;
    let arena = Child::arena(case);
    let child = Child::new(case, asked, &arena)?;
    if args.stepped {
        return Ok(ptrace::between_stops(|| child.run(args.rounds)));
    }
    child.run(args.rounds);
    Ok(ExitCode::SUCCESS)
}

/// What stops the whole run.
enum Failure {
    Child(Mistake),
    NoProgram(io::Error),
    Ptrace(ptrace::Error),
    Callgrind(callgrind::Error),
    /// There is no way to count.
    NoWay(ptrace::Error),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Child(mistake) => write!(f, "{mistake}"),
            Self::NoProgram(error) => write!(f, "this program does not find itself: {error}"),
            Self::Ptrace(error) => write!(f, "{error}"),
            Self::Callgrind(error) => write!(f, "{error}"),
            Self::NoWay(error) => write!(
                f,
                "instructions cannot be counted here: {error}, and valgrind is not installed.\n\
                 Let a process trace its child (in a container: `--cap-add=SYS_PTRACE`, or a \
                 seccomp profile that allows `ptrace`; not under a debugger or `strace -f`), or \
                 install valgrind (on Debian or Ubuntu: `apt-get install valgrind`)."
            ),
        }
    }
}

fn check(args: &Args) -> Result<ExitCode, Failure> {
    if cfg!(debug_assertions) {
        println!(
            "the limits are for optimised code: nothing checked \
             (`cargo bench --bench instructions` does)"
        );
        return Ok(ExitCode::SUCCESS);
    }
    let wanted: Vec<(usize, &Case)> = CASES
        .iter()
        .enumerate()
        .filter(|(_, case)| {
            let filter = args.filter.as_deref().unwrap_or_default();
            case.to_string().contains(filter)
        })
        .collect();
    if wanted.is_empty() {
        println!("no case has that in its name: nothing checked");
        return Ok(ExitCode::SUCCESS);
    }
    let asked = if args.twin {
        Asked::Twin
    } else {
        Asked::Lookup
    };

    let (counts, by_callgrind) = count(&wanted, asked)?;
    let rows: Vec<Row> = wanted
        .iter()
        .enumerate()
        .map(|(k, (_, case))| Row {
            case,
            counted: counts[k],
            callgrind: by_callgrind.as_ref().map(|counts| counts[k]),
        })
        .collect();
    println!("{}", table(&rows));
    Ok(if args.twin {
        judge_twin(&rows)
    } else {
        judge(&rows)
    })
}

/// Counts in each way that there is. The second counts are callgrind's, if there
/// are two.
fn count(wanted: &[(usize, &Case)], asked: Asked) -> Result<(Vec<f64>, Option<Vec<f64>>), Failure> {
    let stepped = per_call(wanted, asked, 1, |command| {
        command.arg("--stepped");
        ptrace::count(command).map_err(Failure::Ptrace)
    });
    let with_callgrind = callgrind::is_installed();
    match stepped {
        // That the ways agree is seen without `--twin`.
        Ok(counts) if asked == Asked::Twin => Ok((counts, None)),
        Ok(counts) if with_callgrind => Ok((counts, Some(under_callgrind(wanted, asked)?))),
        Ok(counts) => {
            println!(
                "not cross-checked, as valgrind is not installed \
                 (on Debian or Ubuntu: `apt-get install valgrind`)"
            );
            Ok((counts, None))
        }
        Err(Failure::Ptrace(error @ ptrace::Error::Refused(_))) if with_callgrind => {
            println!("counted by callgrind alone: {error}");
            Ok((under_callgrind(wanted, asked)?, None))
        }
        Err(Failure::Ptrace(error @ ptrace::Error::Refused(_))) => Err(Failure::NoWay(error)),
        Err(failure) => Err(failure),
    }
}

/// So many calls that the start of the process does not matter.
fn under_callgrind(wanted: &[(usize, &Case)], asked: Asked) -> Result<Vec<f64>, Failure> {
    per_call(wanted, asked, 64_000, |command| {
        callgrind::count(command).map_err(Failure::Callgrind)
    })
}

/// What a call takes in each case, beyond one that returns at once: the mean of
/// at least `calls` calls, which ask for each slice as often.
fn per_call(
    wanted: &[(usize, &Case)],
    asked: Asked,
    calls: usize,
    count: impl Fn(&mut Command) -> Result<u64, Failure>,
) -> Result<Vec<f64>, Failure> {
    let program = env::current_exe().map_err(Failure::NoProgram)?;
    let count = |index: usize, rounds: usize, asked: Asked| {
        let mut command = Command::new(&program);
        if let Some(asked) = asked.to_possible_value() {
            command.args(["--asked", asked.get_name()]);
        }
        command.args(["--child", &index.to_string()]);
        command.args(["--rounds", &rounds.to_string()]);
        count(&mut command)
    };
    // The loop is the same for all, and so is the start for as many regions.
    let mut loops: HashMap<usize, u64> = HashMap::new();
    let mut counts = Vec::new();
    for &(index, case) in wanted {
        let rounds = calls.div_ceil(case.slices());
        let of_loop = match loops.get(&case.regions) {
            Some(&known) => known,
            None => count(index, rounds, Asked::Nothing)?,
        };
        loops.insert(case.regions, of_loop);
        let more = count(index, rounds, asked)? as f64 - of_loop as f64;
        counts.push(more / (rounds * case.slices()) as f64);
    }
    Ok(counts)
}

struct Row<'a> {
    case: &'a Case,
    counted: f64,
    callgrind: Option<f64>,
}

impl Row<'_> {
    fn exceeds(&self) -> bool {
        self.counted > self.case.limit() as f64
    }

    fn has_shrunk(&self) -> bool {
        self.counted.ceil() < self.case.counted as f64
    }

    fn disagrees(&self) -> bool {
        self.callgrind
            .is_some_and(|count| (count - self.counted).abs() > AGREEMENT)
    }
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(["lookup", "instructions", "callgrind", "in its row", "limit"]);
    for row in rows {
        table.add_row([
            row.case.to_string(),
            number(row.counted),
            row.callgrind.map_or_else(|| "-".into(), number),
            row.case.counted.to_string(),
            row.case.limit().to_string(),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// With decimals only where there are any.
fn number(count: f64) -> String {
    let text = format!("{count:.2}");
    text.strip_suffix(".00").unwrap_or(&text).to_owned()
}

fn judge(rows: &[Row]) -> ExitCode {
    let mut passed = true;
    for row in rows.iter().filter(|row| row.exceeds()) {
        passed = false;
        eprintln!(
            "error: {}: {} instructions, and the limit is {}",
            row.case,
            number(row.counted),
            row.case.limit()
        );
    }
    if !passed {
        eprintln!(
            "\
A lookup on the hot path has grown. To see its instructions:
    cargo rustc --profile bench --bench instructions -- --emit asm
and look for the label with `child9is_pinned` or `child9residency` in the file
target/release/deps/instructions-*.s.
If the growth is deserved, put the new count into the case's row in benches/instructions/cases.rs,
and say in the commit what it buys."
        );
    }
    for row in rows.iter().filter(|row| row.disagrees()) {
        passed = false;
        eprintln!(
            "error: {}: {} instructions when stepped through, but {} under callgrind: one of the \
             two is wrong, or the lookup does not always take the same way",
            row.case,
            number(row.counted),
            row.callgrind.map_or_else(String::new, number)
        );
    }
    for row in rows.iter().filter(|row| row.has_shrunk()) {
        println!(
            "{}: fewer than its row says. Put {} there, or it may grow back unnoticed",
            row.case,
            row.counted.ceil()
        );
    }
    if passed {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn judge_twin(rows: &[Row]) -> ExitCode {
    let mut passed = true;
    for row in rows.iter().filter(|row| !row.exceeds()) {
        passed = false;
        eprintln!(
            "error: {}: the slower lookup takes {} instructions, and the limit of {} lets it pass",
            row.case,
            number(row.counted),
            row.case.limit()
        );
    }
    if passed {
        println!("all limits exceeded, as they have to be with --twin");
        return ExitCode::SUCCESS;
    }
    ExitCode::FAILURE
}
