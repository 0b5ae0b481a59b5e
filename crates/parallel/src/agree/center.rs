//! What agreements have in common in which every worker steps by itself and exchanges numbers with a centre, which
//! servers hold. It is none itself: `elastic.rs`, `downpour.rs` and `dogwild.rs` are.
//!
//! An exchange begins before a step, with the weights as they are then, and ends behind it: a thread carries it while
//! the step is computed. Which steps have one, what goes out and what is done with what comes back is a [`Habit`], at
//! the worker; what the centre does with what comes in is a [`Rule`], at the server. An agreement is one of each.
//! Servers have equal parts of all parameters; a worker's exchange costs S bytes out, or in, or both.
//!
//! Before weights are looked at (an evaluation, a checkpoint, the end) all workers meet: every one pushes what it has
//! not pushed yet, and all go on from the centre, with the mean of their optimizers' state. The centre is what is
//! evaluated and saved, so a run goes on from a checkpoint as it went on behind the meeting.
//!
//! Everything goes through the servers after the opening: workers never wait for each other's messages, and who is
//! gone holds nobody up.

mod changes;
mod grouped;
mod lent;
mod link;
pub(super) mod message;
mod server;
#[cfg(test)]
mod tests;
mod worker;

use std::fmt::Debug;
use std::ops::Range;

pub(super) use changes::{Changes, Timetable};
use paceline_comm::CommError;

use super::{Agreement, Demands, Join, Options, Point, Protocol, ServerShard, Shape};

/// A piece of all parameters that is exchanged, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Exchange {
    /// Whether the worker pushes.
    pub pushes: bool,
    /// Whether it takes something back.
    pub pulls: bool,
    /// Which piece.
    pub piece: usize,
}

/// A worker's side of an agreement: when it exchanges what.
pub(super) trait Habit: Debug + Send {
    /// The exchange that begins before the step after so many.
    fn before(&self, step: u64) -> Option<Exchange>;

    /// Whether all of what has changed is pushed behind that step.
    fn pushes_after(&self, _step: u64) -> bool {
        false
    }

    /// Knows the weights that all begin with, or go on with after they have met.
    fn start(&mut self, _weights: &[f32]) {}

    /// Writes what is pushed of some elements.
    fn fill(&mut self, range: Range<usize>, point: Point<'_>, message: &mut [f32]);

    /// Changes weights by what came back for the same elements.
    fn take_back(&mut self, range: Range<usize>, message: &[f32], weights: &mut [f32]);
}

/// A server's part of the centre.
#[derive(Debug)]
pub(super) struct Held {
    /// The weights.
    pub center: Vec<f32>,
    /// What the agreement keeps of its own, each buffer as long.
    pub kept: Vec<Vec<f32>>,
}

/// A server's side of an agreement: what becomes of the centre.
pub(super) trait Rule: Debug {
    /// Changes some elements of the centre by what was pushed for them, of which a share counts, and leaves the answer
    /// in its place.
    fn take(&mut self, held: &mut Held, range: Range<usize>, pushed: &mut [f32], share: f32);

    /// The same where all workers push together: the centre may wait with the change until [`Rule::end_together`].
    fn take_together(&mut self, held: &mut Held, range: Range<usize>, pushed: &mut [f32]) {
        self.take(held, range, pushed, 1.0);
    }

    /// All have pushed.
    fn end_together(&mut self, _held: &mut Held) {}
}

/// How an agreement differs from others at the worker.
pub(super) struct WorkerSide {
    pub habit: Box<dyn Habit>,
    /// Pieces of every server's part.
    pub pieces: usize,
    /// So many steps are made by the first worker alone, at the beginning of a run.
    pub alone: u64,
    /// How much of what is between it and a centre in a memory box both move, where the centre lies there.
    pub lent: Option<f32>,
}

/// What travels: exchanges once in `every` steps, and `buffers` of the agreement's own at the opening.
pub(super) fn protocol(
    name: &'static str,
    shape: &Shape,
    options: &Options,
    (every, buffers): (u64, usize),
) -> Protocol {
    let center = Protocol::center(name, every, buffers);
    if options.group > 1 { center.in_groups(shape.buckets.len()) } else { center }
}

/// Makes this rank one of the workers.
pub(super) fn join(mut join: Join<'_>, protocol: Protocol, side: WorkerSide) -> Result<Box<dyn Agreement>, CommError> {
    match join.group.take() {
        Some(group) => grouped::join(join, group, protocol, side),
        None => Ok(Box::new(worker::Worker::start(join, protocol, side)?)),
    }
}

/// How an agreement differs from others at the server.
pub(super) struct ServerSide {
    pub rule: Box<dyn Rule>,
    /// Pieces of every server's part.
    pub pieces: usize,
    /// Whether an exchange waits until all workers have begun theirs, and all change the centre as it was before.
    pub together: bool,
    /// Whether the centre lies in a memory box, where workers change it themselves.
    pub lends: bool,
}

/// Serves the workers until all have ended.
pub(super) fn serve(
    join: Join<'_>,
    protocol: Protocol,
    side: ServerSide,
    shard: &mut dyn ServerShard,
) -> Result<(), CommError> {
    server::Server::new(join, protocol, side, shard).serve()
}

/// What none of these can be combined with: a sentence that says what to type.
pub(super) fn refuses(name: &'static str, demands: &Demands) -> Option<String> {
    let sentence = if let Some(sentence) = demands.foreign(name) {
        sentence
    } else if demands.sync_batch_norm {
        format!(
            "--sync-batch-norm needs workers that are at the same step, and those of --agree {name} step by themselves; \
             type --agree all-reduce, or leave it out"
        )
    } else if demands.options.shard {
        format!(
            "--shard optimizer needs sums of gradients, and workers of --agree {name} step with their own; type --agree \
             all-reduce, or --shard none"
        )
    } else if !demands.options.squeeze.codec().is_identity() {
        format!(
            "--squeeze {} is for gradients, and --agree {name} sends weights and their changes; type --squeeze none",
            demands.options.squeeze.name()
        )
    } else if demands.options.group > 1 && demands.clips_norm {
        "--clip-norm looks at the gradients of all workers, and those of a --group are its own; leave one of them out"
            .into()
    } else if demands.options.group > 1 && demands.options.rounds.warm_start.is_some_and(|steps| steps > 0) {
        "--warm-start has one worker step alone, and those of a --group step together; leave one of them out".into()
    } else if demands.saves_by_clock {
        format!(
            "--checkpoint-minutes needs workers that are at the same step, and those of --agree {name} are not; type \
             --checkpoint-every with a number of steps"
        )
    } else {
        return None;
    };
    Some(sentence)
}

/// A bound on how far workers may be apart, where they need not step together.
pub(super) fn bound(options: &Options) -> Option<u64> {
    options.staleness.filter(|&steps| steps > 0)
}
