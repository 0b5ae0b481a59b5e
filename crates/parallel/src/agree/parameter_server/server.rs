//! A server: answers workers one conversation after the other, until all have said goodbye.
//!
//! Which push is served next is decided by [`super::turns`]; this is the thin shell around it. What a push does to the weights is the
//! [`Keeper`]'s affair.

use paceline_comm::transfer::{Action, Transfer};
use paceline_comm::{CommError, Communicator, Rank};
use paceline_system::memory;

use super::super::courier::BucketShape;
use super::super::{FACTS, Facts, OPENING, Opening, SHARED, facts};
use super::talk::{Call, Roles, all_of_server, length_of_words};
use super::turns::{Event, Turns};
use super::{COMMAND, Command, MEETS, Pace};

/// Gradients that a server was given.
#[derive(Debug)]
pub struct Push<'a> {
    /// Of which bucket.
    pub bucket: usize,
    /// Where its first element is among all parameters.
    pub start: usize,
    /// Steps that were made before.
    pub step: u64,
    /// The sum over workers, or one worker's.
    pub gradients: &'a mut [f32],
    /// What they are the gradients of.
    pub weights: &'a mut [f32],
}

/// Has the optimizer and its state.
pub trait Keeper {
    /// Changes the weights.
    fn apply(&mut self, push: Push<'_>);

    /// Takes over the state that a run is resumed with: buffer `slot`, of all parameters.
    fn resume(&mut self, slot: usize, state: &[f32]);

    /// Buffer `slot` of the state, of all parameters.
    fn state(&mut self, slot: usize) -> &mut [f32];
}

/// What a server has to know of a run.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Who is who.
    pub roles: Roles,
    /// When pushes are applied.
    pub pace: Pace,
    /// In the order in which they are pushed.
    pub buckets: Vec<BucketShape>,
    /// Elements of all parameters.
    pub parameters: usize,
    /// Elements of all states.
    pub states: usize,
    /// Buffers of the optimizer's state.
    pub slots: usize,
}

/// What rank 0 says of the run: the first that a server hears.
///
/// # Errors
/// When a worker, or the way to it, has failed.
pub fn hear(communicator: &mut Communicator) -> Result<Facts, CommError> {
    let mut words = facts::to_words([0; FACTS]);
    communicator.broadcast(Rank(0), &mut words)?;
    Ok(facts::from_words(words))
}

/// What a worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    /// Its next message says what follows.
    Idle,
    /// This call of a step is next.
    Step(usize),
    /// It has said what follows, and waits until all others have.
    Waits(Command),
    Gone,
}

/// So many numbers of a model's size: a no unwinds to whoever started to serve, as an error.
fn zeros(length: usize) -> Vec<f32> {
    memory::zeros(length, "the weights of a server").unwrap_or_else(|refused| refused.unwind())
}

/// Serves, after [`hear`], until every worker has ended; how often a step ended so many steps ahead of the slowest other worker.
///
/// # Errors
/// When a worker, or the way to it, has failed.
pub fn serve(communicator: Communicator, shape: Shape, keeper: &mut dyn Keeper) -> Result<Vec<u64>, CommError> {
    let workers = shape.roles.workers;
    let server = communicator.rank().index() - workers;
    let lengths: Vec<usize> = shape.buckets.iter().map(|bucket| bucket.elements).collect();
    // The first server lets workers begin a step; the others follow, so that no two can wait for each other.
    let staleness = match shape.pace {
        Pace::Asynchronous { staleness } if server == 0 => staleness,
        _ => None,
    };
    let mut run = Run {
        communicator,
        server,
        calls: Call::of_step(&lengths),
        keeper,
        turns: Turns::new(workers, staleness),
        doing: vec![Doing::Idle; workers],
        numbers: vec![[0.0; SHARED]; workers],
        tags: vec![0; workers],
        meets: MEETS,
        weights: zeros(shape.parameters),
        steps: vec![0; workers],
        room: Vec::new(),
        votes: [0.0; 2],
        shape,
    };
    run.begin()?;
    match run.shape.pace {
        Pace::Synchronous => run.together()?,
        Pace::Asynchronous { .. } => run.apart()?,
    }
    Ok(run.turns.missed().to_vec())
}

struct Run<'a> {
    communicator: Communicator,
    shape: Shape,
    server: usize,
    calls: Vec<Call>,
    keeper: &'a mut dyn Keeper,
    turns: Turns,
    doing: Vec<Doing>,
    numbers: Vec<[f32; SHARED]>,
    /// Counts exchanges with each worker, and those between steps, which all ranks count together.
    tags: Vec<u64>,
    meets: u64,
    /// Of all parameters; only this server's part is up to date.
    weights: Vec<f32>,
    /// Steps that each worker has ended.
    steps: Vec<u64>,
    /// What comes in, then what goes out.
    room: Vec<f32>,
    /// Wishes to end the run, of all workers.
    votes: [f32; 2],
}

