//! What a replica sees of every agreement: it gives gradients away and takes back what became of them.
//!
//! One thread carries the messages. A bucket's memory goes to that thread when its gradients are final and
//! comes back later, so nothing is shared and nothing is locked. What the thread does in between is the
//! agreement's own affair.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use paceline_comm::error::Party;
use paceline_comm::{CommError, Rank, RegisteredBuffer, Transfer};
use paceline_system::clock::Clock;
use paceline_system::threads;

use super::{Returned, StepReport, Wait};

/// After how many steps the order of messages is made from measured times: the first ones warm caches and
/// links up.
const MEASURED_STEPS: u64 = 3;

/// What the carrying thread is given.
pub(super) enum Request {
    /// A step begins: reports to be added up over all workers.
    Report(StepReport),
    /// Final gradients.
    Bucket(usize, RegisteredBuffer),
    /// New weights of this rank's chunk of a bucket, to be given to all and filled up with theirs.
    Gather(usize, RegisteredBuffer),
    /// Numbers that go to other ranks or come from them by a list, between steps.
    Exchange(Vec<Transfer>, Vec<f32>),
    /// When each bucket was ready in the last step, in seconds.
    Reorder(Vec<f32>),
    /// Numbers to be added up over all ranks, which come here at the same point.
    Sum(Vec<f32>),
    /// Numbers between steps, to be replaced by those of rank 0.
    Broadcast(Vec<f32>),
    /// The optimizer's state, where it is not this rank's own.
    Optimizer(Vec<Vec<f32>>),
    /// All weights as the servers have them, where those of this rank may be older.
    Weights(Vec<f32>),
    /// A worker that was lost is back: servers are given running statistics for it.
    Readmit(Returned, Vec<f32>),
    /// This worker is: weights, and running statistics behind them.
    ComeBack(Vec<f32>),
}

/// What it gives back.
pub(super) enum Reply {
    Total(StepReport),
    Bucket(usize, RegisteredBuffer),
    Numbers(Vec<f32>),
    Optimizer(Vec<Vec<f32>>),
    Failed(CommError),
}

/// The carrying thread's ends of both queues.
pub(super) struct Channel {
    pub requests: Receiver<Request>,
    pub replies: SyncSender<Reply>,
}

impl Channel {
    /// Gives something back. Nobody listens any more if the replica is gone; then the next request does not
    /// come either.
    pub fn reply(&self, reply: Reply) {
        let _ = self.replies.send(reply);
    }
}

/// Where the memory of a bucket is.
#[derive(Debug)]
enum Slot {
    Home(RegisteredBuffer),
    Away,
    Landed(RegisteredBuffer),
}

/// What a courier is started with.
pub(super) struct CourierOptions {
    pub rank: Rank,
    /// The name in errors, and the thread's.
    pub phase: &'static str,
    /// How long to wait for a reply.
    pub deadline: Duration,
    pub clock: Clock,
}

/// A replica's end.
#[derive(Debug)]
pub(super) struct Courier {
    rank: Rank,
    phase: &'static str,
    slots: Vec<Slot>,
    total: Option<StepReport>,
    numbers: Option<Vec<f32>>,
    /// Memory for numbers that are added up: used again and again.
    spare: Vec<f32>,
    optimizer: Option<Vec<Vec<f32>>>,
    requests: Option<SyncSender<Request>>,
    replies: Receiver<Reply>,
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
    /// Starts the thread: `carry` takes requests until there are no more.
    pub fn start(
        CourierOptions { rank, phase, deadline, clock }: CourierOptions,
        memory: Vec<RegisteredBuffer>,
        carry: impl FnOnce(&Channel) -> Result<(), CommError> + Send + 'static,
    ) -> Result<Self, CommError> {
        // A step has its numbers and its buckets; a new order goes with them.
        let bound = memory.len() + 2;
        let ((requests, request_end), (reply_end, replies)) = (sync_channel(bound), sync_channel(bound));
        let ready = vec![0.0; memory.len()];
        let channel = Channel { requests: request_end, replies: reply_end };
        let body = move || {
            if let Err(error) = carry(&channel) {
                channel.reply(Reply::Failed(error));
            }
        };
        let thread =
            threads::spawn(phase, body).map_err(|source| CommError::System { rank, what: "start a thread", source })?;
        Ok(Self {
            rank,
            phase,
            slots: memory.into_iter().map(Slot::Home).collect(),
            total: None,
            numbers: None,
            spare: Vec::new(),
            optimizer: None,
            requests: Some(requests),
            replies,
            thread: Some(thread),
            deadline,
            began: clock.seconds(),
            clock,
            ready,
            steps: 0,
            applied: 0,
        })
    }

    pub fn rank(&self) -> Rank {
        self.rank
    }

    pub fn begin_step(&mut self, report: StepReport) -> Result<(), CommError> {
        if self.steps == MEASURED_STEPS {
            self.give(Request::Reorder(self.ready.clone()))?;
        }
        self.steps += 1;
        self.began = self.clock.seconds();
        self.total = None;
        self.give(Request::Report(report))
    }

