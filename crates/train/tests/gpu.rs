//! Training on a GPU beside training on the CPU: the same batches, the same weights at the start, twenty steps. On a machine without a
//! GPU the tests say that they are skipped.

use std::io::Write;
use std::sync::Arc;

use paceline_data::batch::Batch;
use paceline_nn::optim::{HyperParameters, Moment, Optimizer};
use paceline_nn::{Input, zoo};
use paceline_system::clock::Clock;
use paceline_system::random::Random;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::device::cuda::{self, Cuda, Options};
use paceline_tensor::{MemoryUse, Precision};
use paceline_train::phases::Phases;
use paceline_train::replica::{NotFinite, Replica, ReplicaOptions};

const CLASSES: usize = 10;
const BATCH: usize = 16;

fn gpu(test: &str) -> Option<Arc<Cuda>> {
    if cuda::count().is_ok_and(|count| count > 0) {
        let options = Options { tf32: false, deterministic: true, tune: false };
        return Some(Arc::new(Cuda::new(0, options).unwrap_or_else(|error| panic!("{error}"))));
    }
    let _ = writeln!(std::io::stderr(), "skipped: {test}: no GPU");
    None
}

fn options(optimizer: Optimizer, precision: Precision) -> ReplicaOptions {
    ReplicaOptions {
        input: Input::Image { size: [32, 32], channels: 3 },
        classes: CLASSES,
        micro_batch: BATCH,
        accumulate: 1,
        smoothing: 0.1,
        seed: 3,
        rule: optimizer.rule(&HyperParameters::default()).unwrap(),
        precision,
        memory: MemoryUse::Normal,
        sync_batch_norm: false,
        clip_norm: None,
    }
}

/// Images whose brightness tells their class, so that there is something to learn.
fn batch(step: u64) -> Batch {
    let mut random = Random::new(&[7, step]);
    let targets: Vec<i32> = (0..BATCH).map(|_| random.below(CLASSES) as i32).collect();
    let images = targets.iter().enumerate().flat_map(|(index, &target)| {
        let mut noise = Random::new(&[9, step, index as u64]);
        (0..32 * 32 * 3).map(move |_| 0.3 * noise.normal() + target as f32 / 5.0 - 1.0)
    });
    Batch { size: BATCH, images: images.collect(), targets, ..Batch::default() }
}

fn losses(replica: &mut Replica, rate: f32) -> Vec<f64> {
    let clock = Clock::real();
    let steps = (0..20).map(|step| {
        let moment = Moment { step, learning_rate: rate };
        let (tally, result) = replica.step(&batch(step), moment, &mut Phases::start(&clock)).unwrap();
        assert_eq!(result, Ok(()));
        assert!(tally.top1 <= tally.top5 && tally.rows == BATCH as u64);
        tally.mean_loss()
    });
    steps.collect()
}

fn compare(model: &str, optimizer: Optimizer, rate: f32, precision: Precision, tolerance: f64) {
    let Some(cuda) = gpu(&format!("{model}_follows_the_cpu")) else { return };
    let (entry, cpu) = (zoo::find(model).unwrap(), Arc::new(Cpu::new(4)));
    let options = options(optimizer, precision);
    let mut here = Replica::new(entry, options, &cpu).unwrap();
    let mut there = Replica::on_gpu(entry, options, &cpu, &cuda).unwrap();
    let (expected, found) = (losses(&mut here, rate), losses(&mut there, rate));
    assert!(expected[19] < expected[0], "{model} learns: {expected:?}");
    for (step, (expected, found)) in expected.iter().zip(&found).enumerate() {
        // A deep net magnifies rounding from step to step: two instruction sets of a CPU part by up to 1% with these rates (and
        // by 16% with ten times the rate).
        let (apart, allowed) = ((found / expected - 1.0).abs(), if step < 3 { tolerance } else { 0.05 });
        assert!(apart < allowed, "{model} {precision}, step {step}: {found} on the GPU, {expected} on the CPU");
    }
    there.fetch().unwrap();
    let distance: f64 =
        here.store.parameters.iter().zip(&there.store.parameters[..]).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    let length: f64 = here.store.parameters.iter().map(|x| f64::from(*x).powi(2)).sum();
    assert!(
        (distance / length).sqrt() < 0.2,
        "{model} {precision}: weights are {:e} apart",
        (distance / length).sqrt()
    );
    let (logits, tally) = there.evaluate(&batch(100)).unwrap();
    let (reference, expected) = here.evaluate(&batch(100)).unwrap();
    assert_eq!(logits.len(), reference.len());
    assert!((tally.mean_loss() / expected.mean_loss() - 1.0).abs() < 0.2, "{tally:?} is not {expected:?}");
}

