//! `HostRegistration` over the simulated driver: memory that exists is
//! page-locked where it is, chunk by chunk, and undone as a whole.
//! `tests/live_memory.rs` has it beside copies that are running.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use common::{Rig, in_child, logged};
use cuda_sim::code;
use cudarc::driver::sys::{self, CUresult, CUstreamCaptureMode as Mode};
use memmap2::{Mmap, MmapMut};
use pinned_hosts::cuda::{
    CudaError, HostMemory, HostRegistration, PinnedBuffer, Progress, RegisterError,
    RegisterFailure, RegisterOptions, UnregisterFailure, reclaim,
};
use pinned_hosts::{GraceError, Region, RegionState, Residency, global, residency};

const PAGE: usize = 4096;
const REGISTER: &str = "cuMemHostRegister_v2";
const UNREGISTER: &str = "cuMemHostUnregister";
const READ_ONLY_SUPPORTED: i32 = 113;

/// Writable memory that begins on a page.
fn pages(count: usize) -> MmapMut {
    let mut pages = MmapMut::map_anon(count * PAGE).unwrap();
    pages.fill(7);
    pages
}

fn mapped_file(len: usize) -> Mmap {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&vec![7; len]).unwrap();
    // SAFETY: nobody else has the file.
    unsafe { Mmap::map(&file) }.unwrap()
}

fn by_page<'a>() -> RegisterOptions<'a> {
    RegisterOptions::default().chunk_bytes(PAGE)
}

fn pinned_by_page(rig: &Rig, count: usize) -> HostRegistration<MmapMut> {
    HostRegistration::with_options(&rig.context, pages(count), by_page()).unwrap()
}

/// Memory that tells when it is freed.
#[derive(Debug)]
struct Tracked(Box<[u8]>, Arc<AtomicBool>);

// SAFETY: the bytes are in a box, and never written.
unsafe impl HostMemory for Tracked {
    fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        self.1.store(true, Ordering::Relaxed);
    }
}

impl Tracked {
    fn new() -> (Self, Arc<AtomicBool>) {
        let freed = Arc::default();
        (Self(vec![7; PAGE].into(), Arc::clone(&freed)), freed)
    }
}

/// How many registrations the driver has.
fn live(rig: &Rig) -> u64 {
    rig.sim.counters().live_registrations
}

// While it lives

#[test]
fn memory_is_pinned_and_registered_while_it_lives() {
    let rig = Rig::new();
    let before = live(&rig);
    let registration = HostRegistration::new(&rig.context, vec![7u8; 10_000]).unwrap();
    assert_eq!(residency(registration.as_bytes()), Residency::Pinned);
    assert_eq!(live(&rig), before + 1);
    let base = registration.as_bytes().as_ptr();
    drop(registration);
    assert!(global().regions().all(|it| it.region().base() != base));
    assert_eq!(live(&rig), before);
}

#[test]
fn unregistering_gives_the_memory_back_where_it_was() {
    let rig = Rig::new();
    let memory = vec![7u8; 100];
    let address = memory.as_ptr();
    let registration = HostRegistration::new(&rig.context, memory).unwrap();
    assert_eq!(registration.backing().as_ptr(), address);
    let memory = registration.unregister().unwrap();
    assert_eq!((memory.as_ptr(), memory.len()), (address, 100));
    assert_eq!(residency(&memory), Residency::Pageable);
}

#[test]
fn dropping_frees_the_memory() {
    let rig = Rig::new();
    let (memory, freed) = Tracked::new();
    drop(HostRegistration::new(&rig.context, memory).unwrap());
    assert!(freed.load(Ordering::Relaxed));
}

#[test]
fn all_kinds_of_memory_are_all_their_bytes() {
    fn pinned_bytes(rig: &Rig, memory: impl HostMemory) -> usize {
        let registration = HostRegistration::new(&rig.context, memory).unwrap();
        assert_eq!(residency(registration.as_bytes()), Residency::Pinned);
        registration.chunks().map(|chunk| chunk.len()).sum()
    }
    let rig = Rig::new();
    assert_eq!(pinned_bytes(&rig, vec![1u64; 10]), 80);
    assert_eq!(pinned_bytes(&rig, vec![1f32; 10].into_boxed_slice()), 40);
    assert_eq!(pinned_bytes(&rig, Arc::<[i16]>::from([1; 10])), 20);
    assert_eq!(pinned_bytes(&rig, Arc::new(vec![1u8; 10])), 10);
    assert_eq!(pinned_bytes(&rig, pages(1)), PAGE);
    let any: Box<dyn HostMemory> = Box::new(vec![1u8; 10]);
    assert_eq!(pinned_bytes(&rig, any), 10);
}

#[test]
fn empty_memory_is_left_alone() {
    let rig = Rig::new();
    let registration = HostRegistration::new(&rig.context, Vec::<u8>::new()).unwrap();
    assert_eq!(registration.chunks().len(), 0);
    assert!(registration.unregister().unwrap().is_empty());
    assert_eq!(rig.sim.calls(REGISTER), 0);
}

