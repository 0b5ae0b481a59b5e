//! The table from the engine's operations to ONNX'.

use paceline_tensor::op::{BatchNorm, Rectifier};
use paceline_tensor::{Node, Op, Shape, Unary, Value};

use super::proto::{Attribute, signed};
use super::{ExportError, Exporter, Layout, Result, Tensor};

impl Exporter<'_, '_> {
    /// Writes the ONNX nodes of one operation and returns its first output.
    pub(super) fn lower(&mut self, node: &Node) -> Result<Tensor> {
        let x = node.inputs[0];
        match &node.op {
            Op::Conv2d { conv, relu, .. } => {
                let y = self.conv(node, conv)?;
                Ok(self.relu_if(*relu, y))
            }
            Op::MatMul { .. } => Ok(self.matmul(node)),
            Op::BatchNormInference(norm) => self.batch_norm(node, norm),
            Op::LayerNorm { epsilon } => {
                let x = self.same(x);
                let [gamma, beta] = [1, 2].map(|index| self.tensor(node.inputs[index]).name);
                let rank = self.shape(node.inputs[0]).len();
                let attributes = vec![Attribute::int("axis", rank - 1), Attribute::float("epsilon", *epsilon)];
                let name = self.writer.node("LayerNormalization", &[&x.name, &gamma, &beta], attributes);
                Ok(Tensor { name, ..x })
            }
            Op::Unary(function) => Ok(self.unary(x, *function)),
            Op::Add => Ok(self.binary("Add", x, node.inputs[1])),
            Op::Mul => Ok(self.binary("Mul", x, node.inputs[1])),
            Op::Scale(factor) => {
                let x = self.tensor(x);
                let name = self.with_scalar("Mul", &x.name, *factor);
                Ok(Tensor { name, ..x })
            }
            Op::SumLeading { suffix } => Ok(self.sum_leading(x, suffix)),
            Op::Pool2d(pool) => Ok(self.pool(node, pool)),
            Op::Reshape(target) => self.reshape(node, target),
            Op::Slice { dim, start, length } => {
                let x = self.tensor(x);
                if x.batch == Some(*dim) {
                    return Self::unsupported(node, "it cuts the batch, whose size is open");
                }
                let name = self.slice(&x.name, x.layout.place(*dim), *start, *length);
                Ok(Tensor { name, ..x })
            }
            Op::Pad { dim, before, after } => {
                let rank = self.shape(x).len();
                let x = self.tensor(x);
                let mut pads = vec![0; 2 * rank];
                pads[x.layout.place(*dim)] = *before;
                pads[rank + x.layout.place(*dim)] = *after;
                let pads = self.writer.list(&signed(&pads));
                let name = self.writer.node("Pad", &[&x.name, &pads], vec![]);
                Ok(Tensor { name, ..x })
            }
            Op::Concat { dim } => Ok(self.concat(&node.inputs, *dim)),
            Op::Permute { order } => {
                let x = self.tensor(x);
                let places: Vec<usize> = order.iter().map(|&dim| x.layout.place(dim)).collect();
                let name = self.transpose(&x.name, &places);
                let batch = x.batch.and_then(|batch| order.iter().position(|&dim| dim == batch));
                Ok(Tensor { name, layout: Layout::Same, batch })
            }
            Op::Softmax { causal } => Ok(self.softmax(x, *causal)),
            Op::Embedding => Ok(self.embedding(x, node.inputs[1])),
            Op::Lstm => self.lstm(node),
            op => Err(ExportError::Training { layer: node.layer.clone(), op: op.name().to_owned() }),
        }
    }

    pub(super) fn relu_if(&mut self, relu: bool, x: Tensor) -> Tensor {
        if !relu {
            return x;
        }
        let name = self.writer.node("Relu", &[&x.name], vec![]);
        Tensor { name, ..x }
    }

    fn relu6(&mut self, x: Tensor) -> Tensor {
        let [low, high] = [0.0, 6.0].map(|bound| self.writer.floats(&[], &[bound]));
        let name = self.writer.node("Clip", &[&x.name, &low, &high], vec![]);
        Tensor { name, ..x }
    }

    /// An operation of a tensor and one number.
    pub(super) fn with_scalar(&mut self, op_type: &str, x: &str, scalar: f32) -> String {
        let scalar = self.writer.floats(&[], &[scalar]);
        self.writer.node(op_type, &[x, &scalar], vec![])
    }

    /// The part `start..start+length` of one of the file's dims.
    pub(super) fn slice(&mut self, x: &str, dim: usize, start: usize, length: usize) -> String {
        let [start, end, dim] = [start, start + length, dim].map(|number| self.writer.list(&[number as i64]));
        self.writer.node("Slice", &[x, &start, &end, &dim], vec![])
    }

