//! A backward pass in two halves, and several micro-batches alive at once: gradients are those of one pass after the other, bit for bit.

use paceline_tensor::device::null::CostModel;
use paceline_tensor::execute::Turn;
use paceline_tensor::plan::{Place, Updates};
use paceline_tensor::{Device, Executor, MemoryUse, Op, Pass, Plan, Precision, Slot, Store, Wanted};
use proptest::prelude::*;

use super::random_net::{Net, Run, Step, chain_stage, net};

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_bits()).collect()
}

fn all(_: Turn<'_>) -> bool {
    true
}

/// As a whole, both orders give the same bits.
fn same_in_both_orders(steps: &[Step], wanted: impl Fn(&Net) -> Wanted) -> Result<(), TestCaseError> {
    let (net, device) = (Net::stage(steps), Device::cpu(2));
    let [mixed, last] =
        [false, true].map(|weights_last| Run::with(&net, &device, &Wanted { weights_last, ..wanted(&net) }));
    prop_assert_eq!(bits(&last.result), bits(&mixed.result));
    prop_assert_eq!(bits(&last.states), bits(&mixed.states));
    prop_assert_eq!(bits(&last.input_gradient), bits(&mixed.input_gradient));
    prop_assert!(last.input_gradient.iter().all(|x| x.is_finite()));
    for (index, (last, mixed)) in last.gradients.iter().zip(&mixed.gradients).enumerate() {
        prop_assert_eq!(bits(last), bits(mixed), "gradient {}", index);
    }
    Ok(())
}

/// What a micro-batch came to.
#[derive(Debug, Default, PartialEq)]
struct Came {
    result: Vec<u32>,
    gradients: Vec<u32>,
    input_gradient: Vec<u32>,
}

struct Pipeline {
    net: Net,
    executor: Executor,
    store: Store,
    slots: Vec<Slot>,
}

impl Pipeline {
    fn new(steps: &[Step], memory: MemoryUse, slots: usize) -> Self {
        let net = Net::stage(steps);
        let plan = Plan::new(net.graph.clone(), &Wanted { weights_last: true, memory, ..net.wanted(false) });
        let (_, store) = net.executor_of(&Device::cpu(1), plan.clone());
        let executor = Executor::without_arena(&Device::cpu(1), plan);
        let slots = (0..slots).map(|_| executor.new_slot()).collect();
        Self { net, executor, store, slots }
    }

    fn pass(slot: usize) -> Pass {
        Pass { first_sample: slot as u64, ..Pass::default() }
    }

    fn forward(&mut self, slot: usize) -> Vec<u32> {
        let Self { net, executor, store, slots } = self;
        executor.with_slot(&mut slots[slot], |executor| {
            net.fill_with(executor, 30 + slot as u64);
            executor.forward(store, Self::pass(slot)).unwrap();
            bits(&executor.read::<f32>(net.result).unwrap())
        })
    }

    fn backward_inputs(&mut self, slot: usize) -> Vec<u32> {
        let Self { net, executor, store, slots } = self;
        store.gradients.fill(f32::NAN);
        let read = executor.with_slot(&mut slots[slot], |executor| {
            executor
                .backward_inputs(store, Self::pass(slot), &mut |turn| panic!("{turn:?} in the first half"))
                .unwrap();
            bits(&executor.read::<f32>(net.input_gradient.unwrap()).unwrap())
        });
        assert!(store.gradients.iter().all(|x| x.is_nan()), "the first half writes no gradient of a parameter");
        read
    }

    fn backward_weights(&mut self, slot: usize) -> Vec<u32> {
        let Self { executor, store, slots, .. } = self;
        store.gradients.fill(f32::NAN);
        executor.with_slot(&mut slots[slot], |executor| {
            executor.backward_weights(store, Self::pass(slot), &mut all).unwrap()
        });
        gradients(store)
    }
}

/// All gradients, without what lies between them.
fn gradients(store: &Store) -> Vec<u32> {
    (0..store.layout().ranges().len()).flat_map(|index| bits(store.gradient(index))).collect()
}

