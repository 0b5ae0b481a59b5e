//! Whether a schedule keeps what it promises: one order of gradients, no deadlock, no more memory than its
//! kind's.

use super::execution::{Execution, Setting};
use super::{Pass, Schedule, StageTimes};

impl Schedule {
    /// Checks that every stage runs each pass over each micro-batch once and in order, no pass before the one
    /// it needs, that no stages wait for each other for ever, and that no stage keeps more than its kind
    /// allows.
    ///
    /// # Errors
    /// What is wrong, and where.
    pub fn verify(&self) -> Result<(), String> {
        for stage in 0..self.stages() {
            self.verify_order(stage)?;
        }
        self.verify_progress()?;
        for stage in 0..self.stages() {
            let (slots, most) = (self.slots(stage), self.kind.slots_max(stage, self.stages(), self.micro_batches));
            if slots > most {
                let kind = self.kind;
                return Err(format!("stage {stage} keeps {slots} micro-batches at once, and {kind} allows {most}"));
            }
        }
        Ok(())
    }

    fn verify_order(&self, stage: usize) -> Result<(), String> {
        let mut done = [0; 3];
        for task in &self.tasks[stage] {
            let before = match task.pass {
                Pass::Forward => self.micro_batches,
                Pass::Backward => done[Pass::Forward as usize],
                Pass::Weights if self.separates_gradients() => done[Pass::Backward as usize],
                Pass::Weights => return Err(format!("stage {stage} has {task}, but gradients are not separated")),
            };
            let next = done[task.pass as usize];
            if task.micro_batch != next {
                return Err(format!("stage {stage} has {task} where {}{next} is due", task.pass.letter()));
            }
            if next >= before {
                return Err(format!("stage {stage} has {task} before what it needs"));
            }
            done[task.pass as usize] += 1;
        }
        let weights = if self.separates_gradients() { self.micro_batches } else { 0 };
        if done != [self.micro_batches, self.micro_batches, weights] {
            let [forward, backward, weights] = done;
            let count = self.micro_batches;
            return Err(format!(
                "stage {stage} has {forward} F, {backward} B and {weights} W of {count} micro-batches"
            ));
        }
        Ok(())
    }

    /// Lets every stage run as far as it can, until all are done or none goes on.
    fn verify_progress(&self) -> Result<(), String> {
        let times = vec![StageTimes::default(); self.stages()];
        let transfer_s = vec![0.0; self.stages() - 1];
        let mut execution = Execution::new(self.setting(&times, &transfer_s));
        let done = self.run(&mut execution, |_, _, _, _| ());
        let stuck = (0..self.stages()).find(|&stage| done[stage] < self.tasks[stage].len());
        stuck.map_or(Ok(()), |stage| {
            Err(format!("stage {stage} waits for ever before {}", self.tasks[stage][done[stage]]))
        })
    }

    pub(super) fn setting<'a>(&self, times: &'a [StageTimes], transfer_s: &'a [f64]) -> Setting<'a> {
        let (micro_batches, separates_gradients) = (self.micro_batches, self.separates_gradients());
        Setting { micro_batches, times, transfer_s, separates_gradients }
    }
}
