//! The end of a step in which this replica steps its own chunks of every bucket, and is given the weights of
//! the others'.
//!
//! Gradients that travelled during the backward pass have come back as sums, or will soon; the step is made with
//! them, and the weights come back in the next forward pass, just before they are read. Where all gradients are
//! kept, everything is done here. A norm to clip to is made of the norms of all replicas' chunks.

use std::ops::Range;

use paceline_nn::optim::{self, Moment, Segment, Tools};

use super::cpu::CpuEngine;
use super::update::HostTarget;
use super::{Event, Halt, Listener, Slot, StepOutput, Target};
use crate::replica::NotFinite;

impl CpuEngine {
    /// Ends a step.
    pub(super) fn close_chunks(&mut self, on: &mut dyn Listener) -> Result<StepOutput, Halt> {
        let (mut tally, keeps) = (self.tally, self.keeps_gradients());
        if keeps {
            on.on(Event::Forwarded { tally })?;
            let gradients = &self.weights.store.gradients;
            for (index, bucket) in self.buckets.iter().enumerate() {
                on.on(Event::Final { bucket: index, gradients: &gradients[bucket.elements.clone()] })?;
            }
        }
        on.on(Event::Total { tally: &mut tally })?;
        if !tally.loss.is_finite() {
            return Ok(StepOutput { tally, updated: Err(NotFinite::Loss) });
        }
        if let Some(norm_max) = self.options.clip_norm {
            self.clip_chunks(norm_max, on)?;
        }
        self.each_bucket(|bucket, target| on.on(Event::StepChunks { bucket, target }))?;
        if keeps {
            self.each_bucket(|bucket, target| on.on(Event::Settle { bucket, target }))?;
        }
        Ok(StepOutput { tally, updated: Ok(()) })
    }

    /// Lends the parameters of all buckets, one after the other.
    fn each_bucket(
        &mut self,
        mut lend: impl FnMut(usize, &mut HostTarget<'_, '_>) -> Result<(), Halt>,
    ) -> Result<(), Halt> {
        let (_, store, mut updates) = self.split(Slot(0));
        for index in 0..updates.buckets.len() {
            let parameters = &mut store.parameters[updates.buckets[index].elements.clone()];
            lend(index, &mut HostTarget { updates: &mut updates, parameters })?;
        }
        Ok(())
    }

    /// Scales the sums of this replica's chunks down to a norm over those of all. A norm that is no number changes
    /// nothing: the chunk that has none either is not stepped.
    fn clip_chunks(&mut self, norm_max: f64, on: &mut dyn Listener) -> Result<(), Halt> {
        let Self { device, sums, buckets, counted, .. } = self;
        let (mut tools, mut squares) = (Tools { cpu: device, sums }, 0.0);
        for (bucket, start) in buckets.iter().map(|bucket| bucket.elements.start).enumerate() {
            let mut look = |range: Range<usize>, sums: &mut [f32]| {
                let (first, end) = (start + range.start, start + range.end);
                // What lies between tensors is zero.
                for Segment { range, .. } in counted.iter().filter(|one| one.range.start < end && one.range.end > first)
                {
                    let held = range.start.max(first) - first..range.end.min(end) - first;
                    squares += optim::squares(&sums[held], &mut tools);
                }
            };
            on.on(Event::InspectSums { bucket, target: &mut Look(&mut look) })?;
        }
        let mut norm = f64::sqrt(squares);
        on.on(Event::Norm { norm: &mut norm })?;
        let Some(factor) = optim::clip_factor(norm, norm_max) else { return Ok(()) };
        for bucket in 0..buckets.len() {
            let mut scale = |_: Range<usize>, sums: &mut [f32]| optim::scale(sums, factor, &tools);
            on.on(Event::InspectSums { bucket, target: &mut Look(&mut scale) })?;
        }
        Ok(())
    }
}

/// Is shown sums, and no weights.
struct Look<'a>(&'a mut dyn FnMut(Range<usize>, &mut [f32]));

impl Target for Look<'_> {
    fn apply(
        &mut self,
        _: Moment,
        (_, range): (usize, Range<usize>),
        sums: &mut [f32],
        _: Option<&mut [f32]>,
    ) -> Result<(), Halt> {
        (self.0)(range, sums);
        Ok(())
    }

    fn replace(&mut self, _: usize, _: &[f32]) -> Result<(), Halt> {
        Ok(())
    }
}
