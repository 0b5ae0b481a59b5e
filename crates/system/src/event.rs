//! What happened: a run's events, one JSON object a line, in `events/rank-N.jsonl`. docs/events.md is the schema in words.
//!
//! Reports and dashboards read only these lines, so a finished, a crashed and a live run look the same to them. Adding a
//! field is compatible (readers ignore what they do not know); changing the meaning of one raises [`SCHEMA_VERSION`].

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::clock::Clock;
use crate::disk::{Append, Disk, DiskError};
use crate::host::Host;
use crate::phase::{Phase, PhaseTimes};
use crate::printable::printable_json;

/// The version written into every `run_started` event.
pub const SCHEMA_VERSION: u32 = 1;

/// One line of the log: when, by whom, what.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// Seconds since this process opened the log.
    pub time_s: f64,
    /// The rank that wrote it.
    pub rank: u32,
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
}

/// What can happen in a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The run began, or was resumed.
    RunStarted {
        /// [`SCHEMA_VERSION`] of the writer.
        schema: u32,
        /// Paceline's version.
        version: String,
        /// Wall-clock time, seconds since 1970.
        unix_s: u64,
        /// The model's name.
        model: String,
        /// The data set as the user named it.
        data: String,
        /// Number of parameters that are trained.
        parameters: u64,
        /// Steps already done when a run is resumed, otherwise 0.
        resumed_step: u64,
        /// Steps planned in all.
        steps_total: u64,
        /// The machine.
        host: Host,
        /// The resolved configuration, as TOML text.
        config: String,
    },
    /// One optimizer update.
    Step {
        /// Updates done, this one included.
        step: u64,
        /// The epoch it belongs to, from 0.
        epoch: u64,
        /// Mean cross-entropy over the batch, without label smoothing.
        loss: f64,
        /// Share of the batch classified right.
        accuracy: f64,
        /// Learning rate used.
        learning_rate: f64,
        /// Samples in the batch.
        samples: u64,
        /// How many of them were this rank's, where portions of batches go to whoever is free.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        portion: Option<u64>,
        /// Wall time of the step.
        seconds: f64,
        /// Where the time went.
        phases: PhaseTimes,
    },
    /// One pass over the data ended, with its evaluation.
    Epoch {
        /// The epoch, from 0.
        epoch: u64,
        /// Updates done so far.
        step: u64,
        /// Mean training cross-entropy over the epoch, without label smoothing.
        train_loss: f64,
        /// Training accuracy over the epoch.
        train_accuracy: f64,
        /// Validation loss, if there was an evaluation.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        val_loss: Option<f64>,
        /// Share of the validation set whose best guess was right.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        val_top1: Option<f64>,
        /// Share of the validation set with the truth among the five best guesses.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        val_top5: Option<f64>,
        /// Wall time of the epoch's training part.
        seconds: f64,
        /// Training samples per second, waiting for data included.
        samples_per_s: f64,
        /// Seconds that training waited for the loader.
        data_wait_s: f64,
    },
    /// The run was evaluated where a limit ended it, and not at the end of an epoch that is evaluated anyway.
    Evaluated {
        /// The epoch under way, from 0.
        epoch: u64,
        /// Updates done.
        step: u64,
        /// Validation loss.
        val_loss: f64,
        /// Share of the validation set whose best guess was right.
        val_top1: f64,
        /// Share of the validation set with the truth among the five best guesses.
        val_top5: f64,
    },
    /// The run was started again by its launcher after a failure (`--restart`); follows `run_started`.
    Restarted {
        /// Updates done where it goes on.
        step: u64,
        /// How often this was done, this time included.
        number: u64,
        /// How often it may be done.
        most: u64,
    },
    /// A checkpoint is on the disk.
    Checkpoint {
        /// Updates it contains.
        step: u64,
        /// Its folder, relative to the run.
        path: String,
        /// Whether it is the best so far by validation accuracy.
        best: bool,
        /// What writing took.
        seconds: f64,
    },
    /// What the GPU that this rank computes on was doing: about once a second, where the machine can tell.
    Gpu(GpuUse),
    /// What a server did since it last told: about once a second.
    Served {
        /// Updates that its parameters contain.
        step: u64,
        /// The time that this is about.
        seconds: f64,
        /// Where it went: waiting for workers (`exchange`), and changing weights (`update`).
        phases: PhaseTimes,
        /// Seconds that it waited for each rank, by its number, as far as that was seen.
        waited: BTreeMap<String, f64>,
        /// Where every push is a step: how many steps of each worker had missed no update, one, two, …; the 65th is for 64 and
        /// more.
        #[serde(default)]
        missed: BTreeMap<String, Vec<u64>>,
    },
    /// Others wait for a rank; the run goes on.
    Late {
        /// The rank that they wait for.
        late_rank: u32,
        /// Its machine.
        host: String,
        /// What it was doing when it was last heard.
        phase: Phase,
        /// Updates that it had done.
        step: u64,
        /// What the one who waits longest waits for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        message: Option<String>,
        /// For how long.
        waited_s: f64,
        /// For how long nothing was heard of it.
        unheard_s: f64,
    },
    /// Nobody waits any more for a rank that was late.
    CaughtUp {
        /// The rank that was late.
        late_rank: u32,
        /// Its machine.
        host: String,
        /// Updates that it has done.
        step: u64,
        /// How long the one who waited longest waited for it, in all.
        waited_s: f64,
    },
    /// Workers share batches by the speed that each has measured of itself.
    Balanced {
        /// Updates done.
        step: u64,
        /// How many samples of a batch each worker has from here on.
        samples: Vec<u64>,
        /// How many each computes in a second, without what it waits for.
        samples_per_s: Vec<f64>,
    },
    /// A rank is lost, and the others go on without it.
    Lost {
        /// The rank.
        lost_rank: u32,
        /// Its machine.
        host: String,
        /// What it was doing.
        phase: Phase,
        /// Updates that it had done.
        step: u64,
        /// Portions of batches that it had taken and not said to have finished; the last of them may have been applied.
        portions: u64,
        /// What happened to it.
        why: String,
    },
    /// A rank that was lost takes part again.
    Returned {
        /// The rank.
        returned_rank: u32,
        /// Its machine, which may be another than before.
        host: String,
        /// The step that the run was at.
        step: u64,
    },
    /// Something the user should know; the run goes on.
    Warning {
        /// What it is.
        message: String,
    },
    /// The model is computed in stages, in this order.
    Pipeline {
        /// `gpipe`, `1f1b` or `zero-bubble`.
        schedule: String,
        /// Micro-batches of a worker's batch.
        micro_batches: u64,
        /// Each stage.
        stages: Vec<StageUse>,
        /// What a step is expected to take, without its update.
        forecast_s: f64,
        /// Times that one device would take as long as all stages together.
        speedup: f64,
        /// The most that this could be: a device for each stage, and no waiting.
        bound: f64,
        /// The order as a picture of letters.
        drawing: String,
    },
    /// The model's layers are computed by parts, in this order.
    Parts {
        /// As it was asked for, such as `channel:2`.
        split: String,
        /// Each part.
        parts: Vec<PartUse>,
    },
    /// The run ended.
    RunFinished {
        /// Updates done.
        step: u64,
        /// Why: `done`, `early-stop`, `max-steps`, `time-limit`, `interrupted`, `failed`.
        reason: String,
        /// A sentence when it failed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
        /// Wall time of this process's part of the run.
        seconds: f64,
        /// The most memory the process held.
        peak_memory_bytes: u64,
    },
}

