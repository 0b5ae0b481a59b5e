//! Gradients of several GPUs, added up while the backward pass goes on: a stream of its own for the sums, which forks from the
//! computation where a bucket of gradients is final and joins it before the optimizer.
//!
//! Where a batch is computed in parts, gradients are added up on each GPU first, and only the last part goes this way.
//!
//! The same calls run a step and are recorded: events between the streams become edges of the graph. Per step there is one fork and one
//! sum for each bucket (25 MiB), and one join.

use std::ops::Range;
use std::sync::Arc;

use super::super::driver::{Event, Stream};
use super::super::graph::Recorded;
use super::super::nccl::{Calls, Group};
use super::super::program::Program;
use super::super::{Cuda, CudaError};
use super::{DeviceGraph, Session};
use crate::plan::Plan;

/// Gradients that travel together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    /// The node after which they are final.
    after: usize,
    /// Where they begin among all.
    start: usize,
    /// How many there are, with the gaps between tensors.
    elements: usize,
}

/// What leaves after which node: buckets, as when they are final and what they hold, in the order in which they become final.
fn pieces(buckets: impl Iterator<Item = (usize, Range<usize>)>) -> Vec<Piece> {
    let piece = |(after, range): (usize, Range<usize>)| Piece { after, start: range.start, elements: range.len() };
    let mut pieces: Vec<Piece> = buckets.map(piece).filter(|piece| piece.elements > 0).collect();
    pieces.sort_by_key(|piece| (piece.after, piece.start));
    pieces
}

fn pieces_of(plan: &Plan) -> Vec<Piece> {
    pieces(plan.buckets().iter().map(|bucket| (bucket.ready_after, bucket.elements.clone())))
}

/// The way to the others.
#[derive(Debug)]
pub(super) struct Exchange {
    /// What leaves from each training graph, and where its gradients are.
    graphs: Vec<(Vec<Piece>, u64)>,
    /// Where each piece is final.
    forks: Vec<Event>,
    /// Where all have come back.
    joined: Event,
    stream: Stream,
    group: Group,
}

impl Exchange {
    /// For the gradients of these graphs, which have the same buckets.
    pub fn new(cuda: &Cuda, group: Group, graphs: &[DeviceGraph]) -> Result<Self, CudaError> {
        let (context, graphs) = (cuda.context(), graphs.iter().map(|graph| (pieces_of(&graph.plan), graph.gradients)));
        let graphs: Vec<_> = graphs.collect();
        let count = graphs.iter().map(|(pieces, _)| pieces.len()).max().unwrap_or(0);
        let forks = (0..count).map(|_| Event::between(context)).collect::<Result<Vec<_>, _>>()?;
        let (joined, stream) = (Event::between(context)?, Stream::new(context)?);
        Ok(Self { graphs, forks, joined, stream, group })
    }

    /// The right to start sums, and graphs that hold some. Nobody keeps it who may have to wait for the GPU: it
    /// could wait for others that never come, and who leaves them needs the right.
    pub fn calls(&self) -> Result<Calls<'_>, CudaError> {
        self.group.calls()
    }

    fn sum(&self, gradients: u64, piece: &Piece) -> Result<(), CudaError> {
        let address = gradients + (piece.start * size_of::<f32>()) as u64;
        self.calls()?.sum(address, piece.elements, &self.stream)
    }

    /// Starts every call of the program of a graph, and every sum as soon as its gradients are final and `prepare` has made them what is to be sent.
    pub fn start(
        &self,
        (program, graph): (&Program, usize),
        cuda: &Cuda,
        stream: &Stream,
        prepare: impl Fn(Range<usize>) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let (mut next, (pieces, gradients)) = (0, &self.graphs[graph]);
        for (piece, fork) in pieces.iter().zip(&self.forks) {
            program.start_nodes(cuda, stream, next..piece.after + 1)?;
            next = piece.after + 1;
            prepare(piece.start..piece.start + piece.elements)?;
            fork.record(stream)?;
            self.stream.wait_for(fork)?;
            self.sum(*gradients, piece)?;
        }
        program.start_nodes(cuda, stream, next..usize::MAX)?;
        if !pieces.is_empty() {
            self.joined.record(&self.stream)?;
            stream.wait_for(&self.joined)?;
        }
        Ok(())
    }
}

impl Session {
    /// How long the sums are that every step of the training graph makes with others, in order: see
    /// [`Group::join`].
    pub fn sum_lengths(&self) -> Vec<usize> {
        let pieces = self.train.first().into_iter().flat_map(|graph| pieces_of(&graph.plan));
        pieces.map(|piece| piece.elements).collect()
    }

    /// Adds up the gradients of every step with those of a group's other members, from now on.
    ///
    /// # Errors
    /// When statistics of batch-norms are to be added up too: a graph cannot.
    ///
    /// # Panics
    /// When the session has no training graph.
    pub fn join(&mut self, group: Group) -> Result<(), CudaError> {
        let cuda = Arc::clone(&self.cuda);
        let _alone = cuda.enter()?;
        if self.training().plan.shares_statistics() {
            return Err(CudaError("within a graph, statistics of a batch-norm are those of this GPU's batch".into()));
        }
        self.train.iter_mut().for_each(|graph| graph.recorded = Recorded::default());
        self.sums = None;
        self.exchange = Some(Exchange::new(&cuda, group, &self.train)?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_leave_in_the_order_in_which_they_become_final_and_empty_ones_stay() {
        let found = pieces([(9, 0..16), (4, 32..96), (4, 16..32), (5, 96..96)].into_iter());
        let piece = |after, start, elements| Piece { after, start, elements };
        assert_eq!(found, [piece(4, 16, 16), piece(4, 32, 64), piece(9, 0, 16)]);
    }
}
