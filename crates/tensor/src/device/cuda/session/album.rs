//! The images of a data set on the GPU, as bytes, and the kernel that looks at them.

use crate::buffer::bytes_of;
use crate::device::cuda::driver::Memory;
use crate::device::cuda::program::{BLOCK, suffix};
use crate::device::cuda::{Cuda, CudaError};
use crate::dtype::DType;

/// Images of one size.
#[derive(Debug)]
pub struct Album {
    pixels: Memory,
    /// 256 numbers for each channel: what a byte becomes. Then what a hole becomes, for each channel.
    numbers: Memory,
    count: usize,
    size: [usize; 3],
}

impl Album {
    /// Copies images, each height × width × channels bytes. `tables` says what a byte of each channel becomes, `hole` which byte stands for
    /// what is painted over.
    ///
    /// # Errors
    /// When there is no room, or the GPU does not answer.
    ///
    /// # Panics
    /// When there is not one table and one byte per channel.
    pub fn new(
        cuda: &Cuda,
        pixels: &[u8],
        size: [usize; 3],
        (tables, hole): (&[[f32; 256]], &[u8]),
    ) -> Result<Self, CudaError> {
        assert!(tables.len() == size[2] && hole.len() == size[2], "one table and one byte per channel");
        let _alone = cuda.enter()?;
        let mut numbers: Vec<f32> = tables.as_flattened().to_vec();
        numbers.extend(tables.iter().zip(hole).map(|(table, &byte)| table[usize::from(byte)]));
        let album = Self {
            pixels: Memory::zeroed(cuda.context(), pixels.len(), "the images")?,
            numbers: Memory::zeroed(cuda.context(), numbers.len() * size_of::<f32>(), "what pixels become")?,
            count: pixels.len() / size.iter().product::<usize>().max(1),
            size,
        };
        cuda.stream().upload(album.pixels.address(), pixels)?;
        cuda.stream().upload(album.numbers.address(), bytes_of(&numbers))?;
        Ok(album)
    }

    /// Height, width and channels.
    pub fn size(&self) -> [usize; 3] {
        self.size
    }

    /// Bytes that it holds on the GPU.
    pub fn bytes(&self) -> usize {
        self.pixels.bytes() + self.numbers.bytes()
    }

    pub(super) fn has(&self, sample: i32) -> bool {
        usize::try_from(sample).is_ok_and(|sample| sample < self.count)
    }

    /// Starts the kernel that writes `elements` numbers at `to`: those of the views, and zeros behind them.
    pub(super) fn look(
        &self,
        cuda: &Cuda,
        views: (u64, usize),
        (to, elements, dtype): (u64, usize, DType),
    ) -> Result<(), CudaError> {
        let [height, width, channels] = self.size.map(|length| length as u64);
        let (pixels, numbers) = (self.pixels.address(), self.numbers.address());
        let arguments = [pixels, numbers, views.0, views.1 as u64, to, elements as u64, height, width, channels];
        let blocks = elements.div_ceil(BLOCK as usize) as u32;
        cuda.stream().launch(cuda.function(&format!("look_{}", suffix(dtype)))?, [blocks, 1, 1], BLOCK, &arguments)
    }
}
