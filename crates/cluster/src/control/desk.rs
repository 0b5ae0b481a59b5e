//! The thread that tends the control connections: it waits for bytes, turns them into events for the membership, and does
//! what the membership decides. It never blocks on a peer.

use std::io::Read;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use paceline_comm::wire::Identity;
use paceline_comm::{Rank, RunId, Stop};
use paceline_system::clock::Clock;
use paceline_system::progress::Progress;
use paceline_system::ready::{self, Interest};

mod returns;

use super::{Command, Shared};
use crate::connection::Connection;
use crate::ledger::{Claim, Given, Groups, Ledger, Take, Told};
use crate::membership::{Action, CaughtUp, Event, Late, Limits, Membership, Verdict};
use crate::message::{Folder, Message};
use crate::notice::{Log, Refusals};
use crate::rendezvous::{JoinOptions, door::Door};
use crate::table::{Entry, Table};
use crate::waiting::{LOOK, Lookout, Peer};

/// Messages of one peer that are handled before the others have their turn.
const TURN_MAX: usize = 64;

/// How long a rank that greeted may take to say where it is.
const JOIN_MAX: Duration = Duration::from_secs(5);

/// How long the end of a run waits for the others to read why.
const FAREWELL_MAX: Duration = Duration::from_millis(500);

pub(super) struct Desk {
    me: Rank,
    world: usize,
    run: RunId,
    config: String,
    identity: Identity,
    limits: Limits,
    clock: Clock,
    membership: Membership,
    /// By rank.
    connections: Vec<Option<Connection>>,
    entries: Vec<Option<Entry>>,
    /// Those from whom something has come since they were last heard.
    talking: Vec<Rank>,
    /// Ranks that greeted and have not said where they are, with the time by which they must.
    joining: Vec<(Rank, Connection, Duration)>,
    door: Option<Door>,
    woken: UnixStream,
    commands: Receiver<Command>,
    shared: Arc<Shared>,
    progress: Progress,
    lookout: Lookout,
    stop: Stop,
    log: Log,
    refusals: Refusals,
    beat_next: Duration,
    /// Rank 0: who has taken which portion of the data.
    ledger: Ledger,
    groups: Groups,
    /// Rank 0: whether the door stays open when all are there, and whether whoever comes then may be let in.
    keeps_door: bool,
    return_is: Result<(), String>,
    /// Where the run is kept, for those who come later.
    folder: Option<Folder>,
}

impl Desk {
    fn new(
        options: &JoinOptions,
        membership: Membership,
        woken: UnixStream,
        shared: Arc<Shared>,
        commands: Receiver<Command>,
    ) -> Self {
        let world = options.member.world;
        Self {
            me: options.member.rank,
            world,
            run: options.run,
            config: options.config.clone(),
            identity: options.identity(),
            limits: options.limits,
            clock: Clock::real(),
            membership,
            connections: (0..world).map(|_| None).collect(),
            entries: vec![None; world],
            talking: Vec::new(),
            joining: Vec::new(),
            door: None,
            woken,
            commands,
            shared,
            progress: Progress::default(),
            lookout: Lookout::default(),
            stop: options.stop.clone(),
            log: options.log.clone(),
            refusals: Refusals::default(),
            beat_next: Duration::ZERO,
            ledger: Ledger::new(world, (options.member.workers() / options.group.max(1)) as u64),
            groups: Groups::new(world, options.group),
            keeps_door: options.keeps_door,
            return_is: Err("the run has not begun its first step yet; start this rank again in a moment".into()),
            folder: None,
        }
    }

    pub(super) fn hub(
        options: &JoinOptions,
        door: Door,
        data: Option<SocketAddr>,
        woken: UnixStream,
        shared: Arc<Shared>,
        commands: Receiver<Command>,
    ) -> Self {
        let mut entry = options.entry(data);
        if let Some(address) = door.address() {
            entry.seen_from(address);
        }
        let membership = Membership::hub(options.member.world, &entry.host, options.limits, Duration::ZERO);
        let mut desk = Self::new(options, membership, woken, shared, commands);
        desk.entries[0] = Some(entry);
        desk.door = Some(door);
        desk
    }

    pub(super) fn spoke(
        options: &JoinOptions,
        connection: Connection,
        table: &Table,
        woken: UnixStream,
        shared: Arc<Shared>,
        commands: Receiver<Command>,
    ) -> Self {
        let hosts = table.entries().iter().map(|entry| entry.host.clone()).collect();
        let membership = Membership::spoke(options.member.rank, hosts, options.limits, Duration::ZERO);
        let mut desk = Self::new(options, membership, woken, shared, commands);
        desk.connections[0] = Some(connection);
        desk
    }