#[test]
fn a_copy_from_it_is_waited_for() {
    let rig = Rig::new();
    let registration = HostRegistration::new(&rig.context, vec![7u8; PAGE]).unwrap();
    let mut on_device = rig.zeros::<u8>(PAGE);
    rig.copier
        .copy_h2d_async(registration.as_bytes(), &mut on_device)
        .unwrap();
    drop(registration);
    assert_eq!(rig.read_back(&on_device), [7; PAGE]);
    assert_eq!(rig.copier.stats().guarded, 1);
    assert_eq!(rig.counters().late_reads, 1);
    rig.assert_sound();
}

#[test]
fn it_spoils_no_other_threads_capture() {
    let rig = Rig::new();
    let stream = rig.context.new_stream().unwrap();
    let (begun, wait) = mpsc::channel();
    let (done, end) = mpsc::channel::<()>();
    let capturing = thread::spawn(move || {
        stream
            .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL)
            .unwrap();
        begun.send(()).unwrap();
        end.recv().unwrap();
        stream
            .end_capture(
                sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH,
            )
            .map(drop)
    });
    wait.recv().unwrap();
    let registration = HostRegistration::new(&rig.context, vec![7u8; 100]).unwrap();
    registration.unregister().unwrap();
    done.send(()).unwrap();
    capturing.join().unwrap().unwrap();
}

// Chunks

#[test]
fn each_chunk_is_usable_as_soon_as_it_is_live_and_none_before() {
    let rig = Rig::new();
    let memory = Arc::new(pages(4));
    let mut on_device = rig.zeros::<u8>(PAGE);
    let mut seen = Vec::new();
    let mut progress = |progress: Progress| {
        let done = progress.pinned_bytes;
        let pinned = &memory[done - PAGE..done];
        assert_eq!(progress.chunk, Region::of(pinned).unwrap());
        assert_eq!(residency(pinned), Residency::Pinned);
        assert_eq!(residency(&memory[done..]), Residency::Pageable);
        rig.copier.copy_h2d_async(pinned, &mut on_device).unwrap();
        rig.copier
            .copy_h2d_async(&memory[3 * PAGE..], &mut on_device)
            .unwrap();
        seen.push((done / PAGE, progress.total_bytes / PAGE));
    };
    let options = by_page().progress(&mut progress);
    let registration =
        HostRegistration::with_options(&rig.context, Arc::clone(&memory), options).unwrap();
    assert_eq!(seen, [(1, 4), (2, 4), (3, 4), (4, 4)]);
    assert_eq!(rig.copier.stats().pageable, 3);
    assert_eq!(rig.copier.stats().guarded, 5);
    assert!(global().regions().all(|it| it.state() == RegionState::Live));
    drop(registration);
    rig.assert_sound();
}

#[test]
fn each_chunk_is_unregistered_by_its_base() {
    let rig = Rig::new();
    let before = live(&rig);
    let registration = pinned_by_page(&rig, 5);
    assert_eq!(live(&rig), before + 5);
    assert_eq!(residency(registration.as_bytes()), Residency::Seam);
    let memory = registration.unregister().unwrap();
    assert_eq!(live(&rig), before);
    assert_eq!(residency(&memory), Residency::Pageable);
}

#[test]
fn chunks_do_not_cut_elements() {
    let rig = Rig::new();
    for (element_bytes, expected) in [(24, 4080), (1000, 4000), (5000, 5000)] {
        let options = by_page().element_bytes(element_bytes);
        let registration = HostRegistration::with_options(&rig.context, pages(4), options).unwrap();
        let chunks: Vec<_> = registration.chunks().map(|chunk| chunk.len()).collect();
        let (_, whole) = chunks.split_last().unwrap();
        assert!(whole.iter().all(|&len| len == expected), "{chunks:?}");
        assert_eq!(chunks.iter().sum::<usize>(), 4 * PAGE);
    }
}

#[test]
fn a_copy_across_chunks_is_made_in_parts() {
    let rig = Rig::new();
    let registration = pinned_by_page(&rig, 4);
    let mut on_device = rig.zeros::<u8>(4 * PAGE);
    rig.copier
        .copy_h2d_async(registration.as_bytes(), &mut on_device)
        .unwrap();
    assert_eq!(rig.copier.stats().split, 1);
    assert_eq!(rig.counters().h2d_transfers, 4);
    assert_eq!(rig.read_back(&on_device), [7; 4 * PAGE]);
}

#[test]
fn sizes_that_make_no_sense_are_an_error() {
    let rig = Rig::new();
    let refused = |options| {
        let error = HostRegistration::with_options(&rig.context, vec![7u8; 9], options);
        let error = error.unwrap_err();
        assert_eq!(error.memory.unwrap(), [7; 9]);
        error.reason
    };
    let options = RegisterOptions::default;
    assert_eq!(
        refused(options().chunk_bytes(0)),
        RegisterFailure::ZeroChunk
    );
    for bytes in [0, usize::MAX] {
        assert_eq!(
            refused(options().element_bytes(bytes)),
            RegisterFailure::ElementSize { bytes }
        );
    }
    assert_eq!(rig.sim.calls(REGISTER), 0);
    // The largest chunk there can be is cut to what the driver takes.
    let options = options().chunk_bytes(usize::MAX);
    HostRegistration::with_options(&rig.context, vec![7u8; 9], options).unwrap();
}

// Read-only memory

