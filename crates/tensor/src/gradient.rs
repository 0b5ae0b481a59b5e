//! The gradient, as nodes of the same graph: one table from an operation to its backward pass.
//!
//! Walks the nodes in reverse. The gradient of a value is the sum over its uses; a gradient that nobody asked for is
//! never built (so the first convolution has no gradient for the image).

use crate::graph::{Graph, GraphError, Node, Value};
use crate::op::{BatchNorm, BatchNormGrad, Gather, Op, Rectifier, ReluMask, Together};
use crate::shape::Shape;
use crate::window::PoolKind;

/// Gradients by value: what [`differentiate`] returns.
#[derive(Clone, Debug, Default)]
pub struct Gradients(Vec<Option<Value>>);

impl Gradients {
    /// The gradient with respect to a value, if it was asked for and `root` depends on it.
    pub fn of(&self, value: Value) -> Option<Value> {
        self.0.get(value.index()).copied().flatten()
    }
}

/// Appends the nodes that compute d`root`/d`wrt`, starting from `seed` (the gradient of `root`, of the same shape).
///
/// # Errors
/// When an operation on the way has no gradient for the shapes at hand; the error names the layer.
///
/// # Panics
/// When `seed` does not have the shape of `root`.
pub fn differentiate(graph: &mut Graph, root: Value, seed: Value, wrt: &[Value]) -> Result<Gradients, GraphError> {
    differentiate_all(graph, &[(root, seed)], wrt)
}

/// The same for several roots, each with its seed: a value that is a root and read by other nodes too has the sum of both gradients.
fn differentiate_all(graph: &mut Graph, roots: &[(Value, Value)], wrt: &[Value]) -> Result<Gradients, GraphError> {
    for &(root, seed) in roots {
        assert_eq!(graph.shape(root), graph.shape(seed), "the seed of a gradient has the root's shape");
    }
    let forward = graph.nodes().len();
    let mut needed = vec![false; graph.values().count()];
    wrt.iter().for_each(|value| needed[value.index()] = true);
    for node in &graph.nodes()[..forward] {
        // What is learned behind it may be learned in another part.
        let is_shared = matches!(node.op, Op::Together(_));
        let reached = is_shared || node.inputs.iter().any(|input| needed[input.index()]);
        node.outputs.iter().for_each(|output| needed[output.index()] |= reached && graph.dtype(*output).is_float());
    }
    let mut gradients: Vec<Option<Value>> = vec![None; needed.len()];
    roots.iter().for_each(|(root, seed)| gradients[root.index()] = Some(*seed));
    for index in (0..forward).rev() {
        let node = graph.nodes()[index].clone();
        if !node.inputs.iter().any(|input| needed[input.index()]) {
            continue;
        }
        let mut builder = Builder { graph, layer: &node.layer };
        if node.outputs[1..].iter().any(|output| gradients[output.index()].is_some()) {
            return Err(builder.error(&node.op, "has a gradient for its first output only; the loss reads another one"));
        }
        let Some(dy) = gradients[node.outputs[0].index()] else { continue };
        let parts = builder.backward(&node, dy, &|position| needed[node.inputs[position].index()])?;
        for (input, part) in parts {
            let slot = &mut gradients[node.inputs[input].index()];
            *slot = Some(match *slot {
                None => part,
                Some(sum) => builder.one(Op::Add, &[sum, part])?,
            });
        }
    }
    Ok(Gradients(gradients))
}

struct Builder<'a> {
    graph: &'a mut Graph,
    layer: &'a str,
}

/// Gradients for some of a node's inputs, by position.
type Parts = Result<Vec<(usize, Value)>, GraphError>;

