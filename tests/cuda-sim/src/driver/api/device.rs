//! Initialisation, devices, and the texts of result codes.

use crate::code;
use crate::driver::call::{Out, driver_api, enter};
use crate::driver::process::{check_initialized, initialize};
use crate::driver::state::DEVICES;
use crate::driver::{Outcome, device};
use std::ffi::c_char;

/// The version of the interface that is simulated: 12.8.
const VERSION: i32 = 12_080;
const NAME: &[u8] = b"Simulated device\0";

/// The device of a handle, which is its ordinal.
pub(super) fn checked(device: i32) -> Outcome<usize> {
    usize::try_from(device)
        .ok()
        .filter(|device| *device < DEVICES)
        .ok_or(code::INVALID_DEVICE)
}

driver_api! {
    /// Flags must be 0.
    fn cuInit(flags: u32) {
        if flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        initialize()
    }

    fn cuDriverGetVersion(version: Out<i32>) {
        version.set(VERSION)
    }

    fn cuGetErrorName(error: i32, text: Out<*const c_char>) {
        match code::name(error) {
            Some(name) => text.set(name.as_ptr()),
            None => {
                text.set_if_wanted(std::ptr::null());
                Err(code::INVALID_VALUE)
            }
        }
    }

    fn cuGetErrorString(error: i32, text: Out<*const c_char>) {
        match code::description(error) {
            Some(description) => text.set(description.as_ptr()),
            None => {
                text.set_if_wanted(std::ptr::null());
                Err(code::INVALID_VALUE)
            }
        }
    }

    fn cuDeviceGetCount(count: Out<i32>) {
        check_initialized()?;
        count.set(DEVICES as i32)
    }

    fn cuDeviceGet(device: Out<i32>, ordinal: i32) {
        check_initialized()?;
        checked(ordinal)?;
        device.set(ordinal)
    }

    fn cuDeviceGetName(name: Out<u8>, len: i32, device: i32) {
        check_initialized()?;
        checked(device)?;
        let room = usize::try_from(len).map_err(|_| code::INVALID_VALUE)?;
        if room == 0 {
            return Err(code::INVALID_VALUE);
        }
        name.check()?;
        let kept = NAME.len().min(room);
        for (index, byte) in NAME[..kept].iter().enumerate() {
            let last = index + 1 == kept;
            // The caller vouched for `len` bytes.
            name.at(index).set_if_wanted(if last { 0 } else { *byte });
        }
        Ok(())
    }

    fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, device: i32) {
        check_initialized()?;
        uuid.set(uuid_of(checked(device)?))
    }

    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: i32) {
        check_initialized()?;
        uuid.set(uuid_of(checked(device)?))
    }

    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: i32) {
        check_initialized()?;
        checked(device)?;
        bytes.set(device::TOTAL_BYTES)
    }

    fn cuDeviceGetAttribute(value: Out<i32>, attribute: i32, device: i32) {
        let state = enter()?;
        checked(device)?;
        value.set(state.settings.attribute(attribute).ok_or(code::INVALID_VALUE)?)
    }
}

fn uuid_of(device: usize) -> [u8; 16] {
    let mut uuid = *b"simulated-gpu-0\0";
    uuid[15] = device as u8;
    uuid
}
