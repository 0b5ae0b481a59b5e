//! A replica that computes on a GPU: weights and optimizer are there, the host's store is a copy that is fetched when somebody wants it.

use std::sync::Arc;

use paceline_data::augment::View;
use paceline_data::batch::Batch;
use paceline_nn::optim::{Moment, Segment};
use paceline_tensor::device::cuda::session::{self, Album, Blueprint, Found, Samples, Session};
use paceline_tensor::device::cuda::{Cuda, CudaError};
use paceline_tensor::execute::Profile;
use paceline_tensor::{Buffer, Store};

use super::guard::Guard;
use super::half::{Ends, Planned};
use super::{NotFinite, Replica, ReplicaOptions, Stepped, is_finite};
use crate::error::TrainError;
use crate::metrics::Tally;
use crate::phases::Phases;

/// The model on the GPU, and which copy is the newer one.
#[derive(Debug)]
pub(super) struct OnGpu {
    pub(super) session: Session,
    host_is_newer: bool,
    gpu_is_newer: bool,
    albums: Option<Albums>,
    /// The batch that comes while another is computed, and whether its samples are on their way.
    coming: Option<Batch>,
    is_coming: bool,
    /// Whether there is room for batches to come.
    has_room: bool,
    /// Looks after the way to other GPUs, where there are some.
    pub(super) guard: Option<Guard>,
}

/// The images of both halves of a data set, on the GPU.
#[derive(Debug)]
pub struct Albums {
    /// For training.
    pub train: Album,
    /// For evaluation.
    pub val: Album,
}

const NO_ALBUM: &str = "a batch of views belongs to images that are on the GPU";

/// What a GPU cannot do from the start is a refusal: nothing has begun.
fn refused(error: CudaError) -> TrainError {
    TrainError::Refused(error.to_string())
}

fn ends(ends: &Ends) -> session::Ends {
    session::Ends { x: ends.x, targets: ends.targets, logits: ends.logits, seed: ends.seed }
}

fn samples(batch: &Batch) -> Samples<'_> {
    if batch.tokens.is_empty() { Samples::Images(&batch.images) } else { Samples::Tokens(&batch.tokens) }
}

fn tally(found: Found, rows: usize) -> Tally {
    Tally { rows: rows as u64, loss: found.loss, top1: found.top1, top5: found.top5 }
}

impl OnGpu {
    /// Takes the GPU's memory.
    pub fn new(
        cuda: &Arc<Cuda>,
        train: Option<&Planned>,
        eval: &Planned,
        (segments, options): (&[Segment], &ReplicaOptions),
    ) -> Result<Self, TrainError> {
        let decays: Vec<_> = segments.iter().map(|segment| (segment.range.clone(), segment.decay)).collect();
        let blueprint = Blueprint {
            train: train.map(|planned| (&planned.plan, ends(&planned.ends))),
            eval: (&eval.plan, ends(&eval.ends)),
            slots: if train.is_some() { options.rule.optimizer().state_slots() } else { 0 },
            parts: train.is_some() && options.accumulate > 1,
            decays: &decays,
            layer_rates: options.rule.layer_coefficient().filter(|_| train.is_some()),
        };
        let session = Session::new(cuda, &blueprint).map_err(refused)?;
        let (host_is_newer, gpu_is_newer, albums, coming) = (true, false, None, None);
        Ok(Self { session, host_is_newer, gpu_is_newer, albums, coming, is_coming: false, has_room: true, guard: None })
    }

    /// Brings a batch to the GPU, in the way that fits it.
    fn fill(&mut self, batch: &Batch, seed: Option<f32>) -> Result<(), CudaError> {
        if !batch.views.is_empty() {
            return self.look(&batch.views, &batch.targets, seed);
        }
        match seed {
            Some(seed) if std::mem::take(&mut self.is_coming) => self.session.fill_coming(&batch.targets, seed),
            seed => self.session.fill(samples(batch), &batch.targets, seed),
        }
    }

    fn look(&mut self, views: &[View], targets: &[i32], seed: Option<f32>) -> Result<(), CudaError> {
        let albums = self.albums.as_ref().expect(NO_ALBUM);
        let album = if seed.is_some() { &albums.train } else { &albums.val };
        let views: Vec<_> = views.iter().map(View::words).collect();
        self.session.look(album, &views, targets, seed)
    }

