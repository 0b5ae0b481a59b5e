//! What the GPU can do at best, measured: a large product for arithmetic, a large copy for memory.

use super::driver::{Event, Memory};
use super::product::{Matrix, Multiply, Product};
use super::program::Address;
use super::{Cuda, CudaError};
use crate::device::cpu::peak::Peak;
use crate::dtype::DType;

/// Rows and columns of the product.
const SIDE: usize = 8192;
/// Bytes that are copied.
const COPIED: usize = 2 << 30;
const REPEATS: usize = 5;

impl Cuda {
    /// Measures arithmetic in f32 and bf16, and bytes read plus bytes written by a copy.
    ///
    /// # Errors
    /// When the GPU does not have four gigabytes free, or does not answer.
    pub fn peak(&self) -> Result<Peak, CudaError> {
        let _alone = self.enter()?;
        let copied = [(); 2].map(|()| Memory::zeroed(self.context(), COPIED, "measuring its speed"));
        let [from, to] = copied;
        let (from, to) = (from?, to?);
        self.fill_with_noise(from.address(), COPIED, DType::F32)?;
        let seconds = self.time(|| self.stream().copy(to.address(), from.address(), COPIED))?;
        let bytes = 2.0 * COPIED as f64 / seconds;
        let rate = |dtype: DType| {
            let matrix_bytes = SIDE * SIDE * dtype.bytes();
            self.fill_with_noise(from.address(), 2 * matrix_bytes, dtype)?;
            let matrix = |offset: usize| Matrix {
                address: Address::Fixed(from.address() + offset as u64),
                dtype,
                stride: SIDE,
                trans: false,
            };
            let how = Multiply {
                m: SIDE,
                n: SIDE,
                k: SIDE,
                a: matrix(0),
                b: matrix(matrix_bytes),
                c: Address::Fixed(to.address()),
                c_dtype: dtype,
                c_stride: SIDE,
                bias: None,
                relu: false,
                accumulate: false,
                batch: 1,
                batch_strides: [0; 3],
            };
            let product = Product::new(self.blas(), how, self.options().tf32)?;
            let workspace = Memory::zeroed(self.context(), product.workspace_bytes(), "a product")?;
            let product = product.with_workspace(Address::Fixed(workspace.address()));
            let seconds = self.time(|| product.start(self.blas(), self.stream(), 0))?;
            Ok::<f64, CudaError>(2.0 * (SIDE as f64).powi(3) / seconds)
        };
        Ok(Peak { f32_flops: rate(DType::F32)?, bf16_flops: Some(rate(DType::Bf16)?), bytes })
    }

    /// The least seconds of one run, of several after one that is not timed.
    fn time(&self, run: impl Fn() -> Result<(), CudaError>) -> Result<f64, CudaError> {
        let (begin, end) = (Event::new(self.context())?, Event::new(self.context())?);
        let mut least = f64::INFINITY;
        for repeat in 0..=REPEATS {
            begin.record(self.stream())?;
            run()?;
            end.record(self.stream())?;
            let seconds = end.seconds_since(&begin)?;
            if repeat > 0 {
                least = least.min(seconds);
            }
        }
        Ok(least)
    }
}
