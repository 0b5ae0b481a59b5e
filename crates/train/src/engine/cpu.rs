//! The engine on the cores of this machine: an executor over one arena, and the optimizer's arithmetic as
//! gradients become final.

use std::sync::Arc;

use paceline_data::batch::Batch;
use paceline_nn::optim::{self, Buffers, Moment, Segment, Tools};
use paceline_parallel::split::StageTimes;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::device::cuda::CudaError;
use paceline_tensor::execute::{self, Profile, Turn};
use paceline_tensor::plan::Bucket;
use paceline_tensor::{Buffer, Device, Executor, Pass, Plan, Store};

use super::compiled::{Bindings, CompiledGraph, CrossingLengths};
use super::finite::{all_finite, is_finite};
use super::update::{HostTarget, KeptTarget, Updates};
use super::{Event, Gradients, Halt, Inputs, Listener, Parts, Slot, StepOutput, Weights};
use crate::error::TrainError;
use crate::metrics::Tally;
use crate::micro_batch::MicroBatch;
use crate::replica::{NotFinite, ReplicaOptions};
use crate::stage;

pub(super) const EVALUATES: &str = "a replica built for evaluation does not train";

/// A model on the cores of this machine.
#[derive(Debug)]
pub struct CpuEngine {
    pub(super) weights: Weights,
    pub(super) options: ReplicaOptions,
    pub(super) device: Arc<Cpu>,
    /// None if it only evaluates.
    pub(super) train: Option<CompiledGraph>,
    /// The same for micro-batches of other sizes, in the arena of `train`.
    pub(super) others: Vec<CompiledGraph>,
    /// Running statistics, while samples are computed that do not count.
    kept_states: Vec<f32>,
    /// Runs in the arena of `train`, if there is one: they never run at the same time.
    eval: CompiledGraph,
    segments: Vec<Segment>,
    /// Those that count here in a norm over the whole model.
    pub(super) counted: Vec<Segment>,
    pub(super) buckets: Vec<Bucket>,
    /// The sum of gradients over the parts of a batch, where a plan has a place for each part's; empty if not, or if there is one part.
    accumulated: Buffer,
    /// Whether the store has the sum of gradients over the parts of a batch, which come bucket by bucket.
    gathers: bool,
    /// Working memory of the optimizer.
    pub(super) sums: Vec<f64>,
    /// The micro-batches whose answers are there, by slot.
    live: Vec<Live>,
    /// Of the parts so far.
    pub(super) tally: Tally,
}

/// A micro-batch whose backward pass is to come.
#[derive(Debug, Default)]
struct Live {
    pass: Pass,
    micro_batch: MicroBatch,
    /// Its activations; those of the first stand in the executor's own arena.
    activations: Option<execute::Slot>,
}

impl CpuEngine {
    /// Computes on `place`, where the cores do what the host has to.
    pub(crate) fn on(parts: Parts, device: &Arc<Cpu>, place: &Device) -> Result<Self, TrainError> {
        let Parts { options, train, eval, mut weights, segments, counted } = parts;
        let Weights { store, optimizer, .. } = &mut weights;
        let given = [&mut store.parameters, &mut store.gradients].into_iter().chain(optimizer);
        given.for_each(|buffer| device.pool().touch(buffer));
        let buckets = train.first().map_or(&eval.plan, |train| &train.plan).buckets().to_vec();
        let stores = train.first().is_some_and(|train| train.plan.stores_gradients());
        let gathers = !train.is_empty() && options.gathers() && !stores;
        let elements = weights.store.parameters.len();
        if gathers {
            weights.store.gradients = Buffer::zeroed_for("the gradients", elements);
            device.pool().touch(&mut weights.store.gradients);
        }
        let elements = if stores && options.accumulate > 1 { elements } else { 0 };
        let (mut train, evaluates) = (train.into_iter(), eval);
        let largest = train.next().map(|train| CompiledGraph::new(train, place)).transpose()?;
        let mut others: Vec<_> = train.map(|train| CompiledGraph::without_arena(train, place)).collect();
        let eval = match &largest {
            Some(_) => CompiledGraph::without_arena(evaluates, place),
            None => CompiledGraph::new(evaluates, place)?,
        };
        let mut train = largest;
        if let Some(CompiledGraph { executor, .. }) = &mut train {
            // A plan for fewer samples takes less, or hardly more; what it takes is taken now.
            others.iter_mut().for_each(|other| executor.lend_arena(&mut other.executor, |_| ()));
        }
        let counts = segments.iter().zip(counted).filter(|(_, counts)| *counts);
        let mut engine = Self {
            counted: counts.map(|(segment, _)| segment.clone()).collect(),
            weights,
            accumulated: Buffer::zeroed_for("the gradients", elements),
            gathers,
            options,
            device: Arc::clone(device),
            eval,
            train,
            others,
            kept_states: Vec::new(),
            segments,
            buckets,
            sums: Vec::new(),
            live: vec![Live::default()],
            tally: Tally::default(),
        };
        if engine.train.is_some() {
            engine.open(Slot(engine.options.slots.saturating_sub(1)));
        }
        Ok(engine)
    }

