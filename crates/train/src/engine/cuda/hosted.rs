//! Steps in which the host hears of gradients: nodes are started in segments, between which buckets leave,
//! and what came back is applied.
//!
//! The host is ahead of the GPU: it starts the whole backward pass, with a copy of every bucket to pinned
//! memory behind the node that makes it final, has the next batch brought, and then waits for the copies one
//! after the other. What comes back is started on the same stream, so that it is applied after all that was
//! started before. A forward pass stops before the first node that reads a bucket, until what is late has
//! come.

use std::ops::Range;

use paceline_nn::optim::Moment;
use paceline_tensor::device::cuda::session::Part;

use super::super::cpu::{sum_gradients, sum_statistics};
use super::super::finite::all_finite;
use super::super::{Event, Halt, Listener, StepOutput, Target, parameter_of};
use super::{CudaEngine, tally};
use crate::error::TrainError;
use crate::replica::NotFinite;

/// How many buckets later one that has not come back is asked for again.
const OFFERS: usize = 2;

/// The parameters of a bucket on the GPU.
struct DeviceTarget<'a> {
    engine: &'a mut CudaEngine,
    /// Set when the weights came back, so that no update of all parameters follows.
    replaced: &'a mut bool,
}

impl Target for DeviceTarget<'_> {
    fn apply(
        &mut self,
        moment: Moment,
        (bucket, range): (usize, Range<usize>),
        sums: &mut [f32],
        _: Option<&mut [f32]>,
    ) -> Result<(), Halt> {
        let engine = &mut *self.engine;
        let at = engine.plan().buckets()[bucket].clone();
        assert_eq!(range, 0..at.elements.len(), "a bucket comes back whole");
        engine.device_is_newer = true;
        if !all_finite(engine.cpu.pool(), sums) {
            let spoiled = at.elements.start + sums.iter().position(|x| !x.is_finite()).unwrap_or(0);
            return Err(Halt::NotFinite(NotFinite::Gradient(parameter_of(&at, &engine.segments, spoiled))));
        }
        if engine.keeps_gradients() {
            return Ok(engine.session.give_sums(bucket, sums)?);
        }
        let numbers = engine.numbers(moment);
        Ok(engine.session.apply_sums(bucket, sums, &numbers)?)
    }

    fn replace(&mut self, bucket: usize, weights: &[f32]) -> Result<(), Halt> {
        self.engine.device_is_newer = true;
        *self.replaced = true;
        Ok(self.engine.session.replace_weights(bucket, weights)?)
    }
}

impl CudaEngine {
    /// Takes memory to have gradients pass through the host from now on.
    pub(in crate::engine) fn stage_gradients(&mut self) -> Result<(), TrainError> {
        self.session.host_exchange().map_err(super::refused)?;
        self.hosted = true;
        Ok(())
    }

    /// Whether all gradients are looked at before any is applied.
    fn keeps_gradients(&self) -> bool {
        self.options.clip_norm.is_some() || self.options.accumulate > 1 || !self.options.overlap
    }

    /// The forward pass over the micro-batch that was filled in.
    pub(super) fn forward_hosted(&mut self, moment: Moment, on: &mut dyn Listener) -> Result<(), Halt> {
        let numbers = self.numbers(moment);
        self.session.begin_step(&numbers)?;
        let end = self.active_plan().forward_nodes();
        let mut done = 0;
        for index in 0..self.active_plan().needs().len() {
            let (node, bucket) = self.active_plan().needs()[index];
            self.start_nodes(done..node.min(end), on)?;
            done = done.max(node.min(end));
            let target = &mut DeviceTarget { engine: self, replaced: &mut false };
            on.on(Event::BeforeRead { bucket, target })?;
        }
        self.start_nodes(done..end, on)?;
        Ok(self.session.start_tally()?)
    }

    /// The backward pass over the same.
    pub(super) fn backward_hosted(&mut self, on: &mut dyn Listener) -> Result<(), Halt> {
        let (part, nodes) = (self.micro_batch, self.active_plan().graph().nodes().len());
        let (last, count) = (part.is_last(), self.active_plan().buckets().len());
        let mut done = self.active_plan().forward_nodes();
        for bucket in 0..if last { count } else { 0 } {
            let next = self.active_plan().buckets()[bucket].ready_after + 1;
            self.start_nodes(done..next, on)?;
            done = done.max(next);
            if part.of > 1 {
                self.session.accumulate(Part::Last { bucket })?;
            }
            self.session.fetch_gradients(bucket)?;
        }
        self.start_nodes(done..nodes, on)?;
        if !last {
            self.session.accumulate(if part.is_first() { Part::First } else { Part::Between })?;
            self.count()?;
        }
        Ok(())
    }

