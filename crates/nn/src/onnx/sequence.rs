//! Operations of language models.

use paceline_tensor::{Node, Value};

use super::proto::Attribute;
use super::{Exporter, Layout, Result, Tensor};

/// Where ONNX' gates (input, output, forget, cell) are among the engine's (input, forget, cell, output).
const GATES: [usize; 4] = [0, 3, 1, 2];

impl Exporter<'_, '_> {
    pub(super) fn embedding(&mut self, ids: Value, table: Value) -> Tensor {
        let (ids, table) = (self.tensor(ids), self.same(table));
        let name = self.writer.node("Gather", &[&table.name, &ids.name], vec![Attribute::int("axis", 0)]);
        Tensor { name, layout: Layout::Same, batch: ids.batch }
    }

    /// Hidden positions get −∞ before the softmax, which makes their share exactly 0.
    pub(super) fn softmax(&mut self, x: Value, causal: bool) -> Tensor {
        let shape = self.shape(x).clone();
        let mut x = self.same(x);
        if causal {
            let length = shape.last();
            let hide = |index: usize| if index % length > index / length { f32::NEG_INFINITY } else { 0.0 };
            let mask: Vec<f32> = (0..length * length).map(hide).collect();
            let mask = self.writer.floats(&[length, length], &mask);
            x.name = self.writer.node("Add", &[&x.name, &mask], vec![]);
        }
        let name = self.writer.node("Softmax", &[&x.name], vec![Attribute::int("axis", shape.len() - 1)]);
        Tensor { name, ..x }
    }

    /// ONNX wants time first, a dim for directions, and its own order of gates; weights are turned here, values there.
    pub(super) fn lstm(&mut self, node: &Node) -> Result<Tensor> {
        let hidden = self.shape(node.inputs[2])[1];
        let mut weights = Vec::new();
        for &input in &node.inputs[1..3] {
            let width = self.shape(input)[1];
            let elements = self.gates(node, input, hidden * width)?;
            let name = self.network.graph.info(input).name.clone();
            weights.push(self.writer.weights(&name, &[1, 4 * hidden, width], &elements));
        }
        let mut biases = self.gates(node, node.inputs[3], hidden)?;
        biases.extend(self.gates(node, node.inputs[4], hidden)?);
        let name = self.network.graph.info(node.inputs[3]).name.clone();
        let biases = self.writer.weights(&name, &[1, 8 * hidden], &biases);
        let x = self.same(node.inputs[0]);
        let by_time = self.transpose(&x.name, &[1, 0, 2]);
        let inputs = [&by_time, &weights[0], &weights[1], &biases].map(String::as_str);
        let y = self.writer.node("LSTM", &inputs, vec![Attribute::int("hidden_size", hidden)]);
        let direction = self.writer.list(&[1]);
        let y = self.writer.node("Squeeze", &[&y, &direction], vec![]);
        let name = self.transpose(&y, &[1, 0, 2]);
        Ok(Tensor { name, ..x })
    }

    /// Weights with the gates' parts in ONNX' order.
    fn gates(&self, node: &Node, value: Value, part: usize) -> Result<Vec<f32>> {
        let elements = self.elements(node, value)?;
        Ok(GATES.iter().flat_map(|&gate| elements[gate * part..(gate + 1) * part].iter().copied()).collect())
    }
}
