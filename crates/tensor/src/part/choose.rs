//! Which way each node takes, of those that it may take: the fastest, by a dynamic programme.
//!
//! Nodes are gone through in order. What matters of the choices so far is the state of every value that is still to be read (whole, by
//! channels, by samples) and what has been made of it already; of all choices that lead to the same states the cheapest is kept, or, where
//! memory is limited, every one that none beats in both. In a chain there is one such value, and the cost is nodes × states²; where a block
//! branches there are a few. Nothing is contracted: a block that has ended has left one value behind.

use std::collections::BTreeMap;

use super::rule::{Facts, Way, share};
use crate::dtype::DType;
use crate::graph::{Graph, Value};

/// What things cost.
#[derive(Clone, Debug)]
pub struct Prices {
    /// Seconds of each node for the whole batch on one device, backwards included.
    pub nodes: Vec<f64>,
    /// Seconds for a byte that a part sends.
    pub per_byte: f64,
    /// Seconds for a message by itself.
    pub per_message: f64,
    /// Samples that activations are counted for.
    pub samples: f64,
    /// What a part may take, if it is limited.
    pub memory: Option<MemoryLimit>,
}

/// A limit of memory, and how what stands there is counted.
#[derive(Clone, Copy, Debug)]
pub struct MemoryLimit {
    /// Bytes of a part.
    pub bytes_max: f64,
    /// Bytes for each trained number: with its gradient and what the optimizer keeps.
    pub bytes_per_weight: f64,
}

/// Most sets of states that are gone on with, the cheapest ones.
const SETS_MAX: usize = 2048;

/// Most choices of one set of states that differ in memory.
const CHOICES_MAX: usize = 32;

/// How a value stands in the parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum State {
    /// All have all of it.
    Whole,
    /// Each has its share of this many channels, which the innermost elements are over and over.
    Channels(usize),
    /// Each has its share of the samples.
    Samples,
    /// One has it.
    Local,
}

/// What a node needs of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// All of it, for what all parts compute alike.
    Whole,
    /// All of it, for what differs between the parts: gradients are summed.
    Forked,
    /// A share of so many channels.
    Channels(usize),
    /// A share of the samples.
    Samples,
    /// As it stands.
    Local,
}

/// A value that is still to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Live {
    value: Value,
    state: State,
    is_gathered: bool,
    is_forked: bool,
}

#[derive(Clone, Copy, Debug)]
struct Choice {
    seconds: f64,
    bytes: f64,
    /// The last decision that led here.
    trail: usize,
}

/// A set of states, with the choices that lead there.
type Sets = BTreeMap<Vec<Live>, Vec<Choice>>;

/// What a way needs of a node's inputs that are activations.
pub(super) fn need(way: &Way, is_local: bool) -> Need {
    match way {
        Way::Whole => Need::Whole,
        Way::Column => Need::Forked,
        Way::Row { unit } | Way::Channels { unit } => Need::Channels(*unit),
        Way::Samples => Need::Samples,
        Way::Branch { .. } | Way::Join { .. } => {
            if is_local {
                Need::Local
            } else {
                Need::Forked
            }
        }
    }
}

/// The state of a node's results.
pub(super) fn state(facts: &Facts<'_>, node: usize, way: &Way) -> State {
    let node = &facts.graph.nodes()[node];
    match way {
        Way::Whole | Way::Row { .. } | Way::Join { .. } => State::Whole,
        Way::Column => State::Channels(facts.graph.shape(node.outputs[0]).last()),
        Way::Channels { unit } => State::Channels(facts.channels(node, *unit).unwrap_or(*unit)),
        Way::Samples => State::Samples,
        Way::Branch { .. } => State::Local,
    }
}