    pub(super) fn progress(&self) -> Progress {
        self.progress.clone()
    }

    /// Until the run is over.
    pub(super) fn run(&mut self) {
        if self.world == 1 {
            self.begin();
        }
        while !self.membership.ended() {
            self.sleep();
            self.greet();
            self.receive_joins();
            self.receive();
            self.obey();
            self.lookout.look(self.progress.position(), self.stop.awaited(), self.clock.now());
            self.beat();
            self.feed(Event::Tick);
            self.flush();
        }
    }

    /// Waits until something comes or a beat is due. Notes who has said something, so that a turn costs as much as was
    /// said, not as much as there are ranks.
    fn sleep(&mut self) {
        let until_beat = self.beat_next.saturating_sub(self.clock.now());
        let present = |(rank, connection): (usize, &Option<Connection>)| connection.as_ref().map(|_| Rank::at(rank));
        let ranks: Vec<Rank> = self.connections.iter().enumerate().filter_map(present).collect();
        let mut interests: Vec<Interest> = self.connections.iter().flatten().map(Connection::interest).collect();
        interests.push(Interest { fd: self.woken.as_fd(), write: false });
        interests.extend(self.door.iter().flat_map(Door::interests));
        interests.extend(self.joining.iter().map(|(_, connection, _)| connection.interest()));
        let ready = ready::wait(&interests, until_beat.min(LOOK));
        self.talking = ranks.into_iter().zip(ready).filter_map(|(rank, ready)| ready.then_some(rank)).collect();
        let mut bytes = [0; 64];
        while self.woken.read(&mut bytes).is_ok_and(|count| count == bytes.len()) {}
    }

    fn refuse(&mut self, text: &str) {
        self.refusals.say(&self.log, self.clock.now(), text);
    }

    /// Lets in whoever knocks, and takes those who hold the token.
    fn greet(&mut self) {
        let Some(door) = &mut self.door else { return };
        // Whoever comes later is told why it is not let in, by a sentence.
        let present = |rank: &Rank| !self.membership.is_running() && self.membership.is_present(*rank);
        let taken = (0..self.world).map(Rank::at).filter(present).collect();
        let mut troubles = door.open(&Identity { taken, ..self.identity.clone() });
        let mut arrived = Vec::new();
        for greeted in door.greeted() {
            match greeted {
                Ok((stream, rank)) => match Connection::new(stream, Message::limit_at_hub()) {
                    Ok(connection) => arrived.push((rank, connection, self.clock.now() + JOIN_MAX)),
                    Err(error) => troubles.push(format!("{rank} was lost at once: {error}")),
                },
                Err(error) => troubles.push(error.to_string()),
            }
        }
        self.joining.extend(arrived);
        troubles.iter().for_each(|trouble| self.refuse(trouble));
    }

    /// Ranks that greeted say where they are and what they are going to do.
    fn receive_joins(&mut self) {
        let now = self.clock.now();
        for (rank, mut connection, until) in std::mem::take(&mut self.joining) {
            match connection.pull(self.world) {
                Ok(None) if now < until => self.joining.push((rank, connection, until)),
                Ok(None) => self.refuse(&format!("{rank} greeted and then said nothing for {JOIN_MAX:?}")),
                Ok(Some(Message::Join { entry, config, run })) if RunId::from_hex(&run) == Some(self.run) => {
                    self.join(rank, connection, entry, &config);
                }
                Ok(Some(Message::Join { run, .. })) => {
                    let why = format!("{rank} has come to the run {run}, and this is {}", self.run);
                    let _ = connection.push(&Message::Refused { why: why.clone() }, now);
                    self.refuse(&why);
                }
                Ok(Some(_)) => self.refuse(&format!("{rank} did not say where it is")),
                Err(why) => self.refuse(&format!("{rank} left while joining: {why}")),
            }
        }
    }

    fn join(&mut self, rank: Rank, mut connection: Connection, mut entry: Entry, config: &str) {
        let now = self.clock.now();
        if self.membership.is_running() {
            return self.take_back(rank, connection, entry, config);
        }
        if self.membership.is_present(rank) || self.door.is_none() {
            let why = format!("{rank} is here already; give every process its own rank");
            let _ = connection.push(&Message::Refused { why: why.clone() }, now);
            return self.refuse(&why);
        }
        if let Some(why) = difference(&self.config, config, rank, &entry.host) {
            let _ = connection.push(&Message::Refused { why: why.clone() }, now);
            self.log.warn(&why);
            self.shared.change(|state| state.refused = Some(why.clone()));
            return self.feed(Event::Failed { rank: self.me, why, suspect: None, in_vain: true });
        }
        if let Ok(address) = connection.stream().peer_addr() {
            entry.seen_from(address.ip());
        }
        let host = entry.host.clone();
        self.connections[rank.index()] = Some(connection);
        self.entries[rank.index()] = Some(entry);
        self.feed(Event::Arrived { rank, host });
    }

