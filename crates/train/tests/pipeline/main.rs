//! A model that is cut trains as it does whole: any model, any cut, any schedule, any number of micro-batches, stages as threads.

mod on_gpu;
#[path = "../together/world.rs"]
mod world;

use std::collections::BTreeMap;
use std::sync::Arc;

use paceline_comm::{Communicator, Rank};
use paceline_data::batch::Batch;
use paceline_data::order::{self, Shard, Share};
use paceline_nn::layer::{Conv, Window};
use paceline_nn::optim::{HyperParameters, Moment, Optimizer};
use paceline_nn::{Input, Model, Net, zoo};
use paceline_parallel::agree::{self, Join, Recipe, Roles, all_reduce};
use paceline_parallel::mesh::{Axis, Extent, Mesh};
use paceline_parallel::siblings::ReplicaLinks;
use paceline_parallel::split::{Kind, Schedule, StageTimes};
use paceline_parallel::stage::StageLinks;
use paceline_system::clock::Clock;
use paceline_system::random::Random;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::{GraphError, MemoryUse, Precision, Value};
use paceline_train::Config;
use paceline_train::engine::Place;
use paceline_train::micro_batch::MicroBatchSizes;
use paceline_train::phases::Phases;
use paceline_train::replica::{Replica, ReplicaOptions};
use paceline_train::serve::{ServerOptions, fingerprint};
use paceline_train::stage::ModelStage;
use proptest::prelude::*;
use world::{Carry, TIMEOUT, communicators};

const STEPS: u64 = 4;

/// What is trained, and how.
#[derive(Clone, Copy)]
struct Case<'a> {
    model: &'a (dyn Model + Sync),
    input: Input,
    classes: usize,
    batch: usize,
    micro_batches: usize,
    workers: usize,
    cuts: &'a [String],
    kind: Kind,
    clip_norm: Option<f64>,
    /// Every other batch has so few samples; 0 if all are whole.
    rest: usize,
    carry: Carry,
    /// The stages that compute on the first GPU; the others do on the CPU.
    on_gpu: &'a [usize],
}

/// Weights and states by name, and the losses.
#[derive(Debug, PartialEq)]
struct Trained {
    tensors: BTreeMap<String, Vec<f32>>,
    losses: Vec<f64>,
    accuracy: f64,
}

impl Trained {
    fn bits(&self) -> Vec<(String, Vec<u32>)> {
        let bits = |numbers: &Vec<f32>| numbers.iter().map(|x| x.to_bits()).collect();
        self.tensors.iter().map(|(name, numbers)| (name.clone(), bits(numbers))).collect()
    }
}

