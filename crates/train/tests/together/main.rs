//! Training together is training alone with the same batch: every agreement, every way to travel, ranks as
//! threads.
#![allow(unsafe_code)]

mod center;
mod hogwild;
mod local;
mod on_gpu;
mod sharded;
mod shares;
mod world;

use std::ops::Range;
use std::sync::Arc;

use paceline_comm::{Choice, Communicator, Link, Links, Nodes};
use paceline_data::batch::Batch;
use paceline_data::order::{self, Shard, Share};
use paceline_nn::layer::{Conv, Window};
use paceline_nn::optim::{HyperParameters, Moment, Optimizer};
use paceline_nn::schedule::{LearningRate, RunLength};
use paceline_nn::{Input, Model, Net};
use paceline_parallel::agree::{
    self, Agreement, BucketShape, Join, Reach, Recipe, Refusal, Roles, Settled, Shape, Target, Wait, all_reduce,
    parameter_server,
};
use paceline_parallel::lock_free::ThreadMemory;
use paceline_parallel::squeeze;
use paceline_system::clock::Clock;
use paceline_system::random::Random;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::{GraphError, MemoryUse, Precision, Value};
use paceline_train::Config;
use paceline_train::engine::StepOutput;
use paceline_train::gpus::{Card, check, gather_cards};
use paceline_train::micro_batch::MicroBatchSizes;
use paceline_train::phases::Phases;
use paceline_train::replica::{OptimizerShard, Replica, ReplicaOptions};
use paceline_train::serve::{Rates, ServerJournal, ServerOptions, Serving, fingerprint, serve_model};
use sharded::ranks;
use world::{Carry, TIMEOUT, communicators};

const STEPS: u64 = 20;
const BATCH: usize = 16;
const RATE: f32 = 0.004;

/// No batch-norm, whose statistics are each replica's own; dropout, which is not; a matrix that is a bucket
/// of its own.
fn plain(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let x = net.conv("conv1", x, Conv::new(8, 3).pad(1))?;
    let x = net.relu(x)?;
    let x = net.max_pool(x, Window::new(2))?;
    let x = net.flatten(x)?;
    let x = net.linear("fc1", x, 1100)?;
    let x = net.relu(x)?;
    let x = net.dropout(x, 0.2)?;
    let x = net.linear("fc2", x, 1000)?;
    let x = net.relu(x)?;
    net.linear("fc3", x, classes)
}

/// Batch-norms of every kind: in a residual block, before a ReLU, and at the end.
fn normed(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let x = net.conv("conv1", x, Conv::new(8, 3).pad(1))?;
    let x = net.batch_norm("bn1", x)?;
    let x = net.relu(x)?;
    let y = net.conv("conv2", x, Conv::new(8, 3).pad(1))?;
    let y = net.batch_norm("bn2", y)?;
    let x = net.add(x, y)?;
    let x = net.relu(x)?;
    let x = net.max_pool(x, Window::new(2))?;
    let x = net.flatten(x)?;
    let x = net.linear("fc1", x, 1100)?;
    let x = net.batch_norm("bn3", x)?;
    net.linear("fc2", x, classes)
}

fn options((rank, world): (usize, usize), case: Case) -> ReplicaOptions {
    let Case { optimizer, clip_norm, accumulate, sync_batch_norm, overlap, rest, .. } = case;
    let config = Config { batch: BATCH, accumulate, ..Config::default() };
    let sizes = MicroBatchSizes::of(&config, Shard { rank, world }, Some(BATCH + rest));
    let rule = optimizer.rule(&HyperParameters { weight_decay: Some(1e-3), ..HyperParameters::default() }).unwrap();
    let input = Input::Image { size: [8, 8], channels: 3 };
    let (classes, smoothing, seed) = (10, 0.1, 7);
    let (precision, memory) = (Precision::F32, MemoryUse::Normal);
    ReplicaOptions {
        input,
        classes,
        micro_batch: sizes.largest,
        other_sizes: sizes.others,
        accumulate,
        smoothing,
        seed,
        rule,
        precision,
        memory,
        clip_norm,
        sync_batch_norm,
        overlap,
        hosted: case.gpus > 0,
        separate_gradients: false,
        slots: 0,
        shard: (case.shard && world > 1).then_some(OptimizerShard { rank, world, maps_one_copy: false }),
    }
}

/// A model for a case: one with batch-norms where they are those of all replicas.
fn model(case: Case) -> &'static dyn Model {
    if case.sync_batch_norm { &normed } else { &plain }
}

