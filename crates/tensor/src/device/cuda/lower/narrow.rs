//! Convolutions of few channels, multiples of 16, by kernels of our own (`kernels/narrow.cu`): cuDNN's take several times as long as their
//! bytes where tensors are small. The gradient of the image at stride 1 is a forward pass with the kernel turned.

use super::super::CudaError;
use super::super::program::{Address, Argument, Builder, SHARED_MAX, Tensor};
use crate::device::cpu::conv::ConvPass;
use crate::dtype::DType;
use crate::window::{Conv2d, Padding};

/// Channels of images and results from which on cuDNN is left alone.
const CHANNELS_MAX: usize = 64;
/// Channels that a matrix unit multiplies at a time, and outputs.
const SIDE: usize = 16;
/// Bytes of eight channels of a pixel, and of its place in the list of windows.
const PIECE_BYTES: usize = 16;
const WINDOW_BYTES: usize = 4;
/// Threads of a block of a pass, and of the gradient of the weights.
const THREADS: u32 = 256;
const GRADIENT_THREADS: u32 = 384;
/// Pixels of the result in a stage, where there is room for so many, and stages that are there or on their way.
const PIXELS: usize = 256;
const DEPTH: usize = 4;

/// A pass of a convolution that `kernels/narrow.cu` takes.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Narrow {
    pass: ConvPass,
    /// What is convolved, and what comes out or, for the gradient of the weights, is multiplied with it: N, H, W, C.
    image: [usize; 4],
    result: [usize; 4],
    /// Rows and columns of the kernel.
    size: usize,
    stride: usize,
    /// Zeros above and to the left; fewer than none where the first are left out.
    corner: [i32; 2],
    /// Rows of the result in a stage, and images.
    band: usize,
    images: usize,
    depth: usize,
    shared_bytes: usize,
}

impl Narrow {
    /// For a pass of a convolution from images `x` to results `y`; none where it is left to others.
    pub fn new(pass: ConvPass, (x, dtype): ([usize; 4], DType), conv: Conv2d, y: [usize; 4]) -> Option<Self> {
        let Conv2d { kernel, stride, padding: Padding { top, left, .. }, dilation, groups } = conv;
        let plain = groups == 1 && dilation == [1, 1] && stride[0] == stride[1];
        let sized = kernel == [1, 1] || kernel == [3, 3] && stride[0] <= 2;
        let narrow = [x, y].iter().all(|image| image[3].is_multiple_of(SIDE) && image[3] <= CHANNELS_MAX);
        // What a kernel counts in 32 bits.
        let counted = [x, y].iter().all(|image| image.iter().product::<usize>() < 1 << 31);
        if !(plain && sized && narrow && counted && dtype == DType::Bf16) {
            return None;
        }
        let (size, corner) = (kernel[0], [top, left].map(|zeros| zeros as i32));
        let (image, result, corner) = match pass {
            ConvPass::GradInput if stride[0] != 1 => return None,
            ConvPass::GradInput => (y, x, corner.map(|zeros| size as i32 - 1 - zeros)),
            _ => (x, y, corner),
        };
        let cut = Self {
            pass,
            image,
            result,
            size,
            stride: stride[0],
            corner,
            band: 1,
            images: 1,
            depth: 1,
            shared_bytes: 0,
        };
        (1..=DEPTH).rev().find_map(|depth| Self { depth, ..cut.clone() }.cut())
    }

    /// With the largest stages that fit, made so that all are nearly as large.
    fn cut(self) -> Option<Self> {
        let [batch, rows, columns, _] = self.result;
        let of = |band: usize, images: usize| Self { band, images, ..self.clone() };
        let fits = |cut: &Self| cut.bytes() <= SHARED_MAX && (cut.band * cut.images == 1 || cut.pixels() <= PIXELS);
        let tallest =
            (1..=rows).take_while(|&band| band * columns <= PIXELS.max(columns) && fits(&of(band, 1))).last()?;
        let band = rows.div_ceil(rows.div_ceil(tallest));
        let most = if band == rows { batch.min(PIXELS) } else { 1 };
        let images = (1..=most).take_while(|&images| fits(&of(band, images))).last().unwrap_or(1);
        let cut = of(band, images);
        Some(Self { shared_bytes: cut.bytes().max(cut.sums_bytes()), ..cut })
    }

