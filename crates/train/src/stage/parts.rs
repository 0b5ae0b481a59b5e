//! What the parts of a replica will do, before they do: what each has and computes, what they send each other in a step, and what data
//! parallelism between as many workers would send instead. Plain values, apart from the clock by which parts are measured.
//! `paceline plan --split channel:2` prints them.

use paceline_comm::describe::{CollectivePlan, plan as collective};
use paceline_comm::{Choice, Collective};
use paceline_nn::Mode;
use paceline_tensor::op::{Op, Together};
use paceline_tensor::{Graph, Node, Plan, Source, Value};

use super::ModelStage;
use super::plan::Basis;
use crate::balance::profiled;
use crate::config::Config;
use crate::error::TrainError;
use crate::micro_batch::micro_batches;
use crate::replica;
use crate::room::{Candidate, Processes};
use crate::together::Split;

/// Steps of each part of which the fastest counts.
const STEPS: usize = 3;

/// What a rank sends and receives.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Sums and gathers, or all-reduces.
    pub exchanges: usize,
    /// Bytes out.
    pub sent_bytes: u64,
    /// Bytes in.
    pub received_bytes: u64,
    /// Seconds over the links, one exchange after the other.
    pub seconds: f64,
}

impl Traffic {
    fn add(&mut self, other: Self) {
        self.exchanges += other.exchanges;
        self.sent_bytes += other.sent_bytes;
        self.received_bytes += other.received_bytes;
        self.seconds += other.seconds;
    }

    fn times(self, count: usize) -> Self {
        Self {
            exchanges: self.exchanges * count,
            sent_bytes: self.sent_bytes * count as u64,
            received_bytes: self.received_bytes * count as u64,
            seconds: self.seconds * count as f64,
        }
    }

    /// A rank's share of a collective.
    fn of(plan: &CollectivePlan, rank: usize) -> Self {
        let forecast = &plan.ranks[rank].forecast;
        let [sent_bytes, received_bytes] = [forecast.sent_bytes, forecast.received_bytes].map(|bytes| bytes as u64);
        Self { exchanges: 1, sent_bytes, received_bytes, seconds: plan.seconds() }
    }
}

/// What a rank does in a step.
#[derive(Clone, Debug)]
pub struct RankPlan {
    /// Trained elements that it has.
    pub parameters: u64,
    /// Floating-point operations of a step.
    pub flops: u64,
    /// Seconds of them, where they were measured.
    pub seconds: Option<f64>,
    /// Activations of one micro-batch.
    pub arena_bytes: u64,
    /// The most that its process takes in all.
    pub process_bytes: u64,
}

/// One of the parts.
#[derive(Debug)]
pub struct PartPlan {
    /// What it has and computes.
    pub rank: RankPlan,
    /// What it exchanges in the forward passes of a step.
    pub forward: Traffic,
    /// And in the backward passes.
    pub backward: Traffic,
    /// Its step for one micro-batch.
    pub plan: Plan,
}

/// What the first part exchanges for layers whose names begin alike.
#[derive(Debug)]
pub struct LayerTraffic {
    /// How they begin.
    pub name: String,
    /// Elements of their parameters in the whole model.
    pub parameters: u64,
    /// In the forward passes of a step.
    pub forward: Traffic,
    /// And in the backward passes.
    pub backward: Traffic,
    /// What an all-reduce of their gradients between as many workers sends.
    pub replicating: Traffic,
}

/// All parts, and as many workers beside them.
#[derive(Debug)]
pub struct PartsPlan {
    /// Each part.
    pub parts: Vec<PartPlan>,
    /// By layers.
    pub layers: Vec<LayerTraffic>,
    /// Samples of a micro-batch, at most, and how many of them a step has.
    pub micro_batch: usize,
    /// See above.
    pub micro_batches: usize,
    /// One of as many workers, each with its share of the same samples.
    pub replicated: RankPlan,
    /// What that one exchanges.
    pub all_reduce: Traffic,
}

impl PartsPlan {
    /// The parts of a run's configuration, whose exchanges take algorithms by `choice`, which is for as many ranks.
    ///
    /// # Errors
    /// When a layer does not fit, or cannot be computed so.
    pub fn new(candidate: &Candidate<'_>, basis: Basis<'_>, choice: &Choice) -> Result<Self, TrainError> {
        let config = candidate.config;
        let options = candidate.options(config)?;
        let count = micro_batches(config.batch, candidate.workers, config.accumulate);
        let process_bytes = candidate.part_bytes(config)?;
        let mut parts = Vec::new();
        for (own, process_bytes) in process_bytes.into_iter().enumerate() {
            let form = config.part_form(own);
            let plan = replica::plan(ModelStage::whole(candidate.model).in_parts(form.as_ref()), &options)?.0;
            let rank = rank_plan(&plan, (count, options.micro_batch), process_bytes, basis)?;
            let (mut forward, mut backward) = (Traffic::default(), Traffic::default());
            for (index, node) in plan.graph().nodes().iter().enumerate() {
                let pass = if index < plan.forward_nodes() { &mut forward } else { &mut backward };
                exchange(plan.graph(), node, choice, own).into_iter().for_each(|traffic| pass.add(traffic));
            }
            parts.push(PartPlan { rank, forward: forward.times(count), backward: backward.times(count), plan });
        }
        let (replicated, all_reduce) = replicated(candidate, basis, choice)?;
        let network = ModelStage::whole(candidate.model).network(Mode::Train, 1, &options)?;
        let layers = layers(&network.graph, &parts[0].plan, choice, count);
        Ok(Self { parts, layers, micro_batch: options.micro_batch, micro_batches: count, replicated, all_reduce })
    }

