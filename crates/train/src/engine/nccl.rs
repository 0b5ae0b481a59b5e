//! A GPU among others: it joins their group, by which gradients are summed inside the step's graph, and its
//! steps are watched. The one thing that an engine holds of others.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use paceline_comm::{CommError, Communicator, Rank};
use paceline_tensor::device::cuda::CudaError;
use paceline_tensor::device::cuda::nccl::{Group, Key, Placement, Watcher};

use super::cuda::CudaEngine;
use super::guard::{Guard, Limits, within};
use crate::error::TrainError;
use crate::gpus::meet;

/// The phase in which GPUs meet.
const JOIN: &str = "nccl-join";
/// The phase in which they add up gradients.
const STEP: &str = "nccl-all-reduce";

fn failed(rank: Rank, phase: &'static str, CudaError(what): CudaError) -> TrainError {
    CommError::Failed { rank, phase, what }.into()
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl CudaEngine {
    /// Adds up its gradients with those of the other ranks' GPUs by NCCL, from now on; ranks meet through
    /// `communicator`, and without one this GPU is alone. Beside this, ranks agree on everything else as
    /// always.
    ///
    /// # Errors
    /// When the GPUs cannot train together (a refusal), or another rank, or the way to it, has failed.
    pub fn join_gpus(
        &mut self,
        communicator: Option<&mut Communicator>,
        hosts: &[String],
        limits: &Limits,
    ) -> Result<(), TrainError> {
        let (key, placement) = meet(communicator, self.gpu(), hosts)?;
        self.join_group(key, placement, limits)
    }

    /// The second half of [`CudaEngine::join_gpus`], for those who have met already: waits until all have
    /// joined.
    ///
    /// # Errors
    /// When another rank, or the way to it, has failed.
    pub fn join_group(&mut self, key: Key, placement: Placement, limits: &Limits) -> Result<(), TrainError> {
        let (cuda, rank) = (Arc::clone(self.session.cuda()), Rank::at(placement.number));
        let lengths = self.session.sum_lengths();
        let joined = within((rank, JOIN), limits, move || Group::join(&cuda, &key, placement, &lengths))?;
        let (group, watcher) = joined.map_err(|error| failed(rank, JOIN, error))?;
        // The guard's thread looks again and again, and leaves once at most.
        let watcher = Arc::new(Mutex::new(Some(watcher)));
        let left = Arc::clone(&watcher);
        let look =
            move || locked(&watcher).as_ref().and_then(|watcher| watcher.state().err()).map(|error| error.to_string());
        let leave = move || locked(&left).take().into_iter().for_each(Watcher::abort);
        let guard = Guard::start(rank, limits, look, leave)?;
        guard.during(JOIN, || self.session.join(group).map_err(|error| failed(rank, JOIN, error)))?;
        self.guard = Some(guard);
        Ok(())
    }

    /// Does something that may wait for the other GPUs, where there are some.
    pub(super) fn watched<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T, CudaError>) -> Result<T, TrainError> {
        let Some(guard) = self.guard.take() else { return Ok(work(self)?) };
        let done = guard.during(STEP, || work(self).map_err(TrainError::from));
        self.guard = Some(guard);
        done
    }
}
