//! What the simulated driver counts.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    (
        counted { $($(#[$doc:meta])* $counted:ident,)* }
        gauges { $($(#[$gauge_doc:meta])* $gauge:ident,)* }
    ) => {
        /// A reading of the counters.
        ///
        /// Transfers are counted when the device carries them out, not when
        /// they are enqueued: read the counters after waiting, or after
        /// [`drain`](crate::Session::drain).
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[$doc])* pub $counted: u64,)*
            $($(#[$gauge_doc])* pub $gauge: u64,)*
        }

        /// The counters as the driver keeps them.
        ///
        /// All accesses are relaxed: a reader that waited for a transfer
        /// synchronised with it through the driver's lock.
        pub(crate) struct Tally {
            $(pub(crate) $counted: AtomicU64,)*
            $(pub(crate) $gauge: AtomicU64,)*
        }

        impl Tally {
            pub(crate) const fn new() -> Self {
                Self {
                    $($counted: AtomicU64::new(0),)*
                    $($gauge: AtomicU64::new(0),)*
                }
            }

            pub(crate) fn read(&self) -> Counters {
                Counters {
                    $($counted: self.$counted.load(Ordering::Relaxed),)*
                    $($gauge: self.$gauge.load(Ordering::Relaxed),)*
                }
            }

            /// Sets everything to zero but the gauges, which say how much is
            /// alive, and stays alive.
            pub(crate) fn reset(&self) {
                $(self.$counted.store(0, Ordering::Relaxed);)*
            }
        }
    };
}

counters! {
    counted {
        /// Host-to-device transfers carried out.
        h2d_transfers,
        /// Bytes of those.
        h2d_bytes,
        /// Device-to-host transfers carried out.
        d2h_transfers,
        /// Bytes of those.
        d2h_bytes,
        /// Host-to-device transfers whose host source was read by the device
        /// itself and not at call time: the source had to stay as it was
        /// until then.
        late_reads,
        /// Late reads whose source differed at that time from what it was at
        /// the call (or, in a graph, at capture).
        torn_transfers,
        /// Late reads whose source had been freed, unregistered or unmapped
        /// by then.
        dead_reads,
        /// Device-to-host transfers that wrote host memory after the call
        /// may have returned.
        late_writes,
        /// Late writes whose target had been freed, unregistered or unmapped
        /// by then. What is dead is not written.
        dead_writes,
        /// Host-to-device transfers whose pageable source was copied into
        /// staging memory by the call itself.
        staged_copies,
        /// Operations that touched device memory which had been freed.
        dead_device_accesses,
        /// Copies on a stream of another context than that of device memory
        /// which they named, those of `cuMemcpyPeerAsync` included.
        foreign_context_copies,
        /// Operations that were pending when their context broke, and never
        /// ran.
        dropped_operations,
        /// Graph launches.
        graph_launches,
    }
    gauges {
        /// Live `cuMemHostAlloc` allocations.
        live_host_allocations,
        /// Live `cuMemHostRegister` registrations.
        live_registrations,
        /// Live events.
        live_events,
        /// Live streams, without the default streams of contexts.
        live_streams,
        /// Live device allocations.
        live_device_allocations,
        /// Operations enqueued and not yet carried out.
        pending_operations,
    }
}

pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

pub(crate) fn take(gauge: &AtomicU64, amount: u64) {
    gauge.fetch_sub(amount, Ordering::Relaxed);
}
