//! Parameter server: workers push gradients, servers apply them and give back weights.
//!
//! Synchronous: the servers add up what all workers push for a bucket and make one step with the sum.
//! Asynchronous: every push is a step of its own, with the weights as they are; with a bound on staleness
//! nobody gets further ahead of the slowest worker than that. One server moves p·S bytes in and p·S out, p
//! workers and S bytes of gradients; several servers share that equally.

mod header;
mod server;
pub(super) mod talk;
pub mod turns;
pub mod versions;
mod worker;

use paceline_comm::CommError;

use super::{Agreement, Demands, Join, LostPeer, Options, Protocol, Recipe, ServerShard, Shape};

/// What the command line offers.
#[derive(Debug)]
pub struct ParameterServer;

/// The same.
pub const RECIPE: ParameterServer = ParameterServer;

/// When pushes are applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Pace {
    /// All workers' together.
    #[default]
    Synchronous,
    /// Each as it comes.
    Asynchronous {
        /// Steps that a worker may be ahead of the slowest; none is no bound.
        staleness: Option<u64>,
    },
}

impl Pace {
    /// `--staleness`: 0 is synchronous.
    fn from_staleness(staleness: Option<u64>) -> Self {
        match staleness {
            Some(0) => Self::Synchronous,
            staleness => Self::Asynchronous { staleness },
        }
    }
}

impl Recipe for ParameterServer {
    fn name(&self) -> &'static str {
        "parameter-server"
    }

    fn about(&self) -> &'static str {
        "servers make the steps with the gradients that workers push"
    }

    fn has_servers(&self) -> bool {
        true
    }

    fn is_synchronous(&self, options: &Options) -> bool {
        Pace::from_staleness(options.staleness) == Pace::Synchronous
    }

    fn hands_out_portions(&self, options: &Options) -> bool {
        !self.is_synchronous(options)
    }

    fn refuses(&self, demands: &Demands) -> Option<String> {
        if let Some(sentence) = demands.foreign(self.name()) {
            return Some(sentence);
        }
        let sentence = if self.is_synchronous(&demands.options) && demands.options.rounds.staleness_aware {
            "--staleness-aware is for updates that miss others, and with --staleness 0 none does; type --staleness none, \
             or leave it out"
        } else if !self.is_synchronous(&demands.options) && demands.saves_by_clock {
            "--checkpoint-minutes needs workers that are at the same step, and those of --staleness are not; type \
             --checkpoint-every with a number of steps"
        } else if demands.sync_batch_norm {
            "--sync-batch-norm needs workers that add up numbers in the middle of a step, and those of a parameter server \
             do not hear of each other; type --agree all-reduce, or leave it out"
        } else if demands.options.shard {
            "--shard optimizer is for --agree all-reduce: the servers of a parameter server hold the optimizer's state \
             already, divided among them; type --servers with a higher number, or --shard none"
        } else if demands.clips_norm {
            "--clip-norm needs all gradients in one place, and servers have parts of them; type --agree all-reduce"
        } else if demands.whole_tensors && demands.servers > 1 {
            "lars needs whole tensors, and several servers have parts of them; type --servers 1"
        } else {
            return None;
        };
        Some(sentence.to_owned())
    }

    fn protocol(&self, shape: &Shape, _: &Options) -> Protocol {
        Protocol { lost_peer: LostPeer::GoOn, ..Protocol::parameter_server(shape.buckets.len()) }
    }

    fn join(&self, join: Join<'_>) -> Result<Box<dyn Agreement>, CommError> {
        let protocol = self.protocol(join.shape, &join.options);
        Ok(Box::new(worker::Worker::start(join, protocol)?))
    }

    fn serve(&self, join: Join<'_>, shard: &mut dyn ServerShard) -> Result<(), CommError> {
        let protocol = self.protocol(join.shape, &join.options);
        server::serve(join, protocol, shard)
    }
}
