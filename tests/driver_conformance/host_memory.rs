//! Page-locking memory, and undoing it.

use cuda_sim::code;
use cudarc::driver::sys::{
    self, CU_MEMHOSTREGISTER_PORTABLE as PORTABLE, CU_MEMHOSTREGISTER_READ_ONLY as READ_ONLY,
    CUdevice_attribute as Attribute,
};
use memmap2::{Mmap, MmapMut};

use crate::answers::answer;
use crate::calls::{host_alloc, host_flags, host_free, host_register, host_unregister, htod};
use crate::conforms;
use crate::memory::{Device, Host, PAGE, Pageable, Pinned, Stream};
use crate::rig::Rig;

/// Relied on by: `HostRegistration`, which page-locks a vector from where it
/// begins to where it ends.
fn an_unaligned_range_can_be_registered(_: &Rig) {
    let memory = Pageable::filled(3 * PAGE, 3);
    let stream = Stream::new();
    let target = Device::new(3 * PAGE, &stream);
    for (offset, len) in [(1, 1), (7, PAGE), (PAGE - 1, PAGE + 2), (1, 3 * PAGE - 2)] {
        let pin = memory.register(offset, len, PORTABLE);
        let pin = pin.unwrap_or_else(|failed| panic!("{len} bytes at {offset}: {failed}"));
        let copied = htod(target.at(offset), pin.base, len, stream.handle());
        assert_eq!(copied, 0, "a copy of all of it");
        stream.wait();
        assert_eq!(pin.unregister(), 0);
    }
}
conforms!(
    an_unaligned_range_can_be_registered,
    lie: |sim| sim.fail_nth("cuMemHostRegister_v2", 2, code::INVALID_VALUE),
    noticed: "4096 bytes at 7: 1"
);

/// Relied on by: `RegisterFailure::AlreadyRegistered`, and `is_refusal`: after
/// this error the memory is as it was.
fn a_range_that_overlaps_a_registered_one_is_refused(_: &Rig) {
    let memory = Pageable::filled(4 * PAGE, 3);
    let pin = memory.register(PAGE, PAGE, PORTABLE).unwrap();
    for (offset, len) in [
        (PAGE, PAGE),
        (PAGE + 8, 8),
        (0, 4 * PAGE),
        (PAGE - 1, 2),
        (2 * PAGE - 1, 2),
        (PAGE, 1),
    ] {
        let refused = host_register(memory.base().wrapping_add(offset), len, PORTABLE);
        assert_eq!(
            refused,
            code::HOST_MEMORY_ALREADY_REGISTERED,
            "{len} bytes at {offset}"
        );
    }
    // Nothing was changed by all that, and nothing is left of it.
    let stream = Stream::new();
    let target = Device::new(PAGE, &stream);
    assert_eq!(htod(target.at(0), pin.base, PAGE, stream.handle()), 0);
    stream.wait();
    assert_eq!(pin.unregister(), 0, "the first is still registered");
    let all = memory.register(0, 4 * PAGE, PORTABLE).unwrap();
    assert_eq!(all.unregister(), 0);
}
conforms!(
    a_range_that_overlaps_a_registered_one_is_refused,
    lie: |sim| sim.fail_nth("cuMemHostRegister_v2", 5, code::SUCCESS),
    noticed: "2 bytes at 4095"
);

/// Relied on by: `Residency`, which is byte-exact, and `HostRegistration`,
/// whose chunks meet within a page where elements do not end on one.
fn two_ranges_on_one_page_are_two_registrations(_: &Rig) {
    let memory = Pageable::filled(PAGE, 3);
    let stream = Stream::new();
    let target = Device::new(PAGE, &stream);
    let copy = |offset: usize, len| {
        let part = memory.base().wrapping_add(offset);
        let copied = htod(target.at(offset), part, len, stream.handle());
        stream.wait();
        copied
    };
    let first = memory.register(0, 100, PORTABLE).unwrap();
    let second = memory.register(200, 100, PORTABLE);
    let second = second.expect("a second range on the page");
    let third = memory.register(300, 100, PORTABLE);
    let third = third.expect("a third one that touches the second");
    assert_eq!([copy(0, 100), copy(100, 100), copy(200, 100)], [0; 3]);
    assert_eq!(second.unregister(), 0);
    assert_eq!(copy(200, 100), 0, "what was unregistered is pageable");
    assert_eq!(copy(300, 100), 0, "its neighbours are not concerned");
    assert_eq!(copy(200, 101), code::INVALID_VALUE, "the third is there");
    assert_eq!([first.unregister(), third.unregister()], [0; 2]);
}
conforms!(
    two_ranges_on_one_page_are_two_registrations,
    lie: |sim| {
        sim.fail_nth("cuMemHostRegister_v2", 2, code::HOST_MEMORY_ALREADY_REGISTERED);
    },
    noticed: "a second range on the page"
);

