//! Who is who: the number of a process in its world, which run that world is, and which incarnation of it.

use std::fmt;

use paceline_system::entropy;

/// The number of a process among those that train together, from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u32);

impl Rank {
    /// The rank at a position of a table.
    ///
    /// # Panics
    /// Beyond four thousand million ranks.
    pub fn at(index: usize) -> Self {
        Self(u32::try_from(index).expect("a rank fits 32 bits"))
    }

    /// Its position in a table of ranks.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

/// Which incarnation of a world: it grows with every restart, so that a straggler of the last one is not let in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation(pub u64);

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "generation {}", self.0)
    }
}

/// Which run: sixteen bytes that rank 0 draws. The token may be the same for all runs of a user; this tells them apart, so
/// that ranks of two runs on one machine never take each other for their own. It is no secret.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RunId([u8; RunId::BYTES]);

impl RunId {
    /// How many bytes it takes.
    pub const BYTES: usize = 16;

    /// What a rank says that has not met rank 0 yet.
    pub const UNKNOWN: Self = Self([0; Self::BYTES]);

    /// A new one, from the operating system's entropy.
    pub fn random() -> Self {
        Self(entropy::bytes())
    }

    /// The run with these bytes.
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    pub const fn bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }

    /// The run written as 32 hexadecimal digits, if that is what the text is.
    pub fn from_hex(text: &str) -> Option<Self> {
        if text.len() != 2 * Self::BYTES || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        u128::from_str_radix(text, 16).ok().map(|number| Self(number.to_be_bytes()))
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::UNKNOWN => f.write_str("unknown"),
            Self(bytes) => write!(f, "{:032x}", u128::from_be_bytes(bytes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_survives_being_written_down() {
        let run = RunId::random();
        assert_eq!(RunId::from_hex(&run.to_string()), Some(run));
        assert_ne!(run, RunId::random());
        for text in ["", "unknown", &"g".repeat(32), &"+".repeat(32), &"0".repeat(31)] {
            assert_eq!(RunId::from_hex(text), None, "{text}");
        }
    }
}