/// All passes of one micro-batch before the next.
fn one_after_the_other(steps: &[Step], memory: MemoryUse, count: usize) -> (Vec<Came>, Vec<u32>) {
    let net = Net::stage(steps);
    let plan = Plan::new(net.graph.clone(), &Wanted { memory, ..net.wanted(false) });
    let (mut executor, mut store) = net.executor_of(&Device::cpu(1), plan);
    let came = (0..count).map(|slot| {
        store.gradients.fill(f32::NAN);
        net.fill_with(&mut executor, 30 + slot as u64);
        executor.run(&mut store, Pipeline::pass(slot)).unwrap();
        let [result, input_gradient] =
            [net.result, net.input_gradient.unwrap()].map(|value| bits(&executor.read::<f32>(value).unwrap()));
        Came { result, gradients: gradients(&store), input_gradient }
    });
    (came.collect(), bits(&store.states))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn gradients_of_weights_may_come_last(steps in net(), low in any::<bool>(), unfused in any::<bool>()) {
        let memory = if low { MemoryUse::Low } else { MemoryUse::Normal };
        same_in_both_orders(&steps, |net| Wanted { memory, ..net.wanted(unfused) })?;
        same_in_both_orders(&steps, |net| Wanted { memory, beside: true, ..net.wanted(unfused) })?;
        same_in_both_orders(&steps, |net| Wanted { memory, precision: Precision::Bf16, ..net.wanted(unfused) })?;
    }

    #[test]
    fn the_second_half_is_what_no_gradient_of_an_input_depends_on(steps in net()) {
        let net = Net::stage(&steps);
        let plan = Plan::new(net.graph.clone(), &Wanted { weights_last: true, ..net.wanted(false) });
        let (first, second) = (plan.input_gradient_nodes(), plan.weight_gradient_nodes());
        prop_assert_eq!((first.start, first.end, second.end), (plan.forward_nodes(), second.start, plan.graph().nodes().len()));
        prop_assert!(!first.is_empty() && !second.is_empty());
        let nodes = plan.graph().nodes();
        let mut needed = vec![net.input_gradient.unwrap()];
        for node in nodes[first].iter().rev() {
            prop_assert!(node.outputs.iter().any(|output| needed.contains(output)), "{} could come last", node.layer);
            prop_assert!(!node.outputs.iter().any(|&output| matches!(plan.place(output), Place::Gradient(_))));
            needed.extend(&node.inputs);
        }
        prop_assert!(nodes[second].iter().all(|node| node.outputs.iter().all(|output| !needed.contains(output))));
        let start = plan.weight_gradient_nodes().start;
        prop_assert!(!net.has_every_gradient() || plan.buckets().iter().all(|bucket| bucket.ready_after >= start));
    }

    #[test]
    fn micro_batches_in_slots_do_not_disturb_each_other(steps in net(), low in any::<bool>()) {
        let memory = if low { MemoryUse::Low } else { MemoryUse::Normal };
        let (expected, states) = one_after_the_other(&steps, memory, 3);
        let mut pipeline = Pipeline::new(&steps, memory, 3);
        let mut came: Vec<Came> = (0..3).map(|_| Came::default()).collect();
        // Forward passes ahead, halves of backward passes of different micro-batches between them.
        came[0].result = pipeline.forward(0);
        came[1].result = pipeline.forward(1);
        came[0].input_gradient = pipeline.backward_inputs(0);
        came[2].result = pipeline.forward(2);
        came[1].input_gradient = pipeline.backward_inputs(1);
        came[0].gradients = pipeline.backward_weights(0);
        came[2].input_gradient = pipeline.backward_inputs(2);
        came[1].gradients = pipeline.backward_weights(1);
        came[2].gradients = pipeline.backward_weights(2);
        prop_assert_eq!(&came, &expected);
        prop_assert_ne!(&came[0], &came[1]);
        prop_assert_eq!(bits(&pipeline.store.states), states);
    }
}

#[test]
fn a_chain_has_its_products_with_weights_in_the_first_half() {
    let net = chain_stage(&[20, 30, 10, 5]);
    let plan = Plan::new(net.graph.clone(), &Wanted { weights_last: true, ..net.wanted(false) });
    let products = |nodes: std::ops::Range<usize>| {
        plan.graph().nodes()[nodes].iter().filter(|node| matches!(node.op, Op::MatMul { .. })).count()
    };
    assert_eq!([products(plan.input_gradient_nodes()), products(plan.weight_gradient_nodes())], [3, 3]);
    let without =
        Plan::new(net.graph.clone(), &Wanted { input_gradients: Vec::new(), weights_last: true, ..net.wanted(false) });
    assert!(without.input_gradient_nodes().is_empty(), "nobody waits for the gradients of a first stage's inputs");
    let whole = net.plan(false);
    assert!(whole.input_gradient_nodes().is_empty() && whole.weight_gradient_nodes().is_empty());
}

#[test]
fn updates_of_a_second_half_have_the_gradients_of_a_whole_pass() {
    let net = chain_stage(&[40, 50, 60, 7]);
    for device in [Device::cpu(1), Device::null(CostModel::TWO_SERVER_CORES)] {
        let on_cpu = matches!(device, Device::Cpu(_));
        let expected = Run::of(&net, &device, false);
        let updates = Updates::Early { part_bytes_max: Some(1 << 11) };
        let plan = Plan::new(net.graph.clone(), &Wanted { weights_last: true, updates, ..net.wanted(false) });
        let (mut executor, mut store) = net.executor_of(&device, plan.clone());
        executor.forward(&mut store, Pass::default()).unwrap();
        executor
            .backward_inputs(&mut store, Pass::default(), &mut |turn| panic!("{turn:?} in the first half"))
            .unwrap();
        let (mut found, mut applied) = (vec![f32::NAN; plan.parameters().length()], 0);
        executor
            .backward_weights(&mut store, Pass::default(), &mut |turn| {
                if let Turn::Apply { bucket, gradients, parameters } = turn {
                    applied += 1;
                    if on_cpu {
                        found[plan.buckets()[bucket].elements.clone()].copy_from_slice(gradients);
                        parameters.fill(f32::NAN);
                    }
                }
                true
            })
            .unwrap();
        assert_eq!(applied, plan.buckets().len());
        for (index, gradient) in expected.gradients.iter().enumerate().filter(|_| on_cpu) {
            assert_eq!(bits(&found[plan.parameters().range(index)]), bits(gradient), "gradient {index}");
        }
    }
}

#[test]
#[should_panic(expected = "only a plan with `weights_last` has a backward pass in two halves")]
fn a_backward_pass_in_one_piece_has_no_halves() {
    let net = chain_stage(&[20, 30]);
    let (mut executor, mut store) = net.executor(&Device::cpu(1), false);
    executor.backward_inputs(&mut store, Pass::default(), &mut all).unwrap();
}

#[test]
#[should_panic(expected = "the slot was made for another plan")]
fn a_slot_of_another_plan_is_refused() {
    let [small, large] = [&[20, 30][..], &[60, 70, 80]].map(|widths| chain_stage(widths).plan(false));
    let mut slot = Executor::without_arena(&Device::cpu(1), small).new_slot();
    Executor::without_arena(&Device::cpu(1), large).with_slot(&mut slot, |_| ());
}
