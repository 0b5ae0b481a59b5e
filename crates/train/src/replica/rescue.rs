//! What a replica can still save when another one is lost in the middle of a step: the last step whose update
//! is whole, if the weights are still those.
//!
//! Gradients are applied as they come, so a step that failed may have changed some weights and not others;
//! then nothing here can be saved, and the last checkpoint is what is left. The update of a step may come as
//! late as the next forward pass, so the last whole step is one of the last two. Running statistics change in
//! the forward pass, before any weight does, so they are kept as they were when each of the two ended: a copy
//! of a few kilobytes for each step.

use super::Replica;

/// Where the last two steps ended.
#[derive(Debug, Default)]
pub(super) struct Boundary {
    /// The step with which training together began.
    first_step: u64,
    /// Steps done when the one that is under way is.
    next_step: u64,
    /// Steps whose update was made, where gradients are looked at all together and the update follows at the
    /// end.
    updated: u64,
    /// Running statistics after so many steps, by whether that number is odd.
    states: [(u64, Vec<f32>); 2],
}

impl Replica {
    /// Training together begins, with so many steps done before.
    pub(super) fn begin_boundary(&mut self, step: u64) {
        let states = || (step, self.store().states.to_vec());
        let states = [states(), states()];
        self.boundary = Boundary { first_step: step, next_step: step, updated: step, states };
    }

    /// A step begins, after so many.
    pub(super) fn mark_begin(&mut self, steps: u64) {
        self.boundary.next_step = steps;
        self.mark_boundary();
        self.boundary.next_step = steps + 1;
    }

    /// The update of the step that is under way was made, all of it.
    pub(super) fn end_update(&mut self) {
        self.boundary.updated = self.boundary.next_step;
    }

    /// Keeps the running statistics as they are after the last step.
    pub(super) fn mark_boundary(&mut self) {
        let Self { boundary: Boundary { next_step, states, .. }, engine, .. } = self;
        let store = &engine.weights().store;
        let (step, kept) = &mut states[(*next_step % 2) as usize];
        // Alone, nobody can be lost.
        if kept.len() == store.states.len() {
            *step = *next_step;
            kept.copy_from_slice(&store.states);
        }
    }

    /// Whether it keeps running statistics that differ from other replicas' until the mean is taken.
    pub fn has_own_statistics(&self) -> bool {
        !self.states.is_empty() && !self.plan().shares_statistics()
    }

    /// Goes back to where `step` steps had ended, after another replica was lost, if the weights and the
    /// optimizer are still those: then they may be saved, with this replica's own running statistics. Nothing
    /// more can be trained.
    pub fn rescue(&mut self, step: u64) -> bool {
        let Self { boundary: Boundary { first_step, updated, states, .. }, engine, exchange, .. } = self;
        let keeps_gradients = engine.keeps_gradients();
        // Servers have the optimizer's state, or every replica a part of it, or weights of its own that may be in the middle of becoming
        // the same; and where a device has weights of its own the running statistics are not at hand.
        let has_all =
            exchange.makes_own_steps() && exchange.shares_steps() && !exchange.steps_apart() && engine.gpu().is_none();
        let store = &mut engine.weights_mut().store;
        let (marked, states) = &states[(step % 2) as usize];
        if !has_all || *marked != step || step < *first_step || states.len() != store.states.len() {
            return false;
        }
        // Where gradients are looked at all together, the update follows when nothing can be lost any more.
        let whole = match keeps_gradients {
            true => step == *updated,
            false => exchange.agreement().has_stepped(step - *first_step),
        };
        if whole {
            store.states.copy_from_slice(states);
        }
        whole
    }
}
