//! Whether the answers to how a model is split fit the rest of a configuration.

use paceline_nn::optim::Optimizer;

use super::{Config, refuse};
use crate::compute::Compute;
use crate::error::TrainError;
use crate::together::Carry;

impl Config {
    /// Whether the ways to split the model fit the rest.
    pub(super) fn check_split(&self) -> Result<(), TrainError> {
        let stages = self.stages();
        if stages == 1 && !self.cuts.is_empty() {
            let stages = self.cuts.len() + 1;
            return refuse(format!("--cuts is for a model in stages; type --split pipeline:{stages}"));
        }
        if stages == 1 && !self.stage_devices.is_empty() {
            return refuse("--stage-devices is for a model in stages; type --device, or --split pipeline:2".into());
        }
        if self.parts() > 1 {
            return self.check_parts();
        }
        if stages == 1 {
            return Ok(());
        }
        if !self.cuts.is_empty() && self.cuts.len() + 1 != stages {
            return refuse(format!(
                "--split pipeline:{stages} ends {} stages behind layers, and --cuts names {}; type as many, or leave --cuts out",
                stages - 1,
                self.cuts.len()
            ));
        }
        if !self.stage_devices.is_empty() && self.stage_devices.len() != stages {
            return refuse(format!(
                "--stage-devices names {} devices, and there are {stages} stages; type one for each, such as cuda,cpu",
                self.stage_devices.len()
            ));
        }
        if self.carry == Carry::NCCL {
            return refuse(
                "--carry nccl is for whole models on GPUs, and --split has stages; leave --carry out".into(),
            );
        }
        if self.holds_whole_models() {
            return refuse(format!(
                "--agree {} holds whole models, and --split {} has stages; type --agree all-reduce, or leave --split out",
                self.agree.name(),
                self.split
            ));
        }
        Ok(())
    }

    /// Whether the way to agree knows of no stages and parts.
    fn holds_whole_models(&self) -> bool {
        let recipe = self.agree.recipe();
        recipe.has_servers() || recipe.shares_process()
    }

    /// Whether layers that are computed by several parts fit the rest.
    fn check_parts(&self) -> Result<(), TrainError> {
        let split = &self.split;
        if self.carry == Carry::NCCL || self.device != Compute::Cpu {
            return refuse(format!(
                "--split {split} computes layers on CPUs; type --device cpu, and another --carry than nccl"
            ));
        }
        if self.holds_whole_models() {
            return refuse(format!(
                "--agree {} holds whole models, and --split {split} has parts; type --agree all-reduce, or leave --split out",
                self.agree.name()
            ));
        }
        if self.optimizer == Optimizer::Lars {
            return refuse(format!(
                "--optimizer lars looks at whole tensors, and --split {split} cuts them; type --optimizer momentum or another, or leave \
                 --split out"
            ));
        }
        Ok(())
    }
}
