//! Workers and a centre with whole replicas: every exchange is where the rule says, between the steps of an engine.

use paceline_parallel::agree::{RoundOptions, downpour, elastic};

use super::local::{WORKERS, apart, one_step, own_replica};
use super::*;

/// What a run is.
#[derive(Clone, Copy)]
struct Run {
    carry: Carry,
    recipe: &'static dyn Recipe,
    optimizer: Optimizer,
    rounds: RoundOptions,
    staleness: Option<u64>,
}

impl Run {
    fn join(self, communicator: Communicator, shape: &Shape) -> Join<'_> {
        let roles = Roles { workers: WORKERS, servers: 1 };
        let options = agree::Options { rounds: self.rounds, staleness: self.staleness, ..agree::Options::default() };
        Join {
            communicator,
            urgent: None,
            group: None,
            memory: None,
            lending: None,
            roles,
            shape,
            options,
            deadline: TIMEOUT,
            clock: Clock::real(),
        }
    }

    /// What all know of the run; buckets do not travel.
    fn told(replica: &Replica) -> ServerOptions {
        let ReplicaOptions { input, classes, .. } = *replica.options();
        let shape = fingerprint(&Shape { buckets: Vec::new(), ..replica.shape() });
        ServerOptions { step: 0, steps_per_epoch: STEPS, input, classes, shape }
    }

    fn serve(self, mut communicator: Communicator) {
        let replica = own_replica(0, self.optimizer);
        let told = ServerOptions::receive(&mut communicator).unwrap();
        assert_eq!(told, Self::told(&replica));
        let length = RunLength { total_steps: STEPS, steps_per_epoch: STEPS, global_batch: BATCH };
        let rates = Rates { learning_rate: &LearningRate::constant(RATE.into()), length, first_step: 0 };
        let shape = replica.shape();
        let Join { communicator, roles, options, deadline, clock, .. } = self.join(communicator, &shape);
        let (journal, recipe) = (ServerJournal::default(), self.recipe);
        let serving = Serving { recipe, options, roles, communicator, lending: None, deadline, clock, journal };
        serve_model(&normed, (replica.options(), Cpu::new(1)), serving, (told, rates)).unwrap();
    }

    /// Weights of every worker after twenty steps, and after they have met.
    fn train(self) -> Vec<Trained> {
        std::thread::scope(|scope| {
            let threads: Vec<_> = communicators(self.carry, WORKERS + 1)
                .into_iter()
                .enumerate()
                .map(|(rank, communicator)| {
                    scope.spawn(move || {
                        if rank == WORKERS {
                            self.serve(communicator);
                            return None;
                        }
                        let mut replica = own_replica(rank, self.optimizer);
                        let shape = replica.shape();
                        let agreement = self.recipe.join(self.join(communicator, &shape)).unwrap();
                        let told = Self::told(&replica);
                        replica.agree(agreement, &Clock::real()).unwrap();
                        replica.begin_together(0, told.identity()).unwrap();
                        (0..STEPS).for_each(|step| one_step(&mut replica, step, rank, false));
                        replica.settle().unwrap().unwrap();
                        let (weights, states) = (replica.store().parameters.to_vec(), replica.store().states.to_vec());
                        let optimizer = &replica.engine.weights().optimizer;
                        let optimizer_state = optimizer.iter().map(|slot| slot.to_vec()).collect();
                        // Once more is nothing more.
                        replica.settle().unwrap().unwrap();
                        assert!(
                            weights[..] == replica.store().parameters[..] && states[..] == replica.store().states[..]
                        );
                        Some(Trained { losses: Vec::new(), weights, states, optimizer_state })
                    })
                })
                .collect();
            threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
        })
    }
}

/// The synchronous rule by hand: replicas that know nothing of each other, and a centre in 64 bits.
fn by_hand(optimizer: Optimizer, (rate, period): (f64, u64)) -> Vec<f32> {
    let mut replicas: Vec<Replica> = (0..WORKERS).map(|rank| own_replica(rank, optimizer)).collect();
    let mut center: Vec<f64> = replicas[0].store().parameters.iter().copied().map(f64::from).collect();
    for step in 0..STEPS {
        let due = step > 0 && step.is_multiple_of(period);
        let before: Vec<Vec<f64>> = replicas
            .iter()
            .map(|replica| {
                let velocity = replica.engine.weights().optimizer.first();
                // The weights of Nesterov are x + μv, and its buffer is −v/η.
                let ahead = if optimizer == Optimizer::Nesterov { 0.9 * f64::from(RATE) } else { 0.0 };
                let x = |(index, &weight): (usize, &f32)| {
                    f64::from(weight) + velocity.map_or(0.0, |velocity| ahead * f64::from(velocity[index]))
                };
                replica.store().parameters.iter().enumerate().map(x).collect()
            })
            .collect();
        let old = center.clone();
        for (rank, replica) in replicas.iter_mut().enumerate() {
            one_step(replica, step, rank, true);
            for (index, weight) in replica.store_mut().parameters.iter_mut().enumerate().filter(|_| due) {
                let moved = rate * (before[rank][index] - old[index]);
                *weight -= moved as f32;
                center[index] += moved;
            }
        }
    }
    let moved = |index: usize| {
        let of = |replica: &Replica| rate * (f64::from(replica.store().parameters[index]) - center[index]);
        replicas.iter().map(of).sum::<f64>()
    };
    (0..center.len()).map(|index| (center[index] + moved(index)) as f32).collect()
}

#[test]
fn elastic_replicas_that_step_together_go_where_the_rule_says() {
    let cases = [
        (Carry::Thread, Optimizer::Sgd, 1, None),
        (Carry::Tcp, Optimizer::Nesterov, 3, None),
        (Carry::Shm, Optimizer::Momentum, 4, Some(0.3)),
    ];
    for (carry, optimizer, period, elastic_rate) in cases {
        let rounds = RoundOptions { period: Some(period), elastic_rate, ..RoundOptions::default() };
        let all = Run { carry, recipe: &elastic::RECIPE, optimizer, rounds, staleness: Some(0) }.train();
        let expected = by_hand(optimizer, (elastic_rate.unwrap_or(0.45), period));
        for found in &all {
            let apart = apart(&found.weights, &expected);
            assert!(apart < 1e-6, "{optimizer:?} every {period}: {apart:e} apart");
            let same = found.weights == all[0].weights && found.optimizer_state == all[0].optimizer_state;
            assert!(same && found.states == all[0].states, "all go on from the same");
        }
    }
}

#[test]
fn replicas_that_do_not_wait_end_with_the_same() {
    let fetches = RoundOptions { fetch_every: Some(2), push_every: Some(3), ..RoundOptions::default() };
    for (carry, recipe, rounds) in [
        (Carry::Thread, &elastic::RECIPE as &'static dyn Recipe, RoundOptions::default()),
        (Carry::Shm, &downpour::RECIPE, fetches),
        (Carry::Tcp, &downpour::RECIPE, RoundOptions { server_adagrad: Some(0.01), ..fetches }),
    ] {
        let all = Run { carry, recipe, optimizer: Optimizer::Momentum, rounds, staleness: None }.train();
        let begun = own_replica(0, Optimizer::Momentum).store().parameters.to_vec();
        assert!(all.iter().all(|found| found.weights == all[0].weights && found.states == all[0].states));
        assert!(apart(&all[0].weights, &begun) > 1e-3, "{} has learnt", recipe.name());
    }
}
