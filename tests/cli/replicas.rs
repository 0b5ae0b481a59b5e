//! `--replicas N`: the same training by threads of one process.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use paceline::prelude::*;
use paceline::system::process::{Tell, tell};

use crate::place::{Place, QUICK};
use crate::running::{PATIENCE, Running, within};

/// A network with batch-norm, and one without.
const MODELS: [(&str, &str); 2] = [
    (
        "cnn5",
        "train --model cnn5 --data synthetic:16x16x3/10/160 --batch 16 --optimizer adam --lr 0.01 --calibrate off --quiet",
    ),
    (
        "lenet5",
        "train --model lenet5 --data synthetic:32x32x3/10/160 --batch 16 --optimizer momentum --lr 0.01 --calibrate off --quiet",
    ),
];

/// More steps than anybody waits for.
const LONG: &str = "--model mlp --data synthetic:8x8x3/10/4096 --batch 8 --epochs 1000";

#[test]
fn replicas_have_the_bits_of_processes() {
    let place = Place::new();
    for (model, line) in MODELS {
        for count in [2, 4] {
            let (threads, processes) = (format!("{model}-{count}-threads"), format!("{model}-{count}-processes"));
            place.run(&format!("{line} --max-steps 10 --replicas {count} --run {threads}"));
            place.run(&format!("{line} --max-steps 10 --workers {count} --carry shm --run {processes}"));
            assert!(place.weights(&threads, 10) == place.weights(&processes, 10), "{model}, {count} replicas");
            for rank in 0..count {
                assert!(place.path(&format!("{threads}/events/rank-{rank}.jsonl")).exists());
            }
        }
    }
}

#[test]
fn statistics_of_all_replicas_have_the_bits_of_processes() {
    let place = Place::new();
    let line = format!("{} --max-steps 6 --sync-batch-norm", MODELS[0].1);
    place.run(&format!("{line} --replicas 2 --run threads"));
    place.run(&format!("{line} --workers 2 --carry shm --run processes"));
    assert!(place.weights("threads", 6) == place.weights("processes", 6));
}

#[test]
fn servers_are_threads_too() {
    let place = Place::new();
    for (model, line) in MODELS {
        let line = format!("{line} --max-steps 10 --agree parameter-server --servers 2");
        place.run(&format!("{line} --replicas 2 --run {model}-threads"));
        place.run(&format!("{line} --workers 2 --carry shm --run {model}-processes"));
        let (threads, processes) = (format!("{model}-threads"), format!("{model}-processes"));
        assert!(place.weights(&threads, 10) == place.weights(&processes, 10), "{model}");
        assert!(place.path(&format!("{threads}/events/rank-3.jsonl")).exists(), "the second server's");
    }
    let asynchronous =
        format!("train {QUICK} --replicas 2 --agree parameter-server --staleness 1 --max-steps 11 --quiet");
    place.run(&format!("{asynchronous} --run asynchronous"));
}

#[test]
fn a_run_goes_on_with_other_replicas_and_other_processes() {
    let place = Place::new();
    for (model, line) in MODELS {
        let (whole, parts) = (format!("{model}-whole"), format!("{model}-parts"));
        place.run(&format!("{line} --epochs 9 --replicas 2 --max-steps 14 --run {whole}"));
        place.run(&format!("{line} --epochs 9 --replicas 2 --max-steps 6 --run {parts}"));
        let config = place.read_text(&format!("{parts}/config.toml"));
        assert!(config.contains("workers = 2\n") && config.contains("carry = \"thread\"\n"), "{config}");
        place.run(&format!("train --resume {parts} --max-steps 14 --calibrate off --quiet"));
        assert!(place.path(&format!("{parts}/events/rank-1.jsonl")).exists());
        let losses =
            |run: &str| -> Vec<f64> { place.events(run).iter().filter_map(|event| event["loss"].as_f64()).collect() };
        assert_eq!(losses(&whole), losses(&parts), "{model}");
        // Running statistics of batch-norms were averaged once more; nothing that is trained depends on them.
        assert!(model == "cnn5" || place.weights(&whole, 14) == place.weights(&parts, 14), "{model}");
        for (steps, way) in
            [(16, "--replicas 4"), (18, "--workers 2 --carry auto"), (20, "--replicas 3"), (22, "--replicas 1")]
        {
            place.run(&format!("train --resume {parts} --max-steps {steps} {way} --quiet"));
            assert!(place.path(&format!("{parts}/checkpoints/step-{steps:08}")).exists(), "{model} {way}");
        }
        let evaluated = place.json(&format!("evaluate {whole} --json"));
        let events = place.events(&whole);
        let told = events.iter().rev().find_map(|event| event["val_top1"].as_f64()).unwrap();
        assert!((evaluated["top1"].as_f64().unwrap() - told).abs() < 1e-9, "{evaluated} for {told}");
    }
}