impl Builder<'_> {
    fn one(&mut self, op: Op, inputs: &[Value]) -> Result<Value, GraphError> {
        self.graph.push_one(self.layer, op, inputs)
    }

    /// The table. `wants(i)` says whether the gradient of input i is needed; only gradients of the first output flow,
    /// because the others (statistics, winners, gates) are notes for the backward pass.
    fn backward(&mut self, node: &Node, dy: Value, wants: &dyn Fn(usize) -> bool) -> Parts {
        let input = |index: usize| node.inputs[index];
        let mut parts = Vec::new();
        match &node.op {
            Op::Conv2d { .. } => return self.conv2d(node, dy, wants),
            Op::MatMul { .. } => return self.matmul(node, dy, wants),
            Op::BatchNorm(norm) => return self.batch_norm(node, *norm, dy, wants),
            Op::LayerNorm { .. } => {
                let inputs = [dy, input(0), input(1), node.outputs[1], node.outputs[2]];
                let outputs = self.graph.push(self.layer, Op::LayerNormGrad, &inputs)?;
                parts.extend(outputs.into_iter().enumerate());
            }
            Op::Unary(kind) => {
                let saved = if kind.saves_output() { node.outputs[0] } else { input(0) };
                parts.push((0, self.one(Op::UnaryGrad(*kind), &[dy, saved])?));
            }
            Op::Add => {
                parts.push((0, dy));
                if wants(1) {
                    parts.push((1, self.sum_to(dy, input(1))?));
                }
            }
            Op::Mul => {
                if wants(0) {
                    parts.push((0, self.one(Op::Mul, &[dy, input(1)])?));
                }
                if wants(1) {
                    let product = self.one(Op::Mul, &[dy, input(0)])?;
                    parts.push((1, self.sum_to(product, input(1))?));
                }
            }
            Op::Cast(_) => parts.push((0, self.one(Op::Cast(self.graph.dtype(input(0))), &[dy])?)),
            Op::Scale(factor) => parts.push((0, self.one(Op::Scale(*factor), &[dy])?)),
            Op::Pool2d(pool) => {
                let shape = self.graph.shape(input(0)).nhwc().expect("pooling was checked to have an image");
                let mut inputs = vec![dy];
                inputs.extend((pool.kind == PoolKind::Max).then(|| node.outputs[1]));
                parts.push((0, self.one(Op::Pool2dGrad { pool: *pool, input: shape }, &inputs)?));
            }
            Op::Reshape(_) | Op::Slice { .. } | Op::Pad { .. } | Op::Concat { .. } | Op::Permute { .. } => {
                return self.layout(node, dy, wants);
            }
            Op::Dropout { .. } => parts.push((0, self.one(node.op.clone(), &[dy])?)),
            Op::Softmax { .. } => parts.push((0, self.one(Op::SoftmaxGrad, &[dy, node.outputs[0]])?)),
            Op::CrossEntropy { smoothing } => {
                let op = Op::CrossEntropyGrad { smoothing: *smoothing };
                parts.push((0, self.one(op, &[dy, input(0), input(1)])?));
            }
            Op::Embedding => {
                let rows = self.graph.shape(input(1))[0];
                parts.push((1, self.one(Op::EmbeddingGrad { rows }, &[dy, input(0)])?));
            }
            Op::Lstm => {
                let saved = [dy, input(0), input(1), input(2), node.outputs[0], node.outputs[1], node.outputs[2]];
                let outputs = self.graph.push(self.layer, Op::LstmGrad, &saved)?;
                parts.extend(outputs[..3].iter().copied().enumerate());
                // Both biases are added to the same sums, so their gradients are equal. Two copies, here and not at the
                // end of the graph, so that both are final when the layer is done.
                for bias in [3, 4] {
                    if wants(bias) {
                        parts.push((bias, self.one(Op::Scale(1.0), &[outputs[3]])?));
                    }
                }
            }
            Op::Together(together) => return self.together(together, dy, wants(0)),
            op => return Err(self.refuse(op)),
        }
        parts.retain(|&(index, _)| wants(index));
        Ok(parts)
    }

    /// What parts do together has its conjugate.
    fn together(&mut self, together: &Together, dy: Value, is_wanted: bool) -> Parts {
        if !is_wanted {
            return Ok(Vec::new());
        }
        let dx = match together {
            Together::Sum => dy,
            Together::Fork => self.one(Op::Together(Together::Sum), &[dy])?,
            Together::Gather(gather) => self.own_piece(gather, dy)?,
        };
        Ok(vec![(0, dx)])
    }

    /// What a part put into a gather, of the gradient of its result.
    fn own_piece(&mut self, gather: &Gather, dy: Value) -> Result<Value, GraphError> {
        let dim = gather.dim;
        let segments = gather.of(gather.own).collect::<Vec<_>>();
        let slices = segments.into_iter().map(|(start, length)| self.one(Op::Slice { dim, start, length }, &[dy]));
        let slices = slices.collect::<Result<Vec<_>, _>>()?;
        if let [slice] = slices[..] { Ok(slice) } else { self.one(Op::Concat { dim }, &slices) }
    }

    /// What only moves elements moves gradients back.
    fn layout(&mut self, node: &Node, dy: Value, wants: &dyn Fn(usize) -> bool) -> Parts {
        let input = |index: usize| node.inputs[index];
        let mut parts = Vec::new();
        match &node.op {
            Op::Reshape(_) => parts.push((0, self.one(Op::Reshape(self.graph.shape(input(0)).clone()), &[dy])?)),
            Op::Slice { dim, start, length } => {
                let after = self.graph.shape(input(0))[*dim] - start - length;
                parts.push((0, self.one(Op::Pad { dim: *dim, before: *start, after }, &[dy])?));
            }
            Op::Pad { dim, before, .. } => {
                let length = self.graph.shape(input(0))[*dim];
                parts.push((0, self.one(Op::Slice { dim: *dim, start: *before, length }, &[dy])?));
            }
            Op::Concat { dim } => {
                let mut start = 0;
                for (index, &part) in node.inputs.iter().enumerate() {
                    let length = self.graph.shape(part)[*dim];
                    if wants(index) {
                        parts.push((index, self.one(Op::Slice { dim: *dim, start, length }, &[dy])?));
                    }
                    start += length;
                }
            }
            Op::Permute { order } => {
                let mut inverse = vec![0; order.len()];
                order.iter().enumerate().for_each(|(position, &dim)| inverse[dim] = position);
                parts.push((0, self.one(Op::Permute { order: inverse }, &[dy])?));
            }
            op => return Err(self.refuse(op)),
        }
        Ok(parts)
    }

    fn conv2d(&mut self, node: &Node, dy: Value, wants: &dyn Fn(usize) -> bool) -> Parts {
        let Op::Conv2d { conv, relu: false, moments: false, .. } = node.op else { return Err(self.refuse(&node.op)) };
        let (x, weight) = (node.inputs[0], node.inputs[1]);
        let mut parts = Vec::new();
        if node.inputs.len() == 3 && wants(2) {
            parts.push((2, self.sum_to(dy, node.inputs[2])?));
        }
        // The weight is read for the last time before its gradient is made, which can then be applied at once.
        if wants(0) {
            let input = self.graph.shape(x).nhwc().expect("a convolution was checked to have an image");
            parts.push((0, self.one(Op::Conv2dGradInput { conv, input }, &[dy, weight])?));
        }
        if wants(1) {
            parts.push((1, self.one(Op::Conv2dGradWeight { conv }, &[x, dy])?));
        }
        Ok(parts)
    }

    /// Y = op(A)·op(B). For each transposition the two gradients are products of the same three matrices.
    fn matmul(&mut self, node: &Node, dy: Value, wants: &dyn Fn(usize) -> bool) -> Parts {
        let Op::MatMul { trans_a, trans_b, relu: false, .. } = node.op else { return Err(self.refuse(&node.op)) };
        let (a, b) = (node.inputs[0], node.inputs[1]);
        let product = |trans_a, trans_b| Op::MatMul { trans_a, trans_b, bias: false, relu: false };
        let mut parts = Vec::new();
        if node.inputs.len() == 3 && wants(2) {
            parts.push((2, self.sum_to(dy, node.inputs[2])?));
        }
        // As for convolutions.
        if wants(0) {
            let da = if trans_a {
                self.one(product(trans_b, true), &[b, dy])
            } else {
                self.one(product(false, !trans_b), &[dy, b])
            };
            parts.push((0, da?));
        }
        if wants(1) {
            let db = if trans_b {
                self.one(product(true, trans_a), &[dy, a])
            } else {
                self.one(product(!trans_a, false), &[a, dy])
            };
            parts.push((1, db?));
        }
        Ok(parts)
    }

    fn batch_norm(&mut self, node: &Node, norm: BatchNorm, dy: Value, wants: &dyn Fn(usize) -> bool) -> Parts {
        if norm.rectifier != Rectifier::None || norm.residual || norm.moments {
            return Err(self.refuse(&node.op));
        }
        let mut inputs = vec![dy, node.inputs[0], node.outputs[1], node.outputs[2]];
        inputs.extend(norm.scale.then(|| node.inputs[4]));
        let rectifier = Rectifier::None;
        let op =
            Op::BatchNormGrad(BatchNormGrad { scale: norm.scale, rectifier, mask: ReluMask::None, residual: false });
        let outputs = self.graph.push(self.layer, op, &inputs)?;
        let mut parts = vec![(0, outputs[0]), (1, outputs[1])];
        parts.extend(norm.scale.then(|| (4, outputs[2])));
        parts.retain(|&(index, _)| wants(index));
        Ok(parts)
    }

    /// `dy` summed over the leading dims along which `target` was repeated.
    fn sum_to(&mut self, dy: Value, target: Value) -> Result<Value, GraphError> {
        let suffix: Shape = self.graph.shape(target).clone();
        if *self.graph.shape(dy) == suffix { Ok(dy) } else { self.one(Op::SumLeading { suffix }, &[dy]) }
    }

    fn refuse(&self, op: &Op) -> GraphError {
        self.error(op, "has no gradient; differentiate before fusing")
    }

    fn error(&self, op: &Op, message: &str) -> GraphError {
        GraphError { layer: self.layer.to_owned(), op: op.name().to_owned(), message: message.to_owned() }
    }
}

