//! Memory and cores that do not suffice: refused before anything starts, with what fits; and an error where they end half-way.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use paceline::system::limits::Limits;
use paceline::system::threads;

use crate::place::{Place, QUICK, has, skip, text};

/// The binary under a limit on its addresses, in kilobytes.
fn under_ulimit(place: &Place, kilobytes: u64, arguments: &str) -> Output {
    let mut shell = Command::new("sh");
    let inner = place.command(arguments);
    shell.args(["-c", &format!("ulimit -v {kilobytes} && exec \"$0\" \"$@\"")]).arg(inner.get_program());
    shell.args(inner.get_args()).current_dir(inner.get_current_dir().unwrap());
    for (name, value) in inner.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    shell.output().unwrap()
}

/// The one error of an output with this exit code.
fn error(output: &Output, code: i32) -> String {
    let wrong = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{}\n{}{wrong}", output.status, text(&output.stdout));
    assert!(wrong.starts_with("error: ") && wrong.matches("error: ").count() == 1, "one error: {wrong}");
    wrong
}

/// The number behind a flag in a sentence.
fn number(sentence: &str, flag: &str) -> usize {
    let rest = sentence.split_once(flag).unwrap_or_else(|| panic!("no {flag}: {sentence}")).1;
    rest.trim_start().split(|sign: char| !sign.is_ascii_digit()).next().unwrap().parse().unwrap()
}

#[test]
fn workers_that_together_need_more_than_there_is_are_refused_with_a_batch_that_fits() {
    let place = Place::new();
    let limit = Limits::look().shared.expect("a machine with memory").bytes;
    // One sample of resnet50 at 224×224 takes about 77 MB, so each of two workers has three quarters of the memory.
    let batch = (limit / 77_000_000) as usize * 3 / 4 * 2;
    let train =
        |batch: usize| format!("train --model resnet50 --data synthetic:224x224x3/1000 --batch {batch} --workers 2");
    let sentence = place.fails(&train(batch), 2, &["2 workers need ", " GB of memory, ", "which fits"]);
    assert!(place.files().is_empty(), "nothing was started");
    let fitting = number(&sentence, "--batch");
    assert!(fitting < batch && fitting.is_multiple_of(2), "{sentence}");
    // Ranks that another launcher starts refuse by themselves, before they meet.
    let mut rank = place.command(&train(batch).replace(" --workers 2", ""));
    rank.envs([("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")]);
    let output = rank.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29999")]).output().unwrap();
    assert_eq!(error(&output, 2), sentence);
    // What is named is accepted: the run gets as far as a folder that it cannot make.
    place.write("file", "");
    let accepted = text(&place.output(&format!("{} --run file/run", train(fitting))).stderr);
    assert!(accepted.contains("type --run with a folder that can be written"), "{accepted}");
}

#[test]
fn the_limit_of_every_process_counts() {
    let place = Place::new();
    let train = "train --model cnn5 --data synthetic:32x32x3/10/8192 --batch 8192 --run run --max-steps 1 --calibrate off --quiet";
    let sentence = error(&under_ulimit(&place, 500_000, train), 2);
    assert!(sentence.contains("a process needs "), "{sentence}");
    assert!(sentence.contains("`ulimit -v` allows each process 512 MB"), "{sentence}");
    assert!(place.files().is_empty(), "nothing was started");
    let fitting = train.replace("--batch 8192", &format!("--batch {}", number(&sentence, "--batch")));
    let smaller = under_ulimit(&place, 500_000, &fitting);
    assert!(smaller.status.success(), "{fitting}: {}\n{}", smaller.status, text(&smaller.stderr));
}

