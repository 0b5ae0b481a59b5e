//! One copy of a model, ready to be trained and evaluated: what its tensors are, the engine that computes,
//! and how its steps are made together with others'. It knows nothing of data and files.

mod parts;
mod pipeline;
mod rescue;
mod shape;
mod shard;
mod together;

use std::ops::Range;
use std::sync::Arc;

use paceline_data::batch::Batch;
use paceline_nn::net::check_statistics;
use paceline_nn::optim::{Moment, Rule, Segment};
use paceline_nn::{Input, Mode, Model, Parameter, StageNetwork, State};
use paceline_parallel::Owned;
use paceline_parallel::agree::Shape;
use paceline_system::clock::{Clock, sleep};
use paceline_system::limits::Limits;
use paceline_system::memory;
use paceline_system::phase::Phase;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::execute::Profile;
use paceline_tensor::plan::{Bucket, Updates};
use paceline_tensor::{MemoryUse, Pass, Plan, Precision, Store, Wanted};
use pipeline::Pipeline;
pub(crate) use pipeline::phase_of;
use rescue::Boundary;
pub use shape::bucket_shapes;
pub(crate) use shape::shape;
pub use shard::OptimizerShard;

use crate::engine::finite::is_finite;
use crate::engine::sizes::Sizes;
use crate::engine::{Engine, Halt, Inputs, Parts, Place, Planned, StepOutput, Weights, segments, updates};
use crate::error::TrainError;
use crate::exchange::Exchange;
use crate::metrics::Tally;
use crate::micro_batch::{MicroBatch, OTHER_SIZES, share};
use crate::phases::Phases;
use crate::stage::{ModelStage, WholeModel, start, tensors};
use crate::together::Slow;

/// Gradients travel in messages of at most this size: large enough to reach a link's bandwidth, small enough
/// to overlap with the backward pass (25 MiB is also what PyTorch's DDP found to work).
pub const BUCKET_BYTES_MAX: usize = 25 << 20;

/// Gradients that do not travel are applied in buckets of at most this size, while they are still in the
/// caches: on two cores of a Zen 4, the update of resnet50 took 8.6 ms with 4 MiB and 10.9 ms with 16 MiB.
const BUCKET_BYTES_LOCAL: usize = 4 << 20;

/// A matrix whose gradient is larger is applied in parts. They are large enough that the product writes past
/// the caches: the products of VGG's classifier took 52 ms with 32 MiB, 48 ms whole, and 140 ms in parts of 4
/// MiB.
const PART_BYTES_MAX: usize = 32 << 20;

/// How a replica is built.
#[derive(Clone, Copy, Debug)]
pub struct ReplicaOptions {
    /// What one sample looks like.
    pub input: Input,
    /// Number of classes.
    pub classes: usize,
    /// Samples computed at once, at most.
    pub micro_batch: usize,
    /// Other numbers of samples that are computed at once: shares of a batch that is not a multiple, and what an epoch leaves for its last
    /// batch. 0 where there are fewer.
    pub other_sizes: [usize; OTHER_SIZES],
    /// Parts of a batch, computed one after the other.
    pub accumulate: usize,
    /// Label smoothing of the training loss.
    pub smoothing: f32,
    /// Decides the initial weights and dropout.
    pub seed: u64,
    /// The update rule.
    pub rule: Rule,
    /// What activations are stored as.
    pub precision: Precision,
    /// Whether what is cheap to compute again is kept for the backward pass. Changes no bit, and nothing in
    /// an evaluation.
    pub memory: MemoryUse,
    /// Gradients are scaled down to this norm over all parameters. Infinity changes nothing, and keeps them
    /// to be looked at.
    pub clip_norm: Option<f64>,
    /// Whether batch normalisations take their statistics over all replicas.
    pub sync_batch_norm: bool,
    /// Whether gradients travel while the backward pass goes on; otherwise all are kept and sent after it.
    pub overlap: bool,
    /// Whether gradients pass through the host's memory on their way to other replicas: then all devices have
    /// the same buckets.
    pub hosted: bool,
    /// Whether gradients of weights are computed behind all others, so that both can be asked for apart;
    /// keeps all gradients.
    pub separate_gradients: bool,
    /// Whose part of the optimizer's state is kept; all of it if none.
    pub shard: Option<OptimizerShard>,
    /// Micro-batches whose activations are alive at once in a stage of a pipeline; 0 for a replica that is a whole model.
    pub slots: usize,
}

impl ReplicaOptions {
    /// Whether it is one stage of a pipeline.
    pub const fn is_staged(&self) -> bool {
        self.slots > 0
    }