impl Case<'_> {
    fn place(&self, stage: usize) -> Place {
        let cpu = Arc::new(Cpu::new(1));
        let gpu = self.on_gpu.contains(&stage).then(|| on_gpu::gpu().expect("looked for before"));
        gpu.map_or_else(|| Place::Cpu(Arc::clone(&cpu)), |gpu| Place::Cuda(Arc::clone(&cpu), gpu))
    }

    fn options(&self, worker: usize, slots: usize) -> ReplicaOptions {
        let config = Config { batch: self.batch, accumulate: self.micro_batches, ..Config::default() };
        let shard = Shard { rank: worker, world: self.workers };
        let sizes = MicroBatchSizes::of(&config, shard, Some(self.batch + self.rest));
        ReplicaOptions {
            input: self.input,
            classes: self.classes,
            micro_batch: sizes.largest,
            other_sizes: sizes.others,
            accumulate: self.micro_batches,
            smoothing: 0.1,
            seed: 7,
            rule: Optimizer::Momentum.rule(&HyperParameters::default()).unwrap(),
            precision: Precision::F32,
            memory: MemoryUse::Normal,
            clip_norm: self.clip_norm,
            sync_batch_norm: false,
            overlap: true,
            hosted: self.workers > 1 && !self.on_gpu.is_empty(),
            separate_gradients: slots > 0 && self.kind == Kind::ZeroBubble,
            shard: None,
            slots,
        }
    }

    fn batch(&self, step: u64, worker: usize) -> Batch {
        let all = if self.rest > 0 && step % 2 == 1 { self.rest } else { self.batch };
        let mut random = Random::new(&[3, step]);
        let own = order::part(all, worker, self.workers);
        let share = Some(Share { first: own.start, all });
        match self.input {
            Input::Image { size: [height, width], channels } => {
                let each = height * width * channels;
                let images: Vec<f32> = (0..all * each).map(|_| random.normal()).collect();
                let targets: Vec<i32> = (0..all).map(|_| random.below(self.classes) as i32).collect();
                let images = images[own.start * each..own.end * each].to_vec();
                Batch { size: own.len(), images, targets: targets[own].to_vec(), share, ..Batch::default() }
            }
            Input::Tokens { sequence } => {
                let mut draw = || (0..all * sequence).map(|_| random.below(self.classes) as i32).collect::<Vec<_>>();
                let (tokens, targets) = (draw(), draw());
                let rows = own.start * sequence..own.end * sequence;
                let (tokens, targets) = (tokens[rows.clone()].to_vec(), targets[rows].to_vec());
                Batch { size: own.len(), tokens, targets, share, ..Batch::default() }
            }
        }
    }

    fn times(&self) -> Vec<StageTimes> {
        let of = |stage: usize| StageTimes { forward_s: 1.0, inputs_s: stage as f64, weights_s: 1.5 };
        (0..=self.cuts.len()).map(of).collect()
    }

    /// One stage of one worker.
    fn stage(&self, rank: usize, mut world: Communicator) -> Trained {
        let stages = self.cuts.len() + 1;
        let extent = Extent { workers: self.workers, stages, parts: 1, servers: 0 };
        let mesh = Mesh::on_one_node(extent);
        let at = mesh.coordinates(Rank::at(rank)).unwrap();
        let slots = match stages {
            1 => 0,
            _ => Schedule::new(self.kind, self.micro_batches, &self.times()).slots(at.stage),
        };
        let (options, place) = (self.options(at.data, slots), self.place(at.stage));
        let model = ModelStage { cuts: self.cuts, number: at.stage, ..ModelStage::whole(self.model) };
        let mut replica = Replica::stage(model, options, &place).unwrap();
        if self.workers > 1 {
            let communicator = world.group(&mesh.group(Axis::Data, Rank::at(rank))).unwrap();
            let (shape, roles) = (replica.shape(), Roles { workers: self.workers, servers: 0 });
            let (options, deadline, clock) = (agree::Options::default(), TIMEOUT, Clock::real());
            let join = Join {
                communicator,
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
            let (input, classes, shape) = (self.input, self.classes, fingerprint(&shape));
            let known = ServerOptions { step: 0, steps_per_epoch: STEPS, input, classes, shape };
            replica.begin_together(0, known.identity()).unwrap();
        }
        if stages > 1 {
            replica.schedule_by(self.kind, &self.times());
            let links = StageLinks::connect(&mut world, &mesh, replica.link_shapes(), TIMEOUT).unwrap();
            replica.join_siblings(ReplicaLinks::Stages(Box::new(links))).unwrap();
        }
        self.train(replica, at.data)
    }

    fn train(&self, mut replica: Replica, worker: usize) -> Trained {
        let clock = Clock::real();
        let step = |step: u64| {
            let (batch, moment) = (self.batch(step, worker), Moment { step, learning_rate: 0.02 });
            let output = replica.step(&batch, moment, &mut Phases::start(&clock)).unwrap();
            output.updated.unwrap();
            output.tally.mean_loss()
        };
        let losses = (0..STEPS).map(step).collect();
        replica.settle().unwrap().unwrap();
        replica.engine.fetch().unwrap();
        let examined = self.batch(0, worker);
        let count = examined.size.min(replica.options().micro_batch);
        let examined = first(&examined, count);
        let tally = replica.evaluate(&examined).unwrap().1;
        let accuracy = replica.total(tally).unwrap().mean_loss();
        let store = replica.store();
        let parameters =
            replica.parameters.iter().enumerate().map(|(i, p)| (p.name.clone(), store.parameter(i).to_vec()));
        let states = replica.states.iter().enumerate().map(|(i, s)| (s.name.clone(), store.state(i).to_vec()));
        Trained { tensors: parameters.chain(states).collect(), losses, accuracy }
    }

    /// All stages of all workers; the tensors of the first worker together.
    fn run(&self) -> Trained {
        let (stages, ranks) = (self.cuts.len() + 1, (self.cuts.len() + 1) * self.workers);
        let mut all: Vec<Trained> = std::thread::scope(|scope| {
            let run = |(rank, world)| scope.spawn(move || self.stage(rank, world));
            let threads: Vec<_> = communicators(self.carry, ranks).into_iter().enumerate().map(run).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for worker in 1..self.workers {
            for stage in 0..stages {
                let (one, other) = (&all[stage], &all[worker * stages + stage]);
                assert_eq!((&one.tensors, &one.losses), (&other.tensors, &other.losses), "workers agree");
            }
        }
        let others: Vec<Trained> = all.drain(1..stages).collect();
        let mut whole = all.swap_remove(0);
        for stage in others {
            assert_eq!((&whole.losses, whole.accuracy), (&stage.losses, stage.accuracy), "stages hear the same");
            whole.tensors.extend(stage.tensors);
        }
        whole
    }
}

/// The first samples of a batch.
fn first(batch: &Batch, count: usize) -> Batch {
    let part = |numbers: usize| numbers / batch.size * count;
    Batch {
        size: count,
        images: batch.images[..part(batch.images.len())].to_vec(),
        tokens: batch.tokens[..part(batch.tokens.len())].to_vec(),
        targets: batch.targets[..part(batch.targets.len())].to_vec(),
        ..Batch::default()
    }
}

fn close(one: &Trained, other: &Trained, what: &str) {
    assert_eq!(one.tensors.keys().collect::<Vec<_>>(), other.tensors.keys().collect::<Vec<_>>(), "{what}");
    for (name, numbers) in &one.tensors {
        let (a, b) = (numbers, &other.tensors[name]);
        let scale = a.iter().chain(b).fold(1.0f32, |scale, x| scale.max(x.abs()));
        let worst = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst <= 1e-5 * scale, "{what}: {name} differs by {worst}");
    }
    for (a, b) in one.losses.iter().zip(&other.losses).chain([(&one.accuracy, &other.accuracy)]) {
        assert!((a - b).abs() <= 1e-5 * a.abs().max(1.0), "{what}: losses {a} and {b}");
    }
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

const KINDS: [Kind; 3] = [Kind::GPipe, Kind::OneForwardOneBackward, Kind::ZeroBubble];

fn case<'a>(model: &'a (dyn Model + Sync), input: Input, batch: usize, micro_batches: usize) -> Case<'a> {
    let (kind, carry) = (Kind::default(), Carry::Thread);
    let (classes, workers, clip_norm, rest) = (10, 1, None, 0);
    let (cuts, on_gpu) = (&[], &[]);
    Case { model, input, classes, batch, micro_batches, workers, cuts, kind, clip_norm, rest, carry, on_gpu }
}

