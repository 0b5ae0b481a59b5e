//! `paceline plan --split`: stages, their figures and the forecast of a step, and what it refuses.

use serde_json::Value;

use crate::place::Place;

/// Shares of the arithmetic in percent, and the bound in hundredths.
fn shares(plan: &Value) -> (Vec<u64>, u64) {
    let percent = |stage: &Value| (stage["arithmetic_share"].as_f64().unwrap() * 100.0).round() as u64;
    let bound = plan["arithmetic_bound"].as_f64().unwrap();
    (plan["stages"].as_array().unwrap().iter().map(percent).collect(), (bound * 100.0).round() as u64)
}

/// The figures of the two-way cuts of the literature, and of the balanced ones.
#[test]
fn a_plan_of_stages_has_the_figures_of_the_literature() {
    let place = Place::new();
    for (model, cuts, cut, sent_bytes, found) in [
        ("alexnet", "--cuts features.8", "features.8", 173_056, (vec![78, 22], 128)),
        ("vgg16", "--cuts features.17", "features.17", 1_605_632, (vec![66, 34], 151)),
        ("alexnet", "", "features.6", 259_584, (vec![57, 43], 176)),
        ("vgg16", "", "features.12", 3_211_264, (vec![48, 52], 194)),
    ] {
        let plan = place.json(&format!("plan --model {model} --split pipeline:2 {cuts} --balance arithmetic --json"));
        assert_eq!(plan["cuts"][0], cut);
        assert_eq!(shares(&plan), found, "{model} {cut}");
        let [first, last] = [&plan["stages"][0], &plan["stages"][1]];
        assert_eq!((&first["sent_bytes"], &first["returned_bytes"]), (&sent_bytes.into(), &sent_bytes.into()));
        assert_eq!((&last["sent_bytes"], &first["slots"], &last["slots"]), (&0.into(), &2.into(), &1.into()));
        assert!(plan["forecast_s"].is_null() && plan["time_bound"].is_null());
        assert!(plan["speedup"].as_f64().unwrap() <= plan["arithmetic_bound"].as_f64().unwrap() + 1e-9);
    }
    let said = place.run("plan --model alexnet --split pipeline:2 --cuts features.8 --balance arithmetic");
    for part in ["173 KB", "78%", "22%", "1.28× by arithmetic", "features.0 to features.8 (4)", "stage 0 |F0"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let said = place.run("plan --model vgg16 --split pipeline:2 --cuts features.17 --balance arithmetic");
    for part in ["1.6 MB", "66%", "34%", "1.51× by arithmetic"] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

/// The default model has batch-norms, the other has none.
#[test]
fn a_measured_plan_forecasts_a_step() {
    let place = Place::new();
    for (model, size, cuts) in [("cnn5", 32, ""), ("lenet5", 28, "--cuts conv2")] {
        for schedule in ["gpipe", "1f1b", "zero-bubble"] {
            let shape =
                format!("--model {model} --size {size} --classes 10 --batch 16 --micro-batches 4 --calibrate off");
            let asked = format!("plan {shape} --split pipeline:2 {cuts} --schedule {schedule} --threads 1");
            let plan = place.json(&format!("{asked} --json"));
            assert_eq!((&plan["schedule"], &plan["micro_batches"]), (&schedule.into(), &4.into()), "{plan}");
            assert_eq!((&plan["micro_batch"], &plan["threads"]), (&4.into(), &1.into()), "{plan}");
            let number = |name: &str| plan[name].as_f64().unwrap_or_else(|| panic!("{name}: {plan}"));
            assert!(number("forecast_s") > 0.0 && number("speedup") <= number("time_bound") + 1e-9, "{plan}");
            assert!((number("samples_per_s") * number("forecast_s") - 16.0).abs() < 1e-6, "{plan}");
            let of = |stage: &Value, name: &str| stage[name].as_f64().unwrap_or_else(|| panic!("{name}: {plan}"));
            let stages = plan["stages"].as_array().unwrap();
            let shares: f64 = stages.iter().map(|stage| of(stage, "time_share")).sum();
            assert!((shares - 1.0).abs() < 1e-6 && of(&stages[0], "forward_s") > 0.0, "{plan}");
            let slots: Vec<u64> = stages.iter().map(|stage| stage["slots"].as_u64().unwrap()).collect();
            assert!(if schedule == "gpipe" { slots == [4, 4] } else { slots[0] == 2 && slots[1] <= 2 }, "{plan}");
            assert!(stages.iter().all(|stage| of(stage, "process_bytes") > of(stage, "arena_bytes")), "{plan}");
        }
    }
    let said = place.run("plan --model lenet5 --split pipeline:2 --calibrate off --batch 16");
    for part in ["s a step", "images/s", "by measured time", "8 micro-batches of 2", "messages take no time"] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn workers_of_stages_are_counted_and_their_sums_and_links_planned() {
    let place = Place::new();
    let asked = "plan --model lenet5 --split pipeline:2 --cuts conv2 --calibrate off --batch 16 --workers 2";
    let plan = place.json(&format!("{asked} --json"));
    assert_eq!((&plan["processes"], &plan["batch"], &plan["micro_batches"]), (&4.into(), &8.into(), &8.into()));
    for stage in plan["stages"].as_array().unwrap() {
        let (bytes, all_reduce) = (4 * stage["parameters"].as_u64().unwrap(), &stage["all_reduce"]);
        // Tensors begin at whole cache lines. Of two workers, each sends as much as there is.
        let travels = all_reduce["bytes"].as_u64().unwrap();
        assert!((bytes..bytes + 1024).contains(&travels) && all_reduce["sent_bytes"] == travels, "{stage}");
    }
    // Over a link of 100 ms, nine messages follow each other there and back, and two are sums.
    let slow = place.json(&format!("{asked} --link-latency 100000 --json"));
    assert!(slow["forecast_s"].as_f64().unwrap() > plan["forecast_s"].as_f64().unwrap() + 0.3, "{slow}");
    let said = place.run(asked);
    assert!(said.contains("2 workers × 2 stages = 4 processes") && said.contains("all-reduces between"), "{said}");
}

#[test]
fn as_few_stages_as_fit_are_planned() {
    let place = Place::new();
    let asked = "plan --model lenet5 --split auto --balance arithmetic --batch 512 --json";
    let whole = place.json(asked);
    let limit = whole["needs_bytes"].as_u64().unwrap() / 1_000_000 - 1;
    let split = place.json(&format!("{asked} --memory-limit {limit}MB"));
    assert_eq!(split["split"], "pipeline:2", "{split}");
    let largest =
        split["stages"].as_array().unwrap().iter().map(|stage| stage["process_bytes"].as_u64().unwrap()).max();
    assert!(largest.unwrap() <= limit * 1_000_000, "{split}");
}

#[test]
fn what_cannot_be_split_is_refused() {
    let place = Place::new();
    for (arguments, words) in [
        ("--split pipeline:2 --cuts conv9", ["conv9", "there are conv1, conv2"]),
        ("--split pipeline:2 --cuts conv1,conv2", ["pipeline:2", "type as many"]),
        ("--split pipeline:3 --cuts conv2,conv1", ["order of the layers", "cuts"]),
        ("--split pipeline:9", ["at most 5 stages", "type --split pipeline:5"]),
        ("--split pipeline:2 --memory-limit 20MB", ["no cut into 2 stages fits", "--split pipeline:3"]),
        ("--split pipeline:2 --cuts conv2 --memory-limit 20MB", ["a process needs", "20 MB"]),
        ("--split pipeline:1", ["pipeline:1", "2 to"]),
        ("--cuts conv2", ["--split", "required"]),
        ("--split pipeline:2 --schedule cosine", ["cosine", "gpipe or 1f1b or zero-bubble"]),
        ("--split pipeline:2 --eval", ["--eval", "cannot be used"]),
    ] {
        place.refuses(&format!("plan --model lenet5 --balance arithmetic {arguments}"), &words);
    }
}
