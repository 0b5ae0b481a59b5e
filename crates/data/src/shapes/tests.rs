//! `shapes`: reproducible, balanced, beyond a linear model's reach.

use super::*;

#[test]
fn a_sample_is_a_function_of_seed_half_and_number() {
    let (train, val) = Shapes::open(2).unwrap();
    assert_eq!(train.pixels[5 * IMAGE..6 * IMAGE], draw(SEED, Split::Train, 5));
    assert_ne!(val.pixels[5 * IMAGE..6 * IMAGE], draw(SEED, Split::Train, 5));
    assert_ne!(draw(1, Split::Train, 5), draw(2, Split::Train, 5));
    assert!(Shapes::open(1).unwrap().0.pixels == train.pixels, "the number of threads changes nothing");
}

#[test]
fn every_machine_draws_the_same_images() {
    // FNV-1a over the first hundred images. Whoever changes the drawing changes this, and every accuracy ever reported.
    let hash = (0..100)
        .flat_map(|sample| draw(SEED, Split::Train, sample))
        .fold(0xCBF2_9CE4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3));
    assert_eq!(hash, GOLDEN, "{hash:#X}");
}

const GOLDEN: u64 = 0x14CE_6EE2_F7BD_3DF2;

#[test]
fn classes_are_exactly_balanced() {
    for (len, set) in [(TRAIN_LEN, Shapes::open(1).unwrap().0), (VAL_LEN, Shapes::open(1).unwrap().1)] {
        for class in 0..10 {
            assert_eq!((0..len).filter(|&sample| set.label(sample) == class).count(), len / 10);
        }
    }
}

#[test]
fn the_suggested_normalisation_is_that_of_the_training_half() {
    let (train, _) = Shapes::open(2).unwrap();
    for channel in 0..3 {
        let values = || train.pixels.iter().skip(channel).step_by(3).map(|&value| f64::from(value) / 255.0);
        let count = (TRAIN_LEN * SIDE * SIDE) as f64;
        let mean = values().sum::<f64>() / count;
        let std = (values().map(|value| (value - mean) * (value - mean)).sum::<f64>() / count).sqrt();
        assert!((mean - f64::from(train.info.mean[channel])).abs() < 1e-4, "channel {channel}: mean {mean}");
        assert!((std - f64::from(train.info.std[channel])).abs() < 1e-4, "channel {channel}: std {std}");
    }
}

/// Softmax regression on the normalised pixels, by plain stochastic gradient descent.
#[test]
fn a_linear_model_fails() {
    let (train, val) = Shapes::open(2).unwrap();
    let input = |set: &Shapes, sample: usize| -> Vec<f32> {
        set.pixels[sample * IMAGE..][..IMAGE].iter().map(|&value| (f32::from(value) / 255.0 - 0.5) / 0.27).collect()
    };
    let mut weights = vec![[0f32; 10]; IMAGE + 1];
    let logits = |weights: &[[f32; 10]], input: &[f32]| {
        let mut sums = weights[IMAGE];
        for (row, &value) in weights.iter().zip(input) {
            (0..10).for_each(|class| sums[class] += row[class] * value);
        }
        sums
    };
    for epoch in 0..5 {
        let mut order: Vec<usize> = (0..TRAIN_LEN).collect();
        Random::new(&[epoch]).shuffle(&mut order);
        for sample in order {
            let input = input(&train, sample);
            let sums = logits(&weights, &input);
            let greatest = sums.iter().copied().fold(f32::MIN, f32::max);
            let powers = sums.map(|sum| (sum - greatest).exp());
            let total: f32 = powers.iter().sum();
            let step: [f32; 10] = std::array::from_fn(|class| {
                let target = if class == label(sample) { 1.0 } else { 0.0 };
                2e-4 * (powers[class] / total - target)
            });
            for (row, value) in weights.iter_mut().zip(input.into_iter().chain([1.0])) {
                (0..10).for_each(|class| row[class] -= step[class] * value);
            }
        }
    }
    let accuracy = |set: &Shapes| {
        let right = |&sample: &usize| {
            let sums = logits(&weights, &input(set, sample));
            (0..10).max_by(|&a, &b| sums[a].total_cmp(&sums[b])) == Some(label(sample))
        };
        (0..set.info.len).filter(right).count() as f32 / set.info.len as f32
    };
    println!("linear model on shapes: train {:.3}, val {:.3}", accuracy(&train), accuracy(&val));
    assert!(accuracy(&train) > 0.12, "the model learned nothing at all: the test would prove nothing");
    assert!(accuracy(&val) < 0.6, "{}", accuracy(&val));
}
