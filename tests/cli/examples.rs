//! The examples run. Cargo builds them beside this test's own binary whenever it builds all of the package's tests.

use std::path::PathBuf;
use std::process::Command;

use crate::place::{Place, skip, text};

/// Runs an example in a place and gives what it printed; none where cargo was told to build this test alone.
fn run(place: &Place, name: &str, arguments: &[&str]) -> Option<String> {
    let binary = PathBuf::from(env!("CARGO_BIN_EXE_paceline")).with_file_name("examples").join(name);
    if !binary.exists() {
        skip(name, "the example is not built; `cargo test` without --test builds it");
        return None;
    }
    let output = Command::new(binary).args(arguments).current_dir(place.path("")).output().unwrap();
    assert!(output.status.success(), "{name}: {}", text(&output.stderr));
    Some(text(&output.stdout))
}

#[test]
fn a_model_of_ones_own_learns() {
    let place = Place::new();
    let Some(said) = run(&place, "custom_model", &["1", "run"]) else { return };
    let accuracy: f64 = said.split('%').next().unwrap().parse().unwrap();
    assert!(accuracy > 20.0 && said.contains("after 125 steps, in run"), "{said}");
    assert!(place.path("run/checkpoints/step-00000125/weights.safetensors").exists());
}

#[test]
fn a_second_run_starts_from_the_first_ones_weights() {
    let place = Place::new();
    let Some(said) = run(&place, "fine_tune", &["runs"]) else { return };
    assert!(said.contains("the first layer is taken over"), "{said}");
    assert!(place.read_text("runs/second/config.toml").contains("weights-except = [\"fc3\"]"));
}

#[test]
fn threads_without_locks_learn_what_one_learns() {
    let place = Place::new();
    let Some(said) = run(&place, "hogwild", &["4000", "100000", "8"]) else { return };
    let after = |line: &str, word: &str| -> f64 {
        let words = line.split(word).nth(1).and_then(|rest| rest.split([',', '%']).next());
        words.and_then(|number| number.trim().parse().ok()).unwrap_or_else(|| panic!("{line}"))
    };
    let lines: Vec<&str> = said.lines().filter(|line| line.starts_with("threads ")).collect();
    let [one, two] = [lines[0], lines[1]].map(|line| after(line, "loss "));
    assert!(two < 0.5 && (two / one - 1.0).abs() < 0.05, "{said}");
    assert!(said.contains("32000 updates") && said.contains("times as fast"), "{said}");
}

#[test]
fn heat_spreads_over_ranks_as_it_does_on_one() {
    let place = Place::new();
    for ranks in ["2", "3"] {
        let Some(said) = run(&place, "stencil", &["40", "30", "60", ranks]) else { return };
        assert!(said.contains(&format!("60 steps by {ranks} ranks: mean ")), "{said}");
        assert!(said.contains("the same bits as by one rank"), "{said}");
    }
}