/// Trains whole and cut, by every schedule.
fn follows(what: &str, case: Case<'_>, cuts: &[&str]) {
    let (whole, cuts) = (case.run(), names(cuts));
    let mut first = None;
    for kind in KINDS {
        let split = Case { cuts: &cuts, kind, ..case }.run();
        close(&split, &whole, &format!("{what} {kind}"));
        let bits = split.bits();
        assert_eq!(*first.get_or_insert_with(|| bits.clone()), bits, "{what}: all schedules give the same bits");
    }
}

fn zoo_case(name: &str, cuts: &[&str], size: usize, batch: usize) {
    let entry = zoo::find(name).unwrap();
    follows(name, case(entry, native(entry.native, size), batch, 3), cuts);
}

/// What a model is given, of another size.
fn native(input: Input, size: usize) -> Input {
    match input {
        Input::Image { channels, .. } => Input::Image { size: [size, size], channels },
        Input::Tokens { .. } => Input::Tokens { sequence: size },
    }
}

#[test]
fn lenet5_in_two_stages_is_lenet5() {
    zoo_case("lenet5", &["conv2"], 32, 8);
}

#[test]
fn alexnet_with_its_dropout_in_two_stages_is_alexnet() {
    zoo_case("alexnet", &["features.8"], 64, 6);
}

#[test]
fn resnet20_in_three_stages_is_resnet20() {
    zoo_case("resnet20", &["layer1", "layer2"], 16, 9);
}

#[test]
fn an_lstm_has_a_layer_per_stage() {
    zoo_case("lstm", &["lstm.0"], 12, 8);
}

#[test]
#[ignore = "cargo x ci: pipelines"]
fn vgg11_and_googlenet_are_what_they_are_whole() {
    zoo_case("vgg11", &["features.8"], 32, 6);
    zoo_case("googlenet", &["inception4a"], 64, 6);
}

