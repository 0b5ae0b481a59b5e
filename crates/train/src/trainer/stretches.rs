//! Training and evaluation where portions of the data are handed out one by one ([`crate::portions`]).

use std::sync::Arc;

use paceline_comm::{CommError, Rank};
use paceline_data::dataset::SampleKind;
use paceline_data::loader::Portions;
use paceline_data::order::Shard;
use paceline_parallel::Agreement;
use paceline_system::event::Event;

use super::journal::Journal;
use super::{Reason, Trainer, not_a_number, settle};
use crate::error::TrainError;
use crate::evaluate::evaluate_on;
use crate::metrics::Tally;
use crate::portions::{Admission, Counter, Stretch};
use crate::step::{Rules, Stepped, step};

impl Trainer {
    /// Whether portions of evaluations are handed out to workers.
    pub(super) fn evaluates_portions(&self) -> bool {
        self.portions.0.is_some() && self.replica.world() > 1
    }

    /// Whether portions of the training data are, and none has a share of its own.
    pub(super) fn takes_portions(&self) -> bool {
        self.evaluates_portions() && self.journal.config.hands_out_portions()
    }

    /// The next stretch of the data: so many steps of a batch for all workers.
    fn next_stretch(&mut self, steps: u64) -> Option<Arc<Stretch>> {
        self.stretch_by(Stretch::new, steps)
    }

    pub(super) fn stretch_by(
        &mut self,
        make: fn(Arc<dyn Counter>, u64, u64, Shard) -> Stretch,
        steps: u64,
    ) -> Option<Arc<Stretch>> {
        let counter = self.portions.0.clone()?;
        self.stretches += 1;
        let world = self.journal.config.group();
        let place = Shard { rank: self.replica.rank() % world, world };
        Some(Arc::new(make(counter, self.stretches, steps * self.replica.world() as u64, place)))
    }

    /// Trains to the end of the current epoch, from meeting to meeting; a reason says that the run ends inside it.
    pub(super) fn epoch_in_portions(&mut self) -> Result<Option<Reason>, TrainError> {
        loop {
            let first = self.journal.position.step;
            let Some(stretch) = self.next_stretch(self.journal.steps_to_meeting()) else { return Ok(None) };
            self.train_on(&stretch)?;
            self.journal.position.step = first + stretch.end().div_ceil(self.replica.world() as u64);
            // All are here: they decide by the wishes of all.
            self.replica.vote(self.journal.votes());
            self.replica.total(Tally::default())?;
            let votes = self.replica.votes();
            if let Some(reason) = self.journal.ends_inside_epoch(votes) {
                return Ok(Some(reason));
            }
            if self.journal.position.step.is_multiple_of(self.journal.length.steps_per_epoch) {
                return Ok(None);
            }
            if self.journal.checkpoint_due(votes).is_some() {
                settle(&mut self.replica, &mut self.journal)?;
                self.journal.save(&mut self.replica, false)?;
            }
        }
    }

    /// Joins an agreement that goes on, of a worker that was lost and has come back: what it has missed comes with
    /// [`Trainer::rejoin`].
    ///
    /// # Errors
    /// When the engine has no memory for it.
    pub fn agree_again(&mut self, agreement: Box<dyn Agreement>) -> Result<(), TrainError> {
        self.replica.agree(agreement, &self.journal.clock)?;
        self.replica.report_to(&self.journal.progress);
        Ok(())
    }

    /// Takes part again in the stretch that is under way, with the present weights.
    ///
    /// # Errors
    /// When a server, or the way to it, has failed, or the run is where this one cannot be.
    pub fn rejoin(&mut self, admission: Admission) -> Result<(), TrainError> {
        let Admission { stretch, steps, position, .. } = admission;
        if position.samples != self.journal.position.samples || position.step >= self.journal.steps_total() {
            let (rank, what) = (Rank::at(self.journal.rank), "the run is not where this rank could go on".to_owned());
            return Err(CommError::Protocol { rank, peer: Rank(0).into(), phase: "rejoin", what }.into());
        }
        (self.stretches, self.rejoined_after, self.journal.position) = (stretch - 1, Some(steps), position);
        self.replica.rejoin(steps)
    }

