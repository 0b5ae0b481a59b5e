//! Training on a GPU beside training on the CPU: the same batches, the same weights at the start, twenty steps. On a machine without a
//! GPU the tests say that they are skipped.

#[path = "shared/on_gpu.rs"]
mod on_gpu;

use std::io::Write;
use std::ops::Range;
use std::sync::Arc;

use on_gpu::{BATCH, batch, gpu, options};
use paceline_data::augment::{Augment, Op};
use paceline_data::batch::Batch;
use paceline_data::dataset::OpenOptions;
use paceline_data::{Dataset, Loader, LoaderOptions, Spec};
use paceline_nn::optim::{HyperParameters, Moment, Optimizer};
use paceline_nn::{Input, zoo};
use paceline_system::clock::Clock;
use paceline_system::disk::Disk;
use paceline_tensor::Precision;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::device::cuda::session::Album;
use paceline_train::engine::{Albums, Place, StepOutput};
use paceline_train::phases::Phases;
use paceline_train::replica::{NotFinite, Replica, ReplicaOptions};

/// Steps whose losses are compared.
const STEPS: u64 = 20;

/// Steps after which weights are compared: enough for an optimizer's state to matter, too few for rounding to
/// grow.
const EARLY_STEPS: u64 = 3;

/// By how much a replica on the GPU may differ from one on the CPU, relative to the latter.
///
/// Two instruction sets of one CPU show what rounding alone does (an EPYC; `portable` beside `avx2` in f32,
/// `avx2` beside `avx512-bf16` in bf16; the nets, batches and rates of the tests below):
///
/// | | early losses | losses | length | apart | last bias | evaluation |
/// |---|---|---|---|---|---|---|
/// | resnet20, momentum, f32 | 2.0e-7 | 2.2e-4 | 1.9e-4 | 2.5e-3 | 1.5e-7 | 5.4e-4 |
/// | the same in four parts | 4.8e-8 | 7.3e-5 | 1.1e-4 | 1.9e-3 | 0 | |
/// | resnet20, LARS, f32 | 2.5e-7 | 1.1e-3 | 8.4e-5 | 4.4e-3 | 4.2e-4 | 6.4e-4 |
/// | vgg11, Adam, f32 | 1.6e-8 | 2.1e-3 | 3.7e-8 | 3.4e-4 | 9.9e-8 | 1.1e-3 |
/// | resnet20, momentum, bf16 | 1.5e-3 | 1.9e-3 | 6.3e-3 | 0.36 | 1.3e-3 | 3.0e-4 |
/// | vgg11, Adam, bf16 | 2.0e-3 | 2.3e-2 | 9e-4 | 0.34 | 4.7e-3 | 6.6e-3 |
///
/// With ten times resnet20's rate the moves are 0.02 apart after three steps and 0.27 after twenty: then
/// nothing could be told from them. In bf16 the gradients of the first layers are half rounding, and the
/// direction of a move says little; its length and the last layer's bias, to which no rounding of other
/// layers comes back, do. A rate that is wrong by half a percent (in bf16: by 5 %), an optimizer's state that
/// is not kept, or a batch of which a part is missing are beyond these bounds.
struct Tolerances {
    /// The losses of [`EARLY_STEPS`].
    early_losses: f64,
    /// Those of all steps.
    losses: f64,
    /// Of the early moves of all weights together: how far.
    length: f64,
    /// The distance between the early moves.
    apart: f64,
    /// The distance between those of the last parameter alone.
    last_bias: f64,
    /// The loss of an evaluation after all steps.
    evaluation: f64,
}

/// About ten times what was measured, and more where that is next to nothing.
const F32: Tolerances =
    Tolerances { early_losses: 1e-5, losses: 2e-2, length: 1e-2, apart: 4e-2, last_bias: 4e-3, evaluation: 1e-2 };

/// About ten times; twice for losses and directions, which are hardly known better.
const BF16: Tolerances =
    Tolerances { early_losses: 2e-2, losses: 5e-2, length: 0.06, apart: 0.75, last_bias: 0.05, evaluation: 5e-2 };

/// What a replica does in [`STEPS`].
struct Followed {
    losses: Vec<f64>,
    /// By how much every weight has changed in the first of them.
    moves: Vec<f64>,
    /// The same of the last parameter.
    last_bias: Vec<f64>,
}

