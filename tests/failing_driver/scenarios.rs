//! What a program does with this crate, a little of everything, to be run over
//! a driver of which some call fails.
//!
//! A scenario goes on after an error, looks at every result, and rewrites or
//! frees each source right after its call. What it saw it notes, to be compared
//! with what the device has once all is done ([`Notes`]).
#![expect(
    clippy::result_large_err,
    reason = "an error of a transfer has the transfer"
)]

use std::future::{Future, IntoFuture};
use std::pin::pin;
use std::ptr;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;
use std::vec::IntoIter;

use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, CudaViewMut, DriverError};
use pinned_hosts::cuda::{
    self, CheckedCopies, Copier, CopierOptions, CudaError, HostMemory, HostRegistration,
    PinnedBuffer, PinnedPool, Policy, Progress, RegisterFailure, RegisterOptions, Transfer,
    TransferError, UnregisterFailure,
};
use pinned_hosts::{Region, Registration, global};

/// Bytes of a copy, and of a place for one on the device.
pub(crate) const LEN: usize = 256;
/// Places on the device.
pub(crate) const PLACES: usize = 64;
/// What the device memory to copy from is full of.
pub(crate) const ON_DEVICE: u8 = 0x77;
/// What host memory is full of before a copy to it, and again right after.
const ON_HOST: u8 = 0x55;
/// What a source is full of right after its copy.
const REWRITTEN: u8 = 0xee;

pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) run: fn(&Means<'_>, &mut Memory, &mut Notes<'_>) -> Result<(), CudaError>,
}

macro_rules! scenarios {
    ($($name:ident,)*) => {
        pub(crate) const SCENARIOS: &[Scenario] = &[$(Scenario {
            name: stringify!($name),
            run: $name,
        },)*];
    };
}

scenarios! {
    opening,
    borrowed_sources,
    split_sources,
    staging_rings,
    retiring_memory,
    owned_buffers,
    one_place_from_two_streams,
    uploads,
    downloads,
    pools,
    scopes,
    borrowed_destinations,
    checked_copies,
    registering_and_copying,
    registering_while_another_thread_copies,
}

/// What there is before any call fails.
pub(crate) struct Means<'a> {
    pub(crate) context: &'a Arc<CudaContext>,
    pub(crate) stream: &'a Arc<CudaStream>,
    pub(crate) other: &'a Arc<CudaStream>,
    pub(crate) on_device: &'a CudaSlice<u8>,
}

/// Page-locked memory of the program's own.
pub(crate) struct Memory {
    pinned: Locked,
    /// Page-locked in two pieces,
    seam: Locked,
    /// and with a gap between the two.
    mixed: Locked,
}

impl Memory {
    pub(crate) fn new(context: &Arc<CudaContext>) -> Self {
        Self {
            pinned: Locked::new(context, &[(0, LEN)]),
            seam: Locked::new(context, &[(0, 101), (101, LEN)]),
            mixed: Locked::new(context, &[(0, 101), (203, LEN)]),
        }
    }

    /// Fails if the device has written any of it since.
    pub(crate) fn check(&self, case: &str) {
        for locked in [&self.pinned, &self.seam, &self.mixed] {
            let bytes = &locked.bytes;
            let as_left = bytes.iter().all(|byte| [ON_HOST, REWRITTEN].contains(byte));
            assert!(as_left, "{case}: host memory was written after the call");
        }
    }
}

