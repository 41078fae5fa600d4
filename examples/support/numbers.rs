//! Numbers to fill sources with.

/// Numbers that differ each time (SplitMix64).
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end.max(1) as u64).unwrap_or(0)
    }

    pub(crate) fn fill(&mut self, words: &mut [u32]) {
        words.fill_with(|| self.next() as u32);
    }

    pub(crate) fn array<const N: usize>(&mut self) -> [u32; N] {
        let mut words = [0; N];
        self.fill(&mut words);
        words
    }

    pub(crate) fn vec(&mut self, len: usize) -> Vec<u32> {
        let mut words = vec![0; len];
        self.fill(&mut words);
        words
    }

    pub(crate) fn fill_bytes(&mut self, bytes: &mut [u8]) {
        for part in bytes.chunks_mut(size_of::<u64>()) {
            part.copy_from_slice(&self.next().to_le_bytes()[..part.len()]);
        }
    }
}
