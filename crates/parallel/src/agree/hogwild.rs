//! Hogwild!: the workers are threads of one process, and step by themselves on one buffer of weights that
//! nobody locks.
//!
//! A worker computes with a copy of its own, loaded from the buffer before each step, and makes its step
//! there with the run's optimizer, whose state is its own. Then it adds what the step has changed to the
//! buffer, element by element, by a load and a store: what another worker stores between the two is lost.
//! With plain SGD that is the paper's rule; with momentum or Adam the change is what their rule makes of the
//! worker's own gradients (ours).
//!
//! Per step and worker, S bytes of weights, 6·S are read and written, and nobody waits. All meet where the
//! weights are looked at (an evaluation, a checkpoint, the end): between two barriers nobody writes, and all
//! take what is in the buffer (the mean of the copies, if there are several), and the mean of the optimizers'
//! state. So a resumed run goes on from what was saved, though not with the bits of one that was not stopped:
//! who comes first is the machine's affair.
//!
//! With `--herds`, or on several NUMA nodes, each herd of workers has a copy of the buffer, and changes go
//! round a ring ([`crate::lock_free::ThreadMemory`], HogWild++).

use paceline_comm::{CommError, Communicator, Rank};

use super::missed::Missed;
use super::{
    Agreement, Demands, Join, Options, Protocol, Reach, Recipe, RoundOptions, Rounds, Shape, StepReport,
};
use crate::lock_free::{Leader, LockFreeBuffer, Place, ThreadMemory};

/// Steps of a herd's leader between two exchanges with the next herd, if nobody says otherwise: the paper's
/// least.
const DELAY: u64 = 64;

/// What the command line offers.
#[derive(Debug)]
pub struct Hogwild;

/// The same.
pub const RECIPE: Hogwild = Hogwild;

impl Recipe for Hogwild {
    fn name(&self) -> &'static str {
        "hogwild"
    }

    fn about(&self) -> &'static str {
        "threads of one process step by themselves on one buffer of weights, without locks"
    }

    fn is_synchronous(&self, _: &Options) -> bool {
        false
    }

    fn hands_out_portions(&self, _: &Options) -> bool {
        true
    }

    fn shares_process(&self) -> bool {
        true
    }

    fn copies(&self, _: &Options) -> usize {
        // What it has loaded; of every herd, its copy and what its leader last saw of it.
        3
    }

    fn refuses(&self, demands: &Demands) -> Option<String> {
        let RoundOptions { period, herds, .. } = demands.options.rounds;
        let sentence = if demands.staleness {
            "--staleness is for parameter servers; type --agree parameter-server, or leave it out".into()
        } else if demands.options.rounds != (RoundOptions { period, herds, ..RoundOptions::default() }) {
            "--node-period, --post-local, --outer-rate and --outer-momentum are for workers that exchange weights in rounds; \
             type --agree local, or leave them out"
                .into()
        } else if let (Some(period), None) = (period, herds) {
            format!(
                "--period {period} would be the steps between two exchanges of herds, and --herds does not say how many there \
                 are; type for example --herds 2, or leave --period out"
            )
        } else if demands.sync_batch_norm {
            "--sync-batch-norm needs workers that are at the same step, and those of --agree hogwild step by themselves; \
             type --agree all-reduce, or leave it out"
                .into()
        } else if demands.options.shard {
            "--shard optimizer needs sums of gradients, and workers of --agree hogwild step with their own; type --agree \
             all-reduce, or --shard none"
                .into()
        } else if !demands.options.squeeze.codec().is_identity() {
            format!(
                "--squeeze {} is for messages, and --agree hogwild sends none; type --squeeze none",
                demands.options.squeeze.name()
            )
        } else if demands.saves_by_clock {
            "--checkpoint-minutes needs workers that meet at every step, and those of --agree hogwild do not; type \
             --checkpoint-every with a number of steps"
                .into()
        } else {
            return None;
        };
        Some(sentence)
    }

    fn protocol(&self, _: &Shape, _: &Options) -> Protocol {
        // Among the workers of this machine after every step; among all where somebody looks at the weights.
        let rounds = Rounds { every: None, within_node: Some(1), warm_up: 0, fragments: 1 };
        Protocol::local(self.name(), rounds, 0)
    }

    fn join(&self, join: Join<'_>) -> Result<Box<dyn Agreement>, CommError> {
        let Join { communicator, shape, options, memory, .. } = join;
        let Some(memory) = memory else {
            let what = "its workers are threads of one process, and this one shares no memory with others".into();
            return Err(CommError::Failed { rank: communicator.rank(), phase: "hogwild", what });
        };
        let protocol = self.protocol(shape, &options);
        let place = memory.place(communicator.rank().index());
        let delay = options.rounds.period.unwrap_or(DELAY);
        let (step, report) = (LocalStep::default(), StepReport::default());
        Ok(Box::new(Worker { communicator, protocol, memory, place, delay, leader: None, step, report }))
    }
}