/// The cheapest way of each node; `ways(node, unit)` says which it may take where the channels of what it reads stand as shares of `unit`.
/// The seconds of all of them together; none where nothing fits into memory.
pub(super) fn choose(
    facts: &Facts<'_>,
    prices: &Prices,
    ways: &dyn Fn(usize, usize) -> Vec<Way>,
) -> Option<(Vec<Way>, f64)> {
    let nodes = facts.graph.nodes();
    let mut trails: Vec<(usize, Way)> = vec![(usize::MAX, Way::Whole)];
    let given = facts.graph.inputs().iter().map(|&value| Live::new(value, State::Whole)).collect();
    let mut sets = Sets::from([(given, vec![Choice { seconds: 0.0, bytes: 0.0, trail: 0 }])]);
    for index in 0..nodes.len() {
        let mut next = Sets::new();
        for (set, choices) in &sets {
            for way in ways(index, unit(facts, index, set)) {
                let step = Step { facts, prices, index, way: &way };
                let (set, seconds, bytes) = step.take(set);
                let found = next.entry(set).or_default();
                for choice in choices {
                    let (seconds, bytes) = (choice.seconds + seconds, choice.bytes + bytes);
                    let fits = prices.memory.is_none_or(|memory| bytes <= memory.bytes_max);
                    if fits && is_better(found, (seconds, bytes), prices.memory.is_some()) {
                        found.push(Choice { seconds, bytes, trail: trails.len() });
                        trails.push((choice.trail, way.clone()));
                    }
                }
            }
        }
        sets = limit(next);
    }
    let best = sets.into_values().flatten().min_by(|a, b| a.seconds.total_cmp(&b.seconds))?;
    let mut found = Vec::with_capacity(nodes.len());
    let mut at = best.trail;
    while at != 0 {
        let (before, way) = &trails[at];
        found.push(way.clone());
        at = *before;
    }
    found.reverse();
    Some((found, best.seconds))
}

/// How many channels the innermost elements of what a node reads are shares of, or would be.
fn unit(facts: &Facts<'_>, index: usize, set: &[Live]) -> usize {
    let node = &facts.graph.nodes()[index];
    let units = facts.activations(node).filter_map(|input| match live(set, input)?.state {
        State::Channels(unit) => Some(unit),
        _ => None,
    });
    units
        .max()
        .unwrap_or_else(|| facts.activations(node).map(|input| facts.graph.shape(input).last()).min().unwrap_or(1))
}

fn live(set: &[Live], value: Value) -> Option<&Live> {
    set.iter().find(|live| live.value == value)
}

/// Whether nothing that leads to the same states is as good; what it beats is dropped.
fn is_better(found: &mut Vec<Choice>, (seconds, bytes): (f64, f64), counts_memory: bool) -> bool {
    let beats = |a: (f64, f64), b: (f64, f64)| a.0 <= b.0 && (!counts_memory || a.1 <= b.1);
    if found.iter().any(|other| beats((other.seconds, other.bytes), (seconds, bytes))) {
        return false;
    }
    found.retain(|other| !beats((seconds, bytes), (other.seconds, other.bytes)));
    true
}

/// The cheapest sets, and of each the fastest choices and the smallest one.
fn limit(sets: Sets) -> Sets {
    let cheapest = |choices: &[Choice]| choices.iter().map(|choice| choice.seconds).fold(f64::INFINITY, f64::min);
    let mut sets: Vec<(Vec<Live>, Vec<Choice>)> = sets.into_iter().filter(|(_, choices)| !choices.is_empty()).collect();
    for (_, choices) in &mut sets {
        choices.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        if choices.len() > CHOICES_MAX {
            choices.drain(CHOICES_MAX - 1..choices.len() - 1);
        }
    }
    if sets.len() > SETS_MAX {
        sets.sort_by(|a, b| cheapest(&a.1).total_cmp(&cheapest(&b.1)).then_with(|| a.0.cmp(&b.0)));
        sets.truncate(SETS_MAX);
    }
    sets.into_iter().collect()
}

impl Live {
    const fn new(value: Value, state: State) -> Self {
        Self { value, state, is_gathered: false, is_forked: false }
    }
}

/// One node, and a way that it may take.
struct Step<'a> {
    facts: &'a Facts<'a>,
    prices: &'a Prices,
    index: usize,
    way: &'a Way,
}

