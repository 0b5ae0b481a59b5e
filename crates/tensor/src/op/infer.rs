//! The shape rule of each operation. A refusal is a sentence; the graph adds the layer's name to it.
//!
//! A backward operation is held to the shapes of the forward operation that it belongs to.

use super::accept::{is_empty, too_many};
use super::{Gather, Op, ReluMask, Together};
use crate::dtype::DType;
use crate::shape::Shape;
use crate::window::{Conv2d, Padding, Pool2d, PoolKind, Windows};

/// Most dims that a permutation reorders: devices keep them in an array of this length.
pub(crate) const DIMS_MAX: usize = 8;

type Inputs<'a> = [(&'a Shape, DType)];
type Outputs = Vec<(Shape, DType)>;

impl Op {
    /// Shapes and types of the outputs, or why the inputs do not fit.
    pub(crate) fn infer(&self, inputs: &Inputs<'_>) -> Result<Outputs, String> {
        self.accept(inputs)?;
        let outputs = self.rule(inputs)?;
        for (shape, _) in &outputs {
            require(!is_empty(shape), || format!("the result has no elements (shape `{shape}`)"))?;
            require(shape.checked_elements().is_some(), || too_many("the result", shape))?;
        }
        Ok(outputs)
    }

    fn rule(&self, inputs: &Inputs<'_>) -> Result<Outputs, String> {
        let (x, dtype) = inputs[0];
        let one = |shape: &Shape| Ok(vec![(shape.clone(), dtype)]);
        match self {
            Self::Conv2d { .. } | Self::Conv2dGradInput { .. } | Self::Conv2dGradWeight { .. } => {
                self.infer_conv(inputs)
            }
            Self::MatMul { .. } => self.infer_matmul(inputs),
            Self::BatchNorm(_) | Self::BatchNormInference(_) | Self::BatchNormAgain(_) | Self::BatchNormGrad(_) => {
                self.infer_batch_norm(inputs)
            }
            Self::LayerNorm { .. } | Self::LayerNormGrad => self.infer_layer_norm(inputs),
            Self::Unary(_) | Self::Scale(_) => one(x),
            Self::Dropout { probability, .. } => {
                require((0.0..1.0).contains(probability), || format!("dropout {probability} is not in 0..1"))?;
                one(x)
            }
            Self::UnaryGrad(_) | Self::SoftmaxGrad => {
                require(x == inputs[1].0, || mismatch(inputs))?;
                one(x)
            }
            Self::Softmax { causal } => {
                require(!causal || (x.len() >= 2 && x[x.len() - 2] == x.last()), || {
                    format!("a causal softmax needs square rows, not {x}")
                })?;
                one(x)
            }
            Self::Add | Self::Mul => {
                require(x.ends_with(inputs[1].0), || mismatch(inputs))?;
                one(x)
            }
            Self::Cast(target) => {
                require(target.is_float(), || format!("a number becomes another floating-point one, not {target}"))?;
                Ok(vec![(x.clone(), *target)])
            }
            Self::SumLeading { suffix } => {
                require(x.ends_with(suffix), || format!("{suffix} is not the end of {x}"))?;
                Ok(vec![(suffix.clone(), DType::F32)])
            }
            Self::Pool2d(_) | Self::Pool2dGrad { .. } => self.infer_pool(inputs),
            Self::Reshape(target) => {
                require(Some(x.elements()) == target.checked_elements(), || {
                    format!("{x} does not have the elements of {target}")
                })?;
                one(target)
            }
            Self::Slice { .. } | Self::Pad { .. } | Self::Concat { .. } | Self::Permute { .. } => {
                self.infer_layout(inputs)
            }
            Self::CrossEntropy { .. } | Self::CrossEntropyGrad { .. } => self.infer_cross_entropy(inputs),
            Self::Embedding | Self::EmbeddingGrad { .. } => self.infer_embedding(inputs),
            Self::Lstm | Self::LstmGrad => self.infer_lstm(inputs),
            Self::Together(Together::Sum | Together::Fork) => one(x),
            Self::Together(Together::Gather(gather)) => infer_gather(gather, x, dtype),
        }
    }

