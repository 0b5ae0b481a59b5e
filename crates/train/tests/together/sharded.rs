//! A sharded optimizer is an all-reduce: the same weights, and a part of the state on each rank.

use paceline_comm::CommError;
use paceline_nn::optim::Optimizer;
use paceline_parallel::agree::StepReport;
use paceline_train::replica::NotFinite;

use super::*;

const SHARDED: Case = Case { shard: true, ..MOMENTUM };

/// The largest distance between two lists of numbers, against the size of one.
fn apart(found: &[f32], expected: &[f32]) -> f64 {
    let norm = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let size = norm(&mut expected.iter().copied());
    norm(&mut found.iter().zip(expected).map(|(found, expected)| found - expected)) / size.max(f64::MIN_POSITIVE)
}

#[test]
fn a_sharded_optimizer_over_every_carry_is_training_alone() {
    for carry in Carry::ALL {
        assert_like_alone(Case { carry, workers: 3, ..SHARDED });
    }
    assert_like_alone(Case { workers: 4, sync_batch_norm: true, ..SHARDED });
    assert_like_alone(Case { carry: Carry::Tcp, sync_batch_norm: true, urgent: true, ..SHARDED });
}

#[test]
fn it_is_where_gradients_are_kept_too() {
    for carry in [Carry::Thread, Carry::Tcp] {
        assert_like_alone(Case { carry, overlap: false, ..SHARDED });
    }
    assert_like_alone(Case { workers: 3, accumulate: 3, rest: 7, ..SHARDED });
    assert_like_alone(Case { workers: 3, clip_norm: Some(0.5), ..SHARDED });
    // Two samples for three workers.
    assert_like_alone(Case { workers: 3, rest: 2, ..SHARDED });
}

/// The state of all ranks together is that of one: each has its part, and nothing else.
#[test]
fn every_rank_has_its_part_of_the_optimizers_state() {
    for optimizer in [Optimizer::Momentum, Optimizer::Adam] {
        let (divided, whole) = (Case { workers: 3, optimizer, ..SHARDED }, Case { workers: 3, optimizer, ..MOMENTUM });
        let (divided, whole) = (together(divided), together(whole));
        let slots = optimizer.state_slots();
        let length = |trained: &Trained| trained.optimizer_state.iter().map(Vec::len).sum::<usize>();
        let all: usize = divided.iter().map(length).sum();
        assert!(
            all <= length(&whole[0]) && all + slots * 200 > length(&whole[0]),
            "gaps between tensors count for none"
        );
        for found in &divided {
            assert!(found.optimizer_state.len() == slots && length(found) <= length(&whole[0]) / 3 + slots * 10);
            let apart = apart(&found.weights, &whole[0].weights);
            assert!(apart < 1e-6, "{optimizer:?}: {apart:e} apart from an all-reduce");
        }
    }
}

#[test]
fn squeezed_gradients_stay_near_the_exact_ones_and_weights_are_whole() {
    let exact = train(replica((0, 1), MOMENTUM), (0, 1), MOMENTUM);
    for carry in Carry::ALL {
        let all = together(Case { carry, workers: 3, squeeze: "bf16", ..SHARDED });
        for found in &all {
            assert!(found.weights == all[0].weights, "{carry:?}: all ranks have the same bits");
            let apart = apart(&found.weights, &exact.weights);
            assert!(apart > 0.0 && apart < 1e-3, "{carry:?}: {apart:e} apart");
        }
    }
}

/// Subtracts sums from weights; keeps nothing.
#[derive(Default)]
struct Subtract {
    weights: Vec<f32>,
    stepped: Vec<Range<usize>>,
}

impl Target for Subtract {
    fn apply_sums(&mut self, _: usize, _: Range<usize>, sums: &mut [f32]) -> Result<(), Refusal> {
        sums.iter_mut().for_each(|sum| *sum *= 0.5);
        Ok(())
    }

