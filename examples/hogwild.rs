//! Hogwild! where it is at home: sparse logistic regression by one thread and by two, on one buffer that
//! nobody locks: `cargo run --release --example hogwild [SAMPLES FEATURES EPOCHS]`
//!
//! A sample has 50 of a million features, so that two threads are rarely at the same one and hardly a change is
//! lost. Both make the same number of updates, one for each sample and epoch, with a rate that shrinks from
//! epoch to epoch.

use std::ops::Range;
use std::time::Instant;

use paceline::parallel::lock_free::LockFreeBuffer;
use paceline::system::random::Random;

/// Features that a sample has, of length one together.
const NONZEROS: usize = 50;
/// The share of labels that say the contrary.
const NOISE: f32 = 0.05;
const RATE: f32 = 4.0;
/// What becomes of the rate after every epoch.
const DECAY: f32 = 0.85;
/// Runs of each kind, in turns; the fastest counts.
const TURNS: usize = 9;

fn scale() -> f32 {
    (NONZEROS as f32).sqrt().recip()
}

/// Samples, each the numbers of its features, and −1 or 1.
struct Sparse {
    features: Vec<u32>,
    labels: Vec<f32>,
}

impl Sparse {
    /// So many samples that a hidden plane tells apart; the same seed gives the same.
    fn generate(samples: usize, features: usize, seed: u64) -> Self {
        let mut random = Random::new(&[seed]);
        let hidden: Vec<f32> = (0..features).map(|_| random.normal()).collect();
        let (mut numbers, mut labels) = (Vec::with_capacity(samples * NONZEROS), Vec::with_capacity(samples));
        for _ in 0..samples {
            let mut dot = 0.0;
            for _ in 0..NONZEROS {
                // Some features are more frequent than others, as words are.
                let feature = ((features as f32 * random.uniform() * random.uniform()) as usize).min(features - 1);
                dot += hidden[feature];
                numbers.push(feature as u32);
            }
            let label = if dot > 0.0 { 1.0 } else { -1.0 };
            labels.push(if random.chance(NOISE) { -label } else { label });
        }
        Self { features: numbers, labels }
    }

    fn sample(&self, index: usize) -> (&[u32], f32) {
        (&self.features[index * NONZEROS..][..NONZEROS], self.labels[index])
    }

    /// The mean loss of some samples, and the share of right answers.
    fn evaluate(&self, weights: &LockFreeBuffer, samples: Range<usize>) -> (f64, f64) {
        let count = samples.len() as f64;
        let margins = samples.map(|index| margin(weights, self.sample(index)));
        let (loss, right) = margins.fold((0.0, 0), |(loss, right), margin| {
            (loss + f64::from((-margin).exp()).ln_1p(), right + usize::from(margin > 0.0))
        });
        (loss / count, right as f64 / count)
    }
}

/// How far a sample is on the right side.
fn margin(weights: &LockFreeBuffer, (features, label): (&[u32], f32)) -> f32 {
    label * scale() * features.iter().map(|&feature| weights.load(feature as usize)).sum::<f32>()
}

/// One update.
fn step(weights: &LockFreeBuffer, sample: (&[u32], f32), rate: f32) {
    let change = rate * scale() * sample.1 / (1.0 + margin(weights, sample).exp());
    sample.0.iter().for_each(|&feature| weights.add(feature as usize, change));
}

/// What is trained on: the first so many samples, in so many epochs.
#[derive(Clone, Copy)]
struct Length {
    samples: usize,
    epochs: usize,
}

/// Trains weights of zero by so many threads, each with its share of every epoch; the seconds that it took.
fn train(data: &Sparse, weights: &LockFreeBuffer, threads: usize, Length { samples, epochs }: Length) -> f64 {
    let start = Instant::now();
    let mut rate = RATE;
    for epoch in 0..epochs {
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let share = thread * samples / threads..(thread + 1) * samples / threads;
                scope.spawn(move || {
                    // Another beginning in every epoch.
                    let shift = epoch * samples / epochs;
                    share.for_each(|index| step(weights, data.sample((index + shift) % samples), rate));
                });
            }
        });
        rate *= DECAY;
    }
    start.elapsed().as_secs_f64()
}

fn main() {
    let mut numbers = std::env::args().skip(1).map_while(|word| word.parse().ok());
    let mut next = |usual: usize| numbers.next().unwrap_or(usual).max(1);
    let (samples, features, epochs) = (next(200_000), next(1_000_000), next(10));
    // A tenth more, to see what was learnt of samples that were not trained on.
    let unseen = samples..samples + samples.div_ceil(10);
    let data = Sparse::generate(unseen.end, features, 1);
    println!(
        "{samples} samples with {NONZEROS} of {features} features each, {epochs} epochs: {} updates",
        samples * epochs
    );
    let mut fastest = [f64::INFINITY; 2];
    let mut found = [(0.0, 0.0); 2];
    for _ in 0..TURNS {
        for threads in [1, 2] {
            let weights = LockFreeBuffer::new(&vec![0.0; features]);
            let seconds = train(&data, &weights, threads, Length { samples, epochs });
            fastest[threads - 1] = fastest[threads - 1].min(seconds);
            found[threads - 1] = (data.evaluate(&weights, 0..samples).0, data.evaluate(&weights, unseen.clone()).1);
        }
    }
    for threads in [1, 2] {
        let ((loss, right), seconds) = (found[threads - 1], fastest[threads - 1]);
        println!("threads {threads}: {seconds:.3} s, loss {loss:.4}, {:.1}% of unseen samples right", 100.0 * right);
    }
    println!("two threads are {:.2} times as fast as one", fastest[0] / fastest[1]);
}
