//! The measured choice: every set-up of this node by a few steps of the real command, kept, and used by `--split auto`.

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use paceline::system::process::{Tell, tell};
use serde_json::Value;

use crate::place::{Place, has, text};
use crate::running::{PATIENCE, Running, within};

const LENET: &str = "--model lenet5 --data synthetic:32x32x1/10/640 --batch 16 --calibrate off";
const CNN: &str = "--model cnn5 --data synthetic:16x16x3/10/320 --batch 16 --calibrate off";

fn setups(found: &Value) -> &Vec<Value> {
    found["setups"].as_array().unwrap()
}

fn named<'a>(found: &'a Value, name: &str) -> &'a Value {
    let all = setups(found);
    all.iter().find(|setup| setup["setup"] == name).unwrap_or_else(|| panic!("{name} is not among {all:?}"))
}

/// Runs of a search that were left behind: its processes' folders are named after it.
fn left_behind(pid: u32) -> bool {
    let prefix = format!("paceline-choose-{pid}-");
    let names = std::fs::read_dir(std::env::temp_dir()).unwrap().flatten().map(|entry| entry.file_name());
    names.into_iter().any(|name| name.to_string_lossy().starts_with(&prefix))
}

/// The processes of runs that a search times now.
fn timed_by(pid: u32) -> Vec<u32> {
    let wanted = format!("paceline-choose-{pid}-");
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let words = |pid: &u32| std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    pids.filter(|pid| text(&words(pid)).contains(&wanted)).collect()
}

#[test]
fn what_is_measured_is_chosen_kept_and_used() {
    for model in [LENET, CNN] {
        let place = Place::new();
        let begun = Instant::now();
        let found = place.json(&format!("choose {model} --choose-budget 10s --json"));
        let took = begun.elapsed();
        assert!(took < Duration::from_secs(20), "{took:?} of 10 s: {found}");
        assert!(place.files().is_empty(), "it leaves no run behind");
        // The baseline was measured, and whatever was is no faster than the choice.
        let step_s = |setup: &Value| setup["step_s"].as_f64();
        let baseline = &setups(&found)[0];
        assert_eq!(baseline["setup"], "1 replica × 1 thread", "{found}");
        assert!(step_s(baseline).is_some_and(|step_s| step_s > 0.0) && baseline["speedup"] == 1.0, "{found}");
        assert!(baseline["memory_bytes"].as_u64().unwrap() > 10_000_000, "{found}");
        let choice = named(&found, found["chosen"].as_str().unwrap());
        let best_s = setups(&found).iter().filter_map(step_s).min_by(f64::total_cmp).unwrap();
        assert!(step_s(choice).unwrap() <= 1.01 * best_s, "{found}");
        for setup in setups(&found) {
            assert!(step_s(setup).is_some() != setup["why_not"].is_string(), "measured, or why not: {setup}");
        }
        // It is kept, and used.
        let kept = place.json(&format!("choose {model} --choose-budget 5s --json"));
        assert!(kept["kept_unix_s"].is_u64() && kept["setups"] == found["setups"], "{kept}");
        let output = place.output(&format!("train {model} --split auto --choose-budget 6s --max-steps 2 --run run"));
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains(found["chosen"].as_str().unwrap()), "{}", text(&output.stderr));
        assert_eq!(text(&output.stderr).matches("paceline choose shows the table").count(), 1);
        let config = place.read_text("run/config.toml");
        let flags: Vec<&str> = choice["flags"].as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
        assert!(config.contains(&format!("split = \"{}\"", flags[1])), "{flags:?} {config}");
        // What to type does the same.
        let command = found["command"].as_str().unwrap().strip_prefix("paceline ").unwrap();
        place.run(&format!("{command} --max-steps 2 --run typed"));
        let decides = |run: &str| {
            let config = place.read_text(&format!("{run}/config.toml"));
            let fields =
                ["workers = ", "split = ", "cuts = ", "threads = ", "carry = ", "accumulate = ", "schedule = "];
            let lines = config.lines().filter(|line| fields.iter().any(|field| line.starts_with(field)));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(decides("run"), decides("typed"));
    }
}

