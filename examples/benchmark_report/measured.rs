//! What the benches have measured.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::error::ReportError;
use crate::results::{BY_TURNS, ByTurns, CONTENTION, Contention, Publishing, Rate, Sharing};

/// All results of one run.
pub(crate) struct Measured {
    cells: Cells,
    checks: Vec<Check>,
    pub(crate) contention: Contention,
}

/// What a checked copy call costs over an unchecked one, measured by turns.
/// `copy_path` writes one for each size.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Check {
    pub(crate) bytes: usize,
    #[serde(rename = "difference_ns")]
    pub(crate) difference: f64,
    /// Without what it asks the driver.
    #[serde(rename = "own_ns")]
    pub(crate) own: f64,
}

const CHECKS: &str = "copy_path_overhead.json";

/// Nanoseconds for one operation, by group, contestant and size.
type Cells = BTreeMap<(String, String, usize), f64>;

/// A group of benchmarks, and the bench it belongs to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Group {
    pub(crate) bench: &'static str,
    pub(crate) name: &'static str,
}

/// As the next, but measured by turns: what goals are told by.
pub(crate) const HIT_BY_TURNS: Group = group("lookup", "by_turns/hit");
pub(crate) const MISS_FAR_BY_TURNS: Group = group("lookup", "by_turns/miss_far");
pub(crate) const HIT: Group = group("lookup", "lookup/hit");
pub(crate) const MISS_NEAR: Group = group("lookup", "lookup/miss_near");
pub(crate) const MISS_FAR: Group = group("lookup", "lookup/miss_far");
pub(crate) const ALONE: Group = group("publish", "publish/alone");
pub(crate) const REGISTER_ALL: Group = group("publish", "publish/register_all");
pub(crate) const PARKED: Group = group("publish_parked", "publish/parked");
pub(crate) const PAGEABLE_COPY: Group = group("copy_path", "copy_path/pageable");

const fn group(bench: &'static str, name: &'static str) -> Group {
    Group { bench, name }
}

impl Measured {
    pub(crate) fn read(directory: &Path) -> Result<Self, ReportError> {
        let mut cells = Cells::new();
        if directory.is_dir() {
            read_cells(directory, &mut cells)?;
        }
        let turns = directory.join(BY_TURNS);
        if turns.is_file() {
            let turns: Vec<ByTurns> = json(&turns)?;
            let turns = turns.into_iter();
            cells.extend(turns.map(|it| ((it.group, it.contestant, it.n), it.nanoseconds)));
        }
        let contention = directory.join(CONTENTION);
        if !contention.is_file() {
            return Err(ReportError::NotMeasured {
                bench: "contention",
                what: CONTENTION.to_owned(),
            });
        }
        let checks = directory.join(CHECKS);
        Ok(Self {
            cells,
            checks: if checks.is_file() {
                json(&checks)?
            } else {
                Vec::new()
            },
            contention: json(&contention)?,
        })
    }

    /// What one operation costs, in nanoseconds.
    pub(crate) fn cost(
        &self,
        group: Group,
        contestant: &str,
        n: usize,
    ) -> Result<f64, ReportError> {
        self.optional(group, contestant, n)
            .ok_or_else(|| ReportError::NotMeasured {
                bench: group.bench,
                what: format!("{}/{contestant}/{n}", group.name),
            })
    }

    /// As [`cost`](Self::cost), of a contestant that need not take part.
    pub(crate) fn optional(&self, group: Group, contestant: &str, n: usize) -> Option<f64> {
        let key = (group.name.to_owned(), contestant.to_owned(), n);
        self.cells.get(&key).copied()
    }

    /// What a checked copy call of so many bytes adds, if it was measured by
    /// turns.
    pub(crate) fn check(&self, bytes: usize) -> Option<Check> {
        self.checks.iter().copied().find(|it| it.bytes == bytes)
    }

    /// Who takes part in a group, the fastest at the smallest size first.
    pub(crate) fn contestants(&self, group: Group) -> Vec<&str> {
        let mut names: Vec<(usize, f64, &str)> = Vec::new();
        for ((of, name, n), &cost) in &self.cells {
            let known = names.iter().any(|(_, _, other)| other == name);
            if of == group.name && !known {
                names.push((*n, cost, name));
            }
        }
        names.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        names.into_iter().map(|(_, _, name)| name).collect()
    }

