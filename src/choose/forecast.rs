//! What a set-up is expected to take, before it is measured: from the baseline's measured step and from what a few passes over the model
//! took in this process. A pure function of those values; `profile.rs` takes the passes.
//!
//! A step is both passes, the update, and what it waits for data. The baseline tells the last two, and by how much a real pass takes longer
//! than a profiled one. Of other set-ups the passes are profiled: by as many threads, or by as many workers at the same time with their
//! shares of the batch; of stages the passes over a micro-batch, which a schedule puts in order. How well several threads share a pass, or a
//! node its memory, is not computed from anything: it is in what was profiled. An update takes as long as its traffic with the memory, which
//! several cores share: how much faster they stream together than one alone is profiled too. Once a set-up was measured, others of its family
//! are forecast by as much more or less.

use crate::nn::optim::Optimizer;
use crate::parallel::split::{Schedule, StageTimes};
use crate::train::together::Split;

use super::setup::{Family, Setup, Turns};

/// The baseline's step, and where its time went.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Base {
    /// All of it.
    pub step_s: f64,
    /// Both passes.
    pub compute_s: f64,
    /// Changing the weights.
    pub update_s: f64,
}

/// Passes of the model that were profiled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Passes {
    /// So many workers at the same time, each with its share of the batch.
    pub workers: usize,
    /// Threads of each.
    pub threads: usize,
    /// Both passes over a share.
    pub seconds: f64,
}

/// Stages that were profiled, one after the other.
#[derive(Clone, Debug, PartialEq)]
pub struct StagePasses {
    /// Samples of a micro-batch.
    pub samples: usize,
    /// Each stage's passes.
    pub times: Vec<StageTimes>,
    /// Each stage's part of all parameters.
    pub parameters: Vec<f64>,
}

/// Parts that were profiled.
#[derive(Clone, Debug, PartialEq)]
pub struct PartPasses {
    /// Which parts.
    pub split: Split,
    /// Both passes of the slowest.
    pub seconds: f64,
    /// What it exchanges with the others, by what messages in shared memory are expected to take.
    pub exchange_s: f64,
    /// The largest share of all parameters that a part has.
    pub parameters: f64,
}

/// All that forecasts are made from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Known {
    /// Samples of a step.
    pub batch: usize,
    /// Numbers that an update reads or writes for each parameter.
    pub update_streams: f64,
    /// The baseline.
    pub base: Base,
    /// Both passes of whole models; the first are the baseline's.
    pub passes: Vec<Passes>,
    /// By how much a pass takes longer while all cores have one.
    pub crowd: f64,
    /// What so many threads together take to stream through memory, as a part of what one takes for the same.
    pub streaming: Vec<(usize, f64)>,
    /// What taking a micro-batch over from another stage costs beside its pass.
    pub hand_off_s: f64,
    /// Passes of stages, each of two sizes of micro-batch.
    pub stages: Vec<StagePasses>,
    /// Passes of parts.
    pub parts: Vec<PartPasses>,
    /// What was measured of a family, over what had been forecast.
    pub measured: Vec<(Family, f64)>,
}

/// Numbers that an update of this kind reads or writes for each parameter: the gradient once, the weight and each buffer twice.
pub fn update_streams(optimizer: Optimizer) -> f64 {
    (3 + 2 * optimizer.state_slots()) as f64
}

impl Known {
    /// Seconds of a step, if enough was profiled to tell.
    pub fn forecast(&self, setup: &Setup) -> Option<f64> {
        let family = setup.family();
        let known = self.measured.iter().rev().find(|(other, _)| *other == family);
        Some(self.by_passes(setup)? * known.map_or(1.0, |(_, ratio)| *ratio))
    }

    /// The least that it could be: what others of its family took may have been bad luck.
    pub fn least(&self, setup: &Setup) -> Option<f64> {
        Some(self.by_passes(setup)?.min(self.forecast(setup)?))
    }

    /// Learns from a set-up that was measured.
    pub fn learn(&mut self, setup: &Setup, step_s: f64) {
        if let Some(expected_s) = self.by_passes(setup).filter(|expected_s| *expected_s > 0.0) {
            self.measured.push((setup.family(), step_s / expected_s));
        }
    }

    fn by_passes(&self, setup: &Setup) -> Option<f64> {
        match setup.family() {
            Family::Replica | Family::Workers => self.of_whole(setup),
            Family::Stages => self.of_stages(setup),
            Family::Parts => self.of_parts(setup),
            Family::Gpus => None,
        }
    }