#[test]
fn what_replicas_cannot_be_is_refused() {
    let place = Place::new();
    let line = format!("train {QUICK} --run run");
    let refusals: [(&str, &[&str]); 7] = [
        ("--replicas 2 --workers 3", &["type --replicas 2 or --workers 3 alone"]),
        ("--replicas 2 --hosts a,b", &["one machine", "--hosts a:2"]),
        ("--replicas 2 --cluster spec.json --job worker --task 0", &["one machine", "leave --replicas out"]),
        ("--replicas 2 --carry tcp", &["type --replicas 2 alone, or --workers 2 --carry tcp"]),
        ("--replicas 2 --device cuda", &["--carry thread", "type --workers 2"]),
        ("--carry thread --hosts a,b", &["one process of one machine", "type --carry auto"]),
        ("--replicas 9", &["--batch 8 is too small for 9 workers", "type --batch 9 or more"]),
    ];
    for (flags, words) in refusals {
        place.refuses(&format!("{line} {flags}"), words);
    }
    let mut member = place.command(&format!("{line} --replicas 2"));
    let variables = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29999")];
    let output = member.envs(variables).output().unwrap();
    let said = crate::place::text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("by RANK and WORLD_SIZE there are 2; type --carry auto"), "{said}");
    place.refuses("bench scaling --workers 2 --carry thread", &["leave --carry thread out"]);
    place.refuses("train --model mlp --data folder:nowhere --replicas 2 --run run", &["no folder data in"]);
}