/// Declares the scalar input `grad_seed` and differentiates a scalar loss with respect to every parameter. Each
/// parameter's gradient is then the output of a node of its own that no other node reads: it can be given a place of
/// its own, and be sent away and overwritten as soon as it is there.
///
/// # Errors
/// As [`differentiate`].
pub fn of_loss(graph: &mut Graph, loss: Value) -> Result<(Value, Gradients), GraphError> {
    let (seeds, gradients) = of_roots(graph, &[loss], &[])?;
    Ok((seeds[0], gradients))
}

/// As [`of_loss`] for several roots, each of which gets an input for its gradient, and with respect to some `inputs` besides.
///
/// # Errors
/// As [`differentiate`].
pub fn of_roots(graph: &mut Graph, roots: &[Value], inputs: &[Value]) -> Result<(Vec<Value>, Gradients), GraphError> {
    let mut seeds = Vec::with_capacity(roots.len());
    for (number, &root) in roots.iter().enumerate() {
        let name = if number == 0 { "grad_seed".to_owned() } else { format!("grad_seed.{number}") };
        let (shape, dtype) = (graph.shape(root).clone(), graph.dtype(root));
        seeds.push(graph.input(&name, shape, dtype));
    }
    let pairs: Vec<(Value, Value)> = roots.iter().copied().zip(seeds.iter().copied()).collect();
    let parameters = graph.parameters().to_vec();
    let wrt = [&parameters[..], inputs].concat();
    let mut gradients = differentiate_all(graph, &pairs, &wrt)?;
    let read = graph.nodes().iter().flat_map(|node| &node.inputs).copied();
    let of_inputs = inputs.iter().filter_map(|&input| gradients.of(input));
    let mut taken: std::collections::HashSet<Value> = read.chain(seeds.iter().copied()).chain(of_inputs).collect();
    for parameter in parameters {
        let slot = &mut gradients.0[parameter.index()];
        if let Some(gradient) = *slot
            && !taken.insert(gradient)
        {
            let layer = graph.info(parameter).name.clone();
            *slot = Some(graph.push_one(&layer, Op::Scale(1.0), &[gradient])?);
        }
    }
    Ok((seeds, gradients))
}
