//! Pooling of NHWC images over the windows of [`Pool2d`], and its gradients.
//!
//! Both directions are vectorised over channels and parallel over rows of the result. The gradient gathers: each row of
//! dx looks up the windows that cover it, in window order, so that overlapping windows need no atomic additions and
//! give the same bits on any number of threads. Sums are f32, rounded once.

mod rows;

use std::ops::Range;

use rows::{Backward, Forward};

use super::context::Context;
use super::rows::{PAST_BYTES_MIN, may_pass};
use crate::dtype::Float;
use crate::window::{Pool2d, PoolKind};

/// The sizes of a pooling: images `[batch, height, width, channels]` and the windows over them.
#[derive(Clone, Copy, Debug)]
pub struct Pooling {
    pool2d: Pool2d,
    batch: usize,
    size: [usize; 2],
    channels: usize,
    /// Windows per dim.
    output: [usize; 2],
}

/// The real pixels `start..end` of a window along a dim, and what a mean divides by.
#[derive(Clone, Copy, Debug)]
struct Span {
    start: usize,
    end: usize,
    count: usize,
}

impl Pooling {
    /// The pooling of images of `shape` `[batch, height, width, channels]`.
    ///
    /// # Panics
    /// When no window fits: shape checking comes before kernels.
    pub fn new(pool2d: &Pool2d, shape: [usize; 4]) -> Self {
        let [batch, height, width, channels] = shape;
        let size = [height, width];
        let output = pool2d.output(size).expect("a pooling window fits its image");
        Self { pool2d: *pool2d, batch, size, channels, output }
    }

    /// Window `index` along a dim.
    #[inline]
    fn span(&self, dim: usize, index: usize) -> Span {
        let (start, end, count) = self.pool2d.window(dim, index, self.size[dim]);
        assert!(start < end && end <= self.size[dim], "a pooling window holds at least one pixel of its image");
        Span { start, end, count }
    }

    /// The windows along a dim that cover `pixel`, given those that cover the one before it (or none).
    #[inline]
    fn covering(&self, dim: usize, pixel: usize, before: Range<usize>, count: usize) -> Range<usize> {
        let Range { mut start, mut end } = before;
        while start < count && self.span(dim, start).end <= pixel {
            start += 1;
        }
        end = end.max(start);
        while end < count && self.span(dim, end).start <= pixel {
            end += 1;
        }
        start..end
    }

    fn output_row(&self) -> usize {
        self.output[1] * self.channels
    }

    fn input_image(&self) -> usize {
        self.size[0] * self.size[1] * self.channels
    }

    fn check(&self, input: usize, output: usize) {
        assert_eq!(input, self.batch * self.input_image(), "the image has the pooling's shape");
        assert_eq!(output, self.batch * self.output[0] * self.output_row(), "the result has the pooling's shape");
    }
}

/// y = the pooling of x. A maximum also writes, where asked, the pixel (row·width + column within its image) that won,
/// for the gradient: the first of equal ones; NaN wins over numbers.
pub fn forward<E: Float>(context: &Context<'_>, pooling: &Pooling, x: &[E], y: &mut [E], argmax: Option<&mut [i32]>) {
    pooling.check(x.len(), y.len());
    let (pool, isa) = (context.pool, context.isa);
    let (length, rows) = (pooling.output_row(), pooling.output[0]);
    let image = |task: usize| &x[task / rows * pooling.input_image()..][..pooling.input_image()];
    match argmax {
        Some(argmax) => pool.chunks2((y, length), (argmax, length), |task, y, argmax| {
            isa.run(Forward { pooling, x: image(task), row: task % rows, y, argmax: Some(argmax) });
        }),
        None => pool.chunks(y, length, |task, y| {
            isa.run(Forward { pooling, x: image(task), row: task % rows, y, argmax: None });
        }),
    }
}