/// What a part is, and what it exchanges with the others in a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PartUse {
    /// Trained elements that it has.
    pub parameters: u64,
    /// Sums and gathers, each of which it waits for.
    pub exchanges: u64,
    /// Bytes that it sends for them.
    pub sent_bytes: u64,
}

/// What a stage of a pipeline is and takes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StageUse {
    /// Trained elements.
    pub parameters: u64,
    /// Bytes that it sends to the stage behind, for one sample.
    pub sent_bytes: u64,
    /// Seconds of a forward pass over a micro-batch.
    pub forward_s: f64,
    /// Of the gradients of inputs.
    pub inputs_s: f64,
    /// Of the gradients of weights; of all gradients, where they are not computed apart.
    pub weights_s: f64,
}

/// What a GPU was doing at one moment. What it does not tell is left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuUse {
    /// Share of the last moment in which it computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy: Option<f64>,
    /// Memory taken, by all processes that use it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_used_bytes: Option<u64>,
    /// Memory there is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// What it draws.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_w: Option<f64>,
    /// How hot the chip is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature_c: Option<f64>,
}

/// Where a rank's events go.
#[derive(Debug)]
pub struct EventLog {
    rank: u32,
    clock: Clock,
    target: Append,
}

impl EventLog {
    /// Opens `run/events/rank-N.jsonl` for appending: a resumed run continues its own log, on a line of its own if a
    /// crash cut the last one.
    ///
    /// # Errors
    /// When the folder or file cannot be written.
    pub fn open(disk: &Disk, clock: Clock, run: &Path, rank: u32) -> Result<Self, DiskError> {
        let folder = run.join("events");
        disk.create_dir(&folder)?;
        let path = folder.join(format!("rank-{rank}.jsonl"));
        let mut target = disk.append(&path)?;
        if !disk.ends_with_newline(&path)? {
            target.write(b"\n")?;
        }
        Ok(Self { rank, clock, target })
    }