impl Run<'_> {
    /// Hears the states, weights and optimizer of the first worker.
    fn begin(&mut self) -> Result<(), CommError> {
        for opening in OPENING {
            match opening {
                // Nobody asks a server for them.
                Opening::States if self.shape.states > 0 => {
                    self.communicator.broadcast(Rank(0), &mut vec![0.0; self.shape.states])?;
                }
                Opening::States => {}
                Opening::Weights => self.communicator.broadcast(Rank(0), &mut self.weights)?,
                Opening::Optimizer => {
                    let mut state = zeros(self.shape.parameters);
                    for slot in 0..self.shape.slots {
                        self.communicator.broadcast(Rank(0), &mut state)?;
                        self.keeper.resume(slot, &state);
                    }
                }
            }
        }
        Ok(())
    }

    /// Synchronous: all workers do the same, at the same time.
    fn together(&mut self) -> Result<(), CommError> {
        loop {
            let command = self.hear_all()?;
            if command == Command::Goodbye {
                return Ok(());
            }
            self.answer_all()?;
            if command != Command::Step {
                self.between(command)?;
                continue;
            }
            for call in 0..self.calls.len() {
                self.call(call, 0..self.shape.roles.workers)?;
                self.apply(call, self.steps[0]);
            }
            self.steps.iter_mut().for_each(|steps| *steps += 1);
        }
    }

    /// Asynchronous: every worker by itself, as they come.
    fn apart(&mut self) -> Result<(), CommError> {
        while !self.turns.is_over() {
            let open = |worker: &usize| match self.doing[*worker] {
                Doing::Idle => self.turns.may_step(*worker).0,
                Doing::Step(_) => true,
                Doing::Waits(_) | Doing::Gone => false,
            };
            let peers: Vec<Rank> = (0..self.shape.roles.workers).filter(open).map(Rank::at).collect();
            if peers.is_empty() {
                self.meet()?;
                continue;
            }
            let worker = self.communicator.wait_any(&peers)?.index();
            match self.doing[worker] {
                Doing::Step(call) => self.push(worker, call)?,
                _ => self.hear(worker)?,
            }
        }
        Ok(())
    }

    /// All workers that are left have come to the same point between steps.
    fn meet(&mut self) -> Result<(), CommError> {
        let waiting = self.doing.iter().filter_map(|doing| match doing {
            Doing::Waits(command) => Some(*command),
            _ => None,
        });
        let commands: Vec<Command> = waiting.collect();
        let same = commands.windows(2).all(|pair| pair[0] == pair[1]);
        let everybody = commands.len() == self.shape.roles.workers;
        let (Some(&command), true, true) = (commands.first(), same, everybody) else {
            return Err(self.violation("workers do different things between steps"));
        };
        self.sum_numbers();
        self.answer_all()?;
        self.between(command)?;
        self.doing.fill(Doing::Idle);
        Ok(())
    }

    /// Hears what a worker does next.
    fn hear(&mut self, worker: usize) -> Result<(), CommError> {
        let step = worker as u32;
        let list = [Transfer { step, action: Action::Receive, peer: Rank::at(worker), start: 0, length: SHARED }];
        self.with_worker(worker, &list, SHARED)?;
        self.numbers[worker].copy_from_slice(&self.room[..SHARED]);
        let Some(command) = Command::from_number(self.numbers[worker][COMMAND]) else {
            return Err(self.violation("a command that does not exist"));
        };
        match command {
            Command::Step => {
                self.vote(worker);
                self.answer(worker)?;
                self.doing[worker] = Doing::Step(0);
                Ok(())
            }
            Command::Goodbye => {
                self.doing[worker] = Doing::Gone;
                self.turns = self.turns.clone().after(Event::Left(worker));
                Ok(())
            }
            command => {
                self.doing[worker] = Doing::Waits(command);
                Ok(())
            }
        }
    }

    /// Serves a call of a worker's step.
    fn push(&mut self, worker: usize, call: usize) -> Result<(), CommError> {
        self.call(call, worker..worker + 1)?;
        self.apply(call, self.steps[worker]);
        if call + 1 < self.calls.len() {
            self.doing[worker] = Doing::Step(call + 1);
            return Ok(());
        }
        self.doing[worker] = Doing::Idle;
        self.steps[worker] += 1;
        self.turns = self.turns.clone().after(Event::Stepped(worker));
        Ok(())
    }

    /// Exchanges a call's gradients and weights with some workers.
    fn call(&mut self, call: usize, workers: std::ops::Range<usize>) -> Result<(), CommError> {
        let [takes, gives] = self.calls[call].server_elements(self.shape.roles, self.server);
        self.room_for(takes + gives + 1);
        if call > 0 {
            let weights = self.part(call - 1);
            self.room[takes..takes + gives].copy_from_slice(&self.weights[weights]);
        }
        let list = self.calls[call].server(self.shape.roles, self.server, workers.clone());
        self.exchange(workers, &list, takes + gives + 1)
    }

    /// Changes the weights by what came with a call.
    fn apply(&mut self, call: usize, step: u64) {
        let [takes, _] = self.calls[call].server_elements(self.shape.roles, self.server);
        if takes == 0 {
            return;
        }
        let part = self.part(call);
        let (gradients, weights) = (&mut self.room[..takes], &mut self.weights[part.clone()]);
        self.keeper.apply(Push { bucket: call, start: part.start, step, gradients, weights });
    }

    /// This server's part of a bucket, among all parameters.
    fn part(&self, bucket: usize) -> std::ops::Range<usize> {
        let BucketShape { start, elements, .. } = self.shape.buckets[bucket];
        let part = self.shape.roles.part(elements, self.server);
        start + part.start..start + part.end
    }

    /// What follows the numbers, between steps.
    fn between(&mut self, command: Command) -> Result<(), CommError> {
        let workers = self.shape.roles.workers;
        match command {
            Command::Sum => {
                let words = (self.numbers[0][0], self.numbers[0][1]);
                let length = length_of_words(words, workers);
                // A worker says how long; nothing that is added up is longer than what both ends know of.
                if length > self.shape.parameters.max(self.shape.states).max(SHARED) {
                    return Err(self.violation("numbers to add up that are longer than the model"));
                }
                let [push, pull] = Call::pair(length);
                let [takes, _] = push.server_elements(self.shape.roles, self.server);
                self.room_for(takes + 1);
                for call in [push, pull] {
                    let list = call.server(self.shape.roles, self.server, 0..workers);
                    self.meets += 1;
                    self.communicator.exchange(&list, self.meets, &mut self.room[..takes + 1])?;
                }
                Ok(())
            }
            Command::State => {
                let list = all_of_server(self.shape.roles, &self.shape.buckets, self.server, 0..1);
                for slot in 0..self.shape.slots {
                    self.meets += 1;
                    self.communicator.exchange(&list, self.meets, self.keeper.state(slot))?;
                }
                Ok(())
            }
            Command::Weights => {
                let list = all_of_server(self.shape.roles, &self.shape.buckets, self.server, 0..workers);
                self.meets += 1;
                self.communicator.exchange(&list, self.meets, &mut self.weights)
            }
            Command::Step | Command::Goodbye => Ok(()),
        }
    }

    /// Hears the numbers of all workers, who all say the same follows.
    fn hear_all(&mut self) -> Result<Command, CommError> {
        let workers = self.shape.roles.workers;
        for worker in 0..workers {
            let step = worker as u32;
            let list = [Transfer { step, action: Action::Receive, peer: Rank::at(worker), start: 0, length: SHARED }];
            self.with_worker(worker, &list, SHARED)?;
            self.numbers[worker].copy_from_slice(&self.room[..SHARED]);
        }
        let command = Command::from_number(self.numbers[0][COMMAND]);
        let same = self.numbers.iter().all(|numbers| Command::from_number(numbers[COMMAND]) == command);
        let (Some(command), true) = (command, same) else {
            return Err(self.violation("workers do different things at the same step"));
        };
        self.sum_numbers();
        Ok(command)
    }

    /// Gives every worker the sum of all numbers.
    fn sum_numbers(&mut self) {
        let mut sums = [0.0; SHARED];
        for numbers in &self.numbers {
            sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number);
        }
        self.numbers.fill(sums);
    }

    /// Remembers a worker's wishes, and tells it those of all.
    fn vote(&mut self, worker: usize) {
        for (vote, number) in self.votes.iter_mut().zip(&mut self.numbers[worker][5..7]) {
            *vote = vote.max(*number);
            *number = *vote;
        }
    }

    fn answer_all(&mut self) -> Result<(), CommError> {
        (0..self.shape.roles.workers).try_for_each(|worker| self.answer(worker))
    }

    /// The first server answers with the numbers.
    fn answer(&mut self, worker: usize) -> Result<(), CommError> {
        if self.server > 0 {
            // The others count it.
            self.tags[worker] += 1;
            return Ok(());
        }
        self.room_for(SHARED);
        self.room[..SHARED].copy_from_slice(&self.numbers[worker]);
        let (step, peer) = (worker as u32, Rank::at(worker));
        self.with_worker(worker, &[Transfer { step, action: Action::Send, peer, start: 0, length: SHARED }], SHARED)
    }

    fn with_worker(&mut self, worker: usize, list: &[Transfer], elements: usize) -> Result<(), CommError> {
        self.exchange(worker..worker + 1, list, elements)
    }

    fn exchange(
        &mut self,
        workers: std::ops::Range<usize>,
        list: &[Transfer],
        elements: usize,
    ) -> Result<(), CommError> {
        self.room_for(elements);
        let tag = self.tags[workers.start] + 1;
        self.tags[workers].fill(tag);
        self.communicator.exchange(list, tag, &mut self.room[..elements])
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