/// dx = the gradient of the pooling; a maximum needs the winners that [`forward`] wrote.
pub fn gradient<E: Float>(context: &Context<'_>, pooling: &Pooling, dy: &[E], argmax: Option<&[i32]>, dx: &mut [E]) {
    pooling.check(dx.len(), dy.len());
    assert_eq!(
        argmax.map(<[i32]>::len),
        (pooling.pool2d.kind == PoolKind::Max).then_some(dy.len()),
        "winners go with a maximum"
    );
    let [height, width] = pooling.size;
    let image = pooling.output[0] * pooling.output_row();
    let isa = context.isa;
    let past = size_of_val(dx) >= PAST_BYTES_MIN && may_pass(isa, dx, pooling.channels);
    context.pool.chunks(dx, width * pooling.channels, |task, dx| {
        let start = task / height * image;
        let argmax = argmax.map(|argmax| &argmax[start..start + image]);
        isa.run(Backward { pooling, row: task % height, dy: &dy[start..start + image], argmax, dx, past });
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::check::{assert_close, numbers, once, same_bits, slope, weigh, wide};
    use crate::window::{Padding, Windows};

    fn sliding(kind: PoolKind, kernel: usize, stride: usize, ceil: bool, count_padding: bool) -> Pool2d {
        let padding = Padding { top: kernel / 2, left: 0, bottom: 0, right: kernel / 2 };
        let (kernel, stride) = ([kernel, kernel], [stride, stride]);
        Pool2d { kind, windows: Windows::Sliding { kernel, stride, padding, ceil, count_padding } }
    }

    fn cases(kind: PoolKind) -> Vec<(Pool2d, [usize; 4])> {
        vec![
            (Pool2d::sliding(kind, 2, 2), [2, 6, 6, 1]),
            (sliding(kind, 3, 2, false, true), [2, 7, 8, 3]),
            (sliding(kind, 3, 2, true, false), [1, 8, 7, 17]),
            (sliding(kind, 3, 1, false, true), [3, 4, 5, 2]),
            (sliding(kind, 2, 3, false, true), [1, 9, 9, 5]),
            (Pool2d::global(kind), [2, 5, 4, 33]),
            (Pool2d { kind, windows: Windows::Adaptive { output: [3, 2] } }, [2, 5, 3, 4]),
        ]
    }

    fn reference(pool2d: &Pool2d, [batch, height, width, channels]: [usize; 4], x: &[f64]) -> Vec<f64> {
        let [rows, columns] = pool2d.output([height, width]).unwrap();
        let mut y = Vec::new();
        for index in 0..batch * rows * columns * channels {
            let (channel, column) = (index % channels, index / channels % columns);
            let (row, image) = (index / channels / columns % rows, index / channels / columns / rows);
            let (top, bottom, tall) = pool2d.window(0, row, height);
            let (left, right, broad) = pool2d.window(1, column, width);
            let pixels = (top..bottom).flat_map(|row| (left..right).map(move |column| (row, column)));
            let values = pixels.map(|(row, column)| x[((image * height + row) * width + column) * channels + channel]);
            y.push(match pool2d.kind {
                PoolKind::Max => values.fold(f64::NEG_INFINITY, f64::max),
                PoolKind::Average => values.sum::<f64>() / (tall * broad) as f64,
            });
        }
        y
    }

    #[test]
    fn pooling_and_gradients_follow_the_definition() {
        for kind in [PoolKind::Max, PoolKind::Average] {
            for (pool2d, shape) in cases(kind) {
                let pooling = Pooling::new(&pool2d, shape);
                let x = numbers(1, shape.iter().product());
                let expected = reference(&pool2d, shape, &wide(&x));
                let dy = numbers(2, expected.len());
                let mut argmax = vec![-1; expected.len()];
                once(|context| forward(context, &pooling, &x, &mut vec![0.0; expected.len()], Some(&mut argmax)));
                let y = same_bits(|context| {
                    let mut y = vec![f32::NAN; expected.len()];
                    forward(context, &pooling, &x, &mut y, None);
                    let mut with_winners = vec![f32::NAN; expected.len()];
                    forward(context, &pooling, &x, &mut with_winners, Some(&mut vec![-1; expected.len()]));
                    assert_eq!(y, with_winners);
                    y
                });
                assert_close(&y, &expected, 1e-6);
                let winners = (kind == PoolKind::Max).then_some(&argmax[..]);
                let dx = same_bits(|context| {
                    let mut dx = vec![f32::NAN; x.len()];
                    gradient(context, &pooling, &dy, winners, &mut dx);
                    dx
                });
                assert_close(&dx, &slope(&x, |x| weigh(&reference(&pool2d, shape, x), &dy)), 1e-5);
            }
        }
    }

    #[test]
    fn the_first_of_equals_wins_and_nan_beats_numbers() {
        let pooling = Pooling::new(&Pool2d::sliding(PoolKind::Max, 2, 2), [1, 2, 4, 1]);
        let (mut y, mut argmax) = ([0.0; 2], [0; 2]);
        let x = [1.0, 1.0, 5.0, f32::NAN, 1.0, 0.0, 9.0, 2.0];
        once(|context| forward(context, &pooling, &x, &mut y, Some(&mut argmax)));
        assert!(y[0] == 1.0 && y[1].is_nan());
        assert_eq!(argmax, [0, 3]);
    }
}
