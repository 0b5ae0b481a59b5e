//! Several nodes or the best of them alone: hosts that each measure themselves, and what they decide held against what steps take.

use std::path::Path;

use serde_json::Value;

use crate::ground::{Ground, has, say};
use crate::links::{CABLE, measured};
use crate::network::{Cable, Network};

const LENET: &str = "--model lenet5 --data synthetic:32x32x1/10/640 --batch 16 --calibrate off";
const RESNET: &str = "--model resnet20 --data synthetic:32x32x3/10/640 --batch 32 --calibrate off";

/// Each host has a core to itself.
const PINNED: &str = "exec taskset -c $RANK \"$@\"\n";

fn cable(rate: u64) -> Cable {
    Cable { rate: Some(rate), ..CABLE }
}

fn gbit(rate: u64) -> f64 {
    rate as f64 / 1e9
}

/// Hosts that have a core each.
fn pinned(ground: &Ground) {
    std::fs::write(ground.path("pinned.sh"), PINNED).unwrap();
}

/// Which processes began a run, by rank, and with how many workers.
fn runs(ground: &Ground, name: &str) -> Vec<(usize, String)> {
    let config = |rank: usize| std::fs::read_to_string(ground.path(&format!("{name}-{rank}/config.toml")));
    (0..2).filter_map(|rank| Some((rank, config(rank).ok()?))).collect()
}

#[test]
#[ignore = "cargo x ci: field"]
fn hosts_measure_themselves_and_decide_alike() {
    let test = "hosts_measure_themselves_and_decide_alike";
    if !has(&["ip", "tc", "taskset"], test) {
        return;
    }
    let ground = Ground::new();
    pinned(&ground);
    // Each process names the folder after its rank: who makes one is seen.
    std::fs::write(ground.path("train.sh"), "exec taskset -c $RANK \"$@\" --run $NAME-$RANK\n").unwrap();
    let line =
        |model: &str| format!("sh train.sh PACELINE train {model} --split auto --choose-budget 8s --max-steps 4");
    {
        let Some(network) = Network::new(2, cable(100_000_000), test) else { return };
        // Sixty thousand numbers for steps of some milliseconds: one node does not wait for the other.
        let said = &network.run(&ground, 0..2, &line(LENET), &[("NAME", "slow")])[0].said;
        assert!(said.contains("2 nodes (") && said.contains("one node alone is faster"), "{said}");
        assert!(said.contains("--distribute for all"), "{said}");
        let runs = runs(&ground, "slow");
        assert_eq!(runs.len(), 1, "one of them trains: {said}");
        assert!(runs[0].1.contains("workers = 1"), "{}", runs[0].1);
        // Unless told otherwise.
        let told = format!("{} --distribute", line(LENET));
        network.run(&ground, 0..2, &told, &[("NAME", "told")]);
        assert!(ground.path("told-0/config.toml").exists() && !ground.path("told-1").exists());
        // What was measured is kept, and the same is decided from it.
        let kept = &network.run(&ground, 0..2, &line(LENET), &[("NAME", "kept")])[0].said;
        assert!(kept.contains("one node alone is faster"), "{kept}");
    }
    let Some(network) = Network::new(2, cable(1_000_000_000), test) else { return };
    let said = &network.run(&ground, 0..2, &line(RESNET), &[("NAME", "fast")])[0].said;
    assert!(said.contains("2 nodes are expected to take"), "{said}");
    let config = std::fs::read_to_string(ground.path("fast-0/config.toml")).unwrap();
    assert!(config.contains("workers = 2") && config.contains("split = \"replicate\""), "{config}");
    // The table is that of rank 0, with what all decided.
    let words = format!("sh pinned.sh PACELINE choose {RESNET} --choose-budget 8s --json");
    let done = network.run(&ground, 0..2, &words, &[]);
    let found: Value = serde_json::from_str(done[0].said.lines().last().unwrap()).unwrap();
    assert_eq!(found["between"]["distributes"], true, "{found}");
    assert_eq!(found["between"]["nodes"].as_array().unwrap().len(), 2, "{found}");
    assert!(!done[1].said.contains("between"), "{}", done[1].said);
}

/// The median step of a run, without the first ones.
fn step_s(run: &Path) -> f64 {
    let events = std::fs::read_to_string(run.join("events/rank-0.jsonl")).unwrap();
    let events = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut steps: Vec<f64> = events
        .filter(|event| event["event"] == "step")
        .map(|event| event["seconds"].as_f64().unwrap())
        .skip(2)
        .collect();
    steps.sort_by(f64::total_cmp);
    steps[steps.len() / 2]
}