#[test]
fn a_read_only_mapping_is_pinned_where_the_device_takes_it() {
    let rig = Rig::with(|sim| sim.set_attribute(READ_ONLY_SUPPORTED, 1));
    let file = Arc::new(mapped_file(10_000));
    let registration = HostRegistration::new(&rig.context, Arc::clone(&file)).unwrap();
    assert_eq!(residency(&file), Residency::Pinned);
    drop(registration);
    assert_eq!(residency(&file), Residency::Pageable);
    HostRegistration::new(&rig.context, Box::new(mapped_file(100))).unwrap();
}

#[test]
fn a_read_only_mapping_is_refused_unasked_where_the_device_takes_none() {
    let rig = Rig::with(|sim| sim.set_attribute(READ_ONLY_SUPPORTED, 0));
    let error = HostRegistration::new(&rig.context, mapped_file(100)).unwrap_err();
    assert_eq!(error.reason, RegisterFailure::ReadOnly);
    assert!(
        error.to_string().contains("copy from it as it is"),
        "{error}"
    );
    assert_eq!(rig.sim.calls(REGISTER), 0);
    assert_eq!(residency(&error.memory.unwrap()), Residency::Pageable);
    // Writable memory is taken all the same.
    HostRegistration::new(&rig.context, vec![7u8; 100]).unwrap();
}

#[test]
fn a_read_only_mapping_that_does_not_say_so_is_invalid() {
    struct Silent(Mmap);
    // SAFETY: as for the mapping.
    unsafe impl HostMemory for Silent {
        fn as_bytes(&self) -> &[u8] {
            &self.0
        }
    }
    let rig = Rig::new();
    let error = HostRegistration::new(&rig.context, Silent(mapped_file(100))).unwrap_err();
    let backing = error.memory.as_ref().unwrap();
    let region = Region::of(&backing.0).unwrap();
    assert_eq!(error.reason, RegisterFailure::Invalid { region });
    assert!(error.to_string().contains("is_read_only"), "{error}");
}

// Memory that is registered already

#[test]
fn memory_that_is_registered_in_part_is_refused_before_the_driver_is_asked() {
    let rig = Rig::new();
    let memory: Arc<[u8]> = vec![7; 100].into();
    let part = Region::of(&memory[40..60]).unwrap();
    let registration = global().register(part);
    let error = HostRegistration::new(&rig.context, Arc::clone(&memory)).unwrap_err();
    let region = Region::of(&memory).unwrap();
    let registered = part;
    assert_eq!(
        error.reason,
        RegisterFailure::Overlaps { region, registered }
    );
    assert!(error.to_string().contains(&part.to_string()), "{error}");
    assert_eq!(rig.sim.calls(REGISTER), 0);
    registration.unregister();
    HostRegistration::new(&rig.context, error.memory.unwrap()).unwrap();
}

#[test]
fn memory_is_not_registered_twice() {
    let rig = Rig::new();
    let memory: Arc<[u8]> = vec![7; 100].into();
    let registration = HostRegistration::new(&rig.context, Arc::clone(&memory)).unwrap();
    let error = HostRegistration::new(&rig.context, Arc::clone(&memory)).unwrap_err();
    assert!(
        matches!(error.reason, RegisterFailure::Overlaps { .. }),
        "{error}"
    );
    assert_eq!(rig.sim.calls(REGISTER), 1);
    assert_eq!(residency(&memory), Residency::Pinned);
    drop(registration);
}

#[test]
fn memory_that_is_a_pinned_buffer_is_refused() {
    struct Buffer(PinnedBuffer<u8>);
    // SAFETY: a buffer's memory does not move with it.
    unsafe impl HostMemory for Buffer {
        fn as_bytes(&self) -> &[u8] {
            &self.0
        }
    }
    let rig = Rig::new();
    let buffer = Buffer(PinnedBuffer::zeroed(&rig.context, 100).unwrap());
    let error = HostRegistration::new(&rig.context, buffer).unwrap_err();
    assert!(
        matches!(error.reason, RegisterFailure::Overlaps { .. }),
        "{error}"
    );
    assert_eq!(rig.sim.calls(REGISTER), 0);
}

#[test]
fn memory_that_others_have_pinned_in_secret_is_an_error_that_says_so() {
    let rig = Rig::new();
    let memory: Arc<[u8]> = vec![7; 100].into();
    let base = memory.as_ptr().cast_mut().cast();
    // SAFETY: the memory outlives its registration.
    let result = unsafe { sys::cuMemHostRegister_v2(base, 50, 0) };
    assert_eq!(result, CUresult::CUDA_SUCCESS);
    let error = HostRegistration::new(&rig.context, Arc::clone(&memory)).unwrap_err();
    let region = Region::of(&memory).unwrap();
    assert_eq!(error.reason, RegisterFailure::AlreadyRegistered { region });
    assert_eq!(residency(&memory), Residency::Pageable);
    // SAFETY: no transfer reads it.
    let result = unsafe { sys::cuMemHostUnregister(base) };
    assert_eq!(result, CUresult::CUDA_SUCCESS);
}

