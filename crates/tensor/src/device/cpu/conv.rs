//! Convolutions: forward, gradient of the input, gradient of the weight.
//!
//! Images are NHWC and weights `[KH,KW,C/groups,O]`, so a patch of the image is made of contiguous runs of channels and all
//! three passes are products of the blocked kind in [`super::gemm`], whose left operand is read from the image as it is packed;
//! no column matrix is ever stored. Depthwise convolutions have nothing to multiply and get loops of their own.
//!
//! | pass | rows | columns | depth |
//! |---|---|---|---|
//! | forward | output pixels | output channels | taps × input channels |
//! | gradient of the input | input pixels of one stride phase | input channels | that phase's taps × output channels |
//! | gradient of the weight | taps × input channels | output channels | output pixels |

mod axis;
mod depthwise;
mod forward;
mod grad_input;
mod grad_weight;
mod patches;
#[cfg(test)]
mod tests;
mod winograd;

pub use forward::{WithMoments, conv2d_forward, conv2d_forward_with_moments};
pub use grad_input::conv2d_grad_input;
pub use grad_weight::conv2d_grad_weight;

use serde::{Deserialize, Serialize};

use crate::window::Conv2d;

/// A convolution with all its sizes known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ConvShape {
    /// Window, stride, padding, dilation, groups.
    pub conv: Conv2d,
    /// Batch, height, width, channels of the input.
    pub x: [usize; 4],
    /// Batch, height, width, channels of the output.
    pub y: [usize; 4],
}

/// How a convolution is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// The image is the matrix: one tap, stride 1, no padding, one group.
    Pointwise,
    /// Patches of the image are packed as the product reads them.
    Implicit,
    /// Every channel by itself.
    Depthwise,
    /// Tiles of sixteen outputs from 36 products: 3×3, stride 1, one group. In bf16, where the direct product runs twice as fast, it
    /// stands for [`Algorithm::Implicit`].
    Winograd,
}

/// One of the three products of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ConvPass {
    /// y from x and the weight.
    Forward,
    /// dx from dy and the weight.
    GradInput,
    /// dw from x and dy.
    GradWeight,
}

impl Algorithm {
    /// Its name in files and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pointwise => "pointwise",
            Self::Implicit => "implicit",
            Self::Depthwise => "depthwise",
            Self::Winograd => "winograd",
        }
    }
}

impl ConvPass {
    /// Its name in files and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::GradInput => "grad-input",
            Self::GradWeight => "grad-weight",
        }
    }
}

impl ConvShape {
    /// The convolution of an input `[N,H,W,C]` to `outputs` channels.
    ///
    /// # Panics
    /// When the window does not fit, or channels cannot be cut into the groups.
    pub fn new(conv: Conv2d, x: [usize; 4], outputs: usize) -> Self {
        let [batch, height, width, channels] = x;
        let fits = conv.groups > 0 && channels.is_multiple_of(conv.groups) && outputs.is_multiple_of(conv.groups);
        assert!(fits, "{channels} and {outputs} channels in {} groups", conv.groups);
        let [rows, columns] = conv.output([height, width]).expect("the window fits the image");
        Self { conv, x, y: [batch, rows, columns, outputs] }
    }

    /// The algorithms that can compute a pass; the first is the direct sum.
    pub fn candidates(&self, _pass: ConvPass) -> impl Iterator<Item = Algorithm> {
        let winograd = winograd::applies(self).then_some(Algorithm::Winograd);
        std::iter::once(self.direct()).chain(winograd)
    }

    /// The algorithm that is used where nothing was measured.
    pub fn algorithm(&self, _pass: ConvPass) -> Algorithm {
        if winograd::pays(self) { Algorithm::Winograd } else { self.direct() }
    }

    /// The algorithm without tricks.
    pub(super) fn direct(&self) -> Algorithm {
        let Conv2d { kernel, stride, padding, groups, .. } = self.conv;
        if groups > 1 && groups == self.x[3] && groups == self.y[3] {
            Algorithm::Depthwise
        } else if kernel == [1, 1] && stride == [1, 1] && padding == Default::default() && groups == 1 {
            Algorithm::Pointwise
        } else {
            Algorithm::Implicit
        }
    }

    /// Elements of the weight.
    pub fn weights(&self) -> usize {
        self.taps() * self.group_inputs() * self.y[3]
    }

    fn taps(&self) -> usize {
        self.conv.kernel[0] * self.conv.kernel[1]
    }

    fn group_inputs(&self) -> usize {
        self.x[3] / self.conv.groups
    }

    fn group_outputs(&self) -> usize {
        self.y[3] / self.conv.groups
    }

    fn check(&self, x: usize, weight: usize, y: usize) {
        assert_eq!(x, self.x.iter().product::<usize>(), "the input has the wrong size");
        assert_eq!(weight, self.weights(), "the weight has the wrong size");
        assert_eq!(y, self.y.iter().product::<usize>(), "the output has the wrong size");
    }
}
