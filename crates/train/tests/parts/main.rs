//! Layers computed by several parts train as they do whole: the networks of the zoo in every form and in hybrids, parts as threads, one
//! worker or two.

#[path = "../together/world.rs"]
mod world;

use std::collections::BTreeMap;
use std::sync::Arc;

use paceline_comm::{Communicator, Rank};
use paceline_data::batch::Batch;
use paceline_data::order::{self, Shard, Share};
use paceline_nn::optim::{HyperParameters, Moment, Optimizer};
use paceline_nn::{Input, zoo};
use paceline_parallel::agree::{self, Join, Recipe, Roles, all_reduce};
use paceline_parallel::mesh::{Axis, Extent, Mesh};
use paceline_parallel::part::PartLinks;
use paceline_parallel::siblings::ReplicaLinks;
use paceline_system::clock::Clock;
use paceline_system::random::Random;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::part::Piece;
use paceline_tensor::{MemoryUse, Precision};
use paceline_train::Config;
use paceline_train::engine::Place;
use paceline_train::micro_batch::MicroBatchSizes;
use paceline_train::phases::Phases;
use paceline_train::replica::{NotFinite, Replica, ReplicaOptions};
use paceline_train::serve::{ServerOptions, fingerprint};
use paceline_train::stage::{ModelStage, Tensor};
use world::{Carry, TIMEOUT, communicators};

const STEPS: u64 = 10;

/// What is trained, and how.
#[derive(Clone, Debug)]
struct Case {
    model: &'static str,
    side: usize,
    /// As `--split` says it.
    split: &'static str,
    config: Config,
    /// Every other batch has so few samples; 0 if all are whole.
    rest: usize,
    carry: Carry,
    learning_rate: f32,
    /// Decides which weights begin with another last bit; none if it is 0.
    nudge: u64,
    /// Whether they begin with others in every part, and others again when parts have met.
    apart: bool,
}

fn case(model: &'static str, side: usize, batch: usize, split: &'static str) -> Case {
    let config = Config { batch, split: split.parse().unwrap(), ..Config::default() };
    Case { model, side, split, config, rest: 0, carry: Carry::Thread, learning_rate: 0.005, nudge: 0, apart: false }
}

/// Pieces of whole tensors by name, and the losses.
struct Trained {
    tensors: BTreeMap<String, Vec<f32>>,
    /// As they were when parts had met.
    begun: BTreeMap<String, Vec<f32>>,
    momentum: BTreeMap<String, Vec<f32>>,
    losses: Vec<f64>,
    evaluated: f64,
}

impl Case {
    fn input(&self) -> Input {
        let channels = if self.model == "lenet5" { 1 } else { 3 };
        Input::Image { size: [self.side; 2], channels }
    }

    fn options(&self, worker: usize) -> ReplicaOptions {
        let shard = Shard { rank: worker, world: self.config.workers };
        let sizes = MicroBatchSizes::of(&self.config, shard, Some(self.config.batch + self.rest));
        ReplicaOptions {
            input: self.input(),
            classes: 10,
            micro_batch: sizes.largest,
            other_sizes: sizes.others,
            accumulate: self.config.accumulate,
            smoothing: 0.1,
            seed: 7,
            rule: Optimizer::Momentum.rule(&HyperParameters::default()).unwrap(),
            precision: Precision::F32,
            memory: MemoryUse::Normal,
            clip_norm: self.config.clip_norm,
            sync_batch_norm: false,
            overlap: true,
            hosted: false,
            separate_gradients: false,
            shard: self.config.optimizer_shard(shard, false),
            slots: 0,
        }
    }