    pub(super) fn forward(&mut self, slot: Slot, inputs: &Inputs<'_>, on: &mut dyn Listener) -> Result<(), Halt> {
        let Inputs { batch, micro_batch, pass, seed, .. } = *inputs;
        self.open(slot);
        (self.live[slot.0].pass, self.live[slot.0].micro_batch) = (pass, micro_batch);
        if micro_batch.is_first() {
            self.tally = Tally::default();
            let graphs = self.train.iter_mut().chain(&mut self.others);
            graphs.for_each(|graph| graph.executor.hold_parameters());
        }
        let keeps = self.keeps_gradients();
        self.kept_states.clear();
        if micro_batch.is_empty() && !self.plan().shares_statistics() {
            self.kept_states.extend_from_slice(&self.weights.store.states);
        }
        let (graphs, store, mut updates) = self.split(slot);
        let tally = graphs.run(pass.samples, |executor, bindings| {
            bindings.fill(executor, batch, micro_batch, seed)?;
            bindings.receive(executor, on)?;
            executor.forward_with(store, pass, &mut |turn| match turn {
                Turn::BeforeRead { bucket, parameters } if !keeps => {
                    let target = &mut HostTarget { updates: &mut updates, parameters };
                    on.on(Event::BeforeRead { bucket, target })
                }
                Turn::Sum { numbers, .. } => sum_statistics(numbers, micro_batch, on),
                Turn::SumParts { numbers } => on.on(Event::SumParts { numbers }),
                Turn::GatherParts { numbers, lengths, .. } => on.on(Event::GatherParts { numbers, lengths }),
                _ => Ok(()),
            })?;
            bindings.send(executor, on)?;
            Ok::<_, Halt>(bindings.answers(executor, batch, micro_batch)?.1)
        })?;
        let kept = &self.kept_states;
        self.weights.store.states[..kept.len()].copy_from_slice(kept);
        self.tally.merge(&tally);
        if keeps { Ok(()) } else { on.on(Event::Forwarded { tally }) }
    }

