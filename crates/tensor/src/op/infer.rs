//! The shape rule of each operation. A refusal is a sentence; the graph adds the layer's name to it.

use super::Op;
use crate::dtype::DType;
use crate::shape::Shape;
use crate::window::PoolKind;

type Outputs = Vec<(Shape, DType)>;

impl Op {
    /// Shapes and types of the outputs, or why the inputs do not fit.
    pub(crate) fn infer(&self, inputs: &[(&Shape, DType)]) -> Result<Outputs, String> {
        let shape = |index: usize| inputs.get(index).map(|input| input.0).ok_or(format!("input {index} is missing"));
        let dtype = inputs.first().map_or(DType::F32, |input| input.1);
        let one = |shape: Shape| Ok(vec![(shape, dtype)]);
        match self {
            Self::Conv2d { .. } | Self::Conv2dGradInput { .. } | Self::Conv2dGradWeight { .. } => {
                self.infer_conv(inputs)
            }
            Self::MatMul { .. } => self.infer_matmul(inputs),
            Self::BatchNorm(_) | Self::BatchNormInference(_) | Self::BatchNormGrad(_) => self.infer_batch_norm(inputs),
            Self::LayerNorm { .. } => {
                let (x, channels) = (shape(0)?, shape(0)?.last());
                require(shape(1)?.elements() == channels && shape(2)?.elements() == channels, || {
                    format!("gamma and beta must have {channels} elements, one per feature of {x}")
                })?;
                let rows = Shape::from([x.elements() / channels]);
                Ok(vec![(x.clone(), dtype), (rows.clone(), DType::F32), (rows, DType::F32)])
            }
            Self::LayerNormGrad => {
                Ok(vec![(shape(1)?.clone(), dtype), (shape(2)?.clone(), DType::F32), (shape(2)?.clone(), DType::F32)])
            }
            Self::Unary(_) | Self::Scale(_) => one(shape(0)?.clone()),
            Self::Dropout { probability, .. } => {
                require((0.0..1.0).contains(probability), || format!("dropout {probability} is not in 0..1"))?;
                one(shape(0)?.clone())
            }
            Self::UnaryGrad(_) | Self::SoftmaxGrad => {
                require(shape(0)? == shape(1)?, || mismatch(inputs))?;
                one(shape(0)?.clone())
            }
            Self::Softmax { causal } => {
                let x = shape(0)?;
                require(!causal || (x.len() >= 2 && x[x.len() - 2] == x.last()), || {
                    format!("a causal softmax needs square rows, not {x}")
                })?;
                one(x.clone())
            }
            Self::Add | Self::Mul => {
                require(shape(0)?.ends_with(shape(1)?), || mismatch(inputs))?;
                one(shape(0)?.clone())
            }
            Self::SumLeading { suffix } => {
                require(shape(0)?.ends_with(suffix), || {
                    format!("{suffix} is not the end of {}", shape(0).unwrap_or(suffix))
                })?;
                one(suffix.clone())
            }
            Self::Pool2d(_) | Self::Pool2dGrad { .. } => self.infer_pool(inputs),
            Self::Reshape(target) => {
                let x = shape(0)?;
                require(x.elements() == target.elements(), || format!("{x} does not have the elements of {target}"))?;
                one(target.clone())
            }
            Self::Slice { .. } | Self::Pad { .. } | Self::Concat { .. } | Self::Permute { .. } => {
                self.infer_layout(inputs)
            }
            Self::CrossEntropy { smoothing } => {
                let (logits, targets) = (shape(0)?, shape(1)?);
                require(logits.len() == 2 && targets.elements() == logits[0], || mismatch(inputs))?;
                require((0.0..1.0).contains(smoothing), || format!("label smoothing {smoothing} is not in 0..1"))?;
                Ok(vec![(Shape::scalar(), DType::F32)])
            }
            Self::CrossEntropyGrad { .. } => one(shape(1)?.clone()),
            Self::Embedding => {
                require(inputs[0].1 == DType::I32, || format!("token numbers must be i32, not {}", inputs[0].1))?;
                require(shape(1)?.len() == 2, || format!("an embedding table has two dims, not {}", inputs[1].0))?;
                let mut dims = shape(0)?.to_vec();
                dims.push(shape(1)?[1]);
                Ok(vec![(Shape::new(dims), inputs[1].1)])
            }
            Self::EmbeddingGrad { rows } => one(Shape::from([*rows, shape(0)?.last()])),
            Self::Lstm | Self::LstmGrad => self.infer_lstm(inputs),
        }
    }