    fn infer_conv(&self, inputs: &Inputs<'_>) -> Result<Outputs, String> {
        match *self {
            Self::Conv2d { conv, bias, moments, .. } => {
                let y = conv_output(&conv, image(inputs[0].0)?, inputs[1].0)?;
                require(!bias || **inputs[2].0 == [y.last()], || {
                    format!("the bias must have {} elements, not {}", y.last(), inputs[2].0)
                })?;
                let statistic = (Shape::from([y.last()]), DType::F32);
                let mut outputs = vec![(y, inputs[0].1)];
                outputs.extend(moments.then(|| [statistic.clone(), statistic]).into_iter().flatten());
                Ok(outputs)
            }
            Self::Conv2dGradInput { conv, input } => {
                let y = conv_output(&conv, input, inputs[1].0)?;
                require(y == *inputs[0].0, || mismatch(inputs))?;
                Ok(vec![(Shape::from(input), inputs[0].1)])
            }
            Self::Conv2dGradWeight { conv } => {
                let (x, dy) = (image(inputs[0].0)?, image(inputs[1].0)?);
                require(conv.groups > 0, || "there is at least one group".into())?;
                let weight = Shape::from([conv.kernel[0], conv.kernel[1], x[3] / conv.groups, dy[3]]);
                require(conv_output(&conv, x, &weight)? == *inputs[1].0, || mismatch(inputs))?;
                Ok(vec![(weight, DType::F32)])
            }
            _ => unreachable!("only convolutions come here"),
        }
    }

    fn infer_matmul(&self, inputs: &Inputs<'_>) -> Result<Outputs, String> {
        let Self::MatMul { trans_a, trans_b, bias, .. } = *self else { unreachable!("only products come here") };
        let (a, b) = (inputs[0].0, inputs[1].0);
        require(a.len() >= 2 && a.len() == b.len() && a[..a.len() - 2] == b[..b.len() - 2], || mismatch(inputs))?;
        let last = |shape: &Shape, swap: bool| {
            let (rows, columns) = (shape[shape.len() - 2], shape.last());
            if swap { (columns, rows) } else { (rows, columns) }
        };
        let ((rows, inner), (inner_b, columns)) = (last(a, trans_a), last(b, trans_b));
        require(inner == inner_b, || format!("{a} and {b} do not share an inner size ({inner} and {inner_b})"))?;
        require(!bias || **inputs[2].0 == [columns], || format!("the bias must have {columns} elements"))?;
        let mut dims = a[..a.len() - 2].to_vec();
        dims.extend([rows, columns]);
        Ok(vec![(Shape::new(dims), inputs[0].1)])
    }

    fn infer_batch_norm(&self, inputs: &Inputs<'_>) -> Result<Outputs, String> {
        let channels = Shape::from([inputs[0].0.last()]);
        let statistic = (channels.clone(), DType::F32);
        let small = |inputs: &Inputs<'_>| inputs.iter().all(|input| *input.0 == channels);
        let y = (inputs[0].0.clone(), inputs[0].1);
        match self {
            Self::BatchNorm(norm) | Self::BatchNormInference(norm) | Self::BatchNormAgain(norm) => {
                let (fixed, residual) = inputs.split_at(norm.inputs_fixed());
                let fits = small(&fixed[1..]) && residual.iter().all(|input| *input.0 == y.0);
                require(fits, || mismatch(inputs))?;
                if !matches!(self, Self::BatchNorm(_)) {
                    return Ok(vec![y]);
                }
                Ok(vec![y, statistic.clone(), statistic])
            }
            Self::BatchNormGrad(norm) => {
                let (fixed, saved) = inputs.split_at(4 + usize::from(norm.scale));
                let mask = if norm.mask == ReluMask::FromInput { &channels } else { &y.0 };
                let fits = *fixed[1].0 == y.0 && small(&fixed[2..]) && saved.iter().all(|input| input.0 == mask);
                require(fits, || mismatch(inputs))?;
                let mut outputs = vec![y.clone(), statistic.clone()];
                outputs.extend(norm.scale.then_some(statistic));
                outputs.extend(norm.residual.then_some(y));
                Ok(outputs)
            }
            _ => unreachable!("only batch normalisation comes here"),
        }
    }

    fn infer_layer_norm(&self, inputs: &Inputs<'_>) -> Result<Outputs, String> {
        let (x, dtype) = inputs[0];
        let (channels, rows) = (Shape::from([x.last()]), Shape::from([x.elements() / x.last()]));
        let f32 = |shape: &Shape| (shape.clone(), DType::F32);
        if matches!(self, Self::LayerNormGrad) {
            let fits = x == inputs[1].0 && channels == *inputs[2].0 && rows == *inputs[3].0 && rows == *inputs[4].0;
            require(fits, || mismatch(inputs))?;
            return Ok(vec![(x.clone(), dtype), f32(&channels), f32(&channels)]);
        }
        require(inputs[1..].iter().all(|input| *input.0 == channels), || {
            format!("gamma and beta must have {channels} elements, one per feature of {x}")
        })?;
        Ok(vec![(x.clone(), dtype), f32(&rows), f32(&rows)])
    }

