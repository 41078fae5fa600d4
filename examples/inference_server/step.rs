//! A decode step, and the copies it makes.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};
use pinned_hosts::cuda::Policy;

use crate::arena::HalfPinned;
use crate::mirror::{Checks, Mirror};
use crate::path::{CopyPath, Counts, Pinned as _};
use crate::support::numbers::Numbers;

/// Sequences that are decoded together.
const BATCH: usize = 32;
/// Blocks of the key-value cache that a sequence has.
const BLOCKS: usize = 32;
/// Words of the metadata blob that one step needs.
const METADATA: usize = 256;
/// Sampling parameters: four words for each sequence.
const SAMPLING: usize = BATCH * 4;
/// A bias for the logits of one request.
const BIAS: usize = 2048;
/// Cached prompt that lies across the end of page-locked memory.
const PROMPT: usize = 1024;
/// A spilled part of the key-value cache: 384 KiB.
const SPILL: usize = 96 << 10;

/// After so many steps each kind of copy was made at least once.
pub(crate) const ROUND: u64 = 50;

/// Where on the device each of these goes, in words.
mod slot {
    use super::{BATCH, BIAS, BLOCKS, METADATA, PROMPT, SAMPLING, SPILL};

    pub(super) const TOKENS: usize = 0;
    pub(super) const POSITIONS: usize = TOKENS + BATCH;
    pub(super) const LENGTHS: usize = POSITIONS + BATCH;
    pub(super) const BLOCK_TABLE: usize = LENGTHS + BATCH;
    pub(super) const METADATA_PART: usize = BLOCK_TABLE + BATCH * BLOCKS;
    pub(super) const SAMPLING_PARAMETERS: usize = METADATA_PART + METADATA;
    pub(super) const LOGIT_BIAS: usize = SAMPLING_PARAMETERS + SAMPLING;
    pub(super) const PROMPT_PART: usize = LOGIT_BIAS + BIAS;
    /// Last, because it is large and seldom read back.
    pub(super) const SPILLED: usize = PROMPT_PART + PROMPT;
    pub(super) const END: usize = SPILLED + SPILL;
}

/// What all streams share for the whole run.
pub(crate) struct Shared<P: CopyPath> {
    pub(crate) context: Arc<CudaContext>,
    policy: Policy,
    /// A page-locked blob, written once.
    metadata: P::Pinned,
    /// Prompts, in memory of which another library pinned a half.
    prompts: HalfPinned,
}

impl<P: CopyPath> Shared<P> {
    pub(crate) fn new(context: &Arc<CudaContext>, policy: Policy) -> anyhow::Result<Self> {
        let mut numbers = Numbers::new(0);
        let mut metadata = P::Pinned::zeroed(context, 64 << 10)?;
        numbers.fill(metadata.words_mut()?);
        let mut prompts = vec![0; 4 * PROMPT];
        numbers.fill(&mut prompts);
        Ok(Self {
            context: Arc::clone(context),
            policy,
            metadata,
            prompts: HalfPinned::new(context, prompts.into())?,
        })
    }
}

/// What one stream's thread works with.
pub(crate) struct Server<'s, P: CopyPath> {
    shared: &'s Shared<P>,
    path: P,
    mirror: Mirror,
    numbers: Numbers,
    steps: u64,
    /// Temporaries that were page-locked.
    pins: u64,
    /// Two, so that one can be written while the other may still be read.
    sampling: [P::Pinned; 2],
    spill: P::Pinned,
}

impl<'s, P: CopyPath> Server<'s, P> {
    pub(crate) fn new(
        shared: &'s Shared<P>,
        stream: &Arc<CudaStream>,
        number: u16,
    ) -> anyhow::Result<Self> {
        let context = &shared.context;
        Ok(Self {
            shared,
            path: P::new(stream, shared.policy)?,
            mirror: Mirror::new(stream, slot::END)?,
            numbers: Numbers::new(u64::from(number) << 32),
            steps: 0,
            pins: 0,
            sampling: [
                P::Pinned::zeroed(context, SAMPLING)?,
                P::Pinned::zeroed(context, SAMPLING)?,
            ],
            spill: P::Pinned::zeroed(context, SPILL)?,
        })
    }