#[test]
fn one_process_of_a_launcher_has_all_replicas() {
    let place = Place::new();
    let mut member = place.command(&format!("train {QUICK} --max-steps 4 --replicas 2 --run run"));
    let variables = [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29999")];
    let output = member.envs(variables).output().unwrap();
    let said = crate::place::text(&output.stdout);
    assert!(output.status.success() && said.contains("2 replicas × "), "{said}");
}

#[test]
fn a_replica_that_fails_is_named_and_ends_the_run() {
    let place = Place::new();
    for number in 0..24 {
        for class in 0..2 {
            place.write_png(&format!("photos/train/{class}/{number}.png"), 16, class, number);
            place.write_png(&format!("photos/val/{class}/{number}.png"), 16, class, number);
        }
    }
    let whole = place.read("photos/train/1/7.png");
    place.write("photos/train/1/7.png", &whole[..whole.len() / 2]);
    let train = "train --model lenet5 --data folder:photos --size 32 --batch 8 --epochs 3 --calibrate off --quiet";
    // Who has the picture follows from the seed: each of the two in one of these.
    let mut named = [false; 2];
    for seed in 0..8 {
        let words = ["photos/train/1/7.png is damaged", "--damaged-max 1"];
        let said = place.fails(&format!("{train} --seed {seed} --replicas 2 --run run{seed}"), 1, &words);
        named[usize::from(said.contains("error: rank 1 on "))] = true;
    }
    assert_eq!(named, [true; 2], "rank 0 speaks of itself without its number");
}

#[test]
fn a_signal_saves_all_replicas() {
    for (what, code) in [(Tell::Interrupt, 130), (Tell::Terminate, 143)] {
        let place = Place::new();
        let mut run = Running::start(&place, &format!("train {LONG} --replicas 2 --run run --quiet"));
        run.steps(3);
        tell(run.pid(), what);
        assert_eq!(run.ends(PATIENCE).code(), Some(code), "{}", run.said());
        let events = place.events("run");
        let (last, before) = (&events[events.len() - 1], &events[events.len() - 2]);
        assert_eq!((&last["reason"], &before["event"]), (&"interrupted".into(), &"checkpoint".into()));
        let step = last["step"].as_u64().unwrap();
        place.run(&format!("train --resume run --max-steps {} --quiet", step + 2));
    }
}

#[test]
fn a_process_with_replicas_that_is_killed_is_started_again() {
    let place = Place::new();
    let line = "train --model mlp --data synthetic:8x8x3/10/4800 --batch 8 --max-steps 500 --checkpoint-every 100 --optimizer momentum \
                --lr 0.01 --calibrate off --quiet --replicas 2";
    place.run(&format!("{line} --run straight"));
    let mut run = Running::start(&place, &format!("{line} --restart 2 --run run"));
    within(PATIENCE, "a checkpoint", || !run.events(0, "checkpoint").is_empty(), || run.said());
    tell(run.process_of(0), Tell::Kill);
    assert_eq!(run.ends(PATIENCE).code(), Some(0), "{}", run.said());
    assert_eq!(run.said().matches("starting again from step ").count(), 1, "{}", run.said());
    assert!(place.weights("run", 500) == place.weights("straight", 500));
}

/// The memory that a command held in MiB, each page counted once however often it is mapped: the most of its own, and what was to be shared
/// while it trained. While pages are mapped or let go of, one may count twice: so of all looks that saw much of it, the one in the middle.
fn held(place: &Place, line: &str) -> [u64; 2] {
    let mut run = Running::start(place, line);
    let (mut most, mut shared) = (0, Vec::new());
    while run.goes_on() {
        let text = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", run.pid())).unwrap_or_default();
        let mebibytes = |name: &str| {
            let number = text.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB"));
            number.map_or(0, |number| number.trim().parse::<u64>().unwrap() >> 10)
        };
        most = most.max(mebibytes("Pss_Anon:"));
        shared.push(mebibytes("Pss_Shmem:"));
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(run.ends(PATIENCE).success(), "{}", run.said());
    let much = shared.iter().max().map_or(0, |most| most / 2);
    shared.retain(|&seen| seen >= much);
    shared.sort_unstable();
    [most, shared[shared.len() / 2]]
}

#[test]
fn weights_and_optimizer_are_there_once() {
    // 14 million weights and Adam's two buffers of as many; next to nothing else.
    let line = "train --model mlp --data synthetic:96x96x3/10/64 --augment none --batch 4 --max-steps 24 --threads 1 --calibrate off \
                --optimizer adam --checkpoint-minutes 0 --run run --quiet";
    let (one, four) = (Place::new(), Place::new());
    let plan = one.json("plan --model mlp --size 96 --classes 10 --batch 4 --json");
    let weights = (4 * plan["parameters"].as_u64().unwrap()) >> 20;
    let ([alone, _], [beside, shared]) = (held(&one, line), held(&four, &format!("{line} --replicas 4")));
    assert!(alone > 3 * weights, "{alone} with weights of {weights}");
    // One copy of weights and optimizer, and the gradients of four.
    assert!((7 * weights..8 * weights).contains(&shared), "{shared} with weights of {weights}");
    // Before they share them, all have weights of their own; later four have less beside them than one has with them.
    assert!(beside < alone.max(4 * weights) + weights, "{beside} for {alone} of one with weights of {weights}");
}

fn linear(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
    let x = net.flatten(x)?;
    net.linear("fc", x, classes)
}

fn own(model: &str) -> Config {
    let data = "synthetic:8x8x3/10/64".into();
    Config {
        model: model.into(),
        data,
        batch: 8,
        workers: 2,
        carry: Carry::THREAD,
        epochs: 1,
        threads: Some(1),
        ..Config::default()
    }
}

#[test]
fn a_program_trains_by_replicas_in_its_own_process() {
    let place = Place::new();
    let run = Run::new(own("mine")).model("mine", linear).folder(place.path("run")).quiet().stop(Stop::new());
    let trained = run.train().unwrap();
    assert_eq!(trained.outcome().step, 8);
    assert!(place.path("run/events/rank-1.jsonl").exists());
    assert_eq!(trained.predictor().unwrap().predict_values(&[0.5; 8 * 8 * 3], 1).unwrap().len(), 1);
    let resumed = Run::resume(place.path("run"), |config| (config.epochs, config.workers) = (2, 3));
    assert_eq!(resumed.model("mine", linear).quiet().stop(Stop::new()).train().unwrap().outcome().step, 16);
    assert!(place.path("run/events/rank-2.jsonl").exists());
}

#[test]
fn a_replica_that_panics_is_named_and_ends_the_run() {
    static HAPPENED: AtomicBool = AtomicBool::new(false);
    for culprit in ["rank 0", "rank 1"] {
        let place = Place::new();
        // Rank 0 is this thread, which counts the memory of all before it starts the others.
        let test = std::thread::current().id();
        let builds = AtomicUsize::new(0);
        let model = move |net: &mut Net, x: Value, classes: usize| {
            let first = std::thread::current().id() == test;
            let fails = if first {
                culprit == "rank 0" && builds.fetch_add(1, Ordering::SeqCst) >= 4
            } else {
                std::thread::current().name() == Some(culprit)
            };
            if fails {
                HAPPENED.store(true, Ordering::SeqCst);
                panic!("as the test wants it");
            }
            linear(net, x, classes)
        };
        let run = Run::new(own("mine")).model("mine", model).folder(place.path("run")).quiet().stop(Stop::new());
        let error = run.train().unwrap_err().to_string();
        assert!(HAPPENED.swap(false, Ordering::SeqCst), "the fault fired");
        assert!(error.starts_with(&format!("{culprit} on ")) && error.contains("it panicked"), "{error}");
    }
}
