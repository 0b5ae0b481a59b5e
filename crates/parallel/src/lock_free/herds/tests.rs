//! Where changes go on the ring, by hand; and an exchange while a worker of the same herd writes.

use super::super::tests::{interleaved, orders};
use super::*;

/// Herds with nothing but zeros, and their leaders.
fn herds(count: usize, delay: u64) -> (ThreadMemory, Vec<Leader>) {
    let memory = ThreadMemory::of_neighbours(count, count);
    (0..count).for_each(|herd| memory.open(herd, &[0.0]));
    let leaders = (0..count).map(|herd| Leader::new(&memory, herd, delay, &[0.0])).collect();
    (memory, leaders)
}

fn copies(memory: &ThreadMemory) -> Vec<f32> {
    (0..memory.herds()).map(|herd| memory.copy(herd).load(0)).collect()
}

fn close(found: &[f32], expected: &[f64]) {
    let near = |(found, expected): (&f32, &f64)| (f64::from(*found) - expected).abs() < 1e-3;
    assert!(found.iter().zip(expected).all(near), "{found:?} for {expected:?}");
}

#[test]
fn the_shares_are_those_of_the_equations() {
    let golden = (5f64.sqrt() - 1.0) / 2.0;
    let (beta, lambda) = shares(2);
    assert!((beta - golden).abs() < 1e-12 && (lambda - (1.0 - golden)).abs() < 1e-12);
    for n in 2..9 {
        let (beta, lambda) = shares(n as usize);
        assert!((beta.powi(n) + beta - 1.0).abs() < 1e-12 && (lambda - 1.0 + beta.powi(n - 1)).abs() < 1e-12);
    }
}

/// Of two herds, β² + β = 1 and λ = 1 − β. A change of 1000 in the first copy, token by token.
#[test]
fn a_change_goes_round_as_the_rule_says() {
    let (memory, mut leaders) = herds(2, 1);
    let beta = (5f64.sqrt() - 1.0) / 2.0;
    memory.copy(0).add(0, 1000.0);
    leaders[0].stepped(&memory);
    close(&copies(&memory), &[1000.0 * beta, 1000.0 * beta]);
    leaders[1].stepped(&memory);
    // β + β² = 1.
    close(&copies(&memory), &[1000.0, 1000.0 * beta]);
    leaders[0].stepped(&memory);
    let third = 1000.0 * (beta + beta.powi(3));
    close(&copies(&memory), &[third, third]);
}

#[test]
fn a_change_comes_to_be_the_same_in_all_copies() {
    for (count, share) in [(2, 1.0), (3, 0.8712), (4, 0.7779), (5, 0.7121)] {
        let (memory, mut leaders) = herds(count, 1);
        memory.copy(0).add(0, 1000.0);
        for turn in 0..400 {
            leaders[turn % count].stepped(&memory);
        }
        // Less what is too little to be told.
        let found = copies(&memory);
        let near = |found: &f32| (found / 1000.0 - share).abs() < 1e-3;
        assert!(found.iter().all(near), "{count} herds: {found:?} for {share}");
    }
}

#[test]
fn little_changes_wait_until_they_are_worth_telling() {
    let (memory, mut leaders) = herds(2, 1);
    memory.copy(0).add(0, 0.006);
    leaders[0].stepped(&memory);
    // Its own copy keeps it, and the next one hears of it when there is more.
    close(&copies(&memory), &[0.006, 0.0]);
    leaders[1].stepped(&memory);
    memory.copy(0).add(0, 10.0);
    leaders[0].stepped(&memory);
    let (lambda, beta) = ((3.0 - 5f64.sqrt()) / 2.0, (5f64.sqrt() - 1.0) / 2.0);
    let (w, v) = (10.006, lambda * 0.006);
    let told = copies(&memory);
    assert!((f64::from(told[1]) - v - beta * w).abs() < 0.01, "{told:?}");
}

#[test]
fn only_who_has_the_token_exchanges_and_only_after_its_delay() {
    let (memory, mut leaders) = herds(3, 4);
    memory.copy(1).add(0, 50.0);
    let before = copies(&memory);
    (0..9).for_each(|_| leaders[1].stepped(&memory));
    assert_eq!(copies(&memory), before, "the first herd has the token");
    (0..3).for_each(|_| leaders[0].stepped(&memory));
    (0..9).for_each(|_| leaders[1].stepped(&memory));
    assert_eq!(copies(&memory), before, "and keeps it for four steps");
    leaders[0].stepped(&memory);
    (0..3).for_each(|_| leaders[1].stepped(&memory));
    assert_eq!(memory.copy(2).load(0), 0.0);
    leaders[1].stepped(&memory);
    assert!(memory.copy(2).load(0) > 0.0);
}

#[test]
fn ranks_have_places_and_one_of_a_herd_leads_it() {
    let memory = ThreadMemory::of_neighbours(5, 2);
    let places: Vec<(usize, bool)> =
        (0..5).map(|rank| memory.place(rank)).map(|place| (place.herd, place.leads)).collect();
    assert_eq!(places, [(0, true), (0, false), (0, false), (1, true), (1, false)]);
    let nodes = ThreadMemory::of_nodes(&[3, 3, 7, 0]);
    assert_eq!((0..4).map(|rank| nodes.place(rank).herd).collect::<Vec<_>>(), [1, 1, 2, 0]);
    assert_eq!(ThreadMemory::of_nodes(&[2, 2]).herds(), 1);
    let flat = ThreadMemory::default();
    assert_eq!((flat.herds(), flat.place(7).herd), (1, 0));
}

/// The exchange loads its own copy and the next, and stores to the next and its own; the worker loads and
/// stores.
#[test]
fn an_exchange_and_a_step_at_once_lose_one_of_each_other_at_most() {
    let (beta, mut found) = ((5f32.sqrt() - 1.0) / 2.0, Vec::new());
    for order in orders([4, 2]) {
        let (memory, mut leaders) = herds(2, 1);
        memory.copy(0).store(0, 1000.0);
        let leader = &mut leaders[0];
        let mut exchange = || leader.exchange(memory.copy(0), memory.copy(1));
        let mut step = || memory.copy(0).add(0, 1.0);
        interleaved(&order, &mut [&mut exchange, &mut step]);
        found.extend(copies(&memory).first());
    }
    // The step before, behind, overwritten, and in place of the exchange.
    for allowed in [1001.0 * beta, 1000.0 * beta + 1.0, 1000.0 * beta, 1001.0] {
        let is = |found: &f32| (found - allowed).abs() < 1e-3;
        assert!(found.iter().any(is), "{allowed} is one of {found:?}");
        found.retain(|found| !is(found));
    }
    assert!(found.is_empty(), "nothing else: {found:?}");
}
