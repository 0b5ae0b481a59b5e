//! Which set-ups apply: on nodes of several sizes, by what was said, and by what a run refuses.

use super::*;
use crate::nn::optim::Optimizer;
use crate::train::Registry;

const TWO: Node = Node { cores: 2, gpus: 0 };

fn config() -> Config {
    Config { model: "lenet5".into(), batch: 32, ..Config::default() }
}

/// The names of those that apply, and those that do not with why.
fn listed(node: Node, said: &Said, config: &Config) -> (Vec<String>, Vec<(String, String)>) {
    let registry = Registry::new();
    let model = registry.find_model(&config.model).unwrap();
    let subject = Subject { model: &model, input: model.native, classes: 10, held_bytes: 0 };
    let cuts = |stages: usize, _: usize| vec!["conv2".to_owned(); stages - 1];
    let proposed = Proposed { cuts: &cuts, parts: &|parts| parts::proposals(&subject, config, parts) };
    let all = list(node, (said, config), &subject, &proposed);
    let (out, applies): (Vec<Listed>, Vec<Listed>) = all.into_iter().partition(|one| one.left_out.is_some());
    let why = |one: Listed| (one.setup.name(), one.left_out.unwrap_or_default());
    (applies.into_iter().map(|one| one.setup.name()).collect(), out.into_iter().map(why).collect())
}

fn reason(out: &[(String, String)], name: &str) -> String {
    let found = out.iter().find(|(other, _)| other == name);
    found.unwrap_or_else(|| panic!("{name} is not among {out:?}")).1.clone()
}

#[test]
fn two_cores_have_replicas_processes_and_stages() {
    let (applies, out) = listed(TWO, &Said::default(), &config());
    assert_eq!(applies[0], "1 replica × 1 thread", "the baseline is the first");
    for name in [
        "2 replicas × 1 thread",
        "2 processes × 1 thread",
        "2 stages, 1 micro-batch × 1 thread",
        "2 stages, 16 micro-batches by zero-bubble × 1 thread",
    ] {
        assert!(applies.iter().any(|other| other == name), "{name} is not among {applies:?}");
    }
    assert_eq!(applies.iter().filter(|name| name.contains("stages")).count(), 1 + 4 * 3);
    assert!(reason(&out, "1 replica × 4 threads").contains("more threads than this node has cores: 2"), "{out:?}");
    assert!(reason(&out, "2 processes × 1 thread, sharded optimizer").contains("nothing to divide"), "{out:?}");
}

#[test]
fn more_cores_have_more_ways_to_share_them() {
    let (applies, _) = listed(Node { cores: 8, gpus: 0 }, &Said::default(), &config());
    for name in ["2 processes × 4 threads", "4 replicas × 2 threads", "8 replicas × 1 thread", "1 replica × 4 threads"]
    {
        assert!(applies.iter().any(|other| other == name), "{name} is not among {applies:?}");
    }
    let (alone, out) = listed(Node { cores: 1, gpus: 0 }, &Said::default(), &config());
    assert_eq!(alone[0], "1 replica × 1 thread");
    assert!(
        alone.iter().all(|name| !name.contains("stages"))
            && reason(&out, "1 replica × 2 threads").ends_with("cores: 1")
    );
}

#[test]
fn what_was_said_stays() {
    let said = Said { threads: Some(1), ..Said::default() };
    let (applies, out) = listed(TWO, &said, &config());
    assert!(applies.iter().all(|name| name.ends_with("× 1 thread")), "{applies:?}");
    assert!(!out.is_empty());
    let said = Said { workers: Some(2), ..Said::default() };
    let (applies, out) = listed(TWO, &said, &config());
    assert_eq!(applies, ["2 replicas × 1 thread", "2 processes × 1 thread"]);
    assert_eq!(reason(&out, "1 replica × 1 thread"), "2 workers were asked for");
    let said = Said { carry: Some(Carry::THREAD), workers: Some(2), ..Said::default() };
    assert_eq!(listed(TWO, &said, &config()).0, ["2 replicas × 1 thread"]);
    let said = Said { parts: Some(4), schedule: Some(Kind::GPipe), ..Said::default() };
    let (applies, out) = listed(TWO, &said, &Config { accumulate: 4, ..config() });
    let staged: Vec<&String> = applies.iter().filter(|name| name.contains("stages")).collect();
    assert_eq!(staged, ["2 stages, 4 micro-batches by gpipe × 1 thread"]);
    assert!(reason(&out, "2 stages, 8 micro-batches by gpipe × 1 thread").contains("4 micro-batches were asked for"));
}

#[test]
fn what_a_run_would_refuse_does_not_apply() {
    let small = Config { batch: 4, ..config() };
    let (applies, out) = listed(TWO, &Said::default(), &small);
    assert!(!applies.iter().any(|name| name.contains("8 micro-batches")), "{applies:?}");
    let why = reason(&out, "2 stages, 8 micro-batches by 1f1b × 1 thread");
    assert_eq!(why, "--batch 4 cannot be cut into 8 parts");
    let servers = Config { agree: "parameter-server".parse().unwrap(), ..config() };
    let (applies, out) = listed(TWO, &Said::default(), &servers);
    assert!(applies.iter().all(|name| !name.contains("stages")), "{applies:?}");
    assert!(reason(&out, "2 stages, 1 micro-batch × 1 thread").contains("holds whole models"), "{out:?}");
}

#[test]
fn what_does_not_fit_the_memory_does_not_apply() {
    let whole = Config { model: "alexnet".into(), optimizer: Optimizer::Adam, ..config() };
    let limited = Config { memory_limit: Some(300_000_000), ..whole };
    let (_, out) = listed(TWO, &Said::default(), &limited);
    let why = reason(&out, "1 replica × 1 thread");
    assert!(why.contains("a process needs") && why.contains("--memory-limit allows each process 300 MB"), "{why}");
}

#[test]
fn gpus_have_a_process_each_and_no_more() {
    let config = Config { device: Compute::Cuda(None), ..config() };
    let (applies, out) = listed(Node { cores: 2, gpus: 2 }, &Said::default(), &config);
    assert_eq!(applies[0], "1 GPU");
    assert!(
        applies.contains(&"2 processes on GPUs".to_owned()) && applies.iter().any(|name| name.contains("stages")),
        "{applies:?}"
    );
    assert!(reason(&out, "3 processes on GPUs").contains("would share a GPU"), "{out:?}");
}
