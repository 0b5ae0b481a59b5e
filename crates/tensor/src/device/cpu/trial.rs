//! One convolution or matrix product on numbers of its own: what calibration and `paceline bench kernels` time.

use std::collections::HashMap;
use std::fmt;

use paceline_system::clock::Clock;

use super::context::Context;
use super::conv::{self, Algorithm, ConvPass, ConvShape};
use super::dispatch::{matrix, with_float};
use super::gemm::{Batch, Epilogue, Gemm, gemm_batched};
use crate::bf16::Bf16;
use crate::buffer::{Buffer, elements, elements_mut};
use crate::dtype::{DType, Element, Float};
use crate::graph::{Graph, Node};
use crate::op::Op;

/// A convolution or a matrix product with all its sizes known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// One pass of a convolution.
    Convolution {
        /// Its sizes.
        shape: ConvShape,
        /// Which of its three products.
        pass: ConvPass,
        /// The type of its images.
        dtype: DType,
    },
    /// Products of m×k by k×n.
    Product {
        /// m, n and k.
        sizes: [usize; 3],
        /// How many such products make the batch.
        count: usize,
        /// Whether a and b are stored transposed.
        transposed: [bool; 2],
        /// The types of a, b and the result.
        dtypes: [DType; 3],
    },
}

impl Kernel {
    /// What a node computes, if it is a convolution or a product.
    ///
    /// # Panics
    /// When the node is not one of the graph's.
    pub fn of(graph: &Graph, node: &Node) -> Option<Self> {
        let input = |index: usize| graph.shape(node.inputs[index]);
        let image = |index: usize| input(index).nhwc().expect("a convolution has images");
        let result = graph.shape(node.outputs[0]);
        let (shape, pass) = match node.op {
            Op::Conv2d { conv, .. } => (ConvShape::new(conv, image(0), result.last()), ConvPass::Forward),
            Op::Conv2dGradInput { conv, input: x } => (ConvShape::new(conv, x, input(0).last()), ConvPass::GradInput),
            Op::Conv2dGradWeight { conv } => (ConvShape::new(conv, image(0), input(1).last()), ConvPass::GradWeight),
            Op::MatMul { trans_a, trans_b, .. } => {
                let (m, n) = (result[result.len() - 2], result.last());
                let k = if trans_a { input(0)[input(0).len() - 2] } else { input(0).last() };
                let dtypes = [node.inputs[0], node.inputs[1], node.outputs[0]].map(|value| graph.dtype(value));
                let count = result.elements() / (m * n).max(1);
                return Some(Self::Product { sizes: [m, n, k], count, transposed: [trans_a, trans_b], dtypes });
            }
            _ => return None,
        };
        Some(Self::Convolution { shape, pass, dtype: graph.dtype(node.inputs[0]) })
    }

    /// The distinct kernels of a graph in the order of their first node, with the numbers of all their nodes.
    pub fn all(graph: &Graph) -> Vec<(Self, Vec<usize>)> {
        let mut places = HashMap::new();
        let mut found: Vec<(Self, Vec<usize>)> = Vec::new();
        for (index, node) in graph.nodes().iter().enumerate() {
            if let Some(kernel) = Self::of(graph, node) {
                let place = *places.entry(kernel).or_insert(found.len());
                if place == found.len() {
                    found.push((kernel, Vec::new()));
                }
                found[place].1.push(index);
            }
        }
        found
    }

    /// The algorithms to choose from: none for a product, which has but one.
    pub fn candidates(&self) -> Vec<Algorithm> {
        match self {
            Self::Convolution { shape, pass, .. } => shape.candidates(*pass).collect(),
            Self::Product { .. } => Vec::new(),
        }
    }

    /// Floating-point operations of the direct sum.
    pub fn flops(&self) -> u64 {
        match *self {
            Self::Convolution { shape, .. } => {
                let results = shape.y.iter().product::<usize>() as u64;
                2 * results * (shape.weights() / shape.y[3].max(1)) as u64
            }
            Self::Product { sizes: [m, n, k], count, .. } => 2 * (m * n) as u64 * (k * count) as u64,
        }
    }

