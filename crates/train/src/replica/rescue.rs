//! What a replica can still save when another one is lost in the middle of a step: the last whole step, if the weights are
//! still those.
//!
//! Gradients are applied as they come, so a step that failed may have changed some weights and not others; then nothing here
//! can be saved, and the last checkpoint is what is left. Running statistics change in the forward pass, before any weight
//! does, so they are kept as they were when the last step ended: one copy of a few kilobytes for each step.

use super::Replica;

/// Where the last whole step ended.
#[derive(Debug, Default)]
pub(super) struct Boundary {
    /// The step with which training together began.
    first_step: u64,
    /// Running statistics as they were before the step that is under way.
    states: Vec<f32>,
}

impl Replica {
    /// Training together begins, with so many steps done before.
    pub(super) fn begin_boundary(&mut self, step: u64) {
        self.boundary = Boundary { first_step: step, states: self.store.states.to_vec() };
    }

    /// A step begins, or all replicas meet between steps.
    pub(super) fn mark_boundary(&mut self) {
        if !self.boundary.states.is_empty() {
            self.boundary.states.copy_from_slice(&self.store.states);
        }
    }

    /// Goes back to the end of the last whole step after another replica was lost, if `step` steps are whole here: then weights,
    /// optimizer and running statistics (this replica's own) may be saved. Nothing more can be trained.
    pub fn rescue(&mut self, step: u64) -> bool {
        let steps = step.saturating_sub(self.boundary.first_step);
        // Where gradients are looked at all together, the update follows when nothing can be lost any more.
        let whole = self.gpu.is_none() && (self.plan().stores_gradients() || self.agreement.has_stepped(steps));
        if whole && !self.boundary.states.is_empty() {
            self.store.states.copy_from_slice(&self.boundary.states);
        }
        whole
    }
}