/// A cell: whether one node was said to be faster, and whether it is. Where both take the same, both are right.
fn judge(name: &str, found: &Value, (alone_s, together_s): (f64, f64)) -> bool {
    const SAME: f64 = 1.05;
    let between = &found["between"];
    let [said_alone_s, said_s] = ["alone_s", "together_s"].map(|field| between[field].as_f64().unwrap());
    let said = between["distributes"].as_bool().unwrap();
    let faster_together = together_s < alone_s;
    let is_tie = together_s.max(alone_s) < SAME * together_s.min(alone_s);
    let right = is_tie || said == faster_together;
    say(&format!(
        "| {name} | {:.1} | {:.1} | {:.1} | {:.1} | {} | {} |",
        said_alone_s * 1e3,
        alone_s * 1e3,
        said_s * 1e3,
        together_s * 1e3,
        if said { "all" } else { "one" },
        match (is_tie, right) {
            (true, _) => "a tie",
            (_, true) => "right",
            _ => "wrong",
        }
    ));
    right
}

/// Two hosts with a core each, real steps: what they decide together is what is faster.
#[test]
#[ignore = "cargo x long: steps of large models over slow links"]
fn one_node_is_said_to_be_faster_where_it_is() {
    let test = "one_node_is_said_to_be_faster_where_it_is";
    if !has(&["ip", "tc", "taskset"], test) {
        return;
    }
    let ground = Ground::new();
    pinned(&ground);
    let mut wrong = Vec::new();
    for (model, data, batch, steps) in [
        ("lenet5", "32x32x1", 32, 8),
        ("cnn5", "32x32x3", 32, 8),
        ("resnet20", "32x32x3", 8, 8),
        ("resnet20", "32x32x3", 32, 8),
        ("mobilenet", "64x64x3", 32, 6),
        ("alexnet", "64x64x3", 32, 4),
    ] {
        for rate in [100_000_000, 1_000_000_000] {
            let Some(network) = Network::new(2, cable(rate), test) else { return };
            let training = format!("--model {model} --data synthetic:{data}/10 --batch {batch}");
            let choose = format!("sh pinned.sh PACELINE choose {training} --choose-budget 30s --json");
            let done = network.run(&ground, 0..2, &choose, &[]);
            let found: Value = serde_json::from_str(done[0].said.lines().last().unwrap()).unwrap();
            let cell = format!("{model}-{batch}-{rate}");
            let rehearse = |split: &str| {
                format!(
                    "sh pinned.sh PACELINE train {training} {split} --quiet --epochs 100000 --rehearse={steps}:3 --run {cell}"
                )
            };
            let timed = |hosts: usize, line: &str| {
                network.run(&ground, 0..hosts, line, &[]);
                let seconds = step_s(&ground.path(&cell));
                std::fs::remove_dir_all(ground.path(&cell)).unwrap();
                seconds
            };
            let together_s = timed(2, &rehearse("--split replicate"));
            let alone_s = timed(1, &rehearse("--split replicate --threads 1"));
            let name = format!("{model}, batch {batch} | 2 | {}", gbit(rate));
            if !judge(&name, &found, (alone_s, together_s)) {
                wrong.push(name);
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// More hosts and faster links than this machine has: a device that takes the measured time computes, and at 10 Gbit/s time is dilated:
/// links and computing are slower by the same factor.
#[test]
#[ignore = "cargo x long: steps of large models over slow links"]
fn one_node_is_said_to_be_faster_where_it_would_be() {
    let test = "one_node_is_said_to_be_faster_where_it_would_be";
    if !has(&["ip", "tc"], test) {
        return;
    }
    let ground = Ground::new();
    let mut wrong = Vec::new();
    for (model, slowest) in [
        ("mobilenet", 100_000_000),
        ("googlenet", 100_000_000),
        ("resnet50", 1_000_000_000),
        ("alexnet", 1_000_000_000),
    ] {
        for (hosts, rate, dilated) in
            [(4, 100_000_000, 1), (4, 1_000_000_000, 1), (2, 10_000_000_000, 10), (4, 10_000_000_000, 10)]
        {
            if rate < slowest {
                continue;
            }
            let Some(network) = Network::new(hosts, cable(rate / dilated), test) else { return };
            let line = format!(
                "PACELINE choose --model {model} --data synthetic:224x224x3/10 --batch 16 --choose-budget 60s --nodes {hosts} --link-bandwidth {} --json",
                gbit(rate)
            );
            let found: Value = serde_json::from_str(ground.run(&line).lines().last().unwrap()).unwrap();
            let node = &found["between"]["nodes"][0];
            let [alone_s, share_s] = ["alone_s", "share_s"].map(|field| node[field].as_f64().unwrap());
            let told = measured(&ground, &network, 0..hosts, &format!("overlap {model} {}", share_s * dilated as f64));
            let together_s = told.iter().map(|told| told[2]).fold(0.0, f64::max) / dilated as f64;
            let name = format!("{model} 224², batch 16 | {hosts} | {}", gbit(rate));
            if !judge(&name, &found, (alone_s, together_s)) {
                wrong.push(name);
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}
