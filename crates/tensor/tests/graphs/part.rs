//! A graph in parts computes what it computes whole: results, gradients and states, for any forms and any number of parts.

use std::sync::{Barrier, Mutex};

use paceline_system::random::{Random, key_of_text};
use paceline_tensor::device::cuda::CudaError;
use paceline_tensor::execute::Turn;
use paceline_tensor::op::{Together, piece_range};
use paceline_tensor::part::{Form, Part, part, traffic, ways};
use paceline_tensor::window::{Conv2d, Padding, Pool2d, PoolKind};
use paceline_tensor::{
    DType, Device, Executor, Graph, Op, Pass, Plan, Precision, Shape, Store, Unary, Value, Wanted, gradient,
};
use proptest::prelude::*;

use super::random_net::{Net, Step, batch_norm, close_from, net, push};

/// Numbers that a name stands for.
fn numbers(key: &str, count: usize) -> Vec<f32> {
    let mut random = Random::new(&[key_of_text(key)]);
    (0..count).map(|_| random.uniform() - 0.5).collect()
}

/// A graph with its backward pass, on a device.
struct Bench {
    graph: Graph,
    /// The logits.
    result: Value,
    seed: Value,
    executor: Executor,
    store: Store,
}

impl Bench {
    fn new(graph: Graph, ends: [Value; 2], weights_last: bool) -> Self {
        Self::with(graph, ends, Wanted { weights_last, ..Wanted::default() })
    }

    fn with(mut graph: Graph, [result, loss]: [Value; 2], wanted: Wanted) -> Self {
        let (seed, gradients) = gradient::of_loss(&mut graph, loss).unwrap();
        let wanted = Wanted {
            outputs: vec![result, loss],
            gradients: graph.parameters().iter().map(|&parameter| gradients.of(parameter)).collect(),
            bucket_bytes_max: 256,
            ..wanted
        };
        let plan = Plan::new(graph.clone(), &wanted);
        let (store, executor) = (Store::new(&plan), Executor::new(&Device::cpu(1), plan).unwrap());
        Self { graph, result, seed, executor, store }
    }

    fn run(&mut self, answer: &mut dyn FnMut(Turn<'_>)) -> Vec<f32> {
        self.executor.poison().unwrap();
        for &input in self.graph.inputs().iter().chain([&self.seed]) {
            let info = self.graph.info(input);
            let given = numbers(&info.name, info.shape.elements());
            if info.dtype == DType::I32 {
                self.executor.write(input, &vec![1i32; given.len()]).unwrap();
            } else {
                self.executor.write(input, &given).unwrap();
            }
        }
        let pass = Pass { seed: 5, step: 2, first_sample: 6, samples: 3 };
        self.executor
            .forward_with(&mut self.store, pass, &mut |turn| {
                answer(turn);
                Ok::<(), CudaError>(())
            })
            .unwrap();
        self.executor
            .backward(&mut self.store, pass, &mut |turn| {
                answer(turn);
                true
            })
            .unwrap();
        self.executor.read(self.result).unwrap()
    }

    /// Gradients and states.
    fn tensors(&self) -> [Vec<Vec<f32>>; 2] {
        let states = (0..self.graph.states().len()).map(|index| self.store.state(index).to_vec()).collect();
        [(0..self.graph.parameters().len()).map(|index| self.store.gradient(index).to_vec()).collect(), states]
    }
}

/// The same graph with a loss behind it.
fn with_loss(graph: &Graph, result: Value) -> (Graph, [Value; 2]) {
    let mut graph = graph.clone();
    let targets = graph.input("targets", [graph.shape(result)[0]], DType::I32);
    let loss = push(&mut graph, "loss", Op::CrossEntropy { smoothing: 0.1 }, &[result, targets]);
    (graph, [result, loss])
}

/// Results and gradients are of the order of one; what is zero in theory is as much as rounding makes of it.
const LEAST: f32 = 0.1;

/// Where parts exchange numbers.
struct Meeting {
    barrier: Barrier,
    brought: Mutex<Vec<Vec<f32>>>,
}

impl Meeting {
    fn all(&self, own: usize, numbers: &[f32]) -> Vec<Vec<f32>> {
        self.brought.lock().unwrap()[own] = numbers.to_vec();
        self.barrier.wait();
        let all = self.brought.lock().unwrap().clone();
        self.barrier.wait();
        all
    }

