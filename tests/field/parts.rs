//! A classifier of large linear layers by channels, between two hosts with a cable of 1 Gbit/s: what travels is what was planned, and a
//! fraction of what its gradients take.

use serde_json::Value;

use crate::ground::{Ground, has, say};
use crate::links::CABLE;
use crate::network::Network;

const HYBRID: &str = "--split features=replicate,classifier=channel:2";

/// Few samples of small images: its 120 million weights of linear layers are the same for any.
const TRAIN: &str = "train --model vgg16 --size 32 --data synthetic:32x32x3/10/40 --batch 4 --optimizer sgd --lr 0.001 --threads 1 \
                     --augment none --calibrate off --evaluate-every 1000 --carry tcp --quiet";

/// Bytes of packets beside what they carry, and of acknowledgements and heartbeats, for each byte of a message: 1 % were measured.
const BESIDE: f64 = 0.04;

/// Bytes that leave a host in each step, and the seconds of the last one. What else travels is the same in a short run and a long one.
fn measured(ground: &Ground, network: &Network, way: &str, run: &str) -> (f64, f64) {
    let sent = |steps: u64| {
        let before = network.sent_bytes(0);
        let line = format!("PACELINE {TRAIN} {way} --max-steps {steps} --run {run}-{steps}");
        network.run(ground, 0..2, &line, &[]);
        network.sent_bytes(0) - before
    };
    let (short, long) = (sent(1), sent(3));
    let events = std::fs::read_to_string(ground.path(&format!("{run}-3/events/rank-0.jsonl"))).unwrap();
    let mut events = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let last = events.rfind(|event| event["event"] == "step").unwrap()["seconds"].as_f64().unwrap();
    ((long - short) as f64 / 2.0, last)
}

#[test]
#[ignore = "cargo x ci: field"]
fn a_classifier_by_channels_sends_what_was_planned() {
    let test = "a_classifier_by_channels_sends_what_was_planned";
    if !has(&["ip", "tc"], test) {
        return;
    }
    let ground = Ground::new();
    let Some(network) = Network::new(2, CABLE, test) else { return };
    let plan = format!("plan --model vgg16 --size 32 --classes 10 --batch 4 {HYBRID} --balance arithmetic --json");
    let plan: Value = serde_json::from_str(ground.run(&format!("PACELINE {plan}")).trim()).unwrap();
    let part = &plan["parts"][0];
    let of = |value: &Value| value["sent_bytes"].as_f64().unwrap();
    let planned = of(&part["forward"]) + of(&part["backward"]);
    let classifier = plan["layers"].as_array().unwrap().iter().find(|layer| layer["name"] == "classifier").unwrap();
    let (apart, replicated) = (of(&classifier["forward"]) + of(&classifier["backward"]), of(&classifier["replicated"]));
    let (sent, step_s) = measured(&ground, &network, HYBRID, "parts");
    let (sent_whole, whole_s) = measured(&ground, &network, "--workers 2", "workers");
    say(&format!(
        "vgg16 on two hosts, 1 Gbit/s: in parts {:.1} MB a step and {step_s:.2} s, {:.1} MB planned; by all-reduce {:.1} MB and {whole_s:.2} s, \
         {:.1} MB planned; the classifier by channels {:.1} KB, its gradients {:.1} MB",
        sent / 1e6,
        planned / 1e6,
        sent_whole / 1e6,
        of(&plan["replicated"]["all_reduce"]) / 1e6,
        apart / 1e3,
        replicated / 1e6
    ));
    assert!((planned..planned * (1.0 + BESIDE) + 1e5).contains(&sent), "{sent} bytes, {planned} planned");
    assert!(3.0 * apart < replicated, "{apart} bytes for the classifier, {replicated} for its gradients");
    assert!(3.0 * sent < sent_whole, "{sent} bytes in parts, {sent_whole} by all-reduce");
}
