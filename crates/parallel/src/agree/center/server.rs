//! A server: has a part of the centre, and answers workers one after the other as they come, until all have said
//! goodbye.
//!
//! A worker that has begun something which all do together waits until every other that has not ended has begun the
//! same; who is gone is not waited for. Then they are served in the order of ranks, so that the outcome does not depend
//! on who came first. With a bound on staleness the first server does not hear a worker that is too far ahead, unless
//! somebody waits for it.

use paceline_comm::error::Party;
use paceline_comm::memory_box::{Lending, WHEREABOUTS};
use paceline_comm::transfer::{Action, Transfer};
use paceline_comm::{CommError, Communicator, Rank};
use paceline_system::memory;

use super::super::parameter_server::talk::Call;
use super::super::parameter_server::turns::{Event, Turns};
use super::super::parameter_server::versions::Versions;
use super::super::returned::{Returned, met_to_words};
use super::super::{Join, LostPeer, Opening, Protocol, RoundOptions, ServerShard, Shape, Votes};
use super::lent::Lent;
use super::link::PHASE;
use super::message::{Command, HEADER, Header, Layout, MEETS, TOLD, Told, transfer};
use super::{Held, Rule, ServerSide};

/// What a worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    /// Its next message says what follows.
    Idle,
    /// It has said what follows, and waits until all others have.
    Waits,
    Gone,
}

/// A server's part of a run.
pub(super) struct Server<'a> {
    communicator: Communicator,
    protocol: Protocol,
    shape: &'a Shape,
    layout: Layout,
    server: usize,
    rule: Box<dyn Rule>,
    rounds: RoundOptions,
    together: bool,
    held: Held,
    shard: &'a mut dyn ServerShard,
    turns: Turns,
    /// The centre is one bucket.
    versions: Versions,
    doing: Vec<Doing>,
    /// What each worker said last.
    headers: Vec<Header>,
    /// Counts exchanges with each worker, and those of all together.
    tags: Vec<u64>,
    meets: u64,
    /// What comes in, then what goes out, and what is said behind it.
    room: Vec<f32>,
    /// Wishes of all workers.
    votes: Votes,
    /// Running statistics of the first worker, for one that comes back: the first server has them.
    states: Vec<f32>,
    /// Where the centre lies, if workers change it themselves.
    lending: Option<Lending>,
    lent: Option<Lent>,
}

/// So many numbers of a model's size: a no unwinds to whoever started to serve, as an error.
fn zeros(length: usize) -> Vec<f32> {
    memory::zeros(length, "the weights of a server").unwrap_or_else(|refused| refused.unwind())
}

impl<'a> Server<'a> {
    pub fn new(join: Join<'a>, protocol: Protocol, side: ServerSide, shard: &'a mut dyn ServerShard) -> Self {
        let Join { communicator, roles, shape, options, lending, .. } = join;
        let ServerSide { rule, pieces, together, lends } = side;
        let (workers, server) = (roles.workers, communicator.rank().index() - roles.workers);
        let layout = Layout { roles, elements: shape.parameters, pieces };
        let length = layout.part(server).len();
        let kept = (0..protocol.buffers()).map(|_| zeros(length)).collect();
        Self {
            communicator,
            protocol,
            shape,
            layout,
            server,
            rule,
            rounds: options.rounds,
            together,
            held: Held { center: zeros(length), kept },
            shard,
            turns: Turns::new(workers, super::bound(&options).filter(|_| server == 0)),
            versions: Versions::new(workers, 1),
            doing: vec![Doing::Idle; workers],
            headers: vec![Header::new(Command::Goodbye); workers],
            tags: vec![0; workers],
            meets: MEETS,
            room: zeros(length + TOLD),
            votes: Votes::default(),
            states: if server == 0 { zeros(shape.states) } else { Vec::new() },
            lending: lending.filter(|_| lends),
            lent: None,
        }
    }

    /// Serves until every worker has ended.
    pub fn serve(mut self) -> Result<(), CommError> {
        self.open()?;
        while !self.turns.is_over() {
            self.miss_those_who_wait();
            let waited_for = self.doing.contains(&Doing::Waits);
            let heard =
                |worker: &usize| self.doing[*worker] == Doing::Idle && (waited_for || self.turns.may_step(*worker).0);
            let peers: Vec<Rank> = (0..self.doing.len()).filter(heard).map(Rank::at).collect();
            if peers.is_empty() {
                self.all_together()?;
                continue;
            }
            let heard = self.communicator.wait_any(&peers).and_then(|worker| self.hear(worker.index()));
            self.or_without(heard)?;
        }
        Ok(())
    }

