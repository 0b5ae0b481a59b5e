//! What is saved when another rank was lost: the last whole step, by the lowest rank that is left.

use super::Trainer;
use crate::error::TrainError;

impl Trainer {
    /// Saves the last whole step after another rank was lost, by whoever is the lowest rank left; which step that was. None if the
    /// step that failed had changed some weights already, or the run's folder is not here or is another's.
    ///
    /// Running statistics are this rank's own: the others cannot be asked any more.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn save_after_loss(&mut self) -> Result<Option<u64>, TrainError> {
        // The update of the last step may not have come back yet; then the one before is the last whole one.
        for position in [Some(self.journal.position.clone()), self.journal.previous.clone()].into_iter().flatten() {
            if self.replica.rescue(position.step) {
                let step = position.step;
                self.journal.position = position;
                return Ok(self.journal.save_after_loss(&mut self.replica)?.then_some(step));
            }
        }
        Ok(None)
    }

    /// A sentence on the last good checkpoint.
    pub fn last_checkpoint(&self) -> String {
        self.journal.checkpoints.survivor()
    }
}