/// Memory that is page-locked in parts.
struct Locked {
    context: Arc<CudaContext>,
    bytes: Vec<u8>,
    parts: Vec<(usize, Registration<'static>)>,
}

impl Locked {
    fn new(context: &Arc<CudaContext>, parts: &[(usize, usize)]) -> Self {
        let bytes = vec![ON_HOST; LEN];
        let lock = |&(start, end): &(usize, usize)| {
            let part = &bytes[start..end];
            let registration = global().register(Region::of(part).unwrap());
            page_lock(context, part).unwrap();
            (start, registration)
        };
        let parts = parts.iter().map(lock).collect();
        let context = Arc::clone(context);
        Self {
            context,
            bytes,
            parts,
        }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        for (start, registration) in self.parts.drain(..) {
            page_unlock(&self.context, self.bytes[start..].as_ptr()).unwrap();
            registration.unregister();
        }
    }
}

fn page_lock(context: &CudaContext, bytes: &[u8]) -> Result<(), DriverError> {
    let base = bytes.as_ptr().cast_mut().cast();
    // SAFETY: whoever calls this keeps the memory until it is unlocked.
    let lock = || unsafe { sys::cuMemHostRegister_v2(base, bytes.len(), 1) };
    in_two_tries(
        context,
        lock,
        CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
    )
}

fn page_unlock(context: &CudaContext, base: *const u8) -> Result<(), DriverError> {
    // SAFETY: locked by `page_lock`, and no copy reads it.
    let unlock = || unsafe { sys::cuMemHostUnregister(base.cast_mut().cast()) };
    in_two_tries(
        context,
        unlock,
        CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
    )
}

/// Calls the driver twice if need be: these calls are not what is tested, and
/// one that fails may have acted.
fn in_two_tries(
    context: &CudaContext,
    call: impl Fn() -> CUresult,
    done_already: CUresult,
) -> Result<(), DriverError> {
    let call = || {
        // SAFETY: the context lives.
        let _ = unsafe { sys::cuCtxSetCurrent(context.cu_ctx()) };
        call()
    };
    if call() == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    match call() {
        code if code == done_already => Ok(()),
        code => code.result(),
    }
}

/// Where a scenario copies to, and what it has seen.
pub(crate) struct Notes<'a> {
    places: IntoIter<Place<'a>>,
    next_value: u8,
    pub(crate) seen: Seen,
}

#[derive(Default)]
pub(crate) struct Seen {
    copies: Vec<Copied>,
    /// Every error that was returned, refusals that were asked for aside.
    pub(crate) errors: Vec<CudaError>,
    /// Host memory that the device must not write any more.
    kept: Vec<Vec<u8>>,
    downloads: usize,
}

struct Place<'a> {
    number: usize,
    view: CudaViewMut<'a, u8>,
}

/// A copy to a place on the device, from a source full of one value.
struct Copied {
    place: usize,
    bytes: usize,
    value: u8,
    result: Result<(), CudaError>,
}

impl<'a> Notes<'a> {
    pub(crate) fn new(places: CudaViewMut<'a, u8>) -> Self {
        let views = places.chunks_exact_mut(LEN).enumerate();
        let places: Vec<_> = views.map(|(number, view)| Place { number, view }).collect();
        Self {
            places: places.into_iter(),
            next_value: 0,
            seen: Seen::default(),
        }
    }

    fn place(&mut self) -> Place<'a> {
        self.places
            .next()
            .expect("there are more places than copies")
    }

    /// A value that no other source has.
    fn value(&mut self) -> u8 {
        self.next_value += 1;
        assert!(self.next_value < ON_HOST);
        self.next_value
    }

    /// Notes an error, and goes on without what was to be.
    fn some<T>(&mut self, result: Result<T, CudaError>) -> Option<T> {
        result.map_err(|error| self.seen.errors.push(error)).ok()
    }

    /// Notes what came of a copy of `bytes` to `place`.
    fn copied(&mut self, place: usize, bytes: usize, value: u8, result: Result<(), CudaError>) {
        self.seen.errors.extend(result.clone().err());
        self.seen.copies.push(Copied {
            place,
            bytes,
            value,
            result,
        });
    }

    /// Fills a source, copies it to a place, and rewrites it at once.
    fn copy_from(
        &mut self,
        source: &mut [u8],
        copy: impl FnOnce(&[u8], &mut CudaViewMut<'a, u8>) -> Result<(), CudaError>,
    ) {
        let value = self.value();
        source.fill(value);
        let mut place = self.place();
        leave_context();
        let result = copy(source, &mut place.view);
        source.fill(REWRITTEN);
        self.copied(place.number, source.len(), value, result);
    }

    /// Copies to host memory, looks at what arrived, and rewrites it at once.
    fn copy_to(
        &mut self,
        target: &mut [u8],
        copy: impl FnOnce(&mut [u8]) -> Result<(), CudaError>,
    ) {
        target.fill(ON_HOST);
        leave_context();
        let result = copy(target);
        self.downloaded(target, result);
        target.fill(ON_HOST);
    }

    /// As [`copy_to`](Self::copy_to), to memory that is kept for the end.
    fn copy_to_kept(&mut self, copy: impl FnOnce(&mut [u8]) -> Result<(), CudaError>) {
        let mut target = vec![ON_HOST; LEN];
        self.copy_to(&mut target, copy);
        self.seen.kept.push(target);
    }

    fn downloaded(&mut self, target: &[u8], result: Result<(), CudaError>) {
        self.seen.downloads += 1;
        let fits = |byte: &u8| match &result {
            Ok(()) => *byte == ON_DEVICE,
            Err(CudaError::Driver { .. }) => [ON_DEVICE, ON_HOST].contains(byte),
            Err(_) => *byte == ON_HOST,
        };
        assert!(target.iter().all(fits), "{result:?}, but {target:x?}");
        self.seen.errors.extend(result.err());
    }

    /// A copy that was to be refused.
    fn denied(&mut self, result: Result<(), CudaError>) {
        match result {
            Ok(()) => panic!("a copy was not denied"),
            Err(CudaError::Denied { .. }) => {}
            Err(error) => self.seen.errors.push(error),
        }
    }
}

