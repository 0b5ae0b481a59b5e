//! Batch-norm against its definition in f64.

use std::sync::{Barrier, Mutex};

use super::*;
use crate::device::cpu::check::{assert_close, numbers, once, same_bits, slope, weigh, wide};

const EPS: f32 = 1e-3;
const SHAPES: [(usize, usize); 6] = [(7, 1), (5000, 3), (333, 17), (20, 1000), (3, 1100), (900, 64)];

struct Case {
    x: Vec<f32>,
    gamma: Vec<f32>,
    beta: Vec<f32>,
    residual: Vec<f32>,
}

impl Case {
    fn new(rows: usize, channels: usize) -> Self {
        let x = numbers(1, rows * channels).iter().map(|x| x + 0.5).collect();
        Self { x, gamma: numbers(2, channels), beta: numbers(3, channels), residual: numbers(4, rows * channels) }
    }

    fn input(&self, relu: bool, residual: bool) -> BatchNorm<'_, f32> {
        let residual = residual.then_some(&self.residual[..]);
        BatchNorm {
            x: &self.x,
            gamma: Some(&self.gamma),
            beta: &self.beta,
            residual,
            rectifier: rectifier(relu),
            eps: EPS,
            statistics: None,
        }
    }
}

/// Mean and biased variance per channel.
fn moments(x: &[f64], channels: usize) -> (Vec<f64>, Vec<f64>) {
    let rows = (x.len() / channels) as f64;
    let column = |channel| x.iter().skip(channel).step_by(channels);
    let mean: Vec<f64> = (0..channels).map(|channel| column(channel).sum::<f64>() / rows).collect();
    let variance = |channel| column(channel).map(|x| (x - mean[channel]) * (x - mean[channel])).sum::<f64>() / rows;
    let variance = (0..channels).map(variance).collect();
    (mean, variance)
}

/// The whole forward pass in f64; gamma, beta and residual follow x in `point`.
fn rectifier(relu: bool) -> Rectifier {
    if relu { Rectifier::Relu } else { Rectifier::None }
}

fn reference(point: &[f64], rows: usize, channels: usize, relu: bool) -> Vec<f64> {
    let (x, rest) = point.split_at(rows * channels);
    let (gamma, rest) = rest.split_at(channels);
    let (beta, residual) = rest.split_at(channels);
    let (mean, variance) = moments(x, channels);
    let value = |index: usize| {
        let channel = index % channels;
        let normal = (x[index] - mean[channel]) / (variance[channel] + f64::from(EPS)).sqrt();
        let y = normal * gamma[channel] + beta[channel] + residual.get(index).copied().unwrap_or(0.0);
        if relu { y.max(0.0) } else { y }
    };
    (0..x.len()).map(value).collect()
}

fn train_all(context: &mut Context<'_>, input: &BatchNorm<'_, f32>) -> [Vec<f32>; 5] {
    train_with(context, input, None)
}

fn train_with(context: &mut Context<'_>, input: &BatchNorm<'_, f32>, others: Option<&mut Others<'_>>) -> [Vec<f32>; 5] {
    let channels = input.beta.len();
    let mut y = vec![f32::NAN; input.x.len()];
    let [mut mean, mut inv_std] = [(); 2].map(|()| vec![f32::NAN; channels]);
    let (mut running_mean, mut running_variance) = (vec![1.0; channels], vec![2.0; channels]);
    let running = Running { mean: &mut running_mean, variance: &mut running_variance, momentum: 0.1 };
    let output = TrainOutput { y: &mut y, mean: &mut mean, inv_std: &mut inv_std, running };
    train(context, input, output, others);
    [y, mean, inv_std, running_mean, running_variance]
}

#[test]
fn training_follows_the_definition() {
    for (rows, channels) in SHAPES {
        let case = Case::new(rows, channels);
        for (relu, residual) in [(false, false), (true, false), (false, true), (true, true)] {
            let input = case.input(relu, residual);
            same_bits(|context| train_all(context, &input).concat());
            let [y, mean, _, running_mean, running_variance] = once(|context| train_all(context, &input));
            let mut point = wide(&[&case.x[..], &case.gamma, &case.beta].concat());
            if residual {
                point.extend(wide(&case.residual));
            }
            assert_close(&y, &reference(&point, rows, channels, relu), 3e-6);
            let (true_mean, true_variance) = moments(&wide(&case.x), channels);
            assert_close(&mean, &true_mean, 1e-6);
            let blended: Vec<f64> = true_mean.iter().map(|mean| 0.9 + 0.1 * mean).collect();
            assert_close(&running_mean, &blended, 1e-6);
            let unbiased = rows as f64 / (rows as f64 - 1.0);
            let blended: Vec<f64> = true_variance.iter().map(|variance| 1.8 + 0.1 * variance * unbiased).collect();
            assert_close(&running_variance, &blended, 1e-6);
        }
    }
}

