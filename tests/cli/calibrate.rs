//! Measured algorithms: measured once, found again, never a reason to fail.

use std::path::PathBuf;

use crate::place::{Place, text};

/// A network of 3×3 convolutions large enough to be measured.
const RUN: &str = "--model resnet20 --data synthetic:32x32x3/10/64 --batch 16 --max-steps 2 --seed 7 --quiet";

fn cache(place: &Place) -> PathBuf {
    let files: Vec<_> = std::fs::read_dir(place.cache()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "one file for one kind of processor: {files:?}");
    files[0].clone()
}

fn convolutions(place: &Place, how: &str) -> Vec<serde_json::Value> {
    let plan = place.json(&format!("plan --model resnet20 --size 32 --batch 16 --classes 10 --calibrate {how} --json"));
    plan["convolutions"].as_array().unwrap().clone()
}

#[test]
fn what_a_run_measures_is_found_again() {
    let place = Place::new();
    assert!(convolutions(&place, "known").iter().all(|pass| pass["measured"] == false), "nothing was measured yet");
    place.run(&format!("train {RUN} --run one"));
    let measured = std::fs::read(cache(&place)).unwrap();
    place.run(&format!("train {RUN} --run two --threads 1"));
    assert!(std::fs::read(cache(&place)).unwrap() == measured, "nothing was measured twice");
    assert!(place.weights("one", 2) == place.weights("two", 2), "the same choices, the same bits");
    let known = convolutions(&place, "known");
    assert!(known.iter().any(|pass| pass["measured"] == true && pass["pass"] == "grad-weight"), "{known:?}");
    assert!(convolutions(&place, "off").iter().all(|pass| pass["measured"] == false));
}

#[test]
fn without_calibration_nothing_is_written() {
    let place = Place::new();
    place.run(&format!("train {RUN} --run one --calibrate off"));
    place.run(&format!("train {RUN} --run two --calibrate known"));
    assert!(!place.cache().exists());
    assert!(place.weights("one", 2) == place.weights("two", 2));
}

#[test]
fn tiles_can_be_forbidden() {
    let place = Place::new();
    let by_tiles = |arguments: &str| {
        let passes = convolutions(&place, &format!("off {arguments}"));
        passes.iter().filter(|pass| pass["algorithm"] == "winograd").count()
    };
    assert!(by_tiles("") > 0 && by_tiles("--dtype bf16") > 0 && by_tiles("--winograd f32") > 0);
    assert_eq!([by_tiles("--winograd f32 --dtype bf16"), by_tiles("--winograd off")], [0, 0]);
    place.run(&format!("train {RUN} --run one --calibrate off"));
    place.run(&format!("train {RUN} --run two --calibrate off --winograd off"));
    assert!(place.weights("one", 2) != place.weights("two", 2), "tiles round in another way");
}

#[test]
fn a_damaged_cache_is_told_and_replaced() {
    let place = Place::new();
    place.run(&format!("train {RUN} --run one"));
    let file = cache(&place);
    let whole = std::fs::read(&file).unwrap();
    std::fs::write(&file, &whole[..whole.len() / 2]).unwrap();
    let output = place.output(&format!("train {RUN} --run two"));
    assert!(output.status.success());
    let wrong = text(&output.stderr);
    assert!(wrong.starts_with("warning: ") && wrong.contains("is not used: it is damaged"), "{wrong}");
    assert!(serde_json::from_slice::<serde_json::Value>(&std::fs::read(&file).unwrap()).is_ok(), "it is whole again");
}

#[test]
fn a_cache_that_cannot_be_written_stops_nothing() {
    let place = Place::new();
    place.write("file", "not a folder");
    let mut command = place.command(&format!("train {RUN} --run run"));
    let output = command.env("PACELINE_CACHE", place.path("file")).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("what was measured is not kept"), "{}", text(&output.stderr));
}

#[test]
fn kernels_are_measured_one_by_one() {
    let place = Place::new();
    let small = "bench kernels --model resnet20 --size 16 --batch 8 --seconds 0.001";
    let said = place.run(small);
    for word in ["GFLOP/s", "grad-weight", "winograd", "3×3 16→16 at 16×16", "product", "in a step: "] {
        assert!(said.contains(word), "`{word}` is missing: {said}");
    }
    let found = place.json(&format!("{small} --dtype bf16 --json"));
    let kernels = found["kernels"].as_array().unwrap();
    assert!(found["peak_f32_flops"].as_f64().unwrap() > 1e8 && kernels.len() > 15);
    for kernel in kernels {
        let candidates = kernel["candidates"].as_array().unwrap();
        let chosen = candidates.iter().find(|candidate| candidate["algorithm"] == kernel["algorithm"]).unwrap();
        assert_eq!(chosen["seconds"], kernel["seconds"], "{kernel}");
        assert!(kernel["seconds"].as_f64().unwrap() > 0.0 && kernel["bound_s"].as_f64().unwrap() > 0.0, "{kernel}");
    }
}