/// Relied on by: `HostRegistration`'s undoing, which takes any error but 713
/// for "still page-locked", and keeps the memory.
fn only_the_base_of_a_registration_can_be_unregistered(_: &Rig) {
    let memory = Pageable::filled(2 * PAGE, 3);
    let pin = memory.register(0, 2 * PAGE, PORTABLE).unwrap();
    for offset in [1, PAGE, 2 * PAGE - 1] {
        let refused = host_unregister(pin.base.wrapping_add(offset));
        assert_eq!(refused, code::INVALID_VALUE, "at {offset} bytes from it");
    }
    let allocated = Pinned::new(PAGE);
    let refused = host_unregister(allocated.base());
    assert_eq!(refused, code::INVALID_VALUE, "an allocation");
    assert_eq!(pin.unregister(), 0, "it is still registered");
    assert_eq!(allocated.free(), 0, "it is still allocated");
}
conforms!(
    only_the_base_of_a_registration_can_be_unregistered,
    lie: |sim| sim.fail_nth("cuMemHostUnregister", 4, code::SUCCESS),
    noticed: "an allocation"
);

/// Relied on by: `is_not_registered`: by this code, memory of which nobody
/// knew whether it is page-locked turns out not to be.
fn what_is_not_registered_is_said_to_be_so(_: &Rig) {
    let memory = Pageable::filled(2 * PAGE, 3);
    let never = host_unregister(memory.base());
    assert_eq!(never, code::HOST_MEMORY_NOT_REGISTERED, "never registered");
    let pin = memory.register(0, PAGE, PORTABLE).unwrap();
    let beside = host_unregister(memory.base().wrapping_add(PAGE));
    assert_eq!(beside, code::HOST_MEMORY_NOT_REGISTERED, "right behind one");
    assert_eq!(pin.unregister(), 0);
    let twice = host_unregister(memory.base());
    assert_eq!(twice, code::HOST_MEMORY_NOT_REGISTERED, "not any more");
    let again = memory.register(0, 2 * PAGE, PORTABLE).unwrap();
    assert_eq!(again.unregister(), 0, "it can be registered again");
}
conforms!(
    what_is_not_registered_is_said_to_be_so,
    lie: |sim| sim.fail_nth("cuMemHostUnregister", 4, code::SUCCESS),
    noticed: "not any more"
);

/// Relied on by: nothing, as `PinnedBuffer` allocates nothing for no bytes.
fn allocating_no_bytes_succeeds(rig: &Rig) {
    let base = host_alloc(0, PORTABLE).expect("no bytes can be allocated");
    answer(
        rig,
        "cuMemHostAlloc of no bytes gives?",
        if base.is_null() { "null" } else { "an address" },
    );
    if !base.is_null() {
        assert_eq!(host_free(base), 0);
    }
}
conforms!(
    allocating_no_bytes_succeeds,
    lie: |sim| sim.fail_always("cuMemHostAlloc", code::INVALID_VALUE),
    noticed: "no bytes can be allocated"
);

/// Relied on by: `PinnedBuffer`, which asks for `PORTABLE` alone, and whose
/// elements have to lie on addresses that suit them.
fn an_allocation_has_the_flags_it_was_made_with(_: &Rig) {
    let plain = host_alloc(1, 0).expect("a byte can be allocated");
    let portable = host_alloc(1, PORTABLE).expect("a byte can be allocated");
    let flags = [plain, portable].map(|base| host_flags(base));
    let aligned = [plain, portable].map(|base| base.addr().is_multiple_of(256));
    assert_eq!([host_free(plain), host_free(portable)], [0; 2]);
    // Both are mapped for the device too: all addresses are one space.
    let mapped = sys::CU_MEMHOSTALLOC_DEVICEMAP;
    assert_eq!(flags[0], Ok(mapped), "no flags");
    assert_eq!(flags[1], Ok(PORTABLE | mapped), "portable");
    assert_eq!(aligned, [true; 2], "as aligned as any element");
}
conforms!(
    an_allocation_has_the_flags_it_was_made_with,
    lie: |sim| sim.fail_nth("cuMemHostGetFlags", 2, code::SUCCESS),
    noticed: "portable"
);