#[test]
fn a_mean_far_from_zero_costs_no_digits() {
    let channels = 3;
    let x: Vec<f32> = numbers(9, 30_000 * channels).iter().map(|x| 1000.0 + x / 8.0).collect();
    let input = BatchNorm {
        x: &x,
        gamma: None,
        beta: &[0.0; 3],
        residual: None,
        rectifier: Rectifier::None,
        eps: 0.0,
        statistics: None,
    };
    let [_, mean, inv_std, ..] = once(|context| train_all(context, &input));
    let (true_mean, true_variance) = moments(&wide(&x), channels);
    for channel in 0..channels {
        assert!((f64::from(mean[channel]) / true_mean[channel] - 1.0).abs() < 1e-7);
        assert!((f64::from(inv_std[channel]).powi(2) * true_variance[channel] - 1.0).abs() < 1e-5);
    }
}

#[test]
fn inference_uses_the_running_statistics() {
    let (rows, channels) = (50, 17);
    let case = Case::new(rows, channels);
    let (mean, variance) =
        (numbers(5, channels), numbers(6, channels).iter().map(|x| x.abs() + 0.1).collect::<Vec<_>>());
    let y = same_bits(|context| {
        let mut y = vec![f32::NAN; rows * channels];
        infer(context, &case.input(true, true), (&mean, &variance), &mut y);
        y
    });
    let expected = |index: usize| {
        let (channel, wide) = (index % channels, f64::from);
        let normal = (wide(case.x[index]) - wide(mean[channel])) / (wide(variance[channel]) + wide(EPS)).sqrt();
        (normal * wide(case.gamma[channel]) + wide(case.beta[channel]) + wide(case.residual[index])).max(0.0)
    };
    assert_close(&y, &(0..y.len()).map(expected).collect::<Vec<_>>(), 1e-5);
}

fn gradient_all(
    context: &mut Context<'_>,
    case: &Case,
    dy: &[f32],
    relu: bool,
    residual: bool,
    in_place: bool,
) -> Vec<f32> {
    let [dx, dgamma, dbeta, dresidual] = gradient_with(context, (case, dy), (relu, residual), in_place, None);
    [dx, dgamma, dbeta, if residual { dresidual } else { Vec::new() }].concat()
}

fn gradient_with(
    context: &mut Context<'_>,
    (case, dy): (&Case, &[f32]),
    (relu, residual): (bool, bool),
    in_place: bool,
    mut others: Option<&mut Others<'_>>,
) -> [Vec<f32>; 4] {
    let channels = case.gamma.len();
    let [y, mean, inv_std, ..] = train_with(context, &case.input(relu, residual), others.as_deref_mut());
    let held = |holds: bool| if in_place && holds { dy.to_vec() } else { vec![f32::NAN; dy.len()] };
    let (mut dx, mut dresidual) = (held(!residual), held(residual));
    let [mut dgamma, mut dbeta] = [(); 2].map(|()| vec![f32::NAN; channels]);
    let input = BatchNormGrad {
        dy: (!in_place).then_some(dy),
        x: &case.x,
        ceiling: f32::INFINITY,
        mask: match (relu, residual) {
            (false, _) => Mask::None,
            (true, false) => Mask::FromInput(&case.beta),
            (true, true) => Mask::FromOutput(&y),
        },
        gamma: Some(&case.gamma),
        mean: &mean,
        inv_std: &inv_std,
    };
    let output = GradOutput {
        dx: &mut dx,
        dgamma: Some(&mut dgamma),
        dbeta: &mut dbeta,
        dresidual: residual.then_some(&mut dresidual),
    };
    gradient(context, &input, output, others);
    [dx, dgamma, dbeta, dresidual]
}

#[test]
fn gradients_follow_finite_differences() {
    for (rows, channels) in [(7, 1), (40, 3), (9, 17)] {
        let case = Case::new(rows, channels);
        let dy = numbers(8, rows * channels);
        for (relu, residual) in [(false, false), (true, false), (false, true), (true, true)] {
            let all = same_bits(|context| gradient_all(context, &case, &dy, relu, residual, false));
            assert_eq!(all, once(|context| gradient_all(context, &case, &dy, relu, residual, true)));
            let mut point = [&case.x[..], &case.gamma, &case.beta].concat();
            if residual {
                point.extend(&case.residual);
            }
            let expected = slope(&point, |point| weigh(&reference(point, rows, channels, relu), &dy));
            assert_close(&all, &expected, 2e-5);
        }
    }
}

#[test]
fn gradients_of_large_shapes_do_not_depend_on_threads() {
    for (rows, channels) in SHAPES {
        let case = Case::new(rows, channels);
        let dy = numbers(8, rows * channels);
        same_bits(|context| gradient_all(context, &case, &dy, true, true, false));
    }
}

