//! Readers and writers on real threads. Each reader checks what only a torn,
//! stale, lost or freed snapshot can break.
//!
//! All act on the process-wide registry, one buffer to a test, so that every
//! kind of reader can ask, and so that the tests of this file are in each
//! other's way. Writers work through a number of rounds. After that they go on
//! until every reader has seen what its test wants seen ([`Run`]): a reader
//! that never did has tested nothing, and the test fails.
//!
//! `PINNED_HOSTS_STRESS_SECONDS=60` makes each test run for at least so long.

#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::VecDeque;
use std::env;
use std::panic::resume_unwind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pinned_hosts::Residency::{Mixed, Pageable, Pinned, Seam};
use pinned_hosts::{Reader, Region, RegionEntry, Residency, Segment, global};

/// Rounds that a writer works through at least; and at most, unless a time was
/// asked for.
const ROUNDS: u64 = 8_000;
const MOST_ROUNDS: u64 = 25 * ROUNDS;

fn region(bytes: &[u8]) -> Region {
    Region::of(bytes).unwrap()
}

/// The three ways to ask the process-wide registry.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Free,
    Reader,
    Registry,
}

const KINDS: [Kind; 3] = [Kind::Free, Kind::Reader, Kind::Registry];

/// Asks in one of the three ways.
struct Asker {
    kind: Kind,
    reader: Reader<'static>,
}

impl Asker {
    fn new(kind: Kind) -> Self {
        Self {
            kind,
            reader: global().reader(),
        }
    }

    fn residency(&mut self, bytes: &[u8]) -> Residency {
        match self.kind {
            Kind::Free => pinned_hosts::residency(bytes),
            Kind::Reader => self.reader.residency(bytes),
            Kind::Registry => global().residency(bytes),
        }
    }

    fn is_pinned(&mut self, bytes: &[u8]) -> bool {
        match self.kind {
            Kind::Free => pinned_hosts::is_pinned(bytes),
            Kind::Reader => self.reader.is_pinned(bytes),
            Kind::Registry => global().is_pinned(bytes),
        }
    }

    fn segments<'a>(&mut self, bytes: &'a [u8]) -> Vec<Segment<'a>> {
        match self.kind {
            Kind::Reader => self.reader.segments(bytes),
            Kind::Free | Kind::Registry => global().segments(bytes),
        }
        // No more than can be right, lest a fault makes this endless.
        .take(bytes.len())
        .collect()
    }

    /// The registrations that lie in `bytes`.
    fn regions_in(&mut self, bytes: &[u8]) -> Vec<RegionEntry> {
        let all = match self.kind {
            Kind::Reader => self.reader.regions(),
            Kind::Free | Kind::Registry => global().regions(),
        };
        let addresses = bytes.as_ptr_range();
        all.filter(|entry| addresses.contains(&entry.region().base()))
            .collect()
    }
}

/// How long the writers go on, and what the readers have seen.
struct Run {
    until: Instant,
    over: AtomicBool,
    /// One to a reader: which of its outcomes it has seen, as bits.
    seen: Vec<AtomicU64>,
    wanted: u64,
}

impl Run {
    fn new(readers: usize, outcomes: u32) -> Self {
        let seconds = env::var("PINNED_HOSTS_STRESS_SECONDS")
            .map_or(0, |seconds| seconds.parse().expect("a number of seconds"));
        Self {
            until: Instant::now() + Duration::from_secs(seconds),
            over: AtomicBool::new(false),
            seen: (0..readers).map(|_| AtomicU64::new(0)).collect(),
            wanted: (1 << outcomes) - 1,
        }
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    fn see(&self, reader: usize, outcome: u32) {
        self.seen[reader].fetch_or(1 << outcome, Ordering::Relaxed);
    }

    fn have_all_seen_all(&self) -> bool {
        self.seen
            .iter()
            .all(|seen| seen.load(Ordering::Relaxed) == self.wanted)
    }

    /// The rounds of one writer.
    fn rounds(&self) -> impl Iterator<Item = u64> {
        (0..).take_while(|&round| {
            let goes_on = round < ROUNDS
                || Instant::now() < self.until
                || (round < MOST_ROUNDS && !self.have_all_seen_all());
            goes_on && !self.is_over()
        })
    }
}

/// Runs one thread for each of `writers`, and one that calls `read` for each
/// kind of asker until the writers have ended. A reader is told its number.
fn stress(
    outcomes: u32,
    writers: &[&(dyn Fn(&Run) + Sync)],
    read: impl Fn(&Run, usize, Asker) + Sync,
) {
    let run = &Run::new(KINDS.len(), outcomes);
    let read = &read;
    thread::scope(|scope| {
        for (number, kind) in KINDS.into_iter().enumerate() {
            scope.spawn(move || {
                let _over = OverIfPanicking(run);
                read(run, number, Asker::new(kind));
            });
        }
        let writers: Vec<_> = writers
            .iter()
            .map(|write| {
                scope.spawn(move || {
                    let _over = OverIfPanicking(run);
                    write(run);
                })
            })
            .collect();
        for writer in writers {
            if let Err(panic) = writer.join() {
                resume_unwind(panic);
            }
        }
        run.over.store(true, Ordering::Relaxed);
    });
    assert!(
        run.have_all_seen_all(),
        "readers are to see {:#b}, and saw {:?}",
        run.wanted,
        run.seen
    );
}

/// Ends the run of the others when its thread panics.
struct OverIfPanicking<'r>(&'r Run);

