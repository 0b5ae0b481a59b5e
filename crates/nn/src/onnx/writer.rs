//! The ONNX graph under construction: nodes, constants and names that are all different.

use std::collections::HashMap;

use super::proto::{self, Attribute, Tensor};

/// Appends nodes and constants.
#[derive(Debug, Default)]
pub struct Writer {
    pub nodes: Vec<proto::Node>,
    pub initializers: Vec<Tensor>,
    /// How often a name was asked for.
    names: HashMap<String, usize>,
    /// Constants that were written already, so that equal ones are shared.
    constants: HashMap<(Vec<i64>, Vec<u8>), String>,
    /// The layer whose nodes are being written.
    layer: String,
}

impl Writer {
    /// Names the nodes that follow after this layer.
    pub fn enter(&mut self, layer: &str) {
        layer.clone_into(&mut self.layer);
    }

    /// Keeps a name for an input or output of the whole graph.
    pub fn reserve(&mut self, name: &str) {
        self.names.insert(name.to_owned(), 1);
    }

    /// `wanted`, or it with a number where it is taken.
    pub fn unique(&mut self, wanted: &str) -> String {
        let count = self.names.entry(wanted.to_owned()).or_default();
        *count += 1;
        if *count == 1 {
            return wanted.to_owned();
        }
        let numbered = format!("{wanted}_{count}");
        self.unique(&numbered)
    }

    /// Appends a node with one output and returns the output's name.
    pub fn node(&mut self, op_type: &str, inputs: &[&str], attributes: Vec<Attribute>) -> String {
        let wanted = if self.layer.is_empty() { op_type.to_owned() } else { format!("{}/{op_type}", self.layer) };
        let output = self.unique(&wanted);
        self.nodes.push(proto::Node {
            input: inputs.iter().map(|&input| input.to_owned()).collect(),
            output: vec![output.clone()],
            name: output.clone(),
            op_type: op_type.to_owned(),
            attribute: attributes,
        });
        output
    }

    /// Whether a node of this type made the value.
    pub fn is_from(&self, name: &str, op_type: &str) -> bool {
        self.nodes.iter().any(|node| node.op_type == op_type && node.output[0] == name)
    }

    /// Gives the node that was just written a second output, which nobody reads.
    pub fn second_output(&mut self, first: &str) {
        let second = self.unique(&format!("{first}/unused"));
        self.nodes.last_mut().expect("a node was just written").output.push(second);
    }

    /// Adds a named tensor of weights.
    pub fn weights(&mut self, name: &str, shape: &[usize], elements: &[f32]) -> String {
        let name = self.unique(name);
        let raw_data = elements.iter().flat_map(|element| element.to_le_bytes()).collect();
        self.initializers.push(Tensor {
            dims: proto::signed(shape),
            data_type: proto::FLOAT,
            name: name.clone(),
            raw_data,
        });
        name
    }

    /// A constant of real numbers; a shape without dims is a scalar.
    pub fn floats(&mut self, shape: &[usize], elements: &[f32]) -> String {
        let raw_data = elements.iter().flat_map(|element| element.to_le_bytes()).collect();
        self.constant(proto::signed(shape), proto::FLOAT, raw_data)
    }

    /// A list of whole numbers.
    pub fn list(&mut self, elements: &[i64]) -> String {
        let raw_data = elements.iter().flat_map(|element| element.to_le_bytes()).collect();
        self.constant(vec![elements.len() as i64], proto::INT64, raw_data)
    }

    fn constant(&mut self, dims: Vec<i64>, data_type: i32, raw_data: Vec<u8>) -> String {
        // The type goes into the key too: eight zero bytes are one whole number or two real ones.
        let mut key = (dims.clone(), raw_data.clone());
        key.1.push(data_type as u8);
        if let Some(name) = self.constants.get(&key) {
            return name.clone();
        }
        let name = self.unique("constant");
        self.initializers.push(Tensor { dims, data_type, name: name.clone(), raw_data });
        self.constants.insert(key, name.clone());
        name
    }
}
