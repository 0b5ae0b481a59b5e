//! Steps on a GPU in which the host takes part, beside steps that are one graph: where a replica's sums are
//! its own gradients, the same kernels compute both, and weights are equal to the bit. On a machine without a
//! GPU the tests say that they are skipped.

use std::collections::BTreeMap;
use std::io::Write;
use std::ops::Range;
use std::sync::Arc;

use paceline_nn::layer::Conv;
use paceline_nn::optim::{self, HyperParameters, Optimizer, Rule};
use paceline_nn::{Input, Mode, Net, Network, Parameter, State};
use paceline_system::random::Random;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::device::cuda::session::{
    Blueprint, DeviceBindings, DeviceOutput, Part, Samples, Session, StepNumbers,
};
use paceline_tensor::device::cuda::{self, Cuda, CudaError};
use paceline_tensor::execute::{Executor, Pass, Turn};
use paceline_tensor::plan::{Bucket, Plan, Updates, Wanted};
use paceline_tensor::store::Store;
use paceline_tensor::{Buffer, Device, GraphError, Precision, Value};

const CLASSES: usize = 10;
const SIDE: usize = 12;
const PIXELS: usize = SIDE * SIDE * 3;
const RATE: f32 = 0.01;

fn gpu(test: &str) -> Option<Arc<Cuda>> {
    if cuda::count().is_ok_and(|count| count > 0) {
        let options = cuda::Options { tf32: false, deterministic: true, tune: false };
        return Some(Arc::new(Cuda::new(0, options).unwrap_or_else(|error| panic!("{error}"))));
    }
    let _ = writeln!(std::io::stderr(), "skipped: {test}: no GPU");
    None
}

/// Convolutions, with a number of channels that does not fill a cache line, batch-norms, a residual sum and a
/// large matrix.
fn small(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let x = net.conv("conv1", x, Conv::new(16, 3).pad(1).no_bias())?;
    let x = net.batch_norm("bn1", x)?;
    let x = net.relu(x)?;
    let y = net.conv("conv2", x, Conv::new(16, 3).pad(1).no_bias())?;
    let y = net.batch_norm("bn2", y)?;
    let y = net.add(y, x)?;
    let y = net.relu(y)?;
    let y = net.conv("conv3", y, Conv::new(7, 3).stride(2))?;
    let y = net.batch_norm("bn3", y)?;
    let y = net.relu(y)?;
    let y = net.flatten(y)?;
    let y = net.linear("fc1", y, 40)?;
    let y = net.relu(y)?;
    net.linear("fc2", y, classes)
}

/// Matrices that take as long to copy as nodes take to compute: 38 and 17 MB.
fn wide(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let x = net.conv("conv1", x, Conv::new(64, 3).pad(1))?;
    let x = net.relu(x)?;
    let x = net.conv("conv2", x, Conv::new(128, 3).pad(1).stride(2).no_bias())?;
    let x = net.batch_norm("bn2", x)?;
    let x = net.relu(x)?;
    let x = net.flatten(x)?;
    let x = net.linear("fc1", x, 2048)?;
    let x = net.relu(x)?;
    let x = net.linear("fc2", x, 2048)?;
    let x = net.relu(x)?;
    net.linear("fc3", x, classes)
}

/// When a step by segments applies its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    /// In the backward pass, as soon as it may.
    AtOnce,
    /// Some in the backward pass, and some in the next forward pass.
    Late,
    /// In the next forward pass, where they are looked at for the first time.
    Latest,
}

#[derive(Clone, Copy)]
struct Setting {
    model: fn(&mut Net, Value, usize) -> Result<Value, GraphError>,
    batch: usize,
    optimizer: Optimizer,
    precision: Precision,
    parts: usize,
    norm_max: f32,
    updates: Updates,
    shares_statistics: bool,
}

const PLAIN: Setting = Setting {
    model: small,
    batch: 8,
    optimizer: Optimizer::Momentum,
    precision: Precision::F32,
    parts: 1,
    norm_max: f32::INFINITY,
    updates: Updates::FromArena,
    shares_statistics: false,
};

