//! The plan of a step: order, memory, and the moment each gradient is final. All of it known before the first batch.
//!
//! Memory is one arena. A *storage* is a set of values that share bytes: a value, the reshapes of it, and results that
//! may overwrite it because it was read for the last time. Storages whose lives overlap get disjoint bytes; offsets are
//! given largest first, each at the lowest place that is free during its whole life, which in practice lands within a
//! few per cent of the busiest moment's need.

mod beside;
mod bucket;
mod memory;
mod order;
mod report;
mod sums;

use std::ops::Range;

pub use bucket::Bucket;
pub(crate) use bucket::Due;
pub use report::{BucketReport, NodeReport, Report};

use crate::dtype::DType;
use crate::fuse;
use crate::graph::{Graph, Source, Value};
use crate::mixed::{self, Precision};
use crate::recompute::{self, MemoryUse};
use crate::shape::Shape;
use crate::split::{self, Part};

/// Every buffer starts on a cache line.
pub const ALIGNMENT_BYTES: usize = 64;

/// Where gradients are in the arena, other values begin at multiples of this: a GPU moves 128 bytes at once, and gradients end in the middle.
pub const SHARED_ALIGNMENT_BYTES: usize = 512;

/// Where a value lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the arena, at this byte.
    Arena(usize),
    /// In the parameters, by number.
    Parameter(usize),
    /// In the gradients, by the parameter's number.
    Gradient(usize),
    /// In the states, by number.
    State(usize),
    /// Nowhere: fusion made it disappear.
    None,
}

/// What the caller wants from a graph.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// Values to be read after the forward pass, which ends with the last of them.
    pub outputs: Vec<Value>,
    /// Gradients of inputs, to be read after the backward pass, which computes them: a stage of a pipeline sends them on.
    pub input_gradients: Vec<Value>,
    /// For each parameter, the value that is its gradient; empty for a graph without a backward pass.
    pub gradients: Vec<Option<Value>>,
    /// Gradients are grouped into buckets of at most this size; a larger tensor is a bucket by itself, or several.
    pub bucket_bytes_max: usize,
    /// When they become steps.
    pub updates: Updates,
    /// Leave the nodes as they are: for tests and for looking at single operations.
    pub unfused: bool,
    /// A convolution whose result has at least this many elements gives a batch-norm behind it the statistics; a batch-norm
    /// of fewer, which are in a cache, reads them. `usize::MAX` is for devices whose convolutions cannot do it.
    pub moments_from: usize,
    /// What activations and their gradients are stored as.
    pub precision: Precision,
    /// Inputs that are given in the type of activations, unless something reads them in f32.
    pub narrow_inputs: Vec<Value>,
    /// Whether what is cheap to make again is kept.
    pub memory: MemoryUse,
    /// Whether batch normalisations take their statistics over the batches of all replicas: the step then stops to have numbers
    /// added up ([`crate::execute::Turn::Sum`]).
    pub shares_statistics: bool,
    /// Whether a node that gives nothing but gradients of parameters may be computed beside those that follow it ([`Plan::beside`]): what it
    /// reads then lives longer.
    pub beside: bool,
    /// Whether the backward pass has two halves that can be run apart: what the gradients of inputs depend on
    /// ([`Plan::input_gradient_nodes`]), then everything else ([`Plan::weight_gradient_nodes`]). Where no gradients of inputs are wanted, as
    /// in the first stage of a pipeline, the first half is empty. What the second half reads lives longer.
    pub weights_last: bool,
}

/// When gradients become steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Updates {
    /// After the backward pass: all gradients stand in the store then.
    #[default]
    AtEnd,
    /// After the backward pass, too. Where it takes less memory, gradients stand at the beginning of the arena
    /// ([`Plan::arena_has_gradients`]), one after the other as in the layout of the parameters, and share bytes with what was read for the
    /// last time before they were computed.
    FromArena,
    /// During the backward pass: each bucket as soon as it may be. Its gradients live in the arena until then, and no
    /// longer.
    Early {
        /// A larger matrix comes in parts of about this size, each a bucket of its own; none comes whole.
        part_bytes_max: Option<usize>,
    },
}

/// Where each tensor of a flat buffer starts and how long it is, in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    ranges: Vec<Range<usize>>,
    length: usize,
}

