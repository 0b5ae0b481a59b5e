//! Every way to agree over every way to travel, with a batch-norm model and one without: from the start over
//! evaluations and checkpoints to a run that was resumed and is evaluated. Synchronous ways are one process,
//! to the last digits but one.

use crate::place::Place;

/// How far a synchronous run may be from one process, in parts of the loss.
const TOLERANCE: f64 = 1e-5;

/// Eight steps an epoch.
const LEARNING: &str = "--batch 8 --optimizer momentum --lr 0.005 --seed 3 --quiet";

/// A model and its data.
struct Trained {
    name: &'static str,
    data: &'static str,
    /// What makes workers see the batch of all: statistics of their own are another model.
    as_one: &'static str,
}

const MODELS: [Trained; 2] = [
    Trained { name: "lenet5", data: "synthetic:32x32x1/10/64", as_one: "" },
    Trained { name: "cnn5", data: "synthetic:8x8x3/10/64", as_one: "--sync-batch-norm" },
];

/// A way to agree.
struct Way {
    flags: &'static str,
    servers: usize,
    /// Whether all workers are at the same step.
    synchronous: bool,
}

const ALL_REDUCE: Way = Way { flags: "--agree all-reduce", servers: 0, synchronous: true };
const SERVER: Way = Way { flags: "--agree parameter-server --servers 1", servers: 1, synchronous: true };
const BOUNDED: Way =
    Way { flags: "--agree parameter-server --servers 1 --staleness 2", servers: 1, synchronous: false };
const FREE: Way =
    Way { flags: "--agree parameter-server --servers 1 --staleness none", servers: 1, synchronous: false };

const LOCAL: Way = Way { flags: "--agree local --period 3", servers: 0, synchronous: false };
const OUTER: Way =
    Way { flags: "--agree local --period 4 --outer-rate 0.7 --outer-momentum 0.9", servers: 0, synchronous: false };

const ELASTIC: Way = Way { flags: "--agree elastic --period 3", servers: 1, synchronous: false };
const DOWNPOUR: Way =
    Way { flags: "--agree downpour --fetch-every 2 --push-every 3 --servers 2", servers: 2, synchronous: false };
const DOGWILD: Way = Way { flags: "--agree dogwild --period 4", servers: 1, synchronous: false };
const BORROWED: Way = Way { flags: "--agree shm-async --period 3", servers: 1, synchronous: false };

/// How a command line is started by several processes.
fn several(carry: &str, processes: usize, test: &str) -> Option<String> {
    if carry != "mpi" {
        let tls = if carry == "tls" { " --tls" } else { "" };
        let carry = if carry == "tls" { "tcp" } else { carry };
        return Some(format!("paceline --workers 2 --carry {carry}{tls}"));
    }
    let mpirun = std::env::var("MPICC").unwrap_or_else(|_| "mpicc".into()).replace("mpicc", "mpirun");
    crate::place::has(&mpirun, test)
        .then(|| format!("{} paceline --carry mpi", crate::place::mpirun(&mpirun, processes)))
}

/// Runs `paceline train` as one process or as several.
fn train(place: &Place, start: &str, arguments: &str) {
    let program = env!("CARGO_BIN_EXE_paceline");
    let line = match start.split_once("paceline") {
        None => return drop(place.run(&format!("train {arguments}"))),
        Some((before, after)) => format!("{before}{program} train{after} {arguments}"),
    };
    let output = std::process::Command::new("sh")
        .args(["-c", &line])
        .current_dir(place.path(""))
        .env("PACELINE_CACHE", place.cache())
        .env_remove("PACELINE_ISA")
        .output()
        .unwrap();
    let (said, wrong) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{line}: {}\n{said}{wrong}", output.status);
}

/// The losses of a run's steps, in order, those after it was resumed behind the others.
fn losses(place: &Place, run: &str) -> Vec<f64> {
    let events = place.events(run);
    events.iter().filter(|event| event["event"] == "step").map(|event| event["loss"].as_f64().unwrap()).collect()
}

