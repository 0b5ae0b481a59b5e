//! A server: has its part of every vector, adds up what workers give, and does what the coordinator says.
//!
//! A worker that has begun something which all do together waits until every other that has not ended has begun the
//! same; who is gone is not waited for. Then they are served in the order of ranks, so that sums have the same bits
//! whoever came first. What a lost worker had not given is missing in the sum: the coordinator sees it.

use paceline_comm::error::Party;
use paceline_comm::transfer::{Action, Transfer};
use paceline_comm::{CommError, Communicator, Rank};
use paceline_system::memory;

use super::super::center::message::{Layout, transfer};
use super::super::parameter_server::talk::Call;
use super::super::{Join, Opening, Protocol, ServerShard, Shape};
use super::lbfgs::Vector;
use super::message::{COMMAND, Command, Gathered, SAID, Said, Totals};
use super::{PHASE, history};

/// What a worker does.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Doing {
    /// Its next message says what follows.
    Idle,
    /// It has said what follows, and waits until all others have.
    Waits(Said),
    Gone,
}

/// A server's part of a run.
pub(super) struct Server<'a> {
    communicator: Communicator,
    protocol: Protocol,
    shape: &'a Shape,
    layout: Layout,
    server: usize,
    history: usize,
    /// Its parts of them, by number.
    vectors: Vec<Vec<f32>>,
    /// What is in the sum of gradients.
    totals: Totals,
    shard: &'a mut dyn ServerShard,
    doing: Vec<Doing>,
    /// Counts messages to and from each worker.
    tags: Vec<u64>,
    /// What comes in.
    room: Vec<f32>,
    /// Batches whose gradients were given.
    batches: u64,
}

/// So many numbers of a model's size: a no unwinds to whoever started to serve, as an error.
fn zeros(length: usize) -> Vec<f32> {
    memory::zeros(length, "the vectors of a server").unwrap_or_else(|refused| refused.unwind())
}

impl<'a> Server<'a> {
    pub fn new(join: Join<'a>, protocol: Protocol, shard: &'a mut dyn ServerShard) -> Self {
        let Join { communicator, roles, shape, options, .. } = join;
        let (workers, server) = (roles.workers, communicator.rank().index() - roles.workers);
        let layout = Layout { roles, elements: shape.parameters, pieces: 1 };
        let (length, history) = (layout.part(server).len(), history(&options));
        Self {
            communicator,
            protocol,
            shape,
            layout,
            server,
            history,
            vectors: (0..Vector::count(history)).map(|_| zeros(length)).collect(),
            totals: Totals::default(),
            shard,
            doing: vec![Doing::Idle; workers],
            tags: vec![0; workers],
            room: zeros(length),
            batches: 0,
        }
    }

    /// Serves until every worker has ended.
    pub fn serve(mut self) -> Result<(), CommError> {
        self.open()?;
        while self.doing.iter().any(|doing| *doing != Doing::Gone) {
            self.miss_those_who_wait();
            let idle = |worker: &usize| self.doing[*worker] == Doing::Idle;
            let peers: Vec<Rank> = (0..self.doing.len()).filter(idle).map(Rank::at).collect();
            if peers.is_empty() {
                self.all_together()?;
                continue;
            }
            let nobody_waits = !self.doing.iter().any(|doing| matches!(doing, Doing::Waits(_)));
            let heard = match self.communicator.wait_any(&peers) {
                // While a batch is computed there is nothing to be said, however long that takes.
                Err(CommError::DeadlinePassed { .. }) if nobody_waits => continue,
                heard => heard.and_then(|worker| self.hear(worker.index())),
            };
            self.or_without(heard)?;
        }
        Ok(())
    }

    /// Goes on without a worker that is lost. Whether nobody was.
    fn or_without(&mut self, served: Result<(), CommError>) -> Result<bool, CommError> {
        let Err(error) = served else { return Ok(true) };
        let worker = self.layout.roles.missed(&error).ok_or(error)?;
        self.miss(worker);
        Ok(false)
    }

    fn miss(&mut self, worker: usize) {
        // Every list is with one worker alone, so nothing of the others is lost.
        self.communicator.go_on();
        self.doing[worker] = Doing::Gone;
    }

