//! Workers in groups, each of which is one worker to the servers: who talks to whom.

use super::Team;
use crate::comm::{CommError, Communicator, Rank};
use crate::failure::Failure;
use crate::parallel::agree::{Group, Roles};
use crate::train::{Config, TrainError};

/// Whom a rank agrees with.
pub(super) struct Grouped {
    pub communicator: Communicator,
    pub group: Option<Group>,
    pub roles: Roles,
}

/// Groups that two ranks may both be in: one among workers, and the first of them with servers.
pub(super) fn sockets(config: &Config) -> u16 {
    if config.group() > 1 { 2 } else { 0 }
}

impl Team {
    /// Connects the workers of each group, and their first ones with the servers.
    pub(super) fn group(&self, config: &Config, mut world: Communicator) -> Result<Grouped, Failure> {
        let Roles { workers, servers } = self.roles();
        let size = config.group();
        if size == 1 || servers == 0 {
            return Ok(Grouped { communicator: world, group: None, roles: self.roles() });
        }
        let nodes = self.control.table().nodes();
        let is_apart = |group: &[usize]| group.iter().any(|node| *node != group[0]);
        if config.center.group.is_none() && nodes[..workers].chunks(size).any(is_apart) {
            return Err(Failure::refused(format!(
                "groups of {size} workers, as nobody said otherwise, would have workers of several machines; type --group with the \
                 number of workers that each machine has"
            )));
        }
        let roles = Roles { workers: workers / size, servers };
        let rank = self.member.rank.index();
        let first = rank / size * size;
        let is_first = rank < workers && rank == first;
        let mut connect = || {
            let inside: Vec<Rank> = (first..first + size).map(Rank::at).collect();
            let inside = (rank < workers).then(|| world.group(&inside)).transpose()?;
            let outside: Vec<Rank> =
                (0..workers).step_by(size).chain(workers..workers + servers).map(Rank::at).collect();
            let outside = (is_first || rank >= workers).then(|| world.group(&outside)).transpose()?;
            Ok((inside, outside))
        };
        let connected: Result<_, CommError> = connect();
        let (communicator, group) = match self.guard(connected.map_err(TrainError::from))? {
            (Some(inside), Some(outside)) => (outside, Some(Group::First { inside: Box::new(inside) })),
            (Some(inside), None) => (inside, Some(Group::Other)),
            (None, Some(outside)) => (outside, None),
            (None, None) => unreachable!("a rank is a worker or a server"),
        };
        // Its links are those of the groups too.
        self.communicator.set(Some(world));
        Ok(Grouped { communicator, group, roles })
    }
}