    /// Goes on without a worker that is lost: what it had pushed stays. Whether nobody was.
    fn or_without(&mut self, served: Result<(), CommError>) -> Result<bool, CommError> {
        let Err(error) = served else { return Ok(true) };
        let goes_on = self.protocol.lost_peer == LostPeer::GoOn;
        let worker = self.missed(&error).filter(|_| goes_on).ok_or(error)?;
        self.miss(worker);
        Ok(false)
    }

    /// The worker whose loss an error tells of, in the numbers of the world: with groups, the first of one. Without the first
    /// of all nobody goes on.
    fn missed(&self, error: &CommError) -> Option<usize> {
        let lost = error.peer().filter(|_| matches!(error, CommError::PeerGone { .. }))?;
        (1..self.doing.len()).find(|&worker| self.communicator.world_rank(Rank::at(worker)) == lost)
    }

    fn miss(&mut self, worker: usize) {
        // Every list is with one worker alone, so nothing of the others is lost.
        self.communicator.go_on();
        self.doing[worker] = Doing::Gone;
        self.turns = self.turns.clone().after(Event::Left(worker));
    }

    /// Whoever waits for the others sends nothing by which its loss would be seen.
    fn miss_those_who_wait(&mut self) {
        let is_lost =
            |worker: &usize| self.doing[*worker] == Doing::Waits && self.communicator.has_lost(Rank::at(*worker));
        let lost: Vec<usize> = (1..self.doing.len()).filter(is_lost).collect();
        lost.into_iter().for_each(|worker| self.miss(worker));
    }

    /// Receives what the first worker gives to all, and keeps its part of it.
    fn open(&mut self) -> Result<(), CommError> {
        let part = self.layout.part(self.server);
        let Self { communicator, protocol, shape, held, .. } = self;
        protocol.receive_opening(communicator, shape, |opening, index, all| match opening {
            Opening::Weights => held.center.copy_from_slice(&all[part.clone()]),
            Opening::Kept { .. } => held.kept[index].copy_from_slice(&all[part.clone()]),
            // Workers step, and have them.
            Opening::States | Opening::Optimizer => {}
        })?;
        if let Some(lending) = self.lending.take() {
            self.lent =
                Some(Lent::start(self.communicator.world_rank(self.communicator.rank()), &lending, &self.held.center)?);
        }
        Ok(())
    }

    /// Receives what a worker does next, and does its part of it.
    fn hear(&mut self, worker: usize) -> Result<(), CommError> {
        let header = self.receive_header(worker)?;
        self.votes = self.votes.merge(header.votes);
        self.lent.as_mut().map_or(Ok(()), |lent| lent.tell(self.votes))?;
        self.headers[worker] = header;
        match header.command {
            Command::Exchange { .. } if !self.together => self.exchange(worker, false)?,
            Command::Goodbye => {
                self.doing[worker] = Doing::Gone;
                self.turns = self.turns.clone().after(Event::Left(worker));
            }
            Command::Readmit => self.readmit(worker, header.number)?,
            Command::ComeBack => self.give_present(worker)?,
            Command::Whereabouts => self.give_whereabouts(worker)?,
            Command::Changed => self.note_change(worker, header),
            Command::Exchange { .. } | Command::Meet | Command::Sum => self.doing[worker] = Doing::Waits,
        }
        Ok(())
    }

    /// The first worker says that one which was lost takes part again.
    fn readmit(&mut self, worker: usize, number: u64) -> Result<(), CommError> {
        let returned = Returned::from_number(number, self.doing.len()).filter(|_| worker == 0);
        let Some(returned) = returned else { return Err(self.violation(worker, "a worker is back that never was")) };
        self.tags[worker] += 1;
        let list: Vec<Transfer> =
            transfer(worker, Action::Receive, Rank::at(worker), 0..self.states.len()).into_iter().collect();
        self.communicator.exchange(&list, self.tags[worker], &mut self.states)?;
        if returned.connect(&mut self.communicator) {
            (self.doing[returned.worker], self.tags[returned.worker]) = (Doing::Idle, 0);
            self.turns = self.turns.clone().after(Event::Returned(returned.worker));
        }
        Ok(())
    }

    /// Says where the centre lies.
    fn give_whereabouts(&mut self, worker: usize) -> Result<(), CommError> {
        let Some(lent) = &self.lent else { return Err(self.violation(worker, "the centre lies in no memory box")) };
        let mut words = lent.whereabouts().to_words();
        self.tags[worker] += 1;
        let list: Vec<Transfer> =
            transfer(worker, Action::Send, Rank::at(worker), 0..WHEREABOUTS).into_iter().collect();
        self.communicator.exchange(&list, self.tags[worker], &mut words)
    }

