//! A server: answers workers one conversation after the other, until all have said goodbye.
//!
//! Which push is served next is decided by [`super::turns`]; this is the thin shell around it. What a push
//! does to the weights is the
//! [`ServerShard`]'s affair.

use std::ops::Range;

use paceline_comm::transfer::{Action, Transfer};
use paceline_comm::{CommError, Communicator, Rank};
use paceline_system::memory;

use super::super::report::WORDS;
use super::super::{
    Between, BucketShape, Join, LostPeer, Opening, Protocol, Push, Roles, RoundOptions, ServerShard, Shape, StepReport,
    Votes,
};
use super::Pace;
use super::header::{Command, HEADER, Header, MEETS};
use super::talk::{Call, all_of_server};
use super::turns::{Event, Turns};
use super::versions::Versions;
use crate::squeeze::{self, Buckets, Codec, Message};

mod returns;

/// What a worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    /// Its next message says what follows.
    Idle,
    /// This call of a step is next.
    Step(usize),
    /// It has said what follows between steps, and waits until all others have.
    Waits(Between),
    Gone,
}

/// So many numbers of a model's size: a no unwinds to whoever started to serve, as an error.
fn zeros(length: usize) -> Vec<f32> {
    memory::zeros(length, "the weights of a server").unwrap_or_else(|refused| refused.unwind())
}

/// Serves until every worker has ended.
pub(super) fn serve(join: Join<'_>, protocol: Protocol, shard: &mut dyn ServerShard) -> Result<(), CommError> {
    let Join { communicator, roles, shape, options, .. } = join;
    let workers = roles.workers;
    let server = communicator.rank().index() - workers;
    let pace = Pace::from_staleness(options.staleness);
    // The first server lets workers begin a step; the others follow, so that no two can wait for each other.
    let staleness = match pace {
        Pace::Asynchronous { staleness } if server == 0 => staleness,
        _ => None,
    };
    let mut run = Run {
        communicator,
        roles,
        server,
        calls: Call::of_step(&protocol, shape),
        protocol,
        shape,
        shard,
        codec: options.squeeze.codec(),
        rounds: options.rounds,
        message: Message::default(),
        turns: Turns::new(workers, staleness),
        versions: Versions::new(workers, shape.buckets.len()),
        doing: vec![Doing::Idle; workers],
        headers: vec![Header::new(Command::Step); workers],
        tags: vec![0; workers],
        meets: MEETS,
        weights: zeros(shape.parameters),
        steps: vec![0; workers],
        shares: vec![0.0; workers],
        pace,
        room: Vec::new(),
        votes: Votes::default(),
        states: vec![0.0; if server == 0 { shape.states } else { 0 }],
    };
    run.begin()?;
    match pace {
        Pace::Synchronous => run.together(),
        Pace::Asynchronous { .. } => run.apart(),
    }
}

struct Run<'a> {
    communicator: Communicator,
    protocol: Protocol,
    shape: &'a Shape,
    roles: Roles,
    server: usize,
    pace: Pace,
    calls: Vec<Call>,
    shard: &'a mut dyn ServerShard,
    codec: Box<dyn Codec>,
    rounds: RoundOptions,
    message: Message,
    turns: Turns,
    versions: Versions,
    doing: Vec<Doing>,
    /// What each worker said last.
    headers: Vec<Header>,
    /// Counts exchanges with each worker, and those between steps, which all ranks count together.
    tags: Vec<u64>,
    meets: u64,
    /// Of all parameters; only this server's part is up to date.
    weights: Vec<f32>,
    /// Steps that each worker has ended.
    steps: Vec<u64>,
    /// Which share of the step's batch each worker computes.
    shares: Vec<f32>,
    /// What comes in, then what goes out.
    room: Vec<f32>,
    /// Wishes of all workers.
    votes: Votes,
    /// Running statistics of the first worker, for one that comes back: the first server has them.
    states: Vec<f32>,
}

