//! Convolutions of images with few channels, by kernels of our own (`kernels/stem.cu`): their bytes are in the result, which is moved once.
//!
//! Where nobody asks for the image's gradient and a ReLU follows, the forward pass leaves a bit for each result that it lets pass, and the
//! gradients of ReLU, bias and weights are one pass over the gradient of the result (`join.rs`).

use super::super::CudaError;
use super::super::program::{Address, Argument, At, Builder, SHARED_MAX, Tensor};
use crate::device::cpu::conv::ConvPass;
use crate::dtype::DType;
use crate::shape::Shape;
use crate::window::{Conv2d, Padding};

/// Images of more channels are left to cuDNN.
const CHANNELS_MAX: usize = 4;
/// Steps of 16 taps of a forward pass, and warps' shares of the taps of a gradient, from which on folding and cuDNN are faster: measured with
/// kernels of 3×3, 7×7 and 11×11 over three channels on an H200.
const STEPS_MAX: usize = 10;
const GROUPS_MAX: usize = 2;
/// Taps that a warp takes.
const TAPS: usize = 32;
/// Threads of a block.
const THREADS: u32 = 256;
/// Outputs that a block takes.
const OUTPUTS: usize = 64;
/// Pixels of a band, where there is room for so many.
const PIXELS: usize = 1792;
/// Two chunks of gradients in shared memory.
const CHUNKS_BYTES: usize = 2 * 128 * 128;

/// A pass of a convolution that `kernels/stem.cu` takes.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::device::cuda) struct Stem {
    conv: Conv2d,
    /// N, H, W, C.
    image: [usize; 4],
    result: [usize; 4],
    /// Rows of the result in a band.
    band: usize,
    /// Words of shared memory from one line to the next.
    pitch: usize,
    shared_bytes: usize,
}

impl Stem {
    /// For a pass of a convolution from images `x` to results `y`; none where it is left to others.
    pub fn new(pass: ConvPass, x: (&Shape, DType), conv: Conv2d, y: &Shape) -> Option<Self> {
        let (image, result) = (x.0.nhwc()?, y.nhwc()?);
        let plain = conv.groups == 1 && conv.dilation == [1, 1];
        let narrow = x.1 == DType::Bf16 && image[3] <= CHANNELS_MAX && result[3].is_multiple_of(8);
        // What a kernel counts in 32 bits.
        let counts = [image[1] * image[2] * image[3], result[1] * result[2] * result[3]];
        if !plain || !narrow || counts.into_iter().any(|count| count >= 1 << 26) {
            return None;
        }
        let stem = Self { conv, image, result, band: 0, pitch: 0, shared_bytes: 0 };
        match pass {
            ConvPass::Forward if stem.steps() <= STEPS_MAX => stem.for_forward(),
            ConvPass::GradWeight if stem.groups() <= GROUPS_MAX => stem.for_gradient(),
            _ => None,
        }
    }

    /// Steps of 16 taps of a forward pass, two at least: the taps of a row of the kernel stand in pairs.
    fn steps(&self) -> usize {
        let pairs = (self.conv.kernel[1] * self.image[3]).div_ceil(2);
        (self.conv.kernel[0] * pairs).div_ceil(8).max(2)
    }

    fn taps(&self) -> usize {
        self.conv.kernel[0] * self.conv.kernel[1] * self.image[3]
    }

    /// Warps' shares of the taps, one more of which sums the gradients themselves.
    fn groups(&self) -> usize {
        (self.taps() + 1).div_ceil(TAPS)
    }

    fn for_forward(self) -> Option<Self> {
        let ([.., depth], [_, _, columns, _]) = (self.image, self.result);
        let numbers = ((columns - 1) * self.conv.stride[1] + self.conv.kernel[1]) * depth;
        // A word for each number, or for each second one where all windows begin at even ones.
        let pitch = if (depth * self.conv.stride[1]).is_multiple_of(2) { numbers.div_ceil(2) } else { numbers };
        let steps = self.steps();
        self.cut(pitch, 1, |band| steps * (512 + 8) * 4 + band * columns * 4)
    }