#[test]
fn of_two_threads_that_register_one_mapping_one_does() {
    let rig = Rig::with(|sim| sim.set_attribute(READ_ONLY_SUPPORTED, 1));
    let before = live(&rig);
    let file = Arc::new(mapped_file(8 * PAGE));
    for _ in 0..20 {
        let register =
            || HostRegistration::with_options(&rig.context, Arc::clone(&file), by_page());
        let results = thread::scope(|scope| {
            let other = scope.spawn(register);
            [register(), other.join().unwrap()]
        });
        for error in results.iter().filter_map(|result| result.as_ref().err()) {
            let refused = matches!(error.reason, RegisterFailure::Overlaps { .. });
            assert!(refused && error.memory.is_ok(), "{error}");
        }
        // Both may have been in each other's way.
        let won = results.iter().filter(|result| result.is_ok()).count();
        assert!(won <= 1);
        assert_eq!(live(&rig), before + 8 * won as u64);
        drop(results);
        assert_eq!(live(&rig), before);
        assert_eq!(residency(&file), Residency::Pageable);
    }
}

// Failures

#[test]
fn a_chunk_that_fails_undoes_those_before_it_and_gives_the_memory_back() {
    let rig = Rig::new();
    let before = live(&rig);
    rig.sim.fail_nth(REGISTER, 3, code::OUT_OF_MEMORY);
    let mut seen = 0;
    let mut progress = |_| seen += 1;
    let options = by_page().progress(&mut progress);
    let error = HostRegistration::with_options(&rig.context, pages(5), options).unwrap_err();
    assert_eq!(seen, 2);
    assert_eq!(live(&rig), before);
    assert_eq!(rig.sim.calls(UNREGISTER), 2);
    assert!(error.to_string().contains("WSL2"), "{error}");
    let memory = error.memory.unwrap();
    assert_eq!(
        error.reason,
        RegisterFailure::TooMuch {
            region: Region::of(&memory[2 * PAGE..3 * PAGE]).unwrap(),
            pinned_bytes: 2 * PAGE
        }
    );
    assert_eq!(residency(&memory), Residency::Pageable);
    assert!(memory.iter().all(|&byte| byte == 7));
}

#[test]
fn each_refusal_of_the_driver_has_a_name() {
    fn refused(rig: &Rig, code: i32) -> RegisterFailure {
        rig.sim.fail_nth(REGISTER, 1, code);
        HostRegistration::new(&rig.context, vec![7u8; 9])
            .unwrap_err()
            .reason
    }
    use RegisterFailure as Failure;
    let rig = Rig::new();
    let already = refused(&rig, code::HOST_MEMORY_ALREADY_REGISTERED);
    assert!(matches!(already, Failure::AlreadyRegistered { .. }));
    let invalid = refused(&rig, code::INVALID_VALUE);
    assert!(matches!(invalid, Failure::Invalid { .. }));
    let unsupported = refused(&rig, code::NOT_SUPPORTED);
    assert!(matches!(unsupported, Failure::NotSupported { .. }));
    let other = refused(&rig, code::LAUNCH_FAILED);
    assert!(matches!(other, Failure::Driver(_)));
    assert!(other.to_string().starts_with("cuMemHostRegister failed"));
}

#[test]
fn memory_that_cannot_be_undone_is_given_back_as_a_registration() {
    let rig = Rig::new();
    let before = live(&rig);
    let (memory, freed) = Tracked::new();
    let options = RegisterOptions::default().chunk_bytes(PAGE / 4);
    rig.sim.fail_nth(REGISTER, 3, code::OUT_OF_MEMORY);
    rig.sim.fail_nth(UNREGISTER, 2, code::UNKNOWN);
    let error = HostRegistration::with_options(&rig.context, memory, options).unwrap_err();
    assert!(error.to_string().contains("still page-locked"), "{error}");
    assert!(matches!(error.reason, RegisterFailure::TooMuch { .. }));
    let registration = error.memory.unwrap_err();
    // The first chunk could be unpinned, the second not.
    assert_eq!(live(&rig), before + 1);
    let bytes = registration.as_bytes();
    let second = &bytes[PAGE / 4..PAGE / 2];
    assert_eq!(residency(&bytes[..PAGE / 4]), Residency::Pageable);
    assert_eq!(residency(second), Residency::Pinned);
    assert_eq!(registration.chunks().next(), Region::of(second).ok());

    // It can be tried again, and is leaked if nobody does so in time.
    rig.sim.fail_nth(UNREGISTER, 1, code::UNKNOWN);
    let log = logged(|| drop(registration));
    assert!(log.contains("ERROR") && log.contains("leaked"), "{log}");
    assert_eq!(live(&rig), before + 1);
    assert!(!freed.load(Ordering::Relaxed));
}

/// The error of earlier work, which says nothing about this call.
const EARLIER: i32 = code::ILLEGAL_ADDRESS;

#[test]
fn an_error_that_is_no_refusal_does_not_count_as_not_pinned() {
    let rig = Rig::new();
    let before = live(&rig);
    rig.sim.fail_nth_after_acting(REGISTER, 2, EARLIER);
    let error = HostRegistration::with_options(&rig.context, pages(3), by_page()).unwrap_err();
    assert!(
        matches!(error.reason, RegisterFailure::Driver(_)),
        "{error}"
    );
    // It had been pinned, and was unpinned with the one before.
    assert_eq!(rig.sim.calls(UNREGISTER), 2);
    assert_eq!(live(&rig), before);
    let memory = error.memory.unwrap();
    assert_eq!(residency(&memory), Residency::Pageable);
    let mut on_device = rig.zeros::<u8>(memory.len());
    rig.copier.copy_h2d_async(&memory, &mut on_device).unwrap();
    drop(memory);
    rig.assert_sound();
}

