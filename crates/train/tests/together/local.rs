//! Rounds of steps of one's own: with rounds of one step a mean of gradients, and otherwise what the rule says.

use std::ops::Range;

use paceline_comm::Rank;
use paceline_comm::transfer::chunk;
use paceline_parallel::agree::{RoundOptions, local};
use paceline_train::engine::Weights;

use super::*;

pub(super) const WORKERS: usize = 2;

/// A replica, which steps with the mean of its own samples.
pub(super) fn own_replica(rank: usize, optimizer: Optimizer) -> Replica {
    let case = Case { optimizer, workers: WORKERS, ..MOMENTUM };
    Replica::new(&normed, options((rank, WORKERS), case), &Arc::new(Cpu::new(1))).unwrap()
}

fn own_batch(step: u64, rank: usize, alone: bool) -> Batch {
    let share = batch(step, (rank, WORKERS), MOMENTUM);
    // By itself it has no others to count its samples among.
    if alone { Batch { share: None, ..share } } else { share }
}

pub(super) fn one_step(replica: &mut Replica, step: u64, rank: usize, alone: bool) {
    let moment = Moment { step, learning_rate: RATE };
    let clock = Clock::real();
    replica.step(&own_batch(step, rank, alone), moment, &mut Phases::start(&clock)).unwrap().updated.unwrap();
}

