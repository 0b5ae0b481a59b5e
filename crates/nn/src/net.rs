//! A network under construction: layers with names, on top of the engine's graph.
//!
//! The same model function builds the training graph (batch statistics, dropout, loss, gradients) and the evaluation
//! graph (running statistics, no dropout); parameters are matched by their order, which is the order of the calls.

mod fixed;
mod learned;

use std::collections::{HashMap, HashSet};

use paceline_tensor::fuse::MOMENTS_FROM;
use paceline_tensor::gradient::{self, Gradients};
use paceline_tensor::graph::Node;
use paceline_tensor::window::Padding;
use paceline_tensor::{DType, Graph, GraphError, Op, Shape, Value, Wanted};

use crate::init::Init;
use crate::layer::Pad;
use crate::parameter::{ForeignLayout, Parameter, State};

type Result<T> = std::result::Result<T, GraphError>;

/// Which graph a model function is building.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Batch statistics and dropout.
    Train,
    /// Running statistics, nothing random.
    Eval,
}

/// What one sample looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// An image of `size` (height, width) with so many channels.
    Image {
        /// Height and width.
        size: [usize; 2],
        /// Colours, usually 3.
        channels: usize,
    },
    /// So many tokens.
    Tokens {
        /// Length of the sequence.
        sequence: usize,
    },
}

/// Anything that can add its layers to a [`Net`]: a zoo entry, a closure or a function.
pub trait Model {
    /// Adds the layers that turn `x` into logits for `classes` classes.
    ///
    /// # Errors
    /// When a layer does not fit the input; the error names it.
    fn build(&self, net: &mut Net, x: Value, classes: usize) -> Result<Value>;
}

impl<F: Fn(&mut Net, Value, usize) -> Result<Value>> Model for F {
    fn build(&self, net: &mut Net, x: Value, classes: usize) -> Result<Value> {
        self(net, x, classes)
    }
}

/// A network under construction.
#[derive(Debug)]
pub struct Net {
    graph: Graph,
    mode: Mode,
    scope: Vec<String>,
    parameters: Vec<Parameter>,
    states: Vec<State>,
    dropouts: u64,
    drops: bool,
    /// Values that are flattened images, with the image's height, width and channels.
    flattened: HashMap<Value, [usize; 3]>,
}

/// A finished network: the graph and the names of its ends.
#[derive(Debug)]
pub struct Network {
    /// The graph, with loss and gradients if it is for training.
    pub graph: Graph,
    /// What the parameters are, in the graph's order.
    pub parameters: Vec<Parameter>,
    /// What the states are, in the graph's order.
    pub states: Vec<State>,
    /// The images or tokens.
    pub x: Value,
    /// The right classes.
    pub targets: Value,
    /// The model's answer `[rows, classes]`.
    pub logits: Value,
    /// The mean loss over the rows.
    pub loss: Value,
    /// What the gradients are multiplied by, and the gradients: only for training.
    pub gradients: Option<(Value, Gradients)>,
}

impl Network {
    /// Builds a model for a batch size: with gradients in [`Mode::Train`].
    ///
    /// # Errors
    /// When a layer does not fit; the error names it.
    pub fn new(
        model: &dyn Model,
        mode: Mode,
        batch: usize,
        input: Input,
        classes: usize,
        smoothing: f32,
    ) -> Result<Self> {
        let mut network = Self::without_gradients(model, mode, batch, input, classes, smoothing)?;
        if mode == Mode::Train {
            network.gradients = Some(gradient::of_loss(&mut network.graph, network.loss)?);
        }
        Ok(network)
    }

