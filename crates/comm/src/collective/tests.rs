//! Every list of every rank, run by the plainest possible interpreter: whole messages, step by step, on integers.
//!
//! Each element of each rank starts as its own random word, and sums wrap; so a sum is right only if every contribution
//! was added exactly once. Up to 21 ranks a second run counts contributions exactly, three bits for each rank.

use std::collections::{HashMap, VecDeque};

use paceline_system::random::{at, key};
use proptest::prelude::*;

use super::*;
use crate::transfer::{Action, chunk};

type Buffers = Vec<Vec<u64>>;

fn lists(collective: Collective, algorithm: Algorithm, nodes: &Nodes, length: usize) -> Vec<Vec<Transfer>> {
    (0..nodes.world()).map(|rank| transfers(collective, algorithm, Rank::at(rank), nodes, length)).collect()
}

/// Runs the lists and, on the way, holds them to what `transfer.rs` promises.
fn interpret(lists: &[Vec<Transfer>], buffers: &mut Buffers) {
    let steps = lists.iter().flatten().map(|transfer| transfer.step + 1).max().unwrap_or(0);
    let mut done = vec![0; lists.len()];
    let mut links: HashMap<(usize, usize), VecDeque<Vec<u64>>> = HashMap::new();
    for step in 0..steps {
        let of_step = |rank: usize, done: &[usize]| -> Vec<Transfer> {
            lists[rank][done[rank]..].iter().take_while(|transfer| transfer.step == step).copied().collect()
        };
        for (rank, buffer) in buffers.iter().enumerate() {
            for transfer in of_step(rank, &done).iter().filter(|transfer| transfer.action == Action::Send) {
                assert!(transfer.length > 0 && transfer.peer.index() != rank);
                let words = buffer[transfer.range()].to_vec();
                links.entry((rank, transfer.peer.index())).or_default().push_back(words);
            }
        }
        for (rank, buffer) in buffers.iter_mut().enumerate() {
            let now = of_step(rank, &done);
            for transfer in now.iter().filter(|transfer| transfer.action != Action::Send) {
                let link = links.get_mut(&(transfer.peer.index(), rank));
                let words = link.and_then(VecDeque::pop_front).expect("a receive has its send in the same step");
                assert_eq!(words.len(), transfer.length, "both ends name the same length");
                for (target, word) in buffer[transfer.range()].iter_mut().zip(words) {
                    *target = if transfer.action == Action::Reduce { target.wrapping_add(word) } else { word };
                }
            }
            done[rank] += now.len();
        }
        assert!(links.values().all(VecDeque::is_empty), "a send has its receive in the same step");
    }
    assert!(done.iter().zip(lists).all(|(done, list)| *done == list.len()), "steps never fall along a list");
}

/// What must be in the buffers, by definition.
fn expected(collective: Collective, before: &Buffers) -> Buffers {
    let (world, length) = (before.len(), before[0].len());
    let sum = |index: usize| before.iter().fold(0u64, |sum, buffer| sum.wrapping_add(buffer[index]));
    let owner = |index: usize| (0..world).find(|&rank| chunk(length, world, rank).contains(&index)).unwrap();
    let of = |rank: usize, index: usize| match collective {
        Collective::AllReduce | Collective::ReduceScatter => sum(index),
        Collective::AllGather => before[owner(index)][index],
        Collective::Broadcast { root } => before[root.index()][index],
        Collective::Barrier => 0,
        Collective::AllToAll => {
            let (peer, each) = (owner(index), length / world);
            before[peer][rank * each + index % each]
        }
    };
    match collective {
        Collective::AllReduce => {
            let sums: Vec<u64> = (0..length).map(sum).collect();
            vec![sums; world]
        }
        _ => (0..world).map(|rank| (0..length).map(|index| of(rank, index)).collect()).collect(),
    }
}

fn check(
    collective: Collective,
    algorithm: Algorithm,
    nodes: &Nodes,
    length: usize,
    word: impl Fn(usize, usize) -> u64,
) {
    let world = nodes.world();
    let before: Buffers = (0..world).map(|rank| (0..length).map(|index| word(rank, index)).collect()).collect();
    let mut buffers = before.clone();
    interpret(&lists(collective, algorithm, nodes, length), &mut buffers);
    if collective == Collective::Barrier {
        return;
    }
    let expected = expected(collective, &before);
    for rank in 0..world {
        let range = if collective == Collective::ReduceScatter { chunk(length, world, rank) } else { 0..length };
        let said = format!("{collective} by {algorithm}, rank {rank} of {world}, {length} elements");
        assert_eq!(buffers[rank][range.clone()], expected[rank][range], "{said}");
    }
}

fn random_word(rank: usize, index: usize) -> u64 {
    at(key(&[rank as u64]), index as u64)
}

fn length_for(collective: Collective, world: usize, length: usize) -> usize {
    match collective {
        Collective::AllToAll => length / world * world,
        Collective::Barrier => 1,
        _ => length,
    }
}

fn everything(world: usize, nodes: &Nodes, length: usize) {
    for collective in Collective::ALL {
        for algorithm in Algorithm::ALL.into_iter().filter(|algorithm| algorithm.supports(collective, world)) {
            check(collective, algorithm, nodes, length_for(collective, world, length), random_word);
        }
    }
}

