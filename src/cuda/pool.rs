//! [`PinnedPool`]: page-locked buffers to use again and again.
//!
//! A buffer that comes back may still be read by the device. It is put on the
//! shelf all the same, and whoever takes asks the shelf's buffers one by one
//! and passes by those in use: so a slow stream holds up nobody while another
//! buffer of the size is free, and nobody waits unless asked to.
//!
//! The lock is held for asking and counting alone. Memory is pinned and freed
//! outside of it, on room that was set aside under it ([`Room`]); so what the
//! pool has pinned never exceeds what it has counted, and what it has counted
//! never exceeds the limit.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::mem::{self, ManuallyDrop};
use std::ops::Deref;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, DeviceRepr, ValidAsZeroBits};

use super::pinned_buffer::{LARGEST, bytes_of};
use super::{CudaError, PinnedBuffer};

/// The least bytes that a buffer takes: less is not pinned by itself anyway.
const SMALLEST: usize = 4096;

/// How long to wait, at first and at most, before the driver is asked again
/// whether a buffer is free. Nothing tells when the device is done with one.
const PAUSES: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(2)];

/// A pool of [`PinnedBuffer`]s of elements of type `T`, bounded in bytes.
///
/// To pin memory takes far longer than to copy it (0.3 to 1 ms per MB), so a
/// server does it once and then uses the buffers again. A taken buffer ([`Pooled`]) goes back to the pool when it is dropped, even
/// while copies from it are in flight; the pool gives it out again once they
/// are done, and gives out or makes another one meanwhile.
///
/// The pool never pins more than its limit. A buffer takes 4096 bytes or more,
/// for a number of elements rounded up to a power of two, or the limit if that
/// is less. If the limit is in the way of a new buffer, idle ones of other
/// sizes are freed for it, the small ones first.
///
/// To free page-locked memory can take as long as all work of the device:
/// `cuMemFreeHost` was seen to wait for it (NVIDIA/nccl#48), and no document says
/// that it does not. So give a pool room for all sizes that are in use at once:
/// then [`take`](Self::take) frees none of its buffers.
///
/// Share it by reference or in an `Arc`. It frees its buffers when it is
/// dropped, which waits for the copies from them; buffers that are out at that
/// time stay good, and are freed by their own drop.
///
/// A buffer of which the driver can say in no way whether a transfer uses it
/// is leaked when it comes back, and goes on counting against the limit, which
/// is there for the sake of the system's memory: that is still page-locked. So
/// does a [`Pooled`] that is leaked. A buffer for which the driver's answer is
/// an error counts as in use until the answer is another.
///
/// # Examples
///
/// ```no_run
/// use pinned_hosts::cuda::{self, Copier, PinnedPool};
/// use std::time::Duration;
///
/// let context = cuda::context(0)?;
/// let copier = Copier::new(&context.new_stream()?)?;
/// let mut on_device = copier.stream().alloc_zeros::<u32>(1024)?;
///
/// let pool = PinnedPool::<u32>::new(&context, 64 << 20);
/// for request in 0..100 {
///     let mut tokens = pool.wait_and_take(1000, Duration::from_secs(1))?;
///     tokens.as_mut_slice()?.fill(request);
///     copier.copy_h2d_from(&tokens, 0..1000, &mut on_device)?;
///     // `tokens` goes back, and is used again once the device has read it.
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct PinnedPool<T> {
    shared: Arc<Shared<T>>,
}

struct Shared<T> {
    context: Arc<CudaContext>,
    limit: usize,
    state: Mutex<State<T>>,
    /// Signalled when there may be more to take: a buffer or some room.
    more: Condvar,
}

struct State<T> {
    /// The buffers that came back, by capacity, the oldest first. Transfers
    /// may still use them.
    shelves: BTreeMap<usize, VecDeque<PinnedBuffer<T>>>,
    /// Bytes of all buffers, and of the room set aside. At most the limit.
    bytes: usize,
    high_water_bytes: usize,
    lost_bytes: usize,
    out: usize,
    made: u64,
    reused: u64,
    freed: u64,
}