    /// The sizes that a group was measured at.
    pub(crate) fn sizes(&self, group: Group) -> Vec<usize> {
        let of_group = self.cells.keys().filter(|(of, _, _)| of == group.name);
        let mut sizes: Vec<usize> = of_group.map(|&(_, _, n)| n).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    /// What a lookup costs each of so many threads, in nanoseconds.
    pub(crate) fn shared(&self, contestant: &str, threads: usize) -> Result<f64, ReportError> {
        let mut rows = self.contention.sharing.iter();
        rows.find(|row: &&Sharing| row.contestant == contestant && row.threads == threads)
            .map(|row| row.nanoseconds)
            .ok_or_else(|| ReportError::NotMeasured {
                bench: "contention",
                what: format!("{contestant} on {threads} threads"),
            })
    }

    /// How long a reader's batches take beside a writer.
    pub(crate) fn beside(&self, contestant: &str, rate: Rate) -> Result<&Publishing, ReportError> {
        let mut rows = self.contention.publishing.iter();
        rows.find(|row| row.contestant == contestant && row.rate == rate)
            .ok_or_else(|| ReportError::NotMeasured {
                bench: "contention",
                what: format!("{contestant} beside a writer"),
            })
    }
}

/// Of criterion's `benchmark.json`, what is needed.
#[derive(Deserialize)]
struct Benchmark {
    group_id: String,
    function_id: Option<String>,
    value_str: Option<String>,
    throughput: Option<BTreeMap<String, f64>>,
}

/// Of criterion's `estimates.json`, what is needed.
#[derive(Deserialize)]
struct Estimates {
    median: Estimate,
}

#[derive(Deserialize)]
struct Estimate {
    point_estimate: f64,
}

/// Reads all results below `directory`: criterion keeps those of the last run
/// in folders called `new`.
fn read_cells(directory: &Path, cells: &mut Cells) -> Result<(), ReportError> {
    let failed = |error: io::Error| ReportError::file(directory, error);
    for entry in fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if !path.is_dir() {
            continue;
        }
        let benchmark = path.join("benchmark.json");
        if path.ends_with("new") && benchmark.is_file() {
            let estimates: Estimates = json(&path.join("estimates.json"))?;
            add(json(&benchmark)?, &estimates, cells);
        } else {
            read_cells(&path, cells)?;
        }
    }
    Ok(())
}

/// Benchmarks that have no size are of no interest here.
fn add(benchmark: Benchmark, estimates: &Estimates, cells: &mut Cells) {
    let size = benchmark.value_str.and_then(|size| size.parse().ok());
    let (Some(contestant), Some(n)) = (benchmark.function_id, size) else {
        return;
    };
    let operations = benchmark
        .throughput
        .and_then(|throughput| throughput.get("Elements").copied())
        .unwrap_or(1.0);
    let cost = estimates.median.point_estimate / operations;
    cells.insert((benchmark.group_id, contestant, n), cost);
}

fn json<T: DeserializeOwned>(path: &Path) -> Result<T, ReportError> {
    let bytes = fs::read(path).map_err(|error| ReportError::file(path, error))?;
    serde_json::from_slice(&bytes).map_err(|error| ReportError::Json {
        path: path.to_owned(),
        error,
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::results::Machine;

    /// Results in which every cost is what `cost` says of a group, a contestant
    /// and a size.
    pub(crate) fn measured(cells: &[(Group, &str, usize, f64)]) -> Measured {
        let cells = cells.iter().map(|&(group, contestant, n, cost)| {
            ((group.name.to_owned(), contestant.to_owned(), n), cost)
        });
        Measured {
            cells: cells.collect(),
            checks: Vec::new(),
            contention: Contention {
                machine: Machine {
                    processor: "a processor".to_owned(),
                    cores: 2,
                    system: "a system".to_owned(),
                },
                sharing: Vec::new(),
                publishing: Vec::new(),
            },
        }
    }

    fn write(path: &Path, text: &str) {
        fs::create_dir_all(path.parent().expect("a file in a folder")).expect("a folder");
        fs::write(path, text).expect("a file");
    }

    const CONTENTION_JSON: &str = r#"{
        "machine": { "processor": "p", "cores": 2, "system": "s" },
        "sharing": [],
        "publishing": [{
            "contestant": "floor", "rate": { "per_second": 100 }, "publishes": 99.0,
            "batch": 32, "median": 1.0, "p99": 2.0, "p999": 3.0, "max": 4.0
        }]
    }"#;

    #[test]
    fn a_cost_is_the_median_for_one_element() {
        let home = tempfile::tempdir().expect("a temporary folder");
        let new = home.path().join("lookup_hit/floor/3/new");
        write(
            &new.join("benchmark.json"),
            r#"{"group_id":"lookup/hit","function_id":"floor","value_str":"3",
                "throughput":{"Elements":1024},"full_id":"lookup/hit/floor/3"}"#,
        );
        write(
            &new.join("estimates.json"),
            r#"{"mean":{"point_estimate":1.0},"median":{"point_estimate":2048.0}}"#,
        );
        write(&home.path().join(CONTENTION), CONTENTION_JSON);
        write(
            &home.path().join(CHECKS),
            r#"[{"bytes":64,"difference_ns":40.0,"own_ns":10.0}]"#,
        );
        let measured = Measured::read(home.path()).expect("results");
        assert_eq!(measured.cost(HIT, "floor", 3).expect("measured"), 2.0);
        let beside = measured.beside("floor", Rate::PerSecond(100));
        assert_eq!(beside.expect("measured").p999, 3.0);
        assert_eq!(measured.check(64).expect("measured").own, 10.0);
        assert!(measured.check(65).is_none());
    }

    #[test]
    fn what_is_missing_names_the_bench_to_run() {
        let home = tempfile::tempdir().expect("a temporary folder");
        let Err(error) = Measured::read(home.path()) else {
            panic!("nothing was measured");
        };
        assert!(error.to_string().contains("cargo bench --bench contention"));

        let error = measured(&[]).cost(PARKED, "is_pinned", 3);
        let error = error.expect_err("nothing was measured").to_string();
        assert!(
            error.contains("cargo bench --bench publish_parked"),
            "{error}"
        );
        assert!(error.contains("publish/parked/is_pinned/3"), "{error}");
    }

    #[test]
    fn a_file_that_holds_no_results_is_named() {
        let home = tempfile::tempdir().expect("a temporary folder");
        write(&home.path().join(CONTENTION), "{");
        let Err(error) = Measured::read(home.path()) else {
            panic!("that is no JSON");
        };
        assert!(error.to_string().contains(CONTENTION));
    }
}
