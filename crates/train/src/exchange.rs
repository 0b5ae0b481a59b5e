//! Between an engine and an agreement: what happens in a pass becomes messages, and what comes back is
//! applied.
//!
//! Gradients leave as they become final, and come back while the backward pass goes on. What has not come
//! back by its end is applied in the next forward pass, just before the first layer that needs it: a slow
//! link then hides behind a whole step and not only behind half of one. Whoever looks at the weights between
//! steps lets them settle first.

mod rounds;

use std::ops::Range;

use paceline_comm::CommError;
use paceline_nn::optim::Moment;
use paceline_parallel::agree::{
    self, Agreement, Alone, Opening, Refusal, RunIdentity, Settled, StepReport, Steps, Votes, Wait,
};
use paceline_parallel::part::PartLinks;
use paceline_parallel::siblings::ReplicaLinks;
use paceline_parallel::stage::{Side, StageLinks};
use paceline_system::clock::Clock;
use paceline_system::phase::Phase;
use paceline_system::progress::{Message, Progress};
use rounds::Apart;

use crate::engine::{Engine, Event, Halt, Listener, Target, Weights};
use crate::error::TrainError;
use crate::metrics::Tally;
use crate::phases::Phases;
use crate::replica::NotFinite;

/// A replica's end of an agreement, during a run.
#[derive(Debug)]
pub struct Exchange {
    agreement: Box<dyn Agreement>,
    /// With the other stages or parts of this replica, where the model is split.
    siblings: Option<ReplicaLinks>,
    /// The step under way.
    moment: Moment,
    /// The step whose gradients are not all applied.
    pending: Option<Moment>,
    /// Whether devices of different kinds train together.
    mixed: bool,
    /// Whether the report of the step under way was given.
    reported: bool,
    /// What it said of this replica's own answers.
    tally: Tally,
    /// Samples since running statistics were the same everywhere.
    samples: u64,
    /// Which share of the batch under way is this replica's.
    share: f32,
    /// Steps of the run that this replica has made, where it makes its own: those of all, and its own since they met.
    made: u64,
    /// Whether the step under way is applied whole.
    settled: bool,
    /// Whether replicas have made steps of their own since their weights, and all of their state, were the same.
    apart: Apart,
    /// Running statistics at the weights, where others are tried.
    taken_states: Vec<f32>,
    /// This replica's wishes, and after a step everybody's.
    pub votes: Votes,
    clock: Clock,
    /// Says what is waited for.
    progress: Progress,
    /// Spent inside of a pass, in seconds.
    waited_s: f64,
    updated_s: f64,
}

impl Exchange {
    /// With nobody.
    pub fn alone(clock: &Clock) -> Self {
        Self::new(Box::new(Alone::default()), false, clock)
    }

    /// With those who have joined an agreement; `mixed` says whether they may compute on devices of different
    /// kinds.
    pub fn new(agreement: Box<dyn Agreement>, mixed: bool, clock: &Clock) -> Self {
        Self {
            agreement,
            siblings: None,
            moment: Moment { step: 0, learning_rate: 0.0 },
            pending: None,
            mixed,
            reported: false,
            tally: Tally::default(),
            samples: 0,
            share: 0.0,
            made: 0,
            settled: false,
            apart: Apart::default(),
            taken_states: Vec::new(),
            votes: Votes::default(),
            clock: clock.clone(),
            progress: Progress::default(),
            waited_s: 0.0,
            updated_s: 0.0,
        }
    }

    /// Computes together with other stages or parts from now on.
    pub fn join_siblings(&mut self, links: ReplicaLinks) {
        self.siblings = Some(links);
    }

    /// Takes the links to them, for as long as somebody else talks to them; [`Exchange::join_siblings`] gives them back.
    pub fn take_siblings(&mut self) -> Option<ReplicaLinks> {
        self.siblings.take()
    }

    /// Whether nobody else takes part, in any way.
    pub fn is_alone(&self) -> bool {
        self.workers() == 1 && self.siblings.is_none()
    }

    /// Whether it computes a part of every layer, together with others.
    pub fn has_parts(&self) -> bool {
        matches!(self.siblings, Some(ReplicaLinks::Parts(_)))
    }

