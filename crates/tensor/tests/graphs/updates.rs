//! Gradients that are applied while the backward pass runs: they are the same, nothing reads what was changed, and they
//! take no more memory than the largest of them needs.

use std::cell::Cell;

use paceline_tensor::device::null::CostModel;
use paceline_tensor::execute::Turn;
use paceline_tensor::plan::{Place, Plan, Updates};
use paceline_tensor::{Buffer, Device, Pass, Wanted};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use super::random_net::{Net, Run, chain, net};

fn early(net: &Net, bucket_bytes_max: usize, parts: bool) -> Plan {
    let part_bytes_max = parts.then_some(bucket_bytes_max);
    let wanted = Wanted { updates: Updates::Early { part_bytes_max }, bucket_bytes_max, ..net.wanted(false) };
    Plan::new(net.graph.clone(), &wanted)
}

/// Runs a step in which every applied parameter becomes NaN, so that a node which reads it later shows, and compares the
/// gradients with those of a step that applies nothing.
fn check(net: &Net, bucket_bytes_max: usize, parts: bool) -> Result<Plan, TestCaseError> {
    check_in(net, bucket_bytes_max, parts, true)?;
    check_in(net, bucket_bytes_max, parts, false)
}

/// With gradients in the arena, or kept in the store where they come whole.
fn check_in(net: &Net, bucket_bytes_max: usize, parts: bool, kept: bool) -> Result<Plan, TestCaseError> {
    let device = Device::cpu(2);
    let expected = Run::of(net, &device, false);
    let plan = early(net, bucket_bytes_max, parts);
    let (mut executor, mut store) = net.executor_of(&device, plan.clone());
    prop_assert!(store.gradients.is_empty());
    let layout = plan.parameters();
    if kept {
        let mut gradients = Buffer::zeroed(layout.length());
        gradients.fill(f32::NAN);
        executor.keep_gradients(&mut store, Buffer::lent(Box::new(gradients)));
        prop_assert!(!executor.plan().stores_gradients(), "they are applied early");
    }
    let mut found = vec![f32::NAN; layout.length()];
    let mut turns = vec![(0, 0); plan.buckets().len()];
    let mut turn = |turn: Turn<'_>| {
        match turn {
            Turn::Final { bucket, gradients } => {
                assert_eq!(turns[bucket], (0, 0));
                turns[bucket].0 += 1;
                assert_eq!(gradients.len(), plan.buckets()[bucket].elements.len());
            }
            Turn::Apply { bucket, gradients, parameters } => {
                assert_eq!(turns[bucket], (1, 0), "final before it is applied, and applied once");
                turns[bucket].1 += 1;
                found[plan.buckets()[bucket].elements.clone()].copy_from_slice(gradients);
                parameters.fill(f32::NAN);
            }
            Turn::Offer { bucket, .. } => assert_eq!(turns[bucket], (1, 1), "offered again after it was applied"),
            other => panic!("{other:?} in a backward pass without others"),
        }
        true
    };
    executor.forward(&mut store, Pass::default()).unwrap();
    let result: Vec<f32> = executor.read(net.result).unwrap();
    executor.backward(&mut store, Pass::default(), &mut turn).unwrap();
    prop_assert!(turns.iter().all(|&turns| turns == (1, 1)));
    prop_assert_eq!(&result, &expected.result);
    prop_assert_eq!(executor.read::<f32>(net.result).unwrap(), result);
    prop_assert_eq!(store.states.to_vec(), expected.states);
    for (index, gradient) in expected.gradients.iter().enumerate() {
        prop_assert_eq!(&found[layout.range(index)], &gradient[..], "gradient {}", index);
    }
    for index in 0..expected.gradients.len() {
        prop_assert!(store.parameter(index).iter().all(|x| x.is_nan()), "parameter {} was applied whole", index);
    }
    if kept {
        let whole = executor.plan().buckets().iter().filter(|bucket| matches!(bucket.place, Place::Gradient(_)));
        let whole: Vec<_> = whole.map(|bucket| bucket.elements.clone()).collect();
        prop_assert!(parts || whole.len() == plan.buckets().len());
        prop_assert!(whole.into_iter().all(|elements| store.gradients[elements.clone()] == found[elements]));
    }
    // What lies between the tensors is zero.
    let ranges = layout.ranges();
    for pair in ranges.windows(2) {
        let one = plan
            .buckets()
            .iter()
            .any(|b| b.elements.contains(&(pair[0].end - 1)) && b.elements.contains(&pair[1].start));
        prop_assert!(!one || found[pair[0].end..pair[1].start].iter().all(|&x| x == 0.0));
    }
    Ok(plan)
}