    /// Computes the portions that fall to this worker.
    fn train_on(&mut self, stretch: &Arc<Stretch>) -> Result<(), TrainError> {
        let Self { replica, train, journal, rejoined_after, .. } = self;
        let (learning_rate, clock) = (journal.config.learning_rate.clone(), journal.clock.clone());
        let progress = journal.progress.clone();
        let rules = Rules {
            learning_rate: &learning_rate,
            length: journal.length,
            clock: &clock,
            progress: &progress,
            repeats: false,
        };
        let (per_epoch, done, began) =
            (journal.length.steps_per_epoch, journal.position.step, journal.position.clone());
        let portions: Arc<dyn Portions> = Arc::<Stretch>::clone(stretch);
        let mut epoch = train.portions(done / per_epoch, (done % per_epoch) as usize, portions);
        replica.count_from(rejoined_after.take().unwrap_or(done));
        let mut closed = false;
        while let Some(stepped) = step(replica, &mut epoch, done, &rules)? {
            let Stepped { event, tally, not_finite, .. } = stepped;
            if let Some((batch, what)) = not_finite {
                journal.record(event)?;
                drop(epoch);
                let batch = train.with_images(done / per_epoch, batch)?;
                return Err(not_a_number(replica, &batch, what, journal));
            }
            journal.after_portion(event, &tally)?;
            // Between two of its own steps the first worker lets in whoever has come back.
            if let Some(returned) = stretch.returning()
                && !closed
                && replica.readmit(returned)?
            {
                stretch.admit(returned, (journal.position.step, replica.steps_made()), &began);
            }
            if !closed && journal.votes().end() {
                stretch.close();
                closed = true;
            }
        }
        Ok(())
    }

    /// Evaluates the portions that fall to this worker; once more where one that took some was lost.
    pub(super) fn evaluate_in_portions(&mut self) -> Result<Option<Tally>, TrainError> {
        let kind = self.val.dataset().info().kind;
        let each = if let SampleKind::Tokens { sequence } = kind { sequence } else { 1 };
        let rows = (self.val.dataset().len() * each) as u64;
        for _ in 0..self.replica.world() {
            let stop = self.journal.stop.clone();
            let mirrored = self.journal.config.evaluate_mirrored;
            let Some(stretch) = self.next_stretch(self.val.steps() as u64) else { break };
            let epoch = self.val.portions(0, 0, stretch);
            let tally = evaluate_on(&mut self.replica, epoch, mirrored, |_, _| !stop.requested())?;
            self.replica.vote(self.journal.votes());
            let tally = self.replica.total(tally)?;
            if self.replica.votes().interrupted > 0 {
                return Ok(None);
            }
            // Larger counts are not added up exactly.
            if tally.rows == rows || rows >= 1 << 24 {
                return Ok(Some(tally));
            }
        }
        let (rank, what) = (Rank::at(self.journal.rank), "workers were lost faster than an evaluation ends".into());
        Err(CommError::Failed { rank, phase: "evaluate", what }.into())
    }
}

impl Journal {
    /// As [`Journal::after_step`], of a portion of a step; how far the run is follows where all meet.
    pub fn after_portion(&mut self, event: Event, tally: &Tally) -> Result<(), TrainError> {
        let (before, step) = (self.position.step, if let Event::Step { step, .. } = event { step } else { 0 });
        self.after_step(event, tally)?;
        self.position.step = before.max(step);
        Ok(())
    }

    /// Steps until all workers meet: at a checkpoint, the end of an epoch or of the run.
    pub fn steps_to_meeting(&self) -> u64 {
        let step = self.position.step;
        let until = |every: u64| every - step % every;
        let epoch = until(self.length.steps_per_epoch.max(1));
        let checkpoint = self.config.checkpoint_every.map_or(u64::MAX, |every| until(every.max(1)));
        epoch.min(checkpoint).min(self.steps_total().saturating_sub(step))
    }
}
