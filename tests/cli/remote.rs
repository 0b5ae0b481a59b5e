//! Data on another machine: a folder that one process lends, and runs that read it there.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use paceline::system::process::{Tell, tell};

use crate::place::{Place, text};
use crate::ranks::TOKEN;

/// Two classes of ten and four small images.
fn photographs() -> Place {
    let place = Place::new();
    for (class, name) in ["left", "right"].iter().enumerate() {
        for (half, count) in [("train", 10), ("val", 4)] {
            for number in 0..count {
                place.write_png(&format!("photos/{half}/{name}/{number}.png"), 20, class as u32, number);
            }
        }
    }
    place.write("token", format!("{TOKEN}\n"));
    std::fs::set_permissions(place.path("token"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    place
}

/// A command that holds the token.
fn command(place: &Place, line: &str) -> Command {
    let mut command = place.command(line);
    command.env_remove("PACELINE_TOKEN").env("PACELINE_TOKEN_FILE", place.path("token"));
    command
}

/// Somebody who lends the photographs until it is dropped, and where.
struct Lender(Child, String);

impl Lender {
    fn start(place: &Place, arguments: &str) -> Self {
        Self::at(place, "127.0.0.1:0", 28, arguments)
    }

    fn at(place: &Place, address: &str, files: usize, arguments: &str) -> Self {
        let line = format!("data serve folder:photos --listen {address} {arguments}");
        let mut child = command(place, &line).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut said = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
        assert!(said.starts_with(&format!("lending {files} files of photos at 127.0.0.1:")), "{said}");
        let typed = said.split_whitespace().find(|word| word.starts_with("remote:"));
        Self(child, typed.unwrap().to_owned())
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn succeeds(mut command: Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn what_is_read_elsewhere_gives_the_bits_of_what_is_read_here() {
    let place = photographs();
    for (model, lent, secret) in [("lenet5", "", ""), ("cnn5", "--tls", "--tls")] {
        let lender = Lender::start(&place, lent);
        let train = format!(
            "train --model {model} --size 32 --batch 6 --epochs 2 --workers 2 --threads 1 --augment flip --quiet --calibrate off \
             --oversubscribe {secret}"
        );
        succeeds(command(&place, &format!("{train} --data folder:photos --run {model}-here")));
        succeeds(command(&place, &format!("{train} --data {} --run {model}-there", lender.1)));
        let [here, there] = ["here", "there"].map(|end| {
            let run = format!("{model}-{end}");
            let step = std::fs::read_dir(place.path(&format!("{run}/checkpoints"))).unwrap();
            let last = step.map(|entry| entry.unwrap().file_name().into_string().unwrap()).max().unwrap();
            place.read(&format!("{run}/checkpoints/{last}/weights.safetensors"))
        });
        assert!(here == there, "{model}: the weights differ");
        if secret.is_empty() {
            let found = succeeds(command(&place, &format!("evaluate {model}-there --json")));
            assert!(found.contains(&lender.1), "{found}");
            let seen = succeeds(command(&place, &format!("data inspect {} --sheet sheet.png", lender.1)));
            assert!(seen.contains("photos train: 20 samples"), "{seen}");
        }
    }
}

#[test]
fn who_is_not_there_has_another_token_or_dies_is_named() {
    let place = photographs();
    let lender = Lender::start(&place, "");
    let train = "train --model lenet5 --size 32 --batch 4 --threads 1 --quiet --calibrate off";
    let fails = |mut command: Command, code: i32, words: &[&str]| {
        let output = command.output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{said}");
        words.iter().for_each(|word| assert!(said.contains(word), "{word}: {said}"));
    };
    let free = paceline::cluster::launch::local::free_port().unwrap();
    let nobody = command(&place, &format!("{train} --data remote:127.0.0.1:{free}"));
    fails(nobody, 2, &[&format!("paceline data serve folder:DIR --listen ADDRESS:{free}"), "same token file"]);
    place.write("other", format!("{}\n", TOKEN.replace('5', "6")));
    std::fs::set_permissions(place.path("other"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let mut stranger = command(&place, &format!("{train} --data {}", lender.1));
    stranger.env("PACELINE_TOKEN_FILE", place.path("other"));
    fails(stranger, 2, &["token"]);
    place.refuses("train --data remote:somewhere --model lenet5", &["--data remote:10.0.0.1:29410"]);
    place.refuses("data serve shapes", &["data serve folder:DIR"]);
    place.refuses("data serve folder:photos --listen here", &["--listen such as"]);

    // Another one is there meanwhile, with other files: numbers would be other photographs.
    let port = lender.1.rsplit_once(':').unwrap().1.to_owned();
    let line = format!("{train} --data {} --epochs 100000 --run changed", lender.1);
    let child = command(&place, &line).stderr(Stdio::piped()).spawn().unwrap();
    crate::ranks::until("some steps", || {
        let events = std::fs::read_to_string(place.path("changed/events/rank-0.jsonl")).unwrap_or_default();
        events.contains("\"epoch\"").then_some(())
    });
    tell(child.id(), Tell::Stop);
    // On busy cores it goes on for a moment, and would find nobody there.
    crate::ranks::until("it stands still", || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", child.id())).ok()?.flatten();
        let stat = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        let state = |stat: String| stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
        tasks.map(stat).all(|stat| matches!(state(stat), Some('T') | None)).then_some(())
    });
    drop(lender);
    place.write_png("photos/train/left/00.png", 20, 0, 3);
    let other = Lender::at(&place, &format!("127.0.0.1:{port}"), 29, "");
    tell(child.id(), Tell::Continue);
    let output = child.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert!(
        output.status.code() == Some(1) && said.contains("its files are others than this run was told of"),
        "{said}"
    );
    let lender = other;

    // It ends in the middle of a run: the run says where its data were, and ends.
    let line = format!("{train} --data {} --epochs 100000 --run run", lender.1);
    let child = command(&place, &line).stderr(Stdio::piped()).spawn().unwrap();
    crate::ranks::until("some steps", || {
        let events = std::fs::read_to_string(place.path("run/events/rank-0.jsonl")).unwrap_or_default();
        events.contains("\"epoch\"").then_some(())
    });
    let address = lender.1.trim_start_matches("remote:").to_owned();
    drop(lender);
    let output = child.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains(&format!("no data can be had from {address}")), "{said}");
}
