//! The ways a run ends, and what it leaves: limits, checkpoints kept, numbers that are none, weights to start from.

use std::path::Path;
use std::time::Duration;

use paceline_nn::optim::Optimizer;
use paceline_system::clock::Clock;
use paceline_system::event::Event;
use paceline_system::phase::Phase;
use paceline_train::trainer::Surroundings;
use paceline_train::{Config, Reason, TrainError, Trainer};

use crate::{bits, config, events, small, train};

fn steps_kept(run: &Path) -> Vec<String> {
    let names = std::fs::read_dir(run.join("checkpoints")).unwrap();
    let mut names: Vec<String> = names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_limit_on_steps_ends_the_run_with_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let (_, outcome) = train(Config { max_steps: Some(5), ..config() }, folder.path()).unwrap();
    assert_eq!((outcome.reason, outcome.step), (Reason::MaxSteps, 5));
    assert!(steps_kept(folder.path()).contains(&"step-00000005".into()));
}

#[test]
fn a_limit_on_time_ends_the_run_with_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let clock = Clock::manual();
    let around = Surroundings { clock: clock.clone(), ..Surroundings::default() };
    let config = Config { time_limit_s: Some(10.0), ..config() };
    let mut trainer = Trainer::start_with(&small, config, around, Some(folder.path().to_owned())).unwrap();
    trainer.observe(Box::new(move |line| {
        if matches!(line.event, Event::Step { .. }) {
            clock.advance(Duration::from_secs(3));
        }
        Ok(())
    }));
    let outcome = trainer.run().unwrap();
    assert_eq!((outcome.reason, outcome.step), (Reason::TimeLimit, 4));
}

#[test]
fn a_run_that_no_longer_improves_stops_early() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = Config { epochs: 50, early_stop: Some(3), ..config() };
    config.learning_rate.base = 1e-9;
    let (_, outcome) = train(config, folder.path()).unwrap();
    assert_eq!((outcome.reason, outcome.step), (Reason::EarlyStop, 12));
}

#[test]
fn the_last_checkpoints_and_the_best_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    // Nothing is learnt, so the first epoch stays the best.
    let mut config = Config { keep: 2, ..config() };
    config.learning_rate.base = 1e-9;
    train(config, folder.path()).unwrap();
    assert_eq!(steps_kept(folder.path()), ["best.txt", "step-00000003", "step-00000009", "step-00000012"]);
}

#[test]
fn epochs_between_evaluations_are_neither_evaluated_nor_saved() {
    let folder = tempfile::tempdir().unwrap();
    let (every, third) = (folder.path().join("every"), folder.path().join("third"));
    let (expected, _) = train(config(), &every).unwrap();
    let (found, outcome) = train(Config { evaluate_every: 3, ..config() }, &third).unwrap();
    assert!(outcome.evaluation.is_some());
    assert_eq!(bits(found.replica()), bits(expected.replica()), "looking changes nothing");
    let evaluated: Vec<bool> = events(&third)
        .into_iter()
        .filter_map(|event| if let Event::Epoch { val_top1, .. } = event { Some(val_top1.is_some()) } else { None })
        .collect();
    assert_eq!(evaluated, [false, false, true, true]);
    let saved: Vec<u64> = events(&third)
        .into_iter()
        .filter_map(|event| if let Event::Checkpoint { step, .. } = event { Some(step) } else { None })
        .collect();
    assert_eq!(saved, [9, 12]);
}

#[test]
fn clipped_gradients_move_weights_less() {
    let folder = tempfile::tempdir().unwrap();
    let moved = |clip_norm: Option<f64>, name: &str| {
        let config = Config { max_steps: Some(1), optimizer: Optimizer::Sgd, clip_norm, ..config() };
        let path = folder.path().join(name);
        let mut trainer = Trainer::start_with(&small, config, Surroundings::default(), Some(path)).unwrap();
        let before = trainer.replica().store().parameters.to_vec();
        trainer.run().unwrap();
        let after = &trainer.replica().store().parameters;
        before.iter().zip(after.iter()).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt()
    };
    let (free, clipped) = (moved(None, "free"), moved(Some(0.01), "clipped"));
    assert!(free > 0.01 * 0.05, "the gradient was above the norm: {free}");
    assert!((clipped - 0.01 * 0.05).abs() < 1e-6, "a step of 0.01 · 0.05: {clipped}");
}

#[test]
fn a_loss_that_is_no_number_names_step_layer_and_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = Config { optimizer: Optimizer::Sgd, checkpoint_every: Some(1), ..config() };
    config.learning_rate.base = 1e38;
    let error = train(config, folder.path()).err().unwrap();
    assert!(!error.is_refusal(), "{error}");
    let TrainError::NotANumber { step, layer, .. } = &error else { panic!("{error}") };
    assert!(*step >= 1 && ["conv", "norm", "fc"].iter().any(|name| layer.starts_with(name)), "{error}");
    let Some(Event::RunFinished { reason, error: Some(said), .. }) = events(folder.path()).pop() else { panic!() };
    assert_eq!((reason.as_str(), said), ("failed", error.to_string()));
    for name in steps_kept(folder.path()).iter().filter(|name| name.starts_with("step")) {
        assert!(error.to_string().contains(name.as_str()), "{error}");
    }
}

#[test]
fn another_run_starts_from_weights_with_a_new_head() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("first"), folder.path().join("second"));
    let (teacher, _) = train(Config { epochs: 1, ..config() }, &first).unwrap();
    let other = Config { data: "synthetic:8x8x3/7/48".into(), weights: Some(first.display().to_string()), ..config() };
    let start = |config: Config| Trainer::start_with(&small, config, Surroundings::default(), Some(second.clone()));
    let error = start(other.clone()).err().unwrap();
    assert!(error.is_refusal() && error.to_string().contains("--except fc"), "{error}");
    assert!(!second.exists(), "a refused run leaves no folder");
    let pupil = start(Config { weights_except: vec!["fc".into()], ..other }).unwrap();
    assert_eq!(pupil.replica().store().parameter(0), teacher.replica().store().parameter(0));
    assert_eq!(pupil.replica().store().state(0), teacher.replica().store().state(0));
    assert_ne!(bits(pupil.replica()).len(), bits(teacher.replica()).len());
}

#[test]
fn steps_are_logged_one_by_one_with_their_phases() {
    let folder = tempfile::tempdir().unwrap();
    train(config(), folder.path()).unwrap();
    let steps: Vec<u64> = events(folder.path())
        .into_iter()
        .filter_map(|event| match event {
            Event::Step { step, epoch, samples, phases, .. } => {
                assert_eq!((epoch, samples), ((step - 1) / 3, 16));
                assert!(
                    [Phase::Data, Phase::Forward, Phase::Backward, Phase::Update]
                        .iter()
                        .all(|&phase| phases.get(phase).is_some())
                );
                Some(step)
            }
            _ => None,
        })
        .collect();
    assert_eq!(steps, (1..=12).collect::<Vec<u64>>());
}
