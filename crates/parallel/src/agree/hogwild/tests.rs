//! The rule on a quadratic whose trajectory is known, in a fixed order of threads; and the sentences.

use super::*;
use crate::agree::RoundOptions;

/// A step of plain SGD on f(x) = c(x − m)²/2 with ηc = 0.16.
fn descend(weights: &mut [f32]) {
    weights.iter_mut().for_each(|x| *x -= 0.16 * (*x - MINIMUM));
}

const MINIMUM: f32 = 2.0;
const BEGIN: f32 = 3.0;

fn worker(buffer: &LockFreeBuffer) -> (LocalStep, Vec<f32>) {
    let (mut step, mut weights) = (LocalStep::default(), vec![0.0; buffer.len()]);
    buffer.load_all(&mut weights);
    step.begin(buffer.updates(), &weights);
    (step, weights)
}

#[test]
fn two_workers_in_turns_go_where_the_rule_says() {
    let buffer = LockFreeBuffer::new(&[BEGIN; 5]);
    let mut workers = [worker(&buffer), worker(&buffer)];
    for turn in 0..40 {
        let (step, weights) = &mut workers[turn % 2];
        descend(weights);
        step.apply(&buffer, weights);
        // Every step but the first is computed from the weights before the last one: with e = x − m, e(k+1) =
        // e(k) − 0.16·e(k−1), whose roots are 0.8 and 0.2; e(0) = 1 and e(1) = 0.84 say how much of each.
        let nth = turn as i32 + 1;
        let expected = 2.0 + 16.0 / 15.0 * 0.8f64.powi(nth) - 1.0 / 15.0 * 0.2f64.powi(nth);
        for index in 0..buffer.len() {
            let found = f64::from(buffer.load(index));
            assert!((found - expected).abs() < 1e-6, "after {nth} steps {found}, and by the rule {expected}");
        }
    }
    // The first step had missed nothing, and every other one the other worker's last.
    assert_eq!((workers[0].0.missed.take(), workers[1].0.missed.take()), (vec![1, 19], vec![0, 20]));
}

#[test]
fn one_worker_is_plain_descent_to_the_last_bit() {
    let begin: Vec<f32> = (0..257).map(|index| (index as f32 * 0.37).sin()).collect();
    let (buffer, mut plain) = (LockFreeBuffer::new(&begin), begin);
    let (mut step, mut weights) = worker(&buffer);
    for _ in 0..30 {
        descend(&mut plain);
        descend(&mut weights);
        step.apply(&buffer, &mut weights);
    }
    let mut found = vec![0.0; plain.len()];
    buffer.load_all(&mut found);
    assert!(found == plain && weights == plain);
    assert_eq!(step.missed.take(), [30]);
}

/// A step by hand as the buffer sees it: a load and a store of its one element.
#[test]
fn a_change_between_load_and_store_is_lost_and_missed() {
    let buffer = LockFreeBuffer::new(&[BEGIN]);
    let mut workers = [worker(&buffer), worker(&buffer)];
    let [(first, own), (second, other)] = &mut workers;
    descend(own);
    other[0] += 8.0;
    // Both have looked when the first one stores.
    let mut one = || first.apply(&buffer, own);
    let mut two = || second.apply(&buffer, other);
    crate::lock_free::tests::interleaved(&[0, 1, 0, 1], &mut [&mut one, &mut two]);
    assert_eq!(buffer.load(0), BEGIN + 8.0, "the second store is the last");
    assert_eq!(buffer.updates(), 2);
}

#[test]
fn what_cannot_be_is_refused_with_what_to_type() {
    let with = |rounds| Demands { options: Options { rounds, ..Options::default() }, ..Demands::default() };
    let rounds = RoundOptions::default();
    let cases = [
        (Demands::default(), None),
        (with(RoundOptions { outer_rate: Some(0.7), ..rounds }), Some("--agree local")),
        (with(RoundOptions { period: Some(99), ..rounds }), Some("--herds 2")),
        (with(RoundOptions { period: Some(99), herds: Some(2), ..rounds }), None),
        (Demands { staleness: true, ..Demands::default() }, Some("--agree parameter-server")),
        (Demands { sync_batch_norm: true, ..Demands::default() }, Some("--agree all-reduce")),
        (Demands { saves_by_clock: true, ..Demands::default() }, Some("--checkpoint-every")),
    ];
    for (demands, typed) in cases {
        let said = RECIPE.refuses(&demands);
        assert_eq!(said.is_some(), typed.is_some(), "{said:?}");
        assert!(typed.is_none_or(|typed| said.is_some_and(|said| said.contains(typed))));
    }
}
