//! What the driver says about addresses.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{bench, code, device_alloc, host_alloc, host_free, out, register, unregister};
use cudarc::driver::sys::{self, CUpointer_attribute};
use sys::CUpointer_attribute_enum::{
    CU_POINTER_ATTRIBUTE_BUFFER_ID as BUFFER_ID,
    CU_POINTER_ATTRIBUTE_DEVICE_POINTER as DEVICE_POINTER,
    CU_POINTER_ATTRIBUTE_HOST_POINTER as HOST_POINTER,
    CU_POINTER_ATTRIBUTE_IS_MANAGED as IS_MANAGED, CU_POINTER_ATTRIBUTE_MEMORY_TYPE as MEMORY_TYPE,
    CU_POINTER_ATTRIBUTE_RANGE_SIZE as RANGE_SIZE,
    CU_POINTER_ATTRIBUTE_RANGE_START_ADDR as RANGE_START,
};

const HOST: u64 = 1;
const DEVICE: u64 = 2;

/// One attribute, which must be no wider than this.
fn one(attribute: CUpointer_attribute, address: u64) -> Result<u64, i32> {
    // SAFETY: an out pointer, wide enough for any attribute.
    out(|data: *mut u64| unsafe { sys::cuPointerGetAttribute(data.cast(), attribute, address) })
}

/// Several attributes at once, into places that hold rubbish.
fn several<const N: usize>(attributes: [CUpointer_attribute; N], address: u64) -> [u64; N] {
    let mut attributes = attributes;
    let mut values = attributes.map(|attribute| match attribute {
        // Written as words, so that the upper half stays.
        MEMORY_TYPE | IS_MANAGED => 0xffff_ffff,
        _ => u64::MAX,
    });
    let mut places = [std::ptr::null_mut(); N];
    for (place, value) in places.iter_mut().zip(&mut values) {
        *place = (&raw mut *value).cast();
    }
    // SAFETY: as many of each as it says.
    let result = unsafe {
        sys::cuPointerGetAttributes(
            N as u32,
            attributes.as_mut_ptr(),
            places.as_mut_ptr(),
            address,
        )
    };
    assert_eq!(code(result), 0);
    values
}

#[test]
fn an_unknown_address_is_an_error_alone_and_zero_among_others() {
    let _bench = bench();
    let memory = [0_u8; 8];
    let address = memory.as_ptr() as u64;
    for attribute in [MEMORY_TYPE, BUFFER_ID, RANGE_START, RANGE_SIZE, IS_MANAGED] {
        assert_eq!(one(attribute, address), Err(1));
    }
    assert_eq!(
        several(
            [MEMORY_TYPE, BUFFER_ID, RANGE_START, RANGE_SIZE, IS_MANAGED],
            address
        ),
        [0; 5]
    );
}

#[test]
fn page_locked_memory_is_known_to_its_last_byte() {
    let _bench = bench();
    let memory = vec![0_u8; 100];
    let allocated = host_alloc(100);
    assert_eq!(register(&memory), 0);
    for base in [memory.as_ptr() as u64, allocated as u64] {
        for address in [base, base + 99] {
            assert_eq!(
                several(
                    [
                        MEMORY_TYPE,
                        RANGE_START,
                        RANGE_SIZE,
                        IS_MANAGED,
                        HOST_POINTER,
                        DEVICE_POINTER
                    ],
                    address
                ),
                [HOST, base, 100, 0, address, address]
            );
            assert_eq!(one(MEMORY_TYPE, address), Ok(HOST));
        }
        assert_eq!(one(MEMORY_TYPE, base + 100), Err(1));
    }
    assert_eq!(unregister(memory.as_ptr()), 0);
    assert_eq!(host_free(allocated), 0);
    assert_eq!(several([MEMORY_TYPE], memory.as_ptr() as u64), [0]);
    assert_eq!(several([MEMORY_TYPE], allocated as u64), [0]);
}

#[test]
fn device_memory_is_known_and_has_no_host_address() {
    let _bench = bench();
    let memory = device_alloc(100);
    assert_eq!(
        several(
            [MEMORY_TYPE, RANGE_START, RANGE_SIZE, HOST_POINTER],
            memory + 99
        ),
        [DEVICE, memory, 100, 0]
    );
    assert_eq!(one(HOST_POINTER, memory), Err(1));
    assert_eq!(one(MEMORY_TYPE, memory + 100), Err(1));
}

#[test]
fn an_address_that_is_page_locked_again_has_another_buffer_id() {
    let _bench = bench();
    let memory = vec![0_u8; 100];
    let mut ids = Vec::new();
    for _ in 0..3 {
        assert_eq!(register(&memory), 0);
        ids.push(one(BUFFER_ID, memory.as_ptr() as u64).unwrap());
        assert_eq!(unregister(memory.as_ptr()), 0);
    }
    ids.dedup();
    assert_eq!(ids.len(), 3);
}
