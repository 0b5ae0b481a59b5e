//! A worker that was lost and has come back: what the first worker tells servers of it, and what they tell it.
//!
//! The first worker says it to every server between two of its own steps. So all servers hear of it between the same two
//! points at which all meet, and none of those can pass without the one that is back. It then asks each server, which
//! answers with its weights, with how often all have met, and (the first one) with running statistics.

use paceline_comm::{CommError, Communicator, Rank};

/// Words by which a server says how often all have met.
pub(super) const MET: usize = 2;

/// Bits of the lower of two numbers that one is sent as; the upper has 24.
const LOW_BITS: u32 = 20;

/// A worker that was lost and has come back, for the so-manieth time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Returned {
    /// Its number among the workers.
    pub worker: usize,
    /// How often it has.
    pub life: u16,
}

impl Returned {
    /// Both in one number, below 2⁴⁴.
    pub(super) fn to_number(self) -> u64 {
        u64::from(self.life) << 24 | self.worker as u64
    }

    /// Of a number that the first worker sent; none unless it names another worker.
    pub(super) fn from_number(number: u64, workers: usize) -> Option<Self> {
        let (worker, life) = ((number & 0xFF_FFFF) as usize, u16::try_from(number >> 24).ok()?);
        ((1..workers).contains(&worker) && life > 0).then_some(Self { worker, life })
    }

    /// A server has links to it from here on; not if it has been lost again meanwhile.
    pub(super) fn connect(self, communicator: &mut Communicator) -> bool {
        communicator.readmit(Rank::at(self.worker), self.life)
    }
}

/// How often all have met, as numbers that `f32` holds exactly.
pub(super) fn met_to_words(met: u64) -> [f32; MET] {
    [(met >> LOW_BITS) as f32, (met & ((1 << LOW_BITS) - 1)) as f32]
}

/// What all servers say of it, who must say the same.
pub(super) fn met_of_servers(rank: Rank, words: &[f32]) -> Result<u64, CommError> {
    let word = |word: f32, bits: u32| (word as u64).min((1 << bits) - 1);
    let mut met =
        words.as_chunks::<MET>().0.iter().map(|&[high, low]| word(high, 24) << LOW_BITS | word(low, LOW_BITS));
    let first = met.next().unwrap_or_default();
    if met.all(|met| met == first) {
        return Ok(first);
    }
    let (peer, what) = (paceline_comm::error::Party::Anyone, "servers have met workers differently often".to_owned());
    Err(CommError::Protocol { rank, peer, phase: "come_back", what })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_heard_and_a_worker_that_does_not_exist_is_none() {
        let returned = Returned { worker: 3, life: 1000 };
        assert_eq!(Returned::from_number(returned.to_number(), 4), Some(returned));
        for (number, workers) in [(returned.to_number(), 3), (1 << 24, 4), (2, 4), (u64::MAX, 4)] {
            assert_eq!(Returned::from_number(number, workers), None, "{number} of {workers}");
        }
        let words = [met_to_words(123_456_789), met_to_words(123_456_789), met_to_words(7)].concat();
        assert_eq!(met_of_servers(Rank(1), &words[..4]).unwrap(), 123_456_789);
        assert!(met_of_servers(Rank(1), &words).is_err());
        assert!(met_of_servers(Rank(1), &[f32::NAN, -1.0]).is_ok(), "numbers that make no sense are numbers");
    }
}
