//! Fine-tuning from a weights file: `cargo run --release --example fine_tune [RUNS]`
//!
//! A small network first learns ten classes of `shapes`. Its weights then start a second run on other data with another
//! number of classes: every layer is taken over but the last, which starts anew. The file could as well be torchvision's.

use std::path::PathBuf;

use paceline::prelude::*;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let runs = PathBuf::from(std::env::args().nth(1).unwrap_or_else(|| "runs/fine-tune".into()));
    let (first, second) = (runs.join("first"), runs.join("second"));

    let config = Config { model: "lenet5".into(), data: "shapes".into(), max_steps: Some(60), ..Config::default() };
    let mut teacher = Trainer::start(config.clone(), Surroundings::default(), Some(first.clone()))?;
    println!("{} steps on {}", teacher.run()?.step, config.data);

    let config = Config {
        data: "synthetic:32x32x3/4/256".into(),
        // A run's folder stands for its best checkpoint; a .safetensors file works too.
        weights: Some(first.display().to_string()),
        weights_except: vec!["fc3".into()],
        learning_rate: LearningRate::constant(0.0005),
        epochs: 3,
        ..config
    };
    let mut pupil = Trainer::start(config.clone(), Surroundings::default(), Some(second))?;
    let taken_over = pupil.replica().store().parameter(0) == teacher.replica().store().parameter(0);
    println!("the first layer is {}", if taken_over { "taken over" } else { "new" });
    println!("{} steps on {}", pupil.run()?.step, config.data);
    Ok(())
}
