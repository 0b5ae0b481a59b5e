//! Checkpoints that are not what was saved: refused by name, with the last good one in the sentence and never taken by itself.

use paceline::system::random::Random;

use crate::place::{Place, QUICK, text};

const LAST: &str = "run/checkpoints/step-00000008";
const BEFORE: &str = "run/checkpoints/step-00000004";
const FILES: [&str; 3] = ["weights.safetensors", "state.safetensors", "manifest.json"];
/// What is offered for the last checkpoint.
const OFFER: &str =
    "last good checkpoint is of step 4; to go on from it, type: paceline train --resume run/checkpoints/step-00000004";

/// A run of eight steps with two checkpoints.
fn place() -> Place {
    let place = Place::new();
    place.run(&format!("train {QUICK} --epochs 1 --checkpoint-every 4 --run run --quiet"));
    place
}

/// Flips one bit of a file.
fn flip(place: &Place, file: &str, bit: usize) {
    let mut bytes = place.read(file);
    bytes[bit / 8] ^= 1 << (bit % 8);
    place.write(file, bytes);
}

/// Replaces words in the header of a safetensors file.
fn edit_header(place: &Place, file: &str, from: &str, to: &str) {
    let bytes = place.read(file);
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = text(&bytes[8..8 + length]);
    assert!(header.contains(from), "{header}");
    let mut header = header.replace(from, to).into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    place.write(file, [&(header.len() as u64).to_le_bytes()[..], &header, &bytes[8 + length..]].concat());
}

fn remove(place: &Place, path: &str) {
    let path = place.path(path);
    if path.is_dir() { std::fs::remove_dir_all(path).unwrap() } else { std::fs::remove_file(path).unwrap() }
}

fn copy(place: &Place, from: &str, to: &str) {
    std::fs::create_dir_all(place.path(to)).unwrap();
    for name in FILES {
        std::fs::copy(place.path(from).join(name), place.path(to).join(name)).unwrap();
    }
}

#[test]
fn every_flipped_bit_is_found_by_name_and_the_checkpoint_before_is_offered() {
    let place = place();
    place.write_png("photo.png", 8, 0, 0);
    let mut random = Random::new(&[7]);
    for number in 0..200 {
        let name = FILES[number % 3];
        let file = format!("{LAST}/{name}");
        let bit = random.below(8 * place.read(&file).len());
        flip(&place, &file, bit);
        let why = if name == "manifest.json" { "is damaged" } else { "is damaged: its checksum is" };
        let words = [&format!("{file} {why}"), OFFER];
        place.fails("train --resume run --epochs 2", 1, &words);
        if number % 12 < 2 && name != "state.safetensors" {
            let words = [words[0], "last good checkpoint is run/checkpoints/step-00000004; type that instead"];
            place.fails("evaluate run", 1, &words);
            place.fails("predict run photo.png", 1, &words);
            place.fails("export run --onnx model.onnx", 1, &words);
            place.fails(&format!("export {file} --onnx model.onnx").replace(name, FILES[0]), 1, &words);
            let words = [name, "step-00000004; type that instead"];
            place.fails(&format!("train {QUICK} --run next --weights run"), 1, &words);
        }
        flip(&place, &file, bit);
    }
    assert!(!place.path("next").exists() && !place.path("model.onnx").exists());
    place.run("train --resume run --epochs 2 --quiet");
}

#[test]
fn the_checkpoint_that_was_offered_is_gone_on_from_and_what_came_after_is_kept_aside() {
    let place = Place::new();
    // The default model, with batch statistics.
    let run = "train --data synthetic:16x16x3/10/64 --batch 8 --epochs 2 --checkpoint-every 4 --quiet --run";
    place.run(&format!("{run} straight"));
    place.run(&format!("{run} run --max-steps 12 --keep 3"));
    flip(&place, "run/checkpoints/step-00000012/weights.safetensors", 80_000);
    let words =
        ["run/checkpoints/step-00000012/weights.safetensors is damaged", "--resume run/checkpoints/step-00000008"];
    place.fails("train --resume run --max-steps 16", 1, &words);
    place.run("train --resume run/checkpoints/step-00000004 --max-steps 16 --quiet");
    assert!(place.weights("run", 16) == place.weights("straight", 16), "the same bits as a run that never stopped");
    for step in [8, 12] {
        assert!(place.path(&format!("run/checkpoints/step-{step:08}.replaced")).is_dir());
    }
    assert_eq!(place.read_text("run/events/rank-0.jsonl").matches("is kept and no longer used").count(), 2);
    // Nothing is there to be refused any more.
    place.run("evaluate run");
    place.fails("train --resume run", 2, &["this run is done (16 steps)"]);
}

