//! A worker's end, and its thread: pushes each bucket as it becomes ready, and takes back weights.

use paceline_comm::transfer::{Action, Transfer};
use paceline_comm::{CommError, Communicator, Rank, RegisteredBuffer};
use paceline_system::memory::zeros;

use super::super::courier::{Reply, Courier, CourierOptions, Channel, Request};
use super::super::report::WORDS;
use super::super::returned::{MET, met_of_servers};
use super::super::{
    Agreement, Between, BucketShape, Join, Protocol, Returned, Roles, Settled, StepReport, Target, Wait,
};
use super::Pace;
use super::header::{Command, HEADER, Header, MEETS};
use super::talk::{Call, all_of_worker};
use crate::squeeze::{self, Buckets, Codec, Message};

/// A worker's end.
#[derive(Debug)]
pub(super) struct Worker {
    courier: Courier,
    workers: usize,
    pace: Pace,
    /// Whether pulled weights are the servers' own bits.
    is_exact: bool,
    protocol: Protocol,
}

impl Worker {
    pub fn start(join: Join<'_>, protocol: Protocol) -> Result<Self, CommError> {
        let Join { communicator, roles, shape, options, deadline, clock, .. } = join;
        let zeros = |bucket: &BucketShape| {
            zeros(bucket.elements, "messages").unwrap_or_else(|refused| refused.unwind())
        };
        let memory = shape.buckets.iter().map(zeros).map(RegisteredBuffer::from).collect();
        let rank = communicator.rank();
        let calls = Call::of_step(&protocol, shape);
        let room = calls.iter().map(|call| call.worker_elements(roles)).max().unwrap_or(0).max(HEADER);
        let codec = options.squeeze.codec();
        let is_exact = codec.is_identity();
        let mut carrier = Carrier {
            communicator,
            roles,
            worker: rank.index(),
            calls,
            buckets: shape.buckets.clone(),
            parameters: shape.parameters,
            codec,
            message: Message::default(),
            room: vec![0.0; room],
            tag: 0,
            meets: MEETS,
        };
        let goodbye = protocol.closing.is_some();
        let courier = CourierOptions { rank, phase: "parameter-server", deadline, clock };
        let courier = Courier::start(courier, memory, move |channel| {
            carrier.run(channel)?;
            if goodbye { carrier.send_header(Header::new(Command::Goodbye)) } else { Ok(()) }
        })?;
        let pace = Pace::from_staleness(options.staleness);
        Ok(Self { courier, workers: roles.workers, pace, is_exact, protocol })
    }
}

impl Agreement for Worker {
    fn protocol(&self) -> &Protocol {
        &self.protocol
    }

    fn rank(&self) -> Rank {
        self.courier.rank()
    }

    fn workers(&self) -> usize {
        self.workers
    }

    fn shares_steps(&self) -> bool {
        self.pace == Pace::Synchronous
    }

    fn broadcast_from_root(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        self.courier.broadcast_from_root(numbers)
    }

    fn sum(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        self.courier.sum(numbers)
    }

    fn begin_step(&mut self, report: StepReport) -> Result<(), CommError> {
        self.courier.begin_step(report)
    }

    fn total(&mut self) -> Result<StepReport, CommError> {
        self.courier.total()
    }

    fn send(&mut self, bucket: usize, gradients: &[f32]) -> Result<(), CommError> {
        self.courier.send(bucket, gradients)
    }

    fn settle(&mut self, bucket: usize, wait: Wait, target: &mut dyn Target) -> Result<Settled, CommError> {
        let Some(weights) = self.courier.receive(bucket, wait)? else { return Ok(Settled::NotYet) };
        match target.replace_weights(bucket, weights) {
            Ok(()) => Ok(Settled::Done),
            Err(_) => Ok(Settled::Refused),
        }
    }

    fn fetch_weights(&mut self, weights: &mut [f32]) -> Result<(), CommError> {
        // Those of the last pull are the servers', where all workers push together and nothing is rounded.
        if self.pace == Pace::Synchronous && self.is_exact {
            return Ok(());
        }
        self.courier.fetch_weights(weights)
    }

    fn readmit(&mut self, returned: Returned, states: &[f32]) -> Result<bool, CommError> {
        self.courier.readmit(returned, states)?;
        Ok(true)
    }