    /// Brings one of `parts` equal parts of a training batch to the GPU.
    fn fill_part(&mut self, batch: &Batch, (part, parts): (usize, usize), seed: f32) -> Result<(), CudaError> {
        fn part_of<T>(data: &[T], part: usize, parts: usize) -> &[T] {
            &data[data.len() / parts * part..data.len() / parts * (part + 1)]
        }
        let targets = part_of(&batch.targets, part, parts);
        if !batch.views.is_empty() {
            return self.look(part_of(&batch.views, part, parts), targets, Some(seed));
        }
        let samples = match samples(batch) {
            Samples::Images(images) => Samples::Images(part_of(images, part, parts)),
            Samples::Tokens(tokens) => Samples::Tokens(part_of(tokens, part, parts)),
        };
        self.session.fill(samples, targets, Some(seed))
    }

    /// Has the next batch brought while this one is computed.
    pub(super) fn bring(&mut self, next: &mut dyn FnMut() -> Option<Batch>) {
        self.coming = next();
        if let Some(batch) = self.coming.as_ref().filter(|batch| self.has_room && batch.views.is_empty()) {
            // Without room it is copied when its turn comes. Other failures show in the step that is under way.
            self.has_room = self.session.bring(samples(batch)).is_ok();
        }
    }

    fn give(&mut self, store: &Store, slots: &[Buffer]) -> Result<(), CudaError> {
        if std::mem::take(&mut self.host_is_newer) {
            self.session.load(store, slots)?;
        }
        Ok(())
    }

    /// Times every node on the batch that is there.
    pub fn profile(&mut self) -> Result<Profile, CudaError> {
        Ok(Profile { seconds: self.session.profile()? })
    }

    /// Answers a batch.
    pub fn evaluate(&mut self, batch: &Batch, store: &Store, slots: &[Buffer]) -> Result<(Vec<f32>, Tally), CudaError> {
        self.give(store, slots)?;
        self.fill(batch, None)?;
        let (logits, found) = self.session.evaluate()?;
        Ok((logits, tally(found, batch.targets.len())))
    }
}

impl Replica {
    /// Whether it computes on a GPU.
    pub fn is_on_gpu(&self) -> bool {
        self.gpu.is_some()
    }

    /// The GPU it computes on, if it does.
    pub fn gpu(&self) -> Option<&Cuda> {
        self.gpu.as_ref().map(|gpu| &**gpu.session.cuda())
    }

    /// The GPU's session, if it computes on one.
    pub fn session(&mut self) -> Option<&mut Session> {
        self.gpu.as_mut().map(|gpu| &mut gpu.session)
    }

    /// Gives a replica on a GPU the images that batches of views look at.
    pub fn hold(&mut self, albums: Albums) {
        if let Some(gpu) = &mut self.gpu {
            gpu.albums = Some(albums);
        }
    }

    /// Whether it has images that batches of views look at.
    pub fn holds_images(&self) -> bool {
        self.gpu.as_ref().is_some_and(|gpu| gpu.albums.is_some())
    }

    /// The batch that the last step took ahead of its turn: the next step's.
    pub fn take_coming(&mut self) -> Option<Batch> {
        let gpu = self.gpu.as_mut()?;
        gpu.is_coming = gpu.has_room && gpu.coming.as_ref().is_some_and(|batch| batch.views.is_empty());
        gpu.coming.take()
    }

    /// Brings the host's copy of weights, states and optimizer up to date.
    ///
    /// # Errors
    /// When the GPU does not answer.
    pub fn fetch(&mut self) -> Result<(), TrainError> {
        if let Some(gpu) = self.gpu.as_mut().filter(|gpu| gpu.gpu_is_newer) {
            gpu.session.fetch(&mut self.store, &mut self.optimizer_state)?;
            gpu.gpu_is_newer = false;
        }
        Ok(())
    }

    /// Says that the host's copy was changed: the GPU gets it before it computes again.
    pub fn changed(&mut self) {
        if let Some(gpu) = &mut self.gpu {
            gpu.host_is_newer = true;
        }
    }

