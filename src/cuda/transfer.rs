//! [`Transfer`]: a copy that owns both of its ends until it is over.
//!
//! A download is what [`PinnedBuffer`] alone cannot keep sound: the device
//! writes the buffer, so until it has done so nobody may read it, which a
//! borrow of it would allow. So the buffer is moved into the transfer, and
//! comes out once the driver has said that the device is done with it, and
//! never on any other ground.
//!
//! What the buffer knows already does the rest: the copy is one of its uses,
//! noted by an event right behind it, and its drop waits or leaks.

#![expect(
    clippy::result_large_err,
    reason = "an error has the parts, or the transfer, and is no larger than what is returned else"
)]

use std::error::Error;
use std::fmt;
use std::future::IntoFuture;
use std::mem::{self, ManuallyDrop};
use std::pin::Pin;
use std::task::{Context, Poll};

use cudarc::driver::DeviceRepr;

use super::wait::Waited;
use super::{Copier, CudaError, DeviceDestination, DeviceSource, PinnedBuffer, driver};

/// A copy under way between a [`PinnedBuffer`] and device memory, both of
/// which it owns until the device is done with them.
///
/// [`Copier::upload`] and [`Copier::download`] begin one, and return at once.
/// It counts as done when no transfer uses the buffer any more: neither this
/// one nor one from before it.
///
/// Dropped before it is done, it waits, as a buffer does; if the driver cannot
/// say whether the device is done, the buffer and the device memory are
/// leaked. If the transfer itself is leaked ([`mem::forget`]), so are they, and
/// nothing else happens.
///
/// `transfer.await` waits for it in any executor: see [`TransferFuture`] for
/// what that costs.
///
/// # Examples
///
/// ```no_run
/// use pinned_hosts::cuda::{self, Copier, PinnedBuffer, TransferError};
///
/// let context = cuda::context(0)?;
/// let copier = Copier::new(&context.new_stream()?)?;
/// let on_device = copier.stream().alloc_zeros::<f32>(1024)?;
///
/// let input = PinnedBuffer::from_slice(&context, &[1.0; 1024])?;
/// let upload = copier.upload(input, on_device)?;
/// // … work that does not need the two …
/// let (buffer, on_device) = upload.wait()?;
///
/// let mut download = copier.download(on_device, buffer)?;
/// let (output, _on_device) = loop {
///     match download.try_take() {
///         Ok(both) => break both,
///         Err(TransferError::UnderWay { error: cuda::CudaError::NotDone, transfer }) => {
///             // … other work …
///             download = transfer;
///         }
///         Err(error) => return Err(error.into()),
///     }
/// };
/// println!("{}", output[0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "dropping a transfer waits until it is done"]
pub struct Transfer<T, D> {
    buffer: ManuallyDrop<PinnedBuffer<T>>,
    device: ManuallyDrop<D>,
    direction: Direction,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Upload,
    Download,
}

impl Copier {
    /// Begins a copy of all of `src` to the beginning of `dst`, in the order
    /// of the stream, and returns at once. The [`Transfer`] owns both; `dst`
    /// may be a `CudaSlice` or a view.
    ///
    /// Nothing to copy (an empty buffer, or elements without a size) is done at
    /// once, without a call of the driver.
    ///
    /// # Errors
    ///
    /// [`TransferError::Over`], with both parts: nothing was enqueued, because
    /// `dst` is too short ([`CudaError::DestinationTooShort`]) or of another
    /// context ([`CudaError::OtherContext`]), the stream is capturing
    /// ([`CudaError::StreamIsCapturing`]), an earlier error was stored
    /// ([`CudaError::Stored`]), or a call of the driver before the copy failed
    /// ([`CudaError::Driver`]; also for a buffer of which nobody can say any more
    /// whether a transfer uses it). Or the copy was made and is over, but the
    /// stream that frees `dst` could not be told of it (`Driver`, too).
    ///
    /// [`TransferError::UnderWay`], with the transfer: the copy's own call, or
    /// the noting of it for the buffer, failed. The copy may or may not happen;
    /// wait for it to have the parts back.
    ///
    /// # Aborts
    ///
    /// As [`copy_h2d_from`](Self::copy_h2d_from), for `dst`: it may be a view of
    /// memory that is not the transfer's to keep.
    pub fn upload<T, D>(
        &self,
        src: PinnedBuffer<T>,
        mut dst: D,
    ) -> Result<Transfer<T, D>, TransferError<T, D>>
    where
        T: DeviceRepr,
        D: DeviceDestination<T>,
    {
        let begun = self.begin_upload(&src, &mut dst);
        Transfer::begun(begun, src, dst, Direction::Upload)
    }