#[test]
fn gradients_of_random_networks_are_the_same() {
    let config = ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() };
    let checked = Cell::new(0);
    let sizes = prop::sample::select(vec![0usize, 100, 1 << 20]);
    let outcome = TestRunner::new(config).run(&(net(), sizes), |(steps, bytes_max)| {
        let net = Net::build(&steps);
        if !net.has_every_gradient() {
            return Ok(());
        }
        checked.set(checked.get() + 1);
        check(&net, bytes_max, false).map(|_| ())
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
    assert!(checked.get() > 100, "{} networks of 300 had a gradient for every parameter", checked.get());
}

#[test]
fn large_matrices_come_in_parts_and_no_bit_changes() {
    let net = chain(&[50, 70, 33, 90]);
    let rows = 16 * 70 * 4;
    let plan = check(&net, rows, true).unwrap();
    let (buckets, layout) = (plan.buckets(), plan.parameters());
    let of = |parameter: usize| buckets.iter().filter(|bucket| bucket.parameters.contains(&parameter)).count();
    // 70 × 50, 33 × 70 and 90 × 33 in parts of 16, 16 and 32 rows; biases are small.
    assert_eq!([of(0), of(2), of(4)], [5, 3, 3]);
    let mut covered: Vec<_> = buckets.iter().map(|bucket| bucket.elements.clone()).collect();
    covered.sort_by_key(|elements| elements.start);
    assert!(covered.windows(2).all(|pair| pair[0].end.next_multiple_of(16) == pair[1].start), "{covered:?}");
    assert_eq!(covered.last().map(|last| last.end), Some(layout.range(5).end));
    assert!(buckets.iter().all(|bucket| bucket.bytes <= rows && matches!(bucket.place, Place::Arena(_))));
}

#[test]
fn memory_holds_the_largest_bucket_and_not_all() {
    let net = chain(&[200; 10]);
    let arena = |plan: Plan| plan.arena_bytes();
    let (at_end, whole, parted) = (net.plan(false), early(&net, 1 << 12, false), early(&net, 1 << 12, true));
    let matrix = 200 * 200 * 4;
    assert!(arena(whole.clone()) - arena(at_end.clone()) < 2 * matrix, "one matrix of nine");
    assert!(arena(parted) < arena(at_end) + matrix / 4, "sixteen rows of one matrix");
    // The weight's gradient is made after the weight was read for the last time.
    assert!(whole.buckets().iter().all(|bucket| bucket.apply_after == bucket.ready_after));
}

#[test]
fn a_turn_can_end_the_step() {
    let net = chain(&[20, 30, 10, 5]);
    for device in [Device::cpu(1), Device::null(CostModel::TWO_SERVER_CORES)] {
        let plan = early(&net, 0, false);
        let buckets = plan.buckets().len();
        let (mut executor, mut store) = net.executor_of(&device, plan);
        let mut applied = 0;
        executor
            .backward(&mut store, Pass::default(), &mut |turn| {
                applied += usize::from(matches!(turn, Turn::Apply { .. }));
                applied < 3
            })
            .unwrap();
        assert_eq!(applied, 3);
        applied = 0;
        executor
            .backward(&mut store, Pass::default(), &mut |turn| {
                applied += usize::from(matches!(turn, Turn::Apply { .. }));
                true
            })
            .unwrap();
        assert_eq!(applied, buckets);
    }
}

#[test]
fn one_arena_serves_two_plans_in_turns() {
    let nets = [chain(&[20, 30, 40]), chain(&[60, 70, 80, 90])];
    let device = Device::cpu(1);
    let expected = nets.each_ref().map(|net| Run::of(net, &device, false).result);
    let (mut owner, mut store) = nets[0].executor(&device, false);
    let (_, mut other) = nets[1].executor(&device, false);
    let mut borrower = paceline_tensor::Executor::without_arena(&device, nets[1].plan(false));
    for _ in 0..2 {
        let found = owner.lend_arena(&mut borrower, |borrower| {
            nets[1].fill(borrower);
            borrower.run(&mut other, Pass::default()).unwrap();
            borrower.read::<f32>(nets[1].result).unwrap()
        });
        assert_eq!(found, expected[1]);
        nets[0].fill(&mut owner);
        owner.run(&mut store, Pass::default()).unwrap();
        assert_eq!(owner.read::<f32>(nets[0].result).unwrap(), expected[0]);
    }
}
