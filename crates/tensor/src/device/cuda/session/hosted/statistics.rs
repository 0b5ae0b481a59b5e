//! Batch-norms whose statistics are those of all replicas: a node runs in phases, and between two of them the
//! host has its numbers added up.
//!
//! For each such node ([`Plan::nodes_with_sums`]), in the order of the plan, and for each of its sums:
//! [`Session::start_sums`], [`Session::sums`], which waits, and [`Session::give_sums_back`]; then
//! [`Session::start_rest`]. The numbers are those of the CPU in the same order, so that replicas on both
//! kinds of device can train together. PinnedSums that are given back as they came are those of a replica
//! that has no others.
//!
//! [`Plan::nodes_with_sums`]: crate::plan::Plan::nodes_with_sums

use std::sync::Arc;

use super::{HOSTED, Session};
use crate::device::cuda::driver::{Event, Pinned};
use crate::device::cuda::program::Statistics;
use crate::device::cuda::{Cuda, CudaError};
use crate::dtype::DType;
use crate::plan::Plan;

/// PinnedSums on their way.
#[derive(Debug)]
pub(super) struct PinnedSums {
    pinned: Pinned,
    arrived: Event,
}

impl PinnedSums {
    pub fn new(cuda: &Cuda, plan: &Plan) -> Result<Self, CudaError> {
        let most = plan.nodes_with_sums().flat_map(|(_, sums)| sums).max().unwrap_or(0);
        let pinned = Pinned::zeroed(cuda.context(), most * DType::F32.bytes())?;
        Ok(Self { pinned, arrived: Event::between(cuda.context())? })
    }
}

impl Session {
    /// Where the numbers of a sum stand, and how many there are.
    fn shared(&self, node: usize, sum: usize) -> (u64, usize) {
        let plan = self.plan();
        let count = plan.sums(node)[sum];
        assert!(count > 0, "node {node} has a sum number {sum}");
        let channels = plan.graph().shape(plan.graph().nodes()[node].inputs[0]).last();
        (Statistics::at(self.bases.statistics, channels).sums[sum], count)
    }

    /// Starts a node up to its sum number `sum` (0, then perhaps 1; see [`Plan::sums`]), and has the numbers
    /// copied to the host.
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// When the node has no such sum, or steps are not run in segments.
    pub fn start_sums(&mut self, node: usize, sum: usize) -> Result<(), CudaError> {
        let cuda = Arc::clone(&self.cuda);
        let _alone = cuda.enter()?;
        let (address, count) = self.shared(node, sum);
        self.training().program.start_phase(&cuda, cuda.stream(), node, sum)?;
        let numbers = &mut self.hosted.as_mut().expect(HOSTED).numbers;
        cuda.stream().download_later(address, &mut numbers.pinned, count * DType::F32.bytes())?;
        numbers.arrived.record(cuda.stream())
    }

    /// Waits for the numbers of the sum that was started last, which the host replaces by those of all
    /// replicas.
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// As [`Session::start_sums`].
    pub fn sums(&mut self, node: usize, sum: usize) -> Result<&mut [f32], CudaError> {
        self.cuda.context().enter()?;
        let (_, count) = self.shared(node, sum);
        let numbers = &mut self.hosted.as_mut().expect(HOSTED).numbers;
        numbers.arrived.wait()?;
        Ok(numbers.pinned.floats_mut(count))
    }

    /// Whether [`Session::sums`] would not wait.
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// When steps are not run in segments.
    pub fn sums_ready(&self) -> Result<bool, CudaError> {
        self.cuda.context().enter()?;
        self.hosted.as_ref().expect(HOSTED).numbers.arrived.has_happened()
    }

    /// Has the numbers copied back.
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// As [`Session::start_sums`].
    pub fn give_sums_back(&mut self, node: usize, sum: usize) -> Result<(), CudaError> {
        let _alone = self.cuda.enter()?;
        let (address, count) = self.shared(node, sum);
        let numbers = &self.hosted.as_ref().expect(HOSTED).numbers;
        self.cuda.stream().upload_later(address, &numbers.pinned, count * DType::F32.bytes())?;
        // Whoever looks at the memory again waits for this copy.
        numbers.arrived.record(self.cuda.stream())
    }

    /// Starts what follows a node's last sum.
    ///
    /// # Errors
    /// When the GPU does not answer.
    ///
    /// # Panics
    /// When the node has no sums, or the session no training graph.
    pub fn start_rest(&mut self, node: usize) -> Result<(), CudaError> {
        let cuda = Arc::clone(&self.cuda);
        let _alone = cuda.enter()?;
        let graph = self.training();
        let sums = graph.plan.sums(node).iter().filter(|&&count| count > 0).count();
        assert!(sums > 0, "node {node} has sums");
        graph.program.start_phase(&cuda, cuda.stream(), node, sums)
    }
}
