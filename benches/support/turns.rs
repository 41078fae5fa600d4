//! Contestants that are timed by turns.
//!
//! A virtual machine may run at half its speed for a second or more, because of
//! what others do. Two contestants that are timed one after the other are then
//! not comparable. By turns of a fraction of a millisecond, each round finds all
//! of them in the same weather, and what is kept is the median of the ratios
//! within the rounds.

use std::hint::black_box;
use std::time::Instant;

use super::results::ByTurns;
use super::workload::{Case, Workload};
use crate::rivals::Contestant;

const BATCH: usize = 1024;

type AskAll<'a> = dyn FnMut(&[&[u8]]) + 'a;

/// One contestant's way to make a batch of lookups.
pub(crate) struct Lane<'a> {
    name: &'static str,
    ask_all: Box<AskAll<'a>>,
}

impl<'a> Lane<'a> {
    pub(crate) fn of<C: Contestant>(contestant: &'a C) -> Self {
        let mut ask = contestant.asker();
        Self {
            name: C::NAME,
            ask_all: Box::new(move |batch| {
                for &slice in black_box(batch) {
                    black_box(ask(slice));
                }
            }),
        }
    }
}

/// What a lookup costs each of `lanes`, with the ratios to the first one's
/// those of the rounds.
pub(crate) fn by_turns(
    workload: &Workload<'_>,
    case: Case,
    lanes: &mut [Lane<'_>],
    rounds: usize,
) -> Vec<ByTurns> {
    // Where the set does not stay in a cache, each turn has to find it there
    // again: long enough that this does not count.
    let batches = if workload.n() < 10_000 { 8 } else { 48 };
    let slices = workload.slices(case);
    let mut rest = slices.chunks_exact(BATCH).cycle();
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); lanes.len()];
    for _ in 0..rounds {
        let turn: Vec<&[&[u8]]> = rest.by_ref().take(batches).collect();
        for (lane, times) in lanes.iter_mut().zip(&mut times) {
            // To warm up.
            (lane.ask_all)(turn[0]);
            let started = Instant::now();
            for batch in &turn {
                (lane.ask_all)(batch);
            }
            times.push(started.elapsed().as_nanos() as f64 / (batches * BATCH) as f64);
        }
    }
    let first = times[0].clone();
    let unit = median(first.clone());
    let results = lanes.iter().zip(times).map(|(lane, times)| {
        let ratios = times.iter().zip(&first).map(|(time, first)| time / first);
        ByTurns {
            group: format!("by_turns/{}", case.name()),
            contestant: lane.name.to_owned(),
            n: workload.n(),
            nanoseconds: unit * median(ratios.collect()),
        }
    });
    results.collect()
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}
