//! A replica that keeps a part of the optimizer's state: which part, and how rank 0 comes by all of it when it
//! saves.

use paceline_nn::{Parameter, State};
use paceline_parallel::Ownership;
use paceline_tensor::Plan;

use super::{Replica, ReplicaOptions};
use crate::engine::Engine;
use crate::error::TrainError;
use crate::exchange::Exchange;
use crate::stage::WholeModel;

/// A replica's part of the optimizer's state: its chunk of every bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptimizerShard {
    /// Its number among the replicas that train together.
    pub rank: usize,
    /// How many there are.
    pub world: usize,
    /// Whether they can map the same memory: where steps can be made by elements they keep one copy of the whole
    /// state there, and nobody keeps a part.
    pub maps_one_copy: bool,
}

impl ReplicaOptions {
    /// What of the optimizer's state a replica with this plan of a step keeps.
    pub(crate) fn ownership(&self, plan: &Plan) -> Ownership {
        match self.shard {
            Some(OptimizerShard { rank, world, maps_one_copy }) if !(maps_one_copy && self.steps_by_elements(plan)) => {
                Ownership::of(plan.buckets().iter().map(|bucket| bucket.elements.clone()), rank, world)
            }
            _ => Ownership::whole(plan.parameters().length()),
        }
    }

    /// Whether a step can be made with some elements of a bucket by themselves.
    pub(crate) fn steps_by_elements(&self, plan: &Plan) -> bool {
        !plan.stores_gradients() && !self.gathers() && !self.rule.needs_whole_tensors()
    }
}

impl Replica {
    /// Whether it keeps the optimizer's state of its own chunks only.
    pub fn has_shard(&self) -> bool {
        !self.engine.weights().owned.is_whole()
    }

    /// What a checkpoint is made of, and what gathers of it what other replicas have.
    pub(crate) fn for_saving(&mut self) -> (&[Parameter], &[State], Option<&WholeModel>, &Engine, &mut Exchange) {
        (&self.parameters, &self.states, self.whole.as_ref(), &self.engine, &mut self.exchange)
    }

    /// Takes part in what rank 0 does when it saves the optimizer's state, where this replica has a part of it:
    /// gives its chunks of every tensor, in the order of the file.
    ///
    /// # Errors
    /// When another replica, or the way to it, has failed.
    pub fn give_optimizer(&mut self) -> Result<(), TrainError> {
        if !self.has_shard() {
            return Ok(());
        }
        let Self { engine, exchange, .. } = self;
        let weights = engine.weights();
        for slot in 0..weights.optimizer.len() {
            for elements in weights.store.layout().ranges() {
                exchange.gather_state(weights, (slot, elements.clone()))?;
            }
        }
        Ok(())
    }
}
