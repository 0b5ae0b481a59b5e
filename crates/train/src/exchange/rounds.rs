//! Replicas that make their own steps: where a round ends their weights become the same, and before anybody looks at them the rest too.

use paceline_parallel::agree::{self, Reach, Rounds, StepReport, Steps};
use paceline_system::progress::Message;

use super::{Exchange, report};
use crate::engine::{Engine, Weights};
use crate::error::TrainError;
use crate::metrics::Tally;

/// What steps of its own have told apart from the other replicas'.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Apart {
    weights: bool,
    optimizer: bool,
}

impl Exchange {
    /// When replicas that make their own steps exchange weights.
    pub(super) fn rounds(&self) -> Option<Rounds> {
        let Steps::Local { rounds } = self.agreement.protocol().steps else { return None };
        rounds
    }

    /// Who exchanges weights after so many steps.
    fn round_ends(&self, steps_done: u64) -> Option<Reach> {
        self.rounds().and_then(|rounds| rounds.after(steps_done))
    }

    /// Exchanges weights, where replicas make their own steps and a round ends.
    ///
    /// # Errors
    /// When another replica, or the way to it, or a device has failed.
    pub fn exchange_weights(&mut self, engine: &mut Engine, steps_done: u64) -> Result<(), TrainError> {
        if self.rounds().is_some() {
            self.apart = Apart { weights: true, optimizer: true };
        }
        let Some(reach) = self.round_ends(steps_done) else { return Ok(()) };
        engine.fetch()?;
        self.end_round(engine.weights_mut(), reach)?;
        engine.load();
        Ok(())
    }

    /// All go on from what the agreement makes of their weights.
    fn end_round(&mut self, weights: &mut Weights, reach: Reach) -> Result<(), TrainError> {
        let Weights { store, kept, .. } = weights;
        self.wait_for(Message::Weights, |agreement| agreement.exchange_weights(reach, &mut store.parameters, kept))?;
        self.apart.weights &= reach != Reach::All;
        Ok(())
    }

    /// Ends a round wherever it is, and gives all replicas the mean of their optimizers' state: what is saved is what
    /// all go on with.
    pub(super) fn come_together(&mut self, weights: &mut Weights) -> Result<(), TrainError> {
        if self.apart.weights {
            self.end_round(weights, Reach::All)?;
        }
        if std::mem::take(&mut self.apart.optimizer) {
            let share = 1.0 / self.workers() as f32;
            for buffer in &mut weights.optimizer {
                self.wait_for(Message::Optimizer, |agreement| agreement.sum(buffer))?;
                buffer.iter_mut().for_each(|number| *number *= share);
            }
        }
        Ok(())
    }

    /// The tally of a step that this replica has made by itself, and what others wish where all hear of it.
    pub(super) fn total_of_own(&mut self, tally: Tally) -> Result<Tally, TrainError> {
        let own = self.sum_siblings(report(&tally, self.votes, 0.0))?;
        let all = match self.rounds().is_some_and(|rounds| rounds.votes_after(self.moment.step + 1)) {
            true => self.wait_for(Message::Report, |agreement| agree::sum_reports(agreement, own))?,
            false => StepReport::default(),
        };
        Ok(self.take_total(StepReport { votes: all.votes, ..own }))
    }
}