impl Seen {
    pub(crate) fn copies(&self) -> usize {
        self.copies.len() + self.downloads
    }

    /// Compares what is at the places, in their order, with what was copied.
    pub(crate) fn check(&self, places: &[u8], case: &str) {
        for copied in &self.copies {
            let place = &places[copied.place * LEN..][..LEN];
            let (copy, rest) = place.split_at(copied.bytes);
            let value = copied.value;
            let fits = |byte: &u8| match &copied.result {
                Ok(()) => *byte == value,
                // It may have happened, in part too.
                Err(CudaError::Driver { .. }) => [0, value].contains(byte),
                Err(_) => *byte == 0,
            };
            assert!(
                copy.iter().all(fits) && rest.iter().all(|byte| *byte == 0),
                "{case}: {value:x} ended with {:?}, but there is {place:x?}",
                copied.result
            );
        }
        let untouched = |kept: &Vec<u8>| kept.iter().all(|byte| *byte == ON_HOST);
        assert!(
            self.kept.iter().all(untouched),
            "{case}: host memory was written after the call"
        );
    }
}

/// As on a thread that has not used the driver yet.
pub(crate) fn leave_context() {
    // SAFETY: whatever calls the driver next sees to its context itself. If it
    // fails, that is one case more.
    let _ = unsafe { sys::cuCtxSetCurrent(ptr::null_mut()) };
}

fn copier(means: &Means<'_>, options: CopierOptions) -> Result<Copier, CudaError> {
    Copier::with_options(means.stream, options)
}

fn waiting() -> CopierOptions {
    CopierOptions::default().policy(Policy::Wait)
}

fn by_cudarc(error: DriverError) -> CudaError {
    CudaError::Driver {
        call: BY_CUDARC[0],
        source: error,
    }
}

/// Where `cudarc` does not say which of its calls failed.
pub(crate) const BY_CUDARC: [&str; 4] = [
    "a call of cudarc's",
    "opening the device's context",
    "creating a stream",
    "allocating device memory",
];

/// Opens everything anew.
fn opening(_: &Means<'_>, memory: &mut Memory, notes: &mut Notes<'_>) -> Result<(), CudaError> {
    // Of a device that is not open yet.
    drop(cuda::context(1)?);
    // An object in which no copier was made.
    let context = CudaContext::new(0).map_err(by_cudarc)?;
    let stream = context.default_stream();
    let copier = Copier::new(&stream)?;
    notes.copy_from(&mut [0; LEN], |from, to| copier.copy_h2d_async(from, to));
    notes.copy_from(&mut memory.pinned.bytes, |from, to| {
        copier.copy_h2d_async(from, to)
    });
    let error = CudaError::Driver {
        call: "cuMemHostAlloc",
        source: DriverError(CUresult::CUDA_ERROR_UNKNOWN),
    };
    let text = error.to_string();
    assert!(
        text.contains("cuMemHostAlloc") && text.contains("999"),
        "{text}"
    );
    stream.synchronize().map_err(by_cudarc)
}

