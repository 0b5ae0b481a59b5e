//! Workers that are slower than they could be, for experiments: after each pass they do nothing for a while.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The most that a worker may be slowed down.
const FACTOR_MAX: f64 = 1000.0;

/// How many times as long each worker takes for its arithmetic; 1 where nothing is said.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Slow(Vec<(usize, f64)>);

impl Slow {
    /// Whether nobody is slowed down.
    pub fn is_none(&self) -> bool {
        self.0.is_empty()
    }

    /// How many times as long a rank takes.
    pub fn factor(&self, rank: usize) -> f64 {
        self.0.iter().find(|(slow, _)| *slow == rank).map_or(1.0, |(_, factor)| *factor)
    }

    /// The highest rank of which something is said.
    pub fn rank_max(&self) -> Option<usize> {
        self.0.iter().map(|(rank, _)| *rank).max()
    }

    /// How long a worker of this factor does nothing after arithmetic that took so long.
    pub fn pause(factor: f64, computed_s: f64) -> Duration {
        Duration::try_from_secs_f64((factor - 1.0) * computed_s).unwrap_or_default()
    }
}

impl fmt::Display for Slow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<String> = self.0.iter().map(|(rank, factor)| format!("{rank}={factor}")).collect();
        f.write_str(&words.join(","))
    }
}

impl FromStr for Slow {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut all: Vec<(usize, f64)> = Vec::new();
        for word in text.split(',').filter(|word| !word.is_empty()) {
            let pair = word.split_once('=').and_then(|(rank, factor)| Some((rank.parse().ok()?, factor.parse().ok()?)));
            let Some((rank, factor)) = pair.filter(|(_, factor)| (1.0..=FACTOR_MAX).contains(factor)) else {
                return Err(format!("`{word}` is no rank and factor from 1 to {FACTOR_MAX}; type for example 1=4"));
            };
            if all.iter().any(|(known, _)| *known == rank) {
                return Err(format!("rank {rank} stands there twice; type each once"));
            }
            all.push((rank, factor));
        }
        Ok(Self(all))
    }
}

impl TryFrom<String> for Slow {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Slow> for String {
    fn from(slow: Slow) -> Self {
        slow.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_are_those_of_ranks() {
        let slow: Slow = "1=4,3=1.5".parse().unwrap();
        assert_eq!([0, 1, 2, 3].map(|rank| slow.factor(rank)), [1.0, 4.0, 1.0, 1.5]);
        assert_eq!((slow.to_string().as_str(), slow.rank_max()), ("1=4,3=1.5", Some(3)));
        assert_eq!(Slow::pause(4.0, 0.5), Duration::from_millis(1500));
        assert_eq!(Slow::pause(1.0, 0.5), Duration::ZERO);
    }

    #[test]
    fn what_is_no_factor_is_refused_with_what_to_type() {
        for text in ["1", "1=0.5", "1=nan", "=2", "1=2000", "x=2"] {
            assert!(text.parse::<Slow>().unwrap_err().ends_with("type for example 1=4"), "{text}");
        }
        assert!("1=2,1=3".parse::<Slow>().unwrap_err().contains("twice"));
    }
}
