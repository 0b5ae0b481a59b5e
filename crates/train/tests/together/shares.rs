//! One copy of the weights, which ranks step by shares: one that waits steps for the others, and a step that
//! cannot be made is known to all.

use super::*;

/// Given sums and weights.
type Apply<'a> = dyn FnMut(&mut [f32], &mut [f32]) -> Result<(), Refusal> + 'a;

/// What is stepped with, for weights that ranks share.
struct SharedTarget<'a>(&'a mut Apply<'a>);

impl Target for SharedTarget<'_> {
    fn apply_sums(&mut self, _: usize, _: Range<usize>, _: &mut [f32]) -> Result<(), Refusal> {
        Err(Refusal)
    }

    fn step_chunk(&mut self, _: usize, _: Range<usize>, _: &mut [f32]) -> Result<(), Refusal> {
        Err(Refusal)
    }

    fn apply_shared(
        &mut self,
        _: usize,
        _: Range<usize>,
        sums: &mut [f32],
        weights: &mut [f32],
    ) -> Result<(), Refusal> {
        (self.0)(sums, weights)
    }

    fn replace_weights(&mut self, _: usize, _: &[f32]) -> Result<(), Refusal> {
        Err(Refusal)
    }
}

/// Two ranks that share one copy of the weights.
fn one_copy(shape: &Shape) -> Vec<Box<dyn Agreement>> {
    let options = agree::Options { one_copy: true, ..agree::Options::default() };
    let join = |communicator| join((&all_reduce::RECIPE, options), communicator, shape, None);
    communicators(Carry::Shm, 2).into_iter().map(join).collect()
}

/// A model of two buckets.
fn two_buckets(elements: usize, second: usize) -> Shape {
    let bucket = |start| BucketShape { start, elements, ready_after: 0, needed_before: 0 };
    Shape { buckets: vec![bucket(0), bucket(second)], parameters: second + elements, ..Shape::default() }
}

#[test]
fn a_share_that_cannot_be_stepped_with_is_known_to_all_ranks() {
    let shape = two_buckets(10, 16);
    let mut ranks = one_copy(&shape);
    for rank in &mut ranks {
        (0..2).for_each(|bucket| rank.send(bucket, &[1.0; 10]).unwrap());
    }
    let step = |rank: &mut Box<dyn Agreement>, bucket, works: bool| {
        let apply = &mut |sums: &mut [f32], _: &mut [f32]| {
            assert!(sums == [2.0; 10]);
            if works { Ok(()) } else { Err(Refusal) }
        };
        rank.settle(bucket, Wait::Poll, &mut SharedTarget(apply)).unwrap()
    };
    assert_eq!(step(&mut ranks[0], 0, true), Settled::NotYet, "the other may still read the weights");
    assert_eq!(step(&mut ranks[1], 0, false), Settled::Refused);
    assert_eq!(step(&mut ranks[0], 0, true), Settled::Refused);
    assert_eq!(step(&mut ranks[0], 1, true), Settled::Refused);
}

#[test]
fn a_rank_that_waits_makes_the_steps_of_one_that_is_behind() {
    const ELEMENTS: usize = 300_000;
    let shape = two_buckets(ELEMENTS, ELEMENTS);
    let mut ranks = one_copy(&shape);
    // SAFETY: nobody fills it, and it is read when all buckets are settled.
    let memory: Vec<_> = ranks.iter_mut().map(|rank| unsafe { rank.shared_weights() }.unwrap()).collect();
    let mut made = [0, 0];
    let mut settle = |ranks: &mut [Box<dyn Agreement>], rank: usize, bucket, wait| {
        let made = &mut made[rank];
        let apply = &mut |sums: &mut [f32], weights: &mut [f32]| {
            *made += sums.len();
            weights.iter_mut().zip(sums).for_each(|(weight, sum)| *weight -= *sum);
            Ok(())
        };
        ranks[rank].settle(bucket, wait, &mut SharedTarget(apply)).unwrap()
    };
    // Rank 0 has released both buckets before rank 1 comes to the first, which therefore leaves it to rank 0.
    for (rank, bucket) in [(0, 0), (0, 1), (1, 0)] {
        ranks[rank].send(bucket, &vec![1.0 + rank as f32; ELEMENTS]).unwrap();
        assert_eq!(settle(&mut ranks, rank, bucket, Wait::Poll), Settled::NotYet);
    }
    assert_eq!(settle(&mut ranks, 0, 0, Wait::Block), Settled::Done);
    // It is level now, and makes its share of the second.
    ranks[1].send(1, &vec![2.0; ELEMENTS]).unwrap();
    assert_eq!(settle(&mut ranks, 1, 1, Wait::Poll), Settled::NotYet);
    assert_eq!(settle(&mut ranks, 0, 1, Wait::Block), Settled::Done);
    (0..2).for_each(|bucket| assert_eq!(settle(&mut ranks, 1, bucket, Wait::Block), Settled::Done));
    assert!(
        memory.iter().all(|memory| memory.weights.iter().all(|&weight| weight == -3.0)),
        "each weight is stepped once"
    );
    assert!(made[1] > 0 && made[1] <= 3 * (64 << 10) && made[0] + made[1] == 2 * ELEMENTS, "{made:?}");
}
