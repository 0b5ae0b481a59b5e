//! A model of one's own, trained on the built-in `shapes`: `cargo run --release --example custom_model [EPOCHS] [RUN]`

use paceline::prelude::*;

/// Two convolutions, a mean over the image, and a layer for the classes. Parameters are named by the words given here.
fn model(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let x = net.conv("conv1", x, Conv::new(16, 3).pad(1))?;
    let x = net.relu(x)?;
    let x = net.max_pool(x, Window::new(2))?;
    let x = net.conv("conv2", x, Conv::new(32, 3).pad(1))?;
    let x = net.batch_norm("norm2", x)?;
    let x = net.relu(x)?;
    let x = net.global_average_pool(x)?;
    net.linear("fc", x, classes)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let epochs = arguments.next().map_or(Ok(5), |text| text.parse())?;
    let config = Config { model: "mine".into(), data: "shapes".into(), epochs, ..Config::default() };
    let mut trainer = Trainer::start_with(&model, config, Surroundings::default(), arguments.next().map(Into::into))?;
    let outcome = trainer.run()?;
    let accuracy = outcome.evaluation.map_or(0.0, |tally| tally.accuracy());
    println!("{:.1}% after {} steps, in {}", 100.0 * accuracy, outcome.step, outcome.run.display());
    Ok(())
}
