//! Randomness as a function: a stream is named by words (seed, epoch, sample, …), so nothing has to be saved to replay it.
//!
//! The generator is SplitMix64 (Steele, Lea and Flood, 2014): a Weyl sequence through a 64-bit finaliser. It passes
//! BigCrush, needs eight bytes of state and can jump to any position, which is what makes streams cheap.

const WEYL: u64 = 0x9E37_79B9_7F4A_7C15;

/// The SplitMix64 finaliser: every output bit depends on every input bit.
pub const fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

/// A hash of `words` in order: the key of the stream they name.
pub fn key(words: &[u64]) -> u64 {
    words.iter().fold(0, |state, &word| mix(state.wrapping_add(WEYL) ^ mix(word.wrapping_add(WEYL))))
}

/// A hash of text, for streams named by a layer or parameter (FNV-1a, then [`mix`]).
pub fn key_of_text(text: &str) -> u64 {
    let hash = text
        .bytes()
        .fold(0xCBF2_9CE4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3));
    mix(hash)
}

/// Draw number `index` of the stream `key`, without walking there.
pub const fn at(key: u64, index: u64) -> u64 {
    mix(key.wrapping_add(WEYL.wrapping_mul(index.wrapping_add(1))))
}

/// A uniform number in [0, 1) from the upper 24 bits of `word`.
pub const fn unit(word: u64) -> f32 {
    (word >> 40) as f32 * (1.0 / 16_777_216.0)
}

/// One stream of random numbers.
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// The stream named by `words`. The same words give the same numbers on every machine.
    pub fn new(words: &[u64]) -> Self {
        Self { state: key(words) }
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(WEYL);
        mix(self.state)
    }

    /// Uniform in [0, 1).
    pub fn uniform(&mut self) -> f32 {
        unit(self.next_u64())
    }

    /// Uniform in [low, high).
    pub fn range(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * self.uniform()
    }

    /// Uniform in 0..bound, without bias that could be seen (64-bit multiply-shift).
    pub fn below(&mut self, bound: usize) -> usize {
        assert!(bound > 0, "a random choice needs at least one possibility");
        ((u128::from(self.next_u64()) * bound as u128) >> 64) as usize
    }

    /// True with the given probability.
    pub fn chance(&mut self, probability: f32) -> bool {
        self.uniform() < probability
    }

    /// Standard normal, by Box and Muller; one of each pair is dropped so that a draw is a fixed number of words.
    pub fn normal(&mut self) -> f32 {
        let radius = f64::from(1.0 - self.uniform()).ln() * -2.0;
        let angle = f64::from(self.uniform()) * std::f64::consts::TAU;
        (radius.sqrt() * angle.cos()) as f32
    }

    /// Shuffles in place (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_reproducible_and_distinct() {
        let draw = |words: &[u64]| Random::new(words).next_u64();
        assert_eq!(draw(&[1, 2, 3]), draw(&[1, 2, 3]));
        assert_ne!(draw(&[1, 2, 3]), draw(&[1, 3, 2]));
        assert_ne!(draw(&[0]), draw(&[0, 0]));
    }

    #[test]
    fn a_stream_can_be_entered_anywhere() {
        let mut walked = Random::new(&[7]);
        let words: Vec<u64> = (0..10).map(|_| walked.next_u64()).collect();
        assert_eq!((0..10).map(|index| at(key(&[7]), index)).collect::<Vec<_>>(), words);
    }

    #[test]
    fn moments_are_those_of_the_distributions() {
        let mut random = Random::new(&[42]);
        let count = 200_000;
        let (mut sum, mut squares, mut uniform) = (0.0f64, 0.0f64, 0.0f64);
        for _ in 0..count {
            let draw = f64::from(random.normal());
            sum += draw;
            squares += draw * draw;
            uniform += f64::from(random.uniform());
        }
        let count = f64::from(count);
        assert!((sum / count).abs() < 0.01 && (squares / count - 1.0).abs() < 0.02);
        assert!((uniform / count - 0.5).abs() < 0.005);
    }

    #[test]
    fn shuffle_keeps_every_item() {
        let mut items: Vec<usize> = (0..1000).collect();
        Random::new(&[3]).shuffle(&mut items);
        assert_ne!(items, (0..1000).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..1000).collect::<Vec<_>>());
    }
}
