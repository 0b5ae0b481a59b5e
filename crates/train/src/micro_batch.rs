//! How a batch is cut: into the shares of the workers, which differ by at most one sample, and each share into micro-batches.
//!
//! Every mean over samples is a sum of parts that count for their samples, so that however a batch is cut, and whatever is left for an
//! epoch's last one, a step is the same step.

use std::ops::Range;

use paceline_data::batch::Batch;
use paceline_data::order::{self, LastBatch, Shard, Share};

use crate::config::Config;
use crate::together::Balance;

/// How many sizes besides the largest a worker's micro-batches may have: of a whole batch, and of what an epoch leaves, two each, three
/// where the parts of all workers come to it, or all that a share by speed may have.
pub const OTHER_SIZES: usize = 24;

/// In shares by speed, how many steps there are from nothing to an even share.
const UNITS: usize = 8;

/// The sizes that a share by speed may have: multiples of a number that divides the batch, up to twice an even share.
pub fn shares_by_speed(batch: usize, workers: usize) -> impl Iterator<Item = usize> {
    let finest = batch.div_ceil(UNITS * workers).max(1);
    let unit = (finest..=batch).find(|unit| batch.is_multiple_of(*unit)).unwrap_or(batch);
    let units = (batch / unit).saturating_sub(workers - 1).min((2 * batch).div_ceil(workers * unit));
    (1..=units).map(move |count| count * unit)
}

/// How many micro-batches each worker's share of `all` samples has: as many as asked for, if there is a sample for each.
pub fn micro_batches(all: usize, workers: usize, accumulate: usize) -> usize {
    accumulate.min(all.div_ceil(workers)).max(1)
}

/// Which samples of a worker's batch are computed at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MicroBatch {
    /// Its number.
    pub index: usize,
    /// How many there are.
    pub of: usize,
    start: usize,
    end: usize,
    /// Samples in the batch.
    size: usize,
}

impl MicroBatch {
    /// Number `index` of `of` in a batch of `size` samples.
    pub fn new(size: usize, index: usize, of: usize) -> Self {
        let Range { start, end } = order::part(size, index, of);
        Self { index, of, start, end, size }
    }

    /// All samples of a batch.
    pub fn whole(batch: &Batch) -> Self {
        Self::new(batch.size, 0, 1)
    }

    /// The number of its first sample in the batch.
    pub const fn start(self) -> usize {
        self.start
    }

    /// How many samples it has.
    pub const fn len(self) -> usize {
        self.end - self.start
    }

    /// Whether this worker has none, and only keeps step with the others.
    pub const fn is_empty(self) -> bool {
        self.end == self.start
    }

    /// Whether it is the first of its step.
    pub const fn is_first(self) -> bool {
        self.index == 0
    }

    /// Whether it is the last of its step.
    pub const fn is_last(self) -> bool {
        self.index + 1 == self.of
    }

    /// What belongs to its samples, of what belongs to all of the batch's.
    pub fn slice<T>(self, data: &[T]) -> &[T] {
        let each = data.len() / self.size.max(1);
        &data[self.start * each..self.end * each]
    }
}

/// Which part of the batch of all workers a batch is: without a word on it, all have as many samples.
pub fn share(batch: &Batch, rank: usize, workers: usize) -> Share {
    batch.share.unwrap_or(Share { first: rank * batch.size, all: workers * batch.size })
}

/// The sizes that a worker's micro-batches have in a run: a plan is made for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroBatchSizes {
    /// The largest.
    pub largest: usize,
    /// The others; 0 where there are fewer.
    pub others: [usize; OTHER_SIZES],
    /// Samples that a worker evaluates at once: as many on all workers.
    pub evaluation: usize,
}

impl MicroBatchSizes {
    /// Those of one worker. How many samples an epoch has decides what its last batch is; whoever does not know gets the sizes of whole
    /// batches.
    pub fn of(config: &Config, shard: Shard, samples: Option<usize>) -> Self {
        let Shard { rank, world } = shard;
        // Portions that are handed out are anybody's: the largest, and the smallest.
        let parts = if config.hands_out_portions() { vec![0, world - 1] } else { vec![rank] };
        let whole = samples.map_or(config.batch, |samples| samples.min(config.batch));
        let rest = samples.filter(|_| config.last_batch == LastBatch::Keep).map_or(0, |samples| samples % config.batch);
        let mut sizes: Vec<usize> = [whole, rest]
            .into_iter()
            .filter(|&all| all > 0)
            .flat_map(|all| parts.iter().map(move |&part| (all, part)))
            .flat_map(|(all, part)| {
                let (own, of) = (order::part(all, part, world).len(), micro_batches(all, world, config.accumulate));
                // A worker without samples computes one that does not count, to keep step with the others.
                (0..of).map(move |index| MicroBatch::new(own, index, of).len().max(1))
            })
            .collect();
        if config.balance == Balance::Speed && whole == config.batch {
            sizes.extend(shares_by_speed(config.batch, world));
        }
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        sizes.dedup();
        let mut others = [0; OTHER_SIZES];
        others.iter_mut().zip(sizes.iter().skip(1)).for_each(|(other, &size)| *other = size);
        let evaluation = (whole / world / micro_batches(whole, world, config.accumulate)).max(1);
        Self { largest: sizes.first().copied().unwrap_or(1).max(evaluation), others, evaluation }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sizes(batch: usize, accumulate: usize, shard: (usize, usize), samples: usize) -> MicroBatchSizes {
        let config = Config { batch, accumulate, ..Config::default() };
        MicroBatchSizes::of(&config, Shard { rank: shard.0, world: shard.1 }, Some(samples))
    }

    #[test]
    fn equal_shares_have_one_size_and_a_rest_another() {
        let one = MicroBatchSizes { largest: 16, others: Default::default(), evaluation: 16 };
        assert_eq!(sizes(64, 2, (1, 2), 640), one);
        let mut rest = MicroBatchSizes { largest: 256, others: Default::default(), evaluation: 256 };
        rest.others[0] = 80;
        assert_eq!(sizes(256, 1, (0, 1), 50_000), rest);
        assert_eq!(
            sizes(64, 1, (2, 3), 640),
            MicroBatchSizes { largest: 21, others: Default::default(), evaluation: 21 }
        );
        assert_eq!(
            sizes(64, 1, (0, 3), 640),
            MicroBatchSizes { largest: 22, others: Default::default(), evaluation: 21 }
        );
        assert_eq!(
            sizes(64, 1, (0, 1), 10),
            MicroBatchSizes { largest: 10, others: Default::default(), evaluation: 10 }
        );
    }

    proptest! {
        #[test]
        fn every_micro_batch_of_a_run_has_one_of_the_sizes(
            batch in 1usize..70, accumulate in 1usize..7, world in 1usize..6, samples in 1usize..300,
        ) {
            prop_assume!(batch >= world);
            for rank in 0..world {
                let sizes = sizes(batch, accumulate, (rank, world), samples);
                prop_assert!(sizes.evaluation <= sizes.largest);
                for all in [batch.min(samples), samples % batch].into_iter().filter(|&all| all > 0) {
                    let (own, of) = (order::part(all, rank, world).len(), micro_batches(all, world, accumulate));
                    let parts: Vec<_> = (0..of).map(|index| MicroBatch::new(own, index, of)).collect();
                    prop_assert_eq!(parts.iter().map(|part| part.len()).sum::<usize>(), own);
                    for part in parts {
                        let size = part.len().max(1);
                        prop_assert!(size == sizes.largest || sizes.others.contains(&size), "{:?} {:?}", part, sizes);
                    }
                }
            }
        }
    }
}
