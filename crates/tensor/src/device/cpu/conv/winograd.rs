//! Winograd convolution F(4×4, 3×3): sixteen outputs of a 3×3 window from 36 products instead of 144.
//!
//! A tile of 6×6 inputs and the 3×3 weights are both mapped to 6×6 values (the maps of `transform.rs`); there the convolution is one
//! product per position, summed over channels: 36 matrix products of tiles × channels by channels × outputs. A last map takes
//! the 6×6 sums to 4×4 outputs. All three passes have this form:
//!
//! | pass | image | weights | products |
//! |---|---|---|---|
//! | forward | x | as they are | tiles × inputs by inputs × outputs |
//! | gradient of the input | dy | turned by 180°, channels exchanged | tiles × outputs by outputs × inputs |
//! | gradient of the weight | x and dy, both mapped | the result, mapped back | inputs × tiles by tiles × outputs |
//!
//! The points are 0, ±√½, ±√2 and infinity: with them the error in f32 is a few times that of the direct sum (a test bounds it),
//! a quarter of what the integers 0, ±1, ±2 give. Cost per tile and 16 channels: 144 multiply-adds for the input, 120 for the
//! output, against 36 × channels for the products.
//!
//! With bf16 images, mapped values are rounded to bf16 where the machine multiplies pairs of them; that adds about 1% of noise to a
//! result (root mean square), where the direct sum of rounded operands has 0.3%. Sums are in f32.
//!
//! Mapped values live in caches only: a task maps some tiles, multiplies and maps back. The order of every sum is a function of
//! the channels alone, so tasks may be cut as the threads need it and the bits stay.

mod grad_weight;
mod sweep;
#[cfg(test)]
mod tests;
mod transform;
mod weights;

pub(super) use grad_weight::grad_weight;
pub(super) use sweep::{forward, grad_input};

use super::super::gemm::kernel::Words;
use super::super::isa::Isa;
use super::super::simd::is_f32;
use super::ConvShape;
use crate::dtype::Float;

/// Positions of a mapped tile.
const POSITIONS: usize = 36;

/// Outputs of a tile along each side.
const TILE: usize = 4;

/// Inputs of a tile along each side.
const PATCH: usize = 6;

/// Whether a convolution has the form that this algorithm computes.
pub(super) fn applies(shape: &ConvShape) -> bool {
    let conv = &shape.conv;
    let ones = [1, 1];
    let pads = [conv.padding.top, conv.padding.left, conv.padding.bottom, conv.padding.right];
    (conv.kernel, conv.stride, conv.dilation, conv.groups) == ([3, 3], ones, ones, 1)
        && pads.iter().all(|&pad| pad <= 2)
        && shape.y.iter().chain(&shape.x).all(|&size| size > 0)
}

/// Whether it is likely to be faster than the direct sum: enough channels to be worth mapping, and tiles that are not mostly empty.
pub(super) fn pays(shape: &ConvShape) -> bool {
    let direct = 9 * shape.y[0] * shape.y[1] * shape.y[2];
    applies(shape) && shape.x[3].min(shape.y[3]) >= 16 && direct >= 2 * POSITIONS * Tiles::forward(shape).count
}

/// What mapped values are kept as: for bf16 images in bf16 too, where the machine multiplies that twice as fast; else in f32.
fn words<E: Float>(isa: Isa) -> Words {
    if !is_f32::<E>() && isa.multiplies_pairs() { Words::Pairs } else { Words::Plain }
}

/// The tiles of a batch of images: `rows` × `columns` per image.
#[derive(Clone, Copy, Debug)]
struct Tiles {
    /// Height and width of the image that is cut into patches.
    source: [usize; 2],
    /// Height and width of the image that is cut into tiles.
    target: [usize; 2],
    /// How far the first patch begins before the source.
    before: [usize; 2],
    rows: usize,
    columns: usize,
    count: usize,
}

impl Tiles {
    fn new(images: usize, source: [usize; 2], target: [usize; 2], before: [usize; 2]) -> Self {
        let [rows, columns] = target.map(|size| size.div_ceil(TILE));
        Self { source, target, before, rows, columns, count: images * rows * columns }
    }

    /// Tiles of the forward pass of `shape`.
    fn forward(shape: &ConvShape) -> Self {
        let [images, height, width, _] = shape.x;
        let before = [shape.conv.padding.top, shape.conv.padding.left];
        Self::new(images, [height, width], [shape.y[1], shape.y[2]], before)
    }

    /// Tiles of the gradient of the input: the same convolution with the padding that the full one lacks.
    fn backward(shape: &ConvShape) -> Self {
        let [images, height, width, _] = shape.x;
        let before = [2 - shape.conv.padding.top, 2 - shape.conv.padding.left];
        Self::new(images, [shape.y[1], shape.y[2]], [height, width], before)
    }

    /// Image, and the first output row and column of a tile.
    fn place(&self, tile: usize) -> (usize, usize, usize) {
        let (line, column) = (tile / self.columns, tile % self.columns);
        (line / self.rows, line % self.rows * TILE, column * TILE)
    }

    /// The pixels of a tile's patch, or none where it leaves the source.
    fn patch(&self, tile: usize) -> [[Option<usize>; PATCH]; PATCH] {
        let (image, row, column) = self.place(tile);
        let [height, width] = self.source;
        std::array::from_fn(|i| {
            let line = (row + i).checked_sub(self.before[0]).filter(|&line| line < height);
            std::array::from_fn(|j| {
                let pixel = (column + j).checked_sub(self.before[1]).filter(|&pixel| pixel < width);
                Some((image * height + line?) * width + pixel?)
            })
        })
    }

    /// How many pixels of a tile lie inside the target.
    fn pixels(&self, tile: usize) -> usize {
        let (_, row, column) = self.place(tile);
        (self.target[0] - row).min(TILE) * (self.target[1] - column).min(TILE)
    }

    /// The pixels of a tile, or none where it leaves the target.
    fn outputs(&self, tile: usize) -> [[Option<usize>; TILE]; TILE] {
        let (image, row, column) = self.place(tile);
        let [height, width] = self.target;
        std::array::from_fn(|i| {
            std::array::from_fn(|j| {
                (row + i < height && column + j < width).then(|| (image * height + row + i) * width + column + j)
            })
        })
    }
}
