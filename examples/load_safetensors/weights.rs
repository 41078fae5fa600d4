//! A safetensors file, memory-mapped.
//!
//! The file is: the length of the header (8 bytes, little-endian), the header
//! (JSON: for each tensor its type, its shape, and where its bytes begin and
//! end), the bytes of the tensors one behind the other.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, anyhow, bail, ensure};
use indicatif::BinaryBytes;
use memmap2::Mmap;
use safetensors::SafeTensors;
use serde_json::Value;

const LENGTH_BYTES: usize = size_of::<u64>();
/// What a file holds that stands for another one.
const LFS_POINTER: &[u8] = b"version https://git-lfs";
const DAMAGED: &str = "the file is damaged or no safetensors file: download or convert it again";

/// The weights of a model.
pub(crate) struct Weights {
    mapping: Arc<Mmap>,
    /// Where the tensors' bytes are in the mapping, in its order.
    tensors: Vec<Range<usize>>,
}

impl Weights {
    pub(crate) fn open(path: &Path) -> anyhow::Result<Self> {
        let file = open_file(path)?;
        // SAFETY: nobody writes to the file while this runs, nor makes it
        // shorter: `--help` asks for that, since nothing can make sure of it.
        let mapping = unsafe { Mmap::map(&file) }.map_err(|error| {
            anyhow!("it cannot be memory-mapped ({error}); copy it to a local disk")
        })?;
        let tensors = find_tensors(&mapping)?;
        Ok(Self {
            mapping: Arc::new(mapping),
            tensors,
        })
    }

    pub(crate) fn mapping(&self) -> &Arc<Mmap> {
        &self.mapping
    }

    /// The bytes of each tensor.
    pub(crate) fn tensors(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.tensors
            .iter()
            .map(|range| &self.mapping[range.clone()])
    }

    /// All tensors' bytes together.
    pub(crate) fn bytes(&self) -> u64 {
        self.tensors.iter().map(|range| range.len() as u64).sum()
    }
}

fn open_file(path: &Path) -> anyhow::Result<File> {
    // Looked at first: to open a pipe would wait for its writer.
    let metadata = path.metadata().map_err(unreadable)?;
    ensure!(
        !metadata.is_dir(),
        "it is a folder; give the path of one .safetensors file in it"
    );
    ensure!(
        metadata.is_file(),
        "it is no regular file, and only those can be memory-mapped"
    );
    ensure!(metadata.len() > 0, "it is empty; {DAMAGED}");
    File::open(path).map_err(unreadable)
}

fn unreadable(error: io::Error) -> anyhow::Error {
    anyhow!("{error}; give the path of a safetensors file that you may read")
}

fn find_tensors(file: &[u8]) -> anyhow::Result<Vec<Range<usize>>> {
    ensure!(
        !file.starts_with(LFS_POINTER),
        "it is a Git LFS pointer and not the file itself; fetch that with `git lfs pull`"
    );
    let (header, data) = split(file)?;
    check_header(header, data.len())?;
    let (_, metadata) =
        SafeTensors::read_metadata(file).map_err(|error| anyhow!("{error}; {DAMAGED}"))?;

    let mut tensors: Vec<_> = metadata
        .tensors()
        .into_values()
        .map(|tensor| {
            let (start, end) = tensor.data_offsets;
            let data_start = file.len() - data.len();
            data_start + start..data_start + end
        })
        .collect();
    ensure!(
        !tensors.is_empty(),
        "it holds no tensors; give a file that does"
    );
    tensors.sort_by_key(|range| (range.start, range.end));
    Ok(tensors)
}

/// The header, and the bytes behind it.
fn split(file: &[u8]) -> anyhow::Result<(&[u8], &[u8])> {
    let Some((length, rest)) = file.split_first_chunk::<LENGTH_BYTES>() else {
        bail!(
            "it has {} bytes, fewer than the {LENGTH_BYTES} that give the header's length; \
             {DAMAGED}",
            file.len()
        );
    };
    let length = u64::from_le_bytes(*length);
    usize::try_from(length)
        .ok()
        .and_then(|length| rest.split_at_checked(length))
        .with_context(|| {
            format!(
                "its first {LENGTH_BYTES} bytes announce a header of {length} bytes, but only {} \
                 follow; {DAMAGED}",
                rest.len()
            )
        })
}

/// Whether the header is JSON, and describes no more than `data_bytes` bytes.
///
/// The `safetensors` crate checks the rest; of a file that was cut off it says
/// less, and it adds up the sizes unchecked.
fn check_header(header: &[u8], data_bytes: usize) -> anyhow::Result<()> {
    let header: Value = serde_json::from_slice(header)
        .map_err(|error| anyhow!("its header is no JSON ({error}); {DAMAGED}"))?;
    let Value::Object(tensors) = header else {
        bail!("its header is no JSON object; {DAMAGED}");
    };
    for (name, tensor) in &tensors {
        // What is no number here is for the crate to refuse.
        let end = tensor["data_offsets"][1].as_u64().unwrap_or(0);
        ensure!(
            end <= data_bytes as u64,
            "tensor {name:?} would end {} behind the end of the file, which was cut off or is \
             damaged; download or copy it again",
            BinaryBytes(end - data_bytes as u64)
        );
    }
    Ok(())
}
