//! Runs the models and the faults, each in a process of its own, and prints
//! what they came to.

use std::env;
use std::ffi::OsStr;
use std::io::{self, IsTerminal, Read, Write};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use clap::Parser;
use comfy_table::{Table, presets};

use crate::faults::{FAULTS, Fault, VARIABLE};
use crate::model::{Bound, Model};
use crate::{debt, hand_over, ids, retired, sections, snapshots, threads, writers};

/// Explores the models of pinned-hosts with loom, then puts each known fault
/// in and demands that the models named for it find it.
#[derive(Parser)]
#[command(name = "loom-tests/run")]
struct Arguments {
    /// How often a thread may be interrupted in one execution
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=10))]
    bound: u8,
    /// Explore up to bound 3, and without a bound where that ends
    #[arg(long, conflicts_with = "bound")]
    long: bool,
    /// Only models and faults whose name contains this
    #[arg(long, default_value = "")]
    only: String,
    /// Explore one model in this process, and print its line
    #[arg(long, hide = true)]
    explore: Option<String>,
    /// The bound for that; none if 0
    #[arg(long, hide = true, default_value_t = 2)]
    up_to: usize,
}

fn models() -> impl Iterator<Item = &'static Model> {
    hand_over::MODELS
        .iter()
        .chain(&writers::MODELS)
        .chain(&snapshots::MODELS)
        .chain(&ids::MODELS)
        .chain(&threads::MODELS)
        .chain(&retired::MODELS)
        .chain(&sections::MODELS)
        .chain(&debt::MODELS)
}

pub(crate) fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let passed = match &arguments.explore {
        Some(name) => explore(name, arguments.up_to),
        None => run_all(&arguments),
    };
    match passed {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("loom-tests: {error}");
            ExitCode::from(2)
        }
    }
}

/// Explores one model here, in a process that ends with it.
fn explore(name: &str, up_to: usize) -> Result<bool, String> {
    let model = models()
        .find(|model| model.name == name)
        .ok_or_else(|| format!("there is no model {name}"))?;
    let explored = model.explore(bound_from(up_to));
    println!("{} {}", explored.executions, explored.time.as_millis());
    if explored.unseen.is_empty() {
        return Ok(true);
    }
    eprintln!("{name} never saw: {}", explored.unseen.join(", "));
    Ok(false)
}

fn bound_from(up_to: usize) -> Bound {
    (up_to > 0).then_some(up_to)
}

/// One model to explore, maybe with a fault in.
struct Job {
    model: &'static Model,
    bound: Bound,
    fault: Option<&'static Fault>,
}

/// What a job came to.
struct Outcome {
    passed: bool,
    executions: u64,
    milliseconds: u64,
    /// All that it printed, for when it went wrong.
    output: String,
}

impl Job {
    fn run(&self) -> io::Result<Outcome> {
        let up_to = self.bound.unwrap_or(0).to_string();
        let mut command = Command::new(env::current_exe()?);
        command
            .args(["--explore", self.model.name, "--up-to", &up_to])
            .env_remove(VARIABLE)
            .envs(self.fault.map(|fault| (VARIABLE, fault.name)))
            // A failing execution is one of thousands; its trace helps nobody
            // who has not asked for it.
            .env(
                "RUST_BACKTRACE",
                env::var_os("RUST_BACKTRACE")
                    .as_deref()
                    .unwrap_or(OsStr::new("0")),
            );
        let (status, printed, complaints) = run_within(&mut command, self.limit())?;
        let mut figures = printed.split_whitespace().map_while(|it| it.parse().ok());
        Ok(Outcome {
            passed: status.is_some_and(|status| status.success()),
            executions: figures.next().unwrap_or(0),
            milliseconds: figures.next().unwrap_or(0),
            output: match status {
                Some(status) => format!("{printed}{complaints}({status})"),
                None => format!(
                    "{printed}{complaints}(ended by the runner: not done after {} s)",
                    self.limit().as_secs()
                ),
            },
        })
    }

