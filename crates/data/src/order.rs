//! Which samples when: the order of an epoch and its division into batches and ranks, all pure functions.
//!
//! An epoch is one permutation of the set, a function of (seed, epoch) and of nothing else: neither the batch size nor
//! the number of ranks changes it. Step *s* of a run with a batch of *B* samples over all ranks takes samples
//! *sB*‥*(s+1)B* of the permutation, and rank *r* takes the *r*-th part of those; parts differ by at most one
//! sample. So the samples seen after any number of steps are a prefix of the permutation, whoever saw them, and a run that is resumed with another batch size or
//! another world goes on with the rest: [`Epoch::after`] is all there is to it. One permutation costs 4 bytes a sample
//! and is made once an epoch (50,000 samples: under a millisecond).

use std::ops::Range;
use std::sync::Arc;

use paceline_system::random::Random;
use serde::{Deserialize, Serialize};

use crate::DataError;

/// Names the stream of shuffles, apart from those of augmentation and generated data.
const SHUFFLE: u64 = 0x5348_5546;

/// One rank of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// This process's number.
    pub rank: usize,
    /// How many there are.
    pub world: usize,
}

impl Shard {
    /// All of the data: a world of one.
    pub const WHOLE: Self = Self { rank: 0, world: 1 };
}

/// What happens to samples that do not fill a global batch at the end of an epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LastBatch {
    /// They form a smaller batch, shared by the ranks as evenly as can be; a rank's part may be empty.
    #[default]
    Keep,
    /// They are left out of this epoch; the next epoch's shuffle gives them another chance.
    Drop,
}

impl std::str::FromStr for LastBatch {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "keep" => Ok(Self::Keep),
            "drop" => Ok(Self::Drop),
            _ => Err("type keep or drop".into()),
        }
    }
}

/// Part `part` of `length` things that are cut into so many parts, as evenly as can be, the larger ones first: of samples among ranks, and of
/// a rank's among micro-batches.
pub fn part(length: usize, part: usize, parts: usize) -> Range<usize> {
    let (each, more) = (length / parts, length % parts);
    let start = |part: usize| part * each + part.min(more);
    start(part)..start(part + 1)
}

/// How an epoch is cut into batches, as one rank sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Samples per step over all ranks.
    pub batch: usize,
    /// Which rank of how many.
    pub shard: Shard,
    /// What happens to the rest.
    pub last: LastBatch,
}

impl Layout {
    /// How many steps `samples` samples make.
    pub fn steps(&self, samples: usize) -> usize {
        match self.last {
            LastBatch::Keep => samples.div_ceil(self.batch),
            LastBatch::Drop => samples / self.batch,
        }
    }

    /// Refuses what cannot work on a set of `len` samples.
    ///
    /// # Errors
    /// A sentence for the user, when the batch is empty or larger than the set.
    pub fn check(&self, len: usize) -> Result<(), DataError> {
        let Shard { rank, world } = self.shard;
        assert!(rank < world, "rank {rank} of a world of {world}");
        if self.batch == 0 {
            return Err(DataError::refused("a batch of 0 samples trains nothing; type --batch 1 or more"));
        }
        if self.last == LastBatch::Drop && self.batch > len {
            return Err(DataError::refused(format!(
                "a batch of {} is larger than the data set's {len} samples, and --last-batch drop leaves none; \
                 type --batch {len} or smaller, or --last-batch keep",
                self.batch
            )));
        }
        Ok(())
    }
}

/// The order of a set's samples over all epochs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// The run's seed.
    pub seed: u64,
    /// How many samples the set has.
    pub len: usize,
    /// Whether epochs are shuffled; evaluation reads in file order.
    pub shuffle: bool,
}

impl Order {
    /// The order of one epoch.
    pub fn epoch(&self, epoch: u64) -> Epoch {
        let len = u32::try_from(self.len).expect("a set has fewer than 2^32 samples");
        let mut samples: Vec<u32> = (0..len).collect();
        if self.shuffle {
            Random::new(&[SHUFFLE, self.seed, epoch]).shuffle(&mut samples);
        }
        Epoch { samples: samples.into(), start: 0 }
    }
}

