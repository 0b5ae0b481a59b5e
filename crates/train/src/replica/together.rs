//! A replica among others: how it comes to train with them, and what all of them tell each other beside their steps.

use paceline_parallel::Agreement;
use paceline_parallel::agree::{Gathered, Returned, RunIdentity, Steps, Votes};
use paceline_system::clock::Clock;
use paceline_system::memory;
use paceline_system::progress::Progress;

use super::Replica;
use crate::engine::Weights;
use crate::error::TrainError;
use crate::exchange::Exchange;

impl Replica {
    /// Trains together with others from now on.
    ///
    /// # Errors
    /// When the engine has no memory for it.
    pub fn agree(&mut self, mut agreement: Box<dyn Agreement>, clock: &Clock) -> Result<(), TrainError> {
        let in_chunks = agreement.protocol().steps == Steps::Chunks;
        assert_eq!(in_chunks, self.has_shard(), "who steps chunks keeps their state, and nobody else");
        self.engine.share_weights(&mut *agreement);
        self.keep(agreement.protocol().buffers())?;
        if agreement.protocol().gradients_leave() {
            self.engine.stage_gradients()?;
        }
        let siblings = self.exchange.take_siblings();
        self.exchange = Exchange::new(agreement, self.options.hosted, clock);
        siblings.into_iter().for_each(|links| self.exchange.join_siblings(links));
        Ok(())
    }

    /// Has so many buffers for an agreement, those that a checkpoint brought and zeros behind them.
    fn keep(&mut self, buffers: usize) -> Result<(), TrainError> {
        let Weights { store, kept, .. } = self.engine.weights_mut();
        kept.truncate(buffers);
        while kept.len() < buffers {
            kept.push(memory::zeros(store.parameters.len(), "what the agreement keeps")?);
        }
        Ok(())
    }

    /// Says from now on what it waits for when it waits for others.
    pub fn report_to(&mut self, progress: &Progress) {
        self.exchange.report_to(progress);
    }

    /// Takes over the weights, states and optimizer of rank 0, after so many steps.
    ///
    /// # Errors
    /// When another replica, or the way to it, has failed, or begins with another step, other data or another
    /// model.
    pub fn begin_together(&mut self, step: u64, identity: RunIdentity) -> Result<(), TrainError> {
        self.exchange.open(&mut self.engine, identity)?;
        self.exchange.count_from(step);
        self.begin_boundary(step);
        Ok(())
    }

    /// So many steps of the run were made, and from here on this replica counts its own, which may be none; then all meet.
    pub fn count_from(&mut self, steps: u64) {
        self.exchange.count_from(steps);
        self.exchange.step_apart();
    }

    /// Steps of the run that this replica has made by its own count.
    pub fn steps_made(&self) -> u64 {
        self.exchange.steps_made()
    }

    /// The first replica, between two of its steps: servers take one that has come back for one of the others from here on.
    /// Whether they do.
    ///
    /// # Errors
    /// When a server, or the way to it, has failed.
    pub fn readmit(&mut self, returned: Returned) -> Result<bool, TrainError> {
        self.exchange.readmit(&mut self.engine, returned)
    }

    /// Takes over the present weights and states, after the first replica has made so many steps.
    ///
    /// # Errors
    /// When a server, or the way to it, has failed.
    pub fn rejoin(&mut self, steps: u64) -> Result<(), TrainError> {
        self.exchange.rejoin(&mut self.engine, steps)?;
        self.begin_boundary(steps);
        Ok(())
    }

    /// Whether servers step with the gradients of whole batches of portions.
    pub fn gathers(&self) -> bool {
        self.exchange.gathers()
    }

    /// A batch of so many portions begins, after so many steps of the run: from here on the weights stand still, at the
    /// point that is tried.
    pub fn begin_batch(&mut self, steps: u64, portions: u64) {
        self.count_from(steps);
        self.exchange.agreement().begin_batch(portions);
    }

    /// The gradients of the portion that was computed last count.
    pub fn count_portion(&mut self) {
        self.exchange.agreement().count_portion();
    }

    /// What became of the last batch.
    pub fn gathered(&mut self) -> Gathered {
        self.exchange.agreement().gathered()
    }

    /// Whether the point at which gradients are computed may be given up.
    pub fn tries_points(&mut self) -> bool {
        self.exchange.agreement().tries_points()
    }

    /// How many replicas train together.
    pub fn world(&self) -> usize {
        self.exchange.workers()
    }

    /// Whether nobody else takes part in training.
    pub fn is_alone(&self) -> bool {
        self.exchange.is_alone()
    }

    /// How many of its steps had missed no update of another replica, one, two, … since this was last asked.
    pub fn take_missed(&mut self) -> Vec<u64> {
        self.exchange.agreement().take_missed()
    }

    /// This replica's wishes, and after a step everybody's.
    pub fn votes(&self) -> Votes {
        self.exchange.votes
    }

    /// Has these wishes from now on.
    pub fn vote(&mut self, votes: Votes) {
        self.exchange.votes = votes;
    }

    /// This replica's number among all.
    pub fn rank(&self) -> usize {
        self.exchange.rank()
    }

    /// Replaces numbers by their sum over all replicas, which come here at the same step.
    ///
    /// # Errors
    /// When another replica, or the way to it, has failed.
    pub fn sum(&mut self, numbers: &mut [f32]) -> Result<(), TrainError> {
        self.exchange.sum(numbers)
    }
}
