//! A graph that is cut computes what it computes whole: results, gradients and states, wherever it is cut.

use paceline_system::random::Random;
use paceline_tensor::cut::{Stage, behind_layer, crossing, cut};
use paceline_tensor::{DType, Device, Executor, Graph, Op, Pass, Plan, Store, Value, Wanted, gradient};
use proptest::prelude::*;

use super::random_net::{Net, close, net};

/// A stage with its backward pass and memory.
struct Part {
    stage: Stage,
    /// Inputs for the gradients of what is sent.
    seeds: Vec<Value>,
    /// Gradients of what was received.
    returned: Vec<Option<Value>>,
    executor: Executor,
    store: Store,
}

fn numbers(key: &str, count: usize) -> Vec<f32> {
    let key: Vec<u64> = key.bytes().map(u64::from).collect();
    let mut random = Random::new(&key);
    (0..count).map(|_| random.uniform() - 0.5).collect()
}

impl Part {
    /// `result` is what the last stage gives.
    fn new(mut stage: Stage, result: Option<Value>, weights_last: bool) -> Self {
        let sent: Vec<Value> = stage.sent.iter().map(|crossing| crossing.value).collect();
        let learned = stage.sent.iter().filter(|crossing| crossing.has_gradient).map(|crossing| crossing.value);
        let roots: Vec<Value> = learned.chain(result).collect();
        let wrt: Vec<Value> = stage.received.iter().filter(|c| c.has_gradient).map(|c| c.value).collect();
        let (seeds, gradients) = gradient::of_roots(&mut stage.graph, &roots, &wrt).unwrap();
        let returned: Vec<Option<Value>> = wrt.iter().map(|&value| gradients.of(value)).collect();
        let wanted = Wanted {
            outputs: sent.into_iter().chain(result).collect(),
            input_gradients: returned.iter().flatten().copied().collect(),
            gradients: stage.graph.parameters().iter().map(|&parameter| gradients.of(parameter)).collect(),
            bucket_bytes_max: 256,
            weights_last,
            ..Wanted::default()
        };
        let plan = Plan::new(stage.graph.clone(), &wanted);
        let mut store = Store::new(&plan);
        for (index, &parameter) in stage.graph.parameters().iter().enumerate() {
            let info = stage.graph.info(parameter);
            store.parameter_mut(index).copy_from_slice(&numbers(&info.name, info.shape.elements()));
        }
        store.states.fill(1.0);
        let mut executor = Executor::new(&Device::cpu(1), plan).unwrap();
        executor.poison().unwrap();
        Self { stage, seeds, returned, executor, store }
    }

    fn graph(&self) -> &Graph {
        &self.stage.graph
    }
}

/// What a whole step came to: the result, gradients by name of the parameter, states by name.
#[derive(Debug)]
struct Came {
    result: Vec<f32>,
    gradients: Vec<(String, Vec<f32>)>,
    states: Vec<(String, Vec<f32>)>,
}

