//! Where to cut a model into stages: so that the slowest stage is as fast as can be, by time that was measured or by arithmetic, and every
//! stage fits the memory that it may take.
//!
//! Cuts are behind layers with parameters. The best of them for a number of stages is found by a dynamic programme over the places where a
//! cut is possible, O(stages · places²). Memory is a constraint: what a stage would take is estimated there and counted to the byte for the
//! cuts that come out; where the estimate was too small, it is corrected and the programme runs again.

use std::collections::BTreeMap;

use paceline_nn::{Mode, Network};
use paceline_system::clock::Clock;
use paceline_system::limits::in_words;
use paceline_tensor::device::cuda::CudaError;
use paceline_tensor::execute::Profile;
use paceline_tensor::{Device, Executor, Graph, Pass, Plan, Store, cut};

use crate::engine::sizes::{BASE, Sizes};
use crate::error::TrainError;
use crate::replica::{self, ReplicaOptions};
use crate::stage::ModelStage;

/// How often an estimate of memory is corrected before another number of stages is tried.
const CORRECTIONS: usize = 12;

/// What each node of a model's forward pass costs, with the part of the backward pass that belongs to it: seconds, or any unit.
#[derive(Clone, Debug)]
pub struct NodeCosts(Vec<f64>);

impl NodeCosts {
    /// Floating-point operations: a backward pass has twice those of the forward pass.
    pub fn by_arithmetic(graph: &Graph) -> Self {
        Self(graph.nodes().iter().map(|node| 3.0 * graph.flops(node) as f64).collect())
    }

    /// Seconds that were measured for the nodes of a training step's plan: each layer's are shared out among its nodes in the forward pass.
    fn measured(forward: &Graph, plan: &Plan, profile: &Profile) -> Self {
        let mut seconds: BTreeMap<&str, f64> = BTreeMap::new();
        for (node, took) in plan.graph().nodes().iter().zip(&profile.seconds) {
            *seconds.entry(&node.layer).or_default() += took;
        }
        let weight = |node: &paceline_tensor::Node| (forward.flops(node) + forward.bytes_moved(node)) as f64;
        let mut weights: BTreeMap<&str, f64> = BTreeMap::new();
        for node in forward.nodes() {
            *weights.entry(&node.layer).or_default() += weight(node);
        }
        let cost = |node: &paceline_tensor::Node| {
            let (all, own) = (weights[node.layer.as_str()], weight(node));
            seconds.get(node.layer.as_str()).map_or(0.0, |took| took * own / all.max(1.0))
        };
        Self(forward.nodes().iter().map(cost).collect())
    }
}

/// Cuts, and what each stage's share of the whole cost is.
#[derive(Clone, Debug, PartialEq)]
pub struct Balanced {
    /// The layers behind which to cut.
    pub cuts: Vec<String>,
    /// Shares that add up to one.
    pub shares: Vec<f64>,
}

/// A model that is to be cut.
#[derive(Clone, Copy)]
pub struct Uncut<'a> {
    /// The model.
    pub model: &'a dyn paceline_nn::Model,
    /// How a stage's replica is built; its slots are those of the first stage.
    pub options: &'a ReplicaOptions,
    /// Bytes that a process takes beside what the plan of its stage says.
    pub beside: u64,
    /// Bytes that a process may take.
    pub limit: Option<u64>,
}

