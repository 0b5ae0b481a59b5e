//! One copy of weights that ranks step together: every rank at its own pace, every piece of work by one rank,
//! faults named, and nobody touches numbers that are not its own at that time.

mod world;

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use paceline_comm::{CommError, Communicator, OneCopy, OneCopyShape, Rank};
use world::{Carry, LENGTHS, TIMEOUT, communicators, input, on_all, options};

/// Numbers of a piece.
const PIECE: usize = 1000;

fn share(comm: &mut Communicator, buckets: &[Range<usize>]) -> OneCopy {
    let elements = buckets.iter().map(|bucket| bucket.end).max().unwrap_or(0);
    let shape = OneCopyShape { elements, buckets, piece_elements: PIECE, slots: 1, sums: 3 };
    comm.one_copy(&shape).unwrap().expect("ranks share memory")
}

/// A round: gives gradients, and adds twice their sum to the weights until all pieces are finished. The
/// weights then, and how many pieces this rank made.
fn round(comm: &Communicator, region: &mut OneCopy, bucket: usize, length: usize) -> (Vec<f32>, u64) {
    let (number, wait) = (region.stage(bucket) as usize, comm.wait());
    region.write_gradients(bucket, &input(comm.rank().index() + number, length));
    region.arrive(bucket);
    let mut made = 0;
    while !region.is_finished(bucket) {
        match region.take(bucket).unwrap() {
            Some(mut piece) => {
                let mut sums = vec![0.0; piece.range().len()];
                piece.sum_gradients(&mut sums);
                piece.weights().iter_mut().zip(sums).for_each(|(weight, sum)| *weight += 2.0 * sum);
                piece.finish();
                made += 1;
            }
            None => region.wait_for_progress(bucket, &wait).unwrap(),
        }
    }
    (region.weights(bucket).to_vec(), made)
}

/// What the weights are after the first rounds.
fn expected(world: usize, length: usize, rounds: usize) -> Vec<f32> {
    let mut weights = vec![0.0; length];
    for number in 0..rounds {
        for rank in 0..world {
            let gradients = input(rank + number, length);
            weights.iter_mut().zip(gradients).for_each(|(weight, gradient)| *weight += 2.0 * gradient);
        }
    }
    weights
}

#[test]
fn every_piece_is_made_once_and_read_by_all() {
    for world in [1, 2, 3, 4, 7] {
        for length in LENGTHS {
            let rounds = if length > 10_000 { 3 } else { 100 };
            let mut ranks = communicators(Carry::Shm, &options(world, None, TIMEOUT));
            let found = on_all(&mut ranks, |comm| {
                let mut region = share(comm, &[0..length, length + 5..2 * length + 5]);
                let rounds: Vec<_> = (0..rounds).map(|nth| round(comm, &mut region, nth % 2, length)).collect();
                assert!(region.is_idle(0) && region.finished(0) == region.stage(0) * region.pieces(0));
                // Whoever leaves while others work is taken for lost.
                comm.barrier().unwrap();
                rounds
            });
            for nth in 0..rounds {
                let made: u64 = found.iter().map(|rank| rank[nth].1).sum();
                assert_eq!(made, length.div_ceil(PIECE) as u64, "{length} numbers by {world} ranks, round {nth}");
                let weights = expected(world, length, nth / 2 + 1);
                assert!(
                    found.iter().all(|rank| rank[nth].0 == weights),
                    "{length} numbers by {world} ranks, round {nth}"
                );
            }
        }
    }
}

