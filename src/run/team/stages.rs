//! A process among the stages or parts of its worker.

use std::time::Duration;

use super::{FILE_BYTES_MAX, Team};
use crate::comm::{CommError, Communicator, Rank};
use crate::data::order::Shard;
use crate::failure::Failure;
use crate::parallel::mesh::Axis;
use crate::parallel::part::PartLinks;
use crate::parallel::siblings::ReplicaLinks;
use crate::parallel::stage::StageLinks;
use crate::train::{TrainError, Trainer};

impl Team {
    /// Which stage of how many this process computes.
    pub fn stage(&self) -> Shard {
        let rank = self.mesh.coordinates(self.member.rank).map_or(0, |coordinates| coordinates.stage);
        Shard { rank, world: self.mesh.extent().stages }
    }

    /// Which part of how many this process computes.
    pub fn part(&self) -> Shard {
        let rank = self.mesh.coordinates(self.member.rank).map_or(0, |coordinates| coordinates.part);
        Shard { rank, world: self.mesh.extent().parts }
    }

    /// Whether several ranks compute each replica.
    pub(super) fn is_split(&self) -> bool {
        self.stage().world * self.part().world > 1
    }

    /// Groups that two ranks may both be in: those along the data, and those between stages or parts.
    pub(super) fn groups(&self) -> u16 {
        match (self.stage().world, self.part().world) {
            (1, 1) => 0,
            (1, _) => 1 + PartLinks::GROUPS,
            _ => 1 + StageLinks::GROUPS,
        }
    }

    /// Stages wait for each other in every step, which takes so long: of a rank that keeps others waiting for two steps it is told.
    pub fn expect_waits(&self, step: Duration) {
        self.control.expect_waits(2 * step);
    }

    /// Tells all what rank 0 has found out.
    pub fn broadcast(&self, own: &str) -> Result<String, Failure> {
        let mut communicator = self.communicator.take().expect("a team has met");
        let told = broadcast(&mut communicator, own).map_err(TrainError::from);
        self.communicator.set(Some(communicator));
        self.guard(told)
    }

    /// Connects a trainer with the other stages or parts; the communicator of those who have the same one.
    pub(super) fn join_siblings(
        &self,
        trainer: &mut Trainer,
        mut world: Communicator,
    ) -> Result<Communicator, Failure> {
        let (shapes, deadline) = (trainer.replica().link_shapes(), self.deadlines.message);
        let along_data = self.mesh.group(Axis::Data, self.member.rank);
        let connected = world.group(&along_data).and_then(|data| {
            let links = match self.part().world {
                1 => ReplicaLinks::Stages(Box::new(StageLinks::connect(&mut world, &self.mesh, shapes, deadline)?)),
                _ => ReplicaLinks::Parts(Box::new(PartLinks::connect(&mut world, &self.mesh)?)),
            };
            Ok((data, links))
        });
        let (data, links) = self.guard(connected.map_err(TrainError::from))?;
        self.guard(trainer.join_siblings(links))?;
        self.communicator.set(Some(world));
        Ok(data)
    }
}

/// Gives all ranks the words of rank 0.
fn broadcast(communicator: &mut Communicator, own: &str) -> Result<String, CommError> {
    let mut bytes = own.as_bytes().to_vec();
    let mut length = (bytes.len() as u64).to_le_bytes();
    communicator.broadcast_bytes(Rank(0), &mut length)?;
    bytes.resize(usize::try_from(u64::from_le_bytes(length)).unwrap_or(0).min(FILE_BYTES_MAX as usize), 0);
    communicator.broadcast_bytes(Rank(0), &mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
