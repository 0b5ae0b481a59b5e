//! All-reduce with a sharded optimizer (ZeRO-1): every rank steps its own chunks, and keeps the optimizer's state
//! of those only.
//!
//! An all-reduce is a reduce-scatter and an all-gather. Between the two, each rank has the sums of its chunk of
//! every piece of a bucket: it makes the step there, and what is gathered are weights. Per rank (p−1)/p of the
//! gradients' bytes go out and in during the backward pass, and as many of the weights' during the next forward
//! pass: the bytes of an all-reduce, for 1/p of the optimizer's state and of its arithmetic.
//!
//! What a rank has taken back of a bucket's sums is stepped as soon as nobody reads the weights any more. Chunks
//! are given away at the end of the step, on every rank at the same point of its requests, and are gathered
//! behind all sums in the order in which the next forward pass needs them: so the messages of all ranks follow
//! one list, whoever was faster. A step that would spoil the weights is not made; the sums, which are no numbers,
//! are gathered in its place, so that all ranks find it at the same bucket.

use std::io;
use std::ops::Range;

use paceline_comm::transfer::{Action, Transfer};
use paceline_comm::{CommError, Communicator, Rank, RegisteredBuffer};
use paceline_system::memory::zeros;

use super::all_reduce::Carrier;
use super::courier::{Courier, CourierOptions};
use super::{Agreement, BucketShape, Join, Protocol, Settled, StepReport, Target, Wait};
use crate::ownership::{Ownership, own_ranges};

/// A bucket's way through a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// Its weights are up to date.
    Home,
    /// Its gradients are being added up.
    Scattering,
    /// The sums of this rank's chunks are here.
    Scattered,
    /// The step was made with them.
    Stepped,
    /// The weights of all ranks' chunks are being gathered.
    Gathering,
}

/// A worker's end.
#[derive(Debug)]
pub(super) struct Sharded {
    courier: Courier,
    /// For numbers that somebody waits for.
    urgent: Option<Communicator>,
    protocol: Protocol,
    buckets: Vec<At>,
    /// This rank's chunks of each bucket.
    chunks: Vec<Vec<Range<usize>>>,
    /// What every rank has of the optimizer's state.
    owners: Vec<Ownership>,
}

/// The buckets in the order in which a forward pass needs them.
pub(super) fn needed(buckets: &[BucketShape]) -> Vec<usize> {
    let mut needed: Vec<usize> = (0..buckets.len()).collect();
    needed.sort_by_key(|&index| buckets[index].needed_before);
    needed
}

impl Sharded {
    pub fn start(join: Join<'_>, protocol: Protocol) -> Result<Self, CommError> {
        let Join { communicator, urgent, shape, options, deadline, clock, .. } = join;
        let (rank, world) = (communicator.rank(), communicator.world());
        let memory = |bucket: &BucketShape| {
            zeros(bucket.elements, "messages").map(RegisteredBuffer::from).map_err(|refused| CommError::System {
                rank,
                what: "take memory for messages",
                source: io::Error::new(io::ErrorKind::OutOfMemory, refused),
            })
        };
        let memory = shape.buckets.iter().map(memory).collect::<Result<Vec<_>, _>>()?;
        let elements = || shape.buckets.iter().map(|bucket| bucket.start..bucket.start + bucket.elements);
        let owners = (0..world).map(|rank| Ownership::of(elements(), rank, world)).collect();
        let chunks = |bucket: &BucketShape| own_ranges(bucket.elements, rank.index(), world).collect();
        let mut carrier = Carrier::new(communicator, shape, &options, clock.clone());
        let courier = CourierOptions { rank, phase: "all-reduce", deadline, clock };
        Ok(Self {
            courier: Courier::start(courier, memory, move |channel| carrier.run(channel))?,
            urgent,
            protocol,
            buckets: vec![At::Home; shape.buckets.len()],
            chunks: shape.buckets.iter().map(chunks).collect(),
            owners,
        })
    }

