//! Workers and servers of every agreement with a centre, as threads of one world, on functions whose trajectories are
//! known: the rules are computed again here, in 64 bits, as a list of what happens in which order.

mod changes;
mod expected;
mod lent;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use paceline_comm::memory_box::Lending;
use paceline_comm::transport::{Transport, thread};
use paceline_comm::{Choice, Communicator, Link, Links, Rank, Stop, Token};
use paceline_system::clock::Clock;
use proptest::prelude::*;

use super::super::{
    Agreement, BucketShape, Join, Opening, Options, Push, Reach, Recipe, Roles, RoundOptions, ServerShard, Shape,
    StepReport, Votes, dogwild, downpour, elastic,
};

const LIMIT: Duration = Duration::from_secs(20);
const RATE: f64 = 0.1;

/// A worker's function c(x − m)²/2 in every element, whose gradient is c(x − m); its curvature and minimum.
const FUNCTIONS: [(f64, f64); 3] = [(1.0, 2.0), (3.0, -1.0), (0.5, 4.0)];

/// All elements begin apart, so that one that is mistaken for another shows.
fn start(elements: usize) -> Vec<f64> {
    (0..elements).map(|index| 0.5 + index as f64).collect()
}

fn gradient(worker: usize, x: f64) -> f64 {
    let (curvature, minimum) = FUNCTIONS[worker];
    curvature * (x - minimum)
}

/// What servers tell of steps.
#[derive(Clone, Default)]
struct Counts {
    missed: Arc<Mutex<Vec<(usize, u64)>>>,
}

impl ServerShard for Counts {
    fn apply(&mut self, _: Push<'_>) {
        unreachable!("an agreement with a centre has a rule of its own")
    }

    fn stepped(&mut self, worker: usize, missed: u64) {
        self.missed.lock().unwrap().push((worker, missed));
    }

    fn resume(&mut self, _: usize, _: &[f32]) {}

    fn state(&mut self, _: usize) -> &mut [f32] {
        &mut []
    }
}

/// A worker and its weights, driven step by step.
struct Driven {
    number: usize,
    agreement: Box<dyn Agreement>,
    weights: Vec<f32>,
    velocity: Vec<f32>,
    steps: u64,
}

impl Driven {
    /// Makes whole steps of gradient descent.
    fn step(&mut self, steps: u64) {
        for _ in 0..steps {
            self.begin();
            self.end();
        }
    }

    /// Up to where the gradient is computed.
    fn begin(&mut self) {
        let (step, weights) = (self.steps, &mut self.weights);
        if self.agreement.exchanges_before(step) {
            self.agreement.begin_exchange(step, weights, Some((&self.velocity, 2.0))).unwrap();
        }
    }

    /// The step itself, with the gradient of the weights as they are.
    fn end(&mut self) {
        for weight in &mut self.weights {
            *weight -= (RATE * gradient(self.number, f64::from(*weight))) as f32;
        }
        if self.agreement.exchanges_after(self.steps) {
            self.agreement.end_exchange(self.steps, &mut self.weights).unwrap();
        }
        self.steps += 1;
    }

    fn meet(&mut self, kept: &mut [Vec<f32>]) {
        self.agreement.exchange_weights(Reach::All, &mut self.weights, kept).unwrap();
    }

    fn assert_at(&self, expected: &[f64]) {
        for (found, expected) in self.weights.iter().zip(expected) {
            let apart = (f64::from(*found) - expected).abs();
            assert!(apart < 2e-5, "worker {} after {} steps: {found} for {expected}", self.number, self.steps);
        }
    }
}

/// A world: workers that a test drives, and servers in threads of their own. What the servers have told of updates.
fn world(
    recipe: &'static dyn Recipe,
    options: Options,
    (workers, servers, elements): (usize, usize, usize),
    drive: impl FnOnce(Vec<Driven>),
) -> Vec<(usize, u64)> {
    world_that_counts(recipe, options, (workers, servers, elements), &Counts::default(), drive)
}

