//! A network under construction: layers with names, on top of the engine's graph.
//!
//! The same model function builds the training graph (batch statistics, dropout, loss, gradients) and the evaluation
//! graph (running statistics, no dropout); parameters are matched by their order, which is the order of the calls.

use std::collections::HashMap;

use paceline_tensor::gradient::{self, Gradients};
use paceline_tensor::op::BatchNorm;
use paceline_tensor::window::{Conv2d, Padding, Pool2d, PoolKind, Windows};
use paceline_tensor::{DType, Graph, GraphError, Op, Shape, Unary, Value};

use crate::init::Init;
use crate::layer::{Conv, Norm, Pad, Window};
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

    /// A convolution, with `name.weight` and `name.bias`.
    ///
    /// # Errors
    /// When the kernel does not fit the image, or the groups the channels.
    pub fn conv(&mut self, name: &str, x: Value, conv: Conv) -> Result<Value> {
        let layer = self.path(name);
        let size = self.image(&layer, "conv2d", x)?;
        let depth = size[2] / conv.groups.max(1);
        let padding = resolve(conv.padding, size, conv.kernel, conv.stride);
        let geometry = Conv2d {
            kernel: conv.kernel,
            stride: conv.stride,
            padding,
            dilation: [conv.dilation; 2],
            groups: conv.groups,
        };
        let fan_in = conv.kernel[0] * conv.kernel[1] * depth;
        let default = Init::UniformFanIn { fan_in };
        let shape = Shape::from([conv.kernel[0], conv.kernel[1], depth, conv.channels]);
        let weight = self.parameter(&layer, "weight", shape, conv.init.unwrap_or(default), ForeignLayout::Convolution);
        let mut inputs = vec![x, weight];
        if conv.bias {
            let bias_init = conv.bias_init.unwrap_or(default);
            inputs.push(self.parameter(&layer, "bias", [conv.channels].into(), bias_init, ForeignLayout::Same));
        }
        self.graph.push_one(&layer, Op::Conv2d { conv: geometry, bias: conv.bias, relu: false }, &inputs)
    }

    /// A linear layer over the last dim, with `name.weight` `[outputs, inputs]` and `name.bias`, started as PyTorch does.
    ///
    /// # Errors
    /// Never for a value with at least one dim.
    pub fn linear(&mut self, name: &str, x: Value, outputs: usize) -> Result<Value> {
        let fan_in = self.channels(x);
        self.linear_with(name, x, outputs, Init::UniformFanIn { fan_in }, Some(Init::UniformFanIn { fan_in }))
    }

    /// A linear layer with its own start; without `bias` it has none.
    ///
    /// # Errors
    /// Never for a value with at least one dim.
    pub fn linear_with(
        &mut self,
        name: &str,
        x: Value,
        outputs: usize,
        init: Init,
        bias: Option<Init>,
    ) -> Result<Value> {
        let layer = self.path(name);
        let shape = self.shape(x).clone();
        let (rows, width) = (shape.elements() / shape.last(), shape.last());
        let layout =
            self.flattened.get(&x).map_or(ForeignLayout::Same, |&image| ForeignLayout::FlattenedImage { image });
        let weight = self.parameter(&layer, "weight", [outputs, width].into(), init, layout);
        let flat = if shape.len() == 2 { x } else { self.reshape(x, [rows, width])? };
        let mut inputs = vec![flat, weight];
        if let Some(bias) = bias {
            inputs.push(self.parameter(&layer, "bias", [outputs].into(), bias, ForeignLayout::Same));
        }
        let op = Op::MatMul { trans_a: false, trans_b: true, bias: bias.is_some(), relu: false };
        let y = self.graph.push_one(&layer, op, &inputs)?;
        if shape.len() == 2 { Ok(y) } else { self.reshape(y, shape.with(shape.len() - 1, outputs)) }
    }

    /// A batch normalisation over the last dim with PyTorch's defaults, with `name.{weight,bias,running_mean,running_var}`.
    ///
    /// # Errors
    /// Never for a value with at least one dim.
    pub fn batch_norm(&mut self, name: &str, x: Value) -> Result<Value> {
        self.batch_norm_with(name, x, Norm::TORCH)
    }

    /// A batch normalisation with its own constants.
    ///
    /// # Errors
    /// Never for a value with at least one dim.
    pub fn batch_norm_with(&mut self, name: &str, x: Value, norm: Norm) -> Result<Value> {
        let layer = self.path(name);
        let channels = Shape::from([self.channels(x)]);
        let start = Init::Constant(norm.scale_start);
        let gamma = norm.scale.then(|| self.parameter(&layer, "weight", channels.clone(), start, ForeignLayout::Same));
        let beta = self.parameter(&layer, "bias", channels.clone(), Init::Constant(0.0), ForeignLayout::Same);
        let mean = self.state(&layer, "running_mean", channels.clone(), 0.0);
        let variance = self.state(&layer, "running_var", channels, 1.0);
        let mut inputs = vec![x, beta, mean, variance];
        inputs.extend(gamma);
        let Norm { epsilon, momentum, scale, .. } = norm;
        let norm = BatchNorm { epsilon, momentum, scale, residual: false, relu: false };
        let op = if self.mode == Mode::Train { Op::BatchNorm(norm) } else { Op::BatchNormInference(norm) };
        self.graph.push_one(&layer, op, &inputs)
    }

    /// A layer normalisation over the last dim, with `name.weight` and `name.bias`.
    ///
    /// # Errors
    /// Never for a value with at least one dim.
    pub fn layer_norm(&mut self, name: &str, x: Value) -> Result<Value> {
        let layer = self.path(name);
        let width = Shape::from([self.channels(x)]);
        let gamma = self.parameter(&layer, "weight", width.clone(), Init::Constant(1.0), ForeignLayout::Same);
        let beta = self.parameter(&layer, "bias", width, Init::Constant(0.0), ForeignLayout::Same);
        self.graph.push_one(&layer, Op::LayerNorm { epsilon: 1e-5 }, &[x, gamma, beta])
    }

    /// A function of each element.
    ///
    /// # Errors
    /// Never.
    pub fn unary(&mut self, x: Value, function: Unary) -> Result<Value> {
        self.unnamed(Op::Unary(function), &[x])
    }

    /// max(x, 0)
    ///
    /// # Errors
    /// Never.
    pub fn relu(&mut self, x: Value) -> Result<Value> {
        self.unary(x, Unary::Relu)
    }

    /// a + b; b may be a suffix of a's shape.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn add(&mut self, a: Value, b: Value) -> Result<Value> {
        self.unnamed(Op::Add, &[a, b])
    }

    /// a · b, element by element; b may be a suffix of a's shape.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn mul(&mut self, a: Value, b: Value) -> Result<Value> {
        self.unnamed(Op::Mul, &[a, b])
    }

    /// factor · x
    ///
    /// # Errors
    /// Never.
    pub fn scale(&mut self, x: Value, factor: f32) -> Result<Value> {
        self.unnamed(Op::Scale(factor), &[x])
    }

    /// The largest value of each window.
    ///
    /// # Errors
    /// When the window does not fit the image.
    pub fn max_pool(&mut self, x: Value, window: Window) -> Result<Value> {
        self.pool(PoolKind::Max, x, window)
    }

    /// The mean of each window.
    ///
    /// # Errors
    /// When the window does not fit the image.
    pub fn average_pool(&mut self, x: Value, window: Window) -> Result<Value> {
        self.pool(PoolKind::Average, x, window)
    }

    /// The mean over windows spread evenly so that the output has `size` (height, width).
    ///
    /// # Errors
    /// When x is not an image.
    pub fn adaptive_average_pool(&mut self, x: Value, size: [usize; 2]) -> Result<Value> {
        self.unnamed(Op::Pool2d(Pool2d { kind: PoolKind::Average, windows: Windows::Adaptive { output: size } }), &[x])
    }

    /// The mean over the whole image: `[N,H,W,C]` to `[N,C]`.
    ///
    /// # Errors
    /// When x is not an image.
    pub fn global_average_pool(&mut self, x: Value) -> Result<Value> {
        let pooled = self.adaptive_average_pool(x, [1, 1])?;
        let shape = self.shape(pooled).clone();
        self.reshape(pooled, [shape[0], shape.last()])
    }

    /// The largest value of the whole image: `[N,H,W,C]` to `[N,C]`.
    ///
    /// # Errors
    /// When x is not an image.
    pub fn global_max_pool(&mut self, x: Value) -> Result<Value> {
        let pooled = self.unnamed(Op::Pool2d(Pool2d::global(PoolKind::Max)), &[x])?;
        let shape = self.shape(pooled).clone();
        self.reshape(pooled, [shape[0], shape.last()])
    }

    /// All but the first dim in one. A linear layer that follows knows that its inputs were an image, so that weight
    /// files of frameworks with another order of dims load into it.
    ///
    /// # Errors
    /// Never.
    pub fn flatten(&mut self, x: Value) -> Result<Value> {
        let shape = self.shape(x).clone();
        let flat = self.reshape(x, [shape[0], shape.elements() / shape[0]])?;
        if let Some([_, height, width, channels]) = shape.nhwc() {
            self.flattened.insert(flat, [height, width, channels]);
        }
        Ok(flat)
    }

    /// Zeroes elements with this probability while training; nothing in evaluation.
    ///
    /// # Errors
    /// When the probability is not in 0..1.
    pub fn dropout(&mut self, x: Value, probability: f32) -> Result<Value> {
        self.dropouts += 1;
        if self.mode == Mode::Eval || !self.drops || probability == 0.0 {
            return Ok(x);
        }
        let y = self.unnamed(Op::Dropout { probability, salt: self.dropouts }, &[x])?;
        if let Some(&image) = self.flattened.get(&x) {
            self.flattened.insert(y, image);
        }
        Ok(y)
    }

    /// Joins values along the last dim.
    ///
    /// # Errors
    /// When the other dims differ.
    pub fn concat(&mut self, parts: &[Value]) -> Result<Value> {
        let dim = self.shape(parts[0]).len() - 1;
        self.unnamed(Op::Concat { dim }, parts)
    }

    /// The part `start..start+length` of one dim.
    ///
    /// # Errors
    /// When the part is not inside.
    pub fn slice(&mut self, x: Value, dim: usize, start: usize, length: usize) -> Result<Value> {
        self.unnamed(Op::Slice { dim, start, length }, &[x])
    }

    /// Zeros around an image, as a layer of its own (where a maximum must see them).
    ///
    /// # Errors
    /// When x is not an image.
    pub fn zero_pad(&mut self, x: Value, padding: Padding) -> Result<Value> {
        let rows = self.unnamed(Op::Pad { dim: 1, before: padding.top, after: padding.bottom }, &[x])?;
        self.unnamed(Op::Pad { dim: 2, before: padding.left, after: padding.right }, &[rows])
    }

    /// The same elements under another shape.
    ///
    /// # Errors
    /// When the number of elements differs.
    pub fn reshape(&mut self, x: Value, shape: impl Into<Shape>) -> Result<Value> {
        self.unnamed(Op::Reshape(shape.into()), &[x])
    }

    /// The dims in another order.
    ///
    /// # Errors
    /// When `order` does not name each dim once.
    pub fn permute(&mut self, x: Value, order: &[usize]) -> Result<Value> {
        self.unnamed(Op::Permute { order: order.to_vec() }, &[x])
    }

    /// The matrix product of the last two dims, b's swapped if `trans_b`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn matmul(&mut self, a: Value, b: Value, trans_b: bool) -> Result<Value> {
        self.unnamed(Op::MatMul { trans_a: false, trans_b, bias: false, relu: false }, &[a, b])
    }

    /// Softmax over the last dim; `causal` hides later positions.
    ///
    /// # Errors
    /// When a causal softmax is not over squares.
    pub fn softmax(&mut self, x: Value, causal: bool) -> Result<Value> {
        self.unnamed(Op::Softmax { causal }, &[x])
    }

    /// A table of vectors looked up by token, with `name.weight` `[rows, width]`.
    ///
    /// # Errors
    /// When x does not hold tokens.
    pub fn embedding(&mut self, name: &str, x: Value, rows: usize, width: usize, init: Init) -> Result<Value> {
        let layer = self.path(name);
        let table = self.parameter(&layer, "weight", [rows, width].into(), init, ForeignLayout::Same);
        self.graph.push_one(&layer, Op::Embedding, &[x, table])
    }

    /// A learned tensor that is added or multiplied by the model itself, with the given full name.
    pub fn learned(&mut self, name: &str, shape: impl Into<Shape>, init: Init) -> Value {
        let layer = self.path("");
        self.parameter(&layer, name, shape.into(), init, ForeignLayout::Same)
    }

    /// An LSTM layer over `[B,T,I]`, with PyTorch's names `name.weight_ih_lN` and so on.
    ///
    /// # Errors
    /// When x does not have three dims.
    pub fn lstm(&mut self, name: &str, layer_number: usize, x: Value, hidden: usize) -> Result<Value> {
        let layer = self.path(name);
        let init = Init::UniformFanIn { fan_in: hidden };
        let mut inputs = vec![x];
        let width = self.channels(x);
        let shapes = [("weight_ih", vec![4 * hidden, width]), ("weight_hh", vec![4 * hidden, hidden])];
        let biases = [("bias_ih", vec![4 * hidden]), ("bias_hh", vec![4 * hidden])];
        for (kind, shape) in shapes.into_iter().chain(biases) {
            let name = format!("{kind}_l{layer_number}");
            inputs.push(self.parameter(&layer, &name, Shape::new(shape), init, ForeignLayout::Same));
        }
        self.graph.push_one(&layer, Op::Lstm, &inputs)
    }

    fn pool(&mut self, kind: PoolKind, x: Value, window: Window) -> Result<Value> {
        let layer = self.path("pool");
        let size = self.image(&layer, "pool2d", x)?;
        let padding = resolve(window.padding, size, window.kernel, window.stride);
        let Window { kernel, stride, ceil, count_padding, .. } = window;
        let windows = Windows::Sliding { kernel, stride, padding, ceil, count_padding };
        self.graph.push_one(&layer, Op::Pool2d(Pool2d { kind, windows }), &[x])
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
