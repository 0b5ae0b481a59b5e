//! Steps of a replica that trains together with others.
//!
//! Gradients leave as they become final, and come back as sums over all replicas while the backward pass goes on. What has not come
//! back by its end is applied in the next forward pass, just before the first layer that needs it: a slow link then hides behind
//! a whole step and not only behind half of one. Whoever looks at the weights between steps lets them settle first.

use paceline_data::batch::Batch;
use paceline_nn::optim::Moment;
use paceline_parallel::agree::{Elements, Memory, OPENING, Opening, Shared};
use paceline_parallel::{Agreement, Brought};
use paceline_system::clock::Clock;
use paceline_tensor::device::cuda::CudaError;
use paceline_tensor::execute::Turn;
use paceline_tensor::{Buffer, Store};

use super::{EVALUATES, Half, NotFinite, Replica, ReplicaOptions, Stepped, Updating, Votes, split};
use crate::error::TrainError;
use crate::metrics::Tally;
use crate::phases::Phases;
use crate::serve::Start;

impl Replica {
    /// Trains together with others from now on. Dropout is that of the global batch, of which each has its samples.
    pub fn agree(&mut self, mut agreement: Agreement) {
        self.share = agreement.weight();
        let ReplicaOptions { micro_batch, accumulate, .. } = self.options;
        self.first_sample = u64::from(agreement.rank().0) * (micro_batch * accumulate) as u64;
        if let Some(memory) = agreement.memory() {
            self.share_memory(memory, agreement.rank().0 == 0);
        }
        self.agreement = agreement;
    }

    /// How many replicas train together.
    pub fn world(&self) -> usize {
        self.agreement.world()
    }

    /// Whether a step can be made with some elements of a bucket by themselves: nothing looks at whole tensors or at all gradients.
    pub fn steps_by_elements(&self) -> bool {
        !self.plan().stores_gradients() && !self.options.rule.needs_whole_tensors()
    }

    /// What its weights and optimizer take.
    pub fn elements(&self) -> Elements {
        Elements { parameters: self.store.parameters.len(), slots: self.optimizer_state.len() }
    }

    /// A step whose gradients travel while the backward pass runs.
    pub(super) fn step_overlapped(
        &mut self,
        batch: &Batch,
        moment: Moment,
        phases: &mut Phases,
    ) -> Result<Stepped, TrainError> {
        let mut agreement = std::mem::replace(&mut self.agreement, Agreement::alone());
        let stepped = self.overlapped(&mut agreement, batch, moment, phases);
        self.agreement = agreement;
        stepped
    }