    /// Whoever waits for the others sends nothing by which its loss would be seen.
    fn miss_those_who_wait(&mut self) {
        let is_lost = |worker: &usize| {
            matches!(self.doing[*worker], Doing::Waits(_)) && self.communicator.has_lost(Rank::at(*worker))
        };
        let lost: Vec<usize> = (1..self.doing.len()).filter(is_lost).collect();
        lost.into_iter().for_each(|worker| self.miss(worker));
    }

    /// Receives what the first worker gives to all: the weights are the point that is tried first.
    fn open(&mut self) -> Result<(), CommError> {
        let part = self.layout.part(self.server);
        let Self { communicator, protocol, shape, vectors, .. } = self;
        protocol.receive_opening(communicator, shape, |opening, _, all| {
            let at = [Vector::Weights, Vector::Trial].into_iter().filter(|_| opening == Opening::Weights);
            at.for_each(|vector| vectors[vector.index()].copy_from_slice(&all[part.clone()]));
        })
    }

    /// The count of the next message to or from a worker.
    fn tag(&mut self, worker: usize) -> u64 {
        self.tags[worker] += 1;
        self.tags[worker]
    }

    /// Receives what a worker wants, and does what it can.
    fn hear(&mut self, worker: usize) -> Result<(), CommError> {
        let (mut bytes, tag) = ([0; SAID], self.tag(worker));
        self.communicator.recv(Rank::at(worker), tag, &mut bytes)?;
        // Nothing that is added up is longer than what both ends know of, or a report.
        let longest = self.shape.parameters.max(self.shape.states).max(16);
        let Some(said) = Said::from_bytes(&bytes, longest) else {
            return Err(self.violation(worker, "a wish that does not exist"));
        };
        match said {
            Said::Fetch => self.give(worker, Vector::Trial)?,
            Said::Goodbye => self.doing[worker] = Doing::Gone,
            Said::Meet(_) | Said::Sum(_) => self.doing[worker] = Doing::Waits(said),
        }
        Ok(())
    }

    /// Sends a worker this server's part of a vector.
    fn give(&mut self, worker: usize, vector: Vector) -> Result<(), CommError> {
        let (tag, part) = (self.tag(worker), &mut self.vectors[vector.index()]);
        let list: Vec<Transfer> =
            transfer(worker, Action::Send, Rank::at(worker), 0..part.len()).into_iter().collect();
        self.communicator.exchange(&list, tag, part)
    }

    /// All that are left have come to the same point.
    fn all_together(&mut self) -> Result<(), CommError> {
        let said: Vec<(usize, Said)> = self
            .doing
            .iter()
            .enumerate()
            .filter_map(|(worker, doing)| if let Doing::Waits(said) = doing { Some((worker, *said)) } else { None })
            .collect();
        let Some(&(_, first)) = said.first() else { return Ok(()) };
        let same = |other: Said| match (first, other) {
            (Said::Sum(one), Said::Sum(other)) => one == other,
            (Said::Meet(_), Said::Meet(_)) => true,
            _ => false,
        };
        if let Some(&(other, _)) = said.iter().find(|(_, said)| !same(*said)) {
            return Err(self.violation(other, "workers do different things where all do the same"));
        }
        match first {
            Said::Sum(length) => self.sum(&said, length)?,
            _ => self.meet(&said)?,
        }
        for (worker, _) in said {
            if self.doing[worker] != Doing::Gone {
                self.doing[worker] = Doing::Idle;
            }
        }
        Ok(())
    }

