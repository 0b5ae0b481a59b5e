//! Who is there, who is late, who is gone: `(state, event, now) → (state, actions, reason)`, without clock or socket.
//!
//! Rank 0 is the hub: it hears from everybody, decides, and tells everybody. The others hear from rank 0 alone, so they
//! watch only it; what they decide themselves is that rank 0 is gone. The first verdict stands: a survivor that ends
//! because of it closes its connections too, and must not be blamed for that. Who is late is told by the account in
//! `membership/late.rs`.

mod late;
mod verdict;

use std::borrow::Cow;
use std::ops::Range;
use std::time::Duration;

use paceline_comm::Rank;
use paceline_comm::transport::tcp::LIVES_MAX;

use late::{Account, Finding};
use paceline_system::progress::Position;
pub use verdict::{CaughtUp, Cause, Late, Verdict};

use crate::waiting::Waiting;

/// How long what may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Until everybody has arrived.
    pub gather: Duration,
    /// Between two heartbeats.
    pub beat: Duration,
    /// Others wait for a rank for so long before it is called late.
    pub late: Duration,
    /// Silence after which a rank is taken for stalled and everybody ends.
    pub silent: Duration,
}

impl Limits {
    /// With heartbeats that come often enough for these: twice within the time after which a rank is late, and four times
    /// within that after which it is silent.
    pub fn new(gather: Duration, late: Duration, silent: Duration) -> Self {
        let beat = (late / 2).min(silent / 4).clamp(Duration::from_millis(50), Duration::from_millis(500));
        Self { gather, beat, late, silent }
    }
}

impl Default for Limits {
    /// A machine that swaps, or a debugger, may keep a process silent for seconds: that ends no run.
    fn default() -> Self {
        Self::new(Duration::from_secs(120), Duration::from_secs(1), Duration::from_secs(15))
    }
}

/// A gap in the events of this process after which it must have been stopped itself.
const SLEPT: Duration = Duration::from_secs(1);

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
        /// Whom it waits for.
        waiting: Waiting,
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
        /// Whether the same would happen again if everything were started again: the input cannot work.
        in_vain: bool,
    },
    /// A rank is through with its work.
    Goodbye {
        /// The rank that leaves.
        rank: Rank,
    },
    /// The hub has decided.
    Told(Verdict),
    /// The hub goes on without a rank.
    Missed(Verdict),
    /// A rank that was lost is here again, and gets ready to take part.
    Returned {
        /// The rank.
        rank: Rank,
        /// Where it runs now.
        host: String,
    },
    /// It takes part from here on.
    Readmitted {
        /// The rank.
        rank: Rank,
    },
    /// Time passed.
    Tick,
}

/// What the shell has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Everybody has arrived: send the table.
    Start,
    /// Say that somebody is late.
    Late(Late),
    /// Say that it is not any more.
    CaughtUp(CaughtUp),
    /// Tell the hub that this process cannot go on.
    Complain {
        /// What is wrong.
        why: String,
        /// Whom it takes to be the cause.
        suspect: Option<Rank>,
        /// Whether the same would happen again if everything were started again: the input cannot work.
        in_vain: bool,
    },
    /// Tell everybody one hears, set the stop, close.
    End(Verdict),
    /// Tell everybody one hears that a rank is lost, and go on without it.
    GoOn(Verdict),
    /// Tell everybody one hears that a lost rank is here again, for the so-manieth time.
    LetReturn(Rank, u16),
    /// Say that it takes part again.
    Readmit(Rank),
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
    /// The others go on without it.
    Lost,
    /// It was lost, and gets ready to take part again: nobody waits for it.
    Returning,
    Left,
}

impl Standing {
    /// Whether it has a connection, by which it is heard.
    fn is_heard(self) -> bool {
        matches!(self, Self::Present | Self::Returning)
    }

    /// Whether the end need not wait for it.
    fn has_left(self) -> bool {
        matches!(self, Self::Lost | Self::Returning | Self::Left)
    }
}