/// The samples of one epoch in the order they are seen, from some point on.
#[derive(Clone, Debug)]
pub struct Epoch {
    samples: Arc<[u32]>,
    start: usize,
}

impl Epoch {
    /// What is left of this epoch once its first `seen` samples were seen, by whatever batches and ranks.
    pub fn after(&self, seen: usize) -> Self {
        Self { samples: Arc::clone(&self.samples), start: seen.min(self.samples.len()) }
    }

    /// Every sample still to come.
    pub fn samples(&self) -> &[u32] {
        &self.samples[self.start..]
    }

    /// How many steps the rest of the epoch has.
    pub fn steps(&self, layout: &Layout) -> usize {
        layout.steps(self.samples().len())
    }

    /// The samples of one rank's batch at `step`, counted from this point of the epoch, and which part of the batch of all ranks
    /// they are.
    pub fn batch(&self, layout: &Layout, step: usize) -> (&[u32], Share) {
        self.portion(layout, Portion { step, part: layout.shard.rank }, None)
    }

    /// The samples of one portion of a batch, whoever takes it. Where whole batches are cut into parts of given lengths,
    /// those of an epoch's end are cut evenly all the same.
    pub fn portion(
        &self,
        layout: &Layout,
        Portion { step, part: number }: Portion,
        lengths: Option<&[usize]>,
    ) -> (&[u32], Share) {
        assert!(step < self.steps(layout), "step {step} of {}", self.steps(layout));
        let shared = &self.samples()[step * layout.batch..];
        let shared = &shared[..shared.len().min(layout.batch)];
        let own = match lengths.filter(|_| shared.len() == layout.batch) {
            Some(lengths) => {
                let start = lengths[..number].iter().sum();
                start..start + lengths[number]
            }
            None => part(shared.len(), number, layout.shard.world),
        };
        (&shared[own.clone()], Share { first: own.start, all: shared.len() })
    }
}

/// One of the parts, as many as there are ranks, that the batch of a step is cut into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Portion {
    /// Of which step, counted from some point of the epoch.
    pub step: usize,
    /// Which part of its batch.
    pub part: usize,
}

impl Portion {
    /// Portion `number` of those of `world` ranks, one step after the other.
    pub const fn at(number: usize, world: usize) -> Self {
        Self { step: number / world, part: number % world }
    }

    /// Which of them it is.
    pub const fn number(self, world: usize) -> usize {
        self.step * world + self.part
    }
}

impl Share {
    /// The same where the parts of `group` ranks count as one: among their samples.
    #[must_use]
    pub fn among(self, group: usize, number: usize, world: usize) -> Self {
        if group <= 1 {
            return self;
        }
        let first = number / group * group;
        let all = (first..first + group).map(|number| part(self.all, number, world).len()).sum();
        Self { all, ..self }
    }
}

