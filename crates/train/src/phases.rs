//! Where a step's time goes: each phase is a tracing span, a figure in the step's event, and the process's position while
//! it lasts.

use paceline_system::clock::Clock;
use paceline_system::phase::{Phase, PhaseTimes};
use paceline_system::progress::Progress;

/// A stopwatch with a lap for each phase. It takes no memory while it runs.
#[derive(Debug)]
pub struct Phases {
    clock: Clock,
    /// Where the phase is said, after so many updates.
    watched: Option<(Progress, u64)>,
    start: f64,
    times: PhaseTimes,
}

impl Phases {
    /// Starts a step's stopwatch.
    pub fn start(clock: &Clock) -> Self {
        Self { clock: clock.clone(), watched: None, start: clock.seconds(), times: PhaseTimes::default() }
    }

    /// The same, after so many updates; `progress` says which phase it is.
    pub fn watched(clock: &Clock, progress: &Progress, step: u64) -> Self {
        Self { watched: Some((progress.clone(), step)), ..Self::start(clock) }
    }

    /// What it reads.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Runs `body` as a phase.
    pub fn time<T>(&mut self, phase: Phase, body: impl FnOnce() -> T) -> T {
        let _span = tracing::debug_span!("phase", name = phase.name()).entered();
        if let Some((progress, step)) = &self.watched {
            progress.enter(phase, *step);
        }
        let start = self.clock.seconds();
        let result = body();
        self.times.add(phase, self.clock.seconds() - start);
        result
    }

    /// Counts so many seconds of one phase as another's, which ran inside it.
    pub fn shift(&mut self, from: Phase, to: Phase, seconds: f64) {
        self.times.add(from, -seconds);
        self.times.add(to, seconds);
    }

    /// Seconds since the start, and seconds by phase.
    pub fn finish(self) -> (f64, PhaseTimes) {
        (self.clock.seconds() - self.start, self.times)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn time_inside_a_phase_can_be_another_phase() {
        let (clock, progress) = (Clock::manual(), Progress::default());
        let mut phases = Phases::watched(&clock, &progress, 4);
        for _ in 0..2 {
            phases.time(Phase::Backward, || clock.advance(Duration::from_secs(5)));
        }
        assert_eq!(progress.position().to_string(), "in phase backward after step 4");
        phases.shift(Phase::Backward, Phase::Update, 3.0);
        clock.advance(Duration::from_secs(1));
        let (seconds, laps) = phases.finish();
        assert_eq!((seconds, laps.get(Phase::Backward), laps.get(Phase::Update)), (11.0, Some(7.0), Some(3.0)));
    }
}