    pub(super) fn backward(&mut self, slot: Slot, which: Gradients, on: &mut dyn Listener) -> Result<(), Halt> {
        let Live { pass, micro_batch, .. } = self.live[slot.0];
        let (keeps, gathers) = (self.keeps_gradients(), self.gathers);
        let mut sums = if gathers { std::mem::take(&mut self.weights.store.gradients) } else { Buffer::default() };
        let (graphs, store, mut updates) = self.split(slot);
        let passed = graphs.run(pass.samples, |executor, bindings| {
            if which != Gradients::Weights {
                bindings.receive_gradients(executor, on)?;
            }
            let mut result = Ok(());
            let mut turn = |turn: Turn<'_>| {
                result = match turn {
                    Turn::Sum { numbers, .. } => sum_gradients(numbers, micro_batch, on),
                    Turn::SumParts { numbers } => on.on(Event::SumParts { numbers }),
                    Turn::GatherParts { numbers, lengths, .. } => on.on(Event::GatherParts { numbers, lengths }),
                    Turn::Apply { bucket, gradients, .. } if gathers => {
                        let sums = &mut sums[updates.buckets[bucket].elements.clone()];
                        add(updates.device, sums, gradients, micro_batch.is_first());
                        Ok(())
                    }
                    _ if keeps => Ok(()),
                    Turn::Final { bucket, gradients } => on.on(Event::Final { bucket, gradients }),
                    Turn::Apply { bucket, gradients, parameters } => {
                        let target = &mut HostTarget { updates: &mut updates, parameters };
                        on.on(Event::MayApply { bucket, gradients: Some(gradients), target })
                    }
                    Turn::Offer { bucket, parameters } | Turn::BeforeRead { bucket, parameters } => {
                        let target = &mut HostTarget { updates: &mut updates, parameters };
                        on.on(Event::MayApply { bucket, gradients: None, target })
                    }
                };
                result.is_ok()
            };
            match which {
                Gradients::All => executor.backward(store, pass, &mut turn),
                Gradients::Inputs => executor.backward_inputs(store, pass, &mut turn),
                Gradients::Weights => executor.backward_weights(store, pass, &mut turn),
            }?;
            result?;
            if which == Gradients::Weights { Ok(()) } else { bindings.send_gradients(executor, on) }
        });
        if gathers {
            self.weights.store.gradients = sums;
        }
        passed?;
        if keeps && !gathers && which != Gradients::Inputs && micro_batch.of > 1 {
            self.accumulate(micro_batch);
        }
        Ok(())
    }

    pub(super) fn close(&mut self, moment: Moment, on: &mut dyn Listener) -> Result<StepOutput, Halt> {
        if !self.weights.owned.is_whole() {
            return self.close_chunks(on);
        }
        let (mut tally, keeps, mut replaced) = (self.tally, self.keeps_gradients(), false);
        if keeps {
            on.on(Event::Forwarded { tally })?;
            let Self { weights: Weights { store: Store { gradients, parameters, .. }, .. }, buckets, .. } = self;
            for (index, bucket) in buckets.iter().enumerate() {
                on.on(Event::Final { bucket: index, gradients: &gradients[bucket.elements.clone()] })?;
            }
            for (index, bucket) in buckets.iter().enumerate() {
                let (gradients, parameters) =
                    (&mut gradients[bucket.elements.clone()], &mut parameters[bucket.elements.clone()]);
                let target = &mut KeptTarget { gradients, parameters, replaced: &mut replaced };
                on.on(Event::Settle { bucket: index, target })?;
            }
        }
        let updates = keeps && !replaced;
        // A stage does not wait for the others, which may still compute: of a loss that is no number, its gradients are none either.
        let early = if updates && self.options.is_staged() { self.close_update(moment, on)? } else { Ok(()) };
        on.on(Event::Total { tally: &mut tally })?;
        let updated = match tally.loss.is_finite() {
            false => Err(NotFinite::Loss),
            true if updates && !self.options.is_staged() => self.close_update(moment, on)?,
            true => early,
        };
        Ok(StepOutput { tally, updated })
    }

    /// The update with the gradients that were kept.
    fn close_update(&mut self, moment: Moment, on: &mut dyn Listener) -> Result<Result<(), NotFinite>, Halt> {
        on.on(Event::UpdateBegins)?;
        let norm = self.norm(on)?;
        let updated = self.update_all(moment, norm);
        on.on(Event::UpdateEnds)?;
        Ok(updated)
    }

    /// The norm of the whole model's gradients, where they are clipped to one.
    fn norm(&mut self, on: &mut dyn Listener) -> Result<Option<f64>, Halt> {
        if self.options.clip_norm.is_none() {
            return Ok(None);
        }
        let mut sum = self.own_norm().powi(2);
        on.on(Event::Squares { sum: &mut sum })?;
        Ok(Some(sum.sqrt()))
    }

    /// Clips and applies the gradients that were kept, unless they would spoil the weights.
    fn update_all(&mut self, moment: Moment, norm: Option<f64>) -> Result<(), NotFinite> {
        if let (Some(norm), Some(norm_max)) = (norm, self.options.clip_norm) {
            self.clip_by(norm, norm_max);
        }
        let store = &self.weights.store;
        let finite = norm.map_or_else(|| all_finite(self.device.pool(), &store.gradients), f64::is_finite);
        if !finite {
            let spoiled = |&index: &usize| !is_finite(store.gradient(index));
            let parameter = (0..self.segments.len()).find(spoiled).unwrap_or(0);
            return Err(NotFinite::Gradient(parameter));
        }
        self.update(moment);
        Ok(())
    }

    /// The optimizer's step with the gradients that were kept.
    pub fn update(&mut self, moment: Moment) {
        let Self { weights: Weights { store, optimizer, owned, .. }, device, segments, sums, options, .. } = self;
        let Store { parameters: weights, gradients, .. } = store;
        let state = optim::state_of(optimizer, owned.place(0..weights.len()));
        let buffers = Buffers { start: 0, weights, gradients, state };
        options.rule.update(moment, segments, buffers, &mut Tools { cpu: device, sums });
    }

    /// Scales the kept gradients down to a norm over all parameters here, and returns the norm they had.
    pub fn clip(&mut self, norm_max: f64) -> f64 {
        let norm = self.own_norm();
        self.clip_by(norm, norm_max);
        norm
    }

    /// The norm of the kept gradients that count here.
    fn own_norm(&mut self) -> f64 {
        let Self { weights: Weights { store, .. }, device, counted, sums, .. } = self;
        optim::global_norm(&store.gradients, counted, &mut Tools { cpu: device, sums })
    }

    /// Scales the kept gradients, whose norm is known.
    fn clip_by(&mut self, norm: f64, norm_max: f64) {
        let Self { weights: Weights { store, .. }, device, sums, .. } = self;
        if let Some(factor) = optim::clip_factor(norm, norm_max) {
            optim::scale(&mut store.gradients, factor, &Tools { cpu: device, sums });
        }
    }

    pub(super) fn settle(&mut self, on: &mut dyn Listener) -> Result<(), Halt> {
        if self.train.is_none() {
            return Ok(());
        }
        let (_, Store { parameters, .. }, mut updates) = self.split(Slot(0));
        for index in 0..updates.buckets.len() {
            let parameters = &mut parameters[updates.buckets[index].elements.clone()];
            let target = &mut HostTarget { updates: &mut updates, parameters };
            on.on(Event::BeforeRead { bucket: index, target })?;
        }
        Ok(())
    }

    pub(super) fn evaluate(&mut self, batch: &Batch, on: &mut dyn Listener) -> Result<(Vec<f32>, Tally), Halt> {
        let Self { train, eval: CompiledGraph { executor, bindings, .. }, weights, .. } = self;
        let mut run = |executor: &mut Executor| {
            bindings.fill(executor, batch, MicroBatch::whole(batch), 1.0)?;
            bindings.receive(executor, on)?;
            executor.forward_with(&mut weights.store, Pass::default(), &mut |turn| match turn {
                Turn::SumParts { numbers } => on.on(Event::SumParts { numbers }),
                Turn::GatherParts { numbers, lengths, .. } => on.on(Event::GatherParts { numbers, lengths }),
                _ => Ok::<_, Halt>(()),
            })?;
            bindings.send(executor, on)?;
            let (logits, tally) = bindings.answers(executor, batch, MicroBatch::whole(batch))?;
            Ok((logits.into_owned(), tally))
        };
        match train {
            Some(train) => train.executor.lend_arena(executor, run),
            None => run(executor),
        }
    }

    /// The second of two passes, by the clock.
    pub(super) fn stage_times(&mut self) -> Result<StageTimes, TrainError> {
        let pass = Pass { samples: self.options.micro_batch, ..Pass::default() };
        let states = self.weights.store.states.to_vec();
        let (Graphs { train, .. }, store, _) = self.split(Slot(0));
        let executor = &mut train.executor;
        executor.profile(store, pass)?;
        let profile = executor.profile(store, pass)?;
        let times = stage::times(executor.plan(), &profile);
        self.weights.store.states.copy_from_slice(&states);
        Ok(times)
    }

    pub(super) fn lengths(&self, samples: usize) -> &CrossingLengths {
        let other = self.others.iter().find(|other| other.samples == samples);
        &other.or(self.train.as_ref()).unwrap_or(&self.eval).lengths
    }

    pub(super) fn evaluation_lengths(&self) -> &CrossingLengths {
        &self.eval.lengths
    }

    pub(super) fn profile(&mut self, inputs: &Inputs<'_>) -> Result<Profile, TrainError> {
        let (graphs, store, _) = self.split(Slot(0));
        graphs.run(inputs.pass.samples, |executor, bindings| {
            bindings.fill(executor, inputs.batch, inputs.micro_batch, inputs.seed)?;
            Ok(executor.profile(store, inputs.pass)?)
        })
    }

    pub(super) fn find_non_finite(&mut self, inputs: &Inputs<'_>) -> Option<(String, &'static str)> {
        let (graphs, store, _) = self.split(Slot(0));
        let found = graphs.run::<_, CudaError>(inputs.pass.samples, |executor, bindings| {
            bindings.fill(executor, inputs.batch, inputs.micro_batch, inputs.seed)?;
            executor.find_non_finite(store, inputs.pass)
        });
        found.ok().flatten()
    }

    /// Adds the gradients of a micro-batch to those of the ones before.
    fn accumulate(&mut self, micro_batch: MicroBatch) {
        let gradients = &mut self.weights.store.gradients;
        add(&self.device, &mut self.accumulated, gradients, micro_batch.is_first());
        if micro_batch.is_last() {
            gradients.copy_from_slice(&self.accumulated);
        }
    }

    pub(super) fn steps_by_elements(&self) -> bool {
        self.options.steps_by_elements(self.plan())
    }

    /// Whether all gradients are looked at before any is applied.
    pub(super) fn keeps_gradients(&self) -> bool {
        self.plan().stores_gradients() || self.gathers
    }

    pub(super) fn plan(&self) -> &Plan {
        self.train.as_ref().unwrap_or(&self.eval).executor.plan()
    }

    pub(super) fn evaluation_plan(&self) -> &Plan {
        self.eval.executor.plan()
    }

    pub(super) fn cpu(&self) -> &Arc<Cpu> {
        &self.device
    }

    /// What a pass uses at the same time.
    pub(super) fn split(&mut self, slot: Slot) -> (Graphs<'_>, &mut Store, Updates<'_>) {
        let Self { options, device, weights, segments, buckets, sums, train, others, live, .. } = self;
        let Weights { store, optimizer, owned, .. } = weights;
        let updates = Updates { rule: &options.rule, device, optimizer, owned, segments, buckets, sums };
        let activations = live[slot.0].activations.as_mut();
        (Graphs { train: train.as_mut().expect(EVALUATES), others, activations, slot }, store, updates)
    }

    /// Takes memory for the activations of a slot, unless that was done.
    fn open(&mut self, slot: Slot) {
        let executor = &self.train.as_ref().expect(EVALUATES).executor;
        while self.live.len() <= slot.0 {
            // A GPU keeps them by itself.
            let activations = (!executor.is_on_gpu()).then(|| executor.new_slot());
            self.live.push(Live { activations, ..Live::default() });
        }
    }
}