#[test]
fn an_automatic_split_measures_where_nothing_is_kept_and_keeps_to_what_was_said() {
    let place = Place::new();
    let line = format!("train {LENET} --split auto --choose-budget 3s --workers 2 --max-steps 3 --run run");
    let output = place.output(&line);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("measured in "), "{}", text(&output.stderr));
    assert!(place.read_text("run/config.toml").contains("workers = 2"));
    let table = place.run(&format!("choose {LENET} --workers 2 --choose-budget 3s"));
    for words in ["▸ 2 ", "2 workers were asked for", "--again measures anew", "more threads than this node has cores"]
    {
        assert!(table.contains(words), "`{words}` is missing:\n{table}");
    }
    for more in ["3s --again", "3.5s"] {
        let anew = place.run(&format!("choose {LENET} --workers 2 --choose-budget {more}"));
        assert!(anew.contains("and kept") && !anew.contains("--again"), "{more}: {anew}");
    }
}

#[test]
fn workers_that_were_typed_are_those_that_are_chosen_whatever_carries_them() {
    for (typed, flag) in
        [("-w2 --carry thread --schedule cosine", "--replicas 2"), ("--workers=2 --carry tcp", "--workers 2")]
    {
        let place = Place::new();
        let line = format!("{LENET} {typed} --choose-budget 3s");
        let found = place.json(&format!("choose {line} --json"));
        let command = found["command"].as_str().unwrap().strip_prefix("paceline ").unwrap();
        assert!(
            command.contains(flag) && command.matches("=2").count() + command.matches("-w2").count() == 0,
            "{command}"
        );
        place.run(&format!("{command} --max-steps 2 --run typed"));
        place.run(&format!("train {line} --split auto --max-steps 2 --run run"));
        for run in ["typed", "run"] {
            assert!(place.read_text(&format!("{run}/config.toml")).contains("workers = 2"), "{run}: {command}");
        }
    }
}

#[test]
fn what_does_not_fit_the_memory_is_no_answer() {
    let place = Place::new();
    let line = "--model lenet5 --data synthetic:32x32x1/10/1024 --batch 512 --calibrate off --choose-budget 15s";
    place.refuses(
        &format!("choose {line} --memory-limit 20MB"),
        &[
            "no set-up could be measured",
            "1 replica × 1 thread: a process needs",
            "--memory-limit allows each process 20 MB",
        ],
    );
    let found = place.json(&format!("choose {line} --memory-limit 60MB --json"));
    assert!(named(&found, "1 replica × 1 thread")["why_not"].as_str().unwrap().contains("60 MB"), "{found}");
    assert!(found["chosen"].as_str().unwrap().starts_with("2 stages"), "{found}");
    assert!(
        named(&found, found["chosen"].as_str().unwrap())["memory_bytes"].as_u64().unwrap() < 120_000_000,
        "{found}"
    );
}

#[test]
fn what_choose_decides_itself_is_refused() {
    let place = Place::new();
    for (flags, words) in [
        ("--split pipeline:2", "leave --split out"),
        ("--cuts conv2", "leave --cuts out"),
        ("--cluster file --job worker --task 0", "leave --cluster out"),
        ("--link-bandwidth 1", "--nodes"),
        ("--run run", "leave --run out"),
        ("--choose-budget soon", "--choose-budget"),
        ("--batch 0", "--batch"),
        ("--data folder:nowhere", "no folder"),
        ("--model lenet6", "lenet5"),
    ] {
        place.refuses(&format!("choose {flags}"), &[words]);
    }
    place.refuses("choose --resume run", &["in place of --resume"]);
}

