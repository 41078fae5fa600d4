//! The warning that a copy was slowed down: once for each call site, with
//! what somebody needs to find and mend it. Over the simulated driver.
#![allow(clippy::unwrap_used)]

mod common;

use std::io;
use std::sync::{Arc, Mutex};

use common::Rig;
use pinned_hosts::Region;
use pinned_hosts::cuda::PinnedBuffer;
use tracing_subscriber::fmt::MakeWriter;

/// What was logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// The lines that `run` logs.
fn logged(run: impl FnOnce()) -> Vec<String> {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(log.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, run);
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    text.lines().map(str::to_owned).collect()
}

#[test]
fn a_slow_copy_is_logged_once_per_call_site_with_site_region_and_cost() {
    let rig = Rig::new();
    let source = PinnedBuffer::from_slice(&rig.context, &[1u8; 100]).unwrap();
    let mut on_device = rig.zeros::<u8>(100);
    let lines = logged(|| {
        for _ in 0..3 {
            rig.copier
                .copy_h2d_async(&source[10..20], &mut on_device)
                .unwrap();
        }
        rig.copier.copy_h2d_async(&source, &mut on_device).unwrap();
    });
    assert_eq!(lines.len(), 2, "one for each call site: {lines:#?}");
    let region = Region::of(&source).unwrap().to_string();
    for line in &lines {
        assert!(line.contains("WARN"), "{line}");
        assert!(line.contains("tests/warnings.rs:"), "{line}");
        assert!(line.contains(&region), "{line}");
        assert!(line.contains("cost="), "{line}");
        assert!(line.contains("copy_h2d_from"), "what to do: {line}");
    }
    assert_eq!(rig.copier.stats().guarded, 4);
    assert!(rig.copier.stats().waited > std::time::Duration::ZERO);
}

#[test]
fn copies_that_are_not_slowed_down_are_not_logged() {
    let rig = Rig::new();
    let pinned = PinnedBuffer::from_slice(&rig.context, &[1u8; 100]).unwrap();
    let mut on_device = rig.zeros::<u8>(100);
    let lines = logged(|| {
        rig.copier
            .copy_h2d_async(&[1u8; 100], &mut on_device)
            .unwrap();
        rig.copier
            .copy_h2d_from(&pinned, 0..100, &mut on_device)
            .unwrap();
    });
    assert_eq!(lines, [""; 0]);
}

#[test]
fn a_copy_of_mixed_memory_is_logged_with_its_residency() {
    let rig = Rig::new();
    let memory = vec![1u8; 100];
    let registration = pinned_hosts::global().register(Region::of(&memory[50..]).unwrap());
    let mut on_device = rig.zeros::<u8>(100);
    let lines = logged(|| {
        rig.copier.copy_h2d_async(&memory, &mut on_device).unwrap();
    });
    registration.unregister();
    assert_eq!(lines.len(), 1, "{lines:#?}");
    assert!(lines[0].contains("Mixed"), "{}", lines[0]);
    let region = Region::of(&memory[50..]).unwrap().to_string();
    assert!(lines[0].contains(&region), "{}", lines[0]);
}

/// A subscriber may take its time, or a lock that a pinning thread holds: no
/// grace period may depend on it.
#[test]
fn the_warning_is_made_outside_of_the_copys_section() {
    let rig = Rig::new();
    let source = PinnedBuffer::from_slice(&rig.context, &[1u8; 100]).unwrap();
    let mut on_device = rig.zeros::<u8>(100);
    let waited = Arc::new(Mutex::new(None));
    let subscriber = tracing_subscriber::fmt().with_writer({
        let waited = Arc::clone(&waited);
        move || {
            let result = pinned_hosts::global().wait_for_sections(None);
            *waited.lock().unwrap() = Some(result);
            io::sink()
        }
    });
    tracing::subscriber::with_default(subscriber.finish(), || {
        rig.copier.copy_h2d_async(&source, &mut on_device).unwrap();
    });
    assert_eq!(*waited.lock().unwrap(), Some(Ok(())));
}

#[test]
fn a_copy_that_waits_for_the_devices_sake_says_so() {
    let rig = Rig::with(|sim| sim.set_device(cuda_sim::DeviceKind::Coherent));
    let mut on_device = rig.zeros::<u8>(100);
    let lines = logged(|| {
        rig.copier
            .copy_h2d_async(&[1u8; 100], &mut on_device)
            .unwrap();
    });
    assert_eq!(lines.len(), 1, "{lines:#?}");
    assert!(
        lines[0].contains("may read pageable memory late"),
        "{}",
        lines[0]
    );
}

#[test]
fn a_registration_that_wraps_is_logged() {
    // Half of the address space is about to count as pinned: let no other
    // test copy meanwhile.
    let _rig = Rig::new();
    let byte = 1u8;
    let lines = logged(|| pinned_hosts::register(&raw const byte, usize::MAX));
    pinned_hosts::unregister(&raw const byte);
    assert_eq!(lines.len(), 1, "{lines:#?}");
    assert!(lines[0].contains("runs past the end of the address space"));
}