    fn infer_pool(&self, inputs: &Inputs<'_>) -> Result<Outputs, String> {
        match *self {
            Self::Pool2d(pool) => {
                let y = pool_output(&pool, image(inputs[0].0)?)?;
                let mut outputs = vec![(y.clone(), inputs[0].1)];
                outputs.extend((pool.kind == PoolKind::Max).then_some((y, DType::I32)));
                Ok(outputs)
            }
            Self::Pool2dGrad { pool, input } => {
                let y = pool_output(&pool, input)?;
                require(inputs.iter().all(|input| *input.0 == y), || mismatch(inputs))?;
                Ok(vec![(Shape::from(input), inputs[0].1)])
            }
            _ => unreachable!("only pooling comes here"),
        }
    }

    fn infer_layout(&self, inputs: &Inputs<'_>) -> Result<Outputs, String> {
        let (x, dtype) = inputs[0];
        let has = |dim: usize| require(dim < x.len(), || format!("{x} has no dim {dim}"));
        let shape = match self {
            Self::Slice { dim, start, length } => {
                has(*dim)?;
                let end = start.saturating_add(*length);
                require(*length > 0 && end <= x[*dim], || format!("{start}..{end} is not inside dim {dim} of {x}"))?;
                x.with(*dim, *length)
            }
            Self::Pad { dim, before, after } => {
                has(*dim)?;
                x.with(*dim, x[*dim].saturating_add(*before).saturating_add(*after))
            }
            Self::Concat { dim } => {
                has(*dim)?;
                let fits = |other: &Shape| other.len() == x.len() && other.with(*dim, x[*dim]) == *x;
                require(inputs.iter().all(|input| fits(input.0)), || mismatch(inputs))?;
                x.with(*dim, inputs.iter().fold(0, |sum: usize, input| sum.saturating_add(input.0[*dim])))
            }
            Self::Permute { order } => {
                require(x.len() <= DIMS_MAX, || format!("{x} has more than {DIMS_MAX} dims to reorder"))?;
                let mut sorted = order.clone();
                sorted.sort_unstable();
                require(sorted.iter().copied().eq(0..x.len()), || {
                    format!("{order:?} does not reorder the dims of {x}")
                })?;
                Shape::new(order.iter().map(|&dim| x[dim]).collect::<Vec<_>>())
            }
            _ => unreachable!("only layout changes come here"),
        };
        Ok(vec![(shape, dtype)])
    }

    fn infer_cross_entropy(&self, inputs: &Inputs<'_>) -> Result<Outputs, String> {
        let (Self::CrossEntropy { smoothing } | Self::CrossEntropyGrad { smoothing }) = self else {
            unreachable!("only losses come here")
        };
        require((0.0..1.0).contains(smoothing), || format!("label smoothing {smoothing} is not in 0..1"))?;
        let (logits, targets) = (inputs[inputs.len() - 2], inputs[inputs.len() - 1].0);
        require(logits.0.len() == 2 && targets.elements() == logits.0[0], || mismatch(inputs))?;
        if matches!(self, Self::CrossEntropy { .. }) {
            return Ok(vec![(Shape::scalar(), DType::F32)]);
        }
        require(*inputs[0].0 == Shape::scalar(), || mismatch(inputs))?;
        Ok(vec![(logits.0.clone(), logits.1)])
    }

    fn infer_embedding(&self, inputs: &Inputs<'_>) -> Result<Outputs, String> {
        if let Self::EmbeddingGrad { rows } = self {
            let (dy, ids) = (inputs[0].0, inputs[1].0);
            require(dy[..dy.len() - 1] == ids[..], || mismatch(inputs))?;
            return Ok(vec![(Shape::from([*rows, dy.last()]), DType::F32)]);
        }
        let (ids, table) = (inputs[0].0, inputs[1].0);
        require(table.len() == 2, || format!("an embedding table has two dims, not {table}"))?;
        let mut dims = ids.to_vec();
        dims.push(table.last());
        Ok(vec![(Shape::new(dims), inputs[1].1)])
    }

    fn infer_lstm(&self, inputs: &Inputs<'_>) -> Result<Outputs, String> {
        let first = usize::from(matches!(self, Self::LstmGrad));
        let (x, w_ih, w_hh) = (inputs[first].0, inputs[first + 1].0, inputs[first + 2].0);
        require(x.len() == 3 && w_ih.len() == 2 && w_hh.len() == 2, || mismatch(inputs))?;
        let (gates, hidden) = (w_ih[0], w_hh[1]);
        require(w_ih[1] == x[2] && w_hh[0] == gates && gates == 4 * hidden, || mismatch(inputs))?;
        let state = |width| (Shape::from([x[0], x[1], width]), inputs[first].1);
        let outputs = vec![state(hidden), state(gates), state(hidden)];
        if first == 0 {
            require(inputs[3..].iter().all(|bias| **bias.0 == [gates]), || mismatch(inputs))?;
            return Ok(outputs);
        }
        let saved = inputs[4..].iter().zip(&outputs).all(|(saved, output)| *saved.0 == output.0);
        require(saved && *inputs[0].0 == outputs[0].0, || mismatch(inputs))?;
        let f32 = |shape: &Shape| (shape.clone(), DType::F32);
        Ok(vec![(x.clone(), inputs[1].1), f32(w_ih), f32(w_hh), f32(&Shape::from([gates]))])
    }
}

