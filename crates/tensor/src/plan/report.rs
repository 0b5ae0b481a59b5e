//! A plan as a person or a program reads it: the figures of `paceline plan`, as text and as JSON.

use std::fmt;

use serde::Serialize;

use super::{ALIGNMENT_BYTES, Place, Plan};
use crate::dtype::DType;

/// The figures of a plan.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Trained elements.
    pub parameters: u64,
    /// Elements kept but not trained.
    pub states: u64,
    /// Floating-point operations of the forward pass.
    pub forward_flops: u64,
    /// Floating-point operations of the whole step, without the optimizer.
    pub flops: u64,
    /// Bytes that all nodes together must at least move.
    pub bytes_moved: u64,
    /// Bytes of results that the backward pass reads.
    pub activation_bytes: u64,
    /// Bytes of the arena: activations, their gradients, gradients that are applied early, and inputs, with reuse.
    pub arena_bytes: u64,
    /// What the arena would take if no two values shared bytes, each on cache lines of its own.
    pub without_reuse_bytes: u64,
    /// Buckets of gradients in the order in which they become ready.
    pub buckets: Vec<BucketReport>,
    /// The nodes in the order in which they run.
    pub nodes: Vec<NodeReport>,
}

/// One bucket of gradients.
#[derive(Clone, Debug, Serialize)]
pub struct BucketReport {
    /// First parameter in it.
    pub first: String,
    /// Last parameter in it.
    pub last: String,
    /// How many tensors.
    pub tensors: usize,
    /// Its size.
    pub bytes: u64,
    /// The node after which it can be sent.
    pub ready_after: usize,
    /// The node after which it can be applied.
    pub apply_after: usize,
}

/// One node.
#[derive(Clone, Debug, Serialize)]
pub struct NodeReport {
    /// Its operation.
    pub op: String,
    /// Its layer.
    pub layer: String,
    /// The shape of its first output.
    pub output: String,
    /// Its arithmetic.
    pub flops: u64,
    /// Where the first output lives.
    pub place: String,
}

impl Plan {
    /// The plan's figures.
    pub fn report(&self) -> Report {
        let graph = self.graph();
        let elements = |values: &[crate::Value]| values.iter().map(|&value| graph.shape(value).elements() as u64).sum();
        let flops: Vec<u64> = graph.nodes().iter().map(|node| graph.flops(node)).collect();
        let in_arena = |value: &crate::Value| matches!(self.place(*value), Place::Arena(_));
        let lines = |value: crate::Value| graph.info(value).bytes().next_multiple_of(ALIGNMENT_BYTES) as u64;
        let name = |index: usize| graph.info(graph.parameters()[index]).name.clone();
        Report {
            parameters: elements(graph.parameters()),
            states: elements(graph.states()),
            forward_flops: flops[..self.forward_nodes()].iter().sum(),
            flops: flops.iter().sum(),
            bytes_moved: graph.nodes().iter().map(|node| graph.bytes_moved(node)).sum(),
            activation_bytes: self.activation_bytes() as u64,
            arena_bytes: self.arena_bytes() as u64,
            without_reuse_bytes: graph.values().filter(in_arena).map(lines).sum(),
            buckets: self
                .buckets()
                .iter()
                .map(|bucket| BucketReport {
                    first: name(bucket.parameters.start),
                    last: name(bucket.parameters.end - 1),
                    tensors: bucket.parameters.len(),
                    bytes: bucket.bytes as u64,
                    ready_after: bucket.ready_after,
                    apply_after: bucket.apply_after,
                })
                .collect(),
            nodes: graph
                .nodes()
                .iter()
                .zip(&flops)
                .map(|(node, &flops)| NodeReport {
                    op: node.op.name().to_owned(),
                    layer: node.layer.clone(),
                    output: graph.shape(node.outputs[0]).to_string(),
                    flops,
                    place: describe(self.place(node.outputs[0])),
                })
                .collect(),
        }
    }
}

fn describe(place: Place) -> String {
    match place {
        Place::Arena(offset) => format!("arena+{offset}"),
        Place::Parameter(index) => format!("parameter {index}"),
        Place::Gradient(index) => format!("gradient {index}"),
        Place::State(index) => format!("state {index}"),
        Place::None => "-".into(),
    }
}

/// Bytes in binary units, as people say them.
fn human(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "KiB", "MiB"] {
        if value < 1024.0 {
            return if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") };
        }
        value /= 1024.0;
    }
    format!("{value:.2} GiB")
}

/// A number with commas between thousands.
fn grouped(number: u64) -> String {
    let (rest, last) = (number / 1000, number % 1000);
    if rest == 0 { last.to_string() } else { format!("{},{last:03}", grouped(rest)) }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let giga = |flops: u64| flops as f64 / 1e9;
        let (parameters, bytes) = (grouped(self.parameters), human(self.parameters * DType::F32.bytes() as u64));
        writeln!(f, "parameters       {parameters} ({bytes})")?;
        writeln!(f, "states           {}", grouped(self.states))?;
        writeln!(f, "forward          {:.3} GFLOP", giga(self.forward_flops))?;
        writeln!(f, "step             {:.3} GFLOP, at least {} moved", giga(self.flops), human(self.bytes_moved))?;
        writeln!(f, "activations      {}", human(self.activation_bytes))?;
        let share = 100.0 * self.arena_bytes as f64 / (self.without_reuse_bytes.max(1)) as f64;
        let without = human(self.without_reuse_bytes);
        writeln!(f, "arena            {} ({share:.0}% of {without} without reuse)", human(self.arena_bytes))?;
        writeln!(f, "\ngradient buckets, in the order they become ready")?;
        writeln!(f, "{:>4} {:>11} {:>8} {:>11} {:>9}  parameters", "#", "size", "tensors", "after node", "applied")?;
        for (index, bucket) in self.buckets.iter().enumerate() {
            let size = human(bucket.bytes);
            let (first, last) = (&bucket.first, &bucket.last);
            let BucketReport { tensors, ready_after, apply_after, .. } = bucket;
            writeln!(f, "{index:>4} {size:>11} {tensors:>8} {ready_after:>11} {apply_after:>9}  {last} … {first}")?;
        }
        writeln!(f, "\nnodes, in order")?;
        writeln!(f, "{:>4} {:<22} {:<36} {:>18} {:>10}  place", "#", "op", "layer", "output", "GFLOP")?;
        for (index, node) in self.nodes.iter().enumerate() {
            let NodeReport { op, layer, output, place, .. } = node;
            writeln!(f, "{index:>4} {op:<22} {layer:<36} {output:>18} {:>10.4}  {place}", giga(node.flops))?;
        }
        Ok(())
    }
}
