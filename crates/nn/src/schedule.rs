//! The learning rate over time: a pure function of the step.
//!
//! A [`LearningRate`] is a base rate, optionally scaled with the batch, a linear warm-up, and a [`Schedule`] for the
//! rest. A resumed run needs no state: it asks for the same step again.

use serde::{Deserialize, Serialize};

/// How the rate falls. Shares are of the rate after scaling.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Schedule {
    /// It does not.
    #[default]
    Constant,
    /// By a factor every so many epochs.
    Step {
        /// Epochs between two drops.
        every: f64,
        /// What the rate is multiplied by.
        #[serde(default = "tenth")]
        factor: f64,
    },
    /// By a factor at given epochs, counted from the start of the run.
    Milestones {
        /// The epochs.
        at: Vec<f64>,
        /// What the rate is multiplied by.
        #[serde(default = "tenth")]
        factor: f64,
    },
    /// Along half a cosine (Loshchilov and Hutter, 2017).
    Cosine {
        /// The share that is left at the end.
        #[serde(default)]
        end: f64,
    },
    /// As (1−t)^power.
    Polynomial {
        /// 1 is a straight line.
        power: f64,
        /// The share that is left at the end.
        #[serde(default)]
        end: f64,
    },
}

/// How long the rate climbs in a straight line before the schedule starts. The first step has 1/n of the full rate, the
/// n-th step all of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WarmUp {
    /// It does not climb.
    #[default]
    None,
    /// So many steps.
    Steps(u64),
    /// So many epochs, rounded to whole steps.
    Epochs(f64),
}

/// The batch to which a base rate refers in Goyal et al. (2017).
pub const REFERENCE_BATCH: usize = 256;

/// The learning rate of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct LearningRate {
    /// The full rate, for the whole batch or (with `scale_with_batch`) for a batch of [`REFERENCE_BATCH`].
    pub base: f64,
    /// Whether the rate grows in proportion to the batch of all ranks together.
    #[serde(default)]
    pub scale_with_batch: bool,
    /// The climb at the start.
    #[serde(default)]
    pub warm_up: WarmUp,
    /// The fall afterwards.
    #[serde(default)]
    pub schedule: Schedule,
}

/// The sizes of a run that its learning rate depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunLength {
    /// Optimizer updates in the whole run.
    pub total_steps: u64,
    /// Optimizer updates in one epoch.
    pub steps_per_epoch: u64,
    /// Samples in one update, over all ranks.
    pub global_batch: usize,
}

/// A learning rate that cannot be used: the message says what to write.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("learning rate: {name} = {value} does not work; write {range}")]
pub struct LearningRateError {
    /// The name in the config.
    pub name: &'static str,
    /// What was written.
    pub value: f64,
    /// What can be written.
    pub range: &'static str,
}

impl LearningRate {
    /// The same rate throughout.
    pub const fn constant(base: f64) -> Self {
        Self { base, scale_with_batch: false, warm_up: WarmUp::None, schedule: Schedule::Constant }
    }

    /// The rate of an update, counted from 0.
    pub fn rate(&self, step: u64, run: RunLength) -> f32 {
        let scale = if self.scale_with_batch { run.global_batch as f64 / REFERENCE_BATCH as f64 } else { 1.0 };
        let warm_up = self.warm_up.steps(run.steps_per_epoch);
        let share =
            if step < warm_up { (step + 1) as f64 / warm_up as f64 } else { self.schedule.share(step, warm_up, run) };
        (self.base * scale * share) as f32
    }

    /// Whether every number is in its range.
    ///
    /// # Errors
    /// The first that is not.
    pub fn check(&self) -> Result<(), LearningRateError> {
        let (positive, share) = ("a number above 0", "a number from 0 to 1");
        let above = |value: f64| value > 0.0 && value.is_finite();
        let within = |value: f64| (0.0..=1.0).contains(&value);
        let mut checks = vec![("base", self.base, positive, above(self.base))];
        if let WarmUp::Epochs(epochs) = self.warm_up {
            checks.push(("warm-up epochs", epochs, "0 or a number above", epochs >= 0.0 && epochs.is_finite()));
        }
        match &self.schedule {
            Schedule::Constant => {}
            Schedule::Step { every, factor } => {
                checks.push(("every", *every, positive, above(*every)));
                checks.push(("factor", *factor, positive, above(*factor)));
            }
            Schedule::Milestones { at, factor } => {
                checks.extend(at.iter().map(|&epoch| ("at", epoch, "epochs above 0", above(epoch))));
                checks.push(("factor", *factor, positive, above(*factor)));
            }
            Schedule::Cosine { end } => checks.push(("end", *end, share, within(*end))),
            Schedule::Polynomial { power, end } => {
                checks.push(("power", *power, positive, above(*power)));
                checks.push(("end", *end, share, within(*end)));
            }
        }
        match checks.into_iter().find(|check| !check.3) {
            Some((name, value, range, _)) => Err(LearningRateError { name, value, range }),
            None => Ok(()),
        }
    }
}

impl WarmUp {
    fn steps(self, steps_per_epoch: u64) -> u64 {
        match self {
            Self::None => 0,
            Self::Steps(steps) => steps,
            Self::Epochs(epochs) => (epochs * steps_per_epoch as f64).round() as u64,
        }
    }
}

