//! Layers that have parameters. Each declares them under its name, as PyTorch would name them.

use paceline_tensor::op::{BatchNorm, Rectifier};
use paceline_tensor::window::Conv2d;
use paceline_tensor::{Op, Shape, Value};

use super::{Mode, Net, Result, resolve};
use crate::init::Init;
use crate::layer::{Conv, Norm};
use crate::parameter::ForeignLayout;

impl Net {
    /// A convolution, with `name.weight` and `name.bias`.
    ///
    /// # Errors
    /// When the kernel does not fit the image, or the groups the channels.
    pub fn conv(&mut self, name: &str, x: Value, conv: Conv) -> Result<Value> {
        let layer = self.path(name);
        let size = self.image(&layer, "conv2d", x)?;
        let depth = size[2] / conv.groups.max(1);
        let reach = conv.kernel.map(|kernel| kernel.saturating_sub(1).saturating_mul(conv.dilation).saturating_add(1));
        let padding = resolve(conv.padding, size, reach, conv.stride);
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
        self.graph.push_one(
            &layer,
            Op::Conv2d { conv: geometry, bias: conv.bias, relu: false, moments: false },
            &inputs,
        )
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
        let layout = self.order_of(x);
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
    /// When the training graph has only one value per channel, of which there is no variance.
    pub fn batch_norm(&mut self, name: &str, x: Value) -> Result<Value> {
        self.batch_norm_with(name, x, Norm::TORCH)
    }

    /// A batch normalisation with its own constants.
    ///
    /// # Errors
    /// As [`Net::batch_norm`].
    pub fn batch_norm_with(&mut self, name: &str, x: Value, norm: Norm) -> Result<Value> {
        let layer = self.path(name);
        let channels = Shape::from([self.channels(x)]);
        let start = Init::Constant(norm.scale_start);
        let layout = self.order_of(x);
        let gamma = norm.scale.then(|| self.parameter(&layer, "weight", channels.clone(), start, layout));
        let beta = self.parameter(&layer, "bias", channels.clone(), Init::Constant(0.0), layout);
        let mean = self.state(&layer, "running_mean", channels.clone(), 0.0, layout);
        let variance = self.state(&layer, "running_var", channels, 1.0, layout);
        let mut inputs = vec![x, beta, mean, variance];
        inputs.extend(gamma);
        let Norm { epsilon, momentum, scale, .. } = norm;
        let norm = BatchNorm { epsilon, momentum, scale, residual: false, rectifier: Rectifier::None, moments: false };
        let op = if self.mode == Mode::Train { Op::BatchNorm(norm) } else { Op::BatchNormInference(norm) };
        let y = self.graph.push_one(&layer, op, &inputs)?;
        Ok(self.same_order(x, y))
    }

    /// A layer normalisation over the last dim, with `name.weight` and `name.bias`.
    ///
    /// # Errors
    /// Never for a value with at least one dim.
    pub fn layer_norm(&mut self, name: &str, x: Value) -> Result<Value> {
        let layer = self.path(name);
        let width = Shape::from([self.channels(x)]);
        let layout = self.order_of(x);
        let gamma = self.parameter(&layer, "weight", width.clone(), Init::Constant(1.0), layout);
        let beta = self.parameter(&layer, "bias", width, Init::Constant(0.0), layout);
        let y = self.graph.push_one(&layer, Op::LayerNorm { epsilon: 1e-5 }, &[x, gamma, beta])?;
        Ok(self.same_order(x, y))
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
        self.graph.push_one(&format!("{layer}.{layer_number}"), Op::Lstm, &inputs)
    }
}
