//! Where the time of a step goes: one more step, node by node, summed by operation, with the least that each could take.

use std::collections::BTreeMap;

use crate::data::Batch;
use crate::tensor::Graph;
use crate::tensor::device::cpu::peak::Peak;
use crate::train::replica::Replica;
use serde_json::{Value, json};

use super::super::print;
use super::bound::Bound;
use crate::failure::Failure;

/// What the nodes of one operation took together.
#[derive(Debug, Default)]
struct Sum {
    seconds: f64,
    bound: f64,
    flops: u64,
    bytes: u64,
    nodes: usize,
}

/// The times of one step.
#[derive(Debug)]
pub struct Profile {
    /// By node.
    seconds: Vec<f64>,
    /// By operation, the slowest first.
    operations: Vec<(&'static str, Sum)>,
    total: f64,
    bound: f64,
    peak: Peak,
}

impl Profile {
    /// Runs a step.
    pub fn take(replica: &mut Replica, batch: &Batch) -> Result<Self, Failure> {
        let failed =
            |error: &dyn std::fmt::Display| Failure::failed(format!("the GPU failed while nodes were timed: {error}"));
        let seconds = replica.profile(batch, 0).map_err(|error| failed(&error))?.seconds;
        let gpu = replica.engine.gpu().map(|gpu| gpu.peak()).transpose().map_err(|error| failed(&error))?;
        let (cpu, graph) = (replica.device(), replica.plan().graph());
        let on_cpu = gpu.is_none();
        let peak = gpu.unwrap_or_else(|| cpu.peak());
        let mut sums: BTreeMap<&str, Sum> = BTreeMap::new();
        for (node, &time) in graph.nodes().iter().zip(&seconds) {
            let sum = sums.entry(node.op.name()).or_default();
            sum.seconds += time;
            sum.bound += Bound::of_node(on_cpu.then_some(cpu), graph, node, &peak).seconds;
            sum.flops += graph.flops(node);
            sum.bytes += graph.bytes_moved(node);
            sum.nodes += 1;
        }
        let mut operations: Vec<_> = sums.into_iter().collect();
        operations.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds));
        let total = |part: fn(&Sum) -> f64| operations.iter().map(|(_, sum)| part(sum)).sum();
        let (total, bound) = (total(|sum| sum.seconds), total(|sum| sum.bound));
        Ok(Self { seconds, operations, total, bound, peak })
    }

    /// For people: the operations, then the slowest nodes.
    pub fn show(&self, graph: &Graph) {
        let Self { total, bound, peak, .. } = self;
        print(&format!(
            "nodes took {:.1} ms, bound {:.1} ms by {:.0} GFLOP/s{} and {:.1} GB/s: {:.0}%\n",
            total * 1e3,
            bound * 1e3,
            peak.f32_flops / 1e9,
            peak.bf16_flops.map_or(String::new(), |flops| format!(" ({:.0} in bf16)", flops / 1e9)),
            peak.bytes / 1e9,
            100.0 * bound / total
        ));
        print(&format!(
            "\n{:<24} {:>6} {:>9} {:>6} {:>9} {:>7} {:>9}\n",
            "operation", "nodes", "ms", "%", "GFLOP/s", "GB/s", "bound ms"
        ));
        for (name, Sum { seconds, bound, flops, bytes, nodes }) in &self.operations {
            print(&format!(
                "{name:<24} {nodes:>6} {:>9.2} {:>6.1} {:>9.1} {:>7.1} {:>9.2}\n",
                seconds * 1e3,
                100.0 * seconds / total,
                *flops as f64 / seconds / 1e9,
                *bytes as f64 / seconds / 1e9,
                bound * 1e3
            ));
        }
        self.slowest(graph);
    }

    fn slowest(&self, graph: &Graph) {
        let mut nodes: Vec<(f64, usize)> = self.seconds.iter().copied().zip(0..).collect();
        nodes.sort_by(|a, b| b.0.total_cmp(&a.0));
        print(&format!("\n{:<24} {:<30} {:>16} {:>9} {:>9}\n", "slowest nodes", "layer", "output", "ms", "GFLOP/s"));
        for (time, index) in nodes.into_iter().take(20) {
            let node = &graph.nodes()[index];
            let (rate, shape) = (graph.flops(node) as f64 / time / 1e9, graph.shape(node.outputs[0]).to_string());
            let (op, layer, ms) = (node.op.name(), &node.layer, time * 1e3);
            print(&format!("{op:<24} {layer:<30} {shape:>16} {ms:>9.2} {rate:>9.1}\n"));
        }
    }

    /// For programs.
    pub fn to_json(&self) -> Value {
        let operation = |(name, sum): &(&str, Sum)| {
            json!({
                "operation": name, "nodes": sum.nodes, "seconds": sum.seconds, "bound_s": sum.bound,
                "flops": sum.flops, "bytes": sum.bytes,
            })
        };
        json!({
            "seconds": self.total, "bound_s": self.bound, "peak_f32_flops": self.peak.f32_flops,
            "peak_bf16_flops": self.peak.bf16_flops, "read_bytes_per_s": self.peak.bytes,
            "operations": self.operations.iter().map(operation).collect::<Vec<_>>(),
        })
    }
}
