//! Recomputation: what is cheap to make again is not kept for the backward pass.
//!
//! Runs after fusion. A result of the forward pass that only moves or scales what is kept anyway (a normalisation of a
//! convolution's output by its saved statistics, a ReLU, dropout, pooling, a copy) is dropped once the forward pass has
//! read it, and a node that makes it again is put before the first node of the backward pass that reads it. The arithmetic
//! is the same, so no bit changes. Each result is made again at most once: the price is one pass over memory for each, some
//! per cent of a step.
//!
//! A residual block's output is a sum with the output of the block before, which may have been dropped too. Then the
//! whole chain back to what was kept is made at once; its length is bounded, so that it does not take the memory that was
//! saved.

use serde::{Deserialize, Serialize};

use crate::graph::{Graph, Node, Source, Value};
use crate::op::{BatchNorm, Op};

/// How much memory a step takes, against how much it computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryUse {
    /// Everything that the backward pass reads is kept.
    #[default]
    Normal,
    /// What is cheap to make again is not.
    Low,
}

impl MemoryUse {
    /// Every choice.
    pub const ALL: [Self; 2] = [Self::Normal, Self::Low];
}

impl std::fmt::Display for MemoryUse {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.pad(match self {
            Self::Normal => "normal",
            Self::Low => "low",
        })
    }
}

impl std::str::FromStr for MemoryUse {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|choice| choice.to_string() == text);
        found.ok_or_else(|| format!("`{text}` is not a use of memory; type normal or low"))
    }
}

/// The longest chain of results that are made again one from the other. Arenas of resnet50 and resnet152 at 128², in MiB:
/// 606 and 612 with 1, 501 and 506 with 4, 482 and 498 with 6, 508 and 606 without a bound (829 and 875 with all kept).
const CHAIN_MAX: usize = 6;

/// The same computation with fewer results kept; nodes before `forward` are the forward pass, and `wanted` values stay.
pub(crate) fn recompute(graph: Graph, forward: usize, wanted: &[Value]) -> Graph {
    let chains = chains(&graph, forward, wanted);
    let mut work = Work { again: vec![None; graph.values.len()], uses: uses(&graph, forward), graph, chains };
    let backward = work.graph.nodes.split_off(forward);
    for (index, mut node) in backward.into_iter().enumerate() {
        for input in &mut node.inputs {
            *input = work.obtain(*input, forward + index);
        }
        work.push(node);
    }
    work.graph
}

/// The first and the last node of the backward pass that reads each value.
type Uses = Vec<Option<(usize, usize)>>;

fn uses(graph: &Graph, forward: usize) -> Uses {
    let mut uses: Uses = vec![None; graph.values.len()];
    for (index, node) in graph.nodes().iter().enumerate().skip(forward) {
        for input in &node.inputs {
            let (first, _) = uses[input.index()].unwrap_or((index, index));
            uses[input.index()] = Some((first, index));
        }
    }
    uses
}

/// Whether an operation costs about one pass over its operands, and its results depend on them alone.
fn is_cheap(op: &Op) -> bool {
    match op {
        Op::BatchNorm(_) | Op::LayerNorm { .. } | Op::Pool2d(_) | Op::Cast(_) => true,
        Op::Unary(_) | Op::Add | Op::Mul | Op::Scale(_) | Op::Dropout { .. } => true,
        op => op.only_moves(),
    }
}

/// The outputs that are made again: of a batch-norm, the statistics are kept.
fn remade(node: &Node) -> &[Value] {
    if matches!(node.op, Op::BatchNorm(_)) { &node.outputs[..1] } else { &node.outputs }
}

/// The node of the forward pass that makes a value.
fn maker(graph: &Graph, value: Value, forward: usize) -> Option<usize> {
    match graph.info(value).source {
        Source::Node { node, .. } if node < forward => Some(node),
        _ => None,
    }
}