impl Followed {
    fn new(replica: &mut Replica, rate: f32) -> Self {
        let last = replica.parameters.len() - 1;
        let before = replica.store().parameters.to_vec();
        let bias_before = replica.store().parameter(last).to_vec();
        let mut followed = losses(replica, rate, 0..EARLY_STEPS);
        replica.engine.fetch().unwrap();
        let moves = difference(&replica.store().parameters, &before);
        let last_bias = difference(replica.store().parameter(last), &bias_before);
        followed.extend(losses(replica, rate, EARLY_STEPS..STEPS));
        Self { losses: followed, moves, last_bias }
    }
}

fn losses(replica: &mut Replica, rate: f32, steps: Range<u64>) -> Vec<f64> {
    let clock = Clock::real();
    let steps = steps.map(|step| {
        let moment = Moment { step, learning_rate: rate };
        let StepOutput { tally, updated: result } =
            replica.step(&batch(step), moment, &mut Phases::start(&clock)).unwrap();
        assert_eq!(result, Ok(()));
        assert!(tally.top1 <= tally.top5 && tally.rows == BATCH as u64);
        tally.mean_loss()
    });
    steps.collect()
}

fn compare(model: &str, optimizer: Optimizer, rate: f32, precision: Precision) {
    compare_with(model, options(optimizer, precision), rate);
}

fn compare_with(model: &str, options: ReplicaOptions, rate: f32) {
    let Some(cuda) = gpu(&format!("{model}_follows_the_cpu")) else { return };
    let (entry, cpu) = (zoo::find(model).unwrap(), Arc::new(Cpu::new(4)));
    let mut here = Replica::new(entry, options, &cpu).unwrap();
    let mut there = on_gpu::replica(entry, options, &cpu, &cuda);
    let [expected, found] = [&mut here, &mut there].map(|replica| Followed::new(replica, rate));
    let name = format!("{model} {}", options.precision);
    check(&name, &expected, &found, tolerances(options.precision));
    if options.micro_batch < BATCH {
        return;
    }
    let (logits, tally) = there.evaluate(&batch(100)).unwrap();
    let (reference, expected) = here.evaluate(&batch(100)).unwrap();
    assert_eq!(logits.len(), reference.len());
    let apart = (tally.mean_loss() / expected.mean_loss() - 1.0).abs();
    let _ = writeln!(std::io::stderr(), "{name}: evaluations {apart:.1e} apart");
    assert!(apart < tolerances(options.precision).evaluation, "{name}: {tally:?} is not {expected:?}");
}

fn tolerances(precision: Precision) -> &'static Tolerances {
    match precision {
        Precision::F32 => &F32,
        Precision::Bf16 => &BF16,
    }
}

fn check(name: &str, expected: &Followed, found: &Followed, allowed: &Tolerances) {
    let early = EARLY_STEPS as usize;
    let [first, last] = [expected.losses[0], expected.losses[expected.losses.len() - 1]];
    assert!(last < first, "{name} learns: {:?}", expected.losses);
    let apart: Vec<f64> = expected.losses.iter().zip(&found.losses).map(|(a, b)| (b / a - 1.0).abs()).collect();
    let most = |losses: &[f64]| losses.iter().copied().fold(0.0, f64::max);
    let length = length(&found.moves) / length(&expected.moves);
    let measured = [
        ("early losses", most(&apart[..early]), allowed.early_losses),
        ("losses", most(&apart), allowed.losses),
        ("length of the moves", (length - 1.0).abs(), allowed.length),
        ("moves", self::apart(&expected.moves, &found.moves), allowed.apart),
        ("moves of the last bias", self::apart(&expected.last_bias, &found.last_bias), allowed.last_bias),
    ];
    for (what, apart, allowed) in measured {
        let text = format!("{name}: {what} {apart:.1e} apart, {allowed:.0e} allowed");
        let _ = writeln!(std::io::stderr(), "{text}");
        assert!(apart < allowed, "{text}: {:?} is not {:?}", found.losses, expected.losses);
    }
}

#[test]
fn a_residual_net_follows_the_cpu() {
    compare("resnet20", Optimizer::Momentum, 2e-4, Precision::F32);
    compare("resnet20", Optimizer::Momentum, 2e-4, Precision::Bf16);
}

#[test]
fn a_net_with_biases_pooling_and_dropout_follows_the_cpu() {
    compare("vgg11", Optimizer::Adam, 1e-4, Precision::F32);
    compare("vgg11", Optimizer::Adam, 1e-4, Precision::Bf16);
}

