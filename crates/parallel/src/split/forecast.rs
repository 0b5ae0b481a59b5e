//! How long a schedule takes, by the times of its stages and messages.

use super::execution::Execution;
use super::{Schedule, StageTimes, Task};

/// A task, and when.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// Which task.
    pub task: Task,
    /// When it begins, from the start of the step.
    pub begin_s: f64,
    /// When it ends.
    pub end_s: f64,
}

/// When everything of a step happens.
#[derive(Clone, Debug, PartialEq)]
pub struct Forecast {
    /// The whole step.
    pub seconds: f64,
    /// How long each stage computes.
    pub busy_s: Vec<f64>,
    /// What each stage does when.
    pub spans: Vec<Vec<Span>>,
}

impl Forecast {
    /// The share of all stages' time in which they wait.
    pub fn bubble(&self) -> f64 {
        let offered_s = self.seconds * self.busy_s.len() as f64;
        if offered_s > 0.0 { 1.0 - self.work_s() / offered_s } else { 0.0 }
    }

    /// How many times faster than one device that computes all stages.
    pub fn speedup(&self) -> f64 {
        if self.seconds > 0.0 { self.work_s() / self.seconds } else { 1.0 }
    }

    /// What the speed-up would be if the slowest stage never waited: one over its share of the work. No
    /// schedule is better.
    pub fn bound(&self) -> f64 {
        let slowest_s = self.busy_s.iter().copied().fold(0.0, f64::max);
        if slowest_s > 0.0 { self.work_s() / slowest_s } else { 1.0 }
    }

    fn work_s(&self) -> f64 {
        self.busy_s.iter().sum()
    }
}

impl Schedule {
    /// When everything happens if stages take these times, and one message over the boundary between stage k
    /// and the next takes `transfer_s[k]`, in either direction. Messages travel while stages compute; a link
    /// carries one at a time in each direction.
    ///
    /// # Panics
    /// When a stage or a boundary has no time, or a time is negative or no number: bugs.
    pub fn forecast(&self, times: &[StageTimes], transfer_s: &[f64]) -> Forecast {
        assert_eq!(times.len(), self.stages(), "every stage has its times");
        let setting = self.setting(times, transfer_s);
        setting.check();
        let mut spans: Vec<Vec<Span>> = self.tasks.iter().map(|tasks| Vec::with_capacity(tasks.len())).collect();
        self.run(&mut Execution::new(setting), |stage, task, begin_s, end_s| {
            spans[stage].push(Span { task, begin_s, end_s });
        });
        let seconds = spans.iter().flatten().map(|span| span.end_s).fold(0.0, f64::max);
        let busy_s = times.iter().map(|times| times.total_s() * self.micro_batches as f64).collect();
        Forecast { seconds, busy_s, spans }
    }

    /// Runs every stage's list as far as it goes, and returns how far. What depends on what is fixed by the
    /// lists, so the order in which stages are visited changes nothing.
    pub(super) fn run(
        &self,
        execution: &mut Execution<'_>,
        mut report: impl FnMut(usize, Task, f64, f64),
    ) -> Vec<usize> {
        let mut done = vec![0; self.stages()];
        loop {
            let mut went_on = false;
            // Down with the activations and up with the gradients: a sweep carries a micro-batch all the way.
            for stage in (0..self.stages()).chain((0..self.stages()).rev()) {
                while let Some(&task) = self.tasks[stage].get(done[stage]) {
                    let Some(begin_s) = execution.next_s(stage, task.pass) else { break };
                    let (begun, end_s) = execution.begin(stage, task.pass, begin_s);
                    report(stage, begun, begin_s, end_s);
                    done[stage] += 1;
                    went_on = true;
                }
            }
            if !went_on {
                return done;
            }
        }
    }
}