    fn come_back(&mut self, _: u64, states: &mut [f32], weights: &mut [f32]) -> Result<(), CommError> {
        let given = self.courier.come_back([&weights[..], states].concat())?;
        weights.copy_from_slice(&given[..weights.len()]);
        states.copy_from_slice(&given[weights.len()..]);
        Ok(())
    }

    fn fetch_optimizer(&mut self, state: &mut [&mut [f32]]) -> Result<(), CommError> {
        let found = self.courier.fetch_optimizer(state.iter().map(|slot| slot.to_vec()).collect())?;
        state.iter_mut().zip(found).for_each(|(slot, found)| slot.copy_from_slice(&found));
        Ok(())
    }
}

struct Carrier {
    communicator: Communicator,
    roles: Roles,
    worker: usize,
    /// Of a step.
    calls: Vec<Call>,
    buckets: Vec<BucketShape>,
    /// Elements of all of them, with the gaps between.
    parameters: usize,
    codec: Box<dyn Codec>,
    message: Message,
    /// What goes out, then what comes in.
    room: Vec<f32>,
    /// Counts exchanges of steps, and those between steps, which all ranks count together.
    tag: u64,
    meets: u64,
}

impl Carrier {
    fn run(&mut self, channel: &Channel) -> Result<(), CommError> {
        // What is ready to be pushed, and what was and is not pulled yet, by bucket.
        let none = || (0..self.buckets.len()).map(|_| None).collect();
        let (mut ready, mut pushed): (Vec<Option<RegisteredBuffer>>, Vec<Option<RegisteredBuffer>>) = (none(), none());
        // The next call of the step.
        let mut next = self.calls.len();
        while let Ok(request) = channel.requests.recv() {
            match request {
                // Buckets go in the order in which they are ready: the servers have nothing to choose from.
                Request::Reorder(_) => {}
                Request::Report(report) => {
                    let header = Header { report, ..Header::new(Command::Step) };
                    channel.reply(Reply::Total(self.announce(header)?));
                    next = 0;
                }
                Request::Sum(numbers) => channel.reply(Reply::Numbers(self.sum(numbers)?)),
                Request::Broadcast(mut numbers) => {
                    self.communicator.broadcast(Rank(0), &mut numbers)?;
                    channel.reply(Reply::Numbers(numbers));
                }
                Request::Optimizer(state) => channel.reply(Reply::Optimizer(self.optimizer(state)?)),
                Request::Weights(weights) => channel.reply(Reply::Numbers(self.weights(weights)?)),
                Request::Readmit(returned, states) => channel.reply(Reply::Numbers(self.readmit(returned, states)?)),
                Request::ComeBack(numbers) => channel.reply(Reply::Numbers(self.come_back(numbers)?)),
                Request::Bucket(bucket, buffer) => ready[bucket] = Some(buffer),
                // Servers have all chunks.
                Request::Gather(bucket, buffer) => channel.reply(Reply::Bucket(bucket, buffer)),
                Request::Exchange(_, numbers) => channel.reply(Reply::Numbers(numbers)),
            }
            while let Some(&call) = self.calls.get(next) {
                if let Some(bucket) = call.pushes {
                    let Some(gradients) = ready[bucket].take() else { break };
                    self.room[..call.push].copy_from_slice(gradients.as_slice());
                    pushed[bucket] = Some(gradients);
                }
                self.push_pull(call)?;
                if let Some((bucket, mut weights)) = call.pulls.and_then(|bucket| Some((bucket, pushed[bucket].take()?))) {
                    weights.as_mut_slice().copy_from_slice(&self.room[call.pulled()]);
                    channel.reply(Reply::Bucket(bucket, weights));
                }
                next += 1;
            }
        }
        Ok(())
    }

    /// Pushes gradients and pulls weights.
    fn push_pull(&mut self, call: Call) -> Result<(), CommError> {
        let list = call.worker(self.roles, self.worker);
        let Self { communicator, codec, message, room, .. } = self;
        self.tag += 1;
        let values = &mut room[..call.worker_elements(self.roles)];
        let buckets = Buckets { sent: call.pushes, received: call.pulls };
        squeeze::exchange(&mut **codec, communicator, (&list, self.tag), buckets, (values, message))
    }

    fn exchange(&mut self, list: &[Transfer], elements: usize) -> Result<(), CommError> {
        self.tag += 1;
        self.communicator.exchange(list, self.tag, &mut self.room[..elements])
    }

