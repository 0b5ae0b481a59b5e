//! The ways to agree on the weights. Each is a file; adding one is adding a file and its name to the list
//! below.
//!
//! An agreement is two things: a [`Protocol`], the value that lists what travels, and an [`Agreement`], a
//! worker's end of it. Two kinds are told apart by the protocol's [`Steps`]: those that settle the gradients
//! of a step, so that all make the same one, and those that let every worker step by itself and exchange
//! weights between steps, with each other or with a centre (`center.rs`). In a third, servers step with the gradients of
//! a whole epoch (`sandblaster.rs`). One worker alone is a protocol with nothing in it.

mod alone;
mod center;
mod courier;
mod group;
pub(crate) mod identity;
mod missed;
mod protocol;
mod report;
mod returned;
mod rounds;
mod sharded;
mod shares;
mod target;

use std::fmt::Debug;
use std::ops::Range;
use std::time::Duration;

pub use alone::Alone;
pub use group::Group;
pub use identity::{IDENTITY, RunIdentity, receive as receive_identity};
pub use missed::Missed;
use paceline_comm::memory_box::Lending;
use paceline_comm::{CommError, Communicator, LentSlice, Rank};
use paceline_system::clock::Clock;
pub use protocol::{
    Between, Closing, Exchange, LostPeer, OPENING, Opening, Protocol, RETURNED, Reach, Roles, Rounds, Steps,
};
pub use report::{StepReport, Votes};
pub use returned::Returned;
pub use rounds::RoundOptions;
pub use sandblaster::Gathered;
pub use target::{Refusal, Settled, Target};

use crate::lock_free::ThreadMemory;
use crate::squeeze::{Segment, Squeeze, none};

/// Declares every agreement's module, and lists what it offers.
macro_rules! agreements {
    ($($file:ident),* $(,)?) => {
        $(pub mod $file;)*

        /// Every way to agree, the usual one first.
        pub static ALL: &[&dyn Recipe] = &[$(&$file::RECIPE),*];
    };
}

agreements! {
    all_reduce, parameter_server, local, elastic, downpour, dogwild, hogwild, sandblaster, shm_async, shm_hybrid
}

/// An agreement as the command line offers it: how to join it, and what it cannot be combined with.
pub trait Recipe: Debug + Sync {
    /// The word in files and flags.
    fn name(&self) -> &'static str;

    /// A few words for `--help`.
    fn about(&self) -> &'static str;

    /// Whether some ranks are servers.
    fn has_servers(&self) -> bool {
        false
    }

    /// Whether all workers are at the same step all the time.
    fn is_synchronous(&self, _options: &Options) -> bool {
        true
    }

    /// Whether workers that are free take the next portion of the data, so that nobody waits for a slow one: they meet
    /// only where all say they do.
    fn hands_out_portions(&self, _options: &Options) -> bool {
        false
    }

    /// Whether sums of gradients can be made between GPUs, without the hosts.
    fn sums_on_devices(&self) -> bool {
        false
    }

    /// Whether workers that share a machine's memory keep one copy of the weights.
    fn keeps_one_copy(&self) -> bool {
        false
    }

    /// Whether workers are in groups, if nobody says otherwise.
    fn steps_in_groups(&self) -> bool {
        false
    }

    /// Whether weights lie in a memory box.
    fn borrows_memory(&self) -> bool {
        false
    }

    /// Whether workers share weights in the memory of one process, so that they have to be threads of it.
    fn shares_process(&self) -> bool {
        false
    }

    /// The bound on staleness that it has if nobody says otherwise; none is no bound.
    fn usual_staleness(&self) -> Option<u64> {
        Some(0)
    }

    /// Copies of all parameters that a worker keeps for it.
    fn copies(&self, _options: &Options) -> usize {
        0
    }

    /// Copies of all parameters that a server has which is the only one, where nothing of a step travels to it.
    fn server_copies(&self, options: &Options) -> usize {
        2 + self.copies(options)
    }