    /// Whether the gradients of several micro-batches are added up before any is applied.
    pub const fn gathers(&self) -> bool {
        self.accumulate > 1 || self.is_staged()
    }
}

/// What stopped a step: nothing was applied after it was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotFinite {
    /// The loss is not a number. The weights are unchanged.
    Loss,
    /// The gradient of this parameter is not. Parameters whose gradients were final before may have changed.
    Gradient(usize),
}

/// One copy of a model.
#[derive(Debug)]
pub struct Replica {
    options: ReplicaOptions,
    /// What the parameters are.
    pub parameters: Vec<Parameter>,
    /// What the states are.
    pub states: Vec<State>,
    /// What the tensors of the whole model are, where this is a stage of it.
    pub whole: Option<WholeModel>,
    /// What computes, with the weights.
    pub engine: Engine,
    /// With the other replicas.
    exchange: Exchange,
    /// Where the last step ended, for whoever survives when another replica is lost.
    boundary: Boundary,
    /// In which order it computes its micro-batches.
    pipeline: Pipeline,
    /// How many times as long it takes for its arithmetic as it could, for experiments.
    pub slow: f64,
}

/// What the plan of a network's step has to provide.
pub fn wanted(network: &StageNetwork, updates: Updates) -> Wanted {
    let bucket_bytes_max = match updates {
        Updates::AtEnd | Updates::FromArena => BUCKET_BYTES_MAX,
        Updates::Early { .. } => BUCKET_BYTES_LOCAL,
    };
    Wanted { updates, ..network.wanted(bucket_bytes_max) }
}

/// Updates as soon as a gradient is final, of whole tensors where the rule needs them.
pub fn early(whole_tensors: bool) -> Updates {
    Updates::Early { part_bytes_max: (!whole_tensors).then_some(PART_BYTES_MAX) }
}

/// The plan of a training step, without its memory, and what its parameters are.
///
/// # Errors
/// When a layer does not fit the input, which the error names.
pub(crate) fn plan(
    stage: ModelStage<'_>,
    options: &ReplicaOptions,
) -> Result<(Plan, Vec<Parameter>, Vec<Segment>), TrainError> {
    let network = stage.network(Mode::Train, options.micro_batch, options)?;
    let (updates, parameters) = (updates(&network, options, false), tensors(&network).0);
    let plan = Planned::new(network, options.micro_batch, updates, options, false).plan;
    let segments = segments(&parameters, plan.parameters());
    Ok((plan, parameters, segments))
}

impl Replica {
    /// Builds and plans a model's graphs, takes their memory and starts the weights, on the cores of this
    /// machine.
    ///
    /// # Errors
    /// When a layer does not fit the input, which the error names, or the plan does not fit the machine's
    /// memory.
    pub fn new(model: &dyn Model, options: ReplicaOptions, cpu: &Arc<Cpu>) -> Result<Self, TrainError> {
        Self::at(model, options, &Place::Cpu(Arc::clone(cpu)))
    }

    /// As [`Replica::new`], wherever it is to compute.
    ///
    /// # Errors
    /// As [`Replica::new`], and when a GPU's memory is too small or a layer cannot be computed there.
    pub fn at(model: &dyn Model, options: ReplicaOptions, place: &Place) -> Result<Self, TrainError> {
        Self::stage(ModelStage::whole(model), options, place)
    }

    /// As [`Replica::at`], one stage of a model.
    ///
    /// # Errors
    /// As [`Replica::at`].
    pub fn stage(stage: ModelStage<'_>, options: ReplicaOptions, place: &Place) -> Result<Self, TrainError> {
        memory::caught(|| Self::take_memory(stage, options, place, Mode::Train))?
    }

    /// As [`Replica::at`], without the memory that only training needs; it can only evaluate.
    ///
    /// # Errors
    /// As [`Replica::at`].
    pub fn for_evaluation(model: &dyn Model, options: ReplicaOptions, place: &Place) -> Result<Self, TrainError> {
        memory::caught(|| Self::take_memory(ModelStage::whole(model), options, place, Mode::Eval))?
    }

