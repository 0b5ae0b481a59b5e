//! Mixed precision: which values of a graph become bf16, and the casts where types must change.
//!
//! Runs after fusion. Activations and their gradients become bf16; parameters, their gradients, statistics, losses and
//! whatever the caller wants to read stay f32. What an operation can take is the table in `op/operand.rs`; an operation
//! that only knows f32 (a loss, an LSTM) gets it, if need be by a cast. Light operations between two such ones stay f32 too.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::dtype::DType;
use crate::graph::{Graph, Node, Source, Value};
use crate::op::{Op, Operand};

/// What activations are stored as. Arithmetic is done, and parameters are kept, in `f32` in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// As `f32`.
    #[default]
    F32,
    /// As bf16: half the memory and half the traffic, 8 bits of precision.
    Bf16,
}

impl Precision {
    /// Every precision.
    pub const ALL: [Self; 2] = [Self::F32, Self::Bf16];
}

impl std::fmt::Display for Precision {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.pad(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        })
    }
}

impl std::str::FromStr for Precision {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|precision| precision.to_string() == text);
        found.ok_or_else(|| format!("`{text}` is not a type; type f32 or bf16"))
    }
}

/// The same computation with bf16 activations; `wanted` values stay f32. Of the inputs, the `narrow` ones are given in bf16 if nothing needs
/// them in f32; the others are cast.
pub fn mix(mut graph: Graph, wanted: &[Value], narrow: &[Value]) -> Graph {
    let full = full_values(&graph, wanted);
    for input in narrow {
        let info = &mut graph.values[input.index()];
        if info.dtype == DType::F32 && !full[input.index()] {
            info.dtype = DType::Bf16;
        }
    }
    let nodes = std::mem::take(&mut graph.nodes);
    let mut mixing = Mixing { graph, full, casts: HashMap::new() };
    nodes.into_iter().for_each(|node| mixing.node(node));
    mixing.graph
}

/// The values that somebody needs in f32, found from the last node to the first.
fn full_values(graph: &Graph, wanted: &[Value]) -> Vec<bool> {
    let mut full = vec![false; graph.values.len()];
    wanted.iter().for_each(|value| full[value.index()] = true);
    for node in graph.nodes().iter().rev() {
        let through = hands_on(&node.op) && full[node.outputs[0].index()];
        for (index, input) in node.inputs.iter().enumerate() {
            full[input.index()] |= through || node.op.operand(index) == Operand::Full;
        }
    }
    full
}

/// Whether a result in f32 is worth operands in f32: sums of gradients, copies, what follows the last layer.
fn hands_on(op: &Op) -> bool {
    op.only_moves() || matches!(op, Op::Add | Op::Scale(_) | Op::Unary(_) | Op::Dropout { .. })
}

/// Whether f32 operands are taken as they are: a cast would cost as much as the operation.
fn is_light(op: &Op) -> bool {
    hands_on(op) || matches!(op, Op::Mul | Op::UnaryGrad(_) | Op::SumLeading { .. })
}

struct Mixing {
    graph: Graph,
    /// By value of the graph before.
    full: Vec<bool>,
    casts: HashMap<(Value, DType), Value>,
}

impl Mixing {
    fn node(&mut self, mut node: Node) {
        let common = self.common_type(&node);
        for (index, input) in node.inputs.iter_mut().enumerate() {
            let needed = match node.op.operand(index) {
                Operand::Common => common,
                Operand::Full => DType::F32,
                Operand::Free | Operand::Integer => self.graph.dtype(*input),
            };
            *input = self.cast(&node.layer, *input, needed);
        }
        let mut after = Vec::new();
        for (index, output) in node.outputs.iter_mut().enumerate() {
            let full = self.full[output.index()];
            let given = match (node.op.result(index), &node.op) {
                (Operand::Common, _) => common,
                (Operand::Full, _) => DType::F32,
                (Operand::Integer, _) => DType::I32,
                (Operand::Free, Op::Cast(target)) => *target,
                (Operand::Free, _) => {
                    if full {
                        DType::F32
                    } else {
                        DType::Bf16
                    }
                }
            };
            if full && given == DType::Bf16 {
                let (shape, layer) = (self.graph.shape(*output).clone(), node.layer.clone());
                let narrow = self.graph.value(&layer, shape, given, Source::Input(0));
                let widened = std::mem::replace(output, narrow);
                after.push(Node { op: Op::Cast(DType::F32), inputs: vec![narrow], outputs: vec![widened], layer });
            } else {
                self.graph.values[output.index()].dtype = given;
            }
        }
        self.push(node);
        after.into_iter().for_each(|cast| self.push(cast));
    }

    /// The type of the operands that share one.
    fn common_type(&self, node: &Node) -> DType {
        let common = node.inputs.iter().enumerate().filter(|(index, _)| node.op.operand(*index) == Operand::Common);
        let mut types = common.map(|(_, input)| self.graph.dtype(*input));
        match types.clone().next() {
            Some(DType::I32) => DType::I32,
            _ if hands_on(&node.op) && self.full[node.outputs[0].index()] => DType::F32,
            _ if is_light(&node.op) && types.all(|dtype| dtype == DType::F32) => DType::F32,
            _ => DType::Bf16,
        }
    }

    /// `value` as `dtype`; what was cast once is not cast again.
    fn cast(&mut self, layer: &str, value: Value, dtype: DType) -> Value {
        if self.graph.dtype(value) == dtype {
            return value;
        }
        if let Some(&cast) = self.casts.get(&(value, dtype)) {
            return cast;
        }
        let shape = self.graph.shape(value).clone();
        let cast = self.graph.value(layer, shape, dtype, Source::Input(0));
        self.push(Node { op: Op::Cast(dtype), inputs: vec![value], outputs: vec![cast], layer: layer.to_owned() });
        self.casts.insert((value, dtype), cast);
        cast
    }

    fn push(&mut self, node: Node) {
        for (output, value) in node.outputs.iter().enumerate() {
            let source = Source::Node { node: self.graph.nodes.len(), output };
            self.graph.values[value.index()].source = source;
        }
        self.graph.nodes.push(node);
    }
}
