//! The journey of a mini-batch: one optimizer update, from the data to the weights.
//!
//! Read this first. The calls stand in the order of the folders, and each phase has the name that the event
//! log, the report's timeline and the tracing spans use.

use paceline_data::batch::Batch;
use paceline_data::loader::Epoch;
use paceline_data::order::Portion;
use paceline_nn::optim::Moment;
use paceline_nn::schedule::{LearningRate, RunLength};
use paceline_system::clock::Clock;
use paceline_system::event::Event;
use paceline_system::phase::Phase;
use paceline_system::progress::Progress;

use crate::error::TrainError;
use crate::metrics::Tally;
use crate::phases::Phases;
use crate::replica::{NotFinite, Replica, phase_of};

/// What a step depends on besides the replica and the data.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    /// The learning rate over time.
    pub learning_rate: &'a LearningRate,
    /// The run's length, which the learning rate depends on.
    pub length: RunLength,
    /// For the phases.
    pub clock: &'a Clock,
    /// Says which one it is.
    pub progress: &'a Progress,
    /// Whether every epoch is the same function of the weights, so that its steps draw as those of the first do.
    pub repeats: bool,
}

/// What a step did.
#[derive(Debug)]
pub struct Stepped {
    /// For the log.
    pub event: Event,
    /// For the epoch's means.
    pub tally: Tally,
    /// Samples that this replica has computed.
    pub own: usize,
    /// Which portion of the epoch they are, where portions are handed out.
    pub portion: Option<Portion>,
    /// Set if the loss or a gradient was not finite: the run cannot go on from the weights as they are.
    pub not_finite: Option<(Batch, NotFinite)>,
}

/// Makes update number `step` (from 0) of the run with the next batch of `epoch`, or returns none at its end.
///
/// # Errors
/// When the data cannot be had, or another rank, the way to it, or a device has failed.
pub fn step(
    replica: &mut Replica,
    epoch: &mut Epoch<'_>,
    step: u64,
    rules: &Rules<'_>,
) -> Result<Option<Stepped>, TrainError> {
    let mut phases = Phases::watched(rules.clock, rules.progress, step);

    // data: the loader has decoded and augmented ahead; usually the batch is waiting, on a GPU even there.
    let Some(batch) = phases.time(Phase::Data, || epoch.next()).transpose()? else { return Ok(None) };

    // Where portions are handed out, they say which step they are of.
    let per_epoch = rules.length.steps_per_epoch.max(1);
    let step = batch.portion.map_or(step, |portion| step / per_epoch * per_epoch + portion.step as u64);

    let cores = replica.engine.bound();
    let _bound = cores.as_ref().and_then(|cpu| cpu.pool().enter());
    let learning_rate = rules.learning_rate.rate(step, rules.length);
    // Where workers exchange with a centre beside their steps, that begins.
    let drawn_at = if rules.repeats { step % per_epoch } else { step };
    replica.begin_step(Moment { step: drawn_at, learning_rate })?;
    let mut passes = || {
        // parallel: forward and backward passes in the order of a list. A model that is not cut is a pipeline of one
        // stage.
        let schedule = replica.schedule(&batch)?;
        for &task in schedule.tasks(replica.stage_number()) {
            // nn, tensor -> parallel -> comm: the planned graph. Late sums of the step before are applied just before
            // they are read; final buckets leave, and what came back is applied.
            replica.timed(phase_of(task), &mut phases, |replica| replica.pass(&batch, &schedule, task))?;
        }
        // The next batch travels to the device meanwhile.
        if replica.engine.prefetches() {
            replica.engine.prefetch(epoch.peek());
        }
        replica.timed(Phase::Update, &mut phases, Replica::close)
    };
    let closed = passes();
    let output = replica.end_step(closed)?;

    let (samples, own) = (replica.samples(&batch), batch.size);
    let portion = batch.portion;
    let not_finite = match output.updated {
        Ok(()) => {
            epoch.recycle(batch);
            None
        }
        Err(what) => Some((batch, what)),
    };
    let (seconds, phases) = phases.finish();
    let event = Event::Step {
        step: step + 1,
        epoch: step / per_epoch,
        loss: output.tally.mean_loss(),
        accuracy: output.tally.accuracy(),
        learning_rate: f64::from(learning_rate),
        samples,
        portion: portion.map(|_| own as u64),
        seconds,
        phases,
    };
    Ok(Some(Stepped { event, tally: output.tally, own, portion, not_finite }))
}