    fn take_memory(
        stage: ModelStage<'_>,
        options: ReplicaOptions,
        place: &Place,
        mode: Mode,
    ) -> Result<Self, TrainError> {
        let micro_batch = options.micro_batch;
        let on_gpu = place.is_gpu();
        let eval = stage.network(Mode::Eval, micro_batch, &options)?;
        let (whole, pieces) = (stage.inventory(&options)?, eval.pieces.clone());
        whole.iter().zip(&pieces).for_each(|(whole, pieces)| whole.check_own(pieces));
        let (parameters, states) = tensors(&eval);
        let sizes = [&[micro_batch], &options.other_sizes[..]].concat();
        let plan_for = |samples: usize| {
            let network = stage.network(Mode::Train, samples, &options)?;
            assert_eq!(network.pieces, pieces, "a part has the same pieces of tensors for any number of samples");
            if samples == micro_batch && !options.sync_batch_norm {
                check_statistics(&network.graph)?;
            }
            let updates = updates(&network, &options, on_gpu);
            Ok::<_, TrainError>(Planned::new(network, samples, updates, &options, on_gpu))
        };
        let train = match mode {
            Mode::Train => sizes.into_iter().filter(|&size| size > 0).map(plan_for).collect::<Result<Vec<_>, _>>()?,
            Mode::Eval => Vec::new(),
        };
        let elements =
            |planned: &Planned| planned.plan.buckets().iter().map(|bucket| bucket.elements.clone()).collect::<Vec<_>>();
        let same = train.windows(2).all(|pair| elements(&pair[0]) == elements(&pair[1]));
        assert!(same, "gradients have the same buckets for any number of samples");
        let eval = Planned::new(eval, micro_batch, Updates::AtEnd, &options, on_gpu);
        let plan = train.first().map_or(&eval.plan, |train| &train.plan);
        let owned = options.ownership(plan);
        let sizes = Sizes::of(train.first().map(|train| &train.plan), &eval.plan, &options, on_gpu);
        sizes.check(&Limits::look())?;
        let mut store = Store::new(plan);
        let optimizer = if !train.is_empty() { options.rule.new_state(owned.length()) } else { Vec::new() };
        start(whole.as_ref(), &parameters, options.seed, &mut store);
        for (index, state) in states.iter().enumerate() {
            store.state_mut(index).fill(state.start);
        }
        let segments = segments(&parameters, store.layout());
        let counted = whole.as_ref().map_or_else(|| vec![true; segments.len()], WholeModel::counted);
        let parts = Parts {
            options,
            train,
            eval,
            weights: Weights { store, optimizer, owned, kept: Vec::new() },
            segments,
            counted,
        };
        let engine = place.engine(parts)?;
        let (exchange, boundary) = (Exchange::alone(&Clock::real()), Boundary::default());
        let pipeline = Pipeline::new(stage.number, stage.cuts.len() + 1);
        Ok(Self { options, parameters, states, whole, engine, exchange, boundary, pipeline, slow: 1.0 })
    }

    /// The buckets of gradients.
    pub fn buckets(&self) -> &[Bucket] {
        self.plan().buckets()
    }

    /// The options it was built with.
    pub fn options(&self) -> &ReplicaOptions {
        &self.options
    }

    /// The plan of the training step, or of an evaluation if it only evaluates.
    pub fn plan(&self) -> &Plan {
        self.engine.plan()
    }

    /// Every plan that it may run: of the training step, if it trains, and of an evaluation.
    pub fn plans(&self) -> impl Iterator<Item = &Plan> {
        [self.engine.plan(), self.engine.evaluation_plan()].into_iter()
    }

    /// The cores that do the host's part.
    pub fn device(&self) -> &Arc<Cpu> {
        self.engine.cpu()
    }

    /// The host's copy of weights and states.
    pub fn store(&self) -> &Store {
        &self.engine.weights().store
    }

    /// The host's copy of weights and states, to be changed; [`Engine::load`] follows.
    pub fn store_mut(&mut self) -> &mut Store {
        &mut self.engine.weights_mut().store
    }

    /// The number of trained elements.
    pub fn parameter_count(&self) -> usize {
        self.parameters.iter().map(|parameter| parameter.shape.elements()).sum()
    }

    /// What an agreement has to know of the model: the same on all workers and servers.
    pub fn shape(&self) -> Shape {
        shape(self.plan(), &self.parameters, self.engine.weights().optimizer.len())
    }

