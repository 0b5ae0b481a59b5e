//! The geometry of operations that slide a window over an image: convolution and pooling.
//!
//! Pure arithmetic on sizes, shared by shape checking, cost, every device and the exporters. Images are NHWC
//! (batch, height, width, channels) everywhere; `dims` pairs are always (height, width).

use serde::{Deserialize, Serialize};

/// Zeros (or nothing, for pooling) around an image. The sides differ where a framework's "same" rule makes them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Padding {
    /// Rows above.
    pub top: usize,
    /// Columns to the left.
    pub left: usize,
    /// Rows below.
    pub bottom: usize,
    /// Columns to the right.
    pub right: usize,
}

impl Padding {
    /// The same number on every side.
    pub const fn all(size: usize) -> Self {
        Self { top: size, left: size, bottom: size, right: size }
    }

    /// `rows` above and below, `columns` left and right.
    pub const fn symmetric(rows: usize, columns: usize) -> Self {
        Self { top: rows, left: columns, bottom: rows, right: columns }
    }

    /// TensorFlow's "same": the output has ⌈size/stride⌉ pixels, and the odd one of the zeros goes below and right.
    pub fn same(size: [usize; 2], kernel: [usize; 2], stride: [usize; 2]) -> Self {
        let total = |dim: usize| {
            (size[dim].div_ceil(stride[dim]).saturating_sub(1) * stride[dim] + kernel[dim]).saturating_sub(size[dim])
        };
        let (rows, columns) = (total(0), total(1));
        Self { top: rows / 2, left: columns / 2, bottom: rows - rows / 2, right: columns - columns / 2 }
    }
}

/// A 2-D convolution: x `[N,H,W,C]`, weight `[KH,KW,C/groups,O]`, optional bias `[O]` to y `[N,OH,OW,O]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Conv2d {
    /// Kernel height and width.
    pub kernel: [usize; 2],
    /// Step of the window.
    pub stride: [usize; 2],
    /// Zeros around the image.
    pub padding: Padding,
    /// Distance between the kernel's taps.
    pub dilation: [usize; 2],
    /// Input and output channels are cut into this many independent parts; depthwise when it equals the input channels.
    pub groups: usize,
}

impl Conv2d {
    /// A square kernel at stride 1, without padding.
    pub const fn square(kernel: usize) -> Self {
        Self { kernel: [kernel; 2], stride: [1; 2], padding: Padding::all(0), dilation: [1; 2], groups: 1 }
    }

    /// Height and width of the output, or none if the window does not fit the padded image.
    pub fn output(&self, size: [usize; 2]) -> Option<[usize; 2]> {
        let padded =
            [size[0] + self.padding.top + self.padding.bottom, size[1] + self.padding.left + self.padding.right];
        let mut output = [0; 2];
        for dim in 0..2 {
            let reach = (self.kernel[dim] - 1) * self.dilation[dim] + 1;
            output[dim] = padded[dim].checked_sub(reach)? / self.stride[dim] + 1;
        }
        Some(output)
    }
}

/// What a pooling window computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PoolKind {
    /// The largest value; the first one wins a tie, in row order.
    Max,
    /// The mean of the values.
    Average,
}

/// A 2-D pooling over windows of x `[N,H,W,C]`, each channel by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Pool2d {
    /// Maximum or mean.
    pub kind: PoolKind,
    /// Which windows.
    pub windows: Windows,
}

/// The windows of a pooling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Windows {
    /// A kernel that slides by a stride, any relation between the two.
    Sliding {
        /// Window height and width.
        kernel: [usize; 2],
        /// Step of the window.
        stride: [usize; 2],
        /// Pixels that do not exist around the image: never a maximum.
        padding: Padding,
        /// Round the number of windows up instead of down (a window must still start inside image or left padding).
        ceil: bool,
        /// Whether a mean divides by the window's size including padding, or by the real pixels in it.
        count_padding: bool,
    },
    /// As many windows as asked for, spread evenly: window i covers ⌊i·size/out⌋ .. ⌈(i+1)·size/out⌉.
    Adaptive {
        /// Output height and width.
        output: [usize; 2],
    },
}

