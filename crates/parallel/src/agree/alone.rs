//! One worker: nothing travels, and it makes its own steps.

use paceline_comm::{CommError, Rank};

use super::{Agreement, Protocol, StepReport};

/// There are no others.
#[derive(Debug)]
pub struct Alone {
    protocol: Protocol,
    report: StepReport,
}

impl Default for Alone {
    fn default() -> Self {
        Self { protocol: Protocol::alone(), report: StepReport::default() }
    }
}

impl Agreement for Alone {
    fn protocol(&self) -> &Protocol {
        &self.protocol
    }

    fn rank(&self) -> Rank {
        Rank(0)
    }

    fn workers(&self) -> usize {
        1
    }

    fn broadcast_from_root(&mut self, _: &mut [f32]) -> Result<(), CommError> {
        Ok(())
    }

    fn sum(&mut self, _: &mut [f32]) -> Result<(), CommError> {
        Ok(())
    }

    fn begin_step(&mut self, report: StepReport) -> Result<(), CommError> {
        self.report = report;
        Ok(())
    }

    fn total(&mut self) -> Result<StepReport, CommError> {
        Ok(self.report)
    }
}