    /// A worker has changed the centre where it lies.
    fn note_change(&mut self, worker: usize, header: Header) {
        self.turns = self.turns.clone().after(Event::Reached { worker, steps: header.steps });
        self.shard.stepped(worker, header.version);
    }

    /// The centre comes from where workers have changed it.
    fn fetch(&mut self) -> Result<(), CommError> {
        let Self { lent, held, .. } = self;
        lent.as_ref().map_or(Ok(()), |lent| lent.get(&mut held.center))
    }

    /// Gives a worker that has come back the centre as it is, how often all have met, and running statistics.
    fn give_present(&mut self, worker: usize) -> Result<(), CommError> {
        self.fetch()?;
        let length = self.held.center.len();
        self.room[..length].copy_from_slice(&self.held.center);
        self.tell(worker, length);
        let met = met_to_words(self.meets - MEETS);
        let mut numbers = [&self.room[..length + TOLD], &met, &self.states].concat();
        self.tags[worker] += 1;
        let list: Vec<Transfer> =
            transfer(worker, Action::Send, Rank::at(worker), 0..numbers.len()).into_iter().collect();
        self.communicator.exchange(&list, self.tags[worker], &mut numbers)
    }

    fn receive_header(&mut self, worker: usize) -> Result<Header, CommError> {
        let mut words = [0.0; HEADER];
        let list: Vec<Transfer> = transfer(worker, Action::Receive, Rank::at(worker), 0..HEADER).into_iter().collect();
        self.tags[worker] += 1;
        self.communicator.exchange(&list, self.tags[worker], &mut words)?;
        let pieces = self.layout.pieces as u64;
        let exists = |header: &Header| match header.command {
            Command::Exchange { .. } => header.number < pieces,
            // A worker says how long; nothing that is added up is longer than what both ends know of.
            Command::Sum => header.number <= self.shape.parameters.max(self.shape.states).max(HEADER) as u64,
            Command::Meet | Command::Goodbye | Command::Readmit | Command::ComeBack => true,
            Command::Whereabouts | Command::Changed => self.lent.is_some(),
        };
        Header::from_words(&words).filter(exists).ok_or_else(|| self.violation(worker, "a command that does not exist"))
    }

    /// Serves a worker's exchange: takes what it pushes, and answers.
    fn exchange(&mut self, worker: usize, together: bool) -> Result<(), CommError> {
        let Header { command, number, steps, .. } = self.headers[worker];
        let Command::Exchange { pushes, pulls } = command else { return Ok(()) };
        let piece = self.layout.piece_of(self.server, number as usize);
        self.tags[worker] += 1;
        if pushes {
            self.take(worker, piece.clone(), together)?;
        } else {
            self.room[..piece.len()].copy_from_slice(&self.held.center[piece.clone()]);
        }
        if pulls {
            self.tell(worker, piece.len());
            let (length, peer) = (piece.len(), Rank::at(worker));
            let parts = [0..length, length..length + TOLD];
            let list: Vec<Transfer> =
                parts.into_iter().filter_map(|part| transfer(worker, Action::Send, peer, part)).collect();
            self.communicator.exchange(&list, self.tags[worker], &mut self.room[..length + TOLD])?;
        }
        self.turns = self.turns.clone().after(Event::Reached { worker, steps });
        Ok(())
    }

    /// Receives what a worker pushes for some elements, and changes the centre.
    fn take(&mut self, worker: usize, range: std::ops::Range<usize>, together: bool) -> Result<(), CommError> {
        let list: Vec<Transfer> =
            transfer(worker, Action::Receive, Rank::at(worker), 0..range.len()).into_iter().collect();
        let Self { communicator, room, rule, held, shard, .. } = self;
        let pushed = &mut room[..range.len()];
        communicator.exchange(&list, self.tags[worker], pushed)?;
        let Header { steps, version, .. } = self.headers[worker];
        let missed = self.versions.apply_computed_from(worker, 0, version);
        let share = self.rounds.share_of_missed(missed);
        shard.change(steps, &mut || match together {
            true => rule.take_together(held, range.clone(), pushed),
            false => rule.take(held, range.clone(), pushed, share),
        });
        self.shard.stepped(worker, missed);
        Ok(())
    }

    /// Writes what is said behind so many numbers.
    fn tell(&mut self, worker: usize, length: usize) {
        let told = Told { version: self.versions.of_others(worker, 0), votes: self.votes };
        self.room[length..length + TOLD].copy_from_slice(&told.to_words());
    }

