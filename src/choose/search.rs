//! The search: which set-ups are measured in which order, for as long as there is time. The baseline first, then whatever is forecast to be
//! fastest; what is forecast to take twice as long as the best is not. Those that came out close to the best are measured again in turns.

use std::collections::BTreeSet;

use super::apply::Listed;
use super::forecast::{Base, Known, update_streams};
use super::measure::{Length, Measured, Unmeasured, measure};
use super::profile::{Profiler, hand_off_s, streaming};
use super::progress::Progress;
use super::setup::{Family, Setup};
use super::table::Row;
use super::{Request, median};
use crate::failure::Failure;
use crate::system::clock::Clock;
use crate::train::Config;
use crate::train::compute::Compute;
use crate::train::together::Split;

/// What is forecast to be slower than this many times the best is not measured.
const HOPELESS: f64 = 2.0;

/// Set-ups this close to the best are measured again: by one turn, by two.
const CLOSE: [f64; 2] = [1.15, 1.05];

/// How many of those that are close.
const CLOSE_MAX: usize = 5;

/// Set-ups of stages that are measured, of the many that differ in their order alone; more of them where much time is left and they are
/// forecast to be as good as the best.
const STAGED_MAX: usize = 3;
const PROMISING: f64 = 1.1;
const MUCH_TIME: f64 = 0.4;

/// The parts of the budget that the baseline and profiled passes may take.
const BASELINE_SHARE: f64 = 0.4;
const PROFILE_SHARE: f64 = 0.2;

/// A set-up under way.
pub struct Contender {
    /// The set-up, and why it is left out if it is.
    pub listed: Listed,
    /// What was expected of it before it was measured.
    pub forecast_s: Option<f64>,
    /// Each time it was measured.
    pub turns: Vec<Measured>,
    /// Why it was not measured although it applies.
    pub why_not: Option<String>,
}

impl Contender {
    /// The median of its turns.
    pub fn step_s(&self) -> Option<f64> {
        let mut turns: Vec<f64> = self.turns.iter().map(|turn| turn.step_s).collect();
        (!turns.is_empty()).then(|| median(&mut turns))
    }

    /// The least of its turns; of one turn alone, what was expected of it if that is less.
    fn could_be_s(&self) -> Option<f64> {
        let least_s = self.turns.iter().map(|turn| turn.step_s).min_by(f64::total_cmp)?;
        let expected_s = self.forecast_s.filter(|_| self.turns.len() == 1);
        Some(expected_s.map_or(least_s, |expected_s| expected_s.min(least_s)))
    }

    fn is_open(&self) -> bool {
        self.listed.left_out.is_none() && self.turns.is_empty() && self.why_not.is_none()
    }
}

/// Measures until the time is over.
pub struct Search<'a> {
    pub request: &'a Request<'a>,
    pub config: &'a Config,
    pub all: Vec<Contender>,
    pub known: Known,
    pub clock: Clock,
    pub length: Length,
    pub progress: &'a Progress,
    /// Seconds that a run takes beside its steps.
    around_s: f64,
}

/// The user has asked for the end, or nothing can be measured.
pub enum Ended {
    Interrupted,
    Failed(Failure),
}

