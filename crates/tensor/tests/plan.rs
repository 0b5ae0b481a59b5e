//! Properties of plans and of the executor that hold for every graph: fusion changes nothing, memory is never lost or
//! shared wrongly, runs do not disturb each other, figures add up, and bad graphs are refused with a sentence.

mod graphs {
    pub mod accept;
    pub mod cut;
    pub mod halves;
    pub mod part;
    pub mod random_net;
    pub mod recompute;
    pub mod refuse;
    pub mod updates;
}

use std::cell::Cell;

use graphs::random_net::{Net, Run, Step, chain, close, net};
use paceline_tensor::device::null::CostModel;
use paceline_tensor::plan::ALIGNMENT_BYTES;
use paceline_tensor::window::{Conv2d, Padding, Pool2d, PoolKind};
use paceline_tensor::{DType, Device, Executor, Graph, Op, Pass, Plan, Shape, Store, Unary, Value, Wanted, gradient};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_arena_is_never_larger_than_without_reuse(steps in net()) {
        let net = Net::build(&steps);
        for unfused in [false, true] {
            let plan = net.plan(unfused);
            let report = plan.report();
            prop_assert!(report.arena_bytes <= report.without_reuse_bytes);
            prop_assert!(report.activation_bytes <= report.arena_bytes);
            let lines = |value| plan.graph().info(value).bytes().next_multiple_of(ALIGNMENT_BYTES);
            let busiest = plan.graph().nodes().iter().map(|node| node.outputs.iter().map(|&value| lines(value)).max());
            let gradients = plan.parameters().length() * 4;
            prop_assert!(plan.arena_bytes() + gradients >= busiest.max().flatten().unwrap_or(0));
        }
    }

    #[test]
    fn a_second_run_repeats_the_first(steps in net()) {
        let net = Net::build(&steps);
        let (mut executor, mut store) = net.executor(&Device::cpu(1), false);
        let states = store.states.to_vec();
        executor.run(&mut store, Pass::default()).unwrap();
        let first = (executor.read::<f32>(net.result).unwrap(), store.gradients.to_vec(), store.states.to_vec());
        // Without writing the inputs again: they outlive the step.
        store.states.copy_from_slice(&states);
        executor.run(&mut store, Pass::default()).unwrap();
        let second = (executor.read::<f32>(net.result).unwrap(), store.gradients.to_vec(), store.states.to_vec());
        prop_assert_eq!(first, second);
    }

    #[test]
    fn the_null_device_walks_the_whole_plan(steps in net()) {
        let net = Net::build(&steps);
        let (mut executor, mut store) = net.executor(&Device::null(CostModel::TWO_SERVER_CORES), false);
        let nodes = executor.plan().graph().nodes().len();
        let mut seen = Vec::new();
        executor.run_each(&mut store, Pass::default(), &mut |node, outputs| {
            assert!(outputs.is_empty());
            seen.push(node);
            true
        }).unwrap();
        prop_assert_eq!(seen, (0..nodes).collect::<Vec<_>>());
        prop_assert!(executor.read::<f32>(net.result).unwrap().iter().all(|&y| y == 0.0));
        let seconds = CostModel::TWO_SERVER_CORES.plan_seconds(executor.plan());
        prop_assert!(seconds >= nodes as f64 * CostModel::TWO_SERVER_CORES.launch_s);
    }

    #[test]
    fn buckets_cover_every_parameter_once_and_in_order(
        widths in prop::collection::vec(1usize..40, 2..8),
        bytes_max in prop::sample::select(vec![0usize, 4, 100, 1000, 4000, 1 << 20]),
    ) {
        let net = chain(&widths);
        let plan = Plan::new(net.graph.clone(), &Wanted { bucket_bytes_max: bytes_max, ..net.wanted(false) });
        let parameters = net.graph.parameters();
        let covered: Vec<usize> = plan.buckets().iter().flat_map(|bucket| bucket.parameters.clone().rev()).collect();
        prop_assert_eq!(covered, (0..parameters.len()).rev().collect::<Vec<_>>());
        for bucket in plan.buckets() {
            let bytes: usize = bucket.parameters.clone().map(|index| net.graph.info(parameters[index]).bytes()).sum();
            prop_assert_eq!(bucket.bytes, bytes);
            prop_assert!(bytes <= bytes_max || bucket.parameters.len() == 1);
        }
        prop_assert!(plan.buckets().is_sorted_by_key(|bucket| bucket.ready_after));
        // A bucket is ready when its gradients stand in the store, and not a node before: poison shows it.
        let (mut executor, mut store) = net.executor_of(&Device::cpu(1), plan.clone());
        executor.run(&mut store, Pass::default()).unwrap();
        let complete = store.gradients.to_vec();
        for bucket in plan.buckets() {
            store.gradients.fill(f32::NAN);
            executor.run_each(&mut store, Pass::default(), &mut |node, _| node < bucket.ready_after).unwrap();
            for index in bucket.parameters.clone() {
                let range = plan.parameters().range(index);
                prop_assert_eq!(&store.gradients[range.clone()], &complete[range]);
            }
            store.gradients.fill(f32::NAN);
            if bucket.ready_after > 0 {
                executor.run_each(&mut store, Pass::default(), &mut |node, _| node + 1 < bucket.ready_after).unwrap();
                let range = plan.parameters().range(bucket.parameters.start);
                let last = plan.parameters().range(bucket.parameters.end - 1);
                prop_assert!(store.gradients[range.start..last.end].iter().any(|x| x.is_nan()));
            }
        }
    }
}

