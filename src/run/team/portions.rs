//! How portions of the data come from rank 0 to the workers: over the control connections.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::Team;
use crate::cluster::{Claim, ClusterError, Control, Take};
use crate::comm::{CommError, Rank};
use crate::train::Config;
use crate::train::portions::{Answer, Counter, PortionCounter, Question};

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
            self.control.spare(1..self.mesh.extent().workers);
        }
    }
}