    /// Seconds of a step, where parts were measured: the slowest, and what is exchanged where that takes time.
    pub fn step_s(&self, linked: bool) -> Option<f64> {
        let of = |part: &PartPlan| {
            let exchanged_s = part.forward.seconds + part.backward.seconds;
            Some(part.rank.seconds? + if linked { exchanged_s } else { 0.0 })
        };
        self.parts.iter().map(of).try_fold(0.0, |slowest: f64, part_s| Some(slowest.max(part_s?)))
    }

    /// The same of as many workers, of whose messages a part at most hides behind their arithmetic: between none of it and all.
    pub fn replicated_s(&self, linked: bool) -> Option<[f64; 2]> {
        let (alone_s, messages_s) = (self.replicated.seconds?, if linked { self.all_reduce.seconds } else { 0.0 });
        Some([alone_s.max(messages_s), alone_s + messages_s])
    }
}

/// What a part sends for a node, where that is a sum or a gather.
fn exchange(graph: &Graph, node: &Node, choice: &Choice, own: usize) -> Option<Traffic> {
    let bytes = size_of::<f32>();
    match &node.op {
        Op::Together(Together::Sum) => {
            let elements = graph.shape(node.outputs[0]).elements();
            Some(Traffic::of(&collective(Collective::AllReduce, choice, elements, bytes), own))
        }
        Op::Together(Together::Gather(gather)) => {
            let (length, all) = (gather.lengths[own], gather.lengths.iter().sum::<usize>());
            let sent = (gather.lengths.len() - 1) * length * bytes;
            let received = (all - length) * bytes;
            let seconds = choice.links().between.message_s(sent.max(received) as f64);
            Some(Traffic { exchanges: 1, sent_bytes: sent as u64, received_bytes: received as u64, seconds })
        }
        _ => None,
    }
}

/// What a rank does that makes a step by a plan, micro-batch by micro-batch.
fn rank_plan(
    plan: &Plan,
    (count, samples): (usize, usize),
    process_bytes: u64,
    basis: Basis<'_>,
) -> Result<RankPlan, TrainError> {
    let graph = plan.graph();
    let elements = |&value: &Value| graph.shape(value).elements() as u64;
    let flops: u64 = graph.nodes().iter().map(|node| graph.flops(node)).sum();
    let seconds = match basis {
        Basis::Arithmetic => None,
        Basis::Time { device, choose } => {
            choose(plan);
            let total = |_: &Plan, profile: &paceline_tensor::execute::Profile| profile.seconds.iter().sum::<f64>();
            Some(count as f64 * profiled(plan.clone(), (samples, STEPS), device, total)?)
        }
    };
    Ok(RankPlan {
        parameters: graph.parameters().iter().map(elements).sum(),
        flops: count as u64 * flops,
        seconds,
        arena_bytes: plan.arena_bytes() as u64,
        process_bytes,
    })
}

/// As many workers as parts, in place of them.
fn replicated(candidate: &Candidate<'_>, basis: Basis<'_>, choice: &Choice) -> Result<(RankPlan, Traffic), TrainError> {
    let parts = candidate.config.parts();
    let workers = candidate.workers * parts;
    // A step of fewer samples than workers is made by some of them.
    let batch = candidate.config.batch.max(workers);
    let config = &Config { split: Split::Replicate, workers, batch, ..candidate.config.clone() };
    let here = Processes::here(config, workers, workers);
    let other = Candidate { config, workers, here, ..*candidate };
    let options = other.options(config)?;
    let plan = other.plan(Mode::Train)?;
    let count = micro_batches(config.batch, workers, config.accumulate);
    let rank = rank_plan(&plan, (count, options.micro_batch), other.bytes()? / workers as u64, basis)?;
    let mut traffic = Traffic::default();
    for bucket in plan.buckets() {
        let all_reduce = collective(Collective::AllReduce, choice, bucket.elements.len(), size_of::<f32>());
        traffic.add(Traffic::of(&all_reduce, 0));
    }
    Ok((rank, traffic))
}

/// What the first part exchanges, by the first words of layers' names.
fn layers(whole: &Graph, plan: &Plan, choice: &Choice, count: usize) -> Vec<LayerTraffic> {
    let mut layers: Vec<LayerTraffic> = Vec::new();
    let mut of = |name: &str, change: &mut dyn FnMut(&mut LayerTraffic)| {
        let name = name.split('.').next().unwrap_or_default();
        let found = layers.iter().position(|layer| layer.name == name).unwrap_or_else(|| {
            let none = Traffic::default();
            let name = name.to_owned();
            layers.push(LayerTraffic { name, parameters: 0, forward: none, backward: none, replicating: none });
            layers.len() - 1
        });
        change(&mut layers[found]);
    };
    for &value in whole.parameters() {
        if let Source::Parameter(_) = whole.info(value).source {
            let elements = whole.shape(value).elements();
            of(&whole.info(value).name, &mut |layer| layer.parameters += elements as u64);
        }
    }
    let graph = plan.graph();
    for (index, node) in graph.nodes().iter().enumerate() {
        let Some(traffic) = exchange(graph, node, choice, 0) else { continue };
        of(&node.layer, &mut |layer| {
            let pass = if index < plan.forward_nodes() { &mut layer.forward } else { &mut layer.backward };
            pass.add(traffic.times(count));
        });
    }
    for layer in layers.iter_mut().filter(|layer| layer.parameters > 0) {
        let all_reduce = collective(Collective::AllReduce, choice, layer.parameters as usize, size_of::<f32>());
        layer.replicating = Traffic::of(&all_reduce, 0);
    }
    layers
}
