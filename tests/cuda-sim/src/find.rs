//! Where the shared object is, and how it gets to be `libcuda.so`.

use crate::wire;
use libc::{RTLD_NODELETE, RTLD_NOLOAD};
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL, RTLD_NOW};
use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf};

const FILE: &str = "libcuda_sim.so";
/// What a program that uses CUDA asks the dynamic linker for.
const NAME: &str = "libcuda.so";
/// Names the shared object instead of looking for it.
const OVERRIDE: &str = "CUDA_SIM_PATH";

/// Why there is no simulated driver.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoadError {
    /// It is in none of the places where a build puts it.
    NotFound {
        /// The places looked at.
        looked_at: Vec<PathBuf>,
    },
    /// The dynamic linker refuses it.
    Refused {
        /// The file.
        path: PathBuf,
        /// What the linker says.
        reason: String,
    },
    /// Another `libcuda.so` was loaded first, and would be used in its place.
    AnotherDriver,
    /// It was built from another version of this crate.
    Stale {
        /// The file.
        path: PathBuf,
    },
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFound { looked_at } => {
                write!(f, "no {FILE} here (set {OVERRIDE} to name it):")?;
                for place in looked_at {
                    write!(f, " {}", place.display())?;
                }
                Ok(())
            }
            Self::Refused { path, reason } => {
                write!(f, "cannot load {}: {reason}", path.display())
            }
            Self::AnotherDriver => write!(
                f,
                "another {NAME} is loaded already; load the simulated one before the first call"
            ),
            Self::Stale { path } => {
                write!(f, "{} was built from other sources", path.display())
            }
        }
    }
}

impl Error for LoadError {}

/// Finds and loads the shared object, and makes sure that it is what others
/// will find under the driver's name.
pub(crate) fn open() -> Result<(Library, PathBuf), LoadError> {
    let path = find()?;
    let refused = |error: libloading::Error| LoadError::Refused {
        path: path.clone(),
        reason: error.to_string(),
    };
    // SAFETY: the object's initialisers are those of the Rust standard
    // library, which may run at any time.
    let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE) }
        .map_err(refused)?;
    // SAFETY: the symbol, if it is there, has had this type in all versions.
    let version = unsafe { library.get::<extern "C" fn() -> u32>(b"cuda_sim_version\0") };
    if version.map_err(refused)?() != wire::VERSION {
        return Err(LoadError::Stale { path });
    }
    // SAFETY: this loads nothing; it only asks for what is there.
    let by_name = unsafe { Library::open(Some(NAME), RTLD_LAZY | RTLD_NOLOAD) };
    let ours = by_name.is_ok_and(|found| {
        // SAFETY: the symbol is only looked for.
        unsafe { found.get::<extern "C" fn() -> u32>(b"cuda_sim_version\0") }.is_ok()
    });
    if !ours {
        return Err(LoadError::AnotherDriver);
    }
    Ok((library, path))
}

fn find() -> Result<PathBuf, LoadError> {
    if let Some(path) = std::env::var_os(OVERRIDE) {
        let path = PathBuf::from(path);
        return if path.is_file() {
            Ok(path)
        } else {
            Err(LoadError::NotFound {
                looked_at: vec![path],
            })
        };
    }
    let looked_at = places(std::env::current_exe().ok().as_deref());
    match looked_at.iter().find(|place| place.is_file()) {
        Some(place) => Ok(place.clone()),
        None => Err(LoadError::NotFound { looked_at }),
    }
}

/// Tests and benches are built beside the object, examples one folder away,
/// programs one folder above. A documentation test is built elsewhere, but by
/// the build that put the object where this crate was built.
fn places(program: Option<&Path>) -> Vec<PathBuf> {
    let mut places = Vec::new();
    if let Some(folder) = program.and_then(Path::parent) {
        places.extend([folder.join(FILE), folder.join("deps").join(FILE)]);
        if let Some(above) = folder.parent() {
            places.extend([above.join("deps").join(FILE), above.join(FILE)]);
        }
    }
    // …/build/cuda-sim-<hash>/out lies three folders below the profile's.
    if let Some(profile) = Path::new(env!("OUT_DIR")).ancestors().nth(3) {
        places.push(profile.join("deps").join(FILE));
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_looks_beside_itself_first() {
        let places = places(Some(Path::new("/t/debug/deps/test-0")));
        assert_eq!(places[0], Path::new("/t/debug/deps/libcuda_sim.so"));
        assert!(places.contains(&PathBuf::from("/t/debug/libcuda_sim.so")));
    }

    #[test]
    fn an_example_looks_in_the_folder_of_dependencies() {
        let places = places(Some(Path::new("/t/debug/examples/server")));
        assert!(places.contains(&PathBuf::from("/t/debug/deps/libcuda_sim.so")));
    }

    #[test]
    fn the_error_names_the_places() {
        let error = LoadError::NotFound {
            looked_at: vec!["/a/b".into(), "/c".into()],
        };
        let text = error.to_string();
        assert!(text.contains("/a/b") && text.contains("/c"));
    }
}