    /// Brings a batch to the GPU; steps that are started with [`Replica::start_on_gpu`] use it until the next one.
    ///
    /// # Errors
    /// When the GPU does not answer.
    pub fn fill_gpu(&mut self, batch: &Batch) -> Result<(), TrainError> {
        let Some(gpu) = &mut self.gpu else { return Ok(()) };
        gpu.give(&self.store, &self.optimizer_state)?;
        Ok(gpu.fill(batch, Some(self.share))?)
    }

    /// Starts a step on the batch that is there, without waiting for it; does nothing where there is no GPU.
    ///
    /// # Errors
    /// When the GPU does not answer.
    pub fn start_on_gpu(&mut self, moment: Moment) -> Result<(), TrainError> {
        let numbers = self.numbers(moment, 0);
        let Some(gpu) = &mut self.gpu else { return Ok(()) };
        gpu.gpu_is_newer = true;
        Ok(gpu.session.start(&numbers)?)
    }

    /// What a part of a step needs to know.
    fn numbers(&self, moment: Moment, part: usize) -> session::Moment {
        let norm_max = self.options.clip_norm.map_or(f32::INFINITY, |norm| norm as f32);
        let rules = [false, true].map(|decays| self.options.rule.constants(moment, decays));
        session::Moment { pass: self.pass(moment.step, part), norm_max, rules }
    }

    /// Makes a step on the batch that is there, and has the next one brought meanwhile.
    fn compute_whole(&mut self, moment: Moment, next: &mut dyn FnMut() -> Option<Batch>) -> Result<Found, TrainError> {
        self.start_on_gpu(moment)?;
        let gpu = self.gpu.as_mut().expect("only a replica on a GPU comes here");
        gpu.bring(next);
        Ok(gpu.session.finish()?)
    }

    /// A step whose batch is computed in parts. When a loss is not a number, it ends early, without a step; where others wait for its
    /// gradients, it goes on and makes those of later parts no numbers either, so that nobody makes the step. (If it was the last part, only
    /// this rank does without; the run ends on all.)
    fn compute_in_parts(&mut self, batch: &Batch, moment: Moment) -> Result<(Found, Tally), TrainError> {
        let (parts, mut total) = (self.options.accumulate, Tally::default());
        let (mut found, others_wait) = (Found::default(), self.world() > 1);
        for part in 0..parts {
            let numbers = self.numbers(moment, part);
            let share = if total.loss.is_finite() { self.share / parts as f32 } else { f32::NAN };
            let gpu = self.gpu.as_mut().expect("only a replica on a GPU comes here");
            gpu.give(&self.store, &self.optimizer_state)?;
            gpu.fill_part(batch, (part, parts), share)?;
            gpu.gpu_is_newer = true;
            gpu.session.start_part(&numbers, (part, parts))?;
            found = gpu.session.finish()?;
            total.merge(&tally(found, batch.targets.len() / parts));
            if !total.loss.is_finite() && !others_wait {
                break;
            }
        }
        found.loss_is_finite = total.loss.is_finite();
        Ok((found, total))
    }

    pub(super) fn step_on_gpu(
        &mut self,
        batch: &Batch,
        moment: Moment,
        phases: &mut Phases,
        next: &mut dyn FnMut() -> Option<Batch>,
    ) -> Result<Stepped, TrainError> {
        let (found, tally) = if self.options.accumulate > 1 {
            phases.time("compute", || self.watched(|replica| replica.compute_in_parts(batch, moment)))?
        } else {
            phases.time("copy", || self.fill_gpu(batch))?;
            let found = phases.time("compute", || self.watched(|replica| replica.compute_whole(moment, next)))?;
            (found, tally(found, batch.targets.len()))
        };
        let tally = if self.world() > 1 { phases.time("wait", || self.total(tally))? } else { tally };
        if !found.loss_is_finite || !tally.loss.is_finite() {
            return Ok((tally, Err(NotFinite::Loss)));
        }
        if !found.gradients_are_finite {
            self.fetch()?;
            let spoiled = |&index: &usize| !is_finite(self.store.gradient(index));
            let parameter = (0..self.parameters.len()).find(spoiled).unwrap_or(0);
            return Ok((tally, Err(NotFinite::Gradient(parameter))));
        }
        Ok((tally, Ok(())))
    }
}
