//! Convolutions of few channels, multiples of 16, by kernels of our own (`kernels/narrow.cu`): cuDNN's take several times as long as their
//! bytes where tensors are small. The gradient of the image at stride 1 is a forward pass with the kernel turned.

use super::super::CudaError;
use super::super::program::{Address, Argument, Builder, SHARED_MAX, Tensor};
use crate::device::cpu::conv::ConvPass;
use crate::dtype::DType;
use crate::window::{Conv2d, Padding};

/// More channels of images and results, and more products of a tap, are left to cuDNN. Measured on an H200, in µs: weights' gradients of
/// 2^24 and 2^25 products take 6.1 to 11.3 against 13.8 to 34.8 of cuDNN (2^25: 10.7 : 34.8 from 16 to 16 channels, 10.9 : 17.5 from 64 to
/// 64), of 2^32 products 687 : 128.
const CHANNELS_MAX: usize = 64;
const PRODUCTS_MAX: usize = 1 << 26;
/// Channels that a matrix unit multiplies at a time, and outputs.
const SIDE: usize = 16;
/// Bytes of eight channels of a pixel, and of its place in the list of windows.
const PIECE_BYTES: usize = 16;
const WINDOW_BYTES: usize = 4;
/// Threads of a block of a pass, and of the gradient of the weights.
const THREADS: u32 = 256;
const GRADIENT_THREADS: u32 = 384;
/// Pixels of the result in a stage of a pass, over all of its slices, and in one of the gradient of weights of 3×3, where there is room for
/// so many: within 1% of the fastest of 64 to 512 in all layers of resnet20.
const PIXELS: usize = 256;
const GRADIENT_PIXELS: usize = 512;
/// Stages that are there or on their way. More gained less than 1%.
const DEPTH: usize = 2;

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
    shared_bytes: usize,
}

impl Narrow {
    /// For a pass of a convolution from images `x` to results `y`; none where it is left to others.
    pub fn new(pass: ConvPass, (x, dtype): ([usize; 4], DType), conv: Conv2d, y: [usize; 4]) -> Option<Self> {
        let Conv2d { kernel, stride, padding: Padding { top, left, .. }, dilation, groups } = conv;
        let plain = groups == 1 && dilation == [1, 1] && stride[0] == stride[1];
        let narrow = [x, y].iter().all(|image| image[3].is_multiple_of(SIDE) && image[3] <= CHANNELS_MAX);
        let small = x[3] * y.iter().product::<usize>() <= PRODUCTS_MAX;
        // What a kernel counts in 32 bits.
        let counted = x.iter().product::<usize>() < 1 << 31;
        if !(plain && narrow && small && counted && dtype == DType::Bf16) {
            return None;
        }
        if !faster(pass, kernel, stride[0], [x[3], y[3]]) {
            return None;
        }
        let (size, corner) = (kernel[0], [top, left].map(|zeros| zeros as i32));
        let (image, result, corner) = match pass {
            ConvPass::GradInput => (y, x, corner.map(|zeros| size as i32 - 1 - zeros)),
            _ => (x, y, corner),
        };
        Self { pass, image, result, size, stride: stride[0], corner, band: 1, images: 1, shared_bytes: 0 }.cut()
    }

    /// With the largest stages that fit, made so that all are nearly as large.
    fn cut(self) -> Option<Self> {
        let [batch, rows, _, outputs] = self.result;
        let pixels = match (self.pass, self.size) {
            (ConvPass::GradWeight, 1) => PIXELS,
            (ConvPass::GradWeight, _) => GRADIENT_PIXELS,
            _ => PIXELS / (outputs / self.slice()),
        };
        let of = |band: usize, images: usize| Self { band, images, ..self.clone() };
        let fits = |cut: &Self| cut.bytes() <= SHARED_MAX && (cut.band * cut.images == 1 || cut.pixels() <= pixels);
        let tallest = (1..=rows).take_while(|&band| fits(&of(band, 1))).last()?;
        let band = rows.div_ceil(rows.div_ceil(tallest));
        let most = if band == rows { batch.min(pixels) } else { 1 };
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
        self.result[3].min(2 * SIDE)
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
        pixels * WINDOW_BYTES + (weights + DEPTH * slot) * PIECE_BYTES
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
        let stages = [self.band, self.images].map(|size| size as i32);
        sizes.into_iter().chain(self.corner).chain(stages).map(Argument::Int)
    }