#[test]
fn memory_that_an_error_left_unpinned_is_given_back() {
    let rig = Rig::new();
    rig.sim.fail_nth(REGISTER, 2, EARLIER);
    let error = HostRegistration::with_options(&rig.context, pages(3), by_page()).unwrap_err();
    // The driver was asked to unpin both, and said of the second that it is
    // not page-locked.
    assert_eq!(rig.sim.calls(UNREGISTER), 2);
    assert_eq!(residency(&error.memory.unwrap()), Residency::Pageable);
}

#[test]
fn memory_that_may_be_pinned_stays_registered_until_the_driver_says_otherwise() {
    let rig = Rig::new();
    let before = live(&rig);
    rig.sim.fail_nth_after_acting(REGISTER, 1, EARLIER);
    rig.sim.fail_nth(UNREGISTER, 1, EARLIER);
    let error = HostRegistration::new(&rig.context, vec![7u8; 100]).unwrap_err();
    let registration = error.memory.unwrap_err();
    assert_eq!(live(&rig), before + 1);
    assert_eq!(residency(registration.as_bytes()), Residency::Pinned);
    assert_eq!(registration.unregister().unwrap(), [7; 100]);
    assert_eq!(live(&rig), before);
}

#[test]
fn the_limit_holds_for_undoing_too() {
    let rig = Rig::new();
    let before = live(&rig);
    let (start, started) = mpsc::channel::<()>();
    let (entered, wait) = mpsc::channel();
    let (done, end) = mpsc::channel::<()>();
    let in_section = thread::spawn(move || {
        started.recv().unwrap();
        let _section = global().enter();
        entered.send(()).unwrap();
        end.recv().unwrap();
    });
    let mut progress = |_| {
        start.send(()).unwrap();
        wait.recv().unwrap();
    };
    let options = by_page()
        .grace_limit(Duration::from_millis(20))
        .progress(&mut progress);
    let error = HostRegistration::with_options(&rig.context, pages(3), options).unwrap_err();
    assert!(matches!(error.reason, RegisterFailure::Grace(_)), "{error}");
    let registration = error.memory.unwrap_err();
    assert_eq!(registration.chunks().len(), 1);
    assert_eq!(
        residency(&registration.as_bytes()[..PAGE]),
        Residency::Pinned
    );
    assert_eq!(live(&rig), before + 1);
    // Once the section has ended it can be undone.
    done.send(()).unwrap();
    in_section.join().unwrap();
    registration.unregister().unwrap();
    assert_eq!(live(&rig), before);
}

#[test]
fn the_limit_holds_for_dropping_too() {
    let rig = Rig::new();
    let (memory, freed) = Tracked::new();
    let options = RegisterOptions::default().grace_limit(Duration::from_millis(20));
    let registration = HostRegistration::with_options(&rig.context, memory, options).unwrap();
    let (entered, wait) = mpsc::channel();
    let (done, end) = mpsc::channel::<()>();
    let in_section = thread::spawn(move || {
        let _section = global().enter();
        entered.send(()).unwrap();
        end.recv().unwrap();
    });
    wait.recv().unwrap();
    let log = logged(|| drop(registration));
    assert!(log.contains("WARN") && log.contains("later"), "{log}");
    // Neither does a call that does not wait give it back, nor one whose own limit
    // is too short.
    assert_eq!(reclaim(), 0);
    let options = RegisterOptions::default().grace_limit(Duration::from_millis(1));
    drop(HostRegistration::with_options(&rig.context, vec![0u8; 0], options).unwrap());
    assert!(!freed.load(Ordering::Relaxed));
    assert_eq!(rig.sim.calls(UNREGISTER), 0);
    done.send(()).unwrap();
    in_section.join().unwrap();
    HostRegistration::new(&rig.context, vec![0u8; 0]).unwrap();
    assert!(freed.load(Ordering::Relaxed));
    assert_eq!(rig.sim.calls(UNREGISTER), 1);
}

/// Of many chunks, all are waited for at once.
#[test]
fn unpinning_takes_one_grace_period_however_many_chunks() {
    let rig = Rig::new();
    let registration = pinned_by_page(&rig, 3);
    let base = registration.as_bytes().as_ptr().addr();
    // As the driver is asked to unpin the first chunk, none is live any more.
    let states = || {
        let ours = global()
            .regions()
            .filter(|entry| (base..base + 3 * PAGE).contains(&entry.region().base().addr()));
        ours.map(|entry| entry.state()).collect::<Vec<_>>()
    };
    assert_eq!(states(), [RegionState::Live; 3]);
    let (entered, wait) = mpsc::channel();
    let (done, end) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            let _section = global().enter();
            entered.send(()).unwrap();
            end.recv().unwrap();
        });
        wait.recv().unwrap();
        let unpinning = scope.spawn(|| registration.unregister().map(drop).unwrap());
        let deadline = Instant::now() + Duration::from_secs(5);
        while states() != [RegionState::Retiring; 3] && Instant::now() < deadline {
            thread::yield_now();
        }
        let seen = states();
        done.send(()).unwrap();
        unpinning.join().unwrap();
        assert_eq!(seen, [RegionState::Retiring; 3]);
    });
    assert!(states().is_empty());
}