    /// Begins a copy of all of `src` to the beginning of `dst`, in the order
    /// of the stream, and returns at once. The [`Transfer`] owns both; `src`
    /// may be a `CudaSlice` or a view.
    ///
    /// Transfers that still read `dst` on other streams come first: the
    /// stream waits for them, the caller does not. Elements of `dst` past the
    /// length of `src` stay as they are. Nothing to copy is done at once,
    /// without a call of the driver.
    ///
    /// # Errors
    ///
    /// As [`upload`](Self::upload), with the ends exchanged.
    ///
    /// # Aborts
    ///
    /// As [`upload`](Self::upload).
    pub fn download<T, D>(
        &self,
        src: D,
        mut dst: PinnedBuffer<T>,
    ) -> Result<Transfer<T, D>, TransferError<T, D>>
    where
        T: DeviceRepr,
        D: DeviceSource<T>,
    {
        let begun = self.begin_download(&src, &mut dst);
        Transfer::begun(begun, dst, src, Direction::Download)
    }

    fn begin_upload<T, D>(&self, src: &PinnedBuffer<T>, dst: &mut D) -> Result<(), NotBegun>
    where
        T: DeviceRepr,
        D: DeviceDestination<T>,
    {
        // It would never be done.
        src.lost().map_or(Ok(()), Err)?;
        self.copy_to(dst, src.len(), |dst| {
            self.lane.counts.owned.add(1);
            let source = src.as_ptr().cast();
            let bytes = size_of_val(src.as_slice());
            self.use_once(src, || {
                // SAFETY: the buffer keeps its memory, and keeps it from being
                // written, until this use of it is over; `copy_to` saw that the
                // destination is long enough.
                unsafe { driver::copy_h2d(dst, source, bytes, &self.stream) }
            })
        })
    }

    fn begin_download<T, D>(&self, src: &D, dst: &mut PinnedBuffer<T>) -> Result<(), NotBegun>
    where
        T: DeviceRepr,
        D: DeviceSource<T>,
    {
        // It would be written while, for all that anybody knows, it is read.
        dst.lost().map_or(Ok(()), Err)?;
        let len = src.len();
        self.copy_from(src, dst.len(), |src| {
            dst.hold_back(&self.stream)?;
            self.lane.counts.owned.add(1);
            let destination = dst.as_mut_ptr().cast();
            let bytes = len * size_of::<T>();
            self.use_once(dst, || {
                // SAFETY: the buffer keeps its memory until this use of it is
                // over. Nobody borrows it: the caller gave it up, and the
                // transfer that it goes to shows and returns it only then. Uses
                // from before come first, on this stream by its order and on
                // others because it holds back. `copy_from` saw that the buffer
                // is long enough.
                unsafe { driver::copy_d2h(destination, src, bytes, &self.stream) }
            })
        })
    }