impl Uncut<'_> {
    /// The forward pass of the whole model for a micro-batch, with its loss.
    pub(crate) fn forward(&self) -> Result<Graph, TrainError> {
        let ReplicaOptions { input, classes, micro_batch, smoothing, .. } = *self.options;
        let whole = Network::without_gradients(self.model, Mode::Train, micro_batch, input, classes, smoothing)?;
        Ok(whole.graph)
    }

    /// What the layers cost by arithmetic.
    ///
    /// # Errors
    /// When a layer does not fit the input, which the error names.
    pub fn arithmetic(&self) -> Result<NodeCosts, TrainError> {
        Ok(NodeCosts::by_arithmetic(&self.forward()?))
    }

    /// What the layers cost on the cores of this machine: two steps of the whole model, the second of which is timed node by node. `choose`
    /// has a look at the plan first.
    ///
    /// # Errors
    /// As [`Uncut::arithmetic`].
    pub fn measure(&self, device: &Device, choose: &dyn Fn(&Plan)) -> Result<NodeCosts, TrainError> {
        let options =
            ReplicaOptions { slots: 0, separate_gradients: false, accumulate: 1, clip_norm: None, ..*self.options };
        let (plan, ..) = replica::plan(ModelStage::whole(self.model), &options)?;
        choose(&plan);
        let forward = self.forward()?;
        profiled(plan, (options.micro_batch, 1), device, |plan, profile| NodeCosts::measured(&forward, plan, profile))
    }

    /// The best cuts into so many stages.
    ///
    /// # Errors
    /// When there are too few layers, or no cuts fit the memory: a sentence that says what to type.
    pub fn balance(&self, stages: usize, costs: &NodeCosts) -> Result<Balanced, TrainError> {
        let graph = self.forward()?;
        let places = Places::of(&graph)?;
        if places.nodes.len() < stages - 1 {
            let most = places.nodes.len() + 1;
            return Err(TrainError::Refused(format!(
                "the model has layers for at most {most} stages; type --split pipeline:{most} or fewer"
            )));
        }
        let mut correction = 1.0;
        let mut least = u64::MAX;
        for _ in 0..CORRECTIONS {
            let Some(chosen) = places.best(stages, (costs, &graph), (self, correction)) else { break };
            let balanced = places.balanced(&chosen, costs);
            let Some(limit) = self.limit else { return Ok(balanced) };
            let (needed, estimated) = self.largest(&balanced.cuts, &places, &graph, &chosen)?;
            if needed <= limit {
                return Ok(balanced);
            }
            least = least.min(needed);
            correction *= 1.02f64.max(needed as f64 / (estimated * correction).max(1.0));
        }
        let what = if least == u64::MAX { "more".to_owned() } else { in_words(least) };
        Err(TrainError::Refused(format!(
            "no cut into {stages} stages fits: a stage needs {what} and --memory-limit allows {}; type more stages, \
             such as --split pipeline:{}, or more --micro-batches",
            in_words(self.limit.unwrap_or(0)),
            stages + 1
        )))
    }

    /// What the largest stage of some cuts takes, and what was estimated for it without correction.
    fn largest(
        &self,
        cuts: &[String],
        places: &Places,
        graph: &Graph,
        chosen: &[usize],
    ) -> Result<(u64, f64), TrainError> {
        let mut largest = (0, 0.0);
        for number in 0..=cuts.len() {
            let needed = self.stage_bytes(cuts, number)?;
            if needed > largest.0 {
                let bounds = places.bounds(chosen, graph.nodes().len());
                largest = (needed, self.estimate(graph, bounds[number].clone()));
            }
        }
        Ok(largest)
    }

    /// Bytes that the process of a stage takes.
    ///
    /// # Errors
    /// As [`Uncut::arithmetic`].
    pub fn stage_bytes(&self, cuts: &[String], number: usize) -> Result<u64, TrainError> {
        let stage = ModelStage { cuts, number, ..ModelStage::whole(self.model) };
        let sizes = Sizes::plan(stage, self.options)?;
        Ok(BASE + sizes.buffers() + sizes.working(1) + self.beside)
    }

    /// Roughly what a stage of these nodes takes: its results for every micro-batch that is alive, and its parameters with all that is as
    /// large.
    fn estimate(&self, graph: &Graph, nodes: std::ops::Range<usize>) -> f64 {
        let slots = self.options.slots.max(1);
        let (mut results, mut parameters) = (0, 0);
        for node in &graph.nodes()[nodes] {
            results += node.outputs.iter().map(|&value| graph.info(value).bytes()).sum::<usize>();
            let source = |value: &&paceline_tensor::Value| graph.info(**value).source;
            let own = node.inputs.iter().filter(|value| matches!(source(value), paceline_tensor::Source::Parameter(_)));
            parameters += own.map(|&value| graph.info(value).bytes()).sum::<usize>();
        }
        let copies = 2 + self.options.rule.optimizer().state_slots();
        // About a quarter of all results is alive at once; where it is more, the estimate is corrected.
        (results * slots / 4 + parameters * copies) as f64 + (self.beside + BASE) as f64
    }
}

