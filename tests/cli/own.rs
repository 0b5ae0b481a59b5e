//! Programs with models and data of their own: through the library alone and by two processes, and through a command line of their own.
//!
//! `cargo test` runs the programs as examples of this package; `cargo x ci` builds the crate outside of the workspace and runs the same.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use paceline::prelude::{Calibrate, Config, GraphError, Net, OwnData, Run, Stop, TrainError, Value};

use crate::place::{Place, has, skip, text};

/// An example that cargo has built beside this test's binary; none where it was told to build this test alone.
fn example(name: &str) -> Option<PathBuf> {
    let binary = PathBuf::from(env!("CARGO_BIN_EXE_paceline")).with_file_name("examples").join(name);
    if !binary.exists() {
        skip(name, "the example is not built; `cargo test` without --test builds it");
    }
    Some(binary).filter(|binary| binary.exists())
}

/// A program in a place.
struct Program<'a>(&'a Path, &'a Place);

impl Program<'_> {
    fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(self.0);
        command.args(arguments.split_whitespace()).current_dir(self.1.path("")).env_remove("PACELINE_DATA");
        command.env("PACELINE_CACHE", self.1.cache());
        command
    }

    fn output(&self, arguments: &str) -> Output {
        self.command(arguments).output().unwrap()
    }

    fn run(&self, arguments: &str) -> String {
        let output = self.output(arguments);
        let (said, wrong) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{arguments}: {}\n{said}{wrong}", output.status);
        said
    }

    fn json(&self, arguments: &str) -> serde_json::Value {
        serde_json::from_str(&self.run(arguments)).unwrap()
    }

    fn refuses(&self, arguments: &str, words: &[&str]) {
        let output = self.output(arguments);
        let wrong = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments}: {wrong}");
        words.iter().for_each(|word| assert!(wrong.contains(word), "`{word}` is missing: {wrong}"));
    }

    /// The losses of a run's steps.
    fn losses(&self, run: &str) -> Vec<f64> {
        let events = self.1.events(run);
        let steps = events.iter().filter(|event| event["event"] == "step");
        steps.map(|event| event["loss"].as_f64().unwrap()).collect()
    }

    fn same_losses(&self, one: &str, two: &str) {
        let (one, two) = (self.losses(one), self.losses(two));
        assert!(one.len() == two.len() && one.len() > 10, "{} and {} steps", one.len(), two.len());
        for (step, (one, two)) in one.iter().zip(&two).enumerate() {
            assert!((one - two).abs() < 1e-5, "step {step}: {one} alone, {two} together");
        }
        assert!(one[one.len() - 1] < one[0] / 2.0, "it learns: {one:?}");
    }
}

const STRIPED: &str = "--model striped --data stripes --batch 32 --epochs 2 --calibrate off --quiet";
const PLAIN: &str = "--model plain --data points --batch 32 --epochs 6 --lr 0.05 --calibrate off --quiet";

/// What a command line with models and data of its own must be able to do.
fn trains_by_name(program: &Program) {
    for (model, more) in [(STRIPED, "--sync-batch-norm"), (PLAIN, "")] {
        let name = model.split_whitespace().nth(1).unwrap();
        program.run(&format!("train {model} --run {name}-one"));
        program.run(&format!("train {model} --workers 2 {more} --run {name}-two"));
        program.same_losses(&format!("{name}-one"), &format!("{name}-two"));
    }
    // A half, and the rest from there, are the bits of the whole; so they are by two processes.
    program.run(&format!("train {STRIPED} --max-steps 11 --run half"));
    program.run("train --resume half --max-steps 32 --calibrate off --quiet");
    let place = program.1;
    assert!(place.weights("half", 32) == place.weights("striped-one", 32), "resumed is as if never stopped");
    program.run(&format!("train {STRIPED} --workers 2 --sync-batch-norm --max-steps 11 --run halves"));
    program.run("train --resume halves --max-steps 32 --calibrate off --quiet");
    assert!(place.weights("halves", 32) == place.weights("striped-two", 32), "resumed together");
}

fn serves_by_name(program: &Program) {
    program.run(&format!("train {PLAIN} --workers 2 --agree parameter-server --servers 1 --run served"));
    program.same_losses("plain-one", "served");
    program.run("train --model lstm --data counting --batch 10 --epochs 1 --calibrate off --quiet --run counting");
}