#[test]
fn a_panic_of_the_progress_function_undoes_everything() {
    let rig = Rig::new();
    let before = live(&rig);
    let (memory, freed) = Tracked::new();
    let panicked = thread::scope(|scope| {
        let context = &rig.context;
        let pinning = scope.spawn(move || {
            let mut progress = |_| panic!("as ordered");
            let options = RegisterOptions::default().progress(&mut progress);
            HostRegistration::with_options(context, memory, options).map(drop)
        });
        pinning.join().is_err()
    });
    assert!(panicked);
    assert_eq!(live(&rig), before);
    assert!(freed.load(Ordering::Relaxed));
}

#[test]
fn memory_that_could_not_be_unregistered_can_be_again() {
    let rig = Rig::new();
    let before = live(&rig);
    let registration = pinned_by_page(&rig, 3);
    rig.sim.fail_nth(UNREGISTER, 2, code::UNKNOWN);
    let error = registration.unregister().unwrap_err();
    assert!(
        matches!(error.reason, UnregisterFailure::Driver(_)),
        "{error}"
    );
    let registration = error.registration;
    let middle = Region::of(&registration.as_bytes()[PAGE..2 * PAGE]).unwrap();
    assert_eq!(registration.chunks().collect::<Vec<_>>(), [middle]);
    assert_eq!(residency(registration.as_bytes()), Residency::Mixed);
    assert_eq!(live(&rig), before + 1);
    let memory = registration.unregister().unwrap();
    assert_eq!(residency(&memory), Residency::Pageable);
    assert_eq!(live(&rig), before);
}

#[test]
fn chunks_that_could_not_be_unregistered_are_kept_in_order_with_the_first_error() {
    let rig = Rig::new();
    let registration = pinned_by_page(&rig, 3);
    rig.sim
        .fail_nth(UNREGISTER, 1, code::HOST_MEMORY_NOT_REGISTERED);
    rig.sim.fail_nth(UNREGISTER, 2, code::UNKNOWN);
    let error = registration.unregister().unwrap_err();
    let chunk = |page: usize| {
        let bytes = error.registration.as_bytes();
        Region::of(&bytes[page * PAGE..(page + 1) * PAGE]).unwrap()
    };
    let chunks: Vec<_> = error.registration.chunks().collect();
    assert_eq!(chunks, [chunk(0), chunk(1)]);
    let region = chunk(0);
    assert_eq!(error.reason, UnregisterFailure::NotRegistered { region });
}

#[test]
fn it_can_be_dropped_on_a_thread_that_never_called_the_driver() {
    let rig = Rig::new();
    let before = live(&rig);
    let registration = pinned_by_page(&rig, 2);
    thread::spawn(move || drop(registration)).join().unwrap();
    assert_eq!(live(&rig), before);
}

#[test]
fn memory_that_cannot_be_unregistered_is_leaked_and_late_copies_are_still_sound() {
    let rig = Rig::new();
    let before = live(&rig);
    let (memory, freed) = Tracked::new();
    let registration = HostRegistration::new(&rig.context, memory).unwrap();
    let (base, len) = (registration.as_bytes().as_ptr(), PAGE);
    rig.sim.fail_nth(UNREGISTER, 1, code::UNKNOWN);
    let log = logged(|| drop(registration));
    assert!(log.contains("ERROR") && log.contains("leaked"), "{log}");
    assert!(!freed.load(Ordering::Relaxed));
    assert_eq!(live(&rig), before + 1);
    // SAFETY: the memory was leaked.
    let bytes = unsafe { slice::from_raw_parts(base, len) };
    let mut on_device = rig.zeros::<u8>(len);
    rig.copier.copy_h2d_async(bytes, &mut on_device).unwrap();
    assert_eq!(rig.copier.stats().guarded, 1);
    assert_eq!(rig.read_back(&on_device), bytes);
    rig.assert_sound();
}

#[test]
fn leaked_memory_stays_pinned_after_its_context_is_dropped() {
    let rig = Rig::new();
    let before = live(&rig);
    let other = pinned_hosts::cuda::context(1).unwrap();
    let kept = HostRegistration::new(&other, vec![7u8; 100]).unwrap();
    let leaked = HostRegistration::new(&other, vec![7u8; 100]).unwrap();
    drop(other);
    assert_eq!(live(&rig), before + 2, "a registration holds its context");
    rig.sim.fail_nth(UNREGISTER, 1, code::UNKNOWN);
    drop(leaked);
    drop(kept);
    assert_eq!(live(&rig), before + 1, "and so does a leak");
}

#[test]
fn memory_that_others_have_unpinned_in_secret_is_an_error_that_says_so() {
    let rig = Rig::new();
    let registration = HostRegistration::new(&rig.context, vec![7u8; 100]).unwrap();
    let base = registration.as_bytes().as_ptr().cast_mut().cast();
    // SAFETY: no transfer reads it.
    let result = unsafe { sys::cuMemHostUnregister(base) };
    assert_eq!(result, CUresult::CUDA_SUCCESS);
    let error = registration.unregister().unwrap_err();
    let region = Region::of(error.registration.as_bytes()).unwrap();
    assert_eq!(error.reason, UnregisterFailure::NotRegistered { region });
    assert!(error.to_string().contains("cuMemHostUnregister"), "{error}");
    assert_eq!(residency(error.registration.as_bytes()), Residency::Pinned);
}

