//! The ways to agree on the weights. Each is a file; adding one is adding a file and a variant.

pub mod all_reduce;
mod courier;
mod facts;
pub mod parameter_server;
mod shares;

use std::ops::Range;
use std::time::Duration;

pub use courier::BucketShape;
use courier::Courier;
pub use facts::{FACTS, Facts};
use paceline_comm::{CommError, Communicator, LentSlice, Rank};
use parameter_server::{Pace, Roles};
use shares::Shares;

/// Small numbers that all ranks add up once a step, beside the gradients: how good the step was, and whether anybody wants to end or to save. The last
/// is the agreement's own.
pub type Shared = [f32; SHARED];

/// How many they are.
pub const SHARED: usize = 9;

/// What all ranks are given by rank 0 before the first step, after the facts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// What is kept and not trained: running statistics.
    States,
    /// The parameters.
    Weights,
    /// Every buffer of the optimizer's state.
    Optimizer,
}

/// The order in which they are given. Workers and servers both walk this list, so none can expect another.
pub const OPENING: [Opening; 3] = [Opening::States, Opening::Weights, Opening::Optimizer];

/// How a replica agrees with the others on the weights.
#[derive(Debug)]
pub struct Agreement(Kind);

#[derive(Debug)]
enum Kind {
    /// There are no others.
    Alone,
    /// Every rank gets the sum of all gradients and makes the same step; with a way of its own for what cannot wait, if there is one.
    AllReduce(Courier, Option<Box<Communicator>>),
    /// The same steps, on one copy of the weights, made by whoever has time.
    Shares(Box<Shares>),
    /// Servers make the steps; whether they do so for all workers together.
    ParameterServer(Courier, Pace),
}

/// Makes the step of a range of a bucket: which of which, the sum of all ranks' gradients there, and what they are the gradients of.
pub type Apply<'a, E> = dyn FnMut((usize, Range<usize>), &mut [f32], &mut [f32]) -> Result<(), E> + 'a;

/// How much memory a replica's weights and optimizer take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elements {
    /// All parameters, with the gaps between them.
    pub parameters: usize,
    /// How many buffers of that length the optimizer keeps.
    pub slots: usize,
}

/// What became of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Brought {
    /// Its parameters are up to date.
    Done,
    /// It has not come back, was brought already, or there are no other ranks.
    NotYet,
    /// Another rank could not make its share of the step.
    Spoilt,
}

/// Memory that ranks share.
#[derive(Debug)]
pub struct Memory {
    /// All ranks' weights.
    pub weights: LentSlice,
    /// All ranks' buffers of the optimizer.
    pub optimizer: Vec<LentSlice>,
    /// This rank's gradients, as the parameters lie. Those that are computed here are not copied when they are sent.
    pub gradients: LentSlice,
}

impl Agreement {
    /// There are no others.
    pub const fn alone() -> Self {
        Self(Kind::Alone)
    }

    /// Every rank gets the sum of all gradients and makes the same step; all ranks have the same buckets.
    ///
    /// # Errors
    /// When the operating system refuses a thread or memory.
    pub fn all_reduce(
        communicator: Communicator,
        buckets: &[BucketShape],
        deadline: Duration,
    ) -> Result<Self, CommError> {
        all_reduce::start(communicator, buckets, deadline).map(|courier| Self(Kind::AllReduce(courier, None)))
    }

    /// Has numbers that somebody waits for ([`Agreement::sum`]) travel by a communicator of their own, and not behind gradients: by
    /// other connections, so that nobody's order of messages depends on the other's. All ranks do so, or none; for an all-reduce.
    #[must_use]
    pub fn with_urgent(mut self, communicator: Communicator) -> Self {
        if let Kind::AllReduce(_, urgent) = &mut self.0 {
            *urgent = Some(Box::new(communicator));
        }
        self
    }

    /// As [`Agreement::all_reduce`], where ranks share memory and a step can be made element by element: the bits are the same. All
    /// ranks work on one copy of the weights and the optimizer's state, which [`Agreement::memory`] gives out.
    ///
    /// # Errors
    /// When the operating system refuses memory.
    ///
    /// # Panics
    /// When the ranks do not share memory ([`Communicator::shares_memory`]).
    pub fn shares(communicator: Communicator, buckets: &[BucketShape], size: Elements) -> Result<Self, CommError> {
        assert!(communicator.shares_memory(), "steps are made by shares where ranks share memory");
        Shares::start(communicator, buckets, size).map(|shares| Self(Kind::Shares(Box::new(shares))))
    }