fn borrowed_sources(
    means: &Means<'_>,
    memory: &mut Memory,
    notes: &mut Notes<'_>,
) -> Result<(), CudaError> {
    let copier = copier(means, CopierOptions::default())?;
    let pinned = &mut memory.pinned.bytes;
    notes.copy_from(&mut [0; LEN], |from, to| copier.copy_h2d_async(from, to));
    notes.copy_from(&mut [], |from, to| copier.copy_h2d_async(from, to));
    for policy in [Policy::Stage, Policy::Wait] {
        notes.copy_from(pinned, |from, to| {
            copier.copy_h2d_async_with(policy, from, to)
        });
        notes.copy_from(&mut pinned[3..40], |from, to| {
            copier.copy_h2d_async_with(policy, from, to)
        });
    }
    // Freed at once.
    let (value, place) = (notes.value(), notes.place());
    let (number, mut view) = (place.number, place.view);
    let copied = PinnedBuffer::from_slice(means.context, &[value; LEN])
        .and_then(|source| copier.copy_h2d_async(&source, &mut view));
    notes.copied(number, LEN, value, copied);

    let mut place = notes.place();
    notes.denied(copier.copy_h2d_async_with(Policy::Deny, pinned, &mut place.view));
    // Then the zeros are there.
    notes.copied(place.number, LEN, 0, Ok(()));

    let small = self::copier(means, CopierOptions::default().stage_limit(LEN - 1))?;
    notes.copy_from(pinned, |from, to| small.copy_h2d_async(from, to));
    notes.copy_from(&mut pinned[1..], |from, to| small.copy_h2d_async(from, to));
    let per_thread = Copier::new(&means.context.per_thread_stream())?;
    notes.copy_from(pinned, |from, to| per_thread.copy_h2d_async(from, to));
    Ok(())
}

fn split_sources(
    means: &Means<'_>,
    memory: &mut Memory,
    notes: &mut Notes<'_>,
) -> Result<(), CudaError> {
    let copier = copier(means, waiting())?;
    for source in [&mut memory.seam.bytes, &mut memory.mixed.bytes] {
        for policy in [Policy::Wait, Policy::Stage] {
            notes.copy_from(source, |from, to| {
                copier.copy_h2d_async_with(policy, from, to)
            });
        }
    }
    Ok(())
}

/// Rings of one source, of one block, and of two.
fn staging_rings(
    means: &Means<'_>,
    memory: &mut Memory,
    notes: &mut Notes<'_>,
) -> Result<(), CudaError> {
    let pinned = &mut memory.pinned.bytes;
    for (blocks_of_64, copies) in [(1, 3), (4, 6), (8, 10)] {
        let options = CopierOptions::default()
            .stage_limit(64)
            .ring_limit(blocks_of_64 * 64);
        let Some(copier) = notes.some(copier(means, options)) else {
            continue;
        };
        for copy in 0..copies {
            notes.copy_from(&mut pinned[copy..copy + 64], |from, to| {
                copier.copy_h2d_async(from, to)
            });
        }
    }
    Ok(())
}

/// Memory that is copied from and to while it is being unpinned.
fn retiring_memory(
    means: &Means<'_>,
    _: &mut Memory,
    notes: &mut Notes<'_>,
) -> Result<(), CudaError> {
    let copier = copier(means, CopierOptions::default())?;
    let mut bytes = vec![ON_HOST; 4 * LEN];
    let region = Region::of(&bytes).unwrap();
    let lock = || page_lock(means.context, &bytes);
    let registration = global().pin_with(region, lock).unwrap();
    let unpin = || {
        let (pinned, back) = bytes.split_at_mut(LEN);
        for policy in [Policy::Stage, Policy::Wait] {
            notes.copy_from(pinned, |from, to| {
                copier.copy_h2d_async_with(policy, from, to)
            });
            notes.copy_from(pinned, |from, to| {
                copier.scope(|scope| scope.copy_h2d(from, to))
            });
        }
        let (first, second) = back[..2 * LEN].split_at_mut(LEN);
        notes.copy_to(first, |to| copier.copy_d2h_async(means.on_device, to));
        notes.copy_to(second, |to| {
            copier.scope(|scope| scope.copy_d2h(means.on_device, to))
        });
        page_unlock(means.context, region.base())
    };
    registration.unpin_with(unpin).unwrap();
    // Nothing may be written any more, so it can be looked at to the end.
    notes.seen.kept.push(bytes.split_off(LEN));
    Ok(())
}