    /// Blocks for each of so many slices, so that all run at once, so many on a multiprocessor, and have as many stages each.
    fn blocks(
        &self,
        builder: &mut Builder<'_>,
        (kernel, threads): (&str, u32),
        slices: usize,
        each: usize,
    ) -> Result<usize, CudaError> {
        let stages = self.result[0].div_ceil(self.images) * self.result[1].div_ceil(self.band);
        let at_once = builder.blocks_with_shared(kernel, threads, self.shared_bytes)?;
        let most = (at_once.min(each * builder.cuda().multiprocessors()) / slices).max(1);
        Ok(stages.div_ceil(stages.div_ceil(most)))
    }

    /// Appends the forward pass from x to y, or the gradient of the image from dy to dx.
    pub fn pass(&self, builder: &mut Builder<'_>, [from, weight, to]: [Address; 3]) -> Result<(), CudaError> {
        let (slice, turned) = (self.slice(), self.pass == ConvPass::GradInput);
        let kernel = format!("narrow_pass_{}_{slice}", self.size);
        let slices = self.result[3] / slice;
        let blocks = self.blocks(builder, (&kernel, THREADS), slices, 2)?;
        let mut arguments: Vec<Argument> = [from, weight, to].map(Argument::from).into();
        arguments.push(i32::from(turned).into());
        arguments.extend(self.arguments());
        builder.launch_with_shared(&kernel, ([blocks, slices, 1], THREADS), self.shared_bytes, &arguments)?;
        builder.allow_early(&kernel);
        Ok(())
    }

    /// Appends the gradient of the weights.
    pub fn gradient(&self, builder: &mut Builder<'_>, [x, dy]: [Address; 2], dw: &Tensor<'_>) -> Result<(), CudaError> {
        let ([.., channels], [.., outputs], taps) = (self.image, self.result, self.taps());
        let kernel = format!("narrow_gradient_{}", self.size);
        let slices = channels / SIDE * (outputs / SIDE);
        // The sums of more blocks take longer to add up than they gain; with two slices alone they gained 3% and more.
        let each = if slices == 2 { 2 } else { 1 };
        let blocks = self.blocks(builder, (&kernel, GRADIENT_THREADS), slices, each)?;
        let partial = builder.scratch(slices * blocks * taps * SIDE * SIDE * DType::F32.bytes());
        let mut arguments: Vec<Argument> = [x, dy, partial].map(Argument::from).into();
        arguments.extend(self.arguments());
        let grid = ([blocks, slices, 1], GRADIENT_THREADS);
        builder.launch_with_shared(&kernel, grid, self.shared_bytes, &arguments)?;
        builder.allow_early(&kernel);
        let sizes = [blocks, taps, channels, outputs, usize::from(dw.channels_last)];
        let mut arguments = vec![partial.into()];
        arguments.extend(sizes.map(|size| Argument::Int(size as i32)));
        arguments.push(dw.address.into());
        builder.launch("narrow_totals", [taps * SIDE * SIDE / 32, slices, 1], 256, &arguments)?;
        builder.allow_early("narrow_totals");
        Ok(())
    }
}