#[test]
#[ignore = "cargo x ci: pipelines"]
fn two_workers_of_two_stages_of_every_family_are_two_workers() {
    let models =
        [("lenet5", "conv2", 32), ("alexnet", "features.8", 64), ("resnet20", "layer2", 16), ("lstm", "lstm.0", 12)];
    for (name, cut, size) in models.into_iter().chain([("vgg11", "features.8", 32), ("googlenet", "inception4a", 64)]) {
        let entry = zoo::find(name).unwrap();
        follows(name, Case { workers: 2, ..case(entry, native(entry.native, size), 8, 2) }, &[cut]);
    }
}

const SMALL: Input = Input::Image { size: [8, 8], channels: 3 };

/// A skip over two cuts, batch-norm, dropout, and an input that a later stage reads again.
fn skipping(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let a = net.conv("a", x, Conv::new(6, 3).pad(1))?;
    let b = net.conv("b", a, Conv::new(6, 3).pad(1))?;
    let b = net.batch_norm("b_norm", b)?;
    let b = net.relu(b)?;
    let c = net.conv("c", b, Conv::new(6, 3).pad(1))?;
    let c = net.add(c, a)?;
    let c = net.dropout(c, 0.3)?;
    let c = net.concat(&[c, x])?;
    let c = net.max_pool(c, Window::new(2))?;
    let flat = net.flatten(c)?;
    net.linear("head", flat, classes)
}

#[test]
fn what_skips_a_stage_travels_through_it() {
    follows("skipping", case(&skipping, SMALL, 12, 3), &["a", "b_norm", "c"]);
}

#[test]
fn gradients_are_clipped_to_the_norm_of_the_whole_model() {
    follows("clipped", Case { clip_norm: Some(0.3), ..case(&skipping, SMALL, 12, 2) }, &["b_norm"]);
}

#[test]
fn batches_need_not_be_multiples() {
    follows("rests", Case { rest: 5, ..case(&skipping, SMALL, 11, 4) }, &["a", "c"]);
    follows("fewer samples than micro-batches", Case { rest: 2, ..case(&skipping, SMALL, 11, 4) }, &["b_norm"]);
}

#[test]
fn two_workers_of_two_stages_are_two_workers() {
    for carry in Carry::ALL {
        follows("hybrid", Case { workers: 2, carry, ..case(&skipping, SMALL, 12, 2) }, &["b_norm"]);
    }
    follows("uneven shares", Case { workers: 2, rest: 5, ..case(&skipping, SMALL, 13, 2) }, &["b_norm"]);
}

/// A layer of a random network: its kind, and how far back the value that it reads besides is.
type Step = (u8, u8);

/// Convolutions, batch-norms, sums and dropouts in any order.
struct Random3(Vec<Step>);

impl Model for Random3 {
    fn build(&self, net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
        let mut values = vec![net.conv("stem", x, Conv::new(4, 3).pad(1))?];
        for (number, &(kind, back)) in self.0.iter().enumerate() {
            let (last, name) = (values[values.len() - 1], format!("layer{number}"));
            let other = values[values.len() - 1 - usize::from(back) % values.len()];
            let next = match kind % 5 {
                0 | 1 => net.conv(&name, last, Conv::new(4, 3).pad(1))?,
                2 => net.batch_norm(&name, last)?,
                3 => net.add(last, other)?,
                _ => net.dropout(last, 0.2)?,
            };
            values.push(if kind >= 5 { net.relu(next)? } else { next });
        }
        let flat = net.flatten(values[values.len() - 1])?;
        net.linear("head", flat, classes)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_network_cut_anywhere_trains_as_it_does_whole(
        steps in prop::collection::vec((0u8..10, any::<u8>()), 2..9),
        cuts in prop::collection::btree_set(0usize..8, 1..4),
        micro_batches in 1usize..5, kind in 0usize..3, workers in 1usize..3,
    ) {
        let named = |number: &usize| steps.get(*number).is_some_and(|(kind, _)| kind % 5 < 3);
        let cuts: Vec<String> = cuts.iter().filter(|number| named(number)).map(|number| format!("layer{number}")).collect();
        prop_assume!(!cuts.is_empty());
        let model = Random3(steps);
        let whole = Case { workers, ..case(&model, SMALL, 10, micro_batches) };
        let split = Case { cuts: &cuts, kind: KINDS[kind], ..whole };
        close(&split.run(), &whole.run(), "a random network");
    }
}