fn replica(place: (usize, usize), case: Case) -> Replica {
    Replica::new(model(case), options(place, case), &Arc::new(Cpu::new(1))).unwrap()
}

/// Part `rank` of `world` of the batch of a step.
fn batch(step: u64, (rank, world): (usize, usize), case: Case) -> Batch {
    // Two batches, over and over: there is something to learn.
    let mut random = Random::new(&[3, step % 2]);
    let images: Vec<f32> = (0..BATCH * 8 * 8 * 3).map(|_| random.normal()).collect();
    let targets: Vec<i32> = (0..BATCH).map(|_| random.below(10) as i32).collect();
    let all = if case.rest > 0 && step % 3 == 2 { case.rest } else { BATCH };
    let own = order::part(all, rank, world);
    let (images, targets) = (&images[own.start * 192..own.end * 192], &targets[own.clone()]);
    let share = Some(Share { first: own.start, all });
    Batch { size: own.len(), images: images.to_vec(), targets: targets.to_vec(), share, ..Batch::default() }
}

/// What training came to: the losses, and weights and states at the end.
#[derive(Debug)]
struct Trained {
    losses: Vec<f64>,
    weights: Vec<f32>,
    states: Vec<f32>,
    optimizer_state: Vec<Vec<f32>>,
}

/// Twenty steps.
fn train(mut replica: Replica, place: (usize, usize), case: Case) -> Trained {
    let clock = Clock::real();
    let losses = (0..STEPS)
        .map(|step| {
            let moment = Moment { step, learning_rate: RATE };
            let StepOutput { tally, updated: done } =
                replica.step(&batch(step, place, case), moment, &mut Phases::start(&clock)).unwrap();
            done.unwrap();
            tally.mean_loss()
        })
        .collect();
    replica.settle().unwrap().unwrap();
    replica.engine.fetch().unwrap();
    let optimizer_state = replica.engine.weights().optimizer.iter().map(|slot| slot.to_vec()).collect();
    let (weights, states) = (replica.store().parameters.to_vec(), replica.store().states.to_vec());
    Trained { losses, weights, states, optimizer_state }
}

/// How a world is made up.
#[derive(Clone, Copy, Debug)]
struct Case {
    carry: Carry,
    workers: usize,
    /// With so many parameter servers, and a bound on staleness.
    servers: Option<(usize, Option<u64>)>,
    optimizer: Optimizer,
    clip_norm: Option<f64>,
    accumulate: usize,
    sync_batch_norm: bool,
    /// Every rank makes the step for its share.
    by_shares: bool,
    /// Sums of batch-norms have connections of their own.
    urgent: bool,
    /// How messages are squeezed.
    squeeze: &'static str,
    /// Gradients travel while the backward pass goes on.
    overlap: bool,
    /// The first workers compute on a GPU, all on the same.
    gpus: usize,
    /// Every third batch has so few samples; 0 if all are whole.
    rest: usize,
    /// Every rank has its part of the optimizer's state.
    shard: bool,
}

impl Case {
    fn roles(self) -> Roles {
        Roles { workers: self.workers, servers: self.servers.map_or(0, |(servers, _)| servers) }
    }

    fn recipe(self) -> &'static dyn Recipe {
        if self.servers.is_some() { &parameter_server::RECIPE } else { &all_reduce::RECIPE }
    }

    fn agreement(self, one_copy: bool) -> agree::Options {
        let staleness = self.servers.map_or(Some(0), |(_, staleness)| staleness);
        let squeeze = squeeze::find(self.squeeze).unwrap();
        agree::Options { staleness, squeeze, one_copy, shard: self.shard, ..agree::Options::default() }
    }
}

/// Joins an agreement of workers alone.
fn join(
    (recipe, options): (&dyn Recipe, agree::Options),
    communicator: Communicator,
    shape: &Shape,
    memory: Option<ThreadMemory>,
) -> Box<dyn Agreement> {
    let roles = Roles { workers: communicator.world(), servers: 0 };
    let (deadline, clock) = (TIMEOUT, Clock::real());
    recipe
        .join(Join {
            communicator,
            urgent: None,
            group: None,
            memory,
            lending: None,
            roles,
            shape,
            options,
            deadline,
            clock,
        })
        .unwrap()
}