// Sections

#[test]
fn inside_a_section_nothing_is_pinned() {
    let rig = Rig::new();
    let section = global().enter();
    let error = HostRegistration::new(&rig.context, vec![7u8; 100]).unwrap_err();
    assert_eq!(
        error.reason,
        RegisterFailure::Grace(GraceError::InsideSection)
    );
    assert_eq!(rig.sim.calls(REGISTER), 0);
    let memory = error.memory.unwrap();
    assert_eq!(section.residency(&memory), Residency::Pageable);
    drop(section);
    HostRegistration::new(&rig.context, memory).unwrap();
}

/// Drops a registration inside a section, and tells when the memory is freed.
fn dropped_inside_a_section(rig: &Rig) -> (*const u8, Arc<AtomicBool>) {
    let (memory, freed) = Tracked::new();
    let registration = HostRegistration::new(&rig.context, memory).unwrap();
    let base = registration.as_bytes().as_ptr();
    let _section = global().enter();
    drop(registration);
    (base, freed)
}

fn state_at(base: *const u8) -> Option<RegionState> {
    let entry = global().regions().find(|it| it.region().base() == base);
    entry.map(|entry| entry.state())
}

#[test]
fn dropped_inside_a_section_it_is_given_back_later() {
    let empty = |rig: &Rig| HostRegistration::new(&rig.context, vec![0u8; 0]).unwrap();
    // One that exists already, since to make one is such a call itself.
    type Later = fn(&Rig, HostRegistration<Vec<u8>>);
    let calls: [(&str, Later); 4] = [
        ("make", |rig, other| {
            let new = HostRegistration::new(&rig.context, vec![0u8; 0]);
            std::mem::forget((new.unwrap(), other));
        }),
        ("unregister", |_, other| drop(other.unregister().unwrap())),
        ("drop", |_, other| drop(other)),
        ("reclaim", |_, other| {
            std::mem::forget(other);
            // It waits for nobody, and other tests' threads may be in sections.
            let deadline = Instant::now() + Duration::from_secs(20);
            while reclaim() == 0 && Instant::now() < deadline {
                thread::yield_now();
            }
        }),
    ];
    for (name, later) in calls {
        let rig = Rig::new();
        let before = live(&rig);
        let other = empty(&rig);
        let mut seen = None;
        let log = logged(|| seen = Some(dropped_inside_a_section(&rig)));
        let (base, freed) = seen.unwrap();
        assert!(log.contains("WARN") && log.contains("Section"), "{log}");
        assert!(!log.contains("ERROR"), "{log}");
        assert!(!freed.load(Ordering::Relaxed));
        assert_eq!((live(&rig), rig.sim.calls(UNREGISTER)), (before + 1, 0));
        assert_eq!(state_at(base), Some(RegionState::Live));
        // To make a buffer leaves it alone: to unpin it may take long.
        drop(PinnedBuffer::<u8>::zeroed(&rig.context, PAGE).unwrap());
        assert!(!freed.load(Ordering::Relaxed));
        {
            let _section = global().enter();
            assert_eq!(reclaim(), 0, "this thread is inside a section");
        }
        later(&rig, other);
        assert!(freed.load(Ordering::Relaxed), "{name}");
        assert_eq!(
            (live(&rig), rig.sim.calls(UNREGISTER)),
            (before, 1),
            "{name}"
        );
        assert_eq!(state_at(base), None, "{name}");
    }
}

#[test]
fn dropped_inside_a_scope_it_is_given_back_later_and_copies_are_sound() {
    let rig = Rig::new();
    let before = live(&rig);
    let memory: Arc<[u8]> = vec![7; PAGE].into();
    let registration = HostRegistration::new(&rig.context, Arc::clone(&memory)).unwrap();
    let mut on_device = rig.zeros::<u8>(PAGE);
    rig.copier
        .scope(|scope| {
            scope.copy_h2d(&memory, &mut on_device)?;
            drop(registration);
            scope.copy_h2d(&memory, &mut on_device)
        })
        .unwrap();
    assert_eq!(residency(&memory), Residency::Pinned);
    // The same memory, so the registry has to be rid of it first.
    let again = HostRegistration::new(&rig.context, Arc::clone(&memory)).unwrap();
    assert_eq!(again.chunks().len(), 1);
    drop(again);
    assert_eq!(
        (live(&rig), residency(&memory)),
        (before, Residency::Pageable)
    );
    assert_eq!(Arc::strong_count(&memory), 1);
    rig.assert_sound();
}

/// The twin: what the driver does not unpin is leaked for good.
#[test]
fn what_the_driver_does_not_unpin_later_either_is_leaked_and_reported() {
    let rig = Rig::new();
    let (base, freed) = dropped_inside_a_section(&rig);
    rig.sim.fail_nth(UNREGISTER, 1, code::UNKNOWN);
    let make = || drop(HostRegistration::new(&rig.context, vec![0u8; 0]).unwrap());
    let log = logged(make);
    assert!(log.contains("ERROR") && log.contains("leaked"), "{log}");
    make();
    assert_eq!(rig.sim.calls(UNREGISTER), 1);
    assert!(!freed.load(Ordering::Relaxed));
    assert_eq!(state_at(base), Some(RegionState::Live));
}