/// Trains for an epoch and a half, with an evaluation and checkpoints, goes on from there, and evaluates.
fn whole_run(place: &Place, start: &str, (model, flags): (&Trained, &str), run: &str) -> Vec<f64> {
    let Trained { name, data, .. } = model;
    let line = format!("--model {name} --data {data} {LEARNING} --epochs 2 {flags}");
    train(place, start, &format!("{line} --max-steps 12 --checkpoint-every 5 --keep 9 --run {run}"));
    assert!(place.path(&format!("{run}/checkpoints/step-00000005")).exists(), "{run}: a checkpoint inside an epoch");
    assert!(place.path(&format!("{run}/checkpoints/step-00000012")).exists(), "{run}: a checkpoint at the end");
    let resumed = if start.contains("mpirun") { "--resume" } else { "--quiet --resume" };
    train(place, start, &format!("{resumed} {run} --max-steps 16"));
    let events = place.events(run);
    let evaluations = events.iter().filter(|event| event["event"] == "epoch" && event["val_top1"].is_number());
    assert_eq!(evaluations.count(), 2, "{run}: both epochs were evaluated");
    let finished = events.iter().filter(|event| event["event"] == "run_finished");
    assert!(finished.clone().all(|event| event["error"].is_null()) && finished.count() == 2, "{run}");
    let evaluated = place.json(&format!("evaluate {run} --json"));
    assert!(evaluated["top1"].as_f64().is_some_and(|top1| (0.0..=1.0).contains(&top1)), "{evaluated}");
    assert_eq!(events.last().unwrap()["step"], 16, "{run}");
    let losses = losses(place, run);
    assert!(!losses.is_empty() && losses.iter().all(|loss| loss.is_finite()), "{run}: {losses:?}");
    losses
}

fn assert_near(found: &[f64], expected: &[f64], what: &str) {
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        let apart = (found - expected).abs() / expected;
        assert!(apart < TOLERANCE, "{what}: loss {found} for {expected} at step {step}, {apart:.1e} apart");
    }
}

/// One row of the matrix: a way to agree, over some ways to travel.
fn row(way: &Way, carries: &[&str], test: &str) {
    let place = Place::new();
    for model in &MODELS {
        let norms = !model.as_one.is_empty();
        // A server's workers do not hear of each other, so their batch-norms are their own, as those of an
        // all-reduce may be.
        let (start, flags) = match way.servers {
            0 => ("", String::new()),
            _ if norms => ("paceline --workers 2", String::new()),
            _ => ("", String::new()),
        };
        let reference = format!("reference-{}", model.name);
        let expected = whole_run(&place, start, (model, &flags), &reference);
        for carry in carries {
            let Some(start) = several(carry, 2 + way.servers, test) else { return };
            let as_one = if way.servers == 0 && way.synchronous { model.as_one } else { "" };
            let run = format!("{}-{carry}", model.name);
            let flags = format!("{} {as_one}", way.flags);
            let found = whole_run(&place, &start, (model, &flags), &run);
            if way.synchronous {
                assert_eq!(found.len(), 16, "{run}: every step is told of");
                assert_near(&found, &expected, &format!("{} {carry} {}", way.flags, model.name));
            }
        }
    }
}

const CARRIES: [&str; 3] = ["shm", "tcp", "tls"];

#[test]
#[ignore = "cargo x ci: agreements"]
fn all_reduce_over_every_carry_is_one_process_from_start_to_resume() {
    row(&ALL_REDUCE, &CARRIES, "all_reduce_over_every_carry_is_one_process_from_start_to_resume");
}

#[test]
#[ignore = "cargo x ci: agreements"]
fn a_synchronous_server_over_every_carry_is_one_process_from_start_to_resume() {
    row(&SERVER, &CARRIES, "a_synchronous_server_over_every_carry_is_one_process_from_start_to_resume");
}

#[test]
#[ignore = "cargo x ci: agreements"]
fn workers_two_steps_apart_train_over_every_carry() {
    row(&BOUNDED, &CARRIES, "workers_two_steps_apart_train_over_every_carry");
}

#[test]
#[ignore = "cargo x ci: agreements"]
fn workers_that_do_not_wait_train_over_every_carry() {
    row(&FREE, &CARRIES, "workers_that_do_not_wait_train_over_every_carry");
}

#[test]
#[ignore = "cargo x ci: agreements"]
fn workers_that_step_by_themselves_train_over_every_carry() {
    for way in [&LOCAL, &OUTER] {
        row(way, &CARRIES, "workers_that_step_by_themselves_train_over_every_carry");
    }
}