/// A model on a GPU, and the host's copy.
struct Trial {
    setting: Setting,
    session: Session,
    plan: Plan,
    store: Store,
    slots: Vec<Buffer>,
    rule: Rule,
    /// Sums that are applied late, if they were looked at, and the step they belong to.
    pending: BTreeMap<usize, (Option<Vec<f32>>, StepNumbers)>,
}

fn wanted(network: &Network, setting: &Setting) -> Wanted {
    Wanted {
        updates: setting.updates,
        precision: setting.precision,
        narrow_inputs: vec![network.x],
        moments_from: usize::MAX,
        shares_statistics: setting.shares_statistics,
        ..network.wanted(4096)
    }
}

fn ends(network: &Network) -> DeviceBindings {
    let seed = network.gradients.as_ref().map(|(seed, _)| *seed);
    DeviceBindings { x: network.x, targets: network.targets, logits: network.logits, seed }
}

fn network(mode: Mode, setting: &Setting) -> Network {
    let Setting { model, batch, .. } = *setting;
    Network::new(&model, mode, batch, Input::Image { size: [SIDE, SIDE], channels: 3 }, CLASSES, 0.1).unwrap()
}

fn filled(plan: &Plan, parameters: &[Parameter], states: &[State]) -> Store {
    let mut store = Store::new(plan);
    for (index, parameter) in parameters.iter().enumerate() {
        parameter.init.fill(5, &parameter.name, &parameter.shape, store.parameter_mut(index));
    }
    states.iter().enumerate().for_each(|(index, state)| store.state_mut(index).fill(state.start));
    store
}

impl Trial {
    fn new(cuda: &Arc<Cuda>, setting: Setting) -> Self {
        let hyper = HyperParameters { weight_decay: Some(1e-3), ..HyperParameters::default() };
        let rule = setting.optimizer.rule(&hyper).unwrap();
        let (train, eval) = (network(Mode::Train, &setting), network(Mode::Eval, &setting));
        let plan = Plan::new(train.graph.clone(), &Wanted { beside: true, ..wanted(&train, &setting) });
        let eval_wanted = Wanted { updates: Updates::AtEnd, shares_statistics: false, ..wanted(&eval, &setting) };
        let eval_plan = Plan::new(eval.graph.clone(), &eval_wanted);
        let both = train.parameters.iter().zip(plan.parameters().ranges());
        let decays: Vec<_> = both.map(|(parameter, range)| (range.clone(), parameter.decay)).collect();
        let blueprint = Blueprint {
            train: &[(&plan, ends(&train))],
            eval: (&eval_plan, ends(&eval)),
            slots: setting.optimizer.state_slots(),
            parts: setting.parts > 1,
            decays: &decays,
            layer_rates: rule.layer_coefficient(),
        };
        let mut session = Session::new(cuda, &blueprint).unwrap_or_else(|error| panic!("{error}"));
        let store = filled(&plan, &train.parameters, &train.states);
        let slots = rule.new_state(plan.parameters().length());
        session.load(&store, &slots).unwrap();
        Self { setting, session, plan, store, slots, rule, pending: BTreeMap::new() }
    }

    fn moment(&self, step: u64) -> StepNumbers {
        let moment = optim::Moment { step, learning_rate: RATE * (1.0 + step as f32) };
        let rules = [false, true].map(|decays| self.rule.constants(moment, decays));
        StepNumbers { pass: Pass { seed: 3, step, ..Pass::default() }, norm_max: self.setting.norm_max, rules }
    }

    fn fill(&mut self, (images, targets): (&[f32], &[i32]), seed: f32) {
        self.session.fill(Samples::Images(images), targets, Some(seed)).unwrap();
    }

