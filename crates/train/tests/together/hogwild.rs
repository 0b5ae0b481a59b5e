//! Threads on one buffer of weights: in a fixed order of steps they go where the rule says, and they meet
//! with the same weights.

use std::sync::{Condvar, Mutex};

use paceline_parallel::agree::hogwild;

use super::local::{WORKERS, one_step, own_replica};
use super::*;

/// Before all hear what all wish, for which they would meet outside of their turns.
const STEPS: u64 = 12;

/// Lets threads do something in the order of their numbers, again and again.
#[derive(Default)]
struct Turns {
    next: Mutex<u64>,
    changed: Condvar,
}

impl Turns {
    fn take<T>(&self, turn: u64, body: impl FnOnce() -> T) -> T {
        let next = self.next.lock().unwrap();
        let mut next = self.changed.wait_while(next, |next| *next != turn).unwrap();
        let done = body();
        *next += 1;
        self.changed.notify_all();
        done
    }
}

/// What every worker has in the end, and how many updates its steps had missed.
fn by_threads(optimizer: Optimizer) -> Vec<(Vec<f32>, Vec<u64>)> {
    let (memory, turns) = (ThreadMemory::default(), &Turns::default());
    std::thread::scope(|scope| {
        let threads: Vec<_> = communicators(Carry::Thread, WORKERS)
            .into_iter()
            .enumerate()
            .map(|(rank, communicator)| {
                let memory = Some(memory.clone());
                scope.spawn(move || {
                    let mut replica = own_replica(rank, optimizer);
                    let recipe = (&hogwild::RECIPE as &dyn Recipe, agree::Options::default());
                    let agreement = join(recipe, communicator, &replica.shape(), memory);
                    replica.agree(agreement, &Clock::real()).unwrap();
                    replica.begin_together(0, [0; 8]).unwrap();
                    for step in 0..STEPS {
                        let turn = step * WORKERS as u64 + rank as u64;
                        turns.take(turn, || one_step(&mut replica, step, rank, false));
                    }
                    let missed = replica.take_missed();
                    replica.settle().unwrap().unwrap();
                    (replica.store().parameters.to_vec(), missed)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The rule by hand: replicas that know nothing of each other, whose changes are added to one list of
/// numbers.
fn by_hand(optimizer: Optimizer) -> Vec<f32> {
    let mut replicas: Vec<Replica> = (0..WORKERS).map(|rank| own_replica(rank, optimizer)).collect();
    let mut shared = replicas[0].store().parameters.to_vec();
    let mut seen = vec![shared.clone(); WORKERS];
    for step in 0..STEPS {
        for (rank, replica) in replicas.iter_mut().enumerate() {
            one_step(replica, step, rank, true);
            for (index, own) in replica.store_mut().parameters.iter_mut().enumerate() {
                shared[index] += *own - seen[rank][index];
                (*own, seen[rank][index]) = (shared[index], shared[index]);
            }
        }
    }
    shared
}

#[test]
fn weights_go_where_the_rule_says() {
    for optimizer in [Optimizer::Sgd, Optimizer::Momentum] {
        let (found, expected) = (by_threads(optimizer), by_hand(optimizer));
        let apart = local::apart(&found[0].0, &expected);
        assert!(apart < 1e-6, "{optimizer:?}: {apart:e} apart");
        assert!(found[0].0 == found[1].0, "all go on from the same");
        // In turns, every step but the first is computed before the last one.
        assert_eq!([&found[0].1, &found[1].1], [&vec![1, STEPS - 1], &vec![0, STEPS]]);
    }
}