/// What a [`PinnedPool`] has done and has. Buffers without bytes are not
/// counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Buffers given out: those made and those used again.
    pub taken: u64,
    /// Buffers that were made, by pinning memory.
    pub made: u64,
    /// Buffers that were given out again.
    pub reused: u64,
    /// Idle buffers that were freed, to make room or by
    /// [`free_idle`](PinnedPool::free_idle).
    pub freed: u64,
    /// Buffers that are out now.
    pub out: usize,
    /// Buffers that came back and may still be used by a transfer now.
    pub in_flight: usize,
    /// Buffers that can be given out now.
    pub idle: usize,
    /// Bytes that count against the limit now: of all those buffers, of those
    /// that are lost, and of those that are just being made.
    pub bytes: usize,
    /// The most bytes that ever did.
    pub high_water_bytes: usize,
    /// Bytes of buffers that are lost, because the driver cannot say whether a
    /// transfer uses them.
    pub lost_bytes: usize,
}

impl<T: DeviceRepr + Copy + ValidAsZeroBits> PinnedPool<T> {
    /// A pool that pins at most `limit` bytes. It pins none yet.
    #[must_use]
    pub fn new(context: &Arc<CudaContext>, limit: usize) -> Self {
        Self {
            shared: Arc::new(Shared {
                context: Arc::clone(context),
                limit,
                state: Mutex::new(State::default()),
                more: Condvar::new(),
            }),
        }
    }

    /// A buffer of `len` elements, which hold whatever they last held (zeros,
    /// the first time).
    ///
    /// It waits for no transfer: a buffer in use is passed by. But if no buffer of
    /// the size is free, one is made, and the driver may wait for the device while
    /// it frees memory for that: idle buffers of other sizes if the limit is in the
    /// way, and buffers that graphs have kept
    /// ([`reclaim`](crate::cuda::reclaim)).
    ///
    /// # Errors
    ///
    /// [`CudaError::PoolExhausted`] if none is free and the limit leaves no
    /// room for one; otherwise as [`PinnedBuffer::zeroed`].
    pub fn take(&self, len: usize) -> Result<Pooled<T>, CudaError> {
        self.wait_and_take(len, Duration::ZERO)
    }

    /// As [`take`](Self::take), but waits for up to `patience` while the pool
    /// is exhausted: until any buffer of the size is free, or enough others to
    /// make one of, whichever is first. It sleeps between looks, for 50 µs at
    /// first and 2 ms at most. Who waits longer is not served first.
    ///
    /// # Errors
    ///
    /// As [`take`](Self::take). A buffer that does not fit in the limit at all
    /// is not waited for.
    pub fn wait_and_take(&self, len: usize, patience: Duration) -> Result<Pooled<T>, CudaError> {
        let context = &self.shared.context;
        if len == 0 || size_of::<T>() == 0 {
            return Ok(self.out(PinnedBuffer::zeroed(context, len)?, len));
        }
        let (capacity, bytes) = self.capacity_for(len)?;
        // One that cannot be told is never over.
        let deadline = Instant::now().checked_add(patience);
        let [mut pause, longest] = PAUSES;
        let mut state = self.shared.lock();
        loop {
            if let Some(buffer) = state.take_idle(capacity) {
                state.reused += 1;
                state.out += 1;
                drop(state);
                return Ok(self.out(buffer, len));
            }
            let in_use = match state.make_room(bytes, capacity, self.shared.limit) {
                Ok((victims, held)) => {
                    drop(state);
                    let room = Room {
                        pool: &self.shared,
                        bytes: held,
                    };
                    return self.make(capacity, len, victims, room);
                }
                Err(in_use) => in_use,
            };
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Err(CudaError::PoolExhausted {
                    wanted: bytes,
                    in_use,
                    limit: self.shared.limit,
                });
            }
            let sleep = left.map_or(pause, |left| left.min(pause));
            state = match self.shared.more.wait_timeout(state, sleep) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            };
            pause = (2 * pause).min(longest);
        }
    }

    /// How many elements a buffer for `len` of them has, and how many bytes.
    /// Neither `len` nor the size of an element is 0.
    fn capacity_for(&self, len: usize) -> Result<(usize, usize), CudaError> {
        let element_bytes = size_of::<T>();
        let limit = self.shared.limit;
        let wanted = bytes_of::<T>(len)?;
        if wanted > limit {
            return Err(CudaError::PoolExhausted {
                wanted,
                in_use: self.shared.lock().bytes,
                limit,
            });
        }
        let largest = limit.min(LARGEST) / element_bytes;
        let rounded = len
            .max(SMALLEST / element_bytes)
            .checked_next_power_of_two();
        let capacity = rounded.map_or(largest, |rounded| rounded.min(largest));
        Ok((capacity, capacity * element_bytes))
    }

    /// Frees `victims`, and makes a buffer in their room.
    fn make(
        &self,
        capacity: usize,
        len: usize,
        victims: Vec<PinnedBuffer<T>>,
        mut room: Room<'_, T>,
    ) -> Result<Pooled<T>, CudaError> {
        drop(victims);
        room.shrink_to(capacity * size_of::<T>());
        let buffer = PinnedBuffer::zeroed(&self.shared.context, capacity)?;
        room.keep();
        Ok(self.out(buffer, len))
    }

    fn out(&self, mut buffer: PinnedBuffer<T>, len: usize) -> Pooled<T> {
        buffer.set_len(len);
        Pooled {
            buffer: ManuallyDrop::new(buffer),
            pool: Arc::downgrade(&self.shared),
        }
    }
}

