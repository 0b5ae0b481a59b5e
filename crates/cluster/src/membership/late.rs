//! Who is late: a pure account of who waited for whom, from what heartbeats say. Rank 0 keeps it.
//!
//! Waiting is followed from rank to rank to one that does not wait itself: it computes, reads data, or is not heard. In a
//! cycle, that is the one that has not been heard for longest (a process that was stopped may have been looked at in a
//! short wait), else the one with the fewest steps, else nobody: a slow link is nobody's fault.
//!
//! A rank is late when somebody has waited for it for [`Limits::late`] in one exchange; or for more than half of the last
//! five times that, less what it waited for others itself. Ranks that share too few cores wait for each other in turn,
//! and are not late by that. Whoever does what others cannot do beside it, saving or starting, is given ten times as
//! long.
//!
//! [`Limits::late`]: super::Limits

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use paceline_system::phase::Phase;
use paceline_system::progress::Message;

use super::{Member, Standing};
use crate::waiting::Peer;

/// The account looks back over so many times the limit.
const WINDOW: u32 = 5;

/// How many times the limit is given to a rank that saves or starts.
const PATIENCE: u32 = 10;

/// A rank is told of again after so many times the limit, and after twice as long each time.
const PAUSE: u32 = 10;
const PAUSE_DOUBLINGS_MAX: u32 = 6;

/// The most that a heartbeat is believed to tell of.
const LATELY_MAX: Duration = Duration::from_secs(10);

/// Time that was waited, as far as it is not too long ago.
#[derive(Clone, Debug, Default)]
struct Recent {
    waits: VecDeque<(Duration, Duration)>,
    sum: Duration,
}

impl Recent {
    fn add(&mut self, now: Duration, waited: Duration) {
        self.waits.push_back((now, waited));
        self.sum += waited;
    }

    fn forget(&mut self, before: Duration) {
        while let Some(&(at, waited)) = self.waits.front()
            && at < before
        {
            self.waits.pop_front();
            self.sum -= waited;
        }
    }
}

/// What was said of a rank.
#[derive(Clone, Debug, Default)]
struct Record {
    late: bool,
    said: bool,
    /// For how long each has waited for it since it is late.
    waited: BTreeMap<usize, Duration>,
    /// What it was named with.
    at_least: Duration,
    times: u32,
    /// Before this it is not told of again.
    quiet_until: Duration,
}

/// What the account has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finding {
    /// A rank is late.
    Late { rank: usize, message: Option<Message>, waited: Duration, lately: bool },
    /// It is not any more; so long was it waited for meanwhile.
    CaughtUp { rank: usize, waited: Duration },
}

/// The longest wait for a rank.
#[derive(Clone, Copy, Debug)]
struct Longest {
    waited: Duration,
    message: Option<Message>,
}

/// The account.
#[derive(Clone, Debug)]
pub(super) struct Account {
    limit: Duration,
    /// After so long a rank counts as not heard.
    unheard: Duration,
    beat: Duration,
    /// By who waited and for whom.
    waits: BTreeMap<(usize, usize), Recent>,
    /// What each has waited for anybody.
    own: Vec<Recent>,
    records: Vec<Record>,
    next_look: Duration,
    /// Whether waits that add up count, and not only single ones.
    adds_up: bool,
}

impl Account {
    /// From now on a rank is late only when somebody has waited longer than this in one exchange: many short waits are as they should be.
    pub fn expect_waits(&mut self, longest: Duration) {
        (self.limit, self.adds_up) = (self.limit.max(longest), false);
    }

    pub fn new(world: usize, limit: Duration, beat: Duration) -> Self {
        let (own, records) = (vec![Recent::default(); world], vec![Record::default(); world]);
        let unheard = 2 * beat;
        Self { limit, unheard, beat, waits: BTreeMap::new(), own, records, next_look: Duration::ZERO, adds_up: true }
    }

    /// The time over which waits are added up.
    pub fn window(&self) -> Duration {
        self.limit * WINDOW
    }

    /// After so long a silence a rank counts as standing still.
    pub const fn unheard(&self) -> Duration {
        self.unheard
    }

