//! The ranks of one worker, its stages or its parts, and what all of them have to know: how good a step was, votes, a norm over all
//! gradients, and the tensors that the first of them collects for a checkpoint. All of them call the same things in the same order.

use paceline_comm::{CommError, Communicator, Rank};

use crate::agree::StepReport;
use crate::agree::identity::{RunIdentity, compare};
use crate::part::PartLinks;
use crate::stage::StageLinks;

/// A rank's links to those that compute the same replica.
#[derive(Debug)]
pub enum ReplicaLinks {
    /// To other stages.
    Stages(Box<StageLinks>),
    /// To other parts.
    Parts(Box<PartLinks>),
}

impl ReplicaLinks {
    /// What goes between all of them.
    pub const fn siblings(&mut self) -> &mut Siblings {
        match self {
            Self::Stages(links) => links.siblings(),
            Self::Parts(links) => links.siblings(),
        }
    }

    /// Adds up what one worker's ranks report of a step.
    ///
    /// # Errors
    /// When another of them, or the way to it, has failed.
    pub fn sum_report(&mut self, own: StepReport) -> Result<StepReport, CommError> {
        match self {
            // The last stage has an answer, and all have votes.
            Self::Stages(links) => links.siblings().sum_report(own),
            // All parts have answers, which rounding may tell apart: those of the first are everybody's.
            Self::Parts(links) => {
                let votes = StepReport { votes: own.votes, ..StepReport::default() };
                let is_first = links.siblings().number() == 0;
                links.siblings().sum_report(if is_first { own } else { votes })
            }
        }
    }
}

/// A rank's end of the links to its siblings.
#[derive(Debug)]
pub struct Siblings(Communicator);

impl Siblings {
    /// The siblings at these ranks of the world, of which this is one.
    ///
    /// # Errors
    /// When another of them, or the way to it, has failed. So for all calls below.
    pub fn connect(world: &mut Communicator, ranks: &[Rank]) -> Result<Self, CommError> {
        Ok(Self(world.group(ranks)?))
    }

    /// This one's number.
    pub fn number(&self) -> usize {
        self.0.rank().index()
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.world()
    }

    /// The links themselves.
    pub(crate) const fn communicator(&mut self) -> &mut Communicator {
        &mut self.0
    }

    fn sum_report(&mut self, own: StepReport) -> Result<StepReport, CommError> {
        let mut words = own.to_words();
        self.0.all_reduce(&mut words)?;
        Ok(StepReport::from_words(words))
    }

    /// All know the same of the run; before anything else that they tell each other.
    ///
    /// # Errors
    /// When this one knows something else than the first, and as above.
    pub fn identify(&mut self, own: RunIdentity) -> Result<(), CommError> {
        let ranks = [self.0.rank(), Rank(0)].map(|rank| self.0.world_rank(rank));
        compare(own, ranks, |words| self.follow_first(words))
    }

    /// Replaces numbers by those of the first.
    ///
    /// # Errors
    /// As above.
    pub fn follow_first(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        self.0.broadcast(Rank(0), numbers)
    }

    /// Adds up a number: everybody gets the same sum.
    ///
    /// # Errors
    /// As above.
    pub fn sum(&mut self, own: f64) -> Result<f64, CommError> {
        // Two numbers, of which the second is what the first leaves.
        let high = own as f32;
        let mut words = [high, (own - f64::from(high)) as f32];
        self.0.all_reduce(&mut words)?;
        Ok(f64::from(words[0]) + f64::from(words[1]))
    }

    /// Gives everybody the numbers of all, one behind the other; all have as many.
    ///
    /// # Errors
    /// As above.
    pub fn gather(&mut self, own: &[f64]) -> Result<Vec<f64>, CommError> {
        let mut all = vec![0.0; own.len() * self.count()];
        for (number, place) in all.chunks_exact_mut(own.len()).enumerate() {
            if number == self.number() {
                place.copy_from_slice(own);
            }
            self.0.broadcast_bytes(Rank::at(number), bytemuck::cast_slice_mut(place))?;
        }
        Ok(all)
    }

    /// Gives a tensor, or a piece of one, to the first, which collects all to save them.
    ///
    /// # Errors
    /// As above.
    pub fn hand_in(&mut self, tag: u64, tensor: &[f32]) -> Result<(), CommError> {
        self.0.send(Rank(0), tag, bytemuck::cast_slice(tensor))
    }

    /// Takes what another hands in.
    ///
    /// # Errors
    /// As above.
    pub fn collect(&mut self, from: usize, tag: u64, tensor: &mut [f32]) -> Result<(), CommError> {
        self.0.recv(Rank::at(from), tag, bytemuck::cast_slice_mut(tensor))
    }
}
