//! An engine that computes nothing and takes the time a cost model says. Messages, schedules and whole
//! clusters are tried out on it; its weights stay what they are.

use std::ops::Range;
use std::sync::Arc;

use paceline_data::batch::Batch;
use paceline_nn::optim::Moment;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::device::null::CostModel;
use paceline_tensor::execute::{Profile, Turn};
use paceline_tensor::{Device, Pass, Plan};

use super::compiled::CompiledGraph;
use super::cpu::EVALUATES;
use super::{Event, Gradients, Halt, Inputs, Listener, Parts, Slot, StepOutput, Target, Weights};
use crate::error::TrainError;
use crate::metrics::Tally;

/// A model whose steps take time and nothing else.
#[derive(Debug)]
pub struct NullEngine {
    pub(super) weights: Weights,
    device: Arc<Cpu>,
    train: Option<CompiledGraph>,
    eval: CompiledGraph,
    /// Whether the gradients of several micro-batches are added up first.
    gathers: bool,
    pub(super) tally: Tally,
}

/// Whatever comes back changes nothing.
struct Nowhere;

impl Target for Nowhere {
    fn apply(&mut self, _: Moment, _: (usize, Range<usize>), _: &mut [f32], _: Option<&mut [f32]>) -> Result<(), Halt> {
        Ok(())
    }

    fn replace(&mut self, _: usize, _: &[f32]) -> Result<(), Halt> {
        Ok(())
    }
}

impl NullEngine {
    pub(crate) fn new(parts: Parts, device: &Arc<Cpu>, cost: CostModel) -> Result<Self, TrainError> {
        let Parts { options, train, eval, weights, .. } = parts;
        let gathers = options.gathers();
        let place = Device::null(cost);
        let train = train.into_iter().next().map(|train| CompiledGraph::new(train, &place)).transpose()?;
        let eval = CompiledGraph::new(eval, &place)?;
        Ok(Self { weights, device: Arc::clone(device), train, eval, gathers, tally: Tally::default() })
    }

    pub(super) fn forward(&mut self, _: Slot, inputs: &Inputs<'_>, on: &mut dyn Listener) -> Result<(), Halt> {
        let CompiledGraph { executor, .. } = self.train.as_mut().expect(EVALUATES);
        executor.forward_with(&mut self.weights.store, inputs.pass, &mut |turn| match turn {
            Turn::BeforeRead { bucket, .. } => on.on(Event::BeforeRead { bucket, target: &mut Nowhere }),
            Turn::Sum { numbers, .. } => on.on(Event::Sum { numbers }),
            _ => Ok(()),
        })?;
        let rows = inputs.micro_batch.slice(&inputs.batch.targets).len() as u64;
        self.tally.rows = if inputs.micro_batch.is_first() { rows } else { self.tally.rows + rows };
        if self.keeps_gradients() { Ok(()) } else { on.on(Event::Forwarded { tally: self.tally }) }
    }

    /// Whether all gradients are looked at before any is applied.
    pub(super) fn keeps_gradients(&self) -> bool {
        self.plan().stores_gradients() || self.gathers
    }

    pub(super) fn backward(&mut self, _: Slot, _: Gradients, on: &mut dyn Listener) -> Result<(), Halt> {
        let keeps = self.keeps_gradients();
        let CompiledGraph { executor, .. } = self.train.as_mut().expect(EVALUATES);
        let mut result = Ok(());
        executor.backward(&mut self.weights.store, Pass::default(), &mut |turn| {
            result = match turn {
                Turn::Sum { numbers, .. } => on.on(Event::Sum { numbers }),
                // There are no numbers to add or to fill in.
                Turn::SumParts { .. } | Turn::GatherParts { .. } => Ok(()),
                _ if keeps => Ok(()),
                Turn::Final { bucket, .. } => on.on(Event::Final { bucket, gradients: &[] }),
                Turn::Apply { bucket, .. } | Turn::Offer { bucket, .. } | Turn::BeforeRead { bucket, .. } => {
                    on.on(Event::MayApply { bucket, gradients: None, target: &mut Nowhere })
                }
            };
            result.is_ok()
        })?;
        result
    }

    pub(super) fn close(&mut self, _: Moment, on: &mut dyn Listener) -> Result<StepOutput, Halt> {
        let mut tally = self.tally;
        if self.keeps_gradients() {
            let buckets = self.plan().buckets().len();
            on.on(Event::Forwarded { tally })?;
            (0..buckets).try_for_each(|bucket| on.on(Event::Final { bucket, gradients: &[] }))?;
            (0..buckets).try_for_each(|bucket| on.on(Event::Settle { bucket, target: &mut Nowhere }))?;
        }
        on.on(Event::Total { tally: &mut tally })?;
        Ok(StepOutput { tally, updated: Ok(()) })
    }

    pub(super) fn settle(&mut self, on: &mut dyn Listener) -> Result<(), Halt> {
        let buckets = self.plan().buckets().len();
        (0..buckets).try_for_each(|bucket| on.on(Event::BeforeRead { bucket, target: &mut Nowhere }))
    }

    pub(super) fn evaluate(&mut self, batch: &Batch) -> Result<(Vec<f32>, Tally), TrainError> {
        self.eval.executor.run(&mut self.weights.store, Pass::default())?;
        Ok((Vec::new(), Tally { rows: batch.targets.len() as u64, ..Tally::default() }))
    }

    pub(super) fn profile(&mut self, inputs: &Inputs<'_>) -> Result<Profile, TrainError> {
        let CompiledGraph { executor, .. } = self.train.as_mut().expect(EVALUATES);
        Ok(executor.profile(&mut self.weights.store, inputs.pass)?)
    }

    pub(super) fn find_non_finite(&mut self, _: &Inputs<'_>) -> Option<(String, &'static str)> {
        None
    }

    pub(super) fn set_cost(&mut self, cost: CostModel) {
        for graph in self.train.iter_mut().chain([&mut self.eval]) {
            graph.executor.set_device(&Device::null(cost));
        }
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
}