    /// Appends one event and returns its line, for whoever else listens.
    ///
    /// # Errors
    /// When the disk is full or refuses.
    pub fn write(&mut self, event: Event) -> Result<Line, DiskError> {
        self.write_at(self.clock.seconds(), event)
    }

    /// As [`EventLog::write`], of something that happened at another time of the same clock.
    ///
    /// # Errors
    /// As [`EventLog::write`].
    pub fn write_at(&mut self, time_s: f64, event: Event) -> Result<Line, DiskError> {
        let line = Line { time_s, rank: self.rank, event };
        let mut text = serde_json::to_string(&line).expect("events hold nothing that JSON cannot");
        text.push('\n');
        // People look at logs with `cat` and `tail` too.
        let text = printable_json(&text);
        self.target.write(text.as_bytes())?;
        Ok(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resumed_log_does_not_continue_a_line_that_a_crash_cut() {
        let folder = tempfile::tempdir().unwrap();
        let disk = Disk::real();
        let event = Event::Warning { message: "hot".into() };
        let mut log = EventLog::open(&disk, Clock::manual(), folder.path(), 0).unwrap();
        let line = log.write(event.clone()).unwrap();
        assert_eq!(line, Line { time_s: 0.0, rank: 0, event: event.clone() });
        let path = folder.path().join("events/rank-0.jsonl");
        disk.append(&path).unwrap().write(b"{\"time_s\":1.0,\"ra").unwrap();
        EventLog::open(&disk, Clock::manual(), folder.path(), 0).unwrap().write(event).unwrap();
        let text = disk.read_text(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert_eq!(lines[0], lines[2]);
    }

    #[test]
    fn loss_that_is_not_a_number_does_not_break_the_line() {
        let event = Event::Step {
            step: 1,
            epoch: 0,
            loss: f64::NAN,
            accuracy: 0.0,
            learning_rate: 0.1,
            samples: 1,
            portion: None,
            seconds: 1.0,
            phases: PhaseTimes::default(),
        };
        let text = serde_json::to_string(&Line { time_s: 0.0, rank: 0, event }).unwrap();
        assert!(text.contains("\"loss\":null"), "{text}");
    }
}
