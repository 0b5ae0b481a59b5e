//! Evaluation: the validation set, once, in evaluation mode.

use paceline_data::loader::Loader;

use crate::error::TrainError;
use crate::metrics::Tally;
use crate::replica::Replica;

/// Runs the whole loader through the model. `progress(done, total)` is called after each batch and says whether to go on.
///
/// # Errors
/// When the data cannot be had.
pub fn evaluate(
    replica: &mut Replica,
    loader: &mut Loader,
    mut progress: impl FnMut(usize, usize) -> bool,
) -> Result<Tally, TrainError> {
    let mut tally = Tally::default();
    let mut epoch = loader.epoch(0, 0);
    let total = epoch.end();
    while let Some(batch) = epoch.next() {
        let batch = batch?;
        tally.merge(&replica.evaluate(&batch)?.1);
        epoch.recycle(batch);
        if !progress(epoch.step(), total) {
            break;
        }
    }
    Ok(tally)
}
