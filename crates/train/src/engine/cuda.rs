//! The engine on a GPU: weights and optimizer are there, the host's copy is fetched when somebody wants it.
//!
//! A step is one graph of both passes, the optimizer included, and the sums over other GPUs where there are
//! some. Where the host has to hear of gradients ([`CudaEngine::stage_gradients`]), it is run in segments
//! instead (`hosted.rs`).

mod hosted;

use std::sync::Arc;

use paceline_data::augment::View;
use paceline_data::batch::Batch;
use paceline_nn::optim::{Moment, Segment};
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::device::cuda::session::{self, Album, Blueprint, DeviceOutput, Samples, Session};
use paceline_tensor::device::cuda::{Cuda, CudaError};
use paceline_tensor::execute::Profile;
use paceline_tensor::{Device, Pass, Plan};

use super::compiled::{Bindings, CompiledGraph};
use super::cpu::EVALUATES;
use super::finite::is_finite;
use super::guard::Guard;
use super::{Event, Gradients, Halt, Inputs, Listener, Parts, Slot, StepOutput, Weights};
use crate::error::TrainError;
use crate::metrics::Tally;
use crate::micro_batch::MicroBatch;
use crate::replica::{NotFinite, ReplicaOptions};

/// The images of both halves of a data set, on the GPU.
#[derive(Debug)]
pub struct Albums {
    /// For training.
    pub train: Album,
    /// For evaluation.
    pub val: Album,
}

const NO_ALBUM: &str = "a batch of views belongs to images that are on the GPU";

/// A model on a GPU.
#[derive(Debug)]
pub struct CudaEngine {
    /// The host's copy, and which one is the newer.
    pub(super) weights: Weights,
    host_is_newer: bool,
    device_is_newer: bool,
    pub(super) session: Session,
    pub(super) options: ReplicaOptions,
    cpu: Arc<Cpu>,
    segments: Vec<Segment>,
    /// To find out on which layer a step failed, and for their plans: one for each number of samples, the largest first.
    train: Vec<CompiledGraph>,
    /// Which of them computes now.
    active: usize,
    eval: CompiledGraph,
    albums: Option<Albums>,
    /// The batch whose samples are on their way, by the address of its memory.
    prefetched: Option<usize>,
    /// Whether there is room for batches to come.
    has_room: bool,
    /// Whether the host hears of gradients.
    hosted: bool,
    /// Watches the way to other GPUs, where there are some.
    pub(super) guard: Option<Guard>,
    /// Of the parts so far, and what the last one found.
    pub(super) tally: Tally,
    found: DeviceOutput,
    /// The micro-batch that was filled in.
    micro_batch: MicroBatch,
    pass: Pass,
    moment: Option<Moment>,
}

/// What a GPU cannot do from the start is a refusal: nothing has begun.
fn refused(error: CudaError) -> TrainError {
    TrainError::Refused(error.to_string())
}

fn ends(bindings: &Bindings) -> session::DeviceBindings {
    let Bindings { x: Some(x), targets: Some(targets), logits: Some(logits), seed, .. } = *bindings else {
        unreachable!("a GPU has whole models")
    };
    session::DeviceBindings { x, targets, logits, seed }
}

fn samples(batch: &Batch) -> Samples<'_> {
    if batch.tokens.is_empty() { Samples::Images(&batch.images) } else { Samples::Tokens(&batch.tokens) }
}

/// Where a batch's samples are in the host's memory.
fn address(batch: &Batch) -> usize {
    if batch.tokens.is_empty() { batch.images.as_ptr().addr() } else { batch.tokens.as_ptr().addr() }
}

pub(super) fn tally(found: DeviceOutput, rows: usize) -> Tally {
    Tally { rows: rows as u64, loss: found.loss, top1: found.top1, top5: found.top5 }
}