    fn step_chunk(&mut self, _: usize, range: Range<usize>, values: &mut [f32]) -> Result<(), Refusal> {
        self.stepped.push(range.clone());
        values.iter_mut().zip(&self.weights[range]).for_each(|(value, weight)| *value = weight - *value);
        Ok(())
    }

    fn apply_shared(&mut self, _: usize, _: Range<usize>, _: &mut [f32], _: &mut [f32]) -> Result<(), Refusal> {
        Err(Refusal)
    }

    fn replace_weights(&mut self, _: usize, weights: &[f32]) -> Result<(), Refusal> {
        self.weights.copy_from_slice(weights);
        Ok(())
    }
}

fn join_sharded(communicator: Communicator, shape: &Shape) -> Box<dyn Agreement> {
    let options = agree::Options { shard: true, ..agree::Options::default() };
    join((&all_reduce::RECIPE, options), communicator, shape, None)
}

/// A bucket of two elements among three ranks, and one of several pieces.
fn shape() -> Shape {
    let large = BucketShape { start: 16, elements: 2_500_000, ready_after: 0, needed_before: 1 };
    let buckets = vec![large, BucketShape { start: 0, elements: 2, ready_after: 1, needed_before: 0 }];
    Shape { buckets, parameters: 2_500_016, slots: 1, ..Shape::default() }
}

#[test]
fn every_rank_steps_its_chunk_once_and_all_get_the_weights() {
    for carry in Carry::ALL {
        let stepped = ranks(carry, 3, |communicator| {
            let (rank, shape) = (communicator.rank().0 as f32, shape());
            let mut agreement = join_sharded(communicator, &shape);
            let mut stepped = Vec::new();
            let mut weights = [vec![10.0; 2_500_000], vec![10.0; 2]];
            for step in 0..3 {
                agreement.begin_step(StepReport::default()).unwrap();
                for (bucket, weights) in weights.iter().enumerate() {
                    agreement.send(bucket, &vec![rank + 1.0; weights.len()]).unwrap();
                }
                assert_eq!(agreement.total().unwrap(), StepReport::default());
                for (bucket, own) in weights.iter_mut().enumerate() {
                    let mut target = Subtract { weights: std::mem::take(own), stepped: Vec::new() };
                    agreement.settle(bucket, Wait::Poll, &mut target).unwrap();
                    if step == 1 && target.stepped.is_empty() {
                        assert_eq!(agreement.inspect_sums(bucket, &mut target).unwrap(), Settled::NotYet);
                    }
                    agreement.step_chunks(bucket, &mut target).unwrap();
                    stepped.extend(target.stepped.iter().filter(|_| step == 0).map(|range| (bucket, range.clone())));
                    *own = target.weights;
                }
                for (bucket, own) in weights.iter_mut().enumerate() {
                    let mut target = Subtract { weights: std::mem::take(own), stepped: Vec::new() };
                    assert_eq!(agreement.settle(bucket, Wait::Block, &mut target).unwrap(), Settled::Done);
                    assert_eq!(agreement.settle(bucket, Wait::Block, &mut target).unwrap(), Settled::NotYet);
                    *own = target.weights;
                    assert!(step != 0 || own.iter().all(|&weight| weight == 4.0), "{carry:?}: 10 less 1 + 2 + 3");
                }
            }
            (stepped, weights)
        });
        let length = |bucket: usize| {
            let all = stepped.iter().flat_map(|(stepped, _)| stepped);
            all.filter(|(at, _)| *at == bucket).map(|(_, range)| range.len()).sum::<usize>()
        };
        assert_eq!((length(0), length(1)), (2_500_000, 2));
        assert!(stepped[2].0.iter().all(|(bucket, _)| *bucket == 0), "nothing of two elements is the third rank's");
        assert!(stepped.iter().all(|(_, weights)| *weights == stepped[0].1), "{carry:?}");
    }
}

