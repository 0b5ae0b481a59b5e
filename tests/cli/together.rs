//! `--workers`: the same training by several processes.

use crate::place::{Place, QUICK};

/// The losses of a run's steps, and the accuracy of its last evaluation.
fn course(place: &Place, run: &str) -> (Vec<f64>, f64) {
    let events = place.events(run);
    let losses = events.iter().filter(|event| event["event"] == "step").map(|event| event["loss"].as_f64().unwrap());
    let accuracy = events.iter().rev().find_map(|event| event["val_top1"].as_f64()).unwrap();
    (losses.collect(), accuracy)
}

#[test]
fn workers_train_as_one_process_does() {
    let place = Place::new();
    let line = format!("train {QUICK} --optimizer momentum --lr 0.01 --epochs 2 --quiet");
    place.run(&format!("{line} --run alone"));
    let (expected, accuracy) = course(&place, "alone");
    let ways = [
        "--workers 2",
        "--workers 4 --carry shm",
        "--workers 2 --carry tcp",
        "--workers 4 --carry tcp --sockets 3 --algorithm double-tree",
        "--workers 2 --carry tcp --tls",
        "--workers 2 --agree parameter-server",
        "--workers 2 --carry tcp --agree parameter-server --servers 2",
        "--workers 2 --accumulate 2 --clip-norm 1000",
    ];
    for (index, way) in ways.iter().enumerate() {
        let run = format!("run{index}");
        place.run(&format!("{line} {way} --run {run}"));
        let (losses, found) = course(&place, &run);
        assert_eq!(losses.len(), expected.len());
        for (step, (loss, expected)) in losses.iter().zip(&expected).enumerate() {
            assert!((loss - expected).abs() < 1e-4 * expected, "{way}: loss {loss} for {expected} at step {step}");
        }
        assert!((found - accuracy).abs() < 0.02, "{way}: accuracy {found} for {accuracy}");
        assert!(place.path(&format!("{run}/events/rank-1.jsonl")).exists());
        assert!(place.path(&format!("{run}/report.html")).exists());
    }
}

#[test]
fn a_model_with_batch_norm_trains_as_one_process_does() {
    let place = Place::new();
    let line = "train --model cnn5 --data synthetic:16x16x3/10/64 --batch 8 --optimizer momentum --lr 0.01 --max-steps 12 --quiet";
    place.run(&format!("{line} --run alone"));
    let (expected, _) = course(&place, "alone");
    let planned = place.run("plan --model cnn5 --batch 8 --workers 2 --sync-batch-norm");
    assert!(planned.contains("statistics of batch-norm layers: 15 sums"), "{planned}");
    for (run, way) in [("shm", "--workers 2"), ("tcp", "--workers 4 --carry tcp")] {
        place.run(&format!("{line} {way} --sync-batch-norm --run {run}"));
        let (losses, _) = course(&place, run);
        for (step, (loss, expected)) in losses.iter().zip(&expected).enumerate() {
            assert!((loss - expected).abs() < 1e-4 * expected, "{way}: loss {loss} for {expected} at step {step}");
        }
    }
}

/// Eight steps an epoch of a network with batch-norm.
const NORMALISED: &str = "--model cnn5 --data synthetic:8x8x3/10/64 --batch 8";

#[test]
fn servers_train_a_model_with_batch_norm_as_an_all_reduce_does() {
    let place = Place::new();
    let line = format!("train {NORMALISED} --optimizer momentum --lr 0.01 --epochs 2 --workers 2 --quiet");
    place.run(&format!("{line} --run reduced"));
    let (expected, accuracy) = course(&place, "reduced");
    for (index, way) in ["", "--servers 2 --carry tcp"].iter().enumerate() {
        let run = format!("served-{index}");
        place.run(&format!("{line} --agree parameter-server {way} --run {run}"));
        let (losses, found) = course(&place, &run);
        for (step, (loss, expected)) in losses.iter().zip(&expected).enumerate() {
            assert!((loss - expected).abs() < 1e-4 * expected, "{way}: loss {loss} for {expected} at step {step}");
        }
        assert!((found - accuracy).abs() < 0.02, "{way}: accuracy {found} for {accuracy}");
        let evaluated = place.json(&format!("evaluate {run} --json"));
        // It evaluates the best checkpoint.
        let events = place.events(&run);
        let best = events.iter().filter_map(|event| event["val_top1"].as_f64()).fold(0.0, f64::max);
        assert!((evaluated["top1"].as_f64().unwrap() - best).abs() < 1e-9, "{evaluated} for {best}");
    }
}

