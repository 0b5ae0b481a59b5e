//! `paceline predict`: best guesses for image files.

use std::process::ExitCode;

use crate::system::disk::Disk;
use crate::system::printable::{Shown, printable};
use crate::system::threads;
use crate::tensor::device::cuda::Options;
use crate::tensor::device::cuda::kept::Kept;
use crate::train::Registry;
use crate::train::checkpoint::find_weights;
use crate::train::compute::Compute;
use crate::train::predict::{Predictor, PredictorOptions};
use serde_json::json;

use super::calibrate::folder;
use super::{Outcome, print, print_json};
use crate::arguments::Predict;
use crate::failure::Failure;

/// Runs the command.
pub fn run(arguments: &Predict, registry: &Registry) -> Outcome {
    let disk = Disk::real();
    let weights = find_weights(&disk, &arguments.run)?;
    let gpu = match arguments.device {
        Compute::Cpu => None,
        Compute::Cuda(number) => {
            let options = Options { tune: false, ..Options::default() };
            Some(Kept::open(&disk, folder().as_deref(), number.unwrap_or(0), options).map_err(Failure::refused)?)
        }
    };
    let (threads, cuda, precision) = (threads::available(), gpu.as_ref().map(|gpu| &gpu.cuda), arguments.dtype);
    let mut predictor = Predictor::open(&disk, &weights, &PredictorOptions { registry, threads, cuda, precision })?;
    for image in &arguments.images {
        let guesses = predictor.predict(&disk, image, arguments.top)?;
        if arguments.json {
            let guesses: Vec<_> = guesses
                .iter()
                .map(|guess| json!({"class": guess.class, "name": guess.name, "probability": guess.probability}))
                .collect();
            print_json(&json!({"image": image.to_string_lossy(), "guesses": guesses}));
        } else {
            print(&format!("{}\n", Shown(image)));
            for guess in guesses {
                print(&format!("  {:>6.2}%  {}\n", 100.0 * guess.probability, printable(&guess.name)));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