/// Runs the stages in turn, forward and backward, passing on what crosses.
fn run(graph: &Graph, result: Value, before: &[usize], weights_last: bool) -> Came {
    let stages = cut(graph, before).unwrap();
    let last = stages.len() - 1;
    let ends = |number: usize, stage: &Stage| (number == last).then(|| stage.value(result).unwrap());
    let results: Vec<Option<Value>> = stages.iter().enumerate().map(|(number, stage)| ends(number, stage)).collect();
    let mut parts: Vec<Part> =
        stages.into_iter().zip(&results).map(|(stage, &result)| Part::new(stage, result, weights_last)).collect();
    let mut message: Vec<Vec<f32>> = Vec::new();
    for part in &mut parts {
        for (crossing, numbers) in part.stage.received.iter().zip(&message) {
            part.executor.write(crossing.value, numbers).unwrap();
        }
        let own: Vec<Value> =
            part.graph().inputs().iter().copied().filter(|&v| part.graph().info(v).name == "x").collect();
        for value in own {
            let x = numbers("x", part.graph().shape(value).elements());
            part.executor.write(value, &x).unwrap();
        }
        part.executor.forward(&mut part.store, Pass::default()).unwrap();
        message = part.stage.sent.iter().map(|crossing| part.executor.read(crossing.value).unwrap()).collect();
    }
    let end = parts.last().unwrap();
    let result: Vec<f32> = end.executor.read(results[last].unwrap()).unwrap();
    let mut message = vec![numbers("dy", result.len())];
    for part in parts.iter_mut().rev() {
        for (&seed, numbers) in part.seeds.iter().zip(&message) {
            part.executor.write(seed, numbers).unwrap();
        }
        if weights_last {
            part.executor.backward_inputs(&mut part.store, Pass::default(), &mut |_| true).unwrap();
        } else {
            part.executor.backward(&mut part.store, Pass::default(), &mut |_| true).unwrap();
        }
        let learned = part.stage.received.iter().filter(|crossing| crossing.has_gradient);
        let zeros = |value: Value| vec![0.0; part.graph().shape(value).elements()];
        message = learned
            .zip(&part.returned)
            .map(|(crossing, returned)| {
                returned.map_or_else(|| zeros(crossing.value), |value| part.executor.read(value).unwrap())
            })
            .collect();
        if weights_last {
            part.executor.backward_weights(&mut part.store, Pass::default(), &mut |_| true).unwrap();
        }
    }
    let (mut gradients, mut states) = (Vec::new(), Vec::new());
    for part in &parts {
        let name = |value: &Value| part.graph().info(*value).name.clone();
        let parameters = part.graph().parameters().iter().enumerate();
        gradients.extend(parameters.map(|(index, value)| (name(value), part.store.gradient(index).to_vec())));
        states.extend(
            part.graph().states().iter().enumerate().map(|(i, value)| (name(value), part.store.state(i).to_vec())),
        );
    }
    gradients.sort_by(|a, b| a.0.cmp(&b.0));
    states.sort_by(|a, b| a.0.cmp(&b.0));
    Came { result, gradients, states }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn stages_compute_what_the_whole_graph_does(
        steps in net(), at in prop::collection::vec(any::<prop::sample::Index>(), 1..4), weights_last in any::<bool>(),
    ) {
        let (graph, result) = Net::forward(&steps);
        let places = graph.nodes().len() - 1;
        let mut before: Vec<usize> = at.iter().map(|index| 1 + index.index(places)).collect();
        before.sort_unstable();
        before.dedup();
        let (whole, parts) = (run(&graph, result, &[], false), run(&graph, result, &before, weights_last));
        close("result", &parts.result, &whole.result)?;
        prop_assert_eq!(parts.gradients.len(), whole.gradients.len());
        for ((name, one), (other, two)) in parts.gradients.iter().zip(&whole.gradients) {
            prop_assert_eq!(name, other);
            close(name, one, two)?;
        }
        for ((name, one), (other, two)) in parts.states.iter().zip(&whole.states) {
            prop_assert_eq!(name, other);
            close(name, one, two)?;
        }
    }

    #[test]
    fn neighbours_send_what_the_other_receives(steps in net(), at in any::<prop::sample::Index>()) {
        let (graph, _) = Net::forward(&steps);
        let before = 1 + at.index(graph.nodes().len() - 1);
        let stages = cut(&graph, &[before]).unwrap();
        let shapes = |stage: &Stage, crossings: &[paceline_tensor::cut::Crossing]| {
            crossings.iter().map(|c| (stage.graph.shape(c.value).clone(), c.has_gradient)).collect::<Vec<_>>()
        };
        prop_assert_eq!(shapes(&stages[0], &stages[0].sent), shapes(&stages[1], &stages[1].received));
        prop_assert_eq!(stages[0].sent.len(), crossing(&graph, before).len());
        let parameters: Vec<usize> = stages.iter().flat_map(|stage| stage.parameters.clone()).collect();
        prop_assert_eq!(parameters.len(), graph.parameters().len(), "every parameter is somewhere, once");
    }
}

#[test]
fn a_cut_is_behind_a_layer_and_its_activation() {
    let (graph, _) = Net::forward(&[(5, [0; 3]), (3, [0; 3]), (5, [0; 3])]);
    assert_eq!(behind_layer(&graph, "layer0").unwrap(), 2);
    let error = behind_layer(&graph, "layer9").unwrap_err().to_string();
    assert!(error.contains("`layer9`") && error.contains("there are layer0, layer2, head"), "{error}");
}

#[test]
fn cuts_that_leave_nothing_between_them_are_refused() {
    let (graph, _) = Net::forward(&[(5, [0; 3]), (3, [0; 3]), (5, [0; 3])]);
    for before in [&[2, 2][..], &[3, 1], &[graph.nodes().len()], &[0]] {
        let error = cut(&graph, before).unwrap_err().to_string();
        assert!(error.contains("in the order of the layers"), "{error}");
    }
}

#[test]
fn a_parameter_belongs_to_one_stage() {
    let mut graph = Graph::new();
    let x = graph.input("x", [2, 3], DType::F32);
    let weight = graph.parameter("shared.weight", [2, 3]);
    let first = graph.push_one("first", Op::Mul, &[x, weight]).unwrap();
    graph.push_one("second", Op::Mul, &[first, weight]).unwrap();
    let error = cut(&graph, &[1]).unwrap_err().to_string();
    assert!(error.contains("`first`") && error.contains("both it and second read `shared.weight`"), "{error}");
}