impl CudaEngine {
    pub(crate) fn new(parts: Parts, cpu: &Arc<Cpu>, cuda: &Arc<Cuda>) -> Result<Self, TrainError> {
        let Parts { options, train, eval, weights, segments, .. } = parts;
        let decays: Vec<_> = segments.iter().map(|segment| (segment.range.clone(), segment.decay)).collect();
        let plans: Vec<_> = train.iter().map(|planned| (&planned.plan, ends(&planned.bindings))).collect();
        let trains = !train.is_empty();
        let blueprint = Blueprint {
            train: &plans,
            eval: (&eval.plan, ends(&eval.bindings)),
            slots: if trains { options.rule.optimizer().state_slots() } else { 0 },
            parts: trains && options.accumulate > 1,
            decays: &decays,
            layer_rates: options.rule.layer_coefficient().filter(|_| trains),
        };
        let session = Session::new(cuda, &blueprint).map_err(refused)?;
        let place = Device::Cuda(Arc::clone(cuda));
        Ok(Self {
            weights,
            host_is_newer: true,
            device_is_newer: false,
            session,
            options,
            cpu: Arc::clone(cpu),
            segments,
            train: train.into_iter().map(|train| CompiledGraph::without_arena(train, &place)).collect(),
            active: 0,
            eval: CompiledGraph::without_arena(eval, &place),
            albums: None,
            prefetched: None,
            has_room: true,
            hosted: false,
            guard: None,
            tally: Tally::default(),
            found: DeviceOutput::default(),
            micro_batch: MicroBatch::default(),
            pass: Pass::default(),
            moment: None,
        })
    }

    pub(super) fn forward(&mut self, slot: Slot, inputs: &Inputs<'_>, on: &mut dyn Listener) -> Result<(), Halt> {
        assert_eq!(slot, Slot(0), "this engine keeps one micro-batch alive");
        if inputs.micro_batch.is_first() {
            self.tally = Tally::default();
        }
        (self.micro_batch, self.pass, self.moment) = (inputs.micro_batch, inputs.pass, Some(inputs.moment));
        if self.gives_up() {
            return Ok(());
        }
        // Where others wait for gradients, those of later parts are made no numbers either, so that nobody
        // makes the step. (If it was the last part, only this rank does without; the run ends on all.)
        let seed = if self.tally.loss.is_finite() { inputs.seed } else { f32::NAN };
        self.upload()?;
        self.choose(inputs.pass.samples);
        if self.without_samples() {
            self.session.keep_states()?;
        }
        self.fill(inputs.batch, seed)?;
        if self.hosted { self.forward_hosted(inputs.moment, on) } else { Ok(()) }
    }

    pub(super) fn backward(&mut self, slot: Slot, which: Gradients, on: &mut dyn Listener) -> Result<(), Halt> {
        assert_eq!((slot, which), (Slot(0), Gradients::All), "this engine computes all gradients at once");
        let (Some(moment), false) = (self.moment, self.gives_up()) else { return Ok(()) };
        let (numbers, MicroBatch { index, of, .. }) = (self.numbers(moment), self.micro_batch);
        self.device_is_newer = true;
        if self.hosted {
            self.backward_hosted(on)?;
        } else if of == 1 {
            self.watched(|engine| engine.session.start(&numbers))?;
        } else {
            self.found = self.watched(|engine| {
                engine.session.start_part(&numbers, (index, of))?;
                engine.session.finish()
            })?;
            let rows = self.session.rows();
            self.tally.merge(&tally(self.found, rows));
        }
        if self.without_samples() {
            self.session.restore_states()?;
        }
        Ok(())
    }

    /// Whether what is computed does not count, and changes no running statistics: those of all replicas are not changed by it anyway.
    fn without_samples(&self) -> bool {
        self.micro_batch.is_empty() && !self.plan().shares_statistics()
    }

    /// Computes with the graph that was planned for so many samples, or else with the largest.
    fn choose(&mut self, samples: usize) {
        self.active = self.train.iter().position(|graph| graph.samples == samples).unwrap_or(0);
        self.session.choose(self.active);
    }

