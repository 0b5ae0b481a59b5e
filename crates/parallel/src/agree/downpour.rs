//! Downpour SGD: every worker steps by itself, fetches the servers' weights before every n-th step and pushes what it
//! has changed behind every m-th.
//!
//! What travels in place of the sum of gradients g is the change of the weights, −ηΣg with plain descent; with other
//! optimizers it is what they have made of it *(ours)*. A server adds it to its weights, or a part of it: 1/p unless
//! told otherwise, so that p workers with 1/p of a batch each go as far as one with all of it *(ours; the paper adds
//! all)*. Or it makes a step of Adagrad with it: wᵢ moves by γ·cᵢ/√Σcᵢ² for the changes c that were pushed so far. A
//! fetch travels while the step is computed; what a worker has changed since and not pushed stays added to what it
//! brings *(ours)*, so that one worker alone makes the steps of SGD.

use std::ops::Range;

use paceline_comm::CommError;

use super::center::{self, Changes, Exchange, Held, Rule, ServerSide, Timetable, WorkerSide};
use super::{Agreement, Demands, Join, Options, Protocol, Recipe, RoundOptions, ServerShard, Shape};

/// What the command line offers.
#[derive(Debug)]
pub struct Downpour;

/// The same.
pub const RECIPE: Downpour = Downpour;

/// When a worker fetches and pushes.
#[derive(Clone, Copy, Debug)]
struct Every {
    fetch: u64,
    push: u64,
}

impl Every {
    /// Every step, as in the paper's experiments, if nobody says otherwise.
    fn new(options: &Options) -> Self {
        let rounds = &options.rounds;
        Self { fetch: rounds.fetch_every.unwrap_or(1), push: rounds.push_every.unwrap_or(1) }
    }
}

/// A rate of pushes that cannot be: a sentence that says what to type.
pub(super) fn refuses_push_rate(rounds: &RoundOptions) -> Option<&'static str> {
    rounds.push_rate.is_some_and(|rate| !(rate > 0.0 && rate <= 1.0)).then_some(
        "--push-rate must be above 0 and at most 1; type for example --push-rate 0.5, or leave it out for 1 divided by the \
         number of workers",
    )
}

impl Timetable for Every {
    fn before(&self, step: u64) -> Option<Exchange> {
        step.is_multiple_of(self.fetch).then_some(Exchange { pushes: false, pulls: true, piece: 0 })
    }

    fn pushes_after(&self, step: u64) -> bool {
        step.is_multiple_of(self.push)
    }
}

impl Recipe for Downpour {
    fn name(&self) -> &'static str {
        "downpour"
    }

    fn about(&self) -> &'static str {
        "steps of each worker's own, whose changes servers gather and give to all"
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

    fn copies(&self, options: &Options) -> usize {
        // Messages of both kinds, what was pushed so far, and what servers keep.
        3 + usize::from(options.rounds.server_adagrad.is_some())
    }

    fn refuses(&self, demands: &Demands) -> Option<String> {
        if let Some(sentence) = center::refuses(self.name(), demands) {
            return Some(sentence);
        }
        let Options { rounds, staleness, .. } = &demands.options;
        if *staleness == Some(0) {
            return Some(
                "--staleness 0 is for steps of all together, and workers of --agree downpour step by themselves; type --agree \
                 parameter-server, or --staleness with a number from 1"
                    .into(),
            );
        }
        if rounds.server_adagrad.is_some_and(|rate| !(rate.is_finite() && rate > 0.0)) {
            return Some("--server-adagrad must be above zero; type for example --server-adagrad 0.01".into());
        }
        if rounds.server_adagrad.is_some() && rounds.push_rate.is_some() {
            return Some(
                "--push-rate is for changes that are added, and --server-adagrad steps with them at a rate of its own; leave \
                 one of them out"
                    .into(),
            );
        }
        refuses_push_rate(rounds).map(str::to_owned)
    }

    fn protocol(&self, shape: &Shape, options: &Options) -> Protocol {
        let Every { fetch, push } = Every::new(options);
        let buffers = usize::from(options.rounds.server_adagrad.is_some());
        center::protocol(self.name(), shape, options, (fetch.max(push), buffers))
    }

    fn join(&self, join: Join<'_>) -> Result<Box<dyn Agreement>, CommError> {
        let (protocol, options) = (self.protocol(join.shape, &join.options), join.options);
        let habit = Box::new(Changes::new(Every::new(&options)));
        let alone = options.rounds.warm_start.unwrap_or(0);
        center::join(join, protocol, WorkerSide { habit, pieces: 1, alone, lent: None })
    }

    fn serve(&self, join: Join<'_>, shard: &mut dyn ServerShard) -> Result<(), CommError> {
        let protocol = self.protocol(join.shape, &join.options);
        let rule: Box<dyn Rule> = match join.options.rounds.server_adagrad {
            Some(rate) => Box::new(Adagrad { rate: rate as f32 }),
            None => Box::new(Sum::new(&join)),
        };
        center::serve(join, protocol, ServerSide { rule, pieces: 1, together: false, lends: false }, shard)
    }
}

/// A server that adds what is pushed to its weights, or a part of it, and answers with them.
#[derive(Debug)]
pub(super) struct Sum {
    rate: f32,
}

impl Sum {
    pub fn new(join: &Join<'_>) -> Self {
        let rounds = &join.options.rounds;
        // Updates that count less for each that they have missed go no further together than all by one.
        let usual = if rounds.staleness_aware { 1.0 } else { 1.0 / join.roles.workers as f64 };
        Self { rate: rounds.push_rate.unwrap_or(usual) as f32 }
    }
}

impl Rule for Sum {
    fn take(&mut self, held: &mut Held, range: Range<usize>, pushed: &mut [f32], share: f32) {
        let rate = self.rate * share;
        for (center, change) in held.center[range].iter_mut().zip(pushed) {
            *center += rate * *change;
            *change = *center;
        }
    }
}

/// A server that makes a step of Adagrad with it.
#[derive(Debug)]
struct Adagrad {
    /// γ
    rate: f32,
}

impl Rule for Adagrad {
    fn take(&mut self, Held { center, kept }: &mut Held, range: Range<usize>, pushed: &mut [f32], share: f32) {
        let ([squares], rate) = (&mut kept[..], self.rate * share) else { return };
        for ((center, squares), change) in center[range.clone()].iter_mut().zip(&mut squares[range]).zip(pushed) {
            *squares += *change * *change;
            // What never changes has no scale.
            if *squares > 0.0 {
                *center += rate * *change / squares.sqrt();
            }
            *change = *center;
        }
    }
}