    fn infer_conv(&self, inputs: &[(&Shape, DType)]) -> Result<Outputs, String> {
        match *self {
            Self::Conv2d { conv, bias, .. } => {
                let x = image(inputs, 0)?;
                let weight = inputs[1].0;
                let [kernel_h, kernel_w, depth, channels] =
                    weight.nhwc().ok_or(format!("a weight has four dims [KH,KW,C/groups,O], not {weight}"))?;
                require([kernel_h, kernel_w] == conv.kernel, || {
                    format!("the weight {weight} is not for kernel {:?}", conv.kernel)
                })?;
                require(conv.groups > 0 && channels % conv.groups == 0 && depth * conv.groups == x[3], || {
                    format!("{} input channels in {} groups do not fit the weight {weight}", x[3], conv.groups)
                })?;
                require(conv.stride.iter().chain(&conv.dilation).all(|&size| size > 0), || {
                    "stride and dilation start at 1".into()
                })?;
                require(inputs.len() == 2 + usize::from(bias), || format!("{} inputs given", inputs.len()))?;
                require(!bias || inputs[2].0.elements() == channels, || mismatch(inputs))?;
                let [height, width] = conv.output([x[1], x[2]]).ok_or_else(|| too_small(x, conv.kernel))?;
                Ok(vec![(Shape::from([x[0], height, width, channels]), inputs[0].1)])
            }
            Self::Conv2dGradInput { input, .. } => Ok(vec![(Shape::from(input), inputs[0].1)]),
            Self::Conv2dGradWeight { conv } => {
                let (x, dy) = (image(inputs, 0)?, image(inputs, 1)?);
                Ok(vec![(Shape::from([conv.kernel[0], conv.kernel[1], x[3] / conv.groups, dy[3]]), DType::F32)])
            }
            _ => unreachable!("only convolutions come here"),
        }
    }

    fn infer_matmul(&self, inputs: &[(&Shape, DType)]) -> Result<Outputs, String> {
        let Self::MatMul { trans_a, trans_b, bias, .. } = *self else { unreachable!("only products come here") };
        let (a, b) = (inputs[0].0, inputs[1].0);
        require(a.len() >= 2 && a.len() == b.len() && a[..a.len() - 2] == b[..b.len() - 2], || mismatch(inputs))?;
        let last = |shape: &Shape, swap: bool| {
            let (rows, columns) = (shape[shape.len() - 2], shape.last());
            if swap { (columns, rows) } else { (rows, columns) }
        };
        let ((rows, inner), (inner_b, columns)) = (last(a, trans_a), last(b, trans_b));
        require(inner == inner_b, || format!("{a} and {b} do not share an inner size ({inner} and {inner_b})"))?;
        require(!bias || inputs[2].0.elements() == columns, || format!("the bias must have {columns} elements"))?;
        let mut dims = a[..a.len() - 2].to_vec();
        dims.extend([rows, columns]);
        Ok(vec![(Shape::new(dims), inputs[0].1)])
    }

    fn infer_batch_norm(&self, inputs: &[(&Shape, DType)]) -> Result<Outputs, String> {
        let channels = Shape::from([inputs[0].0.last()]);
        let statistic = (channels.clone(), DType::F32);
        match self {
            Self::BatchNorm(norm) | Self::BatchNormInference(norm) => {
                let expected = 4 + usize::from(norm.scale) + usize::from(norm.residual);
                require(inputs.len() == expected, || format!("{} inputs given, {expected} needed", inputs.len()))?;
                let small = 1..4 + usize::from(norm.scale);
                require(inputs[small].iter().all(|input| *input.0 == channels), || mismatch(inputs))?;
                require(!norm.residual || inputs[expected - 1].0 == inputs[0].0, || mismatch(inputs))?;
                let y = (inputs[0].0.clone(), inputs[0].1);
                Ok(if matches!(self, Self::BatchNorm(_)) { vec![y, statistic.clone(), statistic] } else { vec![y] })
            }
            Self::BatchNormGrad(norm) => {
                let x = (inputs[1].0.clone(), inputs[1].1);
                let mut outputs = vec![x.clone(), statistic.clone()];
                outputs.extend(norm.scale.then_some(statistic));
                outputs.extend(norm.residual.then_some(x));
                Ok(outputs)
            }
            _ => unreachable!("only batch normalisation comes here"),
        }
    }

