//! What a rank that was lost and has come back, and rank 0, say to each other until it takes part again.

use std::time::Duration;

use paceline_comm::Rank;
use paceline_system::signal;

use super::{Command, Control};
use crate::ClusterError;
use crate::message::Admission;

/// Between two looks at the user's wish.
const LOOK: Duration = Duration::from_millis(50);

impl Control {
    /// How often this rank has come back into a run that goes on; 0 if it is here from the beginning.
    pub fn life(&self) -> u16 {
        self.life
    }

    /// A rank that has come back: says that it could take part now.
    pub fn ready(&self) {
        self.send(Command::Ready);
    }

    /// A rank that has come back: waits until rank 0 says where in the data it takes part. That may take as long as an
    /// evaluation; rank 0 is heard meanwhile.
    ///
    /// # Errors
    /// When the run ends before, or the user does not want to wait.
    pub fn admission(&self, interrupt: &signal::Stop) -> Result<Admission, ClusterError> {
        loop {
            let mut state = self.shared.wait(LOOK, |state| state.admission.is_some() || state.ended.is_some());
            match (state.admission.take(), &state.ended) {
                (Some(admission), _) => return Ok(admission),
                (None, Some(Err(verdict))) => return Err(ClusterError::Ended(verdict.clone())),
                (None, Some(Ok(()))) => {
                    let rank = self.rank;
                    return Err(ClusterError::Failed(format!("the run ended before {rank} could take part again")));
                }
                (None, None) if interrupt.requested() => {
                    return Err(ClusterError::Failed("interrupted while waiting to take part again".into()));
                }
                (None, None) => {}
            }
        }
    }

    /// Rank 0: a rank that has come back and could take part, with how often it has.
    pub fn returning(&self) -> Option<(Rank, u16)> {
        self.shared.lock().ready.iter().next().map(|(rank, life)| (*rank, *life))
    }

    /// Rank 0: tells a rank that has come back, for the so-manieth time, that it takes part from here on.
    pub fn admit(&self, (rank, life): (Rank, u16), admission: Admission) {
        // Another process may have come back in its place since, and is told by itself.
        self.shared.change(|state| state.ready.retain(|known, number| (*known, *number) != (rank, life)));
        self.send(Command::Admit { rank, life, admission });
    }
}