    /// A step as one graph, its batch in parts if that is the setting.
    fn step(&mut self, step: u64) -> DeviceOutput {
        let (moment, (images, targets)) = (self.moment(step), batch(step, self.setting.batch * self.setting.parts));
        let parts = self.setting.parts;
        for part in 0..parts {
            self.fill(part_of(&images, &targets, part, parts), 1.0 / parts as f32);
            match parts {
                1 => self.session.start(&moment).unwrap(),
                parts => self.session.start_part(&moment, (part, parts)).unwrap(),
            }
        }
        self.session.finish().unwrap()
    }

    /// The forward pass, in which late sums are applied just before their parameters are read.
    fn forward(&mut self) {
        let mut done = 0;
        for (node, bucket) in self.plan.needs().to_vec() {
            self.session.start_nodes(done..node).unwrap();
            done = node;
            if let Some((sums, moment)) = self.pending.remove(&bucket) {
                self.apply(bucket, sums, &moment);
            }
        }
        self.session.start_nodes(done..self.plan.forward_nodes()).unwrap();
        self.session.start_tally().unwrap();
    }

    /// Applies sums, which are the gradients that were fetched.
    fn apply(&mut self, bucket: usize, sums: Option<Vec<f32>>, moment: &StepNumbers) {
        let sums = sums.unwrap_or_else(|| self.session.gradients(bucket).unwrap().to_vec());
        self.session.apply_sums(bucket, &sums, moment).unwrap();
    }

    /// What happens after which node of the backward pass: a bucket is final, or it may be applied.
    fn turns(&self) -> Vec<(usize, bool, usize)> {
        let buckets = self.plan.buckets().iter().enumerate();
        let turns = buckets.flat_map(|(index, at)| [(at.ready_after, false, index), (at.apply_after, true, index)]);
        let mut turns: Vec<_> = turns.collect();
        turns.sort_unstable();
        turns
    }

    /// The rest of the backward pass.
    fn backward_rest(&mut self, done: usize) {
        self.session.start_nodes(done..self.plan.graph().nodes().len()).unwrap();
    }

    /// A step by segments, whose sums are the own gradients.
    fn hosted_step(&mut self, step: u64, when: When) -> DeviceOutput {
        let (moment, (images, targets)) = (self.moment(step), batch(step, self.setting.batch));
        self.fill((&images, &targets), 1.0);
        self.session.begin_step(&moment).unwrap();
        self.forward();
        let mut done = self.plan.forward_nodes();
        for (node, applies, bucket) in self.turns() {
            self.session.start_nodes(done..node + 1).unwrap();
            done = done.max(node + 1);
            if applies && when == When::Latest {
                self.pending.insert(bucket, (None, moment));
            } else if applies {
                let sums = self.session.gradients(bucket).unwrap().to_vec();
                if when == When::Late && bucket % 3 != 1 {
                    self.pending.insert(bucket, (Some(sums), moment));
                } else {
                    self.session.apply_sums(bucket, &sums, &moment).unwrap();
                }
            } else {
                self.session.fetch_gradients(bucket).unwrap();
            }
        }
        self.backward_rest(done);
        self.session.tally().unwrap()
    }

    /// A step by segments, whose gradients are looked at together, its batch in parts if that is the setting.
    fn hosted_step_together(&mut self, step: u64) -> DeviceOutput {
        let (moment, parts) = (self.moment(step), self.setting.parts);
        let (images, targets) = batch(step, self.setting.batch * parts);
        for part in 0..parts {
            self.fill(part_of(&images, &targets, part, parts), 1.0 / parts as f32);
            self.session.begin_step(&moment).unwrap();
            self.forward();
            if part + 1 < parts {
                self.backward_rest(self.plan.forward_nodes());
                self.session.accumulate(if part == 0 { Part::First } else { Part::Between }).unwrap();
            }
        }
        let mut done = self.plan.forward_nodes();
        for bucket in 0..self.plan.buckets().len() {
            let end = self.plan.buckets()[bucket].ready_after + 1;
            self.session.start_nodes(done..end).unwrap();
            done = done.max(end);
            if parts > 1 {
                self.session.accumulate(Part::Last { bucket }).unwrap();
            }
            self.session.fetch_gradients(bucket).unwrap();
        }
        self.backward_rest(done);
        for bucket in 0..self.plan.buckets().len() {
            let sums = self.session.gradients(bucket).unwrap().to_vec();
            self.session.give_sums(bucket, &sums).unwrap();
        }
        self.session.update_all(&moment).unwrap();
        self.session.finish().unwrap()
    }