    /// Two-dimensional products are one Gemm; others a MatMul whose operands are turned by hand.
    fn matmul(&mut self, node: &Node) -> Tensor {
        let Op::MatMul { trans_a, trans_b, bias, relu } = node.op else { unreachable!("only products come here") };
        let rank = self.shape(node.inputs[0]).len();
        let (a, b) = (self.same(node.inputs[0]), self.same(node.inputs[1]));
        let bias = bias.then(|| self.tensor(node.inputs[2]).name);
        // A turned operand has its last two dims swapped, the batch among them. A dim that is summed over is gone.
        let turned = |batch: Option<usize>, turn: bool| match batch {
            Some(dim) if turn && dim + 2 >= rank => Some(2 * rank - 3 - dim),
            other => other,
        };
        let from_a = turned(a.batch, trans_a).filter(|&dim| dim + 1 != rank);
        let from_b = turned(b.batch, trans_b).filter(|&dim| dim + 2 != rank);
        let name = if rank == 2 {
            let attributes = [("transA", trans_a), ("transB", trans_b)];
            let attributes = attributes.map(|(name, flag)| Attribute::int(name, usize::from(flag))).to_vec();
            let inputs: Vec<&str> = [&a.name, &b.name].into_iter().chain(&bias).map(String::as_str).collect();
            self.writer.node("Gemm", &inputs, attributes)
        } else {
            let mut swap: Vec<usize> = (0..rank).collect();
            swap.swap(rank - 2, rank - 1);
            let a = if trans_a { self.transpose(&a.name, &swap) } else { a.name };
            let b = if trans_b { self.transpose(&b.name, &swap) } else { b.name };
            let product = self.writer.node("MatMul", &[&a, &b], vec![]);
            match bias {
                Some(bias) => self.writer.node("Add", &[&product, &bias], vec![]),
                None => product,
            }
        };
        self.relu_if(relu, Tensor { name, layout: Layout::Same, batch: from_a.or(from_b) })
    }

    /// Images and rows have ONNX' own operator; other ranks, whose channels ONNX would look for in the wrong dim, are
    /// multiplied and shifted by folded constants.
    fn batch_norm(&mut self, node: &Node, norm: &BatchNorm) -> Result<Tensor> {
        let shape = self.shape(node.inputs[0]).clone();
        let channels = shape.last();
        let x = if shape.len() == 4 { self.image(node.inputs[0]) } else { self.tensor(node.inputs[0]) };
        let gamma = norm.scale.then(|| node.inputs[4]);
        let name = if matches!(shape.len(), 2 | 4) {
            let ones = vec![1.0; channels];
            let gamma = match gamma {
                Some(gamma) => self.tensor(gamma).name,
                None => self.writer.floats(&[channels], &ones),
            };
            let [beta, mean, variance] = [1, 2, 3].map(|index| self.tensor(node.inputs[index]).name);
            let inputs = [&x.name, &gamma, &beta, &mean, &variance].map(String::as_str);
            self.writer.node("BatchNormalization", &inputs, vec![Attribute::float("epsilon", norm.epsilon)])
        } else {
            let gamma = gamma.map(|gamma| self.elements(node, gamma)).transpose()?;
            let [beta, mean, variance] = [1, 2, 3].map(|index| self.elements(node, node.inputs[index]));
            let (beta, mean, variance) = (beta?, mean?, variance?);
            let scale: Vec<f32> = (0..channels)
                .map(|c| gamma.as_ref().map_or(1.0, |gamma| gamma[c]) / (variance[c] + norm.epsilon).sqrt())
                .collect();
            let shift: Vec<f32> = (0..channels).map(|c| beta[c] - mean[c] * scale[c]).collect();
            let (scale, shift) = (self.writer.floats(&[channels], &scale), self.writer.floats(&[channels], &shift));
            let scaled = self.writer.node("Mul", &[&x.name, &scale], vec![]);
            self.writer.node("Add", &[&scaled, &shift], vec![])
        };
        let mut y = Tensor { name, ..x };
        if norm.residual {
            let residual = node.inputs[4 + usize::from(norm.scale)];
            let residual = if shape.len() == 4 { self.image(residual) } else { self.tensor(residual) };
            y.name = self.writer.node("Add", &[&y.name, &residual.name], vec![]);
        }
        Ok(match norm.rectifier {
            Rectifier::None => y,
            Rectifier::Relu => self.relu_if(true, y),
            Rectifier::Relu6 => self.relu6(y),
        })
    }