    /// As [`PinnedBuffer::use_in`], and tells whether `enqueue` ran.
    fn use_once<T>(
        &self,
        buffer: &PinnedBuffer<T>,
        enqueue: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<(), NotBegun> {
        let mut ran = false;
        let used = buffer.use_in(&self.stream, || {
            ran = true;
            enqueue()
        });
        used.map_err(|error| match ran {
            true => NotBegun::PerhapsEnqueued(error),
            false => NotBegun::NotEnqueued(error),
        })
    }
}

/// Why a transfer was not begun as it should have been.
enum NotBegun {
    NotEnqueued(CudaError),
    /// The error may stem from earlier work, and then says nothing about
    /// whether the copy was enqueued.
    PerhapsEnqueued(CudaError),
}

impl From<CudaError> for NotBegun {
    fn from(error: CudaError) -> Self {
        Self::NotEnqueued(error)
    }
}

impl<T, D> Transfer<T, D> {
    fn begun(
        begun: Result<(), NotBegun>,
        buffer: PinnedBuffer<T>,
        device: D,
        direction: Direction,
    ) -> Result<Self, TransferError<T, D>> {
        let error = match begun {
            Err(NotBegun::NotEnqueued(error)) => {
                return Err(TransferError::Over {
                    error,
                    buffer,
                    device,
                });
            }
            Err(NotBegun::PerhapsEnqueued(error)) => Some(error),
            Ok(()) => None,
        };
        let transfer = Self {
            buffer: ManuallyDrop::new(buffer),
            device: ManuallyDrop::new(device),
            direction,
        };
        match error {
            Some(error) => Err(TransferError::UnderWay { error, transfer }),
            None => Ok(transfer),
        }
    }

    /// Whether the driver says that it is done. Does not wait.
    ///
    /// `false` also if the driver cannot say: then asking again may be in vain
    /// for ever, and [`try_take`](Self::try_take) or [`wait`](Self::wait) tell
    /// the error.
    #[must_use]
    pub fn is_done(&self) -> bool {
        matches!(self.buffer.is_idle(), Ok(true))
    }

    /// The buffer, to read; `None` for a download that is not done.
    #[must_use]
    pub fn buffer(&self) -> Option<&PinnedBuffer<T>> {
        let readable = self.direction == Direction::Upload || self.is_done();
        readable.then_some(&*self.buffer)
    }

    /// The buffer and the device memory, if it is done. Does not wait.
    ///
    /// # Errors
    ///
    /// [`TransferError::UnderWay`], with the transfer: with
    /// [`CudaError::NotDone`] it is simply not done yet, and with another error
    /// the driver cannot say.
    pub fn try_take(self) -> Result<(PinnedBuffer<T>, D), TransferError<T, D>> {
        let error = match self.buffer.is_idle() {
            Ok(true) => return Ok(self.into_parts()),
            Ok(false) => CudaError::NotDone,
            Err(error) => error,
        };
        let transfer = self;
        Err(TransferError::UnderWay { error, transfer })
    }

    /// Waits until it is done. The buffer and the device memory.
    ///
    /// # Errors
    ///
    /// [`TransferError::Over`], with both: it is done, but an error came up in
    /// waiting for it, so what was copied is not to be relied on.
    ///
    /// [`TransferError::UnderWay`], with the transfer: every way to ask the
    /// driver failed. It can be asked again; dropped, it is leaked.
    pub fn wait(mut self) -> Result<(PinnedBuffer<T>, D), TransferError<T, D>> {
        match self.buffer.settle() {
            Waited::Done(Ok(())) => Ok(self.into_parts()),
            Waited::Done(Err(error)) => {
                let (buffer, device) = self.into_parts();
                Err(TransferError::Over {
                    error,
                    buffer,
                    device,
                })
            }
            Waited::Unknown(error) => {
                let transfer = self;
                Err(TransferError::UnderWay { error, transfer })
            }
        }
    }

    /// Only for a transfer that is done.
    fn into_parts(self) -> (PinnedBuffer<T>, D) {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is neither used nor dropped afterwards, so each is
        // taken once.
        unsafe {
            (
                ManuallyDrop::take(&mut this.buffer),
                ManuallyDrop::take(&mut this.device),
            )
        }
    }
}

impl<T, D> Drop for Transfer<T, D> {
    fn drop(&mut self) {
        // SAFETY: a transfer that is being dropped is not used afterwards, and
        // this is the only place in its drop that takes them.
        let (mut buffer, device) = unsafe {
            (
                ManuallyDrop::take(&mut self.buffer),
                ManuallyDrop::take(&mut self.device),
            )
        };
        // The device memory has to stay for as long as the buffer. In a forked
        // child, the events are not ours to wait for.
        if !buffer.is_of_this_process() || matches!(buffer.settle(), Waited::Unknown(_)) {
            mem::forget(device);
        }
    }
}

impl<T, D> IntoFuture for Transfer<T, D> {
    type Output = Result<(PinnedBuffer<T>, D), TransferError<T, D>>;
    type IntoFuture = TransferFuture<T, D>;

