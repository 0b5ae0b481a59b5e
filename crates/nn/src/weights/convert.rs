//! The element types of weights files, as f32.

use safetensors::Dtype;

/// The elements as f32, or none for types that hold no weights. f64 is rounded; the others are exact.
pub fn to_f32(dtype: Dtype, bytes: &[u8]) -> Option<Vec<f32>> {
    let converted = match dtype {
        Dtype::F32 => each(bytes, f32::from_le_bytes),
        Dtype::F64 => each(bytes, |bytes| f64::from_le_bytes(bytes) as f32),
        Dtype::F16 => each(bytes, |bytes| from_f16(u16::from_le_bytes(bytes))),
        Dtype::BF16 => each(bytes, |bytes| f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)),
        _ => return None,
    };
    Some(converted)
}

fn each<const SIZE: usize>(bytes: &[u8], convert: impl Fn([u8; SIZE]) -> f32) -> Vec<f32> {
    bytes.as_chunks::<SIZE>().0.iter().map(|&element| convert(element)).collect()
}

/// 1 sign bit, 5 of exponent, 10 of fraction.
fn from_f16(half: u16) -> f32 {
    let sign = u32::from(half & 0x8000) << 16;
    let (exponent, fraction) = (u32::from(half >> 10) & 0x1f, u32::from(half & 0x3ff));
    let magnitude = match exponent {
        // Zero and the numbers below 2⁻¹⁴, which f32 can write with a leading one.
        0 => (fraction as f32 * (-24f32).exp2()).to_bits(),
        0x1f => 0x7f80_0000 | fraction << 13,
        _ => (exponent + 127 - 15) << 23 | fraction << 13,
    };
    f32::from_bits(sign | magnitude)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_have_the_values_of_the_standard() {
        let cases = [
            (0x0000, 0.0),
            (0x3c00, 1.0),
            (0xc000, -2.0),
            (0x7bff, 65504.0),
            (0x0400, 6.103_515_6e-5),
            (0x0001, 5.960_464_5e-8),
            (0x3555, 0.333_251_95),
            (0xfc00, f32::NEG_INFINITY),
        ];
        for (half, expected) in cases {
            assert_eq!(from_f16(half), expected, "{half:#06x}");
        }
        assert!(from_f16(0x7e00).is_nan());
        assert!(from_f16(0x8000).is_sign_negative());
    }

    #[test]
    fn every_float_type_is_read_and_others_are_refused() {
        assert_eq!(to_f32(Dtype::F32, &1.5f32.to_le_bytes()), Some(vec![1.5]));
        assert_eq!(to_f32(Dtype::F64, &1.5f64.to_le_bytes()), Some(vec![1.5]));
        assert_eq!(to_f32(Dtype::BF16, &[0xc0, 0x3f]), Some(vec![1.5]));
        assert_eq!(to_f32(Dtype::F16, &[0x00, 0x3e]), Some(vec![1.5]));
        assert_eq!(to_f32(Dtype::I64, &[0; 8]), None);
    }
}
