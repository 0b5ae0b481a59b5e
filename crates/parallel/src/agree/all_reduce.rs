//! All-reduce: the gradients of all ranks are summed, bucket by bucket, while the backward pass goes on.
//!
//! The messages of a step follow a list ([`crate::schedule`]). Sums come back at any time; they are applied
//! when the next forward pass needs the parameters, at the latest. After the first steps, rank 0's times
//! decide the order for all ranks. Per rank 2(p−1)/p of the gradients' bytes are sent and received with a
//! ring. Ranks that share a machine's memory keep one copy of the weights instead (`shares.rs`). Where each keeps
//! a part of the optimizer's state, it gets the sums of that part only, and gives weights back (`sharded.rs`).

use paceline_comm::{CommError, Communicator, Rank, RegisteredBuffer};
use paceline_system::clock::Clock;

use super::courier::{Reply, Courier, CourierOptions, Channel, Request};
use super::sharded::{self, Sharded};
use super::shares::Shares;
use super::{
    Agreement, BucketShape, Demands, Join, Options, Protocol, Recipe, Settled, Shape, StepReport, Target, Wait,
};
use crate::schedule::{Expected, Message, LinkSpeed, pieces, schedule};
use crate::squeeze::{self, Codec, Segment};

/// What the command line offers.
#[derive(Debug)]
pub struct AllReduce;

/// The same.
pub const RECIPE: AllReduce = AllReduce;

impl Recipe for AllReduce {
    fn name(&self) -> &'static str {
        "all-reduce"
    }

    fn about(&self) -> &'static str {
        "all get the sum of all gradients and make the same step"
    }

    fn sums_on_devices(&self) -> bool {
        true
    }

    fn keeps_one_copy(&self) -> bool {
        true
    }

    fn refuses(&self, demands: &Demands) -> Option<String> {
        if let Some(sentence) = demands.foreign(self.name()) {
            return Some(sentence);
        }
        let sentence = if demands.staleness {
            "--staleness is for parameter servers; type --agree parameter-server, or leave it out"
        } else if demands.options.shard && demands.whole_tensors {
            "--shard optimizer cuts tensors into chunks, and lars looks at whole ones; type --optimizer momentum or \
             another, or --shard none"
        } else {
            return None;
        };
        Some(sentence.to_owned())
    }

    fn protocol(&self, shape: &Shape, options: &Options) -> Protocol {
        match options.shard {
            true => Protocol::sharded(shape.buckets.len(), sharded::needed(&shape.buckets)),
            false => Protocol::all_reduce(shape.buckets.len()),
        }
    }

    fn join(&self, join: Join<'_>) -> Result<Box<dyn Agreement>, CommError> {
        let Join { mut communicator, urgent, memory, shape, options, deadline, clock, roles, group, lending } = join;
        if options.one_copy
            && let Some(region) = Shares::region(&mut communicator, shape)?
        {
            let protocol = Protocol::all_reduce(shape.buckets.len());
            return Ok(Box::new(Shares::start(communicator, region, (shape, protocol))?));
        }
        let protocol = self.protocol(shape, &options);
        if options.shard {
            let join = Join { communicator, urgent, memory, lending, shape, options, deadline, clock, roles, group };
            return Ok(Box::new(Sharded::start(join, protocol)?));
        }
        let memory: Result<Vec<RegisteredBuffer>, CommError> =
            shape.buckets.iter().map(|bucket| communicator.register_buffer(bucket.elements)).collect();
        let (rank, world) = (communicator.rank(), communicator.world());
        let mut carrier = Carrier::new(communicator, shape, &options, clock.clone());
        let courier = CourierOptions { rank, phase: "all-reduce", deadline, clock };
        let courier = Courier::start(courier, memory?, move |channel| carrier.run(channel))?;
        Ok(Box::new(Worker { courier, world, urgent, protocol }))
    }
}

