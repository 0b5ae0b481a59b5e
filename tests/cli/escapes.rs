//! Names that a terminal would obey: shown as escapes, on both outputs, in the report and in TensorBoard's file.

use std::process::Output;

use crate::place::{Place, text};

/// Renames the window and rings; begins a sequence with one byte of C1; turns the rest of the line around; breaks it.
const CLASS: &str = "a\x1b]0;pwned\x07b\u{9b}2J\u{202e}c\n";
const RUN: &str = "r\x1b[31mun\u{9b}1m";

/// A folder whose name, classes and files would like to be obeyed; `bad…` is damaged.
fn photographs() -> Place {
    let place = Place::new();
    for half in ["train", "val"] {
        for (class, name) in [CLASS, "plain"].iter().enumerate() {
            for number in 0..4 {
                place.write_png(&format!("ph\x1b[1motos\u{9b}/{half}/{name}/{number}.png"), 16, class as u32, number);
            }
        }
    }
    // As many as before: none is left over in an epoch, so that the damaged one is met.
    std::fs::remove_file(place.path("ph\x1b[1motos\u{9b}/train/plain/3.png")).unwrap();
    place.write("ph\x1b[1motos\u{9b}/train/plain/bad\x1b[5m\u{202e}.png", "no image");
    place.write_png("seen\x1b[7m.png", 16, 0, 1);
    place
}

/// Whether a terminal would take this for more than text.
fn is_obeyed(sign: char) -> bool {
    (sign.is_control() && sign != '\n') || ('\u{202a}'..='\u{202e}').contains(&sign)
}

/// What a command said on both outputs, in which there must be nothing to obey.
fn said(output: &Output) -> String {
    let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
    let found: Vec<char> = said.chars().filter(|&sign| is_obeyed(sign)).collect();
    assert!(found.is_empty(), "{found:?} in {said:?}");
    said
}

const DATA: &str = "folder:ph\x1b[1motos\u{9b}";

fn train(rest: &str) -> String {
    format!("train --model mlp --data {DATA} --size 16 --batch 2 --epochs 1 {rest}")
}

#[test]
fn a_run_shows_names_as_escapes_everywhere() {
    let place = photographs();
    let refused = said(&place.output(&train(&format!("--run {RUN}"))));
    assert!(refused.contains("bad\\u{1b}[5m\\u{202e}.png is damaged"), "{refused}");
    std::fs::remove_dir_all(place.path(RUN)).unwrap();
    let shown = said(&place.output(&train(&format!("--damaged-max 1 --run {RUN}"))));
    assert!(shown.contains("run     r\\u{1b}[31mun\\u{9b}1m") && shown.contains("ph\\u{1b}[1motos\\u{9b}"), "{shown}");
    assert!(shown.contains("bad\\u{1b}[5m"), "the warning of a damaged image: {shown}");
    let page = place.read_text(&format!("{RUN}/report.html"));
    assert!(!page.chars().any(|sign| is_obeyed(sign) && sign != '\t') && page.contains("ph\\u{1b}[1motos"), "{page}");
    let board = std::fs::read_dir(place.path(RUN)).unwrap().map(|entry| entry.unwrap().path());
    let board =
        board.filter(|path| path.to_string_lossy().contains("tfevents")).map(|path| std::fs::read(path).unwrap());
    let board = board.into_iter().next().unwrap();
    for raw in ["\x1b[", "\u{9b}"] {
        assert!(!board.windows(raw.len()).any(|bytes| bytes == raw.as_bytes()), "{raw:?} in TensorBoard's file");
    }
    let log = place.read_text(&format!("{RUN}/events/rank-0.jsonl"));
    assert!(!log.chars().any(is_obeyed), "{log:?}");

    let shown = said(&place.output(&format!("evaluate {RUN}")));
    assert!(shown.contains("top-1"), "{shown}");
    let shown = said(&place.output(&format!("report {RUN}")));
    assert_eq!(shown, "r\\u{1b}[31mun\\u{9b}1m/report.html\n");
    let shown = said(&place.output(&format!("predict {RUN} seen\x1b[7m.png")));
    assert!(shown.starts_with("seen\\u{1b}[7m.png\n"), "{shown}");
    assert!(shown.contains("a\\u{1b}]0;pwned\\u{7}b\\u{9b}2J\\u{202e}c\\n\n") && shown.lines().count() == 3, "{shown}");
    let shown = said(&place.output(&format!("export {RUN} --onnx o\x1bx")));
    assert!(shown.contains("written to o\\u{1b}x"), "{shown}");
    let shown = said(&place.output(&format!("train --resume {RUN} --epochs 2 --max-steps 5")));
    assert!(shown.contains(r"--resume $'r\x1b[31mun\xc2\x9b1m'"), "{shown}");
}

#[test]
fn json_keeps_the_names_and_shows_nothing_to_obey() {
    let place = photographs();
    let lines = said(&place.output(&train(&format!("--damaged-max 1 --run {RUN} --json"))));
    let first: serde_json::Value = serde_json::from_str(lines.lines().next().unwrap()).unwrap();
    assert!(first["data"].as_str().unwrap().ends_with("ph\x1b[1motos\u{9b}"), "{first}");
    let guess = said(&place.output(&format!("predict {RUN} seen\x1b[7m.png --json")));
    let guess: serde_json::Value = serde_json::from_str(&guess).unwrap();
    assert_eq!(guess["image"], "seen\x1b[7m.png");
    assert!([0, 1].iter().any(|&place| guess["guesses"][place]["name"] == CLASS), "{guess}");
    let found = said(&place.output(&format!("data inspect {DATA} --json --sheet s\x1b.png")));
    let found: serde_json::Value = serde_json::from_str(&found).unwrap();
    assert_eq!(found["halves"][0]["classes"][0][0], CLASS);
    assert!(found["halves"][0]["damaged"][0]["file"].as_str().unwrap().ends_with("bad\x1b[5m\u{202e}.png"));
}

#[test]
fn inspection_and_refusals_show_names_as_escapes() {
    let place = photographs();
    let shown = said(&place.output(&format!("data inspect {DATA}")));
    assert!(shown.contains("  a\\u{1b}]0;pwned\\u{7}b\\u{9b}2J\\u{202e}c\\n\n"), "{shown}");
    assert!(shown.contains("damaged: ph\\u{1b}[1motos\\u{9b}/train/plain/bad\\u{1b}[5m\\u{202e}.png"), "{shown}");
    for (arguments, words) in [
        ("train --model \x1b[31mx", "\\u{1b}[31mx"),
        ("plan --model \x1b[31mx", "\\u{1b}[31mx"),
        ("train --batch \x1b[31mx", "\\u{1b}[31mx"),
        ("tr\x1b[31main", "tr\\u{1b}[31main"),
        ("train --data \u{202e}x", "\\u{202e}x"),
        ("train --data folder:\x1b[31mx", "\\u{1b}[31mx"),
        ("train \x1b[31mx.toml", "\\u{1b}[31mx.toml"),
        ("evaluate \x1b[31mx", "\\u{1b}[31mx"),
        ("predict \x1b[31mx y.png", "\\u{1b}[31mx"),
        ("report \x1b[31mx", "\\u{1b}[31mx"),
        ("launch --workers 2 -- train --model \x1b[31mx", "\\u{1b}[31mx"),
    ] {
        let output = place.output(arguments);
        let shown = said(&output);
        assert!(output.status.code() == Some(2) && shown.contains(words), "{arguments:?}: {shown}");
    }
}
