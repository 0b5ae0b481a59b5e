//! Worlds of up to a thousand ranks, groups of them at once, and every fault of the menu.

use proptest::prelude::*;

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

/// What a group of these ranks does, with numbers that follow from their ranks in the world; and what each
/// must hold then.
fn part(members: &[Rank], collective: Collective, algorithm: Algorithm, length: usize) -> (Part, Vec<Vec<u8>>) {
    let (world, number) = (members.len(), |member: Rank, index: usize| (member.index() * 7 + index * 3) % 11);
    let of = |member: Rank| (0..length).map(move |index| number(member, index) as f32);
    let sums = |index: usize| members.iter().map(|&member| number(member, index)).sum::<usize>() as f32;
    let bytes = |numbers: Vec<f32>| -> Vec<u8> { numbers.iter().flat_map(|number| number.to_le_bytes()).collect() };
    let after = match collective {
        Collective::Broadcast { root } => bytes(of(members[root.index()]).collect()),
        _ => bytes((0..length).map(sums).collect()),
    };
    let nodes = Nodes::new(members.iter().map(|member| member.0 % 3).collect());
    let lists = (0..world).map(|rank| transfers(collective, algorithm, Rank::at(rank), &nodes, length)).collect();
    let buffers = members.iter().map(|&member| bytes(of(member).collect())).collect();
    (Part { members: members.to_vec(), kind: Kind::F32, lists, buffers }, vec![after; world])
}

/// The world, the rows and the columns of a mesh, and a group in a shuffled order, each with a collective of
/// its own.
fn parts(rows: usize, columns: usize, random: &mut Random) -> Vec<(Part, Vec<Vec<u8>>)> {
    let world = rows * columns;
    let rank = |row: usize, column: usize| Rank::at(row * columns + column);
    let mut groups: Vec<Vec<Rank>> = vec![(0..world).map(Rank::at).collect()];
    groups.extend((0..rows).map(|row| (0..columns).map(|column| rank(row, column)).collect()));
    groups.extend((0..columns).map(|column| (0..rows).map(|row| rank(row, column)).collect()));
    let mut shuffled: Vec<Rank> = (0..world).map(Rank::at).collect();
    random.shuffle(&mut shuffled);
    shuffled.truncate(1 + random.below(world));
    groups.push(shuffled);
    let mut make = |members: &Vec<Rank>| {
        let root = Rank::at(random.below(members.len()));
        let collective = [Collective::AllReduce, Collective::Broadcast { root }][random.below(2)];
        let able: Vec<Algorithm> =
            Algorithm::ALL.into_iter().filter(|able| able.supports(collective, members.len())).collect();
        let algorithm = able[random.below(able.len())];
        part(members, collective, algorithm, random.below(20_000))
    };
    groups.iter().map(&mut make).collect()
}

/// Faults that only slow down, between ranks drawn by chance.
fn slowdowns(world: usize, random: &mut Random) -> Vec<Fault> {
    let fault = |random: &mut Random| {
        let [from, to] = [(); 2].map(|()| Rank::at(random.below(world)));
        match random.below(4) {
            0 => Fault::Delay { from, to, seconds: 0.002 },
            1 => Fault::Narrow { from, to, fraction: 0.2 },
            2 => Fault::Loss { from, to, probability: 0.5 },
            _ => Fault::SlowRank { rank: from, factor: 5.0 },
        }
    };
    (0..random.below(5)).map(|_| fault(random)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn groups_at_once_do_not_mix_and_follow_their_seed(seed: u64, rows in 1usize..4, columns in 1usize..5) {
        let run = || {
            let mut random = Random::new(&[seed]);
            let (mut parts, after): (Vec<Part>, Vec<_>) = parts(rows, columns, &mut random).into_iter().unzip();
            let faults = slowdowns(rows * columns, &mut random);
            let trial = Trial { faults, seed, ..Trial::quiet(link(), "groups") };
            let finishes = drive_groups(&trial, rows * columns, &mut parts);
            let times: Vec<f64> = finishes.into_iter().flatten().map(|finish| finish.unwrap().unwrap()).collect();
            (parts.into_iter().map(|part| part.buffers).collect::<Vec<_>>(), after, times)
        };
        let (buffers, after, times) = run();
        prop_assert!(buffers == after, "seed {seed}");
        prop_assert_eq!(times, run().2);
    }

    #[test]
    fn a_crash_in_a_group_is_named_by_its_rank_in_the_world(seed: u64, world in 3u32..10) {
        let mut random = Random::new(&[seed]);
        let victim = Rank::at(random.below(world as usize));
        let (some, others): (Vec<Rank>, Vec<Rank>) = (0..world).rev().map(Rank).partition(|rank| rank.0 % 2 == victim.0 % 2);
        let mut parts =
            [&some, &others].map(|members| part(members, Collective::AllReduce, Algorithm::Direct, 40_000).0);
        let faults = vec![Fault::Crash { rank: victim, at_s: 20e-6 }];
        let trial = Trial { faults, deadline_s: 5.0, seed, ..Trial::quiet(link(), "all_reduce") };
        let finishes = drive_groups(&trial, world as usize, &mut parts);
        for (member, finish) in some.iter().zip(&finishes[0]).filter(|(member, _)| **member != victim) {
            let error = finish.as_ref().unwrap().as_ref().unwrap_err();
            prop_assert!(error.peer() == Some(victim), "{}", error);
            prop_assert!(error.to_string().starts_with(&format!("{member} ")), "{}", error);
        }
        prop_assert!(finishes[1].iter().all(|finish| matches!(finish, Some(Ok(_)))), "the other group is not concerned");
    }
}
