//! What is saved when another rank was lost: the last whole step, by the lowest rank that is left.

use super::Trainer;
use crate::error::TrainError;

impl Trainer {
    /// Saves the last whole step after another rank was lost; which step that was, or why nothing was saved, in words: the step that
    /// failed has changed some weights already, or the run is not kept here. To be called by one rank that is left.
    ///
    /// Running statistics are this rank's own: the others cannot be asked any more.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn save_after_loss(&mut self) -> Result<Result<u64, &'static str>, TrainError> {
        // A run that goes on by itself ends with the bits of one that lost nobody.
        if self.journal.starts_again() && self.replica.world() > 1 && self.replica.has_own_statistics() {
            return Ok(Err("the running statistics of the others are lost with it"));
        }
        if self.replica.whole.is_some() {
            return Ok(Err(match self.replica.stages() {
                1 => "the weights of its part are lost with it",
                _ => "the weights of its stage are lost with it",
            }));
        }
        // The update of the last step may not have come back yet; then the one before is the last whole one.
        for position in [Some(self.journal.position.clone()), self.journal.previous.clone()].into_iter().flatten() {
            if self.replica.rescue(position.step) {
                let step = position.step;
                self.journal.position = position;
                return Ok(self.journal.save_after_loss(&mut self.replica)?.map(|()| step));
            }
        }
        Ok(Err(match () {
            () if !self.replica.engine.answers_without_others() => "the weights are on the GPU that waits for it",
            () if self.replica.engine.gpu().is_some() => "the weights are on a GPU, in the middle of a step",
            () if self.replica.has_shard() => "its part of the optimizer's state is lost with it (--shard optimizer)",
            () if self.config().agree.recipe().has_servers()
                && self.config().gradients_leave()
                && self.config().group() == 1 =>
            {
                "servers have the optimizer's state"
            }
            () if !self.config().steps_together() => "workers have weights of their own between two exchanges",
            () => "the step under way has changed some weights",
        }))
    }

    /// A sentence on the last good checkpoint.
    pub fn last_checkpoint(&self) -> String {
        self.journal.checkpoints.survivor()
    }
}