    fn unary(&mut self, x: Value, function: Unary) -> Tensor {
        let x = self.tensor(x);
        let name = match function {
            Unary::Relu => self.writer.node("Relu", &[&x.name], vec![]),
            Unary::Relu6 => self.relu6(x.clone()).name,
            Unary::Gelu => {
                let scaled = self.with_scalar("Mul", &x.name, std::f32::consts::FRAC_1_SQRT_2);
                let erf = self.writer.node("Erf", &[&scaled], vec![]);
                self.gelu(&x.name, &erf)
            }
            Unary::GeluTanh => {
                let square = self.writer.node("Mul", &[&x.name, &x.name], vec![]);
                let cubic = self.with_scalar("Mul", &square, 0.044_715);
                let cubic = self.with_scalar("Add", &cubic, 1.0);
                let inner = self.writer.node("Mul", &[&x.name, &cubic], vec![]);
                let scaled = self.with_scalar("Mul", &inner, (2.0 / std::f32::consts::PI).sqrt());
                let tanh = self.writer.node("Tanh", &[&scaled], vec![]);
                self.gelu(&x.name, &tanh)
            }
            Unary::Sigmoid => self.writer.node("Sigmoid", &[&x.name], vec![]),
            Unary::Tanh => self.writer.node("Tanh", &[&x.name], vec![]),
        };
        Tensor { name, ..x }
    }

    /// x · ½(1 + gate)
    fn gelu(&mut self, x: &str, gate: &str) -> String {
        let gate = self.with_scalar("Add", gate, 1.0);
        let half = self.with_scalar("Mul", &gate, 0.5);
        self.writer.node("Mul", &[x, &half], vec![])
    }

    /// An operation of two tensors, the second of which may be a suffix of the first.
    fn binary(&mut self, op_type: &str, a: Value, b: Value) -> Tensor {
        let (shape_a, shape_b) = (self.shape(a).clone(), self.shape(b).clone());
        let (mut left, mut right) = (self.tensor(a), self.tensor(b));
        if shape_a == shape_b {
            if left.layout != right.layout {
                (left, right) = (self.image(a), self.image(b));
            }
        } else if left.layout == Layout::Nchw && shape_b.len() == 1 {
            let column = self.writer.list(&[shape_b.last() as i64, 1, 1]);
            right.name = self.writer.node("Reshape", &[&right.name, &column], vec![]);
        } else {
            (left, right) = (self.same(a), self.same(b));
        }
        let name = self.writer.node(op_type, &[&left.name, &right.name], vec![]);
        // A suffix counts its dims from the end.
        let from_b = right.batch.map(|dim| dim + shape_a.len() - shape_b.len());
        Tensor { name, layout: left.layout, batch: left.batch.or(from_b) }
    }

    fn sum_leading(&mut self, x: Value, suffix: &Shape) -> Tensor {
        let leading = self.shape(x).len() - suffix.len();
        let x = self.same(x);
        let dims = self.writer.list(&signed(&(0..leading).collect::<Vec<_>>()));
        let name = self.writer.node("ReduceSum", &[&x.name, &dims], vec![Attribute::int("keepdims", 0)]);
        Tensor { name, layout: Layout::Same, batch: x.batch.and_then(|dim| dim.checked_sub(leading)) }
    }

    fn concat(&mut self, inputs: &[Value], dim: usize) -> Tensor {
        let images = inputs.iter().any(|&input| self.tensor(input).layout == Layout::Nchw);
        let parts: Vec<Tensor> =
            inputs.iter().map(|&input| if images { self.image(input) } else { self.tensor(input) }).collect();
        let names: Vec<&str> = parts.iter().map(|part| part.name.as_str()).collect();
        let layout = parts[0].layout;
        let name = self.writer.node("Concat", &names, vec![Attribute::int("axis", layout.place(dim))]);
        Tensor { name, layout, batch: parts.iter().find_map(|part| part.batch) }
    }

    /// The dim that holds the batch is −1 in the target, so that ONNX works it out.
    fn reshape(&mut self, node: &Node, target: &Shape) -> Result<Tensor> {
        let source = self.shape(node.inputs[0]).clone();
        // A single pixel has its channels in the same order either way.
        let pixel = source.nhwc().is_some_and(|[_, height, width, _]| height * width == 1);
        let x = if pixel { self.tensor(node.inputs[0]) } else { self.same(node.inputs[0]) };
        let mut dims = signed(target);
        let batch = match x.batch {
            None => None,
            Some(dim) => {
                // What stands before the batch stays before it; the dim may hold more than the batch, such as all rows.
                let batch = self.shape(self.network.x)[0];
                let before: usize = source[..dim].iter().product();
                let place = (0..target.len()).find(|&place| {
                    target[..place].iter().product::<usize>() == before && target[place].is_multiple_of(batch)
                });
                let Some(place) = place else {
                    return Self::unsupported(node, "it spreads the batch over several dims");
                };
                dims[place] = -1;
                Some(place)
            }
        };
        let dims = self.writer.list(&dims);
        let name = self.writer.node("Reshape", &[&x.name, &dims], vec![]);
        Ok(Tensor { name, layout: Layout::Same, batch })
    }
}