    /// By how much a real pass takes longer than a profiled one.
    fn real(&self) -> f64 {
        let alone_s = self.passes.first().map_or(0.0, |passes| passes.seconds);
        if alone_s > 0.0 && self.base.compute_s > 0.0 { self.base.compute_s / alone_s } else { 1.0 }
    }

    /// What a step takes beside passes and update.
    fn rest_s(&self) -> f64 {
        (self.base.step_s - self.base.compute_s - self.base.update_s).max(0.0)
    }

    fn of_whole(&self, setup: &Setup) -> Option<f64> {
        let threads = setup.threads?;
        let same = |passes: &&Passes| (passes.workers, passes.threads) == (setup.workers, threads);
        let passes = self.passes.iter().find(same)?;
        // All cores change weights together: one copy's pieces, or a pool's. A worker writes its gradients to where the others read them, and
        // memory reads what it is about to write.
        let workers = setup.workers as f64;
        let exchanged = if setup.workers > 1 { 3.0 * workers - 1.0 } else { 0.0 };
        let streams = 1.0 + exchanged / self.update_streams.max(1.0);
        let update_s = self.base.update_s * streams * self.streaming_by(setup.workers * threads);
        Some(self.real() * passes.seconds + update_s + self.rest_s())
    }

    /// What so many threads take to stream through memory, as a part of what one takes: their share, where nothing was profiled.
    fn streaming_by(&self, threads: usize) -> f64 {
        let found = self.streaming.iter().find(|(known, _)| *known == threads);
        found.map_or(1.0 / threads as f64, |(_, part)| *part)
    }

    /// By how much passes take longer of which a part of the time others are under way beside them.
    fn crowded(&self, part: f64) -> f64 {
        1.0 + (self.crowd.max(1.0) - 1.0) * part.clamp(0.0, 1.0)
    }

    fn of_stages(&self, setup: &Setup) -> Option<f64> {
        let (Split::Pipeline(stages), Some(Turns { micro_batches, schedule, .. })) = (&setup.split, &setup.turns)
        else {
            return None;
        };
        let stages = *stages;
        let samples = self.batch as f64 / (micro_batches * setup.workers) as f64;
        let (times, parameters) = self.stage_times(stages, samples)?;
        // Gradients of micro-batches are added up: two numbers are read and one is written.
        let update_s: Vec<f64> = parameters.iter().map(|part| self.base.update_s * part).collect();
        let adding = if *micro_batches > 1 { 3.0 / self.update_streams.max(1.0) } else { 0.0 };
        let at_pace = |slower: f64| -> Vec<StageTimes> {
            let real = |(times, update_s): (&StageTimes, &f64)| StageTimes {
                forward_s: times.forward_s * slower + self.hand_off_s,
                inputs_s: times.inputs_s * slower + self.hand_off_s,
                weights_s: times.weights_s * slower + update_s * adding,
            };
            times.iter().zip(&update_s).map(real).collect()
        };
        let ordered = |times: &[StageTimes]| {
            Schedule::new(*schedule, *micro_batches, times).forecast(times, &vec![0.0; stages - 1])
        };
        let alone = ordered(&at_pace(self.real()));
        let busy_s: f64 = alone.busy_s.iter().sum();
        // Of the time that stages compute, the part in which others do.
        let together = (busy_s - alone.seconds) / (busy_s * (1.0 - 1.0 / stages as f64)).max(1e-12);
        let forecast = ordered(&at_pace(self.real() * self.crowded(together)));
        let ends = forecast.spans.iter().map(|spans| spans.last().map_or(0.0, |span| span.end_s));
        let step_s = ends.zip(&update_s).map(|(end_s, update_s)| end_s + update_s).fold(0.0, f64::max);
        Some(step_s + self.rest_s())
    }

    fn of_parts(&self, setup: &Setup) -> Option<f64> {
        let passes = self.parts.iter().find(|passes| passes.split == setup.split)?;
        let slower = self.real() * self.crowded(1.0);
        // All change what they have at the same time.
        let ranks = match &setup.split {
            Split::Parts(split) => split.parts,
            _ => 1,
        };
        let update_s = self.base.update_s * passes.parameters * ranks as f64 * self.streaming_by(ranks);
        Some(slower * passes.seconds + passes.exchange_s + update_s + self.rest_s())
    }