#[test]
#[ignore = "cargo x ci: agreements"]
fn workers_with_a_centre_train_over_every_carry() {
    for way in [&ELASTIC, &DOWNPOUR, &DOGWILD, &BORROWED] {
        row(way, &CARRIES, "workers_with_a_centre_train_over_every_carry");
    }
}

/// With the feature `mpi` (`cargo x mpi`): the same over MPI.
#[cfg(feature = "mpi")]
#[test]
fn every_agreement_over_mpi() {
    for way in [&ALL_REDUCE, &SERVER, &BOUNDED, &FREE, &LOCAL, &OUTER, &ELASTIC, &DOWNPOUR, &DOGWILD, &BORROWED] {
        row(way, &["mpi"], "every_agreement_over_mpi");
    }
}

/// Dropout is a function of the sample, so even masks are those of one process.
#[test]
#[ignore = "cargo x ci: agreements"]
fn a_model_with_dropout_is_one_process_however_it_is_split() {
    let place = Place::new();
    let line = "train --model alexnet --size 64 --data synthetic:64x64x3/10/32 --batch 8 --optimizer momentum --lr 0.002 --seed 3 \
                --max-steps 5 --quiet";
    place.run(&format!("{line} --run alone"));
    let expected = losses(&place, "alone");
    let ways = [
        ("reduced", "--workers 2"),
        ("parts", "--workers 2 --carry tcp --accumulate 2"),
        ("served", "--workers 2 --agree parameter-server --carry tcp"),
    ];
    for (run, way) in ways {
        place.run(&format!("{line} {way} --run {run}"));
        assert_near(&losses(&place, run), &expected, way);
    }
    place.run(&format!("{line} --accumulate 4 --run alone-in-parts"));
    assert_near(&losses(&place, "alone-in-parts"), &expected, "in parts by one process");
}

/// What a step may have beside it: parts of a batch, a norm to clip to, messages after the pass, squeezed
/// messages.
#[test]
#[ignore = "cargo x ci: agreements"]
fn whatever_a_step_has_beside_it_is_one_process() {
    let place = Place::new();
    for (index, model) in MODELS.iter().enumerate() {
        let Trained { name, data, as_one } = model;
        let line = format!("train --model {name} --data {data} {LEARNING} --max-steps 12");
        let run = |name: &str, flags: &str| {
            place.run(&format!("{line} {flags} --run {name}-{index}"));
            losses(&place, &format!("{name}-{index}"))
        };
        let (whole, clipped) = (run("whole", ""), run("clipped", "--clip-norm 0.5"));
        for (way, carry) in [("shm", "--carry shm"), ("tcp", "--carry tcp")] {
            let two = format!("--workers 2 {carry} {as_one}");
            assert_near(&run(&format!("off-{way}"), &format!("{two} --overlap off")), &whole, "overlap off");
            assert_near(&run(&format!("clip-{way}"), &format!("{two} --clip-norm 0.5")), &clipped, "clipped");
            // Half the bits: near, and not the same.
            let squeezed = run(&format!("bf16-{way}"), &format!("{two} --squeeze bf16"));
            let (last, expected) = (squeezed[11], whole[11]);
            assert!((last / expected - 1.0).abs() < 0.05 && squeezed != whole, "{name} {way}: {last} for {expected}");
        }
        let served = "--workers 2 --agree parameter-server";
        let reference = if as_one.is_empty() { whole } else { run("own", "--workers 2") };
        assert_near(&run("served-off", &format!("{served} --overlap off")), &reference, "a server, overlap off");
        let squeezed = run("served-bf16", &format!("{served} --carry tcp --squeeze bf16"));
        // Workers compute with weights of 8 bits, as in bf16: of four samples each, batch-norms magnify that.
        let near = (squeezed[11] / reference[11] - 1.0).abs();
        let learns = squeezed[11] < squeezed[0];
        assert!(near < 0.15 && learns, "{name}: {} for {}, from {}", squeezed[11], reference[11], squeezed[0]);
        if as_one.is_empty() {
            assert_near(&run("served-parts", &format!("{served} --accumulate 2")), &reference, "a server, in parts");
            assert_near(&run("parts", "--workers 2 --accumulate 2"), &reference, "in parts");
        }
    }
}
