//! The upper halves of the values, rounded to the nearest: half of the bytes, 8 bits of precision and the
//! same range.
//!
//! Sums are made in 32 bits and rounded again at each hop. Per element 2 bytes travel where 4 did; encoding
//! and decoding are one pass over memory each.

use paceline_comm::reduce::{round_bf16, widen_bf16};

use super::{Codec, Message, Number, Round, Span, Squeeze};

/// What the command line offers.
#[derive(Debug)]
pub struct Bf16;

/// The same.
pub const SQUEEZE: Bf16 = Bf16;

impl Squeeze for Bf16 {
    fn name(&self) -> &'static str {
        "bf16"
    }

    fn about(&self) -> &'static str {
        "16-bit upper halves: half the bytes, sums rounded to 8 bits"
    }

    fn codec(&self) -> Box<dyn Codec> {
        Box::new(Self)
    }
}

impl Codec for Bf16 {
    fn rounds(&self) -> &'static [Round] {
        &[Round::Sum(Number::Bf16)]
    }

    fn bytes_max(&self, elements: usize) -> usize {
        elements * Number::Bf16.bytes()
    }

    fn encode(&mut self, _: &Span<'_>, values: &[f32], (message, start): (&mut Message, usize)) {
        let halves = message.halves_mut(start..start + values.len());
        halves.iter_mut().zip(values).for_each(|(half, &value)| *half = round_bf16(value));
    }

    fn decode(&mut self, _: &Span<'_>, (message, start): (&Message, usize), values: &mut [f32]) {
        let halves = message.halves(start..start + values.len());
        values.iter_mut().zip(halves).for_each(|(value, &half)| *value = widen_bf16(half));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_comes_back_within_half_a_step_of_its_precision() {
        let values: Vec<f32> = (0..1000).map(|index| (index as f32 - 500.0) * 0.37).collect();
        let (mut codec, mut message, mut back) = (Bf16, Message::default(), vec![0.0; values.len()]);
        let span = Span { round: 0, bucket: None, range: 0..values.len(), segments: &[] };
        message.reserve(codec.bytes_max(values.len()));
        codec.encode(&span, &values, (&mut message, 0));
        codec.decode(&span, (&message, 0), &mut back);
        for (value, back) in values.iter().zip(&back) {
            assert!((value - back).abs() <= value.abs() / 256.0, "{value} came back as {back}");
        }
        assert_eq!(codec.bytes_max(values.len()), 2 * values.len());
    }
}
