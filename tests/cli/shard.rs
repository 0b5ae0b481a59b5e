//! `--shard optimizer`: the same training, with a part of the optimizer's state on each worker.

use crate::place::{Place, has, text};
use crate::ranks::{Run, until};

/// A network without batch-norm, and one whose batch-norms are those of all workers.
const LENET5: &str = "--model lenet5 --data synthetic:32x32x1/10/64";
const CNN5: &str = "--model cnn5 --data synthetic:8x8x3/10/64 --sync-batch-norm";
const RESNET20: &str = "--model resnet20 --data synthetic:8x8x3/10/64 --sync-batch-norm";

/// Eight steps an epoch; shares of three workers are not equal.
const LENGTH: &str = "--batch 8 --epochs 2 --threads 1 --calibrate off --seed 3 --quiet";

/// The numbers of a file of a checkpoint, and what it says of them.
fn tensors(place: &Place, run: &str, (step, file): (u64, &str)) -> (serde_json::Value, Vec<f32>) {
    let bytes = place.read(&format!("{run}/checkpoints/step-{step:08}/{file}.safetensors"));
    let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
    let (header, numbers) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let mut header: serde_json::Value = serde_json::from_slice(header).unwrap();
    header["__metadata__"] = serde_json::Value::Null;
    (header, numbers.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect())
}

/// Both runs have the same tensors at a step, to the last digits but one.
fn assert_near(place: &Place, (found, expected): (&str, &str), step: u64) {
    for file in ["weights", "state"] {
        let ((names, found), (expected_names, expected)) =
            (tensors(place, found, (step, file)), tensors(place, expected, (step, file)));
        assert_eq!(names, expected_names, "{file}: the same tensors in the same places");
        let norm = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        let size = norm(&mut expected.iter().copied());
        let apart = norm(&mut found.iter().zip(&expected).map(|(a, b)| a - b)) / size;
        assert!(apart < 1e-5 && size > 0.0, "{file} of step {step}: {apart:e} apart");
    }
}

#[test]
fn ten_steps_of_a_sharded_optimizer_are_those_of_an_all_reduce() {
    let place = Place::new();
    let cases = [
        ("lenet5", LENET5, "adam --lr 0.001", "--workers 3 --carry tcp"),
        ("cnn5", CNN5, "momentum --lr 0.01", "--workers 3 --carry tcp"),
        ("resnet20", RESNET20, "momentum --lr 0.01", "--workers 2 --carry tcp"),
        ("cnn5-adam", CNN5, "adam --lr 0.001", "--workers 2 --carry tcp"),
        ("resnet20-adam", RESNET20, "adam --lr 0.001", "--workers 3 --carry tcp"),
        // Where nothing keeps them from it, workers of one machine keep one copy.
        ("shm", LENET5, "momentum --lr 0.01", "--workers 3 --carry shm --overlap off"),
        ("parts", CNN5, "adam --lr 0.001", "--workers 2 --carry shm --accumulate 2 --clip-norm 0.5"),
    ];
    for (name, model, optimizer, way) in cases {
        let line = format!("train {model} {LENGTH} --max-steps 10 --optimizer {optimizer} {way}");
        let (whole, divided) = (format!("{name}-whole"), format!("{name}-divided"));
        place.run(&format!("{line} --run {whole}"));
        place.run(&format!("{line} --shard optimizer --run {divided}"));
        assert_near(&place, (&divided, &whole), 10);
        assert!(place.read_text(&format!("{divided}/config.toml")).contains("shard = \"optimizer\""));
    }
}

#[test]
fn a_sharded_checkpoint_goes_on_with_any_number_of_workers_and_any_other_with_sharded_ones() {
    let place = Place::new();
    // With Adam, whose first steps are signs, sums in another order are another course where batch-norms amplify it.
    for (name, model, optimizer) in [("lenet5", LENET5, "adam --lr 0.001"), ("cnn5", CNN5, "momentum --lr 0.01")] {
        let line = format!("train {model} {LENGTH} --optimizer {optimizer} --carry tcp --keep 9");
        let resume = |run: &str, from: &str, way: &str| {
            let copied = std::process::Command::new("cp").arg("-r").args([place.path(from), place.path(run)]).status();
            assert!(copied.unwrap().success());
            place.run(&format!("train --resume {run} --max-steps 10 --calibrate off --quiet {way}"));
        };
        place.run(&format!("{line} --workers 3 --shard optimizer --max-steps 10 --run {name}"));
        place.run(&format!(
            "{line} --workers 3 --shard optimizer --max-steps 10 --checkpoint-every 5 --run {name}-saved"
        ));
        assert!(place.weights(name, 10) == place.weights(&format!("{name}-saved"), 10), "saving changes nothing");
        place.run(&format!("{line} --workers 3 --shard optimizer --max-steps 5 --run {name}-at-5"));
        assert_near(&place, (&format!("{name}-at-5"), &format!("{name}-saved")), 5);
        place.run(&format!("{line} --workers 2 --max-steps 5 --run {name}-whole-at-5"));
        let ways = [
            ("again", "at-5", "--workers 3"),
            ("two", "at-5", "--workers 2"),
            ("one", "at-5", "--workers 1 --shard none"),
            ("undivided", "at-5", "--workers 2 --shard none"),
            ("divided", "whole-at-5", "--workers 3 --shard optimizer"),
        ];
        for (run, from, way) in ways {
            let run = format!("{name}-{run}");
            resume(&run, &format!("{name}-{from}"), way);
            assert_near(&place, (&run, name), 10);
        }
        let again = place.weights(&format!("{name}-again"), 10);
        assert!(again == place.weights(name, 10), "{name}: as many workers give the same bits");
    }
}