/// The same; what the servers tell can be looked at meanwhile.
fn world_that_counts(
    recipe: &'static dyn Recipe,
    options: Options,
    (workers, servers, elements): (usize, usize, usize),
    counts: &Counts,
    drive: impl FnOnce(Vec<Driven>),
) -> Vec<(usize, u64)> {
    let lending = Lending::at_home(Token::random());
    let choice = Choice::by_cost(Links::uniform(workers + servers, Link::new(1e-5, 1e9)));
    let communicator = paceline_comm::Options { timeout: LIMIT, stop: Stop::new(), choice };
    let ends = thread::mesh(workers + servers).into_iter().map(Transport::Thread);
    let mut ends: Vec<Communicator> = ends.map(|end| Communicator::new(end, communicator.clone())).collect();
    let bucket = BucketShape { start: 0, elements, ready_after: 0, needed_before: 0 };
    let shape = Shape { buckets: vec![bucket], parameters: elements, states: 2, slots: 1, ..Shape::default() };
    let roles = Roles { workers, servers };
    let join = |communicator| Join {
        communicator,
        urgent: None,
        group: None,
        roles,
        shape: &shape,
        options,
        deadline: LIMIT,
        clock: Clock::real(),
        memory: None,
        lending: recipe.borrows_memory().then(|| lending.clone()),
    };
    let opening = recipe.protocol(&shape, &options).opening;
    let opening = &opening;
    std::thread::scope(|scope| {
        let serving = ends.split_off(workers).into_iter().map(|communicator| {
            let join = join(communicator);
            scope.spawn(move || {
                recipe.serve(join, &mut counts.clone()).unwrap();
            })
        });
        let serving: Vec<_> = serving.collect();
        let joined: Vec<Driven> = ends
            .into_iter()
            .enumerate()
            .map(|(number, end)| {
                let agreement = recipe.join(join(end)).unwrap();
                let (weights, velocity) = (vec![0.0; elements], vec![0.0; elements]);
                Driven { number, agreement, weights, velocity, steps: 0 }
            })
            .collect();
        // All at once: a broadcast waits for others.
        let joined: Vec<_> = joined.into_iter().map(|driven| scope.spawn(move || open(driven, opening))).collect();
        drive(joined.into_iter().map(|opened| opened.join().unwrap()).collect());
        serving.into_iter().for_each(|served| served.join().unwrap());
    });
    let missed = counts.missed.lock().unwrap();
    missed.clone()
}

/// What [`crate::agree::Protocol`] lists, as a replica does it.
fn open(mut driven: Driven, opening: &[Opening]) -> Driven {
    let elements = driven.weights.len();
    for opening in opening {
        let mut numbers = match opening {
            Opening::States => vec![0.0; 2],
            Opening::Weights => start(elements).into_iter().map(|x| x as f32).collect(),
            Opening::Optimizer | Opening::Kept { .. } => vec![0.0; elements],
        };
        driven.agreement.broadcast_from_root(&mut numbers).unwrap();
        if *opening == Opening::Weights {
            driven.weights = numbers;
        }
    }
    driven.agreement.opened(&driven.weights);
    driven
}

fn options(rounds: RoundOptions, staleness: Option<u64>) -> Options {
    Options { rounds, staleness, ..Options::default() }
}

