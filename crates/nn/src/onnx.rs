//! Exports a network to ONNX: an evaluation graph from `x` to `logits`, for onnxruntime and whatever else reads it.
//!
//! The engine keeps images as NHWC; ONNX' operators want NCHW. Every value therefore remembers how it lies in the file
//! (`Layout`), convolutions and pools keep images NCHW from end to end, and a Transpose appears only where an
//! operation mixes the dims, such as a flatten. The batch stays open: it is the named size `N`, and reshapes compute it.
//!
//! `lower.rs` is the table from the engine's operations to ONNX', `image.rs` has those with windows, `sequence.rs` those
//! of language models, `writer.rs` names things, `proto.rs` is the file format. What is absent: training graphs, the loss,
//! and files of 2 GiB and more, which need ONNX' external data.

mod image;
mod lower;
mod proto;
mod sequence;
mod writer;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};

use paceline_tensor::{DType, Node, Op, Shape, Source, Value};
use prost::Message;

use crate::net::Network;
use crate::weights::{Slot, Values};
use proto::Dim;
use writer::Writer;

/// The operators of ONNX 1.12 (2022), the first with LayerNormalization.
const OPSET: i64 = 17;
/// The file format that goes with them.
const IR_VERSION: i64 = 8;
/// Protocol buffers cannot be longer.
const BYTES_MAX: usize = i32::MAX as usize;

/// A network could not be exported.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExportError {
    /// The graph is for training.
    #[error("layer `{layer}` ({op}) belongs to training; build the network with Mode::Eval to export it")]
    Training {
        /// The layer.
        layer: String,
        /// The operation.
        op: String,
    },
    /// ONNX files end at 2 GiB.
    #[error("the model has {bytes} bytes of weights; an ONNX file holds less than 2 GiB, so export a smaller model")]
    TooLarge {
        /// Bytes of weights.
        bytes: usize,
    },
    /// The operation cannot be said in ONNX with an open batch size.
    #[error("layer `{layer}` ({op}) cannot be exported: {reason}")]
    Unsupported {
        /// The layer.
        layer: String,
        /// The operation.
        op: String,
        /// What ONNX does not have.
        reason: String,
    },
}

type Result<T> = std::result::Result<T, ExportError>;

/// How a value lies in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// With its dims in the engine's order.
    Same,
    /// An image as NCHW.
    Nchw,
}

impl Layout {
    /// Where the file has the engine's dim.
    fn place(self, dim: usize) -> usize {
        match self {
            Self::Same => dim,
            Self::Nchw => [0, 2, 3, 1][dim],
        }
    }

    /// Sizes given in the engine's order, in the file's.
    fn sizes(self, shape: &[usize]) -> Vec<usize> {
        let mut sizes = shape.to_vec();
        shape.iter().enumerate().for_each(|(dim, &size)| sizes[self.place(dim)] = size);
        sizes
    }
}

/// A value in the file.
#[derive(Clone, Debug)]
struct Tensor {
    name: String,
    layout: Layout,
    /// The engine's dim that grows with the batch, if one does.
    batch: Option<usize>,
}

struct Exporter<'a, 'data> {
    network: &'a Network,
    values: Values<'a, 'data>,
    writer: Writer,
    tensors: HashMap<Value, Tensor>,
}

/// The bytes of an ONNX model that computes `logits` from `x`: images as float32 `[N,C,H,W]`, tokens as int64 `[N,T]`.
///
/// # Errors
/// When the network was built for training, is too large for the format, or moves the batch where ONNX cannot follow.
pub fn export(network: &Network, values: Values<'_, '_>, metadata: &BTreeMap<String, String>) -> Result<Vec<u8>> {
    let bytes = (network.parameter_count() + network.state_count()) * size_of::<f32>();
    let mut exporter = Exporter { network, values, writer: Writer::default(), tensors: HashMap::new() };
    if bytes > BYTES_MAX {
        return Err(ExportError::TooLarge { bytes });
    }
    let input = exporter.input();
    for node in needed(network) {
        exporter.writer.enter(&node.layer);
        let tensor = exporter.lower(node)?;
        exporter.tensors.insert(node.outputs[0], tensor);
    }
    let output = exporter.output();
    let Writer { nodes: node, initializers: initializer, .. } = exporter.writer;
    let graph = proto::Graph { node, name: "paceline".into(), initializer, input: vec![input], output: vec![output] };
    let model = proto::Model {
        ir_version: IR_VERSION,
        producer_name: "paceline".into(),
        producer_version: env!("CARGO_PKG_VERSION").into(),
        graph: Some(graph),
        opset_import: vec![proto::OperatorSet { domain: String::new(), version: OPSET }],
        metadata_props: metadata
            .iter()
            .map(|(key, value)| proto::Entry { key: key.clone(), value: value.clone() })
            .collect(),
    };
    if model.encoded_len() > BYTES_MAX {
        return Err(ExportError::TooLarge { bytes });
    }
    Ok(model.encode_to_vec())
}

