//! Messages are the values themselves.

use super::{Codec, Message, Number, Round, Span, Squeeze};

/// What the command line offers.
#[derive(Debug)]
pub struct None;

/// The same.
pub const SQUEEZE: None = None;

impl Squeeze for None {
    fn name(&self) -> &'static str {
        "none"
    }

    fn about(&self) -> &'static str {
        "32-bit numbers, as they are"
    }

    fn codec(&self) -> Box<dyn Codec> {
        Box::new(Self)
    }
}

impl Codec for None {
    fn rounds(&self) -> &'static [Round] {
        &[Round::Sum(Number::F32)]
    }

    fn is_identity(&self) -> bool {
        true
    }

    fn bytes_max(&self, elements: usize) -> usize {
        elements * Number::F32.bytes()
    }

    fn encode(&mut self, _: &Span<'_>, _: &[f32], _: (&mut Message, usize)) {}

    fn decode(&mut self, _: &Span<'_>, _: (&Message, usize), _: &mut [f32]) {}
}
