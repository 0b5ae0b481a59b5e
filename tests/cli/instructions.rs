//! The binary on every instruction set of this machine: slower ones learn the same.

use paceline::tensor::device::cpu::isa::Isa;

use crate::place::{Place, text};

#[test]
fn every_instruction_set_trains_to_the_same_loss() {
    let place = Place::new();
    for dtype in ["f32", "bf16"] {
        let losses: Vec<f64> = Isa::ALL
            .into_iter()
            .filter(|isa| isa.available())
            .map(|isa| {
                let run = format!("{dtype}-{}", isa.name());
                let line = format!(
                    "train --model resnet20 --data synthetic:16x16x3/10/128 --batch 32 --max-steps 4 --lr 0.001 --dtype {dtype} --run {run} --quiet"
                );
                let output = place.command(&line).env("PACELINE_ISA", isa.name()).output().unwrap();
                assert!(output.status.success(), "{run}: {}", text(&output.stderr));
                let events = place.events(&run);
                let last = events.iter().rfind(|event| event["event"] == "step").unwrap();
                last["loss"].as_f64().unwrap()
            })
            .collect();
        let tolerance = if dtype == "f32" { 1e-3 } else { 5e-2 };
        assert!(losses.iter().all(|loss| (loss / losses[0] - 1.0).abs() < tolerance), "{dtype}: {losses:?}");
    }
}

#[test]
fn the_set_in_use_is_told() {
    let place = Place::new();
    let line = "bench step --model lenet5 --batch 2 --steps 1 --json";
    let output = place.command(line).env("PACELINE_ISA", "portable").output().unwrap();
    assert!(text(&output.stdout).contains(r#""isa":"portable""#), "{output:?}");
}

#[test]
fn a_set_that_is_not_there_is_refused() {
    let place = Place::new();
    let output = place.command("models").env("PACELINE_ISA", "sse9").output().unwrap();
    let wrong = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{wrong}");
    assert!(wrong.contains("PACELINE_ISA=sse9") && wrong.contains("portable"), "{wrong}");
}
