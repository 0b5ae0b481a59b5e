//! Adding what came to what is there. The loops are plain and vectorised by the compiler: they run at the speed of memory.

use bytemuck::{cast_slice, cast_slice_mut};

/// What the elements of a buffer are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// 32-bit numbers.
    F32,
    /// The upper halves of 32-bit numbers. Sums are made in `f32` and rounded, to even, at each hop.
    Bf16,
    /// Bytes that are moved and never added.
    Byte,
}

impl Kind {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
            Self::Byte => 1,
        }
    }

    /// Adds `source` to `target`, both whole elements, aligned and of equal length.
    ///
    /// # Panics
    /// When they are not, or for bytes, which have no sum: bugs.
    pub fn add(self, target: &mut [u8], source: &[u8]) {
        match self {
            Self::F32 => add_f32(cast_slice_mut(target), cast_slice(source)),
            Self::Bf16 => add_bf16(cast_slice_mut(target), cast_slice(source)),
            Self::Byte => panic!("bytes have no sum"),
        }
    }
}

/// `target += source`.
pub fn add_f32(target: &mut [f32], source: &[f32]) {
    assert_eq!(target.len(), source.len(), "both sides of a sum have the same length");
    for (target, source) in target.iter_mut().zip(source) {
        *target += source;
    }
}

/// `target += source` on upper halves.
pub fn add_bf16(target: &mut [u16], source: &[u16]) {
    assert_eq!(target.len(), source.len(), "both sides of a sum have the same length");
    for (target, source) in target.iter_mut().zip(source) {
        *target = round_bf16(widen_bf16(*target) + widen_bf16(*source));
    }
}

/// The number whose upper half this is.
#[inline(always)]
pub const fn widen_bf16(half: u16) -> f32 {
    f32::from_bits((half as u32) << 16)
}

/// The nearest upper half, ties to the even one; what is not a number stays so.
#[inline(always)]
pub const fn round_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let quiet = bits >> 16 | 0x40;
    (if value.is_nan() { quiet } else { rounded }) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_halves_are_rounded_to_even() {
        let half = |value: f32| round_bf16(value);
        let mut target = [half(1.0), half(256.0), half(f32::NAN), half(f32::MAX)];
        add_bf16(&mut target, &[half(2.0), half(1.0), half(1.0), half(f32::MAX)]);
        assert_eq!(target[..2], [half(3.0), half(256.0)], "257 lies between 256 and 258");
        assert!(widen_bf16(target[2]).is_nan() && widen_bf16(target[3]).is_infinite());
    }
}
