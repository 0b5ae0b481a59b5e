//! What a replica sees of every agreement: it gives gradients away and takes back what became of them.
//!
//! One thread carries the messages. A bucket's memory goes to that thread when its gradients are final and comes back later, so nothing
//! is shared and nothing is locked. What the thread does in between is the agreement's own affair.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use paceline_comm::error::Party;
use paceline_comm::{CommError, Rank, RegisteredBuffer};
use paceline_system::clock::Clock;
use paceline_system::threads;

use super::Shared;

/// After how many steps the order of messages is made from measured times: the first ones warm caches and links up.
const MEASURED_STEPS: u64 = 3;

/// What is known of a bucket before the first step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketShape {
    /// Where it begins among all parameters.
    pub start: usize,
    /// Its length.
    pub elements: usize,
    /// The node after which its gradients are final.
    pub ready_after: usize,
    /// The node before which its parameters are needed.
    pub needed_before: usize,
}

/// What the carrying thread is given.
pub(super) enum Job {
    /// A step begins: numbers to be added up over all ranks.
    Share(Shared),
    /// Final gradients.
    Bucket(usize, RegisteredBuffer),
    /// When each bucket was ready in the last step, in seconds.
    Reorder(Vec<f32>),
    /// Numbers to be added up over all ranks, which come here at the same point.
    Sum(Vec<f32>),
    /// Numbers between steps, to be replaced by those of rank 0.
    First(Vec<f32>),
    /// The optimizer's state, where it is not this rank's own.
    State(Vec<Vec<f32>>),
    /// All weights as the servers have them, where those of this rank may be older.
    Weights(Vec<f32>),
}

/// What it gives back.
pub(super) enum Answer {
    Shared(Shared),
    Bucket(usize, RegisteredBuffer),
    Numbers(Vec<f32>),
    State(Vec<Vec<f32>>),
    Failed(CommError),
}

/// The carrying thread's ends.
pub(super) struct Ends {
    pub jobs: Receiver<Job>,
    pub answers: SyncSender<Answer>,
}

impl Ends {
    /// Gives something back. Nobody listens any more if the replica is gone; then the next job does not come either.
    pub fn answer(&self, answer: Answer) {
        let _ = self.answers.send(answer);
    }
}

/// Where the memory of a bucket is.
#[derive(Debug)]
enum Slot {
    Home(RegisteredBuffer),
    Away,
    Landed(RegisteredBuffer),
}

/// A replica's end.
#[derive(Debug)]
pub(super) struct Courier {
    pub rank: Rank,
    pub world: usize,
    phase: &'static str,
    slots: Vec<Slot>,
    shared: Option<Shared>,
    numbers: Option<Vec<f32>>,
    /// Memory for numbers that are added up: used again and again.
    spare: Vec<f32>,
    state: Option<Vec<Vec<f32>>>,
    jobs: Option<SyncSender<Job>>,
    answers: Receiver<Answer>,
    thread: Option<JoinHandle<()>>,
    deadline: Duration,
    clock: Clock,
    /// When this step began and when its buckets were ready, in seconds.
    began: f64,
    ready: Vec<f32>,
    steps: u64,
    /// Buckets that came back and were applied.
    applied: u64,
}

