//! A run in a dozen numbers: for the report's header and for the last lines on the terminal.

use std::fmt;

use paceline_system::event::{Event, Line};
use paceline_system::phase::Phase;

use crate::history::{Epoch, Evaluation, History, Process, Step};

/// The name under which time that no phase claims is shown.
pub const OTHER_PHASE: &str = "other";

/// How a run ended, as far as its log knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All planned steps were done.
    Done,
    /// Validation stopped improving.
    EarlyStop,
    /// The user's limit on steps was reached.
    MaxSteps,
    /// The user's limit on time was reached.
    TimeLimit,
    /// The user or a scheduler asked it to stop.
    Interrupted,
    /// It failed, with the error's sentence where one was logged.
    Failed(Option<String>),
    /// A reason that this version does not know.
    Other(String),
    /// No end was logged: the run goes on, or its process is gone.
    Unfinished,
}

impl Outcome {
    pub(crate) fn of(process: Option<&Process>) -> Self {
        let Some(finish) = process.and_then(|process| process.finish.as_ref()) else { return Self::Unfinished };
        match finish.reason.as_str() {
            "done" => Self::Done,
            "early-stop" => Self::EarlyStop,
            "max-steps" => Self::MaxSteps,
            "time-limit" => Self::TimeLimit,
            "interrupted" => Self::Interrupted,
            "failed" => Self::Failed(finish.error.clone()),
            other => Self::Other(other.to_owned()),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Done => "done",
            Self::EarlyStop => "stopped early",
            Self::MaxSteps => "stopped at the step limit",
            Self::TimeLimit => "stopped at the time limit",
            Self::Interrupted => "interrupted",
            Self::Failed(_) => "failed",
            Self::Other(reason) => reason,
            Self::Unfinished => "still running or crashed",
        })
    }
}

/// The best evaluation of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Best {
    /// Share of the validation set whose best guess was right.
    pub top1: f64,
    /// The epoch that reached it first, from 0.
    pub epoch: u64,
    /// Updates done by then.
    pub step: u64,
}

/// A run in a dozen numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// The model's name; empty when the log does not say.
    pub model: String,
    /// The data set; empty when the log does not say.
    pub data: String,
    /// Number of parameters that are trained.
    pub parameters: u64,
    /// Updates done.
    pub steps: u64,
    /// Updates planned.
    pub steps_total: u64,
    /// Epochs that ended.
    pub epochs: u64,
    /// How often it was started again by its launcher.
    pub restarts: u64,
    /// How it ended.
    pub outcome: Outcome,
    /// Mean training loss of the last epoch, or the last step's loss before the first epoch ended.
    pub train_loss: Option<f64>,
    /// Training accuracy of the last epoch, or the last step's before the first epoch ended.
    pub train_accuracy: Option<f64>,
    /// Validation loss of the last evaluation.
    pub val_loss: Option<f64>,
    /// Top-1 of the last evaluation.
    pub final_top1: Option<f64>,
    /// Top-5 of the last evaluation.
    pub final_top5: Option<f64>,
    /// The best evaluation.
    pub best: Option<Best>,
    /// Samples trained on over all steps that count.
    pub samples: u64,
    /// Samples per second of step time, waiting for data included.
    pub samples_per_s: Option<f64>,
    /// Wall time over all processes of the run.
    pub seconds: f64,
    /// Wall time inside steps that count.
    pub step_seconds: f64,
    /// Seconds by phase, most first; time in no phase comes last as [`OTHER_PHASE`].
    pub phases: Vec<(&'static str, f64)>,
    /// The most memory any process of the run held; 0 when the log does not say.
    pub peak_memory_bytes: u64,
}

impl Summary {
    /// The summary of what `lines` tell. With lines of several ranks, the lowest rank speaks for the run.
    pub fn of(lines: &[Line]) -> Self {
        let rank = lines.iter().map(|line| line.rank).min().unwrap_or(0);
        Self::of_history(&History::of(lines.iter().filter(|line| line.rank == rank)))
    }

    pub(crate) fn of_history(history: &History) -> Self {
        let mut totals = Totals::default();
        history.steps.iter().for_each(|step| totals.add_step(step));
        history.epochs.iter().for_each(|epoch| totals.add_epoch(epoch));
        history.all_evaluations().iter().for_each(|evaluation| totals.add_evaluation(evaluation));
        Self::of_totals(history, &totals)
    }