impl<T> PinnedPool<T> {
    /// The most bytes that the pool pins.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.shared.limit
    }

    /// Frees the buffers that are idle now. How many bytes those had.
    pub fn free_idle(&self) -> usize {
        let mut state = self.shared.lock();
        let idle = state.idle(|_| true);
        let bytes = idle
            .iter()
            .map(|&(capacity, _)| capacity * size_of::<T>())
            .sum();
        let victims = state.remove(idle);
        drop(state);
        // Given up when they are free, and not before.
        let _room = Room {
            pool: &self.shared,
            bytes,
        };
        drop(victims);
        bytes
    }

    /// What the pool has done and has. Asks the driver about each buffer that
    /// came back.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let state = self.shared.lock();
        let back: usize = state.shelves.values().map(VecDeque::len).sum();
        let idle = state.idle(|_| true).len();
        PoolStats {
            taken: state.made + state.reused,
            made: state.made,
            reused: state.reused,
            freed: state.freed,
            out: state.out,
            in_flight: back - idle,
            idle,
            bytes: state.bytes,
            high_water_bytes: state.high_water_bytes,
            lost_bytes: state.lost_bytes,
        }
    }
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // It holds at every moment: nothing that can panic runs under it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put_back(&self, buffer: PinnedBuffer<T>) {
        let capacity = buffer.capacity();
        let lost = buffer.lost().is_some();
        let mut state = self.lock();
        state.out -= 1;
        if lost {
            state.lost_bytes += capacity * size_of::<T>();
            drop(state);
            // It leaks itself, and says so, which runs code of the program's.
            drop(buffer);
            return;
        }
        state.shelves.entry(capacity).or_default().push_back(buffer);
        drop(state);
        self.more.notify_all();
    }
}

impl<T> State<T> {
    /// An idle buffer of just that capacity.
    fn take_idle(&mut self, capacity: usize) -> Option<PinnedBuffer<T>> {
        let shelf = self.shelves.get_mut(&capacity)?;
        let index = shelf.iter().position(is_idle)?;
        shelf.remove(index)
    }

    /// The idle buffers of those capacities, as capacity and place on the
    /// shelf, ascending.
    fn idle(&self, which: impl Fn(usize) -> bool) -> Vec<(usize, usize)> {
        let shelves = self
            .shelves
            .iter()
            .filter(|&(&capacity, _)| which(capacity));
        shelves
            .flat_map(|(&capacity, shelf)| {
                let idle = shelf
                    .iter()
                    .enumerate()
                    .filter(|(_, buffer)| is_idle(buffer));
                idle.map(move |(index, _)| (capacity, index))
            })
            .collect()
    }

    /// Takes buffers from the shelves. The places are ascending.
    fn remove(&mut self, places: Vec<(usize, usize)>) -> Vec<PinnedBuffer<T>> {
        // From the back, so that the places of the others stay.
        let removed: Vec<_> = places
            .into_iter()
            .rev()
            .filter_map(|(capacity, index)| self.shelves.get_mut(&capacity)?.remove(index))
            .collect();
        self.freed += removed.len() as u64;
        removed
    }

