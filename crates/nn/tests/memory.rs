//! The memory of every model's step: less is kept where that was asked for, and gradients do not pile up.

#[path = "support/families.rs"]
mod families;

use std::ops::Range;

use paceline_nn::zoo::{self, Entry};
use paceline_nn::{Input, Mode, Network};
use paceline_system::random::Random;
use paceline_tensor::plan::{Place, Updates};
use paceline_tensor::{DType, Device, Executor, MemoryUse, Pass, Plan, Precision, Store, Value, Wanted};

fn network(name: &str, side: usize, batch: usize) -> Network {
    let entry = zoo::find(name).unwrap();
    let input = match entry.native {
        Input::Image { channels, .. } => Input::Image { size: [side, side], channels },
        Input::Tokens { .. } => Input::Tokens { sequence: side },
    };
    Network::new(entry, Mode::Train, batch, input, 10, 0.0).unwrap()
}

#[test]
fn no_model_needs_more_memory_when_it_keeps_less() {
    for entry in zoo::all() {
        let network = network(entry.name, entry.smallest.max(64), 2);
        let updates = Updates::Early { part_bytes_max: Some(1 << 20) };
        let wanted = Wanted { updates, ..network.wanted(1 << 20) };
        let [normal, low] =
            MemoryUse::ALL.map(|memory| Plan::new(network.graph.clone(), &Wanted { memory, ..wanted.clone() }));
        assert!(low.activation_bytes() <= normal.activation_bytes(), "{}", entry.name);
        assert!(low.arena_bytes() <= normal.arena_bytes(), "{}", entry.name);
    }
}

/// Loss, gradients and running statistics of one step, as bits.
fn step(network: &Network, wanted: &Wanted) -> Vec<u32> {
    let plan = Plan::new(network.graph.clone(), wanted);
    let (mut store, mut executor) = (Store::new(&plan), Executor::new(&Device::cpu(2), plan).unwrap());
    let mut random = Random::new(&[5]);
    // Small numbers over and over: the largest models have more parameters than a test has time to draw.
    let small: Vec<f32> = (0..4093).map(|_| 0.1 * random.uniform() - 0.05).collect();
    store.parameters.iter_mut().zip(small.iter().cycle()).for_each(|(weight, small)| *weight = *small);
    network.states.iter().enumerate().for_each(|(index, state)| store.state_mut(index).fill(state.start));
    executor.poison().unwrap();
    for &input in network.graph.inputs() {
        let (count, dtype) = (network.graph.shape(input).elements(), network.graph.dtype(input));
        if dtype == DType::I32 {
            executor.write(input, &(0..count).map(|_| random.below(10) as i32).collect::<Vec<_>>()).unwrap();
        } else {
            executor.write(input, &(0..count).map(|_| random.normal()).collect::<Vec<_>>()).unwrap();
        }
    }
    executor.run(&mut store, Pass { seed: 1, step: 2, ..Pass::default() }).unwrap();
    let loss = executor.read::<f32>(network.loss).unwrap();
    loss.iter().chain(store.gradients.iter()).chain(store.states.iter()).map(|x| x.to_bits()).collect()
}

#[test]
fn every_family_computes_the_same_bits_in_less_memory() {
    same_bits_in_less_memory(families::models(true));
}

#[test]
#[ignore = "cargo x ci: memory"]
fn every_model_computes_the_same_bits_in_less_memory() {
    same_bits_in_less_memory(families::models(false));
}

fn same_bits_in_less_memory(models: impl Iterator<Item = &'static Entry>) {
    for entry in models {
        let network = network(entry.name, entry.smallest.max(16), 2);
        for precision in Precision::ALL {
            let [normal, low] =
                MemoryUse::ALL.map(|memory| step(&network, &Wanted { precision, memory, ..network.wanted(1 << 20) }));
            assert!(normal == low, "{} in {precision}", entry.name);
        }
    }
}

#[test]
fn resnet50_keeps_a_third_less() {
    for precision in Precision::ALL {
        let network = network("resnet50", 128, 8);
        let wanted = Wanted { precision, ..network.wanted(1 << 20) };
        let arena = |memory| Plan::new(network.graph.clone(), &Wanted { memory, ..wanted.clone() }).arena_bytes();
        let (normal, low) = (arena(MemoryUse::Normal), arena(MemoryUse::Low));
        assert!(3 * low <= 2 * normal, "{precision}: {low} of {normal} bytes");
    }
}

