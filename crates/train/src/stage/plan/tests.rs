//! Pipelines of the literature by their published figures, and the time of a measured one.

use std::sync::Arc;

use paceline_nn::zoo;
use paceline_parallel::split::Kind;
use paceline_tensor::device::cpu::Cpu;

use super::*;
use crate::room::Processes;
use crate::together::Split;

fn config(model: &str, cuts: &[&str], batch: usize) -> Config {
    Config {
        model: model.into(),
        batch,
        accumulate: batch,
        split: Split::Pipeline(cuts.len().max(1) + 1),
        cuts: cuts.iter().map(|&cut| cut.to_owned()).collect(),
        ..Config::default()
    }
}

/// At the model's own size.
fn candidate(config: &Config) -> Candidate<'_> {
    let model = zoo::find(&config.model).unwrap();
    Candidate {
        model,
        config,
        input: model.native,
        classes: model.classes,
        held_bytes: 0,
        workers: config.workers,
        here: Processes::here(config, config.workers, config.ranks()),
        resumes: false,
        hosted: false,
    }
}

fn by_arithmetic(config: &Config, link: Option<Link>) -> PipelinePlan {
    PipelinePlan::new(&candidate(config), Basis::Arithmetic, link).unwrap()
}

/// Bytes of an image that cross, shares in percent and the bound in hundredths: as the two-way cuts of the literature have them.
#[test]
fn the_cuts_of_the_literature_have_their_figures() {
    for (model, cuts, cut, sent_bytes, shares, bound) in [
        ("alexnet", &["features.8"][..], "features.8", 173_056, [78, 22], 128),
        ("vgg16", &["features.17"], "features.17", 1_605_632, [66, 34], 151),
        ("alexnet", &[], "features.6", 259_584, [57, 43], 176),
        ("vgg16", &[], "features.12", 3_211_264, [48, 52], 194),
    ] {
        let plan = by_arithmetic(&config(model, cuts, 2), None);
        assert_eq!(plan.cuts, [cut], "{model}");
        let percent = |stage: &StagePlan| (stage.arithmetic_share * 100.0).round() as i32;
        assert_eq!(plan.stages.iter().map(percent).collect::<Vec<_>>(), shares, "{model} {cut}");
        assert_eq!((plan.stages[0].sent_bytes, plan.stages[1].sent_bytes), (sent_bytes, 0), "{model} {cut}");
        assert_eq!(plan.stages[0].returned_bytes, sent_bytes, "{model} {cut}");
        assert_eq!((plan.arithmetic_bound() * 100.0).round() as i32, bound, "{model} {cut}");
        let parameters = plan.stages.iter().map(|stage| stage.parameters).sum::<u64>();
        assert_eq!(parameters, if model == "vgg16" { 138_357_544 } else { 61_100_840 });
    }
}

#[test]
fn a_forecast_by_arithmetic_is_that_of_the_formula() {
    let four = config("alexnet", &["features.8"], 4);
    let plan = by_arithmetic(&four, None);
    let [first, second] = [0, 1].map(|number: usize| plan.stages[number].arithmetic_share);
    // docs/split.md: a + b/m of one device's time, or less where the first is the larger.
    let expected = first - 1e-9..first + second / 4.0 + 1e-9;
    assert!(expected.contains(&plan.forecast.seconds), "{expected:?} {}", plan.forecast.seconds);
    assert!((plan.forecast.speedup() * plan.forecast.seconds - 1.0).abs() < 1e-9 && !plan.is_measured());
    assert_eq!(plan.stages.iter().map(|stage| stage.slots).collect::<Vec<_>>(), [2, 1]);
    assert_eq!(plan.drawing(80).lines().count(), 2);
    // Stages wait for messages, and a step for the sums of the stage that ends last with them.
    let slow = by_arithmetic(&four, Some(Link::new(0.1, 1e9)));
    assert!(slow.forecast.seconds > plan.forecast.seconds + 0.2, "{}", slow.forecast.seconds);
    assert!((plan.step_s(&[0.0, 0.0]) - plan.forecast.seconds).abs() < 1e-12);
    assert!((plan.step_s(&[2.0, 0.0]) - plan.forecast.seconds - 2.0).abs() < 1e-12, "the first stage ends last");
}

#[test]
fn a_measured_pipeline_has_seconds_for_every_pass() {
    let config = Config { schedule: Kind::ZeroBubble, ..config("lenet5", &["conv2"], 4) };
    let device = Device::Cpu(Arc::new(Cpu::new(1)));
    let basis = Basis::Time { device: &device, choose: &|_| {} };
    let plan = PipelinePlan::new(&candidate(&config), basis, None).unwrap();
    assert!(plan.is_measured() && plan.forecast.seconds > 0.0);
    let [first, second] = [0, 1].map(|number: usize| plan.stages[number].times.unwrap());
    assert!(first.forward_s > 0.0 && first.weights_s > 0.0 && second.inputs_s > 0.0, "{first:?} {second:?}");
    let shares = plan.stages.iter().map(|stage| stage.time_share.unwrap()).sum::<f64>();
    assert!((shares - 1.0).abs() < 1e-9);
    assert!(plan.stages.iter().all(|stage| stage.slots <= stage.arenas && stage.process_bytes > stage.arena_bytes));
    // Without names the layers are timed, too.
    let balanced = Config { cuts: Vec::new(), ..config.clone() };
    assert_eq!(PipelinePlan::new(&candidate(&balanced), basis, None).unwrap().cuts.len(), 1);
}

#[test]
fn what_cannot_be_cut_is_refused_by_a_sentence() {
    let refusal = |config: &Config| {
        let error = PipelinePlan::new(&candidate(config), Basis::Arithmetic, None).unwrap_err();
        assert!(error.is_refusal());
        error.to_string()
    };
    let unknown = refusal(&config("lenet5", &["conv9"], 4));
    assert!(unknown.contains("conv9") && unknown.contains("there are conv1, conv2"), "{unknown}");
    let many = Config { split: Split::Pipeline(32), ..config("lenet5", &[], 4) };
    assert!(refusal(&many).contains("at most 5 stages"), "{}", refusal(&many));
    let small = Config { memory_limit: Some(20 << 20), ..config("lenet5", &[], 4) };
    assert!(refusal(&small).contains("no cut into 2 stages fits"), "{}", refusal(&small));
    let named = Config { memory_limit: Some(20 << 20), ..config("lenet5", &["conv2"], 4) };
    assert!(refusal(&named).contains("a process needs"), "{}", refusal(&named));
}