    /// Floating-point operations of the products that an algorithm multiplies, without what prepares them.
    pub fn flops_of(&self, algorithm: Algorithm) -> u64 {
        match *self {
            Self::Convolution { shape, pass, .. } if algorithm == Algorithm::Winograd => {
                // 36 products for each tile of 4×4 results, or of the gradient that takes their place.
                let [images, height, width, _] = if pass == ConvPass::GradInput { shape.x } else { shape.y };
                let tiles = (images * height.div_ceil(4) * width.div_ceil(4)) as u64;
                2 * 36 * tiles * (shape.x[3] * shape.y[3]) as u64
            }
            _ => self.flops(),
        }
    }

    /// Bytes of the operands and the result: what must at least be moved if nothing of it is in a cache.
    pub fn bytes(&self) -> u64 {
        self.operands().into_iter().map(|(elements, dtype)| (elements * dtype.bytes()) as u64).sum()
    }

    /// Elements and types of a, b and the result.
    fn operands(&self) -> [(usize, DType); 3] {
        match *self {
            Self::Convolution { shape, pass, dtype } => {
                let (x, y) = (shape.x.iter().product(), shape.y.iter().product());
                let ((x, y), weight) = (((x, dtype), (y, dtype)), (shape.weights(), DType::F32));
                match pass {
                    ConvPass::Forward => [x, weight, y],
                    ConvPass::GradInput => [y, weight, x],
                    ConvPass::GradWeight => [x, y, weight],
                }
            }
            Self::Product { sizes: [m, n, k], count, dtypes, .. } => {
                let elements = [m * k, k * n, m * n].map(|elements| elements * count);
                [0, 1, 2].map(|operand| (elements[operand], dtypes[operand]))
            }
        }
    }

    /// The same convolution of so few images that it takes at most `flops_max`, or of one.
    pub(super) fn shortened(mut self, flops_max: u64) -> Self {
        let flops = self.flops();
        if let Self::Convolution { shape, .. } = &mut self {
            let per_image = (flops / shape.x[0].max(1) as u64).max(1);
            let images = (flops_max / per_image).clamp(1, shape.x[0].max(1) as u64) as usize;
            (shape.x[0], shape.y[0]) = (images, images);
        }
        self
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match *self {
            Self::Convolution { shape, .. } => {
                let ([_, height, width, inputs], outputs) = (shape.x, shape.y[3]);
                let ([down, across], [step, _]) = (shape.conv.kernel, shape.conv.stride);
                let stride = if shape.conv.stride == [1, 1] { String::new() } else { format!(" /{step}") };
                let groups = if shape.conv.groups == 1 { String::new() } else { format!(" g{}", shape.conv.groups) };
                format!("{down}×{across}{stride}{groups} {inputs}→{outputs} at {height}×{width}")
            }
            Self::Product { sizes: [m, n, k], count: 1, .. } => format!("{m}×{k} · {k}×{n}"),
            Self::Product { sizes: [m, n, k], count, .. } => format!("{count} of {m}×{k} · {k}×{n}"),
        };
        f.pad(&text)
    }
}

/// Numbers of either type where the arena of a step would have them: from a cache line on, in huge pages if there are many.
#[derive(Debug)]
struct Floats {
    memory: Buffer,
    count: usize,
    dtype: DType,
}

impl Floats {
    /// Numbers between −1 and 1, as good as independent.
    fn noise((count, dtype): (usize, DType), salt: u32) -> Self {
        let memory = Buffer::zeroed((count * dtype.bytes()).div_ceil(size_of::<f32>()));
        let mut floats = Self { memory, count, dtype };
        with_float!(dtype, fill::<_>(&mut floats, salt));
        floats
    }

    fn get<E: Element>(&self) -> &[E] {
        assert_eq!(E::DTYPE, self.dtype, "numbers are of one type");
        elements(&self.memory, 0, self.count)
    }

    fn get_mut<E: Element>(&mut self) -> &mut [E] {
        assert_eq!(E::DTYPE, self.dtype, "numbers are of one type");
        elements_mut(&mut self.memory, 0, self.count)
    }
}

fn fill<E: Float>(floats: &mut Floats, salt: u32) {
    // The finalizer of MurmurHash3: a few instructions for each number.
    let mix = |word: u32| {
        let word = (word ^ (word >> 16)).wrapping_mul(0x85EB_CA6B);
        let word = (word ^ (word >> 13)).wrapping_mul(0xC2B2_AE35);
        word ^ (word >> 16)
    };
    for (index, number) in (0..).zip(floats.get_mut::<E>()) {
        *number = E::from_f32(mix(index ^ salt << 30).cast_signed() as f32 / i32::MAX as f32);
    }
}