    /// Memory that this rank is to use from now on instead of its own, once, where ranks share memory. Rank 0 fills what is common
    /// before [`Agreement::begin`].
    pub fn memory(&mut self) -> Option<Memory> {
        match &mut self.0 {
            Kind::Shares(shares) => shares.memory.take(),
            _ => None,
        }
    }

    /// Whether ranks have one copy of the weights.
    pub const fn is_common(&self) -> bool {
        matches!(self.0, Kind::Shares(_))
    }

    /// Servers make the steps ([`parameter_server::server::serve`]); this rank is one of the workers.
    ///
    /// # Errors
    /// When the operating system refuses a thread.
    pub fn parameter_server(
        communicator: Communicator,
        (roles, pace): (Roles, Pace),
        buckets: &[BucketShape],
        deadline: Duration,
    ) -> Result<Self, CommError> {
        let courier = parameter_server::join(communicator, roles, buckets, deadline)?;
        Ok(Self(Kind::ParameterServer(courier, pace)))
    }

    fn courier(&mut self) -> Option<&mut Courier> {
        match &mut self.0 {
            Kind::Alone | Kind::Shares(_) => None,
            Kind::AllReduce(courier, _) | Kind::ParameterServer(courier, _) => Some(courier),
        }
    }

    /// How many replicas agree.
    pub fn world(&self) -> usize {
        match &self.0 {
            Kind::Alone => 1,
            Kind::Shares(shares) => shares.world(),
            Kind::AllReduce(courier, _) | Kind::ParameterServer(courier, _) => courier.world,
        }
    }

    /// This replica's rank.
    pub fn rank(&self) -> Rank {
        match &self.0 {
            Kind::Alone => Rank(0),
            Kind::Shares(shares) => shares.rank(),
            Kind::AllReduce(courier, _) | Kind::ParameterServer(courier, _) => courier.rank,
        }
    }

    /// What a replica's gradient counts for in a step: its share of the batch of all, or all of it where every push is a step.
    pub fn weight(&self) -> f32 {
        match &self.0 {
            Kind::ParameterServer(_, Pace::Asynchronous { .. }) => 1.0,
            _ => 1.0 / self.world() as f32,
        }
    }

    /// Gives this rank's numbers of the step; before the first bucket of the step.
    ///
    /// # Errors
    /// When another rank, or the way to it, has failed.
    pub fn share(&mut self, numbers: Shared) -> Result<(), CommError> {
        match &mut self.0 {
            Kind::Shares(shares) => shares.share(numbers),
            _ => self.courier().map_or(Ok(()), |courier| courier.share(numbers)),
        }
    }

    /// The sum of the numbers over all ranks (this rank's own, where every push is a step); waits for them. None if there are no
    /// other ranks.
    ///
    /// # Errors
    /// As [`Agreement::share`].
    pub fn shared(&mut self) -> Result<Option<Shared>, CommError> {
        match &mut self.0 {
            Kind::Shares(shares) => shares.shared().map(Some),
            _ => self.courier().map(Courier::shared).transpose(),
        }
    }

    /// Gives the gradients of a bucket, which are final.
    ///
    /// # Errors
    /// As [`Agreement::share`].
    pub fn send(&mut self, bucket: usize, gradients: &[f32]) -> Result<(), CommError> {
        match &mut self.0 {
            Kind::Shares(shares) => {
                shares.send(bucket, gradients);
                Ok(())
            }
            _ => self.courier().map_or(Ok(()), |courier| courier.send(bucket, gradients)),
        }
    }