#[test]
fn a_ceiling_cuts_the_gradient_off_as_zero_does() {
    const CEILING: f32 = 0.5;
    let (rows, channels) = (90, 17);
    let (case, dy) = (Case::new(rows, channels), numbers(8, rows * channels));
    let run = |dy: &[f32], masked: bool| {
        once(|context| {
            let [y, mean, inv_std, ..] = train_all(context, &case.input(false, false));
            let cut: Vec<f32> =
                dy.iter().zip(&y).map(|(&dy, &y)| if y <= 0.0 || y >= CEILING { 0.0 } else { dy }).collect();
            let mask = if masked { Mask::FromInput(&case.beta[..]) } else { Mask::None };
            let dy = if masked { dy } else { &cut };
            let (mean, inv_std, gamma) = (&mean[..], &inv_std[..], Some(&case.gamma[..]));
            let input = BatchNormGrad { dy: Some(dy), x: &case.x, ceiling: CEILING, mask, gamma, mean, inv_std };
            let [mut dgamma, mut dbeta] = [(); 2].map(|()| vec![f32::NAN; channels]);
            let mut dx = vec![f32::NAN; dy.len()];
            let output = GradOutput { dx: &mut dx, dgamma: Some(&mut dgamma), dbeta: &mut dbeta, dresidual: None };
            gradient(context, &input, output, None);
            assert!(cut.iter().zip(&y).any(|(&cut, &y)| cut == 0.0 && y >= CEILING), "the ceiling was not reached");
            [dx, dgamma, dbeta].concat()
        })
    };
    assert_eq!(run(&dy, true), run(&dy, false));
}

/// Where two parts of a batch meet: each adds its numbers and gets the sum.
struct Meeting {
    sums: Mutex<Vec<f32>>,
    barrier: Barrier,
}

impl Meeting {
    fn add(&self, numbers: &mut [f32]) {
        let mut sums = self.sums.lock().unwrap();
        sums.resize(numbers.len(), 0.0);
        sums.iter_mut().zip(&*numbers).for_each(|(sum, number)| *sum += number);
        drop(sums);
        self.barrier.wait();
        numbers.copy_from_slice(&self.sums.lock().unwrap());
        if self.barrier.wait().is_leader() {
            self.sums.lock().unwrap().clear();
        }
        self.barrier.wait();
    }
}

#[test]
fn two_parts_of_a_batch_are_one_batch() {
    // The second is a mean far from zero, and parts that differ in size and mean.
    for (rows, channels, first, far) in [(40, 3, 20, 0.0), (333, 17, 100, 300.0), (900, 64, 899, -5.0)] {
        let mut case = Case::new(rows, channels);
        case.x.iter_mut().enumerate().for_each(|(at, x)| *x += far + (at / 50) as f32 * 1e-3);
        let (dy, at) = (numbers(8, rows * channels), first * channels);
        let part = |range: std::ops::Range<usize>| Case {
            x: case.x[range.clone()].to_vec(),
            gamma: case.gamma.clone(),
            beta: case.beta.clone(),
            residual: case.residual[range].to_vec(),
        };
        let parts = [(part(0..at), &dy[..at]), (part(at..dy.len()), &dy[at..])];
        for kind in [(false, false), (true, false), (true, true)] {
            let whole = once(|context| gradient_with(context, (&case, &dy), kind, false, None));
            let statistics = once(|context| train_all(context, &case.input(kind.0, kind.1)));
            let meeting = Meeting { sums: Mutex::default(), barrier: Barrier::new(2) };
            let run = |(case, dy): &(Case, &[f32])| {
                let mut add = |numbers: &mut [f32]| meeting.add(numbers);
                once(|context| {
                    let forward = train_with(context, &case.input(kind.0, kind.1), Some(&mut add));
                    (forward, gradient_with(context, (case, dy), kind, false, Some(&mut add)))
                })
            };
            let [first, second] = std::thread::scope(|scope| {
                let other = scope.spawn(|| run(&parts[1]));
                [run(&parts[0]), other.join().unwrap()]
            });
            for ((first, second), expected) in first.0.iter().zip(&second.0).zip(&statistics).skip(1) {
                assert_eq!(first, second, "statistics have the same bits");
                assert_close(first, &wide(expected), 2e-6);
            }
            // What a mean far away costs is one rounding of x − mean.
            let tolerance = 2e-6 + 1e-7 * f64::from(f32::abs(far));
            assert_close(&[&first.0[0][..], &second.0[0]].concat(), &wide(&statistics[0]), tolerance);
            assert_close(&[&first.1[0][..], &second.1[0]].concat(), &wide(&whole[0]), tolerance);
            for ((first, second), expected) in first.1.iter().zip(&second.1).zip(&whole).take(3).skip(1) {
                let sum: Vec<f32> = first.iter().zip(second).map(|(a, b)| a + b).collect();
                assert_close(&sum, &wide(expected), tolerance);
            }
        }
    }
}
