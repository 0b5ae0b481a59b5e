//! Elastic averaging (EASGD): every worker steps by itself and is tied to a centre x̃ by a spring.
//!
//! Asynchronous: before its step t, where τ divides t, a worker at x sends x; the server answers with d = a(x − x̃) and
//! moves x̃ by d. The step is made meanwhile with the gradient of the old x, and then x moves by −d: elastic move and
//! step add up, so nothing waits. Synchronous (`--staleness 0`): x̃ moves by the sum of all workers' d, all taken from
//! the values at the step's start. Each exchange sends S bytes to the servers and S back, once in τ steps.
//!
//! With Nesterov's momentum that is EAMSGD: x is then the point behind the one that the optimizer looks at.

use std::ops::Range;

use paceline_comm::CommError;

use super::center::{self, Exchange, Habit, Held, Rule, ServerSide, WorkerSide};
use super::{Agreement, Demands, Join, Options, Point, Protocol, Recipe, ServerShard, Shape};

/// Steps between two exchanges, if nobody says otherwise.
pub(super) const PERIOD: u64 = 8;

/// β of the paper: what all workers' moves together are of the way to the centre, if nobody says otherwise.
pub(super) const BETA: f64 = 0.9;

/// What the command line offers.
#[derive(Debug)]
pub struct Elastic;

/// The same.
pub const RECIPE: Elastic = Elastic;

fn period(options: &Options) -> u64 {
    options.rounds.period.unwrap_or(PERIOD)
}

impl Elastic {
    /// A rate that makes no sense.
    pub(super) fn refuses_rate(&self, options: &Options) -> Option<String> {
        let rate = options.rounds.elastic_rate.unwrap_or(BETA);
        (!(rate > 0.0 && rate < 1.0)).then(|| {
            "--elastic-rate must be above 0 and below 1; type for example --elastic-rate 0.45, or leave it out for 0.9 \
             divided by the number of workers"
                .into()
        })
    }
}

impl Recipe for Elastic {
    fn name(&self) -> &'static str {
        "elastic"
    }

    fn about(&self) -> &'static str {
        "steps of each worker's own, which is tied to a centre on servers every --period"
    }

    fn has_servers(&self) -> bool {
        true
    }

    fn is_synchronous(&self, _: &Options) -> bool {
        false
    }

    fn hands_out_portions(&self, options: &Options) -> bool {
        // Workers that exchange together make equally many steps.
        options.staleness != Some(0)
    }

    fn usual_staleness(&self) -> Option<u64> {
        None
    }

    fn copies(&self, _: &Options) -> usize {
        // Messages: of exchanges, and of pushes that are not answered.
        2
    }

    fn refuses(&self, demands: &Demands) -> Option<String> {
        if let Some(sentence) = center::refuses(self.name(), demands) {
            return Some(sentence);
        }
        self.refuses_rate(&demands.options)
    }

    fn protocol(&self, shape: &Shape, options: &Options) -> Protocol {
        center::protocol(self.name(), shape, options, (period(options), 0))
    }

    fn join(&self, join: Join<'_>) -> Result<Box<dyn Agreement>, CommError> {
        let (protocol, period) = (self.protocol(join.shape, &join.options), period(&join.options));
        center::join(join, protocol, WorkerSide { habit: Box::new(Spring { period }), pieces: 1, alone: 0, lent: None })
    }

    fn serve(&self, join: Join<'_>, shard: &mut dyn ServerShard) -> Result<(), CommError> {
        let protocol = self.protocol(join.shape, &join.options);
        let rate = join.options.rounds.elastic_rate.unwrap_or(BETA / join.roles.workers as f64) as f32;
        let rule = Box::new(Moves { rate, sum: Vec::new() });
        let together = join.options.staleness == Some(0);
        center::serve(join, protocol, ServerSide { rule, pieces: 1, together, lends: false }, shard)
    }
}

/// A worker's side.
#[derive(Debug)]
pub(super) struct Spring {
    pub period: u64,
}

impl Habit for Spring {
    fn before(&self, step: u64) -> Option<Exchange> {
        // All begin where the centre is.
        let due = step > 0 && step.is_multiple_of(self.period);
        due.then_some(Exchange { pushes: true, pulls: true, piece: 0 })
    }

    fn fill(&mut self, range: Range<usize>, point: Point<'_>, message: &mut [f32]) {
        let message = &mut message[range.clone()];
        message.copy_from_slice(&point.weights[range.clone()]);
        if let Some((velocity, ahead)) = point.velocity {
            message.iter_mut().zip(&velocity[range]).for_each(|(x, velocity)| *x += ahead * velocity);
        }
    }

    fn take_back(&mut self, range: Range<usize>, message: &[f32], weights: &mut [f32]) {
        weights[range.clone()].iter_mut().zip(&message[range]).for_each(|(weight, moved)| *weight -= moved);
    }
}

/// A server's side.
#[derive(Debug)]
pub(super) struct Moves {
    /// a
    pub rate: f32,
    /// Of the moves that the centre is still to make, where all push together.
    pub sum: Vec<f32>,
}

impl Rule for Moves {
    fn take(&mut self, held: &mut Held, range: Range<usize>, pushed: &mut [f32], _: f32) {
        for (center, x) in held.center[range].iter_mut().zip(pushed) {
            let moved = self.rate * (*x - *center);
            *center += moved;
            *x = moved;
        }
    }

    fn take_together(&mut self, held: &mut Held, range: Range<usize>, pushed: &mut [f32]) {
        self.sum.resize(held.center.len(), 0.0);
        for ((center, sum), x) in held.center[range.clone()].iter().zip(&mut self.sum[range]).zip(pushed) {
            let moved = self.rate * (*x - center);
            *sum += moved;
            *x = moved;
        }
    }

    fn end_together(&mut self, held: &mut Held) {
        held.center.iter_mut().zip(&mut self.sum).for_each(|(center, sum)| *center += std::mem::take(sum));
    }
}