    fn links(&mut self) -> Result<&mut StageLinks, TrainError> {
        match &mut self.siblings {
            Some(ReplicaLinks::Stages(links)) => Ok(links),
            _ => Err(TrainError::Refused("a stage has to join the others first".into())),
        }
    }

    /// Has the other parts add their numbers, or fill in their pieces; a part that nobody has joined keeps its own.
    fn with_parts(&mut self, ask: impl FnOnce(&mut PartLinks) -> Result<(), CommError>) -> Result<(), TrainError> {
        let Some(ReplicaLinks::Parts(parts)) = &mut self.siblings else { return Ok(()) };
        let (before, start) = (self.progress.switch(Phase::Exchange, Some(Message::Parts)), self.clock.seconds());
        let done = ask(parts);
        self.waited_s += self.clock.seconds() - start;
        self.progress.set(before);
        Ok(done?)
    }

    /// Replaces numbers by those of the first part.
    ///
    /// # Errors
    /// When another part, or the way to it, has failed.
    pub fn follow_first_part(&mut self, numbers: &mut [f32]) -> Result<(), TrainError> {
        self.with_parts(|parts| parts.siblings().follow_first(numbers))
    }

    /// Whether all parts wish what this one does.
    ///
    /// # Errors
    /// When another part, or the way to it, has failed.
    pub fn all_parts_wish(&mut self, wishes: bool) -> Result<bool, TrainError> {
        let mut against = [f32::from(u8::from(!wishes))];
        self.with_parts(|parts| parts.sum(&mut against))?;
        Ok(against[0] == 0.0)
    }

    /// Says that a neighbour will send messages of these lengths.
    ///
    /// # Errors
    /// When it, or the way to it, has failed.
    pub fn expect(&mut self, from: Side, lengths: &[usize]) -> Result<(), TrainError> {
        Ok(self.links()?.expect(from, lengths)?)
    }

    /// Passes on from stage to stage what the first of them wishes.
    ///
    /// # Errors
    /// When another stage, or the way to it, has failed.
    pub fn pass_on(&mut self, wishes: bool, (stage, stages): (usize, usize)) -> Result<bool, TrainError> {
        let mut word = [f32::from(u8::from(wishes))];
        if stage > 0 {
            self.expect(Side::Before, &[1])?;
            self.receive(Side::Before, &mut word)?;
        }
        if stage + 1 < stages {
            self.links()?.send(Side::Behind, &word)?;
        }
        Ok(word[0] > 0.0)
    }

    /// Waits for numbers of a neighbour.
    fn receive(&mut self, from: Side, numbers: &mut [f32]) -> Result<(), TrainError> {
        let message = if from == Side::Before { Message::Activations } else { Message::Gradients };
        let (before, start) = (self.progress.switch(Phase::Exchange, Some(message)), self.clock.seconds());
        let received = self.links()?.receive(from, numbers);
        self.waited_s += self.clock.seconds() - start;
        self.progress.set(before);
        Ok(received?)
    }

    /// Adds up a number over the ranks of this replica.
    fn sum_squares(&mut self, sum: &mut f64) -> Result<(), TrainError> {
        if let Some(links) = &mut self.siblings {
            *sum = links.siblings().sum(*sum)?;
        }
        Ok(())
    }

    /// Makes of a report that of all ranks of this replica.
    fn sum_siblings(&mut self, report: StepReport) -> Result<StepReport, TrainError> {
        let Some(links) = &mut self.siblings else { return Ok(report) };
        let (before, start) = (self.progress.switch(Phase::Exchange, Some(Message::Report)), self.clock.seconds());
        let summed = links.sum_report(report);
        self.waited_s += self.clock.seconds() - start;
        self.progress.set(before);
        Ok(summed?)
    }

    /// The agreement.
    pub fn agreement(&mut self) -> &mut dyn Agreement {
        &mut *self.agreement
    }

    /// How many replicas train together.
    pub fn workers(&self) -> usize {
        self.agreement.workers()
    }

    /// This replica's number among them.
    pub fn rank(&self) -> usize {
        self.agreement.rank().index()
    }

