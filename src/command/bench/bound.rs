//! The least time that a node can take on this machine: its arithmetic at the peak, or its operands at the speed of memory,
//! each read or written once. A sum over nodes bounds a step; data that stays in a cache from one node to the next can beat it.

use std::sync::Arc;

use crate::tensor::device::cpu::Cpu;
use crate::tensor::device::cpu::conv::Algorithm;
use crate::tensor::device::cpu::peak::Peak;
use crate::tensor::device::cpu::trial::Kernel;
use crate::tensor::{DType, Graph, Node};

/// A bound, and what it is made of.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// The least seconds.
    pub seconds: f64,
    /// Whether memory decides.
    pub by_memory: bool,
}

impl Bound {
    fn new(flops: f64, flops_per_s: f64, bytes: u64, peak: &Peak) -> Self {
        let (arithmetic, memory) = (flops / flops_per_s, bytes as f64 / peak.bytes);
        Self { seconds: arithmetic.max(memory), by_memory: memory > arithmetic }
    }

    /// Of a kernel, computed by an algorithm.
    pub fn of_kernel(kernel: &Kernel, algorithm: Option<Algorithm>, peak: &Peak) -> Self {
        let flops = algorithm.map_or(kernel.flops(), |algorithm| kernel.flops_of(algorithm));
        Self::new(flops as f64, flops_per_s(kernel, peak), kernel.bytes(), peak)
    }

    /// Of any node, with the algorithm that the CPU takes for it; on a GPU, of direct sums.
    pub fn of_node(cpu: Option<&Arc<Cpu>>, graph: &Graph, node: &Node, peak: &Peak) -> Self {
        match Kernel::of(graph, node) {
            Some(kernel @ Kernel::Convolution { shape, pass, dtype }) => {
                Self::of_kernel(&kernel, cpu.map(|cpu| cpu.algorithm(&shape, pass, dtype).0), peak)
            }
            Some(kernel) => Self::of_kernel(&kernel, None, peak),
            None => Self::new(graph.flops(node) as f64, peak.f32_flops, graph.bytes_moved(node), peak),
        }
    }
}

/// The arithmetic that the kernel's types allow.
pub fn flops_per_s(kernel: &Kernel, peak: &Peak) -> f64 {
    let bf16 = match kernel {
        Kernel::Convolution { dtype, .. } => *dtype == DType::Bf16,
        Kernel::Product { dtypes: [a, b, _], .. } => [a, b].contains(&&DType::Bf16),
    };
    if bf16 { peak.bf16_flops.unwrap_or(peak.f32_flops) } else { peak.f32_flops }
}