impl Drop for OverIfPanicking<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.over.store(true, Ordering::Relaxed);
        }
    }
}

/// The two halves of a buffer come together and the left one goes first: the
/// left one alone is never seen, neither by a question nor in a list.
#[test]
fn two_regions_registered_together_are_seen_together() {
    let buffer = [0u8; 128];
    let halves = [&buffer[..64], &buffer[64..]].map(region);
    let write = |run: &Run| {
        for _ in run.rounds() {
            let registrations = global().register_all(halves);
            for registration in registrations {
                registration.unregister();
            }
        }
    };
    stress(3, &[&write], |run, number, mut asker| {
        while !run.is_over() {
            let parts = asker.segments(&buffer);
            let parts: Vec<_> = parts.iter().map(Segment::residency).collect();
            assert_ne!(parts, [Pinned, Pageable]);

            let listed = asker.regions_in(&buffer);
            match listed.as_slice() {
                [] => {}
                [right] => assert_eq!(right.region(), halves[1]),
                [left, right] => {
                    assert_eq!([left.region(), right.region()], halves);
                    assert!(left.id() < right.id());
                }
                _ => panic!("more than were ever registered: {listed:?}"),
            }

            match asker.residency(&buffer) {
                Pageable => run.see(number, 0),
                Mixed => run.see(number, 1),
                Seam => run.see(number, 2),
                Pinned => panic!("no region ever contained both halves"),
            }
        }
    });
}

/// Each batch of regions carries a seal: one region more, as long as the
/// checksum of the others. The batch comes with its seal in one publish, and
/// goes after its seal; so a snapshot with a seal in it holds just the regions
/// that the seal sums up. Two writers, each with a batch of its own.
#[test]
fn every_snapshot_matches_its_checksum() {
    const BATCH: usize = 96;
    const SEAL: usize = 160;
    let buffers = [[0u8; BATCH + SEAL]; 2];
    let write = |run: &Run, buffer: &[u8]| {
        let (batch, seal) = buffer.split_at(BATCH);
        for round in run.rounds() {
            // Up to seven regions of up to eight bytes, as the round has it.
            let regions: Vec<Region> = (0..1 + round % 7)
                .map(|k| {
                    let start = (k as usize * 13 + round as usize) % (BATCH - 8);
                    region(&batch[start..][..1 + (round + k) as usize % 8])
                })
                .collect();
            let sealed = region(&seal[..checksum(batch, &regions)]);
            let mut registrations = global().register_all(regions.into_iter().chain([sealed]));
            while let Some(last) = registrations.pop() {
                last.unregister();
            }
        }
    };
    let writers: [&(dyn Fn(&Run) + Sync); 2] = [&|run| write(run, &buffers[0]), &|run| {
        write(run, &buffers[1])
    }];
    stress(2, &writers, |run, number, mut asker| {
        while !run.is_over() {
            for buffer in &buffers {
                let (batch, seal) = buffer.split_at(BATCH);
                let listed = asker.regions_in(buffer).into_iter().map(|it| it.region());
                let (regions, seals): (Vec<_>, Vec<_>) =
                    listed.partition(|region| region.base() < seal.as_ptr());
                match seals.as_slice() {
                    [] => run.see(number, 0),
                    [seal] => {
                        assert_eq!(seal.len(), checksum(batch, &regions), "{regions:?}");
                        run.see(number, 1);
                    }
                    _ => panic!("two seals of one writer: {seals:?}"),
                }
            }
        }
    });

    fn checksum(batch: &[u8], regions: &[Region]) -> usize {
        let start = batch.as_ptr().addr();
        let terms = regions
            .iter()
            .map(|region| (region.base().addr() - start) * 31 + region.len() * 7 + 1);
        1 + terms.sum::<usize>() % (SEAL - 1)
    }
}

