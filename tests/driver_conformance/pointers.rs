//! What the driver says of an address. This crate does not ask yet, so nothing
//! relies on these; they are what an audit of registrations would stand on.

use cuda_sim::code;
use cudarc::driver::sys::CUpointer_attribute as Attribute;

use crate::answers::answer;
use crate::calls::{attribute_alone, attributes};
use crate::conforms;
use crate::memory::{Device, Host, PAGE, Pageable, Pinned, Stream};
use crate::rig::Rig;

const TYPE: Attribute = Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
const START: Attribute = Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR;
const SIZE: Attribute = Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE;
const BUFFER: Attribute = Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID;

const HOST: u64 = 1;
const DEVICE: u64 = 2;

fn address(base: *const u8) -> u64 {
    base.addr() as u64
}

/// Relied on by: an audit, which must not take "unknown" for an error.
fn an_unknown_address_reads_as_zeros_together_and_is_refused_alone(_: &Rig) {
    let memory = Pageable::new(PAGE);
    let asked = attributes([TYPE, START, SIZE, BUFFER], address(memory.base()));
    assert_eq!(asked, Ok([0; 4]), "together");
    let asked = attribute_alone(TYPE, address(memory.base()));
    assert_eq!(asked, Err(code::INVALID_VALUE), "alone");
}
conforms!(
    an_unknown_address_reads_as_zeros_together_and_is_refused_alone,
    lie: |sim| sim.fail_always("cuPointerGetAttributes", code::SUCCESS),
    noticed: "together"
);

/// Relied on by: an audit, which asks for the first and the last byte.
fn a_page_locked_address_is_host_memory(rig: &Rig) {
    let allocated = Pinned::new(2 * PAGE);
    let memory = Pageable::new(3 * PAGE);
    let (offset, len) = (100, PAGE + 50);
    let pin = memory.register(offset, len, 0).unwrap();
    for (what, base, len) in [
        ("allocated", allocated.base(), 2 * PAGE),
        ("registered", pin.base, len),
    ] {
        for offset in [0, len / 2, len - 1] {
            let pointer = address(base) + offset as u64;
            let [kind, start, size] = attributes([TYPE, START, SIZE], pointer).unwrap();
            assert_eq!(kind, HOST, "{what}, byte {offset}");
            assert_eq!(attribute_alone(TYPE, pointer), Ok(HOST), "{what}, alone");
            let range = start..start + size;
            assert!(range.contains(&pointer), "{what}: {range:x?}, {pointer:x}");
        }
        let [start, size] = attributes([START, SIZE], address(base)).unwrap();
        let exact = (start, size) == (address(base), len as u64);
        let range = format!(
            "{}, {} bytes before the base and {} in all for {len}",
            if exact { "yes" } else { "no" },
            address(base) - start,
            size
        );
        answer(rig, &format!("range of {what} memory is exact?"), range);
        let [behind] = attributes([TYPE], address(base) + len as u64).unwrap();
        let behind = if behind == 0 {
            "unknown"
        } else {
            "page-locked"
        };
        answer(rig, &format!("the byte behind {what} memory is?"), behind);
    }
    assert_eq!(pin.unregister(), 0);
    let [kind] = attributes([TYPE], address(memory.base()) + offset as u64).unwrap();
    assert_eq!(kind, 0, "what was unregistered is unknown");
}
conforms!(
    a_page_locked_address_is_host_memory,
    lie: |sim| sim.fail_nth("cuMemHostUnregister", 1, code::SUCCESS),
    noticed: "what was unregistered is unknown"
);

/// Relied on by: an audit, which tells memory that was page-locked again at
/// the same address from what was there before.
fn each_registration_has_a_number_of_its_own(_: &Rig) {
    let memory = Pageable::new(PAGE);
    let mut numbers = Vec::new();
    for _ in 0..3 {
        let pin = memory.register(0, PAGE, 0).unwrap();
        let [number] = attributes([BUFFER], address(pin.base)).unwrap();
        numbers.push(number);
        assert_eq!(pin.unregister(), 0);
    }
    numbers.sort_unstable();
    let all = numbers.len();
    numbers.dedup();
    assert_eq!(numbers.len(), all, "each has its own number: {numbers:?}");
    assert!(!numbers.contains(&0), "each has a number: {numbers:?}");
}
conforms!(
    each_registration_has_a_number_of_its_own,
    lie: |sim| sim.fail_always("cuPointerGetAttributes", code::SUCCESS),
    noticed: "each has its own number"
);

/// Relied on by: an audit, which looks at host memory alone.
fn a_device_address_is_device_memory(_: &Rig) {
    let stream = Stream::new();
    let memory = Device::new(PAGE, &stream);
    stream.wait();
    let [kind, start, size] = attributes([TYPE, START, SIZE], memory.at(100)).unwrap();
    assert_eq!(kind, DEVICE, "device memory");
    assert_eq!((start, size), (memory.at(0), PAGE as u64));
}
conforms!(
    a_device_address_is_device_memory,
    lie: |sim| sim.fail_always("cuPointerGetAttributes", code::SUCCESS),
    noticed: "device memory"
);
