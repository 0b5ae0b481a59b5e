//! A model of one's own, trained on the built-in `shapes`: `cargo run --release --example custom_model [EPOCHS] [RUN]`

use paceline::prelude::*;

/// Three convolutions, each on an image half as large, then one layer for the classes. Parameters get the names said here.
fn model(net: &mut Net, mut x: Value, classes: usize) -> Result<Value, GraphError> {
    for (stage, channels) in [16, 32, 64].into_iter().enumerate() {
        x = net.conv(&format!("conv{stage}"), x, Conv::new(channels, 3).pad(1))?;
        x = net.batch_norm(&format!("norm{stage}"), x)?;
        x = net.relu(x)?;
        x = net.max_pool(x, Window::new(2))?;
    }
    let x = net.flatten(x)?;
    net.linear("fc", x, classes)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let epochs = arguments.next().map_or(Ok(5), |text| text.parse())?;
    let learning_rate = LearningRate::constant(0.01);
    let config = Config { model: "mine".into(), data: "shapes".into(), epochs, learning_rate, ..Config::default() };
    let mut trainer = Trainer::start_with(&model, config, Surroundings::default(), arguments.next().map(Into::into))?;
    let outcome = trainer.run()?;
    let accuracy = outcome.evaluation.map_or(0.0, |tally| tally.accuracy());
    println!("{:.1}% after {} steps, in {}", 100.0 * accuracy, outcome.step, outcome.run.display());
    Ok(())
}