/// Seconds of each node of a plan on a device of this machine: the faster of two steps, after one that does not count.
///
/// # Errors
/// When the device cannot run it.
pub fn node_seconds(plan: &Plan, samples: usize, device: &Device) -> Result<Vec<f64>, TrainError> {
    profiled(plan.clone(), (samples, 2), device, |_, profile| profile.seconds.clone())
}

/// What steps by a plan took, node by node, as somebody reads it: the fastest of so many, after one that does not count. Inputs and weights
/// are zero.
pub(crate) fn profiled<T>(
    plan: Plan,
    (samples, steps): (usize, usize),
    device: &Device,
    read: impl FnOnce(&Plan, &Profile) -> T,
) -> Result<T, TrainError> {
    let refused = |error: CudaError| TrainError::Refused(error.to_string());
    let mut store = Store::new(&plan);
    let mut executor = Executor::new(device, plan).map_err(refused)?;
    let pass = Pass { samples, ..Pass::default() };
    executor.profile(&mut store, pass).map_err(refused)?;
    let mut fastest = executor.profile(&mut store, pass).map_err(refused)?;
    for _ in 1..steps {
        let Profile { seconds } = executor.profile(&mut store, pass).map_err(refused)?;
        fastest.seconds.iter_mut().zip(seconds).for_each(|(least, took)| *least = least.min(took));
    }
    Ok(read(executor.plan(), &fastest))
}

/// Seconds of both passes by a plan: the median of at least two after one that does not count, and of as many more as begin within a time.
/// Updates are left out.
///
/// # Errors
/// When the device refuses the plan.
pub fn pass_s(plan: Plan, samples: usize, within_s: f64, device: &Device) -> Result<f64, TrainError> {
    const PASSES: std::ops::Range<usize> = 2..30;
    let refused = |error: CudaError| TrainError::Refused(error.to_string());
    let mut store = Store::new(&plan);
    let mut executor = Executor::new(device, plan).map_err(refused)?;
    let pass = Pass { samples, ..Pass::default() };
    executor.profile(&mut store, pass).map_err(refused)?;
    let (clock, mut found) = (Clock::real(), Vec::new());
    while found.len() < PASSES.start || found.len() < PASSES.end && clock.seconds() < within_s {
        found.push(executor.profile(&mut store, pass).map_err(refused)?.seconds.iter().sum());
    }
    found.sort_by(f64::total_cmp);
    Ok(f64::midpoint(found[(found.len() - 1) / 2], found[found.len() / 2]))
}

/// Where a graph can be cut: the node in front of which, and the layer that ends there.
struct Places {
    nodes: Vec<usize>,
    layers: Vec<String>,
}

impl Places {
    fn of(graph: &Graph) -> Result<Self, TrainError> {
        let mut places = BTreeMap::new();
        for name in cut::names(graph) {
            let node = cut::behind_layer(graph, name)?;
            // Behind the last layer comes the loss alone.
            if node + 1 < graph.nodes().len() && cut::cut(graph, &[node]).is_ok() {
                places.insert(node, name.to_owned());
            }
        }
        let (nodes, layers) = places.into_iter().unzip();
        Ok(Self { nodes, layers })
    }

    fn bounds(&self, chosen: &[usize], end: usize) -> Vec<std::ops::Range<usize>> {
        let starts = [0].into_iter().chain(chosen.iter().map(|&place| self.nodes[place]));
        let ends = chosen.iter().map(|&place| self.nodes[place]).chain([end]);
        starts.zip(ends).map(|(start, end)| start..end).collect()
    }