fn owned_buffers(
    means: &Means<'_>,
    _: &mut Memory,
    notes: &mut Notes<'_>,
) -> Result<(), CudaError> {
    let copier = copier(means, CopierOptions::default())?;
    let other = Copier::new(means.other)?;
    let mut buffer = PinnedBuffer::from_slice(means.context, &[0; LEN])?;
    for copiers in [&[&copier][..], &[&copier, &other], &[&other]] {
        let value = notes.value();
        let Some(bytes) = notes.some(buffer.as_mut_slice()) else {
            continue;
        };
        bytes.fill(value);
        for copier in copiers {
            let mut place = notes.place();
            leave_context();
            let copied = copier.copy_h2d_from(&buffer, 1..LEN, &mut place.view);
            notes.copied(place.number, LEN - 1, value, copied);
        }
    }
    let waited = buffer.wait();
    notes.some(waited);
    if let Some(bytes) = notes.some(buffer.as_mut_slice()) {
        bytes.fill(REWRITTEN);
    }
    // Dropped while it is in use.
    let (value, mut place) = (notes.value(), notes.place());
    let buffer = PinnedBuffer::from_slice(means.context, &[value; LEN])?;
    let copied = copier.copy_h2d_from(&buffer, 0..LEN, &mut place.view);
    leave_context();
    drop(buffer);
    notes.copied(place.number, LEN, value, copied);
    Ok(())
}

/// A copy must come after an earlier one of another stream to the same place,
/// or not be made.
fn one_place_from_two_streams(
    means: &Means<'_>,
    memory: &mut Memory,
    notes: &mut Notes<'_>,
) -> Result<(), CudaError> {
    let copier = copier(means, waiting())?;
    let other = Copier::new(means.other)?;
    let [first, second] = [(); 2].map(|()| notes.value());
    let buffer = PinnedBuffer::from_slice(means.context, &[first; LEN])?;
    let mut place = notes.place();
    let earlier = other.copy_h2d_from(&buffer, 0..LEN, &mut place.view);
    // It is waited for, and the earlier one only if it has to be.
    memory.pinned.bytes.fill(second);
    let later = copier.copy_h2d_async(&memory.pinned.bytes, &mut place.view);
    memory.pinned.bytes.fill(REWRITTEN);
    match later {
        Ok(()) => {
            notes.seen.errors.extend(earlier.err());
            notes.copied(place.number, LEN, second, later);
        }
        // Either may be there.
        Err(CudaError::Driver { .. }) => {
            notes.seen.errors.extend(earlier.err());
            notes.seen.errors.extend(later.err());
        }
        Err(error) => {
            notes.seen.errors.push(error);
            notes.copied(place.number, LEN, first, earlier);
        }
    }
    Ok(())
}

/// How a transfer is brought to its end.
#[derive(Clone, Copy)]
enum End {
    Wait,
    Ask,
    Await,
}

const ENDS: [End; 3] = [End::Wait, End::Ask, End::Await];

type Ended<D> = Result<(PinnedBuffer<u8>, D), TransferError<u8, D>>;

impl End {
    fn of<D>(self, transfer: Transfer<u8, D>) -> Ended<D> {
        leave_context();
        match self {
            Self::Wait => transfer.wait(),
            Self::Ask => transfer.try_take(),
            Self::Await => {
                let mut future = pin!(transfer.into_future());
                let mut context = Context::from_waker(Waker::noop());
                loop {
                    if let Poll::Ready(ended) = future.as_mut().poll(&mut context) {
                        return ended;
                    }
                }
            }
        }
    }

    /// Goes on until the buffer is there. The first error on the way.
    fn reach<D>(
        self,
        begun: Result<Transfer<u8, D>, TransferError<u8, D>>,
    ) -> (Result<(), CudaError>, PinnedBuffer<u8>) {
        let mut result = Ok(());
        let mut ended = begun.and_then(|transfer| self.of(transfer));
        loop {
            match ended {
                Ok((buffer, _)) => return (result, buffer),
                Err(TransferError::Over { error, buffer, .. }) => {
                    return (result.and(Err(error)), buffer);
                }
                Err(TransferError::UnderWay { error, transfer }) => {
                    if error != CudaError::NotDone {
                        result = result.and(Err(error));
                    }
                    ended = self.of(transfer);
                }
                Err(other) => panic!("{other:?}"),
            }
        }
    }
}

