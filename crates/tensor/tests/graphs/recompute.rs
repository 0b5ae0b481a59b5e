//! Plans that keep less: the same bits, in less memory.

use std::cell::Cell;

use paceline_tensor::plan::Plan;
use paceline_tensor::window::{Conv2d, Padding};
use paceline_tensor::{DType, Device, Executor, Graph, MemoryUse, Op, Pass, Precision, Store, Unary, Value, Wanted};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use super::random_net::{Net, batch_norm, net, push};

/// What a step leaves: result, gradients, states.
fn run(net: &Net, wanted: &Wanted) -> (Plan, [Vec<f32>; 3]) {
    let plan = Plan::new(net.graph.clone(), wanted);
    let (mut executor, mut store) = net.executor_of(&Device::cpu(2), plan.clone());
    executor.run(&mut store, Pass { seed: 3, step: 5, ..Pass::default() }).unwrap();
    (plan, [executor.read(net.result).unwrap(), store.gradients.to_vec(), store.states.to_vec()])
}

fn bits(numbers: &[Vec<f32>; 3]) -> Vec<u32> {
    numbers.iter().flatten().map(|x| x.to_bits()).collect()
}

#[test]
fn what_is_made_again_is_the_same() {
    let config = ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() };
    let remade = Cell::new(0);
    let outcome = TestRunner::new(config).run(&(net(), any::<bool>(), any::<bool>()), |(steps, unfused, bf16)| {
        let net = Net::build(&steps);
        let precision = if bf16 { Precision::Bf16 } else { Precision::F32 };
        let normal = Wanted { precision, ..net.wanted(unfused) };
        let low = Wanted { memory: MemoryUse::Low, ..normal.clone() };
        let ((normal, kept), (low, again)) = (run(&net, &normal), run(&net, &low));
        prop_assert_eq!(bits(&kept), bits(&again));
        prop_assert!(low.activation_bytes() <= normal.activation_bytes());
        prop_assert_eq!(low.forward_nodes(), normal.forward_nodes());
        remade.set(remade.get() + usize::from(low.graph().nodes().len() > normal.graph().nodes().len()));
        Ok(())
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
    assert!(remade.get() > 100, "something was made again in {} of 300 networks", remade.get());
}

fn conv(graph: &mut Graph, name: &str, x: Value, outputs: usize) -> Value {
    let channels = graph.shape(x).last();
    let weight = graph.parameter(name, [3, 3, channels, outputs]);
    let conv = Conv2d { padding: Padding::all(1), ..Conv2d::square(3) };
    push(graph, name, Op::Conv2d { conv, bias: false, relu: false, moments: false }, &[x, weight])
}

/// Residual blocks of two convolutions each.
fn blocks(count: usize) -> Net {
    let mut graph = Graph::new();
    let x = graph.input("x", [4, 8, 8, 8], DType::F32);
    let mut x = conv(&mut graph, "stem", x, 8);
    for number in 0..count {
        let name = format!("block{number}");
        let y = conv(&mut graph, &name, x, 8);
        let y = batch_norm(&mut graph, &name, y, true);
        let y = push(&mut graph, &name, Op::Unary(Unary::Relu), &[y]);
        let y = push(&mut graph, &name, Op::Dropout { probability: 0.2, salt: number as u64, within: None }, &[y]);
        let y = conv(&mut graph, &name, y, 8);
        let y = batch_norm(&mut graph, &name, y, false);
        let y = push(&mut graph, &name, Op::Add, &[y, x]);
        x = push(&mut graph, &name, Op::Unary(Unary::Relu), &[y]);
    }
    let result = conv(&mut graph, "head", x, 8);
    Net::with_gradients(graph, result)
}

#[test]
fn a_residual_network_keeps_its_convolutions_and_little_else() {
    let net = blocks(12);
    let normal = net.wanted(false);
    let low = Wanted { memory: MemoryUse::Low, ..normal.clone() };
    let ((normal, kept), (low, again)) = (run(&net, &normal), run(&net, &low));
    assert_eq!(bits(&kept), bits(&again));
    // Of two convolutions, dropout and the output of each block, the convolutions stay, and one block in a few.
    let image = 4 * 8 * 8 * 8 * 4;
    assert!(normal.activation_bytes() > 4 * 12 * image);
    assert!(low.activation_bytes() < (2 * 12 + 5) * image, "{} images", low.activation_bytes() / image);
    assert!(low.arena_bytes() < normal.arena_bytes() * 7 / 10, "{} of {}", low.arena_bytes(), normal.arena_bytes());
    let count = |plan: &Plan, name: &str| plan.graph().nodes().iter().filter(|node| node.op.name() == name).count();
    assert_eq!(count(&low, "conv2d"), count(&normal, "conv2d"));
    assert!(count(&low, "batch_norm.again") > 12 && count(&low, "batch_norm.again") <= 24);
}

#[test]
fn nothing_is_made_again_without_a_backward_pass() {
    let mut graph = Graph::new();
    let x = graph.input("x", [4], DType::F32);
    let y = push(&mut graph, "y", Op::Unary(Unary::Relu), &[x]);
    let z = push(&mut graph, "z", Op::Scale(2.0), &[y]);
    let wanted = Wanted { outputs: vec![z], memory: MemoryUse::Low, ..Wanted::default() };
    let plan = Plan::new(graph, &wanted);
    assert_eq!(plan.graph().nodes().len(), 2);
    let (mut store, mut executor) = (Store::new(&plan), Executor::new(&Device::cpu(1), plan).unwrap());
    executor.write(x, &[-1.0f32, 0.0, 1.0, 2.0]).unwrap();
    executor.run(&mut store, Pass::default()).unwrap();
    assert_eq!(executor.read::<f32>(z).unwrap(), [0.0, 0.0, 2.0, 4.0]);
}