    fn answer(&self, own: usize, turn: Turn<'_>) {
        match turn {
            Turn::SumParts { numbers } => {
                let all = self.all(own, numbers);
                numbers.fill(0.0);
                all.iter().for_each(|one| numbers.iter_mut().zip(one).for_each(|(sum, x)| *sum += x));
            }
            Turn::GatherParts { numbers, lengths, own: number } => {
                assert_eq!(number, own);
                let all = self.all(own, &numbers[piece_range(lengths, own)]);
                for (part, one) in all.iter().enumerate() {
                    numbers[piece_range(lengths, part)].copy_from_slice(one);
                }
            }
            _ => {}
        }
    }
}

/// The same results, gradients and states in parts as in one.
fn same_in_parts(
    graph: &Graph,
    result: Value,
    forms: &[(String, Form)],
    parts: usize,
    last: bool,
) -> Result<(), TestCaseError> {
    let (graph, ends) = with_loss(graph, result);
    let ways = ways(&graph, forms, parts).unwrap_or_else(|error| {
        // Statistics are not taken by samples.
        assert!(error.to_string().contains("batch-norm"), "{error}");
        let forms: Vec<_> = forms.iter().map(|(name, _)| (name.clone(), Form::Channel)).collect();
        ways(&graph, &forms, parts).unwrap()
    });
    let mut whole = Bench::new(graph.clone(), ends, last);
    for (index, &parameter) in graph.parameters().iter().enumerate() {
        let info = graph.info(parameter);
        whole.store.parameter_mut(index).copy_from_slice(&numbers(&info.name, info.shape.elements()));
    }
    whole.store.states.fill(1.0);
    let expected = whole.run(&mut |_| {});
    let [gradients, states] = whole.tensors();
    let made: Vec<Part> = (0..parts).map(|own| part(&graph, &ways, parts, own).unwrap()).collect();
    let mut benches: Vec<Bench> = Vec::new();
    for one in &made {
        let mut bench = Bench::new(one.graph.clone(), ends.map(|end| one.value(end).unwrap()), last);
        for (index, tensor) in one.parameters.iter().enumerate() {
            tensor.piece.take(whole.store.parameter(tensor.whole), bench.store.parameter_mut(index));
        }
        bench.store.states.fill(1.0);
        benches.push(bench);
    }
    let asked = |bench: &Bench| {
        let exchanges = traffic(bench.executor.plan().graph()).exchanges;
        exchanges.into_iter().map(|one| (one.kind, one.bytes)).collect::<Vec<_>>()
    };
    for bench in &benches {
        prop_assert_eq!(asked(bench), asked(&benches[0]), "all parts meet as often, for the same");
    }
    let meeting = Meeting { barrier: Barrier::new(parts), brought: Mutex::new(vec![Vec::new(); parts]) };
    let found: Vec<Vec<f32>> = std::thread::scope(|scope| {
        let threads: Vec<_> = benches
            .iter_mut()
            .enumerate()
            .map(|(own, bench)| {
                let meeting = &meeting;
                scope.spawn(move || bench.run(&mut |turn| meeting.answer(own, turn)))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (own, (bench, found)) in benches.iter().zip(&found).enumerate() {
        close_from(LEAST, &format!("the result of part {own}"), found, &expected)?;
        prop_assert_eq!(found, &benches[0].executor.read::<f32>(benches[0].result).unwrap(), "all have the same bits");
        let [own_gradients, own_states] = bench.tensors();
        for (what, tensors, own_tensors, whole) in [
            ("gradient", &made[own].parameters, own_gradients, &gradients),
            ("state", &made[own].states, own_states, &states),
        ] {
            for (tensor, found) in tensors.iter().zip(own_tensors) {
                let mut expected = vec![0.0; found.len()];
                tensor.piece.take(&whole[tensor.whole], &mut expected);
                close_from(LEAST, &format!("{what} {} of part {own}", tensor.whole), &found, &expected)?;
            }
        }
    }
    Ok(())
}

/// Layers that random networks lack: convolutions in groups, dropout, flattened images, linear layers.
fn layers(steps: &[Step]) -> (Graph, Value) {
    let mut graph = Graph::new();
    let mut x = graph.input("x", [3, 5, 4, 4], DType::F32);
    for (number, &(kind, choice)) in steps.iter().enumerate() {
        let layer = format!("layer{}.{number}", number % 2);
        let (shape, channels) = (graph.shape(x).clone(), graph.shape(x).last());
        let is_image = shape.len() == 4;
        let outputs = 2 * (1 + usize::from(choice[0]) % 4);
        x = match kind % 9 {
            0 | 1 if is_image => {
                let groups = if kind % 9 == 0 { 1 } else { [channels, 2, channels / 2][usize::from(choice[1]) % 3] };
                let outputs = if groups == 1 { outputs } else { channels * (1 + usize::from(choice[2]) % 2) };
                let conv = Conv2d { padding: Padding::all(1), groups, ..Conv2d::square(3) };
                let bias = choice[2] % 3 > 0;
                let mut inputs =
                    vec![x, graph.parameter(&format!("{layer}.weight"), [3, 3, channels / groups, outputs])];
                inputs.extend(bias.then(|| graph.parameter(&format!("{layer}.bias"), [outputs])));
                push(&mut graph, &layer, Op::Conv2d { conv, bias, relu: false, moments: false }, &inputs)
            }
            2 if is_image => push(&mut graph, "flat", Op::Reshape(Shape::from([3, shape.elements() / 3])), &[x]),
            3 if is_image && shape[1].min(shape[2]) > 1 => {
                let kind = if choice[0] % 2 == 0 { PoolKind::Max } else { PoolKind::Average };
                push(&mut graph, "pool", Op::Pool2d(Pool2d::sliding(kind, 2, 1)), &[x])
            }
            4 => push(&mut graph, "dropout", Op::Dropout { probability: 0.3, salt: number as u64, within: None }, &[x]),
            5 => push(&mut graph, "relu", Op::Unary(Unary::Relu), &[x]),
            6 if choice[0] % 2 == 0 => batch_norm(&mut graph, &layer, x, choice[1] % 2 == 0),
            7 if is_image => {
                let branches = ["a", "b", "c"].map(|name| branch(&mut graph, &format!("{layer}.{name}"), x, outputs));
                let all = [&branches[..], &[x]].concat();
                push(&mut graph, &layer, Op::Concat { dim: 3 }, &all[..2 + usize::from(choice[1]) % 3])
            }
            _ if is_image => push(&mut graph, "tanh", Op::Unary(Unary::Tanh), &[x]),
            _ => linear(&mut graph, &layer, x, outputs),
        };
    }
    if graph.shape(x).len() == 4 {
        let shape = graph.shape(x).clone();
        x = push(&mut graph, "flat", Op::Reshape(Shape::from([3, shape.elements() / 3])), &[x]);
    }
    let result = linear(&mut graph, "head", x, 3);
    (graph, result)
}

fn branch(graph: &mut Graph, layer: &str, x: Value, outputs: usize) -> Value {
    let weight = graph.parameter(&format!("{layer}.weight"), [1, 1, graph.shape(x).last(), outputs]);
    let y = push(
        graph,
        layer,
        Op::Conv2d { conv: Conv2d::square(1), bias: false, relu: false, moments: false },
        &[x, weight],
    );
    push(graph, layer, Op::Unary(Unary::Relu), &[y])
}

fn linear(graph: &mut Graph, layer: &str, x: Value, outputs: usize) -> Value {
    let weight = graph.parameter(&format!("{layer}.weight"), [outputs, graph.shape(x).last()]);
    let bias = graph.parameter(&format!("{layer}.bias"), [outputs]);
    push(graph, layer, Op::MatMul { trans_a: false, trans_b: true, bias: true, relu: false }, &[x, weight, bias])
}

fn form() -> impl Strategy<Value = Form> {
    prop::sample::select(Form::ALL.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn a_random_network_in_parts(steps in net(), form in form(), parts in 2usize..4, last in any::<bool>()) {
        let (graph, result) = Net::forward(&steps);
        same_in_parts(&graph, result, &[(String::new(), form)], parts, last)?;
    }

    #[test]
    fn layers_of_every_kind_in_parts(
        steps in prop::collection::vec((0u8..9, any::<[u8; 3]>()), 1..10),
        forms in [form(), form(), form()],
        parts in 2usize..4,
        last in any::<bool>(),
    ) {
        let (graph, result) = layers(&steps);
        let names = ["", "layer0", "layer1"].into_iter().zip(forms);
        let is_there = |name: &str| name.is_empty() || graph.nodes().iter().any(|node| {
            node.layer.starts_with(name) && node.inputs.iter().any(|input| graph.parameters().contains(input))
        });
        let forms: Vec<_> = names.filter(|(name, _)| is_there(name)).map(|(name, form)| (name.to_owned(), form)).collect();
        same_in_parts(&graph, result, &forms, parts, last)?;
    }
}

/// A convolution by outputs, its batch-norm and ReLU by channels, and a convolution by inputs: one sum each way.
#[test]
fn a_pair_of_convolutions_closes_with_one_sum() {
    let mut graph = Graph::new();
    let x = graph.input("x", [2, 6, 6, 8], DType::F32);
    let first = graph.parameter("stem.weight", [1, 1, 8, 8]);
    let conv = |graph: &mut Graph, layer: &str, x, weight| {
        let conv = Conv2d { padding: Padding::all(0), ..Conv2d::square(1) };
        push(graph, layer, Op::Conv2d { conv, bias: false, relu: false, moments: false }, &[x, weight])
    };
    let y = conv(&mut graph, "stem", x, first);
    let [up, down] = [("up", [1, 1, 8, 32]), ("down", [1, 1, 32, 8])].map(|(name, shape)| graph.parameter(name, shape));
    let h = conv(&mut graph, "up", y, up);
    let h = batch_norm(&mut graph, "norm", h, true);
    let h = push(&mut graph, "relu", Op::Unary(Unary::Relu), &[h]);
    let h = conv(&mut graph, "down", h, down);
    let result = push(&mut graph, "sum", Op::Add, &[y, h]);
    let forms = ["up", "norm", "down"].map(|name| (name.to_owned(), Form::Channel));
    let pooled = push(&mut graph, "mean", Op::Pool2d(Pool2d::global(PoolKind::Average)), &[result]);
    let result = push(&mut graph, "flat", Op::Reshape(Shape::from([2, 8])), &[pooled]);
    let (graph, ends) = with_loss(&graph, result);
    let ways = ways(&graph, &forms, 2).unwrap();
    let one = part(&graph, &ways, 2, 0).unwrap();
    let bench = Bench::new(one.graph.clone(), ends.map(|end| one.value(end).unwrap()), false);
    let exchanges = traffic(&bench.graph).exchanges;
    let bytes = 2 * 36 * 8 * 4;
    let found: Vec<_> = exchanges.iter().map(|one| (one.layer.as_str(), one.bytes)).collect();
    assert_eq!(
        found,
        [("down", bytes), ("up", bytes)],
        "the result forwards, and backwards the gradient of what both read"
    );
}

#[test]
fn a_part_by_itself_does_not_wait() {
    let (graph, result) = Net::forward(&[(5, [0, 1, 2]), (3, [0; 3]), (5, [0, 1, 2])]);
    let (graph, ends) = with_loss(&graph, result);
    let ways = ways(&graph, &[(String::new(), Form::Channel)], 2).unwrap();
    let one = part(&graph, &ways, 2, 1).unwrap();
    let mut bench = Bench::new(one.graph.clone(), ends.map(|end| one.value(end).unwrap()), false);
    assert_eq!(bench.run(&mut |_| {}).len(), graph.shape(result).elements());
}

#[test]
fn what_travels_is_not_rounded_where_activations_are() {
    let (graph, result) = layers(&[
        (0, [2, 0, 1]),
        (5, [0; 3]),
        (1, [3, 0, 0]),
        (7, [1, 2, 0]),
        (2, [0; 3]),
        (8, [3, 0, 0]),
        (5, [0; 3]),
    ]);
    let (graph, ends) = with_loss(&graph, result);
    for form in [Form::Channel, Form::Branch, Form::Replicate] {
        let ways = ways(&graph, &[(String::new(), form)], 2).unwrap();
        let one = part(&graph, &ways, 2, 0).unwrap();
        let wanted = Wanted { precision: Precision::Bf16, ..Wanted::default() };
        let bench = Bench::with(one.graph.clone(), ends.map(|end| one.value(end).unwrap()), wanted);
        let graph = bench.executor.plan().graph();
        assert!(graph.values().any(|value| graph.dtype(value) == DType::Bf16), "{form}: activations are narrow");
        let travels = |op: &Op| matches!(op, Op::Together(Together::Sum | Together::Gather(_)));
        let exchanges: Vec<_> = graph.nodes().iter().filter(|node| travels(&node.op)).collect();
        assert!(!exchanges.is_empty(), "{form}");
        let is_full = |value: &Value| graph.dtype(*value) == DType::F32;
        assert!(exchanges.iter().all(|node| node.inputs.iter().chain(&node.outputs).all(is_full)), "{form}");
    }
}