#[test]
fn every_element_is_reduced_exactly_once_in_small_worlds() {
    for world in 1..=21 {
        for length in [0, 1, 2, world - 1, world, world + 1, 37] {
            everything(world, &Nodes::one(world), length);
            for algorithm in Algorithm::ALL {
                check(Collective::AllReduce, algorithm, &Nodes::one(world), length, |rank, _| 1 << (3 * rank));
            }
        }
        for root in (0..world).map(Rank::at) {
            for algorithm in [Algorithm::Ring, Algorithm::RecursiveDoubling, Algorithm::Direct] {
                check(Collective::Broadcast { root }, algorithm, &Nodes::one(world), 29, random_word);
            }
        }
    }
}

#[test]
fn every_element_is_reduced_exactly_once_in_large_worlds() {
    for world in [64, 100, 255, 1023, 1024] {
        let nodes = Nodes::new((0..world as u32).map(|rank| rank / 8).collect());
        for algorithm in Algorithm::ALL {
            check(Collective::AllReduce, algorithm, &nodes, world + 5, random_word);
        }
        check(Collective::Barrier, Algorithm::RecursiveDoubling, &nodes, 1, random_word);
        check(Collective::Broadcast { root: Rank(7) }, Algorithm::Ring, &nodes, world + 5, random_word);
        check(Collective::Broadcast { root: Rank(7) }, Algorithm::RecursiveDoubling, &nodes, world + 5, random_word);
    }
}

#[test]
fn a_barrier_hears_from_everyone() {
    for world in 1..=70 {
        for algorithm in [Algorithm::RecursiveDoubling, Algorithm::Direct] {
            let lists = lists(Collective::Barrier, algorithm, &Nodes::one(world), 1);
            // Whom each rank has heard of, directly or through others, as bits.
            let mut heard: Vec<u128> = (0..world).map(|rank| 1 << rank).collect();
            for step in 0..8 {
                let before = heard.clone();
                for (rank, list) in lists.iter().enumerate() {
                    for transfer in list.iter().filter(|t| t.step == step && t.action == Action::Receive) {
                        heard[rank] |= before[transfer.peer.index()];
                    }
                }
            }
            assert!(heard.iter().all(|ranks| ranks.count_ones() as usize == world));
        }
    }
}

/// Steps of the whole, and the most elements any rank sends.
fn steps_and_sent(algorithm: Algorithm, nodes: &Nodes, length: usize) -> (usize, usize) {
    let lists = lists(Collective::AllReduce, algorithm, nodes, length);
    let steps = lists.iter().flatten().map(|transfer| transfer.step as usize + 1).max().unwrap_or(0);
    let sent = |list: &Vec<Transfer>| -> usize {
        list.iter().filter(|transfer| transfer.action == Action::Send).map(|transfer| transfer.length).sum()
    };
    (steps, lists.iter().map(sent).max().unwrap_or(0))
}

#[test]
fn steps_and_bytes_are_those_of_the_formulas() {
    for world in [2usize, 3, 4, 6, 8, 13, 16, 100, 1024] {
        let (nodes, length) = (Nodes::one(world), 16 * world);
        let least = 2 * (world - 1) * length / world;
        let (levels, up) = (world.ilog2() as usize, world.next_power_of_two().ilog2() as usize);
        assert_eq!(steps_and_sent(Algorithm::Ring, &nodes, length), (2 * (world - 1), least));
        assert_eq!(steps_and_sent(Algorithm::Direct, &nodes, length), (2, least));
        if world.is_power_of_two() {
            assert_eq!(steps_and_sent(Algorithm::HalvingDoubling, &nodes, length), (2 * levels, least));
            assert_eq!(steps_and_sent(Algorithm::RecursiveDoubling, &nodes, length), (levels, levels * length));
        } else {
            let (core, folded) = (1 << levels, 2 * (world - (1 << levels)) == world);
            assert!(!folded);
            let (steps, sent) = steps_and_sent(Algorithm::HalvingDoubling, &nodes, length * core);
            assert_eq!((steps, sent), (2 * levels + 2, (2 * (core - 1) + core) * length));
            let (steps, sent) = steps_and_sent(Algorithm::RecursiveDoubling, &nodes, length);
            assert_eq!((steps, sent), (levels + 2, (levels + 1) * length));
        }
        let (steps, sent) = steps_and_sent(Algorithm::DoubleTree, &nodes, length);
        assert!(steps <= 2 * up && sent <= 2 * length, "{world}: {steps} steps, {sent} of {length}");
    }
    // Four nodes of eight ranks: m = 8, n = 4.
    let nodes = Nodes::new((0..32).map(|rank| rank / 8).collect());
    let (length, m, n) = (64, 8, 4);
    let expected = 2 * (m - 1) * length / m + 2 * (n - 1) * length / n / m;
    assert_eq!(steps_and_sent(Algorithm::Hierarchical, &nodes, length), (2 + 2 * (n - 1), expected));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn any_world_any_length_any_nodes(
        node_of in prop::collection::vec(0u32..5, 1..60), length in 0usize..300, root in any::<prop::sample::Index>(),
    ) {
        let world = node_of.len();
        let nodes = Nodes::new(node_of);
        everything(world, &nodes, length);
        let root = Rank::at(root.index(world));
        check(Collective::Broadcast { root }, Algorithm::Ring, &nodes, length, random_word);
        check(Collective::Broadcast { root }, Algorithm::RecursiveDoubling, &nodes, length, random_word);
    }
}