    /// Whether a step is made with the gradients of all replicas, so that each counts for its samples among all.
    pub fn shares_steps(&self) -> bool {
        self.agreement.shares_steps()
    }

    /// Samples of a batch are computed, which has so many in all: running statistics count for as many.
    pub fn count(&mut self, samples: usize, part: usize, of: usize) {
        self.samples += if part == 0 { samples as u64 } else { 0 };
        self.share = samples as f32 / of.max(1) as f32;
    }

    /// Whether the step of a bucket is made with what comes back, and not with this replica's own gradients.
    fn settles(&self) -> bool {
        !self.agreement.protocol().steps.are_own()
    }

    /// The step under way.
    pub fn moment(&self) -> Moment {
        self.moment
    }

    /// How good this replica's own answers were, where a step was given up.
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// Whether this replica makes the steps itself, and so has all that they need.
    pub fn makes_own_steps(&self) -> bool {
        !matches!(self.agreement.protocol().steps, Steps::Chunks | Steps::Servers | Steps::Gathered)
    }

    /// A step begins, with weights that are ahead of where the optimizer is by so many times its velocity.
    ///
    /// # Errors
    /// When another replica, or the way to it, or a device has failed.
    pub fn begin(&mut self, engine: &mut Engine, moment: Moment, ahead: f32) -> Result<(), TrainError> {
        (self.moment, self.reported) = (moment, false);
        (self.waited_s, self.updated_s) = (0.0, 0.0);
        self.begin_exchange(engine, ahead)
    }

    /// Says from now on what it waits for.
    pub fn report_to(&mut self, progress: &Progress) {
        self.progress = progress.clone();
    }

    /// Tells apart what was spent inside of a phase since the last time.
    pub fn tell_apart(&mut self, phase: Phase, phases: &mut Phases) {
        let (waited_s, updated_s) = (std::mem::take(&mut self.waited_s), std::mem::take(&mut self.updated_s));
        if updated_s > 0.0 {
            phases.shift(phase, Phase::Update, updated_s);
        }
        if !self.is_alone() && waited_s > 0.0 {
            phases.shift(phase, Phase::Exchange, waited_s);
        }
    }

    /// Time, without what was waited for others in this pass.
    pub fn computed_s(&self) -> f64 {
        self.clock.seconds() - self.waited_s
    }

    /// Waits for others. Heartbeats say meanwhile what for.
    fn wait_for<T>(&mut self, message: Message, wait: impl FnOnce(&mut dyn Agreement) -> T) -> T {
        let (before, start) = (self.progress.switch(Phase::Exchange, Some(message)), self.clock.seconds());
        let done = wait(&mut *self.agreement);
        self.waited_s += self.clock.seconds() - start;
        self.progress.set(before);
        done
    }

    /// Keeps the weights from being changed by others any more, and says whether they are still.
    pub fn freeze(&mut self) -> bool {
        self.agreement.freeze()
    }

    /// Takes over what rank 0 gives to all, as the protocol lists it.
    ///
    /// # Errors
    /// When another replica, or the way to it, has failed, or begins with another step, other data or another
    /// model.
    pub fn open(&mut self, engine: &mut Engine, identity: RunIdentity) -> Result<(), TrainError> {
        self.wait_for(Message::Opening, |agreement| open(agreement, engine.weights_mut(), identity))?;
        self.taken_states = engine.weights().store.states.to_vec();
        engine.load();
        Ok(())
    }

    /// Adds up a tally over all replicas, with their wishes; between steps.
    ///
    /// # Errors
    /// When another replica, or the way to it, has failed.
    pub fn total(&mut self, tally: Tally) -> Result<Tally, TrainError> {
        let own = report(&tally, self.votes, 0.0);
        let report = self.wait_for(Message::Report, |agreement| agree::sum_reports(agreement, own))?;
        let report = self.sum_siblings(report)?;
        Ok(self.take_total(report))
    }

    /// What all replicas that step together have reported, and of one that steps by itself its own.
    fn total_of_step(&mut self, tally: Tally) -> Result<Tally, TrainError> {
        if self.steps_apart() {
            return self.total_of_own(tally);
        }
        if !self.reported {
            // The gradients never came by: they were summed between devices.
            return self.total(tally);
        }
        let total = self.wait_for(Message::Report, |agreement| agreement.total())?;
        let total = self.sum_siblings(total)?;
        Ok(self.take_total(total))
    }