    fn batch(&self, step: u64, worker: usize) -> Batch {
        let all = if self.rest > 0 && step % 2 == 1 { self.rest } else { self.config.batch };
        let mut random = Random::new(&[3, step]);
        let own = order::part(all, worker, self.config.workers);
        let share = Some(Share { first: own.start, all });
        let Input::Image { size: [height, width], channels } = self.input() else { unreachable!("images") };
        let each = height * width * channels;
        let images: Vec<f32> = (0..all * each).map(|_| random.normal()).collect();
        let targets: Vec<i32> = (0..all).map(|_| random.below(10) as i32).collect();
        let images = images[own.start * each..own.end * each].to_vec();
        Batch { size: own.len(), images, targets: targets[own].to_vec(), share, ..Batch::default() }
    }

    /// One part of one worker, which has met the others.
    fn joined(&self, rank: usize, mut world: Communicator) -> Replica {
        let (workers, parts) = (self.config.workers, self.config.parts());
        let mesh = Mesh::on_one_node(Extent { workers, stages: 1, parts, servers: 0 });
        let at = mesh.coordinates(Rank::at(rank)).unwrap();
        let form = self.config.part_form(at.part);
        let model = ModelStage::whole(zoo::find(self.model).unwrap()).in_parts(form.as_ref());
        let place = Place::Cpu(Arc::new(Cpu::new(1)));
        let mut replica = Replica::stage(model, self.options(at.data), &place).unwrap();
        if self.nudge > 0 {
            nudge(&mut replica, &[self.nudge, if self.apart { at.part as u64 } else { 0 }]);
        }
        let data = world.group(&mesh.group(Axis::Data, Rank::at(rank))).unwrap();
        if parts > 1 {
            let links = ReplicaLinks::Parts(Box::new(PartLinks::connect(&mut world, &mesh).unwrap()));
            replica.join_siblings(links).unwrap();
        }
        if workers > 1 {
            let (shape, roles) = (replica.shape(), Roles { workers, servers: 0 });
            let options = agree::Options { shard: replica.has_shard(), ..self.config.agreement(false) };
            let (deadline, clock) = (TIMEOUT, Clock::real());
            let join = Join {
                communicator: data,
                urgent: None,
                group: None,
                memory: None,
                lending: None,
                roles,
                shape: &shape,
                options,
                deadline,
                clock,
            };
            replica.agree(all_reduce::RECIPE.join(join).unwrap(), &Clock::real()).unwrap();
            let (input, shape) = (self.input(), fingerprint(&shape));
            let known = ServerOptions { step: 0, steps_per_epoch: STEPS, input, classes: 10, shape };
            replica.begin_together(0, known.identity()).unwrap();
        }
        replica
    }

    /// What it has trained.
    fn part(&self, rank: usize, world: Communicator) -> Trained {
        let (mut replica, parts) = (self.joined(rank, world), self.config.parts());
        let begun = tensors(&replica).0;
        if self.apart {
            nudge(&mut replica, &[self.nudge, (rank % parts) as u64]);
        }
        Trained { begun, ..self.train(replica, rank / parts) }
    }

    fn train(&self, mut replica: Replica, worker: usize) -> Trained {
        let clock = Clock::real();
        let step = |step: u64| {
            let (batch, moment) = (self.batch(step, worker), Moment { step, learning_rate: self.learning_rate });
            let output = replica.step(&batch, moment, &mut Phases::start(&clock)).unwrap();
            output.updated.unwrap();
            output.tally.mean_loss()
        };
        let losses = (0..STEPS).map(step).collect();
        replica.settle().unwrap().unwrap();
        let tally = replica.evaluate(&first(&self.batch(0, worker), replica.options().micro_batch)).unwrap().1;
        let evaluated = replica.total(tally).unwrap().mean_loss();
        let (tensors, momentum) = tensors(&replica);
        Trained { tensors, begun: BTreeMap::new(), momentum, losses, evaluated }
    }

