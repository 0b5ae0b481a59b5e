//! `paceline evaluate`: a trained model on the validation set.

use std::path::Path;
use std::process::ExitCode;

use crate::system::printable::printable;
use crate::train::Registry;
use crate::train::checkpoint::find_weights;
use crate::train::evaluate::evaluate;
use crate::train::run::read_config;
use crate::train::trainer::prepare_evaluation;
use serde_json::json;

use super::calibrate::{Calibrate, calibrate};
use super::{Outcome, print, print_json, surroundings};
use crate::arguments::Evaluate;
use crate::failure::Failure;

/// Runs the command.
pub fn run(arguments: &Evaluate, registry: &Registry) -> Outcome {
    let around = surroundings(registry);
    let weights = find_weights(&around.disk, &arguments.run)?;
    // RUN/checkpoints/step-N/weights.safetensors: the run's configuration stands three folders up.
    let run = weights.ancestors().find(|folder| around.disk.exists(&folder.join("config.toml")));
    let run = run.unwrap_or_else(|| Path::new(&arguments.run));
    let mut config = read_config(&around.disk, run)?;
    if let Some(data) = &arguments.data {
        config.data.clone_from(data);
    }
    config.dtype = arguments.dtype.unwrap_or(config.dtype);
    config.device = arguments.device.unwrap_or(config.device);
    let mut examined = prepare_evaluation(&weights, &config, &around)?;
    // As in training, so that the numbers are those of the run's own evaluation.
    calibrate(examined.replica.device(), examined.replica.plans(), Calibrate::Known);
    let start = around.clock.seconds();
    config.evaluate_mirrored |= arguments.mirrored;
    let tally = evaluate(&mut examined.replica, &mut examined.val, config.evaluate_mirrored, |_, _| true);
    let tally = tally.map_err(|error| Failure::from(error).after_start())?;
    let seconds = around.clock.seconds() - start;
    if tally.rows == 0 {
        return Err(Failure::refused("the validation set is empty"));
    }
    if arguments.json {
        let value = json!({
            "weights": weights.to_string_lossy(), "data": config.data, "dtype": config.dtype, "samples": tally.rows, "loss": tally.mean_loss(),
            "top1": tally.accuracy(), "top5": tally.top5_accuracy(), "seconds": seconds,
        });
        print_json(&value);
    } else {
        let (top1, top5) = (100.0 * tally.accuracy(), 100.0 * tally.top5_accuracy());
        let (rows, loss) = (tally.rows, tally.mean_loss());
        print(&format!(
            "{} on {}: top-1 {top1:.2}%, top-5 {top5:.2}%, loss {loss:.4} over {rows} samples, {seconds:.1} s\n",
            printable(&config.model),
            printable(&config.data)
        ));
    }
    Ok(ExitCode::SUCCESS)
}