    fn into_future(self) -> TransferFuture<T, D> {
        TransferFuture {
            transfer: Some(self),
        }
    }
}

impl<T, D> fmt::Debug for Transfer<T, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer")
            .field("direction", &self.direction)
            .field("buffer", &*self.buffer)
            .finish_non_exhaustive()
    }
}

/// Waits for a [`Transfer`] without blocking the thread; made by
/// `transfer.await`.
///
/// It needs no thread, no callback and no executor of its own, and pays for
/// that by asking: each poll asks the driver once (0.1 to 1 µs), and if the
/// transfer is not done asks to be polled again at once. Other tasks run in
/// between, but an executor with nothing else to do keeps a core busy. For
/// transfers that take long, sleep on a timer of the executor's between calls
/// of [`Transfer::try_take`] instead.
///
/// The result is that of [`Transfer::wait`]. If the driver cannot say whether
/// the transfer is done, the poll waits as that does, blocking. Dropped before
/// the end, it waits as a transfer does.
#[must_use = "a future does nothing unless it is polled"]
pub struct TransferFuture<T, D> {
    /// `None` once it is over.
    transfer: Option<Transfer<T, D>>,
}

// Nothing in it is ever pinned.
impl<T, D> Unpin for TransferFuture<T, D> {}

impl<T, D> Future for TransferFuture<T, D> {
    type Output = Result<(PinnedBuffer<T>, D), TransferError<T, D>>;

    /// # Panics
    ///
    /// If it is polled again after it was ready.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(transfer) = self.transfer.take() else {
            panic!("the future of a transfer was polled after it was ready");
        };
        match transfer.buffer.is_idle() {
            Ok(true) => Poll::Ready(Ok(transfer.into_parts())),
            Ok(false) => {
                self.transfer = Some(transfer);
                context.waker().wake_by_ref();
                Poll::Pending
            }
            // To ask again would be in vain.
            Err(_) => Poll::Ready(transfer.wait()),
        }
    }
}

impl<T, D> fmt::Debug for TransferFuture<T, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TransferFuture")
            .field(&self.transfer)
            .finish()
    }
}

/// Why a [`Transfer`] did not give its parts back, or was not begun; with the
/// parts, or the transfer that has them. Nothing is lost.
///
/// Turning it into a [`CudaError`], as `?` does, drops what is in it.
#[non_exhaustive]
pub enum TransferError<T, D> {
    /// Nothing is under way: it was not begun, or is over.
    Over {
        /// What went wrong.
        error: CudaError,
        /// The buffer.
        buffer: PinnedBuffer<T>,
        /// The device memory.
        device: D,
    },
    /// The device may still be using both parts.
    UnderWay {
        /// What went wrong, or [`CudaError::NotDone`].
        error: CudaError,
        /// The transfer, to ask again, to wait for, or to drop.
        transfer: Transfer<T, D>,
    },
}

impl<T, D> TransferError<T, D> {
    /// What went wrong.
    #[must_use]
    pub fn error(&self) -> &CudaError {
        match self {
            Self::Over { error, .. } | Self::UnderWay { error, .. } => error,
        }
    }
}

impl<T, D> From<TransferError<T, D>> for CudaError {
    /// Drops what is in the error, which waits for a transfer that is under
    /// way.
    fn from(error: TransferError<T, D>) -> Self {
        match error {
            TransferError::Over { error, .. } | TransferError::UnderWay { error, .. } => error,
        }
    }
}

impl<T, D> fmt::Debug for TransferError<T, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Over { error, buffer, .. } => f
                .debug_struct("Over")
                .field("error", error)
                .field("buffer", buffer)
                .finish_non_exhaustive(),
            Self::UnderWay { error, transfer } => f
                .debug_struct("UnderWay")
                .field("error", error)
                .field("transfer", transfer)
                .finish(),
        }
    }
}

impl<T, D> fmt::Display for TransferError<T, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error().fmt(f)
    }
}

// No `source`: the text is that of the error already.
impl<T, D> Error for TransferError<T, D> {}
