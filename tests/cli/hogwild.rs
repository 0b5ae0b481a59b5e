//! `--agree hogwild`: threads that step by themselves on one buffer of weights.

use paceline::system::process::{Tell, tell};

use crate::place::{Place, text};
use crate::running::{PATIENCE, Running};

/// One with batch-norm, and one without.
const MODELS: [(&str, &str); 2] = [
    ("lenet5", "--model lenet5 --data synthetic:32x32x1/10/64"),
    ("cnn5", "--model cnn5 --data synthetic:8x8x3/10/64"),
];

/// Eight steps an epoch.
const LENGTH: &str = "--batch 8 --threads 1 --calibrate off --seed 3 --quiet --optimizer momentum --lr 0.005";

/// How many portions both ranks tell of in their events, and how many of those had missed updates.
fn missed(place: &Place, run: &str) -> (u64, u64) {
    let told = |rank: usize| -> Vec<u64> {
        let events = place.read_text(&format!("{run}/events/rank-{rank}.jsonl"));
        let lines = events.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        lines
            .filter(|line| line["event"] == "served")
            .flat_map(|line| {
                let counts: Vec<u64> = serde_json::from_value(line["missed"][rank.to_string()].clone()).unwrap();
                // Those that had missed nothing stand first.
                [counts[0], counts[1..].iter().sum()]
            })
            .collect()
    };
    let all = [0, 1].map(told).concat();
    let sum = |from: usize| all.iter().skip(from).step_by(2).sum::<u64>();
    (sum(0) + sum(1), sum(1))
}

/// Over evaluations and checkpoints inside of an epoch and at its end, to a run that goes on with as many and
/// with one.
#[test]
fn threads_on_one_buffer_train_evaluate_save_and_go_on() {
    let place = Place::new();
    for (run, model) in MODELS {
        let line =
            format!("train {model} {LENGTH} --epochs 4 --workers 2 --agree hogwild --checkpoint-every 5 --keep 9");
        place.run(&format!("{line} --max-steps 12 --run {run}"));
        for step in [5, 8, 10, 12] {
            assert!(!place.weights(run, step).is_empty());
        }
        let config = place.read_text(&format!("{run}/config.toml"));
        assert!(config.contains("agree = \"hogwild\"\n") && config.contains("carry = \"auto\"\n"), "{config}");
        // Two portions a step, each by whoever was free.
        assert_eq!(missed(&place, run).0, 24, "{run}: every portion is told of");
        let loss = || place.json(&format!("evaluate {run} --json"))["loss"].as_f64().unwrap();
        let before = loss();
        place.run(&format!("train --quiet --resume {run} --max-steps 24"));
        assert_eq!(missed(&place, run).0, 48, "{run}");
        place.run(&format!("train --quiet --resume {run} --workers 1 --max-steps 26"));
        assert!(before.is_finite() && loss().is_finite(), "{before}, {}", loss());
        place.run(&format!("report {run}"));
        assert!(place.read_text(&format!("{run}/report.html")).contains("<h2>Staleness</h2>"), "{run}");
    }
}

/// Each thread has a copy of its own, and changes go round after every step.
#[test]
fn herds_train_and_go_on_from_the_mean_of_their_copies() {
    let place = Place::new();
    let (_, model) = MODELS[1];
    let line = format!("train {model} {LENGTH} --epochs 4 --workers 2 --agree hogwild --herds 2 --period 1");
    place.run(&format!("{line} --max-steps 12 --run run"));
    place.run("train --quiet --resume run --max-steps 20");
    place.run("train --quiet --resume run --herds 1 --max-steps 24");
    place.fails("train --quiet --resume run --workers 1 --herds 2 --max-steps 28", 2, &["--herds 1 or less"]);
    let losses: Vec<f64> = place.events("run").iter().filter_map(|event| event["val_loss"].as_f64()).collect();
    assert!(losses.len() >= 4 && losses.iter().all(|loss| loss.is_finite()), "{losses:?}");
}

#[test]
fn a_signal_is_heard_by_threads_that_do_not_wait_for_each_other() {
    let place = Place::new();
    let line = "train --model mlp --data synthetic:8x8x3/10/4096 --batch 8 --epochs 1000 --replicas 2 --agree hogwild --run run --quiet";
    let mut run = Running::start(&place, line);
    run.steps(3);
    tell(run.pid(), Tell::Interrupt);
    assert_eq!(run.ends(PATIENCE).code(), Some(130), "{}", run.said());
    let events = place.events("run");
    let (last, before) = (&events[events.len() - 1], &events[events.len() - 2]);
    assert_eq!((&last["reason"], &before["event"]), (&"interrupted".into(), &"checkpoint".into()));
    let step = last["step"].as_u64().unwrap();
    place.run(&format!("train --resume run --max-steps {} --quiet", step + 2));
}

#[test]
fn what_does_not_go_together_is_refused_with_what_to_type() {
    let place = Place::new();
    let cases = [
        ("--workers 2 --carry tcp", "leave --carry out"),
        ("--workers 2 --carry shm", "--agree all-reduce"),
        ("--workers 2 --device cuda", "--device cpu"),
        ("--workers 2 --staleness 2", "--agree parameter-server"),
        ("--workers 2 --sync-batch-norm", "--agree all-reduce"),
        ("--workers 2 --shard optimizer", "--shard none"),
        ("--workers 2 --squeeze bf16", "--squeeze none"),
        ("--workers 2 --checkpoint-minutes 5", "--checkpoint-every"),
        ("--workers 2 --outer-rate 0.7", "--agree local"),
        ("--workers 2 --herds 3", "--herds 2 or less"),
        ("--workers 2 --period 99", "--herds 2"),
        ("--workers 2 --agree local --herds 2", "--agree hogwild"),
        ("--workers 2 --agree all-reduce --herds 2", "leave it out"),
        ("--workers 2 --split pipeline:2", "leave --split out"),
        ("--workers 2 --split channel:2", "leave --split out"),
        ("--hosts a,b", "--agree all-reduce"),
    ];
    for (flags, typed) in cases {
        let agree = if flags.contains("--agree") { "" } else { "--agree hogwild" };
        place.refuses(&format!("train {agree} {flags}"), &[typed]);
    }
    let mut member = place.command("train --agree hogwild --workers 2");
    let variables = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29999")];
    let output = member.envs(variables).output().unwrap();
    let said = text(&output.stderr);
    assert!(
        output.status.code() == Some(2) && said.contains("type --agree all-reduce --carry auto in their place"),
        "{said}"
    );
    assert!(text(&place.output("train --help").stdout).contains("| hogwild"));
    let plan = place.run("plan --model lenet5 --workers 2");
    assert!(plan.contains("all-reduce") && !plan.contains("hogwild"), "no link is between threads: {plan}");
}

/// With nothing said beside it.
#[test]
#[ignore = "cargo x ci: agreements"]
fn the_default_training_learns() {
    let place = Place::new();
    place.run("train --workers 2 --agree hogwild --run run --quiet");
    let top1 = place.json("evaluate run --json")["top1"].as_f64().unwrap();
    assert!(top1 >= 0.93, "{top1}");
    let (portions, some) = missed(&place, "run");
    assert_eq!(portions, 1000, "every portion is told of");
    assert!(some > 0, "two threads at once miss something");
}
