//! What breaks while a run is under way: a disk that fills up, a loss that is no number.

use std::process::Command;

use crate::place::{Place, QUICK, skip};

#[test]
fn a_loss_that_is_no_number_ends_the_run_with_step_layer_and_checkpoint() {
    let place = Place::new();
    let run = format!("train {QUICK} --optimizer sgd --lr 1e30 --checkpoint-every 1 --run run");
    place.fails(&run, 1, &["not a number at step 2", "layer", "`fc", "run/checkpoints/step-00000001", "--lr"]);
    let events = place.events("run");
    let last = events.last().unwrap();
    assert_eq!((last["event"].as_str(), last["reason"].as_str()), (Some("run_finished"), Some("failed")));
    assert!(last["error"].as_str().unwrap().contains("step 2"), "{last}");
    assert!(place.read_text("run/report.html").contains("not a number"));
}

/// A small file system in memory, unmounted at the end.
struct SmallDisk(std::path::PathBuf);

impl SmallDisk {
    fn mount(path: std::path::PathBuf, megabytes: usize) -> Option<Self> {
        std::fs::create_dir_all(&path).unwrap();
        let size = format!("size={megabytes}m");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(&path).output();
        mounted.is_ok_and(|output| output.status.success()).then_some(Self(path))
    }

    fn grow(&self, megabytes: usize) {
        let size = format!("remount,size={megabytes}m");
        assert!(Command::new("mount").args(["-o", &size]).arg(&self.0).status().unwrap().success());
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_leaves_the_checkpoint_before_and_the_run_goes_on_with_the_same_bits() {
    let place = Place::new();
    // A checkpoint takes 2.9 MB, and two are kept while the third is written.
    let Some(disk) = SmallDisk::mount(place.path("small"), 8) else {
        skip("a_full_disk_leaves_the_checkpoint_before", "needs the right to mount");
        return;
    };
    let train = format!("train {QUICK} --optimizer momentum --epochs 1 --checkpoint-every 2 --run");
    let survivor = "small/run/checkpoints/step-00000004";
    place.fails(
        &format!("{train} small/run"),
        1,
        &[
            "checkpoint of step 6 could not be saved",
            "No space left on device",
            survivor,
            "paceline train --resume small/run",
        ],
    );
    place.run("evaluate small/run");
    assert!(!place.path("small/run/checkpoints/.step-00000006.part").exists(), "the half checkpoint is gone");
    disk.grow(64);
    place.run("train --resume small/run --quiet");
    place.run(&format!("{train} straight --quiet"));
    assert!(place.weights("small/run", 8) == place.weights("straight", 8));
}
