//! Random images with random classes, for benchmarks: nothing can be learned from them, and nothing has to be read.

use paceline_system::random;

use crate::dataset::{Info, SampleKind, Source, Split};
use crate::pixels::Pixels;
use crate::spec::{Shape, Spec};

/// Names the streams of this set.
const SYNTHETIC: u64 = 0x5359_4E54;

/// One half of a synthetic set. A sample is a pure function of its number and its half.
#[derive(Debug)]
pub struct Synthetic {
    info: Info,
}

impl Synthetic {
    /// Both halves; that for evaluation has a tenth of the samples.
    pub fn pair(shape: Shape) -> (Self, Self) {
        let half = |split, len| Self {
            info: Info {
                source: Source::Synthetic,
                name: Spec::Synthetic(shape).to_string(),
                split,
                len,
                kind: SampleKind::Image { height: shape.height, width: shape.width, channels: shape.channels },
                classes: shape.classes,
                class_names: (0..shape.classes).map(|class| class.to_string()).collect(),
                // Uniform bytes: mean 127.5 of 255, standard deviation √((256² − 1) ÷ 12) of 255.
                mean: vec![0.5; shape.channels],
                std: vec![0.289_81; shape.channels],
            },
        };
        (half(Split::Train, shape.count), half(Split::Val, shape.count.div_ceil(10)))
    }

    pub(crate) fn info(&self) -> &Info {
        &self.info
    }

    fn key(&self, sample: usize) -> u64 {
        assert!(sample < self.info.len, "sample {sample} of {}", self.info.len);
        random::key(&[SYNTHETIC, self.info.split as u64, sample as u64])
    }

    pub(crate) fn label(&self, sample: usize) -> i32 {
        (self.key(sample) % self.info.classes as u64) as i32
    }

    pub(crate) fn read(&self, sample: usize, image: &mut Pixels) -> i32 {
        let SampleKind::Image { height, width, channels } = self.info.kind else { unreachable!("images") };
        image.reshape(height, width, channels);
        let key = self.key(sample);
        for (at, bytes) in image.data.chunks_mut(8).enumerate() {
            bytes.copy_from_slice(&random::at(key, at as u64).to_le_bytes()[..bytes.len()]);
        }
        self.label(sample)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_a_function_of_its_number_and_half() {
        let shape = Shape { width: 5, height: 3, channels: 3, classes: 7, count: 100 };
        let (train, val) = Synthetic::pair(shape);
        assert_eq!((train.info().len, val.info().len), (100, 10));
        let read = |set: &Synthetic, sample| {
            let mut image = Pixels::default();
            (set.read(sample, &mut image), image)
        };
        assert_eq!(read(&train, 3), read(&train, 3));
        assert_ne!(read(&train, 3).1, read(&train, 4).1);
        assert_ne!(read(&train, 3).1, read(&val, 3).1);
        assert!((0..100).all(|sample| (0..7).contains(&read(&train, sample).0)));
        assert_eq!(read(&train, 9).0, train.label(9));
    }
}
