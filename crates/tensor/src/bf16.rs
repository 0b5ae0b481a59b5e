//! The upper half of an `f32`, as a number of its own.

/// Sixteen bits: sign, eight bits of exponent, seven of fraction. It stores; all arithmetic is done in `f32`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Bf16(u16);

impl Bf16 {
    /// The number with these bits.
    pub const fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    /// Its bits.
    pub const fn to_bits(self) -> u16 {
        self.0
    }

    /// The nearest number, ties to the even one, as the processors' own conversions round. What is not a number stays so.
    #[inline(always)]
    pub const fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        // Half of the last place that is kept, or a hair less where that place is even.
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        // The fraction of a NaN could lie in the lower half alone, or the sum overflow.
        let quiet = bits >> 16 | 0x40;
        Self(if value.is_nan() { quiet } else { rounded } as u16)
    }

    /// The same number, exactly.
    #[inline(always)]
    pub const fn to_f32(self) -> f32 {
        f32::from_bits((self.0 as u32) << 16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_survives_the_way_there_and_back() {
        for bits in 0..=u16::MAX {
            let number = Bf16::from_bits(bits);
            if !number.to_f32().is_nan() {
                assert_eq!(Bf16::from_f32(number.to_f32()), number);
            }
        }
    }

    #[test]
    fn rounding_is_to_the_nearest_and_ties_to_even() {
        let rounded = |value: f32| Bf16::from_f32(value).to_f32();
        assert_eq!(rounded(1.0 + 1.0 / 256.0), 1.0);
        assert_eq!(rounded(1.0 + 3.0 / 256.0), 1.0 + 4.0 / 256.0);
        assert_eq!(rounded(1.0 + 1.01 / 256.0), 1.0 + 2.0 / 256.0);
        assert_eq!(rounded(f32::MAX), f32::INFINITY);
        assert_eq!(rounded(f32::NEG_INFINITY), f32::NEG_INFINITY);
        assert!(rounded(f32::NAN).is_nan() && rounded(f32::from_bits(0x7f80_0001)).is_nan());
        assert!(rounded(f32::from_bits(0xffff_ffff)).is_nan());
    }
}