    /// The same, without its backward pass: to be looked at or cut.
    ///
    /// # Errors
    /// As [`Network::new`].
    pub fn without_gradients(
        model: &dyn Model,
        mode: Mode,
        batch: usize,
        input: Input,
        classes: usize,
        smoothing: f32,
    ) -> Result<Self> {
        let mut net = Net::new(mode);
        let x = net.input(batch, input);
        let shape = net.shape(x);
        if shape.checked_elements().is_none() {
            return Err(input_error("x", format!("has {shape} elements, more than this machine can address")));
        }
        let logits = model.build(&mut net, x, classes)?;
        net.check_names()?;
        let rows = net.shape(logits)[0];
        let targets = net.graph.input("targets", [rows], DType::I32);
        let smoothing = if mode == Mode::Train { smoothing } else { 0.0 };
        let loss = net.graph.push_one("loss", Op::CrossEntropy { smoothing }, &[logits, targets])?;
        Ok(Self {
            graph: net.graph,
            parameters: net.parameters,
            states: net.states,
            x,
            targets,
            logits,
            loss,
            gradients: None,
        })
    }

    /// What a plan of this network has to provide: logits, loss and, for training, every parameter's gradient.
    pub fn wanted(&self, bucket_bytes_max: usize) -> Wanted {
        let gradients = match &self.gradients {
            Some((_, gradients)) => self.graph.parameters().iter().map(|&parameter| gradients.of(parameter)).collect(),
            None => Vec::new(),
        };
        let outputs = vec![self.logits, self.loss];
        Wanted { outputs, gradients, bucket_bytes_max, moments_from: MOMENTS_FROM, ..Wanted::default() }
    }

    /// Whether every batch normalisation has more than one value per channel ([`check_statistics`]).
    ///
    /// # Errors
    /// When one has not; the error names it.
    pub fn check_statistics(&self) -> Result<()> {
        check_statistics(&self.graph)
    }

    /// The number of trained elements.
    pub fn parameter_count(&self) -> usize {
        self.parameters.iter().map(|parameter| parameter.shape.elements()).sum()
    }

    /// The number of elements kept but not trained.
    pub fn state_count(&self) -> usize {
        self.states.iter().map(|state| state.shape.elements()).sum()
    }
}

impl Net {
    /// A net without layers.
    pub fn new(mode: Mode) -> Self {
        Self {
            graph: Graph::new(),
            mode,
            scope: Vec::new(),
            parameters: Vec::new(),
            states: Vec::new(),
            dropouts: 0,
            drops: true,
            flattened: HashMap::new(),
        }
    }

    /// Declares the input `x`.
    pub fn input(&mut self, batch: usize, input: Input) -> Value {
        match input {
            Input::Image { size: [height, width], channels } => {
                self.graph.input("x", [batch, height, width, channels], DType::F32)
            }
            Input::Tokens { sequence } => self.graph.input("x", [batch, sequence], DType::I32),
        }
    }

    /// Leaves out every dropout layer from here on: for comparing numbers with another framework, where nothing may be
    /// random, and for models too small to overfit.
    pub fn without_dropout(&mut self) {
        self.drops = false;
    }

    /// Whether the training graph is being built.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// A value's shape.
    pub fn shape(&self, value: Value) -> &Shape {
        self.graph.shape(value)
    }

    /// The channels (last dim) of a value.
    pub fn channels(&self, value: Value) -> usize {
        self.shape(value).last()
    }

    /// Runs `body` with `name` in front of the names of its layers.
    ///
    /// # Errors
    /// Those of `body`.
    pub fn scope<T>(&mut self, name: impl Into<String>, body: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.scope.push(name.into());
        let result = body(self);
        self.scope.pop();
        result
    }

    /// A weights file holds each tensor under its name, so no two may share one.
    fn check_names(&self) -> Result<()> {
        let parameters = self.parameters.iter().map(|parameter| &parameter.name);
        let mut seen = HashSet::new();
        for name in parameters.chain(self.states.iter().map(|state| &state.name)) {
            if !seen.insert(name) {
                let message = "two tensors of the model have this name; give each layer its own".to_owned();
                return Err(input_error(name, message));
            }
        }
        Ok(())
    }

    /// Remembers that y is in the order of x, where that is a flattened image.
    fn same_order(&mut self, x: Value, y: Value) -> Value {
        if let Some(&image) = self.flattened.get(&x) {
            self.flattened.insert(y, image);
        }
        y
    }