impl Layout {
    /// Tensors of these shapes one after the other, each on a cache line of its own.
    pub fn new<'a>(shapes: impl IntoIterator<Item = &'a Shape>) -> Self {
        let align = ALIGNMENT_BYTES / DType::F32.bytes();
        let mut length = 0usize;
        let ranges = shapes
            .into_iter()
            .map(|shape| {
                let end = length.checked_add(shape.elements()).and_then(|end| end.checked_next_multiple_of(align));
                let start = std::mem::replace(&mut length, end.expect("no more elements than can be addressed"));
                start..start + shape.elements()
            })
            .collect();
        Self { ranges, length }
    }

    /// The elements of tensor `index`.
    pub fn range(&self, index: usize) -> Range<usize> {
        self.ranges[index].clone()
    }

    /// All ranges, in order.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// Elements of the whole buffer, gaps included.
    pub fn length(&self) -> usize {
        self.length
    }
}

/// Everything a device needs to run a graph.
#[derive(Clone, Debug)]
pub struct Plan {
    graph: Graph,
    places: Vec<Place>,
    arena_bytes: usize,
    spans: Vec<memory::Span>,
    /// Bytes of results that the backward pass reads.
    activation_bytes: usize,
    /// Nodes before this one belong to the forward pass.
    forward_nodes: usize,
    /// Where gradients of weights come last, the first node that only they need.
    weights_from: Option<usize>,
    buckets: Vec<Bucket>,
    dues: Vec<Due>,
    /// Which bucket is needed before which node, in order.
    needs: Vec<(usize, usize)>,
    /// After which node which bucket is offered again, in order.
    offers: Vec<(usize, usize)>,
    parameters: Layout,
    states: Layout,
    outputs: Vec<Value>,
    shares_statistics: bool,
    /// Of early updates, the gradients that come whole: bucket, parameter, value.
    whole: Vec<(usize, usize, Value)>,
    early: bool,
    arena_has_gradients: bool,
    beside: Vec<Option<usize>>,
}

impl Plan {
    /// Fuses a graph, chooses its types and plans it.
    ///
    /// # Panics
    /// When a gradient is wanted that the graph does not compute with a node of its own, in the parameter's shape, and
    /// leave alone afterwards (as [`crate::gradient::of_loss`] arranges it), or early updates of a parameter without
    /// a gradient: a bug in the caller.
    pub fn new(graph: Graph, wanted: &Wanted) -> Self {
        let mut keep = wanted.outputs.clone();
        keep.extend(wanted.input_gradients.iter().chain(wanted.gradients.iter().flatten()));
        let graph = if wanted.unfused { graph } else { fuse::fuse(graph, &keep) };
        let graph = if wanted.unfused { graph } else { fuse::moments(graph, wanted.moments_from) };
        let graph = match wanted.precision {
            Precision::F32 => graph,
            Precision::Bf16 => mixed::mix(graph, &keep, &wanted.narrow_inputs),
        };
        memory::check_gradients(&graph, &wanted.gradients);
        let forward_nodes = forward_nodes(&graph, &wanted.outputs);
        let graph = match wanted.memory {
            MemoryUse::Normal => graph,
            MemoryUse::Low => recompute::recompute(graph, forward_nodes, &keep),
        };
        let (graph, parts) = match wanted.updates {
            Updates::Early { part_bytes_max: Some(bytes_max) } => split::split(graph, &wanted.gradients, bytes_max),
            _ => {
                let parts = split::whole(&graph, &wanted.gradients);
                (graph, parts)
            }
        };
        let (graph, weights_from) = if wanted.weights_last {
            let (graph, from) = order::weights_last(graph, forward_nodes, (&wanted.input_gradients, &parts));
            (graph, Some(from))
        } else {
            (graph, None)
        };
        let shapes = |values: &[Value]| Layout::new(values.iter().map(|&value| graph.shape(value)));
        let (parameters, states) = (shapes(graph.parameters()), shapes(graph.states()));
        let mut buckets = bucket::buckets(&graph, &parameters, &parts, wanted.bucket_bytes_max);
        let beside = if wanted.beside { beside::beside(&graph, &parts) } else { vec![None; graph.nodes().len()] };
        let memory = memory::assign(&graph, (wanted, &beside), (&parts, &parameters, &mut buckets));
        let activation_bytes = memory::activation_bytes(&graph, &memory, forward_nodes);
        let early = matches!(wanted.updates, Updates::Early { .. });
        let plan = Self {
            early,
            beside,
            arena_has_gradients: memory.has_gradients,
            whole: if early { bucket::whole(&buckets, &parts, &parameters) } else { Vec::new() },
            graph,
            places: memory.places,
            arena_bytes: memory.arena_bytes,
            spans: memory.spans,
            activation_bytes,
            forward_nodes,
            weights_from,
            dues: bucket::dues(&buckets),
            needs: bucket::needs(&buckets),
            offers: bucket::offers(&buckets),
            buckets,
            parameters,
            states,
            outputs: wanted.outputs.iter().chain(&wanted.input_gradients).copied().collect(),
            shares_statistics: wanted.shares_statistics,
        };
        plan.verify();
        plan.verify_beside();
        plan.verify_gradients(&parts);
        plan
    }

