//! What a membership says: a warning that somebody is late, or why everybody ends. Each is one sentence that names the
//! rank, the host, the phase and the last step.

use std::fmt;
use std::time::Duration;

use paceline_comm::Rank;
use paceline_system::progress::{Message, Position};
use serde::{Deserialize, Serialize};

/// Why everybody ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// Whose fault it is; of several that never arrived, the first.
    pub rank: usize,
    /// Its host; empty if it was never heard of.
    pub host: String,
    /// Where it was when it was last heard of.
    pub position: Position,
    /// What is wrong with it.
    pub cause: Cause,
}

/// What is wrong with a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// These never came, although everybody waited so long.
    NeverArrived {
        /// The ranks.
        missing: Vec<usize>,
        /// How long the others waited.
        waited_ms: u64,
    },
    /// Its connection ended without a goodbye: killed, crashed, or the link was cut.
    Disconnected {
        /// What the operating system said.
        why: String,
    },
    /// Its connection is there and nothing comes: stopped, frozen, or the link swallows everything.
    Silent {
        /// For how long.
        silent_ms: u64,
    },
    /// It said so itself.
    Failed {
        /// What it said.
        why: String,
        /// Whether the same would happen again if everything were started again: the input cannot work.
        #[serde(default)]
        in_vain: bool,
    },
}

impl Verdict {
    /// Whether the same would happen again if everything were started again.
    pub fn is_in_vain(&self) -> bool {
        matches!(self.cause, Cause::Failed { in_vain: true, .. })
    }

    /// The rank that is at fault.
    pub fn culprit(&self) -> Rank {
        Rank::at(self.rank)
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rank = self.rank;
        if let Cause::NeverArrived { missing, waited_ms } = &self.cause {
            let (who, waited) = (list(missing), seconds(*waited_ms));
            return write!(out, "{who} did not arrive within {waited}; look at the output and the host of each");
        }
        write!(out, "rank {rank} on {} ", self.host)?;
        match &self.cause {
            Cause::Disconnected { why } => write!(out, "is gone ({why})")?,
            Cause::Silent { silent_ms } => write!(out, "is stalled: silent for {}", seconds(*silent_ms))?,
            Cause::Failed { why, .. } => write!(out, "failed: {why}")?,
            Cause::NeverArrived { .. } => {}
        }
        write!(out, "; it was last {}", self.position)
    }
}

/// Somebody is late, and the run goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Late {
    /// The rank that is late.
    pub rank: Rank,
    /// Its host.
    pub host: String,
    /// Where it was when it was last heard of.
    pub position: Position,
    /// What the one who waits longest waits for.
    pub message: Option<Message>,
    /// For how long.
    pub waited: Duration,
    /// The time within which that was waited, where it was not in one exchange.
    pub window: Option<Duration>,
    /// For how long nothing was heard of it.
    pub unheard: Duration,
    /// After how long a silence the run ends, where it is silent.
    pub ends_after: Option<Duration>,
}

impl fmt::Display for Late {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, host, position, waited, .. } = self;
        write!(out, "{rank} on {host} is late: others have waited {:.1} s", waited.as_secs_f64())?;
        if let Some(window) = self.window {
            write!(out, " of the last {:.1} s", window.as_secs_f64())?;
        }
        match self.message {
            Some(message) => write!(out, " for it, for {message}; it is {position}")?,
            None => write!(out, " for it; it is {position}")?,
        }
        match self.ends_after {
            Some(limit) => {
                let (unheard, limit) = (self.unheard.as_secs_f64(), limit.as_secs_f64());
                write!(out, ", and silent for {unheard:.1} s; the run ends at {limit:.1} s")
            }
            None => Ok(()),
        }
    }
}

/// Nobody waits any more for a rank that was late.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaughtUp {
    /// The rank that was late.
    pub rank: Rank,
    /// Its host.
    pub host: String,
    /// Where it is.
    pub position: Position,
    /// How long the one who waited longest waited for it.
    pub waited: Duration,
}

impl fmt::Display for CaughtUp {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, host, position, waited } = self;
        let waited = waited.as_secs_f64();
        write!(out, "{rank} on {host} has caught up: others waited {waited:.1} s for it; it is {position}")
    }
}

fn seconds(milliseconds: u64) -> String {
    format!("{:.1} s", milliseconds as f64 / 1000.0)
}

/// Ranks in words, at most eight of them by number.
fn list(ranks: &[usize]) -> String {
    const SHOWN: usize = 8;
    let mut names: Vec<String> = ranks.iter().take(SHOWN).map(usize::to_string).collect();
    if ranks.len() > SHOWN {
        names.push(format!("{} more", ranks.len() - SHOWN));
    }
    let last = names.pop().unwrap_or_default();
    match (names.is_empty(), ranks.len()) {
        (true, _) => format!("rank {last}"),
        (false, _) => format!("ranks {} and {last}", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_system::phase::Phase;

    #[test]
    fn every_sentence_names_rank_host_phase_and_step() {
        let position = Position { step: 41, phase: Phase::Exchange, message: None };
        let say = |cause| Verdict { rank: 2, host: "b".into(), position, cause }.to_string();
        let tail = "; it was last in phase exchange after step 41";
        let gone = say(Cause::Disconnected { why: "connection reset".into() });
        assert_eq!(gone, format!("rank 2 on b is gone (connection reset){tail}"));
        assert_eq!(say(Cause::Silent { silent_ms: 3010 }), format!("rank 2 on b is stalled: silent for 3.0 s{tail}"));
        assert_eq!(
            say(Cause::Failed { why: "disk full".into(), in_vain: false }),
            format!("rank 2 on b failed: disk full{tail}")
        );
        let missing = say(Cause::NeverArrived { missing: vec![2, 5, 6], waited_ms: 5000 });
        assert!(missing.starts_with("ranks 2, 5 and 6 did not arrive within 5.0 s"), "{missing}");
        let many = say(Cause::NeverArrived { missing: (0..100).collect(), waited_ms: 5000 });
        assert!(many.starts_with("ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more did not"), "{many}");
    }
}