    /// Why it cannot do what a run demands: a sentence that says what to type.
    fn refuses(&self, _demands: &Demands) -> Option<String> {
        None
    }

    /// What travels.
    fn protocol(&self, shape: &Shape, options: &Options) -> Protocol;

    /// Makes this rank one of the workers.
    ///
    /// # Errors
    /// When the operating system refuses a thread or memory.
    fn join(&self, join: Join<'_>) -> Result<Box<dyn Agreement>, CommError>;

    /// Serves the workers until all have ended, where some ranks are servers.
    ///
    /// # Errors
    /// When a worker, or the way to it, has failed.
    fn serve(&self, join: Join<'_>, _shard: &mut dyn ServerShard) -> Result<(), CommError> {
        let what = format!("{} has no servers", self.name());
        Err(CommError::Failed { rank: join.communicator.rank(), phase: "serve", what })
    }
}

/// The agreement of this name.
pub fn find(name: &str) -> Option<&'static dyn Recipe> {
    ALL.iter().copied().find(|recipe| recipe.name() == name)
}

/// What a run demands of its agreement beside the weights.
#[derive(Clone, Copy, Debug, Default)]
pub struct Demands {
    /// Gradients are clipped to a norm over all of them.
    pub clips_norm: bool,
    /// The loss is smoothed.
    pub smooths_labels: bool,
    /// Weights decay.
    pub decays: bool,
    /// Workers compute on GPUs.
    pub on_gpu: bool,
    /// Batch-norms take their statistics over all workers.
    pub sync_batch_norm: bool,
    /// The optimizer looks at whole tensors.
    pub whole_tensors: bool,
    /// A bound on staleness was given.
    pub staleness: bool,
    /// The run is saved by the clock.
    pub saves_by_clock: bool,
    /// How many servers were asked for.
    pub servers: usize,
    /// Its own options.
    pub options: Options,
}

/// The options of an agreement.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Steps that a worker may be ahead of the slowest; none is no bound.
    pub staleness: Option<u64>,
    /// How messages shrink.
    pub squeeze: &'static dyn Squeeze,
    /// Whether ranks that share memory may keep one copy of the weights: each makes its steps by elements.
    pub one_copy: bool,
    /// Whether each rank keeps the optimizer's state of its own chunks only, unless there is one copy.
    pub shard: bool,
    /// Workers that add up their gradients and are one to the others.
    pub group: usize,
    /// When weights are exchanged, and how.
    pub rounds: RoundOptions,
}

impl Default for Options {
    fn default() -> Self {
        let rounds = RoundOptions::default();
        Self { staleness: Some(0), squeeze: &none::SQUEEZE, one_copy: false, shard: false, group: 1, rounds }
    }
}

/// What is known of a model before the first step: the same on all workers and servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// In the order in which they become final.
    pub buckets: Vec<BucketShape>,
    /// What each bucket holds; may be empty.
    pub segments: Vec<Vec<Segment>>,
    /// Elements of all parameters, with the gaps between them.
    pub parameters: usize,
    /// Elements of all states.
    pub states: usize,
    /// Buffers of the optimizer's state, each as long as the parameters.
    pub slots: usize,
}

/// What is known of a bucket before the first step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketShape {
    /// Where it begins among all parameters.
    pub start: usize,
    /// Its length.
    pub elements: usize,
    /// The node after which its gradients are final.
    pub ready_after: usize,
    /// The node before which its parameters are needed.
    pub needed_before: usize,
}