impl Pool2d {
    /// A square sliding window without padding.
    pub const fn sliding(kind: PoolKind, kernel: usize, stride: usize) -> Self {
        let (kernel, stride, padding) = ([kernel; 2], [stride; 2], Padding::all(0));
        Self { kind, windows: Windows::Sliding { kernel, stride, padding, ceil: false, count_padding: true } }
    }

    /// One window over the whole image.
    pub const fn global(kind: PoolKind) -> Self {
        Self { kind, windows: Windows::Adaptive { output: [1, 1] } }
    }

    /// Height and width of the output, or none if no window fits.
    pub fn output(&self, size: [usize; 2]) -> Option<[usize; 2]> {
        match self.windows {
            Windows::Adaptive { output } => Some(output),
            Windows::Sliding { kernel, stride, padding, ceil, .. } => {
                let before = [padding.top, padding.left];
                let after = [padding.bottom, padding.right];
                let mut output = [0; 2];
                for dim in 0..2 {
                    let room = (size[dim] + before[dim] + after[dim]).checked_sub(kernel[dim])?;
                    output[dim] = if ceil { room.div_ceil(stride[dim]) } else { room / stride[dim] } + 1;
                    if ceil && (output[dim] - 1) * stride[dim] >= size[dim] + before[dim] {
                        output[dim] -= 1;
                    }
                }
                Some(output)
            }
        }
    }

    /// The real pixels `start..end` along `dim` under window `index`, and the number a mean divides by along `dim`.
    pub fn window(&self, dim: usize, index: usize, size: usize) -> (usize, usize, usize) {
        match self.windows {
            Windows::Adaptive { output } => {
                let (start, end) = (index * size / output[dim], ((index + 1) * size).div_ceil(output[dim]));
                (start, end, end - start)
            }
            Windows::Sliding { kernel, stride, padding, count_padding, .. } => {
                let before = [padding.top, padding.left][dim];
                let after = [padding.bottom, padding.right][dim];
                let begin = index * stride[dim];
                let (start, end) =
                    (begin.saturating_sub(before), (begin + kernel[dim]).saturating_sub(before).min(size));
                // With rounding up, the part of a window beyond the padding counts for nothing.
                let padded_end = (begin + kernel[dim]).min(size + before + after);
                (start, end, if count_padding { padded_end - begin } else { end - start })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_padding_puts_the_odd_zero_last() {
        assert_eq!(Padding::same([224, 224], [3, 3], [2, 2]), Padding { top: 0, left: 0, bottom: 1, right: 1 });
        assert_eq!(Padding::same([7, 7], [3, 3], [1, 1]), Padding::all(1));
    }

    #[test]
    fn a_kernel_larger_than_the_image_has_no_output() {
        assert_eq!(Conv2d::square(5).output([4, 8]), None);
        assert_eq!(Conv2d { dilation: [2, 2], ..Conv2d::square(3) }.output([5, 6]), Some([1, 2]));
    }

    #[test]
    fn rounding_up_never_starts_a_window_in_the_right_padding() {
        let pool = |padding| Pool2d {
            kind: PoolKind::Max,
            windows: Windows::Sliding { kernel: [3, 3], stride: [2, 2], padding, ceil: true, count_padding: true },
        };
        assert_eq!(pool(Padding::all(0)).output([112, 112]), Some([56, 56]));
        assert_eq!(pool(Padding::all(1)).output([4, 4]), Some([3, 3]));
        assert_eq!(pool(Padding::all(0)).window(0, 55, 112), (110, 112, 2));
    }

    #[test]
    fn adaptive_windows_cover_every_pixel() {
        let pool = Pool2d { kind: PoolKind::Average, windows: Windows::Adaptive { output: [7, 7] } };
        assert_eq!(pool.window(0, 0, 10), (0, 2, 2));
        assert_eq!(pool.window(0, 6, 10), (8, 10, 2));
        assert_eq!(pool.window(0, 3, 1), (0, 1, 1));
    }
}