#[test]
fn asynchronous_workers_come_to_an_end() {
    let place = Place::new();
    for (model, name) in [(QUICK, "mlp"), (NORMALISED, "cnn5")] {
        for staleness in ["1", "none"] {
            let run = format!("{name}-{staleness}");
            let line = format!("train {model} --workers 2 --agree parameter-server --staleness {staleness} --quiet");
            place.run(&format!("{line} --epochs 2 --max-steps 11 --run {run}"));
            // Which worker computes a portion is whoever is free; where they end is said.
            let ended = || place.events(&run).last().and_then(|event| event["step"].as_u64());
            assert_eq!(ended(), Some(11));
            place.run(&format!("train --resume {run} --max-steps 16 --quiet"));
            assert_eq!(ended(), Some(16));
            place.run(&format!("evaluate {run}"));
            // Every step of both workers, by how many updates it had missed.
            let served = place.read_text(&format!("{run}/events/rank-2.jsonl"));
            let served = served.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
            let counts = served.filter_map(|event| event["missed"].as_object().cloned()).flatten();
            let steps: Vec<u64> = counts
                .flat_map(|(_, counts)| counts.as_array().cloned().unwrap())
                .map(|n| n.as_u64().unwrap())
                .collect();
            assert_eq!(steps.iter().sum::<u64>(), 2 * 16, "{run}: {steps:?}");
            place.run(&format!("report {run}"));
            assert!(place.read_text(&format!("{run}/report.html")).contains("Missed on average"));
        }
    }
}

#[test]
fn a_run_of_servers_with_batch_norm_goes_on_from_its_checkpoint() {
    for agree in ["all-reduce", "parameter-server", "parameter-server --servers 2"] {
        let place = Place::new();
        let line = format!("train {NORMALISED} --optimizer momentum --workers 2 --agree {agree} --quiet");
        place.run(&format!("{line} --epochs 2 --run whole"));
        place.run(&format!("{line} --epochs 2 --max-steps 11 --run parts"));
        place.run("train --resume parts --max-steps 16 --quiet");
        // Running statistics were averaged once more; nothing that is trained depends on them.
        let (whole, parts) = (course(&place, "whole"), course(&place, "parts"));
        assert_eq!(whole.0, parts.0, "{agree}");
        assert!((whole.1 - parts.1).abs() < 0.02, "{agree}: accuracy {} for {}", parts.1, whole.1);
    }
}

#[test]
fn a_run_of_workers_goes_on_from_its_checkpoint() {
    for agree in ["all-reduce", "parameter-server"] {
        let place = Place::new();
        let line = format!("train {QUICK} --optimizer momentum --workers 2 --agree {agree} --quiet");
        place.run(&format!("{line} --epochs 2 --run whole"));
        place.run(&format!("{line} --epochs 2 --max-steps 11 --run parts"));
        place.run("train --resume parts --max-steps 16 --quiet");
        let weights = "checkpoints/step-00000016/weights.safetensors";
        assert!(place.read(&format!("whole/{weights}")) == place.read(&format!("parts/{weights}")), "{agree}");
        // More or fewer workers may go on with it.
        place.run("train --resume parts --epochs 3 --max-steps 20 --workers 1 --agree all-reduce --quiet");
    }
}