    /// The passes of so many stages over so many samples, and each stage's part of the parameters: on the line through two sizes that were
    /// profiled.
    fn stage_times(&self, stages: usize, samples: f64) -> Option<(Vec<StageTimes>, Vec<f64>)> {
        let of: Vec<&StagePasses> = self.stages.iter().filter(|passes| passes.times.len() == stages).collect();
        let (few, many) = (of.first()?, of.last()?);
        let (least, most) = (few.samples as f64, many.samples as f64);
        let at = |low: f64, high: f64| match most > least {
            true => (low + (high - low) * (samples - least) / (most - least)).max(low.min(high) * samples / most),
            false => low * samples / least.max(1.0),
        };
        let times = few.times.iter().zip(&many.times).map(|(low, high)| StageTimes {
            forward_s: at(low.forward_s, high.forward_s),
            inputs_s: at(low.inputs_s, high.inputs_s),
            weights_s: at(low.weights_s, high.weights_s),
        });
        Some((times.collect(), few.parameters.clone()))
    }
}

#[cfg(test)]
mod tests {
    use crate::parallel::split::Kind;

    use super::*;

    fn known() -> Known {
        let passes = |workers, threads, seconds| Passes { workers, threads, seconds };
        Known {
            batch: 32,
            update_streams: 7.0,
            base: Base { step_s: 1.3, compute_s: 1.1, update_s: 0.14 },
            passes: vec![passes(1, 1, 1.0), passes(1, 2, 0.6), passes(2, 1, 0.55)],
            crowd: 1.1,
            ..Known::default()
        }
    }

    fn close(found: Option<f64>, expected: f64) {
        assert!(found.is_some_and(|found| (found - expected).abs() < 1e-9), "{found:?} and {expected}");
    }

    #[test]
    fn threads_and_replicas_follow_what_was_profiled() {
        let mut known = known();
        let replicas = Setup { workers: 2, in_one_process: true, ..Setup::threads(1) };
        close(known.forecast(&Setup::threads(1)), 1.3);
        close(known.forecast(&Setup::threads(2)), 1.1 * 0.6 + 0.07 + 0.06);
        // Each writes its gradients and reads the other's: five numbers more than the seven of an update.
        close(known.forecast(&replicas), 1.1 * 0.55 + 0.14 * 12.0 / 7.0 / 2.0 + 0.06);
        assert_eq!(known.forecast(&Setup::threads(4)), None, "nothing was profiled of it");
        let (before, slower) = (known.forecast(&replicas), Setup { in_one_process: false, ..replicas.clone() });
        known.learn(&replicas, 2.0 * before.unwrap_or(0.0));
        close(known.forecast(&slower), 2.0 * before.unwrap_or(0.0));
        close(known.forecast(&Setup::threads(2)), 1.1 * 0.6 + 0.07 + 0.06);
        // Two cores that share a memory stream a tenth faster than one, not twice as fast.
        known.streaming = vec![(2, 0.9)];
        close(known.forecast(&Setup::threads(2)), 1.1 * 0.6 + 0.14 * 0.9 + 0.06);
    }

    #[test]
    fn stages_follow_their_schedule() {
        let mut known = Known { base: Base { step_s: 0.8, compute_s: 0.8, update_s: 0.0 }, crowd: 1.0, ..known() };
        known.passes[0].seconds = 0.8;
        let times = |seconds: f64| vec![StageTimes { forward_s: seconds, inputs_s: seconds, weights_s: seconds }; 2];
        let passes = |samples, seconds| StagePasses { samples, times: times(seconds), parameters: vec![0.5, 0.5] };
        known.stages = vec![passes(2, 0.02), passes(8, 0.08)];
        let of = |micro_batches, schedule| {
            let turns = Turns { micro_batches, schedule, cuts: Vec::new() };
            Setup { split: Split::Pipeline(2), turns: Some(turns), ..Setup::threads(1) }
        };
        // (m + s − 1) times the passes of a stage; and each pass by itself with zero bubbles: one third of the bubble.
        close(known.forecast(&of(4, Kind::GPipe)), 5.0 * 0.24);
        close(known.forecast(&of(16, Kind::OneForwardOneBackward)), 17.0 * 0.06);
        close(known.forecast(&of(4, Kind::ZeroBubble)), 4.0 * 0.24 + 0.08);
        // Stages that never compute at the same time do not crowd each other; others do for as long as they do.
        known.crowd = 1.5;
        close(known.forecast(&of(1, Kind::GPipe)), 2.0 * 0.96);
        close(known.forecast(&of(4, Kind::GPipe)), 5.0 * 0.24 * (1.0 + 0.5 * 0.75));
        (known.crowd, known.hand_off_s) = (1.0, 0.005);
        close(known.forecast(&of(4, Kind::GPipe)), 5.0 * 0.25);
        known.hand_off_s = 0.0;
        assert_eq!(known.forecast(&Setup { split: Split::Pipeline(3), ..of(4, Kind::GPipe) }), None);
    }
}