    fn for_gradient(self) -> Option<Self> {
        let across = self.result[2].div_ceil(16);
        // Ten words more than whole rounds of the banks: three channels then lie in different ones.
        let needed = across * 16 + (self.conv.kernel[1] - 1) / self.conv.stride[1];
        let planes = self.image[3] * self.conv.stride[1];
        let sums_bytes = self.groups() * TAPS * OUTPUTS * DType::F32.bytes();
        let cut = self.cut(needed + (42 - needed % 32) % 32, planes, |band| CHUNKS_BYTES + (band * across + 8) * 8)?;
        Some(Self { shared_bytes: cut.shared_bytes.max(sums_bytes), ..cut })
    }

    /// With the tallest bands that fit, made so that all are nearly as tall; a row of the image is so many lines.
    fn cut(self, pitch: usize, lines: usize, fixed: impl Fn(usize) -> usize) -> Option<Self> {
        let [_, rows, columns, _] = self.result;
        let under = |band: usize| (band - 1) * self.conv.stride[0] + self.conv.kernel[0];
        let bytes = |band: usize| fixed(band) + under(band) * lines * pitch * 4;
        let fits = |&band: &usize| bytes(band) <= SHARED_MAX && (band == 1 || band * columns <= PIXELS);
        let tallest = (1..=rows).take_while(fits).last()?;
        let band = rows.div_ceil(rows.div_ceil(tallest));
        Some(Self { band, pitch, shared_bytes: bytes(band), ..self })
    }

    /// `STEM_PARAMETERS` of the kernels.
    fn arguments(&self) -> Vec<Argument> {
        let ([batch, height, width, depth], [_, rows, columns, outputs]) = (self.image, self.result);
        let Conv2d { kernel, stride, padding: Padding { top, left, .. }, .. } = self.conv;
        let sizes = [height, width, depth, rows, columns, outputs, kernel[0], kernel[1], stride[0], stride[1]];
        let sizes = sizes.into_iter().chain([top, left, self.band, self.pitch]);
        [batch.into()].into_iter().chain(sizes.map(|size| Argument::Int(size as i32))).collect()
    }

    /// Blocks, all of which run at once, and which outputs they take.
    fn grid(&self, builder: &mut Builder<'_>, kernel: &str) -> Result<[usize; 3], CudaError> {
        let tiles = self.result[3].div_ceil(OUTPUTS);
        let bands = self.result[0] * self.result[1].div_ceil(self.band);
        let at_once = builder.blocks_with_shared(kernel, THREADS, self.shared_bytes)?;
        Ok([bands.min(at_once.div_ceil(tiles)), tiles, 1])
    }

    /// Appends the forward pass; `gate` gets a bit for each result that the ReLU lets pass.
    pub fn forward(
        &self,
        builder: &mut Builder<'_>,
        [x, weight, y]: [Address; 3],
        (bias, relu): (Option<Address>, bool),
        gate: Option<Address>,
    ) -> Result<(), CudaError> {
        let kernel = if self.steps() == 2 { "stem_forward_two" } else { "stem_forward_any" };
        let [bias, gate] = [bias, gate].map(|address| address.unwrap_or(NOTHING));
        let mut arguments: Vec<Argument> = [x, weight, bias, y, gate].map(Argument::from).into();
        arguments.push(i32::from(relu).into());
        arguments.extend(self.arguments());
        let grid = self.grid(builder, kernel)?;
        builder.launch_with_shared(kernel, (grid, THREADS), self.shared_bytes, &arguments)
    }

