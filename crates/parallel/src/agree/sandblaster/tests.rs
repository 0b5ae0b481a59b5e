//! Workers and servers as threads of one world, on a function whose values the tests know, against the same
//! minimisation in one place.

use std::time::Duration;

use paceline_comm::transport::{Transport, thread};
use paceline_comm::{Choice, Communicator, Link, Links, Rank, Stop};
use paceline_system::clock::Clock;

use super::lbfgs::tests::Here;
use super::lbfgs::{Lbfgs, Vector};
use super::{Gathered, RECIPE};
use crate::agree::{
    Agreement, BucketShape, Demands, Join, Opening, Options, Push, Reach, Recipe, Roles, RoundOptions, ServerShard,
    Shape, StepReport,
};

const LIMIT: Duration = Duration::from_secs(20);

/// Each portion is a sample of its own: a bowl around it. What is minimised is their mean.
const PORTIONS: usize = 6;

/// Elements of all parameters, in two buckets.
const ELEMENTS: usize = 11;

fn curvature(element: usize) -> f64 {
    1.0 + 3.0 * element as f64
}

/// The loss and the gradient of a portion.
fn portion(number: usize, x: &[f64]) -> (f64, Vec<f64>) {
    let minimum = |element: usize| (number + element) as f64 / 4.0;
    let loss = |(element, x): (usize, &f64)| curvature(element) * (x - minimum(element)).powi(2) / 2.0;
    let slope = |(element, x): (usize, &f64)| curvature(element) * (x - minimum(element));
    (x.iter().enumerate().map(loss).sum(), x.iter().enumerate().map(slope).collect())
}

/// The mean of all.
fn whole(x: &[f64]) -> (f64, Vec<f64>) {
    let (mut loss, mut gradient) = (0.0, vec![0.0; x.len()]);
    for number in 0..PORTIONS {
        let (one, slopes) = portion(number, x);
        loss += one / PORTIONS as f64;
        gradient.iter_mut().zip(slopes).for_each(|(sum, slope)| *sum += slope / PORTIONS as f64);
    }
    (loss, gradient)
}

struct Counts;

impl ServerShard for Counts {
    fn apply(&mut self, _: Push<'_>) {
        unreachable!("no optimizer steps")
    }

    fn resume(&mut self, _: usize, _: &[f32]) {}

    fn state(&mut self, _: usize) -> &mut [f32] {
        &mut []
    }
}

struct Driven {
    number: usize,
    agreement: Box<dyn Agreement>,
    weights: Vec<f32>,
}

impl Driven {
    fn open(mut self) -> Self {
        for opening in self.agreement.protocol().opening.clone() {
            let mut numbers = match opening {
                Opening::Weights => vec![if self.number == 0 { 3.0 } else { 0.0 }; ELEMENTS],
                _ => vec![0.0; 2],
            };
            self.agreement.broadcast_from_root(&mut numbers).unwrap();
            if opening == Opening::Weights {
                self.weights = numbers;
            }
        }
        self
    }

    /// Computes some portions of a batch, of which some answers come too late to count, and meets the others.
    fn batch(&mut self, mine: &[usize], late: &[usize]) -> Gathered {
        self.agreement.begin_batch(PORTIONS as u64);
        for &number in mine.iter().chain(late) {
            if self.agreement.exchanges_before(0) {
                assert!(self.agreement.begin_exchange(0, &mut self.weights, None).unwrap());
            }
            let point: Vec<f64> = self.weights.iter().map(|x| f64::from(*x)).collect();
            let (loss, gradient) = portion(number, &point);
            let gradient: Vec<f32> = gradient.into_iter().map(|slope| slope as f32).collect();
            self.agreement.begin_step(StepReport { rows: 1, loss, ..StepReport::default() }).unwrap();
            self.agreement.send(0, &gradient[..4]).unwrap();
            self.agreement.send(1, &gradient[4..]).unwrap();
            if !late.contains(&number) {
                self.agreement.count_portion();
            }
        }
        self.agreement.exchange_weights(Reach::All, &mut self.weights, &mut []).unwrap();
        self.agreement.gathered()
    }
}

