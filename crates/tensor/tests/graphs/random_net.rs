//! Small random networks with their backward pass, and runs of them.

use paceline_system::random::Random;
use paceline_tensor::op::{BatchNorm, Rectifier};
use paceline_tensor::window::{Conv2d, Padding, Pool2d, PoolKind};
use paceline_tensor::{DType, Device, Executor, Graph, Op, Pass, Plan, Shape, Store, Unary, Value, Wanted, gradient};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

/// One layer: its kind, and which of the values so far it reads.
pub type Step = (u8, [u8; 3]);

/// The layers of a random network.
pub fn net() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec((0u8..16, any::<[u8; 3]>()), 1..12)
}

/// A network with its backward pass.
pub struct Net {
    pub graph: Graph,
    pub result: Value,
    gradients: Vec<Option<Value>>,
    /// Of the first input, where it is wanted.
    pub input_gradient: Option<Value>,
}

impl Net {
    /// Layers in a chain with branches, on small images, ending in a linear layer.
    pub fn build(steps: &[Step]) -> Self {
        let (graph, result) = Self::forward(steps);
        Self::with_gradients(graph, result)
    }

    /// The same as a stage of a pipeline: with the gradient of its input.
    pub fn stage(steps: &[Step]) -> Self {
        let (graph, result) = Self::forward(steps);
        Self::with_input_gradient(graph, result)
    }

    /// Without its backward pass.
    pub fn forward(steps: &[Step]) -> (Graph, Value) {
        let mut graph = Graph::new();
        let mut images = vec![graph.input("x", [3, 6, 5, 4], DType::F32)];
        for (number, &(kind, choice)) in steps.iter().enumerate() {
            let image = layer(&mut graph, &format!("layer{number}"), kind, choice, &images);
            images.push(image);
        }
        let last = *images.last().expect("there is the input");
        let pooled = push(&mut graph, "pool", Op::Pool2d(Pool2d::global(PoolKind::Average)), &[last]);
        let channels = graph.shape(pooled).last();
        let flat = push(&mut graph, "flat", Op::Reshape(Shape::from([3, channels])), &[pooled]);
        let (weight, bias) = (graph.parameter("head.weight", [2, channels]), graph.parameter("head.bias", [2]));
        let op = Op::MatMul { trans_a: false, trans_b: true, bias: true, relu: false };
        let result = push(&mut graph, "head", op, &[flat, weight, bias]);
        (graph, result)
    }

    pub fn with_gradients(graph: Graph, result: Value) -> Self {
        Self::differentiate(graph, result, None)
    }

    pub fn with_input_gradient(graph: Graph, result: Value) -> Self {
        let x = graph.inputs()[0];
        Self::differentiate(graph, result, Some(x))
    }

    fn differentiate(mut graph: Graph, result: Value, x: Option<Value>) -> Self {
        let dy = graph.input("dy", graph.shape(result).clone(), DType::F32);
        let parameters = graph.parameters().to_vec();
        let of: Vec<Value> = parameters.iter().copied().chain(x).collect();
        let gradients = gradient::differentiate(&mut graph, result, dy, &of).expect("every layer has one");
        let input_gradient = x.and_then(|x| gradients.of(x));
        let gradients = parameters.iter().map(|&parameter| gradients.of(parameter)).collect();
        Self { graph, result, gradients, input_gradient }
    }

    pub fn wanted(&self, unfused: bool) -> Wanted {
        let (outputs, gradients) = (vec![self.result], self.gradients.clone());
        let input_gradients = self.input_gradient.into_iter().collect();
        Wanted { outputs, input_gradients, gradients, bucket_bytes_max: 256, unfused, ..Wanted::default() }
    }

    pub fn plan(&self, unfused: bool) -> Plan {
        Plan::new(self.graph.clone(), &self.wanted(unfused))
    }

    pub fn executor(&self, device: &Device, unfused: bool) -> (Executor, Store) {
        self.executor_of(device, self.plan(unfused))
    }

