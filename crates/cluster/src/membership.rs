//! Who is there, who is late, who is gone: `(state, event, now) → (state, actions, reason)`, without clock or socket.
//!
//! Rank 0 is the hub: it hears from everybody, decides, and tells everybody. The others hear from rank 0 alone, so they
//! watch only it; what they decide themselves is that rank 0 is gone. The first verdict stands: a survivor that ends
//! because of it closes its connections too, and must not be blamed for that.

mod verdict;

use std::borrow::Cow;
use std::time::Duration;

use paceline_comm::Rank;

pub use verdict::{Cause, Late, Verdict};

use crate::phase::Position;

/// How long what may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Until everybody has arrived.
    pub gather: Duration,
    /// Between two heartbeats.
    pub beat: Duration,
    /// Silence after which a rank is called late.
    pub late: Duration,
    /// Silence after which a rank is taken for stalled and everybody ends.
    pub silent: Duration,
    /// Others wait for so long before a rank that is alive is called late; none where ranks do not wait for each other.
    pub behind: Option<Duration>,
    /// Others wait for so long before a rank that is alive is taken for stalled.
    pub stalled: Option<Duration>,
}

impl Default for Limits {
    /// A fault is named within 5 s: 3 s of silence, and the rest to spare for a busy machine.
    fn default() -> Self {
        Self {
            gather: Duration::from_secs(120),
            beat: Duration::from_millis(500),
            late: Duration::from_millis(1500),
            silent: Duration::from_secs(3),
            behind: Some(Duration::from_secs(10)),
            stalled: None,
        }
    }
}

/// How long the verdict on a rank that blames another waits for the other's end: it shows within two heartbeats.
const BLAME: Duration = Duration::from_secs(1);

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A rank greeted with a good token and fits.
    Arrived {
        /// The rank that greeted.
        rank: Rank,
        /// Where it runs.
        host: String,
    },
    /// A rank is alive.
    Beat {
        /// The rank whose heartbeat came.
        rank: Rank,
        /// Where it is.
        position: Position,
    },
    /// A connection ended without a goodbye.
    Lost {
        /// The rank at its other end.
        rank: Rank,
        /// What the operating system said.
        why: String,
    },
    /// A rank cannot go on and says so.
    Failed {
        /// The rank that fails.
        rank: Rank,
        /// What is wrong.
        why: String,
        /// Whom it takes to be the cause.
        suspect: Option<Rank>,
    },
    /// A rank is through with its work.
    Goodbye {
        /// The rank that leaves.
        rank: Rank,
    },
    /// The hub has decided.
    Told(Verdict),
    /// Time passed.
    Tick,
}

/// What the shell has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Everybody has arrived: send the table.
    Start,
    /// Say that somebody is late.
    Warn(Late),
    /// Tell the hub that this process cannot go on.
    Complain {
        /// What is wrong.
        why: String,
        /// Whom it takes to be the cause.
        suspect: Option<Rank>,
    },
    /// Tell everybody one hears, set the stop, close.
    End(Verdict),
    /// Everybody is through: say so to everybody and close.
    Finish,
}

/// What follows from an event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// What to do, in order.
    pub actions: Vec<Action>,
    /// Why, for the log; empty when nothing worth a line happened.
    pub reason: Cow<'static, str>,
}

impl Decision {
    fn because(reason: impl Into<Cow<'static, str>>) -> Self {
        Self { actions: Vec::new(), reason: reason.into() }
    }

    fn and(mut self, action: Action) -> Self {
        self.actions.push(action);
        self
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Awaited,
    Present,
    Left,
}

/// What is known of a rank.
#[derive(Clone, Debug)]
struct Peer {
    host: String,
    standing: Standing,
    /// When it was last heard.
    heard: Duration,
    position: Position,
    /// When it reached its position.
    since: Duration,
    /// Called late in this silence.
    silence_told: bool,
    /// After how long a wait it is called late (again).
    behind_next: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Gathering,
    Running,
    Ended,
}

/// The state.
#[derive(Clone, Debug)]
pub struct Membership {
    me: Rank,
    limits: Limits,
    stage: Stage,
    began: Duration,
    /// When the last event was handled: a long gap means that this process itself was stopped.
    seen: Duration,
    peers: Vec<Peer>,
    /// A verdict on a rank that blames another, and when it is spoken.
    held: Option<(Verdict, Duration)>,
}

impl Membership {
    /// The hub before anybody arrived but itself.
    pub fn hub(world: usize, host: &str, limits: Limits, now: Duration) -> Self {
        let mut state = Self::new(Rank::at(0), vec![String::new(); world], limits, now);
        state.stage = Stage::Gathering;
        state.peers[0] = Peer { host: host.to_owned(), standing: Standing::Present, ..state.peers[0].clone() };
        state
    }

