//! Convolutions by tiles against direct sums: training takes the same course.

use std::sync::Arc;

use paceline_data::batch::Batch;
use paceline_nn::optim::{HyperParameters, Moment, Optimizer};
use paceline_nn::{Input, zoo};
use paceline_system::clock::Clock;
use paceline_system::random::Random;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::{MemoryUse, Precision};
use paceline_train::engine::StepOutput;
use paceline_train::phases::Phases;
use paceline_train::replica::{Replica, ReplicaOptions};

const SIZE: usize = 16;
const BATCH: usize = 16;
const STEPS: u64 = 30;

/// Images of which each class has a colour of its own, in noise.
fn batch() -> Batch {
    let mut random = Random::new(&[1]);
    let targets: Vec<i32> = (0..BATCH).map(|_| random.below(10) as i32).collect();
    let images = targets.iter().flat_map(|&class| vec![class as f32 / 5.0 - 1.0; SIZE * SIZE * 3]).collect::<Vec<_>>();
    let images = images.into_iter().map(|mean| mean + random.normal()).collect();
    Batch { size: BATCH, images, targets, ..Batch::default() }
}

/// The losses of some steps of resnet20 on one batch, with the last candidate for every convolution or with the first, which is the direct sum.
fn losses(precision: Precision, tiles: bool) -> Vec<f64> {
    let rule = Optimizer::Momentum.rule(&HyperParameters::default()).unwrap();
    let (input, classes, micro_batch) = (Input::Image { size: [SIZE; 2], channels: 3 }, 10, BATCH);
    let (accumulate, smoothing, seed, clip_norm) = (1, 0.0, 3, None);
    let memory = MemoryUse::Normal;
    let options = ReplicaOptions {
        input,
        classes,
        micro_batch,
        other_sizes: Default::default(),
        accumulate,
        smoothing,
        seed,
        rule,
        precision,
        memory,
        clip_norm,
        sync_batch_norm: false,
        overlap: true,
        hosted: false,
        separate_gradients: false,
        slots: 0,
        shard: None,
    };
    let cpu = Arc::new(Cpu::new(2));
    let mut replica = Replica::new(zoo::find("resnet20").unwrap(), options, &cpu).unwrap();
    cpu.hold_to(replica.plan(), |candidates| {
        let taken = if tiles { candidates.last() } else { candidates.first() };
        *taken.expect("a convolution has an algorithm")
    });
    let (clock, batch) = (Clock::real(), batch());
    (0..STEPS)
        .map(|step| {
            let moment = Moment { step, learning_rate: 0.005 };
            let StepOutput { tally, updated } = replica.step(&batch, moment, &mut Phases::start(&clock)).unwrap();
            updated.unwrap();
            tally.mean_loss()
        })
        .collect()
}

#[test]
fn the_curve_is_that_of_direct_sums() {
    for (precision, tolerance) in [(Precision::F32, 1e-2), (Precision::Bf16, 0.1)] {
        let [direct, tiles] = [false, true].map(|tiles| losses(precision, tiles));
        println!("{precision}: direct {direct:.4?}\n{precision}: tiles {tiles:.4?}");
        assert_ne!(direct, tiles, "both took the same algorithms");
        let last = |losses: &[f64]| losses[20..].iter().sum::<f64>() / 10.0;
        assert!(last(&direct) < 0.6 * direct[0], "{precision}: nothing was learned: {direct:.3?}");
        for (step, (direct, tiles)) in direct.iter().zip(&tiles).enumerate() {
            assert!((direct - tiles).abs() < tolerance, "{precision}, step {step}: {tiles} instead of {direct}");
        }
    }
}
