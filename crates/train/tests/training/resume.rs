//! A run that was stopped and resumed has the same bits as one that never was.

use paceline_nn::optim::Optimizer;
use paceline_system::signal::Stop;
use paceline_train::{Config, Reason, Trainer};

use crate::{around, bits, config, curves, resume, small, stop_at, train};

/// Trains straight through, then with a stop after each of `stops`, and compares all that is carried between steps.
fn check(config: Config, stops: &[u64]) {
    let folder = tempfile::tempdir().unwrap();
    let (straight, stopped) = (folder.path().join("straight"), folder.path().join("stopped"));
    let (expected, ended) = train(config.clone(), &straight).unwrap();
    for (index, &step) in stops.iter().enumerate() {
        let (stop, config) = (Stop::new(), config.clone());
        let mut trainer = match index {
            0 => Trainer::start_with(&small, config, around(&stop), Some(stopped.clone())).unwrap(),
            _ => Trainer::resume_with(&small, stopped.clone(), around(&stop), |_| {}).unwrap(),
        };
        stop_at(&mut trainer, &stop, step);
        let outcome = trainer.run().unwrap();
        assert_eq!((outcome.reason, outcome.step), (Reason::Interrupted, step));
    }
    let (resumed, outcome) = resume(&stopped).unwrap();
    assert_eq!((outcome.reason, outcome.step), (ended.reason, ended.step));
    assert_eq!(outcome.evaluation, ended.evaluation);
    assert!(bits(resumed.replica()) == bits(expected.replica()), "stopped at {stops:?}");
    assert_eq!(curves(&stopped), curves(&straight), "stopped at {stops:?}");
    let file = |run: &std::path::Path, name: &str| {
        std::fs::read(run.join(format!("checkpoints/step-{:08}", outcome.step)).join(name)).unwrap()
    };
    assert!(file(&stopped, "weights.safetensors") == file(&straight, "weights.safetensors"));
}

#[test]
fn a_stop_inside_an_epoch_changes_no_bit() {
    let mut config = Config { data: "shapes".into(), accumulate: 2, max_steps: Some(9), ..config() };
    config.hyper_parameters.weight_decay = Some(1e-3);
    check(config, &[4]);
}

#[test]
fn many_stops_change_no_bit() {
    check(config(), &[1, 2, 5, 7]);
}

#[test]
fn a_stop_at_an_epochs_end_is_resumed_with_its_evaluation() {
    check(config(), &[3]);
    check(config(), &[6, 9]);
}

#[test]
fn a_stop_at_the_very_last_step_leaves_only_the_evaluation() {
    check(config(), &[12]);
}

#[test]
fn every_optimizer_resumes_with_the_same_bits() {
    for optimizer in Optimizer::ALL {
        let mut config = Config { optimizer, clip_norm: Some(0.5), ..config() };
        config.learning_rate.base = 0.01;
        check(config, &[5]);
    }
}

#[test]
fn a_run_longer_than_planned_goes_on_where_it_ended() {
    let folder = tempfile::tempdir().unwrap();
    let (long, short) = (folder.path().join("long"), folder.path().join("short"));
    let (expected, _) = train(config(), &long).unwrap();
    train(Config { epochs: 2, ..config() }, &short).unwrap();
    let done = resume(&short).err().unwrap();
    assert!(done.is_refusal() && done.to_string().contains("--epochs"), "{done}");
    let around = around(&Stop::new());
    let mut trainer = Trainer::resume_with(&small, short.clone(), around, |config| config.epochs = 4).unwrap();
    assert_eq!(trainer.run().unwrap().step, 12);
    assert!(bits(trainer.replica()) == bits(expected.replica()));
}

#[test]
fn what_would_move_the_ground_under_a_checkpoint_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    train(Config { epochs: 1, ..config() }, folder.path()).unwrap();
    type Change = (&'static str, fn(&mut Config));
    let changes: [Change; 4] = [
        ("--batch", |config| config.batch = 8),
        ("--seed", |config| config.seed += 1),
        ("--optimizer", |config| config.optimizer = Optimizer::Lars),
        ("--data", |config| config.data = "synthetic:8x8x3/4/96".into()),
    ];
    let before = std::fs::read(folder.path().join("config.toml")).unwrap();
    for (flag, change) in changes {
        let changed = Trainer::resume_with(&small, folder.path().to_owned(), around(&Stop::new()), |config| {
            config.epochs = 9;
            change(config);
        });
        let error = changed.err().unwrap();
        assert!(error.is_refusal() && error.to_string().starts_with(flag), "{error}");
    }
    assert_eq!(std::fs::read(folder.path().join("config.toml")).unwrap(), before);
}

#[test]
fn weights_that_a_run_started_from_may_be_gone_when_it_is_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("first"), folder.path().join("second"));
    train(Config { epochs: 1, ..config() }, &first).unwrap();
    let weights = Some(first.display().to_string());
    train(Config { epochs: 1, weights, ..config() }, &second).unwrap();
    std::fs::remove_dir_all(&first).unwrap();
    Trainer::resume_with(&small, second, around(&Stop::new()), |config| config.epochs = 2).unwrap().run().unwrap();
}
