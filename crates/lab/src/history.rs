//! One rank's run as it counts: events in order, with the work that a crash threw away taken out.
//!
//! A resumed process continues the log of the one before. Where it does a step again, the later process wins, and with
//! that step everything that followed it in the earlier process goes: those weights no longer exist. A process that
//! ended before its first step replaces nothing.
//!
//! A step is kept in about a hundred bytes, so a million of them fit where their parsed lines would not.

use paceline_system::event::{Event, Line};
use paceline_system::host::Host;
use paceline_system::phase::Phase;

use crate::gpu::GpuTotals;
use crate::waiting::{Lateness, Served};

/// Different warnings that are kept; the rest is counted.
pub(crate) const WARNINGS_MAX: usize = 200;

/// One optimizer update.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub step: u64,
    pub loss: f64,
    pub accuracy: f64,
    pub learning_rate: f64,
    pub samples: u64,
    pub seconds: f64,
    /// By the number of the phase.
    pub phases: [f32; Phase::ALL.len()],
}

/// One pass over the data.
#[derive(Clone, Debug)]
pub(crate) struct Epoch {
    pub epoch: u64,
    pub step: u64,
    pub train_loss: f64,
    pub train_accuracy: f64,
    pub val_loss: Option<f64>,
    pub val_top1: Option<f64>,
    pub val_top5: Option<f64>,
    pub seconds: f64,
    pub samples_per_s: f64,
    pub data_wait_s: f64,
}

impl Epoch {
    /// What its evaluation found.
    pub fn evaluation(&self) -> Evaluation {
        let Self { epoch, step, val_loss, val_top1, val_top5, .. } = *self;
        Evaluation { epoch, step, loss: val_loss, top1: val_top1, top5: val_top5 }
    }
}

/// An evaluation, at an epoch's end or where a limit ended the run.
#[derive(Clone, Debug)]
pub(crate) struct Evaluation {
    pub epoch: u64,
    pub step: u64,
    pub loss: Option<f64>,
    pub top1: Option<f64>,
    pub top5: Option<f64>,
}

/// How a process began.
#[derive(Clone, Debug)]
pub(crate) struct Start {
    pub version: String,
    pub unix_s: u64,
    pub model: String,
    pub data: String,
    pub parameters: u64,
    pub resumed_step: u64,
    pub steps_total: u64,
    pub host: Host,
    pub config: String,
}

/// How a process ended.
#[derive(Clone, Debug)]
pub(crate) struct Finish {
    pub step: u64,
    pub reason: String,
    pub error: Option<String>,
    pub seconds: f64,
    pub peak_memory_bytes: u64,
}

/// One process's part of the run: from its start to its end, or to the last thing it said.
#[derive(Clone, Debug, Default)]
pub(crate) struct Process {
    pub start: Option<Start>,
    pub finish: Option<Finish>,
    pub last_time_s: f64,
    pub last_step: u64,
}

impl Process {
    /// How long it ran, as far as the log knows.
    pub fn seconds(&self) -> f64 {
        self.finish.as_ref().map_or(self.last_time_s, |finish| finish.seconds)
    }
}

/// A checkpoint that was written.
#[derive(Clone, Debug)]
pub(crate) struct Checkpoint {
    pub step: u64,
    pub path: String,
    pub best: bool,
    pub seconds: f64,
}

/// A warning, and how often it was given.
#[derive(Clone, Debug)]
pub(crate) struct Warning {
    pub time_s: f64,
    pub message: String,
    pub count: usize,
}

/// One rank's run.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    pub rank: u32,
    pub processes: Vec<Process>,
    pub steps: Vec<Step>,
    pub epochs: Vec<Epoch>,
    /// Those between the ends of epochs.
    pub evaluations: Vec<Evaluation>,
    /// How often the launcher started the run again.
    pub restarts: u64,
    /// How the stages or parts of the model compute together, in the latest process; none if that has all of the model.
    pub split: Option<Event>,
    pub checkpoints: Vec<Checkpoint>,
    pub warnings: Vec<Warning>,
    /// Warnings beyond [`WARNINGS_MAX`] different ones.
    pub warnings_more: u64,
    /// Ranks that were late, as this one told.
    pub late: Vec<Lateness>,
    /// What this rank did as a server, or what its own steps had missed.
    pub served: Option<Served>,
    /// None if nothing was told of a GPU.
    pub gpu: Option<GpuTotals>,
}