    fn weights(&mut self) -> &[f32] {
        for (bucket, (sums, moment)) in std::mem::take(&mut self.pending) {
            self.apply(bucket, sums, &moment);
        }
        self.session.settle().unwrap();
        self.session.fetch(&mut self.store, &mut self.slots).unwrap();
        &self.store.parameters
    }
}

/// Images whose brightness tells their class.
fn batch(step: u64, size: usize) -> (Vec<f32>, Vec<i32>) {
    let mut random = Random::new(&[7, step]);
    let targets: Vec<i32> = (0..size).map(|_| random.below(CLASSES) as i32).collect();
    let images = targets.iter().enumerate().flat_map(|(index, &target)| {
        let mut noise = Random::new(&[9, step, index as u64]);
        (0..PIXELS).map(move |_| 0.3 * noise.normal() + target as f32 / 5.0 - 1.0)
    });
    (images.collect(), targets)
}

fn part_of<'a>(images: &'a [f32], targets: &'a [i32], part: usize, parts: usize) -> (&'a [f32], &'a [i32]) {
    let of = |length: usize| -> Range<usize> { length / parts * part..length / parts * (part + 1) };
    (&images[of(images.len())], &targets[of(targets.len())])
}

/// The length of the difference in lengths of `b`.
fn apart(a: &[f32], b: &[f32]) -> f64 {
    let length = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let difference = length(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b)));
    difference / length(&mut b.iter().map(|x| f64::from(*x))).max(f64::MIN_POSITIVE)
}

/// Six steps: call by call, recorded, replayed.
const STEPS: u64 = 6;

/// Compares steps by segments with steps that are one graph.
fn compare(cuda: &Arc<Cuda>, setting: Setting) {
    let (mut whole, text) = (Trial::new(cuda, setting), format!("{} {}", setting.optimizer.name(), setting.precision));
    let found: Vec<DeviceOutput> = (0..STEPS).map(|step| whole.step(step)).collect();
    let start = whole.store.parameters.to_vec();
    assert!(apart(&start, whole.weights()) > 1e-4, "{text}: weights move");
    for when in [When::AtOnce, When::Late, When::Latest] {
        let mut hosted = Trial::new(cuda, setting);
        hosted.session.host_exchange().unwrap();
        assert!(hosted.plan.buckets().len() > 3, "several buckets");
        for (step, found) in found.iter().enumerate() {
            let tally = hosted.hosted_step(step as u64, when);
            let counts = |found: &DeviceOutput| (found.loss, found.top1, found.top5);
            assert_eq!(counts(&tally), counts(found), "{text}, {when:?}, step {step}");
        }
        assert!(hosted.weights() == whole.weights(), "{text}, {when:?}: the same weights");
        assert!(hosted.slots.iter().zip(&whole.slots).all(|(a, b)| a[..] == b[..]), "{text}: the same optimizer");
        assert_eq!(hosted.session.spoiled_bucket(), Ok(None));
    }
}

#[test]
fn a_step_by_segments_gives_the_same_bits_as_one_graph() {
    let Some(cuda) = gpu("a_step_by_segments_gives_the_same_bits_as_one_graph") else { return };
    for optimizer in [Optimizer::Momentum, Optimizer::Adam, Optimizer::Lars, Optimizer::Sgd] {
        for precision in [Precision::F32, Precision::Bf16] {
            compare(&cuda, Setting { optimizer, precision, ..PLAIN });
        }
    }
}

#[test]
fn copies_that_take_as_long_as_the_computation_come_in_time() {
    let Some(cuda) = gpu("copies_that_take_as_long_as_the_computation_come_in_time") else { return };
    compare(&cuda, Setting { model: wide, batch: 64, ..PLAIN });
}