/// All workers meet, each in a thread of its own, and go on from the same.
fn all_meet(workers: &mut [Driven], buffers: usize) -> Vec<Vec<f32>> {
    let elements = workers[0].weights.len();
    let kept = std::thread::scope(|scope| {
        let meeting: Vec<_> = workers
            .iter_mut()
            .map(|worker| {
                scope.spawn(move || {
                    let mut kept = vec![vec![0.0; elements]; buffers];
                    worker.meet(&mut kept);
                    kept
                })
            })
            .collect();
        meeting.into_iter().map(|met| met.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(workers.iter().all(|worker| worker.weights == workers[0].weights), "all go on from the same");
    kept.into_iter().next().unwrap_or_default()
}

/// A driver has to know that a push has come before the next worker fetches: the answer to a sum says so.
fn settle_pushes(workers: &mut [Driven]) {
    std::thread::scope(|scope| {
        workers.iter_mut().for_each(|worker| drop(scope.spawn(|| worker.agreement.sum(&mut [1.0]).unwrap())));
    });
}

/// EASGD by the rule, asynchronous: which worker makes its next step, one after the other.
struct Easgd {
    x: Vec<Vec<f64>>,
    center: Vec<f64>,
    steps: Vec<u64>,
    rate: f64,
    period: u64,
}

impl Easgd {
    fn new(workers: usize, elements: usize, rate: f64, period: u64) -> Self {
        let center = start(elements);
        Self { x: vec![center.clone(); workers], center, steps: vec![0; workers], rate, period }
    }

    fn step(&mut self, worker: usize) {
        let due = self.steps[worker] > 0 && self.steps[worker].is_multiple_of(self.period);
        self.steps[worker] += 1;
        for (x, center) in self.x[worker].iter_mut().zip(&mut self.center) {
            let old = *x;
            if due {
                let moved = self.rate * (old - *center);
                *x -= moved;
                *center += moved;
            }
            // The gradient is that of the value before the move.
            *x -= RATE * gradient(worker, old);
        }
    }

    /// x̃ + aΣ(xᵢ − x̃), from which all go on.
    fn meet(&mut self) {
        for index in 0..self.center.len() {
            let center = self.center[index];
            self.center[index] += self.x.iter().map(|x| self.rate * (x[index] - center)).sum::<f64>();
        }
        self.x.iter_mut().for_each(|x| x.copy_from_slice(&self.center));
    }
}

#[test]
fn elastic_workers_in_any_order_are_where_the_rule_says() {
    // Worker 0 is three times as fast as worker 1 for a while, then slower.
    let order = [0, 0, 0, 1, 0, 0, 0, 1, 0, 1, 2, 1, 1, 1, 0, 2, 1, 1, 2, 2, 2, 0, 0, 1];
    for (servers, rate, period) in [(1, None, 1), (1, Some(0.45), 2), (2, Some(0.2), 3), (3, Some(0.9), 1)] {
        let rounds = RoundOptions { period: Some(period), elastic_rate: rate, ..RoundOptions::default() };
        world(&elastic::RECIPE, options(rounds, None), (3, servers, 5), |mut workers| {
            let mut rule = Easgd::new(3, 5, rate.unwrap_or(0.3), period);
            for worker in order {
                workers[worker].step(1);
                rule.step(worker);
                workers[worker].assert_at(&rule.x[worker]);
            }
            all_meet(&mut workers, 0);
            rule.meet();
            workers.iter().for_each(|worker| worker.assert_at(&rule.center));
            // And on from there.
            workers[1].step(4);
            (0..4).for_each(|_| rule.step(1));
            workers[1].assert_at(&rule.x[1]);
        });
    }
}

#[test]
fn elastic_workers_that_step_together_move_from_the_same_centre() {
    let rounds = RoundOptions { period: Some(1), elastic_rate: Some(0.3), ..RoundOptions::default() };
    world(&elastic::RECIPE, options(rounds, Some(0)), (2, 1, 4), |mut workers| {
        let (mut x, mut center) = (vec![start(4); 2], start(4));
        for step in 0..6 {
            workers.iter_mut().for_each(Driven::begin);
            workers.iter_mut().for_each(Driven::end);
            let (old, before) = (x.clone(), center.clone());
            for index in 0..4 {
                for worker in 0..2 {
                    let moved = if step > 0 { 0.3 * (old[worker][index] - before[index]) } else { 0.0 };
                    x[worker][index] -= RATE * gradient(worker, old[worker][index]) + moved;
                    center[index] += moved;
                }
            }
            (0..2).for_each(|worker| workers[worker].assert_at(&x[worker]));
        }
        all_meet(&mut workers, 0);
        let moved = |index: usize| (0..2).map(|worker| 0.3 * (x[worker][index] - center[index])).sum::<f64>();
        let expected: Vec<f64> = (0..4).map(|index| center[index] + moved(index)).collect();
        workers[0].assert_at(&expected);
    });
}

#[test]
fn the_point_behind_a_velocity_is_what_is_tied_to_the_centre() {
    let rounds = RoundOptions { period: Some(1), elastic_rate: Some(0.5), ..RoundOptions::default() };
    world(&elastic::RECIPE, options(rounds, None), (1, 1, 1), |mut workers| {
        let worker = &mut workers[0];
        worker.step(1);
        let (y, center) = (f64::from(worker.weights[0]), 0.5);
        worker.velocity = vec![0.75];
        worker.step(1);
        // x = y + 2v, of which half the way to the centre is taken; the gradient is that of y.
        worker.assert_at(&[y - RATE * gradient(0, y) - 0.5 * (y + 1.5 - center)]);
    });
}

#[test]
fn updates_say_what_they_had_missed() {
    // With an exchange in every step but the first: worker 1 makes its second behind four of the other's.
    let rounds = RoundOptions { period: Some(1), ..RoundOptions::default() };
    let missed = world(&elastic::RECIPE, options(rounds, None), (2, 1, 2), |mut workers| {
        workers[0].step(5);
        workers[1].step(3);
        workers[0].step(1);
    });
    assert_eq!(missed, [(0, 0), (0, 0), (0, 0), (0, 0), (1, 4), (1, 0), (0, 2)]);
    // A push behind step t is of gradients whose weights were read before the step that followed the push before.
    let missed = world(&downpour::RECIPE, options(RoundOptions::default(), None), (2, 1, 2), |mut workers| {
        for worker in [0, 1, 0, 0, 1] {
            workers[worker].step(1);
            settle_pushes(&mut workers);
        }
    });
    assert_eq!(missed, [(0, 0), (1, 1), (0, 1), (0, 0), (1, 2)]);
}

#[test]
fn a_wish_to_stop_is_heard_with_the_next_answer_and_where_all_meet() {
    let rounds = RoundOptions { period: Some(2), ..RoundOptions::default() };
    world(&elastic::RECIPE, options(rounds, None), (2, 1, 2), |mut workers| {
        let wish = Votes { interrupted: 1, ..Votes::default() };
        workers[0].agreement.tell_wishes(wish);
        workers[0].step(3);
        assert_eq!(workers[1].agreement.tell_wishes(Votes::default()), Votes::default());
        workers[1].step(3);
        assert_eq!(workers[1].agreement.tell_wishes(Votes::default()), wish);
        let limit = Votes { time_limit: 1, ..Votes::default() };
        workers[1].agreement.tell_wishes(limit);
        all_meet(&mut workers, 0);
        assert_eq!(workers[0].agreement.tell_wishes(wish), Votes { time_limit: 1, ..wish });
    });
}

#[test]
fn who_is_too_far_ahead_waits_for_the_slowest() {
    let rounds = RoundOptions { period: Some(1), ..RoundOptions::default() };
    world(&elastic::RECIPE, options(rounds, Some(3)), (2, 1, 2), |workers| {
        let [mut first, mut second] = <[Driven; 2]>::try_from(workers).ok().unwrap();
        std::thread::scope(|scope| {
            let (told, ahead) = std::sync::mpsc::channel();
            scope.spawn(move || {
                for step in 0..10 {
                    first.step(1);
                    told.send(step).unwrap();
                }
            });
            let far = |ahead: &std::sync::mpsc::Receiver<i32>| {
                std::iter::from_fn(|| ahead.recv_timeout(Duration::from_millis(300)).ok()).last()
            };
            let first_stop = far(&ahead).unwrap();
            assert!((4..=5).contains(&first_stop), "{first_stop}");
            second.step(3);
            assert!(far(&ahead).unwrap() > first_stop);
            second.step(10);
            assert_eq!(far(&ahead), Some(9));
        });
    });
}

#[test]
fn one_that_was_asked_to_stop_may_meet_before_an_exchange_of_the_others() {
    let rounds = RoundOptions { period: Some(2), ..RoundOptions::default() };
    world(&elastic::RECIPE, options(rounds, Some(0)), (2, 1, 2), |workers| {
        let [mut first, mut second] = <[Driven; 2]>::try_from(workers).ok().unwrap();
        std::thread::scope(|scope| {
            let wish = Votes { interrupted: 1, ..Votes::default() };
            scope.spawn(move || {
                first.step(1);
                first.agreement.tell_wishes(wish);
                first.meet(&mut []);
            });
            // Its third step has an exchange, with nobody.
            second.step(3);
            assert_eq!(second.agreement.tell_wishes(Votes::default()), wish);
            second.meet(&mut []);
        });
    });
}

#[test]
fn who_has_left_is_not_waited_for() {
    let rounds = RoundOptions { period: Some(1), ..RoundOptions::default() };
    world(&elastic::RECIPE, options(rounds, Some(0)), (2, 1, 2), |workers| {
        let [first, mut second] = <[Driven; 2]>::try_from(workers).ok().unwrap();
        drop(first);
        second.step(3);
        let mut sum = [2.0, 3.0];
        second.agreement.sum(&mut sum).unwrap();
        assert_eq!(sum, [2.0, 3.0]);
        second.meet(&mut []);
        assert_eq!(second.agreement.total().unwrap(), StepReport::default());
        assert_eq!(second.agreement.rank(), Rank(1));
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn sums_are_those_of_all_workers(
        workers in 1usize..4, servers in 1usize..4, numbers in prop::collection::vec(-100i32..100, 1..8),
    ) {
        let numbers: Vec<f32> = numbers.into_iter().map(|number| number as f32).collect();
        world(&elastic::RECIPE, options(RoundOptions::default(), None), (workers, servers, 9), |mut driven| {
            std::thread::scope(|scope| {
                for worker in &mut driven {
                    let mut own = numbers.clone();
                    let expected: Vec<f32> = numbers.iter().map(|number| number * workers as f32).collect();
                    scope.spawn(move || {
                        worker.agreement.sum(&mut own).unwrap();
                        assert_eq!(own, expected);
                    });
                }
            });
        });
    }
}
