//! Training where servers step with the gradients of a whole epoch ([`paceline_parallel::agree::sandblaster`]): every
//! epoch is one value of the same function of the weights, with its order, augmentation and masks those of the first.

use std::sync::Arc;

use paceline_comm::{CommError, Rank};
use paceline_data::loader::Portions;
use paceline_nn::schedule::LearningRate;
use paceline_parallel::agree::Gathered;

use super::{Reason, Trainer, not_a_number, settle};
use crate::config::Config;
use crate::error::TrainError;
use crate::portions::Stretch;
use crate::step::{Rules, Stepped, step};

/// Whether a run whose epochs have so many steps is never saved inside of one.
pub(super) fn check_length(config: &Config, steps: u64) -> Result<(), TrainError> {
    let steps = steps.max(1);
    let inside = |asked: Option<u64>| asked.filter(|asked| config.gathers() && !asked.is_multiple_of(steps));
    let Some(every) = inside(config.checkpoint_every) else { return Ok(()) };
    Err(TrainError::Refused(format!(
        "--checkpoint-every {every} would save inside of an epoch, which is one batch of --agree sandblaster and has \
         {steps} steps; leave it out, each epoch is saved"
    )))
}

impl Trainer {
    /// Trains to the end of the current epoch; once more where the gradients of a worker that was lost were missing. A
    /// reason says that the run ends, and what was computed of the epoch counts for nothing.
    ///
    /// Where a run begins inside of an epoch its first batch is the rest of it, and one that is shorter than an epoch
    /// (`--max-steps`) is one batch; no batch that others are compared with is cut short.
    pub(super) fn epoch_gathered(&mut self) -> Result<Option<Reason>, TrainError> {
        let (before, per_epoch) = (self.journal.position.clone(), self.journal.length.steps_per_epoch);
        let from = before.step % per_epoch;
        let steps = (per_epoch - from).min(self.journal.steps_total().saturating_sub(before.step));
        if from + steps < per_epoch && before.step > 0 {
            return Ok(Some(Reason::MaxSteps));
        }
        for _ in 0..self.replica.world() {
            let Some(stretch) = self.stretch_by(Stretch::of_claims, steps) else { return Ok(None) };
            let start = self.journal.clock.seconds();
            self.replica.begin_batch(before.step, stretch.portions());
            self.gather(&stretch, from)?;
            // All are here, and add up what each has computed: whoever had which portion.
            self.replica.vote(self.journal.votes());
            let tally = self.replica.total(self.journal.position.tally)?;
            let votes = self.replica.votes();
            settle(&mut self.replica, &mut self.journal)?;
            if stretch.end() == stretch.portions() && self.replica.gathered() != Gathered::Missing {
                // Of the epoch, of which this worker may have computed nothing.
                let epoch_s = self.journal.clock.seconds() - start;
                let position = &mut self.journal.position;
                (position.step, position.tally, position.epoch_s) = (before.step + steps, tally, epoch_s);
                return Ok(self.journal.ends_inside_epoch(votes));
            }
            self.journal.position.clone_from(&before);
            if stretch.end() < stretch.portions() {
                return Ok(Some(self.journal.limit(votes).unwrap_or(Reason::Interrupted)));
            }
        }
        let (rank, what) = (Rank::at(self.journal.rank), "workers were lost faster than a batch ends".into());
        Err(CommError::Failed { rank, phase: "gather", what }.into())
    }

    /// Computes the portions that fall to this worker, and adds up the gradients of those that count.
    fn gather(&mut self, stretch: &Arc<Stretch>, from: u64) -> Result<(), TrainError> {
        let Self { replica, train, journal, .. } = self;
        // Steps are the line search's affair.
        let (none, clock, progress) = (LearningRate::constant(0.0), journal.clock.clone(), journal.progress.clone());
        let rules =
            Rules { learning_rate: &none, length: journal.length, clock: &clock, progress: &progress, repeats: true };
        let (done, world) = (journal.position.step, replica.world());
        let portions: Arc<dyn Portions> = Arc::<Stretch>::clone(stretch);
        let mut epoch = train.portions(0, from as usize, portions);
        let mut closed = false;
        while let Some(stepped) = step(replica, &mut epoch, done, &rules)? {
            let Stepped { event, tally, portion, not_finite, .. } = stepped;
            // A point that is only tried may be one at which there is no loss.
            let is_tried = replica.tries_points();
            if let Some((batch, what)) = not_finite.filter(|_| !is_tried) {
                journal.record(event)?;
                drop(epoch);
                let batch = train.with_images(0, batch)?;
                return Err(not_a_number(replica, &batch, what, journal));
            }
            let number = portion.map_or(0, |portion| portion.number(world)) as u64;
            if stretch.claim(number.saturating_sub(from * world as u64))? {
                replica.count_portion();
                if tally.loss.is_finite() {
                    journal.after_portion(event, &tally)?;
                }
            }
            if !closed && journal.votes().end() {
                stretch.close();
                closed = true;
            }
        }
        Ok(())
    }
}