    /// Pixels of the result in a stage.
    fn pixels(&self) -> usize {
        self.images * self.band * self.result[2]
    }

    fn taps(&self) -> usize {
        self.size * self.size
    }

    /// Outputs that a block of a pass takes.
    fn slice(&self) -> usize {
        if self.image[3] > SIDE && self.result[3].is_multiple_of(2 * SIDE) { 2 * SIDE } else { SIDE }
    }

    /// Bytes of shared memory for stages, windows and weights.
    fn bytes(&self) -> usize {
        let plane = |pieces: usize| (pieces + 3) / 8 * 8 + 4;
        let step = if self.size == 1 { 1 } else { self.stride };
        let [under, across] = [self.band, self.result[2]].map(|count| (count - 1) * step + self.size);
        let (image, pixels) = (plane(self.images * under * across), self.pixels().next_multiple_of(16));
        let (slot, weights) = match self.pass {
            ConvPass::GradWeight => ((image + plane(pixels)) * 2, 0),
            ConvPass::Forward => (image * self.image[3] / 8, self.slice() * (self.taps() * self.image[3] / 8 + 1)),
            ConvPass::GradInput => (image * self.image[3] / 8, self.image[3] * (self.taps() * self.slice() / 8 + 1)),
        };
        pixels * WINDOW_BYTES + (weights + self.depth * slot) * PIECE_BYTES
    }

    /// Bytes of shared memory in which the warps of a block add up the gradient of the weights.
    fn sums_bytes(&self) -> usize {
        let parts = GRADIENT_THREADS as usize / 32 / self.size;
        if self.pass == ConvPass::GradWeight { parts * self.taps() * SIDE * SIDE * DType::F32.bytes() } else { 0 }
    }

    /// `NARROW_PARAMETERS` of the kernels.
    fn arguments(&self) -> impl Iterator<Item = Argument> {
        let ([batch, height, width, channels], [_, rows, columns, outputs]) = (self.image, self.result);
        let sizes = [batch, height, width, channels, rows, columns, outputs, self.stride].map(|size| size as i32);
        let stages = [self.band, self.images, self.depth].map(|size| size as i32);
        sizes.into_iter().chain(self.corner).chain(stages).map(Argument::Int)
    }

    /// Blocks for each of so many slices, so that all run at once and have as many stages each.
    fn blocks(&self, builder: &mut Builder<'_>, kernel: (&str, u32), slices: usize) -> Result<usize, CudaError> {
        let stages = self.result[0].div_ceil(self.images) * self.result[1].div_ceil(self.band);
        builder.blocks_with_shared(kernel.0, kernel.1, self.shared_bytes)?;
        let most = (builder.cuda().multiprocessors() / slices).max(1);
        Ok(stages.div_ceil(stages.div_ceil(most)))
    }

    /// Appends the forward pass from x to y, or the gradient of the image from dy to dx.
    pub fn pass(&self, builder: &mut Builder<'_>, [from, weight, to]: [Address; 3]) -> Result<(), CudaError> {
        let (slice, channels, turned) = (self.slice(), self.image[3], self.pass == ConvPass::GradInput);
        let kernel = match (self.size, channels, slice) {
            (3, SIDE, SIDE) => "narrow_pass_3_kept".to_owned(),
            (size, _, slice) => format!("narrow_pass_{size}_{slice}"),
        };
        let slices = self.result[3] / slice;
        let blocks = self.blocks(builder, (&kernel, THREADS), slices)?;
        let mut arguments: Vec<Argument> = [from, weight, to].map(Argument::from).into();
        arguments.push(i32::from(turned).into());
        arguments.extend(self.arguments());
        builder.launch_with_shared(&kernel, ([blocks, slices, 1], THREADS), self.shared_bytes, &arguments)
    }