/// Relied on by: `HostRegistration` over a memory-mapped file, which asks for
/// the attribute, and trusts it.
fn the_attribute_says_whether_read_only_memory_can_be_registered(rig: &Rig) {
    let file = mapped_file();
    let register = |flags| host_register(file.as_ptr(), file.len(), flags);
    let plain = register(PORTABLE);
    if plain == 0 {
        assert_eq!(host_unregister(file.as_ptr()), 0);
    }
    let question = "read-only memory registered without READ_ONLY?";
    answer(rig, question, outcome(plain));
    let supported = Attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED;
    let registered = register(PORTABLE | READ_ONLY);
    if rig.attribute(supported) == 0 {
        assert_ne!(registered, 0, "the attribute says that it is impossible");
        return;
    }
    assert_eq!(registered, 0, "the attribute says that it is possible");
    let stream = Stream::new();
    let target = Device::new(file.len(), &stream);
    let copied = htod(target.at(0), file.as_ptr(), file.len(), stream.handle());
    assert_eq!(copied, 0);
    stream.wait();
    assert_eq!(target.contents(), &file[..], "the file arrives");
    assert_eq!(host_unregister(file.as_ptr()), 0);
}
conforms!(
    the_attribute_says_whether_read_only_memory_can_be_registered,
    lie: |sim| sim.fail_nth("cuMemHostRegister_v2", 2, code::NOT_SUPPORTED),
    noticed: "the attribute says that it is possible"
);

/// The other value of the attribute, which one device cannot have too.
#[test]
fn the_attribute_says_that_read_only_memory_cannot_be_registered() {
    if let Some(rig) = Rig::altered(|sim| sim.set_attribute(113, 0)) {
        the_attribute_says_whether_read_only_memory_can_be_registered(&rig);
    }
}

/// A file mapped for reading only.
fn mapped_file() -> Mmap {
    let file = tempfile::tempfile().unwrap();
    file.set_len(3 * PAGE as u64).unwrap();
    // SAFETY: nobody else has the file, which has no name.
    let mut written = unsafe { MmapMut::map_mut(&file) }.unwrap();
    for (index, byte) in written.iter_mut().enumerate() {
        *byte = (index % 251) as u8;
    }
    drop(written);
    // SAFETY: as above.
    unsafe { Mmap::map(&file) }.unwrap()
}

/// Relied on by: nothing; a driver that refuses gives a clear error. A file
/// that is mapped shared and writable is what the documentation of
/// `HostMemory` recommends where read-only mappings cannot be page-locked.
#[test]
fn whether_a_shared_writable_file_can_be_registered() {
    let rig = Rig::new();
    let file = tempfile::tempfile().unwrap();
    file.set_len(PAGE as u64).unwrap();
    // SAFETY: nobody else has the file, which has no name.
    let mapped = unsafe { MmapMut::map_mut(&file) }.unwrap();
    let registered = host_register(mapped.as_ptr(), mapped.len(), PORTABLE);
    let question = "a shared, writable file mapping can be registered?";
    answer(&rig, question, outcome(registered));
    if registered == 0 {
        assert_eq!(host_unregister(mapped.as_ptr()), 0);
    }
}

/// Relied on by: nothing; the process-wide registry refuses it first.
#[test]
fn whether_an_allocation_can_be_registered_again() {
    let rig = Rig::new();
    let memory = Pinned::new(2 * PAGE);
    let inner = memory.base().wrapping_add(PAGE);
    let registered = host_register(inner, 8, PORTABLE);
    let question = "a part of an allocation can be registered?";
    answer(&rig, question, outcome(registered));
    if registered == 0 {
        assert_eq!(host_unregister(inner), 0);
    }
    assert_eq!(memory.free(), 0);
}

fn outcome(code: i32) -> String {
    match code {
        0 => "yes".to_owned(),
        failed => format!("no, refused with {failed}"),
    }
}