    /// Steps and epochs come from `totals`, everything else from `history`.
    fn of_totals(history: &History, totals: &Totals) -> Self {
        let start = history.start();
        let Totals { samples, step_seconds, epochs, .. } = *totals;
        let (last_step, last_epoch) = (totals.last_step.as_ref(), totals.last_epoch.as_ref());
        let last_evaluation = totals.last_evaluation.as_ref();
        let finish = history.processes.last().and_then(|process| process.finish.as_ref());
        let peaks = history.processes.iter().filter_map(|process| process.finish.as_ref());
        Self {
            model: start.map(|start| start.model.clone()).unwrap_or_default(),
            data: start.map(|start| start.data.clone()).unwrap_or_default(),
            parameters: start.map_or(0, |start| start.parameters),
            steps: last_step.map_or(0, |step| step.step).max(finish.map_or(0, |finish| finish.step)),
            steps_total: start.map_or(0, |start| start.steps_total),
            epochs,
            restarts: history.restarts,
            outcome: Outcome::of(history.processes.last()),
            train_loss: last_epoch.map(|epoch| epoch.train_loss).or(last_step.map(|step| step.loss)),
            train_accuracy: last_epoch.map(|epoch| epoch.train_accuracy).or(last_step.map(|step| step.accuracy)),
            val_loss: last_evaluation.and_then(|found| found.loss),
            final_top1: last_evaluation.and_then(|found| found.top1),
            final_top5: last_evaluation.and_then(|found| found.top5),
            best: totals.best,
            samples,
            samples_per_s: (step_seconds > 0.0).then(|| samples as f64 / step_seconds),
            seconds: history.processes.iter().map(Process::seconds).sum(),
            step_seconds,
            phases: phases(totals),
            peak_memory_bytes: peaks.map(|finish| finish.peak_memory_bytes).max().unwrap_or(0),
        }
    }
}

/// Builds the summary of a run while it goes, in memory that does not grow with its length: for whoever listens to one
/// process. A second `run_started` begins anew, and lines of another rank than the first one's are left out; what
/// several processes of a run did together is told by [`Summary::of`].
#[derive(Clone, Debug, Default)]
pub struct SummaryBuilder {
    /// Holds no step, epoch or checkpoint: the first two move to the totals, and the last are not in a summary.
    history: History,
    totals: Totals,
}

impl SummaryBuilder {
    /// One that has heard nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the next line.
    pub fn push(&mut self, line: &Line) {
        if !self.history.processes.is_empty() {
            if line.rank != self.history.rank {
                return;
            }
            if matches!(line.event, Event::RunStarted { .. }) {
                *self = Self::default();
            }
        }
        self.history.push(line);
        self.history.steps.drain(..).for_each(|step| self.totals.add_step(&step));
        self.history.epochs.drain(..).for_each(|epoch| {
            self.totals.add_epoch(&epoch);
            self.totals.add_evaluation(&epoch.evaluation());
        });
        self.history.evaluations.drain(..).for_each(|evaluation| self.totals.add_evaluation(&evaluation));
        self.history.checkpoints.clear();
    }

    /// The summary of the lines so far.
    pub fn finish(&self) -> Summary {
        Summary::of_totals(&self.history, &self.totals)
    }
}

/// What a summary says of steps and epochs.
#[derive(Clone, Debug, Default)]
struct Totals {
    samples: u64,
    step_seconds: f64,
    /// By the number of the phase.
    phases: [f64; Phase::ALL.len()],
    epochs: u64,
    last_step: Option<Step>,
    last_epoch: Option<Epoch>,
    last_evaluation: Option<Evaluation>,
    best: Option<Best>,
}

impl Totals {
    fn add_step(&mut self, step: &Step) {
        self.samples += step.samples;
        self.step_seconds += step.seconds;
        for (total, &phase_s) in self.phases.iter_mut().zip(&step.phases) {
            *total += f64::from(phase_s);
        }
        self.last_step = Some(step.clone());
    }

    fn add_epoch(&mut self, epoch: &Epoch) {
        self.epochs += 1;
        self.last_epoch = Some(epoch.clone());
    }

    /// In the order of steps; of an epoch without one, nothing.
    fn add_evaluation(&mut self, evaluation: &Evaluation) {
        let Some(top1) = evaluation.top1 else { return };
        self.last_evaluation = Some(evaluation.clone());
        if top1.is_finite() && self.best.is_none_or(|known| top1 > known.top1) {
            self.best = Some(Best { top1, epoch: evaluation.epoch, step: evaluation.step });
        }
    }
}