    /// A model takes seconds, up to a minute, and more on a machine that has
    /// other work; one that waits for itself would hold up all.
    fn limit(&self) -> Duration {
        Duration::from_secs(if self.bound == Some(2) { 600 } else { 1800 })
    }

    /// Whether the outcome is the wanted one: passed; or failed for the
    /// fault's reason.
    fn is_as_wanted(&self, outcome: &Outcome) -> bool {
        match self.fault {
            None => outcome.passed,
            Some(fault) => {
                !outcome.passed
                    && fault
                        .reason
                        .split('|')
                        .any(|reason| outcome.output.contains(reason))
            }
        }
    }

    fn describe(&self) -> String {
        let bound = bound_text(self.bound);
        match self.fault {
            None => format!("{} (bound {bound})", self.model.name),
            Some(fault) => format!("{} with {} (bound {bound})", self.model.name, fault.name),
        }
    }
}

/// Runs `command`, for no longer than `limit`; then its status is `None`.
fn run_within(
    command: &mut Command,
    limit: Duration,
) -> io::Result<(Option<ExitStatus>, String, String)> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    // Read meanwhile, or the child would wait for room in the pipes.
    let stdout = read_all(child.stdout.take());
    let stderr = read_all(child.stderr.take());
    let started = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if started.elapsed() > limit {
            child.kill()?;
            child.wait()?;
            break None;
        }
        thread::sleep(Duration::from_millis(5));
    };
    let text = |reader: JoinHandle<Vec<u8>>| {
        String::from_utf8_lossy(&reader.join().unwrap_or_default()).into_owned()
    };
    Ok((status, text(stdout), text(stderr)))
}

fn read_all(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut all = Vec::new();
        if let Some(mut pipe) = pipe {
            // What cannot be read is missing from a report of a failure.
            let _ = pipe.read_to_end(&mut all);
        }
        all
    })
}

fn bound_text(bound: Bound) -> String {
    bound.map_or_else(|| "none".to_owned(), |bound| bound.to_string())
}

fn run_all(arguments: &Arguments) -> Result<bool, String> {
    let started = Instant::now();
    let bound = Some(usize::from(arguments.bound));
    let selected = |name: &str| name.contains(&arguments.only);

    let mut jobs = Vec::new();
    for model in models().filter(|model| selected(model.name)) {
        let bounds = if arguments.long {
            vec![model.at_most(Some(3)), model.furthest]
        } else {
            vec![model.at_most(bound)]
        };
        for (index, &bound) in bounds.iter().enumerate() {
            if !bounds[..index].contains(&bound) {
                jobs.push(Job {
                    model,
                    bound,
                    fault: None,
                });
            }
        }
    }
    // Faults at the bound of an ordinary run, also in a long one: what is
    // found there is found further on, and the claim is about this bound.
    for fault in FAULTS.iter().filter(|fault| selected(fault.name)) {
        for &name in fault.found_by {
            let model = models()
                .find(|model| model.name == name)
                .ok_or_else(|| format!("fault {} names no model: {name}", fault.name))?;
            jobs.push(Job {
                model,
                bound: model.at_most(bound),
                fault: Some(fault),
            });
        }
    }
    // A model that no fault is known to fail has not been shown to be able to.
    for model in models() {
        if !FAULTS
            .iter()
            .any(|fault| fault.found_by.contains(&model.name))
        {
            return Err(format!("no fault names the model {}", model.name));
        }
    }
    if jobs.is_empty() {
        return Err(format!("nothing is named like \"{}\"", arguments.only));
    }

    let outcomes = run_jobs(&jobs)?;
    println!("{}", models_table(&jobs, &outcomes));
    println!("{}", faults_table(&jobs, &outcomes));

    let mut failed = 0;
    for (job, outcome) in jobs.iter().zip(&outcomes) {
        if !job.is_as_wanted(outcome) {
            failed += 1;
            let wrong = match job.fault {
                Some(_) if outcome.passed => "did not find the fault",
                Some(_) => "failed for another reason than the one wanted",
                None => "failed",
            };
            println!(
                "\n{} {wrong}:\n{}",
                job.describe(),
                outcome.output.trim_end()
            );
        }
    }
    println!("{} passed, {failed} failed", jobs.len() - failed);
    eprintln!("in {:.0} s", started.elapsed().as_secs_f64());
    Ok(failed == 0)
}