/// A kernel with its operands.
#[derive(Debug)]
pub(super) struct Trial {
    kernel: Kernel,
    a: Floats,
    b: Floats,
    result: Floats,
}

impl Trial {
    pub(super) fn new(kernel: Kernel) -> Self {
        let [a, b, result] = kernel.operands();
        Self { kernel, a: Floats::noise(a, 1), b: Floats::noise(b, 2), result: Floats::noise(result, 3) }
    }

    /// Runs the kernel once; a product takes no algorithm.
    pub(super) fn run(&mut self, context: &mut Context<'_>, algorithm: Option<Algorithm>) {
        match self.kernel {
            Kernel::Convolution { shape, pass, dtype } => {
                let algorithm = algorithm.unwrap_or_else(|| shape.algorithm(pass));
                with_float!(dtype, convolve::<_>(context, self, &shape, pass, algorithm));
            }
            Kernel::Product { dtypes: [a, _, _], .. } => with_float!(a, product_of::<_>(context, self)),
        }
    }

    /// The least seconds of each of `algorithms` (or of the product, if there are none), run in turns until `seconds` are
    /// over, and at least twice after a run that is not timed.
    pub(super) fn time(&mut self, context: &mut Context<'_>, algorithms: &[Algorithm], seconds: f64) -> Vec<f64> {
        let turns: Vec<Option<Algorithm>> =
            if algorithms.is_empty() { vec![None] } else { algorithms.iter().copied().map(Some).collect() };
        let clock = Clock::real();
        let mut least = vec![f64::INFINITY; turns.len()];
        turns.iter().for_each(|&turn| self.run(context, turn));
        let start = clock.seconds();
        for round in 0.. {
            if round >= 2 && clock.seconds() - start > seconds {
                break;
            }
            for (least, &turn) in least.iter_mut().zip(&turns) {
                let begin = clock.seconds();
                self.run(context, turn);
                *least = least.min(clock.seconds() - begin);
            }
        }
        least
    }

    /// The result as `f32`.
    pub(super) fn result(&self) -> Vec<f32> {
        fn widened<E: Float>(floats: &Floats) -> Vec<f32> {
            floats.get::<E>().iter().map(|number| number.to_f32()).collect()
        }
        with_float!(self.result.dtype, widened::<_>(&self.result))
    }
}

fn convolve<E: Float>(
    context: &mut Context<'_>,
    trial: &mut Trial,
    shape: &ConvShape,
    pass: ConvPass,
    algorithm: Algorithm,
) {
    let Trial { a, b, result, .. } = trial;
    let a = a.get::<E>();
    match pass {
        ConvPass::Forward => {
            let (weight, y) = (b.get(), result.get_mut());
            conv::conv2d_forward(context, shape, algorithm, a, weight, Epilogue::default(), y);
        }
        ConvPass::GradInput => {
            conv::conv2d_grad_input(context, shape, algorithm, a, b.get(), result.get_mut());
        }
        ConvPass::GradWeight => {
            conv::conv2d_grad_weight(context, shape, algorithm, a, b.get(), result.get_mut());
        }
    }
}

fn product_of<A: Float>(context: &mut Context<'_>, trial: &mut Trial) {
    let Kernel::Product { dtypes: [_, b, _], .. } = trial.kernel else { unreachable!("only products come here") };
    with_float!(b, product_with::<_, A>(context, trial));
}

fn product_with<B: Float, A: Float>(context: &mut Context<'_>, trial: &mut Trial) {
    let Kernel::Product { dtypes: [_, _, c], .. } = trial.kernel else { unreachable!("only products come here") };
    with_float!(c, product::<_, A, B>(context, trial));
}

fn product<C: Float, A: Float, B: Float>(context: &mut Context<'_>, trial: &mut Trial) {
    let Trial { kernel: Kernel::Product { sizes: [m, n, k], count, transposed, .. }, a, b, result } = trial else {
        unreachable!("only products come here")
    };
    let (m, n, k) = (*m, *n, *k);
    let a = matrix(a.get::<A>(), if transposed[0] { m } else { k }, transposed[0]);
    let b = matrix(b.get::<B>(), if transposed[1] { k } else { n }, transposed[1]);
    let batch = Batch { count: *count, a_stride: m * k, b_stride: k * n, c_stride: m * n };
    gemm_batched(context, Gemm::new([m, n, k], a, b), batch, result.get_mut::<C>());
}