fn uses_by_name(program: &Program) {
    let measured = program.json("evaluate striped-one --json");
    assert_eq!((&measured["samples"], measured["top1"].as_f64()), (&128.into(), Some(1.0)), "{measured}");
    // Stripes of two pixels, down.
    let pixel = |x: u32, _| image::Luma([if x & 2 == 0 { 230u8 } else { 60 }]);
    image::GrayImage::from_fn(8, 8, pixel).save(program.1.path("down.png")).unwrap();
    let guess = program.json("predict striped-one down.png --top 1 --json");
    assert_eq!(guess["guesses"][0]["name"], "down", "{guess}");
    program.run("export striped-two --onnx striped.onnx");
    assert!(program.1.read("striped.onnx").windows(6).any(|bytes| bytes == b"across"));
    assert!(program.run("plan --model striped --batch 8").contains("striped at 8×8×1"));
    assert!(program.run("bench step --model striped --batch 4 --steps 1 --calibrate off").starts_with("striped"));
    let models = program.json("models --json");
    assert_eq!((&models[0]["name"], &models[0]["family"]), (&"striped".into(), &"own".into()));
    let looked = program.json("data inspect stripes --json");
    assert_eq!(looked["halves"][0]["classes"], serde_json::json!([["across", 256], ["down", 256]]));
    assert_eq!(program.json("data inspect points --json")["halves"][1]["samples"], 100);
    assert!(program.run("train --help").contains("own_command train"));
}

fn refuses_by_name(program: &Program) {
    program.refuses("train --model strippd", &["unknown model `strippd`; did you mean `striped`?"]);
    program.refuses(
        "train --data strips",
        &["no data set is called 'strips'", "of this program: stripes, points, counting"],
    );
    program.refuses("train --model striped --data counting", &["error: "]);
    program.refuses(&format!("train {PLAIN} --size 16"), &["numbers, which are not resized"]);
    program.refuses(&format!("train {PLAIN} --resume nowhere"), &["error: "]);
}

#[test]
fn every_command_knows_a_programs_own_models_and_data() {
    let Some(binary) = example("own_command") else { return };
    let place = Place::new();
    let program = Program(&binary, &place);
    trains_by_name(&program);
    serves_by_name(&program);
    uses_by_name(&program);
    refuses_by_name(&program);
}

/// Rank 0 alone goes on behind the run, and the run is the one that a single process makes.
fn starts_its_others(binary: &Path) {
    let place = Place::new();
    let program = Program(binary, &place);
    let said = program.run("");
    assert_eq!(said.matches("100.0% after 32 steps").count(), 1, "{said}");
    let runs: Vec<PathBuf> = std::fs::read_dir(place.path("runs")).unwrap().map(|run| run.unwrap().path()).collect();
    let [run] = &runs[..] else { panic!("{runs:?}") };
    for name in ["report.html", "config.toml", "checkpoints/step-00000032/weights.safetensors", "events/rank-0.jsonl"] {
        assert!(run.join(name).exists(), "{name}");
    }
    let files = std::fs::read_dir(run).unwrap().map(|file| file.unwrap().file_name());
    assert!(files.into_iter().any(|name| name.to_string_lossy().starts_with("events.out.tfevents")), "TensorBoard");
    let config = std::fs::read_to_string(run.join("config.toml")).unwrap();
    assert!(config.contains("workers = 2") && config.contains("data = \"stripes\""), "{config}");
}

#[test]
fn a_program_starts_the_others_itself() {
    let Some(binary) = example("together") else { return };
    starts_its_others(&binary);
}

#[test]
fn a_program_joins_where_a_launcher_has_set_its_variables() {
    let Some(binary) = example("together") else { return };
    let place = Place::new();
    let program = Program(&binary, &place);
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |rank: usize| {
        let mut command = program.command("");
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2").env("LOCAL_RANK", rank.to_string());
        command.env("LOCAL_WORLD_SIZE", "2").env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.env("PACELINE_TOKEN", "5".repeat(64));
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap()
    };
    let ranks = [start(1), start(0)];
    let [other, first] = ranks.map(|rank| rank.wait_with_output().unwrap());
    assert!(first.status.success() && text(&first.stdout).contains("100.0% after 32 steps"), "{}", text(&first.stderr));
    assert!(other.status.success() && other.stdout.is_empty(), "{}{}", text(&other.stdout), text(&other.stderr));
}