fn uploads(means: &Means<'_>, _: &mut Memory, notes: &mut Notes<'_>) -> Result<(), CudaError> {
    let copier = copier(means, CopierOptions::default())?;
    let other = Copier::new(means.other)?;
    for end in ENDS {
        let (value, place) = (notes.value(), notes.place());
        let buffer = PinnedBuffer::from_slice(means.context, &[value; LEN])?;
        leave_context();
        let begun = copier.upload(buffer, place.view);
        let (result, mut buffer) = end.reach(begun);
        notes.copied(place.number, LEN, value, result);
        // It was given back, so it may be written.
        let Some(bytes) = notes.some(buffer.as_mut_slice()) else {
            continue;
        };
        let value = notes.value();
        bytes.fill(value);
        let place = notes.place();
        let begun = other.upload(buffer, place.view);
        let result = begun.map(drop).map_err(CudaError::from);
        notes.copied(place.number, LEN, value, result);
    }
    Ok(())
}

fn downloads(means: &Means<'_>, _: &mut Memory, notes: &mut Notes<'_>) -> Result<(), CudaError> {
    let copier = copier(means, CopierOptions::default())?;
    let other = Copier::new(means.other)?;
    for end in ENDS {
        // Another stream reads the buffer before it is written.
        let (value, mut place) = (notes.value(), notes.place());
        let buffer = PinnedBuffer::from_slice(means.context, &[value; LEN])?;
        let copied = other.copy_h2d_from(&buffer, 0..LEN, &mut place.view);
        notes.copied(place.number, LEN, value, copied);
        leave_context();
        let begun = copier.download(means.on_device.as_view(), buffer);
        let (result, mut buffer) = end.reach(begun);
        notes.seen.downloads += 1;
        let fits = |byte: &u8| match &result {
            Ok(()) => *byte == ON_DEVICE,
            Err(CudaError::Driver { .. }) => [ON_DEVICE, value].contains(byte),
            Err(_) => *byte == value,
        };
        assert!(buffer.iter().all(fits), "{result:?}");
        notes.seen.errors.extend(result.err());
        if let Some(bytes) = notes.some(buffer.as_mut_slice()) {
            bytes.fill(REWRITTEN);
        }
        leave_context();
        let begun = other.download(means.on_device.as_view(), buffer);
        notes.some(begun.map(drop).map_err(CudaError::from));
    }
    Ok(())
}

fn pools(means: &Means<'_>, _: &mut Memory, notes: &mut Notes<'_>) -> Result<(), CudaError> {
    let copier = copier(means, CopierOptions::default())?;
    let pool = PinnedPool::<u8>::new(means.context, 4 * 4096);
    // The large one has to have small ones freed for it.
    for len in [LEN, LEN, LEN, 2 * 4096, LEN] {
        leave_context();
        let Some(mut buffer) = notes.some(pool.wait_and_take(len, Duration::MAX)) else {
            continue;
        };
        let value = notes.value();
        let Some(bytes) = notes.some(buffer.as_mut_slice()) else {
            continue;
        };
        bytes.fill(value);
        let mut place = notes.place();
        let copied = copier.copy_h2d_from(&buffer, 0..LEN, &mut place.view);
        notes.copied(place.number, LEN, value, copied);
    }
    leave_context();
    let stats = pool.stats();
    assert_eq!((stats.out, stats.lost_bytes), (0, 0), "{stats:?}");
    pool.free_idle();
    let last = pool.wait_and_take(LEN, Duration::MAX)?;
    let mut place = notes.place();
    let copied = copier.copy_h2d_from(&last, 0..LEN, &mut place.view);
    notes.seen.errors.extend(copied.err());
    drop(pool);
    drop(last);
    Ok(())
}

