//! Where the statistics of a batch-norm stand while they are added up with other replicas': between its
//! phases, which other calls may come between, and so not in the working memory of a node.

use crate::dtype::DType;
use crate::plan::Plan;

/// Where a batch-norm's statistics stand between its phases.
#[derive(Clone, Copy, Debug)]
pub(in crate::device::cuda) struct Statistics {
    /// What is added up with other replicas': first, and then. See [`Plan::sums`].
    pub sums: [u64; 2],
    /// Means and variances of this replica's rows, in f64.
    pub moments: u64,
}

impl Statistics {
    /// Of so many channels, from an address on.
    pub fn at(address: u64, channels: usize) -> Self {
        let bytes = |floats: usize| (floats * DType::F32.bytes()).next_multiple_of(super::SCRATCH_ALIGNMENT) as u64;
        let second = address + bytes(2 * channels + 1);
        Self { sums: [address, second], moments: second + bytes(channels) }
    }

    /// Bytes that a plan needs for them.
    pub fn bytes(plan: &Plan) -> usize {
        let channels = plan.nodes_with_sums().map(|(node, _)| {
            let node = &plan.graph().nodes()[node];
            plan.graph().shape(node.inputs[0]).last()
        });
        let most = channels.max().unwrap_or(0);
        Self::at(0, most).moments as usize + 2 * most * size_of::<f64>()
    }
}
