//! The communicator of some of the ranks: links, counters and memory of its own, so that nothing of it meets
//! what the others say, and threads may use several at once.

use std::sync::Arc;

use paceline_system::random;

use super::{Communicator, Options};
use crate::collective::{Algorithm, Collective, transfers};
use crate::error::CommError;
use crate::rank::Rank;
use crate::reduce::Kind;
use crate::run::Bytes;
use crate::transfer::{Action, Transfer};

/// The code of what members say to each other about a new group.
const GROUP: u16 = 0x103;

const PHASE: &str = "group";

impl Communicator {
    /// The communicator of these ranks, of which this is one; they are numbered anew in this order, and
    /// errors name them by their numbers in the world. All of them call this at the same point with the same
    /// list, and wait here for each other; the others do not. It has the timeout, the stop and the algorithms
    /// of this one, restricted to its members.
    ///
    /// It may be used at the same time as this one, by another thread. Over sockets each group takes a
    /// connection to each of its ranks that was opened in advance
    /// ([`crate::transport::tcp::Config::groups`]).
    ///
    /// # Errors
    /// When a member is gone, late, or names other members; or when the transport has nothing left for
    /// another group.
    ///
    /// # Panics
    /// When this rank is not one of them, or one is named twice or is not a rank: a bug.
    pub fn group(&mut self, members: &[Rank]) -> Result<Self, CommError> {
        let unique = members.iter().enumerate().all(|(place, member)| !members[..place].contains(member));
        assert!(unique && members.iter().all(|member| member.index() < self.world()), "members are different ranks");
        assert!(members.contains(&self.rank), "a rank makes groups that it is in");
        let key = random::key(&members.iter().map(|member| u64::from(member.0)).collect::<Vec<_>>());
        let context = self.meet(members, key)?;
        let transport = self.named(self.transport.group(members, context))?;
        let options = Options { choice: self.options.choice.restricted_to(members), ..self.options.clone() };
        let names: Arc<[Rank]> = members.iter().map(|&member| self.world_rank(member)).collect();
        let rank = transport.place().0;
        let mut group = Self {
            rank,
            members: names,
            transport,
            options,
            sequence: 0,
            broken: false,
            spare: 0..0,
            missed: Vec::new(),
        };
        group.greet(key)?;
        Ok(group)
    }

    /// Waits until all members are here, and tells them the number that the first has drawn.
    fn meet(&mut self, members: &[Rank], key: u64) -> Result<u64, CommError> {
        let (first, others) = members.split_first().expect("this rank is a member");
        let of = |action, peer, length| Transfer { step: 0, action, peer, start: 0, length };
        let mut context = [0; size_of::<u64>()];
        let what = (PHASE, GROUP, key);
        if self.rank != *first {
            self.run(&[of(Action::Send, *first, 1)], what, Kind::Byte, Bytes::Fixed(&[0]))?;
            let receive = [of(Action::Receive, *first, context.len())];
            self.run(&receive, what, Kind::Byte, Bytes::Open(&mut context))?;
            return Ok(u64::from_le_bytes(context));
        }
        let receive: Vec<Transfer> = others.iter().map(|&peer| of(Action::Receive, peer, 1)).collect();
        self.run(&receive, what, Kind::Byte, Bytes::Open(&mut [0]))?;
        let drawn = self.transport.new_context();
        let send: Vec<Transfer> = others.iter().map(|&peer| of(Action::Send, peer, context.len())).collect();
        self.run(&send, what, Kind::Byte, Bytes::Fixed(&drawn.to_le_bytes()))?;
        Ok(drawn)
    }

    /// The first barrier of a group: its links lead to the ranks that they should.
    fn greet(&mut self, key: u64) -> Result<(), CommError> {
        let nodes = &self.options.choice.links().nodes;
        let list = transfers(Collective::Barrier, Algorithm::Direct, self.rank, nodes, 1);
        self.run(&list, (PHASE, GROUP, key), Kind::Byte, Bytes::Open(&mut [0]))
    }
}