    /// The places whose slowest stage is fastest, of those whose stages fit by estimate.
    fn best(
        &self,
        stages: usize,
        (costs, graph): (&NodeCosts, &Graph),
        (uncut, correction): (&Uncut<'_>, f64),
    ) -> Option<Vec<usize>> {
        let end = graph.nodes().len();
        let sums: Vec<f64> = [0.0]
            .into_iter()
            .chain(costs.0.iter().scan(0.0, |sum, cost| {
                *sum += cost;
                Some(*sum)
            }))
            .collect();
        let edges: Vec<usize> = [0].into_iter().chain(self.nodes.iter().copied()).chain([end]).collect();
        let cost = |from: usize, to: usize| {
            let nodes = edges[from]..edges[to];
            let fits =
                uncut.limit.is_none_or(|limit| uncut.estimate(graph, nodes.clone()) * correction <= limit as f64);
            if fits { sums[nodes.end] - sums[nodes.start] } else { f64::INFINITY }
        };
        // Slowest stage, and where it began, for the first edges in so many stages.
        let last = edges.len() - 1;
        let mut table = vec![vec![(f64::INFINITY, 0); edges.len()]; stages + 1];
        table[0][0] = (0.0, 0);
        for count in 1..=stages {
            for to in 1..=last {
                for from in 0..to {
                    let slowest = table[count - 1][from].0.max(cost(from, to));
                    if slowest < table[count][to].0 {
                        table[count][to] = (slowest, from);
                    }
                }
            }
        }
        if !table[stages][last].0.is_finite() {
            return None;
        }
        let mut chosen = Vec::new();
        let mut at = last;
        for count in (2..=stages).rev() {
            at = table[count][at].1;
            chosen.push(at - 1);
        }
        chosen.reverse();
        Some(chosen)
    }

    fn balanced(&self, chosen: &[usize], costs: &NodeCosts) -> Balanced {
        let all: f64 = costs.0.iter().sum();
        let share = |nodes: std::ops::Range<usize>| costs.0[nodes].iter().sum::<f64>() / all.max(f64::MIN_POSITIVE);
        let shares = self.bounds(chosen, costs.0.len()).into_iter().map(share).collect();
        Balanced { cuts: chosen.iter().map(|&place| self.layers[place].clone()).collect(), shares }
    }
}

#[cfg(test)]
mod tests {
    use paceline_nn::optim::Optimizer;
    use paceline_nn::{Input, zoo};

    use super::*;
    use crate::config::Config;
    use crate::micro_batch::MicroBatchSizes;
    use crate::trainer::options;

    fn of(model: &str, batch: usize) -> ReplicaOptions {
        let entry = zoo::find(model).unwrap();
        let config = Config { batch, optimizer: Optimizer::Momentum, ..Config::default() };
        let sizes = MicroBatchSizes { largest: batch, others: Default::default(), evaluation: batch };
        ReplicaOptions { slots: 2, ..options(&config, sizes, (1, false), (entry.native, entry.classes)).unwrap() }
    }

    #[test]
    fn the_balanced_cuts_of_the_literature_are_found_by_arithmetic() {
        for (model, cut, share) in [("alexnet", "features.6", 0.57), ("vgg16", "features.12", 0.48)] {
            let options = of(model, 1);
            let uncut = Uncut { model: zoo::find(model).unwrap(), options: &options, beside: 0, limit: None };
            let balanced = uncut.balance(2, &uncut.arithmetic().unwrap()).unwrap();
            assert_eq!(balanced.cuts, [cut], "{balanced:?}");
            assert!((balanced.shares[0] - share).abs() < 0.01, "{model}: {balanced:?}");
        }
    }

    #[test]
    fn memory_is_a_constraint() {
        let options = of("vgg16", 2);
        let model = zoo::find("vgg16").unwrap();
        let free = Uncut { model, options: &options, beside: 0, limit: None };
        let costs = free.arithmetic().unwrap();
        let balanced = free.balance(3, &costs).unwrap();
        let largest = |cuts: &[String]| (0..3).map(|number| free.stage_bytes(cuts, number).unwrap()).max().unwrap();
        // The classifier holds nine tenths of the parameters: with less memory, more stages are before it.
        let limit = largest(&balanced.cuts) - (8 << 20);
        match (Uncut { limit: Some(limit), ..free }).balance(3, &costs) {
            Ok(other) => assert!(largest(&other.cuts) <= limit, "{other:?}"),
            Err(error) => assert!(error.to_string().contains("type more stages"), "{error}"),
        }
        let refused = Uncut { limit: Some(1 << 20), ..free }.balance(2, &costs).unwrap_err().to_string();
        assert!(refused.contains("no cut into 2 stages fits"), "{refused}");
        assert!(matches!(options.input, Input::Image { .. }));
    }
}