    /// Appends the gradient of the weights.
    pub fn gradient(&self, builder: &mut Builder<'_>, [x, dy]: [Address; 2], dw: &Tensor<'_>) -> Result<(), CudaError> {
        let ([.., channels], [.., outputs], taps) = (self.image, self.result, self.taps());
        let kernel = format!("narrow_gradient_{}", self.size);
        let slices = channels / SIDE * (outputs / SIDE);
        let blocks = self.blocks(builder, (&kernel, GRADIENT_THREADS), slices)?;
        let partial = builder.scratch(slices * blocks * taps * SIDE * SIDE * DType::F32.bytes());
        let mut arguments: Vec<Argument> = [x, dy, partial].map(Argument::from).into();
        arguments.extend(self.arguments());
        let grid = ([blocks, slices, 1], GRADIENT_THREADS);
        builder.launch_with_shared(&kernel, grid, self.shared_bytes, &arguments)?;
        let sizes = [blocks, taps, channels, outputs, usize::from(dw.channels_last)];
        let mut arguments = vec![partial.into()];
        arguments.extend(sizes.map(|size| Argument::Int(size as i32)));
        arguments.push(dw.address.into());
        builder.launch("narrow_totals", [taps * SIDE * SIDE / 32, slices, 1], 256, &arguments)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSES: [ConvPass; 3] = [ConvPass::Forward, ConvPass::GradInput, ConvPass::GradWeight];

    fn narrow(pass: ConvPass, x: [usize; 4], outputs: usize, [kernel, stride, padding]: [usize; 3]) -> Option<Narrow> {
        let conv = Conv2d { stride: [stride; 2], padding: Padding::all(padding), ..Conv2d::square(kernel) };
        let [rows, columns] = conv.output([x[1], x[2]]).unwrap();
        Narrow::new(pass, (x, DType::Bf16), conv, [x[0], rows, columns, outputs])
    }

    #[test]
    fn a_pass_is_taken_where_it_is_faster() {
        let taken = |x, outputs, window| PASSES.map(|pass| narrow(pass, x, outputs, window).is_some());
        assert_eq!(taken([128, 32, 32, 16], 16, [3, 1, 1]), [true; 3], "resnet20");
        assert_eq!(taken([128, 16, 16, 32], 64, [3, 2, 1]), [true, false, true], "resnet20 between its parts");
        assert_eq!(taken([128, 32, 32, 16], 32, [1, 2, 0]), [true, false, true], "resnet20 beside them");
        assert_eq!(taken([128, 8, 8, 64], 128, [3, 1, 1]), [false; 3], "too many channels");
        assert_eq!(taken([128, 8, 8, 24], 16, [3, 1, 1]), [false; 3], "channels that are no multiple of 16");
        assert_eq!(taken([128, 8, 8, 16], 16, [5, 1, 2]), [false; 3], "a larger kernel");
        assert_eq!(taken([1, 4, 1 << 16, 16], 16, [3, 1, 1]), [false; 3], "rows that shared memory does not hold");
    }

    #[test]
    fn what_a_block_takes_fits_a_multiprocessor() {
        for (x, outputs, window) in [
            ([128, 32, 32, 16], 16, [3, 1, 1]),
            ([128, 8, 8, 64], 64, [3, 1, 1]),
            ([3, 33, 47, 48], 64, [3, 2, 1]),
            ([1, 7, 7, 16], 48, [1, 1, 0]),
        ] {
            for found in PASSES.into_iter().filter_map(|pass| narrow(pass, x, outputs, window)) {
                assert!(found.shared_bytes <= SHARED_MAX, "{found:?}");
                assert!(found.images == 1 || found.band == found.result[1], "{found:?}");
                assert!(found.band <= found.result[1] && found.images <= found.result[0], "{found:?}");
            }
        }
    }
}
