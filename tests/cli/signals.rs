//! Runs that are told to end, or whose ground is taken away: what is saved, what is said, and the exit codes.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Output, Stdio};

use crate::place::{Place, QUICK, has, skip, text};

/// More steps than anybody waits for.
const LONG: &str = "--model mlp --data synthetic:8x8x3/10/4096 --batch 8 --epochs 1000";

/// Starts a run and waits until it has made a few steps. Where workers share their data, rank 0 tells of its own steps
/// alone, and any of the first may have been another's.
fn start(command: &mut Command) -> Child {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let step = |line: &str| line.split_once("\"event\":\"step\",\"step\":")?.1.split_once(',')?.0.parse::<u64>().ok();
    let seen = |line: std::io::Result<String>| line.is_ok_and(|line| step(&line).is_some_and(|step| step >= 3));
    assert!(lines.any(seen), "it made no step");
    child
}

fn tell(child: &Child, signal: &str) {
    assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
}

/// Waits for the end; what it wrote after the steps that were waited for.
fn end(child: Child) -> (Option<i32>, String) {
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    (status.code(), text(&stdout) + &text(&stderr))
}

/// Whether this process, and so whatever it starts, ignores SIGHUP.
fn ignores_hangups() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    ignored.is_some_and(|signals| signals & 1 == 1)
}

#[test]
fn signals_save_and_are_answered_as_shells_expect() {
    if !has("kill", "signals_save_and_are_answered_as_shells_expect") {
        return;
    }
    let place = Place::new();
    let one = format!("train {LONG} --json --run");
    let two = format!("train {LONG} --workers 2 --json --run");
    let tied = format!("train {LONG} --workers 2 --agree elastic --json --run");
    let tied_together = format!("train {LONG} --workers 2 --agree elastic --staleness 0 --json --run");
    let launched = format!("launch --workers 2 -- train {LONG} --json --run");
    let cases = [
        (&one, "-INT", 130),
        (&one, "-TERM", 143),
        (&one, "-HUP", 129),
        (&two, "-TERM", 143),
        (&tied, "-INT", 130),
        (&tied_together, "-INT", 130),
        (&launched, "-INT", 130),
    ];
    for (number, (line, signal, code)) in cases.into_iter().enumerate() {
        if signal == "-HUP" && ignores_hangups() {
            skip("signals_save_and_are_answered_as_shells_expect (SIGHUP)", "the tests run under nohup");
            continue;
        }
        let run = format!("run{number}");
        let child = start(&mut place.command(&format!("{line} {run}")));
        tell(&child, signal);
        let (found, said) = end(child);
        assert_eq!(found, Some(code), "{line} {signal}: {said}");
        let events = place.events(&run);
        let (last, before) = (&events[events.len() - 1], &events[events.len() - 2]);
        assert_eq!(last["reason"], "interrupted", "{line} {signal}");
        assert_eq!((&before["event"], &before["step"]), (&"checkpoint".into(), &last["step"]));
    }
}

#[test]
fn a_run_that_ignores_the_end_of_its_terminal_goes_on() {
    if !has("kill", "a_run_that_ignores_the_end_of_its_terminal_goes_on") {
        return;
    }
    let place = Place::new();
    let line = place.command(&format!("train {LONG} --json --run run"));
    let words: Vec<_> = line.get_args().map(|word| word.to_str().unwrap()).collect();
    let script = format!("trap '' HUP; exec {} {}", env!("CARGO_BIN_EXE_paceline"), words.join(" "));
    let mut command = Command::new("sh");
    command.args(["-c", &script]).current_dir(place.path(".")).env("PACELINE_CACHE", place.cache());
    let mut child = start(&mut command);
    tell(&child, "-HUP");
    // More than a pipe holds: the last of these steps were made after the signal.
    let mut steps = vec![0; 128 << 10];
    child.stdout.as_mut().unwrap().read_exact(&mut steps).expect("it goes on");
    tell(&child, "-TERM");
    assert_eq!(end(child).0, Some(143), "as under nohup, it was the second signal that ended it");
}

#[test]
fn the_line_that_resumes_can_be_typed_into_a_shell() {
    let place = Place::new();
    let run = "my run; it's";
    let output = place.command(&format!("train {QUICK} --epochs 2 --max-steps 5 --run")).arg(run).output().unwrap();
    let said = text(&output.stdout);
    let line = said.lines().find_map(|line| line.strip_prefix("resume  paceline ")).unwrap().to_owned();
    assert_eq!(line, r"train --resume 'my run; it'\''s' --max-steps 10");
    let script = format!("exec {} {line}", env!("CARGO_BIN_EXE_paceline"));
    let mut command = Command::new("sh");
    command.args(["-c", &script]).current_dir(place.path(".")).env("PACELINE_CACHE", place.cache());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(place.path(run).join("checkpoints/step-00000010").is_dir());
}

#[test]
fn a_folder_that_is_removed_under_a_run_is_an_error_that_says_so() {
    let place = Place::new();
    for (run, gone) in [("run", "run"), ("other", "other/checkpoints")] {
        // Steps without a checkpoint in sight, or one at every step.
        let every = if gone == run { 1_000_000 } else { 1 };
        let line = format!("train {LONG} --checkpoint-every {every} --json --run {run}");
        let child = start(&mut place.command(&line));
        // In one moment: what is written meanwhile could be in the way.
        std::fs::rename(place.path(gone), place.path("rubbish")).unwrap();
        std::fs::remove_dir_all(place.path("rubbish")).unwrap();
        let (code, said) = end(child);
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains(&format!("{gone} is gone: it was removed or renamed")), "{said}");
        assert!(!place.path(gone).exists(), "nothing made it again");
    }
}

#[test]
fn a_damaged_image_in_the_middle_of_a_run_is_a_failure_and_says_how_to_go_on() {
    let place = Place::new();
    for (class, name) in ["left", "right"].iter().enumerate() {
        for number in 0..6 {
            place.write_png(&format!("photos/train/{name}/{number}.png"), 16, class as u32, number);
            place.write_png(&format!("photos/val/{name}/{number}.png"), 16, class as u32, number);
        }
    }
    let train = "train --model mlp --data folder:photos --size 16 --batch 4";
    place.run(&format!("{train} --epochs 1 --run run --quiet"));
    let whole = place.read("photos/train/left/4.png");
    place.write("photos/train/left/4.png", &whole[..whole.len() / 2]);
    let words = ["photos/train/left/4.png is damaged", "--damaged-max 1", "type: paceline train --resume run"];
    place.fails("train --resume run --epochs 2 --quiet", 1, &words);
}

#[test]
fn a_folder_with_anything_in_it_is_not_trained_in() {
    let place = Place::with_run();
    for entry in [".git/HEAD", "report.html", "events/rank-0.jsonl", "events/rank-1.jsonl", "checkpoints/best.txt"] {
        place.write(&format!("mine/{entry}"), "mine");
        let words = ["mine is not empty (it holds mine/", "type another --run"];
        place.refuses(&format!("train {QUICK} --run mine"), &words);
        place.refuses(&format!("train {QUICK} --workers 2 --run mine"), &words);
        std::fs::remove_dir_all(place.path("mine")).unwrap();
    }
    place.refuses(&format!("train {QUICK} --workers 2 --run run"), &["already holds a run", "--resume run"]);
    std::fs::create_dir(place.path("empty")).unwrap();
    place.run(&format!("train {QUICK} --epochs 1 --run empty --quiet"));
    std::fs::create_dir(place.path("shared")).unwrap();
    place.run(&format!("train {QUICK} --epochs 1 --workers 2 --run shared --quiet"));
}
