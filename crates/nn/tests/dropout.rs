//! Dropout in the zoo: layers see tensors whose leading dim is that of the samples, so that the mask of a sample is its own wherever it
//! is computed.

use paceline_nn::zoo::{self, Entry};
use paceline_nn::{Input, Mode, Network};
use paceline_tensor::{Device, Executor, MemoryUse, Op, Pass, Plan, Precision, Store, Wanted};

fn network(entry: &'static Entry, batch: usize) -> Network {
    let input = match entry.native {
        Input::Image { channels, .. } => Input::Image { size: [entry.smallest.max(32); 2], channels },
        Input::Tokens { .. } => Input::Tokens { sequence: 16 },
    };
    Network::new(entry, Mode::Train, batch, input, 10, 0.0).unwrap()
}

#[test]
fn every_dropout_of_the_zoo_has_samples_in_its_leading_dim() {
    const BATCH: usize = 3;
    let mut with = Vec::new();
    for entry in zoo::all() {
        for precision in [Precision::F32, Precision::Bf16] {
            for memory in [MemoryUse::Normal, MemoryUse::Low] {
                let network = network(entry, BATCH);
                let wanted = Wanted { precision, memory, ..network.wanted(1 << 22) };
                let plan = Plan::new(network.graph, &wanted);
                let drops = plan.graph().nodes().iter().filter(|node| matches!(node.op, Op::Dropout { .. }));
                for node in drops {
                    let leading = plan.graph().shape(node.inputs[0])[0];
                    assert_eq!(leading, BATCH, "{}: {} in {precision:?} with {memory:?}", entry.name, node.layer);
                    with.push(entry.name);
                }
            }
        }
    }
    with.dedup();
    for name in ["alexnet", "vgg11", "googlenet", "mobilenet", "lstm", "gpt"] {
        assert!(with.contains(&name), "{name} has dropout");
    }
}

/// The logits of samples `first..first + batch` of a batch, in training.
fn logits(entry: &'static Entry, (first, batch): (usize, usize), precision: Precision) -> Vec<f32> {
    let network = network(entry, batch);
    let wanted = Wanted { precision, ..network.wanted(1 << 22) };
    let (x, logits) = (network.x, network.logits);
    let plan = Plan::new(network.graph, &wanted);
    let length = plan.graph().shape(x).elements();
    let (mut store, mut executor) = (Store::new(&plan), Executor::new(&Device::cpu(2), plan).unwrap());
    for (index, parameter) in network.parameters.iter().enumerate() {
        parameter.init.fill(1, &parameter.name, &parameter.shape, store.parameter_mut(index));
    }
    let tokens: Vec<i32> = (0..length).map(|index| ((first * length / batch + index) * 7 % 10) as i32).collect();
    executor.write(x, &tokens).unwrap();
    let pass = Pass { seed: 5, step: 3, first_sample: first as u64, samples: batch };
    executor.forward(&mut store, pass).unwrap();
    executor.read(logits).unwrap()
}

#[test]
fn samples_are_answered_alike_in_any_part_of_a_batch() {
    for name in ["lstm", "gpt"] {
        let entry = zoo::find(name).unwrap();
        for (precision, tolerance) in [(Precision::F32, 1e-4), (Precision::Bf16, 0.05)] {
            let whole = logits(entry, (0, 5), precision);
            let mut parts = logits(entry, (0, 2), precision);
            parts.extend(logits(entry, (2, 3), precision));
            let size = whole.iter().fold(0.0f32, |size, x| size.max(x.abs()));
            let worst = whole.iter().zip(&parts).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst < tolerance * size, "{name} in {precision:?}: parts differ by {worst} of {size}");
            let moved = logits(entry, (1, 2), precision);
            let worst = parts.iter().zip(&moved).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst > tolerance * size, "{name} in {precision:?}: other samples have other answers");
        }
    }
}
