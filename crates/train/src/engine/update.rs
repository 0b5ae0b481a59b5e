//! The optimizer's arithmetic on the host, bucket by bucket.

use std::ops::Range;

use paceline_nn::optim::{self, Buffers, Moment, Rule, Segment, Tools};
use paceline_parallel::Ownership;
use paceline_tensor::Buffer;
use paceline_tensor::device::cpu::Cpu;
use paceline_tensor::plan::Bucket;

use super::finite::all_finite;
use super::{Halt, Target, parameter_of};
use crate::replica::NotFinite;

/// What applies gradients.
pub(super) struct Updates<'a> {
    pub rule: &'a Rule,
    pub device: &'a Cpu,
    pub optimizer: &'a mut [Buffer],
    /// What of all parameters that is the state of.
    pub owned: &'a Ownership,
    pub segments: &'a [Segment],
    pub buckets: &'a [Bucket],
    /// Working memory.
    pub sums: &'a mut Vec<f64>,
}

impl Updates<'_> {
    /// Changes parameters, some of a bucket's, unless their gradients would spoil them.
    fn apply(
        &mut self,
        moment: Moment,
        (bucket, range): (usize, Range<usize>),
        gradients: &mut [f32],
        parameters: &mut [f32],
    ) -> Result<(), NotFinite> {
        let Self { rule, device, optimizer, owned, segments, buckets, sums } = self;
        let (at, bucket) = ((bucket, range.start), &buckets[bucket]);
        let start = bucket.elements.start + range.start;
        if all_finite(device.pool(), gradients) {
            let state = optim::state_of(optimizer, owned.place(start..bucket.elements.start + range.end));
            let buffers = Buffers { start, weights: parameters, gradients, state };
            rule.update(moment, &segments[bucket.parameters.clone()], buffers, &mut Tools { cpu: device, sums });
            return Ok(());
        }
        Err(self.spoiled(at, gradients))
    }

    /// Which gradient of a bucket is not a number.
    fn spoiled(&self, (bucket, start): (usize, usize), gradients: &[f32]) -> NotFinite {
        let bucket = &self.buckets[bucket];
        let first = gradients.iter().position(|x| !x.is_finite()).unwrap_or(0);
        NotFinite::Gradient(parameter_of(bucket, self.segments, bucket.elements.start + start + first))
    }
}

/// The parameters of a bucket in the host's memory.
pub(super) struct HostTarget<'a, 'b> {
    pub updates: &'a mut Updates<'b>,
    pub parameters: &'a mut [f32],
}

impl Target for HostTarget<'_, '_> {
    fn apply(
        &mut self,
        moment: Moment,
        at: (usize, Range<usize>),
        gradients: &mut [f32],
        shared: Option<&mut [f32]>,
    ) -> Result<(), Halt> {
        let own = at.1.clone();
        let parameters = shared.unwrap_or_else(|| &mut self.parameters[own]);
        self.updates.apply(moment, at, gradients, parameters).map_err(Halt::NotFinite)
    }

    fn step_chunk(&mut self, moment: Moment, at: (usize, Range<usize>), values: &mut [f32]) -> Result<(), Halt> {
        let parameters = &mut self.parameters[at.1.clone()];
        // Whoever gathers sums that are no numbers finds out, this replica too.
        if self.updates.apply(moment, at, values, parameters).is_ok() {
            values.copy_from_slice(parameters);
        }
        Ok(())
    }

    fn replace(&mut self, bucket: usize, weights: &[f32]) -> Result<(), Halt> {
        let gathered = !self.updates.owned.is_whole();
        if gathered && !all_finite(self.updates.device.pool(), weights) {
            return Err(Halt::NotFinite(self.updates.spoiled((bucket, 0), weights)));
        }
        self.parameters.copy_from_slice(weights);
        Ok(())
    }
}

/// All gradients, kept: what comes back takes their place, and the update follows.
pub(super) struct KeptTarget<'a> {
    pub gradients: &'a mut [f32],
    pub parameters: &'a mut [f32],
    /// Set when the weights came back, so that no update follows.
    pub replaced: &'a mut bool,
}

impl Target for KeptTarget<'_> {
    fn apply(
        &mut self,
        _: Moment,
        (_, range): (usize, Range<usize>),
        gradients: &mut [f32],
        _: Option<&mut [f32]>,
    ) -> Result<(), Halt> {
        self.gradients[range].copy_from_slice(gradients);
        Ok(())
    }

    fn replace(&mut self, _: usize, weights: &[f32]) -> Result<(), Halt> {
        self.parameters.copy_from_slice(weights);
        *self.replaced = true;
        Ok(())
    }
}
