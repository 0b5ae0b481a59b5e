//! Runs that fit and runs that do not, on machines of any size.

use paceline_nn::zoo;
use paceline_system::limits::Source;

use super::*;

const IMAGE: Input = Input::Image { size: [32, 32], channels: 3 };
const GB: u64 = 1_000_000_000;

fn machine(bytes: u64) -> Limits {
    Limits { shared: Some(Memory { bytes, source: Source::Machine }), ..Limits::default() }
}

fn candidate(config: &Config) -> Candidate<'_> {
    let here = Processes::here(config, config.workers, config.workers + usize::from(servers(config)));
    let model = zoo::find(&config.model).unwrap();
    Candidate {
        model,
        config,
        input: IMAGE,
        classes: 10,
        held_bytes: 0,
        workers: config.workers,
        here,
        resumes: false,
        hosted: false,
    }
}

fn servers(config: &Config) -> bool {
    config.agree.recipe().has_servers()
}

fn config(workers: usize, batch: usize) -> Config {
    Config { model: "resnet50".into(), workers, batch, ..Config::default() }
}

/// The number behind a flag in a sentence.
fn number(sentence: &str, flag: &str) -> usize {
    let rest = sentence.split_once(flag).unwrap_or_else(|| panic!("no {flag}: {sentence}")).1;
    rest.trim_start().split(|sign: char| !sign.is_ascii_digit()).next().unwrap().parse().unwrap()
}

#[test]
fn the_processes_of_a_machine_are_counted_together() {
    let (one, saved) = (config(1, 1024), config(2, 2048));
    let two = Config { checkpoint_minutes: Some(0.0), ..saved.clone() };
    let alone = candidate(&one).need(&one).unwrap().total(candidate(&one).here);
    let both = candidate(&two).need(&two).unwrap().total(candidate(&two).here);
    // Each computes 1024 samples; weights and optimizer are there once.
    assert!(both > 2 * alone - 3 * 100_000_000 && both < 2 * alone + 100_000_000, "{alone} {both}");
    // What is saved beside training is there once more: weights and both moments of Adam, 94 MB each.
    let copied = candidate(&saved).need(&saved).unwrap().total(candidate(&saved).here) - both;
    assert!((270_000_000..300_000_000).contains(&copied), "{copied}");
    assert!(candidate(&one).check(&machine(alone)).is_ok());
    let error = candidate(&two).check(&machine(alone + alone / 2)).unwrap_err();
    assert!(error.is_refusal(), "{error}");
    assert!(error.to_string().starts_with("2 workers need "), "{error}");
}

#[test]
fn the_batch_that_is_named_fits_and_much_more_does_not() {
    for (workers, accumulate) in [(1, 1), (2, 1), (3, 2)] {
        let config = Config { accumulate, ..config(workers, 6144) };
        let limits = machine(3 * GB);
        let error = candidate(&config).check(&limits).unwrap_err().to_string();
        let batch = number(&error, "--batch");
        assert!(batch.is_multiple_of(workers * accumulate) && batch > 0, "{error}");
        let smaller = Config { batch, ..config.clone() };
        assert!(candidate(&smaller).check(&limits).is_ok(), "{error}");
        let larger = Config { batch: batch + batch / 2 / (workers * accumulate) * workers * accumulate, ..config };
        assert!(candidate(&larger).check(&limits).is_err(), "{error}");
    }
}

#[test]
fn other_ways_are_named_where_they_do() {
    let whole = config(1, 1024);
    let need = candidate(&whole).need(&whole).unwrap().worker;
    let error = candidate(&whole).check(&machine(need - need / 20)).unwrap_err().to_string();
    for words in ["--batch ", "which fits, or --accumulate 2", "--memory low", "--dtype bf16"] {
        assert!(error.contains(words), "`{words}`: {error}");
    }
    let resumed = Candidate { resumes: true, ..candidate(&whole) };
    let error = resumed.check(&machine(need - need / 20)).unwrap_err().to_string();
    assert!(!error.contains("--batch") && error.contains("--memory low"), "the batch of a run is settled: {error}");
    let error = candidate(&whole).check(&machine(100_000_000)).unwrap_err().to_string();
    assert!(error.contains("no batch fits: type a smaller --model"), "{error}");
}

