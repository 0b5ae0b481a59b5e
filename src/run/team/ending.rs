//! How a run of several ends: together, or by a failure that one of them tells of.

use std::sync::Arc;

use super::Team;
use crate::cluster::speaker::speaker;
use crate::cluster::{ClusterError, Verdict};
use crate::comm::Rank;
use crate::data::DataError;
use crate::failure::Failure;
use crate::system::shell::resume_line;
use crate::train::{TrainError, Trainer};

impl Team {
    /// Tells everybody of an error, and hears whose it is.
    pub fn guard<T>(&self, result: Result<T, TrainError>) -> Result<T, Failure> {
        self.judge(result).inspect_err(|_| self.let_others_speak())
    }

    /// Where a launcher kills all processes as soon as one has failed, those that say nothing wait for the one that does.
    fn let_others_speak(&self) {
        match self.member.rank {
            _ if !self.ends_with_the_first => {}
            Rank(0) => self.control.stay_open(),
            _ if self.speaks_at_the_end() => {}
            _ => self.control.outlast_rank_0(self.deadlines.farewell),
        }
    }

    fn judge<T>(&self, result: Result<T, TrainError>) -> Result<T, Failure> {
        let error = match result {
            Ok(value) => return Ok(value),
            Err(error) => error,
        };
        let suspect = if let TrainError::Comm(error) = &error { error.peer() } else { None };
        let in_vain = error.is_in_vain();
        let verdict = self.control.give_up(&error.to_string(), suspect, in_vain);
        let failure = match (&error, &verdict) {
            (error, Some(verdict)) if shows_another(error) => Failure::failed(verdict).in_vain(verdict.is_in_vain()),
            _ => error.into(),
        };
        let rank = self.shares_output.then_some(self.member.rank);
        let failure = failure.for_all(self.speaks_at_the_end());
        Err(if is_told_elsewhere(verdict.as_ref(), rank) { failure.silently() } else { failure })
    }

    /// Tells everybody why a run fails, and hears whose fault it is. Where another rank was lost, rank 0 saves the last whole step, or
    /// rank 1 if rank 0 is the one.
    pub fn fail(&self, error: TrainError, trainer: &mut Trainer) -> Failure {
        let failure = self.save_after(error, trainer);
        self.let_others_speak();
        failure
    }

    fn save_after(&self, error: TrainError, trainer: &mut Trainer) -> Failure {
        let of_another = shows_another(&error);
        let failure = match self.judge(Err::<(), _>(error)) {
            Ok(()) => return Failure::failed("the run has failed"),
            Err(failure) => failure,
        };
        let Some(verdict) = self.control.verdict().filter(|verdict| verdict.rank != self.member.rank.index()) else {
            return failure;
        };
        let lowest = usize::from(verdict.rank == 0);
        if !of_another || self.member.rank.index() != lowest {
            return failure;
        }
        let line = resume_line(trainer.run_dir().path());
        failure.and(&match trainer.save_after_loss() {
            Ok(Ok(step)) => format!("; step {step} is saved; to go on from there, type: {line}"),
            Ok(Err(why)) => {
                let last = trainer.last_checkpoint();
                format!("; nothing was saved, because {why}. {last}; to go on, type: {line}")
            }
            Err(error) => format!("; {error}"),
        })
    }

    /// Whether this is the process that speaks for a run that has failed: the first of those that are left.
    pub fn speaks_at_the_end(&self) -> bool {
        self.member.rank == self.control.verdict().map_or(Rank(0), |verdict| speaker(&verdict))
    }

    /// Ends together with the others.
    pub fn finish(self) -> Result<(), Failure> {
        // Only whoever tells of the folder borrows it, and that is long over.
        let control = Arc::into_inner(self.control).ok_or_else(|| Failure::failed("the run is still being told of"))?;
        let rank = self.shares_output.then_some(self.member.rank);
        control.finish(self.deadlines.farewell).map_err(|error| once(error, rank))
    }
}

/// Whether it shows that another rank has failed.
fn shows_another(error: &TrainError) -> bool {
    matches!(error, TrainError::Comm(_) | TrainError::Data(DataError::NotTold { .. }))
}

/// Whether another rank tells the user of a verdict; `rank` is this one, where all share their output.
fn is_told_elsewhere(verdict: Option<&Verdict>, rank: Option<Rank>) -> bool {
    verdict.zip(rank).is_some_and(|(verdict, rank)| speaker(verdict) != rank)
}

/// A failure to meet or to part, told by one rank.
pub(super) fn once(error: ClusterError, rank: Option<Rank>) -> Failure {
    let elsewhere = matches!(&error, ClusterError::Ended(verdict) if is_told_elsewhere(Some(verdict), rank));
    if elsewhere { Failure::from(error).silently() } else { error.into() }
}
