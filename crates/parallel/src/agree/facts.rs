//! What rank 0 tells all before the first step: a few whole numbers, which workers compare with theirs and from which a server
//! learns what it serves.

/// How many they are.
pub const FACTS: usize = 8;

/// Whole numbers below 2⁴⁴. What each means is the caller's affair.
pub type Facts = [u64; FACTS];

const LOW_BITS: u32 = 20;

/// Each as two numbers that `f32` holds exactly.
pub(super) fn to_words(facts: Facts) -> [f32; 2 * FACTS] {
    let mut words = [0.0; 2 * FACTS];
    for (words, fact) in words.as_chunks_mut::<2>().0.iter_mut().zip(facts) {
        assert!(fact < 1 << 44, "{fact} is too large to be told");
        *words = [(fact >> LOW_BITS) as f32, (fact & ((1 << LOW_BITS) - 1)) as f32];
    }
    words
}

/// The numbers again. Words that a peer made up give numbers too, within the same bound.
pub(super) fn from_words(words: [f32; 2 * FACTS]) -> Facts {
    let mut facts = [0; FACTS];
    for (&[high, low], fact) in words.as_chunks::<2>().0.iter().zip(&mut facts) {
        let word = |word: f32, bits: u32| (word as u64).min((1 << bits) - 1);
        *fact = word(high, 24) << LOW_BITS | word(low, LOW_BITS);
    }
    facts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_is_heard() {
        let facts = [0, 1, 2, 1 << 20, (1 << 44) - 1, 123_456_789_012, 7, 0];
        assert_eq!(from_words(to_words(facts)), facts);
    }

    #[test]
    fn what_makes_no_sense_is_a_number_in_range() {
        for word in [f32::NAN, f32::INFINITY, -1.0, 1e38, 0.5] {
            assert!(from_words([word; 2 * FACTS]).iter().all(|&fact| fact < 1 << 44));
        }
    }
}