impl Schedule {
    /// The share of the full rate at a step after the warm-up.
    fn share(&self, step: u64, warm_up: u64, run: RunLength) -> f64 {
        // Drops are counted in whole steps, so that 0.1 epochs of 10 steps are exactly one.
        let start_of = |epoch: f64| (epoch * run.steps_per_epoch as f64).round().max(1.0) as u64;
        // Cosine and polynomial stretch over what the warm-up left; beyond the end of the run they stay at their end.
        let left = run.total_steps.saturating_sub(warm_up).max(1);
        let progress = ((step - warm_up) as f64 / left as f64).min(1.0);
        let between = |end: f64, share: f64| end + (1.0 - end) * share;
        match self {
            Self::Constant => 1.0,
            Self::Step { every, factor } => factor.powf((step / start_of(*every)) as f64),
            Self::Milestones { at, factor } => {
                factor.powf(at.iter().filter(|&&epoch| step >= start_of(epoch)).count() as f64)
            }
            Self::Cosine { end } => between(*end, 0.5 * (1.0 + (std::f64::consts::PI * progress).cos())),
            Self::Polynomial { power, end } => between(*end, (1.0 - progress).powf(*power)),
        }
    }
}

const fn tenth() -> f64 {
    0.1
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: RunLength = RunLength { total_steps: 100, steps_per_epoch: 10, global_batch: 256 };

    fn with(schedule: Schedule) -> LearningRate {
        LearningRate { schedule, ..LearningRate::constant(0.1) }
    }

    /// The rates at the given steps, in thousandths.
    fn check(rate: &LearningRate, cases: &[(u64, f64)]) {
        for &(step, expected) in cases {
            let found = f64::from(rate.rate(step, RUN)) * 1000.0;
            assert!((found - expected).abs() < 1e-4, "{rate:?} at {step}: {found} is not {expected}");
        }
    }

    #[test]
    fn each_schedule_has_its_shape_from_the_first_step_to_the_last() {
        check(&with(Schedule::Constant), &[(0, 100.0), (99, 100.0), (1000, 100.0)]);
        check(&with(Schedule::Step { every: 3.0, factor: 0.5 }), &[(0, 100.0), (29, 100.0), (30, 50.0), (99, 12.5)]);
        let milestones = Schedule::Milestones { at: vec![3.0, 6.0, 8.0], factor: 0.1 };
        check(&with(milestones), &[(0, 100.0), (29, 100.0), (30, 10.0), (60, 1.0), (79, 1.0), (80, 0.1), (99, 0.1)]);
        // torch's CosineAnnealingLR(T_max=100) at 25 and 99.
        check(
            &with(Schedule::Cosine { end: 0.0 }),
            &[(0, 100.0), (25, 85.35534), (50, 50.0), (99, 0.024672), (100, 0.0)],
        );
        check(&with(Schedule::Cosine { end: 0.1 }), &[(0, 100.0), (50, 55.0), (100, 10.0), (5000, 10.0)]);
        let square = Schedule::Polynomial { power: 2.0, end: 0.0 };
        check(&with(square), &[(0, 100.0), (50, 25.0), (99, 0.01), (100, 0.0), (101, 0.0)]);
    }

    #[test]
    fn warm_up_climbs_to_the_full_rate_and_then_the_schedule_starts() {
        let mut rate = with(Schedule::Cosine { end: 0.0 });
        rate.warm_up = WarmUp::Epochs(2.0);
        check(&rate, &[(0, 5.0), (9, 50.0), (19, 100.0), (20, 100.0), (60, 50.0), (100, 0.0)]);
        rate.warm_up = WarmUp::Steps(4);
        check(&rate, &[(0, 25.0), (3, 100.0), (4, 100.0), (52, 50.0)]);
        rate.warm_up = WarmUp::Steps(0);
        check(&rate, &[(0, 100.0)]);
    }

    #[test]
    fn a_warm_up_longer_than_the_run_only_climbs() {
        let mut rate = with(Schedule::Cosine { end: 0.0 });
        rate.warm_up = WarmUp::Steps(1000);
        check(&rate, &[(0, 0.1), (99, 10.0), (999, 100.0), (1000, 100.0), (1001, 0.0)]);
    }

    #[test]
    fn the_rate_grows_with_the_batch() {
        let rate = LearningRate { scale_with_batch: true, ..LearningRate::constant(0.1) };
        assert_eq!(rate.rate(0, RunLength { global_batch: 8192, ..RUN }), 3.2);
        assert_eq!(rate.rate(0, RunLength { global_batch: 64, ..RUN }), 0.025);
    }

    #[test]
    fn a_config_reads_as_it_is_written() {
        let text = r#"{"base": 0.1, "scale-with-batch": true, "warm-up": {"epochs": 5.0},
                       "schedule": {"kind": "milestones", "at": [30, 60, 80]}}"#;
        let rate: LearningRate = serde_json::from_str(text).unwrap();
        assert_eq!(rate.schedule, Schedule::Milestones { at: vec![30.0, 60.0, 80.0], factor: 0.1 });
        assert_eq!(rate.warm_up, WarmUp::Epochs(5.0));
        let again: LearningRate = serde_json::from_str(&serde_json::to_string(&rate).unwrap()).unwrap();
        assert_eq!(rate, again);
        assert!(serde_json::from_str::<LearningRate>(r#"{"base": 0.1, "warmup": {"epochs": 5}}"#).is_err());
    }

    #[test]
    fn numbers_out_of_range_are_refused_with_what_to_write() {
        let error = with(Schedule::Step { every: 0.0, factor: 0.1 }).check().unwrap_err();
        assert_eq!(error.to_string(), "learning rate: every = 0 does not work; write a number above 0");
        assert!(LearningRate::constant(f64::NAN).check().is_err());
        assert!(LearningRate::constant(0.1).check().is_ok());
    }
}
