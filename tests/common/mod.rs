//! What the tests over the simulated driver share.
#![allow(dead_code, reason = "each test file uses its own part of it")]

pub(crate) mod example;

use std::io::{self, Write};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

use cuda_sim::{Counters, Session};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, sys};
use pinned_hosts::cuda::{self, Copier, CopierOptions, Policy};
use pinned_hosts::{Region, global};

/// The simulated driver to oneself, a context, a stream, and a
/// [waiting copier](waiting_copier) on it.
///
/// The fields are dropped in this order: what uses the driver goes first.
pub(crate) struct Rig {
    pub(crate) copier: Copier,
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) context: Arc<CudaContext>,
    pub(crate) sim: Session,
}

impl Rig {
    pub(crate) fn new() -> Self {
        Self::with(|_| ())
    }

    /// With settings that have to be made before the device is opened.
    pub(crate) fn with(set_up: impl FnOnce(&Session)) -> Self {
        let sim = cuda_sim::load().unwrap().session();
        set_up(&sim);
        let context = cuda::context(0).unwrap();
        // An error that an earlier test left stored in the context.
        let _ = context.check_err();
        let stream = context.new_stream().unwrap();
        Self {
            copier: waiting_copier(&stream),
            stream,
            context,
            sim,
        }
    }

    pub(crate) fn zeros<T: cudarc::driver::DeviceRepr + cudarc::driver::ValidAsZeroBits>(
        &self,
        len: usize,
    ) -> CudaSlice<T> {
        let zeros = self.stream.alloc_zeros(len).unwrap();
        self.stream.synchronize().unwrap();
        zeros
    }

    /// Lets the device finish, and reads what it has.
    pub(crate) fn read_back<T: cudarc::driver::DeviceRepr + Clone + Default>(
        &self,
        on_device: &CudaSlice<T>,
    ) -> Vec<T> {
        self.stream.clone_dtoh(on_device).unwrap()
    }

    /// Lets the device finish, and reads the counters.
    pub(crate) fn counters(&self) -> Counters {
        self.sim.drain();
        self.sim.counters()
    }

    #[track_caller]
    pub(crate) fn assert_sound(&self) {
        let counters = self.counters();
        assert_eq!(
            (
                counters.torn_transfers,
                counters.dead_reads,
                counters.dead_writes
            ),
            (0, 0, 0),
            "(torn transfers, dead reads, dead writes) of {counters:?}"
        );
    }
}

/// A copier that waits for page-locked sources: what waits can be seen to.
pub(crate) fn waiting_copier(stream: &Arc<CudaStream>) -> Copier {
    Copier::with_options(stream, CopierOptions::default().policy(Policy::Wait)).unwrap()
}

/// Memory that the user's own code page-locks with the driver, and notes in
/// the registry.
pub(crate) struct Registered {
    pub(crate) memory: Vec<u8>,
    registration: Option<pinned_hosts::Registration<'static>>,
}

impl Registered {
    pub(crate) fn new(memory: Vec<u8>) -> Self {
        let registration = global().register(Region::of(&memory).unwrap());
        let base = memory.as_ptr().cast_mut().cast();
        // SAFETY: the vector outlives the registration (see `drop`).
        let code = unsafe { sys::cuMemHostRegister_v2(base, memory.len(), 1) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        Self {
            memory,
            registration: Some(registration),
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let base = self.memory.as_ptr().cast_mut().cast();
        // SAFETY: registered by `new`.
        let code = unsafe { sys::cuMemHostUnregister(base) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        self.registration.take().unwrap().unregister();
    }
}

/// Runs the test `name` of this binary in a process of its own, with the
/// variable `IN_CHILD` set, so that it can do what a process does only once.
pub(crate) fn in_child(name: &str, set_up: impl FnOnce(&mut Command)) -> Option<Output> {
    if is_child() {
        return None;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env(IN_CHILD, "1");
    set_up(&mut command);
    Some(command.output().unwrap())
}

const IN_CHILD: &str = "PINNED_HOSTS_TEST_IN_CHILD";

pub(crate) fn is_child() -> bool {
    std::env::var_os(IN_CHILD).is_some()
}

/// The lines that `run` logs.
pub(crate) fn logged(run: impl FnOnce()) -> String {
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, run);
    String::from_utf8(log.0.lock().unwrap().clone()).unwrap()
}