fn scopes(means: &Means<'_>, memory: &mut Memory, notes: &mut Notes<'_>) -> Result<(), CudaError> {
    let copier = copier(means, CopierOptions::default())?;
    let values = [(); 4].map(|()| notes.value());
    let mut freed = PinnedBuffer::from_slice(means.context, &[values[3]; LEN])?;
    let mut pageable = vec![values[0]; LEN];
    memory.pinned.bytes.fill(values[1]);
    memory.seam.bytes.fill(values[2]);
    let mut places = values.map(|_| notes.place());
    let mut back = vec![ON_HOST; LEN];
    memory.mixed.bytes.fill(ON_HOST);

    let mut results = values.map(|_| Ok(()));
    let mut backs = [Ok(()), Ok(())];
    leave_context();
    let waited = copier.scope(|scope| {
        let sources = [
            &pageable[..],
            &memory.pinned.bytes,
            &memory.seam.bytes,
            freed.as_slice(),
        ];
        for ((source, place), result) in sources.into_iter().zip(&mut places).zip(&mut results) {
            *result = scope.copy_h2d(source, &mut place.view);
        }
        backs = [
            scope.copy_d2h(means.on_device, &mut back),
            scope.copy_d2h(means.on_device, &mut memory.mixed.bytes),
        ];
        Ok(())
    });
    pageable.fill(REWRITTEN);
    memory.pinned.bytes.fill(REWRITTEN);
    memory.seam.bytes.fill(REWRITTEN);
    if let Some(bytes) = notes.some(freed.as_mut_slice()) {
        bytes.fill(REWRITTEN);
    }
    drop((pageable, freed));
    for ((place, value), result) in places.into_iter().zip(values).zip(results) {
        notes.copied(place.number, LEN, value, result.and(waited.clone()));
    }
    for (target, result) in [&mut back, &mut memory.mixed.bytes].into_iter().zip(backs) {
        notes.downloaded(target, result.and(waited.clone()));
        target.fill(ON_HOST);
    }
    notes.seen.kept.push(back);

    // The copies of a closure that fails are waited for too.
    notes.copy_from(&mut memory.pinned.bytes, |from, to| {
        let mut copied = Ok(());
        let ended = copier.scope(|scope| {
            copied = scope.copy_h2d(from, to);
            Err::<(), _>(CudaError::NotDone)
        });
        assert!(ended.is_err());
        copied
    });
    Ok(())
}

fn borrowed_destinations(
    means: &Means<'_>,
    memory: &mut Memory,
    notes: &mut Notes<'_>,
) -> Result<(), CudaError> {
    let copier = copier(means, CopierOptions::default())?;
    notes.copy_to_kept(|to| copier.copy_d2h_async(means.on_device, to));
    for target in [&mut memory.pinned, &mut memory.seam, &mut memory.mixed] {
        notes.copy_to(&mut target.bytes, |to| {
            copier.copy_d2h_async(means.on_device, to)
        });
    }
    let deny = self::copier(means, CopierOptions::default().policy(Policy::Deny))?;
    let pinned = &mut memory.pinned.bytes;
    notes.denied(deny.copy_d2h_async(means.on_device, pinned));
    // Freed at once.
    let mut freed = PinnedBuffer::from_slice(means.context, &[ON_HOST; LEN])?;
    let filled = freed.as_mut_slice()?;
    let copied = copier.copy_d2h_async(means.on_device, filled);
    notes.downloaded(filled, copied);
    drop(freed);
    Ok(())
}

fn checked_copies(
    means: &Means<'_>,
    memory: &mut Memory,
    notes: &mut Notes<'_>,
) -> Result<(), CudaError> {
    let stream = means.stream;
    let mut pageable = vec![0; LEN];
    for source in [
        &mut pageable,
        &mut memory.pinned.bytes,
        &mut memory.seam.bytes,
        &mut memory.mixed.bytes,
    ] {
        notes.copy_from(source, |from, to| stream.memcpy_htod_checked(from, to));
    }
    // One buffer on two streams.
    let value = notes.value();
    let mut places = [(); 2].map(|()| notes.place());
    let buffer = PinnedBuffer::from_slice(means.context, &[value; LEN])?;
    let results = [0, 1].map(|index| {
        let stream = [stream, means.other][index];
        stream.memcpy_htod_checked(&buffer[..], &mut places[index].view)
    });
    drop(buffer);
    for (place, result) in places.into_iter().zip(results) {
        notes.copied(place.number, LEN, value, result);
    }
    // Results.
    notes.copy_to(&mut memory.pinned.bytes, |to| {
        stream.memcpy_dtoh_checked(means.on_device, to)
    });
    Ok(())
}

/// Says that it is mapped read-only, which the driver asks the device about.
struct ReadOnly(Arc<[u8]>);

// SAFETY: as for the `Arc` in it.
unsafe impl HostMemory for ReadOnly {
    fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    fn is_read_only(&self) -> bool {
        true
    }
}