/// A server, which hears of the run from the first worker.
fn hold(case: Case, mut communicator: Communicator) {
    let options = options((0, case.workers), case);
    let told = ServerOptions::receive(&mut communicator).unwrap();
    let ReplicaOptions { input, classes, .. } = options;
    assert_eq!(told, ServerOptions { step: 0, steps_per_epoch: STEPS, input, classes, shape: told.shape });
    let length = RunLength { total_steps: STEPS, steps_per_epoch: STEPS, global_batch: BATCH };
    let learning_rate = &LearningRate::constant(RATE.into());
    let rates = Rates { learning_rate, length, first_step: told.step };
    let serving = Serving {
        journal: ServerJournal::default(),
        recipe: case.recipe(),
        options: case.agreement(false),
        roles: case.roles(),
        communicator,
        lending: None,
        deadline: TIMEOUT,
        clock: Clock::real(),
    };
    serve_model(model(case), (&options, Cpu::new(1)), serving, (told, rates)).unwrap();
}

/// What every worker has trained.
fn together(case: Case) -> Vec<Trained> {
    let Case { carry, workers, .. } = case;
    let ranks = workers + case.roles().servers;
    std::thread::scope(|scope| {
        let urgents = communicators(Carry::Tcp, ranks).into_iter().map(|urgent| case.urgent.then_some(urgent));
        let threads: Vec<_> = communicators(carry, ranks)
            .into_iter()
            .zip(urgents)
            .enumerate()
            .map(|(rank, (communicator, urgent))| {
                scope.spawn(move || {
                    if rank >= workers {
                        hold(case, communicator);
                        return None;
                    }
                    let mut replica = match on_gpu::gpu().filter(|_| rank < case.gpus) {
                        Some(cuda) => on_gpu::replica((rank, workers), case, cuda),
                        None => replica((rank, workers), case),
                    };
                    let shape = replica.shape();
                    let one_copy = case.by_shares && replica.engine.steps_by_elements();
                    let agreement = case.recipe().join(Join {
                        communicator,
                        urgent,
                        group: None,
                        memory: None,
                        lending: None,
                        roles: case.roles(),
                        shape: &shape,
                        options: case.agreement(one_copy),
                        deadline: TIMEOUT,
                        clock: Clock::real(),
                    });
                    replica.agree(agreement.unwrap(), &Clock::real()).unwrap();
                    let ReplicaOptions { input, classes, .. } = *replica.options();
                    let shape = fingerprint(&shape);
                    let known = ServerOptions { step: 0, steps_per_epoch: STEPS, input, classes, shape };
                    replica.begin_together(0, known.identity()).unwrap();
                    Some(train(replica, (rank, workers), case))
                })
            })
            .collect();
        threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
    })
}

fn assert_like_alone(case: Case) {
    let Trained { losses, weights, states, .. } = train(replica((0, 1), case), (0, 1), case);
    let norm = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let error = |found: &[f32], expected: &[f32]| {
        let size = norm(&mut expected.iter().copied());
        norm(&mut found.iter().zip(expected).map(|(found, expected)| found - expected)) / size.max(f64::MIN_POSITIVE)
    };
    let all = together(case);
    assert_eq!(all.len(), case.workers);
    for (rank, found) in all.iter().enumerate() {
        let same = found.weights == all[0].weights && found.states == all[0].states;
        assert!(same, "{case:?}: rank {rank} and rank 0 have the same bits");
        for (step, (loss, expected)) in found.losses.iter().zip(&losses).enumerate() {
            assert!((loss - expected).abs() < 1e-5 * expected, "{case:?}: loss {loss} for {expected} at step {step}");
        }
        let error = [error(&found.weights, &weights), error(&found.states, &states)];
        assert!(error.iter().all(|&error| error <= 1e-6), "{case:?}: weights and states differ by {error:?}");
    }
    assert!(losses[STEPS as usize - 1] < losses[0], "it learns: {losses:?}");
}

const MOMENTUM: Case = Case {
    carry: Carry::Thread,
    workers: 2,
    servers: None,
    optimizer: Optimizer::Momentum,
    clip_norm: None,
    accumulate: 1,
    sync_batch_norm: false,
    by_shares: false,
    urgent: false,
    squeeze: "none",
    overlap: true,
    gpus: 0,
    rest: 0,
    shard: false,
};

#[test]
fn all_reduce_over_every_carry_is_training_alone() {
    for carry in Carry::ALL {
        for workers in [2, 4] {
            assert_like_alone(Case { carry, workers, ..MOMENTUM });
        }
    }
}