    /// Says to all servers what follows.
    fn send_header(&mut self, header: Header) -> Result<(), CommError> {
        self.room[..HEADER].copy_from_slice(&header.to_words());
        let send = |server: usize| Transfer {
            step: self.worker as u32,
            action: Action::Send,
            peer: self.roles.server(server),
            start: 0,
            length: HEADER,
        };
        let list: Vec<Transfer> = (0..self.roles.servers).map(send).collect();
        self.exchange(&list, HEADER)
    }

    /// Says what follows, and receives the sum of all workers' reports from the first server.
    fn announce(&mut self, header: Header) -> Result<StepReport, CommError> {
        self.send_header(header)?;
        let (step, peer) = (self.worker as u32, self.roles.server(0));
        self.exchange(&[Transfer { step, action: Action::Receive, peer, start: 0, length: WORDS }], WORDS)?;
        let mut words = [0.0; WORDS];
        words.copy_from_slice(&self.room[..WORDS]);
        Ok(StepReport::from_words(words))
    }

    fn sum(&mut self, mut numbers: Vec<f32>) -> Result<Vec<f32>, CommError> {
        let length = numbers.len();
        self.announce(Header { length, ..Header::new(Command::Between(Between::Sum)) })?;
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
        numbers.copy_from_slice(&self.room[..length]);
        Ok(numbers)
    }

    /// The first worker gets the optimizer's state, for a checkpoint; the others keep theirs, which nobody
    /// looks at.
    fn optimizer(&mut self, mut state: Vec<Vec<f32>>) -> Result<Vec<Vec<f32>>, CommError> {
        self.announce(Header::new(Command::Between(Between::Optimizer)))?;
        for slot in &mut state {
            self.meets += 1;
            if self.worker == 0 {
                let list = all_of_worker(self.roles, &self.buckets, self.worker);
                self.communicator.exchange(&list, self.meets, slot)?;
            }
        }
        Ok(state)
    }

    /// Says who is back, with running statistics for it to the first server; the others count that.
    fn readmit(&mut self, returned: Returned, mut states: Vec<f32>) -> Result<Vec<f32>, CommError> {
        self.send_header(Header { length: returned.to_number() as usize, ..Header::new(Command::Readmit) })?;
        self.tag += 1;
        let (step, peer, length) = (self.worker as u32, self.roles.server(0), states.len());
        let send = Transfer { step, action: Action::Send, peer, start: 0, length };
        let list: Vec<Transfer> = (length > 0).then_some(send).into_iter().collect();
        self.communicator.exchange(&list, self.tag, &mut states)?;
        Ok(states)
    }

    /// Takes the weights as they are, and behind them running statistics; then how often all have met.
    fn come_back(&mut self, mut numbers: Vec<f32>) -> Result<Vec<f32>, CommError> {
        self.send_header(Header::new(Command::ComeBack))?;
        self.tag += 1;
        let list = all_of_worker(self.roles, &self.buckets, self.worker);
        self.communicator.exchange(&list, self.tag, &mut numbers)?;
        let (length, step) = (numbers.len(), self.worker as u32);
        numbers.resize(length + MET * self.roles.servers, 0.0);
        let states = self.parameters..length;
        let of = |server: usize| {
            let states = if server == 0 { states.clone() } else { 0..0 };
            let met = length + MET * server..length + MET * (server + 1);
            let peer = self.roles.server(server);
            [met, states].map(|range| Transfer {
                step,
                action: Action::Receive,
                peer,
                start: range.start,
                length: range.len(),
            })
        };
        let list: Vec<Transfer> = (0..self.roles.servers).flat_map(of).filter(|part| part.length > 0).collect();
        self.tag += 1;
        self.communicator.exchange(&list, self.tag, &mut numbers)?;
        self.meets = MEETS + met_of_servers(self.communicator.rank(), &numbers[length..])?;
        numbers.truncate(length);
        Ok(numbers)
    }

    /// Every worker gets the weights: all have pushed all they had by now.
    fn weights(&mut self, mut weights: Vec<f32>) -> Result<Vec<f32>, CommError> {
        self.announce(Header::new(Command::Between(Between::Weights)))?;
        self.meets += 1;
        let list = all_of_worker(self.roles, &self.buckets, self.worker);
        self.communicator.exchange(&list, self.meets, &mut weights)?;
        Ok(weights)
    }
}