    /// A loss that is not a number ends a step early, unless others wait for its gradients.
    fn gives_up(&self) -> bool {
        !self.tally.loss.is_finite() && self.guard.is_none() && !self.hosted
    }

    pub(super) fn close(&mut self, moment: Moment, on: &mut dyn Listener) -> Result<StepOutput, Halt> {
        if self.hosted {
            return self.close_hosted(moment, on);
        }
        if self.micro_batch.of == 1 {
            self.found = self.watched(|engine| engine.session.finish())?;
            self.tally = tally(self.found, self.session.rows());
        }
        let (found, mut total) = (self.found, self.tally);
        on.on(Event::Total { tally: &mut total })?;
        let updated = match () {
            () if !found.loss_is_finite || !total.loss.is_finite() => Err(NotFinite::Loss),
            () if !found.gradients_are_finite => Err(self.spoiled_gradient()?),
            () => Ok(()),
        };
        Ok(StepOutput { tally: total, updated })
    }

    /// The first parameter whose gradient is not a number.
    fn spoiled_gradient(&mut self) -> Result<NotFinite, TrainError> {
        self.fetch()?;
        let spoiled = |&index: &usize| !is_finite(self.weights.store.gradient(index));
        Ok(NotFinite::Gradient((0..self.segments.len()).find(spoiled).unwrap_or(0)))
    }

    pub(super) fn settle(&mut self, on: &mut dyn Listener) -> Result<(), Halt> {
        if self.hosted { self.settle_hosted(on) } else { Ok(()) }
    }

    /// Brings a micro-batch to the GPU, in the way that fits it.
    fn fill(&mut self, batch: &Batch, seed: f32) -> Result<(), CudaError> {
        let part = self.micro_batch;
        let targets = part.slice(&batch.targets);
        if !batch.views.is_empty() {
            return self.look(part.slice(&batch.views), targets, Some(seed));
        }
        if part.of == 1 && self.prefetched.take() == Some(address(batch)) {
            return self.session.fill_coming(targets, seed);
        }
        let samples = match samples(batch) {
            Samples::Images(images) => Samples::Images(part.slice(images)),
            Samples::Tokens(tokens) => Samples::Tokens(part.slice(tokens)),
        };
        self.session.fill(samples, targets, Some(seed))
    }

    fn look(&mut self, views: &[View], targets: &[i32], seed: Option<f32>) -> Result<(), CudaError> {
        let albums = self.albums.as_ref().expect(NO_ALBUM);
        let album = if seed.is_some() { &albums.train } else { &albums.val };
        let views: Vec<_> = views.iter().map(View::words).collect();
        self.session.look(album, &views, targets, seed)
    }

    pub(super) fn prefetches(&self) -> bool {
        self.options.accumulate == 1
    }

    /// Without room, a batch is copied when its turn comes. Other failures show in the step that is under
    /// way.
    pub(super) fn prefetch(&mut self, next: Option<&Batch>) {
        self.prefetched = None;
        if let Some(batch) = next.filter(|batch| self.has_room && batch.views.is_empty() && batch.size > 0) {
            self.has_room = self.session.prefetch(samples(batch)).is_ok();
            self.prefetched = self.has_room.then(|| address(batch));
        }
    }

    /// Brings what the host has changed to the GPU.
    pub(super) fn upload(&mut self) -> Result<(), CudaError> {
        if std::mem::take(&mut self.host_is_newer) {
            self.session.load(&self.weights.store, &self.weights.optimizer)?;
        }
        Ok(())
    }

    pub(super) fn fetch(&mut self) -> Result<(), TrainError> {
        if self.device_is_newer {
            self.session.fetch(&mut self.weights.store, &mut self.weights.optimizer)?;
            self.device_is_newer = false;
        }
        Ok(())
    }

