//! Operations without parameters: functions of elements, pooling, layout, products.

use paceline_tensor::window::{Padding, Pool2d, PoolKind, Windows};
use paceline_tensor::{Op, Shape, Unary, Value};

use super::{Mode, Net, Result, resolve};
use crate::layer::Window;

impl Net {
    /// A function of each element.
    ///
    /// # Errors
    /// Never.
    pub fn unary(&mut self, x: Value, function: Unary) -> Result<Value> {
        let y = self.unnamed(Op::Unary(function), &[x])?;
        Ok(self.same_order(x, y))
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
        let y = self.unnamed(Op::Scale(factor), &[x])?;
        Ok(self.same_order(x, y))
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

    /// All but the first dim in one. A linear layer or normalisation that follows, with functions of elements between
    /// or not, knows that its inputs were an image, so that weight files of frameworks with another order of dims load
    /// into it.
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
        let y = self.unnamed(Op::Dropout { probability, salt: self.dropouts, within: None }, &[x])?;
        Ok(self.same_order(x, y))
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

    fn pool(&mut self, kind: PoolKind, x: Value, window: Window) -> Result<Value> {
        let layer = self.path("pool");
        let size = self.image(&layer, "pool2d", x)?;
        let padding = resolve(window.padding, size, window.kernel, window.stride);
        let Window { kernel, stride, ceil, count_padding, .. } = window;
        let windows = Windows::Sliding { kernel, stride, padding, ceil, count_padding };
        self.graph.push_one(&layer, Op::Pool2d(Pool2d { kind, windows }), &[x])
    }
}
