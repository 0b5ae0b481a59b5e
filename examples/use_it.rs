//! What follows training: `cargo run --release --example use_it [WORKERS] [STEPS]`
//!
//! A model is trained, asked about pixels and numbers, and written as weights and as ONNX.

use paceline::prelude::*;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let workers = arguments.next().map_or(Ok(1), |text| text.parse())?;
    let max_steps = Some(arguments.next().map_or(Ok(40), |text| text.parse())?);
    let (model, data) = ("lenet5".to_owned(), "shapes".to_owned());
    let config = Config { model, data, workers, epochs: 1000, max_steps, evaluate_every: 1000, ..Config::default() };
    let trained = Run::new(config).folder("runs/shapes").quiet().train()?;

    let mut predictor = trained.predictor()?;
    let grey = Pixels { height: 48, width: 64, channels: 3, data: vec![128; 48 * 64 * 3] };
    for guess in predictor.predict_pixels(&grey, 2)? {
        println!("a grey picture: {} ({:.1}%)", guess.name, 100.0 * guess.probability);
    }
    let same = predictor.predict_values(&[128.0 / 255.0; 32 * 32 * 3], 1)?;
    println!("the same as numbers: {}", same[0].name);

    trained.save_weights("shapes.safetensors")?;
    trained.export_onnx("shapes.onnx")?;
    println!("{} steps in {}", trained.outcome().step, trained.folder().display());
    Ok(())
}