/// Weights and optimizer's state of every worker after twenty steps and a settling. `hidden` says whether fragments
/// have a communicator of their own.
fn rounds(carry: Carry, optimizer: Optimizer, (rounds, hidden): (RoundOptions, bool)) -> Vec<Trained> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = communicators(carry, WORKERS)
            .into_iter()
            .enumerate()
            .map(|(rank, mut communicator)| {
                scope.spawn(move || {
                    let mut replica = own_replica(rank, optimizer);
                    let shape = replica.shape();
                    let options = agree::Options { rounds, ..agree::Options::default() };
                    let all: Vec<Rank> = (0..WORKERS).map(Rank::at).collect();
                    let urgent = hidden.then(|| communicator.group(&all).unwrap());
                    let (roles, clock) = (Roles { workers: WORKERS, servers: 0 }, Clock::real());
                    let (shape, deadline) = (&shape, TIMEOUT);
                    let join = Join {
                        communicator,
                        urgent,
                        group: None,
                        memory: None,
                        lending: None,
                        roles,
                        shape,
                        options,
                        deadline,
                        clock,
                    };
                    replica.agree(local::RECIPE.join(join).unwrap(), &Clock::real()).unwrap();
                    replica.begin_together(0, [0; 8]).unwrap();
                    (0..STEPS).for_each(|step| one_step(&mut replica, step, rank, false));
                    replica.settle().unwrap().unwrap();
                    let (weights, states) = (replica.store().parameters.to_vec(), replica.store().states.to_vec());
                    let Weights { optimizer, .. } = replica.engine.weights();
                    let optimizer_state = optimizer.iter().map(|slot| slot.to_vec()).collect();
                    Trained { losses: Vec::new(), weights, states, optimizer_state }
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn norm(numbers: impl Iterator<Item = f32>) -> f64 {
    numbers.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

pub(super) fn apart(found: &[f32], expected: &[f32]) -> f64 {
    norm(found.iter().zip(expected).map(|(a, b)| a - b)) / norm(expected.iter().copied())
}

/// A fragment that is under way: where it is, the mean of all, and what each replica had when it left.
type UnderWay = (Range<usize>, Vec<f64>, Vec<Vec<f32>>);

/// The rule by hand, with fragments that come back when the next leaves.
fn by_hand_hidden(optimizer: Optimizer, rounds: RoundOptions) -> Vec<f32> {
    let mut replicas: Vec<Replica> = (0..WORKERS).map(|rank| own_replica(rank, optimizer)).collect();
    let (rate, momentum) = (rounds.outer_rate.unwrap_or(1.0), rounds.outer_momentum.unwrap_or(0.0));
    let (every, fragments) = (rounds.period.unwrap(), rounds.fragments.unwrap());
    let mut anchor: Vec<f64> = replicas[0].store().parameters.iter().copied().map(f64::from).collect();
    let mut velocity = vec![0.0; anchor.len()];
    let mut under_way: Option<UnderWay> = None;
    for done in 1..=STEPS {
        replicas.iter_mut().enumerate().for_each(|(rank, replica)| one_step(replica, done - 1, rank, true));
        let due = |fragment: &u64| (fragment + 1) * every / fragments % every == done % every;
        let leaves = (0..fragments).find(due).map(|index| chunk(anchor.len(), fragments as usize, index as usize));
        // At the end all come together, whatever was under way.
        for range in leaves.into_iter().chain((done == STEPS).then_some(0..anchor.len())) {
            if let Some((range, mean, sent)) = under_way.take() {
                for (place, index) in range.enumerate() {
                    let change = anchor[index] - mean[place];
                    velocity[index] = momentum * velocity[index] + change;
                    anchor[index] -= rate * (change + momentum * velocity[index]);
                    for (replica, sent) in replicas.iter_mut().zip(&sent) {
                        let weight = &mut replica.store_mut().parameters[index];
                        *weight = (anchor[index] + f64::from(*weight - sent[place])) as f32;
                    }
                }
            }
            let of = |replica: &Replica| replica.store().parameters[range.clone()].to_vec();
            let sent: Vec<Vec<f32>> = replicas.iter().map(of).collect();
            let mean = (0..range.len()).map(|place| sent.iter().map(|own| f64::from(own[place])).sum::<f64>());
            let mean: Vec<f64> = mean.map(|sum| sum / WORKERS as f64).collect();
            under_way = Some((range, mean, sent));
        }
    }
    let (_, mean, _) = under_way.unwrap();
    for (index, mean) in mean.into_iter().enumerate() {
        let change = anchor[index] - mean;
        velocity[index] = momentum * velocity[index] + change;
        anchor[index] -= rate * (change + momentum * velocity[index]);
    }
    anchor.into_iter().map(|weight| weight as f32).collect()
}

/// The rule by hand: replicas that know nothing of each other, whose weights are put together between steps.
fn by_hand(optimizer: Optimizer, rounds: RoundOptions) -> Vec<f32> {
    let mut replicas: Vec<Replica> = (0..WORKERS).map(|rank| own_replica(rank, optimizer)).collect();
    let (rate, momentum) = (rounds.outer_rate.unwrap_or(1.0), rounds.outer_momentum.unwrap_or(0.0));
    let mut anchor: Vec<f64> = replicas[0].store().parameters.iter().copied().map(f64::from).collect();
    let mut velocity = vec![0.0; anchor.len()];
    for step in 0..STEPS {
        for (rank, replica) in replicas.iter_mut().enumerate() {
            one_step(replica, step, rank, true);
        }
        let done = step + 1;
        let every = rounds.period.unwrap();
        let ends = done.is_multiple_of(every) || done <= rounds.warm_up.unwrap_or(0);
        // Without fragments the whole is one; with them each has its step of a round.
        let fragments = rounds.fragments.unwrap_or(1);
        let exchanged: Vec<Range<usize>> = match (fragments, ends, done == STEPS) {
            (1, false, false) => continue,
            (1, ..) => std::iter::once(0..anchor.len()).collect(),
            (_, _, last) => {
                let due = |fragment: &u64| (fragment + 1) * every / fragments % every == done % every;
                let part = |fragment| chunk(anchor.len(), fragments as usize, fragment as usize);
                let parts = (0..fragments).filter(due).map(part);
                parts.chain(last.then_some(0..anchor.len())).collect()
            }
        };
        for index in exchanged.into_iter().flatten() {
            let anchor = &mut anchor[index];
            let mean = replicas.iter().map(|replica| f64::from(replica.store().parameters[index])).sum::<f64>();
            let change = *anchor - mean / WORKERS as f64;
            velocity[index] = momentum * velocity[index] + change;
            *anchor -= rate * (change + momentum * velocity[index]);
            replicas.iter_mut().for_each(|replica| replica.store_mut().parameters[index] = *anchor as f32);
        }
    }
    replicas[0].store().parameters.to_vec()
}

#[test]
fn weights_go_where_the_rule_says() {
    let plain = RoundOptions { period: Some(3), ..RoundOptions::default() };
    let outer = RoundOptions { outer_rate: Some(0.7), outer_momentum: Some(0.9), ..plain };
    let cases = [
        (Carry::Thread, Optimizer::Sgd, RoundOptions { warm_up: Some(4), ..plain }),
        (Carry::Tcp, Optimizer::Nesterov, plain),
        (Carry::Shm, Optimizer::Momentum, outer),
        (Carry::Thread, Optimizer::Nesterov, RoundOptions { period: Some(7), fragments: Some(3), ..plain }),
        (Carry::Tcp, Optimizer::Sgd, RoundOptions { period: Some(4), fragments: Some(4), ..outer }),
    ];
    for (carry, optimizer, options) in cases {
        let all = rounds(carry, optimizer, (options, false));
        let expected = by_hand(optimizer, options);
        for found in &all {
            let apart = apart(&found.weights, &expected);
            assert!(apart < 1e-6, "{optimizer:?}, {options:?}: {apart:e} apart");
            let same = found.weights == all[0].weights && found.optimizer_state == all[0].optimizer_state;
            assert!(same && found.states == all[0].states, "all go on from the same");
        }
    }
}

#[test]
fn fragments_come_back_behind_the_steps_that_hide_them() {
    let plain = RoundOptions { period: Some(7), fragments: Some(3), ..RoundOptions::default() };
    let outer = RoundOptions { period: Some(4), fragments: Some(4), outer_rate: Some(0.7), ..plain };
    let cases = [
        (Carry::Thread, Optimizer::Nesterov, plain),
        (Carry::Shm, Optimizer::Sgd, RoundOptions { outer_momentum: Some(0.9), ..outer }),
    ];
    for (carry, optimizer, options) in cases {
        let expected = by_hand_hidden(optimizer, options);
        for found in rounds(carry, optimizer, (options, true)) {
            let apart = apart(&found.weights, &expected);
            assert!(apart < 1e-6, "{optimizer:?}, {options:?}: {apart:e} apart");
        }
    }
}

#[test]
fn rounds_of_one_step_of_sgd_are_steps_with_the_mean_gradient() {
    let case = Case { optimizer: Optimizer::Sgd, workers: WORKERS, ..MOMENTUM };
    let expected = together(case);
    std::thread::scope(|scope| {
        let threads: Vec<_> = communicators(Carry::Thread, WORKERS)
            .into_iter()
            .enumerate()
            .map(|(rank, communicator)| {
                scope.spawn(move || {
                    let mut replica = replica((rank, WORKERS), case);
                    let shape = replica.shape();
                    let rounds = RoundOptions { period: Some(1), ..RoundOptions::default() };
                    let options = agree::Options { rounds, ..agree::Options::default() };
                    let agreement = join((&local::RECIPE, options), communicator, &shape, None);
                    replica.agree(agreement, &Clock::real()).unwrap();
                    replica.begin_together(0, [0; 8]).unwrap();
                    (0..STEPS).for_each(|step| one_step(&mut replica, step, rank, false));
                    replica.store().parameters.to_vec()
                })
            })
            .collect();
        for thread in threads {
            let apart = apart(&thread.join().unwrap(), &expected[0].weights);
            assert!(apart < 1e-6, "{apart:e} apart from an all-reduce");
        }
    });
}

/// Ranks of one machine average among themselves, between rounds of all.
#[test]
fn workers_of_a_machine_average_more_often() {
    let nodes = Nodes::new(vec![0, 0, 1, 1]);
    let link = Link::new(20e-6, 2e9);
    let found = std::thread::scope(|scope| {
        let threads: Vec<_> = communicators(Carry::Thread, 4)
            .into_iter()
            .enumerate()
            .map(|(rank, mut communicator)| {
                let nodes = nodes.clone();
                scope.spawn(move || {
                    communicator.set_choice(Choice::by_cost(Links { nodes, within: link, between: link }));
                    let shape = Shape::default();
                    let options = agree::Options::default();
                    let mut worker = join((&local::RECIPE, options), communicator, &shape, None);
                    let mut weights = vec![rank as f32; 1001];
                    worker.exchange_weights(Reach::Node, &mut weights, &mut []).unwrap();
                    let within = weights.clone();
                    worker.exchange_weights(Reach::All, &mut weights, &mut []).unwrap();
                    (within, weights)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    for (rank, (within, all)) in found.iter().enumerate() {
        let expected = if rank < 2 { 0.5 } else { 2.5 };
        assert!(within.iter().all(|&x| x == expected) && all.iter().all(|&x| x == 1.5), "rank {rank}");
    }
}