#[test]
fn shares_need_not_be_equal_nor_batches_whole() {
    // Sixteen samples by three workers, then seven, or two for three.
    for rest in [7, 2] {
        let case = Case { workers: 3, rest, ..MOMENTUM };
        assert_like_alone(case);
        assert_like_alone(Case { carry: Carry::Shm, by_shares: true, ..case });
        assert_like_alone(Case { accumulate: 3, ..case });
        assert_like_alone(Case { servers: Some((1, Some(0))), ..case });
    }
    // Two rows would be plus and minus one behind a batch-norm, whatever they were: four for five workers.
    for (workers, rest) in [(3, 7), (5, 4)] {
        assert_like_alone(Case { workers, rest, sync_batch_norm: true, ..MOMENTUM });
    }
}

#[test]
fn a_step_made_by_shares_has_the_bits_of_one_made_by_all() {
    by_shares_as_by_all(&[Optimizer::Momentum]);
    assert_like_alone(Case { carry: Carry::Shm, workers: 4, by_shares: true, ..MOMENTUM });
}

#[test]
#[ignore = "cargo x ci: together"]
fn steps_of_other_optimizers_made_by_shares_have_the_same_bits_too() {
    by_shares_as_by_all(&[Optimizer::Sgd, Optimizer::Adam]);
}

fn by_shares_as_by_all(optimizers: &[Optimizer]) {
    for &optimizer in optimizers {
        for (workers, sync_batch_norm) in [(2, false), (4, false), (2, true)] {
            let whole = Case { carry: Carry::Shm, workers, optimizer, sync_batch_norm, ..MOMENTUM };
            let shares = Case { by_shares: true, ..whole };
            let (whole, shares) = (together(whole), together(shares));
            for (whole, shares) in whole.iter().zip(&shares) {
                assert!(whole.weights == shares.weights, "{optimizer:?} by {workers} workers");
                assert!(whole.optimizer_state == shares.optimizer_state && whole.states == shares.states);
                assert_eq!(whole.losses, shares.losses);
            }
        }
    }
}

#[test]
fn gradients_that_travel_after_the_backward_pass_are_the_same_step() {
    for carry in Carry::ALL {
        assert_like_alone(Case { carry, overlap: false, ..MOMENTUM });
        assert_like_alone(Case { carry, overlap: false, servers: Some((1, Some(0))), ..MOMENTUM });
    }
}

#[test]
fn parts_of_a_batch_are_added_up_before_they_are_pushed() {
    assert_like_alone(Case { accumulate: 2, servers: Some((2, Some(0))), ..MOMENTUM });
    assert_like_alone(Case { carry: Carry::Tcp, accumulate: 2, ..MOMENTUM });
}

/// The servers have the optimizer's state, even those of one worker.
#[test]
fn the_first_worker_fetches_the_optimizer_to_save_it() {
    for workers in [1, 2] {
        let case = Case { workers, servers: Some((1, Some(0))), ..MOMENTUM };
        let (alone, all) = (train(replica((0, 1), case), (0, 1), case), together(case));
        let (found, expected) = (&all[0].optimizer_state[0], &alone.optimizer_state[0]);
        let furthest = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(furthest < 1e-6 && expected.iter().any(|x| x.abs() > 1e-3), "{workers} workers: {furthest} apart");
    }
}

/// Half of the bits of every message: near the exact run, the same on all ranks, and not the exact run
/// itself.
#[test]
fn squeezed_messages_stay_near_the_exact_ones() {
    let exact = train(replica((0, 1), MOMENTUM), (0, 1), MOMENTUM);
    let length = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    for (carry, servers) in Carry::ALL.into_iter().flat_map(|carry| [(carry, None), (carry, Some((2, Some(0))))]) {
        let all = together(Case { carry, servers, squeeze: "bf16", ..MOMENTUM });
        for found in &all {
            assert!(found.weights == all[0].weights, "{carry:?} {servers:?}: all ranks have the same bits");
            let apart = length(&mut found.weights.iter().zip(&exact.weights).map(|(a, b)| a - b));
            let apart = apart / length(&mut exact.weights.iter().copied());
            assert!(apart > 0.0 && apart < 1e-3, "{carry:?} {servers:?}: {apart:e} apart");
            let (last, expected) = (found.losses[STEPS as usize - 1], exact.losses[STEPS as usize - 1]);
            assert!((last / expected - 1.0).abs() < 0.05, "{carry:?} {servers:?}: {last} for {expected}");
        }
    }
}

