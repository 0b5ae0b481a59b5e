//! A device that computes nothing and takes the time that a cost model says: for planners, simulations and tests of
//! everything around the arithmetic. A thousand of them fit in one process.

use std::ops::Range;
use std::time::Duration;

use paceline_system::clock;

use crate::execute::{Progress, Turn};
use crate::graph::{Graph, Node};
use crate::op::{Op, Together};
use crate::plan::{Due, Plan};
use crate::store::Store;

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

/// Takes the time of some nodes; the buckets' turns come with parameters as they stand and without gradients.
pub(crate) fn run(
    model: &CostModel,
    (plan, nodes): (&Plan, Range<usize>),
    store: &mut Store,
    watch: &mut dyn FnMut(Progress<'_>) -> bool,
) {
    let mut dues = plan.dues_from(nodes.start).iter().peekable();
    for index in nodes {
        if model.sleeps {
            clock::sleep(Duration::from_secs_f64(model.node_seconds(plan.graph(), &plan.graph().nodes()[index])));
        }
        let sums = plan.sums(index).into_iter().filter(|&count| count > 0);
        let op = &plan.graph().nodes()[index].op;
        if !together(op, watch)
            || !sums.into_iter().all(|_| watch(Progress::Turn(Turn::Sum { node: index, numbers: &mut [] })))
            || !watch(Progress::Node(index, &[]))
        {
            return;
        }
        while let Some(&Due { bucket, apply, .. }) = dues.next_if(|due| due.node == index) {
            let gradients = &mut [][..];
            let turn = if apply {
                let parameters = &mut store.parameters[plan.buckets()[bucket].elements.clone()];
                Turn::Apply { bucket, gradients, parameters }
            } else {
                Turn::Final { bucket, gradients }
            };
            if !watch(Progress::Turn(turn)) {
                return;
            }
        }
    }
}

/// The turn of the other parts, if a node has one.
fn together(op: &Op, watch: &mut dyn FnMut(Progress<'_>) -> bool) -> bool {
    let numbers = &mut [][..];
    match op {
        Op::Together(Together::Sum) => watch(Progress::Turn(Turn::SumParts { numbers })),
        Op::Together(Together::Gather(gather)) => {
            watch(Progress::Turn(Turn::GatherParts { numbers, lengths: &gather.lengths, own: gather.own }))
        }
        _ => true,
    }
}