/// A worker's end.
#[derive(Debug)]
struct Worker {
    courier: Courier,
    world: usize,
    /// For numbers that somebody waits for.
    urgent: Option<Communicator>,
    protocol: Protocol,
}

impl Agreement for Worker {
    fn protocol(&self) -> &Protocol {
        &self.protocol
    }

    fn rank(&self) -> Rank {
        self.courier.rank()
    }

    fn workers(&self) -> usize {
        self.world
    }

    fn broadcast_from_root(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        self.courier.broadcast_from_root(numbers)
    }

    fn sum(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        match &mut self.urgent {
            Some(urgent) => urgent.all_reduce(numbers),
            None => self.courier.sum(numbers),
        }
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
        let Some(sums) = self.courier.receive(bucket, wait)? else { return Ok(Settled::NotYet) };
        if target.apply_sums(bucket, 0..sums.len(), sums).is_err() {
            return Ok(Settled::Refused);
        }
        self.courier.applied();
        Ok(Settled::Done)
    }

    fn has_stepped(&mut self, steps: u64) -> bool {
        self.courier.has_applied(steps)
    }
}

/// What the thread owns.
pub(super) struct Carrier {
    communicator: Communicator,
    buckets: Vec<BucketShape>,
    segments: Vec<Vec<Segment>>,
    codec: Box<dyn Codec>,
    /// Encoded values.
    message: squeeze::Message,
    clock: Clock,
    /// Whether sums go to the owners of chunks only, who give weights back.
    shard: bool,
    /// Counts exchanges by lists.
    tag: u64,
}

/// A step under way.
struct Step {
    order: Vec<Message>,
    /// The next message.
    next: usize,
    buckets: Vec<Option<RegisteredBuffer>>,
    /// Elements that were carried, in how many seconds.
    carried: (usize, f64),
    /// Weights of chunks, behind all sums: in the order in which the next forward pass needs them, the next
    /// message, and what is ready to be gathered.
    gathers: Vec<Message>,
    gathered: usize,
    stepped: Vec<Option<RegisteredBuffer>>,
}

impl Carrier {
    /// One that carries the messages of a model.
    pub fn new(communicator: Communicator, shape: &Shape, options: &Options, clock: Clock) -> Self {
        Self {
            communicator,
            buckets: shape.buckets.clone(),
            segments: shape.segments.clone(),
            codec: options.squeeze.codec(),
            message: squeeze::Message::default(),
            clock,
            shard: options.shard,
            tag: 0,
        }
    }

    /// Carries steps until there are no more requests.
    pub fn run(&mut self, channel: &Channel) -> Result<(), CommError> {
        let at_once = LinkSpeed { latency_s: 0.0, element_s: 0.0 };
        let order = schedule(&self.expected(|bucket| bucket.ready_after as f64), at_once);
        let none = || self.buckets.iter().map(|_| None).collect();
        let of_bucket = |bucket: usize| pieces(self.buckets[bucket].elements).map(move |range| Message { bucket, range });
        let gathers = sharded::needed(&self.buckets).into_iter().flat_map(of_bucket).collect();
        let (buckets, stepped) = (none(), none());
        let mut step = Step { order, next: 0, buckets, carried: (0, 0.0), gathers, gathered: 0, stepped };
        while let Ok(request) = channel.requests.recv() {
            match request {
                Request::Reorder(ready) => step.order = self.reorder(ready, step.carried)?,
                Request::Report(report) => {
                    let mut words = report.to_words();
                    self.communicator.all_reduce(&mut words)?;
                    channel.reply(Reply::Total(StepReport::from_words(words)));
                    (step.next, step.gathered, step.carried) = (0, 0, (0, 0.0));
                }
                Request::Sum(mut numbers) => {
                    self.communicator.all_reduce(&mut numbers)?;
                    channel.reply(Reply::Numbers(numbers));
                }
                Request::Broadcast(mut numbers) => {
                    self.communicator.broadcast(Rank(0), &mut numbers)?;
                    channel.reply(Reply::Numbers(numbers));
                }
                Request::Optimizer(state) => channel.reply(Reply::Optimizer(state)),
                // Nobody is lost and comes back.
                Request::Weights(numbers) | Request::Readmit(_, numbers) | Request::ComeBack(numbers) => {
                    channel.reply(Reply::Numbers(numbers));
                }
                Request::Bucket(bucket, memory) => step.buckets[bucket] = Some(memory),
                Request::Gather(bucket, memory) => step.stepped[bucket] = Some(memory),
                Request::Exchange(list, mut numbers) => {
                    self.tag += 1;
                    self.communicator.exchange(&list, self.tag, &mut numbers)?;
                    channel.reply(Reply::Numbers(numbers));
                }
            }
            while self.carry(&mut step, channel)? {}
            while self.gather(&mut step, channel)? {}
        }
        Ok(())
    }

