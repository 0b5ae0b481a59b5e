//! Runs whose activations are bf16: they learn as f32 does, repeat themselves bit for bit, and share checkpoints with f32.

use paceline_nn::optim::Optimizer;
use paceline_nn::schedule::LearningRate;
use paceline_system::event::Event;
use paceline_system::signal::Stop;
use paceline_tensor::Precision;
use paceline_train::trainer::Surroundings;
use paceline_train::{Config, Reason, Trainer};

use crate::{around, bits, config, events, resume, small, stop_at, train};

fn narrow() -> Config {
    Config { dtype: Precision::Bf16, ..config() }
}

#[test]
#[ignore = "cargo x ci: training"]
fn bf16_learns_what_f32_learns() {
    let folder = tempfile::tempdir().unwrap();
    let accuracy = |dtype: Precision| {
        let config = Config { epochs: 3, dtype, ..Config::default() };
        let run = folder.path().join(dtype.to_string());
        let outcome = Trainer::start(config, Surroundings::default(), Some(run)).unwrap().run().unwrap();
        outcome.evaluation.unwrap().accuracy()
    };
    let [full, narrow] = Precision::ALL.map(accuracy);
    assert!(full > 0.95 && (full - narrow).abs() < 0.015, "{narrow} instead of {full}");
}

#[test]
fn bf16_gives_the_same_bits_on_any_number_of_threads_and_others_than_f32() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, config: Config| bits(train(config, &folder.path().join(name)).unwrap().0.replica());
    let one = run("one", Config { threads: Some(1), ..narrow() });
    assert!(run("three", Config { threads: Some(3), ..narrow() }) == one);
    assert!(run("f32", config()) != one);
}

#[test]
fn a_stopped_bf16_run_resumes_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let (straight, stopped) = (folder.path().join("straight"), folder.path().join("stopped"));
    let (expected, _) = train(narrow(), &straight).unwrap();
    let stop = Stop::new();
    let mut trainer = Trainer::start_with(&small, narrow(), around(&stop), Some(stopped.clone())).unwrap();
    stop_at(&mut trainer, &stop, 5);
    assert_eq!(trainer.run().unwrap().reason, Reason::Interrupted);
    drop(trainer);
    assert!(bits(resume(&stopped).unwrap().0.replica()) == bits(expected.replica()));
}

#[test]
fn a_run_goes_on_in_the_other_type_and_says_so() {
    for [first, second] in [[Precision::F32, Precision::Bf16], [Precision::Bf16, Precision::F32]] {
        let folder = tempfile::tempdir().unwrap();
        train(Config { epochs: 2, dtype: first, ..config() }, folder.path()).unwrap();
        let mut trainer = Trainer::resume_with(&small, folder.path().to_owned(), around(&Stop::new()), |config| {
            (config.epochs, config.dtype) = (4, second);
        })
        .unwrap();
        assert_eq!(trainer.run().unwrap().step, 12);
        let note = format!("activations are {second} from here on, and were {first}");
        let said = |event: &Event| matches!(event, Event::Warning { message } if *message == note);
        assert!(events(folder.path()).iter().any(said), "{note}");
    }
}

#[test]
fn a_number_that_is_none_is_found_in_bf16_too() {
    let folder = tempfile::tempdir().unwrap();
    let learning_rate = LearningRate::constant(1e38);
    let config = Config { optimizer: Optimizer::Sgd, learning_rate, ..narrow() };
    let error = train(config, folder.path()).err().unwrap().to_string();
    assert!(["conv", "norm", "fc"].iter().any(|layer| error.contains(layer)), "{error}");
}
