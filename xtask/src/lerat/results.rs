//! What was measured, cell by cell, and what follows for an epoch.

use std::path::Path;

use anyhow::Result;
use serde_json::Value;

use super::cells::{Cell, ONE_CORE, Place, Side, Work};

/// All cells that were measured.
pub struct Results {
    cells: Vec<(Cell, Value)>,
}

/// Seconds of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// The median.
    pub median: f64,
    /// The shortest.
    pub least: f64,
    /// The longest.
    pub most: f64,
    /// Whether it was measured; otherwise it is on the line through smaller batches.
    pub measured: bool,
}

impl Results {
    /// Reads what is there.
    pub fn read(folder: &Path, grid: &[Cell]) -> Result<Self> {
        let mut cells = Vec::new();
        for cell in grid {
            let Ok(text) = std::fs::read_to_string(folder.join(format!("{}.json", cell.name()))) else { continue };
            cells.push((cell.clone(), serde_json::from_str(&text)?));
        }
        Ok(Self { cells })
    }

    /// What was measured.
    pub fn all(&self) -> impl Iterator<Item = &(Cell, Value)> {
        self.cells.iter()
    }

    /// A cell of ours with a copy of its own.
    pub fn cell(&self, work: Work, batch: u32, setup: &str) -> Option<&Value> {
        self.at(work, batch, setup, Side::Paceline, Place::Local)
    }

    /// Any cell.
    pub fn at(&self, work: Work, batch: u32, setup: &str, side: Side, place: Place) -> Option<&Value> {
        let is = |cell: &Cell| {
            cell.work == work && cell.batch == batch && cell.setup == setup && cell.side == side && cell.place == place
        };
        self.cells.iter().find(|(cell, _)| is(cell)).map(|(_, found)| found)
    }

    /// Seconds of a step by a set-up, with a copy of its own.
    pub fn step(&self, work: Work, batch: u32, setup: &str, side: Side) -> Option<Step> {
        let measured = |batch| self.at(work, batch, setup, side, Place::Local).and_then(step_of);
        if let Some(step) = measured(batch) {
            return Some(step);
        }
        // What waits for a link is on no line: it takes as long as the longer of two things.
        let waits = self.cells.iter().any(|(cell, _)| cell.setup == setup && cell.nodes > 1);
        let (&[first, second], true) = (work.measured, batch > *work.measured.last()? && !waits) else { return None };
        let (a, b) = (measured(first)?, measured(second)?);
        let line = |low: f64, high: f64| high + (high - low) * f64::from(batch - second) / f64::from(second - first);
        let median = line(a.median, b.median);
        Some(Step { median, least: median, most: median, measured: false })
    }

    /// How many times as fast as one core.
    pub fn speedup(&self, work: Work, batch: u32, setup: &str) -> Option<f64> {
        let one = self.step(work, batch, ONE_CORE, Side::Paceline)?;
        Some(one.median / self.step(work, batch, setup, Side::Paceline)?.median)
    }

    /// Set-ups of ours, in the order of the grid.
    pub fn setups(&self) -> Vec<&'static str> {
        let mut found = Vec::new();
        for (cell, _) in self.cells.iter().filter(|(cell, _)| cell.side == Side::Paceline) {
            if !found.contains(&cell.setup) {
                found.push(cell.setup);
            }
        }
        found
    }
}

/// The seconds of a cell's steps.
pub fn step_of(found: &Value) -> Option<Step> {
    let mut seconds: Vec<f64> = found["seconds"].as_array()?.iter().filter_map(Value::as_f64).collect();
    seconds.sort_by(f64::total_cmp);
    let median = *seconds.get(seconds.len() / 2)?;
    Some(Step { median, least: seconds[0], most: seconds[seconds.len() - 1], measured: true })
}

/// Bytes that a step's gradients have.
pub fn gradient_bytes(found: &Value) -> Option<f64> {
    Some(4.0 * found["parameters"].as_f64()?)
}

/// Bytes a step that the busiest host has sent, headers included.
pub fn sent_bytes(found: &Value) -> Option<f64> {
    let steps = found["window_steps"].as_f64()?;
    let sent = found["host_bytes"].as_array()?.iter().filter_map(|host| host[1].as_f64());
    sent.reduce(f64::max).map(|bytes| bytes / steps)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::cells::{Extent, WORKS, grid};
    use super::*;

    #[test]
    fn what_was_not_measured_is_on_a_line_and_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let cells = grid(Extent { quick: false, hosts: false, torch: false, help: "" });
        for cell in cells.iter().filter(|cell| cell.setup == ONE_CORE) {
            let found = json!({ "seconds": [9.0, 1.0 + 0.5 * f64::from(cell.batch), 0.1] });
            std::fs::write(folder.path().join(format!("{}.json", cell.name())), found.to_string()).unwrap();
        }
        let results = Results::read(folder.path(), &cells).unwrap();
        let step = |batch| results.step(WORKS[0], batch, ONE_CORE, Side::Paceline).unwrap();
        assert_eq!(step(8), Step { median: 5.0, least: 0.1, most: 9.0, measured: true });
        let far = step(128);
        assert!(!far.measured && far.median > step(32).median, "{far:?}");
        assert!(results.step(WORKS[1], 128, ONE_CORE, Side::Paceline).unwrap().measured);
        assert_eq!(results.speedup(WORKS[0], 8, ONE_CORE), Some(1.0));
        assert_eq!(results.speedup(WORKS[0], 8, "nothing"), None);
    }
}
