//! Every model against PyTorch: logits in evaluation and training, loss, every parameter's gradient, the running
//! statistics afterwards; and ten steps of training.
//!
//! The fixtures were computed in float64 by `tools/fixtures.py`, which says how to make them again.

#[path = "support/families.rs"]
mod families;
#[path = "support/rule.rs"]
mod rule;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use paceline_nn::optim::{Buffers, HyperParameters, Moment, Optimizer, Segment, Tools, state_of};
use paceline_nn::{Input, Mode, Model, Net, Network, Parameter, State, zoo};
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::device::{Device, cuda};
use paceline_tensor::execute::{Executor, Pass};
use paceline_tensor::plan::{Plan, Wanted};
use paceline_tensor::store::Store;
use paceline_tensor::{GraphError, Value};
use serde::Deserialize;

/// How far a number may be from PyTorch's, relative to the tensor it belongs to.
const TOLERANCE: f64 = 1e-4;

/// How many errors of float32 a fixture's ReLUs and maxima must at least be from their kinks: on the other side of one, a
/// gradient jumps by more than the tolerance, however exact a kernel is. `tools/fixtures.py` has it too.
const MARGIN: f64 = 3.0;

/// A gradient that is zero by symmetry (a bias before a normalisation) is only zero up to rounding: below this share of
/// the model's largest gradient norm, the tolerance no longer shrinks.
const FLOOR: f64 = 1e-3;

#[derive(Deserialize)]
struct Fixture {
    rule: u32,
    size: Vec<usize>,
    classes: usize,
    draw: String,
    redrawn: rule::Redrawn,
    /// How far ReLUs are from their kinks, in errors of float32; nothing where there are none.
    margin: Option<f64>,
    eval_logits: Vec<f64>,
    train_logits: Vec<f64>,
    loss: f64,
    gradients: BTreeMap<String, Vec<f64>>,
    states: BTreeMap<String, Vec<f64>>,
}

