//! The sizes of a tensor's dims, outermost first.

use std::fmt;
use std::ops::Deref;

use serde::{Deserialize, Serialize};

use crate::dtype::DType;

/// The sizes of a tensor's dims; the last one is contiguous in memory. A scalar has one dim of size 1.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Shape(Vec<usize>);

impl Shape {
    /// A shape from its sizes.
    pub fn new(dims: impl Into<Vec<usize>>) -> Self {
        Self(dims.into())
    }

    /// The shape of a single number.
    pub fn scalar() -> Self {
        Self(vec![1])
    }

    /// The number of elements.
    ///
    /// # Panics
    /// When they are more than this machine can address; operations refuse such shapes before anybody counts.
    pub fn elements(&self) -> usize {
        self.checked_elements().expect("a tensor has no more elements than this machine can address")
    }

    /// The number of elements, or none where a machine word cannot address as many of four bytes each.
    pub fn checked_elements(&self) -> Option<usize> {
        let product = self.0.iter().try_fold(1usize, |product, &size| product.checked_mul(size))?;
        (product <= isize::MAX as usize / DType::F32.bytes()).then_some(product)
    }

    /// Batch, height, width and channels, if there are four dims.
    pub fn nhwc(&self) -> Option<[usize; 4]> {
        self.0.as_slice().try_into().ok()
    }

    /// The size of the last dim.
    pub fn last(&self) -> usize {
        self.0.last().copied().unwrap_or(1)
    }

    /// Whether `other` repeats along this shape's leading dims.
    pub fn ends_with(&self, other: &Self) -> bool {
        self.0.ends_with(&other.0)
    }

    /// The same shape with another size for one dim.
    pub fn with(&self, dim: usize, size: usize) -> Self {
        let mut dims = self.0.clone();
        dims[dim] = size;
        Self(dims)
    }
}

impl Deref for Shape {
    type Target = [usize];

    fn deref(&self) -> &[usize] {
        &self.0
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        Self(dims.to_vec())
    }
}

impl From<&[usize]> for Shape {
    fn from(dims: &[usize]) -> Self {
        Self(dims.to_vec())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        write!(formatter, "{}", dims.join("×"))
    }
}
