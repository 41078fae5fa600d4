//! UCX's cache of memory types, through its C library.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr;

use libloading::{Library, Symbol};

use super::{Bounds, Changeable, Contestant};

/// `ucs_memtype_cache_lookup` of UCX 1.13 and later: a radix table of all
/// regions behind a reader-writer lock. There is one per process.
///
/// Its bounds are multiples of 16 bytes, as the workloads' are.
pub(crate) struct Ucx {
    lookup: unsafe extern "C" fn(*const c_void, usize, *mut MemoryInfo) -> c_int,
    update: unsafe extern "C" fn(*const c_void, usize, c_int, u8),
    remove: unsafe extern "C" fn(*const c_void, usize),
    standing: Vec<Bounds>,
    // The functions are the library's.
    _library: Library,
}

/// `ucs_memory_info_t`
#[repr(C)]
struct MemoryInfo {
    kind: c_int,
    device: u8,
    base: *mut c_void,
    len: usize,
}

const LIBRARY: &str = "libucs.so.0";
const UCS_OK: c_int = 0;
const UCS_MEMORY_TYPE_CUDA: c_int = 1;
const UCS_SYS_DEVICE_ID_UNKNOWN: u8 = u8::MAX;

/// Why UCX does not take part.
#[derive(Debug)]
pub(crate) enum NoUcx {
    Library(libloading::Error),
    /// The library is there, but keeps no cache in this process.
    NoCache,
}

impl fmt::Display for NoUcx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Library(error) => write!(f, "UCX does not take part: {error}"),
            Self::NoCache => write!(
                f,
                "UCX does not take part: {LIBRARY} keeps no cache of memory types"
            ),
        }
    }
}

impl Ucx {
    /// As [`Contestant::holding`], where UCX is installed.
    pub(crate) fn load(regions: &[Bounds]) -> Result<Self, NoUcx> {
        // Safety: the library's constructors read its configuration, and
        // nothing else of the process.
        let library = unsafe { Library::new(LIBRARY) }.map_err(NoUcx::Library)?;
        // Safety: the signatures are those of `ucs/memory/memtype_cache.h`.
        let this = unsafe {
            Self {
                lookup: *symbol(&library, "ucs_memtype_cache_lookup")?,
                update: *symbol(&library, "ucs_memtype_cache_update")?,
                remove: *symbol(&library, "ucs_memtype_cache_remove")?,
                standing: regions.to_vec(),
                _library: library,
            }
        };
        // The first lookup of the process makes the cache; what is noted
        // before it is lost.
        this.contains(Bounds { start: 0, end: 1 });
        for &region in regions {
            this.insert(region);
        }
        if regions.iter().all(|&region| this.contains(region)) {
            Ok(this)
        } else {
            Err(NoUcx::NoCache)
        }
    }

    #[inline]
    fn contains(&self, wanted: Bounds) -> bool {
        let mut info = MemoryInfo {
            kind: 0,
            device: 0,
            base: ptr::null_mut(),
            len: 0,
        };
        let base = ptr::without_provenance(wanted.start);
        // Safety: the address is only compared, and `info` is written to.
        let status = unsafe { (self.lookup)(base, wanted.end - wanted.start, &raw mut info) };
        // A slice of which the cache knows a part has an unknown type.
        status == UCS_OK && info.kind == UCS_MEMORY_TYPE_CUDA
    }
}

/// # Safety
///
/// `T` has to be the type of the symbol.
unsafe fn symbol<'lib, T>(library: &'lib Library, name: &str) -> Result<Symbol<'lib, T>, NoUcx> {
    // Safety: the caller's promise.
    unsafe { library.get(name) }.map_err(NoUcx::Library)
}

impl Contestant for Ucx {
    const NAME: &'static str = "UCX";

    /// Only where [`Ucx::load`] has worked before.
    fn holding(regions: &[Bounds]) -> Self {
        Self::load(regions).unwrap_or_else(|error| panic!("{error}"))
    }

    fn asker(&self) -> impl FnMut(&[u8]) -> bool {
        |bytes| !bytes.is_empty() && self.contains(Bounds::of(bytes))
    }
}

impl Changeable for Ucx {
    type Key<'a> = Bounds;

    fn insert(&self, region: Bounds) -> Bounds {
        let base = ptr::without_provenance(region.start);
        let (len, kind) = (region.end - region.start, UCS_MEMORY_TYPE_CUDA);
        // Safety: the addresses are noted, not used.
        unsafe { (self.update)(base, len, kind, UCS_SYS_DEVICE_ID_UNKNOWN) };
        region
    }

    fn remove(&self, region: Bounds) {
        let base = ptr::without_provenance(region.start);
        // Safety: the addresses are forgotten, not used.
        unsafe { (self.remove)(base, region.end - region.start) };
    }
}

impl Drop for Ucx {
    fn drop(&mut self) {
        for &region in &self.standing {
            self.remove(region);
        }
    }
}