    /// What micro-batch `part` of a batch is computed with.
    fn inputs<'a>(&self, batch: &'a Batch, part: usize, moment: Moment) -> Inputs<'a> {
        let ReplicaOptions { seed, micro_batch: largest, other_sizes, .. } = self.options;
        let share = share(batch, self.exchange.rank(), self.world());
        let micro_batch = MicroBatch::new(batch.size, part, self.micro_batches(batch));
        // Samples are numbered within the batch of all replicas.
        let first_sample = (share.first + micro_batch.start()) as u64;
        let samples = Some(micro_batch.len().max(1)).filter(|size| other_sizes.contains(size)).unwrap_or(largest);
        let pass = Pass { seed, step: moment.step, first_sample, samples };
        let counts_among = if self.exchange.shares_steps() { share.all } else { batch.size };
        let weight = micro_batch.len() as f64 / counts_among.max(1) as f64;
        Inputs { batch, micro_batch, pass, seed: weight as f32, moment }
    }

    /// A step begins.
    ///
    /// # Errors
    /// When another replica, or the way to it, or a device has failed.
    pub fn begin_step(&mut self, moment: Moment) -> Result<(), TrainError> {
        self.mark_begin(moment.step);
        self.exchange.begin(&mut self.engine, moment, self.options.rule.look_ahead(moment))
    }

    /// Ends the step: its tally becomes that of all replicas, and gradients that were kept are applied.
    ///
    /// # Errors
    /// As [`Replica::pass`].
    pub fn close(&mut self) -> Result<StepOutput, Halt> {
        let moment = self.exchange.moment();
        let output = self.engine.close(moment, &mut self.exchange)?;
        if output.updated.is_ok() {
            self.exchange.exchange_weights(&mut self.engine, moment.step + 1)?;
        }
        Ok(output)
    }

    /// Does a part of a step as a phase of it. What was spent inside on waiting for others and on changing weights is told
    /// apart. An engine that computes a step as one graph has one phase for all of it.
    ///
    /// # Errors
    /// Those of the part.
    pub fn timed<T>(
        &mut self,
        phase: Phase,
        phases: &mut Phases,
        part: impl FnOnce(&mut Self) -> Result<T, Halt>,
    ) -> Result<T, Halt> {
        let phase = if self.engine.is_one_graph() { Phase::Compute } else { phase };
        let done = phases.time(phase, || {
            let start = self.exchange.computed_s();
            let done = part(self);
            if self.slow > 1.0 {
                sleep(Slow::pause(self.slow, self.exchange.computed_s() - start));
            }
            done
        });
        self.exchange.tell_apart(phase, phases);
        done
    }

    /// What a step came to, once it was closed or given up.
    ///
    /// # Errors
    /// When another replica, or the way to it, or a device has failed.
    pub fn end_step(&mut self, closed: Result<StepOutput, Halt>) -> Result<StepOutput, TrainError> {
        self.exchange.end();
        let output = match closed {
            Ok(output) => output,
            Err(halt) => StepOutput { tally: self.exchange.tally(), updated: Err(self.not_finite(halt)?) },
        };
        if output.updated.is_ok() {
            self.end_update();
        }
        Ok(output)
    }

    /// What is not a number, if that ended a pass.
    fn not_finite(&self, halt: Halt) -> Result<NotFinite, TrainError> {
        match halt {
            Halt::Failed(error) => Err(error),
            Halt::NotFinite(what) => Ok(what),
            Halt::RefusedElsewhere { bucket } => Ok(NotFinite::Gradient(self.buckets()[bucket].parameters.start)),
        }
    }

    /// One step on a batch that is there: what [`crate::step::step`] does, without the data.
    ///
    /// # Errors
    /// As [`Replica::end_step`].
    ///
    /// # Panics
    /// As [`Replica::pass`].
    pub fn step(&mut self, batch: &Batch, moment: Moment, phases: &mut Phases) -> Result<StepOutput, TrainError> {
        let cores = self.engine.bound();
        let _bound = cores.as_ref().and_then(|cpu| cpu.pool().enter());
        self.begin_step(moment)?;
        let mut passes = || {
            let schedule = self.schedule(batch)?;
            for &task in schedule.tasks(self.pipeline.stage) {
                self.timed(phase_of(task), phases, |replica| replica.pass(batch, &schedule, task))?;
            }
            self.timed(Phase::Update, phases, Self::close)
        };
        let closed = passes();
        self.end_step(closed)
    }

    /// Waits until every gradient is applied: the weights can be looked at, and are the same everywhere.
    ///
    /// # Errors
    /// When another replica, or the way to it, or a device has failed, or a gradient was not finite.
    pub fn settle(&mut self) -> Result<Result<(), NotFinite>, TrainError> {
        self.mark_boundary();
        match self.exchange.settle(&mut self.engine) {
            Ok(()) => self.follow_first_part().map(Ok),
            Err(halt) => self.not_finite(halt).map(Err),
        }
    }

    /// Adds up a tally over all replicas, with their wishes.
    ///
    /// # Errors
    /// When another replica, or the way to it, has failed.
    pub fn total(&mut self, tally: Tally) -> Result<Tally, TrainError> {
        self.exchange.total(tally)
    }

    /// Forward and backward pass over a whole batch: leaves the gradient of the mean loss in the store. For
    /// replicas that keep their gradients; [`Replica::step`] is for all.
    ///
    /// # Errors
    /// When a device fails.
    ///
    /// # Panics
    /// When the replica was built for evaluation or applies gradients as they come.
    pub fn compute(&mut self, batch: &Batch, step: u64) -> Result<Tally, TrainError> {
        assert!(self.engine.keeps_gradients(), "gradients are applied as they come; ask for a clip_norm to keep them");
        self.begin_step(Moment { step, learning_rate: 0.0 })
            .expect("nothing is exchanged where gradients are only computed");
        let mut passes = || {
            let schedule = self.schedule(batch)?;
            schedule.tasks(0).iter().try_for_each(|&task| self.pass(batch, &schedule, task))
        };
        passes().map_err(|halt| match halt {
            Halt::Failed(error) => error,
            _ => TrainError::Refused("the loss is not a number".into()),
        })?;
        Ok(self.engine.tally())
    }

    /// Scales the gradients that were kept down to a norm over all parameters, and returns the norm they had.
    ///
    /// # Panics
    /// When it does not compute on the CPU.
    pub fn clip(&mut self, norm_max: f64) -> f64 {
        self.engine.cpu_mut().expect("gradients are kept in the host's memory").clip(norm_max)
    }

    /// One optimizer update from the gradients that were kept.
    ///
    /// # Panics
    /// When it does not compute on the CPU.
    pub fn update(&mut self, step: u64, learning_rate: f32) {
        let engine = self.engine.cpu_mut().expect("gradients are kept in the host's memory");
        engine.update(Moment { step, learning_rate });
    }

    /// As one part of a step, timing every node and applying nothing.
    ///
    /// # Errors
    /// When a device fails.
    ///
    /// # Panics
    /// When the replica was built for evaluation.
    pub fn profile(&mut self, batch: &Batch, step: u64) -> Result<Profile, TrainError> {
        let inputs = self.inputs(batch, 0, Moment { step, learning_rate: 0.0 });
        self.engine.profile(&inputs)
    }

    /// Where a step went wrong, as layer and operation: the first result that is not finite for this batch.
    /// Where later layers have changed since, there may be none any more; then, and of a part of every layer, it
    /// is the gradient that was seen.
    ///
    /// # Panics
    /// When the replica was built for evaluation.
    pub fn find_non_finite(&mut self, batch: &Batch, step: u64, seen: NotFinite) -> (String, &'static str) {
        let moment = Moment { step, learning_rate: 0.0 };
        // Others may still change weights that are everybody's, and a part cannot compute by itself; then it is not computed again.
        let again = self.exchange.freeze() && !self.exchange.has_parts();
        let parts = if again { self.micro_batches(batch) } else { 0 };
        let found = (0..parts).find_map(|part| {
            let inputs = Inputs { seed: 1.0, ..self.inputs(batch, part, moment) };
            self.engine.find_non_finite(&inputs)
        });
        found.unwrap_or_else(|| match seen {
            NotFinite::Loss => ("loss".into(), "cross_entropy"),
            NotFinite::Gradient(index) => {
                let name = &self.parameters[index].name;
                (name.rsplit_once('.').map_or(name.as_str(), |(layer, _)| layer).to_owned(), "gradient")
            }
        })
    }

    /// The first tensor that holds something that is not a number: a parameter, a state or a buffer of the
    /// optimizer.
    pub fn spoiled_tensor(&self) -> Option<String> {
        let Weights { store, optimizer, owned, .. } = self.engine.weights();
        let named = |index: usize| self.parameters[index].name.clone();
        let parameter = (0..self.parameters.len()).find(|&index| !is_finite(store.parameter(index)));
        let state = || (0..self.states.len()).find(|&index| !is_finite(store.state(index)));
        let slot = || {
            let spoiled = |range: &Range<usize>| {
                let mut here = owned.within(range.clone());
                here.any(|Owned { place, .. }| optimizer.iter().any(|slot| !is_finite(&slot[place.clone()])))
            };
            store.layout().ranges().iter().position(spoiled)
        };
        parameter
            .map(named)
            .or_else(|| state().map(|index| self.states[index].name.clone()))
            .or_else(|| slot().map(named))
    }
}