#[test]
fn gradients_that_are_clipped_together_are_too() {
    for carry in [Carry::Thread, Carry::Shm] {
        assert_like_alone(Case { carry, clip_norm: Some(0.5), ..MOMENTUM });
    }
}

#[test]
fn batch_norms_over_all_replicas_are_those_of_the_whole_batch() {
    for carry in Carry::ALL {
        for workers in [2, 4] {
            assert_like_alone(Case { carry, workers, sync_batch_norm: true, ..MOMENTUM });
        }
    }
    assert_like_alone(Case { clip_norm: Some(0.5), sync_batch_norm: true, ..MOMENTUM });
    assert_like_alone(Case { carry: Carry::Tcp, workers: 4, sync_batch_norm: true, urgent: true, ..MOMENTUM });
}

#[test]
fn each_part_of_a_batch_is_normalised_over_all_replicas() {
    // Alone, a part is other samples than two workers' parts are, so only the ranks are compared.
    let all = together(Case { accumulate: 2, sync_batch_norm: true, ..MOMENTUM });
    assert!(all[0].weights == all[1].weights && all[0].states == all[1].states);
    assert!(all[0].losses[STEPS as usize - 1] < all[0].losses[0], "it learns: {:?}", all[0].losses);
}

#[test]
fn a_synchronous_parameter_server_over_every_carry_is_training_alone() {
    synchronous_servers(&[(4, 2)]);
}

#[test]
#[ignore = "cargo x ci: together"]
fn any_number_of_synchronous_parameter_servers_is_training_alone() {
    synchronous_servers(&[(2, 1), (4, 1), (2, 3)]);
}

fn synchronous_servers(numbers: &[(usize, usize)]) {
    for carry in Carry::ALL {
        for &(workers, servers) in numbers {
            assert_like_alone(Case { carry, workers, servers: Some((servers, Some(0))), ..MOMENTUM });
        }
    }
}

#[test]
fn workers_of_an_asynchronous_parameter_server_learn() {
    for (staleness, servers) in [(None, 1), (Some(1), 2), (Some(4), 1)] {
        for carry in [Carry::Thread, Carry::Shm, Carry::Tcp] {
            let all = together(Case { carry, workers: 3, servers: Some((servers, staleness)), ..MOMENTUM });
            for Trained { losses, weights, .. } in &all {
                assert!(weights.iter().all(|weight| weight.is_finite()));
                assert!(weights == &all[0].weights, "{carry:?} {staleness:?}: all end with the servers' weights");
                let (first, last) = (losses[..3].iter().sum::<f64>(), losses[17..].iter().sum::<f64>());
                assert!(last < first, "{carry:?} {staleness:?}: {losses:?}");
            }
        }
    }
}

#[test]
fn every_rank_hears_whose_gpu_is_whose_and_a_shared_one_is_refused_alike_by_all() {
    for carry in Carry::ALL {
        let answers = ranks(carry, 4, |mut communicator| {
            let own = Card { nccl: 22_803, gpu: [communicator.rank().0 as u8 % 3; 16] };
            let cards = gather_cards(&mut communicator, own).unwrap();
            assert_eq!(cards[communicator.rank().index()], own);
            check(&cards, &[]).unwrap_err()
        });
        assert!(answers[0].starts_with("rank 0 and rank 3 compute on one GPU"), "{answers:?}");
        assert!(answers.iter().all(|answer| *answer == answers[0]), "{carry:?}: {answers:?}");
    }
}

#[test]
fn ranks_whose_gradients_travel_elsewhere_still_agree_on_the_rest() {
    for carry in Carry::ALL {
        let totals = ranks(carry, 3, |communicator| {
            let rank = communicator.rank().0 as f32;
            let (mut weights, mut sum) = ([rank; 5], 0.0);
            let recipe = (&all_reduce::RECIPE as &dyn Recipe, agree::Options::default());
            let mut agreement = join(recipe, communicator, &Shape::default(), None);
            agreement.broadcast_from_root(&mut weights).unwrap();
            for step in 0..10 {
                let mut numbers = [rank, step as f32];
                agreement.sum(&mut numbers).unwrap();
                sum += numbers[0] + numbers[1];
            }
            (weights, agreement.shares_steps(), sum)
        });
        assert!(totals.iter().all(|total| *total == ([0.0; 5], true, 165.0)), "{carry:?}: {totals:?}");
    }
}
