//! A model and data of one's own, trained by two processes: `cargo run --release --example together`

use paceline::prelude::*;

/// A convolution, then one layer for the classes. Parameters get the names said here.
fn model(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let x = net.conv("conv", x, Conv::new(8, 3).pad(1))?;
    let x = net.batch_norm("norm", x)?;
    let x = net.relu(x)?;
    let x = net.flatten(x)?;
    net.linear("fc", x, classes)
}

/// Grey images of 8×8 pixels, striped across or down at one of four phases, and which of both they are.
fn stripes(count: usize) -> (Vec<u8>, Vec<usize>) {
    let line = |image: usize, pixel: usize| [pixel / 8, pixel % 8][image % 2] + image / 2;
    let pixels = (0..count * 64).map(|at| if line(at / 64, at % 64) & 2 == 0 { 20 + (at % 97) as u8 } else { 230 });
    (pixels.collect(), (0..count).map(|image| image % 2).collect())
}

fn main() -> Result<(), TrainError> {
    let config = Config { model: "mine".into(), data: "stripes".into(), workers: 2, epochs: 2, ..Config::default() };
    let data = OwnData::images([8, 8, 1], stripes(1024), stripes(256)).class_names(["across", "down"]);
    let trained = Run::new(config).model("mine", model).data("stripes", data).train()?;
    println!("{:.1}% after {} steps", 100.0 * trained.accuracy(), trained.outcome().step);
    Ok(())
}