#[test]
fn fusion_changes_no_result_and_no_gradient() {
    let config = ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() };
    let (device, shrunk) = (Device::cpu(2), Cell::new(0));
    let check = |steps: Vec<Step>| {
        let net = Net::build(&steps);
        // Statistics that a convolution takes differ in their last digits, and so do gradients that are zero in theory; the op
        // table holds those.
        let fused = Run::with(&net, &device, &Wanted { moments_from: usize::MAX, ..net.wanted(false) });
        let plain = Run::of(&net, &device, true);
        prop_assert!(fused.nodes <= plain.nodes);
        shrunk.set(shrunk.get() + usize::from(fused.nodes < plain.nodes));
        close("result", &fused.result, &plain.result)?;
        for (index, (fused, plain)) in fused.gradients.iter().zip(&plain.gradients).enumerate() {
            close(&format!("gradient {index}"), fused, plain)?;
        }
        close("states", &fused.states, &plain.states)
    };
    TestRunner::new(config).run(&net(), check).unwrap_or_else(|failure| panic!("{failure}"));
    assert!(shrunk.get() > 50, "fusion found something in {} of 200 networks only", shrunk.get());
}

/// An LSTM under a loss that reads the parameter `p` as it is: both need copies of a gradient.
#[test]
fn a_final_gradient_is_read_by_nobody_and_buckets_come_in_ready_order() {
    let mut graph = Graph::new();
    let (x, targets) = (graph.input("x", [2, 3, 4], DType::F32), graph.input("targets", [6], DType::I32));
    let first = graph.parameter("first", [6, 5]);
    let shapes: [&[usize]; 4] = [&[20, 4], &[20, 5], &[20], &[20]];
    let mut inputs = vec![x];
    inputs.extend(shapes.map(|shape| graph.parameter("lstm", shape)));
    let y = graph.push_one("lstm", Op::Lstm, &inputs).expect("fits");
    let y = graph.push_one("flat", Op::Reshape(Shape::from([6, 5])), &[y]).expect("fits");
    // The gradient of `first` is also that of the LSTM's output.
    let y = graph.push_one("add", Op::Add, &[y, first]).expect("fits");
    let loss = graph.push_one("loss", Op::CrossEntropy { smoothing: 0.0 }, &[y, targets]).expect("fits");
    let (_, gradients) = gradient::of_loss(&mut graph, loss).expect("has a gradient");
    let gradients: Vec<Option<Value>> = graph.parameters().iter().map(|&p| gradients.of(p)).collect();
    for gradient in gradients.iter().flatten() {
        assert!(graph.nodes().iter().all(|node| !node.inputs.contains(gradient)));
    }
    let plan = Plan::new(graph, &Wanted { outputs: vec![loss], gradients, ..Wanted::default() });
    assert_eq!(plan.buckets().len(), 5);
    assert!(plan.buckets().is_sorted_by_key(|bucket| bucket.ready_after));
    // The two biases follow each other; the copy for `first` comes last, whatever its number.
    assert_eq!(plan.buckets()[4].parameters, 0..1);
    assert_eq!(plan.graph().nodes()[plan.buckets()[3].ready_after].op.name(), "scale");
}