/// Whether a pass of few products was measured to be clearly faster than cuDNN's. In µs, by layers of resnet20 with a batch of 128: passes by
/// 3×3 from 16 to 16 channels 7.1 : 20.2 and back 7.2 : 19.1, from 16 to 32 at stride 2 5.9 : 7.1; by 1×1 at stride 2 3.8 : 4.9 and 3.3 : 6.4.
/// By 3×3 from 32 to 32 6.8 : 7.0 and back 6.8 : 7.2, from 64 to 64 6.8 : 6.5 and back 7.0 : 6.1, from 32 to 64 at stride 2 6.3 : 5.6.
fn faster(pass: ConvPass, kernel: [usize; 2], stride: usize, channels: [usize; 2]) -> bool {
    use ConvPass::{Forward, GradInput, GradWeight};
    matches!(
        (pass, kernel, stride, channels),
        (GradWeight, [1, 1], ..)
            | (GradWeight, [3, 3], 1 | 2, _)
            | (Forward | GradInput, [3, 3], 1, [16, 16])
            | (Forward, [3, 3], 2, [16, 32])
            | (Forward, [1, 1], 2, [16, 32] | [32, 64])
    )
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
        assert_eq!(taken([128, 32, 32, 16], 16, [3, 1, 1]), [true; 3], "resnet20's first part");
        assert_eq!(taken([128, 32, 32, 16], 32, [3, 2, 1]), [true, false, true], "to its second");
        assert_eq!(taken([128, 32, 32, 16], 32, [1, 2, 0]), [true, false, true], "beside that");
        assert_eq!(taken([128, 16, 16, 32], 32, [3, 1, 1]), [false, false, true], "its second part");
        assert_eq!(taken([128, 16, 16, 32], 64, [3, 2, 1]), [false, false, true], "to its third");
        assert_eq!(taken([128, 16, 16, 32], 64, [1, 2, 0]), [true, false, true], "beside that");
        assert_eq!(taken([128, 8, 8, 64], 64, [3, 1, 1]), [false, false, true], "its third part");
        assert_eq!(taken([256, 32, 32, 16], 16, [3, 1, 1]), [true; 3], "as many products as are taken");
        assert_eq!(taken([257, 32, 32, 16], 16, [3, 1, 1]), [false; 3], "more");
        assert_eq!(taken([256, 56, 56, 64], 64, [3, 1, 1]), [false; 3], "resnet50");
        assert_eq!(taken([128, 8, 8, 64], 128, [3, 1, 1]), [false; 3], "too many channels");
        assert_eq!(taken([128, 8, 8, 24], 16, [3, 1, 1]), [false; 3], "channels that are no multiple of 16");
        assert_eq!(taken([128, 8, 8, 16], 16, [5, 1, 2]), [false; 3], "a larger kernel");
        assert_eq!(taken([1, 4, 1 << 16, 16], 16, [3, 1, 1]), [false; 3], "rows that shared memory does not hold");
    }

    #[test]
    fn stages_are_those_that_were_measured() {
        let stage = |pass, x, outputs, window| {
            let found = narrow(pass, x, outputs, window).unwrap();
            [found.band, found.images, found.shared_bytes]
        };
        let [forward, input, weight] = PASSES;
        assert_eq!(stage(forward, [128, 32, 32, 16], 16, [3, 1, 1]), [8, 1, 27648]);
        assert_eq!(stage(input, [128, 32, 32, 16], 16, [3, 1, 1]), [8, 1, 27648]);
        assert_eq!(stage(forward, [128, 32, 32, 16], 32, [3, 2, 1]), [16, 1, 80640]);
        assert_eq!(stage(forward, [128, 32, 32, 16], 32, [1, 2, 0]), [16, 1, 19200]);
        assert_eq!(stage(forward, [128, 16, 16, 32], 64, [1, 2, 0]), [8, 2, 19968]);
        assert_eq!(stage(weight, [128, 32, 32, 16], 16, [3, 1, 1]), [16, 1, 74240]);
        assert_eq!(stage(weight, [128, 32, 32, 16], 32, [3, 2, 1])[..2], [16, 1]);
        assert_eq!(stage(weight, [128, 16, 16, 32], 32, [3, 1, 1])[..2], [16, 2]);
        assert_eq!(stage(weight, [128, 8, 8, 64], 64, [3, 1, 1])[..2], [8, 8]);
        assert_eq!(stage(weight, [128, 32, 32, 16], 32, [1, 2, 0])[..2], [16, 1]);
    }

    #[test]
    fn what_a_block_takes_fits_a_multiprocessor() {
        for (x, outputs, window, taken) in [
            ([2, 400, 300, 16], 16, [3, 1, 1], [true; 3]),
            ([3, 133, 447, 16], 32, [3, 2, 1], [true, false, false]),
            ([3, 33, 47, 48], 64, [3, 2, 1], [false, false, true]),
            ([300, 1, 1, 32], 64, [1, 2, 0], [true, false, true]),
            ([1, 7, 7, 16], 48, [1, 1, 0], [false, false, true]),
        ] {
            let found = PASSES.map(|pass| narrow(pass, x, outputs, window));
            assert_eq!(found.each_ref().map(Option::is_some), taken, "{x:?} to {outputs}");
            for found in found.into_iter().flatten() {
                assert!(found.shared_bytes <= SHARED_MAX, "{found:?}");
                assert!(found.images == 1 || found.band == found.result[1], "{found:?}");
                assert!(found.band <= found.result[1] && found.images <= found.result[0], "{found:?}");
            }
        }
    }
}
