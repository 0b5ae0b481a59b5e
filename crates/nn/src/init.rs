//! How parameters start: the rules of the frameworks whose models are rebuilt here.

use paceline_system::random::{Random, key_of_text};
use paceline_tensor::Shape;

/// How a parameter starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Every element the same.
    Constant(f32),
    /// Normal with deviation √(2/fan_out): ResNet's, VGG's and DenseNet's convolutions in torchvision.
    KaimingFanOut,
    /// Normal with deviation √(2/fan_in) (He et al., 2015).
    KaimingFanIn,
    /// Uniform within ±1/√fan_in: what PyTorch gives a layer nobody initialised, weight and bias alike.
    UniformFanIn {
        /// Inputs of the layer, since a bias does not show them.
        fan_in: usize,
    },
    /// Uniform within ±√(6/(fan_in+fan_out)): Keras' default for weights (Glorot and Bengio, 2010).
    GlorotUniform,
    /// Normal with this deviation.
    Normal(f32),
    /// Normal with this deviation, drawn again beyond two deviations.
    TruncatedNormal(f32),
    /// Uniform within ± this bound.
    Uniform(f32),
}

impl Init {
    /// Fills a parameter. Its stream is named by the seed and its name, so that a model with one layer more starts the
    /// other layers the same.
    pub fn fill(self, seed: u64, name: &str, shape: &Shape, target: &mut [f32]) {
        let mut random = Random::new(&[seed, key_of_text(name)]);
        let (fan_in, fan_out) = fans(shape);
        let mut draw =
            |sample: &mut dyn FnMut(&mut Random) -> f32| target.iter_mut().for_each(|x| *x = sample(&mut random));
        match self {
            Self::Constant(value) => target.fill(value),
            Self::KaimingFanOut => draw(&mut |random| random.normal() * (2.0 / fan_out as f32).sqrt()),
            Self::KaimingFanIn => draw(&mut |random| random.normal() * (2.0 / fan_in as f32).sqrt()),
            Self::UniformFanIn { fan_in } => {
                let bound = 1.0 / (fan_in as f32).sqrt();
                draw(&mut |random| random.range(-bound, bound));
            }
            Self::GlorotUniform => {
                let bound = (6.0 / (fan_in + fan_out) as f32).sqrt();
                draw(&mut |random| random.range(-bound, bound));
            }
            Self::Normal(deviation) => draw(&mut |random| random.normal() * deviation),
            Self::TruncatedNormal(deviation) => draw(&mut |random| truncated(random) * deviation),
            Self::Uniform(bound) => draw(&mut |random| random.range(-bound, bound)),
        }
    }
}

fn truncated(random: &mut Random) -> f32 {
    // A draw beyond two deviations has probability 0.046; 64 in a row do not happen.
    (0..64).map(|_| random.normal()).find(|draw| draw.abs() <= 2.0).unwrap_or(0.0)
}

/// Inputs and outputs of one unit. A convolution weight is `[KH,KW,I,O]`, a linear one `[O,I]`.
fn fans(shape: &Shape) -> (usize, usize) {
    match **shape {
        [height, width, input, output] => (height * width * input, height * width * output),
        [output, input] => (input, output),
        _ => (shape.elements(), shape.elements()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deviation(init: Init, shape: &Shape) -> f64 {
        let mut data = vec![0.0; shape.elements()];
        init.fill(1, "w", shape, &mut data);
        (data.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / data.len() as f64).sqrt()
    }

    #[test]
    fn deviations_are_those_of_the_rules() {
        let shape = Shape::from([3, 3, 64, 128]);
        let close = |init, expected: f64| {
            let found = deviation(init, &shape);
            assert!((found / expected - 1.0).abs() < 0.02, "{init:?}: {found} is not {expected}");
        };
        close(Init::KaimingFanOut, (2.0f64 / (9.0 * 128.0)).sqrt());
        close(Init::KaimingFanIn, (2.0f64 / (9.0 * 64.0)).sqrt());
        close(Init::UniformFanIn { fan_in: 576 }, 1.0 / (576.0f64 * 3.0).sqrt());
        close(Init::GlorotUniform, (2.0f64 / (9.0 * 192.0)).sqrt());
        close(Init::Normal(0.02), 0.02);
    }

    #[test]
    fn the_same_name_starts_the_same() {
        let shape = Shape::from([8, 8]);
        let fill = |seed, name| {
            let mut data = vec![0.0; 64];
            Init::GlorotUniform.fill(seed, name, &shape, &mut data);
            data
        };
        assert_eq!(fill(1, "a"), fill(1, "a"));
        assert_ne!(fill(1, "a"), fill(1, "b"));
        assert_ne!(fill(1, "a"), fill(2, "a"));
    }
}
