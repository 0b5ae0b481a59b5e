//! The command line of Paceline with models and data of one's own: `cargo run -- train --model striped --data stripes --workers 2`
//!
//! Every command knows them by name: `models`, `data inspect stripes`, `plan --model striped`, `train`, `evaluate RUN`, `predict RUN IMAGE`,
//! `export RUN --onnx FILE`.

use std::process::ExitCode;

use paceline::prelude::*;

/// A convolution and a batch-norm, then one layer for the classes.
fn striped(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let x = net.conv("conv", x, Conv::new(8, 3).pad(1))?;
    let x = net.batch_norm("norm", x)?;
    let x = net.relu(x)?;
    let x = net.flatten(x)?;
    net.linear("fc", x, classes)
}

/// A layer between the samples and the classes, for samples of any size.
fn plain(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let x = net.flatten(x)?;
    let x = net.linear("hidden", x, 16)?;
    let x = net.relu(x)?;
    net.linear("fc", x, classes)
}

/// Grey images of 8×8 pixels, striped across or down at one of four phases, and which of both they are.
fn stripes(count: usize) -> (Vec<u8>, Vec<usize>) {
    let line = |image: usize, pixel: usize| [pixel / 8, pixel % 8][image % 2] + image / 2;
    let pixels = (0..count * 64).map(|at| if line(at / 64, at % 64) & 2 == 0 { 20 + (at % 97) as u8 } else { 230 });
    (pixels.collect(), (0..count).map(|image| image % 2).collect())
}

/// Points of the plane, and whether they are inside a circle. They are made when they are asked for.
struct Points(usize);

impl Samples for Points {
    fn len(&self) -> usize {
        self.0
    }

    fn sample(&self, index: usize) -> Sample<'_> {
        // Two sequences that fill the square evenly.
        let [x, y] = [0.618_034, 0.754_878].map(|step| 2.0 * (index as f32 * step).fract() - 1.0);
        Sample::Values { values: vec![x, y].into(), label: usize::from(x * x + y * y < 0.5) }
    }
}

fn main() -> ExitCode {
    let input = Input::Image { size: [8, 8], channels: 1 };
    let listing = Listing { input, classes: 2, summary: "tells stripes apart".into() };
    let stripes =
        OwnData::images([8, 8, 1], stripes(512), stripes(128)).class_names(["across", "down"]).augment(1, false);
    let kind = SampleKind::Image { height: 1, width: 2, channels: 1 };
    let points = OwnData::new(kind, 2, Points(512), Points(100)).class_names(["outside", "inside"]);
    let count = |length: i32| (0..length).map(|token| token % 5).collect();
    let registry = Registry::new()
        .listed_model("striped", striped, listing)
        .model("plain", plain)
        .data("stripes", stripes)
        .data("points", points)
        .data("counting", OwnData::tokens(8, 5, count(400), count(100)));
    paceline::cli::run_with(&registry)
}