fn require(holds: bool, message: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(message()) }
}

/// The pieces joined, and, where they do not lie one behind the other then, as they came.
fn infer_gather(gather: &Gather, x: &Shape, dtype: DType) -> Result<Outputs, String> {
    let Gather { dim, lengths, own, .. } = gather;
    require(*dim < x.len() && *own < lengths.len(), || format!("{x} is no piece to be joined"))?;
    let is_known = gather.segments.iter().all(|segment| segment.part < lengths.len());
    require(is_known && gather.extent(*own) == x[*dim], || format!("{x} is not the piece of part {own}"))?;
    let run = x.elements() / x[*dim];
    let fits = |(part, length): (usize, &usize)| gather.extent(part).checked_mul(run) == Some(*length);
    require(lengths.iter().enumerate().all(fits), || format!("{x} is not joined with pieces of other sizes"))?;
    let y = x.with(*dim, gather.total());
    let is_in_order = gather.is_in_order(x[..*dim].iter().product());
    let pieces = (!is_in_order).then(|| (Shape::from([y.elements()]), dtype));
    Ok([(y, dtype)].into_iter().chain(pieces).collect())
}

/// Whether sums and products of two such sizes cannot overflow.
fn is_countable(size: &usize) -> bool {
    i32::try_from(*size).is_ok()
}

fn image(shape: &Shape) -> Result<[usize; 4], String> {
    shape.nhwc().ok_or_else(|| format!("needs an image [N,H,W,C], not {shape}"))
}

/// The shape of a convolution's result.
fn conv_output(conv: &Conv2d, x: [usize; 4], weight: &Shape) -> Result<Shape, String> {
    let [kernel_h, kernel_w, depth, channels] =
        weight.nhwc().ok_or_else(|| format!("a weight has four dims [KH,KW,C/groups,O], not {weight}"))?;
    require([kernel_h, kernel_w] == conv.kernel, || {
        format!("the weight {weight} is not for a kernel {}×{}", conv.kernel[0], conv.kernel[1])
    })?;
    require(conv.groups > 0 && [channels, x[3]].iter().all(|size| size.is_multiple_of(conv.groups)), || {
        format!("{} input and {channels} output channels do not divide into {} groups", x[3], conv.groups)
    })?;
    require(depth == x[3] / conv.groups, || {
        format!("{} input channels in {} groups do not fit the weight {weight}", x[3], conv.groups)
    })?;
    require(conv.kernel.iter().chain(&conv.stride).chain(&conv.dilation).all(|&size| size > 0), || {
        "kernel, stride and dilation start at 1".into()
    })?;
    let Padding { top, left, bottom, right } = conv.padding;
    let sizes = [conv.kernel, conv.stride, conv.dilation, [top, left], [bottom, right]];
    require(sizes.as_flattened().iter().all(is_countable), || {
        "kernel, stride, padding and dilation end at 2³¹".into()
    })?;
    let [height, width] = conv.output([x[1], x[2]]).ok_or_else(|| too_small(x, "kernel", conv.kernel))?;
    Ok(Shape::from([x[0], height, width, channels]))
}

/// The shape of a pooling's result. Every window holds at least one pixel.
fn pool_output(pool: &Pool2d, x: [usize; 4]) -> Result<Shape, String> {
    let mut kernel = [1; 2];
    if let Windows::Sliding { kernel: size, stride, padding, .. } = pool.windows {
        kernel = size;
        require(kernel.iter().chain(&stride).all(|&size| size > 0), || "kernel and stride start at 1".into())?;
        require(kernel.iter().chain(&stride).all(is_countable), || "kernel and stride end at 2³¹".into())?;
        let (rows, columns) = (padding.top.max(padding.bottom), padding.left.max(padding.right));
        require(rows < kernel[0] && columns < kernel[1], || {
            format!("the padding {rows}×{columns} is not smaller than the window {}×{}", kernel[0], kernel[1])
        })?;
    }
    let [height, width] = pool.output([x[1], x[2]]).ok_or_else(|| too_small(x, "window", kernel))?;
    Ok(Shape::from([x[0], height, width, x[3]]))
}

fn mismatch(inputs: &Inputs<'_>) -> String {
    let shapes: Vec<String> = inputs.iter().map(|input| input.0.to_string()).collect();
    format!("the shapes {} do not fit together", shapes.join(", "))
}

fn too_small(x: [usize; 4], what: &str, kernel: [usize; 2]) -> String {
    format!("the image {}×{} is smaller than the {what} {}×{}", x[1], x[2], kernel[0], kernel[1])
}