    /// Brings the parameters of a bucket that was sent up to date, once, with what came back for it: new weights, or gradients that
    /// `apply` makes a step with. Waits for it if asked; where ranks have one copy of the weights, `apply` may be called for other
    /// buckets meanwhile.
    ///
    /// # Errors
    /// As [`Agreement::share`], and the first that `apply` gives.
    pub fn bring<E: From<CommError>>(
        &mut self,
        bucket: usize,
        wait: bool,
        parameters: &mut [f32],
        apply: &mut Apply<'_, E>,
    ) -> Result<Brought, E> {
        match &mut self.0 {
            Kind::Alone => Ok(Brought::NotYet),
            Kind::Shares(shares) => shares.bring(bucket, wait, apply),
            Kind::AllReduce(courier, _) => {
                let Some(sums) = courier.take(bucket, wait)? else { return Ok(Brought::NotYet) };
                apply((bucket, 0..sums.len()), sums, parameters)?;
                courier.applied();
                Ok(Brought::Done)
            }
            Kind::ParameterServer(courier, _) => {
                let Some(weights) = courier.take(bucket, wait)? else { return Ok(Brought::NotYet) };
                parameters.copy_from_slice(weights);
                Ok(Brought::Done)
            }
        }
    }

    /// Whether the weights here are those after so many steps since the beginning, whole, and the optimizer's state too. Where
    /// servers make the steps, they have the state.
    pub fn has_stepped(&mut self, steps: u64) -> bool {
        match &mut self.0 {
            // Nobody can be lost; or a step was left in the middle, and this stands in for the agreement.
            Kind::Alone => false,
            Kind::AllReduce(courier, _) => courier.has_applied(steps),
            Kind::Shares(shares) => shares.has_made(steps),
            Kind::ParameterServer(..) => false,
        }
    }

    /// Adds up numbers over all ranks, which do so at the same point; with parameter servers, between steps. They travel behind the
    /// gradients that were given before, unless they have a way of their own ([`Agreement::with_urgent`]).
    ///
    /// # Errors
    /// As [`Agreement::share`].
    pub fn sum(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        match &mut self.0 {
            _ if numbers.is_empty() => Ok(()),
            Kind::Shares(shares) => shares.sum(numbers),
            Kind::AllReduce(_, Some(urgent)) => urgent.all_reduce(numbers),
            _ => self.courier().map_or(Ok(()), |courier| courier.sum(numbers)),
        }
    }

    /// All know the same of the run; before the first step.
    ///
    /// # Errors
    /// When this rank knows something else than rank 0, and as [`Agreement::share`].
    pub fn begin(&mut self, facts: Facts) -> Result<(), CommError> {
        let mut words = facts::to_words(facts);
        self.of_first(&mut words)?;
        if facts::from_words(words) == facts {
            return Ok(());
        }
        let what = "another step or other data than this rank has".to_owned();
        Err(CommError::Protocol { rank: self.rank(), peer: Rank(0).into(), phase: "begin", what })
    }

    /// Replaces numbers by those of rank 0; before the first step.
    ///
    /// # Errors
    /// As [`Agreement::share`].
    pub fn of_first(&mut self, numbers: &mut [f32]) -> Result<(), CommError> {
        match &mut self.0 {
            _ if numbers.is_empty() => Ok(()),
            Kind::Shares(shares) => shares.of_first(numbers),
            _ => self.courier().map_or(Ok(()), |courier| courier.of_first(numbers)),
        }
    }

    /// Brings the weights of the servers to every rank where each push is a step, so that those of a rank may be older than another's
    /// last push; between steps.
    ///
    /// # Errors
    /// As [`Agreement::share`].
    pub fn last_weights(&mut self, weights: &mut [f32]) -> Result<(), CommError> {
        match &mut self.0 {
            Kind::ParameterServer(courier, Pace::Asynchronous { .. }) => courier.weights(weights),
            _ => Ok(()),
        }
    }

    /// Brings the optimizer's state to rank 0, where servers have it; between steps.
    ///
    /// # Errors
    /// As [`Agreement::share`].
    pub fn optimizer_state(&mut self, state: &mut [impl std::ops::DerefMut<Target = [f32]>]) -> Result<(), CommError> {
        let courier = match &mut self.0 {
            Kind::ParameterServer(courier, _) => courier,
            Kind::Alone | Kind::AllReduce(..) | Kind::Shares(_) => return Ok(()),
        };
        let found = courier.state(state.iter().map(|slot| slot.to_vec()).collect())?;
        state.iter_mut().zip(found).for_each(|(slot, found)| slot.copy_from_slice(&found));
        Ok(())
    }
}