/// What a rank joins an agreement with.
#[derive(Debug)]
pub struct Join<'a> {
    /// To all workers and servers.
    pub communicator: Communicator,
    /// For numbers that somebody waits for, which then do not travel behind gradients. All ranks have one, or
    /// none.
    pub urgent: Option<Communicator>,
    /// Where workers are in groups.
    pub group: Option<Group>,
    /// What all ranks share where they are threads of one process.
    pub memory: Option<ThreadMemory>,
    /// Where memory boxes are, for agreements that use them.
    pub lending: Option<Lending>,
    /// Which ranks do what.
    pub roles: Roles,
    /// The model.
    pub shape: &'a Shape,
    /// How to agree.
    pub options: Options,
    /// How long to wait for an answer.
    pub deadline: Duration,
    /// What times are read from.
    pub clock: Clock,
}

/// Whether to wait for what has not come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Come back at once.
    Poll,
    /// Until it is there.
    Block,
}

/// Where a worker is that makes its own steps.
#[derive(Clone, Copy, Debug)]
pub struct Point<'a> {
    /// Its weights.
    pub weights: &'a [f32],
    /// What they are ahead of it, where the optimizer keeps the point that it looks at: so many times this.
    pub velocity: Option<(&'a [f32], f32)>,
}

/// Memory that ranks share.
#[derive(Debug)]
pub struct SharedWeights {
    /// All ranks' weights.
    pub weights: LentSlice,
    /// All ranks' buffers of the optimizer.
    pub optimizer: Vec<LentSlice>,
    /// This rank's gradients, as the parameters lie. Those that are computed here are not copied when they
    /// are sent.
    pub gradients: LentSlice,
}

/// A worker's end of an agreement.
pub trait Agreement: Debug + Send {
    /// What travels.
    fn protocol(&self) -> &Protocol;

    /// This worker's rank.
    fn rank(&self) -> Rank;

    /// How many workers agree.
    fn workers(&self) -> usize;

    /// Whether a step is made with the gradients of all workers, so that each counts for its samples among
    /// all; otherwise every push is a step.
    fn shares_steps(&self) -> bool {
        true
    }

    /// Replaces numbers by those of rank 0, on all workers and servers; before the first step.
    ///
    /// # Errors
    /// When another rank, or the way to it, has failed. So for all calls below.
    fn broadcast_from_root(&mut self, numbers: &mut [f32]) -> Result<(), CommError>;

    /// Replaces numbers by their sum over all workers, which call this at the same point.
    ///
    /// # Errors
    /// As above.
    fn sum(&mut self, numbers: &mut [f32]) -> Result<(), CommError>;

    /// Gives this worker's report of a step, before its first bucket.
    ///
    /// # Errors
    /// As above.
    fn begin_step(&mut self, report: StepReport) -> Result<(), CommError>;

    /// The sum of all reports of the step (this worker's own, where every push is a step); waits for them.
    ///
    /// # Errors
    /// As above.
    fn total(&mut self) -> Result<StepReport, CommError>;

    /// Gives the gradients of a bucket, which are final. A device without memory gives none. Where workers make their own
    /// steps they go nowhere, and nothing comes back.
    ///
    /// # Errors
    /// As above.
    fn send(&mut self, _bucket: usize, _gradients: &[f32]) -> Result<(), CommError> {
        Ok(())
    }

    /// Brings the parameters of a bucket that was sent up to date, once, with what came back for it. Where
    /// ranks have one copy of the weights, steps of other buckets may be made meanwhile.
    ///
    /// # Errors
    /// As above.
    fn settle(&mut self, _bucket: usize, _wait: Wait, _target: &mut dyn Target) -> Result<Settled, CommError> {
        Ok(Settled::NotYet)
    }

    /// Looks at the sums of this rank's chunks of a bucket that was sent, or changes them, before the step is made
    /// with them ([`Steps::Chunks`]); waits for them.
    ///
    /// # Errors
    /// As above.
    fn inspect_sums(&mut self, _bucket: usize, _target: &mut dyn Target) -> Result<Settled, CommError> {
        Ok(Settled::NotYet)
    }

    /// Makes the step of this rank's chunks of a bucket that was sent, unless that was done, and gives the weights
    /// to all ([`Steps::Chunks`]); waits for the sums. At the end of a step, for every bucket, in order.
    ///
    /// # Errors
    /// As above.
    fn step_chunks(&mut self, _bucket: usize, _target: &mut dyn Target) -> Result<Settled, CommError> {
        Ok(Settled::NotYet)
    }