    /// What the members say.
    fn receive(&mut self) {
        for rank in std::mem::take(&mut self.talking) {
            for _ in 0..TURN_MAX {
                let Some(connection) = &mut self.connections[rank.index()] else { break };
                match connection.pull(self.world) {
                    Ok(Some(message)) => self.handle(rank, message),
                    Ok(None) => break,
                    Err(why) => self.lose(rank, why),
                }
            }
        }
    }

    fn handle(&mut self, rank: Rank, message: Message) {
        match message {
            Message::Beat { position, waiting } => {
                self.feed(Event::Beat { rank, position, waiting });
                self.shared.change(|state| {
                    state.positions.insert(rank, position);
                });
            }
            Message::Goodbye => self.feed(Event::Goodbye { rank }),
            Message::Failed { why, suspect, in_vain } => {
                self.feed(Event::Failed { rank, why, suspect: suspect.map(Rank), in_vain });
            }
            Message::Ended { verdict } => self.feed(Event::Told(verdict)),
            Message::Folder(folder) if rank.index() == 0 => {
                self.shared.change(|state| state.folder = Some(folder));
            }
            Message::Lost { verdict } if rank.index() == 0 => self.feed(Event::Missed(verdict)),
            Message::Returned { rank: back, host, life } if rank.index() == 0 => {
                self.feed(Event::Returned { rank: Rank(back), host });
                self.stop.let_return(Rank(back), life);
            }
            Message::Ready if self.me.index() == 0 => self.hear_ready(rank),
            Message::Admitted(admission) if rank.index() == 0 => {
                self.shared.change(|state| state.admission = Some(admission));
            }
            Message::Take(take) if self.me.index() == 0 && !self.ledger.is_sound(take) => {
                self.lose(rank, "it asks for data that nobody else is at; start all ranks with the same data".into());
            }
            Message::Take(take) if self.me.index() == 0 => {
                let told = self.groups.take(&mut self.ledger, rank.index(), take);
                self.tell(told);
            }
            Message::Claim(claim) if self.me.index() == 0 => self.hear_claim(rank, claim),
            Message::Close { stretch } if self.me.index() == 0 => {
                let told = self.ledger.close(stretch);
                self.tell(told);
            }
            Message::Given(given) if rank.index() == 0 => self.give(given),
            Message::Counted(counted) if rank.index() == 0 => {
                self.shared.change(|state| state.counted = Some(counted));
            }
            Message::Join { .. }
            | Message::Table { .. }
            | Message::Refused { .. }
            | Message::Folder(_)
            | Message::Lost { .. }
            | Message::Returned { .. }
            | Message::Ready
            | Message::Admitted(_)
            | Message::Take(_)
            | Message::Close { .. }
            | Message::Claim(_)
            | Message::Counted(_)
            | Message::Given(_) => {
                self.lose(rank, "it said what nobody says at this point".into());
            }
        }
    }

    /// This process is given a portion, or hears that there is none.
    fn give(&self, given: Given) {
        self.shared.change(|state| state.given = Some(given));
    }

    /// This process asks for a portion.
    fn take(&mut self, take: Take) {
        if self.me.index() > 0 {
            return self.send_all(&Message::Take(take), |_, _| true);
        }
        let told = self.groups.take(&mut self.ledger, 0, take);
        self.tell(told);
    }

    /// What ranks are told that have asked for portions.
    fn tell(&mut self, told: Told) {
        for (rank, given) in told {
            match rank {
                0 => self.give(given),
                _ => self.send_all(&Message::Given(given), |_, peer| peer.index() == rank),
            }
        }
    }

    /// A rank has computed a portion.
    fn hear_claim(&mut self, rank: Rank, claim: Claim) {
        let (counted, told) = self.ledger.claim(rank.index(), claim);
        match counted {
            Some(counted) if rank == self.me => self.shared.change(|state| state.counted = Some(counted)),
            Some(counted) => self.send_all(&Message::Counted(counted), |_, peer| peer == rank),
            None => self.lose(rank, "it has computed data that it was not given".into()),
        }
        self.tell(told);
    }

