//! Dogwild!: every worker steps by itself, as threads of Hogwild! do on one buffer, and streams what it has changed to
//! a master copy M, piece by piece.
//!
//! A worker keeps its weights W and L, the master as far as it knows. Before every step it sends W − L of the next
//! piece of all weights; the server adds it to M and answers with M, and behind the step W moves by M − L, and L is M
//! *(ours)*. In τ steps every piece has travelled once. With plain descent that is what the original sends, gradients
//! to the master and weights back; with other optimizers the worker steps and differences travel *(ours)*. As with
//! Downpour the master takes 1/p of what p workers have changed unless told otherwise *(ours)*. A piece costs S/τ bytes
//! out and in. The original sends them by UDP and lets some be lost; here none is.

use paceline_comm::CommError;

use super::center::{self, Changes, Exchange, ServerSide, Timetable, WorkerSide};
use super::downpour::{self, Sum};
use super::{Agreement, Demands, Join, Options, Protocol, Recipe, ServerShard, Shape};

/// Steps in which every piece has travelled once, if nobody says otherwise.
const PERIOD: u64 = 8;

/// Pieces that make messages too small to be worth one.
const PERIOD_MAX: u64 = 1 << 10;

/// What the command line offers.
#[derive(Debug)]
pub struct Dogwild;

/// The same.
pub const RECIPE: Dogwild = Dogwild;

fn period(options: &Options) -> u64 {
    options.rounds.period.unwrap_or(PERIOD)
}

/// A piece before every step.
#[derive(Clone, Copy, Debug)]
struct Stream {
    pieces: u64,
}

impl Timetable for Stream {
    fn before(&self, step: u64) -> Option<Exchange> {
        // Nothing has changed before the first.
        let piece = (step.checked_sub(1)? % self.pieces) as usize;
        Some(Exchange { pushes: true, pulls: true, piece })
    }

    fn pushes_after(&self, _: u64) -> bool {
        false
    }
}

impl Recipe for Dogwild {
    fn name(&self) -> &'static str {
        "dogwild"
    }

    fn about(&self) -> &'static str {
        "steps of each worker's own, whose changes stream to servers and back, a piece beside every step"
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
        // Messages, and the master as far as the worker knows.
        3
    }

    fn refuses(&self, demands: &Demands) -> Option<String> {
        if let Some(sentence) = center::refuses(self.name(), demands) {
            return Some(sentence);
        }
        let period = period(&demands.options);
        let sentence = if demands.options.staleness == Some(0) {
            "--staleness 0 is for steps of all together, and workers of --agree dogwild step by themselves; type --agree \
             parameter-server, or --staleness with a number from 1"
                .to_owned()
        } else if let Some(sentence) = downpour::refuses_push_rate(&demands.options.rounds) {
            sentence.to_owned()
        } else if period > PERIOD_MAX {
            format!("--period {period} makes pieces of the weights that are too small; type --period with at most {PERIOD_MAX}")
        } else {
            return None;
        };
        Some(sentence)
    }

    fn protocol(&self, shape: &Shape, options: &Options) -> Protocol {
        center::protocol(self.name(), shape, options, (period(options), 0))
    }

    fn join(&self, join: Join<'_>) -> Result<Box<dyn Agreement>, CommError> {
        let (protocol, pieces) = (self.protocol(join.shape, &join.options), period(&join.options));
        let habit = Box::new(Changes::new(Stream { pieces }));
        center::join(join, protocol, WorkerSide { habit, pieces: pieces as usize, alone: 0, lent: None })
    }

    fn serve(&self, join: Join<'_>, shard: &mut dyn ServerShard) -> Result<(), CommError> {
        let (protocol, pieces) = (self.protocol(join.shape, &join.options), period(&join.options) as usize);
        let rule = Box::new(Sum::new(&join));
        center::serve(join, protocol, ServerSide { rule, pieces, together: false, lends: false }, shard)
    }
}
