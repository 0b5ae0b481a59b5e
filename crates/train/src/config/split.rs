//! Whether the answers to how a model is split fit the rest of a configuration.

use super::{Config, refuse};
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
        if self.agree.recipe().has_servers() {
            return refuse(format!(
                "--agree {} holds whole models, and --split {} has stages; type --agree all-reduce, or leave --split out",
                self.agree.name(),
                self.split
            ));
        }
        Ok(())
    }
}