    fn infer_pool(&self, inputs: &[(&Shape, DType)]) -> Result<Outputs, String> {
        match *self {
            Self::Pool2d(pool) => {
                let x = image(inputs, 0)?;
                let size = pool.output([x[1], x[2]]).filter(|size| size.iter().all(|&pixels| pixels > 0));
                let [height, width] =
                    size.ok_or_else(|| format!("the image {}×{} is smaller than the window", x[1], x[2]))?;
                let y = Shape::from([x[0], height, width, x[3]]);
                let mut outputs = vec![(y.clone(), inputs[0].1)];
                outputs.extend((pool.kind == PoolKind::Max).then_some((y, DType::I32)));
                Ok(outputs)
            }
            Self::Pool2dGrad { input, .. } => Ok(vec![(Shape::from(input), inputs[0].1)]),
            _ => unreachable!("only pooling comes here"),
        }
    }

    fn infer_layout(&self, inputs: &[(&Shape, DType)]) -> Result<Outputs, String> {
        let (x, dtype) = (inputs[0].0, inputs[0].1);
        let has = |dim: usize| require(dim < x.len(), || format!("{x} has no dim {dim}"));
        let shape = match self {
            Self::Slice { dim, start, length } => {
                has(*dim)?;
                require(*length > 0 && start + length <= x[*dim], || {
                    format!("{start}..{} is not inside dim {dim} of {x}", start + length)
                })?;
                x.with(*dim, *length)
            }
            Self::Pad { dim, before, after } => {
                has(*dim)?;
                x.with(*dim, x[*dim] + before + after)
            }
            Self::Concat { dim } => {
                has(*dim)?;
                let fits = |other: &Shape| other.len() == x.len() && other.with(*dim, x[*dim]) == *x;
                require(inputs.iter().all(|input| fits(input.0)), || mismatch(inputs))?;
                x.with(*dim, inputs.iter().map(|input| input.0[*dim]).sum())
            }
            Self::Permute { order } => {
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

    fn infer_lstm(&self, inputs: &[(&Shape, DType)]) -> Result<Outputs, String> {
        let shape = |index: usize| (inputs[index].0.clone(), inputs[index].1);
        if matches!(self, Self::LstmGrad) {
            let gates = Shape::from([inputs[2].0[0]]);
            return Ok(vec![shape(1), shape(2), shape(3), (gates, DType::F32)]);
        }
        let (x, w_ih, w_hh) = (inputs[0].0, inputs[1].0, inputs[2].0);
        require(x.len() == 3 && w_ih.len() == 2 && w_hh.len() == 2, || mismatch(inputs))?;
        let (gates, hidden) = (w_ih[0], w_hh[1]);
        require(w_ih[1] == x[2] && w_hh[0] == gates && gates == 4 * hidden, || mismatch(inputs))?;
        require(inputs[3..].len() == 2 && inputs[3..].iter().all(|bias| bias.0.elements() == gates), || {
            mismatch(inputs)
        })?;
        let state = |width| (Shape::from([x[0], x[1], width]), inputs[0].1);
        Ok(vec![state(hidden), state(gates), state(hidden)])
    }
}

fn require(holds: bool, message: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(message()) }
}

fn image(inputs: &[(&Shape, DType)], index: usize) -> Result<[usize; 4], String> {
    let shape = inputs[index].0;
    shape.nhwc().ok_or(format!("needs an image [N,H,W,C], not {shape}"))
}

fn mismatch(inputs: &[(&Shape, DType)]) -> String {
    let shapes: Vec<String> = inputs.iter().map(|input| input.0.to_string()).collect();
    format!("the shapes {} do not fit together", shapes.join(", "))
}

fn too_small(x: [usize; 4], kernel: [usize; 2]) -> String {
    format!("the image {}×{} is smaller than the kernel {}×{}", x[1], x[2], kernel[0], kernel[1])
}