    /// An executor and a store, filled with numbers.
    pub fn executor_of(&self, device: &Device, plan: Plan) -> (Executor, Store) {
        let mut random = Random::new(&[17]);
        let mut store = Store::new(&plan);
        store.parameters.iter_mut().for_each(|x| *x = random.uniform() - 0.5);
        store.states.fill(1.0);
        // What is not computed stays poisoned, except the gradients that nobody computes.
        let computed = self.gradients.iter().enumerate().filter(|(_, gradient)| gradient.is_some());
        for (index, _) in computed.filter(|_| plan.stores_gradients()) {
            store.gradients[plan.parameters().range(index)].fill(f32::NAN);
        }
        let mut executor = Executor::new(device, plan).unwrap();
        self.fill(&mut executor);
        (executor, store)
    }

    /// Poisons the arena and writes the inputs.
    pub fn fill(&self, executor: &mut Executor) {
        self.fill_with(executor, 18);
    }

    /// The same with other numbers.
    pub fn fill_with(&self, executor: &mut Executor, seed: u64) {
        let mut random = Random::new(&[seed]);
        executor.poison().unwrap();
        for &input in self.graph.inputs() {
            let numbers = (0..self.graph.shape(input).elements()).map(|_| 2.0 * random.uniform() - 1.0);
            executor.write(input, &numbers.collect::<Vec<f32>>()).unwrap();
        }
    }

    /// Whether the result depends on every parameter.
    pub fn has_every_gradient(&self) -> bool {
        self.gradients.iter().all(Option::is_some)
    }
}

/// Linear layers with ReLU between them, three rows at a time.
pub fn chain(widths: &[usize]) -> Net {
    let (graph, result) = chain_forward(widths);
    Net::with_gradients(graph, result)
}

/// The same as a stage of a pipeline.
pub fn chain_stage(widths: &[usize]) -> Net {
    let (graph, result) = chain_forward(widths);
    Net::with_input_gradient(graph, result)
}

fn chain_forward(widths: &[usize]) -> (Graph, Value) {
    let mut graph = Graph::new();
    let mut x = graph.input("x", [3, widths[0]], DType::F32);
    for (number, pair) in widths.windows(2).enumerate() {
        let layer = format!("linear{number}");
        let weight = graph.parameter(&format!("{layer}.weight"), [pair[1], pair[0]]);
        let bias = graph.parameter(&format!("{layer}.bias"), [pair[1]]);
        let op = Op::MatMul { trans_a: false, trans_b: true, bias: true, relu: false };
        x = push(&mut graph, &layer, op, &[x, weight, bias]);
        x = push(&mut graph, &layer, Op::Unary(Unary::Relu), &[x]);
    }
    // The seed is read by a node of its own, so that every gradient is one too.
    let result = push(&mut graph, "scale", Op::Scale(0.5), &[x]);
    (graph, result)
}

pub fn push(graph: &mut Graph, layer: &str, op: Op, inputs: &[Value]) -> Value {
    graph.push_one(layer, op, inputs).expect("the shapes were chosen to fit")
}

/// A layer on one of the last images; the last kinds are small blocks.
fn layer(graph: &mut Graph, name: &str, kind: u8, choice: [u8; 3], images: &[Value]) -> Value {
    let recent = &images[images.len().saturating_sub(3)..];
    let x = if choice[0] < 160 { recent[recent.len() - 1] } else { recent[usize::from(choice[0]) % recent.len()] };
    let same = |graph: &Graph, dims: usize| {
        let fits: Vec<Value> =
            images.iter().copied().filter(|&other| graph.shape(other)[..dims] == graph.shape(x)[..dims]).collect();
        fits[usize::from(choice[1]) % fits.len()]
    };
    let channels = graph.shape(x).last();
    match kind {
        0..=2 => batch_norm(graph, name, x, choice[2] & 1 == 0),
        3 | 4 => push(graph, name, Op::Unary(Unary::Relu), &[x]),
        5 | 6 => {
            let kernel = [1, 3][usize::from(choice[1]) % 2];
            let outputs = 2 + usize::from(choice[2]) % 4;
            let weight = graph.parameter(name, [kernel, kernel, channels, outputs]);
            let conv = Conv2d { padding: Padding::all(kernel / 2), ..Conv2d::square(kernel) };
            push(graph, name, Op::Conv2d { conv, bias: false, relu: false, moments: false }, &[x, weight])
        }
        7..=9 => {
            let other = same(graph, 4);
            push(graph, name, Op::Add, &[x, other])
        }
        10 if channels < 20 => {
            let other = same(graph, 3);
            push(graph, name, Op::Concat { dim: 3 }, &[x, other])
        }
        11 if graph.shape(x)[1] > 2 && graph.shape(x)[2] > 2 => {
            let kind = if choice[1] & 1 == 0 { PoolKind::Max } else { PoolKind::Average };
            push(graph, name, Op::Pool2d(Pool2d::sliding(kind, 2, 1)), &[x])
        }
        12..=15 => block(graph, name, x, same(graph, 4), choice),
        _ => push(graph, name, Op::Unary(Unary::Tanh), &[x]),
    }
}