/// A buffer is handed from one registration to the next, the next one first:
/// it is always pinned. Two writers do so with overlapping buffers.
#[test]
fn a_region_that_is_always_registered_by_somebody_is_always_seen() {
    let buffer = [0u8; 128];
    // The middle is pinned twice, by two writers.
    let parts = [&buffer[..96], &buffer[32..]];
    let last = parts.map(|part| Mutex::new(Some(global().register(region(part)))));
    let hand_on = |run: &Run, writer: usize| {
        let mut last = last[writer].lock().unwrap();
        for _ in run.rounds() {
            let next = global().register(region(parts[writer]));
            last.replace(next).unwrap().unregister();
        }
        // The other writer's readers may still be at work: it stays.
    };
    let writers: [&(dyn Fn(&Run) + Sync); 2] = [&|run| hand_on(run, 0), &|run| hand_on(run, 1)];
    stress(2, &writers, |run, number, mut asker| {
        while !run.is_over() {
            assert_eq!(asker.residency(parts[0]), Pinned);
            assert_eq!(asker.residency(parts[1]), Pinned);
            assert_eq!(asker.residency(&buffer), Seam);
            assert!(asker.is_pinned(&buffer));
            match asker.regions_in(&buffer).len() {
                2 => run.see(number, 0),
                3 | 4 => run.see(number, 1),
                n => panic!("{n} registrations of two parts"),
            }
        }
    });
    for last in last {
        last.into_inner().unwrap().unwrap().unregister();
    }
}

/// Registering a base again swaps the length: the shorter part is pinned all
/// the time, by one entry.
#[test]
fn a_base_that_is_registered_again_is_never_seen_gone_nor_twice() {
    let buffer = [0u8; 128];
    pinned_hosts::register(buffer.as_ptr(), 64);
    let write = |run: &Run| {
        for round in run.rounds() {
            let bytes = if round.is_multiple_of(2) { 128 } else { 64 };
            pinned_hosts::register(buffer.as_ptr(), bytes);
        }
    };
    stress(2, &[&write, &write], |run, number, mut asker| {
        while !run.is_over() {
            assert_eq!(asker.residency(&buffer[..64]), Pinned);
            assert_eq!(asker.regions_in(&buffer).len(), 1);
            match asker.residency(&buffer) {
                Pinned => run.see(number, 0),
                Mixed => run.see(number, 1),
                other => panic!("never were the bytes {other:?}"),
            }
        }
    });
    pinned_hosts::unregister(buffer.as_ptr());
}

/// A writer tells what it is about to do and what it has done by counters; a
/// reader that has learnt of a registration sees it, and one that has learnt
/// of a removal sees that.
///
/// The `k`-th registration is of slot `k % SLOTS`, and `LIVE` are live at a
/// time, so a slot stays free for a while before it is used again.
#[test]
fn who_learns_of_a_registration_or_of_its_removal_sees_it() {
    const SLOTS: u64 = 64;
    const LIVE: u64 = 16;
    const SLOT: usize = 8;

    let buffer = vec![0u8; SLOT * SLOTS as usize];
    let slot = |k: u64| {
        let at = (k % SLOTS) as usize * SLOT;
        &buffer[at..at + SLOT]
    };
    // All count how many of the registrations, from the first on, have come
    // so far.
    let [adding, added, removing, removed] = [const { AtomicU64::new(0) }; 4];

    let write = |run: &Run| {
        let mut live = VecDeque::new();
        for k in run.rounds() {
            adding.store(k + 1, Ordering::Release);
            live.push_back(global().register(region(slot(k))));
            added.store(k + 1, Ordering::Release);
            if k >= LIVE {
                removing.store(k - LIVE + 1, Ordering::Release);
                live.pop_front().unwrap().unregister();
                removed.store(k - LIVE + 1, Ordering::Release);
            }
        }
        removing.store(u64::MAX, Ordering::Release);
        for registration in live {
            registration.unregister();
        }
    };
    stress(2, &[&write], |run, number, mut asker| {
        while !run.is_over() {
            if let Some(k) = added.load(Ordering::Acquire).checked_sub(1) {
                let pinned = asker.is_pinned(slot(k));
                // A lookup that saw the removal makes this load see that it
                // had begun.
                if removing.load(Ordering::Acquire) <= k {
                    assert!(pinned, "registration {k} was missed");
                    run.see(number, 0);
                }
            }
            if let Some(k) = removed.load(Ordering::Acquire).checked_sub(1) {
                let residency = asker.residency(slot(k));
                if adding.load(Ordering::Acquire) <= k + SLOTS {
                    assert_eq!(residency, Pageable, "the removal of {k} was missed");
                    run.see(number, 1);
                }
            }
        }
    });
}

