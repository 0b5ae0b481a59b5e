//! Every operation of the engine, forward and backward, with its shape rule and its arithmetic cost.
//!
//! A closed enum: a device is a `match` over it, and the compiler says what a new operation still lacks. Adding one
//! touches this file, `op/accept.rs` (its inputs), `op/infer.rs` (its shapes), `op/cost.rs` where it costs more than one
//! operation per result, `gradient.rs`, one kernel file and its line in the device's dispatch, plus its meaning in
//! `tests/reference/interpret.rs` and rows of the op table in `tests/ops.rs`.

mod accept;
mod cost;
mod infer;
mod operand;
mod together;

pub(crate) use infer::DIMS_MAX;
pub(crate) use operand::Operand;
pub use together::{Gather, Segment, Together, Within, piece_range};

use crate::dtype::DType;
use crate::shape::Shape;
use crate::unary::Unary;
use crate::window::{Conv2d, Pool2d};

/// What a node computes. Inputs and outputs are listed in order; `[…]` marks one that a flag switches on.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// x, weight, `[bias]` → y, `[mean, variance]`. ReLU is applied last where fusion put it here.
    Conv2d {
        /// Geometry.
        conv: Conv2d,
        /// Whether a third input is the bias.
        bias: bool,
        /// Whether ReLU follows.
        relu: bool,
        /// Whether the mean and the variance (over n) of each channel of y are given out too.
        moments: bool,
    },
    /// dy, weight → dx
    Conv2dGradInput {
        /// Geometry of the forward operation.
        conv: Conv2d,
        /// Shape of x.
        input: [usize; 4],
    },
    /// x, dy → dweight
    Conv2dGradWeight {
        /// Geometry of the forward operation.
        conv: Conv2d,
    },
    /// a, b, `[bias]` → y: the product of the last two dims, for every index of the equal leading dims.
    MatMul {
        /// Read a's last two dims swapped.
        trans_a: bool,
        /// Read b's last two dims swapped.
        trans_b: bool,
        /// Whether a third input is a bias over the last dim.
        bias: bool,
        /// Whether ReLU follows.
        relu: bool,
    },
    /// x, beta, running mean, running variance, `[gamma]`, `[mean, variance]`, `[residual]` → y, mean, 1/deviation.
    /// Statistics of the batch, over all dims but the last; the running ones are updated in place.
    BatchNorm(BatchNorm),
    /// x, beta, running mean, running variance, `[gamma]`, `[residual]` → y, from the running statistics.
    BatchNormInference(BatchNorm),
    /// x, beta, mean, 1/deviation, `[gamma]`, `[residual]` → y: what a batch-norm gave with these statistics, once more.
    BatchNormAgain(BatchNorm),
    /// dy, x, mean, 1/deviation, `[gamma]`, `[beta or y, as the mask says]` → dx, dbeta, `[dgamma]`, `[dresidual]`
    BatchNormGrad(BatchNormGrad),
    /// x, gamma, beta → y, mean, 1/deviation, over the last dim.
    LayerNorm {
        /// Added to the variance.
        epsilon: f32,
    },
    /// dy, x, gamma, mean, 1/deviation → dx, dgamma, dbeta
    LayerNormGrad,
    /// x → y
    Unary(Unary),
    /// dy, y or x (see [`Unary::saves_output`]) → dx
    UnaryGrad(Unary),
    /// a, b → a + b; b may be a suffix of a's shape and repeats.
    Add,
    /// a, b → a · b; b may be a suffix of a's shape and repeats.
    Mul,
    /// x → factor · x
    Scale(f32),
    /// x → the same numbers as another floating-point type, rounded to it.
    Cast(DType),
    /// x → the sum over the leading dims in f32, leaving this suffix of the shape.
    SumLeading {
        /// The shape that is left.
        suffix: Shape,
    },
    /// x → y, and for maxima the winning pixel h·W+w of each.
    Pool2d(Pool2d),
    /// dy, `[winners, for maxima]` → dx
    Pool2dGrad {
        /// The forward operation.
        pool: Pool2d,
        /// Shape of x.
        input: [usize; 4],
    },
    /// The same elements under another shape: never moves a byte.
    Reshape(Shape),
    /// x → the part `start..start+length` of one dim.
    Slice {
        /// Which dim.
        dim: usize,
        /// First index kept.
        start: usize,
        /// How many are kept.
        length: usize,
    },
    /// x → x with zeros before and after one dim.
    Pad {
        /// Which dim.
        dim: usize,
        /// Zeros before.
        before: usize,
        /// Zeros after.
        after: usize,
    },
    /// inputs → one tensor, joined along a dim.
    Concat {
        /// Which dim.
        dim: usize,
    },
    /// x → x with its dims reordered: output dim i is input dim `order[i]`.
    Permute {
        /// The order.
        order: Vec<usize>,
    },
    /// x → y: each element is zeroed with this probability, the others grow to keep the mean. The mask is a function
    /// of (seed, step, salt, element), so the gradient is the same operation on dy.
    Dropout {
        /// Share of the elements that is dropped.
        probability: f32,
        /// Tells the dropout layers of a model apart.
        salt: u64,
        /// Which elements of a whole tensor these are, if they are not all: they are dropped as they are there.
        within: Option<Within>,
    },
    /// x → softmax over the last dim; `causal` lets row t of a square see only columns up to t.
    Softmax {
        /// Whether later positions are hidden.
        causal: bool,
    },
    /// dy, y → dx
    SoftmaxGrad,
    /// logits `[rows, classes]`, targets `[rows]` → mean loss over the rows.
    CrossEntropy {
        /// Share of the target spread evenly over all classes.
        smoothing: f32,
    },
    /// dloss, logits, targets → dlogits
    CrossEntropyGrad {
        /// As in the forward operation.
        smoothing: f32,
    },
    /// ids, table `[rows, width]` → `[ids…, width]`
    Embedding,
    /// dy, ids → dtable
    EmbeddingGrad {
        /// Rows of the table.
        rows: usize,
    },
    /// x `[B,T,I]`, w_ih `[4H,I]`, w_hh `[4H,H]`, b_ih, b_hh → y `[B,T,H]`, gates `[B,T,4H]`, cells `[B,T,H]`.
    /// Gates in the order input, forget, cell, output; the state starts at zero.
    Lstm,
    /// dy, x, w_ih, w_hh, y, gates, cells → dx, dw_ih, dw_hh, db
    LstmGrad,
    /// What the parts of a layer do together.
    Together(Together),
}