/// Runs the jobs on all cores; the outcomes come in the order of the jobs.
fn run_jobs(jobs: &[Job]) -> Result<Vec<Outcome>, String> {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    let next = AtomicUsize::new(0);
    let done = Mutex::new(0);
    let outcomes: Vec<Mutex<Option<io::Result<Outcome>>>> =
        jobs.iter().map(|_| Mutex::new(None)).collect();
    let workers = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let index = jobs.iter().position(|it| std::ptr::eq(it, job)).unwrap();
                    let outcome = job.run();
                    let mut done = done.lock().unwrap();
                    *done += 1;
                    show_progress(*done, jobs.len(), job);
                    *outcomes[index].lock().unwrap() = Some(outcome);
                }
            });
        }
    });
    outcomes
        .into_iter()
        .map(|outcome| match outcome.into_inner().unwrap() {
            Some(Ok(outcome)) => Ok(outcome),
            Some(Err(error)) => Err(format!("cannot start a model: {error}")),
            None => Err("a worker stopped early".to_owned()),
        })
        .collect()
}

/// On a terminal, one line that changes; in a pipe nothing.
fn show_progress(done: usize, all: usize, job: &Job) {
    let mut out = io::stderr().lock();
    if out.is_terminal() {
        let name: String = job.describe().chars().take(60).collect();
        let line = if done == all {
            String::new()
        } else {
            format!("{done}/{all} {name}")
        };
        // Not being able to show progress is no reason to stop.
        let _ = write!(out, "\r\x1b[K{line}");
        let _ = out.flush();
    }
}

fn table(headings: &[&str]) -> Table {
    let mut table = Table::new();
    table
        .load_style(presets::ASCII_MARKDOWN)
        .set_header(headings);
    table
}

fn models_table(jobs: &[Job], outcomes: &[Outcome]) -> Table {
    let mut table = table(&[
        "promise",
        "model",
        "faults it finds",
        "bound",
        "executions",
        "s",
        "",
    ]);
    for (job, outcome) in jobs.iter().zip(outcomes) {
        if job.fault.is_none() {
            let finds = FAULTS
                .iter()
                .filter(|fault| fault.found_by.contains(&job.model.name))
                .map(|fault| fault.name);
            table.add_row([
                job.model.promise.to_owned(),
                job.model.name.to_owned(),
                finds.collect::<Vec<_>>().join(", "),
                bound_text(job.bound),
                outcome.executions.to_string(),
                format!("{:.2}", outcome.milliseconds as f64 / 1000.0),
                verdict(job, outcome, "ok"),
            ]);
        }
    }
    table
}

fn faults_table(jobs: &[Job], outcomes: &[Outcome]) -> Table {
    let mut table = table(&["fault", "what is wrong", "model", ""]);
    for (job, outcome) in jobs.iter().zip(outcomes) {
        if let Some(fault) = job.fault {
            table.add_row([
                fault.name.to_owned(),
                fault.what.to_owned(),
                job.model.name.to_owned(),
                verdict(job, outcome, "found"),
            ]);
        }
    }
    table
}

fn verdict(job: &Job, outcome: &Outcome, good: &str) -> String {
    let as_wanted = job.is_as_wanted(outcome);
    (if as_wanted { good } else { "FAILED" }).to_owned()
}
