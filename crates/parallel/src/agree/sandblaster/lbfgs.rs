//! L-BFGS over a function whose values cost a pass over the data: `(state, value) → (state, commands)`, on vectors that
//! are somewhere else.
//!
//! From the weights x with the gradient g the direction is d = −Hg, with an H that follows from the last m changes of
//! x and g (s and y) by two loops of dot products and sums: 4m + 4 commands. The point x + αd is tried; the next call
//! brings the value and the gradient there. It is taken if the value has fallen far enough (Armijo) and the slope along
//! d has become flatter (weak Wolfe, so that y·s is above zero). Otherwise α is sought between a step that was too
//! short and one that was too long. The first step of a direction is α = 1; where nothing is known of the curvature,
//! one of length 1.
//!
//! Since a value is a pass over the data, the slope is asked for in the first trials only; later whatever has fallen far
//! enough is taken, and what was learnt of the curvature is kept if y·s is above zero.

use std::collections::VecDeque;

use paceline_comm::CommError;

/// How much of the fall that the slope promises has to come (Nocedal and Wright, 3.1).
const ARMIJO: f64 = 1e-4;

/// How much of the slope may be left (the same).
const WOLFE: f64 = 0.9;

/// A step that is too short is looked for a longer one so often.
const LONGER_MAX: u32 = 2;

/// After so many trials of a direction, what was learnt of the curvature is forgotten.
const TRIALS_MAX: u32 = 8;

/// Sums of a value in another order differ by as much of it: 2⁻²³, what the terms are rounded to.
const ROUNDING: f64 = 1.2e-7;

/// The cosine between s and y below which they say nothing of the curvature.
const COSINE_MIN: f64 = 1e-8;

/// A vector of the length of all parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vector {
    /// x, the last point that was taken.
    Weights,
    /// The gradient there.
    Gradient,
    /// The point that is tried.
    Trial,
    /// The gradient there.
    TrialGradient,
    /// d.
    Direction,
    /// What a step has changed of the weights.
    S(usize),
    /// What it has changed of the gradient.
    Y(usize),
}

/// What can be done with vectors, wherever they are.
pub trait Vectors {
    /// The product of two.
    ///
    /// # Errors
    /// When whoever has them, or the way there, has failed. So for all calls below.
    fn dot(&mut self, a: Vector, b: Vector) -> Result<f64, CommError>;

    /// y ← y + αx.
    ///
    /// # Errors
    /// As above.
    fn axpy(&mut self, alpha: f64, x: Vector, y: Vector) -> Result<(), CommError>;

    /// x ← αx.
    ///
    /// # Errors
    /// As above.
    fn scale(&mut self, alpha: f64, x: Vector) -> Result<(), CommError>;

    /// One becomes the other.
    ///
    /// # Errors
    /// As above.
    fn copy(&mut self, source: Vector, target: Vector) -> Result<(), CommError>;
}

/// What a step has told of the curvature.
#[derive(Clone, Copy, Debug)]
struct Pair {
    /// Where s and y are.
    place: usize,
    /// 1 / y·s
    rho: f64,
    /// y·s / y·y
    gamma: f64,
}

/// A step along the direction: how long, and what was found there.
#[derive(Clone, Copy, Debug)]
struct Step {
    alpha: f64,
    value: f64,
    slope: f64,
}

/// The search along a direction.
#[derive(Clone, Copy, Debug)]
struct Search {
    /// Where it begins: α = 0.
    start: Step,
    /// The longest that was too short.
    low: Step,
    /// The shortest that was too long.
    high: Option<f64>,
    /// What is tried.
    alpha: f64,
    trials: u32,
}

/// What came of a trial.
enum Judged {
    Take,
    Try(f64),
    GiveUp,
}

/// The state of a minimisation.
#[derive(Debug)]
pub struct Lbfgs {
    history: usize,
    /// The oldest first.
    pairs: VecDeque<Pair>,
    search: Option<Search>,
}

impl Lbfgs {
    /// With so many pairs of s and y.
    pub fn new(history: usize) -> Self {
        Self { history, pairs: VecDeque::new(), search: None }
    }

    /// The value and the gradient of [`Vector::Trial`] are known: whether it was taken. The next point to try is there
    /// afterwards.
    ///
    /// # Errors
    /// As [`Vectors::dot`].
    pub fn advance(&mut self, value: f64, vectors: &mut impl Vectors) -> Result<bool, CommError> {
        let Some(mut search) = self.search else {
            vectors.copy(Vector::Trial, Vector::Weights)?;
            vectors.copy(Vector::TrialGradient, Vector::Gradient)?;
            self.begin(value, None, vectors)?;
            return Ok(true);
        };
        match search.judge(value, vectors)? {
            Judged::Take => {
                self.learn(vectors)?;
                self.begin(value, None, vectors)?;
                return Ok(true);
            }
            Judged::Try(alpha) => {
                search.alpha = alpha;
                self.search = Some(search);
                try_step(alpha, vectors)?;
            }
            Judged::GiveUp => {
                let squares = vectors.dot(Vector::Direction, Vector::Direction)?;
                self.pairs.clear();
                self.begin(search.start.value, Some(search.alpha * squares.sqrt()), vectors)?;
            }
        }
        Ok(false)
    }