#[test]
fn a_program_joins_under_mpirun() {
    let test = "a_program_joins_under_mpirun";
    let Some(binary) = example("together").filter(|_| has("mpirun.openmpi", test)) else { return };
    let place = Place::new();
    let launcher = Path::new("mpirun.openmpi");
    let words = "--allow-run-as-root --oversubscribe -n 2";
    let said = Program(launcher, &place).run(&format!("{words} {}", binary.display()));
    assert_eq!(said.matches("100.0% after 32 steps").count(), 1, "{said}");
    let runs = std::fs::read_dir(place.path("runs")).unwrap().count();
    assert!(runs == 1 && said.contains("mine (1,122 parameters)"), "{said}");
}

#[test]
fn what_a_run_returns_predicts_saves_and_exports() {
    let Some(binary) = example("use_it") else { return };
    for workers in ["1", "2"] {
        let place = Place::new();
        let program = Program(&binary, &place);
        let said = program.run(workers);
        assert!(said.contains("a grey picture: ") && said.contains("40 steps in runs/shapes"), "{said}");
        let pictured = said.split("a grey picture: ").nth(1).unwrap().split(' ').next().unwrap();
        assert!(said.contains(&format!("the same as numbers: {pictured}")), "{said}");
        assert!(place.path("shapes.onnx").exists());
        // What was saved starts another run.
        place.run("train --model lenet5 --data shapes --weights shapes.safetensors --max-steps 1 --run again --quiet");
        // A folder that holds a run is an error of rank 0 as of one that is alone: nothing was started.
        let output = program.output(workers);
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output.stderr).contains("RunExists") && output.stdout.is_empty(), "{}", text(&output.stderr));
    }
}

/// Starts `use_it` by two processes for longer than a test waits, and gives it once it has made some steps.
fn long_run(binary: &Path, place: &Place) -> std::process::Child {
    let mut command = Program(binary, place).command("2 1000000");
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let child = command.spawn().unwrap();
    let begun = Instant::now();
    while !place.path("runs/shapes/events/rank-0.jsonl").exists() || steps_of(place) < 5 {
        assert!(begun.elapsed() < Duration::from_secs(60), "no step within a minute");
        std::thread::sleep(Duration::from_millis(5));
    }
    child
}

/// Whole lines of steps; the last one may be half written.
fn steps_of(place: &Place) -> usize {
    place.read_text("runs/shapes/events/rank-0.jsonl").matches("\"event\":\"step\"").count()
}

fn tell(signal: &str, pid: &str) {
    assert!(Command::new("kill").args([signal, pid]).status().unwrap().success());
}

#[test]
fn ctrl_c_saves_and_the_program_goes_on() {
    let Some(binary) = example("use_it") else { return };
    let place = Place::new();
    let child = long_run(&binary, &place);
    tell("-INT", &child.id().to_string());
    let output = child.wait_with_output().unwrap();
    let said = text(&output.stdout);
    assert!(output.status.success() && said.contains("a grey picture"), "{said}{}", text(&output.stderr));
    let step = place.events("runs/shapes").iter().filter(|event| event["event"] == "step").count() as u64;
    assert!(said.contains(&format!("{step} steps in")) && !place.weights("runs/shapes", step).is_empty());
}

#[test]
fn the_end_of_another_rank_is_an_error_of_rank_0() {
    let Some(binary) = example("use_it") else { return };
    let place = Place::new();
    let child = long_run(&binary, &place);
    // Each child belongs to the thread that has started it.
    let tasks = std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap();
    let children = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("children")).unwrap_or_default());
    let children: String = children.collect();
    let [other] = children.split_whitespace().collect::<Vec<_>>()[..] else { panic!("one other rank: {children}") };
    tell("-KILL", other);
    let output = child.wait_with_output().unwrap();
    let wrong = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{wrong}");
    assert!(wrong.contains("rank 1") && wrong.contains("is saved") && output.stdout.is_empty(), "{wrong}");
}