    /// The graph as it will run.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Where a value lives.
    pub fn place(&self, value: Value) -> Place {
        self.places[value.index()]
    }

    /// The values that can be read after a run.
    pub fn outputs(&self) -> &[Value] {
        &self.outputs
    }

    /// Bytes of the arena.
    pub fn arena_bytes(&self) -> usize {
        self.arena_bytes
    }

    /// Whether gradients may stand at the beginning of the arena instead of in memory of their own.
    pub fn arena_has_gradients(&self) -> bool {
        self.arena_has_gradients
    }

    /// Bytes of results that the backward pass reads.
    pub fn activation_bytes(&self) -> usize {
        self.activation_bytes
    }

    /// How many nodes belong to the forward pass.
    pub fn forward_nodes(&self) -> usize {
        self.forward_nodes
    }

    /// The first half of the backward pass, where it has two ([`Wanted::weights_last`]); else none.
    pub fn input_gradient_nodes(&self) -> Range<usize> {
        self.weights_from.map_or(0..0, |from| self.forward_nodes..from)
    }

    /// The second half of the backward pass, where it has two; else none. All gradients of parameters are written here.
    pub fn weight_gradient_nodes(&self) -> Range<usize> {
        self.weights_from.map_or(0..0, |from| from..self.graph.nodes().len())
    }

    /// Whether the backward pass has two halves.
    pub fn weights_are_last(&self) -> bool {
        self.weights_from.is_some()
    }

    /// The buckets of gradients, in the order in which they become ready.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// Whether gradients become steps after the backward pass: all stand in the store then.
    pub fn stores_gradients(&self) -> bool {
        !self.early && self.writes_gradients()
    }

    /// Whether some gradients stand in the store.
    pub fn writes_gradients(&self) -> bool {
        self.buckets.iter().any(|bucket| matches!(bucket.place, Place::Gradient(_)))
    }

    /// Has gradients of early updates written to the store's gradients instead of the arena, where they would soon be overwritten:
    /// all but those of tensors that come in parts. Their turns stay the same.
    pub fn keep_gradients(&mut self) {
        for &(bucket, parameter, value) in &self.whole {
            self.places[value.index()] = Place::Gradient(parameter);
            self.buckets[bucket].place = Place::Gradient(self.buckets[bucket].parameters.start);
        }
    }

    /// What is to be done with the buckets from a node on, in order.
    pub(crate) fn dues_from(&self, node: usize) -> &[Due] {
        &self.dues[self.dues.partition_point(|due| due.node < node)..]
    }

    /// The node after which a bucket is offered again, and the bucket, from a node on, in order.
    pub(crate) fn offers_from(&self, node: usize) -> &[(usize, usize)] {
        &self.offers[self.offers.partition_point(|offer| offer.0 < node)..]
    }

    /// The node before which each bucket's parameters are needed, and the bucket, in order.
    pub fn needs(&self) -> &[(usize, usize)] {
        &self.needs
    }

    /// The flat layout of parameters and of gradients.
    pub fn parameters(&self) -> &Layout {
        &self.parameters
    }

    /// The flat layout of states.
    pub fn states(&self) -> &Layout {
        &self.states
    }

    /// Bytes `start..end` of a value in the arena.
    pub(crate) fn arena_range(&self, value: Value) -> Option<Range<usize>> {
        match self.place(value) {
            Place::Arena(start) => Some(start..start + self.graph.info(value).bytes()),
            _ => None,
        }
    }

    /// For a node that may be computed beside those that follow it, the node before which it has to be done.
    pub fn beside(&self, node: usize) -> Option<usize> {
        self.beside[node]
    }