    /// Takes the trial, and keeps what it tells of the curvature.
    fn learn(&mut self, vectors: &mut impl Vectors) -> Result<(), CommError> {
        // The oldest makes room; of one that tells nothing the place stays free.
        let used = |place: &usize| self.pairs.iter().any(|pair| pair.place == *place);
        let free = (0..self.history).find(|place| !used(place));
        let place = match free {
            Some(place) => place,
            None => self.pairs.pop_front().map_or(0, |pair| pair.place),
        };
        let (s, y) = (Vector::S(place), Vector::Y(place));
        vectors.copy(Vector::Trial, s)?;
        vectors.axpy(-1.0, Vector::Weights, s)?;
        vectors.copy(Vector::TrialGradient, y)?;
        vectors.axpy(-1.0, Vector::Gradient, y)?;
        let (ys, ss, yy) = (vectors.dot(y, s)?, vectors.dot(s, s)?, vectors.dot(y, y)?);
        if ys > COSINE_MIN * (ss * yy).sqrt() {
            self.pairs.push_back(Pair { place, rho: 1.0 / ys, gamma: ys / yy });
        }
        vectors.copy(Vector::Trial, Vector::Weights)?;
        vectors.copy(Vector::TrialGradient, Vector::Gradient)
    }

    /// Begins a search from the weights, with a step of at most this length if one is given.
    fn begin(&mut self, value: f64, length: Option<f64>, vectors: &mut impl Vectors) -> Result<(), CommError> {
        self.direct(vectors)?;
        let mut slope = vectors.dot(Vector::Gradient, Vector::Direction)?;
        if slope.is_nan() || slope >= 0.0 {
            self.pairs.clear();
            self.direct(vectors)?;
            slope = vectors.dot(Vector::Gradient, Vector::Direction)?;
        }
        // Where nothing is known, the direction is −g and its slope −g·g. At a minimum there is nowhere to go.
        let longest = length.unwrap_or(1.0).min(1.0);
        let alpha = if !self.pairs.is_empty() || slope == 0.0 { 1.0 } else { longest / (-slope).sqrt() };
        let start = Step { alpha: 0.0, value, slope };
        self.search = Some(Search { start, low: start, high: None, alpha, trials: 0 });
        try_step(alpha, vectors)
    }

    /// d ← −Hg
    fn direct(&self, vectors: &mut impl Vectors) -> Result<(), CommError> {
        let d = Vector::Direction;
        vectors.copy(Vector::Gradient, d)?;
        let mut alphas = Vec::new();
        for pair in self.pairs.iter().rev() {
            let alpha = pair.rho * vectors.dot(Vector::S(pair.place), d)?;
            vectors.axpy(-alpha, Vector::Y(pair.place), d)?;
            alphas.push(alpha);
        }
        vectors.scale(-self.pairs.back().map_or(1.0, |pair| pair.gamma), d)?;
        for (pair, alpha) in self.pairs.iter().zip(alphas.into_iter().rev()) {
            // d is −q already.
            let beta = -pair.rho * vectors.dot(Vector::Y(pair.place), d)?;
            vectors.axpy(beta - alpha, Vector::S(pair.place), d)?;
        }
        Ok(())
    }
}

impl Search {
    /// What the value at the step that is tried means.
    fn judge(&mut self, value: f64, vectors: &mut impl Vectors) -> Result<Judged, CommError> {
        let Self { start, alpha, .. } = *self;
        self.trials += 1;
        let most = start.value + ARMIJO * alpha * start.slope + ROUNDING * start.value.abs();
        let mut slope = f64::NAN;
        if value <= most {
            slope = vectors.dot(Vector::TrialGradient, Vector::Direction)?;
        }
        // A value that is none, or whose gradient is none, is that of a step that is too long.
        if slope.is_finite() {
            let flat = slope >= WOLFE * start.slope;
            if flat || self.trials > LONGER_MAX {
                return Ok(Judged::Take);
            }
            let shorter = std::mem::replace(&mut self.low, Step { alpha, value, slope });
            let next = self.high.map_or_else(|| longer(shorter, self.low), |high| f64::midpoint(alpha, high));
            return Ok(Judged::Try(next));
        }
        if self.trials >= TRIALS_MAX {
            return Ok(Judged::GiveUp);
        }
        self.high = Some(alpha);
        Ok(Judged::Try(between(self.low, alpha, value)))
    }
}

/// A step that is longer than the last, where the slope would be zero if it went on becoming flatter as it did.
fn longer(before: Step, last: Step) -> f64 {
    let flatter = (last.slope - before.slope) / (last.alpha - before.alpha);
    let zero = last.alpha - last.slope / flatter;
    if zero.is_finite() { zero.clamp(2.0 * last.alpha, 10.0 * last.alpha) } else { 10.0 * last.alpha }
}

/// A step between one that is too short and one that is too long: the lowest of the parabola through what is known of them.
fn between(low: Step, high: f64, value: f64) -> f64 {
    let width = high - low.alpha;
    let bend = value - low.value - low.slope * width;
    let lowest = -low.slope * width * width / (2.0 * bend);
    let lowest = if lowest.is_finite() { lowest } else { 0.1 * width };
    low.alpha + lowest.clamp(0.1 * width, 0.5 * width)
}

/// The point a step along the direction.
fn try_step(alpha: f64, vectors: &mut impl Vectors) -> Result<(), CommError> {
    vectors.copy(Vector::Weights, Vector::Trial)?;
    vectors.axpy(alpha, Vector::Direction, Vector::Trial)
}

#[cfg(test)]
pub(super) mod tests;