impl History {
    /// Whether this rank held parameters and trained nothing.
    pub fn is_server(&self) -> bool {
        self.served.is_some() && self.steps.is_empty()
    }

    /// The history that `lines` of one rank tell.
    pub fn of<'a>(lines: impl IntoIterator<Item = &'a Line>) -> Self {
        let mut history = Self::default();
        for line in lines {
            history.push(line);
        }
        history
    }

    /// Adds the next line.
    pub fn push(&mut self, line: &Line) {
        self.rank = line.rank;
        if self.processes.is_empty() || matches!(line.event, Event::RunStarted { .. }) {
            self.processes.push(Process::default());
        }
        let process = self.processes.last_mut().expect("pushed above");
        process.last_time_s = process.last_time_s.max(line.time_s);
        match &line.event {
            Event::RunStarted { .. } => {
                process.start = start(&line.event);
                self.split = None;
            }
            Event::RunFinished { .. } => process.finish = finish(&line.event),
            Event::Step { step, .. } => {
                process.last_step = *step;
                self.push_step(&line.event);
            }
            Event::Epoch { .. } => self.push_epoch(&line.event),
            &Event::Evaluated { epoch, step, val_loss, val_top1, val_top5 } => {
                self.evaluations.truncate(self.evaluations.partition_point(|known| known.step < step));
                let (loss, top1, top5) = (Some(val_loss), Some(val_top1), Some(val_top5));
                self.evaluations.push(Evaluation { epoch, step, loss, top1, top5 });
            }
            Event::Restarted { .. } => self.restarts += 1,
            Event::Pipeline { .. } | Event::Parts { .. } => self.split = Some(line.event.clone()),
            Event::Checkpoint { step, path, best, seconds } => {
                self.checkpoints.retain(|known| known.path != *path);
                self.checkpoints.push(Checkpoint { step: *step, path: path.clone(), best: *best, seconds: *seconds });
            }
            Event::Served { .. } => self.served.get_or_insert_default().add(&line.event),
            Event::Late { .. } | Event::CaughtUp { .. } => Lateness::add(&mut self.late, line),
            Event::Gpu(seen) => self.gpu.get_or_insert_default().add(seen),
            Event::Balanced { .. } => {}
            Event::Lost { why, portions, .. } => {
                let message =
                    format!("{why}; the others went on without it, and {portions} portions of batches it had taken");
                self.push_warning(line.time_s, &message);
            }
            Event::Returned { returned_rank, host, step } => {
                let message = format!("rank {returned_rank} on {host} takes part again, from step {step} on");
                self.push_warning(line.time_s, &message);
            }
            Event::Warning { message } => self.push_warning(line.time_s, message),
        }
    }

    fn push_warning(&mut self, time_s: f64, message: &str) {
        if let Some(known) = self.warnings.iter_mut().find(|known| known.message == message) {
            known.count += 1;
        } else if self.warnings.len() < WARNINGS_MAX {
            self.warnings.push(Warning { time_s, message: message.to_owned(), count: 1 });
        } else {
            self.warnings_more += 1;
        }
    }

    fn push_step(&mut self, event: &Event) {
        let Event::Step { step, loss, accuracy, learning_rate, samples, seconds, phases: named, .. } = event else {
            return;
        };
        let mut phases = [0.0; Phase::ALL.len()];
        named.iter().for_each(|(phase, phase_s)| phases[phase as usize] = phase_s as f32);
        self.steps.truncate(self.steps.partition_point(|known| known.step < *step));
        self.epochs.truncate(self.epochs.partition_point(|known| known.step < *step));
        self.evaluations.truncate(self.evaluations.partition_point(|known| known.step < *step));
        self.steps.push(Step {
            step: *step,
            loss: *loss,
            accuracy: *accuracy,
            learning_rate: *learning_rate,
            samples: *samples,
            seconds: *seconds,
            phases,
        });
    }

    fn push_epoch(&mut self, event: &Event) {
        let Event::Epoch {
            epoch,
            step,
            train_loss,
            train_accuracy,
            val_loss,
            val_top1,
            val_top5,
            seconds,
            samples_per_s,
            data_wait_s,
        } = event
        else {
            return;
        };
        self.epochs.truncate(self.epochs.partition_point(|known| known.epoch < *epoch));
        self.epochs.push(Epoch {
            epoch: *epoch,
            step: *step,
            train_loss: *train_loss,
            train_accuracy: *train_accuracy,
            val_loss: *val_loss,
            val_top1: *val_top1,
            val_top5: *val_top5,
            seconds: *seconds,
            samples_per_s: *samples_per_s,
            data_wait_s: *data_wait_s,
        });
    }

    /// Every evaluation, in order.
    pub fn all_evaluations(&self) -> Vec<Evaluation> {
        let of_epochs = self.epochs.iter().map(Epoch::evaluation).filter(|found| found.top1.is_some());
        let mut all: Vec<Evaluation> = of_epochs.chain(self.evaluations.iter().cloned()).collect();
        all.sort_by_key(|evaluation| evaluation.step);
        all
    }

    /// The start of the latest process that said how it began.
    pub fn start(&self) -> Option<&Start> {
        self.processes.iter().rev().find_map(|process| process.start.as_ref())
    }

    /// The steps at which later processes took over, for marks in the charts.
    pub fn resumes(&self) -> Vec<u64> {
        let starts = self.processes.iter().skip(1).filter_map(|process| process.start.as_ref());
        starts.map(|start| start.resumed_step).filter(|&step| step > 0).collect()
    }
}