/// A world whose workers a test drives, each in a thread of its own; the weights that each ends with.
fn world(
    (workers, servers, history): (usize, usize, usize),
    stops: &[Stop],
    drive: impl Fn(&mut Driven) + Sync,
) -> Vec<Vec<f32>> {
    let choice = Choice::by_cost(Links::uniform(workers + servers, Link::new(1e-5, 1e9)));
    let ends = thread::mesh(workers + servers).into_iter().map(Transport::Thread).enumerate();
    let mut ends: Vec<Communicator> = ends
        .map(|(rank, end)| {
            let stop = stops.get(rank).cloned().unwrap_or_default();
            Communicator::new(end, paceline_comm::Options { timeout: LIMIT, stop, choice: choice.clone() })
        })
        .collect();
    let bucket = |start, elements| BucketShape { start, elements, ready_after: 0, needed_before: 0 };
    let buckets = vec![bucket(0, 4), bucket(4, ELEMENTS - 4)];
    let shape = Shape { buckets, parameters: ELEMENTS, states: 2, ..Shape::default() };
    let rounds = RoundOptions { history: Some(history), ..RoundOptions::default() };
    let join = |communicator| Join {
        communicator,
        urgent: None,
        group: None,
        roles: Roles { workers, servers },
        shape: &shape,
        options: Options { rounds, ..Options::default() },
        deadline: LIMIT,
        clock: Clock::real(),
        memory: None,
 lending: None,
    };
    let (join, drive) = (&join, &drive);
    std::thread::scope(|scope| {
        for server in ends.split_off(workers) {
            scope.spawn(move || RECIPE.serve(join(server), &mut Counts).unwrap());
        }
        let driven = ends.into_iter().enumerate().map(|(number, end)| {
            scope.spawn(move || {
                let agreement = RECIPE.join(join(end)).unwrap();
                let mut driven = Driven { number, agreement, weights: vec![0.0; ELEMENTS] }.open();
                drive(&mut driven);
                driven.weights
            })
        });
        let driven: Vec<_> = driven.collect();
        driven.into_iter().map(|driven| driven.join().unwrap()).collect()
    })
}

/// A worker's portions where each has every so many-th.
fn own(number: usize, workers: usize) -> Vec<usize> {
    (0..PORTIONS).filter(|portion| portion % workers == number).collect()
}

/// The weights after so many values of the function, all in one place.
fn alone(history: usize, values: usize) -> Vec<f64> {
    let (mut lbfgs, mut here) = (Lbfgs::new(history), Here::at(&[3.0; ELEMENTS], history));
    for _ in 0..values {
        let (loss, gradient) = whole(here.get(Vector::Trial));
        *here.get(Vector::TrialGradient) = gradient;
        lbfgs.advance(loss, &mut here).unwrap();
    }
    here.get(Vector::Weights).clone()
}

#[test]
fn workers_and_servers_come_to_where_one_process_comes() {
    for (workers, servers, history) in [(1, 1, 3), (2, 1, 10), (3, 2, 4), (2, 13, 2)] {
        let values = 9;
        let ended = world((workers, servers, history), &[], |driven| {
            for _ in 0..values {
                // Everybody has also computed what was another's.
                let mine = own(driven.number, workers);
                let late: Vec<usize> = (0..PORTIONS).filter(|portion| !mine.contains(portion)).take(2).collect();
                driven.batch(&mine, &late);
            }
        });
        let expected = alone(history, values);
        for (number, weights) in ended.iter().enumerate() {
            for (found, expected) in weights.iter().zip(&expected) {
                let apart = (f64::from(*found) - expected).abs();
                assert!(apart < 2e-4, "worker {number} of {workers} with {servers} servers: {found} for {expected}");
            }
        }
    }
}