    /// Takes in what a rank has waited since its heartbeat before.
    pub fn hear(&mut self, members: &[Member], waiter: usize, now: Duration) {
        for &(peer, waited_ms) in &members[waiter].waiting.lately_ms {
            if peer == Peer::Anyone {
                continue;
            }
            let waited = Duration::from_millis(waited_ms).min(LATELY_MAX);
            self.own[waiter].add(now, waited);
            let found = self.follow(members, peer, now).map(|(rank, _)| rank);
            if let Some(rank) = found.filter(|&rank| rank != waiter && !is_excused(&members[rank], &members[waiter])) {
                self.waits.entry((waiter, rank)).or_default().add(now, waited);
                if self.records[rank].late {
                    *self.records[rank].waited.entry(waiter).or_default() += waited;
                }
            }
        }
    }

    /// What is to be said now.
    pub fn look(&mut self, members: &[Member], now: Duration) -> Option<Finding> {
        if now < self.next_look {
            return None;
        }
        self.next_look = now + self.beat / 2;
        let before = now.saturating_sub(self.window());
        self.own.iter_mut().for_each(|recent| recent.forget(before));
        self.waits.retain(|_, recent| {
            recent.forget(before);
            !recent.waits.is_empty()
        });
        let longest = self.in_one_exchange(members, now);
        (0..members.len()).find_map(|rank| self.judge(rank, &members[rank], longest.get(&rank), now))
    }

    /// By the rank that is waited for: the longest wait of somebody in one exchange.
    fn in_one_exchange(&self, members: &[Member], now: Duration) -> BTreeMap<usize, Longest> {
        let mut found: BTreeMap<usize, Longest> = BTreeMap::new();
        for waiter in 0..members.len() {
            let Some(peer) = self.peer_of(members, waiter, now) else { continue };
            let waited = Duration::from_millis(members[waiter].waiting.for_ms);
            // Whoever is waited for through others is so since the last of them waits.
            let Some((rank, between)) = self.follow(members, peer, now).filter(|(rank, _)| *rank != waiter) else {
                continue;
            };
            let waited = waited.min(between);
            let patience = if is_excused(&members[rank], &members[waiter]) { PATIENCE } else { 1 };
            if waited < self.limit * patience {
                continue;
            }
            let longest = Longest { waited, message: members[waiter].position.message };
            let known = found.entry(rank).or_insert(longest);
            if known.waited < waited {
                *known = longest;
            }
        }
        found
    }

    fn judge(&mut self, rank: usize, member: &Member, longest: Option<&Longest>, now: Duration) -> Option<Finding> {
        let window = self.window();
        let for_it = self.waits.iter().filter(|((_, waited_for), _)| *waited_for == rank);
        let lately = for_it.map(|(_, recent)| recent.sum).max().unwrap_or_default().saturating_sub(self.own[rank].sum);
        let lately = if self.adds_up { lately } else { Duration::ZERO };
        let present = member.standing == Standing::Present;
        let record = &mut self.records[rank];
        if !record.late && present && (longest.is_some() || lately > window / 2) {
            *record = Record { late: true, said: now >= record.quiet_until, waited: BTreeMap::new(), ..record.clone() };
            let waits = self.waits.iter().filter(|((_, waited_for), _)| *waited_for == rank);
            record.waited.extend(waits.map(|((waiter, _), recent)| (*waiter, recent.sum)));
            let (message, waited) = longest.map_or((None, lately), |longest| (longest.message, longest.waited));
            record.at_least = waited;
            let finding = Finding::Late { rank, message, waited, lately: longest.is_none() };
            return record.said.then_some(finding);
        }
        // One that was late again too soon to be named again, and still is.
        let unsaid = record.late && !record.said && present && now >= record.quiet_until;
        if unsaid && (longest.is_some() || lately > window / 2) {
            record.said = true;
            let (message, waited) = longest.map_or((None, lately), |longest| (longest.message, longest.waited));
            return Some(Finding::Late { rank, message, waited, lately: longest.is_none() });
        }
        // Half of the way back is not the same as never having been late: it stays so until it is hardly waited for.
        if record.late && longest.is_none() && lately < window / 5 {
            record.late = false;
            if std::mem::take(&mut record.said) {
                let pause = self.limit * PAUSE * 2u32.pow(record.times.min(PAUSE_DOUBLINGS_MAX));
                (record.times, record.quiet_until) = (record.times + 1, now + pause);
                let waited = record.waited.values().copied().max().unwrap_or_default().max(record.at_least);
                return present.then_some(Finding::CaughtUp { rank, waited });
            }
        }
        None
    }