#[test]
fn memory_that_a_plan_did_not_count_is_an_error_and_no_panic() {
    let place = Place::new();
    let plan = place.json("plan --model cnn5 --batch 2048 --calibrate off --json");
    let arena = plan["arena_bytes"].as_u64().unwrap();
    // A step that is measured counts no addresses of code and libraries, so the limit that it passes first is too small for it.
    let codes = (0..16).map(|more| {
        let kilobytes = arena / 1024 + more * 8192;
        let output = under_ulimit(&place, kilobytes, "bench step --model cnn5 --batch 2048 --steps 1 --calibrate off");
        let code = output.status.code();
        assert!(code.is_some_and(|code| code <= 2), "{}\n{}", output.status, text(&output.stderr));
        (code, output)
    });
    let (_, output) = codes.into_iter().find(|(code, _)| *code != Some(2)).expect("a limit that passes");
    let sentence = error(&output, 1);
    assert!(sentence.contains("no memory for ") && sentence.contains("paceline doctor"), "{sentence}");
}

#[test]
fn memory_that_ends_half_way_is_an_error_and_no_signal() {
    if !has("prlimit", "memory_that_ends_half_way_is_an_error_and_no_signal") {
        return;
    }
    let place = Place::new();
    let train = "train --model mlp --data synthetic:64x64x3/10/8000 --batch 8 --checkpoint-every 100 --time-limit 60s";
    let child =
        place.command(&format!("{train} --run run --calibrate off --quiet")).stderr(Stdio::piped()).spawn().unwrap();
    let begun = (0..4000).any(|_| {
        std::thread::sleep(Duration::from_millis(5));
        let events = std::fs::read_to_string(place.path("run/events/rank-0.jsonl"));
        events.is_ok_and(|events| events.contains(r#""event":"step""#))
    });
    // The limit falls below what the process has: the first checkpoint finds no memory.
    let lowered = Command::new("prlimit").args(["--pid", &child.id().to_string(), "--as=1000000"]).status().unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(begun && lowered.success(), "the run did not begin");
    let sentence = error(&output, 1);
    assert!(sentence.contains("no memory for ") && sentence.contains("paceline doctor"), "{sentence}");
}

/// The need that a plan names is what a run is checked against: never less than it takes, and not a fifth more (a third more for several
/// processes, of which each is given what only one takes).
#[test]
fn a_plan_names_the_memory_that_a_run_takes() {
    let place = Place::new();
    let shape = "--model cnn5 --batch 256 --calibrate off";
    for (number, way) in ["", "--clip-norm 1", "--accumulate 4", "--workers 2"].into_iter().enumerate() {
        let plan = place.json(&format!("plan {shape} --size 32 --classes 10 --json {way}"));
        let needed = plan["needs_bytes"].as_f64().unwrap();
        let run = format!("run{number}");
        place.run(&format!("train {shape} --data synthetic:32x32x3/10/512 --max-steps 2 --quiet --run {run} {way}"));
        let peak = |rank: usize| {
            let events = std::fs::read_to_string(place.path(&format!("{run}/events/rank-{rank}.jsonl"))).ok()?;
            let last: serde_json::Value = serde_json::from_str(events.lines().next_back()?).ok()?;
            last["peak_memory_bytes"].as_f64()
        };
        let taken: f64 = (0..2).filter_map(peak).sum();
        let least = if way.contains("workers") { 0.67 } else { 0.8 };
        assert!(taken <= needed && taken >= least * needed, "{way}: {taken} of {needed}");
        let said = place.run(&format!("plan {shape} --size 32 --classes 10 {way}"));
        assert!(said.ends_with(", besides samples held in memory\n") && said.contains("\nneeds 0."), "{said}");
        let kept = plan["kept_gradient_bytes"].as_u64().unwrap();
        assert_eq!(kept > 0, way.contains("clip") || way.contains("accumulate"), "{way}: {kept}");
    }
    let said = place.run(&format!("plan {shape} --workers 2 --clip-norm 1"));
    assert!(said.contains("after the backward pass"), "{said}");
}

/// A control group with a limit, where this test may make one; it goes with this value.
struct Group(PathBuf);

impl Group {
    /// With `first` in a file of a controller of version 1, or `unified` in one of version 2.
    fn new(controller: &str, first: (&str, &str), unified: (&str, &str)) -> Result<Self, String> {
        let tree = Path::new("/sys/fs/cgroup").join(controller);
        let (root, (file, limit)) =
            if tree.is_dir() { (tree, first) } else { (PathBuf::from("/sys/fs/cgroup"), unified) };
        let folder = root.join(format!("paceline-test-{controller}-{}", std::process::id()));
        std::fs::create_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let group = Self(folder);
        std::fs::write(group.0.join(file), limit).map_err(|error| format!("{file}: {error}"))?;
        Ok(group)
    }

    fn output(&self, place: &Place, arguments: &str) -> Output {
        let inner = place.command(arguments);
        let mut shell = Command::new("sh");
        shell.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(self.0.join("cgroup.procs")).arg(inner.get_program());
        shell.args(inner.get_args()).current_dir(inner.get_current_dir().unwrap());
        shell.env("PACELINE_CACHE", place.cache()).output().unwrap()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The kernel may still count the last process for a moment.
        for _ in 0..50 {
            if std::fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn a_small_control_group_gets_a_run_or_a_sentence_and_never_a_kill() {
    let test = "a_small_control_group_gets_a_run_or_a_sentence_and_never_a_kill";
    let limit = "600000000";
    let group = match Group::new("memory", ("memory.limit_in_bytes", limit), ("memory.max", limit)) {
        Ok(group) => group,
        Err(why) => return skip(test, &format!("cannot make a control group: {why}")),
    };
    let place = Place::new();
    let output = group.output(&place, "train --workers 2 --max-steps 3 --quiet --calibrate off --run small");
    assert!(output.status.success(), "{}\n{}", output.status, text(&output.stderr));
    let large = "train --model resnet50 --data synthetic:224x224x3/1000 --batch 64 --run large";
    let sentence = error(&group.output(&place, large), 2);
    assert!(sentence.contains("the cgroup /") && sentence.contains("allows 600 MB"), "{sentence}");
    let sentence = error(&group.output(&place, &format!("{large} --workers 2")), 2);
    assert!(sentence.contains("2 workers need ") && sentence.contains("allows 600 MB"), "{sentence}");
    // The largest batch that passes runs, and is not killed.
    let middle =
        "train --model cnn5 --data synthetic:32x32x3/10/4096 --batch 4096 --max-steps 1 --calibrate off --quiet";
    let sentence = error(&group.output(&place, middle), 2);
    let fitting = middle.replace("--batch 4096", &format!("--batch {}", number(&sentence, "--batch")));
    let output = group.output(&place, &fitting);
    assert!(output.status.success(), "{fitting}: {}\n{}", output.status, text(&output.stderr));
}

#[test]
fn threads_follow_the_quota_of_a_control_group() {
    let test = "threads_follow_the_quota_of_a_control_group";
    let group = match Group::new("cpu", ("cpu.cfs_quota_us", "50000"), ("cpu.max", "50000 100000")) {
        Ok(group) => group,
        Err(why) => return skip(test, &format!("cannot make a control group: {why}")),
    };
    let place = Place::new();
    let output = group.output(&place, &format!("train {QUICK} --max-steps 1 --quiet --run run"));
    assert!(output.status.success(), "{}\n{}", output.status, text(&output.stderr));
    let host = &place.events("run")[0]["host"];
    assert_eq!(host["cores"], 1, "half a core, rounded up: {host}");
}

#[test]
fn more_processes_than_cores_can_share_are_refused_unless_asked_for() {
    let place = Place::new();
    let most = 16 * threads::available();
    let (many, rank) = (most + 1, format!("--workers {}", most + 1));
    let words = format!("type --workers {most} or fewer, or --oversubscribe");
    for command in [
        format!("train --model mlp --data synthetic:8x8x3/10/64 --batch {many} {rank}"),
        format!("launch {rank} -- models"),
        format!("bench collectives {rank}"),
        format!("bench scaling {rank}"),
    ] {
        place.refuses(&command, &[&format!("{many} processes on "), &words]);
    }
    place.run(&format!("launch {rank} --oversubscribe -- models"));
    place.run(&format!("launch --workers {} -- models", most.min(4)));
}
