//! Worlds of up to a thousand ranks, and every fault of the menu.

use super::*;
use crate::collective::{Algorithm, Collective, Nodes, transfers};
use crate::cost::{Links, seconds};
use crate::error::CommError;
use crate::reduce::Kind;
use crate::transfer::Transfer;

fn link() -> Link {
    Link::new(20e-6, 1e9)
}

fn lists(algorithm: Algorithm, world: usize, length: usize) -> Vec<Vec<Transfer>> {
    let nodes = Nodes::new((0..world as u32).map(|rank| rank / 4).collect());
    (0..world).map(|rank| transfers(Collective::AllReduce, algorithm, Rank::at(rank), &nodes, length)).collect()
}

/// Small whole numbers, whose sums are exact.
fn buffers(world: usize, length: usize) -> Vec<Vec<u8>> {
    let number = |rank: usize, index: usize| ((rank * 7 + index * 3) % 11) as f32;
    let buffer = |rank| (0..length).flat_map(move |index| number(rank, index).to_le_bytes()).collect();
    (0..world).map(buffer).collect()
}

fn sums(buffers: &[Vec<u8>]) -> Vec<u8> {
    let numbers = |buffer: &Vec<u8>| -> Vec<f32> {
        buffer.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    };
    let mut sums = vec![0.0; buffers[0].len() / 4];
    for buffer in buffers {
        sums.iter_mut().zip(numbers(buffer)).for_each(|(sum, number)| *sum += number);
    }
    sums.iter().flat_map(|sum| sum.to_le_bytes()).collect()
}

/// Runs an all-reduce without faults, checks every rank's result, and returns when the last was done.
fn quiet(algorithm: Algorithm, world: usize, length: usize) -> f64 {
    let mut buffers = buffers(world, length);
    let expected = sums(&buffers);
    let trial = Trial::quiet(link(), "all_reduce");
    let finishes = drive(&trial, &lists(algorithm, world, length), Kind::F32, &mut buffers);
    assert!(buffers.iter().all(|buffer| *buffer == expected), "{algorithm} of {world}");
    finishes.into_iter().map(|finish| finish.unwrap().unwrap()).fold(0.0, f64::max)
}

#[test]
fn a_hundred_ranks_agree_by_every_algorithm() {
    for algorithm in Algorithm::ALL {
        quiet(algorithm, 100, 1100);
    }
}

#[test]
#[ignore = "cargo x ci: comm"]
fn a_thousand_ranks_agree_by_every_algorithm() {
    for algorithm in Algorithm::ALL.into_iter().filter(|&algorithm| algorithm != Algorithm::Direct) {
        quiet(algorithm, 1024, 1100);
    }
}

#[test]
fn virtual_time_is_near_the_formula() {
    for algorithm in [Algorithm::Ring, Algorithm::HalvingDoubling, Algorithm::RecursiveDoubling, Algorithm::DoubleTree]
    {
        let (world, length) = (16, 1 << 18);
        let formula = seconds(Collective::AllReduce, algorithm, &Links::uniform(world, link()), 4 * length);
        let took = quiet(algorithm, world, length);
        assert!((0.7..1.5).contains(&(took / formula)), "{algorithm}: {took} s, formula {formula} s");
    }
}

#[test]
fn the_same_seed_gives_the_same_course() {
    let fault = Fault::Loss { from: Rank(1), to: Rank(2), probability: 0.3 };
    let run = |seed| {
        let trial = Trial { faults: vec![fault.clone()], seed, ..Trial::quiet(link(), "all_reduce") };
        let finishes = drive(&trial, &lists(Algorithm::Ring, 8, 4000), Kind::F32, &mut buffers(8, 4000));
        finishes.into_iter().map(|finish| finish.unwrap().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(run(1), run(1));
    assert!((2..20).any(|seed| run(seed) != run(1)), "chance plays a part");
}

#[test]
fn faults_that_only_slow_down_change_the_time_and_not_the_result() {
    let base = quiet(Algorithm::Ring, 8, 40_000);
    let faults = [
        Fault::Delay { from: Rank(2), to: Rank(3), seconds: 0.01 },
        Fault::Narrow { from: Rank(2), to: Rank(3), fraction: 0.1 },
        Fault::Loss { from: Rank(2), to: Rank(3), probability: 0.9 },
        Fault::SlowRank { rank: Rank(5), factor: 10.0 },
    ];
    for fault in faults {
        let mut buffers = buffers(8, 40_000);
        let expected = sums(&buffers);
        let trial = Trial { faults: vec![fault.clone()], seed: 3, ..Trial::quiet(link(), "all_reduce") };
        let finishes = drive(&trial, &lists(Algorithm::Ring, 8, 40_000), Kind::F32, &mut buffers);
        let last = finishes.into_iter().map(|finish| finish.unwrap().unwrap()).fold(0.0, f64::max);
        assert!(buffers.iter().all(|buffer| *buffer == expected));
        assert!(last > 2.0 * base, "{fault:?}: {last} s against {base} s");
    }
}

#[test]
fn a_crash_is_named_by_the_neighbours_and_nobody_waits_beyond_the_deadline() {
    let faults = vec![Fault::Crash { rank: Rank(3), at_s: 100e-6 }];
    let trial = Trial { faults, deadline_s: 5.0, ..Trial::quiet(link(), "all_reduce") };
    let finishes = drive(&trial, &lists(Algorithm::Ring, 8, 400_000), Kind::F32, &mut buffers(8, 400_000));
    assert!(finishes[3].is_none());
    for neighbour in [2, 4] {
        let error = finishes[neighbour].as_ref().unwrap().as_ref().unwrap_err();
        assert!(matches!(error, CommError::PeerGone { .. }) && error.peer() == Some(Rank(3)), "{error}");
    }
    assert!(finishes.iter().flatten().all(Result::is_err), "nobody can have finished");
}

#[test]
fn a_cut_link_and_a_partition_end_with_the_deadline_and_name_a_rank() {
    let cut = Fault::Cut { between: Rank(3), and: Rank(4), at_s: 0.0 };
    let partition = Fault::Partition { ranks: vec![Rank(0), Rank(1), Rank(2), Rank(3)], at_s: 0.0 };
    for fault in [cut, partition] {
        let trial = Trial { faults: vec![fault], deadline_s: 5.0, ..Trial::quiet(link(), "all_reduce") };
        let finishes = drive(&trial, &lists(Algorithm::Ring, 8, 4000), Kind::F32, &mut buffers(8, 4000));
        let error = finishes[4].as_ref().unwrap().as_ref().unwrap_err();
        assert!(matches!(error, CommError::DeadlinePassed { .. }) && error.peer() == Some(Rank(3)), "{error}");
    }
}
