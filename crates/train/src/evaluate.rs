//! Evaluation: the validation set, once, in evaluation mode.

use paceline_data::loader::Loader;

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
    mut progress: impl FnMut(usize, usize) -> bool,
) -> Result<Tally, TrainError> {
    let mut tally = Tally::default();
    let mut epoch = loader.epoch(0, 0);
    let total = epoch.end();
    while let Some(batch) = epoch.next() {
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
        if !progress(epoch.step(), total) {
            break;
        }
    }
    Ok(tally)
}