impl Courier {
    /// Starts the thread: `carry` takes jobs until there are no more.
    pub fn start(
        (rank, world, phase): (Rank, usize, &'static str),
        memory: Vec<RegisteredBuffer>,
        deadline: Duration,
        carry: impl FnOnce(&Ends) -> Result<(), CommError> + Send + 'static,
    ) -> Result<Self, CommError> {
        // A step has its numbers and its buckets; a new order goes with them.
        let bound = memory.len() + 2;
        let ((jobs, job_ends), (answer_ends, answers)) = (sync_channel(bound), sync_channel(bound));
        let (clock, ready) = (Clock::real(), vec![0.0; memory.len()]);
        let ends = Ends { jobs: job_ends, answers: answer_ends };
        let body = move || {
            if let Err(error) = carry(&ends) {
                ends.answer(Answer::Failed(error));
            }
        };
        let thread =
            threads::spawn(phase, body).map_err(|source| CommError::System { rank, what: "start a thread", source })?;
        Ok(Self {
            rank,
            world,
            phase,
            slots: memory.into_iter().map(Slot::Home).collect(),
            shared: None,
            numbers: None,
            spare: Vec::new(),
            state: None,
            jobs: Some(jobs),
            answers,
            thread: Some(thread),
            deadline,
            began: clock.seconds(),
            clock,
            ready,
            steps: 0,
            applied: 0,
        })
    }

    pub fn share(&mut self, numbers: Shared) -> Result<(), CommError> {
        if self.steps == MEASURED_STEPS {
            self.give(Job::Reorder(self.ready.clone()))?;
        }
        self.steps += 1;
        self.began = self.clock.seconds();
        self.shared = None;
        self.give(Job::Share(numbers))
    }

    pub fn shared(&mut self) -> Result<Shared, CommError> {
        loop {
            if let Some(numbers) = self.shared {
                return Ok(numbers);
            }
            self.hear(true)?;
        }
    }

    /// A device without memory gives no gradients; then the numbers that are there travel.
    pub fn send(&mut self, bucket: usize, gradients: &[f32]) -> Result<(), CommError> {
        let Slot::Home(mut memory) = std::mem::replace(&mut self.slots[bucket], Slot::Away) else {
            panic!("bucket {bucket} is sent once, after what came back was taken");
        };
        if !gradients.is_empty() {
            memory.as_mut_slice().copy_from_slice(gradients);
        }
        self.ready[bucket] = (self.clock.seconds() - self.began) as f32;
        self.give(Job::Bucket(bucket, memory))
    }

    /// What came back for a bucket, once.
    pub fn take(&mut self, bucket: usize, wait: bool) -> Result<Option<&mut [f32]>, CommError> {
        while matches!(self.slots[bucket], Slot::Away) && self.hear(wait)? {}
        if !matches!(self.slots[bucket], Slot::Landed(_)) {
            return Ok(None);
        }
        let Slot::Landed(memory) = std::mem::replace(&mut self.slots[bucket], Slot::Away) else { return Ok(None) };
        self.slots[bucket] = Slot::Home(memory);
        match &mut self.slots[bucket] {
            Slot::Home(memory) => Ok(Some(memory.as_mut_slice())),
            _ => Ok(None),
        }
    }

    /// What came back for a bucket was applied, without fault.
    pub fn applied(&mut self) {
        self.applied += 1;
    }

    /// Whether all that came back for so many steps was applied, and nothing of the next.
    pub fn has_applied(&self, steps: u64) -> bool {
        self.applied == steps * self.slots.len() as u64
    }

    /// Replaces numbers by their sum over all ranks.
    pub fn sum(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        let mut given = std::mem::take(&mut self.spare);
        given.clear();
        given.extend_from_slice(numbers);
        let sums = self.between(Job::Sum(given))?;
        numbers.copy_from_slice(&sums);
        self.spare = sums;
        Ok(())
    }

    /// Replaces numbers by those of rank 0.
    pub fn of_first(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        let first = self.between(Job::First(numbers.to_vec()))?;
        numbers.copy_from_slice(&first);
        Ok(())
    }

    /// Replaces weights by those that the servers have.
    pub fn weights(&mut self, weights: &mut [f32]) -> Result<(), CommError> {
        let last = self.between(Job::Weights(weights.to_vec()))?;
        weights.copy_from_slice(&last);
        Ok(())
    }

    fn between(&mut self, job: Job) -> Result<Vec<f32>, CommError> {
        self.give(job)?;
        loop {
            match self.numbers.take() {
                Some(numbers) => return Ok(numbers),
                None => self.hear(true)?,
            };
        }
    }

    /// The optimizer's state from wherever it is.
    pub fn state(&mut self, buffers: Vec<Vec<f32>>) -> Result<Vec<Vec<f32>>, CommError> {
        self.give(Job::State(buffers))?;
        loop {
            match self.state.take() {
                Some(state) => return Ok(state),
                None => self.hear(true)?,
            };
        }
    }

    fn give(&mut self, job: Job) -> Result<(), CommError> {
        let jobs = self.jobs.as_ref().expect("there until it is dropped");
        if jobs.send(job).is_ok() {
            return Ok(());
        }
        // The thread has ended and has said why.
        while self.hear(true)? {}
        Err(CommError::Broken { rank: self.rank, phase: self.phase })
    }

    /// Takes in one answer; whether there was one.
    fn hear(&mut self, wait: bool) -> Result<bool, CommError> {
        let (rank, phase) = (self.rank, self.phase);
        let broken = CommError::Broken { rank, phase };
        let answer = if wait {
            self.answers.recv_timeout(self.deadline).map_err(|error| match error {
                RecvTimeoutError::Disconnected => broken,
                RecvTimeoutError::Timeout => {
                    CommError::DeadlinePassed { rank, peer: Party::Anyone, phase, waited: self.deadline }
                }
            })?
        } else {
            match self.answers.try_recv() {
                Ok(answer) => answer,
                Err(TryRecvError::Empty) => return Ok(false),
                Err(TryRecvError::Disconnected) => return Err(broken),
            }
        };
        match answer {
            Answer::Shared(numbers) => self.shared = Some(numbers),
            Answer::Bucket(bucket, memory) => self.slots[bucket] = Slot::Landed(memory),
            Answer::Numbers(numbers) => self.numbers = Some(numbers),
            Answer::State(state) => self.state = Some(state),
            Answer::Failed(error) => return Err(error),
        }
        Ok(true)
    }
}

impl Drop for Courier {
    fn drop(&mut self) {
        // Without jobs the thread ends; one that waits for a dead rank has a deadline.
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
