//! What all parts of a replica have whole is the same on all of them, whenever weights are looked at.
//!
//! Every part makes the step of its own copy. The gradients of those are the same numbers on all parts, but in the last bits they need not be:
//! parts may compute the same layer by different algorithms. What that leaves is put right where training begins and where gradients have
//! settled, before evaluations and checkpoints.

use super::Replica;
use crate::engine::Weights;
use crate::error::TrainError;
use crate::stage::{Tensor, held};

impl Replica {
    /// Takes over the first part's copies of the tensors that all parts have whole: of parameters, states and, unless replicas keep chunks of it,
    /// the optimizer's state. All parts of all replicas call this at the same point, between steps.
    ///
    /// # Errors
    /// When another part or replica, or the way to it, has failed.
    pub fn follow_first_part(&mut self) -> Result<(), TrainError> {
        let Some(whole) = self.whole.as_ref().filter(|_| self.exchange.has_parts()) else { return Ok(()) };
        let everybodys = whole.everybodys();
        self.engine.fetch()?;
        // Of one copy that several replicas have, the first takes care, and the others wait for it.
        let has_one_copy = self.exchange.agreement().has_one_copy();
        let writes = !has_one_copy || self.exchange.rank() == 0;
        let has_shard = self.has_shard();
        let Self { engine, exchange, whole, .. } = self;
        let Weights { store, optimizer, kept, .. } = engine.weights_mut();
        for tensor in everybodys {
            let Some((number, _)) = held(whole.as_ref(), tensor) else { continue };
            match tensor {
                Tensor::State(_) => exchange.follow_first_part(store.state_mut(number))?,
                _ if !writes => {}
                _ => {
                    let place = store.layout().range(number);
                    exchange.follow_first_part(store.parameter_mut(number))?;
                    if !has_shard {
                        let mut slots = optimizer.iter_mut();
                        slots.try_for_each(|slot| exchange.follow_first_part(&mut slot[place.clone()]))?;
                    }
                    kept.iter_mut().try_for_each(|buffer| exchange.follow_first_part(&mut buffer[place.clone()]))?;
                }
            }
        }
        if has_one_copy {
            exchange.agreement().sum(&mut [0.0])?;
        }
        exchange.agreement().opened(&engine.weights().store.parameters);
        engine.load();
        Ok(())
    }
}
