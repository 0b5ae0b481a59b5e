//! What workers and servers say to each other, in bytes of fixed lengths: pure.
//!
//! A worker begins with what it wants of all servers; numbers follow where that says so. Where all have given their
//! gradients, the first worker, who coordinates, gives commands that name vectors, and is answered with scalars.

use super::lbfgs::Vector;

/// Bytes of what a worker begins with.
pub(super) const SAID: usize = 32;

/// Bytes of a command.
pub(super) const COMMAND: usize = 16;

/// Bytes of the answer to [`Command::Totals`].
pub(super) const TOTALS: usize = 24;

/// What a worker wants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Said {
    /// The point that is tried.
    Fetch,
    /// To give the sum of its gradients, and to meet all others; what is in the sum.
    Meet(Totals),
    /// To add up so many numbers with all others.
    Sum(usize),
    /// Nothing any more.
    Goodbye,
}

/// What is in a sum of gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Totals {
    /// Portions of the data.
    pub portions: u64,
    /// Rows of answers, for each of which a gradient counts.
    pub rows: u64,
    /// The sum of their losses.
    pub loss: f64,
}

impl Totals {
    /// Adds those of another.
    pub fn add(&mut self, other: Self) {
        self.portions = self.portions.saturating_add(other.portions);
        self.rows = self.rows.saturating_add(other.rows);
        self.loss += other.loss;
    }

    pub fn to_bytes(self) -> [u8; TOTALS] {
        let mut bytes = [0; TOTALS];
        let words = [self.portions, self.rows, self.loss.to_bits()];
        bytes.chunks_exact_mut(8).zip(words).for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_le_bytes()));
        bytes
    }

    pub fn from_bytes(bytes: &[u8; TOTALS]) -> Self {
        let [portions, rows, loss] = [0, 1, 2].map(|index| word(bytes, index));
        Self { portions, rows, loss: f64::from_bits(loss) }
    }
}

/// A word of eight bytes.
fn word(bytes: &[u8], index: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[8 * index..8 * index + 8]);
    u64::from_le_bytes(word)
}

impl Said {
    pub fn to_bytes(self) -> [u8; SAID] {
        let (kind, totals) = match self {
            Self::Fetch => (0, Totals::default()),
            Self::Meet(totals) => (1, totals),
            Self::Sum(length) => (2, Totals { portions: length as u64, ..Totals::default() }),
            Self::Goodbye => (3, Totals::default()),
        };
        let mut bytes = [0; SAID];
        bytes[0] = kind;
        bytes[SAID - TOTALS..].copy_from_slice(&totals.to_bytes());
        bytes
    }

    /// Of bytes that a worker sent; none if there is no such wish, or more would be added up than anybody has.
    pub fn from_bytes(bytes: &[u8; SAID], longest: usize) -> Option<Self> {
        let mut totals = [0; TOTALS];
        totals.copy_from_slice(&bytes[SAID - TOTALS..]);
        let totals = Totals::from_bytes(&totals);
        Some(match word(bytes, 0) {
            0 => Self::Fetch,
            1 => Self::Meet(totals),
            2 => Self::Sum(usize::try_from(totals.portions).ok().filter(|&length| length <= longest)?),
            3 => Self::Goodbye,
            _ => return None,
        })
    }
}

/// What became of the gradients of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gathered {
    /// Some are missing: they count for nothing, and the point is to be tried again.
    #[default]
    Missing,
    /// The point is given up, and another is tried.
    GivenUp,
    /// The weights have become those of the point.
    Taken,
}

impl Gathered {
    pub(super) const fn to_byte(self) -> u8 {
        self as u8
    }

    pub(super) fn from_byte(byte: u8) -> Option<Self> {
        [Self::Missing, Self::GivenUp, Self::Taken].get(usize::from(byte)).copied()
    }
}

/// What the coordinator has a server do with its parts of vectors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Command {
    /// Say what is in the sum of gradients.
    Totals,
    /// Say the product of two.
    Dot(Vector, Vector),
    /// The second becomes itself and so many times the first.
    Axpy(f64, Vector, Vector),
    /// It becomes so many times itself.
    Scale(f64, Vector),
    /// The second becomes the first.
    Copy(Vector, Vector),
    /// Nothing any more: all go on.
    End(Gathered),
}

/// The vectors beside s and y, by number.
const NAMED: [Vector; 5] =
    [Vector::Weights, Vector::Gradient, Vector::Trial, Vector::TrialGradient, Vector::Direction];

