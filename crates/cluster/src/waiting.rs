//! What a rank says in its heartbeats about waiting, and how it knows: its control thread looks again and again at what
//! the training thread does and whom the process waits for. A look is two loads; nothing is added to the waits
//! themselves.

use std::collections::BTreeMap;
use std::time::Duration;

use paceline_comm::Awaited;
use paceline_system::phase::Phase;
use paceline_system::progress::Position;
use serde::{Deserialize, Serialize};

/// Between two looks.
pub const LOOK: Duration = Duration::from_millis(50);

/// What a look counts for at most: who did not look for longer did not run, and so did not wait either.
const LOOK_MAX: Duration = Duration::from_millis(100);

/// Peers in one heartbeat; those waited for longest.
const PEERS_MAX: usize = 16;

/// Whom a rank waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Peer {
    /// This rank.
    Rank(u32),
    /// All ranks together; who is missing is not known.
    All,
    /// Whoever comes next: nobody is late.
    Anyone,
}

impl From<Awaited> for Peer {
    fn from(awaited: Awaited) -> Self {
        match awaited {
            Awaited::Rank(rank) => Self::Rank(rank.0),
            Awaited::All => Self::All,
            Awaited::Anyone => Self::Anyone,
        }
    }
}

/// What a heartbeat says about waiting.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Waiting {
    /// Whom the rank waits for at the moment, while it does nothing else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<Peer>,
    /// For how long, in this one exchange.
    #[serde(default)]
    pub for_ms: u64,
    /// For how long it has waited for whom since the heartbeat before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lately_ms: Vec<(Peer, u64)>,
}

impl Waiting {
    /// Whether it can be meant for a world of this size.
    pub fn is_sound(&self, world: usize) -> bool {
        let known = |peer: &Peer| !matches!(peer, Peer::Rank(rank) if *rank as usize >= world);
        let lately = &self.lately_ms;
        self.peer.iter().all(known) && lately.len() <= PEERS_MAX && lately.iter().all(|(peer, _)| known(peer))
    }
}

/// Looks at one process.
#[derive(Debug, Default)]
pub struct Lookout {
    /// What the last look saw, and since when it is so.
    seen: Option<(Position, Peer)>,
    waited: Duration,
    looked: Option<Duration>,
    lately: BTreeMap<Peer, Duration>,
}

impl Lookout {
    /// Looks at where the training thread is and whom the process waits for. Only a training thread that does nothing
    /// else waits.
    pub fn look(&mut self, position: Position, awaited: Option<Awaited>, now: Duration) {
        let passed = now.saturating_sub(self.looked.replace(now).unwrap_or(now)).min(LOOK_MAX);
        let peer = awaited.map(Peer::from).filter(|_| position.phase == Phase::Exchange);
        let seen = peer.map(|peer| (position, peer));
        if let Some(peer) = peer {
            *self.lately.entry(peer).or_default() += passed;
        }
        self.waited = if seen.is_some() && seen == self.seen { self.waited + passed } else { Duration::ZERO };
        self.seen = seen;
    }

    /// What to say in the next heartbeat.
    pub fn take(&mut self) -> Waiting {
        let whole = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        let lately = std::mem::take(&mut self.lately).into_iter().map(|(peer, waited)| (peer, whole(waited)));
        let mut lately_ms: Vec<(Peer, u64)> = lately.filter(|(_, waited)| *waited > 0).collect();
        lately_ms.sort_by_key(|(_, waited)| std::cmp::Reverse(*waited));
        lately_ms.truncate(PEERS_MAX);
        Waiting { peer: self.seen.map(|(_, peer)| peer), for_ms: whole(self.waited), lately_ms }
    }
}

#[cfg(test)]
mod tests {
    use paceline_comm::Rank;
    use paceline_system::progress::Message;

    use super::*;

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn a_wait_in_one_exchange_is_as_long_as_it_is_seen_and_ends_with_it() {
        let mut lookout = Lookout::default();
        let at = |step| Position { step, phase: Phase::Exchange, message: Some(Message::Report) };
        let one = Some(Awaited::Rank(Rank(1)));
        (0..=20).for_each(|look| lookout.look(at(3), one, ms(look * 50)));
        let told = lookout.take();
        assert_eq!((told.peer, told.for_ms, told.lately_ms), (Some(Peer::Rank(1)), 1000, vec![(Peer::Rank(1), 1000)]));
        lookout.look(at(4), one, ms(1050));
        let told = lookout.take();
        assert_eq!((told.for_ms, told.lately_ms), (0, vec![(Peer::Rank(1), 50)]), "another exchange");
    }

    #[test]
    fn whoever_computes_or_stands_still_does_not_wait() {
        let mut lookout = Lookout::default();
        let one = Some(Awaited::Rank(Rank(1)));
        let computing = Position { step: 3, phase: Phase::Backward, message: None };
        (0..=20).for_each(|look| lookout.look(computing, one, ms(look * 50)));
        assert_eq!(lookout.take(), Waiting::default(), "another thread waits meanwhile");
        let waiting = Position { phase: Phase::Exchange, ..computing };
        lookout.look(waiting, one, ms(1050));
        lookout.look(waiting, one, ms(9000));
        assert_eq!(lookout.take().for_ms, 100, "a stopped process did not wait for others");
    }
}