    /// How other frameworks order a tensor whose last dim follows the last dim of x.
    fn order_of(&self, x: Value) -> ForeignLayout {
        self.flattened.get(&x).map_or(ForeignLayout::Same, |&image| ForeignLayout::FlattenedImage { image })
    }

    fn unnamed(&mut self, op: Op, inputs: &[Value]) -> Result<Value> {
        let layer = self.path(op.name());
        self.graph.push_one(&layer, op, inputs)
    }

    fn path(&self, name: &str) -> String {
        let mut path = self.scope.join(".");
        if !path.is_empty() && !name.is_empty() {
            path.push('.');
        }
        path + name
    }

    fn image(&self, layer: &str, op: &str, x: Value) -> Result<[usize; 3]> {
        let shape = self.shape(x);
        let [_, height, width, channels] = shape.nhwc().ok_or_else(|| GraphError {
            layer: layer.to_owned(),
            op: op.to_owned(),
            message: format!("needs an image [N,H,W,C], not {shape}"),
        })?;
        Ok([height, width, channels])
    }

    fn parameter(&mut self, layer: &str, kind: &str, shape: Shape, init: Init, layout: ForeignLayout) -> Value {
        let name = if layer.is_empty() { kind.to_owned() } else { format!("{layer}.{kind}") };
        // Vectors are biases and normalisation parameters: decaying them hurts (He et al., 2018).
        let decay = shape.len() > 1;
        self.parameters.push(Parameter { name: name.clone(), shape: shape.clone(), init, decay, layout });
        self.graph.parameter(&name, shape)
    }

    fn state(&mut self, layer: &str, kind: &str, shape: Shape, start: f32, layout: ForeignLayout) -> Value {
        let name = format!("{layer}.{kind}");
        self.states.push(State { name: name.clone(), shape: shape.clone(), start, layout });
        self.graph.state(&name, shape)
    }
}

/// Whether every batch normalisation of a graph has more than one value per channel to take statistics of: of one value they say nothing,
/// and a layer behind it learns nothing from it.
///
/// # Errors
/// When one has not; the error names it.
pub fn check_statistics(graph: &Graph) -> Result<()> {
    let shape = |node: &Node| graph.shape(node.inputs[0]);
    let single = |node: &&Node| matches!(node.op, Op::BatchNorm(_)) && shape(node).elements() == shape(node).last();
    graph.nodes().iter().find(single).map_or(Ok(()), |node| {
        Err(GraphError {
            layer: node.layer.clone(),
            op: node.op.name().to_string(),
            message: format!(
                "training needs more than one value per channel, not {}; use a larger batch or image",
                shape(node)
            ),
        })
    })
}

fn input_error(name: &str, message: String) -> GraphError {
    GraphError { layer: name.to_owned(), op: "tensor".to_owned(), message }
}

