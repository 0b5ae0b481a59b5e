//! Evaluation: the validation set, once, in evaluation mode.

use paceline_data::loader::{Epoch, Loader};

use crate::error::TrainError;
use crate::metrics::Tally;
use crate::replica::Replica;

/// Runs the whole loader through the model. If `mirrored`, the answer for an image is the mean of the logits for it and for its mirror
/// image. `progress(done, total)` is called after each batch and says whether to go on.
///
/// # Errors
/// When the data cannot be had.
pub fn evaluate(
    replica: &mut Replica,
    loader: &mut Loader,
    mirrored: bool,
    progress: impl FnMut(usize, usize) -> bool,
) -> Result<Tally, TrainError> {
    evaluate_on(replica, loader.epoch(0, 0), mirrored, progress)
}

/// As [`evaluate`], on the batches of an epoch.
///
/// # Errors
/// As [`evaluate`].
pub fn evaluate_on(
    replica: &mut Replica,
    mut epoch: Epoch<'_>,
    mirrored: bool,
    mut progress: impl FnMut(usize, usize) -> bool,
) -> Result<Tally, TrainError> {
    let mut tally = Tally::default();
    let total = epoch.end();
    let mut goes_on = true;
    while let Some(batch) = epoch.next() {
        // In a pipeline, the first stage decides whether there is one more, and the others follow it.
        if !replica.evaluates_on(goes_on && batch.is_ok())? {
            return batch.map(|_| tally).map_err(TrainError::from);
        }
        let mut batch = batch?;
        let (mut logits, mut found) = replica.evaluate(&batch)?;
        if mirrored {
            epoch.mirror(&mut batch);
            logits.iter_mut().zip(replica.evaluate(&batch)?.0).for_each(|(a, b)| *a = (*a + b) / 2.0);
            found = Tally::default();
            found.count(&logits, &batch.targets);
        }
        tally.merge(&found);
        epoch.recycle(batch);
        goes_on = progress(epoch.step(), total);
    }
    Ok(tally)
}