impl From<Failure> for Ended {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl<'a> Search<'a> {
    /// A search over set-ups of which none was measured; both passes take about so long on one core.
    pub fn new(
        (request, config): (&'a Request<'a>, &'a Config),
        listed: Vec<Listed>,
        look_s: f64,
        (clock, progress): (Clock, &'a Progress),
    ) -> Self {
        let open = |listed| Contender { listed, forecast_s: None, turns: Vec::new(), why_not: None };
        let known = Known { batch: config.batch, update_streams: update_streams(config.optimizer), ..Known::default() };
        Self {
            request,
            config,
            all: listed.into_iter().map(open).collect(),
            known,
            clock,
            length: length(look_s, request.budget_s),
            progress,
            around_s: 1.0,
        }
    }

    fn left_s(&self) -> f64 {
        self.request.budget_s - self.clock.seconds()
    }

    /// The whole search.
    pub fn run(&mut self, profiler: Profiler<'_>, look_s: f64) -> Result<(), Ended> {
        let baseline = self.all.iter().position(Contender::is_open);
        let Some(baseline) = baseline else { return Ok(()) };
        let expected_s = look_s * (self.length.warm_up + self.length.steps) as f64;
        if self.all[baseline].listed.setup.threads != Some(1) || expected_s < BASELINE_SHARE * self.request.budget_s {
            self.turn(baseline)?;
        }
        self.profile_all(profiler, look_s)?;
        while let Some(next) = self.next() {
            self.turn(next)?;
        }
        self.repeat_close_ones()
    }

    /// The next to measure: whatever is forecast to be fastest, and what nothing is known of in the order of the list.
    fn next(&mut self) -> Option<usize> {
        loop {
            let known = &self.known;
            let expected = |contender: &Contender| known.forecast(&contender.listed.setup).unwrap_or(0.0);
            let open = self.all.iter().enumerate().filter(|(_, contender)| contender.is_open());
            let (next, expected_s) = open
                .map(|(index, contender)| (index, expected(contender)))
                .min_by(|(_, one), (_, other)| one.total_cmp(other))?;
            match self.not_worth_it(next, expected_s) {
                None => return Some(next),
                Some(sentence) => {
                    let forecast_s = self.known.forecast(&self.all[next].listed.setup);
                    let contender = &mut self.all[next];
                    (contender.forecast_s, contender.why_not) = (forecast_s, Some(sentence));
                }
            }
        }
    }

    fn not_worth_it(&self, next: usize, expected_s: f64) -> Option<String> {
        let best_s = self.best_s();
        let least_s = self.known.least(&self.all[next].listed.setup).unwrap_or(0.0);
        if best_s.is_some_and(|best_s| least_s > HOPELESS * best_s) {
            return Some("forecast to take more than twice as long as the best".into());
        }
        let family = self.all[next].listed.setup.family();
        let same = |other: &&Contender| other.listed.setup.family() == family && !other.turns.is_empty();
        let is_promising = best_s.is_some_and(|best_s| expected_s <= PROMISING * best_s)
            && self.left_s() > MUCH_TIME * self.request.budget_s;
        if family == Family::Stages && !is_promising && self.all.iter().filter(same).count() >= STAGED_MAX {
            return Some("others of its kind that are forecast to be faster were measured".to_owned());
        }
        let run_s = self.around_s + self.steps_s(if expected_s > 0.0 { expected_s } else { best_s.unwrap_or(0.0) });
        (run_s > self.left_s()).then(|| "no time was left; --choose-budget gives it more".to_owned())
    }

    /// Seconds of the steps of a run.
    fn steps_s(&self, step_s: f64) -> f64 {
        let Length { warm_up, steps, seconds, .. } = self.length;
        ((warm_up + steps) as f64 * step_s).max(seconds + step_s)
    }

    fn best_s(&self) -> Option<f64> {
        self.all.iter().filter_map(Contender::step_s).min_by(f64::total_cmp)
    }

    /// Measures a set-up once.
    fn turn(&mut self, index: usize) -> Result<(), Ended> {
        let setup = self.all[index].listed.setup.clone();
        self.progress.at(self.clock.seconds(), &setup.name());
        let forecast_s = self.known.forecast(&setup);
        let length = Length { most_s: self.left_s().max(1.0), ..self.length };
        let found = measure(&setup, (self.request, self.config), length);
        let contender = &mut self.all[index];
        let measured = match found {
            Ok(measured) => measured,
            Err(Unmeasured::Interrupted) => return Err(Ended::Interrupted),
            Err(Unmeasured::Failed(sentence)) => {
                // One that ran before, and does not now, keeps what it had.
                contender.why_not = contender.turns.is_empty().then_some(sentence);
                return Ok(());
            }
        };
        if contender.turns.is_empty() {
            contender.forecast_s = forecast_s;
        }
        contender.turns.push(measured);
        self.around_s = self.around_s.max(measured.around_s);
        let is_baseline = setup == Setup::threads(1);
        if is_baseline && self.known.base == Base::default() {
            let Measured { step_s, compute_s, update_s, .. } = measured;
            self.known.base = Base { step_s, compute_s, update_s };
            self.around_s = measured.around_s;
        } else if !is_baseline {
            self.known.learn(&setup, measured.step_s);
        }
        Ok(())
    }

    /// Profiles what set-ups are forecast from, as far as there is time for it.
    fn profile_all(&mut self, profiler: Profiler<'_>, look_s: f64) -> Result<(), Ended> {
        if self.config.device != Compute::Cpu {
            return Ok(());
        }
        let setups: Vec<Setup> =
            self.all.iter().filter(|one| one.listed.left_out.is_none()).map(|one| one.listed.setup.clone()).collect();
        // Each pass is made three times, by one thread, by several, and in stages.
        let allowed_s = PROFILE_SHARE * self.request.budget_s;
        let profiler = profiler.within(10.0 * look_s, allowed_s);
        let until_s = self.clock.seconds() + 2.0 * allowed_s;
        self.known.passes.push(self.profiled("one thread", || profiler.passes(&Setup::threads(1)))?);
        for setup in &setups {
            let is_known =
                self.known.passes.iter().any(|one| (one.workers, Some(one.threads)) == (setup.workers, setup.threads));
            let is_whole = matches!(setup.family(), Family::Replica | Family::Workers);
            if is_whole && !is_known && self.clock.seconds() < until_s {
                let passes = self.profiled(&setup.name(), || profiler.passes(setup))?;
                self.known.passes.push(passes);
            }
        }
        let busy = setups.iter().map(|setup| setup.threads.unwrap_or(1) * setup.ranks(self.config));
        for threads in busy.filter(|threads| *threads > 1).collect::<BTreeSet<_>>() {
            let part = self.profiled("memory", || Ok(streaming(threads)))?;
            self.known.streaming.push((threads, part));
        }
        let mut cuts: Vec<(Vec<String>, usize)> = Vec::new();
        for setup in &setups {
            let (Split::Pipeline(_), Some(turns)) = (&setup.split, &setup.turns) else { continue };
            if !turns.cuts.is_empty() && cuts.iter().all(|(known, _)| *known != turns.cuts) {
                cuts.push((turns.cuts.clone(), setup.threads.unwrap_or(1)));
            }
        }
        let in_parts = || setups.iter().filter(|setup| setup.family() == Family::Parts);
        if let Some(ranks) = cuts.first().map(|(cuts, _)| cuts.len() + 1).or(in_parts().next().map(|_| 2)) {
            self.known.crowd = self.profiled("all cores", || profiler.crowd(ranks))?;
        }
        for setup in in_parts() {
            if self.clock.seconds() < until_s {
                let passes = self.profiled(&setup.name(), || Ok(profiler.part_passes(setup)?))?;
                self.known.parts.push(passes);
            }
        }
        for (cuts, threads) in cuts {
            if self.clock.seconds() >= until_s {
                break;
            }
            let passes = self.profiled("stages", || Ok(profiler.stages(&cuts, threads)?))?;
            self.known.stages.extend(passes);
        }
        self.known.hand_off_s = self.profiled("hand-offs", || Ok(hand_off_s()))?;
        Ok(())
    }

    fn profiled<T>(&self, what: &str, take: impl FnOnce() -> Result<T, Failure>) -> Result<T, Ended> {
        if self.request.stop.requested() {
            return Err(Ended::Interrupted);
        }
        self.progress.at(self.clock.seconds(), &format!("profiling {what}"));
        Ok(take()?)
    }

    /// Measures those again that came out close to the best, or were expected to, in turns, there and back: a machine that was slow for a
    /// while has been slow for one of them alone.
    fn repeat_close_ones(&mut self) -> Result<(), Ended> {
        for (turn, close_to) in CLOSE.into_iter().enumerate() {
            let Some(best_s) = self.best_s() else { return Ok(()) };
            let mut close: Vec<(usize, f64)> = self
                .all
                .iter()
                .enumerate()
                .filter_map(|(index, one)| Some((index, one.could_be_s()?)))
                .filter(|(_, step_s)| *step_s <= close_to * best_s)
                .collect();
            close.sort_by(|(_, one), (_, other)| one.total_cmp(other));
            close.truncate(CLOSE_MAX);
            if close.len() < 2 {
                return Ok(());
            }
            if turn % 2 == 0 {
                close.reverse();
            }
            for (index, step_s) in close {
                if self.around_s + self.steps_s(step_s) <= self.left_s() {
                    self.turn(index)?;
                }
            }
        }
        Ok(())
    }

    /// What was found.
    pub fn rows(&self) -> Vec<Row> {
        let base = &self.all[0];
        let base_s = base.step_s().or_else(|| self.known.forecast(&base.listed.setup));
        self.all.iter().map(|contender| self.row(contender, base_s)).collect()
    }

    fn row(&self, contender: &Contender, base_s: Option<f64>) -> Row {
        let Contender { listed, forecast_s, turns, why_not } = contender;
        let step_s = contender.step_s();
        let peak = turns.iter().map(|turn| turn.memory_bytes).max().filter(|bytes| *bytes > 0);
        Row {
            setup: listed.setup.name(),
            flags: listed.setup.flags(),
            applies: listed.left_out.is_none(),
            step_s,
            turns: turns.iter().map(|turn| turn.step_s).collect(),
            samples_per_s: step_s.map(|step_s| self.config.batch as f64 / step_s),
            speedup: base_s.zip(step_s).map(|(base_s, step_s)| base_s / step_s),
            // What processes share is in the peak of each; the plan counts it once, and is a bound from above.
            memory_bytes: peak.into_iter().chain(listed.bytes).min(),
            forecast_s: *forecast_s,
            why_not: listed.left_out.clone().or_else(|| why_not.clone()),
        }
    }
}

/// How long each run is, where both passes take so long on one core: a sixth of the budget at most for the slowest.
fn length(look_s: f64, budget_s: f64) -> Length {
    let fits = (budget_s / 6.0 / look_s.max(1e-6)) as usize;
    let all = fits.clamp(2, 8);
    let warm_up = if all > 4 { 3 } else { 1 };
    Length { warm_up, steps: all - warm_up, seconds: (budget_s / 40.0).clamp(0.1, 1.5), most_s: budget_s }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_models_are_measured_by_fewer_steps() {
        let quick = length(0.001, 60.0);
        assert_eq!((quick.warm_up, quick.steps, quick.seconds), (3, 5, 1.5));
        let slow = length(3.0, 60.0);
        assert_eq!((slow.warm_up, slow.steps), (1, 2));
        assert_eq!((length(100.0, 60.0).warm_up, length(100.0, 60.0).steps), (1, 1));
        assert!(length(0.001, 10.0).seconds < 0.3);
    }
}
