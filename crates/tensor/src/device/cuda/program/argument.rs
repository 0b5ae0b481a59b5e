//! What calls are made with: addresses, some of which are known only when all working memory is, and numbers.

/// An address on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::device::cuda) enum Address {
    /// Known.
    Fixed(u64),
    /// So many bytes into the working memory.
    Scratch(u64),
}

impl Address {
    /// So many bytes behind it.
    pub fn plus(self, bytes: usize) -> Self {
        match self {
            Self::Fixed(address) => Self::Fixed(address + bytes as u64),
            Self::Scratch(offset) => Self::Scratch(offset + bytes as u64),
        }
    }

    pub(super) fn complete(self, scratch: u64) -> u64 {
        match self {
            Self::Fixed(address) => address,
            Self::Scratch(offset) => scratch + offset,
        }
    }
}

/// An argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub(in crate::device::cuda) enum Argument {
    /// A pointer.
    Address(Address),
    /// A `long long`.
    Long(u64),
    /// An `int`.
    Int(i32),
    /// A `float`.
    Float(f32),
}

impl From<Address> for Argument {
    fn from(address: Address) -> Self {
        Self::Address(address)
    }
}

impl From<usize> for Argument {
    fn from(value: usize) -> Self {
        Self::Long(value as u64)
    }
}

impl From<i32> for Argument {
    fn from(value: i32) -> Self {
        Self::Int(value)
    }
}

impl From<f32> for Argument {
    fn from(value: f32) -> Self {
        Self::Float(value)
    }
}

impl Argument {
    pub(super) fn complete(self, scratch: u64) -> u64 {
        match self {
            Self::Address(address) => address.complete(scratch),
            Self::Long(value) => value,
            Self::Int(value) => u64::from(value as u32),
            Self::Float(value) => u64::from(value.to_bits()),
        }
    }
}
