//! Memory boxes that are started by hand, and runs that keep their weights there.

use std::fs::Permissions;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Stdio};

use paceline::system::process::{Tell, tell};
use serde_json::Value;

use crate::place::{Place, text};
use crate::running::{PATIENCE, Running, within};

/// Five steps an epoch.
const LENGTH: &str = "--batch 48 --threads 1 --pin off --calibrate off --seed 3 --quiet --workers 2";

const MODELS: [&str; 2] =
    ["--model lenet5 --data synthetic:32x32x1/10/240", "--model cnn5 --data synthetic:8x8x3/10/240"];

/// A box in a process of its own. It is killed when the test lets go of it.
struct Lender {
    child: Child,
    address: String,
}

impl Lender {
    fn start(place: &Place, flags: &str) -> Self {
        Self::start_with(place, flags, None)
    }

    /// With a token of its own.
    fn start_with(place: &Place, flags: &str, token: Option<&str>) -> Self {
        let line = format!("serve memory --listen 127.0.0.1:0 --pool 16MB --json {flags}");
        let mut command = place.command(&line);
        if let Some(token) = token {
            place.write("token", token);
            std::fs::set_permissions(place.path("token"), Permissions::from_mode(0o600)).unwrap();
            command.env("PACELINE_TOKEN_FILE", place.path("token"));
        }
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut said = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
        let said: Value = serde_json::from_str(&said).unwrap();
        Self { child, address: said["address"].as_str().unwrap().to_owned() }
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_run_keeps_its_weights_in_boxes_that_were_started_before() {
    let place = Place::new();
    for (index, (flags, count, agreement)) in
        [("", 1, "shm-async"), ("--tls", 2, "shm-async --servers 2 --tls"), ("", 2, "shm-hybrid")]
            .into_iter()
            .enumerate()
    {
        let lenders: Vec<Lender> = (0..count).map(|_| Lender::start(&place, flags)).collect();
        let boxes: Vec<&str> = lenders.iter().map(|lender| lender.address.as_str()).collect();
        let (run, model) = (format!("run-{index}"), MODELS[index % 2]);
        let line = format!("train {model} {LENGTH} --agree {agreement} --period 2 --box {}", boxes.join(","));
        place.run(&format!("{line} --epochs 3 --run {run}"));
        let evaluated = place.json(&format!("evaluate {run} --json"));
        assert!(evaluated["loss"].as_f64().is_some_and(f64::is_finite), "{agreement}: {evaluated}");
        for mut lender in lenders {
            tell(lender.child.id(), Tell::Interrupt);
            assert_eq!(lender.child.wait().unwrap().code(), Some(0), "a box ends when it is asked to");
        }
    }
}

#[test]
fn a_box_that_is_not_there_or_has_another_token_is_told() {
    let place = Place::new();
    let line = format!("train {} {LENGTH} --agree shm-async", MODELS[0]);
    place.fails(&format!("{line} --box 127.0.0.1:1 --run none"), 1, &["127.0.0.1:1", "paceline serve memory"]);
    let lender = Lender::start_with(&place, "", Some(&"0123456789abcdef".repeat(4)));
    place.fails(&format!("{line} --box {} --run other", lender.address), 1, &["token"]);
    place.fails("serve memory --pool 900000GB", 2, &["type a smaller --pool"]);
    place.fails("serve memory --listen here", 2, &["--listen"]);
}

#[test]
fn a_box_that_is_killed_is_named_and_ends_the_run() {
    let place = Place::new();
    let mut lender = Lender::start(&place, "");
    let line = format!(
        "train {} {LENGTH} --epochs 4000 --agree shm-async --period 1 --silent 2s --checkpoint-every 10 --box {} --run run",
        MODELS[1], lender.address
    );
    let mut run = Running::start(&place, &line);
    within(PATIENCE, "a checkpoint", || !run.events(0, "checkpoint").is_empty(), || run.said());
    lender.child.kill().unwrap();
    // Every rank loses it by itself, so that more than one may say so.
    assert_eq!(run.ends(PATIENCE).code(), Some(1));
    let said = run.said();
    assert!(said.contains("the memory box at ") && said.contains("type: paceline train --resume "), "{said}");
}

#[test]
fn what_a_box_takes_is_measured_beside_its_bounds() {
    let place = Place::new();
    let said = place.json("bench memory --bytes 8,65536 --seconds 0.01 --json");
    let rows = said["rows"].as_array().unwrap();
    assert!(rows.len() >= 24 && rows.iter().all(|row| row["seconds"].as_f64().is_some_and(|seconds| seconds > 0.0)));
    let table = text(&place.output("bench memory --bytes 4096 --seconds 0.01").stdout);
    assert!(table.contains("tcp read") && table.contains("one-sided beside two-sided"), "{table}");
}