/// The gradients of a first layer, whose ReLU, bias and weights a GPU takes in one pass: in bf16 as near to those in f32 as the CPU's.
#[test]
fn a_first_layer_moves_as_on_the_cpu() {
    let Some(cuda) = gpu("a_first_layer_moves_as_on_the_cpu") else { return };
    let (entry, cpu) = (zoo::find("vgg13").unwrap(), Arc::new(Cpu::new(4)));
    let [full, narrow] = [Precision::F32, Precision::Bf16].map(|precision| options(Optimizer::Momentum, precision));
    let exact = moves(&mut Replica::new(entry, full, &cpu).unwrap(), &[0, 1]);
    let here = moves(&mut Replica::new(entry, narrow, &cpu).unwrap(), &[0, 1]);
    let there = moves(&mut on_gpu::replica(entry, narrow, &cpu, &cuda), &[0, 1]);
    for index in 0..exact.len() {
        let [here, there] = [&here, &there].map(|moves| apart(&exact[index], &moves[index]));
        let text = format!("parameter {index}: {here:.4} apart from f32 on the CPU, {there:.4} on the GPU");
        let _ = writeln!(std::io::stderr(), "{text}");
        assert!(there < 1.2 * here + 0.01, "{text}");
    }
}

/// By how much some parameters change in one step.
fn moves(replica: &mut Replica, indices: &[usize]) -> Vec<Vec<f64>> {
    let before: Vec<_> = indices.iter().map(|&index| replica.store().parameter(index).to_vec()).collect();
    let moment = Moment { step: 0, learning_rate: 0.1 };
    let StepOutput { updated: result, .. } =
        replica.step(&batch(0), moment, &mut Phases::start(&Clock::real())).unwrap();
    assert_eq!(result, Ok(()));
    replica.engine.fetch().unwrap();
    indices.iter().zip(&before).map(|(&index, before)| difference(replica.store().parameter(index), before)).collect()
}

fn difference(after: &[f32], before: &[f32]) -> Vec<f64> {
    after.iter().zip(before).map(|(after, before)| f64::from(*after) - f64::from(*before)).collect()
}