    /// Appends the gradient of the weights and, where it has a place, of the bias. With `gate`, `dy` is that after the ReLU.
    pub fn gradient(
        &self,
        builder: &mut Builder<'_>,
        [x, dy]: [Address; 2],
        gate: Option<Address>,
        (dw, bias): (&Tensor<'_>, Option<Address>),
    ) -> Result<(), CudaError> {
        let (kernel, groups, taps) = ("stem_gradient", self.groups(), self.taps());
        let grid = self.grid(builder, kernel)?;
        let [blocks, tiles, _] = grid;
        let partial = builder.scratch(tiles * blocks * groups * TAPS * OUTPUTS * DType::F32.bytes());
        let mut arguments: Vec<Argument> = [x, dy, gate.unwrap_or(NOTHING), partial].map(Argument::from).into();
        arguments.push((groups as i32).into());
        arguments.extend(self.arguments());
        builder.launch_with_shared(kernel, (grid, THREADS), self.shared_bytes, &arguments)?;
        let sizes = [blocks, groups, taps, self.result[3], usize::from(dw.channels_last)];
        let mut arguments = vec![partial.into()];
        arguments.extend(sizes.map(|size| Argument::Int(size as i32)));
        arguments.extend([dw.address, bias.unwrap_or(NOTHING)].map(Argument::from));
        builder.launch("stem_totals", [(taps + 1) * OUTPUTS / 32, tiles, 1], THREADS, &arguments)
    }
}

const NOTHING: Address = Address::Fixed(0);

/// Appends the gradients of a stem's ReLU, bias and weights at the node of the ReLU's.
pub(in crate::device::cuda) fn stem_gradient(
    builder: &mut Builder<'_>,
    at: &At<'_>,
    stem: &Stem,
    (x, dw, bias): (&Tensor<'_>, &Tensor<'_>, Option<Address>),
) -> Result<(), CudaError> {
    stem.gradient(builder, [x.address, at.input(0).address], at.gate(), (dw, bias))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stem(pass: ConvPass, image: [usize; 4], outputs: usize, [kernel, stride, padding]: [usize; 3]) -> Option<Stem> {
        let conv = Conv2d { stride: [stride; 2], padding: Padding::all(padding), ..Conv2d::square(kernel) };
        let [rows, columns] = conv.output([image[1], image[2]]).unwrap();
        Stem::new(pass, (&image.into(), DType::Bf16), conv, &[image[0], rows, columns, outputs].into())
    }

    #[test]
    fn a_pass_is_taken_where_it_is_faster() {
        let taken = |image, outputs, window| {
            [ConvPass::Forward, ConvPass::GradInput, ConvPass::GradWeight]
                .map(|pass| stem(pass, image, outputs, window).is_some())
        };
        assert_eq!(taken([128, 224, 224, 3], 64, [3, 1, 1]), [true, false, true], "vgg16");
        assert_eq!(taken([256, 224, 224, 3], 64, [7, 2, 3]), [true, false, false], "resnet50");
        assert_eq!(taken([512, 224, 224, 3], 64, [11, 4, 2]), [false; 3], "alexnet");
        assert_eq!(taken([1, 8, 8, 5], 64, [3, 1, 1]), [false; 3], "too many channels");
        assert_eq!(taken([1, 8, 8, 3], 60, [3, 1, 1]), [false; 3], "results of which eight are no 16 bytes");
        assert_eq!(taken([1, 8, 1 << 16, 3], 64, [3, 1, 1]), [false; 3], "rows that shared memory does not hold");
    }

    #[test]
    fn what_a_block_takes_fits_a_multiprocessor() {
        for (image, outputs, window) in
            [([128, 224, 224, 3], 64, [3, 1, 1]), ([3, 33, 47, 4], 40, [3, 3, 1]), ([1, 7, 7, 1], 8, [7, 1, 3])]
        {
            let [forward, gradient] =
                [ConvPass::Forward, ConvPass::GradWeight].map(|pass| stem(pass, image, outputs, window).unwrap());
            assert!(forward.shared_bytes.max(gradient.shared_bytes) <= SHARED_MAX, "{forward:?} {gradient:?}");
            assert!(gradient.shared_bytes >= gradient.groups() * TAPS * OUTPUTS * 4 && gradient.pitch % 32 == 10);
        }
    }
}
