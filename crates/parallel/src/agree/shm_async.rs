//! ShmCaffe's SEASGD, asynchronous (A): every worker is tied to weights that lie in a memory box, which it reads and adds to
//! by itself.
//!
//! It is elastic averaging (`elastic.rs`) without a server in the way: before its step t, where τ divides t, a worker at Wx
//! reads Wg from the box and writes ΔWx = a(Wx − Wg); the step is made meanwhile, then Wx −= ΔWx, and behind that the box
//! adds ΔWx to Wg. An exchange reads S bytes and writes S; the sum is made in the box.
//!
//! The server has the box, or the run has been given one (`--box`). It hears from workers how far they are, and takes part
//! where all meet.

use paceline_comm::CommError;

use super::center::{self, ServerSide, WorkerSide};
use super::elastic::{BETA, Moves, PERIOD, RECIPE as ELASTIC, Spring};
use super::{Agreement, Demands, Join, Options, Protocol, Recipe, ServerShard, Shape};

/// What the command line offers.
#[derive(Debug)]
pub struct ShmAsync {
    name: &'static str,
    about: &'static str,
    in_groups: bool,
}

/// The same.
pub const RECIPE: ShmAsync = ShmAsync::new(
    "shm-async",
    "steps of each worker's own, which is tied to weights in a memory box that it reads and adds to itself, every --period",
    false,
);

impl ShmAsync {
    pub(super) const fn new(name: &'static str, about: &'static str, in_groups: bool) -> Self {
        Self { name, about, in_groups }
    }
}

fn period(options: &Options) -> u64 {
    options.rounds.period.unwrap_or(PERIOD)
}

/// a, of so many workers.
fn rate(options: &Options, workers: usize) -> f32 {
    options.rounds.elastic_rate.unwrap_or(BETA / workers as f64) as f32
}

impl Recipe for ShmAsync {
    fn name(&self) -> &'static str {
        self.name
    }

    fn about(&self) -> &'static str {
        self.about
    }

    fn has_servers(&self) -> bool {
        true
    }

    fn steps_in_groups(&self) -> bool {
        self.in_groups
    }

    fn borrows_memory(&self) -> bool {
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

    fn copies(&self, options: &Options) -> usize {
        // Messages as of an elastic one, the centre as it was read, and the increment in the box, which is there twice while it
        // is written anew. A server's box has the centre as often: as it is, as it becomes, and as somebody reads it.
        ELASTIC.copies(options) + 3
    }

    fn refuses(&self, demands: &Demands) -> Option<String> {
        if demands.options.staleness.is_some() {
            let name = self.name;
            return Some(format!(
                "--staleness has a server hold workers back, and those of --agree {name} exchange with the memory box by \
                 themselves; type --staleness none, or --agree elastic"
            ));
        }
        if let Some(sentence) = center::refuses(self.name, demands) {
            return Some(sentence);
        }
        ELASTIC.refuses_rate(&demands.options)
    }

    fn protocol(&self, shape: &Shape, options: &Options) -> Protocol {
        center::protocol(self.name, shape, options, (period(options), 0))
    }

    fn join(&self, join: Join<'_>) -> Result<Box<dyn Agreement>, CommError> {
        let (protocol, period) = (self.protocol(join.shape, &join.options), period(&join.options));
        let lent = Some(rate(&join.options, join.roles.workers));
        center::join(join, protocol, WorkerSide { habit: Box::new(Spring { period }), pieces: 1, alone: 0, lent })
    }

    fn serve(&self, join: Join<'_>, shard: &mut dyn ServerShard) -> Result<(), CommError> {
        let protocol = self.protocol(join.shape, &join.options);
        let rate = rate(&join.options, join.roles.workers);
        let rule = Box::new(Moves { rate, sum: Vec::new() });
        center::serve(join, protocol, ServerSide { rule, pieces: 1, together: false, lends: true }, shard)
    }
}
