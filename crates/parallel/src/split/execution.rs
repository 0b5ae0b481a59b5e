//! How far all stages are, and when what they sent arrives: the arithmetic that forecasts, list scheduling
//! and the search for deadlocks share.

use super::{Pass, StageTimes, Task};

/// What surrounds the stages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setting<'a> {
    pub micro_batches: usize,
    /// Of each stage.
    pub times: &'a [StageTimes],
    /// Of one message between each stage and the next, in either direction.
    pub transfer_s: &'a [f64],
    /// Whether gradients of weights have tasks of their own.
    pub separates_gradients: bool,
}

impl Setting<'_> {
    /// # Panics
    /// When there is nothing to do, a boundary has no time, or a time is none: bugs.
    pub fn check(&self) {
        assert!(self.micro_batches > 0 && !self.times.is_empty(), "a schedule has a stage and a micro-batch");
        assert_eq!(self.transfer_s.len() + 1, self.times.len(), "every boundary between stages has a time");
        let passes = self.times.iter().flat_map(|times| [times.forward_s, times.inputs_s, times.weights_s]);
        let mut all = passes.chain(self.transfer_s.iter().copied());
        assert!(all.all(|time| time.is_finite() && time >= 0.0), "times are not negative");
    }

    pub fn task_s(&self, stage: usize, pass: Pass) -> f64 {
        self.times[stage].pass_s(pass, self.separates_gradients)
    }
}

/// Some tasks done and the others not.
#[derive(Clone, Debug)]
pub(super) struct Execution<'a> {
    setting: Setting<'a>,
    stages: Vec<Progress>,
    /// When the activations that a forward pass needs are there, by stage and micro-batch; infinite until
    /// sent.
    activations_s: Vec<f64>,
    /// When the gradients that a backward pass needs are there.
    gradients_s: Vec<f64>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    /// Tasks that were begun, by pass.
    begun: [usize; 3],
    /// When the last of them ends.
    free_s: f64,
}

impl<'a> Execution<'a> {
    /// Nothing is done.
    pub fn new(setting: Setting<'a>) -> Self {
        let (stages, count) = (setting.times.len(), setting.micro_batches);
        let mut activations_s = vec![f64::INFINITY; stages * count];
        let mut gradients_s = activations_s.clone();
        activations_s[..count].fill(0.0);
        gradients_s[(stages - 1) * count..].fill(0.0);
        Self { setting, stages: vec![Progress::default(); stages], activations_s, gradients_s }
    }

    /// Tasks of a pass that a stage began.
    pub fn begun(&self, stage: usize, pass: Pass) -> usize {
        self.stages[stage].begun[pass as usize]
    }

    /// When a stage could begin its next task of a pass; none while that waits for something that nobody
    /// began.
    pub fn next_s(&self, stage: usize, pass: Pass) -> Option<f64> {
        let progress = &self.stages[stage];
        let next = progress.begun[pass as usize];
        let limit = match pass {
            Pass::Forward => self.setting.micro_batches,
            Pass::Backward => progress.begun[Pass::Forward as usize],
            Pass::Weights => progress.begun[Pass::Backward as usize],
        };
        if next >= limit {
            return None;
        }
        let index = stage * self.setting.micro_batches + next;
        let ready_s = match pass {
            Pass::Forward => self.activations_s[index],
            Pass::Backward => self.gradients_s[index],
            Pass::Weights => 0.0,
        };
        ready_s.is_finite().then_some(progress.free_s.max(ready_s))
    }

    /// Begins the next task of a pass; `next_s` said when. Returns it with its end.
    pub fn begin(&mut self, stage: usize, pass: Pass, begin_s: f64) -> (Task, f64) {
        let count = self.setting.micro_batches;
        let progress = &mut self.stages[stage];
        let micro_batch = progress.begun[pass as usize];
        progress.begun[pass as usize] += 1;
        progress.free_s = begin_s + self.setting.task_s(stage, pass);
        let end_s = progress.free_s;
        match pass {
            Pass::Forward if stage + 1 < self.stages.len() => {
                let inbox = &mut self.activations_s[(stage + 1) * count..(stage + 2) * count];
                send(inbox, micro_batch, end_s, self.setting.transfer_s[stage]);
            }
            Pass::Backward if stage > 0 => {
                let inbox = &mut self.gradients_s[(stage - 1) * count..stage * count];
                send(inbox, micro_batch, end_s, self.setting.transfer_s[stage - 1]);
            }
            _ => {}
        }
        (Task { micro_batch, pass }, end_s)
    }
}

/// A link carries one message at a time in each direction: one begins when those before have arrived.
fn send(inbox: &mut [f64], micro_batch: usize, end_s: f64, transfer_s: f64) {
    let link_free_s = if micro_batch == 0 { 0.0 } else { inbox[micro_batch - 1] };
    inbox[micro_batch] = end_s.max(link_free_s) + transfer_s;
}