#[test]
fn the_state_of_all_ranks_comes_to_the_first() {
    for carry in Carry::ALL {
        let gathered = ranks(carry, 3, |communicator| {
            let (rank, shape) = (communicator.rank().index(), shape());
            let elements = shape.buckets.iter().map(|bucket| bucket.start..bucket.start + bucket.elements);
            let owned = paceline_parallel::Ownership::of(elements, rank, 3);
            let mut own = vec![0.0; owned.length()];
            for part in owned.within(0..shape.parameters) {
                own[part.place].iter_mut().zip(part.elements).for_each(|(state, element)| *state = element as f32);
            }
            let mut agreement = join_sharded(communicator, &shape);
            [0..2, 16..1_000_000, 1_000_001..2_500_016].map(|range| agreement.gather_state(&own, range).unwrap())
        });
        assert!(gathered[1..].iter().flatten().all(Vec::is_empty), "{carry:?}: nobody else gets anything");
        for (range, found) in [0..2, 16..1_000_000, 1_000_001..2_500_016].into_iter().zip(&gathered[0]) {
            assert!(range.map(|element| element as f32).eq(found.iter().copied()), "{carry:?}");
        }
    }
}

#[test]
fn a_chunk_that_is_spoilt_on_one_rank_ends_the_step_on_all_ranks_alike() {
    for clip_norm in [None, Some(1.0)] {
        let case = Case { workers: 3, clip_norm, ..SHARDED };
        let found = ranks(Carry::Thread, 3, |communicator| {
            let rank = communicator.rank().index();
            let mut replica = replica((rank, 3), case);
            let agreement = join_sharded(communicator, &replica.shape());
            replica.agree(agreement, &Clock::real()).unwrap();
            replica.begin_together(0, [0; 8]).unwrap();
            // The last rank's chunks come to no numbers.
            let moment = Moment { step: 0, learning_rate: if rank == 2 { f32::NAN } else { RATE } };
            let batch = batch(0, (rank, 3), case);
            let output = replica.step(&batch, moment, &mut Phases::start(&Clock::real())).unwrap();
            output.updated.and_then(|()| replica.settle().unwrap())
        });
        assert!(
            matches!(found[0], Err(NotFinite::Gradient(_))) && found.iter().all(|other| *other == found[0]),
            "{found:?}"
        );
    }
}

#[test]
fn a_rank_that_dies_in_the_middle_is_named() {
    for carry in [Carry::Thread, Carry::Tcp] {
        let ended = ranks(carry, 3, |communicator| {
            let (rank, shape) = (communicator.rank().index(), shape());
            let mut agreement = join_sharded(communicator, &shape);
            let mut targets =
                [2_500_000, 2].map(|length| Subtract { weights: vec![0.0; length], ..Subtract::default() });
            let mut step = || -> Result<(), CommError> {
                agreement.begin_step(StepReport::default())?;
                agreement.send(0, &vec![1.0; 2_500_000])?;
                // Its part of the first bucket's sums is with the others; nothing more will be.
                agreement.inspect_sums(0, &mut targets[0])?;
                if rank == 1 {
                    return Ok(());
                }
                agreement.send(1, &[1.0; 2])?;
                for bucket in [0, 1] {
                    agreement.step_chunks(bucket, &mut targets[bucket])?;
                }
                agreement.settle(1, Wait::Block, &mut targets[1]).map(drop)
            };
            step()
        });
        assert!(ended[1].is_ok());
        let named = |rank: usize| ended[rank].as_ref().unwrap_err().peer().map(|peer| peer.0);
        assert!(named(0) == Some(1) || named(2) == Some(1), "{carry:?}: {ended:?}");
    }
}

/// Runs every rank of a world as a thread.
pub(super) fn ranks<T: Send>(carry: Carry, world: usize, rank: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> = communicators(carry, world)
            .into_iter()
            .map(|communicator| scope.spawn(move || rank(communicator)))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
