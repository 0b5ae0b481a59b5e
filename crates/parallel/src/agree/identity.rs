//! What rank 0 tells all before the first step: a few whole numbers that identify the run, which workers
//! compare with theirs and from which a server learns what it serves.

use paceline_comm::{CommError, Communicator, Rank};

/// How many numbers identify a run.
pub const IDENTITY: usize = 8;

/// Whole numbers below 2⁴⁴. What each means is the caller's affair.
pub type RunIdentity = [u64; IDENTITY];

/// Numbers that an identity takes in a message.
pub(super) const WORDS: usize = 2 * IDENTITY;

const LOW_BITS: u32 = 20;

/// Each as two numbers that `f32` holds exactly.
pub(super) fn to_words(identity: RunIdentity) -> [f32; WORDS] {
    let mut words = [0.0; WORDS];
    for (words, number) in words.as_chunks_mut::<2>().0.iter_mut().zip(identity) {
        assert!(number < 1 << 44, "{number} is too large to be sent");
        *words = [(number >> LOW_BITS) as f32, (number & ((1 << LOW_BITS) - 1)) as f32];
    }
    words
}

/// The numbers again. Words that a peer made up give numbers too, within the same bound.
pub(super) fn from_words(words: [f32; WORDS]) -> RunIdentity {
    let mut identity = [0; IDENTITY];
    for (&[high, low], number) in words.as_chunks::<2>().0.iter().zip(&mut identity) {
        let word = |word: f32, bits: u32| (word as u64).min((1 << bits) - 1);
        *number = word(high, 24) << LOW_BITS | word(low, LOW_BITS);
    }
    identity
}

/// What rank 0 says of the run: the first that a server receives.
///
/// # Errors
/// When a worker, or the way to it, has failed.
pub fn receive(communicator: &mut Communicator) -> Result<RunIdentity, CommError> {
    let mut words = to_words([0; IDENTITY]);
    communicator.broadcast(Rank(0), &mut words)?;
    Ok(from_words(words))
}

/// Holds what this rank knows of the run to what the first one does, which `broadcast` gives to all.
pub(crate) fn compare(
    own: RunIdentity,
    [rank, first]: [Rank; 2],
    broadcast: impl FnOnce(&mut [f32]) -> Result<(), CommError>,
) -> Result<(), CommError> {
    let mut words = to_words(own);
    broadcast(&mut words)?;
    if from_words(words) == own {
        return Ok(());
    }
    let what = "another step, other data or another model than this rank has".to_owned();
    Err(CommError::Protocol { rank, peer: first.into(), phase: "begin", what })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_is_received() {
        let identity = [0, 1, 2, 1 << 20, (1 << 44) - 1, 123_456_789_012, 7, 3];
        assert_eq!(from_words(to_words(identity)), identity);
    }

    #[test]
    fn what_makes_no_sense_is_a_number_in_range() {
        for word in [f32::NAN, f32::INFINITY, -1.0, 1e38, 0.5] {
            assert!(from_words([word; WORDS]).iter().all(|&number| number < 1 << 44));
        }
    }
}
