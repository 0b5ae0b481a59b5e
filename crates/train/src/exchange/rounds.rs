//! Replicas that make their own steps: where a round ends their weights become the same, or they exchange with a centre beside their steps;
//! before anybody looks at them all is the same.

use paceline_parallel::agree::{self, Agreement, Gathered, Reach, Returned, Rounds, StepReport, Steps};
use paceline_system::progress::Message;

use super::{Exchange, report};
use crate::engine::{Engine, Halt, Weights};
use crate::error::TrainError;
use crate::metrics::Tally;

/// What steps of its own have told apart from the other replicas'.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Apart {
    weights: bool,
    optimizer: bool,
}

impl Exchange {
    /// Whether replicas make steps of their own, so that what each has is another's only where they meet.
    pub fn steps_apart(&self) -> bool {
        match self.agreement.protocol().steps {
            Steps::Local { rounds } => rounds.is_some(),
            Steps::Center { .. } | Steps::Groups { .. } | Steps::Gathered => true,
            Steps::Sums | Steps::Chunks | Steps::Servers => false,
        }
    }

    fn has_center(&self) -> bool {
        matches!(self.agreement.protocol().steps, Steps::Center { .. } | Steps::Groups { .. } | Steps::Gathered)
    }

    /// Whether servers step with the gradients of whole batches of portions.
    pub fn gathers(&self) -> bool {
        self.agreement.protocol().steps == Steps::Gathered
    }

    /// Running statistics belong to the weights: those that were taken at a point that is given up are given up too.
    pub(super) fn keep_statistics(&mut self, states: &mut [f32]) {
        if !self.gathers() {
            return;
        }
        if self.agreement.gathered() == Gathered::Taken {
            self.taken_states.copy_from_slice(states);
        } else {
            states.copy_from_slice(&self.taken_states);
        }
    }

    /// Whether that was since all had the same.
    pub(super) fn has_stepped_apart(&self) -> bool {
        self.apart.optimizer
    }

    /// From here on steps of replicas' own tell them apart: also this one that may make none of them.
    pub fn step_apart(&mut self) {
        let steps = self.steps_apart();
        self.apart = Apart { weights: steps, optimizer: steps };
    }

    /// So many steps of the run were made when all replicas had the same weights last.
    pub fn count_from(&mut self, steps: u64) {
        self.made = steps;
    }

    /// Steps of the run that were made when all had the same weights last, and this replica's own since.
    pub fn steps_made(&self) -> u64 {
        self.made
    }

    /// Tells servers that a replica takes part again, and what running statistics it begins with. Whether this is a point at
    /// which it can.
    ///
    /// # Errors
    /// When a server, or the way to it, has failed.
    pub fn readmit(&mut self, engine: &mut Engine, returned: Returned) -> Result<bool, TrainError> {
        engine.fetch()?;
        let states = &engine.weights().store.states;
        Ok(self.wait_for(Message::Opening, |agreement| agreement.readmit(returned, states))?)
    }

    /// Takes over what this replica has missed since it was lost, as the protocol lists it for a joiner.
    ///
    /// # Errors
    /// When a server, or the way to it, has failed.
    pub fn rejoin(&mut self, engine: &mut Engine, steps: u64) -> Result<(), TrainError> {
        let store = &mut engine.weights_mut().store;
        let (states, weights) = (&mut store.states, &mut store.parameters);
        self.wait_for(Message::Opening, |agreement| agreement.come_back(steps, states, weights))?;
        engine.load();
        self.count_from(steps);
        Ok(())
    }

    /// Replaces numbers by their sum over all replicas.
    ///
    /// # Errors
    /// When another replica, or the way to it, has failed.
    pub fn sum(&mut self, numbers: &mut [f32]) -> Result<(), TrainError> {
        Ok(self.wait_for(Message::Report, |agreement| agreement.sum(numbers))?)
    }

    /// Begins what is exchanged with a centre while the step is made.
    pub(super) fn begin_exchange(&mut self, engine: &mut Engine, ahead: f32) -> Result<(), TrainError> {
        if !self.has_center() {
            return Ok(());
        }
        self.votes = self.agreement.tell_wishes(self.votes);
        let step = self.made;
        if !self.agreement.exchanges_before(step) {
            return Ok(());
        }
        engine.fetch()?;
        let Weights { store, optimizer, .. } = engine.weights_mut();
        let velocity = optimizer.first().filter(|_| ahead != 0.0).map(|velocity| (&velocity[..], ahead));
        let begin = |agreement: &mut dyn Agreement| agreement.begin_exchange(step, &mut store.parameters, velocity);
        if self.wait_for(Message::Weights, begin)? {
            engine.load();
        }
        Ok(())
    }

    /// Ends it.
    fn end_exchange(&mut self, engine: &mut Engine, step: u64) -> Result<(), TrainError> {
        if !self.agreement.exchanges_after(step) {
            return Ok(());
        }
        engine.fetch()?;
        let weights = &mut engine.weights_mut().store.parameters;
        if self.wait_for(Message::Weights, |agreement| agreement.end_exchange(step, weights))? {
            engine.load();
        }
        Ok(())
    }

    /// The step is computed.
    pub fn end(&mut self) {
        self.made += 1;
        let settled = std::mem::take(&mut self.settled);
        self.pending = (self.settles() && !settled && !self.gathers()).then_some(self.moment);
    }

    /// When replicas that make their own steps exchange weights.
    pub(super) fn rounds(&self) -> Option<Rounds> {
        let Steps::Local { rounds } = self.agreement.protocol().steps else { return None };
        rounds
    }

    /// Who exchanges weights after so many steps.
    fn round_ends(&self, steps_done: u64) -> Option<Reach> {
        self.rounds().and_then(|rounds| rounds.after(steps_done))
    }

    /// Exchanges weights, where replicas make their own steps and a round ends, or a step with an exchange beside it.
    ///
    /// # Errors
    /// When another replica, or the way to it, or a device has failed.
    pub fn exchange_weights(&mut self, engine: &mut Engine, steps_done: u64) -> Result<(), Halt> {
        self.step_apart();
        if self.has_center() {
            let exchanges = self.agreement.exchanges_after(self.made) || self.agreement.exchanges_before(self.made + 1);
            if self.settles() && exchanges {
                // What leaves, or changes, is the weights behind this step.
                self.pending = Some(self.moment);
                engine.settle(self)?;
                self.settled = true;
            }
            return Ok(self.end_exchange(engine, self.made)?);
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
            // Those who stand elsewhere in the epoch hear of a wish to stop where all have come to.
            if self.has_center() {
                self.votes = self.agreement.tell_wishes(self.votes);
            }
        }
        // Where servers step, no replica's optimizer does.
        if std::mem::take(&mut self.apart.optimizer) && !self.gathers() {
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
        if self.has_center() {
            let own = report(&tally, self.votes, 0.0);
            let own = match self.settles() {
                // Of its group.
                true => self.wait_for(Message::Report, |agreement| agreement.total())?,
                false => own,
            };
            let votes = self.agreement.tell_wishes(own.votes);
            return Ok(self.take_total(StepReport { votes, ..own }));
        }
        let own = self.sum_siblings(report(&tally, self.votes, 0.0))?;
        let all = match self.round_ends(self.moment.step + 1) {
            Some(Reach::All | Reach::Fragment { .. }) => {
                self.wait_for(Message::Report, |agreement| agree::sum_reports(agreement, own))?
            }
            _ => StepReport::default(),
        };
        Ok(self.take_total(StepReport { votes: all.votes, ..own }))
    }
}