    /// The longest run of bytes of the arena that no value occupies at any of some nodes, nor anything else that is there.
    pub(crate) fn free_arena(&self, nodes: &[usize], taken: &[Range<usize>]) -> Range<usize> {
        memory::longest_gap(&self.spans, nodes, taken, self.arena_bytes)
    }

    /// Asserts what the devices' memory accesses rely on: within a node, an output overlaps nothing but the one input
    /// it may overwrite, and that one exactly; a state that is updated is no other operand of the same node.
    fn verify(&self) {
        for node in self.graph.nodes() {
            if matches!(node.op, crate::op::Op::BatchNorm(_)) {
                for updated in 2..4 {
                    let place = self.place(node.inputs[updated]);
                    assert!(matches!(place, Place::State(_)), "{}: only states are updated", node.layer);
                    let uses = node.inputs.iter().chain(&node.outputs).filter(|&&value| self.place(value) == place);
                    assert_eq!(uses.count(), 1, "{}: an updated state is another operand too", node.layer);
                }
            }
            for (position, &output) in node.outputs.iter().enumerate() {
                let place = self.place(output);
                assert_ne!(place, Place::None, "{}: an output without a place", node.layer);
                let overlaps = |other: Value| match (self.arena_range(output), self.arena_range(other)) {
                    (Some(a), Some(b)) => a.start < b.end && b.start < a.end,
                    _ => place == self.place(other),
                };
                for (index, &input) in node.inputs.iter().enumerate() {
                    let may_share = node.op.is_view() || node.op.in_place() == Some((position, index));
                    let shared = may_share && self.place(input) == place;
                    assert!(shared || !overlaps(input), "{}: output {position} overlaps input {index}", node.layer);
                }
                let clash = node.outputs[..position].iter().any(|&earlier| overlaps(earlier));
                assert!(!clash, "{}: two outputs overlap", node.layer);
            }
        }
    }

    /// Asserts that nothing overwrites what a node reads that is computed beside others, before it has to be done.
    fn verify_beside(&self) {
        let nodes = self.graph.nodes();
        for (index, until) in (0..nodes.len()).filter_map(|index| Some((index, self.beside[index]?))) {
            let read: Vec<Range<usize>> = nodes[index].inputs.iter().filter_map(|&v| self.arena_range(v)).collect();
            for node in &nodes[index + 1..until] {
                let mut written = node.outputs.iter().filter_map(|&output| self.arena_range(output));
                let overlaps = |to: Range<usize>| read.iter().any(|from| from.start < to.end && to.start < from.end);
                assert!(
                    !written.any(overlaps),
                    "{}: overwrites what {} may be reading",
                    node.layer,
                    nodes[index].layer
                );
            }
        }
    }

    /// Asserts that a bucket that is ready is no longer read, because whoever sends it may overwrite it, and that its
    /// parameters are not either once it may be applied.
    fn verify_gradients(&self, parts: &[Part]) {
        let mut last_use = vec![usize::MAX; self.graph.values.len()];
        for bucket in &self.buckets {
            let gradients = parts[bucket.parts.clone()].iter().filter_map(|part| part.value);
            gradients.for_each(|value| last_use[value.index()] = bucket.ready_after);
            for &parameter in &self.graph.parameters()[bucket.parameters.clone()] {
                let last = &mut last_use[parameter.index()];
                *last = bucket.apply_after.min(*last);
            }
        }
        for (index, node) in self.graph.nodes().iter().enumerate() {
            let late = node.inputs.iter().find(|value| last_use[value.index()] < index);
            if let Some(&value) = late {
                let what = if matches!(self.place(value), Place::Parameter(_)) { "parameter" } else { "gradient" };
                let done = if what == "parameter" { "changed" } else { "sent" };
                panic!("{}: reads a {what} that may have been {done}", node.layer);
            }
            if node.op.is_view() {
                last_use[node.outputs[0].index()] = last_use[node.inputs[0].index()];
            }
        }
    }
}

/// How many nodes there are up to the last one that gives a wanted output: the forward pass.
fn forward_nodes(graph: &Graph, outputs: &[Value]) -> usize {
    let node_of = |value: &Value| match graph.info(*value).source {
        Source::Node { node, .. } => node,
        _ => 0,
    };
    outputs.iter().map(|value| node_of(value) + 1).max().unwrap_or(graph.nodes().len())
}