/// What a worker knows of the buffer.
#[derive(Debug, Default)]
struct LocalStep {
    /// What it has loaded.
    seen: Vec<f32>,
    /// Updates that were counted then.
    version: u64,
    missed: Missed,
}

impl LocalStep {
    /// Begins with these weights, which are those of the buffer after so many updates.
    fn begin(&mut self, version: u64, weights: &[f32]) {
        self.version = version;
        self.seen.clear();
        self.seen.extend_from_slice(weights);
    }

    /// Adds what a step has changed, and loads what the next one begins with.
    fn apply(&mut self, buffer: &LockFreeBuffer, weights: &mut [f32]) {
        let version = buffer.updates();
        buffer.exchange(&mut self.seen, weights);
        // Counted once it is all there: who reads the count before the weights has every update that it says,
        // so that a step may have missed fewer than are counted, and never more.
        let before = buffer.count_update();
        self.missed.count(before - self.version);
        // Its own is one that it does not miss.
        self.version = version + 1;
    }
}

/// A worker's end.
#[derive(Debug)]
struct Worker {
    communicator: Communicator,
    protocol: Protocol,
    memory: ThreadMemory,
    place: Place,
    /// Steps between two exchanges of herds.
    delay: u64,
    /// What it knows as a herd's leader, where there are several.
    leader: Option<Leader>,
    step: LocalStep,
    report: StepReport,
}

impl Worker {
    /// All take the same weights, while nobody writes.
    fn meet(&mut self, weights: &mut [f32]) -> Result<(), CommError> {
        let Self { communicator, memory, place, leader, step, .. } = self;
        // Everybody's last step is there.
        communicator.barrier()?;
        memory.mean(weights);
        if memory.herds() > 1 {
            communicator.barrier()?;
            if let Some(leader) = leader {
                memory.copy(place.herd).store_all(weights);
                leader.begin_again(weights);
            }
        }
        step.begin(memory.copy(place.herd).updates(), weights);
        // Nobody makes the next step before all have them.
        communicator.barrier()
    }
}

impl Agreement for Worker {
    fn protocol(&self) -> &Protocol {
        &self.protocol
    }

    fn rank(&self) -> Rank {
        self.communicator.rank()
    }

    fn workers(&self) -> usize {
        self.communicator.world()
    }

    fn shares_steps(&self) -> bool {
        false
    }

    fn broadcast_from_root(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        self.communicator.broadcast(Rank(0), numbers)
    }

    fn sum(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        self.communicator.all_reduce(numbers)
    }

    fn begin_step(&mut self, report: StepReport) -> Result<(), CommError> {
        self.report = report;
        Ok(())
    }

    fn total(&mut self) -> Result<StepReport, CommError> {
        Ok(self.report)
    }

    fn opened(&mut self, weights: &[f32]) {
        let Self { memory, place, delay, leader, step, .. } = self;
        // All have been given the same: it does not matter whose a copy is filled with.
        memory.open(place.herd, weights);
        // Others may have stepped since, which this one has missed.
        step.begin(0, weights);
        if place.leads && memory.herds() > 1 {
            *leader = Some(Leader::new(memory, place.herd, *delay, weights));
        }
    }

    fn exchange_weights(&mut self, reach: Reach, weights: &mut [f32], _: &mut [Vec<f32>]) -> Result<(), CommError> {
        let Self { memory, place, leader, step, .. } = self;
        match reach {
            Reach::Node => {
                step.apply(memory.copy(place.herd), weights);
                if let Some(leader) = leader {
                    leader.stepped(memory);
                }
                Ok(())
            }
            // Herds meet whole.
            Reach::All | Reach::Fragment { .. } => self.meet(weights),
        }
    }

    fn take_missed(&mut self) -> Vec<u64> {
        self.step.missed.take()
    }
}

#[cfg(test)]
mod tests;
