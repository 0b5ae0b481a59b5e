//! What a stage of a pipeline takes from the stages beside it and gives to them, on any device.

use super::Executor;
use crate::buffer::elements_mut;
use crate::device::cuda::CudaError;
use crate::dtype::DType;
use crate::graph::{Source, Value};

impl Executor {
    /// Has an input of `f32` numbers filled by `fill`, where it stands or, on a device whose memory the host does not reach, on the way
    /// there.
    ///
    /// # Errors
    /// Those of `fill`, and when a GPU does not answer.
    ///
    /// # Panics
    /// When `value` is not an input, or of another type.
    pub fn fill<E: From<CudaError>>(
        &mut self,
        value: Value,
        fill: impl FnOnce(&mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let info = self.plan.graph().info(value);
        assert!(matches!(info.source, Source::Input(_)), "`{}` is not an input", info.name);
        let length = info.shape.elements();
        if self.arena.is_empty() || info.dtype != DType::F32 {
            let mut numbers = vec![0.0; length];
            fill(&mut numbers)?;
            // What is no float travels as the same bits.
            let bits = || numbers.iter().map(|x| x.to_bits().cast_signed()).collect::<Vec<_>>();
            let written =
                if info.dtype == DType::I32 { self.write(value, &bits()) } else { self.write(value, &numbers) };
            return Ok(written?);
        }
        let start = self.offset(value).expect("there is an arena");
        fill(elements_mut::<f32>(&mut self.arena, start, length))
    }

    /// Shows `look` the numbers of an output, where they stand or a copy.
    ///
    /// # Errors
    /// Those of `look`, and when a GPU does not answer.
    ///
    /// # Panics
    /// When `value` is not a wanted output of the plan.
    pub fn look<E: From<CudaError>>(&self, value: Value, look: impl FnOnce(&[f32]) -> Result<(), E>) -> Result<(), E> {
        let is_float = self.plan.graph().dtype(value) == DType::F32;
        match if is_float { self.view::<f32>(value) } else { None } {
            Some(numbers) => look(numbers),
            None if self.plan.graph().dtype(value) == DType::I32 => {
                let bits = self.read::<i32>(value)?;
                look(&bits.into_iter().map(|x| f32::from_bits(x.cast_unsigned())).collect::<Vec<_>>())
            }
            None => look(&self.read::<f32>(value)?),
        }
    }
}