/// A run inside of this very test.
fn inside(workers: usize, place: &Place) -> Run {
    let half = |count: usize| {
        let values = (0..count * 4).map(|at| ((at * at) % 7) as f32 - 3.0).collect();
        (values, (0..count).map(|sample| sample % 3).collect())
    };
    let config = Config {
        model: "mine".into(),
        data: "numbers".into(),
        batch: 12,
        epochs: 2,
        workers,
        agree: "parameter-server".parse().unwrap(),
        ..Config::default()
    };
    fn model(net: &mut Net, x: Value, classes: usize) -> Result<Value, GraphError> {
        let x = net.flatten(x)?;
        net.linear("fc", x, classes)
    }
    let run = Run::new(config).model("mine", model).data("numbers", OwnData::values([1, 2, 2], half(96), half(30)));
    run.folder(place.path(&format!("run-{workers}"))).calibrate(Calibrate::Off).stop(Stop::new()).quiet()
}

#[test]
fn a_run_inside_of_a_test_starts_workers_and_a_server() {
    let place = Place::new();
    let name = "own::a_run_inside_of_a_test_starts_workers_and_a_server";
    let together = inside(2, &place).arguments([name, "--exact", "--quiet"]).train().unwrap();
    let alone = inside(1, &place).train().unwrap();
    let [one, two] = [&alone, &together].map(|trained| trained.outcome().evaluation.unwrap().mean_loss());
    assert!((one - two).abs() < 1e-5, "{one} alone, {two} together");
    assert_eq!((alone.outcome().step, together.outcome().step), (16, 16));
    let guess = &together.predictor().unwrap().predict_values(&[0.0; 4], 1).unwrap()[0];
    assert!(guess.probability > 0.0);
}

#[test]
fn others_that_do_not_come_are_an_error_at_once() {
    let (place, begun) = (Place::new(), Instant::now());
    let failed = inside(2, &place).arguments(["--no-such-flag"]).train().unwrap_err();
    assert!(matches!(&failed, TrainError::Failed(why) if why.contains("rank")), "{failed:?}");
    let unreached = inside(2, &place).arguments(["no such test", "--list", "--format", "terse"]).train().unwrap_err();
    assert!(unreached.to_string().contains("Run::arguments"), "{unreached}");
    assert!(begun.elapsed() < Duration::from_secs(30));
}

#[test]
fn the_simplest_program_is_short() {
    let source = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/together.rs")).unwrap();
    let code = |line: &&str| !line.trim().is_empty() && !line.trim().starts_with("//");
    let lines = source.lines().filter(code).count();
    assert!(lines <= 25, "{lines} lines");
    let page = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/library.md")).unwrap();
    let body: String = source.lines().skip(2).map(|line| format!("{line}\n")).collect();
    assert!(page.contains(&body), "docs/library.md has another program than examples/together.rs");
}

/// The crate outside of the workspace, built in the same target folder: only Paceline's own crates are compiled again, since cargo tells
/// those of two workspaces apart.
fn build_outside() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = root.join("examples/own_command");
    // The versions that everything else here is tested with; cargo adds the crate itself.
    std::fs::copy(root.join("Cargo.lock"), folder.join("Cargo.lock")).unwrap();
    let binaries = Path::new(env!("CARGO_BIN_EXE_paceline")).parent().unwrap();
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--offline", "--manifest-path"]).arg(folder.join("Cargo.toml"));
    // What it trains here is small, and everything is compiled anew: no crate of another workspace can be taken over.
    command.env("CARGO_PROFILE_DEV_OPT_LEVEL", "1");
    if binaries.ends_with("release") {
        command.arg("--release");
    }
    let built = command.arg("--target-dir").arg(binaries.parent().unwrap()).output().unwrap();
    assert!(built.status.success(), "{}", text(&built.stderr));
    binaries.to_owned()
}

#[test]
#[ignore = "cargo x ci: external"]
fn a_crate_outside_of_the_workspace_does_all_of_it() {
    let binaries = build_outside();
    starts_its_others(&binaries.join("together"));
    let (binary, place) = (binaries.join("own_command"), Place::new());
    let program = Program(&binary, &place);
    trains_by_name(&program);
    serves_by_name(&program);
    uses_by_name(&program);
    refuses_by_name(&program);
}