fn start(event: &Event) -> Option<Start> {
    let Event::RunStarted {
        version,
        unix_s,
        model,
        data,
        parameters,
        resumed_step,
        steps_total,
        host,
        config,
        schema: _,
    } = event
    else {
        return None;
    };
    Some(Start {
        version: version.clone(),
        unix_s: *unix_s,
        model: model.clone(),
        data: data.clone(),
        parameters: *parameters,
        resumed_step: *resumed_step,
        steps_total: *steps_total,
        host: host.clone(),
        config: config.clone(),
    })
}

fn finish(event: &Event) -> Option<Finish> {
    let Event::RunFinished { step, reason, error, seconds, peak_memory_bytes } = event else { return None };
    Some(Finish {
        step: *step,
        reason: reason.clone(),
        error: error.clone(),
        seconds: *seconds,
        peak_memory_bytes: *peak_memory_bytes,
    })
}

#[cfg(test)]
mod tests {
    use paceline_system::phase::PhaseTimes;

    use super::*;

    fn line(event: Event) -> Line {
        Line { time_s: 0.0, rank: 0, event }
    }

    fn step(step: u64, loss: f64) -> Line {
        let phases = PhaseTimes::default();
        line(Event::Step {
            step,
            epoch: 0,
            loss,
            accuracy: 0.0,
            learning_rate: 0.1,
            samples: 8,
            portion: None,
            seconds: 1.0,
            phases,
        })
    }

    fn started(resumed_step: u64) -> Line {
        line(Event::RunStarted {
            schema: 1,
            version: "1".into(),
            unix_s: 0,
            model: "m".into(),
            data: "d".into(),
            parameters: 1,
            resumed_step,
            steps_total: 9,
            host: Host::default(),
            config: String::new(),
        })
    }

    #[test]
    fn the_later_process_wins_and_lost_work_is_left_out() {
        let lines = [
            started(0),
            step(1, 1.0),
            step(2, 2.0),
            step(3, 3.0),
            step(4, 4.0),
            started(1),
            step(2, 20.0),
            step(3, 30.0),
        ];
        let history = History::of(&lines);
        let kept: Vec<_> = history.steps.iter().map(|step| (step.step, step.loss)).collect();
        assert_eq!(kept, [(1, 1.0), (2, 20.0), (3, 30.0)]);
        assert_eq!(history.resumes(), [1]);
    }

    #[test]
    fn a_process_that_never_stepped_replaces_nothing() {
        let history = History::of(&[started(0), step(1, 1.0), step(2, 2.0), started(1)]);
        assert_eq!(history.steps.len(), 2);
        assert_eq!(history.processes.len(), 2);
    }

    #[test]
    fn a_repeated_warning_is_counted() {
        let warning = line(Event::Warning { message: "hot".into() });
        let history = History::of(&[warning.clone(), warning]);
        assert_eq!((history.warnings.len(), history.warnings[0].count), (1, 2));
    }

    #[test]
    fn endless_different_warnings_are_bounded() {
        let lines: Vec<Line> =
            (0..WARNINGS_MAX + 5).map(|number| line(Event::Warning { message: format!("hot {number}") })).collect();
        let history = History::of(&lines);
        assert_eq!((history.warnings.len(), history.warnings_more), (WARNINGS_MAX, 5));
    }
}
