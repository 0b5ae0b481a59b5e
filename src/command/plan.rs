//! `paceline plan`: what a step will do, before it does.

use std::process::ExitCode;

use paceline::nn::zoo::{self, Entry};
use paceline::nn::{Input, Mode, Network};
use paceline::tensor::Plan as Planned;
use paceline::train::config::SIDE_MAX;
use paceline::train::replica;
use serde_json::json;

use super::{Outcome, print};
use crate::cli::Plan;
use crate::failure::Failure;

/// Runs the command.
pub fn run(arguments: &Plan) -> Outcome {
    let entry = zoo::find(&arguments.model).map_err(Failure::refused)?;
    let (input, batch) = (input(entry, arguments.size)?, arguments.batch);
    let mode = if arguments.eval { Mode::Eval } else { Mode::Train };
    let network = Network::new(entry, mode, batch, input, arguments.classes.unwrap_or(entry.classes), 0.0)?;
    let wanted = replica::wanted(&network, replica::early(false));
    let report = Planned::new(network.graph, &wanted).report();
    if arguments.json {
        let mut value = serde_json::to_value(&report).expect("a report is JSON");
        value["model"] = json!(entry.name);
        value["batch"] = json!(batch);
        print(&format!("{value}\n"));
        return Ok(ExitCode::SUCCESS);
    }
    let text = report.to_string();
    let (summary, nodes) = text.split_once("\nnodes, in order").unwrap_or((&text, ""));
    print(&format!("model            {} at {}, batch {batch}\n{summary}", entry.name, describe(input)));
    if arguments.nodes {
        print(&format!("\nnodes, in order{nodes}"));
    } else {
        print(&format!("\n{} nodes (--nodes lists them)\n", report.nodes.len()));
    }
    Ok(ExitCode::SUCCESS)
}

/// A model's input at a size asked for.
pub fn input(entry: &Entry, size: Option<usize>) -> Result<Input, Failure> {
    let Some(size) = size else { return Ok(entry.native) };
    if size > SIDE_MAX {
        return Err(Failure::refused(format!("--size {size} is too large; type --size with at most {SIDE_MAX}")));
    }
    match entry.native {
        Input::Tokens { .. } => Ok(Input::Tokens { sequence: size }),
        Input::Image { channels, .. } if size >= entry.smallest => Ok(Input::Image { size: [size, size], channels }),
        Input::Image { .. } => {
            let (name, smallest) = (entry.name, entry.smallest);
            Err(Failure::refused(format!(
                "{name} needs images of at least {smallest}×{smallest}; type --size {smallest} or more"
            )))
        }
    }
}

/// An input in words.
pub fn describe(input: Input) -> String {
    match input {
        Input::Image { size: [height, width], channels } => format!("{width}×{height}×{channels}"),
        Input::Tokens { sequence } => format!("{sequence} tokens"),
    }
}