/// The parts of a batch normalisation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchNorm {
    /// Added to the variance.
    pub epsilon: f32,
    /// Share of the batch's statistics in the new running ones.
    pub momentum: f32,
    /// Whether there is a learned scale gamma.
    pub scale: bool,
    /// Whether another tensor is added after the normalisation.
    pub residual: bool,
    /// What cuts the result off.
    pub rectifier: Rectifier,
    /// Whether the statistics of the batch are given, by the convolution that made x.
    pub moments: bool,
}

impl BatchNorm {
    /// Where the given mean stands among the inputs; the variance follows it.
    pub const fn moments_at(&self) -> usize {
        4 + self.scale as usize
    }

    /// Inputs before the residual.
    pub(crate) const fn inputs_fixed(&self) -> usize {
        self.moments_at() + 2 * self.moments as usize
    }
}

/// What cuts off the result of a batch normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rectifier {
    /// Nothing.
    None,
    /// What is below zero becomes zero.
    Relu,
    /// And what is above six becomes six.
    Relu6,
}

impl Rectifier {
    /// The activation of this name, if it is one.
    pub const fn of(unary: Unary) -> Option<Self> {
        match unary {
            Unary::Relu => Some(Self::Relu),
            Unary::Relu6 => Some(Self::Relu6),
            _ => None,
        }
    }

    /// The largest value that it lets pass.
    pub const fn ceiling(self) -> f32 {
        match self {
            Self::None | Self::Relu => f32::INFINITY,
            Self::Relu6 => 6.0,
        }
    }
}

/// The parts of a batch normalisation's gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchNormGrad {
    /// Whether there is a learned scale gamma.
    pub scale: bool,
    /// What cut the result off.
    pub rectifier: Rectifier,
    /// Where it let the gradient pass.
    pub mask: ReluMask,
    /// Whether the gradient that the ReLU let pass is given out too: it is that of the tensor that was added.
    pub residual: bool,
}

/// How the gradient of a batch normalisation knows which results its ReLU cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReluMask {
    /// There is no ReLU.
    None,
    /// Nothing was added before the ReLU, so its input follows from x, gamma and beta.
    FromInput,
    /// It is where y is not above zero, or not below the ceiling.
    FromOutput,
}

