//! The result codes of the driver interface, as CUDA 12.8 numbers them.
//!
//! `cudarc` transmutes what a call returns into its own enum, so a code that
//! is not in this list would be undefined behaviour there. Nothing in this
//! crate returns one, and [`fail_nth`](crate::Session::fail_nth) refuses one.

use std::ffi::CStr;

macro_rules! codes {
    ($($name:ident = $number:literal, $text:literal;)*) => {
        $(
            #[doc = concat!("`CUDA_ERROR_", stringify!($name), "`: ", $text, ".")]
            pub const $name: i32 = $number;
        )*

        /// Number, name and description of every code but success.
        const TABLE: &[(i32, &CStr, &CStr)] = &[
            $((
                $number,
                terminated(concat!("CUDA_ERROR_", stringify!($name), "\0")),
                terminated(concat!($text, "\0")),
            ),)*
        ];
    };
}

/// `CUDA_SUCCESS`.
pub const SUCCESS: i32 = 0;

codes! {
    INVALID_VALUE = 1, "invalid argument";
    OUT_OF_MEMORY = 2, "out of memory";
    NOT_INITIALIZED = 3, "initialization error";
    DEINITIALIZED = 4, "driver shutting down";
    DEVICE_UNAVAILABLE = 46, "CUDA-capable device(s) is/are busy or unavailable";
    NO_DEVICE = 100, "no CUDA-capable device is detected";
    INVALID_DEVICE = 101, "invalid device ordinal";
    INVALID_CONTEXT = 201, "invalid device context";
    MAP_FAILED = 205, "mapping of buffer object failed";
    ECC_UNCORRECTABLE = 214, "uncorrectable ECC error encountered";
    NVLINK_UNCORRECTABLE = 220, "uncorrectable NVLink error detected during the execution";
    CONTAINED = 226, "an exception on the device was contained";
    OPERATING_SYSTEM = 304, "OS call failed or operation not supported on this OS";
    INVALID_HANDLE = 400, "invalid resource handle";
    ILLEGAL_STATE = 401, "the operation cannot be performed in the present state";
    NOT_FOUND = 500, "named symbol not found";
    NOT_READY = 600, "device not ready";
    ILLEGAL_ADDRESS = 700, "an illegal memory access was encountered";
    LAUNCH_TIMEOUT = 702, "the launch timed out and was terminated";
    PRIMARY_CONTEXT_ACTIVE = 708, "cannot set while device is active in this process";
    CONTEXT_IS_DESTROYED = 709, "context is destroyed";
    ASSERT = 710, "device-side assert triggered";
    HOST_MEMORY_ALREADY_REGISTERED = 712, "part or all of the requested memory range is already mapped";
    HOST_MEMORY_NOT_REGISTERED = 713, "pointer does not correspond to a registered memory region";
    HARDWARE_STACK_ERROR = 714, "hardware stack error";
    ILLEGAL_INSTRUCTION = 715, "an illegal instruction was encountered";
    MISALIGNED_ADDRESS = 716, "misaligned address";
    INVALID_ADDRESS_SPACE = 717, "operation not supported on global or shared address space";
    INVALID_PC = 718, "invalid program counter";
    LAUNCH_FAILED = 719, "unspecified launch failure";
    TENSOR_MEMORY_LEAK = 721, "tensor memory was not completely freed";
    NOT_PERMITTED = 800, "operation not permitted";
    NOT_SUPPORTED = 801, "operation not supported";
    SYSTEM_NOT_READY = 802, "system not yet initialized";
    MPS_CLIENT_TERMINATED = 810, "the server has terminated the MPS client";
    STREAM_CAPTURE_UNSUPPORTED = 900, "operation not permitted when stream is capturing";
    STREAM_CAPTURE_INVALIDATED = 901, "operation failed due to a previous error during capture";
    STREAM_CAPTURE_MERGE = 902, "operation would result in a merge of separate capture sequences";
    STREAM_CAPTURE_UNMATCHED = 903, "capture was not ended in the same stream as it began";
    STREAM_CAPTURE_UNJOINED = 904, "capturing stream has unjoined work";
    STREAM_CAPTURE_ISOLATION = 905, "dependency created on uncaptured work in another stream";
    STREAM_CAPTURE_IMPLICIT = 906, "operation would make the legacy stream depend on a capturing blocking stream";
    CAPTURED_EVENT = 907, "operation not permitted on an event last recorded in a capturing stream";
    STREAM_CAPTURE_WRONG_THREAD = 908, "attempt to terminate a thread-local capture sequence from another thread";
    TIMEOUT = 909, "wait operation timed out";
    EXTERNAL_DEVICE = 911, "an async error has occurred in external entity outside of CUDA";
    UNKNOWN = 999, "unknown error";
}

/// Whether `code` is one that the simulated driver may return.
pub fn is_known(code: i32) -> bool {
    code == SUCCESS || lookup(code).is_some()
}

pub(crate) fn name(code: i32) -> Option<&'static CStr> {
    match code {
        SUCCESS => Some(c"CUDA_SUCCESS"),
        _ => lookup(code).map(|row| row.1),
    }
}

pub(crate) fn description(code: i32) -> Option<&'static CStr> {
    match code {
        SUCCESS => Some(c"no error"),
        _ => lookup(code).map(|row| row.2),
    }
}

fn lookup(code: i32) -> Option<&'static (i32, &'static CStr, &'static CStr)> {
    TABLE.iter().find(|row| row.0 == code)
}

const fn terminated(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("a code's text holds a NUL"),
    }
}