    pub(super) fn load(&mut self) {
        self.host_is_newer = true;
    }

    pub(super) fn evaluate(&mut self, batch: &Batch) -> Result<(Vec<f32>, Tally), TrainError> {
        self.upload()?;
        if batch.views.is_empty() {
            self.session.fill(samples(batch), &batch.targets, None)?;
        } else {
            self.look(&batch.views, &batch.targets, None)?;
        }
        let (logits, found) = self.session.evaluate()?;
        Ok((logits, tally(found, batch.targets.len())))
    }

    /// Times every node on the batch that is there.
    pub(super) fn profile(&mut self, _: &Inputs<'_>) -> Result<Profile, TrainError> {
        Ok(Profile { seconds: self.session.profile()? })
    }

    pub(super) fn find_non_finite(&mut self, inputs: &Inputs<'_>) -> Option<(String, &'static str)> {
        // Without the weights of a GPU that does not answer, nothing can be computed again.
        self.fetch().ok()?;
        self.choose(inputs.pass.samples);
        let CompiledGraph { executor, bindings, .. } = self.train.get_mut(self.active).expect(EVALUATES);
        bindings.fill(executor, inputs.batch, inputs.micro_batch, inputs.seed).ok()?;
        executor.find_non_finite(&mut self.weights.store, inputs.pass).ok().flatten()
    }

    /// What a step needs to know.
    pub(super) fn numbers(&self, moment: Moment) -> session::StepNumbers {
        let norm_max = self.options.clip_norm.map_or(f32::INFINITY, |norm| norm as f32);
        let rules = [false, true].map(|decays| self.options.rule.constants(moment, decays));
        session::StepNumbers { pass: self.pass, norm_max, rules }
    }

    /// Brings a batch to the GPU; steps that are started with [`CudaEngine::start`] use it until the next
    /// one.
    ///
    /// # Errors
    /// When the GPU does not answer.
    pub fn fill_once(&mut self, batch: &Batch, seed: f32) -> Result<(), TrainError> {
        self.upload()?;
        self.micro_batch = MicroBatch::whole(batch);
        Ok(self.fill(batch, seed)?)
    }

    /// Starts a step on the batch that is there, without waiting for it: for measurements.
    ///
    /// # Errors
    /// When the GPU does not answer.
    pub fn start(&mut self, moment: Moment) -> Result<(), TrainError> {
        let ReplicaOptions { seed, micro_batch: samples, .. } = self.options;
        self.pass = Pass { seed, step: moment.step, first_sample: 0, samples };
        let numbers = self.numbers(moment);
        self.device_is_newer = true;
        Ok(self.session.start(&numbers)?)
    }

    /// The model on the GPU.
    pub fn session(&mut self) -> &mut Session {
        &mut self.session
    }

    /// Keeps the images that batches of views look at.
    pub fn hold(&mut self, albums: Albums) {
        self.albums = Some(albums);
    }

    /// Whether it has images that batches of views look at.
    pub fn holds_images(&self) -> bool {
        self.albums.is_some()
    }

    /// Whether the host takes no part in a step.
    pub(super) fn is_one_graph(&self) -> bool {
        !self.hosted
    }

    /// Whether sums over other GPUs are made inside of a step.
    pub(super) fn sums_inside(&self) -> bool {
        self.guard.is_some()
    }

    pub(super) fn gpu(&self) -> &Arc<Cuda> {
        self.session.cuda()
    }

    pub(super) fn plan(&self) -> &Plan {
        self.train.first().unwrap_or(&self.eval).executor.plan()
    }

    /// The plan of the step under way.
    fn active_plan(&self) -> &Plan {
        self.train.get(self.active).unwrap_or(&self.eval).executor.plan()
    }

    pub(super) fn evaluation_plan(&self) -> &Plan {
        self.eval.executor.plan()
    }

    pub(super) fn cpu(&self) -> &Arc<Cpu> {
        &self.cpu
    }
}
