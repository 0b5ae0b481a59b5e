//! Functions whose minima are known, and the two loops against the formula that they stand for.

use proptest::prelude::*;

use super::*;

/// Vectors of 64 bits that are here.
pub struct Here {
    named: [Vec<f64>; 5],
    s: Vec<Vec<f64>>,
    y: Vec<Vec<f64>>,
}

impl Here {
    /// That begin at a point.
    pub fn at(start: &[f64], history: usize) -> Self {
        let zeros = vec![0.0; start.len()];
        let mut named = [(); 5].map(|()| zeros.clone());
        named[2] = start.to_vec();
        Self { named, s: vec![zeros.clone(); history], y: vec![zeros; history] }
    }

    /// One of them.
    pub fn get(&mut self, vector: Vector) -> &mut Vec<f64> {
        match vector {
            Vector::Weights => &mut self.named[0],
            Vector::Gradient => &mut self.named[1],
            Vector::Trial => &mut self.named[2],
            Vector::TrialGradient => &mut self.named[3],
            Vector::Direction => &mut self.named[4],
            Vector::S(place) => &mut self.s[place],
            Vector::Y(place) => &mut self.y[place],
        }
    }
}

fn product(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

impl Vectors for Here {
    fn dot(&mut self, a: Vector, b: Vector) -> Result<f64, CommError> {
        let a = self.get(a).clone();
        Ok(product(&a, self.get(b)))
    }

    fn axpy(&mut self, alpha: f64, x: Vector, y: Vector) -> Result<(), CommError> {
        let x = self.get(x).clone();
        self.get(y).iter_mut().zip(x).for_each(|(y, x)| *y += alpha * x);
        Ok(())
    }

    fn scale(&mut self, alpha: f64, x: Vector) -> Result<(), CommError> {
        self.get(x).iter_mut().for_each(|x| *x *= alpha);
        Ok(())
    }

    fn copy(&mut self, source: Vector, target: Vector) -> Result<(), CommError> {
        *self.get(target) = self.get(source).clone();
        Ok(())
    }
}

/// A function's value and gradient.
type Function = fn(&[f64]) -> (f64, Vec<f64>);

/// Minimises it in so many values of it; the values at the points that were taken.
fn minimise(function: Function, start: &[f64], (history, values): (usize, usize)) -> (Vec<f64>, Vec<f64>) {
    let (mut lbfgs, mut here) = (Lbfgs::new(history), Here::at(start, history));
    let mut taken = Vec::new();
    for _ in 0..values {
        let (value, gradient) = function(here.get(Vector::Trial));
        *here.get(Vector::TrialGradient) = gradient;
        if lbfgs.advance(value, &mut here).unwrap() {
            taken.push(value);
        }
    }
    (here.get(Vector::Weights).clone(), taken)
}

/// Σ cᵢ(xᵢ − 1)²/2 with curvatures from 1 to 100.
fn bowl(x: &[f64]) -> (f64, Vec<f64>) {
    let curvature = |index: usize| 1.0 + 99.0 * index as f64 / (x.len() - 1) as f64;
    let value = x.iter().enumerate().map(|(index, x)| curvature(index) * (x - 1.0).powi(2) / 2.0).sum();
    (value, x.iter().enumerate().map(|(index, x)| curvature(index) * (x - 1.0)).collect())
}

/// Rosenbrock's valley, whose minimum is at (1, 1).
fn rosenbrock(x: &[f64]) -> (f64, Vec<f64>) {
    let (a, b) = (1.0 - x[0], x[1] - x[0] * x[0]);
    (a * a + 100.0 * b * b, vec![-2.0 * a - 400.0 * x[0] * b, 200.0 * b])
}

/// The logarithm is none below zero, and falls without end near it.
fn wall(x: &[f64]) -> (f64, Vec<f64>) {
    (x[0] - x[0].ln(), vec![1.0 - 1.0 / x[0]])
}

fn distance(x: &[f64]) -> f64 {
    x.iter().map(|x| (x - 1.0).powi(2)).sum::<f64>().sqrt()
}

#[test]
fn bowls_and_valleys_are_minimised_and_no_value_rises() {
    let far = [30.0];
    for (function, start, values) in
        [(bowl as Function, &[5.0; 20][..], 90), (rosenbrock, &[-1.2, 1.0], 60), (wall, &far, 20), (wall, &[1e-3], 20)]
    {
        for history in [3, 10] {
            let (end, taken) = minimise(function, start, (history, values));
            assert!(distance(&end) < 1e-4, "{end:?} after {taken:?}");
            assert!(taken.windows(2).all(|pair| pair[1] <= pair[0] * (1.0 + 1e-6)), "{taken:?}");
        }
    }
}

/// Nothing but the gradient is there to begin with: how far it goes does not depend on how steep it is.
#[test]
fn a_minimum_is_found_however_the_function_is_scaled() {
    fn steep(x: &[f64]) -> (f64, Vec<f64>) {
        let (value, gradient) = bowl(x);
        (1e6 * value, gradient.into_iter().map(|g| 1e6 * g).collect())
    }
    fn flat(x: &[f64]) -> (f64, Vec<f64>) {
        let (value, gradient) = bowl(x);
        (1e-6 * value, gradient.into_iter().map(|g| 1e-6 * g).collect())
    }
    for function in [steep, flat] {
        let (end, taken) = minimise(function, &[5.0; 20], (10, 45));
        assert!(distance(&end) < 1e-3, "{end:?} after {taken:?}");
    }
}

/// A function that is not smooth, or that noise is on: the search gives up and begins anew, and what is taken never rises.
#[test]
fn what_cannot_be_searched_is_begun_anew() {
    fn lies(x: &[f64]) -> (f64, Vec<f64>) {
        // The gradient points the wrong way.
        (x[0] * x[0], vec![-2.0 * x[0]])
    }
    let (end, taken) = minimise(lies, &[1.0], (4, 60));
    assert!(end[0].is_finite() && taken.iter().all(|value| *value <= 1.0 + 1e-6), "{end:?} {taken:?}");
    let (end, taken) = minimise(bowl, &[1.0; 5], (4, 10));
    assert_eq!((end, taken[0]), (vec![1.0; 5], 0.0), "a minimum is stayed at");
}

/// H by its definition, from the oldest pair to the newest: H ← VᵀHV + ρssᵀ with V = I − ρysᵀ (Nocedal and Wright, 7.16).
fn dense(pairs: &[(Vec<f64>, Vec<f64>)], gradient: &[f64]) -> Vec<f64> {
    let n = gradient.len();
    let (s, y) = pairs.last().unwrap();
    let gamma = product(s, y) / product(y, y);
    let mut h: Vec<Vec<f64>> =
        (0..n).map(|i| (0..n).map(|j| if i == j { gamma } else { 0.0 }).collect()).collect();
    for (s, y) in pairs {
        let rho = 1.0 / product(s, y);
        let v = |i: usize, j: usize| f64::from(u8::from(i == j)) - rho * y[i] * s[j];
        let entry = |i: usize, j: usize| -> f64 {
            let whole: f64 = (0..n).map(|k| (0..n).map(|l| v(k, i) * h[k][l] * v(l, j)).sum::<f64>()).sum();
            whole + rho * s[i] * s[j]
        };
        h = (0..n).map(|i| (0..n).map(|j| entry(i, j)).collect()).collect();
    }
    h.iter().map(|row| -product(row, gradient)).collect()
}

proptest! {
    #[test]
    fn the_two_loops_are_the_matrix_that_they_stand_for(
        numbers in prop::collection::vec(-1.0f64..1.0, 5 * 9), count in 1usize..5,
    ) {
        let (n, mut here) = (5, Here::at(&[0.0; 5], 4));
        let part = |index: usize| numbers[index * n..(index + 1) * n].to_vec();
        let mut lbfgs = Lbfgs::new(4);
        let mut pairs = Vec::new();
        for place in 0..count {
            // Some curvature, and something else beside it.
            let (s, noise) = (part(2 * place), part(2 * place + 1));
            let y: Vec<f64> = s.iter().zip(&noise).enumerate().map(|(i, (s, o))| (1.0 + i as f64) * s + 0.1 * o).collect();
            let ys = product(&s, &y);
            prop_assume!(ys > 0.05);
            let gamma = ys / product(&y, &y);
            (*here.get(Vector::S(place)), *here.get(Vector::Y(place))) = (s.clone(), y.clone());
            lbfgs.pairs.push_back(Pair { place, rho: 1.0 / ys, gamma });
            pairs.push((s, y));
        }
        let gradient = part(8);
        here.get(Vector::Gradient).clone_from(&gradient);
        lbfgs.direct(&mut here).unwrap();
        for (found, expected) in here.get(Vector::Direction).iter().zip(dense(&pairs, &gradient)) {
            prop_assert!((found - expected).abs() < 1e-6 * (1.0 + expected.abs()), "{found} for {expected}");
        }
    }
}