    fn take_total(&mut self, report: StepReport) -> Tally {
        self.votes = report.votes;
        let StepReport { rows, loss, top1, top5, .. } = report;
        Tally { rows, loss, top1, top5 }
    }

    /// Waits until every gradient is applied, and gives all replicas the mean of their running statistics, by
    /// the samples that each has seen, and the servers' weights where everybody stepped alone: the weights can be looked at, and are the same
    /// everywhere.
    ///
    /// # Errors
    /// When another replica, or the way to it, or a device has failed, or a gradient was not finite.
    pub fn settle(&mut self, engine: &mut Engine) -> Result<(), Halt> {
        if self.pending.is_some() {
            engine.settle(self)?;
            self.pending = None;
        }
        // Alone, nothing is anywhere else; and where nobody has stepped since the last time, all are where they were.
        if self.agreement.protocol().opening.is_empty() || (self.steps_apart() && !self.has_stepped_apart()) {
            return Ok(());
        }
        engine.fetch()?;
        // Statistics over all replicas are the same everywhere already.
        let own_statistics = !engine.plan().shares_statistics() && self.workers() > 1;
        let weights = engine.weights_mut();
        self.come_together(weights)?;
        if own_statistics && !weights.store.states.is_empty() {
            let (own, workers) = (std::mem::take(&mut self.samples) as f32, self.agreement.workers());
            let mut all = [own];
            self.wait_for(Message::Statistics, |agreement| agreement.sum(&mut all))?;
            let share = if all[0] > 0.0 { own / all[0] } else { 1.0 / workers as f32 };
            weights.store.states.iter_mut().for_each(|state| *state *= share);
            self.wait_for(Message::Statistics, |agreement| agreement.sum(&mut weights.store.states))?;
        }
        self.keep_statistics(&mut weights.store.states);
        self.wait_for(Message::Weights, |agreement| agreement.fetch_weights(&mut weights.store.parameters))?;
        let mut optimizer: Vec<&mut [f32]> = weights.optimizer.iter_mut().map(|buffer| &mut **buffer).collect();
        self.wait_for(Message::Optimizer, |agreement| agreement.fetch_optimizer(&mut optimizer))?;
        if self.mixed && self.agreement.protocol().steps == Steps::Sums {
            self.follow_root(engine)?;
        }
        engine.load();
        Ok(())
    }

    /// Devices of different kinds make the same step in their own arithmetic; between steps all go on from
    /// rank 0's weights.
    fn follow_root(&mut self, engine: &mut Engine) -> Result<(), TrainError> {
        let Weights { store, optimizer, .. } = engine.weights_mut();
        Ok(self.wait_for(Message::Weights, |agreement| {
            agreement.broadcast_from_root(&mut store.parameters)?;
            optimizer.iter_mut().try_for_each(|buffer| agreement.broadcast_from_root(buffer))
        })?)
    }

    /// Makes the norm of all replicas' parts of one's own: each has two numbers for its part, of which the second
    /// is what the first leaves, so that all come to the same bits.
    fn combine_norm(&mut self, norm: &mut f64) -> Result<(), TrainError> {
        let mut parts = vec![0.0f32; 2 * self.workers()];
        let high = *norm as f32;
        let own = 2 * self.rank();
        (parts[own], parts[own + 1]) = (high, (*norm - f64::from(high)) as f32);
        self.wait_for(Message::Report, |agreement| agreement.sum(&mut parts))?;
        let part = |pair: &[f32]| pair.iter().copied().map(f64::from).sum::<f64>();
        let mut squares = parts.chunks(2).map(|pair| part(pair).powi(2)).sum::<f64>();
        self.sum_squares(&mut squares)?;
        *norm = squares.sqrt();
        Ok(())
    }