    /// This process has computed a portion.
    fn claim(&mut self, claim: Claim) {
        match self.me.index() {
            0 => self.hear_claim(self.me, claim),
            _ => self.send_all(&Message::Claim(claim), |_, _| true),
        }
    }

    fn lose(&mut self, rank: Rank, why: String) {
        self.connections[rank.index()] = None;
        self.feed(Event::Lost { rank, why });
    }

    /// What the training loop of this process says.
    fn obey(&mut self) {
        while let Ok(command) = self.commands.try_recv() {
            match command {
                Command::Goodbye => {
                    self.send_all(&Message::Goodbye, |me, _| me.index() > 0);
                    self.feed(Event::Goodbye { rank: self.me });
                }
                Command::Expect(longest) => self.membership.expect_waits(longest),
                Command::Spare(ranks, return_is) => {
                    self.membership.spare(ranks);
                    self.return_is = return_is;
                }
                Command::Ready => self.send_all(&Message::Ready, |_, _| true),
                Command::Admit { rank, life, admission } => self.admit((rank, life), admission),
                Command::Take(take) => self.take(take),
                Command::Claim(claim) => self.claim(claim),
                Command::Close(stretch) if self.me.index() == 0 => {
                    let told = self.ledger.close(stretch);
                    self.tell(told);
                }
                Command::Close(stretch) => self.send_all(&Message::Close { stretch }, |_, _| true),
                Command::Folder(folder) => {
                    self.send_all(&Message::Folder(folder.clone()), |_, _| true);
                    self.folder = Some(folder);
                }
                Command::Fail { why, suspect, in_vain } => {
                    self.feed(Event::Failed { rank: self.me, why, suspect, in_vain });
                }
            }
        }
    }

    fn beat(&mut self) {
        let now = self.clock.now();
        if now < self.beat_next || self.membership.ended() {
            return;
        }
        self.beat_next = now + self.limits.beat;
        let (position, waiting) = (self.progress.position(), self.lookout.take());
        if !waiting.lately_ms.is_empty() {
            self.shared.change(|state| {
                for (peer, waited_ms) in &waiting.lately_ms {
                    if let Peer::Rank(rank) = peer {
                        *state.waited.entry(*rank).or_default() += Duration::from_millis(*waited_ms);
                    }
                }
            });
        }
        self.feed(Event::Beat { rank: self.me, position, waiting: waiting.clone() });
        self.send_all(&Message::Beat { position, waiting }, |_, _| true);
    }

    fn send_all(&mut self, message: &Message, to: impl Fn(Rank, Rank) -> bool) {
        let (me, now) = (self.me, self.clock.now());
        for rank in (0..self.world).map(Rank::at).filter(|rank| to(me, *rank)) {
            let Some(connection) = &mut self.connections[rank.index()] else { continue };
            if let Err(why) = connection.push(message, now) {
                self.lose(rank, why);
            }
        }
    }

    fn flush(&mut self) {
        let now = self.clock.now();
        for rank in (0..self.world).map(Rank::at) {
            let Some(connection) = &mut self.connections[rank.index()] else { continue };
            let sent = connection.flush(now);
            let stuck = connection.stuck_for(now);
            match sent {
                Err(why) => self.lose(rank, why),
                Ok(()) if stuck > self.limits.silent => {
                    self.lose(rank, format!("it has read nothing for {:.1} s", stuck.as_secs_f64()));
                }
                Ok(()) => {}
            }
        }
    }

    fn feed(&mut self, event: Event) {
        let decision = self.membership.on(event, self.clock.now());
        let told = decision.actions.iter().find_map(told);
        let is_told_below = |action: &Action| matches!(action, Action::GoOn(_) | Action::Readmit(_));
        let is_told_below = decision.actions.iter().any(is_told_below);
        match (told, decision.reason) {
            _ if is_told_below && self.me.index() == 0 => {}
            (Some(event), reason) => self.log.tell(reason, event),
            (None, reason) if !reason.is_empty() => self.log.say(reason),
            _ => {}
        }
        for action in decision.actions {
            match action {
                Action::Start => self.begin(),
                Action::Late(_) | Action::CaughtUp(_) => {}
                Action::Complain { why, suspect, in_vain } => {
                    let suspect = suspect.map(|rank| rank.0);
                    self.send_all(&Message::Failed { why, suspect, in_vain }, |_, _| true);
                }
                Action::End(verdict) => self.end(verdict),
                Action::GoOn(verdict) => self.go_on(verdict),
                Action::LetReturn(rank, life) => self.let_return(rank, life),
                // Told where it is said to the rank as well.
                Action::Readmit(_) => {}
                Action::Finish => {
                    let last = Message::Goodbye;
                    self.farewell(|me| (me.index() == 0).then_some(last), false);
                    self.shared.change(|state| state.ended = Some(Ok(())));
                }
            }
        }
    }