#[test]
fn several_nodes_are_compared_with_one() {
    let place = Place::new();
    let line = format!("choose {LENET} --nodes 4 --choose-budget 6s");
    // 62 thousand numbers for steps of a millisecond: over a slow link they take ten times as long.
    let slow = place.json(&format!("{line} --link-bandwidth 0.1 --json"));
    assert_eq!(slow["between"]["distributes"], false, "{slow}");
    let fast = place.json(&format!("{line} --link-bandwidth 100 --link-latency 1 --json"));
    assert!(fast["kept_unix_s"].is_u64(), "the link is no part of what is measured: {fast}");
    let [alone, together] = ["alone_s", "together_s"].map(|field| fast["between"][field].as_f64().unwrap());
    assert_eq!(fast["between"]["distributes"].as_bool(), Some(together < alone), "{fast}");
    assert!(slow["between"]["exchange_s"].as_f64() > fast["between"]["exchange_s"].as_f64(), "{slow}");
    let said = place.run(&format!("{line} --link-bandwidth 0.1"));
    assert!(said.contains("one node alone is faster: 4 nodes are expected to take"), "{said}");
    assert!(!said.lines().last().unwrap().contains("--nodes"), "{said}");
}

#[test]
fn a_search_that_is_interrupted_ends_at_once_and_leaves_nothing() {
    if !has("kill", "a_search_that_is_interrupted_ends_at_once_and_leaves_nothing") {
        return;
    }
    let place = Place::new();
    let mut running = Running::start(&place, &format!("choose {LENET}"));
    let pid = running.pid();
    within(PATIENCE, "a set-up is measured", || left_behind(pid), || running.said());
    let told = Command::new("kill").args(["-INT", &pid.to_string()]).stdout(Stdio::null()).status().unwrap();
    assert!(told.success());
    assert_eq!(running.ends(PATIENCE).code(), Some(130), "{}", running.said());
    assert!(!left_behind(pid) && !place.cache().exists(), "{}", running.said());
}

#[test]
fn an_interruption_while_the_share_of_a_node_is_measured_is_one() {
    if !has("kill", "an_interruption_while_the_share_of_a_node_is_measured_is_one") {
        return;
    }
    let place = Place::new();
    place.run(&format!("choose {LENET} --choose-budget 2s"));
    // What is kept answers for the whole batch, so that what is measured is the share.
    let mut running = Running::start(&place, &format!("choose {LENET} --nodes 2 --choose-budget 4s"));
    let pid = running.pid();
    within(PATIENCE, "a set-up is measured", || left_behind(pid), || running.said());
    let told = Command::new("kill").args(["-INT", &pid.to_string()]).stdout(Stdio::null()).status().unwrap();
    assert!(told.success());
    assert_eq!(running.ends(PATIENCE).code(), Some(130), "{}", running.said());
}

#[test]
fn runs_that_are_timed_end_with_a_search_that_is_killed() {
    let place = Place::new();
    let mut running = Running::start(&place, &format!("choose {LENET} --workers 2 --carry tcp"));
    let pid = running.pid();
    // A launcher and its two workers, which stand still so that they do not end by themselves.
    // Whoever has threads has tied itself to the one that started it: that is the first thing it does.
    let has_threads = |pid: &u32| {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
        tasks.is_ok_and(|tasks| tasks.count() > 1)
    };
    let begun = || Some(timed_by(pid)).is_some_and(|timed| timed.len() > 2 && timed.iter().all(has_threads));
    within(PATIENCE, "processes are timed", begun, || running.said());
    let timed = timed_by(pid);
    timed.iter().for_each(|timed| tell(*timed, Tell::Stop));
    tell(pid, Tell::Kill);
    running.ends(PATIENCE);
    let until = Instant::now() + Duration::from_secs(10);
    while !timed_by(pid).is_empty() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    let left = timed_by(pid);
    left.iter().for_each(|left| tell(*left, Tell::Kill));
    let folders = std::fs::read_dir(std::env::temp_dir()).unwrap().flatten().map(|entry| entry.path());
    let own = format!("paceline-choose-{pid}-");
    for folder in folders.filter(|path| path.to_string_lossy().contains(&own)) {
        let mode = folder.metadata().unwrap().permissions().mode();
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(mode & 0o777, 0o700, "{}", folder.display());
    }
    assert!(left.is_empty(), "{left:?} of {timed:?} go on");
}