/// To free memory runs code of the program's.
#[test]
fn memory_whose_drop_panics_is_the_only_one_that_is_lost() {
    struct Panics(Box<[u8]>);
    // SAFETY: as for `Tracked`.
    unsafe impl HostMemory for Panics {
        fn as_bytes(&self) -> &[u8] {
            &self.0
        }
    }
    impl Drop for Panics {
        fn drop(&mut self) {
            panic!("as ordered");
        }
    }

    let rig = Rig::new();
    let before = live(&rig);
    let (first, first_freed) = Tracked::new();
    let (last, last_freed) = Tracked::new();
    let first = HostRegistration::new(&rig.context, first).unwrap();
    let panics = HostRegistration::new(&rig.context, Panics(vec![7; PAGE].into())).unwrap();
    let last = HostRegistration::new(&rig.context, last).unwrap();
    let section = global().enter();
    drop((first, panics, last));
    drop(section);
    let make = || drop(HostRegistration::new(&rig.context, vec![0u8; 0]).unwrap());
    catch_unwind(AssertUnwindSafe(make)).unwrap_err();
    make();
    assert!(first_freed.load(Ordering::Relaxed) && last_freed.load(Ordering::Relaxed));
    assert_eq!(live(&rig), before);
}

#[test]
fn inside_a_section_it_is_not_unregistered_but_given_back() {
    let rig = Rig::new();
    let registration = pinned_by_page(&rig, 3);
    let section = global().enter();
    let error = registration.unregister().unwrap_err();
    drop(section);
    let inside = UnregisterFailure::Grace(GraceError::InsideSection);
    assert_eq!(error.reason, inside);
    assert_eq!(error.registration.chunks().len(), 3);
    error.registration.unregister().unwrap();
}

#[test]
fn other_threads_sections_are_waited_for_within_the_limit() {
    fn timed_out(grace: &GraceError) -> bool {
        matches!(grace, GraceError::TimedOut { waited } if *waited < Duration::from_secs(5))
    }
    let rig = Rig::new();
    let options = || RegisterOptions::default().grace_limit(Duration::from_millis(20));
    let register = |memory| HostRegistration::with_options(&rig.context, memory, options());
    let registration = register(vec![7u8; 100]).unwrap();

    let (entered, wait) = mpsc::channel();
    let (done, end) = mpsc::channel::<()>();
    let in_section = thread::spawn(move || {
        let _section = global().enter();
        entered.send(()).unwrap();
        end.recv().unwrap();
    });
    wait.recv().unwrap();
    let error = register(vec![8u8; 100]).unwrap_err();
    assert!(
        matches!(&error.reason, RegisterFailure::Grace(it) if timed_out(it)),
        "{error}"
    );
    assert_eq!(
        residency(error.memory.as_ref().unwrap()),
        Residency::Pageable
    );
    let error = registration.unregister().unwrap_err();
    assert!(
        matches!(&error.reason, UnregisterFailure::Grace(it) if timed_out(it)),
        "{error}"
    );
    assert_eq!((rig.sim.calls(REGISTER), rig.sim.calls(UNREGISTER)), (1, 0));
    done.send(()).unwrap();
    in_section.join().unwrap();
    error.registration.unregister().unwrap();
}

// Forks

#[test]
fn a_forked_child_unpins_and_frees_nothing() {
    let name = "a_forked_child_unpins_and_frees_nothing";
    // In a process of its own, so that no other test runs while it forks.
    if let Some(output) = in_child(name, |_| ()) {
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let rig = Rig::new();
    let (memory, freed) = Tracked::new();
    let dropped = HostRegistration::new(&rig.context, memory).unwrap();
    let asked = HostRegistration::new(&rig.context, vec![7u8; 100]).unwrap();
    let (_, late) = dropped_inside_a_section(&rig);
    // SAFETY: the child only tries to unpin, and leaves.
    match unsafe { libc::fork() } {
        0 => {
            drop(dropped);
            let refused = asked.unregister().err();
            let refused = refused.is_some_and(|it| it.reason == UnregisterFailure::ForkedChild);
            let calls = rig.sim.calls(UNREGISTER);
            let nothing = reclaim() == 0 && !late.load(Ordering::Relaxed);
            let right = refused && nothing && calls == 0 && !freed.load(Ordering::Relaxed);
            // SAFETY: ends the child, without running what the parent owns.
            unsafe { libc::_exit(i32::from(!right)) }
        }
        child => {
            assert!(child > 0, "fork");
            let mut status = -1;
            // SAFETY: `child` is ours, and `status` a place for its status.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0, "the child unpinned memory of its parent's");
        }
    }
    drop(dropped);
    asked.unregister().unwrap();
    assert_eq!(rig.sim.calls(UNREGISTER), 3);
    assert!(freed.load(Ordering::Relaxed) && late.load(Ordering::Relaxed));
}

// Types

#[test]
fn errors_can_be_passed_on_and_registrations_sent() {
    fn passed_on<E: std::error::Error + Send + Sync + 'static>() {}
    fn sent<T: Send + Sync>() {}
    passed_on::<RegisterError<Vec<u8>>>();
    passed_on::<pinned_hosts::cuda::UnregisterError<Vec<u8>>>();
    passed_on::<CudaError>();
    sent::<HostRegistration<Vec<u8>>>();
}