fn length(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// The length of the difference in lengths of `a`.
fn apart(a: &[f64], b: &[f64]) -> f64 {
    let between: Vec<f64> = a.iter().zip(b).map(|(a, b)| a - b).collect();
    length(&between) / length(a).max(f64::MIN_POSITIVE)
}

/// Gradients and what is read by an evaluation share memory with activations: neither disturbs the other, nor the zeros behind ten biases.
#[test]
fn an_evaluation_between_steps_changes_nothing() {
    let Some(cuda) = gpu("an_evaluation_between_steps_changes_nothing") else { return };
    let (entry, cpu) = (zoo::find("resnet20").unwrap(), Arc::new(Cpu::new(4)));
    let options = options(Optimizer::Momentum, Precision::Bf16);
    let weights = [false, true].map(|evaluates| {
        let mut replica = on_gpu::replica(entry, options, &cpu, &cuda);
        for step in 0..4 {
            let moment = Moment { step, learning_rate: 0.002 };
            let StepOutput { updated: result, .. } =
                replica.step(&batch(step), moment, &mut Phases::start(&Clock::real())).unwrap();
            assert_eq!(result, Ok(()));
            if evaluates {
                replica.evaluate(&batch(100 + step)).unwrap();
            }
        }
        replica.engine.fetch().unwrap();
        (replica.store().parameters.to_vec(), replica.store().gradients.to_vec())
    });
    assert!(weights[0] == weights[1]);
}

#[test]
fn a_batch_in_parts_follows_the_cpu() {
    let options = options(Optimizer::Momentum, Precision::F32);
    compare_with("resnet20", ReplicaOptions { micro_batch: BATCH / 4, accumulate: 4, ..options }, 2e-4);
}

#[test]
fn lars_follows_the_cpu() {
    let hyper = HyperParameters { lars_coefficient: 0.1, weight_decay: Some(1e-3), ..HyperParameters::default() };
    let rule = Optimizer::Lars.rule(&hyper).unwrap();
    // Clipped, so that the norms are those of gradients that were scaled down.
    let options = ReplicaOptions { rule, clip_norm: Some(0.5), ..options(Optimizer::Lars, Precision::F32) };
    compare_with("resnet20", options, 0.002);
    let Some(cuda) = gpu("lars_follows_the_cpu") else { return };
    // A step of every parameter on its own: a wrong rate would show in the length of the step.
    let (entry, cpu) = (zoo::find("resnet20").unwrap(), Arc::new(Cpu::new(4)));
    let mut here = Replica::new(entry, options, &cpu).unwrap();
    let mut there = on_gpu::replica(entry, options, &cpu, &cuda);
    let all: Vec<usize> = (0..here.parameters.len()).collect();
    let (expected, found) = (moves(&mut here, &all), moves(&mut there, &all));
    for (index, (expected, found)) in expected.iter().zip(&found).enumerate() {
        let apart = apart(expected, found);
        assert!(apart < 1e-2, "{} moves {apart:.4} apart from the CPU's", here.parameters[index].name);
    }
}

#[test]
fn what_is_saved_on_a_gpu_goes_on_elsewhere() {
    let Some(cuda) = gpu("what_is_saved_on_a_gpu_goes_on_elsewhere") else { return };
    let (entry, cpu) = (zoo::find("resnet20").unwrap(), Arc::new(Cpu::new(4)));
    let options = options(Optimizer::Momentum, Precision::F32);
    let mut first = on_gpu::replica(entry, options, &cpu, &cuda);
    losses(&mut first, 0.02, 0..STEPS);
    first.engine.fetch().unwrap();
    let mut second = on_gpu::replica(entry, options, &cpu, &cuda);
    second.store_mut().parameters.copy_from_slice(&first.store().parameters);
    second.store_mut().states.copy_from_slice(&first.store().states);
    second.engine.weights_mut().optimizer[0].copy_from_slice(&first.engine.weights().optimizer[0]);
    second.engine.load();
    assert_eq!(losses(&mut first, 0.02, 0..STEPS), losses(&mut second, 0.02, 0..STEPS), "the same bits");
}

#[test]
fn a_gradient_that_is_not_a_number_changes_nothing_on_a_gpu() {
    let Some(cuda) = gpu("a_gradient_that_is_not_a_number_changes_nothing_on_a_gpu") else { return };
    let (entry, cpu) = (zoo::find("resnet20").unwrap(), Arc::new(Cpu::new(4)));
    let mut replica = on_gpu::replica(entry, options(Optimizer::Momentum, Precision::F32), &cpu, &cuda);
    let index = replica.parameters.iter().position(|parameter| parameter.name == "fc.weight").unwrap();
    replica.store_mut().parameter_mut(index)[3] = f32::NAN;
    let before: Vec<u32> = replica.store().parameters.iter().map(|x| x.to_bits()).collect();
    let moment = Moment { step: 0, learning_rate: 0.1 };
    let StepOutput { updated: result, .. } =
        replica.step(&batch(0), moment, &mut Phases::start(&Clock::real())).unwrap();
    assert_eq!(result, Err(NotFinite::Loss));
    replica.engine.fetch().unwrap();
    assert!(replica.store().parameters.iter().map(|x| x.to_bits()).eq(before));
}

/// Losses of steps whose batches come in three ways: copied before the step, copied while the step before computes, and looked at on the GPU.
#[test]
fn batches_come_to_a_gpu_in_three_ways() {
    let Some(cuda) = gpu("batches_come_to_a_gpu_in_three_ways") else { return };
    let (entry, cpu, clock) = (zoo::find("resnet20").unwrap(), Arc::new(Cpu::new(4)), Clock::real());
    let spec: Spec = "synthetic:32x32x3/10/200".parse().unwrap();
    let (train, val) = Dataset::open(&spec, &OpenOptions::default(), &Disk::real()).unwrap();
    let normalise = Op::Normalise { mean: vec![0.5; 3], std: vec![0.25; 3] };
    let ops = vec![Op::RandomCrop { pad: 4 }, Op::HorizontalFlip, Op::Cutout { side: 8 }, normalise];
    let augment = Augment::new(ops).unwrap();
    let album = |set: &Dataset| {
        let images = set.images().unwrap().unwrap();
        Album::new(&cuda, &images, [32, 32, 3], (augment.tables(), augment.hole())).unwrap()
    };
    let albums = Albums { train: album(&train), val: album(&val) };
    let train = Arc::new(train);
    let run = |ahead: bool, albums: Option<Albums>| {
        // Eight samples are left at the end of an epoch.
        let mut options = options(Optimizer::Momentum, Precision::Bf16);
        options.other_sizes[0] = 8;
        let mut replica = on_gpu::replica(entry, options, &cpu, &cuda);
        let views = albums.is_some();
        albums.into_iter().for_each(|albums| replica.engine.cuda_mut().unwrap().hold(albums));
        let options = LoaderOptions { views, threads: 2, ..LoaderOptions::training(BATCH, 3) };
        let mut loader = Loader::new(Arc::clone(&train), augment.clone(), options, clock.clone()).unwrap();
        let mut losses = Vec::new();
        for number in 0..2 {
            let mut epoch = loader.epoch(number, 0);
            while let Some(batch) = epoch.next().map(Result::unwrap) {
                replica.begin_step(Moment { step: losses.len() as u64, learning_rate: 0.01 }).unwrap();
                let schedule = replica.schedule(&batch).unwrap();
                schedule.tasks(0).iter().for_each(|&task| replica.pass(&batch, &schedule, task).unwrap());
                replica.engine.prefetch(if ahead { epoch.peek() } else { None });
                let closed = replica.close();
                let StepOutput { tally, updated } = replica.end_step(closed).unwrap();
                assert_eq!(updated, Ok(()));
                losses.push(tally.loss);
            }
        }
        losses
    };
    let expected = run(false, None);
    assert_eq!(expected.len(), 26);
    assert_eq!(run(true, None), expected, "copied ahead");
    assert_eq!(run(false, Some(albums)), expected, "looked at");
}

#[test]
fn a_model_is_evaluated_on_a_gpu_as_on_the_cpu() {
    let Some(cuda) = gpu("a_model_is_evaluated_on_a_gpu_as_on_the_cpu") else { return };
    let (entry, cpu) = (zoo::find("resnet20").unwrap(), Arc::new(Cpu::new(4)));
    let options = options(Optimizer::Sgd, Precision::F32);
    let mut there = Replica::for_evaluation(entry, options, &Place::Cuda(Arc::clone(&cpu), Arc::clone(&cuda))).unwrap();
    let mut here = Replica::for_evaluation(entry, options, &Place::Cpu(cpu)).unwrap();
    let (found, expected) = (there.evaluate(&batch(1)).unwrap(), here.evaluate(&batch(1)).unwrap());
    let most = expected.0.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    assert!(found.0.iter().zip(&expected.0).all(|(a, b)| (a - b).abs() < 1e-4 * most), "{found:?} is not {expected:?}");
}

#[test]
fn a_batch_that_does_not_fit_a_gpu_is_refused_with_one_that_does() {
    let Some(cuda) = gpu("a_batch_that_does_not_fit_a_gpu_is_refused_with_one_that_does") else { return };
    let (entry, cpu) = (zoo::find("resnet50").unwrap(), Arc::new(Cpu::new(4)));
    let input = Input::Image { size: [224, 224], channels: 3 };
    let options =
        |micro_batch: usize| ReplicaOptions { input, micro_batch, ..options(Optimizer::Momentum, Precision::F32) };
    let error = Replica::at(entry, options(100_000), &Place::Cuda(Arc::clone(&cpu), Arc::clone(&cuda)))
        .map(|_| ())
        .unwrap_err();
    let (error, refused) = (error.to_string(), error.is_refusal());
    let words = |text: &str, before: &str| {
        text.split_once(before).and_then(|(_, rest)| rest.split(' ').next()?.parse().ok()).unwrap_or(f64::NAN)
    };
    let [needed, free, fits] = ["needs ", "memory; ", "a batch of about "].map(|before| words(&error, before));
    assert!(refused && error.starts_with("a step with a batch of 100000 needs ") && needed > free, "{error}");
    assert!((1.0..100_000.0).contains(&fits), "{error}");
    assert!((needed / 100_000.0 * fits) < free, "{error}");
    let mut replica = on_gpu::replica(entry, options(2), &cpu, &cuda);
    let images = (0..2 * 224 * 224 * 3).map(|pixel| (pixel % 251) as f32 / 125.0 - 1.0).collect();
    let batch = Batch { size: 2, images, targets: vec![1, 2], ..Batch::default() };
    let moment = Moment { step: 0, learning_rate: 0.001 };
    let StepOutput { tally, updated: result } =
        replica.step(&batch, moment, &mut Phases::start(&Clock::real())).unwrap();
    assert!(result.is_ok() && tally.rows == 2 && tally.loss.is_finite(), "{tally:?}");
}