    fn overlapped(
        &mut self,
        agreement: &mut Agreement,
        batch: &Batch,
        moment: Moment,
        phases: &mut Phases,
    ) -> Result<Stepped, TrainError> {
        let (share, votes, pending) = (self.share, self.votes, self.pending.take());
        let pass = self.pass(moment.step, 0);
        let (Half { executor, ends }, store, mut updates) = split(self);
        let (clock, mut times) = (phases.clock().clone(), Times::default());
        let (tally, failed) = phases.time("compute", || {
            if let Err(error) = ends.fill(executor, batch, 0, share) {
                return (Tally::default(), Some(error.into()));
            }
            let mut turn = |turn: Turn<'_>| match (turn, pending) {
                (Turn::BeforeRead { bucket, parameters }, Some(before)) => {
                    times.bring(&clock, &mut updates, (agreement, before), (bucket, true), parameters)
                }
                (Turn::Sum { numbers, .. }, _) => times.sum(&clock, agreement, numbers),
                _ => Ok(()),
            };
            let failed = executor.forward_with(store, pass, &mut turn).err();
            (ends.answers(executor, batch, 0).1, failed)
        });
        times.tell(phases);
        match failed {
            Some(Failed::Comm(error)) => return Err(error),
            Some(Failed::NotFinite(what)) => return Ok((tally, Err(what))),
            None => {}
        }
        agreement.share(numbers(&tally, votes))?;
        let (mut failed, mut times) = (None, Times::default());
        let ran = phases.time("compute", || {
            executor.backward(store, pass, &mut |turn| {
                let done = match turn {
                    Turn::Final { bucket, gradients } => agreement.send(bucket, gradients).map_err(Failed::from),
                    Turn::Apply { bucket, parameters, .. } | Turn::Offer { bucket, parameters } => {
                        times.bring(&clock, &mut updates, (agreement, moment), (bucket, false), parameters)
                    }
                    Turn::Sum { numbers, .. } => times.sum(&clock, agreement, numbers),
                    Turn::BeforeRead { .. } => Ok(()),
                };
                failed = done.err();
                failed.is_none()
            })
        });
        ran?;
        times.tell(phases);
        match failed {
            Some(Failed::Comm(error)) => return Err(error),
            Some(Failed::NotFinite(what)) => return Ok((tally, Err(what))),
            None => {}
        }
        self.pending = Some(moment);
        let tally = phases.time("wait", || self.hear(agreement))?.unwrap_or(tally);
        let finite = if tally.loss.is_finite() { Ok(()) } else { Err(NotFinite::Loss) };
        Ok((tally, finite))
    }

    /// A step whose gradients are looked at all together before they are applied.
    pub(super) fn step_together(
        &mut self,
        batch: &Batch,
        moment: Moment,
        phases: &mut Phases,
    ) -> Result<Stepped, TrainError> {
        let mut agreement = std::mem::replace(&mut self.agreement, Agreement::alone());
        let mut add = |numbers: &mut [f32]| agreement.sum(numbers).map_err(TrainError::from);
        let computed = phases.time("compute", || self.compute_with(batch, moment.step, &mut add));
        let tally = computed.and_then(|tally| phases.time("wait", || self.sum(&mut agreement, &tally)));
        self.agreement = agreement;
        let stepped = self.finish_step(tally?, moment, phases);
        if stepped.1.is_ok() {
            self.end_update();
        }
        Ok(stepped)
    }

    fn sum(&mut self, agreement: &mut Agreement, tally: &Tally) -> Result<Tally, TrainError> {
        agreement.share(numbers(tally, self.votes))?;
        for (index, bucket) in self.buckets.iter().enumerate() {
            agreement.send(index, &self.store.gradients[bucket.elements.clone()])?;
        }
        for (index, bucket) in self.buckets.iter().enumerate() {
            let gradients = &mut self.store.gradients[bucket.elements.clone()];
            agreement.bring(index, true, gradients, &mut |_, sums, gradients| {
                gradients.copy_from_slice(sums);
                Ok::<_, TrainError>(())
            })?;
        }
        Ok(self.hear(agreement)?.unwrap_or(*tally))
    }

    /// What all replicas shared in this step.
    fn hear(&mut self, agreement: &mut Agreement) -> Result<Option<Tally>, TrainError> {
        Ok(agreement.shared()?.map(|numbers| self.understand(numbers)))
    }

    fn understand(&mut self, numbers: Shared) -> Tally {
        let [rows, loss, rest, top1, top5, interrupted, time_limit, checkpoint, _] = numbers;
        let [interrupted, time_limit, checkpoint] = [interrupted, time_limit, checkpoint].map(|votes| votes as u32);
        self.votes = Votes { interrupted, time_limit, checkpoint };
        let loss = f64::from(loss) + f64::from(rest);
        Tally { rows: rows as u64, loss, top1: top1 as u64, top5: top5 as u64 }
    }

    /// Uses memory that all replicas map; the first one's numbers are theirs all.
    fn share_memory(&mut self, memory: Memory, first: bool) {
        let Memory { weights, optimizer, gradients } = memory;
        let own = std::iter::once(&mut self.store.parameters).chain(&mut self.optimizer_state);
        for (own, mut common) in own.zip(std::iter::once(weights).chain(optimizer)) {
            assert_eq!(own.len(), common.len(), "all ranks have the same parameters");
            if first {
                common.copy_from_slice(own);
            }
            *own = Buffer::lent(Box::new(common));
        }
        let train = self.train.as_mut().expect(EVALUATES);
        train.executor.keep_gradients(&mut self.store, Buffer::lent(Box::new(gradients)));
    }

    /// Takes over the weights, states and optimizer of rank 0, from this step on.
    ///
    /// # Errors
    /// When another replica, or the way to it, has failed, or begins with another step or other data.
    pub fn begin_together(&mut self, step: u64, steps_per_epoch: u64) -> Result<(), TrainError> {
        let Self { agreement, store, optimizer_state, options, .. } = self;
        let ReplicaOptions { input, classes, .. } = *options;
        agreement.begin(Start { step, steps_per_epoch, input, classes }.facts())?;
        for opening in OPENING {
            match opening {
                Opening::States => agreement.of_first(&mut store.states)?,
                // Where there is one copy, rank 0 has filled it before it said what it begins with.
                Opening::Weights | Opening::Optimizer if agreement.is_common() => {}
                Opening::Weights => agreement.of_first(&mut store.parameters)?,
                Opening::Optimizer => optimizer_state.iter_mut().try_for_each(|buffer| agreement.of_first(buffer))?,
            }
        }
        self.begin_boundary(step);
        self.changed();
        Ok(())
    }

    /// Adds up a tally over all replicas.
    ///
    /// # Errors
    /// When another replica, or the way to it, has failed.
    pub fn total(&mut self, tally: Tally) -> Result<Tally, TrainError> {
        if self.world() == 1 {
            return Ok(tally);
        }
        let mut agreement = std::mem::replace(&mut self.agreement, Agreement::alone());
        let mut total = numbers(&tally, self.votes);
        let added = agreement.sum(&mut total);
        self.agreement = agreement;
        added?;
        Ok(self.understand(total))
    }

    /// Waits until every gradient is applied, and gives all replicas the mean of their running statistics, and the servers' weights
    /// where everybody stepped alone: the weights can be looked at, and are the same everywhere.
    ///
    /// # Errors
    /// When another replica, or the way to it, has failed, or a gradient was not finite.
    pub fn settle(&mut self) -> Result<Result<(), NotFinite>, TrainError> {
        self.mark_boundary();
        let mut agreement = std::mem::replace(&mut self.agreement, Agreement::alone());
        let settled = self.settle_with(&mut agreement);
        self.agreement = agreement;
        settled
    }

    fn settle_with(&mut self, agreement: &mut Agreement) -> Result<Result<(), NotFinite>, TrainError> {
        if let (Some(before), Some(_)) = (self.pending.take(), &self.train) {
            let (_, Store { parameters, .. }, mut updates) = split(self);
            for index in 0..updates.buckets.len() {
                let parameters = &mut parameters[updates.buckets[index].elements.clone()];
                match updates.bring((agreement, before), (index, true), parameters, &mut |update| update()) {
                    Ok(()) => {}
                    Err(Failed::NotFinite(what)) => return Ok(Err(what)),
                    Err(Failed::Comm(error)) => return Err(error),
                }
            }
        }
        // Statistics over all replicas are the same everywhere already.
        if !self.plan().shares_statistics() && agreement.world() > 1 {
            self.fetch()?;
            agreement.sum(&mut self.store.states)?;
            let factor = 1.0 / agreement.world() as f32;
            self.store.states.iter_mut().for_each(|state| *state *= factor);
            self.changed();
        }
        agreement.last_weights(&mut self.store.parameters)?;
        agreement.optimizer_state(&mut self.optimizer_state)?;
        Ok(Ok(()))
    }
}