#[test]
fn a_residual_net_follows_the_cpu() {
    compare("resnet20", Optimizer::Momentum, 0.002, Precision::F32, 1e-3);
    compare("resnet20", Optimizer::Momentum, 0.002, Precision::Bf16, 2e-2);
}

#[test]
fn a_net_with_biases_pooling_and_dropout_follows_the_cpu() {
    compare("vgg11", Optimizer::Adam, 1e-4, Precision::F32, 1e-3);
    compare("vgg11", Optimizer::Adam, 1e-4, Precision::Bf16, 2e-2);
}

/// The gradients of a first layer, whose ReLU, bias and weights a GPU takes in one pass: in bf16 as near to those in f32 as the CPU's.
#[test]
fn a_first_layer_moves_as_on_the_cpu() {
    let Some(cuda) = gpu("a_first_layer_moves_as_on_the_cpu") else { return };
    let (entry, cpu) = (zoo::find("vgg13").unwrap(), Arc::new(Cpu::new(4)));
    let [full, narrow] = [Precision::F32, Precision::Bf16].map(|precision| options(Optimizer::Momentum, precision));
    let exact = first_moves(&mut Replica::new(entry, full, &cpu).unwrap());
    let here = first_moves(&mut Replica::new(entry, narrow, &cpu).unwrap());
    let there = first_moves(&mut Replica::on_gpu(entry, narrow, &cpu, &cuda).unwrap());
    for index in 0..exact.len() {
        let [here, there] = [&here, &there].map(|moves| apart(&exact[index], &moves[index]));
        let text = format!("parameter {index}: {here:.4} apart from f32 on the CPU, {there:.4} on the GPU");
        let _ = writeln!(std::io::stderr(), "{text}");
        assert!(there < 1.2 * here + 0.01, "{text}");
    }
}

/// By how much the first layer's weight and bias change in one step.
fn first_moves(replica: &mut Replica) -> [Vec<f64>; 2] {
    let before = [0, 1].map(|index| replica.store.parameter(index).to_vec());
    let moment = Moment { step: 0, learning_rate: 0.1 };
    let (_, result) = replica.step(&batch(0), moment, &mut Phases::start(&Clock::real())).unwrap();
    assert_eq!(result, Ok(()));
    replica.fetch().unwrap();
    [0, 1].map(|index| {
        let after = replica.store.parameter(index).iter();
        after.zip(&before[index]).map(|(after, before)| f64::from(*after) - f64::from(*before)).collect()
    })
}

/// The length of the difference in lengths of `a`.
fn apart(a: &[f64], b: &[f64]) -> f64 {
    let length = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    length(&mut a.iter().zip(b).map(|(a, b)| a - b)) / length(&mut a.iter().copied())
}

#[test]
fn what_is_saved_on_a_gpu_goes_on_elsewhere() {
    let Some(cuda) = gpu("what_is_saved_on_a_gpu_goes_on_elsewhere") else { return };
    let (entry, cpu) = (zoo::find("resnet20").unwrap(), Arc::new(Cpu::new(4)));
    let options = options(Optimizer::Momentum, Precision::F32);
    let mut first = Replica::on_gpu(entry, options, &cpu, &cuda).unwrap();
    losses(&mut first, 0.02);
    first.fetch().unwrap();
    let mut second = Replica::on_gpu(entry, options, &cpu, &cuda).unwrap();
    second.store.parameters.copy_from_slice(&first.store.parameters);
    second.store.states.copy_from_slice(&first.store.states);
    second.optimizer_state[0].copy_from_slice(&first.optimizer_state[0]);
    second.changed();
    assert_eq!(losses(&mut first, 0.02), losses(&mut second, 0.02), "the same bits");
}

#[test]
fn a_gradient_that_is_not_a_number_changes_nothing_on_a_gpu() {
    let Some(cuda) = gpu("a_gradient_that_is_not_a_number_changes_nothing_on_a_gpu") else { return };
    let (entry, cpu) = (zoo::find("resnet20").unwrap(), Arc::new(Cpu::new(4)));
    let mut replica = Replica::on_gpu(entry, options(Optimizer::Momentum, Precision::F32), &cpu, &cuda).unwrap();
    let index = replica.parameters.iter().position(|parameter| parameter.name == "fc.weight").unwrap();
    replica.store.parameter_mut(index)[3] = f32::NAN;
    let before: Vec<u32> = replica.store.parameters.iter().map(|x| x.to_bits()).collect();
    let moment = Moment { step: 0, learning_rate: 0.1 };
    let (_, result) = replica.step(&batch(0), moment, &mut Phases::start(&Clock::real())).unwrap();
    assert_eq!(result, Err(NotFinite::Loss));
    replica.fetch().unwrap();
    assert!(replica.store.parameters.iter().map(|x| x.to_bits()).eq(before));
}