impl Run<'_> {
    /// Receives the states, weights and optimizer of the first worker, as the protocol lists them.
    fn begin(&mut self) -> Result<(), CommError> {
        for opening in self.protocol.opening.clone() {
            match opening {
                // Nobody asks a server for them.
                Opening::States if self.shape.states > 0 => {
                    self.communicator.broadcast(Rank(0), &mut vec![0.0; self.shape.states])?;
                }
                Opening::States => {}
                Opening::Weights => self.communicator.broadcast(Rank(0), &mut self.weights)?,
                // No server has any.
                Opening::Kept { .. } => {}
                Opening::Optimizer => {
                    let mut state = zeros(self.shape.parameters);
                    for slot in 0..self.shape.slots {
                        self.communicator.broadcast(Rank(0), &mut state)?;
                        self.shard.resume(slot, &state);
                    }
                }
            }
        }
        Ok(())
    }

    /// Synchronous: all workers do the same, at the same time.
    fn together(&mut self) -> Result<(), CommError> {
        loop {
            let command = self.receive_headers()?;
            match command {
                Command::Goodbye => return Ok(()),
                Command::Step => self.answer_all()?,
                Command::Between(between) => {
                    self.answer_all()?;
                    self.between(between)?;
                    continue;
                }
                Command::Readmit | Command::ComeBack => {
                    return Err(self.violation("nobody comes back where all make the same steps"));
                }
            }
            for call in 0..self.calls.len() {
                self.call_all(call)?;
                self.apply(call, self.steps[0], 1.0);
            }
            self.steps.iter_mut().for_each(|steps| *steps += 1);
        }
    }

    /// Exchanges a call with all workers that are there. One that is lost meanwhile has its gradients in some of the sum,
    /// and none in the next.
    fn call_all(&mut self, call: usize) -> Result<(), CommError> {
        // The first worker is never missed, and its numbers are those that the others' are added to.
        self.communicator.spare(1..self.roles.workers);
        let called = self.call(call, self.present());
        self.communicator.spare(0..0);
        let missed = self.communicator.take_missed();
        missed.into_iter().for_each(|rank| self.miss(rank.index()));
        called
    }

    /// Asynchronous: every worker by itself, as they come.
    fn apart(&mut self) -> Result<(), CommError> {
        while !self.turns.is_over() {
            self.miss_those_who_wait();
            let open = |worker: &usize| match self.doing[*worker] {
                Doing::Idle => self.turns.may_step(*worker).0,
                Doing::Step(_) => true,
                Doing::Waits(_) | Doing::Gone => false,
            };
            let peers: Vec<Rank> = (0..self.roles.workers).filter(open).map(Rank::at).collect();
            if peers.is_empty() {
                self.meet()?;
                continue;
            }
            let served = self.communicator.wait_any(&peers).and_then(|worker| match self.doing[worker.index()] {
                Doing::Step(call) => self.push(worker.index(), call),
                _ => self.receive_command(worker.index()),
            });
            self.or_without(served)?;
        }
        Ok(())
    }

    /// Goes on without a worker that is lost, where the others can: what it had pushed stays.
    fn or_without(&mut self, served: Result<(), CommError>) -> Result<(), CommError> {
        let Err(error) = served else { return Ok(()) };
        let worker = self.roles.missed(&error).filter(|_| self.protocol.lost_peer == LostPeer::GoOn).ok_or(error)?;
        self.miss(worker);
        Ok(())
    }

    fn miss(&mut self, worker: usize) {
        // Every list is with one worker alone, so nothing of the others is lost.
        self.communicator.go_on();
        self.doing[worker] = Doing::Gone;
        self.turns = self.turns.clone().after(Event::Left(worker));
    }

    /// Whoever waits for the others sends nothing by which its loss would be seen.
    fn miss_those_who_wait(&mut self) {
        let is_lost = |worker: &usize| {
            matches!(self.doing[*worker], Doing::Waits(_)) && self.communicator.has_lost(Rank::at(*worker))
        };
        let lost: Vec<usize> = (0..self.roles.workers).filter(is_lost).collect();
        lost.into_iter().for_each(|worker| self.miss(worker));
    }

    /// The workers that are there.
    fn present(&self) -> Vec<usize> {
        (0..self.roles.workers).filter(|&worker| self.doing[worker] != Doing::Gone).collect()
    }

    /// All workers that are left have come to the same point between steps.
    fn meet(&mut self) -> Result<(), CommError> {
        let waiting = self.doing.iter().filter_map(|doing| match doing {
            Doing::Waits(between) => Some(*between),
            _ => None,
        });
        let all: Vec<Between> = waiting.collect();
        let same = all.windows(2).all(|pair| pair[0] == pair[1]);
        let (Some(&between), true, true) = (all.first(), same, all.len() == self.present().len()) else {
            return Err(self.violation("workers do different things between steps"));
        };
        self.sum_reports();
        self.answer_all()?;
        self.between(between)?;
        self.turns = self.turns.clone().after(Event::Met);
        if between == Between::Weights {
            self.versions.read_by_all();
        }
        self.doing.iter_mut().filter(|doing| **doing != Doing::Gone).for_each(|doing| *doing = Doing::Idle);
        Ok(())
    }

    /// Receives what a worker does next.
    fn receive_command(&mut self, worker: usize) -> Result<(), CommError> {
        match self.receive_header(worker)? {
            Command::Step => {
                self.votes = self.votes.merge(self.headers[worker].report.votes);
                self.headers[worker].report.votes = self.votes;
                self.answer(worker)?;
                self.doing[worker] = Doing::Step(0);
            }
            Command::Goodbye => {
                self.doing[worker] = Doing::Gone;
                self.turns = self.turns.clone().after(Event::Left(worker));
            }
            Command::Between(between) => {
                self.doing[worker] = Doing::Waits(between);
                self.turns = self.turns.clone().after(Event::Waits(worker));
            }
            Command::Readmit => self.readmit(worker)?,
            Command::ComeBack => self.give_present(worker)?,
        }
        Ok(())
    }

    fn receive_header(&mut self, worker: usize) -> Result<Command, CommError> {
        let (step, peer) = (worker as u32, Rank::at(worker));
        let list = [Transfer { step, action: Action::Receive, peer, start: 0, length: HEADER }];
        self.with_worker(worker, &list, HEADER)?;
        let mut words = [0.0; HEADER];
        words.copy_from_slice(&self.room[..HEADER]);
        let header = Header::from_words(&words).filter(|header| match header.command {
            Command::Between(between) => self.protocol.allows(between),
            Command::Step | Command::Goodbye | Command::Readmit | Command::ComeBack => true,
        });
        let Some(header) = header else { return Err(self.violation("a command that does not exist")) };
        self.headers[worker] = header;
        Ok(header.command)
    }

    /// Serves a call of a worker's step.
    fn push(&mut self, worker: usize, call: usize) -> Result<(), CommError> {
        let Call { pushes, pulls, .. } = self.calls[call];
        pulls.into_iter().for_each(|bucket| self.versions.read(worker, bucket));
        self.call(call, vec![worker])?;
        // Whoever had no samples has nothing to step with.
        let steps = self.headers[worker].report.rows > 0;
        if steps {
            let missed = pushes.map_or(0, |bucket| self.versions.apply(worker, bucket));
            // Whoever made them: so many steps of all workers' samples.
            let step = self.steps.iter().sum::<u64>() / self.roles.workers as u64;
            self.apply(call, step, self.rounds.share_of_missed(missed));
        }
        if call + 1 < self.calls.len() {
            self.doing[worker] = Doing::Step(call + 1);
            return Ok(());
        }
        self.doing[worker] = Doing::Idle;
        self.steps[worker] += 1;
        let missed = self.versions.end_step(worker);
        if steps {
            self.shard.stepped(worker, missed);
        }
        self.turns = self.turns.clone().after(Event::Stepped(worker));
        Ok(())
    }

    /// Exchanges a call's gradients and weights with some workers.
    fn call(&mut self, call: usize, workers: Vec<usize>) -> Result<(), CommError> {
        let [takes, gives] = self.calls[call].server_elements(self.roles, self.server);
        self.room_for(takes + gives + 1);
        if let Some(bucket) = self.calls[call].pulls {
            let weights = self.part(bucket);
            self.room[takes..takes + gives].copy_from_slice(&self.weights[weights]);
        }
        let buckets = Buckets { sent: self.calls[call].pulls, received: self.calls[call].pushes };
        let tag = self.next_tag(&workers);
        let list = self.calls[call].server(self.roles, self.server, workers.into_iter());
        let Self { communicator, codec, message, room, .. } = self;
        let values = &mut room[..takes + gives + 1];
        squeeze::exchange(&mut **codec, communicator, (&list, tag), buckets, (values, message))
    }

    /// Changes the weights by what came with a call, with a share of the learning rate.
    fn apply(&mut self, call: usize, step: u64, rate_share: f32) {
        let [takes, _] = self.calls[call].server_elements(self.roles, self.server);
        let Some(bucket) = self.calls[call].pushes.filter(|_| takes > 0) else { return };
        let part = self.part(bucket);
        if self.pace == Pace::Synchronous && self.doing.contains(&Doing::Gone) {
            // Each worker's part counts among the samples of all: those of the lost do not arrive.
            let arrived: f32 = self.present().into_iter().map(|worker| self.shares[worker]).sum();
            let scale = if arrived > 0.0 { 1.0 / arrived } else { 0.0 };
            self.room[..takes].iter_mut().for_each(|gradient| *gradient *= scale);
        }
        let (gradients, weights) = (&mut self.room[..takes], &mut self.weights[part.clone()]);
        self.shard.apply(Push { bucket, start: part.start, step, rate_share, gradients, weights });
    }

    /// This server's part of a bucket, among all parameters.
    fn part(&self, bucket: usize) -> Range<usize> {
        let BucketShape { start, elements, .. } = self.shape.buckets[bucket];
        let part = self.roles.part(elements, self.server);
        start + part.start..start + part.end
    }

    /// What follows between steps.
    fn between(&mut self, between: Between) -> Result<(), CommError> {
        match between {
            Between::Sum => {
                let length = self.headers[0].length;
                // A worker says how long; nothing that is added up is longer than what both ends know of.
                let same = self.present().into_iter().all(|worker| self.headers[worker].length == length);
                if !same || length > self.shape.parameters.max(self.shape.states).max(HEADER) {
                    return Err(self.violation("numbers to add up that are longer than the model"));
                }
                self.sum(length)
            }
            Between::Optimizer => {
                let list = all_of_server(self.roles, &self.shape.buckets, self.server, 0..1);
                for slot in 0..self.shape.slots {
                    self.meets += 1;
                    self.communicator.exchange(&list, self.meets, self.shard.state(slot))?;
                }
                Ok(())
            }
            Between::Weights => {
                self.meets += 1;
                for group in self.lists() {
                    let list = all_of_server(self.roles, &self.shape.buckets, self.server, group);
                    let sent = self.communicator.exchange(&list, self.meets, &mut self.weights);
                    self.or_without(sent)?;
                }
                Ok(())
            }
        }
    }

    /// The workers that are served by one list: all of them, or each by itself where it may be lost.
    fn lists(&self) -> Vec<Range<usize>> {
        match self.protocol.lost_peer {
            LostPeer::End => std::iter::once(0..self.roles.workers).collect(),
            LostPeer::GoOn => self.present().into_iter().map(|worker| worker..worker + 1).collect(),
        }
    }

    /// Adds up numbers of all workers, and gives each the sum.
    fn sum(&mut self, length: usize) -> Result<(), CommError> {
        let [push, pull] = Call::pair(length);
        let [takes, _] = push.server_elements(self.roles, self.server);
        let mut sums = vec![0.0; takes];
        self.room_for(takes + 1);
        self.meets += 1;
        for group in self.lists() {
            let list = push.server(self.roles, self.server, group.clone());
            let received = self.communicator.exchange(&list, self.meets, &mut self.room[..takes + 1]);
            let came = received.is_ok();
            self.or_without(received)?;
            sums.iter_mut().zip(&self.room[..takes]).filter(|_| came).for_each(|(sum, number)| *sum += number);
        }
        self.meets += 1;
        for group in self.lists() {
            self.room[..takes].copy_from_slice(&sums);
            let list = pull.server(self.roles, self.server, group);
            let sent = self.communicator.exchange(&list, self.meets, &mut self.room[..takes + 1]);
            self.or_without(sent)?;
        }
        Ok(())
    }

    /// Receives the headers of all workers, who all say the same follows.
    fn receive_headers(&mut self) -> Result<Command, CommError> {
        for worker in self.present() {
            let received = self.receive_header(worker).map(|_| ());
            self.or_without(received)?;
            self.shares[worker] = self.headers[worker].report.share;
        }
        let command = self.headers[0].command;
        if self.present().into_iter().any(|worker| self.headers[worker].command != command) {
            return Err(self.violation("workers do different things at the same step"));
        }
        self.sum_reports();
        Ok(command)
    }

    /// Every worker is given the sum of all reports.
    fn sum_reports(&mut self) {
        let mut sums = [0.0; WORDS];
        for worker in self.present() {
            sums.iter_mut().zip(self.headers[worker].report.to_words()).for_each(|(sum, word)| *sum += word);
        }
        let total = StepReport::from_words(sums);
        self.headers.iter_mut().for_each(|header| header.report = total);
    }

    fn answer_all(&mut self) -> Result<(), CommError> {
        for worker in self.present() {
            let answered = self.answer(worker);
            self.or_without(answered)?;
        }
        Ok(())
    }

    /// The first server answers with the sum of reports.
    fn answer(&mut self, worker: usize) -> Result<(), CommError> {
        if self.server > 0 {
            // The others count it.
            self.tags[worker] += 1;
            return Ok(());
        }
        self.room_for(WORDS);
        self.room[..WORDS].copy_from_slice(&self.headers[worker].report.to_words());
        let (step, peer) = (worker as u32, Rank::at(worker));
        self.with_worker(worker, &[Transfer { step, action: Action::Send, peer, start: 0, length: WORDS }], WORDS)
    }

    fn with_worker(&mut self, worker: usize, list: &[Transfer], elements: usize) -> Result<(), CommError> {
        self.room_for(elements);
        let tag = self.next_tag(&[worker]);
        self.communicator.exchange(list, tag, &mut self.room[..elements])
    }

    /// The next number of an exchange with workers who have counted alike.
    fn next_tag(&mut self, workers: &[usize]) -> u64 {
        let tag = self.tags[workers[0]] + 1;
        workers.iter().for_each(|&worker| self.tags[worker] = tag);
        tag
    }

    fn room_for(&mut self, elements: usize) {
        if self.room.len() < elements {
            self.room.resize(elements, 0.0);
        }
    }

    fn violation(&self, what: &str) -> CommError {
        let (rank, peer) = (self.communicator.rank(), paceline_comm::error::Party::Anyone);
        CommError::Protocol { rank, peer, phase: "parameter-server", what: what.to_owned() }
    }
}