/// Compares steps by segments whose gradients are looked at together with steps that are one graph.
fn compare_together(cuda: &Arc<Cuda>, setting: Setting) {
    let Setting { optimizer, parts, norm_max, .. } = setting;
    let text = format!("{} in {parts}, norm {norm_max}", optimizer.name());
    let (mut whole, mut hosted) = (Trial::new(cuda, setting), Trial::new(cuda, setting));
    hosted.session.host_exchange().unwrap();
    for step in 0..STEPS {
        let (expected, found) = (whole.step(step), hosted.hosted_step_together(step));
        assert_eq!(found, expected, "{text}, step {step}");
        assert!(norm_max.is_infinite() || step > 0 || found.norm > f64::from(norm_max), "{found:?} is clipped");
    }
    assert!(hosted.weights() == whole.weights(), "{text}");
}

#[test]
fn gradients_that_are_clipped_together_give_the_same_bits_as_one_graph() {
    let Some(cuda) = gpu("gradients_that_are_clipped_together_give_the_same_bits_as_one_graph") else { return };
    compare_together(&cuda, Setting { norm_max: 0.1, ..PLAIN });
}

#[test]
fn a_batch_in_parts_gives_the_same_bits_as_one_graph() {
    let Some(cuda) = gpu("a_batch_in_parts_gives_the_same_bits_as_one_graph") else { return };
    compare_together(&cuda, Setting { optimizer: Optimizer::Lars, parts: 3, ..PLAIN });
    compare_together(&cuda, Setting { optimizer: Optimizer::Adam, parts: 2, norm_max: 0.1, ..PLAIN });
}

/// Gradients that live in the arena until they are applied, and matrices in parts, as on the CPU.
#[test]
fn a_plan_of_early_updates_follows_one_graph() {
    let Some(cuda) = gpu("a_plan_of_early_updates_follows_one_graph") else { return };
    let early = Setting { updates: Updates::Early { part_bytes_max: Some(8192) }, ..PLAIN };
    let (mut whole, mut hosted) = (Trial::new(&cuda, PLAIN), Trial::new(&cuda, early));
    hosted.session.host_exchange().unwrap();
    let is_part =
        |bucket: &Bucket| bucket.elements.len() < hosted.plan.parameters().range(bucket.parameters.start).len();
    assert!(hosted.plan.buckets().iter().any(is_part), "a tensor in parts");
    for step in 0..STEPS {
        let (expected, found) = (
            whole.step(step).loss,
            hosted.hosted_step(step, if step % 2 == 1 { When::Late } else { When::AtOnce }).loss,
        );
        assert!((found / expected - 1.0).abs() < 1e-4, "step {step}: {found} by parts, {expected} by one graph");
    }
    // Products of some rows may be computed by another algorithm: sums of f32 in another order.
    let distance = apart(hosted.weights(), whole.weights());
    assert!(distance < 1e-4, "{distance:e} apart");
}

#[test]
fn weights_that_are_replaced_are_those_that_are_fetched_and_computed_with() {
    let Some(cuda) = gpu("weights_that_are_replaced_are_those_that_are_fetched_and_computed_with") else { return };
    for precision in [Precision::F32, Precision::Bf16] {
        let setting = Setting { precision, ..PLAIN };
        let (mut replaced, mut loaded) = (Trial::new(&cuda, setting), Trial::new(&cuda, setting));
        replaced.session.host_exchange().unwrap();
        let mut random = Random::new(&[11]);
        for index in 0..loaded.plan.parameters().ranges().len() {
            loaded.store.parameter_mut(index).iter_mut().for_each(|x| *x = 0.1 * random.normal());
        }
        loaded.session.load(&loaded.store, &loaded.slots).unwrap();
        for _ in 0..3 {
            for (bucket, at) in replaced.plan.buckets().iter().enumerate() {
                let weights = &loaded.store.parameters[at.elements.clone()];
                replaced.session.replace_weights(bucket, weights).unwrap();
            }
        }
        assert!(replaced.weights() == &loaded.store.parameters[..], "{precision}: fetched");
        let (images, targets) = batch(0, setting.batch);
        let [found, expected] = [&mut replaced, &mut loaded].map(|trial| {
            trial.session.fill(Samples::Images(&images), &targets, None).unwrap();
            trial.session.evaluate().unwrap()
        });
        assert_eq!(found, expected, "{precision}: evaluated");
        assert_eq!(replaced.step(0), loaded.step(0), "{precision}: a step as one graph");
    }
}

