//! Samples in memory: vectors that a program has, and nothing else.

use super::{OwnData, Sample, Samples};
use crate::dataset::SampleKind;

/// Images side by side, with their classes. A vector that is too short or too long gives its first wrong sample as it is, which is
/// refused by its number.
struct Stack<T> {
    /// Values of one image.
    each: usize,
    values: Vec<T>,
    labels: Vec<usize>,
}

impl<T> Stack<T> {
    fn slice(&self, index: usize) -> &[T] {
        let from = (index * self.each).min(self.values.len());
        // The last one shows what is left over.
        let to = if index + 1 == self.labels.len() { self.values.len() } else { from + self.each };
        &self.values[from..to.min(self.values.len())]
    }

    fn bytes(&self) -> usize {
        size_of_val(self.values.as_slice()) + size_of_val(self.labels.as_slice())
    }
}

impl Samples for Stack<u8> {
    fn len(&self) -> usize {
        self.labels.len()
    }

    fn sample(&self, index: usize) -> Sample<'_> {
        Sample::Image { pixels: self.slice(index).into(), label: self.labels[index] }
    }

    fn held_bytes(&self) -> usize {
        self.bytes()
    }
}

impl Samples for Stack<f32> {
    fn len(&self) -> usize {
        self.labels.len()
    }

    fn sample(&self, index: usize) -> Sample<'_> {
        Sample::Values { values: self.slice(index).into(), label: self.labels[index] }
    }

    fn held_bytes(&self) -> usize {
        self.bytes()
    }
}

/// A stream of tokens, in windows that do not overlap.
struct Stream {
    sequence: usize,
    tokens: Vec<i32>,
}

impl Samples for Stream {
    fn len(&self) -> usize {
        self.tokens.len().saturating_sub(1) / self.sequence.max(1)
    }

    fn sample(&self, index: usize) -> Sample<'_> {
        let (from, to) = (index * self.sequence, (index + 1) * self.sequence);
        Sample::Tokens { tokens: self.tokens[from..to].into(), targets: self.tokens[from + 1..=to].into() }
    }

    fn held_bytes(&self) -> usize {
        size_of_val(self.tokens.as_slice())
    }
}

impl OwnData {
    /// Images of bytes, of one size (height, width, channels): all pixels of all images one after the other, and a class for each image,
    /// for training and for evaluation.
    pub fn images(shape: [usize; 3], train: (Vec<u8>, Vec<usize>), val: (Vec<u8>, Vec<usize>)) -> Self {
        Self::stacks(shape, train, val)
    }

    /// The same in numbers; a vector of n features has the shape `[1, n, 1]`.
    pub fn values(shape: [usize; 3], train: (Vec<f32>, Vec<usize>), val: (Vec<f32>, Vec<usize>)) -> Self {
        Self::stacks(shape, train, val)
    }

    /// Two streams of tokens below `vocabulary`, in windows of `sequence` tokens; what is to be answered at each is the token that follows.
    pub fn tokens(sequence: usize, vocabulary: usize, train: Vec<i32>, val: Vec<i32>) -> Self {
        let [train, val] = [train, val].map(|tokens| Stream { sequence, tokens });
        Self::new(SampleKind::Tokens { sequence }, vocabulary, train, val)
    }

    fn stacks<T>([height, width, channels]: [usize; 3], train: (Vec<T>, Vec<usize>), val: (Vec<T>, Vec<usize>)) -> Self
    where
        Stack<T>: Samples + 'static,
    {
        let each = height * width * channels;
        let classes = train.1.iter().chain(&val.1).max().map_or(0, |most| most + 1);
        let [train, val] = [train, val].map(|(values, labels)| Stack { each, values, labels });
        Self::new(SampleKind::Image { height, width, channels }, classes, train, val)
    }
}