#[test]
fn ulimit_counts_for_each_process_by_itself() {
    let two = config(2, 2048);
    let need = candidate(&two).need(&two).unwrap();
    let limits = |bytes| Limits { own: Some(Memory { bytes, source: Source::Ulimit }), ..Limits::default() };
    assert!(need.addresses(candidate(&two).here) < need.total(candidate(&two).here));
    assert!(candidate(&two).check(&limits(need.addresses(candidate(&two).here))).is_ok());
    let error = candidate(&two).check(&limits(need.addresses(candidate(&two).here) - 1)).unwrap_err().to_string();
    assert!(error.starts_with("a process needs ") && error.contains("`ulimit -v` allows each process "), "{error}");
}

#[test]
fn replicas_in_one_process_take_less_than_processes_and_all_of_its_addresses() {
    let processes = Config { checkpoint_minutes: Some(0.0), ..config(4, 256) };
    let threads = Config { carry: Carry::THREAD, ..processes.clone() };
    let [of_processes, of_threads] = [&processes, &threads].map(|config| candidate(config).need(config).unwrap());
    let here = candidate(&threads).here;
    // They differ by what a process takes before it does anything; weights and optimizer are there once for both.
    let (more, less) = (of_processes.total(here), of_threads.total(here));
    assert_eq!(more - less, 4 * (BASE - RANK) + BASE / 2 - BASE);
    assert!(of_threads.addresses(here) > 3 * of_processes.addresses(here), "{of_threads:?}");
    assert!(of_threads.addresses(here) > less);
    let error = candidate(&threads).check(&machine(less - 1)).unwrap_err().to_string();
    assert!(error.starts_with("4 replicas need "), "{error}");
    let error = candidate(&threads).check(&machine(100_000_000)).unwrap_err().to_string();
    assert!(error.ends_with("or fewer --replicas"), "{error}");
    // Servers are threads as well.
    let served = Config { agree: "parameter-server".parse().unwrap(), ..threads };
    let need = candidate(&served).need(&served).unwrap();
    assert!(need.threads && need.addresses(candidate(&served).here) > need.total(candidate(&served).here));
}

#[test]
fn servers_count_too() {
    let config = Config { agree: "parameter-server".parse().unwrap(), ..config(2, 64) };
    let it = candidate(&config);
    assert_eq!(it.here, Processes { workers: 2, servers: 1, each: 1, all: true });
    let need = it.need(&config).unwrap();
    assert!(need.server > 3 * 90_000_000, "weights and two buffers of Adam: {need:?}");
    let error = it.check(&machine(300_000_000)).unwrap_err().to_string();
    assert!(error.starts_with("2 workers and 1 server need "), "{error}");
    let elsewhere = Processes::here(&config, 8, 2);
    assert_eq!(elsewhere, Processes { workers: 2, servers: 0, each: 1, all: false }, "of nine processes two");
}

#[test]
fn each_of_several_workers_counts_for_its_part_of_a_sharded_optimizer() {
    let sockets = |shard: &str| {
        let (carry, checkpoint_minutes) = ("tcp".parse().unwrap(), Some(0.0));
        Config { shard: shard.parse().unwrap(), carry, checkpoint_minutes, ..config(4, 64) }
    };
    let (whole, divided) = (sockets("none"), sockets("optimizer"));
    let worker = |config: &Config| candidate(config).need(config).unwrap().worker;
    // Two buffers of Adam, 94 MB each, of which every fourth number is left.
    let saved = worker(&whole) - worker(&divided);
    assert!((140_000_000..142_000_000).contains(&saved), "{saved}");
    let [own, all] = candidate(&divided).optimizer_bytes().unwrap();
    assert!(all - own == saved && candidate(&whole).optimizer_bytes().unwrap() == [all, all]);
    // Where all map the same memory, there is one copy, whatever was asked for.
    let shared = |config: Config| Config { carry: "shm".parse().unwrap(), ..config };
    let (whole, divided) = (shared(whole), shared(divided));
    assert_eq!(candidate(&whole).need(&whole).unwrap(), candidate(&divided).need(&divided).unwrap());
    let clipped = Config { clip_norm: Some(1.0), ..divided };
    assert!(candidate(&clipped).optimizer_bytes().unwrap()[0] < all / 3, "clipped gradients need messages");
}

#[test]
fn a_gpu_has_its_own_memory() {
    let config = Config { device: "cuda".parse().unwrap(), ..config(1, 4096) };
    assert!(candidate(&config).check(&machine(GB)).is_ok());
}