    /// Takes the sums of a bucket in, if they are there or it is to wait; whether they are.
    fn take_sums(&mut self, bucket: usize, wait: Wait) -> Result<bool, CommError> {
        if self.buckets[bucket] == At::Scattering && self.courier.receive(bucket, wait)?.is_some() {
            self.buckets[bucket] = At::Scattered;
        }
        Ok(self.buckets[bucket] == At::Scattered)
    }

    /// Makes the step of this rank's chunks of a bucket, if their sums are there or it is to wait.
    fn step(&mut self, bucket: usize, wait: Wait, target: &mut dyn Target) -> Result<Settled, CommError> {
        if !self.take_sums(bucket, wait)? {
            return Ok(Settled::NotYet);
        }
        let values = self.courier.at_home(bucket);
        for range in &self.chunks[bucket] {
            if target.step_chunk(bucket, range.clone(), &mut values[range.clone()]).is_err() {
                return Ok(Settled::Refused);
            }
        }
        self.buckets[bucket] = At::Stepped;
        Ok(Settled::NotYet)
    }
}

impl Agreement for Sharded {
    fn protocol(&self) -> &Protocol {
        &self.protocol
    }

    fn rank(&self) -> Rank {
        self.courier.rank()
    }

    fn workers(&self) -> usize {
        self.owners.len()
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
        self.buckets[bucket] = At::Scattering;
        self.courier.send(bucket, gradients)
    }

    fn settle(&mut self, bucket: usize, wait: Wait, target: &mut dyn Target) -> Result<Settled, CommError> {
        if self.step(bucket, wait, target)? == Settled::Refused {
            return Ok(Settled::Refused);
        }
        if self.buckets[bucket] != At::Gathering {
            return Ok(Settled::NotYet);
        }
        let Some(weights) = self.courier.receive(bucket, wait)? else { return Ok(Settled::NotYet) };
        self.buckets[bucket] = At::Home;
        match target.replace_weights(bucket, weights) {
            Ok(()) => Ok(Settled::Done),
            Err(_) => Ok(Settled::Refused),
        }
    }

    fn inspect_sums(&mut self, bucket: usize, target: &mut dyn Target) -> Result<Settled, CommError> {
        if !self.take_sums(bucket, Wait::Block)? {
            return Ok(Settled::NotYet);
        }
        let sums = self.courier.at_home(bucket);
        for range in &self.chunks[bucket] {
            if target.apply_sums(bucket, range.clone(), &mut sums[range.clone()]).is_err() {
                return Ok(Settled::Refused);
            }
        }
        Ok(Settled::NotYet)
    }

    fn step_chunks(&mut self, bucket: usize, target: &mut dyn Target) -> Result<Settled, CommError> {
        let settled = self.step(bucket, Wait::Block, target)?;
        if self.buckets[bucket] == At::Stepped {
            self.courier.gather(bucket)?;
            self.buckets[bucket] = At::Gathering;
        }
        Ok(settled)
    }

    fn gather_state(&mut self, own: &[f32], elements: Range<usize>) -> Result<Vec<f32>, CommError> {
        let (rank, first) = (self.rank(), elements.start);
        let receives = rank == Rank(0);
        // Rank 0 has room for all; the others have what they send, one chunk behind the other.
        let mut numbers = if receives { vec![0.0; elements.len()] } else { Vec::new() };
        let mut list = Vec::new();
        for owned in self.owners[rank.index()].within(elements.clone()) {
            if receives {
                let at = owned.elements.start - first..owned.elements.end - first;
                numbers[at].copy_from_slice(&own[owned.place]);
            } else {
                let (start, length) = (numbers.len(), owned.place.len());
                list.push(Transfer { step: rank.0, action: Action::Send, peer: Rank(0), start, length });
                numbers.extend_from_slice(&own[owned.place]);
            }
        }
        for peer in (1..self.owners.len()).filter(|_| receives) {
            let receive = |owned: crate::Owned| Transfer {
                step: peer as u32,
                action: Action::Receive,
                peer: Rank::at(peer),
                start: owned.elements.start - first,
                length: owned.elements.len(),
            };
            list.extend(self.owners[peer].within(elements.clone()).map(receive));
        }
        let numbers = self.courier.exchange(list, numbers)?;
        Ok(if receives { numbers } else { Vec::new() })
    }
}