    /// A rank that has been told the hosts of all.
    pub fn spoke(me: Rank, hosts: Vec<String>, limits: Limits, now: Duration) -> Self {
        assert!(me.index() > 0, "rank 0 is the hub");
        let mut state = Self::new(me, hosts, limits, now);
        state.peers[0].standing = Standing::Present;
        state.peers[me.index()].standing = Standing::Present;
        state
    }

    fn new(me: Rank, hosts: Vec<String>, limits: Limits, now: Duration) -> Self {
        let behind_next = limits.behind.unwrap_or(Duration::MAX);
        let peer = |host| Peer {
            host,
            standing: Standing::Awaited,
            heard: now,
            position: Position::default(),
            since: now,
            silence_told: false,
            behind_next,
        };
        let peers = hosts.into_iter().map(peer).collect();
        Self { me, limits, stage: Stage::Running, began: now, seen: now, peers, held: None }
    }

    /// Whether the run is over, well or badly.
    pub fn ended(&self) -> bool {
        self.stage == Stage::Ended
    }

    /// Whether a rank has arrived and not left.
    pub fn is_present(&self, rank: Rank) -> bool {
        self.peers[rank.index()].standing == Standing::Present
    }

    /// The ranks that have not arrived.
    pub fn missing(&self) -> Vec<usize> {
        (0..self.peers.len()).filter(|&rank| self.peers[rank].standing == Standing::Awaited).collect()
    }

    /// Handles an event. After the end, events are ignored.
    pub fn on(&mut self, event: Event, now: Duration) -> Decision {
        if self.stage == Stage::Ended {
            return Decision::default();
        }
        self.forgive_own_sleep(now);
        match event {
            Event::Arrived { rank, host } => self.arrived(rank, host, now),
            Event::Beat { rank, position } => self.beat(rank, position, now),
            Event::Lost { rank, why } => self.lost(rank, why),
            Event::Failed { rank, why, suspect } => self.failed(rank, why, suspect, now),
            Event::Goodbye { rank } => self.goodbye(rank),
            Event::Told(verdict) => self.end(verdict),
            Event::Tick => self.tick(now),
        }
    }

    /// A process that was stopped itself has heard nobody; that is not their fault.
    fn forgive_own_sleep(&mut self, now: Duration) {
        let gap = now.saturating_sub(self.seen);
        if gap > self.limits.late {
            for peer in &mut self.peers {
                peer.heard += gap;
                peer.since += gap;
            }
            self.held = self.held.take().map(|(verdict, at)| (verdict, at + gap));
        }
        self.seen = self.seen.max(now);
    }

    fn arrived(&mut self, rank: Rank, host: String, now: Duration) -> Decision {
        if self.stage != Stage::Gathering || self.peers[rank.index()].standing != Standing::Awaited {
            return Decision::default();
        }
        let world = self.peers.len();
        let peer = &mut self.peers[rank.index()];
        (peer.standing, peer.heard, peer.since) = (Standing::Present, now, now);
        let reason = format!("{rank} arrived from {host}");
        peer.host = host;
        match self.missing().len() {
            0 => {
                self.stage = Stage::Running;
                for peer in &mut self.peers {
                    (peer.heard, peer.since) = (now, now);
                }
                Decision::because(format!("{reason}; all {world} are there")).and(Action::Start)
            }
            missing => Decision::because(format!("{reason}; {} of {world} are there", world - missing)),
        }
    }

    fn beat(&mut self, rank: Rank, position: Position, now: Duration) -> Decision {
        let behind = self.limits.behind.unwrap_or(Duration::MAX);
        let peer = &mut self.peers[rank.index()];
        if peer.standing != Standing::Present {
            return Decision::default();
        }
        peer.heard = now;
        if position != peer.position {
            (peer.position, peer.since, peer.behind_next) = (position, now, behind);
        }
        if std::mem::take(&mut peer.silence_told) {
            return Decision::because(format!("{rank} on {} is heard again", peer.host));
        }
        Decision::default()
    }

    fn lost(&mut self, rank: Rank, why: String) -> Decision {
        let peer = &mut self.peers[rank.index()];
        if peer.standing != Standing::Present {
            return Decision::default();
        }
        if self.stage == Stage::Gathering {
            peer.standing = Standing::Awaited;
            return Decision::because(format!("{rank} left again before the run began ({why}); waiting for it"));
        }
        if let Some((verdict, _)) = &self.held
            && verdict.rank == rank.index()
        {
            return Decision::because(format!("{rank} has complained and left; its complaint is being looked into"));
        }
        self.blame(rank, Cause::Disconnected { why })
    }

