//! All-reduce: the gradients of all ranks are summed, bucket by bucket, while the backward pass goes on.
//!
//! The messages of a step follow a list ([`crate::schedule`]). Sums come back at any time; they are applied
//! when the next forward pass needs the parameters, at the latest. After the first steps, rank 0's times
//! decide the order for all ranks. Per rank 2(p−1)/p of the gradients' bytes are sent and received with a
//! ring. Ranks that share a machine's memory keep one copy of the weights instead (`shares.rs`).

use paceline_comm::{CommError, Communicator, Rank, RegisteredBuffer};
use paceline_system::clock::Clock;

use super::courier::{Reply, Courier, CourierOptions, Channel, Request};
use super::shares::Shares;
use super::{
    Agreement, BucketShape, Demands, Join, Protocol, Recipe, Settled, Shape, StepReport, Target, Wait,
};
use crate::schedule::{Expected, Message, LinkSpeed, schedule};
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
        "every worker gets the sum of all gradients and makes the same step"
    }

    fn sums_on_devices(&self) -> bool {
        true
    }

    fn keeps_one_copy(&self) -> bool {
        true
    }

    fn refuses(&self, demands: &Demands) -> Option<String> {
        let sentence = "--staleness is for parameter servers; type --agree parameter-server, or leave it out";
        demands.staleness.then(|| sentence.to_owned())
    }

    fn protocol(&self, shape: &Shape) -> Protocol {
        Protocol::all_reduce(shape.buckets.len())
    }

    fn join(&self, join: Join<'_>) -> Result<Box<dyn Agreement>, CommError> {
        let protocol = self.protocol(join.shape);
        let Join { mut communicator, urgent, shape, options, deadline, clock, .. } = join;
        if options.one_copy
            && let Some(region) = Shares::region(&mut communicator, shape)?
        {
            return Ok(Box::new(Shares::start(communicator, region, (shape, protocol))?));
        }
        let memory: Result<Vec<RegisteredBuffer>, CommError> =
            shape.buckets.iter().map(|bucket| communicator.register_buffer(bucket.elements)).collect();
        let (rank, world) = (communicator.rank(), communicator.world());
        let mut carrier = Carrier {
            communicator,
            buckets: shape.buckets.clone(),
            segments: shape.segments.clone(),
            codec: options.squeeze.codec(),
            message: squeeze::Message::default(),
            clock: clock.clone(),
        };
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
struct Carrier {
    communicator: Communicator,
    buckets: Vec<BucketShape>,
    segments: Vec<Vec<Segment>>,
    codec: Box<dyn Codec>,
    /// Encoded values.
    message: squeeze::Message,
    clock: Clock,
}

/// A step under way.
struct Step {
    order: Vec<Message>,
    /// The next message.
    next: usize,
    buckets: Vec<Option<RegisteredBuffer>>,
    /// Elements that were carried, in how many seconds.
    carried: (usize, f64),
}

impl Carrier {
    /// Carries steps until there are no more requests.
    fn run(&mut self, channel: &Channel) -> Result<(), CommError> {
        let at_once = LinkSpeed { latency_s: 0.0, element_s: 0.0 };
        let order = schedule(&self.expected(|bucket| bucket.ready_after as f64), at_once);
        let buckets = self.buckets.iter().map(|_| None).collect();
        let mut step = Step { order, next: 0, buckets, carried: (0, 0.0) };
        while let Ok(request) = channel.requests.recv() {
            match request {
                Request::Reorder(ready) => step.order = self.reorder(ready, step.carried)?,
                Request::Report(report) => {
                    let mut words = report.to_words();
                    self.communicator.all_reduce(&mut words)?;
                    channel.reply(Reply::Total(StepReport::from_words(words)));
                    (step.next, step.carried) = (0, (0, 0.0));
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
                Request::Weights(weights) => channel.reply(Reply::Numbers(weights)),
                Request::Bucket(bucket, memory) => step.buckets[bucket] = Some(memory),
            }
            while self.carry(&mut step, channel)? {}
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
        squeeze::all_reduce(&mut **codec, communicator, (*bucket, memory), (range.clone(), segments), message)?;
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