    pub fn total(&mut self) -> Result<StepReport, CommError> {
        loop {
            if let Some(report) = self.total {
                return Ok(report);
            }
            self.take_reply(Wait::Block)?;
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
        self.give(Request::Bucket(bucket, memory))
    }

    /// What came back for a bucket, once.
    pub fn receive(&mut self, bucket: usize, wait: Wait) -> Result<Option<&mut [f32]>, CommError> {
        while matches!(self.slots[bucket], Slot::Away) && self.take_reply(wait)? {}
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

    /// The numbers of a bucket that came back and were not sent again.
    pub fn at_home(&mut self, bucket: usize) -> &mut [f32] {
        match &mut self.slots[bucket] {
            Slot::Home(memory) => memory.as_mut_slice(),
            _ => panic!("bucket {bucket} is looked at after it came back"),
        }
    }

    /// Sends the numbers of a bucket that came back, and were changed, so that every rank has all chunks.
    pub fn gather(&mut self, bucket: usize) -> Result<(), CommError> {
        let Slot::Home(memory) = std::mem::replace(&mut self.slots[bucket], Slot::Away) else {
            panic!("bucket {bucket} is gathered after its sums came back");
        };
        self.give(Request::Gather(bucket, memory))
    }

    /// Runs this rank's part of a list of transfers, between steps.
    pub fn exchange(&mut self, list: Vec<Transfer>, numbers: Vec<f32>) -> Result<Vec<f32>, CommError> {
        self.between(Request::Exchange(list, numbers))
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
        let sums = self.between(Request::Sum(given))?;
        numbers.copy_from_slice(&sums);
        self.spare = sums;
        Ok(())
    }

    /// Replaces numbers by those of rank 0.
    pub fn broadcast_from_root(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        let root = self.between(Request::Broadcast(numbers.to_vec()))?;
        numbers.copy_from_slice(&root);
        Ok(())
    }

    /// Replaces weights by those that the servers have.
    pub fn fetch_weights(&mut self, weights: &mut [f32]) -> Result<(), CommError> {
        let last = self.between(Request::Weights(weights.to_vec()))?;
        weights.copy_from_slice(&last);
        Ok(())
    }

    /// Tells servers of a worker that has come back.
    pub fn readmit(&mut self, returned: Returned, states: &[f32]) -> Result<(), CommError> {
        self.between(Request::Readmit(returned, states.to_vec())).map(drop)
    }

    /// Fetches what this worker has missed: weights, and running statistics behind them.
    pub fn come_back(&mut self, numbers: Vec<f32>) -> Result<Vec<f32>, CommError> {
        self.between(Request::ComeBack(numbers))
    }

    fn between(&mut self, request: Request) -> Result<Vec<f32>, CommError> {
        self.give(request)?;
        loop {
            match self.numbers.take() {
                Some(numbers) => return Ok(numbers),
                None => self.take_reply(Wait::Block)?,
            };
        }
    }

    /// The optimizer's state from wherever it is.
    pub fn fetch_optimizer(&mut self, buffers: Vec<Vec<f32>>) -> Result<Vec<Vec<f32>>, CommError> {
        self.give(Request::Optimizer(buffers))?;
        loop {
            match self.optimizer.take() {
                Some(state) => return Ok(state),
                None => self.take_reply(Wait::Block)?,
            };
        }
    }

    fn give(&mut self, request: Request) -> Result<(), CommError> {
        let requests = self.requests.as_ref().expect("there until it is dropped");
        if requests.send(request).is_ok() {
            return Ok(());
        }
        // The thread has ended and has said why.
        while self.take_reply(Wait::Block)? {}
        Err(CommError::Broken { rank: self.rank, phase: self.phase })
    }

    /// Takes in one reply; whether there was one.
    fn take_reply(&mut self, wait: Wait) -> Result<bool, CommError> {
        let (rank, phase) = (self.rank, self.phase);
        let broken = CommError::Broken { rank, phase };
        let reply = if wait == Wait::Block {
            self.replies.recv_timeout(self.deadline).map_err(|error| match error {
                RecvTimeoutError::Disconnected => broken,
                RecvTimeoutError::Timeout => {
                    CommError::DeadlinePassed { rank, peer: Party::Anyone, phase, waited: self.deadline }
                }
            })?
        } else {
            match self.replies.try_recv() {
                Ok(reply) => reply,
                Err(TryRecvError::Empty) => return Ok(false),
                Err(TryRecvError::Disconnected) => return Err(broken),
            }
        };
        match reply {
            Reply::Total(report) => self.total = Some(report),
            Reply::Bucket(bucket, memory) => self.slots[bucket] = Slot::Landed(memory),
            Reply::Numbers(numbers) => self.numbers = Some(numbers),
            Reply::Optimizer(state) => self.optimizer = Some(state),
            Reply::Failed(error) => return Err(error),
        }
        Ok(true)
    }
}

impl Drop for Courier {
    fn drop(&mut self) {
        // Without requests the thread ends; one that waits for a dead rank has a deadline.
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