    /// Brings a tensor's part of a buffer of the optimizer's state to rank 0 of those who keep chunks of it: all of
    /// them come here for the same tensors, in the same order. The others get nothing.
    ///
    /// # Errors
    /// When another replica, or the way to it, has failed.
    pub fn gather_state(
        &mut self,
        weights: &Weights,
        (slot, elements): (usize, Range<usize>),
    ) -> Result<Vec<f32>, CommError> {
        let own = &weights.optimizer[slot];
        self.wait_for(Message::Optimizer, |agreement| agreement.gather_state(own, elements))
    }

    /// Brings the parameters of a bucket up to date with what came back for it.
    fn settle_bucket(
        &mut self,
        (bucket, wait): (usize, Wait),
        moment: Moment,
        target: &mut dyn Target,
    ) -> Result<(), Halt> {
        self.with_target((bucket, wait), moment, target, |agreement, target| agreement.settle(bucket, wait, target))
    }

    /// Has an agreement apply what came back for a bucket to a target.
    fn with_target(
        &mut self,
        (bucket, wait): (usize, Wait),
        moment: Moment,
        target: &mut dyn Target,
        ask: impl FnOnce(&mut dyn Agreement, &mut dyn agree::Target) -> Result<Settled, CommError>,
    ) -> Result<(), Halt> {
        let (clock, progress) = (self.clock.clone(), self.progress.clone());
        let mut applied = Applied { target, moment, clock: &clock, progress: &progress, halt: None, updated_s: 0.0 };
        let before = progress.position();
        if wait == Wait::Block {
            progress.switch(Phase::Exchange, Some(Message::bucket(bucket)));
        }
        let start = clock.seconds();
        let settled = ask(&mut *self.agreement, &mut applied);
        let Applied { halt, updated_s, .. } = applied;
        progress.set(before);
        self.updated_s += updated_s;
        self.waited_s += clock.seconds() - start - updated_s;
        match (settled?, halt) {
            (_, Some(halt)) => Err(halt),
            // Another rank could not make its share of the step; which parameter it was, that rank knows.
            (Settled::Refused, None) => Err(Halt::RefusedElsewhere { bucket }),
            (Settled::Done | Settled::NotYet, None) => Ok(()),
        }
    }
}

impl Listener for Exchange {
    fn on(&mut self, event: Event<'_>) -> Result<(), Halt> {
        let moment = self.moment;
        match event {
            Event::Forwarded { tally } => {
                self.tally = tally;
                // Of one worker nothing has changed yet, and all its parts have the same loss; others find out by the total.
                let stages = matches!(self.siblings, Some(ReplicaLinks::Stages(_)));
                if self.workers() == 1 && !stages && !self.settles() && !tally.loss.is_finite() {
                    return Err(Halt::NotFinite(NotFinite::Loss));
                }
                self.reported = true;
                let report = report(&tally, self.votes, self.share);
                Ok(self.wait_for(Message::Report, |agreement| agreement.begin_step(report))?)
            }
            Event::BeforeRead { bucket, target } => match self.pending {
                Some(before) => self.settle_bucket((bucket, Wait::Block), before, target),
                None => Ok(()),
            },
            Event::Final { bucket, gradients } if self.settles() => Ok(self.agreement.send(bucket, gradients)?),
            Event::MayApply { bucket, gradients: Some(gradients), target } if !self.settles() => {
                let start = self.clock.seconds();
                let applied = target.apply(moment, (bucket, 0..gradients.len()), gradients, None);
                self.updated_s += self.clock.seconds() - start;
                applied
            }
            Event::MayApply { bucket, target, .. } if self.settles() => {
                self.settle_bucket((bucket, Wait::Poll), moment, target)
            }
            Event::Settle { bucket, target } if self.settles() => {
                self.settle_bucket((bucket, Wait::Block), moment, target)
            }
            Event::Final { .. } | Event::MayApply { .. } | Event::Settle { .. } => Ok(()),
            Event::InspectSums { bucket, target } => {
                let at = (bucket, Wait::Block);
                self.with_target(at, moment, target, |agreement, target| agreement.inspect_sums(bucket, target))
            }
            Event::StepChunks { bucket, target } => {
                let at = (bucket, Wait::Block);
                self.with_target(at, moment, target, |agreement, target| agreement.step_chunks(bucket, target))
            }
            Event::Norm { norm } => Ok(self.combine_norm(norm)?),
            Event::UpdateBegins => {
                self.updated_s -= self.clock.seconds();
                Ok(())
            }
            Event::UpdateEnds => {
                self.updated_s += self.clock.seconds();
                Ok(())
            }
            Event::Receive { from, numbers } => Ok(self.receive(from, numbers)?),
            Event::Send { to, numbers } => Ok(self.links()?.send(to, numbers)?),
            Event::SumParts { numbers } => Ok(self.with_parts(|parts| parts.sum(numbers))?),
            Event::GatherParts { numbers, lengths } => Ok(self.with_parts(|parts| parts.gather(numbers, lengths))?),
            Event::Squares { sum } => Ok(self.sum_squares(sum)?),
            Event::Sum { numbers: [] } => Ok(()),
            Event::Sum { numbers } => Ok(self.wait_for(Message::BatchNormSums, |agreement| agreement.sum(numbers))?),
            Event::Total { tally } => {
                *tally = self.total_of_step(*tally)?;
                Ok(())
            }
        }
    }
}