#[test]
fn sums_that_are_no_numbers_change_nothing_and_are_told() {
    let Some(cuda) = gpu("sums_that_are_no_numbers_change_nothing_and_are_told") else { return };
    let mut trial = Trial::new(&cuda, PLAIN);
    trial.session.host_exchange().unwrap();
    let (before, moment) = (trial.weights().to_vec(), trial.moment(0));
    let mut sums = vec![1.0; trial.plan.buckets()[1].elements.len()];
    sums[1] = f32::NAN;
    trial.session.apply_sums(1, &sums, &moment).unwrap();
    assert!(trial.weights() == before);
    assert_eq!(trial.session.spoiled_bucket(), Ok(Some(1)));
}

/// One node of every replica, in its phases, with numbers that `add` adds up.
fn in_phases(trials: &mut [Trial], node: usize, add: &mut dyn FnMut(usize, &mut [Vec<f32>])) {
    let phases = trials[0].plan.sums(node).into_iter().filter(|&count| count > 0).count();
    for phase in 0..phases {
        trials.iter_mut().for_each(|trial| trial.session.start_sums(node, phase).unwrap());
        let own = trials.iter_mut().map(|trial| trial.session.sums(node, phase).unwrap().to_vec());
        let mut own: Vec<Vec<f32>> = own.collect();
        add(node, &mut own);
        for (trial, sums) in trials.iter_mut().zip(&own) {
            trial.session.sums(node, phase).unwrap().copy_from_slice(sums);
            trial.session.give_sums_back(node, phase).unwrap();
        }
    }
    trials.iter_mut().for_each(|trial| trial.session.start_rest(node).unwrap());
}

/// A step of replicas that compute the parts of a batch and have one batch-norm.
fn step_of_all(trials: &mut [Trial], step: u64, add: &mut dyn FnMut(usize, &mut [Vec<f32>])) {
    let (world, plan) = (trials.len(), trials[0].plan.clone());
    let (images, targets) = batch(step, world * trials[0].setting.batch);
    let moment = trials[0].moment(step);
    for (part, trial) in trials.iter_mut().enumerate() {
        trial.fill(part_of(&images, &targets, part, world), 1.0 / world as f32);
        trial.session.begin_step(&moment).unwrap();
    }
    let mut done = 0;
    for (node, _) in plan.nodes_with_sums() {
        trials.iter_mut().for_each(|trial| trial.session.start_nodes(done..node).unwrap());
        in_phases(trials, node, add);
        done = node + 1;
    }
    trials.iter_mut().for_each(|trial| trial.backward_rest(done));
    for bucket in 0..plan.buckets().len() {
        trials.iter_mut().for_each(|trial| trial.session.fetch_gradients(bucket).unwrap());
        let mut sums = vec![0.0; plan.buckets()[bucket].elements.len()];
        for trial in trials.iter_mut() {
            let gradients = trial.session.gradients(bucket).unwrap();
            sums.iter_mut().zip(gradients).for_each(|(sum, x)| *sum += *x);
        }
        trials.iter_mut().for_each(|trial| trial.session.apply_sums(bucket, &sums, &moment).unwrap());
    }
}