fn read<T: for<'a> Deserialize<'a>>(name: &str) -> T {
    // On a machine that only has the tests, the tree may be elsewhere: then this one runs in its root.
    let built = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let folder = if built.is_dir() { built } else { PathBuf::from("crates/nn/tests/fixtures") };
    let path = folder.join(format!("{name}.json"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap()
}

/// A model without its dropout layers.
struct Certain(&'static zoo::Entry);

impl Model for Certain {
    fn build(&self, net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
        net.without_dropout();
        self.0.build(net, x, classes)
    }
}

/// A network bound to a device.
struct Bound {
    executor: Executor,
    parameters: Vec<Parameter>,
    states: Vec<State>,
    ends: rule::Ends,
    logits: Value,
    loss: Value,
    seed: Option<Value>,
}

impl Bound {
    fn new(device: &Device, name: &str, mode: Mode, size: &[usize], classes: usize) -> Self {
        let input = match *size {
            [_, side, channels] => Input::Image { size: [side, side], channels },
            [_, sequence] => Input::Tokens { sequence },
            _ => panic!("{name}: {size:?} is neither an image nor a sequence"),
        };
        let network = Network::new(&Certain(zoo::find(name).unwrap()), mode, size[0], input, classes, 0.0).unwrap();
        let ends = rule::Ends::of(&network);
        let (seed, gradients) = network.gradients.map_or((None, Vec::new()), |(seed, gradients)| {
            (Some(seed), network.graph.parameters().iter().map(|&parameter| gradients.of(parameter)).collect())
        });
        let outputs = vec![network.logits, network.loss];
        // Every convolution counts for the batch-norm behind it, even of images too small for that to pay.
        let moments_from = 0;
        let wanted = Wanted { outputs, gradients, bucket_bytes_max: 1 << 22, moments_from, ..Wanted::default() };
        let executor = Executor::new(device, Plan::new(network.graph, &wanted)).unwrap();
        let (parameters, states, logits, loss) = (network.parameters, network.states, network.logits, network.loss);
        Self { executor, parameters, states, ends, logits, loss, seed }
    }

    /// Runs one batch and returns its loss.
    fn run(&mut self, store: &mut Store, draw: &str) -> f64 {
        self.ends.write(&mut self.executor, draw);
        if let Some(seed) = self.seed {
            self.executor.write(seed, &[1.0f32]).unwrap();
        }
        self.executor.run(store, Pass::default()).unwrap();
        f64::from(self.executor.read::<f32>(self.loss).unwrap()[0])
    }

    fn logits(&self) -> Vec<f64> {
        self.executor.read::<f32>(self.logits).unwrap().into_iter().map(f64::from).collect()
    }
}

/// What disagrees, in sentences.
#[derive(Default)]
struct Complaints(Vec<String>);

impl Complaints {
    fn compare(&mut self, what: &str, found: &[f64], expected: &[f64], scale: f64) {
        assert_eq!(found.len(), expected.len(), "{what}");
        // A NaN is infinitely far from everything; f64::max alone would skip it.
        let further = |most: f64, apart: f64| if apart.is_nan() { f64::INFINITY } else { most.max(apart) };
        let apart = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, further) / scale;
        if apart > TOLERANCE {
            self.0.push(format!("{what}: {apart:.1e} apart: {found:.6?} is not {expected:.6?}"));
        }
    }
}

/// Norm, dot product with the vector named after the tensor, and so many sampled elements, in PyTorch's order.
fn summary(name: &str, foreign: &[f32], samples: usize) -> Vec<f64> {
    let norm = foreign.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
    let vector = rule::uniform(&format!("dot:{name}"), foreign.len());
    let dot = foreign.iter().zip(vector).map(|(&x, u)| f64::from(x) * f64::from(u)).sum();
    let chosen = rule::below(&format!("sample:{name}"), samples, foreign.len());
    [norm, dot].into_iter().chain(chosen.into_iter().map(|index| f64::from(foreign[index]))).collect()
}

fn cpu() -> Device {
    Device::cpu(std::thread::available_parallelism().map_or(1, usize::from))
}

/// The first GPU, if there is one.
fn gpu() -> Option<Device> {
    static GPU: OnceLock<Option<Device>> = OnceLock::new();
    let device = GPU.get_or_init(|| {
        cuda::count().ok().filter(|&count| count > 0)?;
        let options = cuda::Options { tf32: false, deterministic: true, tune: false };
        Some(Device::Cuda(Arc::new(cuda::Cuda::new(0, options).unwrap_or_else(|error| panic!("{error}")))))
    });
    device.clone()
}

fn check_on_a_gpu(name: &str) {
    match gpu() {
        Some(gpu) => check_on(name, &gpu),
        None => drop(writeln!(std::io::stderr(), "skipped: on_a_gpu::{name}: no GPU")),
    }
}

fn check_on(name: &str, device: &Device) {
    // One model at a time: the large ones take two gigabytes, and each uses every core.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let fixture: Fixture = read(name);
    assert_eq!(fixture.rule, rule::VERSION, "run tools/fixtures.py: the rule has changed");
    assert!(fixture.margin.is_none_or(|margin| margin >= MARGIN), "run tools/fixtures.py: a ReLU is near its kink");
    let mut complaints = Complaints::default();
    let largest = |values: &[f64]| values.iter().fold(0.0f64, |most, value| most.max(value.abs()));

    let mut train = Bound::new(device, name, Mode::Train, &fixture.size, fixture.classes);
    let mut store = Store::new(train.executor.plan());
    rule::fill(&train.parameters, &train.states, &fixture.redrawn, &mut store);

    let mut eval = Bound::new(device, name, Mode::Eval, &fixture.size, fixture.classes);
    eval.run(&mut store, &fixture.draw);
    complaints.compare("logits in evaluation", &eval.logits(), &fixture.eval_logits, largest(&fixture.eval_logits));
    drop(eval);

    let loss = train.run(&mut store, &fixture.draw);
    complaints.compare("logits in training", &train.logits(), &fixture.train_logits, largest(&fixture.train_logits));
    complaints.compare("loss", &[loss], &[fixture.loss], fixture.loss);

    let known: Vec<&String> = fixture.gradients.keys().collect();
    let mut names: Vec<&String> = train.parameters.iter().map(|parameter| &parameter.name).collect();
    names.sort_unstable();
    assert_eq!(names, known, "the parameters have PyTorch's names");
    let floor = FLOOR * fixture.gradients.values().fold(0.0f64, |most, gradient| most.max(gradient[0]));
    for (index, parameter) in train.parameters.iter().enumerate() {
        let expected = &fixture.gradients[&parameter.name];
        let foreign = parameter.layout.to_foreign(&parameter.shape, store.gradient(index));
        let found = summary(&parameter.name, &foreign, expected.len() - 2);
        complaints.compare(&format!("gradient of {}", parameter.name), &found, expected, expected[0].max(floor));
    }
    assert_eq!(train.states.len(), fixture.states.len());
    for (index, state) in train.states.iter().enumerate() {
        let expected = &fixture.states[&state.name];
        let found = summary(&state.name, store.state(index), 0);
        complaints.compare(&format!("{} after a step", state.name), &found, expected, expected[0]);
    }
    let count = complaints.0.len();
    complaints.0.truncate(12);
    assert!(
        count == 0,
        "{name} on {}: {count} disagreements, the first {}:\n{}",
        if matches!(device, Device::Cuda(_)) { "a GPU" } else { "the CPU" },
        complaints.0.len(),
        complaints.0.join("\n")
    );
}

macro_rules! follows_pytorch {
    (representatives: $($name:ident)*; others: $($other:ident)*;) => {
        mod follows_pytorch {
            $(#[test] fn $name() { super::check_on(stringify!($name), &super::cpu()); })*
            $(#[test] #[ignore = "cargo x ci: models"] fn $other() { super::check_on(stringify!($other), &super::cpu()); })*
        }

        mod on_a_gpu {
            $(#[test] fn $name() { super::check_on_a_gpu(stringify!($name)); })*
            $(#[test] fn $other() { super::check_on_a_gpu(stringify!($other)); })*
        }

        #[test]
        fn every_model_of_the_zoo_is_compared() {
            let names = |representatives| families::models(representatives).map(|entry| entry.name).collect::<Vec<_>>();
            assert_eq!(names(true), [$(stringify!($name)),*]);
            assert_eq!(names(false), [$(stringify!($other)),*]);
        }
    };
}

follows_pytorch! {
    representatives: mlp lenet5 cnn5 resnet20 alexnet vgg11_bn resnet152 resnet50v2 googlenet mobilenet xception gpt;
    others:
    resnet9
    vgg11 vgg13 vgg16 vgg19 vgg13_bn vgg16_bn vgg19_bn
    resnet18 resnet34 resnet50 resnet101
    resnet101v2 resnet152v2
    inceptionv3 inceptionresnetv2
    lstm;
}

#[derive(Deserialize)]
struct Steps {
    rule: u32,
    size: Vec<usize>,
    classes: usize,
    lr: f32,
    momentum: f32,
    weight_decay: f32,
    losses: Vec<f64>,
}

#[test]
fn ten_steps_of_resnet20_follow_pytorch() {
    let fixture: Steps = read("resnet20_steps");
    assert_eq!((fixture.rule, fixture.losses.len()), (rule::VERSION, 10));
    let mut train = Bound::new(&cpu(), "resnet20", Mode::Train, &fixture.size, fixture.classes);
    let mut store = Store::new(train.executor.plan());
    rule::fill(&train.parameters, &train.states, &rule::Redrawn::new(), &mut store);
    let layout = store.layout().clone();
    let segments: Vec<Segment> = train
        .parameters
        .iter()
        .enumerate()
        .map(|(index, parameter)| Segment { range: layout.range(index), decay: parameter.decay })
        .collect();
    let Steps { lr: learning_rate, momentum, weight_decay, .. } = fixture;
    let hyper = HyperParameters { momentum, weight_decay: Some(weight_decay), ..HyperParameters::default() };
    let optimizer = Optimizer::Momentum.rule(&hyper).unwrap();
    let (mut state, cpu, mut sums) = (optimizer.new_state(layout.length()), Cpu::new(1), Vec::new());
    for (step, expected) in (0..).zip(fixture.losses) {
        let loss = train.run(&mut store, &format!(":{step}"));
        assert!((loss / expected - 1.0).abs() < 1e-3, "step {step}: the loss {loss} is not {expected}");
        let state = state_of(&mut state, 0..layout.length());
        let buffers = Buffers { start: 0, weights: &mut store.parameters, gradients: &store.gradients, state };
        optimizer.update(Moment { step, learning_rate }, &segments, buffers, &mut Tools { cpu: &cpu, sums: &mut sums });
    }
}