/// The padding of a window over an image. `reach` is how far the window sees: its kernel, spread by the dilation. What
/// cannot be (a stride of 0) is left for the operation to refuse.
fn resolve(padding: Pad, [height, width, _]: [usize; 3], reach: [usize; 2], stride: [usize; 2]) -> Padding {
    match padding {
        Pad::By(padding) => padding,
        Pad::Same => Padding::same([height, width], reach, stride.map(|stride| stride.max(1))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer::{Conv, Window};

    fn lenet(net: &mut Net, x: Value, classes: usize) -> Result<Value> {
        let x = net.conv("conv1", x, Conv::new(6, 5).pad(2))?;
        let x = net.relu(x)?;
        let x = net.max_pool(x, Window::new(2))?;
        let x = net.flatten(x)?;
        let x = net.dropout(x, 0.5)?;
        net.linear("fc", x, classes)
    }

    #[test]
    fn both_modes_declare_the_same_parameters() {
        let input = Input::Image { size: [28, 28], channels: 1 };
        let build = |mode| Network::new(&lenet, mode, 4, input, 10, 0.1).unwrap();
        let names = |network: &Network| network.parameters.iter().map(|p| p.name.clone()).collect::<Vec<_>>();
        let (train, eval) = (build(Mode::Train), build(Mode::Eval));
        assert_eq!(names(&train), ["conv1.weight", "conv1.bias", "fc.weight", "fc.bias"]);
        assert_eq!(names(&train), names(&eval));
        assert_eq!(train.parameter_count(), 5 * 5 * 6 + 6 + 14 * 14 * 6 * 10 + 10);
        assert_eq!(train.parameters[2].layout, ForeignLayout::FlattenedImage { image: [14, 14, 6] });
        assert_eq!(train.parameters[2].layout, eval.parameters[2].layout);
        let (_, gradients) = train.gradients.unwrap();
        assert!(train.graph.parameters().iter().all(|&parameter| gradients.of(parameter).is_some()));
        assert!(gradients.of(train.x).is_none());
    }

    const IMAGE: Input = Input::Image { size: [4, 6], channels: 2 };

    #[test]
    fn same_padding_sees_the_dilation() {
        let model = |net: &mut Net, x: Value, classes: usize| {
            let y = net.conv("conv", x, Conv::new(3, 3).dilation(2).same())?;
            assert_eq!(**net.shape(y), [2, 4, 6, 3]);
            let y = net.flatten(y)?;
            net.linear("fc", y, classes)
        };
        Network::new(&model, Mode::Eval, 2, IMAGE, 10, 0.0).unwrap();
    }

    #[test]
    fn a_stride_of_zero_is_refused_with_same_padding_too() {
        let conv = |net: &mut Net, x: Value, _: usize| net.conv("conv", x, Conv::new(3, 3).stride(0).same());
        let pool = |net: &mut Net, x: Value, _: usize| net.max_pool(x, Window::new(3).stride(0).same());
        for (model, expected) in [(&conv as &dyn Model, "kernel, stride and"), (&pool, "kernel and stride start")] {
            let error = Network::new(model, Mode::Eval, 2, IMAGE, 10, 0.0).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_flattened_image_keeps_its_order_through_what_keeps_it() {
        let model = |net: &mut Net, x: Value, classes: usize| {
            let y = net.flatten(x)?;
            let y = net.batch_norm("bn", y)?;
            let y = net.relu(y)?;
            let y = net.scale(y, 0.5)?;
            let y = net.dropout(y, 0.1)?;
            let y = net.layer_norm("ln", y)?;
            let y = net.linear("fc1", y, 5)?;
            net.linear("fc2", y, classes)
        };
        let network = Network::new(&model, Mode::Train, 2, IMAGE, 10, 0.0).unwrap();
        let image = ForeignLayout::FlattenedImage { image: [4, 6, 2] };
        for parameter in &network.parameters {
            let ordered = parameter.name != "fc1.bias" && !parameter.name.starts_with("fc2");
            assert_eq!(parameter.layout == image, ordered, "{}", parameter.name);
        }
        assert!(network.states.iter().all(|state| state.layout == image));
    }

    #[test]
    fn two_tensors_of_one_name_are_refused() {
        let model = |net: &mut Net, x: Value, classes: usize| {
            let y = net.flatten(x)?;
            let y = net.linear("fc", y, 5)?;
            net.linear("fc", y, classes)
        };
        let error = Network::new(&model, Mode::Eval, 2, IMAGE, 10, 0.0).unwrap_err().to_string();
        assert!(error.contains("`fc.weight`") && error.contains("two tensors"), "{error}");
    }

    #[test]
    fn a_batch_that_no_machine_can_hold_is_refused() {
        let error = Network::new(&lenet, Mode::Eval, usize::MAX / 2, IMAGE, 10, 0.0).unwrap_err().to_string();
        assert!(error.contains("more than this machine can address"), "{error}");
    }

    #[test]
    fn an_image_too_small_names_the_layer() {
        let input = Input::Image { size: [1, 1], channels: 3 };
        let error = Network::new(&lenet, Mode::Eval, 1, input, 10, 0.0).unwrap_err();
        assert!(error.to_string().contains("`pool`"), "{error}");
    }
}