impl Op {
    /// The operation's name in plans, errors and profiles.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Conv2d { relu: false, moments: false, .. } => "conv2d",
            Self::Conv2d { relu: true, moments: false, .. } => "conv2d+relu",
            Self::Conv2d { relu: false, moments: true, .. } => "conv2d+moments",
            Self::Conv2d { relu: true, moments: true, .. } => "conv2d+relu+moments",
            Self::Conv2dGradInput { .. } => "conv2d.grad_input",
            Self::Conv2dGradWeight { .. } => "conv2d.grad_weight",
            Self::MatMul { relu: false, .. } => "matmul",
            Self::MatMul { relu: true, .. } => "matmul+relu",
            Self::BatchNorm(BatchNorm { residual: false, rectifier: Rectifier::None, .. }) => "batch_norm",
            Self::BatchNorm(BatchNorm { residual: false, .. }) => "batch_norm+relu",
            Self::BatchNorm(BatchNorm { residual: true, rectifier: Rectifier::None, .. }) => "batch_norm+add",
            Self::BatchNorm(BatchNorm { residual: true, .. }) => "batch_norm+add+relu",
            Self::BatchNormInference(_) => "batch_norm.inference",
            Self::BatchNormAgain(_) => "batch_norm.again",
            Self::BatchNormGrad(BatchNormGrad { mask: ReluMask::None, .. }) => "batch_norm.grad",
            Self::BatchNormGrad(BatchNormGrad { residual: false, .. }) => "batch_norm+relu.grad",
            Self::BatchNormGrad(BatchNormGrad { residual: true, .. }) => "batch_norm+add+relu.grad",
            Self::LayerNorm { .. } => "layer_norm",
            Self::LayerNormGrad => "layer_norm.grad",
            Self::Unary(Unary::Relu) => "relu",
            Self::Unary(Unary::Relu6) => "relu6",
            Self::Unary(Unary::Gelu) => "gelu",
            Self::Unary(Unary::GeluTanh) => "gelu_tanh",
            Self::Unary(Unary::Sigmoid) => "sigmoid",
            Self::Unary(Unary::Tanh) => "tanh",
            Self::UnaryGrad(_) => "unary.grad",
            Self::Add => "add",
            Self::Mul => "mul",
            Self::Scale(_) => "scale",
            Self::Cast(_) => "cast",
            Self::SumLeading { .. } => "sum_leading",
            Self::Pool2d(_) => "pool2d",
            Self::Pool2dGrad { .. } => "pool2d.grad",
            Self::Reshape(_) => "reshape",
            Self::Slice { .. } => "slice",
            Self::Pad { .. } => "pad",
            Self::Concat { .. } => "concat",
            Self::Permute { .. } => "permute",
            Self::Dropout { .. } => "dropout",
            Self::Softmax { .. } => "softmax",
            Self::SoftmaxGrad => "softmax.grad",
            Self::CrossEntropy { .. } => "cross_entropy",
            Self::CrossEntropyGrad { .. } => "cross_entropy.grad",
            Self::Embedding => "embedding",
            Self::EmbeddingGrad { .. } => "embedding.grad",
            Self::Lstm => "lstm",
            Self::LstmGrad => "lstm.grad",
            Self::Together(Together::Sum) => "sum_parts",
            Self::Together(Together::Fork) => "fork",
            Self::Together(Together::Gather(_)) => "gather_parts",
        }
    }

    /// The output that may take over an input's buffer, and that input, if nobody needs the input afterwards and both have
    /// the same type. Only where every device reads element i before it writes element i.
    pub const fn in_place(&self) -> Option<(usize, usize)> {
        match self {
            Self::Unary(_) | Self::UnaryGrad(_) | Self::Add | Self::Mul | Self::Scale(_) | Self::Dropout { .. } => {
                Some((0, 0))
            }
            // What the ReLU let pass replaces dy in the first of two passes, and the second reads it.
            Self::BatchNormGrad(BatchNormGrad { residual: true, scale, .. }) => Some((2 + *scale as usize, 0)),
            Self::BatchNormGrad(_) | Self::LayerNormGrad | Self::SoftmaxGrad => Some((0, 0)),
            Self::Together(Together::Sum) => Some((0, 0)),
            _ => None,
        }
    }

    /// Whether the result is the input's bytes: it has none of its own.
    pub(crate) const fn is_view(&self) -> bool {
        matches!(self, Self::Reshape(_) | Self::Together(Together::Fork))
    }
}
