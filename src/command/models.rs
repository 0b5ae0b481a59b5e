//! `paceline models`: the zoo as a table.

use std::process::ExitCode;

use crate::nn::{Input, Mode, Network};
use crate::train::Registry;
use serde_json::json;

use super::{Outcome, grouped, print, print_json};
use crate::arguments::Models;

/// Runs the command.
pub fn run(arguments: &Models, registry: &Registry) -> Outcome {
    let mut rows = Vec::new();
    let mut text = format!(
        "{:<18} {:>12} {:>12} {:>8} {:>9} {:>9}  {}\n",
        "name", "parameters", "statistics", "GMACs", "native", "smallest", ""
    );
    for entry in registry.models().all() {
        let network = Network::new(&entry, Mode::Eval, 1, entry.native, entry.classes, 0.0)?;
        let (parameters, statistics) = (network.parameter_count() as u64, network.state_count() as u64);
        let gmacs = network.graph.macs() as f64 / 1e9;
        let native = match entry.native {
            Input::Image { size: [height, width], .. } => format!("{width}×{height}"),
            Input::Tokens { sequence } => format!("{sequence} tok"),
        };
        text += &format!(
            "{:<18} {:>12} {:>12} {gmacs:>8.3} {native:>9} {:>9}  {}\n",
            entry.name,
            grouped(parameters),
            grouped(statistics),
            entry.smallest,
            entry.summary
        );
        rows.push(json!({
            "name": entry.name, "family": entry.family, "parameters": parameters, "statistics": statistics,
            "gmacs": gmacs, "native": native, "smallest": entry.smallest, "classes": entry.classes, "summary": entry.summary,
        }));
    }
    if arguments.json {
        print_json(&rows);
    } else {
        print(&text);
        print(
            "\nParameters are trained, statistics are kept beside them; both at the published number of classes.\nImages smaller than `smallest` are resized up to it.\n",
        );
    }
    Ok(ExitCode::SUCCESS)
}
