//! Sandblaster L-BFGS: a batch is the whole training set, and its gradient moves the weights once.
//!
//! The weights stand still while workers compute the gradients of portions, which they take as they are free, near the
//! end some of them twice; the first answer to each counts. Then all meet. Every worker gives the sum of its gradients to servers, each of which has a part
//! of the weights and of the last m changes of weights and gradients. The first worker coordinates: it has servers
//! multiply, add and scale their parts, is answered with scalars only, and so decides on the next point to try
//! (`sandblaster/lbfgs.rs`). Every worker fetches it when it computes its next portion.
//!
//! A batch costs each worker S bytes out, S in for the weights that are evaluated and saved, and S in for the point
//! that is tried; the coordinator some 8m + 20 messages of a few bytes to every server, half of them answered.
//!
//! A batch in which gradients are missing, because a worker was lost on its way to the servers, or the run was to end,
//! counts for nothing.

mod lbfgs;
mod message;
mod server;
#[cfg(test)]
mod tests;
mod worker;

use paceline_comm::CommError;

use super::{Agreement, Demands, Join, Options, Protocol, Recipe, ServerShard, Shape};
pub use message::Gathered;

/// The name in errors.
const PHASE: &str = "sandblaster";

/// Pairs of changes, if nobody says otherwise (PyTorch keeps 100, SciPy 10).
const HISTORY: usize = 10;

/// The most that make sense: two vectors of all parameters each.
const HISTORY_MAX: usize = 1000;

/// What the command line offers.
#[derive(Debug)]
pub struct Sandblaster;

/// The same.
pub const RECIPE: Sandblaster = Sandblaster;

fn history(options: &Options) -> usize {
    options.rounds.history.unwrap_or(HISTORY)
}

impl Recipe for Sandblaster {
    fn name(&self) -> &'static str {
        "sandblaster"
    }

    fn about(&self) -> &'static str {
        "L-BFGS with the gradient of the whole training set, one step an epoch, on vectors that servers hold"
    }

    fn has_servers(&self) -> bool {
        true
    }

    fn is_synchronous(&self, _: &Options) -> bool {
        false
    }

    fn hands_out_portions(&self, _: &Options) -> bool {
        true
    }

    fn usual_staleness(&self) -> Option<u64> {
        None
    }

    fn copies(&self, _: &Options) -> usize {
        // The point, the gradients of a portion, and their sum.
        3
    }

    fn server_copies(&self, options: &Options) -> usize {
        // The model, what comes in, five vectors and the pairs.
        2 + 5 + 2 * history(options)
    }

    fn refuses(&self, demands: &Demands) -> Option<String> {
        refuses(demands)
    }

    fn protocol(&self, _: &Shape, _: &Options) -> Protocol {
        Protocol::gathered(self.name())
    }

    fn join(&self, join: Join<'_>) -> Result<Box<dyn Agreement>, CommError> {
        let protocol = self.protocol(join.shape, &join.options);
        Ok(Box::new(worker::Worker::start(join, protocol)))
    }

    fn serve(&self, join: Join<'_>, shard: &mut dyn ServerShard) -> Result<(), CommError> {
        let protocol = self.protocol(join.shape, &join.options);
        server::Server::new(join, protocol, shard).serve()
    }
}

/// What it cannot be combined with: a sentence that says what to type.
fn refuses(demands: &Demands) -> Option<String> {
    let sentence = if let Some(sentence) = demands.foreign("sandblaster") {
        sentence
    } else if demands.sync_batch_norm {
        "--sync-batch-norm needs workers that are at the same step, and those of --agree sandblaster take portions as they \
         are free; type --agree all-reduce, or leave it out"
            .into()
    } else if demands.options.shard {
        "--shard optimizer divides an optimizer's state, and servers of --agree sandblaster have its place; type --shard \
         none"
            .into()
    } else if !demands.options.squeeze.codec().is_identity() {
        format!(
            "--squeeze {} rounds gradients, and the line search of --agree sandblaster compares them; type --squeeze none",
            demands.options.squeeze.name()
        )
    } else if demands.clips_norm {
        "--clip-norm changes gradients, and the line search of --agree sandblaster needs them as they are; leave it out"
            .into()
    } else if demands.smooths_labels {
        "--label-smoothing changes the loss that is descended and not the one that is told, and the line search of --agree \
         sandblaster compares both; leave it out"
            .into()
    } else if demands.decays {
        "--weight-decay is a part of an optimizer's step, and L-BFGS has its place with --agree sandblaster; leave it out"
            .into()
    } else if demands.staleness {
        "--staleness is for workers that step apart, and those of --agree sandblaster wait for the batch; leave it out"
            .into()
    } else if demands.saves_by_clock {
        "--checkpoint-minutes would save inside of a batch, and a batch of --agree sandblaster is an epoch; leave it out, \
         each epoch is saved"
            .into()
    } else if demands.on_gpu {
        "--agree sandblaster computes on CPUs; type --device cpu, or --agree all-reduce".into()
    } else if !(1..=HISTORY_MAX).contains(&history(&demands.options)) {
        format!("--history must be from 1 to {HISTORY_MAX}; type for example --history 10")
    } else {
        return None;
    };
    Some(sentence)
}