    /// Brings some elements of a buffer of the optimizer's state to rank 0, of which every rank has its own chunks
    /// in `own` ([`Steps::Chunks`]); between steps, by all ranks with the same elements. The others get none.
    ///
    /// # Errors
    /// As above.
    fn gather_state(&mut self, _own: &[f32], _elements: Range<usize>) -> Result<Vec<f32>, CommError> {
        Ok(Vec::new())
    }

    /// Knows the weights that all begin with, where workers make their own steps.
    fn opened(&mut self, _weights: &[f32]) {}

    /// Takes this worker's wishes along with its next message, and gives those of all that it has heard of, where
    /// workers exchange with a centre ([`Steps::Center`]).
    fn tell_wishes(&mut self, own: Votes) -> Votes {
        own
    }

    /// Whether an exchange with the centre may begin before the step after so many ([`Steps::Center`]).
    fn exchanges_before(&self, _step: u64) -> bool {
        false
    }

    /// Begins it, with the weights as they are before that step, which are ahead of where the worker is by so many
    /// times the optimizer's velocity if one is given. Whether it has changed them.
    ///
    /// # Errors
    /// As above.
    fn begin_exchange(
        &mut self,
        _step: u64,
        _weights: &mut [f32],
        _velocity: Option<(&[f32], f32)>,
    ) -> Result<bool, CommError> {
        Ok(false)
    }

    /// Whether an exchange ends, or numbers are pushed, behind that step ([`Steps::Center`]).
    fn exchanges_after(&self, _step: u64) -> bool {
        false
    }

    /// Ends it: waits for what comes back, and changes the weights by it; then pushes. Whether it has changed them.
    ///
    /// # Errors
    /// As above.
    fn end_exchange(&mut self, _step: u64, _weights: &mut [f32]) -> Result<bool, CommError> {
        Ok(false)
    }

    /// Exchanges weights at the end of a round, where workers make their own steps ([`Steps::Local`],
    /// [`Steps::Center`]). `kept` are its own buffers ([`Protocol::buffers`]).
    ///
    /// # Errors
    /// As above.
    fn exchange_weights(&mut self, _: Reach, _weights: &mut [f32], _kept: &mut [Vec<f32>]) -> Result<(), CommError> {
        Ok(())
    }

    /// A batch of so many portions begins, where servers step with all of its gradients ([`Steps::Gathered`]).
    fn begin_batch(&mut self, _portions: u64) {}

    /// The gradients that were sent last count in the batch.
    fn count_portion(&mut self) {}

    /// What became of the batch whose gradients were given last.
    fn gathered(&self) -> Gathered {
        Gathered::default()
    }

    /// Whether the point that gradients are computed at may be given up, so that it may be one at which there are none.
    fn tries_points(&self) -> bool {
        false
    }

    /// How many of its own steps had missed no update of others, one, two, … since last asked, where it can tell.
    fn take_missed(&mut self) -> Vec<u64> {
        Vec::new()
    }

    /// Whether the weights here are those after so many steps since the beginning, whole, and the optimizer's
    /// state too.
    fn has_stepped(&mut self, _steps: u64) -> bool {
        false
    }

    /// Fetches the weights that are to be saved, where those of this rank may be older or rounded; between
    /// steps.
    ///
    /// # Errors
    /// As above.
    fn fetch_weights(&mut self, _weights: &mut [f32]) -> Result<(), CommError> {
        Ok(())
    }

    /// Fetches the optimizer's state to rank 0, where servers have it; between steps.
    ///
    /// # Errors
    /// As above.
    fn fetch_optimizer(&mut self, _state: &mut [&mut [f32]]) -> Result<(), CommError> {
        Ok(())
    }

