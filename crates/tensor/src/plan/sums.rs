//! Sums with others in the middle of a step: the statistics of batch normalisations, where they are those of all replicas.

use super::Plan;
use crate::op::Op;

impl Plan {
    /// Whether batch normalisations add up their statistics with other replicas'.
    pub fn shares_statistics(&self) -> bool {
        self.shares_statistics
    }

    /// How many numbers a node adds up with those of other replicas: in its first sum, and in its second. Forward, per channel a sum
    /// and then a square, with the number of rows; backward two sums, with the number of rows.
    pub fn sums(&self, node: usize) -> [usize; 2] {
        let node = &self.graph.nodes()[node];
        let channels = || self.graph.shape(node.inputs[0]).last();
        match node.op {
            Op::BatchNorm(_) if self.shares_statistics => [channels() + 1, channels()],
            Op::BatchNormGrad(_) if self.shares_statistics => [2 * channels() + 1, 0],
            _ => [0; 2],
        }
    }

    /// The nodes that add up numbers with other replicas', in order, with how many.
    pub fn nodes_with_sums(&self) -> impl Iterator<Item = (usize, [usize; 2])> + '_ {
        (0..self.graph.nodes().len()).map(|node| (node, self.sums(node))).filter(|(_, sums)| sums[0] > 0)
    }
}