impl Step<'_> {
    /// The states behind the node, and what that takes in seconds and bytes.
    fn take(&self, set: &[Live]) -> (Vec<Live>, f64, f64) {
        let (facts, node) = (self.facts, &self.facts.graph.nodes()[self.index]);
        let mut set = set.to_vec();
        let (mut seconds, mut bytes) = (self.own(), 0.0);
        for &input in &node.inputs {
            match set.iter_mut().find(|live| live.value == input) {
                Some(live) => seconds += self.provide(live),
                None if *self.way == Way::Samples && facts.learns[input.index()] => {
                    seconds += self.sum(self.facts.graph.info(input).bytes() as f64);
                }
                None => {}
            }
            if let (false, Some(memory)) = (facts.is_activation(input), self.prices.memory) {
                bytes += self.held(input) * memory.bytes_per_weight / DType::F32.bytes() as f64;
            }
        }
        if let (Way::Row { .. }, Some(&y)) = (self.way, node.outputs.first()) {
            seconds += self.sum(self.bytes(y));
        }
        if let (Way::Join { .. }, Some(&y)) = (self.way, node.outputs.first()) {
            seconds += self.gather(y);
        }
        let state = state(facts, self.index, self.way);
        set.retain(|live| facts.last[live.value.index()] > self.index);
        for &output in node.outputs.iter().filter(|output| facts.readers[output.index()] > 0) {
            set.push(Live::new(output, state));
        }
        let part = self.part();
        bytes += node.outputs.iter().map(|&output| self.bytes(output) * part).sum::<f64>();
        set.sort();
        (set, seconds, bytes)
    }

    /// The largest share of the node that a part computes.
    fn part(&self) -> f64 {
        let node = &self.facts.graph.nodes()[self.index];
        let of = |total: usize| {
            let parts = self.facts.parts;
            let most = (0..parts).map(|own| share(total, parts, own).len()).max().unwrap_or(total);
            most as f64 / total as f64
        };
        match self.way {
            Way::Column => of(self.facts.graph.shape(node.outputs[0]).last()),
            Way::Row { unit } | Way::Channels { unit } => of(*unit),
            Way::Samples => of(self.facts.batch),
            Way::Whole | Way::Branch { .. } | Way::Join { .. } => 1.0,
        }
    }

    fn own(&self) -> f64 {
        self.prices.nodes[self.index] * self.part()
    }

    /// Bytes of an activation.
    fn bytes(&self, value: Value) -> f64 {
        self.facts.graph.info(value).bytes() as f64 / self.facts.batch as f64 * self.prices.samples
    }

    /// Bytes of a parameter that a part has.
    fn held(&self, value: Value) -> f64 {
        let whole = self.facts.graph.info(value).bytes() as f64;
        if matches!(self.way, Way::Column | Way::Row { .. } | Way::Channels { .. }) {
            whole * self.part()
        } else {
            whole
        }
    }

    /// Seconds for a sum of so many bytes: each part sends and receives all but its share twice.
    fn sum(&self, bytes: f64) -> f64 {
        let others = (self.facts.parts - 1) as f64 / self.facts.parts as f64;
        self.prices.per_message + 2.0 * others * bytes * self.prices.per_byte
    }

    fn gather(&self, value: Value) -> f64 {
        let others = (self.facts.parts - 1) as f64 / self.facts.parts as f64;
        self.prices.per_message + others * self.bytes(value) * self.prices.per_byte
    }

    /// Seconds for a value to stand as the node needs it.
    fn provide(&self, live: &mut Live) -> f64 {
        let need = need(self.way, live.state == State::Local);
        let is_there = match (need, live.state) {
            (Need::Local, _) | (Need::Samples, State::Samples) => true,
            (Need::Channels(needed), State::Channels(unit)) => needed == unit,
            _ => false,
        };
        if is_there {
            return 0.0;
        }
        let mut seconds = 0.0;
        if live.state != State::Whole && !std::mem::replace(&mut live.is_gathered, true) {
            seconds += self.gather(live.value);
        }
        let is_forked = need != Need::Whole && self.facts.learns[live.value.index()];
        if is_forked && !std::mem::replace(&mut live.is_forked, true) {
            seconds += self.sum(self.bytes(live.value));
        }
        seconds
    }
}

/// Seconds for a byte between two machines at 1 Gbit/s.
const LINK_S_PER_BYTE: f64 = 8e-9;

impl Prices {
    /// Prices by which bytes that travel decide, and next to them what is computed more than once: the same for every batch and every machine,
    /// so that a model is always divided alike.
    pub(super) fn of_bytes(graph: &Graph, batch: usize) -> Self {
        // One core of a server: 100 GFLOP/s and 10 GB/s; backwards takes twice as long as forwards.
        let seconds = |node: &crate::graph::Node| {
            let bytes = graph.info(node.outputs[0]).bytes() as f64 / batch as f64;
            3.0 * (graph.flops(node) as f64 / batch as f64 / 1e11 + bytes / 1e10)
        };
        let nodes = graph.nodes().iter().map(seconds).collect();
        Self { nodes, per_byte: LINK_S_PER_BYTE, per_message: 0.0, samples: 1.0, memory: None }
    }
}