/// Which part of the batch of all ranks a rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The number of its first sample in the batch of all.
    pub first: usize,
    /// Samples of all ranks.
    pub all: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn layout(batch: usize, rank: usize, world: usize, last: LastBatch) -> Layout {
        Layout { batch, shard: Shard { rank, world }, last }
    }

    /// What all ranks together see in `steps`, in order.
    fn seen(epoch: &Epoch, batch: usize, world: usize, last: LastBatch, steps: usize) -> Vec<u32> {
        let mut samples = Vec::new();
        for step in 0..steps {
            for rank in 0..world {
                samples.extend_from_slice(epoch.batch(&layout(batch, rank, world, last), step).0);
            }
        }
        samples
    }

    proptest! {
        #[test]
        fn every_sample_is_seen_exactly_once_over_the_ranks(len in 0usize..300, batch in 1usize..20, world in 1usize..9, seed: u64) {
            let epoch = Order { seed, len, shuffle: true }.epoch(3);
            let steps = epoch.steps(&layout(batch, 0, world, LastBatch::Keep));
            let mut samples = seen(&epoch, batch, world, LastBatch::Keep, steps);
            samples.sort_unstable();
            prop_assert_eq!(samples, (0..len as u32).collect::<Vec<_>>());
        }

        #[test]
        fn dropping_the_last_batch_keeps_all_others_full(len in 0usize..300, batch in 1usize..20, world in 1usize..9) {
            let epoch = Order { seed: 1, len, shuffle: true }.epoch(0);
            let steps = epoch.steps(&layout(batch, 0, world, LastBatch::Drop));
            for step in 0..steps {
                let mut next = 0;
                for rank in 0..world {
                    let (samples, share) = epoch.batch(&layout(batch, rank, world, LastBatch::Drop), step);
                    prop_assert!(samples.len() == batch / world || samples.len() == batch.div_ceil(world));
                    prop_assert_eq!(share, Share { first: next, all: batch });
                    next += samples.len();
                }
                prop_assert_eq!(next, batch);
            }
            prop_assert!(len - steps * batch < batch);
        }

        #[test]
        fn a_run_resumed_with_another_world_sees_the_rest(
            len in 1usize..300, before in (1usize..12, 1usize..6), after in (1usize..12, 1usize..6), stop: prop::sample::Index,
        ) {
            let epoch = Order { seed: 9, len, shuffle: true }.epoch(1);
            let steps = epoch.steps(&layout(before.0, 0, before.1, LastBatch::Keep));
            let mut samples = seen(&epoch, before.0, before.1, LastBatch::Keep, stop.index(steps + 1));
            let rest = epoch.after(samples.len());
            let steps = rest.steps(&layout(after.0, 0, after.1, LastBatch::Keep));
            samples.extend(seen(&rest, after.0, after.1, LastBatch::Keep, steps));
            prop_assert_eq!(samples, epoch.samples().to_vec());
        }

        #[test]
        fn a_resumed_epoch_has_the_same_suffix(len in 1usize..300, batch in 1usize..20, world in 1usize..5, rank in 0usize..5, stop: prop::sample::Index) {
            let layout = layout(batch, rank % world, world, LastBatch::Keep);
            let order = Order { seed: 4, len, shuffle: true };
            let (whole, again) = (order.epoch(7), order.epoch(7));
            let stop = stop.index(whole.steps(&layout));
            let rest = again.after(stop * layout.batch);
            prop_assert_eq!(rest.steps(&layout), whole.steps(&layout) - stop);
            for step in 0..rest.steps(&layout) {
                prop_assert_eq!(rest.batch(&layout, step), whole.batch(&layout, stop + step));
            }
        }
    }

    #[test]
    fn parts_of_given_lengths_are_a_batch_and_the_last_one_is_cut_evenly() {
        let epoch = Order { seed: 5, len: 26, shuffle: true }.epoch(0);
        let layout = layout(10, 0, 3, LastBatch::Keep);
        let lengths = [6, 1, 3];
        let all = |step| (0..3).map(|part| epoch.portion(&layout, Portion { step, part }, Some(&lengths)).0).collect();
        let parts: Vec<Vec<&[u32]>> = (0..3).map(all).collect();
        assert_eq!(parts.concat().concat(), epoch.samples());
        assert_eq!(parts[1].iter().map(|part| part.len()).collect::<Vec<_>>(), lengths);
        assert_eq!(parts[2].iter().map(|part| part.len()).collect::<Vec<_>>(), [2, 2, 2]);
        assert_eq!(epoch.portion(&layout, Portion { step: 0, part: 2 }, Some(&lengths)).1, Share { first: 7, all: 10 });
    }

    #[test]
    fn epochs_and_seeds_give_different_orders() {
        let order = |seed, epoch| Order { seed, len: 100, shuffle: true }.epoch(epoch).samples().to_vec();
        assert_eq!(order(1, 2), order(1, 2));
        assert_ne!(order(1, 2), order(1, 3));
        assert_ne!(order(1, 2), order(2, 2));
        assert_eq!(Order { seed: 1, len: 3, shuffle: false }.epoch(5).samples(), [0, 1, 2]);
    }

    #[test]
    fn an_impossible_batch_is_refused_with_what_to_type() {
        let check = |batch, world, len| layout(batch, 0, world, LastBatch::Drop).check(len).unwrap_err().to_string();
        assert!(check(0, 1, 10).contains("--batch 1"));
        assert!(check(64, 1, 10).contains("type --batch 10 or smaller, or --last-batch keep"));
        assert!(check(usize::MAX, 4, 100).contains("--batch 100"));
        assert!(layout(64, 0, 1, LastBatch::Keep).check(10).is_ok());
    }
}
