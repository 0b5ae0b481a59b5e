//! One dimension of a sliding window, seen from the side that is written.
//!
//! Forward and backward are the same sweep: each written position is a sum over taps of a read position times a weight.
//! Backward through a stride, written positions fall into as many phases as the stride has steps; a phase meets only
//! every so-manieth tap and is itself a sweep of stride 1, so no zero is ever multiplied.

use crate::window::Conv2d;

/// Output i lies at `first + step·i` and sums, over t below `taps`, input `stride·i + origin + delta·t` times the weight of
/// kernel tap `tap_first + tap_step·t`. Inputs outside `0..size` are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Axis {
    pub outputs: usize,
    pub first: usize,
    pub step: usize,
    pub size: usize,
    pub stride: usize,
    pub origin: isize,
    pub delta: usize,
    pub taps: usize,
    pub tap_first: usize,
    pub tap_step: isize,
}

impl Axis {
    /// The sweep of a convolution along `dim`, from `x` to `y` pixels.
    pub fn forward(conv: &Conv2d, dim: usize, x: usize, y: usize) -> Self {
        let before = [conv.padding.top, conv.padding.left][dim];
        Self {
            outputs: y,
            first: 0,
            step: 1,
            size: x,
            stride: conv.stride[dim],
            origin: -(before as isize),
            delta: conv.dilation[dim],
            taps: conv.kernel[dim],
            tap_first: 0,
            tap_step: 1,
        }
    }

    /// The sweep that gives the gradient of input pixels `phase`, `phase + stride`, … from that of `y` output pixels.
    pub fn backward(conv: &Conv2d, dim: usize, phase: usize, x: usize, y: usize) -> Self {
        let (stride, dilation, kernel) = (conv.stride[dim], conv.dilation[dim], conv.kernel[dim]);
        let shifted = phase + [conv.padding.top, conv.padding.left][dim];
        let period = stride / gcd(stride, dilation);
        // Tap k reads output (shifted - k·dilation) / stride where that is whole: every `period`-th tap, if any.
        let whole = |tap: &usize| (shifted as isize - (tap * dilation) as isize).rem_euclid(stride as isize) == 0;
        let first_tap = (0..period.min(kernel)).find(whole);
        let taps = first_tap.map_or(0, |tap| (kernel - tap).div_ceil(period));
        let last_tap = first_tap.map_or(0, |tap| tap + (taps - 1) * period);
        Self {
            outputs: x.saturating_sub(phase).div_ceil(stride),
            first: phase,
            step: stride,
            size: y,
            stride: 1,
            origin: (shifted as isize - (last_tap * dilation) as isize).div_euclid(stride as isize),
            delta: period * dilation / stride,
            taps,
            tap_first: last_tap,
            tap_step: -(period as isize),
        }
    }

    /// The kernel tap of tap `t`.
    pub fn tap(&self, t: usize) -> usize {
        self.tap_first.wrapping_add_signed(self.tap_step * t as isize)
    }

    /// Where output `i`'s first tap reads; may lie outside the input.
    pub fn start(&self, i: usize) -> isize {
        (self.stride * i) as isize + self.origin
    }

    /// The taps of output `i` that read inside the input.
    pub fn valid_taps(&self, i: usize) -> std::ops::Range<usize> {
        let start = self.start(i);
        let low = start.min(0).unsigned_abs().div_ceil(self.delta);
        let high = (self.size as isize - start).max(0).unsigned_abs().div_ceil(self.delta).min(self.taps);
        low.min(high)..high
    }

    /// The outputs for which tap `t` reads inside the input.
    pub fn valid_outputs(&self, t: usize) -> std::ops::Range<usize> {
        let start = self.origin + (self.delta * t) as isize;
        let low = start.min(0).unsigned_abs().div_ceil(self.stride);
        let high = (self.size as isize - start).max(0).unsigned_abs().div_ceil(self.stride).min(self.outputs);
        low.min(high)..high
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::window::Padding;

    #[test]
    fn the_phases_of_a_stride_share_the_taps() {
        let conv = Conv2d { stride: [2, 2], padding: Padding::all(1), ..Conv2d::square(3) };
        let phases: Vec<Axis> = (0..2).map(|phase| Axis::backward(&conv, 0, phase, 8, 4)).collect();
        assert_eq!(phases.iter().map(|axis| axis.taps).collect::<Vec<_>>(), [1, 2]);
        assert_eq!((phases[0].tap(0), phases[0].start(0)), (1, 0));
        assert_eq!((phases[1].tap(0), phases[1].start(0), phases[1].tap(1), phases[1].delta), (2, 0, 0, 1));
    }

    #[test]
    fn a_dilation_that_divides_the_stride_leaves_phases_without_taps() {
        let conv = Conv2d { stride: [2, 2], dilation: [2, 2], ..Conv2d::square(3) };
        let taps = [0, 1].map(|phase| Axis::backward(&conv, 0, phase, 9, 3).taps);
        assert_eq!(taps, [3, 0]);
    }

    #[test]
    fn taps_and_outputs_are_clipped_to_the_input() {
        let conv = Conv2d { padding: Padding::all(2), dilation: [2, 2], ..Conv2d::square(3) };
        let axis = Axis::forward(&conv, 0, 4, 4);
        assert_eq!(axis.valid_taps(0), 1..3);
        assert_eq!(axis.valid_taps(3), 0..2);
        assert_eq!(axis.valid_outputs(0), 2..4);
        assert_eq!(axis.valid_outputs(2), 0..2);
    }
}