#[test]
fn numbers_are_added_up_beside_the_weights() {
    let mut ranks = communicators(Carry::Shm, &options(3, None, TIMEOUT));
    on_all(&mut ranks, |comm| {
        let mut region = share(comm, &[]);
        for nth in 0..1000 {
            let own = (comm.rank().0 * 10 + nth) as f32;
            region.start_sum(&[own, 1.0, -own], &comm.wait()).unwrap();
            let mut sums = [0.0; 3];
            region.finish_sum(&mut sums, &comm.wait()).unwrap();
            assert_eq!(sums, [30.0 + 3.0 * nth as f32, 3.0, -30.0 - 3.0 * nth as f32]);
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn only_ranks_that_share_memory_have_one_copy() {
    let shape = OneCopyShape { elements: 0, buckets: &[], piece_elements: PIECE, slots: 0, sums: 0 };
    let mut alone = communicators(Carry::Thread, &options(1, None, TIMEOUT));
    assert!(!alone[0].shares_memory() && alone[0].one_copy(&shape).unwrap().is_none());
}

fn pair() -> (Vec<Communicator>, Vec<OneCopy>) {
    let mut ranks = communicators(Carry::Shm, &options(2, None, Duration::from_millis(300)));
    let regions = ranks.iter_mut().map(|comm| share(comm, &[0..10, 10..20])).collect();
    (ranks, regions)
}

#[test]
fn nobody_waits_who_does_not_ask_to() {
    let (_ranks, mut regions) = pair();
    let [first, second] = &mut regions[..] else { panic!("two ranks") };
    first.arrive(0);
    assert!(!first.all_arrived(0) && first.take(0).unwrap().is_none());
    second.arrive(0);
    assert!(first.all_arrived(0) && second.all_arrived(0) && first.latest_stage(0) == 1);
    let piece = first.take(0).unwrap().unwrap();
    assert!(second.take(0).unwrap().is_none() && !second.is_idle(0), "each piece is taken by one rank");
    assert!(!second.is_finished(0));
    piece.finish();
    assert!(second.is_finished(0) && second.is_idle(0) && second.finished(0) == 1);
}

/// What a call panics with.
fn refused<T>(call: impl FnOnce() -> T) -> String {
    let Err(panic) = catch_unwind(AssertUnwindSafe(call)) else { return String::new() };
    panic.downcast_ref::<&str>().map(ToString::to_string).unwrap_or_default()
}

#[test]
fn numbers_that_others_work_on_cannot_be_touched() {
    let (_ranks, mut regions) = pair();
    regions.iter_mut().for_each(|region| region.arrive(0));
    let (first, second) = regions.split_at_mut(1);
    let piece = first[0].take(0).unwrap().unwrap();
    let gradients = [0.0; 10];
    assert!(refused(|| second[0].write_gradients(0, &gradients)).contains("being added up"));
    assert!(refused(|| second[0].weights(0).len()).contains("being stepped"));
    assert!(refused(|| second[0].arrive(0)).contains("when the last is over"));
    second[0].write_gradients(1, &gradients);
    piece.finish();
    second[0].write_gradients(0, &gradients);
    assert_eq!(second[0].weights(0), [0.0; 10]);
}

#[test]
fn a_rank_that_cannot_go_on_or_freezes_the_weights_is_seen_by_the_others() {
    for poison in [false, true] {
        let (_ranks, mut regions) = pair();
        regions.iter_mut().for_each(|region| region.arrive(0));
        if poison {
            regions[1].poison()
        } else {
            regions[1].freeze()
        }
        assert_eq!(regions[0].is_poisoned(0), poison);
        assert!(regions.iter_mut().all(|region| region.take(0).unwrap().is_none()), "nobody takes a piece");
        assert!(regions[1].is_idle(0), "the weights stay as they are");
        regions[1].arrive(1);
        regions[0].arrive(1);
        assert!(regions[0].take(1).unwrap().is_none(), "nor of another bucket");
    }
}

#[test]
fn ranks_that_share_other_buckets_notice() {
    let mut ranks = communicators(Carry::Shm, &options(2, None, TIMEOUT));
    let shapes = [[0..10, 10..20], [0..11, 11..20]];
    let mut regions: Vec<_> = ranks.iter_mut().zip(&shapes).map(|(comm, buckets)| share(comm, buckets)).collect();
    regions.iter_mut().for_each(|region| region.arrive(0));
    let error = regions[0].take(0).unwrap_err();
    assert!(matches!(error, CommError::Protocol { .. }) && error.peer() == Some(Rank(1)), "{error}");
    assert!(refused(|| share(&mut ranks[0], &[0..10, 9..20])).contains("do not meet"));
}

#[test]
fn a_rank_that_leaves_or_stalls_is_named() {
    let (ranks, mut regions) = pair();
    let started = Instant::now();
    regions[0].arrive(0);
    let wait_for = |region: &OneCopy| -> CommError {
        let wait = ranks[0].wait();
        loop {
            if let Err(error) = region.wait_for_progress(0, &wait) {
                return error;
            }
        }
    };
    let late = wait_for(&regions[0]);
    assert!(matches!(late, CommError::DeadlinePassed { .. }) && late.peer() == Some(Rank(1)), "{late}");
    drop(regions.remove(1));
    let gone = wait_for(&regions[0]);
    assert!(matches!(gone, CommError::PeerGone { .. }) && gone.peer() == Some(Rank(1)), "{gone}");
    assert!(started.elapsed() < Duration::from_secs(5));
}
