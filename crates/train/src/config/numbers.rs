//! Counts that must not be zero, or are too large.

use super::{Config, SIDE_MAX, SOCKETS_MAX, THREADS_MAX, refuse};
use crate::error::TrainError;

impl Config {
    /// Whether every count can be one.
    pub(super) fn check_numbers(&self) -> Result<(), TrainError> {
        let positive = [
            ("--batch", Some(self.batch as u64)),
            ("--accumulate", Some(self.accumulate as u64)),
            ("--epochs", Some(self.epochs)),
            ("--max-steps", self.max_steps),
            ("--early-stop", self.early_stop),
            ("--size", self.size.map(|size| size as u64)),
            ("--sequence", Some(self.sequence as u64)),
            ("--classes", self.classes.map(|classes| classes as u64)),
            ("--threads", self.threads.map(|threads| threads as u64)),
            ("--loader-threads", Some(self.loader_threads as u64)),
            ("--evaluate-every", Some(self.evaluate_every)),
            ("--checkpoint-every", self.checkpoint_every),
            ("--keep", Some(self.keep as u64)),
            ("--workers", Some(self.workers as u64)),
            ("--servers", Some(self.servers as u64)),
            ("--sockets", Some(self.sockets as u64)),
            ("--group", self.center.group.map(|group| group as u64)),
            ("--period", self.period),
            ("--node-period", self.node_period),
            ("--fragments", self.fragments),
            ("--herds", self.herds.map(|herds| herds as u64)),
            ("--fetch-every", self.center.fetch_every),
            ("--push-every", self.center.push_every),
        ];
        if let Some((flag, _)) = positive.iter().find(|(_, value)| *value == Some(0)) {
            return refuse(format!("{flag} 0 does not work; type {flag} with a whole number from 1"));
        }
        let bounded = [
            ("--size", self.size, SIDE_MAX),
            ("--threads", self.threads, THREADS_MAX),
            ("--loader-threads", Some(self.loader_threads), THREADS_MAX),
            ("--sockets", Some(self.sockets), SOCKETS_MAX),
        ];
        if let Some((flag, Some(value), most)) = bounded.iter().find(|(_, value, most)| value > &Some(*most)) {
            return refuse(format!("{flag} {value} is too large; type {flag} with at most {most}"));
        }
        Ok(())
    }
}