    /// All that are left have come to the same point, or to an exchange before others who were asked to stop and want to
    /// meet: these hear of it there.
    fn all_together(&mut self) -> Result<(), CommError> {
        let mut waiting: Vec<usize> =
            (0..self.doing.len()).filter(|&worker| self.doing[worker] == Doing::Waits).collect();
        let exchanges = |&worker: &usize| matches!(self.headers[worker].command, Command::Exchange { .. });
        let meets = |&worker: &usize| self.headers[worker].command == Command::Meet;
        if waiting.iter().all(|worker| exchanges(worker) || meets(worker)) && waiting.iter().any(exchanges) {
            waiting.retain(exchanges);
        }
        let Some(&first) = waiting.first() else { return Err(self.violation(0, "nobody says anything")) };
        let Header { command, number, .. } = self.headers[first];
        let same = |&worker: &usize| {
            let header = self.headers[worker];
            header.command == command && header.number == number
        };
        if let Some(&other) = waiting.iter().find(|worker| !same(worker)) {
            return Err(self.violation(other, "workers do different things where all do the same"));
        }
        match command {
            Command::Exchange { .. } => {
                for &worker in &waiting {
                    let exchanged = self.exchange(worker, true);
                    self.or_without(exchanged)?;
                }
                self.rule.end_together(&mut self.held);
            }
            Command::Meet => self.meet(&waiting, number > 0)?,
            _ => self.sum(&waiting, number as usize)?,
        }
        waiting.retain(|&worker| self.doing[worker] == Doing::Waits);
        waiting.into_iter().for_each(|worker| self.doing[worker] = Doing::Idle);
        Ok(())
    }

    /// Takes what every worker has left, and gives the centre to all; to the first what the agreement keeps, if asked.
    fn meet(&mut self, workers: &[usize], with_kept: bool) -> Result<(), CommError> {
        self.fetch()?;
        let part = 0..self.held.center.len();
        for &worker in workers {
            self.tags[worker] += 1;
            let taken = self.take(worker, part.clone(), true);
            self.or_without(taken)?;
        }
        self.turns = self.turns.clone().after(Event::Met);
        self.rule.end_together(&mut self.held);
        self.lent.as_ref().map_or(Ok(()), |lent| lent.put(&self.held.center))?;
        let length = part.len();
        self.meets += 1;
        self.room[..length].copy_from_slice(&self.held.center);
        for &worker in workers.iter().filter(|&&worker| self.doing[worker] != Doing::Gone).collect::<Vec<_>>() {
            self.tell(worker, length);
            let parts = [0..length, length..length + TOLD];
            let to = |part| transfer(worker, Action::Send, Rank::at(worker), part);
            let list: Vec<Transfer> = parts.into_iter().filter_map(to).collect();
            let told = self.communicator.exchange(&list, self.meets, &mut self.room[..length + TOLD]);
            self.or_without(told)?;
        }
        for kept in self.held.kept.iter_mut().filter(|_| with_kept) {
            self.meets += 1;
            if workers.contains(&0) {
                let list: Vec<Transfer> = transfer(0, Action::Send, Rank(0), 0..length).into_iter().collect();
                self.communicator.exchange(&list, self.meets, kept)?;
            }
        }
        Ok(())
    }

    /// Adds up numbers over those who are there.
    fn sum(&mut self, workers: &[usize], length: usize) -> Result<(), CommError> {
        let [push, _] = Call::pair(length);
        let [takes, _] = push.server_elements(self.layout.roles, self.server);
        if self.room.len() < takes + 1 {
            self.room.resize(takes + 1, 0.0);
        }
        let mut sums = vec![0.0; takes];
        for (call, comes) in Call::pair(length).into_iter().zip([true, false]) {
            self.meets += 1;
            for &worker in workers.iter().filter(|&&worker| self.doing[worker] != Doing::Gone).collect::<Vec<_>>() {
                let list = call.server(self.layout.roles, self.server, std::iter::once(worker));
                if !comes {
                    self.room[..takes].copy_from_slice(&sums);
                }
                let exchanged = self.communicator.exchange(&list, self.meets, &mut self.room[..takes + 1]);
                if self.or_without(exchanged)? && comes {
                    sums.iter_mut().zip(&self.room[..takes]).for_each(|(sum, number)| *sum += number);
                }
            }
        }
        Ok(())
    }

    fn violation(&self, worker: usize, what: &str) -> CommError {
        let of_world = |rank| self.communicator.world_rank(rank);
        let (rank, peer) = (of_world(self.communicator.rank()), Party::from(of_world(Rank::at(worker))));
        CommError::Protocol { rank, peer, phase: PHASE, what: what.to_owned() }
    }
}