#[test]
fn what_workers_cannot_share_is_refused() {
    let place = Place::new();
    let line = format!("train {QUICK} --run run");
    place.fails(
        &format!("{line} --workers 9 --oversubscribe"),
        2,
        &["--batch 8 is too small for 9 workers", "type --batch 9 or more"],
    );
    place.fails(&format!("{line} --staleness 2"), 2, &["--agree parameter-server"]);
    place.fails(&format!("{line} --workers 2 --algorithm spiral"), 2, &["--algorithm spiral is none", "double-tree"]);
    place.fails(&format!("{line} --workers 2 --sockets 1000"), 2, &["--sockets 1000 is too large", "at most 64"]);
    place.fails(&format!("{line} --workers 2 --tls=a.pem,b.pem"), 2, &["--tls takes three files"]);
    place.write("no.pem", "nothing");
    place.fails(&format!("{line} --workers 2 --tls=no.pem,no.pem,no.pem"), 2, &["--tls: the certificate holds no"]);
    if !cfg!(feature = "mpi") {
        place.fails(&format!("{line} --workers 2 --carry mpi"), 2, &["built without MPI", "--features mpi"]);
    }
    let servers = format!("{line} --workers 2 --agree parameter-server");
    place.fails(&format!("{servers} --clip-norm 1"), 2, &["--clip-norm", "--agree all-reduce"]);
    place.fails(&format!("{servers} --sync-batch-norm"), 2, &["--sync-batch-norm needs", "type --agree all-reduce"]);
    place.fails(&format!("{line} --sync-batch-norm"), 2, &["mlp has no batch-norm", "leave --sync-batch-norm out"]);
    assert!(!place.path("run").exists());
}

#[test]
fn a_plan_ranks_agreements_by_the_seconds_of_a_step() {
    let place = Place::new();
    // So much to send and so little to compute that bytes decide: 3.6 for one server of six workers, and as much again where one
    // bucket waits for another.
    let line = "plan --model vgg16 --size 32 --classes 10 --batch 6 --workers 6 --link-latency 1 --calibrate off";
    let found = place.json(&format!("{line} --json"))["agreements"].clone();
    let step_s = |name: &str| {
        let ranked = found["ranked"].as_array().unwrap();
        ranked.iter().find(|way| way["agreement"] == *name).unwrap()["step_s"].as_f64().unwrap()
    };
    let ring = step_s("all-reduce");
    let slower = step_s("parameter-server, 1 server on a machine of its own") / ring;
    assert!((3.5..4.5).contains(&slower), "{found}");
    assert!((step_s("parameter-server, 6 servers beside the workers") / ring - 1.0).abs() < 0.05, "{found}");
    let slowest = found["ranked"].as_array().and_then(|ranked| ranked.last()).cloned().unwrap_or_default();
    assert_eq!(slowest["machines"], 7, "one server is the slowest: {found}");
    // Weights of eight steps at once: so much less, and another training, which is no answer to which is the fastest.
    let rounds = step_s("local, weights every 8 steps: another training");
    assert!(
        rounds < ring && found["ranked"][0]["step_s"] == rounds && found["lead"].as_f64().unwrap() < 2.0,
        "{found}"
    );
    assert!(found["lead"].as_f64().unwrap() >= 1.0);
    let said = place.run(&format!("{line} --clip-norm 1"));
    assert!(said.contains("not in this run: --clip-norm needs") && said.contains("--balance time measures"), "{said}");
    let timed = place.run("plan --model lenet5 --batch 8 --workers 2 --balance time --calibrate off");
    assert!(timed.contains("measured on this machine"), "{timed}");
    place.refuses("plan --model lenet5 --balance time", &["--split and --workers"]);
}

#[test]
fn a_plan_shows_what_workers_send_each_other() {
    let place = Place::new();
    let said = place.run("plan --model resnet20 --batch 6 --workers 6 --calibrate off");
    assert!(said.contains("between 6 workers") && said.contains("rank 5: "), "{said}");
    let json = place.json("plan --model resnet20 --batch 6 --workers 6 --calibrate off --json");
    assert_eq!(json["messages"]["ranks"].as_array().unwrap().len(), 6);
    place.fails("plan --model resnet20 --batch 5 --workers 6", 2, &["type --batch 6 or more"]);
}