    /// Carries the next message if its bucket is there; whether it was.
    fn carry(&mut self, step: &mut Step, channel: &Channel) -> Result<bool, CommError> {
        let Some(Message { bucket, range }) = step.order.get(step.next) else { return Ok(false) };
        let Some(memory) = &mut step.buckets[*bucket] else { return Ok(false) };
        let start = self.clock.seconds();
        let Self { communicator, codec, message, segments, .. } = self;
        let segments = segments.get(*bucket).map_or(&[][..], Vec::as_slice);
        let (codec, held) = (&mut **codec, (range.clone(), segments));
        match self.shard {
            true => squeeze::reduce_scatter(codec, communicator, (*bucket, memory.as_mut_slice()), held, message)?,
            false => squeeze::all_reduce(codec, communicator, (*bucket, memory), held, message)?,
        }
        let seconds = self.clock.seconds() - start;
        step.carried = (step.carried.0 + range.len(), step.carried.1 + seconds);
        step.next += 1;
        if range.end == self.buckets[*bucket].elements
            && let Some(memory) = step.buckets[*bucket].take()
        {
            channel.reply(Reply::Bucket(*bucket, memory));
        }
        Ok(true)
    }

    /// Gathers the next message of weights, behind all sums of the step, if its bucket is there; whether it was.
    fn gather(&mut self, step: &mut Step, channel: &Channel) -> Result<bool, CommError> {
        if step.next < step.order.len() {
            return Ok(false);
        }
        let Some(Message { bucket, range }) = step.gathers.get(step.gathered) else { return Ok(false) };
        let Some(memory) = &mut step.stepped[*bucket] else { return Ok(false) };
        self.communicator.all_gather(&mut memory.as_mut_slice()[range.clone()])?;
        step.gathered += 1;
        if range.end == self.buckets[*bucket].elements
            && let Some(memory) = step.stepped[*bucket].take()
        {
            channel.reply(Reply::Bucket(*bucket, memory));
        }
        Ok(true)
    }

    fn expected(&self, ready: impl Fn(&BucketShape) -> f64) -> Vec<Expected> {
        let of = |bucket: &BucketShape| Expected {
            ready_s: ready(bucket),
            need: bucket.needed_before,
            elements: bucket.elements,
        };
        self.buckets.iter().map(of).collect()
    }

    /// The order that follows from rank 0's times.
    fn reorder(&mut self, ready: Vec<f32>, (elements, seconds): (usize, f64)) -> Result<Vec<Message>, CommError> {
        let mut times = ready;
        times.push((seconds / elements.max(1) as f64) as f32);
        self.communicator.broadcast(Rank(0), &mut times)?;
        let element_s = f64::from(times.pop().unwrap_or(0.0));
        let mut expected = self.expected(|_| 0.0);
        expected.iter_mut().zip(times).for_each(|(expected, time)| expected.ready_s = f64::from(time));
        Ok(schedule(&expected, LinkSpeed { latency_s: 0.0, element_s }))
    }
}