impl Vector {
    fn to_number(self) -> u16 {
        let number = |place: usize, which: usize| NAMED.len() + 2 * place + which;
        let number = match self {
            Self::S(place) => number(place, 0),
            Self::Y(place) => number(place, 1),
            named => NAMED.iter().position(|&known| known == named).unwrap_or_default(),
        };
        number as u16
    }

    /// None if nobody has it, where there are so many pairs of s and y.
    pub(super) fn from_number(number: usize, history: usize) -> Option<Self> {
        if let Some(&named) = NAMED.get(number) {
            return Some(named);
        }
        let (place, which) = ((number - NAMED.len()) / 2, (number - NAMED.len()) % 2);
        (place < history).then_some(if which == 0 { Self::S(place) } else { Self::Y(place) })
    }

    /// How many there are.
    pub(super) const fn count(history: usize) -> usize {
        NAMED.len() + 2 * history
    }

    /// Which of them it is.
    pub(super) fn index(self) -> usize {
        usize::from(self.to_number())
    }
}

impl Command {
    pub fn to_bytes(self) -> [u8; COMMAND] {
        let none = Vector::Weights;
        let (kind, factor, first, second) = match self {
            Self::Totals => (0, 0.0, none, none),
            Self::Dot(a, b) => (1, 0.0, a, b),
            Self::Axpy(factor, x, y) => (2, factor, x, y),
            Self::Scale(factor, x) => (3, factor, x, none),
            Self::Copy(source, target) => (4, 0.0, source, target),
            Self::End(gathered) => (5 + gathered.to_byte(), 0.0, none, none),
        };
        let mut bytes = [0; COMMAND];
        bytes[0] = kind;
        bytes[2..4].copy_from_slice(&first.to_number().to_le_bytes());
        bytes[4..6].copy_from_slice(&second.to_number().to_le_bytes());
        bytes[8..].copy_from_slice(&f64::to_bits(factor).to_le_bytes());
        bytes
    }

    /// Of bytes that the coordinator sent; none if there is no such command, or no such vector.
    pub fn from_bytes(bytes: &[u8; COMMAND], history: usize) -> Option<Self> {
        let vector = |at: usize| {
            Vector::from_number(usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]])), history)
        };
        let (first, second, factor) = (vector(2)?, vector(4)?, f64::from_bits(word(bytes, 1)));
        Some(match bytes[0] {
            0 => Self::Totals,
            1 => Self::Dot(first, second),
            2 => Self::Axpy(factor, first, second),
            3 => Self::Scale(factor, first),
            4 => Self::Copy(first, second),
            kind => Self::End(Gathered::from_byte(kind.checked_sub(5)?)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_said_survives_being_sent() {
        let totals = Totals { portions: 120, rows: 1 << 40, loss: 0.1 };
        for said in [Said::Fetch, Said::Meet(totals), Said::Sum(77), Said::Goodbye] {
            assert_eq!(Said::from_bytes(&said.to_bytes(), 77), Some(said));
        }
        assert_eq!(Said::from_bytes(&Said::Sum(78).to_bytes(), 77), None, "nobody has so many numbers");
        let (w, y) = (Vector::Weights, Vector::Y(3));
        let ends = [Gathered::Missing, Gathered::GivenUp, Gathered::Taken].map(Command::End);
        let commands = [Command::Dot(w, y), Command::Axpy(-0.3, y, w), Command::Scale(2.0, y), Command::Copy(y, w)];
        for command in commands.into_iter().chain(ends).chain([Command::Totals]) {
            assert_eq!(Command::from_bytes(&command.to_bytes(), 4), Some(command));
        }
        assert_eq!(Command::from_bytes(&Command::Dot(w, y).to_bytes(), 3), None, "there is no such vector");
    }

    #[test]
    fn vectors_have_numbers_of_their_own() {
        let all: Vec<Vector> = (0..).map_while(|number| Vector::from_number(number, 4)).collect();
        assert_eq!(all.len(), Vector::count(4));
        assert!(all.iter().enumerate().all(|(number, vector)| vector.index() == number));
    }

    proptest! {
        #[test]
        fn any_bytes_are_something_or_nothing(said: [u8; SAID], command: [u8; COMMAND], history in 0usize..9) {
            if let Some(Said::Sum(length)) = Said::from_bytes(&said, 9) {
                prop_assert!(length <= 9);
            }
            if let Some(Command::Copy(a, b)) = Command::from_bytes(&command, history) {
                prop_assert!(a.index().max(b.index()) < Vector::count(history));
            }
        }
    }
}