/// The training graphs, and the activations of a slot.
pub(super) struct Graphs<'a> {
    train: &'a mut CompiledGraph,
    others: &'a mut [CompiledGraph],
    /// None if they stand in the executor's own arena.
    activations: Option<&'a mut execute::Slot>,
    slot: Slot,
}

impl Graphs<'_> {
    /// Runs the graph that was planned for so many samples, or else the largest.
    fn run<T, E: From<CudaError>>(
        self,
        samples: usize,
        run: impl FnOnce(&mut Executor, &Bindings) -> Result<T, E>,
    ) -> Result<T, E> {
        let Self { train: CompiledGraph { executor, bindings, .. }, others, activations, slot } = self;
        if executor.is_on_gpu() {
            let (executor, bindings) = match others.iter_mut().find(|other| other.samples == samples) {
                Some(CompiledGraph { executor, bindings, .. }) => (executor, &*bindings),
                None => (executor, &*bindings),
            };
            executor.switch_slot(slot.0)?;
            return run(executor, bindings);
        }
        let in_arena = |executor: &mut Executor| match others.iter_mut().find(|other| other.samples == samples) {
            Some(other) => executor.lend_arena(&mut other.executor, |executor| run(executor, &other.bindings)),
            None => run(executor, bindings),
        };
        match activations {
            Some(activations) => executor.with_slot(activations, in_arena),
            None => in_arena(executor),
        }
    }
}