/// What is known of a rank.
#[derive(Clone, Debug)]
struct Member {
    host: String,
    standing: Standing,
    /// When it was last heard.
    heard: Duration,
    position: Position,
    waiting: Waiting,
    /// When it was last known to wait for somebody itself.
    waited: Duration,
    /// How often it has come back.
    life: u16,
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
    members: Vec<Member>,
    account: Account,
    /// A verdict on a rank that blames another, and when it is spoken.
    held: Option<(Verdict, Duration)>,
    /// The ranks that the others can do without.
    spare: Range<usize>,
}

impl Membership {
    /// The hub before anybody arrived but itself.
    pub fn hub(world: usize, host: &str, limits: Limits, now: Duration) -> Self {
        let mut state = Self::new(Rank::at(0), vec![String::new(); world], limits, now);
        state.stage = Stage::Gathering;
        state.members[0] = Member { host: host.to_owned(), standing: Standing::Present, ..state.members[0].clone() };
        state
    }

    /// A rank that has been told the hosts of all.
    pub fn spoke(me: Rank, hosts: Vec<String>, limits: Limits, now: Duration) -> Self {
        assert!(me.index() > 0, "rank 0 is the hub");
        let mut state = Self::new(me, hosts, limits, now);
        state.members[0].standing = Standing::Present;
        state.members[me.index()].standing = Standing::Present;
        state
    }

    /// Ranks wait for each other as a matter of course, for so long at once.
    pub fn expect_waits(&mut self, longest: Duration) {
        self.account.expect_waits(longest);
    }

    fn new(me: Rank, hosts: Vec<String>, limits: Limits, now: Duration) -> Self {
        let account = Account::new(hosts.len(), limits.late, limits.beat);
        let member = |host| Member {
            host,
            standing: Standing::Awaited,
            heard: now,
            position: Position::default(),
            waiting: Waiting::default(),
            waited: now,
            life: 0,
        };
        let members = hosts.into_iter().map(member).collect();
        let (stage, spare) = (Stage::Running, 0..0);
        Self { me, limits, stage, began: now, seen: now, members, account, held: None, spare }
    }

    /// The hub: from now on the loss of one of these ranks ends nothing; the others go on without it.
    pub fn spare(&mut self, ranks: Range<usize>) {
        self.spare = ranks;
    }

    /// Whether the run is over, well or badly.
    pub fn ended(&self) -> bool {
        self.stage == Stage::Ended
    }

    /// Whether a rank has arrived and not left.
    pub fn is_present(&self, rank: Rank) -> bool {
        self.members[rank.index()].standing == Standing::Present
    }

    /// Whether the run has begun, and not ended.
    pub fn is_running(&self) -> bool {
        self.stage == Stage::Running
    }

    /// Whether a rank that says it is back was lost, and may come back.
    ///
    /// # Errors
    /// Why not, in a sentence.
    pub fn may_return(&self, rank: Rank) -> Result<(), String> {
        let Member { standing, life, .. } = &self.members[rank.index()];
        match standing {
            Standing::Lost if *life < LIVES_MAX => Ok(()),
            Standing::Lost => Err(format!("{rank} was lost and has come back {LIVES_MAX} times, which is enough")),
            Standing::Left => Err(format!("{rank} is through with its part of the run")),
            Standing::Present | Standing::Returning => {
                Err(format!("{rank} is still in the run; whoever takes its place comes when it is lost"))
            }
            Standing::Awaited => Err(format!("{rank} has never been here")),
        }
    }

    /// The ranks that have not arrived.
    pub fn missing(&self) -> Vec<usize> {
        (0..self.members.len()).filter(|&rank| self.members[rank].standing == Standing::Awaited).collect()
    }

