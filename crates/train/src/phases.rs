//! Where a step's time goes: named phases, each a tracing span and a figure in the step's event.

use std::collections::BTreeMap;

use paceline_system::clock::Clock;

/// A stopwatch with named laps.
#[derive(Debug)]
pub struct Phases {
    clock: Clock,
    start: f64,
    laps: BTreeMap<String, f64>,
}

impl Phases {
    /// Starts the step's stopwatch.
    pub fn start(clock: &Clock) -> Self {
        Self { clock: clock.clone(), start: clock.seconds(), laps: BTreeMap::new() }
    }

    /// Runs `body` as the phase `name`.
    pub fn time<T>(&mut self, name: &'static str, body: impl FnOnce() -> T) -> T {
        let _span = tracing::debug_span!("phase", name).entered();
        let start = self.clock.seconds();
        let result = body();
        *self.laps.entry(name.to_owned()).or_default() += self.clock.seconds() - start;
        result
    }

    /// Seconds since the start, and seconds by phase.
    pub fn finish(self) -> (f64, BTreeMap<String, f64>) {
        (self.clock.seconds() - self.start, self.laps)
    }
}