fn phases(totals: &Totals) -> Vec<(&'static str, f64)> {
    let step_seconds = totals.step_seconds;
    let named = Phase::ALL.into_iter().map(Phase::name).zip(totals.phases);
    let mut phases: Vec<(&'static str, f64)> = named.filter(|(_, phase_s)| *phase_s > 0.0).collect();
    phases.sort_by(|a, b| b.1.total_cmp(&a.1).then_with(|| a.0.cmp(b.0)));
    let claimed: f64 = phases.iter().map(|(_, phase_s)| phase_s).sum();
    // Below a thousandth it is rounding and the clock's own cost.
    if step_seconds - claimed > step_seconds * 1e-3 {
        phases.push((OTHER_PHASE, step_seconds - claimed));
    }
    phases
}

#[cfg(test)]
mod tests {
    use paceline_system::event::Event;

    use super::*;

    fn line(time_s: f64, event: Event) -> Line {
        Line { time_s, rank: 0, event }
    }

    fn step(step: u64) -> Line {
        let phases = [(Phase::Data, 0.5), (Phase::Forward, 1.0)].into_iter().collect();
        let event = Event::Step {
            step,
            epoch: 0,
            loss: 1.0,
            accuracy: 0.5,
            learning_rate: 0.1,
            samples: 20,
            portion: None,
            seconds: 2.0,
            phases,
        };
        line(step as f64 * 2.0, event)
    }

    fn epoch(epoch: u64, top1: f64) -> Line {
        let event = Event::Epoch {
            epoch,
            step: epoch + 1,
            train_loss: 0.7,
            train_accuracy: 0.6,
            val_loss: Some(0.8),
            val_top1: Some(top1),
            val_top5: None,
            seconds: 2.0,
            samples_per_s: 10.0,
            data_wait_s: 0.5,
        };
        line(epoch as f64 * 2.0 + 2.5, event)
    }

    #[test]
    fn best_is_not_last_and_time_without_a_phase_is_other() {
        let summary = Summary::of(&[step(1), epoch(0, 0.9), step(2), epoch(1, 0.8)]);
        assert_eq!(summary.best, Some(Best { top1: 0.9, epoch: 0, step: 1 }));
        assert_eq!(summary.final_top1, Some(0.8));
        assert_eq!(summary.samples_per_s, Some(10.0));
        assert_eq!(summary.phases, [("forward", 2.0), ("data", 1.0), ("other", 1.0)]);
        assert_eq!((summary.seconds, summary.outcome), (4.5, Outcome::Unfinished));
    }

    #[test]
    fn an_evaluation_where_a_limit_ended_the_run_is_the_last_and_no_epoch() {
        let evaluated = line(9.0, Event::Evaluated { epoch: 1, step: 2, val_loss: 0.5, val_top1: 0.95, val_top5: 1.0 });
        let summary = Summary::of(&[step(1), epoch(0, 0.9), step(2), evaluated.clone()]);
        assert_eq!((summary.epochs, summary.final_top1, summary.val_loss), (1, Some(0.95), Some(0.5)));
        assert_eq!(summary.best, Some(Best { top1: 0.95, epoch: 1, step: 2 }));
        // Resumed, it was at a step that still counts; done again from before, it was not.
        let resumed = Summary::of(&[step(1), epoch(0, 0.9), step(2), evaluated.clone(), step(3)]);
        assert_eq!((resumed.final_top1, resumed.epochs), (Some(0.95), 1));
        let again = Summary::of(&[step(1), epoch(0, 0.9), step(2), evaluated, step(2)]);
        assert_eq!(again.final_top1, Some(0.9));
    }

    #[test]
    fn nothing_is_known_of_an_empty_log() {
        let summary = Summary::of(&[]);
        assert_eq!((summary.steps, summary.samples_per_s, summary.best), (0, None, None));
    }

    #[test]
    fn a_summary_built_line_by_line_is_the_same_and_keeps_no_lines() {
        let mut lines = Vec::new();
        for number in 0..1000 {
            lines.extend([step(number + 1), epoch(number, 0.5 + (number % 7) as f64 / 100.0)]);
            let path = format!("checkpoints/{number}");
            lines.push(line(0.0, Event::Checkpoint { step: number + 1, path, best: false, seconds: 0.1 }));
        }
        let mut builder = SummaryBuilder::new();
        for (number, line) in lines.iter().enumerate() {
            builder.push(line);
            builder.push(&Line { rank: 1, ..line.clone() });
            if number % 300 == 0 {
                assert_eq!(builder.finish(), Summary::of(&lines[..=number]));
            }
        }
        assert_eq!(builder.finish(), Summary::of(&lines));
        let History { steps, epochs, checkpoints, .. } = &builder.history;
        assert!(steps.capacity() + epochs.capacity() + checkpoints.capacity() < 20);
    }

    #[test]
    fn a_failure_keeps_its_sentence() {
        let event = Event::RunFinished {
            step: 1,
            reason: "failed".into(),
            error: Some("loss is not a number".into()),
            seconds: 9.0,
            peak_memory_bytes: 5,
        };
        let summary = Summary::of(&[step(1), line(8.0, event)]);
        assert_eq!(summary.outcome, Outcome::Failed(Some("loss is not a number".into())));
        assert_eq!((summary.seconds, summary.peak_memory_bytes), (9.0, 5));
    }
}
