//! What survives a step: parameters, their gradients, and states, each as one flat buffer.
//!
//! Flat, because that is what replicas agree on: a gradient message is a range of one slice. The layout is the plan's
//! and is the same for the training and the evaluation graph of a model, so both run on one store.

use crate::buffer::Buffer;
use crate::plan::{Layout, Plan};

/// The tensors of one replica of a model.
#[derive(Clone, Debug)]
pub struct Store {
    layout: Layout,
    states_layout: Layout,
    /// All parameters, one after the other.
    pub parameters: Buffer,
    /// Their gradients, at the same positions; empty for a model that is only evaluated, and where each gradient is
    /// applied as soon as it is there.
    pub gradients: Buffer,
    /// All states.
    pub states: Buffer,
}

impl Store {
    /// Zeros for the tensors of a plan.
    ///
    /// # Panics
    /// As [`Buffer::zeroed_for`].
    pub fn new(plan: &Plan) -> Self {
        let gradients = if plan.stores_gradients() { plan.parameters().length() } else { 0 };
        Self {
            layout: plan.parameters().clone(),
            states_layout: plan.states().clone(),
            parameters: Buffer::zeroed_for("the weights", plan.parameters().length()),
            gradients: Buffer::zeroed_for("the gradients", gradients),
            states: Buffer::zeroed_for("the states", plan.states().length()),
        }
    }

    /// Where the parameters stand in the flat buffers.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Where the states stand in their flat buffer.
    pub fn states_layout(&self) -> &Layout {
        &self.states_layout
    }

    /// Parameter `index`.
    pub fn parameter(&self, index: usize) -> &[f32] {
        &self.parameters[self.layout.range(index)]
    }

    /// Parameter `index`, to be written.
    pub fn parameter_mut(&mut self, index: usize) -> &mut [f32] {
        &mut self.parameters[self.layout.range(index)]
    }

    /// The gradient of parameter `index`.
    pub fn gradient(&self, index: usize) -> &[f32] {
        &self.gradients[self.layout.range(index)]
    }

    /// State `index`.
    pub fn state(&self, index: usize) -> &[f32] {
        &self.states[self.states_layout.range(index)]
    }

    /// State `index`, to be written.
    pub fn state_mut(&mut self, index: usize) -> &mut [f32] {
        &mut self.states[self.states_layout.range(index)]
    }
}