/// A batch in which portions are missing changes nothing, and what workers sum up between batches is there.
#[test]
fn a_batch_that_is_not_whole_counts_for_nothing() {
    let ended = world((2, 2, 3), &[], |driven| {
        let mine = own(driven.number, 2);
        assert_eq!(driven.batch(&mine[..2], &[]), Gathered::Missing);
        assert_eq!(driven.weights, [3.0; ELEMENTS]);
        assert!(!driven.agreement.tries_points());
        assert_eq!(driven.batch(&mine, &[]), Gathered::Taken);
        assert!(driven.agreement.tries_points());
        let mut numbers = [1.0, driven.number as f32, 0.5];
        driven.agreement.sum(&mut numbers).unwrap();
        assert_eq!(numbers, [2.0, 1.0, 1.0]);
        assert_eq!(driven.batch(&mine[1..], &[]), Gathered::Missing);
        driven.batch(&mine, &[]);
    });
    let expected = alone(3, 2);
    let close = |(found, expected): (&f32, &f64)| (f64::from(*found) - expected).abs() < 1e-4;
    assert!(ended.iter().all(|weights| weights.iter().zip(&expected).all(close)));
}

/// A point at which there is no loss is one that lies too far.
#[test]
fn a_loss_that_is_no_number_is_a_step_too_far() {
    world((2, 1, 3), &[], |driven| {
        let mine = own(driven.number, 2);
        assert_eq!(driven.batch(&mine, &[]), Gathered::Taken);
        let before = driven.weights.clone();
        driven.agreement.begin_batch(PORTIONS as u64);
        for _ in &mine {
            driven.agreement.begin_step(StepReport { rows: 1, loss: f64::NAN, ..StepReport::default() }).unwrap();
            driven.agreement.send(0, &[f32::NAN; 4]).unwrap();
            driven.agreement.send(1, &[f32::INFINITY; ELEMENTS - 4]).unwrap();
            driven.agreement.count_portion();
        }
        driven.agreement.exchange_weights(Reach::All, &mut driven.weights, &mut []).unwrap();
        assert_eq!((driven.agreement.gathered(), &driven.weights), (Gathered::GivenUp, &before));
        // Nearer there is one.
        let gathered: Vec<Gathered> = (0..6).map(|_| driven.batch(&mine, &[])).collect();
        assert!(gathered.contains(&Gathered::Taken), "{gathered:?}");
    });
}

/// The others go on without a worker that is lost before it gives its gradients; what it had is missing.
#[test]
fn the_others_go_on_without_a_worker_that_is_lost() {
    let stops: Vec<Stop> = (0..5).map(|_| Stop::new()).collect();
    let ended = world((3, 2, 3), &stops, |driven| {
        driven.batch(&own(driven.number, 3), &[]);
        if driven.number == 2 {
            stops.iter().for_each(|stop| stop.lose(Rank(2)));
            return;
        }
        assert_eq!(driven.batch(&own(driven.number, 3), &[]), Gathered::Missing);
        for _ in 0..4 {
            driven.batch(&own(driven.number, 2), &[]);
        }
    });
    let expected = alone(3, 5);
    let close = |(found, expected): (&f32, &f64)| (f64::from(*found) - expected).abs() < 1e-4;
    assert!(ended[..2].iter().all(|weights| weights.iter().zip(&expected).all(close)));
}

#[test]
fn what_does_not_go_together_is_refused_with_what_to_type() {
    let refused = |demands: Demands| RECIPE.refuses(&demands).unwrap_or_default();
    let demands = Demands::default();
    assert_eq!(refused(demands), "");
    let with = |history| RoundOptions { history, ..RoundOptions::default() };
    let options = |rounds| Options { rounds, ..Options::default() };
    for (demands, typed) in [
        (Demands { clips_norm: true, ..demands }, "leave it out"),
        (Demands { smooths_labels: true, ..demands }, "leave it out"),
        (Demands { decays: true, ..demands }, "leave it out"),
        (Demands { on_gpu: true, ..demands }, "--device cpu"),
        (Demands { options: options(with(Some(0))), ..demands }, "--history 10"),
        (Demands { options: Options { shard: true, ..Options::default() }, ..demands }, "--shard none"),
    ] {
        assert!(refused(demands).contains(typed), "{}", refused(demands));
    }
}
