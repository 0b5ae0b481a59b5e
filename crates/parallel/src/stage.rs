//! A stage's links to its neighbours in a pipeline: activations go down, gradients come up, while the stage computes.
//!
//! Each direction of each link has a communicator of two ranks and a thread of its own (`mailbox`), so that messages travel while both
//! sides compute, and a message never waits behind one of another kind. A box holds as many messages as micro-batches can be alive, so nobody
//! who sends waits for one who would have to receive first. What all stages of a worker have to know goes between [`Siblings`].

mod mailbox;

use std::time::Duration;

use paceline_comm::{CommError, Communicator, Rank};

use crate::mesh::{Axis, Mesh};
use crate::siblings::Siblings;
use mailbox::{Inbox, Outbox};

/// The neighbour on one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The stage before, from which activations come.
    Before,
    /// The stage behind, from which gradients come.
    Behind,
}

/// What may be under way between a stage and a neighbour.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinkShape {
    /// Messages at once, in each direction.
    pub messages: usize,
    /// Elements of the longest.
    pub elements: usize,
}

/// A stage's ends of its links.
#[derive(Debug)]
pub struct StageLinks {
    /// With all stages of this worker.
    siblings: Siblings,
    before: Option<Neighbour>,
    behind: Option<Neighbour>,
}

#[derive(Debug)]
struct Neighbour {
    outbox: Outbox,
    inbox: Inbox,
}

impl StageLinks {
    /// Connections that two neighbouring ranks need beside the one that all have, where each group takes one.
    pub const GROUPS: u16 = 3;

    /// Connects a rank with the other stages of its worker; all of them call this at the same point.
    ///
    /// # Errors
    /// When another stage, or the way to it, has failed, or the system gives no memory or thread.
    ///
    /// # Panics
    /// When the rank computes nothing: a bug.
    pub fn connect(
        world: &mut Communicator,
        mesh: &Mesh,
        [before, behind]: [LinkShape; 2],
        deadline: Duration,
    ) -> Result<Self, CommError> {
        let rank = world.rank();
        let ranks = mesh.group(Axis::Stage, rank);
        let stage = mesh.coordinates(rank).expect("a stage computes").stage;
        let siblings = Siblings::connect(world, &ranks)?;
        let mut neighbour = |number: usize, side: Side, shape: LinkShape| {
            let pair = [ranks[number], ranks[number + 1]];
            // Both sides make the same groups in the same order.
            let (down, up) = (world.group(&pair)?, world.group(&pair)?);
            let (inward, outward) = if side == Side::Before { (down, up) } else { (up, down) };
            let peer = Rank(if side == Side::Before { 0 } else { 1 });
            let (outbox, inbox) =
                (Outbox::start(outward, peer, shape, deadline)?, Inbox::start(inward, peer, shape, deadline)?);
            Ok::<_, CommError>(Neighbour { outbox, inbox })
        };
        let before = if stage > 0 { Some(neighbour(stage - 1, Side::Before, before)?) } else { None };
        let behind = if stage + 1 < ranks.len() { Some(neighbour(stage, Side::Behind, behind)?) } else { None };
        Ok(Self { siblings, before, behind })
    }

    /// This stage's number.
    pub fn stage(&self) -> usize {
        self.siblings.number()
    }

    /// How many stages there are.
    pub fn stages(&self) -> usize {
        self.siblings.count()
    }

    /// What goes between all stages.
    pub const fn siblings(&mut self) -> &mut Siblings {
        &mut self.siblings
    }

    fn neighbour(&mut self, side: Side) -> &mut Neighbour {
        let found = match side {
            Side::Before => &mut self.before,
            Side::Behind => &mut self.behind,
        };
        found.as_mut().expect("a message is for a neighbour that there is")
    }

    /// Says that messages of these lengths will come from a neighbour, in this order, behind those that were said before: they are received
    /// as they come, while this stage computes.
    ///
    /// # Errors
    /// When the neighbour, or the way to it, has failed. So for all calls below.
    ///
    /// # Panics
    /// When there is no such neighbour: a bug. So for all calls below.
    pub fn expect(&mut self, from: Side, lengths: &[usize]) -> Result<(), CommError> {
        self.neighbour(from).inbox.expect(lengths)
    }

    /// Takes the next message of a neighbour; waits for it.
    ///
    /// # Errors
    /// As above.
    ///
    /// # Panics
    /// When it has another length than was expected.
    pub fn receive(&mut self, from: Side, numbers: &mut [f32]) -> Result<(), CommError> {
        self.neighbour(from).inbox.receive(numbers)
    }

    /// Gives a message to a neighbour, which travels meanwhile.
    ///
    /// # Errors
    /// As above.
    pub fn send(&mut self, to: Side, numbers: &[f32]) -> Result<(), CommError> {
        self.neighbour(to).outbox.send(numbers)
    }
}
