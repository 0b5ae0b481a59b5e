//! How stale an update is: a pure count.
//!
//! Every bucket has a version, the number of updates that were applied to it. An update is computed from the version
//! that its worker read last; those that were applied since are what it has missed. Buckets travel one after the
//! other, so their numbers may differ; that of a step is the largest.

/// The versions of one server's buckets, and what each worker has read of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Versions {
    /// Updates that were applied, by bucket.
    applied: Vec<u64>,
    /// The version that each worker read last, by worker and bucket.
    read: Vec<Vec<u64>>,
    /// Those of the updates that are a worker's own, by worker and bucket.
    own: Vec<Vec<u64>>,
    /// The most that the step under way has missed, by worker.
    missed: Vec<u64>,
}

impl Versions {
    /// All workers begin with the same.
    pub fn new(workers: usize, buckets: usize) -> Self {
        let (read, own) = (vec![vec![0; buckets]; workers], vec![vec![0; buckets]; workers]);
        Self { applied: vec![0; buckets], read, own, missed: vec![0; workers] }
    }

    /// A worker is given the weights of a bucket.
    pub fn read(&mut self, worker: usize, bucket: usize) {
        self.read[worker][bucket] = self.applied[bucket];
    }

    /// All workers are given all weights.
    pub fn read_by_all(&mut self) {
        self.read.iter_mut().for_each(|read| read.copy_from_slice(&self.applied));
    }

    /// What a worker has pushed for a bucket is applied: how many updates it had missed.
    pub fn apply(&mut self, worker: usize, bucket: usize) -> u64 {
        let missed = self.applied[bucket] - self.read[worker][bucket];
        self.missed[worker] = self.missed[worker].max(missed);
        self.applied[bucket] += 1;
        self.own[worker][bucket] += 1;
        missed
    }

    /// The updates of others that a bucket contains: what a worker is told that it reads, and says again with an
    /// update that it has computed from there.
    pub fn of_others(&self, worker: usize, bucket: usize) -> u64 {
        self.applied[bucket] - self.own[worker][bucket]
    }

    /// What a worker has pushed for a bucket is applied, which says that it was computed from a bucket with so many
    /// updates of others. How many it had missed; of a number that it was never told, none.
    pub fn apply_computed_from(&mut self, worker: usize, bucket: usize, of_others: u64) -> u64 {
        let missed = self.of_others(worker, bucket).saturating_sub(of_others);
        self.applied[bucket] += 1;
        self.own[worker][bucket] += 1;
        missed
    }

    /// A worker's step is whole: how many updates it had missed.
    pub fn end_step(&mut self, worker: usize) -> u64 {
        std::mem::take(&mut self.missed[worker])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step of one bucket: pushed, applied, and pulled again.
    fn step(versions: &mut Versions, worker: usize) -> u64 {
        versions.apply(worker, 0);
        versions.read(worker, 0);
        versions.end_step(worker)
    }

    #[test]
    fn a_worker_alone_misses_nothing_and_of_two_in_turns_each_misses_one() {
        let mut versions = Versions::new(2, 1);
        assert_eq!((0..3).map(|_| step(&mut versions, 0)).collect::<Vec<_>>(), [0, 0, 0]);
        // The other has read the weights of the beginning.
        assert_eq!(step(&mut versions, 1), 3);
        let turns: Vec<u64> = [0, 1, 0, 1].into_iter().map(|worker| step(&mut versions, worker)).collect();
        assert_eq!(turns, [1, 1, 1, 1]);
        // One that is four times as fast: its own updates are none that it misses.
        let turns: Vec<u64> = [0, 0, 0, 0, 1].into_iter().map(|worker| step(&mut versions, worker)).collect();
        assert_eq!(turns, [1, 0, 0, 0, 4]);
    }

    #[test]
    fn an_update_that_says_what_it_was_computed_from_has_missed_the_others_since() {
        let mut versions = Versions::new(2, 1);
        let told = versions.of_others(1, 0);
        (0..3).for_each(|_| assert_eq!(versions.apply_computed_from(0, 0, 0), 0, "its own are none that it misses"));
        // Read before the three, and not again before its second update.
        assert_eq!(versions.apply_computed_from(1, 0, told), 3);
        assert_eq!(versions.apply_computed_from(1, 0, told), 3);
        assert_eq!(versions.apply_computed_from(0, 0, 0), 2);
        let told = versions.of_others(1, 0);
        assert_eq!((told, versions.apply_computed_from(1, 0, told)), (4, 0));
        assert_eq!(versions.apply_computed_from(1, 0, u64::MAX), 0, "a version that does not exist");
    }

    #[test]
    fn the_step_of_several_buckets_has_missed_what_its_stalest_has() {
        let mut versions = Versions::new(2, 2);
        versions.apply(0, 0);
        // The second worker is between the two buckets of the first.
        versions.apply(1, 0);
        versions.apply(1, 1);
        versions.apply(0, 1);
        assert_eq!((versions.end_step(0), versions.end_step(1)), (1, 1));
        versions.read_by_all();
        versions.apply(1, 0);
        assert_eq!(versions.end_step(1), 0);
    }
}