    /// Waits for the answers of a part, and counts them.
    fn count(&mut self) -> Result<(), Halt> {
        let found = self.session.tally()?;
        self.tally.merge(&tally(found, self.session.rows()));
        Ok(())
    }

    /// Gives buckets away as they arrive, and applies what has come back meanwhile.
    fn send_gradients(&mut self, on: &mut dyn Listener) -> Result<(), Halt> {
        on.on(Event::Forwarded { tally: self.tally })?;
        for bucket in 0..self.plan().buckets().len() {
            on.on(Event::Final { bucket, gradients: self.session.gradients(bucket)? })?;
            for before in bucket.saturating_sub(OFFERS)..=bucket {
                let target = &mut DeviceTarget { engine: self, replaced: &mut false };
                on.on(Event::MayApply { bucket: before, gradients: None, target })?;
            }
        }
        Ok(())
    }

    pub(super) fn close_hosted(&mut self, moment: Moment, on: &mut dyn Listener) -> Result<StepOutput, Halt> {
        self.count()?;
        let (keeps, mut replaced, mut total) = (self.keeps_gradients(), false, self.tally);
        if !keeps {
            self.send_gradients(on)?;
        } else {
            on.on(Event::Forwarded { tally: total })?;
            let count = self.plan().buckets().len();
            for bucket in 0..count {
                on.on(Event::Final { bucket, gradients: self.session.gradients(bucket)? })?;
            }
            for bucket in 0..count {
                let target = &mut DeviceTarget { engine: self, replaced: &mut replaced };
                on.on(Event::Settle { bucket, target })?;
            }
        }
        on.on(Event::Total { tally: &mut total })?;
        let updated = match total.loss.is_finite() {
            false => Err(NotFinite::Loss),
            true if keeps && !replaced => {
                on.on(Event::UpdateBegins)?;
                let updated = self.update_all(moment);
                on.on(Event::UpdateEnds)?;
                updated?
            }
            true => Ok(()),
        };
        Ok(StepOutput { tally: total, updated })
    }

    /// Clips and applies the sums of all buckets, unless they would spoil the weights.
    fn update_all(&mut self, moment: Moment) -> Result<Result<(), NotFinite>, Halt> {
        let numbers = self.numbers(moment);
        self.session.update_all(&numbers)?;
        let found = self.session.finish()?;
        if found.gradients_are_finite { Ok(Ok(())) } else { Ok(Err(NotFinite::Gradient(0))) }
    }

    pub(super) fn settle_hosted(&mut self, on: &mut dyn Listener) -> Result<(), Halt> {
        for bucket in 0..self.plan().buckets().len() {
            let target = &mut DeviceTarget { engine: self, replaced: &mut false };
            on.on(Event::BeforeRead { bucket, target })?;
        }
        Ok(self.session.settle()?)
    }

    /// Starts nodes, with a stop where a batch-norm adds up its statistics with other replicas'.
    fn start_nodes(&mut self, nodes: Range<usize>, on: &mut dyn Listener) -> Result<(), Halt> {
        let mut done = nodes.start;
        if self.active_plan().shares_statistics() {
            for node in nodes.clone() {
                let counts = self.active_plan().sums(node);
                if counts[0] == 0 {
                    continue;
                }
                self.session.start_nodes(done..node)?;
                done = node + 1;
                for (sum, _) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
                    self.session.start_sums(node, sum)?;
                    let (samples, backward) = (self.micro_batch, node >= self.active_plan().forward_nodes());
                    let numbers = self.session.sums(node, sum)?;
                    if backward {
                        sum_gradients(numbers, samples, on)?;
                    } else {
                        sum_statistics(numbers, samples, on)?;
                    }
                    self.session.give_sums_back(node, sum)?;
                }
                self.session.start_rest(node)?;
            }
        }
        if done < nodes.end {
            self.session.start_nodes(done..nodes.end)?;
        }
        Ok(())
    }
}
