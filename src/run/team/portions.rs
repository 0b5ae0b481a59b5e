//! How portions of the data come from rank 0 to the workers: over the control connections.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::Team;
use crate::cluster::{Claim, ClusterError, Control, Take};
use crate::comm::{CommError, Rank};
use crate::failure::Failure;
use crate::parallel::agree::Returned;
use crate::system::signal::Stop;
use crate::train::portions::{Admission, Answer, Counter, PortionCounter, Question};
use crate::train::{Config, TrainError, Trainer};

/// Asks rank 0, which keeps the account.
struct Hub {
    /// The run may end while a loader still asks.
    control: Weak<Control>,
    rank: Rank,
    limit: Duration,
}

impl Hub {
    fn ask<T>(&self, ask: impl FnOnce(&Control) -> Result<T, ClusterError>) -> Result<T, CommError> {
        let (rank, phase) = (self.rank, "data");
        let stopped = |reason: String| CommError::Stopped { rank, phase, reason };
        let control = self.control.upgrade().ok_or_else(|| stopped("the run is over".into()))?;
        ask(&control).map_err(|error| stopped(error.to_string()))
    }
}

impl Counter for Hub {
    fn take(&self, Question { stretch, portions, finished, claimed }: Question) -> Result<Answer, CommError> {
        let given = self.ask(|control| control.take(Take { stretch, portions, finished, claimed }, self.limit))?;
        Ok(Answer { portion: given.portion, end: given.end })
    }

    fn returning(&self) -> Option<Returned> {
        let (rank, life) = self.control.upgrade()?.returning()?;
        Some(Returned { worker: rank.index(), life })
    }

    fn admit(&self, Returned { worker, life }: Returned, admission: Admission) {
        let place = admission.place();
        let Admission { stretch, step, steps, .. } = admission;
        let told = crate::cluster::Admission { stretch, step, steps, place };
        self.control.upgrade().into_iter().for_each(|control| control.admit((Rank::at(worker), life), told.clone()));
    }

    fn claim(&self, stretch: u64, portion: u64) -> Result<bool, CommError> {
        self.ask(|control| control.claim(Claim { stretch, portion }, self.limit))
    }

    fn close(&self, stretch: u64) {
        self.control.upgrade().into_iter().for_each(|control| control.close(stretch));
    }
}

impl Team {
    /// Who hands out portions of the data to this worker, where it has no share of its own.
    pub fn portions(&self, config: &Config) -> PortionCounter {
        let (control, rank, limit) = (Arc::downgrade(&self.control), self.member.rank, self.deadlines.message);
        let hub = || Arc::new(Hub { control, rank, limit }) as Arc<dyn Counter>;
        // An evaluation is handed out too where a worker may be lost in it.
        PortionCounter((config.hands_out_portions() || config.goes_on_without_workers()).then(hub))
    }

    /// From now on the others go on without a worker that is lost, where they can.
    pub(super) fn go_on_without_workers(&self, config: &Config) {
        if self.member.rank == Rank(0) && config.goes_on_without_workers() {
            let on_cpus = match self.is_hosted() {
                false => Ok(()),
                true => Err("workers come back on CPUs, and some of this run compute on GPUs".to_owned()),
            };
            // Rank 0 steps with those of its group.
            self.control.spare(config.group()..self.mesh.extent().workers, config.lets_workers_return().and(on_cpus));
        }
    }

    /// Whether this rank was lost and has come back into a run that goes on.
    pub fn is_back(&self) -> bool {
        self.control.life() > 0
    }

    /// Takes part again: waits until rank 0 says where, and takes the present weights.
    pub fn rejoin(&self, trainer: &mut Trainer, interrupt: &Stop) -> Result<(), Failure> {
        self.control.ready();
        let told = self.control.admission(interrupt)?;
        let nonsense = || TrainError::Refused("rank 0 is where no run can be".into());
        let admission = Admission::from_parts(told.stretch, (told.step, told.steps), &told.place).ok_or_else(nonsense);
        self.guard(admission.and_then(|admission| trainer.rejoin(admission)))
    }
}
