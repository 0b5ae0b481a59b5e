//! Data as the command line sees it: inspection, contact sheets, folders of photographs with a damaged one, text.

use crate::place::Place;

/// Two classes of six and three small images; one of them damaged if asked for.
fn photographs(damaged: bool) -> Place {
    let place = Place::new();
    for (class, name) in ["left", "right"].iter().enumerate() {
        for number in 0..6 {
            place.write_png(&format!("photos/train/{name}/{number}.png"), 16, class as u32, number);
        }
        for number in 0..3 {
            place.write_png(&format!("photos/val/{name}/{number}.png"), 16, class as u32, number);
        }
    }
    if damaged {
        let whole = place.read("photos/train/left/4.png");
        place.write("photos/train/left/4.png", &whole[..whole.len() / 2]);
    }
    place
}

const TRAIN: &str = "train --model mlp --data folder:photos --size 16 --batch 4 --epochs 2 --quiet";

#[test]
fn a_folder_of_images_is_trained_on() {
    let place = photographs(false);
    place.run(&format!("{TRAIN} --run run"));
    let guessed = place.json("predict run photos/val/left/0.png --json");
    assert_eq!(guessed["guesses"].as_array().unwrap().len(), 2, "there are two classes");
    assert!(["left", "right"].iter().any(|name| guessed["guesses"][0]["name"] == *name));
}

#[test]
fn a_damaged_image_is_named_and_refused_unless_it_is_allowed() {
    let place = photographs(true);
    place.fails(&format!("{TRAIN} --run run"), 1, &["photos/train/left/4.png is damaged", "--damaged-max 1"]);
    place.run(&format!("{TRAIN} --run other --damaged-max 1"));
    let seen = place.run("data inspect folder:photos");
    assert!(seen.contains("damaged: photos/train/left/4.png"), "{seen}");
}

#[test]
fn inspection_counts_and_draws() {
    let place = Place::new();
    let said = place.run("data inspect shapes");
    assert!(said.contains("shapes train: 8,000 samples") && said.contains("10 classes"), "{said}");
    let sheet = image::load_from_memory(&place.read("shapes-contact-sheet.png")).unwrap();
    assert!(sheet.width() > 100 && sheet.height() > 100);
    let found = place.json("data inspect synthetic:8x8x3/4/64 --sheet sheet.png --json");
    assert_eq!(found["halves"][0]["samples"], 64);
    assert!(place.path("sheet.png").exists());
}

#[test]
fn a_text_trains_a_language_model() {
    let place = Place::new();
    place.write("text.txt", "the quick brown fox jumps over the lazy dog. ".repeat(60));
    let train = "train --data text:text.txt --sequence 16 --batch 8 --max-steps 4 --lr 0.01 --quiet --run";
    for model in ["lstm", "gpt"] {
        place.run(&format!("{train} {model} --model {model}"));
        place.run(&format!("evaluate {model}"));
        place.run(&format!("export {model} --onnx {model}.onnx"));
        place.refuses(&format!("predict {model} text.txt"), &["reads text", "images"]);
    }
}

#[test]
fn what_was_trained_on_whole_images_is_evaluated_and_asked_about_whole_images() {
    let place = photographs(false);
    let train = "train --model mlp --data folder:photos --size 12 --batch 4 --epochs 1 --quiet --calibrate off --run";
    place.run(&format!("{train} whole --augment flip"));
    place.run(&format!("{train} cropped"));
    let ops = |run: &str| {
        let folder = std::fs::read_dir(place.path(&format!("{run}/checkpoints"))).unwrap().next().unwrap().unwrap();
        let weights = std::fs::read(folder.path().join("weights.safetensors")).unwrap();
        let header: serde_json::Value =
            serde_json::from_slice(&weights[8..][..u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize])
                .unwrap();
        header["__metadata__"].to_string()
    };
    assert!(ops("whole").contains("resize") && !ops("whole").contains("crop"), "{}", ops("whole"));
    assert!(ops("cropped").contains("centre-crop"), "{}", ops("cropped"));
    let seen = place.events("whole").into_iter().rev().find(|event| event["event"] == "epoch").unwrap();
    let found = place.json("evaluate whole --json");
    assert_eq!(found["loss"], seen["val_loss"], "{seen}");
    place.run("predict whole photos/val/left/0.png");
}
