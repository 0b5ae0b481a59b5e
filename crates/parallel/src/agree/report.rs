//! What a worker reports of a step, beside its gradients, and what the reports of all workers add up to: how
//! good the step was, and whether anybody wants to end the run or to save it.

/// One worker's step, or the sum over workers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepReport {
    /// Rows of answers.
    pub rows: u64,
    /// The sum of their losses.
    pub loss: f64,
    /// Rows whose most likely class was the right one.
    pub top1: u64,
    /// Rows with the right class among the five most likely.
    pub top5: u64,
    /// Which share of the step's batch was computed: 1 of all workers together, unless one is lost.
    pub share: f32,
    /// Wishes of workers.
    pub votes: Votes,
}

/// Reasons to end the run after the step, or to save it: how many workers have each, so that all do it after
/// the same step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Votes {
    /// Somebody was asked to stop.
    pub interrupted: u32,
    /// Somebody's time is over.
    pub time_limit: u32,
    /// The first worker's run was not saved for too long.
    pub checkpoint: u32,
}

impl Votes {
    /// Wishes, whoever has them.
    pub(super) fn once(self) -> Self {
        let Self { interrupted, time_limit, checkpoint } = self;
        Self { interrupted: interrupted.min(1), time_limit: time_limit.min(1), checkpoint: checkpoint.min(1) }
    }

    /// Whether somebody wishes the run to end.
    pub const fn end(self) -> bool {
        self.interrupted > 0 || self.time_limit > 0
    }
}

/// Numbers that a report takes in a message.
pub(super) const WORDS: usize = 9;

/// A report as it travels: numbers that are added up in `f32`.
pub(crate) type Words = [f32; WORDS];

impl StepReport {
    /// Counts below 2²⁴ stay exact; the loss is two numbers, of which the second is what the first leaves.
    pub(crate) fn to_words(self) -> Words {
        let Self { rows, loss, top1, top5, share, votes: Votes { interrupted, time_limit, checkpoint } } = self;
        let high = loss as f32;
        let low = (loss - f64::from(high)) as f32;
        let [rows, top1, top5] = [rows, top1, top5].map(|count| count as f32);
        let [interrupted, time_limit, checkpoint] = [interrupted, time_limit, checkpoint].map(|votes| votes as f32);
        [rows, high, low, top1, top5, share, interrupted, time_limit, checkpoint]
    }

    /// What a peer made up gives a report too.
    pub(crate) fn from_words(words: Words) -> Self {
        let [rows, high, low, top1, top5, share, interrupted, time_limit, checkpoint] = words;
        let [rows, top1, top5] = [rows, top1, top5].map(|count| count as u64);
        let [interrupted, time_limit, checkpoint] = [interrupted, time_limit, checkpoint].map(|votes| votes as u32);
        let loss = f64::from(high) + f64::from(low);
        Self { rows, loss, top1, top5, share, votes: Votes { interrupted, time_limit, checkpoint } }
    }
}

impl Votes {
    /// What either of two has seen.
    pub(super) fn merge(self, other: Self) -> Self {
        Self {
            interrupted: self.interrupted.max(other.interrupted),
            time_limit: self.time_limit.max(other.time_limit),
            checkpoint: self.checkpoint.max(other.checkpoint),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_survives_being_sent() {
        let votes = Votes { interrupted: 1, time_limit: 0, checkpoint: 2 };
        let report = StepReport { rows: 256, loss: 123.456_789_012_3, top1: 17, top5: 99, share: 0.25, votes };
        let received = StepReport::from_words(report.to_words());
        assert!((received.loss - report.loss).abs() < 1e-11);
        assert_eq!(StepReport { loss: report.loss, ..received }, report);
    }

    #[test]
    fn words_that_make_no_sense_are_a_report_all_the_same() {
        for word in [f32::NAN, f32::INFINITY, -1.0, 1e38] {
            let report = StepReport::from_words([word; WORDS]);
            assert!(word.is_finite() || !report.loss.is_finite());
        }
    }
}