/// What is saved by the clock is saved between two steps, since all workers have a part in it.
#[test]
fn a_sharded_run_is_saved_by_the_clock_too() {
    let place = Place::new();
    let line = format!("train {LENET5} {LENGTH} --workers 2 --carry tcp --shard optimizer --max-steps 12 --keep 99");
    place.run(&format!("{line} --checkpoint-minutes 0.0000001 --run run"));
    let saved = place.events("run").iter().filter(|event| event["event"] == "checkpoint").count();
    assert!(saved >= 10, "{saved} checkpoints");
    place.run(&format!("{line} --run straight"));
    assert!(place.weights("run", 12) == place.weights("straight", 12));
}

#[test]
fn workers_that_share_one_copy_say_that_nothing_is_divided() {
    let place = Place::new();
    let line = format!("train {LENET5} {LENGTH} --max-steps 4 --workers 2");
    place.run(&format!("{line} --run plain"));
    place.run(&format!("{line} --shard optimizer --run one-copy"));
    assert!(place.weights("plain", 4) == place.weights("one-copy", 4));
    let warned = |run: &str| {
        let events = place.events(run);
        let warnings = events.iter().filter(|event| event["event"] == "warning");
        warnings
            .filter(|event| event["message"].as_str().unwrap().contains("--shard optimizer changes nothing"))
            .count()
    };
    assert_eq!((warned("plain"), warned("one-copy")), (0, 1));
}

#[test]
fn where_there_is_nothing_to_divide_a_sentence_says_what_to_type() {
    let place = Place::new();
    let line = format!("train {LENET5} {LENGTH} --shard optimizer --run run");
    place.refuses(&line, &["there is one", "type --workers 2 or more, or --shard none"]);
    place.refuses(
        &format!("{line} --workers 2 --agree parameter-server"),
        &["hold the optimizer's state already", "--servers with a higher number, or --shard none"],
    );
    place.refuses(&format!("{line} --workers 2 --optimizer lars"), &["lars looks at whole ones", "--shard none"]);
    for carry in ["", "--carry nccl"] {
        place.refuses(
            &format!("{line} --workers 2 --device cuda {carry}"),
            &["a GPU keeps its optimizer's state itself", "type --device cpu, or --shard none"],
        );
    }
    place.fails(&format!("train {LENET5} --workers 2 --shard weights"), 2, &["type optimizer or none"]);
    place.fails("plan --model lenet5 --shard optimizer", 2, &["type --workers 2 or more"]);
}

#[test]
fn a_plan_lists_what_travels_for_a_sharded_optimizer_and_what_each_keeps() {
    let place = Place::new();
    let line = "plan --model resnet20 --batch 8 --workers 4 --optimizer adam --calibrate off";
    let (whole, divided) =
        (place.json(&format!("{line} --json")), place.json(&format!("{line} --shard optimizer --json")));
    let bytes = |plan: &serde_json::Value| plan["optimizer_bytes"].as_u64().unwrap();
    assert!(bytes(&divided) * 4 <= bytes(&whole) + 1000 && bytes(&divided) * 4 > bytes(&whole) * 9 / 10, "{divided}");
    let sent = |plan: &serde_json::Value| plan["messages"]["ranks"][0]["sent_bytes"].as_u64().unwrap();
    assert!(sent(&divided).abs_diff(sent(&whole)) < 100, "the bytes of an all-reduce");
    let buckets = divided["messages"]["buckets"].as_array().unwrap();
    let count = |name: &str| buckets.iter().filter(|bucket| bucket["collective"] == name).count();
    assert_eq!(
        (count("reduce_scatter"), count("all_gather"), count("all_reduce")),
        (buckets.len() / 2, buckets.len() / 2, 0)
    );
    let said = place.run(&format!("{line} --shard optimizer"));
    assert!(said.contains("reduce_scatter by ") && said.contains("all_gather by "), "{said}");
    assert!(said.contains("optimizer's state: 0.5 MiB of 2.1 MiB with each worker"), "{said}");
}