#[test]
fn the_gradients_of_vgg16_do_not_pile_up() {
    let network = network("vgg16", 64, 2);
    let arena =
        |updates| Plan::new(network.graph.clone(), &Wanted { updates, ..network.wanted(4 << 20) }).arena_bytes();
    let (at_end, early) = (arena(Updates::AtEnd), arena(Updates::Early { part_bytes_max: Some(8 << 20) }));
    assert!(early < at_end + (20 << 20), "{early} against {at_end} bytes, and 537 MB of gradients in the store");
}

/// The plan of a step on a GPU.
fn gpu_plan(network: &Network, updates: Updates, (precision, memory): (Precision, MemoryUse)) -> Plan {
    let (narrow_inputs, moments_from, beside) = (vec![network.x], usize::MAX, true);
    let wanted = Wanted { updates, precision, memory, narrow_inputs, moments_from, beside, ..network.wanted(1 << 20) };
    Plan::new(network.graph.clone(), &wanted)
}

/// For each parameter, the bytes of its gradient at the beginning of the arena with the rest of its last cache line, and the first node at
/// which they may be written: the one that gives the last of what the gradient is computed from, because a device may compute both together.
/// What is written in part only must not be touched at all, nor what is not written.
fn gradients(plan: &Plan) -> Vec<(Range<usize>, usize)> {
    let (graph, line) = (plan.graph(), 64);
    let ends = |range: &Range<usize>| 4 * range.start..(4 * range.end).next_multiple_of(line);
    let mut found: Vec<_> = plan.parameters().ranges().iter().map(|range| (ends(range), 0)).collect();
    for (index, node) in graph.nodes().iter().enumerate() {
        let made = |value: &Value| graph.nodes()[..index].iter().rposition(|node| node.outputs.contains(value));
        let last = node.inputs.iter().filter_map(made).max().unwrap_or(0);
        for &output in &node.outputs {
            if let Place::Gradient(parameter) = plan.place(output) {
                let is_full = (4 * plan.parameters().range(parameter).len()).is_multiple_of(line);
                found[parameter].1 = if is_full { last } else { 0 };
            }
        }
    }
    found
}

#[test]
fn nothing_lies_where_a_gradient_does() {
    let mut shared = 0;
    let ways = Precision::ALL.into_iter().flat_map(|precision| MemoryUse::ALL.map(|memory| (precision, memory)));
    for (entry, way) in zoo::all().iter().flat_map(|entry| ways.clone().map(move |way| (entry, way))) {
        let network = network(entry.name, entry.smallest.max(64), 32);
        let plan = gpu_plan(&network, Updates::FromArena, way);
        if !plan.arena_has_gradients() {
            continue;
        }
        shared += 1;
        let (graph, gradients) = (plan.graph(), gradients(&plan));
        for (index, node) in graph.nodes().iter().enumerate() {
            let until = plan.beside(index).unwrap_or(index + 1);
            for &value in node.inputs.iter().chain(&node.outputs) {
                let Place::Arena(start) = plan.place(value) else { continue };
                let end = start + graph.info(value).bytes();
                for (bytes, _) in gradients.iter().filter(|(_, first)| *first < until) {
                    let overlaps = bytes.start < end && start < bytes.end;
                    assert!(!overlaps, "{} {way:?}, {}: {start}..{end} and {bytes:?}", entry.name, node.layer);
                }
            }
        }
    }
    assert!(shared > 40, "{shared} plans' gradients share the arena");
}

const BF16: (Precision, MemoryUse) = (Precision::Bf16, MemoryUse::Normal);

#[test]
fn gradients_of_deep_models_cost_next_to_nothing() {
    for (name, side, batch) in [("resnet152", 224, 128), ("resnet50", 224, 256), ("resnet50", 32, 2048)] {
        let network = network(name, side, batch);
        let [alone, shared] = [Updates::AtEnd, Updates::FromArena].map(|updates| gpu_plan(&network, updates, BF16));
        let (more, gradients) =
            (shared.arena_bytes().saturating_sub(alone.arena_bytes()), 4 * alone.parameters().length());
        assert!(shared.arena_has_gradients() && !alone.arena_has_gradients());
        assert!(5 * more < gradients, "{name}, {side}²: {more} bytes more for {gradients} bytes of gradients");
    }
}

#[test]
fn gradients_have_memory_of_their_own_where_that_is_less() {
    let network = network("alexnet", 224, 512);
    let [alone, shared] = [Updates::AtEnd, Updates::FromArena].map(|updates| gpu_plan(&network, updates, BF16));
    assert!(!shared.arena_has_gradients());
    assert_eq!(shared.arena_bytes(), alone.arena_bytes());
}