#[test]
fn files_of_different_steps_and_runs_are_told_apart() {
    let place = place();
    let state = format!("{LAST}/state.safetensors");
    let (good, other) = (place.read(&state), place.read(&format!("{BEFORE}/state.safetensors")));
    place.write(&state, &other);
    place.fails("train --resume run --epochs 2", 1, &[&format!("{state} is damaged"), OFFER]);
    place.write(&state, &good[..good.len() / 2]);
    place.fails("train --resume run --epochs 2", 1, &[&format!("{state} is damaged: it has"), OFFER]);
    remove(&place, &state);
    place.fails("train --resume run --epochs 2", 1, &[&format!("{state} is missing"), OFFER]);
    // A whole checkpoint in the place of another, and one of another run.
    remove(&place, LAST);
    copy(&place, BEFORE, LAST);
    place.fails(
        "train --resume run --epochs 2",
        1,
        &[LAST, "is named after step 8, and its manifest is of step 4", OFFER],
    );
    place.run(&format!("train {QUICK} --epochs 1 --run other --quiet"));
    copy(&place, "other/checkpoints/step-00000008", LAST);
    place.fails("train --resume run --epochs 2", 1, &[LAST, "is of another run", OFFER]);
    place.fails("evaluate run", 1, &[LAST, "is of another run", BEFORE]);
    // Alone, it is a checkpoint as good as any.
    copy(&place, "other/checkpoints/step-00000008", "kept/step-00000008");
    place.run("export kept/step-00000008 --onnx model.onnx");
}

#[test]
fn checkpoints_of_earlier_versions_agree_with_each_other_or_are_refused() {
    let place = place();
    for folder in [LAST, BEFORE] {
        remove(&place, &format!("{folder}/manifest.json"));
    }
    remove(&place, "run/id");
    let (weights, state) = (format!("{LAST}/weights.safetensors"), format!("{LAST}/state.safetensors"));
    let files = [&weights, &state].map(|file| (file, place.read(file)));
    let restore = || files.iter().for_each(|(file, bytes)| place.write(file, bytes));
    place.write(&weights, place.read(&format!("{BEFORE}/weights.safetensors")));
    let words = [LAST, "weights.safetensors is of step 4, and state.safetensors of step 8", OFFER];
    place.fails("train --resume run --epochs 2", 1, &words);
    restore();
    edit_header(&place, &state, "\\\"step\\\":8,", "\\\"step\\\":1000000,");
    place.fails("train --resume run --epochs 2", 1, &[LAST, "of step 1000000", OFFER]);
    edit_header(&place, &weights, "\\\"step\\\":8}", "\\\"step\\\":1000000}");
    let words = [LAST, "is of step 1000000, and the run that config.toml describes has 16", OFFER];
    place.fails("train --resume run --epochs 2", 1, &words);
    restore();
    let mut spoiled = place.read(&weights);
    let end = spoiled.len();
    spoiled[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    place.write(&weights, spoiled);
    place.fails("train --resume run --epochs 2", 1, &[&weights, "is damaged: `fc3.", OFFER]);
    restore();
    place.run("evaluate run");
    place.run("train --resume run --epochs 2 --quiet");
    assert!(place.read_text("run/events/rank-0.jsonl").contains("has no manifest, so nothing tells"));
    assert!(place.path("run/id").exists() && place.path("run/checkpoints/step-00000016/manifest.json").exists());
}

#[test]
fn a_loss_that_is_no_number_right_after_weights_were_loaded_is_not_the_learning_rates_fault() {
    let place = place();
    let bytes = place.read(&format!("{LAST}/weights.safetensors"));
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut foreign = bytes.clone();
    for number in foreign[header..].as_chunks_mut::<4>().0 {
        *number = f32::MAX.to_le_bytes();
    }
    place.write("foreign/huge.safetensors", &foreign);
    foreign[header..header + 4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    place.write("foreign/infinite.safetensors", &foreign);
    // A file of that name that has nothing to do with checkpoints.
    place.write("foreign/manifest.json", "{\"name\": \"my app\"}");
    let train = |file: &str, run: &str| format!("train {QUICK} --weights foreign/{file} --run {run}");
    let words = ["not a number at step 1", "first step after ", "foreign/huge.safetensors was loaded"];
    let said = place.fails(&train("huge.safetensors", "huge"), 1, &words);
    assert!(!said.contains("--lr"), "{said}");
    place.fails(&train("infinite.safetensors", "infinite"), 2, &["foreign/infinite.safetensors: `fc", "not numbers"]);
    place.fails("export foreign/infinite.safetensors --onnx model.onnx", 2, &["`fc", "not numbers"]);
    assert!(!place.path("infinite").exists());
    std::fs::copy(place.path(LAST).join(FILES[0]), place.path("foreign/fine.safetensors")).unwrap();
    place.run(&format!("{} --max-steps 1 --quiet", train("fine.safetensors", "fine")));
}

#[test]
fn what_a_crash_left_behind_is_cleaned_up_when_the_run_goes_on() {
    let place = place();
    let left = [".step-00000002.old", ".step-00000006.part", ".step-00000008.swap"];
    for name in left {
        place.write(&format!("run/checkpoints/{name}/weights.safetensors"), "half");
    }
    place.run("train --resume run --epochs 2 --quiet");
    for name in left {
        assert!(!place.path("run/checkpoints").join(name).exists(), "{name}");
    }
    // What was about to be replaced when the process died comes back.
    std::fs::rename(place.path("run/checkpoints/step-00000016"), place.path("run/checkpoints/.step-00000016.swap"))
        .unwrap();
    place.fails("train --resume run", 2, &["this run is done (16 steps)"]);
    assert!(place.path("run/checkpoints/step-00000016").is_dir());
}