/// Adds gradients to sums, or begins with them.
fn add(device: &Cpu, sums: &mut [f32], gradients: &[f32], begins: bool) {
    const CHUNK: usize = 1 << 16;
    device.pool().chunks(sums, CHUNK, |index, sums| {
        let gradients = &gradients[index * CHUNK..][..sums.len()];
        if begins {
            sums.copy_from_slice(gradients);
        } else {
            sums.iter_mut().zip(gradients).for_each(|(sum, gradient)| *sum += gradient);
        }
    });
}

/// Adds up the statistics of a batch-norm. A worker without samples adds nothing.
pub(super) fn sum_statistics(numbers: &mut [f32], samples: MicroBatch, on: &mut dyn Listener) -> Result<(), Halt> {
    if samples.is_empty() {
        numbers.fill(0.0);
    }
    on.on(Event::Sum { numbers })
}

/// Adds up the sums of a batch-norm's gradient. A worker without samples adds nothing, and its own gradient stays zero.
pub(super) fn sum_gradients(numbers: &mut [f32], samples: MicroBatch, on: &mut dyn Listener) -> Result<(), Halt> {
    if !samples.is_empty() {
        return on.on(Event::Sum { numbers });
    }
    numbers.fill(0.0);
    on.on(Event::Sum { numbers })?;
    numbers.fill(0.0);
    // The last is the number of rows, which sums are divided by.
    if let Some(rows) = numbers.last_mut() {
        *rows = 1.0;
    }
    Ok(())
}
