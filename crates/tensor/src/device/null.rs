//! A device that computes nothing and takes the time that a cost model says: for planners, simulations and tests of
//! everything around the arithmetic. A thousand of them fit in one process.

use std::time::Duration;

use paceline_system::clock;

use crate::execute::After;
use crate::graph::{Graph, Node};
use crate::plan::Plan;

/// How fast the imagined device is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostModel {
    /// Arithmetic it does per second.
    pub flops_per_s: f64,
    /// Memory it reads and writes per second.
    pub bytes_per_s: f64,
    /// What starting one node takes.
    pub launch_s: f64,
    /// Whether a run really takes the time (by sleeping), or only says how long it would take.
    pub sleeps: bool,
}

impl CostModel {
    /// Two cores of a server CPU of 2023: 230 GFLOP/s, 20 GB/s, 5 µs to start a kernel.
    pub const TWO_SERVER_CORES: Self = Self { flops_per_s: 230e9, bytes_per_s: 20e9, launch_s: 5e-6, sleeps: false };

    /// Whether a time follows from it: speeds above zero and a start that is not negative, none of them NaN.
    pub fn is_possible(&self) -> bool {
        let start = self.launch_s >= 0.0 && self.launch_s.is_finite();
        self.flops_per_s > 0.0 && self.bytes_per_s > 0.0 && start
    }

    /// Seconds for one node: the larger of its arithmetic and its memory traffic (a roofline), plus the start.
    pub fn node_seconds(&self, graph: &Graph, node: &Node) -> f64 {
        let arithmetic = graph.flops(node) as f64 / self.flops_per_s;
        let traffic = graph.bytes_moved(node) as f64 / self.bytes_per_s;
        self.launch_s + arithmetic.max(traffic)
    }

    /// Seconds for a whole plan.
    pub fn plan_seconds(&self, plan: &Plan) -> f64 {
        plan.graph().nodes().iter().map(|node| self.node_seconds(plan.graph(), node)).sum()
    }
}

pub(crate) fn run(model: &CostModel, plan: &Plan, after: &mut After<'_>) {
    for (index, node) in plan.graph().nodes().iter().enumerate() {
        if model.sleeps {
            clock::sleep(Duration::from_secs_f64(model.node_seconds(plan.graph(), node)));
        }
        if !after(index, &[]) {
            return;
        }
    }
}