    /// All parts of all workers; the tensors of the first worker put together.
    fn run(&self) -> Trained {
        let parts = self.config.parts();
        let mut all: Vec<Trained> = std::thread::scope(|scope| {
            let run = |(rank, world)| scope.spawn(move || self.part(rank, world));
            let ranks = communicators(self.carry, parts * self.config.workers);
            let threads: Vec<_> = ranks.into_iter().enumerate().map(run).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let mut whole = all.remove(0);
        for (number, other) in all.iter().enumerate() {
            assert_eq!((&whole.losses, whole.evaluated), (&other.losses, other.evaluated), "all hear the same");
            if number + 1 < parts {
                put_together(&mut whole.begun, &other.begun);
                put_together(&mut whole.tensors, &other.tensors);
                // Of a divided optimizer, each worker has its chunks.
                if self.config.workers == 1 {
                    put_together(&mut whole.momentum, &other.momentum);
                }
            }
        }
        whole
    }

    /// Trains in parts and whole.
    fn follows(&self) {
        self.follow_all(&[self.split]);
    }

    /// Trains in parts by every one of these splits, and whole once.
    fn follow_all(&self, splits: &[&'static str]) {
        let with = |split: &str| Config { split: split.parse().unwrap(), ..self.config.clone() };
        let whole = Self { config: with("replicate"), ..self.clone() }.run();
        for split in splits {
            let found = Self { config: with(split), ..self.clone() }.run();
            close(&found, &whole, &format!("{} {split} {:?}", self.model, self.carry));
        }
    }
}

/// Trains in parts and whole, in steps so small that all gradients are those of the first weights: batch-norms over few numbers magnify
/// rounding from layer to layer, and step by step that would grow without bound. What ten steps have gathered of gradients (the optimizer's
/// momentum), weights with statistics, and losses are within 1e-5, or hardly farther than those of a whole model whose weights begin with
/// other last bits.
fn as_near_as_rounding(case: &Case, splits: &[&'static str]) {
    let with = |split: &str| Config { split: split.parse().unwrap(), ..case.config.clone() };
    let whole = Case { config: with("replicate"), ..case.clone() };
    let expected = whole.run();
    let rounding = far(&Case { nudge: 1, ..whole }.run(), &expected);
    for split in splits {
        let found = far(&Case { config: with(split), ..case.clone() }.run(), &expected);
        println!("{} {split}: gradients, tensors and losses {found:?}, rounding {rounding:?}", case.model);
        for (found, rounding) in found.into_iter().zip(rounding) {
            assert!(
                found <= (4.0 * rounding).max(1e-5) && found < 0.7,
                "{} {split}: {found:e} {rounding:e}",
                case.model
            );
        }
    }
}

/// The largest distance of a tensor of the optimizer, and of weights and statistics, in parts of its length; and of a loss.
fn far(one: &Trained, other: &Trained) -> [f64; 3] {
    let norm = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let of = |one: &BTreeMap<String, Vec<f32>>, other: &BTreeMap<String, Vec<f32>>| {
        let apart = |(name, a): (&String, &Vec<f32>)| {
            let b = &other[name];
            let apart = norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied()).max(1e-3);
            assert!(apart.is_finite(), "{name}: all parts together have it");
            apart
        };
        one.iter().map(apart).fold(0.0, f64::max)
    };
    let losses = one.losses.iter().zip(&other.losses).map(|(a, b)| (a - b).abs() / b).fold(0.0, f64::max);
    [of(&one.momentum, &other.momentum), of(&one.tensors, &other.tensors), losses]
}

/// As many of the first samples of a batch.
fn first(batch: &Batch, most: usize) -> Batch {
    let size = batch.size.min(most);
    let part = |numbers: usize| numbers / batch.size * size;
    Batch {
        size,
        images: batch.images[..part(batch.images.len())].to_vec(),
        targets: batch.targets[..size].to_vec(),
        ..Batch::default()
    }
}

/// Changes the last bits of weights.
fn nudge(replica: &mut Replica, seed: &[u64]) {
    let mut random = Random::new(seed);
    let parameters = &mut replica.store_mut().parameters;
    parameters.iter_mut().for_each(|x| *x = f32::from_bits(x.to_bits() ^ random.below(2) as u32));
    replica.engine.load();
}

/// Fills in what another part has.
fn put_together(whole: &mut BTreeMap<String, Vec<f32>>, part: &BTreeMap<String, Vec<f32>>) {
    for (name, numbers) in part {
        let held = whole.entry(name.clone()).or_insert_with(|| vec![f32::NAN; numbers.len()]);
        for (one, other) in held.iter_mut().zip(numbers).filter(|(_, other)| !other.is_nan()) {
            assert!(one.is_nan() || *one == *other, "{name}: what several parts have is the same");
            *one = *other;
        }
    }
}

/// All parameters and states as they are in the whole model, and the optimizer's buffer, with no number where another part has it.
fn tensors(replica: &Replica) -> (BTreeMap<String, Vec<f32>>, BTreeMap<String, Vec<f32>>) {
    let (store, whole) = (replica.store(), replica.whole.as_ref());
    let put = |name: &String, tensor: Tensor, number: usize| {
        let (number, piece) = match whole {
            Some(whole) => whole.own(tensor).cloned().unwrap_or((0, Piece::Absent)),
            None => (number, Piece::Whole),
        };
        let own = match tensor {
            _ if piece == Piece::Absent => &[],
            Tensor::State(_) => store.state(number),
            Tensor::Parameter(_) => store.parameter(number),
            Tensor::Optimizer { .. } if replica.has_shard() => return (name.clone(), Vec::new()),
            Tensor::Optimizer { slot, .. } => &replica.engine.weights().optimizer[slot][store.layout().range(number)],
        };
        let mut all = vec![f32::NAN; whole.map_or(own.len(), |whole| whole.elements(tensor))];
        piece.put(own, &mut all);
        (name.clone(), all)
    };
    let (parameters, states) =
        whole.map_or((&replica.parameters, &replica.states), |whole| (&whole.parameters, &whole.states));
    let weights = parameters.iter().enumerate().map(|(index, one)| put(&one.name, Tensor::Parameter(index), index));
    let kept = states.iter().enumerate().map(|(index, one)| put(&one.name, Tensor::State(index), index));
    let momentum =
        parameters.iter().enumerate().map(|(index, one)| put(&one.name, Tensor::Optimizer { slot: 0, index }, index));
    (weights.chain(kept).collect(), momentum.collect())
}

fn close(one: &Trained, other: &Trained, what: &str) {
    assert_eq!(one.tensors.keys().collect::<Vec<_>>(), other.tensors.keys().collect::<Vec<_>>(), "{what}");
    for (name, numbers) in &one.tensors {
        let (a, b) = (numbers, &other.tensors[name]);
        let scale = a.iter().chain(b).fold(1.0f32, |scale, x| scale.max(x.abs()));
        let worst =
            a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |worst, x| if x <= worst { worst } else { x });
        assert!(worst <= 1e-5 * scale, "{what}: {name} differs by {worst}");
    }
    for (a, b) in one.losses.iter().zip(&other.losses).chain([(&one.evaluated, &other.evaluated)]) {
        assert!((a - b).abs() <= 1e-5 * a.abs().max(1.0), "{what}: losses {a} and {b}");
    }
}

#[test]
fn lenet5_in_parts_is_lenet5_over_every_carry() {
    for carry in Carry::ALL {
        let hybrid = "conv1=replicate,conv2=replicate,fc1=channel,fc2=channel:2";
        Case { carry, ..case("lenet5", 32, 6, hybrid) }.follow_all(&["channel:2", "channel:3", hybrid]);
    }
}

#[test]
fn a_batch_norm_model_by_channels_is_whole() {
    case("cnn5", 16, 6, "channel:2").follow_all(&["channel:2", "channel:4", "branch:2", "channel,fc=replicate:2"]);
}

#[test]
fn what_a_step_has_beside_it_goes_with_parts() {
    let base = case("cnn5", 16, 12, "channel:2");
    let with = |config: Config| Case { config, ..base.clone() };
    with(Config { clip_norm: Some(0.3), ..base.config.clone() }).follows();
    with(Config { accumulate: 3, ..base.config.clone() }).follows();
    Case { rest: 5, ..base.clone() }.follows();
    let lenet5 = case("lenet5", 32, 11, "conv1=replicate,conv2=replicate,fc1=channel,fc2=channel:2");
    Case { rest: 5, ..lenet5 }.follows();
}

#[test]
fn two_workers_of_two_parts_are_two_workers() {
    for carry in Carry::ALL {
        let base = case("cnn5", 16, 8, "channel:2");
        let two = Config { workers: 2, ..base.config.clone() };
        Case { carry, config: two.clone(), ..base.clone() }.follows();
        let clipped = Config { clip_norm: Some(0.3), ..two };
        Case { carry, config: clipped.clone(), ..base.clone() }.follows();
        let sharded = Config { shard: "optimizer".parse().unwrap(), ..clipped };
        Case { carry, config: sharded, ..base }.follows();
    }
}

#[test]
fn parts_that_rounding_has_told_apart_hear_the_same_and_come_together() {
    let hybrid = "conv1=replicate,conv2=replicate,fc1=channel,fc2=channel:2";
    for base in [case("lenet5", 32, 6, hybrid), case("cnn5", 16, 6, "channel:3")] {
        let apart = Case { nudge: 1, apart: true, ..base };
        apart.run();
        Case { config: Config { workers: 2, ..apart.config.clone() }, ..apart }.run();
    }
}

#[test]
fn a_part_says_what_it_has_seen_and_computes_nothing_again_without_the_others() {
    let case = case("lenet5", 32, 6, "channel:2");
    let find = &|(rank, world)| {
        let mut replica = case.joined(rank, world);
        let bias = replica.parameters.iter().position(|one| one.name == "fc3.bias").unwrap();
        replica.store_mut().parameter_mut(bias).fill(f32::NAN);
        let (batch, moment) = (case.batch(0, 0), Moment { step: 0, learning_rate: 0.1 });
        let output = replica.step(&batch, moment, &mut Phases::start(&Clock::real())).unwrap();
        assert_eq!(output.updated, Err(NotFinite::Loss));
        replica.find_non_finite(&batch, 0, NotFinite::Loss)
    };
    std::thread::scope(|scope| {
        let ranks = communicators(Carry::Thread, 2).into_iter().enumerate();
        let threads: Vec<_> = ranks.map(|rank| scope.spawn(move || find(rank))).collect();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), ("loss".to_owned(), "cross_entropy"));
        }
    });
}

#[test]
fn alexnet_with_its_dropout_is_alexnet() {
    let hybrid = "features=replicate,classifier=channel:2";
    case("alexnet", 64, 2, "channel:2").follow_all(&["channel:2", hybrid]);
}

fn slowly(model: &'static str, side: usize, batch: usize) -> Case {
    Case { learning_rate: 1e-7, ..case(model, side, batch, "channel:2") }
}

#[test]
#[ignore = "cargo x ci: parts"]
fn vgg11_in_parts_is_vgg11() {
    as_near_as_rounding(&slowly("vgg11", 32, 4), &["channel:2", "features=replicate,classifier=channel:2"]);
}

#[test]
#[ignore = "cargo x ci: parts"]
fn googlenet_in_parts_is_googlenet() {
    as_near_as_rounding(
        &slowly("googlenet", 64, 6),
        &["channel:2", "branch:2", "branch,conv1=channel,conv2=channel:2"],
    );
}

#[test]
#[ignore = "cargo x ci: parts"]
fn inceptionv3_in_parts_is_inceptionv3() {
    as_near_as_rounding(&slowly("inceptionv3", 75, 12), &["channel:2", "branch:2"]);
}
