//! Training as a library user sees it: runs of a small model of one's own, stopped, resumed, starved of disk.

mod full_disk;
mod mixed;
mod resume;
mod runs;
mod same_arithmetic;
mod tiles;
mod updates;

use std::path::Path;

use paceline_nn::layer::{Conv, Window};
use paceline_nn::optim::Optimizer;
use paceline_nn::schedule::LearningRate;
use paceline_nn::{Net, weights};
use paceline_system::disk::Disk;
use paceline_system::event::{Event, Line};
use paceline_system::signal::Stop;
use paceline_tensor::{GraphError, Value};
use paceline_train::replica::Replica;
use paceline_train::trainer::Surroundings;
use paceline_train::{Config, Outcome, TrainError, Trainer};

/// Everything that keeps state between steps, in few parameters: batch statistics and dropout.
fn small(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let x = net.conv("conv", x, Conv::new(4, 3).pad(1))?;
    let x = net.batch_norm("norm", x)?;
    let x = net.relu(x)?;
    let x = net.max_pool(x, Window::new(2))?;
    let x = net.flatten(x)?;
    let x = net.dropout(x, 0.3)?;
    net.linear("fc", x, classes)
}

/// Four epochs of three steps on random images.
fn config() -> Config {
    Config {
        model: "small".into(),
        data: "synthetic:8x8x3/4/48".into(),
        batch: 16,
        epochs: 4,
        optimizer: Optimizer::Nesterov,
        learning_rate: LearningRate::constant(0.05),
        threads: Some(2),
        ..Config::default()
    }
}

fn around(stop: &Stop) -> Surroundings {
    Surroundings { stop: stop.clone(), ..Surroundings::default() }
}

/// Asks for a stop once `step` is done.
fn stop_at(trainer: &mut Trainer, stop: &Stop, step: u64) {
    let stop = stop.clone();
    trainer.observe(Box::new(move |line| {
        if matches!(line.event, Event::Step { step: done, .. } if done == step) {
            stop.request();
        }
        Ok(())
    }));
}

/// A whole run in a new folder.
fn train(config: Config, run: &Path) -> Result<(Trainer, Outcome), TrainError> {
    let mut trainer = Trainer::start_with(&small, config, Surroundings::default(), Some(run.to_owned()))?;
    let outcome = trainer.run()?;
    Ok((trainer, outcome))
}

/// Continues a run to its end.
fn resume(run: &Path) -> Result<(Trainer, Outcome), TrainError> {
    let mut trainer = Trainer::resume_with(&small, run.to_owned(), Surroundings::default(), |_| {})?;
    let outcome = trainer.run()?;
    Ok((trainer, outcome))
}

/// All that a run carries from step to step, as bits: weights, running statistics, optimizer state.
fn bits(replica: &Replica) -> Vec<u32> {
    let store = &replica.store();
    let optimizer = replica.engine.weights().optimizer.iter().flat_map(|slot| slot.iter());
    store.parameters.iter().chain(store.states.iter()).chain(optimizer).map(|x| x.to_bits()).collect()
}

/// The events of a run, in order.
fn events(run: &Path) -> Vec<Event> {
    let text = Disk::real().read_text(&run.join("events/rank-0.jsonl")).unwrap();
    // JSON has no NaN: a loss that is none is written as null.
    let line =
        |line: &str| serde_json::from_str::<Line>(&line.replace("\"loss\":null", "\"loss\":-1.0")).unwrap().event;
    text.lines().map(line).collect()
}

/// The training loss, accuracy and validation loss of every epoch.
fn curves(run: &Path) -> Vec<(u64, f64, f64, Option<f64>)> {
    let epoch = |event| match event {
        Event::Epoch { epoch, train_loss, train_accuracy, val_loss, .. } => {
            Some((epoch, train_loss, train_accuracy, val_loss))
        }
        _ => None,
    };
    events(run).into_iter().filter_map(epoch).collect()
}

/// The metadata of a file that is a weights file.
fn is_weights_file(path: &Path) -> bool {
    weights::read_metadata(&Disk::real(), path).is_ok()
}