/// Where the outcome of a bucket goes, and what kept it from going there.
struct Applied<'a> {
    target: &'a mut dyn Target,
    moment: Moment,
    clock: &'a Clock,
    progress: &'a Progress,
    halt: Option<Halt>,
    updated_s: f64,
}

impl Applied<'_> {
    fn timed(&mut self, apply: impl FnOnce(&mut dyn Target, Moment) -> Result<(), Halt>) -> Result<(), Refusal> {
        let (before, start) = (self.progress.switch(Phase::Update, None), self.clock.seconds());
        let applied = apply(self.target, self.moment);
        self.updated_s += self.clock.seconds() - start;
        self.progress.set(before);
        applied.map_err(|halt| {
            self.halt = Some(halt);
            Refusal
        })
    }
}

impl agree::Target for Applied<'_> {
    fn apply_sums(&mut self, bucket: usize, range: Range<usize>, sums: &mut [f32]) -> Result<(), Refusal> {
        self.timed(|target, moment| target.apply(moment, (bucket, range), sums, None))
    }

    fn step_chunk(&mut self, bucket: usize, range: Range<usize>, values: &mut [f32]) -> Result<(), Refusal> {
        self.timed(|target, moment| target.step_chunk(moment, (bucket, range), values))
    }

    fn apply_shared(
        &mut self,
        bucket: usize,
        range: Range<usize>,
        sums: &mut [f32],
        weights: &mut [f32],
    ) -> Result<(), Refusal> {
        self.timed(|target, moment| target.apply(moment, (bucket, range), sums, Some(weights)))
    }

    fn replace_weights(&mut self, bucket: usize, weights: &[f32]) -> Result<(), Refusal> {
        self.timed(|target, _| target.replace(bucket, weights))
    }
}

/// Takes over what rank 0 gives to all, as the protocol lists it.
fn open(agreement: &mut dyn Agreement, weights: &mut Weights, identity: RunIdentity) -> Result<(), CommError> {
    agree::identify(agreement, identity)?;
    for opening in agreement.protocol().opening.clone() {
        match opening {
            Opening::States if weights.store.states.is_empty() => {}
            Opening::States => agreement.broadcast_from_root(&mut weights.store.states)?,
            // Where there is one copy, rank 0 has filled it before it said what it begins with.
            Opening::Weights | Opening::Optimizer if agreement.has_one_copy() => {}
            Opening::Weights => agreement.broadcast_from_root(&mut weights.store.parameters)?,
            Opening::Optimizer => {
                weights.optimizer.iter_mut().try_for_each(|buffer| agreement.broadcast_from_root(buffer))?;
            }
            Opening::Kept { .. } => {
                weights.kept.iter_mut().try_for_each(|buffer| agreement.broadcast_from_root(buffer))?;
            }
        }
    }
    agreement.opened(&weights.store.parameters);
    Ok(())
}

fn report(tally: &Tally, votes: Votes, share: f32) -> StepReport {
    let Tally { rows, loss, top1, top5 } = *tally;
    StepReport { rows, loss, top1, top5, share, votes }
}