    /// Sets room for `bytes` more aside. What has to be freed first, and how
    /// much is set aside until that is done; or how many bytes are in use, if
    /// they leave no room.
    fn make_room(
        &mut self,
        bytes: usize,
        capacity: usize,
        limit: usize,
    ) -> Result<(Vec<PinnedBuffer<T>>, usize), usize> {
        let mut victims = Vec::new();
        let mut victim_bytes = 0;
        // What is counted never exceeds the limit, and neither does a buffer.
        let fits_beside = |in_use: usize| in_use <= limit - bytes;
        if !fits_beside(self.bytes) {
            let mut idle = self.idle(|other| other != capacity);
            let mut enough = idle.len();
            for (index, &(capacity, _)) in idle.iter().enumerate() {
                victim_bytes += capacity * size_of::<T>();
                if fits_beside(self.bytes - victim_bytes) {
                    enough = index + 1;
                    break;
                }
            }
            if !fits_beside(self.bytes - victim_bytes) {
                return Err(self.bytes - victim_bytes);
            }
            idle.truncate(enough);
            victims = self.remove(idle);
        }
        // The victims are pinned until they are freed, and the new buffer is
        // not before that.
        let held = victim_bytes.max(bytes);
        self.bytes = self.bytes - victim_bytes + held;
        Ok((victims, held))
    }
}

/// Whether the driver says that the buffer may be given out.
fn is_idle<T>(buffer: &PinnedBuffer<T>) -> bool {
    matches!(buffer.is_idle(), Ok(true))
}

impl<T> Default for State<T> {
    fn default() -> Self {
        Self {
            shelves: BTreeMap::new(),
            bytes: 0,
            high_water_bytes: 0,
            lost_bytes: 0,
            out: 0,
            made: 0,
            reused: 0,
            freed: 0,
        }
    }
}

/// Bytes that are counted, for a buffer that is about to be made or freed.
/// Dropping it gives them up.
struct Room<'a, T> {
    pool: &'a Shared<T>,
    bytes: usize,
}

impl<T> Room<'_, T> {
    fn shrink_to(&mut self, bytes: usize) {
        self.pool.lock().bytes -= self.bytes - bytes;
        self.bytes = bytes;
        self.pool.more.notify_all();
    }

    /// The buffer was made.
    fn keep(self) {
        let mut state = self.pool.lock();
        state.made += 1;
        state.out += 1;
        state.high_water_bytes = state.high_water_bytes.max(state.bytes);
        drop(state);
        mem::forget(self);
    }
}

impl<T> Drop for Room<'_, T> {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

impl<T> fmt::Debug for PinnedPool<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedPool")
            .field("limit", &self.shared.limit)
            .field("bytes", &self.shared.lock().bytes)
            .finish_non_exhaustive()
    }
}

/// A [`PinnedBuffer`] of a [`PinnedPool`], of just the length that was asked
/// for. It goes back when it is dropped, which waits for nothing, unless the
/// pool is gone.
pub struct Pooled<T> {
    buffer: ManuallyDrop<PinnedBuffer<T>>,
    pool: Weak<Shared<T>>,
}

impl<T> Pooled<T> {
    /// The elements, to write. Waits until no transfer reads them: not after
    /// the buffer was taken, but after it was copied from.
    ///
    /// # Errors
    ///
    /// As [`PinnedBuffer::as_mut_slice`].
    pub fn as_mut_slice(&mut self) -> Result<&mut [T], CudaError> {
        self.buffer.as_mut_slice()
    }
}

// No `DerefMut`: it would let buffers of two pools, and their counts, be
// exchanged.
impl<T> Deref for Pooled<T> {
    type Target = PinnedBuffer<T>;

    fn deref(&self) -> &PinnedBuffer<T> {
        &self.buffer
    }
}

impl<T> Drop for Pooled<T> {
    fn drop(&mut self) {
        // SAFETY: a buffer that is being dropped is not used afterwards, and
        // this is the only place that takes it.
        let buffer = unsafe { ManuallyDrop::take(&mut self.buffer) };
        // In a forked child, the lock may be another thread's for ever.
        if buffer.capacity() * size_of::<T>() == 0 || !buffer.is_of_this_process() {
            return;
        }
        if let Some(pool) = self.pool.upgrade() {
            pool.put_back(buffer);
        }
    }
}

impl<T> fmt::Debug for Pooled<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pooled").field(&*self.buffer).finish()
    }
}
