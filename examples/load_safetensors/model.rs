//! Makes a small model file, with tensors as a language model has them, and
//! with what loaders stumble over: an odd size, and a tensor of no elements.

use std::borrow::Cow;
use std::path::Path;

use anyhow::Context as _;
use safetensors::tensor::View;
use safetensors::{Dtype, serialize_to_file};

use crate::support::numbers::Numbers;

const LAYERS: usize = 8;
const PROJECTIONS: [&str; 4] = ["q_proj", "k_proj", "v_proj", "o_proj"];
const BF16_BYTES: usize = 2;

/// Writes a model of about `bytes` bytes.
pub(crate) fn write(path: &Path, bytes: usize) -> anyhow::Result<()> {
    // An eighth of it embeds, the rest projects.
    let hidden = (bytes / 8 * 7 / (LAYERS * PROJECTIONS.len() * BF16_BYTES)).isqrt();
    let vocabulary = bytes / 8 / (hidden * BF16_BYTES);

    let mut tensors = Vec::new();
    let mut add = |name: String, dtype, shape: &[usize]| {
        let seed = tensors.len() as u64;
        tensors.push((name, Tensor::new(dtype, shape, seed)));
    };
    add(
        "model.embed_tokens.weight".to_owned(),
        Dtype::BF16,
        &[vocabulary, hidden],
    );
    for layer in 0..LAYERS {
        for projection in PROJECTIONS {
            add(
                format!("model.layers.{layer}.self_attn.{projection}.weight"),
                Dtype::BF16,
                &[hidden, hidden],
            );
        }
        add(
            format!("model.layers.{layer}.input_layernorm.weight"),
            Dtype::F32,
            &[hidden],
        );
    }
    add("model.position_ids".to_owned(), Dtype::I64, &[1, 2048]);
    add("tokenizer.bytes".to_owned(), Dtype::U8, &[12_345]);
    add("model.adapter.weight".to_owned(), Dtype::F16, &[0, hidden]);

    let made = serialize_to_file(tensors, None, path);
    made.with_context(|| {
        format!(
            "writing a model of {} MiB to '{}'; set TMPDIR to a folder with more room, or make a \
             smaller one with '--mib'",
            bytes >> 20,
            path.display()
        )
    })
}

/// A tensor of numbers that are made when they are written, so that no model
/// has to fit into memory twice.
struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    seed: u64,
}

impl Tensor {
    fn new(dtype: Dtype, shape: &[usize], seed: u64) -> Self {
        Self {
            dtype,
            shape: shape.to_vec(),
            seed,
        }
    }
}

impl View for Tensor {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut bytes = vec![0; self.data_len()];
        Numbers::new(self.seed << 32).fill_bytes(&mut bytes);
        bytes.into()
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}