/// The nodes that the logits depend on, in order: not the loss, nor its gradient.
fn needed(network: &Network) -> Vec<&Node> {
    let mut wanted = HashSet::from([network.logits]);
    let mut nodes = Vec::new();
    for node in network.graph.nodes().iter().rev() {
        if node.outputs.iter().any(|output| wanted.contains(output)) {
            wanted.extend(&node.inputs);
            nodes.push(node);
        }
    }
    nodes.reverse();
    nodes
}

fn value_info(name: &str, elem_type: i32, dim: Vec<Dim>) -> proto::ValueInfo {
    let tensor = proto::TensorType { elem_type, shape: Some(proto::TensorShape { dim }) };
    proto::ValueInfo { name: name.to_owned(), kind: Some(proto::Type { tensor: Some(tensor) }) }
}

impl<'data> Exporter<'_, 'data> {
    fn input(&mut self) -> proto::ValueInfo {
        let info = self.network.graph.info(self.network.x);
        let layout = if info.shape.len() == 4 { Layout::Nchw } else { Layout::Same };
        self.writer.reserve("x");
        self.writer.reserve("logits");
        self.tensors.insert(self.network.x, Tensor { name: "x".into(), layout, batch: Some(0) });
        let mut dims: Vec<Dim> = layout.sizes(&info.shape).into_iter().map(Dim::known).collect();
        dims[0] = Dim::named("N");
        value_info("x", if info.dtype == DType::I32 { proto::INT64 } else { proto::FLOAT }, dims)
    }

    /// Renames the value of the logits and describes it.
    fn output(&mut self) -> proto::ValueInfo {
        let logits = self.network.logits;
        let tensor = self.same(logits);
        let shape = self.network.graph.shape(logits);
        let rows_per_sample = shape[0] / self.network.graph.shape(self.network.x)[0];
        let rows = if rows_per_sample == 1 { "N".to_owned() } else { format!("{rows_per_sample}*N") };
        let rename = |name: &mut String| {
            if *name == tensor.name {
                "logits".clone_into(name);
            }
        };
        for node in &mut self.writer.nodes {
            node.input.iter_mut().chain(&mut node.output).for_each(rename);
        }
        let mut dims: Vec<Dim> = shape.iter().map(|&size| Dim::known(size)).collect();
        dims[0] = Dim::named(&rows);
        value_info("logits", proto::FLOAT, dims)
    }

    /// A value as it lies in the file; parameters and states are added when they are first used.
    fn tensor(&mut self, value: Value) -> Tensor {
        if let Some(tensor) = self.tensors.get(&value) {
            return tensor.clone();
        }
        let info = self.network.graph.info(value);
        let elements = (self.values)(self.slot(value).expect("the graph's order: a value is made before it is used"));
        let name = self.writer.weights(&info.name, &info.shape, &elements);
        let tensor = Tensor { name, layout: Layout::Same, batch: None };
        self.tensors.insert(value, tensor.clone());
        tensor
    }

    /// Which weights a value is, if it is no node's result.
    fn slot(&self, value: Value) -> Option<Slot> {
        match self.network.graph.info(value).source {
            Source::Parameter(index) => Some(Slot::Parameter(index)),
            Source::State(index) => Some(Slot::State(index)),
            Source::Input(_) | Source::Node { .. } => None,
        }
    }

    /// A value with its dims in the engine's order.
    fn same(&mut self, value: Value) -> Tensor {
        let tensor = self.tensor(value);
        if tensor.layout == Layout::Same {
            return tensor;
        }
        let transposed = self.transpose(&tensor.name, &[0, 2, 3, 1]);
        Tensor { name: transposed, layout: Layout::Same, ..tensor }
    }

    /// An image as NCHW.
    fn image(&mut self, value: Value) -> Tensor {
        let tensor = self.tensor(value);
        if tensor.layout == Layout::Nchw {
            return tensor;
        }
        let transposed = self.transpose(&tensor.name, &[0, 3, 1, 2]);
        Tensor { name: transposed, layout: Layout::Nchw, ..tensor }
    }

    fn transpose(&mut self, name: &str, order: &[usize]) -> String {
        self.writer.node("Transpose", &[name], vec![proto::Attribute::ints("perm", order)])
    }

    fn shape(&self, value: Value) -> &Shape {
        self.network.graph.shape(value)
    }

    fn unsupported<T>(node: &Node, reason: impl Into<String>) -> Result<T> {
        let Node { op, layer, .. } = node;
        let (layer, op) = (layer.clone(), Op::name(op).to_owned());
        Err(ExportError::Unsupported { layer, op, reason: reason.into() })
    }

    /// The elements of weights that the file needs in another form.
    fn elements(&self, node: &Node, value: Value) -> Result<Cow<'data, [f32]>> {
        match self.slot(value) {
            Some(slot) => Ok((self.values)(slot)),
            None => Self::unsupported(node, "its weights are the result of another layer"),
        }
    }
}
