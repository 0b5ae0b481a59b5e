//! Weights as mapped matrices, in the panels that the product reads.
#![allow(unsafe_code)]

use std::ops::Range;

use super::super::super::gemm::pack::{How, Words, pack_transposed};
use super::super::super::isa::Isa;
use super::super::super::pool::SendPointer;
use super::super::super::simd::{Simd, Vectorised};
use super::transform::{Weight, map_pair, map_tile};
use super::{PATCH, POSITIONS};

const TAPS: usize = 9;

/// Channels whose turned weights are gathered at a time.
const GATHER: usize = 16;

/// Widest panel.
const WIDTH_MAX: usize = 32;

/// The 3×3 weights `[taps, inputs, outputs]` as a matrix depth × columns for each tap.
#[derive(Clone, Copy, Debug)]
pub(super) struct Weights<'a> {
    pub weight: &'a [f32],
    pub inputs: usize,
    pub outputs: usize,
    /// Turned by 180° and with the channels exchanged, as the gradient of the input needs them.
    pub turned: bool,
}

/// Where mapped weights go: of position p, word (d, c) of a block to `offset + p · stride + d · width + c` of `length` words, with zeros
/// in the columns that are left.
#[derive(Clone, Copy, Debug)]
pub(super) struct Panels {
    pub base: SendPointer<f32>,
    pub offset: usize,
    pub length: usize,
    pub stride: usize,
    pub width: usize,
    pub words: Words,
}

impl Weights<'_> {
    /// Maps `depth` × `columns` into `panels`.
    ///
    /// # Safety
    /// Nobody else touches the rows that are written.
    pub unsafe fn map(&self, isa: Isa, depth: Range<usize>, columns: Range<usize>, panels: Panels) {
        let Panels { offset, length, stride, width, words, .. } = panels;
        let lines = depth.len().div_ceil(words.numbers());
        let (rows, room) = if self.turned { (self.outputs, self.inputs) } else { (self.inputs, self.outputs) };
        assert!(depth.end <= rows && columns.end <= room && columns.len() <= width && width <= WIDTH_MAX);
        assert!(lines * width <= stride && width.is_multiple_of(isa.lanes()));
        assert!(length >= offset + (POSITIONS - 1) * stride + lines * width, "the panels are too short");
        if !self.turned {
            let source = &self.weight[depth.start * self.outputs + columns.start..];
            let strides = (self.inputs * self.outputs, self.outputs);
            isa.run(MapWeights { source, strides, depth: depth.len(), columns: columns.len(), panels });
            return;
        }
        let mut gathered = [0.0; TAPS * GATHER * WIDTH_MAX];
        for first in depth.clone().step_by(GATHER) {
            let count = GATHER.min(depth.end - first);
            for tap in 0..TAPS {
                let row = (TAPS - 1 - tap) * self.inputs + columns.start;
                let source = &self.weight[row * self.outputs + first..];
                let target = &mut gathered[tap * GATHER * width..];
                pack_transposed(
                    How { isa, words: Words::Plain },
                    source,
                    self.outputs,
                    count,
                    columns.len(),
                    target,
                    width,
                );
            }
            let panels = Panels { offset: offset + (first - depth.start) / words.numbers() * width, ..panels };
            let strides = (GATHER * width, width);
            isa.run(MapWeights { source: &gathered, strides, depth: count, columns: width, panels });
        }
    }
}

/// Weight (tap, d, c) lies at `tap · strides.0 + d · strides.1 + c` of `source`.
struct MapWeights<'a> {
    source: &'a [f32],
    strides: (usize, usize),
    depth: usize,
    columns: usize,
    panels: Panels,
}

impl Vectorised for MapWeights<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Self { source, strides, depth, columns, panels: Panels { base, offset, stride, width, words, .. } } = self;
        assert!(source.len() >= (TAPS - 1) * strides.0 + (depth - 1) * strides.1 + columns);
        for (line, row) in (0..depth).step_by(words.numbers()).enumerate() {
            for column in (0..width).step_by(S::LANES) {
                let count = columns.saturating_sub(column).min(S::LANES);
                // SAFETY: the assertions here and in `Weights::map` keep every vector inside; a short one is read only where it is
                // valid, and panels are whole vectors wide.
                unsafe {
                    let to = base.get().add(offset + line * width + column);
                    let store =
                        |i: usize, j: usize, value: S::Vector| S::store(to.add((PATCH * i + j) * stride), value);
                    let load = |row: usize| {
                        let from = source.as_ptr().wrapping_add(row * strides.1 + column);
                        move |i: usize, j: usize| {
                            let from = from.wrapping_add((3 * i + j) * strides.0);
                            if count == S::LANES { S::load(from) } else { S::load_first(from, count) }
                        }
                    };
                    if words != Words::Pairs {
                        map_tile::<S, Weight, 3, PATCH>(load(row), store);
                    } else if row + 1 < depth {
                        map_pair::<S, Weight, 3, PATCH>(load(row), load(row + 1), store);
                    } else {
                        map_pair::<S, Weight, 3, PATCH>(load(row), |_, _| S::splat(0.0), store);
                    }
                }
            }
        }
    }
}