    /// All are there: everybody gets the table, and the door closes.
    fn begin(&mut self) {
        self.door = self.door.take().filter(|_| self.keeps_door);
        self.joining.clear();
        let entries: Vec<Entry> = self.entries.iter().flatten().cloned().collect();
        assert_eq!(entries.len(), self.world, "a run starts when everybody has arrived");
        let (run, table) = (self.run.to_string(), entries.clone());
        self.send_all(&Message::Table { entries: table, run, life: 0 }, |_, _| true);
        self.shared.change(|state| state.table = Some(Table::new(entries)));
    }

    fn end(&mut self, verdict: Verdict) {
        // The stop comes first: every wait of this process ends now.
        self.stop.set(verdict.to_string());
        self.shared.change(|state| state.ended = Some(Err(verdict.clone())));
        self.door = None;
        let kept = self.farewell(|_| Some(Message::Ended { verdict }), true);
        self.shared.change(|state| state.kept = Some(kept));
    }

    /// Tells everybody the last thing, and gives them a moment to read it. The connections close after it, or are handed out where one of
    /// them shows the others when rank 0 has ended ([`super::Control::outlast_rank_0`]): there rank 0 does not finish writing.
    fn farewell(&mut self, last: impl FnOnce(Rank) -> Option<Message>, stays: bool) -> Vec<Connection> {
        let (last, hub) = (last(self.me), self.me.index() == 0);
        let until = self.clock.now() + FAREWELL_MAX;
        let mut leaving: Vec<Connection> = self.connections.iter_mut().filter_map(Option::take).collect();
        leaving.retain_mut(|connection| {
            let sent = last.as_ref().map_or(Ok(()), |message| connection.push(message, until));
            sent.is_ok()
        });
        let mut closed = vec![false; leaving.len()];
        while self.clock.now() < until && closed.contains(&false) {
            for (connection, closed) in leaving.iter_mut().zip(&mut closed).filter(|(_, closed)| !**closed) {
                let sent = connection.flush(until);
                let written = !connection.interest().write;
                if written && !(stays && hub) {
                    connection.finish_writing();
                }
                *closed = sent.is_err() || (written && stays && !hub) || connection.drained();
            }
            paceline_system::clock::sleep(Duration::from_millis(2));
        }
        leaving
    }
}

/// What of a decision belongs into the run's events.
fn told(action: &Action) -> Option<paceline_system::event::Event> {
    use paceline_system::event::Event;
    match action {
        Action::Late(Late { rank, host, position, message, waited, unheard, .. }) => Some(Event::Late {
            late_rank: rank.0,
            host: host.clone(),
            phase: position.phase,
            step: position.step,
            message: message.map(|message| message.to_string()),
            waited_s: waited.as_secs_f64(),
            unheard_s: unheard.as_secs_f64(),
        }),
        Action::CaughtUp(CaughtUp { rank, host, position, waited }) => Some(Event::CaughtUp {
            late_rank: rank.0,
            host: host.clone(),
            step: position.step,
            waited_s: waited.as_secs_f64(),
        }),
        _ => None,
    }
}

/// The first line in which two configurations differ, as a sentence that names both ranks.
fn difference(ours: &str, theirs: &str, rank: Rank, host: &str) -> Option<String> {
    if ours == theirs {
        return None;
    }
    let (mut left, mut right) = (ours.lines(), theirs.lines());
    let (mine, other) = loop {
        match (left.next(), right.next()) {
            (Some(mine), Some(other)) if mine == other => {}
            (mine, other) => break (mine.unwrap_or("nothing"), other.unwrap_or("nothing")),
        }
    };
    let show = |line: &str| crate::message::printable(line.trim()).chars().take(200).collect::<String>();
    Some(format!(
        "the configurations differ: rank 0 has `{}` and {rank} on {host} has `{}`; start all with the same",
        show(mine),
        show(other)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_that_differs_is_shown_for_both() {
        assert_eq!(difference("a = 1\nb = 2", "a = 1\nb = 2", Rank(1), "x"), None);
        let text = difference("a = 1\nb = 2\nc = 3", "a = 1\nb = 4", Rank(1), "x").unwrap();
        assert!(text.contains("rank 0 has `b = 2` and rank 1 on x has `b = 4`"), "{text}");
        assert!(difference("a", "a\nb", Rank(1), "x").unwrap().contains("rank 0 has `nothing`"));
    }
}