/// What fusion looks for: batch-norm, an addition of one thing or another, ReLU or not.
fn block(graph: &mut Graph, name: &str, x: Value, other: Value, choice: [u8; 3]) -> Value {
    let y = batch_norm(graph, name, x, choice[2] & 1 == 0);
    let sum = match choice[2] >> 1 & 3 {
        0 => y,
        1 => push(graph, name, Op::Add, &[y, other]),
        2 => push(graph, name, Op::Add, &[other, y]),
        _ => {
            let shortcut = batch_norm(graph, &format!("{name}.shortcut"), other, true);
            push(graph, name, Op::Add, &[y, shortcut])
        }
    };
    if choice[2] >> 3 & 3 == 0 { sum } else { push(graph, name, Op::Unary(Unary::Relu), &[sum]) }
}

pub fn batch_norm(graph: &mut Graph, name: &str, x: Value, scale: bool) -> Value {
    let channels = [graph.shape(x).last()];
    let mut inputs = vec![x, graph.parameter(&format!("{name}.beta"), channels)];
    inputs.extend(["mean", "variance"].map(|state| graph.state(&format!("{name}.{state}"), channels)));
    inputs.extend(scale.then(|| graph.parameter(&format!("{name}.gamma"), channels)));
    let norm =
        BatchNorm { epsilon: 0.1, momentum: 0.1, scale, residual: false, rectifier: Rectifier::None, moments: false };
    push(graph, name, Op::BatchNorm(norm), &inputs)
}

/// What one run left behind.
#[derive(Debug, PartialEq)]
pub struct Run {
    pub nodes: usize,
    pub result: Vec<f32>,
    pub gradients: Vec<Vec<f32>>,
    pub states: Vec<f32>,
    pub input_gradient: Vec<f32>,
}

impl Run {
    pub fn of(net: &Net, device: &Device, unfused: bool) -> Self {
        Self::with(net, device, &net.wanted(unfused))
    }

    pub fn with(net: &Net, device: &Device, wanted: &Wanted) -> Self {
        let (mut executor, mut store) = net.executor_of(device, Plan::new(net.graph.clone(), wanted));
        executor.run(&mut store, Pass::default()).unwrap();
        Self {
            nodes: executor.plan().graph().nodes().len(),
            result: executor.read(net.result).unwrap(),
            gradients: (0..net.graph.parameters().len()).map(|index| store.gradient(index).to_vec()).collect(),
            states: store.states.to_vec(),
            input_gradient: net.input_gradient.map_or_else(Vec::new, |value| executor.read(value).unwrap()),
        }
    }
}

/// Equal to 1e-5 of the tensor's largest magnitude, or of 1e-2 where all is smaller: some gradients are zero in theory
/// (an offset before a normalisation) and rounding in practice.
pub fn close(what: &str, a: &[f32], b: &[f32]) -> Result<(), TestCaseError> {
    close_from(1e-2, what, a, b)
}

/// The same with another magnitude below which all is noise.
pub fn close_from(least: f32, what: &str, a: &[f32], b: &[f32]) -> Result<(), TestCaseError> {
    let scale = a.iter().chain(b).fold(least, |scale, x| scale.max(x.abs()));
    for (index, (a, b)) in a.iter().zip(b).enumerate() {
        prop_assert!((a - b).abs() <= 1e-5 * scale, "{} element {}: {} and {} (scale {})", what, index, a, b, scale);
    }
    prop_assert_eq!(a.len(), b.len());
    Ok(())
}