    /// Whom a rank waits for, as far as it is heard.
    fn peer_of(&self, members: &[Member], rank: usize, now: Duration) -> Option<Peer> {
        let member = &members[rank];
        let heard = member.standing == Standing::Present && now.saturating_sub(member.heard) < self.unheard;
        member.waiting.peer.filter(|_| heard)
    }

    /// The rank that holds up whoever waits for `peer`, and for how long all those in between have waited.
    fn follow(&self, members: &[Member], peer: Peer, now: Duration) -> Option<(usize, Duration)> {
        let (mut peer, mut between) = (peer, Duration::MAX);
        for _ in 0..=members.len() {
            let rank = match peer {
                Peer::Anyone => return None,
                Peer::All => {
                    let rank = self.missing(members, now)?;
                    return Some((rank, between.min(now.saturating_sub(members[rank].waited))));
                }
                Peer::Rank(rank) => rank as usize,
            };
            match self.peer_of(members, rank, now) {
                Some(next) => {
                    between = between.min(Duration::from_millis(members[rank].waiting.for_ms));
                    peer = next;
                }
                // It has not done for longer what others wait for than it has not waited itself: what they said may be older
                // than what it says.
                None if members[rank].standing == Standing::Present => {
                    return Some((rank, between.min(now.saturating_sub(members[rank].waited))));
                }
                None => return None,
            }
        }
        // More steps than there are ranks: they go round in a cycle.
        let Peer::Rank(first) = peer else { return None };
        let mut cycle = vec![first as usize];
        while let Some(Peer::Rank(next)) = self.peer_of(members, cycle[cycle.len() - 1], now) {
            if next == first {
                break;
            }
            cycle.push(next as usize);
        }
        // What a stopped process said of its own wait is no measure.
        self.of_cycle(members, &cycle, now).map(|rank| (rank, Duration::MAX))
    }

    fn of_cycle(&self, members: &[Member], cycle: &[usize], now: Duration) -> Option<usize> {
        let silence = |rank: &usize| now.saturating_sub(members[*rank].heard);
        let quietest = cycle.iter().copied().max_by_key(silence)?;
        if silence(&quietest) > self.beat + self.beat / 2 {
            return Some(quietest);
        }
        only_least(cycle.iter().copied(), |rank| members[rank].position.step)
    }

    /// Of those that do not wait, where all wait for all: one that is not heard, else the one that is least far.
    fn missing(&self, members: &[Member], now: Duration) -> Option<usize> {
        let busy =
            |rank: &usize| members[*rank].standing == Standing::Present && self.peer_of(members, *rank, now).is_none();
        let busy: Vec<usize> = (0..members.len()).filter(busy).collect();
        let silence = |rank: &usize| now.saturating_sub(members[*rank].heard);
        let quietest = busy.iter().copied().max_by_key(silence)?;
        if silence(&quietest) >= self.unheard {
            return Some(quietest);
        }
        only_least(busy.into_iter(), |rank| (members[rank].position.step, members[rank].position.phase))
    }
}

/// The one with the least of something, if there is only one.
fn only_least<T: Ord>(ranks: impl Iterator<Item = usize> + Clone, of: impl Fn(usize) -> T) -> Option<usize> {
    let least = ranks.clone().map(&of).min()?;
    let mut found = ranks.filter(|&rank| of(rank) == least);
    let first = found.next();
    if found.next().is_none() { first } else { None }
}

/// Whether a rank does what the one that waits for it cannot do beside it: it saves, or starts.
fn is_excused(member: &Member, waiter: &Member) -> bool {
    member.position.phase == Phase::Checkpoint || waiter.position.message == Some(Message::Opening)
}