/// Why a step cannot go on.
enum Failed {
    Comm(TrainError),
    NotFinite(NotFinite),
}

impl From<paceline_comm::CommError> for Failed {
    fn from(error: paceline_comm::CommError) -> Self {
        Self::Comm(error.into())
    }
}

impl From<CudaError> for Failed {
    fn from(error: CudaError) -> Self {
        Self::Comm(error.into())
    }
}

impl Updating<'_> {
    /// Brings the parameters of a bucket up to date with what came back for it. `timed` runs a step.
    fn bring(
        &mut self,
        (agreement, moment): (&mut Agreement, Moment),
        (bucket, wait): (usize, bool),
        parameters: &mut [f32],
        timed: &mut dyn FnMut(&mut dyn FnMut()),
    ) -> Result<(), Failed> {
        let brought = agreement.bring(bucket, wait, parameters, &mut |part, gradients, parameters| {
            let mut applied = Ok(());
            timed(&mut || applied = self.apply(moment, part.clone(), gradients, parameters));
            applied.map_err(Failed::NotFinite)
        })?;
        match brought {
            Brought::Spoilt => Err(Failed::NotFinite(NotFinite::Gradient(self.buckets[bucket].parameters.start))),
            Brought::Done | Brought::NotYet => Ok(()),
        }
    }
}

/// What ran inside of "compute" and is told apart.
#[derive(Default)]
struct Times {
    wait_s: f64,
    update_s: f64,
}

impl Times {
    fn bring(
        &mut self,
        clock: &Clock,
        updates: &mut Updating<'_>,
        with: (&mut Agreement, Moment),
        (bucket, wait): (usize, bool),
        parameters: &mut [f32],
    ) -> Result<(), Failed> {
        let (start, mut update_s) = (clock.seconds(), 0.0);
        let brought = updates.bring(with, (bucket, wait), parameters, &mut |update: &mut dyn FnMut()| {
            let start = clock.seconds();
            update();
            update_s += clock.seconds() - start;
        });
        self.update_s += update_s;
        self.wait_s += clock.seconds() - start - update_s;
        brought
    }

    /// Waits until numbers are added up over all replicas.
    fn sum(&mut self, clock: &Clock, agreement: &mut Agreement, numbers: &mut [f32]) -> Result<(), Failed> {
        let start = clock.seconds();
        agreement.sum(numbers)?;
        self.wait_s += clock.seconds() - start;
        Ok(())
    }

    fn tell(self, phases: &mut Phases) {
        phases.shift("compute", "update", self.update_s);
        phases.shift("compute", "wait", self.wait_s);
    }
}

/// A tally and votes as numbers that can be added up in `f32`: the loss in two, of which the second is what the first leaves.
fn numbers(tally: &Tally, votes: Votes) -> Shared {
    let loss = tally.loss as f32;
    let rest = (tally.loss - f64::from(loss)) as f32;
    let [rows, top1, top5] = [tally.rows, tally.top1, tally.top5].map(|count| count as f32);
    let [interrupted, time_limit, checkpoint] =
        [votes.interrupted, votes.time_limit, votes.checkpoint].map(|votes| votes as f32);
    [rows, loss, rest, top1, top5, interrupted, time_limit, checkpoint, 0.0]
}
