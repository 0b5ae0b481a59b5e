//! Workers in groups: those of one add up their gradients and make the same step, and their first exchanges with the
//! centre for all of them. To the servers a group is one worker.
//!
//! What the first takes from the centre it gives to the others of its group, behind the step that the exchange was
//! beside. All know which steps those are, so that nobody asks.

use paceline_comm::{CommError, Rank};

use super::super::{
    Agreement, Group, Join, Options, Protocol, Reach, Recipe, RoundOptions, Settled, StepReport, Target, Votes, Wait,
    all_reduce,
};
use super::message::Layout;
use super::worker::Worker;
use super::{Exchange, Habit, WorkerSide};
use crate::squeeze::none;

/// What a worker is to its group.
#[derive(Debug)]
enum Place {
    /// It speaks for the group with the servers.
    First(Box<Worker>),
    /// It knows when the first does.
    Other { habit: Box<dyn Habit>, under_way: Option<Exchange> },
}

/// A worker's end.
#[derive(Debug)]
struct Grouped {
    protocol: Protocol,
    rank: Rank,
    workers: usize,
    layout: Layout,
    place: Place,
    /// Among the workers of the group.
    sums: Box<dyn Agreement>,
}

/// Makes this rank one of a group.
pub(super) fn join(
    join: Join<'_>,
    group: Group,
    protocol: Protocol,
    side: WorkerSide,
) -> Result<Box<dyn Agreement>, CommError> {
    let Join { communicator, roles, shape, options, deadline, clock, mut lending, .. } = join;
    let layout = Layout { roles, elements: shape.parameters, pieces: side.pieces };
    let of = |communicator, options, lending| Join {
        communicator,
        urgent: None,
        group: None,
        memory: None,
        lending,
        roles,
        shape,
        options,
        deadline,
        clock: clock.clone(),
    };
    let (inside, place) = match group {
        Group::First { inside } => {
            let worker = Worker::start(of(communicator, options, lending.take()), protocol.clone(), side)?;
            (*inside, Place::First(Box::new(worker)))
        }
        Group::Other => (communicator, Place::Other { habit: side.habit, under_way: None }),
    };
    let (rank, workers) = (inside.world_rank(inside.rank()), roles.workers * inside.world());
    let inner =
        Options { squeeze: &none::SQUEEZE, one_copy: false, group: 1, rounds: RoundOptions::default(), ..options };
    let sums = all_reduce::RECIPE.join(of(inside, inner, None))?;
    Ok(Box::new(Grouped { protocol, rank, workers, layout, place, sums }))
}

impl Agreement for Grouped {
    fn protocol(&self) -> &Protocol {
        &self.protocol
    }

    fn rank(&self) -> Rank {
        self.rank
    }

    fn workers(&self) -> usize {
        self.workers
    }

    fn broadcast_from_root(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        if let Place::First(worker) = &mut self.place {
            worker.broadcast_from_root(numbers)?;
        }
        self.sums.broadcast_from_root(numbers)
    }

    fn sum(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        self.sums.sum(numbers)?;
        if let Place::First(worker) = &mut self.place {
            worker.sum(numbers)?;
        }
        self.sums.broadcast_from_root(numbers)
    }

    fn begin_step(&mut self, report: StepReport) -> Result<(), CommError> {
        self.sums.begin_step(report)
    }

    fn total(&mut self) -> Result<StepReport, CommError> {
        let total = self.sums.total()?;
        // Wishes are told again with every step, and would add up.
        Ok(StepReport { votes: total.votes.once(), ..total })
    }

    fn send(&mut self, bucket: usize, gradients: &[f32]) -> Result<(), CommError> {
        self.sums.send(bucket, gradients)
    }

    fn settle(&mut self, bucket: usize, wait: Wait, target: &mut dyn Target) -> Result<Settled, CommError> {
        self.sums.settle(bucket, wait, target)
    }

    fn opened(&mut self, weights: &[f32]) {
        if let Place::First(worker) = &mut self.place {
            worker.opened(weights);
        }
    }

    fn tell_wishes(&mut self, own: Votes) -> Votes {
        match &mut self.place {
            Place::First(worker) => worker.tell_wishes(own),
            Place::Other { .. } => own,
        }
    }

    fn exchanges_before(&self, step: u64) -> bool {
        match &self.place {
            Place::First(worker) => worker.exchanges_before(step),
            Place::Other { habit, .. } => habit.before(step).is_some(),
        }
    }

    fn begin_exchange(
        &mut self,
        step: u64,
        weights: &mut [f32],
        velocity: Option<(&[f32], f32)>,
    ) -> Result<bool, CommError> {
        match &mut self.place {
            Place::First(worker) => worker.begin_exchange(step, weights, velocity),
            Place::Other { habit, under_way } => {
                *under_way = habit.before(step);
                Ok(false)
            }
        }
    }

    fn exchanges_after(&self, step: u64) -> bool {
        match &self.place {
            Place::First(worker) => worker.exchanges_after(step),
            Place::Other { under_way, .. } => under_way.is_some(),
        }
    }

    fn end_exchange(&mut self, step: u64, weights: &mut [f32]) -> Result<bool, CommError> {
        let ended = match &mut self.place {
            Place::First(worker) => {
                let under_way = worker.under_way();
                worker.end_exchange(step, weights)?;
                under_way
            }
            Place::Other { under_way, .. } => under_way.take(),
        };
        let Some(Exchange { piece, .. }) = ended else { return Ok(false) };
        let Self { layout, sums, .. } = self;
        layout.piece(piece).try_for_each(|range| sums.broadcast_from_root(&mut weights[range]))?;
        Ok(true)
    }

    fn exchange_weights(&mut self, reach: Reach, weights: &mut [f32], kept: &mut [Vec<f32>]) -> Result<(), CommError> {
        if let Place::First(worker) = &mut self.place {
            worker.exchange_weights(reach, weights, kept)?;
        }
        self.sums.broadcast_from_root(weights)
    }
}
