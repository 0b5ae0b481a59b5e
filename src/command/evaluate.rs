//! `paceline evaluate`: a trained model on the validation set.

use std::path::Path;
use std::process::ExitCode;

use paceline::train::checkpoint::{find_weights, load_weights};
use paceline::train::evaluate::evaluate;
use paceline::train::run::RunDir;
use paceline::train::trainer::prepare;
use serde_json::json;

use super::{Outcome, print, surroundings};
use crate::cli::Evaluate;
use crate::failure::Failure;

/// Runs the command.
pub fn run(arguments: &Evaluate) -> Outcome {
    let around = surroundings();
    let weights = find_weights(&around.disk, &arguments.run)?;
    // RUN/checkpoints/step-N/weights.safetensors: the run's configuration stands three folders up.
    let run = weights.ancestors().find(|folder| around.disk.exists(&folder.join("config.toml")));
    let run = run.unwrap_or_else(|| Path::new(&arguments.run));
    let (_, mut config) = RunDir::open(&around.disk, run)?;
    if let Some(data) = &arguments.data {
        config.data.clone_from(data);
    }
    config.weights = None;
    let mut prepared = prepare(&config, &around)?;
    load_weights(&around.disk, &weights, &mut prepared.replica, &[])?;
    let start = around.clock.seconds();
    let tally = evaluate(&mut prepared.replica, &mut prepared.val, |_, _| true)?;
    let seconds = around.clock.seconds() - start;
    if tally.rows == 0 {
        return Err(Failure::refused("the validation set is empty"));
    }
    if arguments.json {
        let value = json!({
            "weights": weights, "data": config.data, "samples": tally.rows, "loss": tally.mean_loss(),
            "top1": tally.accuracy(), "top5": tally.top5_accuracy(), "seconds": seconds,
        });
        print(&format!("{value}\n"));
    } else {
        let (top1, top5) = (100.0 * tally.accuracy(), 100.0 * tally.top5_accuracy());
        let (rows, loss) = (tally.rows, tally.mean_loss());
        print(&format!(
            "{} on {}: top-1 {top1:.2}%, top-5 {top5:.2}%, loss {loss:.4} over {rows} samples, {seconds:.1} s\n",
            config.model, config.data
        ));
    }
    Ok(ExitCode::SUCCESS)
}