    /// Handles an event. After the end, events are ignored.
    pub fn on(&mut self, event: Event, now: Duration) -> Decision {
        if self.stage == Stage::Ended {
            return Decision::default();
        }
        self.forgive_own_sleep(now);
        match event {
            Event::Arrived { rank, host } => self.arrived(rank, host, now),
            Event::Beat { rank, position, waiting } => self.beat(rank, position, waiting, now),
            Event::Lost { rank, why } => self.lost(rank, why),
            Event::Failed { rank, why, suspect, in_vain } => self.failed(rank, (why, in_vain), suspect, now),
            Event::Goodbye { rank } => self.goodbye(rank),
            Event::Told(verdict) => self.end(verdict),
            Event::Missed(verdict) => self.go_on(verdict),
            Event::Returned { rank, host } => self.returned(rank, host, now),
            Event::Readmitted { rank } => self.readmitted(rank, now),
            Event::Tick => self.tick(now),
        }
    }

    /// A process that was stopped itself has heard nobody; that is not their fault.
    fn forgive_own_sleep(&mut self, now: Duration) {
        let gap = now.saturating_sub(self.seen);
        if gap > SLEPT {
            self.members.iter_mut().for_each(|member| member.heard += gap);
            self.held = self.held.take().map(|(verdict, at)| (verdict, at + gap));
        }
        self.seen = self.seen.max(now);
    }

    fn arrived(&mut self, rank: Rank, host: String, now: Duration) -> Decision {
        if self.stage != Stage::Gathering || self.members[rank.index()].standing != Standing::Awaited {
            return Decision::default();
        }
        let world = self.members.len();
        let peer = &mut self.members[rank.index()];
        (peer.standing, peer.heard) = (Standing::Present, now);
        let reason = format!("{rank} arrived from {host}");
        peer.host = host;
        match self.missing().len() {
            0 => {
                self.stage = Stage::Running;
                self.members.iter_mut().for_each(|member| member.heard = now);
                Decision::because(format!("{reason}; all {world} are there")).and(Action::Start)
            }
            missing => Decision::because(format!("{reason}; {} of {world} are there", world - missing)),
        }
    }

    fn beat(&mut self, rank: Rank, position: Position, waiting: Waiting, now: Duration) -> Decision {
        let member = &mut self.members[rank.index()];
        if !member.standing.is_heard() {
            return Decision::default();
        }
        if waiting.peer.is_some() || !waiting.lately_ms.is_empty() {
            member.waited = now;
        }
        (member.heard, member.position, member.waiting) = (now, position, waiting);
        // Nobody waits for one that only gets ready.
        if self.me.index() > 0 || self.stage != Stage::Running || member.standing != Standing::Present {
            return Decision::default();
        }
        self.account.hear(&self.members, rank.index(), now);
        self.look_who_is_late(now)
    }

