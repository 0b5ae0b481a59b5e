//! Where a step's time goes: named phases, each a tracing span and a figure in the step's event.

use std::collections::BTreeMap;

use paceline_system::clock::Clock;

/// The most phases that a step has.
const PHASES_MAX: usize = 8;

/// A stopwatch with named laps. It takes no memory while it runs.
#[derive(Debug)]
pub struct Phases {
    clock: Clock,
    start: f64,
    laps: [(&'static str, f64); PHASES_MAX],
    count: usize,
}

impl Phases {
    /// Starts the step's stopwatch.
    pub fn start(clock: &Clock) -> Self {
        Self { clock: clock.clone(), start: clock.seconds(), laps: [("", 0.0); PHASES_MAX], count: 0 }
    }

    /// What it reads.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Runs `body` as the phase `name`.
    ///
    /// # Panics
    /// When there are too many names.
    pub fn time<T>(&mut self, name: &'static str, body: impl FnOnce() -> T) -> T {
        let _span = tracing::debug_span!("phase", name).entered();
        let start = self.clock.seconds();
        let result = body();
        *self.lap(name) += self.clock.seconds() - start;
        result
    }

    /// Counts so many seconds of one phase as another's, which ran inside it.
    ///
    /// # Panics
    /// As [`Phases::time`].
    pub fn shift(&mut self, from: &'static str, to: &'static str, seconds: f64) {
        *self.lap(from) -= seconds;
        *self.lap(to) += seconds;
    }

    fn lap(&mut self, name: &'static str) -> &mut f64 {
        let known = self.laps[..self.count].iter().position(|lap| lap.0 == name);
        let index = known.unwrap_or_else(|| {
            assert!(self.count < PHASES_MAX, "a step has at most {PHASES_MAX} phases");
            self.laps[self.count].0 = name;
            self.count += 1;
            self.count - 1
        });
        &mut self.laps[index].1
    }

    /// Seconds since the start, and seconds by phase.
    pub fn finish(self) -> (f64, BTreeMap<String, f64>) {
        let laps = self.laps[..self.count].iter().map(|&(name, seconds)| (name.to_owned(), seconds)).collect();
        (self.clock.seconds() - self.start, laps)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn time_inside_a_phase_can_be_another_phase() {
        let clock = Clock::manual();
        let mut phases = Phases::start(&clock);
        for _ in 0..2 {
            phases.time("compute", || clock.advance(Duration::from_secs(5)));
        }
        phases.shift("compute", "update", 3.0);
        clock.advance(Duration::from_secs(1));
        let (seconds, laps) = phases.finish();
        assert_eq!((seconds, laps["compute"], laps["update"]), (11.0, 7.0, 3.0));
    }
}
