//! Which samples of a batch each worker has: a share, even or by its speed, or portions as it is free; and what the loss of one means.

use paceline_parallel::agree::{LostPeer, Shape, Steps};

use super::{Config, refuse};
use crate::compute::Compute;
use crate::error::TrainError;
use crate::micro_batch::shares_by_speed;
use crate::together::{Balance, Carry, Sharding};

impl Config {
    /// Whether workers take portions of the data as they are free, and have no share of their own.
    pub fn hands_out_portions(&self) -> bool {
        self.agree.recipe().hands_out_portions(&self.agreement(false))
    }

    /// Whether an epoch is one batch, with whose gradients servers step.
    pub fn gathers(&self) -> bool {
        self.agree.recipe().protocol(&Shape::default(), &self.agreement(false)).steps == Steps::Gathered
    }

    /// Whether the loss of a worker that is not the first ends nothing: the others go on without it. MPI ends all processes with
    /// one, and threads are one process.
    pub fn goes_on_without_workers(&self) -> bool {
        let (recipe, options) = (self.agree.recipe(), self.agreement(false));
        let goes_on = recipe.protocol(&Shape::default(), &options).lost_peer == LostPeer::GoOn;
        goes_on && self.workers > 1 && !matches!(self.carry, Carry::MPI | Carry::THREAD)
    }

    /// Whether a worker that was lost may come back while the others go on.
    ///
    /// # Errors
    /// Why not: a sentence that says what to type.
    pub fn lets_workers_return(&self) -> Result<(), String> {
        let instead = "let the run end and go on with --resume to have all workers back";
        if !self.hands_out_portions() {
            let why = "workers of a synchronous server make the same steps, so that none can come back in the middle";
            return Err(format!("{why}; for runs where they can, type --staleness none; here {instead}"));
        }
        if self.gathers() {
            return Err(format!("the gradients of all are one step here, and its sums are not given out; {instead}"));
        }
        if self.group() > 1 {
            return Err(format!(
                "those of a --group step together, so that none can come back in the middle; here {instead}"
            ));
        }
        if self.carry != Carry::TCP {
            return Err(format!(
                "a worker comes back over sockets, and this run has --carry {}; start runs where they can with --carry tcp; here \
                 {instead}",
                self.carry.name()
            ));
        }
        if self.device != Compute::Cpu {
            return Err(format!("workers come back on CPUs, and this run has --device {}; {instead}", self.device));
        }
        Ok(())
    }

    /// Whether so many workers can share a batch: each needs a sample for every part. Shares need not be equal.
    ///
    /// # Errors
    /// When there are too few; the sentence says what to type.
    pub fn check_world(&self, world: usize) -> Result<(), TrainError> {
        if self.shard == Sharding::Optimizer && world == 1 {
            return refuse(
                "--shard optimizer divides the optimizer's state among workers, and there is one; \
                 type --workers 2 or more, or --shard none"
                    .into(),
            );
        }
        if self.gathers() && world == 1 {
            let name = self.agree.name();
            return refuse(format!(
                "--agree {name} has servers, which one worker has not; type --workers 2 or more, or leave --agree out"
            ));
        }
        let least = world * self.accumulate;
        if self.batch >= least {
            return Ok(());
        }
        let parts = if self.accumulate > 1 { format!(" in {} parts each", self.accumulate) } else { String::new() };
        refuse(format!("--batch {} is too small for {world} workers{parts}; type --batch {least} or more", self.batch))
    }

    /// Whether shares of a batch fit the rest.
    pub(super) fn check_shares(&self) -> Result<(), TrainError> {
        if let Some(rank) = self.slow.rank_max().filter(|&rank| rank >= self.workers * self.ranks_per_worker()) {
            let last = self.workers * self.ranks_per_worker() - 1;
            return refuse(format!("--slow {} names rank {rank}, and ranks that compute are 0 to {last}", self.slow));
        }
        self.refuses_balance().map_or(Ok(()), |sentence| refuse(sentence.into()))
    }

    /// Why shares cannot follow the workers' speed.
    fn refuses_balance(&self) -> Option<&'static str> {
        Some(match self.balance {
            Balance::Even => return None,
            Balance::Speed if self.hands_out_portions() => {
                "--balance speed is for workers that wait for each other; here whoever is free takes the next portion already; leave it out"
            }
            Balance::Speed if !self.steps_together() => {
                "--balance speed is for workers that make the same steps; type --agree all-reduce, or leave it out"
            }
            Balance::Speed if self.ranks_per_worker() > 1 => {
                "--balance speed is for workers of one process each; leave --split or --balance out"
            }
            Balance::Speed if self.accumulate > 1 => {
                "--balance speed cuts batches for each worker's speed, and --accumulate into equal parts; leave one of them out"
            }
            Balance::Speed if self.device != Compute::Cpu => {
                "--balance speed is for workers on CPUs, and a GPU has a graph for each number of samples; leave it out"
            }
            Balance::Speed if self.workers > 1 && shares_by_speed(self.batch, self.workers).next().is_none() => {
                "--balance speed cuts a batch into equal pieces, a few for each worker; type a --batch with more divisors, such as 64 or 96"
            }
            Balance::Speed if self.balance_every == 0 => {
                "--balance-every must be above zero; type for example --balance-every 50"
            }
            Balance::Speed => return None,
        })
    }
}