    fn lost(&mut self, rank: Rank, why: String) -> Decision {
        let peer = &mut self.members[rank.index()];
        if !peer.standing.is_heard() {
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

    fn failed(&mut self, rank: Rank, (why, in_vain): (String, bool), suspect: Option<Rank>, now: Duration) -> Decision {
        if !self.members[rank.index()].standing.is_heard() && rank != self.me {
            return Decision::default();
        }
        let hub = self.me.index() == 0;
        let verdict = self.verdict(rank, Cause::Failed { why: why.clone(), in_vain });
        match suspect.filter(|suspect| *suspect != rank && suspect.index() < self.members.len()) {
            None if hub => self.decide(verdict),
            suspect => {
                // The hub decides; a rank without one, if rank 0 is gone as well, decides when that shows.
                let wait = if hub { BLAME } else { self.limits.silent + BLAME };
                let reason = match suspect {
                    Some(suspect) => format!("{rank} complains of {suspect}: {why}"),
                    None => format!("{rank} fails: {why}"),
                };
                self.held.get_or_insert((verdict, now + wait));
                let decision = Decision::because(reason);
                if hub { decision } else { decision.and(Action::Complain { why, suspect, in_vain }) }
            }
        }
    }

    fn goodbye(&mut self, rank: Rank) -> Decision {
        let hub = self.me.index() == 0;
        self.members[rank.index()].standing = Standing::Left;
        let all = self.members.iter().all(|member| member.standing.has_left());
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
            return self.decide(verdict);
        }
        let watched = if self.me.index() == 0 { 1..self.members.len() } else { 0..1 };
        for rank in watched.map(Rank::at) {
            let decision = self.listen(rank, now);
            if decision != Decision::default() {
                return decision;
            }
        }
        if self.me.index() == 0 { self.look_who_is_late(now) } else { Decision::default() }
    }

    /// Stalled by silence.
    fn listen(&mut self, rank: Rank, now: Duration) -> Decision {
        let member = &self.members[rank.index()];
        let silence = now.saturating_sub(member.heard);
        if !member.standing.is_heard() || silence < self.limits.silent {
            return Decision::default();
        }
        self.blame(rank, Cause::Silent { silent_ms: milliseconds(silence) })
    }

    fn look_who_is_late(&mut self, now: Duration) -> Decision {
        let Some(finding) = self.account.look(&self.members, now) else { return Decision::default() };
        let (Finding::Late { rank, .. } | Finding::CaughtUp { rank, .. }) = finding;
        let Member { host, position, heard, .. } = &self.members[rank];
        let (host, position) = (host.clone(), *position);
        match finding {
            Finding::Late { message, waited, lately, .. } => {
                let unheard = now.saturating_sub(*heard);
                let window = lately.then(|| self.account.window());
                let ends_after = (unheard >= self.account.unheard()).then_some(self.limits.silent);
                let rank = Rank::at(rank);
                let late = Late { rank, host, position, message, waited, window, unheard, ends_after };
                Decision::because(late.to_string()).and(Action::Late(late))
            }
            Finding::CaughtUp { waited, .. } => {
                let caught_up = CaughtUp { rank: Rank::at(rank), host, position, waited };
                Decision::because(caught_up.to_string()).and(Action::CaughtUp(caught_up))
            }
        }
    }

    fn verdict(&self, rank: Rank, cause: Cause) -> Verdict {
        let peer = &self.members[rank.index()];
        Verdict { rank: rank.index(), host: peer.host.clone(), position: peer.position, cause }
    }

    fn blame(&mut self, rank: Rank, cause: Cause) -> Decision {
        self.decide(self.verdict(rank, cause))
    }

    /// Everybody ends, unless the others can do without the culprit.
    fn decide(&mut self, verdict: Verdict) -> Decision {
        let spared = self.stage == Stage::Running && self.spare.contains(&verdict.rank);
        if spared { self.go_on(verdict) } else { self.end(verdict) }
    }

    fn go_on(&mut self, verdict: Verdict) -> Decision {
        let member = &mut self.members[verdict.rank];
        if matches!(member.standing, Standing::Left | Standing::Lost) {
            return Decision::default();
        }
        member.standing = Standing::Lost;
        // Whoever blamed it was right, and whom it blamed is not to blame.
        self.held = self.held.take().filter(|(held, _)| held.rank != verdict.rank);
        Decision::because(format!("{verdict}; the others go on without it")).and(Action::GoOn(verdict))
    }

    /// A rank that was lost is here again. It is watched from now on, and nobody waits for it.
    fn returned(&mut self, rank: Rank, host: String, now: Duration) -> Decision {
        if self.stage != Stage::Running || self.may_return(rank).is_err() {
            return Decision::default();
        }
        let member = &mut self.members[rank.index()];
        (member.standing, member.heard, member.waited) = (Standing::Returning, now, now);
        (member.position, member.waiting) = (Position::default(), Waiting::default());
        member.life += 1;
        let (life, reason) = (member.life, format!("{rank} has come back, from {host}, and gets ready"));
        member.host = host;
        Decision::because(reason).and(Action::LetReturn(rank, life))
    }

    fn readmitted(&mut self, rank: Rank, now: Duration) -> Decision {
        let member = &mut self.members[rank.index()];
        if member.standing != Standing::Returning {
            return Decision::default();
        }
        (member.standing, member.heard, member.waited) = (Standing::Present, now, now);
        Decision::because(format!("{rank} on {} takes part again", member.host)).and(Action::Readmit(rank))
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

#[cfg(test)]
#[path = "membership/return_tests.rs"]
mod return_tests;