/// Slots are only added: what a thread has seen it sees again, even when it
/// asks another way.
#[test]
fn two_lookups_of_one_thread_never_go_back_in_time() {
    const SLOTS: usize = 64;

    let buffer = vec![0u8; SLOTS];
    // Odd while slots are added, even while they are taken away.
    let phase = AtomicU64::new(0);
    let write = |run: &Run| {
        for _ in run.rounds().step_by(SLOTS) {
            phase.fetch_add(1, Ordering::AcqRel);
            let registrations: Vec<_> = buffer
                .chunks(1)
                .map(|slot| global().register(region(slot)))
                .collect();
            phase.fetch_add(1, Ordering::AcqRel);
            for registration in registrations {
                registration.unregister();
            }
        }
    };
    stress(2, &[&write], |run, number, mut asker| {
        let mut seen = 0;
        let mut seen_in = 0;
        for kind in KINDS.into_iter().cycle() {
            if run.is_over() {
                break;
            }
            asker.kind = kind;
            let before = phase.load(Ordering::Acquire);
            let now = match asker.segments(&buffer).as_slice() {
                [.., rest] if rest.residency() == Pageable => SLOTS - rest.bytes().len(),
                _ => SLOTS,
            };
            let again = now == 0 || asker.is_pinned(&buffer[..now]);
            if before.is_multiple_of(2) || phase.load(Ordering::Acquire) != before {
                continue;
            }
            if before != seen_in {
                (seen, seen_in) = (0, before);
            }
            assert!(now >= seen, "{kind:?} saw {now} slots after {seen}");
            assert!(again, "{kind:?} saw {now} slots and then fewer");
            seen = now;
            run.see(number, u32::from(now > SLOTS / 2));
        }
    });
}

/// Writers come and go around, over and inside a region that stays.
#[test]
fn a_region_that_stays_is_seen_through_the_coming_and_going_of_others() {
    let buffer = [0u8; 300];
    let permanent = global().register(region(&buffer[100..200]));
    let churn = |run: &Run, parts: [&[u8]; 2]| {
        for _ in run.rounds() {
            let registrations = parts.map(|part| global().register(region(part)));
            for (registration, part) in registrations.into_iter().zip(parts) {
                assert_eq!(registration.unregister(), region(part));
            }
        }
    };
    let outside = |run: &Run| churn(run, [&buffer[..100], &buffer[200..]]);
    let across = |run: &Run| churn(run, [&buffer[50..150], &buffer[120..130]]);
    stress(2, &[&outside, &across], |run, number, mut asker| {
        while !run.is_over() {
            assert_eq!(asker.residency(&buffer[100..200]), Pinned);
            assert!(asker.is_pinned(&buffer[140..160]));
            match asker.residency(&buffer[..100]) {
                Pageable | Mixed => run.see(number, 0),
                Pinned => run.see(number, 1),
                Seam => panic!("the first part lies in one region or sticks out"),
            }
        }
    });
    permanent.unregister();
}

/// Every writer finds exactly what it did, whatever the others do.
#[test]
fn writers_find_their_own_changes() {
    let buffer = [0u8; 128];
    let write = |run: &Run, own: &[u8]| {
        let mut askers = KINDS.map(Asker::new);
        for round in run.rounds() {
            let registration = global().register(region(own));
            let asker = &mut askers[round as usize % KINDS.len()];
            assert_eq!(asker.residency(own), Pinned);
            registration.unregister();
            assert_eq!(asker.residency(own), Pageable);
        }
    };
    let writers: [&(dyn Fn(&Run) + Sync); 3] = [
        &|run| write(run, &buffer[..32]),
        &|run| write(run, &buffer[32..96]),
        &|run| write(run, &buffer[96..]),
    ];
    stress(2, &writers, |run, number, mut asker| {
        while !run.is_over() {
            match asker.residency(&buffer) {
                Pageable => run.see(number, 0),
                Mixed | Seam => run.see(number, 1),
                Pinned => panic!("no region ever was the whole buffer"),
            }
        }
    });
    assert_eq!(Asker::new(Kind::Registry).regions_in(&buffer), []);
}
