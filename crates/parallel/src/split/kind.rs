//! The kinds of schedules, by the words that name them in files and flags.

use std::fmt;
use std::str::FromStr;

/// How stages take turns between forward and backward passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Kind {
    /// All forward passes, then all backward passes.
    GPipe,
    /// A backward pass as soon as there can be one, then one forward pass for each.
    #[default]
    OneForwardOneBackward,
    /// Gradients of weights apart from those of inputs, in the time in which a stage would wait.
    ZeroBubble,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::GPipe, Self::OneForwardOneBackward, Self::ZeroBubble];

    /// The word in files and flags.
    pub const fn name(self) -> &'static str {
        match self {
            Self::GPipe => "gpipe",
            Self::OneForwardOneBackward => "1f1b",
            Self::ZeroBubble => "zero-bubble",
        }
    }

    /// A few words for `--help`.
    pub const fn about(self) -> &'static str {
        match self {
            Self::GPipe => "all forward passes, then all backward passes",
            Self::OneForwardOneBackward => "forward and backward passes in turn, in less memory",
            Self::ZeroBubble => "as 1f1b, with gradients of weights where a stage would wait",
        }
    }

    /// Whether gradients of weights have tasks of their own.
    pub const fn separates_gradients(self) -> bool {
        matches!(self, Self::ZeroBubble)
    }

    /// The most micro-batches whose activations a stage may keep at once.
    ///
    /// 1F1B needs one for itself and one for every stage that follows, so the first stage needs most. A last
    /// stage that waits with gradients of weights needs more than one, so with zero bubbles every stage may
    /// keep as many as 1F1B's first (ZB-H1 of Qi et al., 2023): no device needs more than 1F1B's largest.
    pub fn slots_max(self, stage: usize, stages: usize, micro_batches: usize) -> usize {
        match self {
            Self::GPipe => micro_batches,
            Self::OneForwardOneBackward => micro_batches.min(stages - stage),
            Self::ZeroBubble => micro_batches.min(stages),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = Self::ALL.map(Self::name).join(" or ");
        Self::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| format!("type {names}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_found_by_its_name() {
        for kind in Kind::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        assert_eq!("pipedream".parse::<Kind>(), Err("type gpipe or 1f1b or zero-bubble".into()));
        assert_eq!(Kind::default().name(), "1f1b");
    }
}
