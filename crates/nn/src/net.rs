//! A network under construction: layers with names, on top of the engine's graph.
//!
//! The same model function builds the training graph (batch statistics, dropout, loss, gradients) and the evaluation
//! graph (running statistics, no dropout); parameters are matched by their order, which is the order of the calls.

mod fixed;
mod learned;

use std::collections::HashMap;

use paceline_tensor::gradient::{self, Gradients};
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
        let mut net = Net::new(mode);
        let x = net.input(batch, input);
        let logits = model.build(&mut net, x, classes)?;
        let rows = net.shape(logits)[0];
        let targets = net.graph.input("targets", [rows], DType::I32);
        let smoothing = if mode == Mode::Train { smoothing } else { 0.0 };
        let loss = net.graph.push_one("loss", Op::CrossEntropy { smoothing }, &[logits, targets])?;
        let gradients = if mode == Mode::Train { Some(gradient::of_loss(&mut net.graph, loss)?) } else { None };
        Ok(Self {
            graph: net.graph,
            parameters: net.parameters,
            states: net.states,
            x,
            targets,
            logits,
            loss,
            gradients,
        })
    }

    /// What a plan of this network has to provide: logits, loss and, for training, every parameter's gradient.
    pub fn wanted(&self, bucket_bytes_max: usize) -> Wanted {
        let gradients = match &self.gradients {
            Some((_, gradients)) => self.graph.parameters().iter().map(|&parameter| gradients.of(parameter)).collect(),
            None => Vec::new(),
        };
        Wanted { outputs: vec![self.logits, self.loss], gradients, bucket_bytes_max, unfused: false }
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

    fn state(&mut self, layer: &str, kind: &str, shape: Shape, start: f32) -> Value {
        let name = format!("{layer}.{kind}");
        self.states.push(State { name: name.clone(), shape: shape.clone(), start });
        self.graph.state(&name, shape)
    }
}

fn resolve(padding: Pad, [height, width, _]: [usize; 3], kernel: [usize; 2], stride: [usize; 2]) -> Padding {
    match padding {
        Pad::By(padding) => padding,
        Pad::Same => Padding::same([height, width], kernel, stride),
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

    #[test]
    fn an_image_too_small_names_the_layer() {
        let input = Input::Image { size: [1, 1], channels: 3 };
        let error = Network::new(&lenet, Mode::Eval, 1, input, 10, 0.0).unwrap_err();
        assert!(error.to_string().contains("`pool`"), "{error}");
    }
}