    /// The first worker, between two of its own steps: servers take a worker that has come back for one of them from here
    /// on, and give it these running statistics with their weights. Whether this is a point at which they do.
    ///
    /// # Errors
    /// As above.
    fn readmit(&mut self, _returned: Returned, _states: &[f32]) -> Result<bool, CommError> {
        Ok(false)
    }

    /// A worker that has come back, once servers take it for one of them: is given what the protocol has for a joiner
    /// ([`Protocol::joiner`]), by servers and not by rank 0. The first worker has made so many steps.
    ///
    /// # Errors
    /// As above, and where nobody comes back.
    fn come_back(&mut self, _steps: u64, _states: &mut [f32], _weights: &mut [f32]) -> Result<(), CommError> {
        let what = format!("nobody comes back to {}", self.protocol().name);
        Err(CommError::Failed { rank: self.rank(), phase: "come_back", what })
    }

    /// Memory that this rank is to use from now on instead of its own, once, where ranks have one copy of the
    /// weights.
    ///
    /// # Safety
    /// Rank 0 alone fills weights and optimizer, before the opening. From then on the caller reads a bucket's
    /// weights, and writes its gradients, only after [`Agreement::settle`] has found it done and before it
    /// settles the bucket again; it touches the optimizer's numbers only inside of [`Target::apply_shared`],
    /// in the range that it is given; or it does so after [`Agreement::freeze`].
    #[allow(unsafe_code)]
    unsafe fn shared_weights(&mut self) -> Option<SharedWeights> {
        None
    }

    /// Lets nobody change shared weights any more, and says whether nobody does: the run ends.
    fn freeze(&mut self) -> bool {
        true
    }

    /// Whether ranks have one copy of the weights.
    fn has_one_copy(&self) -> bool {
        false
    }
}

/// All know the same of the run; before the opening.
///
/// # Errors
/// When this rank knows something else than rank 0, and when another rank, or the way to it, has failed.
pub fn identify(agreement: &mut dyn Agreement, own: RunIdentity) -> Result<(), CommError> {
    identity::compare(own, [agreement.rank(), Rank(0)], |words| agreement.broadcast_from_root(words))
}

/// Adds up reports over all workers, between steps.
///
/// # Errors
/// When another rank, or the way to it, has failed.
pub fn sum_reports(agreement: &mut dyn Agreement, own: StepReport) -> Result<StepReport, CommError> {
    if agreement.workers() == 1 {
        return Ok(own);
    }
    let mut words = own.to_words();
    agreement.sum(&mut words)?;
    Ok(StepReport::from_words(words))
}

/// Gradients that a server was given.
#[derive(Debug)]
pub struct Push<'a> {
    /// Of which bucket.
    pub bucket: usize,
    /// Where its first element is among all parameters.
    pub start: usize,
    /// Steps that were made before.
    pub step: u64,
    /// The learning rate is so much of what it usually is.
    pub rate_share: f32,
    /// The sum over workers, or one worker's.
    pub gradients: &'a mut [f32],
    /// What they are the gradients of.
    pub weights: &'a mut [f32],
}

/// A server's part of the parameters: the optimizer and its state.
pub trait ServerShard {
    /// Changes the weights.
    fn apply(&mut self, push: Push<'_>);

    /// Has weights changed by a rule of the agreement's own, with what a worker has pushed after so many steps.
    fn change(&mut self, _steps: u64, change: &mut dyn FnMut()) {
        change();
    }

    /// A step of a worker is applied whole, where every push is a step; it had missed so many updates: those that were applied between the
    /// reading of the weights that it was computed from and its own application.
    fn stepped(&mut self, _worker: usize, _missed: u64) {}

    /// Takes over the state that a run is resumed with: buffer `slot`, of all parameters.
    fn resume(&mut self, slot: usize, state: &[f32]);

    /// Buffer `slot` of the state, of all parameters.
    fn state(&mut self, slot: usize) -> &mut [f32];
}
