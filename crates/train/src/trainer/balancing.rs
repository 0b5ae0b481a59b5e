//! Shares of a batch that follow the workers' speed (`--balance speed`): each has as many samples as it computes while the others compute
//! theirs. Gradients are means over the samples of all, so the step is the same one whoever computed them.

use paceline_system::event::Event;
use paceline_system::phase::Phase;

use super::journal::Journal;
use crate::config::Config;
use crate::error::TrainError;
use crate::micro_batch::shares_by_speed;
use crate::replica::Replica;
use crate::together::Balance;

/// The first steps after a change, which touch memory for the first time.
const WARM_UP: u64 = 2;

/// How workers share batches.
#[derive(Debug)]
pub(super) struct Shares {
    /// Samples of a batch that each has.
    pub samples: Vec<usize>,
    /// How many each computes in a second.
    pub speeds: Vec<f64>,
}

/// What a worker has measured of itself since shares were last made.
#[derive(Debug, Default)]
pub(super) struct Speed {
    steps: u64,
    samples: u64,
    computed_s: f64,
}

impl Speed {
    /// A step was made, with so many samples of this worker's.
    pub fn add(&mut self, event: &Event, own: usize) {
        let Event::Step { phases, .. } = event else { return };
        self.steps += 1;
        if self.steps > WARM_UP {
            let seconds = |phase| phases.get(phase).unwrap_or(0.0);
            self.samples += own as u64;
            self.computed_s += [Phase::Forward, Phase::Backward, Phase::Compute].into_iter().map(seconds).sum::<f64>();
        }
    }

    /// New shares, after the steps at which all measure again; all workers come here at the same step.
    ///
    /// # Errors
    /// When another worker, or the way to it, has failed.
    pub fn shares(&mut self, config: &Config, step: u64, replica: &mut Replica) -> Result<Option<Shares>, TrainError> {
        let (own, world) = (replica.rank(), replica.world());
        if config.balance == Balance::Even || world == 1 || !step.is_multiple_of(config.balance_every) {
            return Ok(None);
        }
        let Self { samples, computed_s, .. } = std::mem::take(self);
        let mut speeds = vec![0.0f32; world];
        speeds[own] = if computed_s > 0.0 { (samples as f64 / computed_s) as f32 } else { 0.0 };
        replica.sum(&mut speeds)?;
        // One that has measured nothing is not known.
        if speeds.iter().any(|speed| !(speed.is_finite() && *speed > 0.0)) {
            return Ok(None);
        }
        let speeds: Vec<f64> = speeds.into_iter().map(f64::from).collect();
        Ok(Some(Shares { samples: shares(&speeds, config.batch), speeds }))
    }
}

impl Journal {
    /// Tells how the workers share batches from here on.
    pub fn balanced(&mut self, Shares { samples, speeds }: &Shares) -> Result<(), TrainError> {
        let (step, samples) = (self.position.step, samples.iter().map(|&share| share as u64).collect());
        self.record(Event::Balanced { step, samples, samples_per_s: speeds.clone() })
    }
}

/// Shares of a batch with which the slowest worker is through as early as can be. Every worker has one size at least: it is measured again.
fn shares(speeds: &[f64], batch: usize) -> Vec<usize> {
    let sizes: Vec<usize> = shares_by_speed(batch, speeds.len()).collect();
    let (Some(&unit), Some(&most)) = (sizes.first(), sizes.last()) else {
        let part = |worker| paceline_data::order::part(batch, worker, speeds.len()).len();
        return (0..speeds.len()).map(part).collect();
    };
    let mut shares = vec![unit; speeds.len()];
    while shares.iter().sum::<usize>() < batch {
        let through = |worker: &usize| (shares[*worker] + unit) as f64 / speeds[*worker];
        let open = (0..shares.len()).filter(|&worker| shares[worker] < most);
        let Some(next) = open.min_by(|one, other| through(one).total_cmp(&through(other))) else { break };
        shares[next] += unit;
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::micro_batch::OTHER_SIZES;
    use proptest::prelude::*;

    #[test]
    fn a_worker_that_is_four_times_slower_has_a_fourth() {
        assert_eq!(shares(&[100.0, 25.0], 100), [80, 20]);
        assert_eq!(shares(&[100.0, 100.0], 64), [32, 32]);
        assert_eq!(shares(&[4.0, 4.0, 4.0, 1.0], 128), [40, 40, 40, 8]);
        assert_eq!(shares(&[1000.0, 1.0], 64), [60, 4]);
        assert_eq!(shares(&[1.0, 5.0, 3.0], 2), [1, 1, 0]);
    }

    proptest! {
        #[test]
        fn shares_are_a_batch_and_have_sizes_that_are_planned(
            speeds in prop::collection::vec(0.01f64..100.0, 2..9), batch in 1usize..600,
        ) {
            let (workers, found) = (speeds.len(), shares(&speeds, batch));
            prop_assert_eq!(found.iter().sum::<usize>(), batch);
            let sizes: Vec<usize> = shares_by_speed(batch, workers).collect();
            prop_assert!(sizes.len() + 4 <= OTHER_SIZES, "{} sizes", sizes.len());
            prop_assert!(sizes.is_empty() || found.iter().all(|share| sizes.contains(share)));
        }
    }
}
