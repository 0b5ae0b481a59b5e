//! What a membership says: a warning that somebody is late, or why everybody ends. Each is one sentence that names the
//! rank, the host, the phase and the last step.

use std::fmt;
use std::time::Duration;

use paceline_comm::Rank;
use serde::{Deserialize, Serialize};

use crate::phase::Position;

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
    /// It is alive, and others have waited for it too long.
    Stalled {
        /// For how long.
        waited_ms: u64,
    },
    /// It said so itself.
    Failed {
        /// What it said.
        why: String,
    },
}

impl Verdict {
    /// The rank that is at fault.
    pub fn culprit(&self) -> Rank {
        Rank::at(self.rank)
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rank, Position { step, phase }) = (self.rank, self.position);
        if let Cause::NeverArrived { missing, waited_ms } = &self.cause {
            let (who, waited) = (list(missing), seconds(*waited_ms));
            return write!(out, "{who} did not arrive within {waited}; look at the output and the host of each");
        }
        write!(out, "rank {rank} on {} ", self.host)?;
        match &self.cause {
            Cause::Disconnected { why } => write!(out, "is gone ({why})")?,
            Cause::Silent { silent_ms } => write!(out, "is stalled: silent for {}", seconds(*silent_ms))?,
            Cause::Stalled { waited_ms } => write!(out, "is stalled: others wait since {}", seconds(*waited_ms))?,
            Cause::Failed { why } => write!(out, "failed: {why}")?,
            Cause::NeverArrived { .. } => {}
        }
        write!(out, "; it was last in phase {phase} after step {step}")
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
    /// How: silent, or alive and behind the others.
    pub silent: bool,
    /// For how long.
    pub since: Duration,
    /// After how long the run ends, if it does.
    pub deadline: Option<Duration>,
}

impl fmt::Display for Late {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rank, Position { step, phase }) = (self.rank.index(), self.position);
        let how = if self.silent { "silent for" } else { "others wait for it since" };
        let since = self.since.as_secs_f64();
        write!(out, "rank {rank} on {} is late: in phase {phase} after step {step}, {how} {since:.1} s", self.host)?;
        match self.deadline {
            Some(deadline) => write!(out, "; the run ends at {:.1} s", deadline.as_secs_f64()),
            None => Ok(()),
        }
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
    use crate::phase::Phase;

    #[test]
    fn every_sentence_names_rank_host_phase_and_step() {
        let position = Position { step: 41, phase: Phase::Exchange };
        let say = |cause| Verdict { rank: 2, host: "b".into(), position, cause }.to_string();
        let tail = "; it was last in phase exchange after step 41";
        let gone = say(Cause::Disconnected { why: "connection reset".into() });
        assert_eq!(gone, format!("rank 2 on b is gone (connection reset){tail}"));
        assert_eq!(say(Cause::Silent { silent_ms: 3010 }), format!("rank 2 on b is stalled: silent for 3.0 s{tail}"));
        let stalled = say(Cause::Stalled { waited_ms: 9000 });
        assert_eq!(stalled, format!("rank 2 on b is stalled: others wait since 9.0 s{tail}"));
        assert_eq!(say(Cause::Failed { why: "disk full".into() }), format!("rank 2 on b failed: disk full{tail}"));
        let missing = say(Cause::NeverArrived { missing: vec![2, 5, 6], waited_ms: 5000 });
        assert!(missing.starts_with("ranks 2, 5 and 6 did not arrive within 5.0 s"), "{missing}");
        let many = say(Cause::NeverArrived { missing: (0..100).collect(), waited_ms: 5000 });
        assert!(many.starts_with("ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more did not"), "{many}");
    }
}