#[test]
#[should_panic(expected = "reads a gradient that may have been sent")]
fn a_gradient_that_is_read_after_it_was_sent_is_a_bug() {
    let mut graph = Graph::new();
    let x = graph.input("x", [3], DType::F32);
    graph.parameter("p", [3]);
    let gradient = graph.push_one("gradient", Op::Scale(2.0), &[x]).expect("fits");
    graph.push_one("late", Op::Scale(3.0), &[gradient]).expect("fits");
    Plan::new(graph, &Wanted { gradients: vec![Some(gradient)], ..Wanted::default() });
}

#[test]
fn a_loss_that_reads_a_statistic_is_refused() {
    let mut graph = Graph::new();
    let (x, gamma, beta) = (graph.parameter("x", [4, 3]), graph.parameter("g", [3]), graph.parameter("b", [3]));
    let outputs = graph.push("norm", Op::LayerNorm { epsilon: 0.1 }, &[x, gamma, beta]).expect("fits");
    let root = graph.push_one("scale", Op::Scale(2.0), &[outputs[1]]).expect("fits");
    let seed = graph.input("seed", [4], DType::F32);
    let error = gradient::differentiate(&mut graph, root, seed, &[x]).expect_err("dropped in silence").to_string();
    assert!(error.starts_with("layer `norm` (layer_norm): has a gradient for its first output only"), "{error}");
}

/// x → 2x → 3·2x, of which only the last is wanted.
fn doubled() -> (Executor, [Value; 3]) {
    let mut graph = Graph::new();
    let x = graph.input("x", [3], DType::F32);
    let y = graph.push_one("y", Op::Scale(2.0), &[x]).expect("fits");
    let z = graph.push_one("z", Op::Scale(3.0), &[y]).expect("fits");
    let plan = Plan::new(graph, &Wanted { outputs: vec![z], ..Wanted::default() });
    (Executor::new(&Device::cpu(1), plan).unwrap(), [x, y, z])
}

#[test]
#[should_panic(expected = "`y` is not an input")]
fn only_inputs_are_written() {
    let (mut executor, [_, y, _]) = doubled();
    executor.write(y, &[1.0f32; 3]).unwrap();
}

#[test]
#[should_panic(expected = "`y` is not a wanted output")]
fn only_wanted_outputs_are_read() {
    let (executor, [_, y, _]) = doubled();
    executor.read::<f32>(y).unwrap();
}

#[test]
#[should_panic(expected = "the store was made for another model")]
fn a_store_with_other_states_is_refused() {
    let (mut executor, _) = doubled();
    let mut graph = Graph::new();
    graph.state("s", [3]);
    let mut store = Store::new(&Plan::new(graph, &Wanted::default()));
    executor.run(&mut store, Pass::default()).unwrap();
}

#[test]
#[should_panic(expected = "a cost model has speeds above zero")]
fn a_device_without_speed_is_refused() {
    Device::null(CostModel { flops_per_s: 0.0, ..CostModel::TWO_SERVER_CORES });
}

#[test]
fn two_executors_do_not_disturb_each_other() {
    let nets = [[3, 20, 30, 4], [7, 11, 5, 9]].map(|widths| chain(&widths));
    let shared = Device::cpu(2);
    let alone: Vec<Run> = nets.iter().map(|net| Run::of(net, &Device::cpu(2), false)).collect();
    // In turns on one device.
    let mut pairs = nets.each_ref().map(|net| net.executor(&shared, false));
    for _ in 0..3 {
        for ((executor, store), (net, alone)) in pairs.iter_mut().zip(nets.iter().zip(&alone)) {
            executor.run(store, Pass::default()).unwrap();
            assert_eq!(executor.read::<f32>(net.result).unwrap(), alone.result);
            assert_eq!(
                (0..alone.gradients.len()).map(|i| store.gradient(i).to_vec()).collect::<Vec<_>>(),
                alone.gradients
            );
        }
    }
    // And at the same time.
    std::thread::scope(|scope| {
        for (net, alone) in nets.iter().zip(&alone) {
            let shared = &shared;
            scope.spawn(move || (0..20).for_each(|_| assert_eq!(Run::of(net, shared, false).result, alone.result)));
        }
    });
}