    /// Makes one decode step.
    pub(crate) fn step(&mut self) -> anyhow::Result<()> {
        self.copy_from_the_stack()?;
        self.copy_from_short_lived_vecs()?;
        self.copy_a_slice_of_the_metadata()?;
        self.copy_sampling_parameters()?;
        if self.steps % 4 == 1 {
            self.copy_a_page_locked_temporary()?;
        }
        if self.steps % 10 == 2 {
            self.copy_across_the_end_of_pinned_memory()?;
        }
        if self.steps % ROUND == 3 {
            self.spill()?;
        }
        // A server waits for the sampled tokens here.
        self.mirror.check()?;
        self.path.drained();
        self.steps += 1;
        Ok(())
    }

    fn copy_from_the_stack(&mut self) -> anyhow::Result<()> {
        let tokens = self.numbers.array::<BATCH>();
        self.mirror.copy(&mut self.path, &tokens, slot::TOKENS)?;
        let positions = self.numbers.array::<BATCH>();
        self.mirror
            .copy(&mut self.path, &positions, slot::POSITIONS)
    }

    fn copy_from_short_lived_vecs(&mut self) -> anyhow::Result<()> {
        let lengths = self.numbers.vec(BATCH);
        self.mirror.copy(&mut self.path, &lengths, slot::LENGTHS)?;
        drop(lengths);
        let block_table = self.numbers.vec(BATCH * BLOCKS);
        self.mirror
            .copy(&mut self.path, &block_table, slot::BLOCK_TABLE)
    }

    fn copy_a_slice_of_the_metadata(&mut self) -> anyhow::Result<()> {
        let words = self.shared.metadata.words()?;
        let start = self.numbers.below(words.len() - METADATA);
        self.mirror.copy(
            &mut self.path,
            &words[start..start + METADATA],
            slot::METADATA_PART,
        )
    }

    /// What to do when a copy should not wait: hand over a buffer that keeps
    /// itself as it is for as long as needed.
    fn copy_sampling_parameters(&mut self) -> anyhow::Result<()> {
        self.sampling.swap(0, 1);
        self.numbers.fill(self.sampling[0].words_mut()?);
        self.mirror
            .copy_from(&mut self.path, &self.sampling[0], slot::SAMPLING_PARAMETERS)
    }

    /// A buffer that was page-locked to make its copy fast, and that is freed
    /// right after the call like any other.
    fn copy_a_page_locked_temporary(&mut self) -> anyhow::Result<()> {
        let mut bias = P::Pinned::zeroed(&self.shared.context, BIAS)?;
        self.pins += 1;
        self.numbers.fill(bias.words_mut()?);
        if self.steps % 8 == 1 {
            self.mirror
                .copy(&mut self.path, bias.words()?, slot::LOGIT_BIAS)
        } else {
            self.mirror
                .copy_from(&mut self.path, &bias, slot::LOGIT_BIAS)
        }
    }

    fn copy_across_the_end_of_pinned_memory(&mut self) -> anyhow::Result<()> {
        let words = self.shared.prompts.words();
        let start = words.len() / 2 - PROMPT / 2;
        self.mirror.copy(
            &mut self.path,
            &words[start..start + PROMPT],
            slot::PROMPT_PART,
        )
    }

    /// A large page-locked buffer, used again for the next sequence as soon as
    /// the copy call has returned.
    fn spill(&mut self) -> anyhow::Result<()> {
        self.numbers.fill(self.spill.words_mut()?);
        self.mirror
            .copy(&mut self.path, self.spill.words()?, slot::SPILLED)?;
        self.numbers.fill(self.spill.words_mut()?);
        Ok(())
    }

    pub(crate) fn counts(&self) -> Counts {
        self.path.counts()
    }

    pub(crate) fn checks(&self) -> Checks {
        self.mirror.checks()
    }

    pub(crate) fn pins(&self) -> u64 {
        self.pins
    }

    pub(crate) fn steps(&self) -> u64 {
        self.steps
    }
}
