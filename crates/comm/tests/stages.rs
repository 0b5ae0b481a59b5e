//! Shared buffers worked on by stages: every rank at its own pace, sums where they belong, faults named.

mod world;

use std::time::{Duration, Instant};

use paceline_comm::transfer::chunk;
use paceline_comm::{CommError, Communicator, Rank, SharedBuffer};
use world::{Carry, LENGTHS, TIMEOUT, communicators, input, on_all, options};

/// A round: fills, adds up its own chunk and doubles it, and reads what all left.
fn round(comm: &mut Communicator, buffer: &mut SharedBuffer, number: u64) -> Vec<f32> {
    let (rank, world, length) = (comm.rank().index(), comm.world(), buffer.as_slice().len());
    let sent = 3 * number + 1;
    comm.all_at(buffer, sent - 1, true).unwrap();
    buffer.as_mut_slice().copy_from_slice(&input(rank + number as usize, length));
    comm.come_to(buffer, sent);
    assert!(comm.all_at(buffer, sent, true).unwrap());
    let own = chunk(length, world, rank);
    comm.sum_own(buffer, own, sent).iter_mut().for_each(|sum| *sum *= 2.0);
    comm.come_to(buffer, sent + 1);
    assert!(comm.all_at(buffer, sent + 1, true).unwrap());
    let mut found = vec![f32::NAN; length];
    for peer in 0..world {
        let part = chunk(length, world, peer);
        found[part.clone()].copy_from_slice(comm.part_of(buffer, Rank::at(peer), part, sent + 1));
    }
    comm.come_to(buffer, sent + 2);
    found
}

#[test]
fn every_rank_reads_what_the_owners_left() {
    for world in [1, 2, 3, 4, 7] {
        for length in LENGTHS {
            let rounds = if length > 10_000 { 3 } else { 100 };
            let mut ranks = communicators(Carry::Shm, &options(world, None, TIMEOUT));
            let found = on_all(&mut ranks, |comm| {
                let mut buffer = comm.shared_buffer(length).unwrap();
                (0..rounds).map(|number| round(comm, &mut buffer, number)).collect::<Vec<_>>()
            });
            for (rank, rounds) in found.iter().enumerate() {
                for (number, found) in rounds.iter().enumerate() {
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
fn nobody_waits_who_does_not_ask_to() {
    let mut ranks = communicators(Carry::Shm, &options(2, None, TIMEOUT));
    let mut buffers: Vec<SharedBuffer> = ranks.iter_mut().map(|comm| comm.shared_buffer(10).unwrap()).collect();
    assert!(!ranks[0].all_at(&mut buffers[0], 1, false).unwrap());
    ranks[1].come_to(&mut buffers[1], 1);
    assert!(ranks[0].all_at(&mut buffers[0], 1, false).unwrap());
    assert_eq!(ranks[0].furthest(&mut buffers[0]), 1);
    assert!(!ranks[1].all_at(&mut buffers[1], 1, false).unwrap());
}

#[test]
fn a_rank_that_leaves_or_stalls_is_named() {
    let mut ranks = communicators(Carry::Shm, &options(2, None, Duration::from_millis(300)));
    let mut buffer = ranks[0].shared_buffer(10).unwrap();
    let started = Instant::now();
    let late = ranks[0].all_at(&mut buffer, 1, true).unwrap_err();
    assert!(matches!(late, CommError::DeadlinePassed { .. }) && late.peer() == Some(Rank(1)), "{late}");
    drop(ranks.remove(1));
    let gone = ranks[0].all_at(&mut buffer, 1, true).unwrap_err();
    assert!(matches!(gone, CommError::PeerGone { .. }) && gone.peer() == Some(Rank(1)), "{gone}");
    assert!(started.elapsed() < Duration::from_secs(5));
}
