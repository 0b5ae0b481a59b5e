//! A worker's thread: pushes each bucket as it becomes ready, and takes back weights.

use std::time::Duration;

use paceline_comm::transfer::{Action, Transfer};
use paceline_comm::{CommError, Communicator, Rank, RegisteredBuffer};
use paceline_system::memory::zeros;

use super::super::courier::{Answer, BucketShape, Courier, Ends, Job};
use super::super::{SHARED, Shared};
use super::talk::{Call, Roles, all_of_worker, length_words};
use super::{COMMAND, Command, MEETS};

pub(super) fn start(
    communicator: Communicator,
    roles: Roles,
    buckets: &[BucketShape],
    deadline: Duration,
) -> Result<Courier, CommError> {
    let lengths: Vec<usize> = buckets.iter().map(|bucket| bucket.elements).collect();
    let zeros = |&length: &usize| zeros(length, "messages").unwrap_or_else(|refused| refused.unwind());
    let memory = lengths.iter().map(zeros).map(RegisteredBuffer::from).collect();
    let rank = communicator.rank();
    let calls = Call::of_step(&lengths);
    let room = calls.iter().map(|call| call.worker_elements(roles)).max().unwrap_or(0).max(2 * SHARED);
    let (buckets, worker) = (buckets.to_vec(), rank.index());
    let mut carrier =
        Carrier { communicator, roles, worker, calls, buckets, room: vec![0.0; room], tag: 0, meets: MEETS };
    Courier::start((rank, roles.workers, "parameter-server"), memory, deadline, move |ends| {
        let ended = carrier.run(ends);
        if ended.is_ok() { carrier.tell(Command::Goodbye, [0.0; SHARED]) } else { ended }
    })
}

struct Carrier {
    communicator: Communicator,
    roles: Roles,
    worker: usize,
    /// Of a step.
    calls: Vec<Call>,
    buckets: Vec<BucketShape>,
    /// What goes out, then what comes in.
    room: Vec<f32>,
    /// Counts exchanges of steps, and those between steps, which all ranks count together.
    tag: u64,
    meets: u64,
}

impl Carrier {
    fn run(&mut self, ends: &Ends) -> Result<(), CommError> {
        let count = self.buckets.len();
        let mut memory: Vec<Option<RegisteredBuffer>> = (0..count).map(|_| None).collect();
        // The next call of the step, and the bucket under way.
        let mut next = count + 1;
        let mut pushed: Option<RegisteredBuffer> = None;
        while let Ok(job) = ends.jobs.recv() {
            match job {
                // Buckets go in the order in which they are ready: the servers have nothing to choose from.
                Job::Reorder(_) => {}
                Job::Share(numbers) => {
                    ends.answer(Answer::Shared(self.numbers(Command::Step, numbers)?));
                    next = 0;
                }
                Job::Sum(numbers) => ends.answer(Answer::Numbers(self.sum(numbers)?)),
                Job::First(mut numbers) => {
                    self.communicator.broadcast(Rank(0), &mut numbers)?;
                    ends.answer(Answer::Numbers(numbers));
                }
                Job::State(state) => ends.answer(Answer::State(self.state(state)?)),
                Job::Weights(weights) => ends.answer(Answer::Numbers(self.weights(weights)?)),
                Job::Bucket(bucket, buffer) => memory[bucket] = Some(buffer),
            }
            while next <= count {
                let now = if next < count { memory[next].take() } else { None };
                if next < count && now.is_none() {
                    break;
                }
                let call = self.calls[next];
                if let Some(now) = &now {
                    self.room[..call.push].copy_from_slice(now.as_slice());
                }
                self.exchange(&call.worker(self.roles, self.worker), call.worker_elements(self.roles))?;
                if let Some(mut before) = std::mem::replace(&mut pushed, now) {
                    before.as_mut_slice().copy_from_slice(&self.room[call.pulled()]);
                    ends.answer(Answer::Bucket(next - 1, before));
                }
                next += 1;
            }
        }
        Ok(())
    }

    fn exchange(&mut self, list: &[Transfer], elements: usize) -> Result<(), CommError> {
        self.tag += 1;
        self.communicator.exchange(list, self.tag, &mut self.room[..elements])
    }

    /// Says what follows.
    fn tell(&mut self, command: Command, numbers: Shared) -> Result<(), CommError> {
        self.room[..SHARED].copy_from_slice(&numbers);
        self.room[COMMAND] = command.number();
        let send = |server: usize| Transfer {
            step: self.worker as u32,
            action: Action::Send,
            peer: self.roles.server(server),
            start: 0,
            length: SHARED,
        };
        let list: Vec<Transfer> = (0..self.roles.servers).map(send).collect();
        self.exchange(&list, SHARED)
    }

    /// Says what follows, and hears the sum of all workers' numbers from the first server.
    fn numbers(&mut self, command: Command, numbers: Shared) -> Result<Shared, CommError> {
        self.tell(command, numbers)?;
        let (step, peer) = (self.worker as u32, self.roles.server(0));
        self.exchange(&[Transfer { step, action: Action::Receive, peer, start: 0, length: SHARED }], SHARED)?;
        let mut sums = [0.0; SHARED];
        sums.copy_from_slice(&self.room[..SHARED]);
        Ok(sums)
    }

    fn sum(&mut self, numbers: Vec<f32>) -> Result<Vec<f32>, CommError> {
        let length = numbers.len();
        let mut words = [0.0; SHARED];
        (words[0], words[1]) = length_words(length);
        self.numbers(Command::Sum, words)?;
        let room = length + self.roles.servers;
        if self.room.len() < room {
            self.room.resize(room, 0.0);
        }
        self.room[..length].copy_from_slice(&numbers);
        for call in Call::pair(length) {
            self.meets += 1;
            let list = call.worker(self.roles, self.worker);
            self.communicator.exchange(&list, self.meets, &mut self.room[..room])?;
        }
        Ok(self.room[..length].to_vec())
    }

    /// The first worker gets the optimizer's state, for a checkpoint; the others keep theirs, which nobody looks at.
    fn state(&mut self, mut state: Vec<Vec<f32>>) -> Result<Vec<Vec<f32>>, CommError> {
        self.numbers(Command::State, [0.0; SHARED])?;
        for slot in &mut state {
            self.meets += 1;
            if self.worker == 0 {
                let list = all_of_worker(self.roles, &self.buckets, self.worker);
                self.communicator.exchange(&list, self.meets, slot)?;
            }
        }
        Ok(state)
    }

    /// Every worker gets the weights: all have pushed all they had by now.
    fn weights(&mut self, mut weights: Vec<f32>) -> Result<Vec<f32>, CommError> {
        self.numbers(Command::Weights, [0.0; SHARED])?;
        self.meets += 1;
        let list = all_of_worker(self.roles, &self.buckets, self.worker);
        self.communicator.exchange(&list, self.meets, &mut weights)?;
        Ok(weights)
    }
}