    /// Adds up the gradients of all, obeys the coordinator, and gives the weights to all.
    fn meet(&mut self, said: &[(usize, Said)]) -> Result<(), CommError> {
        self.totals = Totals::default();
        self.vectors[Vector::TrialGradient.index()].fill(0.0);
        for &(worker, said) in said {
            let Said::Meet(totals) = said else { continue };
            let (tag, length) = (self.tag(worker), self.room.len());
            let list: Vec<Transfer> =
                transfer(worker, Action::Receive, Rank::at(worker), 0..length).into_iter().collect();
            let given = self.communicator.exchange(&list, tag, &mut self.room);
            if self.or_without(given)? {
                self.totals.add(totals);
                let sum = &mut self.vectors[Vector::TrialGradient.index()];
                sum.iter_mut().zip(&self.room).for_each(|(sum, number)| *sum += number);
            }
        }
        self.batches += 1;
        let gathered = self.obey()?;
        for &(worker, _) in said {
            if self.doing[worker] != Doing::Gone {
                let given = self.give(worker, Vector::Weights).and_then(|()| {
                    let tag = self.tag(worker);
                    self.communicator.send(Rank::at(worker), tag, &[gathered.to_byte()])
                });
                self.or_without(given)?;
            }
        }
        Ok(())
    }

    /// Does what the coordinator says, until it is through.
    fn obey(&mut self) -> Result<Gathered, CommError> {
        loop {
            let (mut bytes, tag) = ([0; COMMAND], self.tag(0));
            self.communicator.recv(Rank(0), tag, &mut bytes)?;
            let Some(command) = Command::from_bytes(&bytes, self.history) else {
                return Err(self.violation(0, "a command that does not exist"));
            };
            let Self { vectors, shard, batches, .. } = self;
            match command {
                Command::Totals => {
                    let (tag, totals) = (self.tag(0), self.totals.to_bytes());
                    self.communicator.send(Rank(0), tag, &totals)?;
                }
                Command::Dot(a, b) => {
                    let product = dot(&vectors[a.index()], &vectors[b.index()]);
                    let tag = self.tag(0);
                    self.communicator.send(Rank(0), tag, &product.to_bits().to_le_bytes())?;
                }
                Command::Axpy(alpha, x, y) => shard.change(*batches, &mut || {
                    with_two(vectors, x, y, |x, y| *y = (f64::from(*y) + alpha * f64::from(x)) as f32);
                }),
                Command::Scale(alpha, x) => shard.change(*batches, &mut || {
                    vectors[x.index()].iter_mut().for_each(|x| *x = (alpha * f64::from(*x)) as f32);
                }),
                Command::Copy(source, target) => {
                    shard.change(*batches, &mut || with_two(vectors, source, target, |source, target| *target = source));
                }
                Command::End(gathered) => return Ok(gathered),
            }
        }
    }

    /// Adds up numbers over those who are there.
    fn sum(&mut self, said: &[(usize, Said)], length: usize) -> Result<(), CommError> {
        let [push, _] = Call::pair(length);
        let [takes, _] = push.server_elements(self.layout.roles, self.server);
        let mut room = zeros(takes + 1);
        let mut sums = vec![0.0; takes];
        for (call, comes) in Call::pair(length).into_iter().zip([true, false]) {
            for &(worker, _) in said {
                if self.doing[worker] == Doing::Gone {
                    continue;
                }
                let list = call.server(self.layout.roles, self.server, std::iter::once(worker));
                if !comes {
                    room[..takes].copy_from_slice(&sums);
                }
                let tag = self.tag(worker);
                let exchanged = self.communicator.exchange(&list, tag, &mut room);
                if self.or_without(exchanged)? && comes {
                    sums.iter_mut().zip(&room[..takes]).for_each(|(sum, number)| *sum += number);
                }
            }
        }
        Ok(())
    }

    fn violation(&self, worker: usize, what: &str) -> CommError {
        let (rank, peer) = (self.communicator.rank(), Party::from(Rank::at(worker)));
        CommError::Protocol { rank, peer, phase: PHASE, what: what.to_owned() }
    }
}

/// The product of two, with sums of 64 bits.
fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// Changes the elements of a vector by those of another, which may be the same.
fn with_two(vectors: &mut [Vec<f32>], x: Vector, y: Vector, change: impl Fn(f32, &mut f32)) {
    let (x, y) = (x.index(), y.index());
    match vectors.get_disjoint_mut([x, y]) {
        Ok([x, y]) => x.iter().zip(y).for_each(|(x, y)| change(*x, y)),
        Err(_) => vectors[x].iter_mut().for_each(|x| change(*x, x)),
    }
}
