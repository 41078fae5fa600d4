//! Batched copies, whose callers say when sources may be read.

use super::copy::{self, Staging};
use crate::code;
use crate::driver::Outcome;
use crate::driver::call::{In, Out, driver_api, enter};

const ORDER_STREAM: u32 = 1;
const ORDER_DURING_API_CALL: u32 = 2;
const ORDER_ANY: u32 = 3;

/// `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Attributes {
    source_access_order: u32,
    source_location: [u32; 2],
    target_location: [u32; 2],
    flags: u32,
}

driver_api! {
    /// From host to device only, which is what sources are read late for.
    fn cuMemcpyBatchAsync(
        targets: In<u64>,
        sources: In<u64>,
        sizes: In<usize>,
        count: usize,
        attributes: In<Attributes>,
        first_indices: In<usize>,
        attributes_count: usize,
        failed_index: Out<usize>,
        stream: usize,
    ) {
        failed_index.set_if_wanted(usize::MAX);
        if count == 0 || attributes_count == 0 || attributes_count > count {
            return Err(code::INVALID_VALUE);
        }
        check_stream(stream)?;
        let mut group = 0;
        for index in 0..count {
            // SAFETY: the caller vouches for `attributes_count` attributes and
            // first indices.
            while group + 1 < attributes_count && unsafe { first_indices.at(group + 1) }? <= index {
                group += 1;
            }
            // SAFETY: as above, and for `count` of the others.
            let (group, target, source, size) = unsafe {
                (attributes.at(group)?, targets.at(index)?, sources.at(index)?, sizes.at(index)?)
            };
            let staging = match group.source_access_order {
                ORDER_DURING_API_CALL => Staging::Always,
                ORDER_STREAM | ORDER_ANY => Staging::Never,
                _ => return Err(code::INVALID_VALUE),
            };
            if target == 0 || source == 0 || size == 0 {
                failed_index.set_if_wanted(index);
                return Err(code::INVALID_VALUE);
            }
            // SAFETY: the caller vouches that sources can be read.
            unsafe { copy::to_device(target, source as usize, size, stream, staging) }
                .inspect_err(|_| failed_index.set_if_wanted(index))?;
        }
        Ok(())
    }
}

/// Not on the legacy stream, and not in a capture, which this does not spoil.
fn check_stream(handle: usize) -> Outcome {
    let mut state = enter()?;
    state.current()?;
    if handle <= 1 {
        return Err(code::INVALID_VALUE);
    }
    let stream = state.stream(handle)?;
    match state.streams.get(&stream).and_then(|it| it.capture()) {
        Some(_) => Err(code::STREAM_CAPTURE_UNSUPPORTED),
        None => Ok(()),
    }
}