#[test]
fn the_first_layer_with_a_number_that_is_not_finite_is_named() {
    let mut graph = Graph::new();
    let x = graph.input("x", [4], DType::F32);
    let mut y = x;
    for layer in ["first", "second", "third", "fourth"] {
        let factor = graph.parameter(&format!("{layer}.factor"), [4]);
        y = graph.push_one(layer, Op::Mul, &[y, factor]).expect("fits");
    }
    let plan = Plan::new(graph, &Wanted { outputs: vec![y], ..Wanted::default() });
    let (mut store, mut executor) = (Store::new(&plan), Executor::new(&Device::cpu(1), plan).unwrap());
    executor.write(x, &[1.0f32, 2.0, 3.0, 4.0]).unwrap();
    store.parameters.fill(1.0);
    assert_eq!(executor.find_non_finite(&mut store, Pass::default()).unwrap(), None);
    assert_eq!(executor.read::<f32>(y).unwrap(), [1.0, 2.0, 3.0, 4.0]);
    for bad in [f32::NAN, f32::INFINITY] {
        store.parameter_mut(2)[1] = bad;
        executor.run(&mut store, Pass::default()).unwrap();
        assert!(!executor.read::<f32>(y).unwrap()[1].is_finite());
        let found = executor.find_non_finite(&mut store, Pass::default()).unwrap();
        assert_eq!(found, Some(("third".to_owned(), "mul")));
    }
}

#[test]
fn a_report_adds_up() {
    let mut graph = Graph::new();
    let x = graph.input("x", [2, 4, 4, 3], DType::F32);
    let targets = graph.input("targets", [2], DType::I32);
    let conv = Conv2d { padding: Padding::all(1), ..Conv2d::square(3) };
    let weight = graph.parameter("conv.weight", [3, 3, 3, 8]);
    let y = graph
        .push_one("conv", Op::Conv2d { conv, bias: false, relu: false, moments: false }, &[x, weight])
        .expect("fits");
    let y = graph.push_one("relu", Op::Unary(Unary::Relu), &[y]).expect("fits");
    let y = graph.push_one("pool", Op::Pool2d(Pool2d::global(PoolKind::Average)), &[y]).expect("fits");
    let y = graph.push_one("flat", Op::Reshape(Shape::from([2, 8])), &[y]).expect("fits");
    let (weight, bias) = (graph.parameter("head.weight", [10, 8]), graph.parameter("head.bias", [10]));
    let op = Op::MatMul { trans_a: false, trans_b: true, bias: true, relu: false };
    let logits = graph.push_one("head", op, &[y, weight, bias]).expect("fits");
    let loss = graph.push_one("loss", Op::CrossEntropy { smoothing: 0.0 }, &[logits, targets]).expect("fits");
    let (_, gradients) = gradient::of_loss(&mut graph, loss).expect("has a gradient");
    let gradients = graph.parameters().iter().map(|&parameter| gradients.of(parameter)).collect();
    let plan = Plan::new(graph, &Wanted { outputs: vec![loss], gradients, bucket_bytes_max: 400, ..Wanted::default() });
    let report = plan.report();
    assert_eq!(report.parameters, 3 * 3 * 3 * 8 + 10 * 8 + 10);
    assert_eq!(report.states, 0);
    // Convolution, the pool's additions, head, loss.
    assert_eq!(report.forward_flops, 2 * (2 * 4 * 4 * 8) * 27 + 2 * 4 * 4 * 8 + 2 * (2 * 10) * 8 + 1);
    assert_eq!(report.flops, report.nodes.iter().map(|node| node.flops).sum::<u64>());
    assert_eq!(report.nodes[0].op, "conv2d+relu");
    // The image is no result; ReLU's output, the pooled pixels, and the logits are what the backward pass reads.
    assert_eq!(report.activation_bytes, 4 * (2 * 4 * 4 * 8 + 2 * 8 + 2 * 10));
    let buckets: Vec<(u64, usize)> = report.buckets.iter().map(|bucket| (bucket.bytes, bucket.tensors)).collect();
    assert_eq!(buckets, [(4 * 90, 2), (4 * 216, 1)]);
    let text = report.to_string();
    for line in ["parameters       306 (1.2 KiB)", "conv2d+relu", "head.bias … head.weight", "gradient 0"] {
        assert!(text.contains(line), "no `{line}` in\n{text}");
    }
    let json = serde_json::to_value(&report).expect("a report is JSON");
    assert_eq!(json["parameters"], 306);
    assert_eq!(json["forward_flops"], report.forward_flops);
    assert_eq!(json["arena_bytes"], plan.arena_bytes());
    assert_eq!(json["nodes"].as_array().map(Vec::len), Some(plan.graph().nodes().len()));
    assert_eq!(json["buckets"][0]["first"], "head.weight");
}