    fn failed(&mut self, rank: Rank, why: String, suspect: Option<Rank>, now: Duration) -> Decision {
        if self.peers[rank.index()].standing != Standing::Present && rank != self.me {
            return Decision::default();
        }
        let hub = self.me.index() == 0;
        let verdict = self.verdict(rank, Cause::Failed { why: why.clone() });
        match suspect.filter(|suspect| *suspect != rank && suspect.index() < self.peers.len()) {
            None if hub => self.end(verdict),
            suspect => {
                // The hub decides; a rank without one, if rank 0 is gone as well, decides when that shows.
                let wait = if hub { BLAME } else { self.limits.silent + BLAME };
                let reason = match suspect {
                    Some(suspect) => format!("{rank} complains of {suspect}: {why}"),
                    None => format!("{rank} fails: {why}"),
                };
                self.held.get_or_insert((verdict, now + wait));
                let decision = Decision::because(reason);
                if hub { decision } else { decision.and(Action::Complain { why, suspect }) }
            }
        }
    }

    fn goodbye(&mut self, rank: Rank) -> Decision {
        let hub = self.me.index() == 0;
        self.peers[rank.index()].standing = Standing::Left;
        let all = self.peers.iter().all(|peer| peer.standing == Standing::Left);
        // The hub is the last to say goodbye, so to the others its goodbye is everybody's.
        if (hub && all) || (!hub && rank.index() == 0) {
            self.stage = Stage::Ended;
            return Decision::because("everybody is through").and(Action::Finish);
        }
        Decision::because(format!("{rank} is through"))
    }

    fn tick(&mut self, now: Duration) -> Decision {
        if self.stage == Stage::Gathering {
            let waited = now.saturating_sub(self.began);
            let missing = self.missing();
            if waited < self.limits.gather || missing.is_empty() {
                return Decision::default();
            }
            let first = Rank::at(missing[0]);
            return self.blame(first, Cause::NeverArrived { missing, waited_ms: milliseconds(waited) });
        }
        if let Some((verdict, _)) = self.held.take_if(|(_, at)| now >= *at) {
            return self.end(verdict);
        }
        let watched = if self.me.index() == 0 { 1..self.peers.len() } else { 0..1 };
        for rank in watched.map(Rank::at) {
            let decision = self.listen(rank, now);
            if decision != Decision::default() {
                return decision;
            }
        }
        if self.me.index() == 0 { self.look_who_is_behind(now) } else { Decision::default() }
    }

    /// Late or stalled by silence.
    fn listen(&mut self, rank: Rank, now: Duration) -> Decision {
        let Limits { late, silent, .. } = self.limits;
        let peer = &mut self.peers[rank.index()];
        let silence = now.saturating_sub(peer.heard);
        if peer.standing != Standing::Present || silence < late {
            return Decision::default();
        }
        if silence >= silent {
            return self.blame(rank, Cause::Silent { silent_ms: milliseconds(silence) });
        }
        if std::mem::replace(&mut peer.silence_told, true) {
            return Decision::default();
        }
        self.warn(rank, silence, true)
    }

    /// Late or stalled although alive: others are ahead of it and have waited long. Warned of again after twice the wait.
    fn look_who_is_behind(&mut self, now: Duration) -> Decision {
        let present = |peer: &&Peer| peer.standing == Standing::Present;
        let Some(front) = self.peers.iter().filter(present).map(|peer| peer.position).max() else {
            return Decision::default();
        };
        // Since when somebody stands at the front.
        let reached =
            self.peers.iter().filter(present).filter(|peer| peer.position == front).map(|peer| peer.since).min();
        let waited = now.saturating_sub(reached.unwrap_or(now));
        let last = |rank: &usize| {
            let peer = &self.peers[*rank];
            peer.standing == Standing::Present && peer.position < front
        };
        let Some(rank) = (0..self.peers.len()).filter(last).min_by_key(|&rank| self.peers[rank].position) else {
            return Decision::default();
        };
        if self.limits.stalled.is_some_and(|limit| waited >= limit) {
            return self.blame(Rank::at(rank), Cause::Stalled { waited_ms: milliseconds(waited) });
        }
        if waited < self.peers[rank].behind_next {
            return Decision::default();
        }
        self.peers[rank].behind_next = waited * 2;
        self.warn(Rank::at(rank), waited, false)
    }

    fn warn(&self, rank: Rank, since: Duration, silent: bool) -> Decision {
        let peer = &self.peers[rank.index()];
        let deadline = if silent { Some(self.limits.silent) } else { self.limits.stalled };
        let late = Late { rank, host: peer.host.clone(), position: peer.position, silent, since, deadline };
        Decision::because(late.to_string()).and(Action::Warn(late))
    }

    fn verdict(&self, rank: Rank, cause: Cause) -> Verdict {
        let peer = &self.peers[rank.index()];
        Verdict { rank: rank.index(), host: peer.host.clone(), position: peer.position, cause }
    }

    fn blame(&mut self, rank: Rank, cause: Cause) -> Decision {
        self.end(self.verdict(rank, cause))
    }

    fn end(&mut self, verdict: Verdict) -> Decision {
        self.stage = Stage::Ended;
        Decision::because(verdict.to_string()).and(Action::End(verdict))
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
#[path = "membership/tests.rs"]
mod tests;