/// Registrations of a few pages, with copies from what is page-locked so far
/// and from across the boundaries.
fn registering_and_copying(
    means: &Means<'_>,
    _: &mut Memory,
    notes: &mut Notes<'_>,
) -> Result<(), CudaError> {
    let copier = copier(means, CopierOptions::default())?;
    for policy in [Policy::Wait, Policy::Stage] {
        let value = notes.value();
        let bytes: Arc<[u8]> = vec![value; 3 * 4096].into();
        let mut copy_across = |progress: Progress| {
            let end = progress.pinned_bytes;
            let source = &bytes[end.saturating_sub(LEN / 2)..][..LEN.min(bytes.len() - end)];
            let mut place = notes.place();
            leave_context();
            let copied = copier.copy_h2d_async_with(policy, source, &mut place.view);
            notes.copied(place.number, source.len(), value, copied);
        };
        let options = RegisterOptions::default()
            .chunk_bytes(4096)
            .progress(&mut copy_across);
        let registered =
            HostRegistration::with_options(means.context, ReadOnly(Arc::clone(&bytes)), options);
        end_registration(notes, registered);
        let end = bytes.len();
        let mut place = notes.place();
        let copied = copier.copy_h2d_async(&bytes[end - LEN..], &mut place.view);
        // Freed, unless it could not be unpinned.
        drop(bytes);
        notes.copied(place.number, LEN, value, copied);
    }
    // Dropped, which cannot be tried again.
    leave_context();
    match HostRegistration::new(means.context, vec![0_u8; LEN]) {
        Ok(registration) => drop(registration),
        Err(error) => note_register_failure(notes, error.reason),
    }
    Ok(())
}

/// Unpins, a second time if need be.
fn end_registration<B: HostMemory>(
    notes: &mut Notes<'_>,
    registered: Result<HostRegistration<B>, cuda::RegisterError<B>>,
) {
    leave_context();
    let registration = match registered {
        Ok(registration) => registration,
        Err(error) => {
            note_register_failure(notes, error.reason);
            match error.memory {
                Ok(_) => return,
                Err(registration) => *registration,
            }
        }
    };
    let Err(first) = registration.unregister() else {
        return;
    };
    note_unregister_failure(notes, first.reason);
    if let Err(second) = first.registration.unregister() {
        note_unregister_failure(notes, second.reason);
    }
}

fn note_register_failure(notes: &mut Notes<'_>, reason: RegisterFailure) {
    match reason {
        RegisterFailure::Driver(error) => notes.seen.errors.push(error),
        // Memory that was freed by a call that said it had failed, and that is
        // now the allocator's again, stays registered.
        RegisterFailure::Overlaps { .. } => {}
        other => panic!("{other:?}"),
    }
}

fn note_unregister_failure(notes: &mut Notes<'_>, reason: UnregisterFailure) {
    match reason {
        UnregisterFailure::Driver(error) => notes.seen.errors.push(error),
        // Unpinned by a call that said it had failed.
        UnregisterFailure::NotRegistered { .. } => {}
        other => panic!("{other:?}"),
    }
}

fn registering_while_another_thread_copies(
    means: &Means<'_>,
    _: &mut Memory,
    notes: &mut Notes<'_>,
) -> Result<(), CudaError> {
    let copier = Copier::new(means.other)?;
    let value = notes.value();
    let bytes: Arc<[u8]> = vec![value; 3 * 4096].into();
    let mut places: Vec<_> = (0..8).map(|_| notes.place()).collect();
    let copied: Vec<_> = thread::scope(|threads| {
        let copying = threads.spawn(|| {
            let copy = |(number, place): (usize, &mut Place<'_>)| {
                let policy = [Policy::Stage, Policy::Wait][number % 2];
                let source = &bytes[number * 1300..][..LEN];
                copier.copy_h2d_async_with(policy, source, &mut place.view)
            };
            places.iter_mut().enumerate().map(copy).collect()
        });
        let options = RegisterOptions::default().chunk_bytes(4096);
        let registered = HostRegistration::with_options(means.context, Arc::clone(&bytes), options);
        end_registration(notes, registered);
        copying.join().unwrap()
    });
    drop(bytes);
    for (place, result) in places.into_iter().zip(copied) {
        notes.copied(place.number, LEN, value, result);
    }
    Ok(())
}