/// For each node of the forward pass whose results are dropped, the length of the chain that makes them again.
fn chains(graph: &Graph, forward: usize, wanted: &[Value]) -> Vec<Option<usize>> {
    let uses = uses(graph, forward);
    let mut chains: Vec<Option<usize>> = vec![None; forward];
    for (index, node) in graph.nodes()[..forward].iter().enumerate() {
        let used = remade(node).iter().filter_map(|output| uses[output.index()]);
        let Some(first) = used.map(|(first, _)| first).min() else { continue };
        if remade(node).iter().any(|output| wanted.contains(output)) {
            continue;
        }
        let search = Search { graph, forward, uses: &uses, chains: &chains };
        // What only has another shape takes no memory, unless what it is a shape of is dropped.
        let least = if node.op.is_view() { 2 } else { 1 };
        chains[index] = search.chain(index, first).filter(|chain| (least..=CHAIN_MAX).contains(chain));
    }
    chains
}

struct Search<'a> {
    graph: &'a Graph,
    forward: usize,
    uses: &'a Uses,
    chains: &'a [Option<usize>],
}

impl Search<'_> {
    /// How long a chain makes a node's results again before node `at`, from what is kept until then anyway.
    fn chain(&self, index: usize, at: usize) -> Option<usize> {
        if let Some(chain) = self.chains[index] {
            return Some(chain);
        }
        let node = &self.graph.nodes()[index];
        if !is_cheap(&node.op) {
            return None;
        }
        let lengths = ingredients(node).map(|input| match maker(self.graph, input, self.forward) {
            None => Some(0),
            Some(maker) if self.chains[maker].is_some() => self.chains[maker],
            Some(_) if self.uses[input.index()].is_some_and(|(_, last)| last >= at) => Some(0),
            Some(maker) => self.chain(maker, at),
        });
        let longest = lengths.collect::<Option<Vec<usize>>>()?.into_iter().max().unwrap_or(0);
        Some(longest + 1).filter(|&chain| chain <= CHAIN_MAX)
    }
}

/// What a node's results are made from again: not the running statistics of a batch-norm, nor those that it was given.
fn ingredients(node: &Node) -> impl Iterator<Item = Value> {
    let (states, given) = match node.op {
        Op::BatchNorm(norm) => (2..4, norm.moments_at()..norm.inputs_fixed()),
        _ => (0..0, 0..0),
    };
    let is_left = move |index: &usize| !states.contains(index) && !given.contains(index);
    node.inputs.iter().enumerate().filter(move |(index, _)| is_left(index)).map(|(_, &input)| input)
}

struct Work {
    graph: Graph,
    chains: Vec<Option<usize>>,
    uses: Uses,
    /// The value that stands for a dropped one.
    again: Vec<Option<Value>>,
}

impl Work {
    /// What node `at` of the backward pass reads for `value`: itself, or what was made again for it.
    fn obtain(&mut self, value: Value, at: usize) -> Value {
        let Some(maker) = maker(&self.graph, value, self.chains.len()) else { return value };
        let node = &self.graph.nodes[maker];
        let is_kept = self.chains[maker].is_none() && self.uses[value.index()].is_some_and(|(_, last)| last >= at);
        if is_kept || !remade(node).contains(&value) {
            return value;
        }
        if self.again[value.index()].is_none() {
            self.make(maker, at);
        }
        self.again[value.index()].expect("made now or before")
    }

    fn make(&mut self, maker: usize, at: usize) {
        let mut node = self.graph.nodes[maker].clone();
        let outputs = remade(&node).to_vec();
        if let Op::BatchNorm(norm) = node.op {
            node.op = Op::BatchNormAgain(BatchNorm { moments: false, ..norm });
            node.inputs.drain(norm.moments_at()..norm.inputs_fixed());
            node.inputs[2..4].copy_from_slice(&node.outputs[1..]);
        }
        for index in 0..node.inputs.len() {
            node.inputs[index] = self.obtain(node.inputs[index], at);
        }
        node.outputs = outputs.iter().map(|&output| self.twin(output)).collect();
        for (&output, &twin) in outputs.iter().zip(&node.outputs) {
            self.again[output.index()] = Some(twin);
        }
        self.push(node);
    }

    fn twin(&mut self, value: Value) -> Value {
        let info = self.graph.info(value).clone();
        self.graph.value(&info.name, info.shape, info.dtype, info.source)
    }

    fn push(&mut self, node: Node) {
        for (output, value) in node.outputs.iter().enumerate() {
            self.graph.values[value.index()].source = Source::Node { node: self.graph.nodes.len(), output };
        }
        self.graph.nodes.push(node);
    }
}
