//! Shared buffers worked on by stages: every rank at its own pace, every piece of work by one rank, faults named.

mod world;

use std::time::{Duration, Instant};

use paceline_comm::{CommError, Common, Communicator, Rank, SharedBuffer};
use world::{Carry, LENGTHS, TIMEOUT, communicators, input, on_all, options};

/// Numbers of a piece.
const PIECE: usize = 1000;

/// A round: fills, makes pieces of twice the sum in common memory until all are done, and reads them. Which pieces it made.
fn round(
    comm: &mut Communicator,
    (numbers, buffer): (&mut SharedBuffer, &mut SharedBuffer),
    common: &mut Common,
    number: u64,
) -> (Vec<f32>, Vec<u64>) {
    let (rank, length) = (comm.rank().index(), numbers.as_slice().len());
    let pieces = length.div_ceil(PIECE) as u64;
    let (stage, end) = (2 * number + 1, (number + 1) * pieces);
    // Common memory is written again once all have read it.
    reach(comm, buffer, stage - 1);
    let mut own = comm.own_again(numbers).unwrap().unwrap();
    own.copy_from_slice(&input(rank + number as usize, length));
    comm.come_to(buffer, stage);
    reach(comm, buffer, stage);
    let mut made = Vec::new();
    while let Some(piece) = comm.take(buffer, end) {
        let start = (piece - number * pieces) as usize * PIECE;
        let range = start..(start + PIECE).min(length);
        let sums = &mut common[range.clone()];
        comm.sum_into(numbers, range, (buffer, stage), sums);
        sums.iter_mut().for_each(|sum| *sum *= 2.0);
        comm.finish(buffer);
        made.push(piece);
    }
    let wait = comm.wait();
    while comm.finished(buffer) < end {
        comm.watch(buffer, (stage, end), &wait).unwrap();
    }
    let found = common.to_vec();
    comm.come_to(buffer, stage + 1);
    (found, made)
}

fn reach(comm: &mut Communicator, buffer: &mut SharedBuffer, stage: u64) {
    let wait = comm.wait();
    while !comm.are_at(buffer, stage) {
        comm.watch(buffer, (stage, u64::MAX), &wait).unwrap();
    }
}

#[test]
fn every_piece_is_made_once_and_read_by_all() {
    for world in [1, 2, 3, 4, 7] {
        for length in LENGTHS {
            let rounds = if length > 10_000 { 3 } else { 100 };
            let mut ranks = communicators(Carry::Shm, &options(world, None, TIMEOUT));
            let found = on_all(&mut ranks, |comm| {
                let (mut numbers, mut board) = (comm.shared_buffer(length).unwrap(), comm.shared_buffer(0).unwrap());
                let [mut common] = comm.common(length).unwrap().unwrap();
                (0..rounds)
                    .map(|number| round(comm, (&mut numbers, &mut board), &mut common, number))
                    .collect::<Vec<_>>()
            });
            let mut made: Vec<u64> = found.iter().flatten().flat_map(|(_, made)| made.clone()).collect();
            made.sort_unstable();
            let pieces = rounds * length.div_ceil(PIECE) as u64;
            assert!(made.into_iter().eq(0..pieces), "{length} numbers by {world} ranks");
            for (rank, rounds) in found.iter().enumerate() {
                for (number, (found, _)) in rounds.iter().enumerate() {
                    let mut expected = vec![0.0; length];
                    for rank in 0..world {
                        let numbers = input(rank + number, length);
                        expected.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += 2.0 * number);
                    }
                    assert!(*found == expected, "rank {rank} of {world}, {length} numbers, round {number}");
                }
            }
        }
    }
}

#[test]
fn mappings_of_common_memory_lead_to_the_same_numbers() {
    let mut ranks = communicators(Carry::Shm, &options(2, None, TIMEOUT));
    let mut maps: Vec<[Common; 2]> = ranks.iter_mut().map(|comm| comm.common(10).unwrap().unwrap()).collect();
    maps[1][0][3] = 7.0;
    assert!(maps.iter().flatten().all(|map| map[..] == [0.0, 0.0, 0.0, 7.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]));
    let mut alone = communicators(Carry::Thread, &options(1, None, TIMEOUT));
    assert!(alone[0].common::<1>(10).unwrap().is_none());
}

#[test]
fn nobody_waits_who_does_not_ask_to() {
    let mut ranks = communicators(Carry::Shm, &options(2, None, TIMEOUT));
    let mut buffers: Vec<SharedBuffer> = ranks.iter_mut().map(|comm| comm.shared_buffer(10).unwrap()).collect();
    assert!(!ranks[0].are_at(&mut buffers[0], 1));
    ranks[1].come_to(&mut buffers[1], 1);
    assert!(ranks[0].are_at(&mut buffers[0], 1));
    assert_eq!(ranks[0].furthest(&mut buffers[0]), 1);
    assert!(!ranks[1].are_at(&mut buffers[1], 1));
    assert_eq!((ranks[0].take(&mut buffers[0], 1), ranks[1].take(&mut buffers[1], 1)), (Some(0), None));
    assert_eq!(ranks[1].finished(&mut buffers[1]), 0);
    ranks[0].finish(&mut buffers[0]);
    assert_eq!(ranks[1].finished(&mut buffers[1]), 1);
}

#[test]
fn a_rank_that_leaves_or_stalls_is_named() {
    let mut ranks = communicators(Carry::Shm, &options(2, None, Duration::from_millis(300)));
    let mut buffer = ranks[0].shared_buffer(10).unwrap();
    let started = Instant::now();
    let mut wait_for = |comm: &mut Communicator, done: u64| -> CommError {
        let wait = comm.wait();
        loop {
            if let Err(error) = comm.watch(&mut buffer, (1, done), &wait) {
                return error;
            }
        }
    };
    let late = wait_for(&mut ranks[0], u64::MAX);
    assert!(matches!(late, CommError::DeadlinePassed { .. }) && late.peer() == Some(Rank(1)), "{late}");
    drop(ranks.remove(1));
    let gone = wait_for(&mut ranks[0], u64::MAX);
    assert!(matches!(gone, CommError::PeerGone { .. }) && gone.peer() == Some(Rank(1)), "{gone}");
    assert!(started.elapsed() < Duration::from_secs(5));
}