#[test]
fn batch_norms_of_two_replicas_follow_one_with_the_double_batch() {
    let Some(cuda) = gpu("batch_norms_of_two_replicas_follow_one_with_the_double_batch") else { return };
    for (precision, tolerance) in [(Precision::F32, 1e-4), (Precision::Bf16, 2e-2)] {
        let setting = Setting { precision, ..PLAIN };
        let mut alone = Trial::new(&cuda, Setting { batch: 2 * PLAIN.batch, ..setting });
        let mut trials = [(); 2].map(|()| Trial::new(&cuda, Setting { shares_statistics: true, ..setting }));
        assert_eq!(trials[0].plan.nodes_with_sums().count(), 6, "three batch-norms and their gradients");
        trials.iter_mut().for_each(|trial| trial.session.host_exchange().unwrap());
        for step in 0..STEPS {
            alone.step(step);
            step_of_all(&mut trials, step, &mut |_, own| {
                let sum: Vec<f32> = own[0].iter().zip(&own[1]).map(|(a, b)| a + b).collect();
                own.iter_mut().for_each(|numbers| numbers.copy_from_slice(&sum));
            });
        }
        let expected = alone.weights().to_vec();
        for trial in &mut trials {
            let distance = apart(trial.weights(), &expected);
            assert!(distance < tolerance, "{precision}: weights are {distance:e} apart");
            let distance = apart(&trial.store.states, &alone.store.states);
            assert!(distance < tolerance, "{precision}: states are {distance:e} apart");
        }
        let [first, second] = &mut trials;
        assert!(first.weights() == second.weights(), "{precision}: both have the same weights");
    }
}

/// Replicas on both kinds of device may train together: what they add up are the same numbers in the same
/// order.
#[test]
fn a_gpu_and_a_cpu_add_up_the_same_numbers() {
    let Some(cuda) = gpu("a_gpu_and_a_cpu_add_up_the_same_numbers") else { return };
    let setting = Setting { shares_statistics: true, ..PLAIN };
    let mut trials = [Trial::new(&cuda, setting)];
    trials[0].session.host_exchange().unwrap();
    let mut there: Vec<(usize, Vec<f32>)> = Vec::new();
    step_of_all(&mut trials, 0, &mut |node, own| there.push((node, own[0].clone())));
    let train = network(Mode::Train, &setting);
    let plan = Plan::new(train.graph.clone(), &wanted(&train, &Setting { updates: Updates::AtEnd, ..setting }));
    let mut store = filled(&plan, &train.parameters, &train.states);
    let mut executor = Executor::new(&Device::Cpu(Arc::new(Cpu::new(2))), plan).unwrap();
    let (images, targets) = batch(0, setting.batch);
    executor.write(train.x, &images).unwrap();
    executor.write(train.targets, &targets).unwrap();
    executor.write(train.gradients.as_ref().unwrap().0, &[1.0f32]).unwrap();
    let mut here: Vec<(usize, Vec<f32>)> = Vec::new();
    let pass = Pass { seed: 3, ..Pass::default() };
    let mut keep = |turn: Turn<'_>| {
        if let Turn::Sum { node, numbers } = turn {
            here.push((node, numbers.to_vec()));
        }
    };
    let mut forward = |turn: Turn<'_>| {
        keep(turn);
        Ok::<(), CudaError>(())
    };
    executor.forward_with(&mut store, pass, &mut forward).unwrap();
    executor
        .backward(&mut store, pass, &mut |turn| {
            keep(turn);
            true
        })
        .unwrap();
    assert_eq!(here.len(), 9, "two sums of three batch-norms, and one of each gradient");
    assert_eq!(there.len(), here.len());
    let mut last = usize::MAX;
    for ((node, expected), (found_node, found)) in here.iter().zip(&there) {
        assert_eq!((node, expected.len()), (found_node, found.len()));
        // The first sum of a node ends with the number of rows.
        let count = usize::from(std::mem::replace(&mut last, *node) != *node);
        let numbers = expected.len() - count;
        assert_eq!(found[numbers..], expected[numbers..], "node {node}: the number of rows");
        let distance = apart(&found[..numbers], &expected[..numbers]);
        assert!(distance < 1e-3, "node {node}: {distance:e} apart: {found:?} is not {expected:?}");
    }
}
