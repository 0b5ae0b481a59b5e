//! A convolution of an image with few channels, as one of an image with more: pixels become channels.
//!
//! Matrix units multiply eight or more channels at a time, and a picture has three. With stride s, each square of s×s pixels becomes one
//! pixel with s² times the channels, and the kernel shrinks by s (a 7×7 kernel at stride 2 over 3 channels becomes a 4×4 kernel over 12).
//! At stride 1, the pixels under a row of the kernel become channels instead. Channels are filled up with zeros to a multiple of eight.

use super::super::CudaError;
use super::super::program::{Address, Argument, Builder, Tensor};
use crate::dtype::DType;
use crate::window::{Conv2d, Padding};

/// Images of more channels are left as they are.
const CHANNELS_MAX: usize = 4;

/// How pixels become channels.
pub(super) struct Fold {
    /// The convolution afterwards.
    pub conv: Conv2d,
    /// The image afterwards: N, H, W, C.
    pub image: [usize; 4],
    before: Conv2d,
    from: [usize; 4],
    /// Columns of pixels that become channels.
    columns: usize,
}

impl Fold {
    /// For a convolution of `x` with a result of this size; none where it would not help.
    pub fn new(x: &Tensor<'_>, conv: Conv2d, [_, height, width, _]: [usize; 4]) -> Option<Self> {
        let from = x.shape.nhwc()?;
        let [kernel_h, kernel_w] = conv.kernel;
        let small = x.dtype == DType::Bf16 && from[3] <= CHANNELS_MAX && conv.groups == 1 && conv.dilation == [1, 1];
        if !small || kernel_h * kernel_w == 1 {
            return None;
        }
        let columns = if conv.stride[1] == 1 { kernel_w } else { conv.stride[1] };
        let kernel = [kernel_h.div_ceil(conv.stride[0]), kernel_w.div_ceil(columns)];
        let channels = (conv.stride[0] * columns * from[3]).next_multiple_of(8);
        let image = [from[0], height + kernel[0] - 1, width + kernel[1] - 1, channels];
        let after = Conv2d { kernel, stride: [1, 1], padding: Padding::all(0), ..conv };
        Some(Self { conv: after, image, before: conv, from, columns })
    }

    /// Elements of one output channel's weights.
    pub fn taps(&self) -> usize {
        self.conv.kernel[0] * self.conv.kernel[1] * self.image[3]
    }

    /// Bytes that folding reads and writes.
    pub fn bytes(&self) -> usize {
        (self.from.iter().product::<usize>() + self.image.iter().product::<usize>()) * DType::Bf16.bytes()
    }

    /// The image with pixels as channels.
    pub fn image(&self, builder: &mut Builder<'_>, x: &Tensor<'_>) -> Result<Address, CudaError> {
        let elements: usize = self.image.iter().product();
        let to = builder.scratch(elements * DType::Bf16.bytes());
        let ([_, from_h, from_w, depth], [_, to_h, to_w, channels]) = (self.from, self.image);
        let Conv2d { stride, padding, .. } = self.before;
        let sizes = [from_h, from_w, depth, to_h, to_w, channels, stride[0], stride[1], stride[0], self.columns];
        let pieces = elements / 8;
        let mut arguments: Vec<Argument> = vec![x.address.into(), to.into(), pieces.into()];
        arguments.extend(sizes.into_iter().chain([padding.top, padding.left]).map(|size| Argument::Int(size as i32)));
        builder.launch_each("fold_image", pieces, &arguments)?;
        Ok(to)
    }

    /// The weights that go with it.
    pub fn weight(&self, builder: &mut Builder<'_>, from: Address, outputs: usize) -> Result<Address, CudaError> {
        let elements = outputs * self.taps();
        let to = builder.scratch(elements * DType::Bf16.bytes());
        builder.launch_each("fold_weight", elements, &self.arguments(from, to, elements))?;
        Ok(to)
    }

    /// The gradient of the weights as they were, from that of those that went with it.
    pub fn unfold(&self, builder: &mut Builder<'_>, from: Address, outputs: usize) -> Result<Address, CudaError> {
        let elements = outputs * self.before.kernel[0] * self.before.kernel[1] * self.from[3];
        let to = builder.scratch(elements * DType::Bf16.bytes());
        builder.launch_each("unfold_weight", elements, &self.arguments(from, to, elements))?;
        Ok(to)
    }

    fn arguments(&self, from: Address, to: Address, elements: usize) -> Vec<Argument> {
        let ([rows, columns], [to_rows, to_columns]) = (self.before.kernel, self.conv.kernel);
        let step = self.before.stride[0];
        let sizes = [rows, columns, self.from[3], to_rows, to_columns, self.image[3], step, step, self.columns];
        let mut arguments: Vec<Argument> = vec![from.into(), to.into(), elements.into()];
        arguments.extend(sizes.map(|size| Argument::Int(size as i32)));
        arguments
    }
}