#[test]
fn a_worker_that_is_killed_takes_its_part_of_the_optimizer_with_it() {
    let place = Place::new();
    let line = format!(
        "train {CNN5} --batch 16 --epochs 99 --threads 1 --calibrate off --checkpoint-every 4 --keep 99 --quiet \
         --carry tcp --shard optimizer --run run"
    );
    let ranks = Run::new(3, &line);
    let mut children: Vec<_> = (0..3).map(|rank| ranks.rank(&place, rank).spawn().unwrap()).collect();
    until("a checkpoint", || place.path("run/checkpoints/step-00000008/manifest.json").exists().then_some(()));
    children[1].kill().unwrap();
    let outputs: Vec<_> = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    let said = text(&outputs[0].stderr);
    assert_eq!(outputs[0].status.code(), Some(1), "{said}");
    for words in ["rank 1", "nothing was saved, because its part of the optimizer's state is lost with it", "--resume"]
    {
        assert!(said.contains(words), "`{words}`: {said}");
    }
    let saved = std::fs::read_dir(place.path("run/checkpoints")).unwrap().count();
    place.run("train --resume run --workers 2 --epochs 100 --max-steps 9999 --time-limit 1s --quiet");
    assert!(std::fs::read_dir(place.path("run/checkpoints")).unwrap().count() > saved);
}

/// Two workers over MPI's own collectives.
#[test]
fn a_sharded_optimizer_over_mpi_is_an_all_reduce() {
    let test = "a_sharded_optimizer_over_mpi_is_an_all_reduce";
    if !cfg!(feature = "mpi") {
        return crate::place::skip(test, "needs a paceline with MPI: cargo x mpi");
    }
    let mpirun = std::env::var("MPICC").unwrap_or_else(|_| "mpicc".into()).replace("mpicc", "mpirun");
    if !has(&mpirun, test) {
        return;
    }
    let place = Place::new();
    for (run, flags) in
        [("whole", ""), ("divided", "--shard optimizer"), ("squeezed", "--shard optimizer --squeeze bf16")]
    {
        let program = env!("CARGO_BIN_EXE_paceline");
        let start = crate::place::mpirun(&mpirun, 3);
        let line = format!("{start} {program} train {LENET5} {LENGTH} --carry mpi --max-steps 10 {flags} --run {run}");
        let output = std::process::Command::new("sh").args(["-c", &line]).current_dir(place.path("")).output().unwrap();
        assert!(output.status.success(), "{line}: {}", text(&output.stderr));
    }
    assert_near(&place, ("divided", "whole"), 10);
    assert!(place.weights("squeezed", 10) != place.weights("divided", 10));
}

/// The peak of real processes: alexnet has 228 MB of weights, and Adam keeps twice as much.
#[test]
#[ignore = "cargo x ci: shard"]
fn half_of_the_optimizers_memory_is_gone_with_two_workers() {
    let place = Place::new();
    let line = "--model alexnet --batch 4 --optimizer adam";
    let peaks = |run: &str, flags: &str| {
        let data = "--data synthetic:64x64x3/10/8 --max-steps 2 --checkpoint-minutes 0 --quiet";
        place.run(&format!("train {line} {data} --workers 2 --carry tcp {flags} --run {run}"));
        [0, 1].map(|rank| {
            let events = place.read_text(&format!("{run}/events/rank-{rank}.jsonl"));
            let last: serde_json::Value = serde_json::from_str(events.lines().last().unwrap()).unwrap();
            last["peak_memory_bytes"].as_u64().unwrap()
        })
    };
    let (whole, divided) = (peaks("whole", ""), peaks("divided", "--shard optimizer"));
    let optimizer = 2 * 4 * 57_044_810;
    // The first worker has one tensor of all workers at a time while it saves: 151 MB.
    assert!(whole[0] > divided[0] + optimizer / 2 - 160_000_000, "{whole:?} {divided:?}");
    assert!(whole[1] > divided[1] + optimizer / 2 - 20_000_000, "{whole:?} {divided:?}");
    let plan = place.json(&format!("plan {line} --size 64 --classes 10 --workers 2 --shard optimizer --json"));
    let planned = plan["needs_bytes"].as_u64().unwrap();
    assert!(divided.iter().sum::<u64>() <= planned, "{divided:?} of {planned}");
}
