//! `cargo x lerat`: from one node to many, on this machine: two models with their data, by every set-up of two cores, on one host and on two
//! that are joined by a shaped link, with PyTorch beside. Writes docs/reports/lerat.md with its figures and raw numbers.
//!
//! An epoch is its steps times the median of a few measured ones. What was measured is kept, cell by cell, in target/lerat; the same command
//! goes on where it stopped, and `--again` begins anew. `--quick` measures one step of a few cells and writes to target/lerat/quick.
//!
//! Needs PACELINE_DATA with `flower_photos_3class`, and PACELINE_PYTHON with torch and torchvision for the repeated set and for PyTorch's times.
//! Hosts are network namespaces: as root, with `ip` and `tc`. `sar` and `pidstat` are asked beside where they are installed.

mod cells;
mod claims;
mod figure;
mod hosts;
mod measure;
mod processes;
mod report;
mod results;
mod sysstat;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use cells::{Cell, Extent, Place, WORKS};
use hosts::Hosts;
use measure::Lab;
use results::Results;

/// Bits a second of every host's cable.
const LINK_BITS_PER_S: u64 = 1_000_000_000;

/// How often each image is there in the repeated set: 600 × 30 = 18,000.
const TIMES: usize = 30;

/// Runs the command.
pub fn run(root: &Path, arguments: &[&str]) -> Result<()> {
    let (mut quick, mut again, mut only) = (false, false, None);
    for argument in arguments {
        match *argument {
            "--quick" => quick = true,
            "--again" => again = true,
            text if !text.starts_with('-') => only = Some(text),
            other => bail!("cargo x lerat takes --quick, --again and a part of cells' names, not {other}"),
        }
    }
    crate::cargo(&["build", "--release"], &[])?;
    let folder = root.join(if quick { "target/lerat/quick" } else { "target/lerat" });
    let raw = folder.join("cells");
    if again {
        let _ = std::fs::remove_dir_all(&raw);
    }
    std::fs::create_dir_all(&raw)?;
    let lab = lab(root, &folder)?;
    let help = Command::new(&lab.paceline).args(["train", "--help"]).output()?;
    let help = String::from_utf8_lossy(&help.stdout).into_owned();
    let data = Data::prepare(&lab, &folder.join("data"), if quick { 2 } else { TIMES })?;
    let extent = Extent { quick, hosts: lab.hosts.is_some(), torch: lab.python.is_some(), help: &help };
    let all = cells::grid(extent);
    let wanted: Vec<&Cell> = all.iter().filter(|cell| only.is_none_or(|part| cell.name().contains(part))).collect();
    let failed = measure_all(&lab, &data, &wanted, &raw)?;
    let target = if quick { folder.join("report") } else { root.join("docs/reports") };
    std::fs::create_dir_all(&target)?;
    let results = Results::read(&raw, &all)?;
    report::write(&results, &target, (quick, data.is_augmented))?;
    println!("{}", target.join("lerat.md").display());
    if failed > 0 {
        bail!("{failed} of {} cells could not be measured; the same command tries them again", wanted.len());
    }
    Ok(())
}

/// Measures what is not there yet; how many failed.
fn measure_all(lab: &Lab, data: &Data, wanted: &[&Cell], raw: &Path) -> Result<usize> {
    let (begun, mut failed) = (Instant::now(), 0);
    for (number, cell) in wanted.iter().enumerate() {
        let file = raw.join(format!("{}.json", cell.name()));
        if file.exists() {
            continue;
        }
        let place = data.of(cell);
        match lab.measure(cell, &place) {
            Ok(found) => {
                println!(
                    "{:>5.0} s  {}/{} {}: {}",
                    begun.elapsed().as_secs_f64(),
                    number + 1,
                    wanted.len(),
                    cell.name(),
                    seconds_of(&found)
                );
                std::fs::write(&file, serde_json::to_string(&found)? + "\n")?;
            }
            Err(error) => {
                eprintln!("{}: {error:#}", cell.name());
                failed += 1;
            }
        }
    }
    Ok(failed)
}

fn seconds_of(found: &Value) -> String {
    let seconds = found["seconds"].as_array().into_iter().flatten().filter_map(Value::as_f64);
    seconds.map(|seconds| format!("{seconds:.3}")).collect::<Vec<_>>().join(" ") + " s"
}

fn lab(root: &Path, folder: &Path) -> Result<Lab> {
    let python = std::env::var("PACELINE_PYTHON").ok().filter(|python| {
        let imports = Command::new(python).args(["-c", "import torch, torchvision"]).output();
        imports.is_ok_and(|output| output.status.success())
    });
    if python.is_none() {
        println!(
            "PACELINE_PYTHON has no torch and torchvision: no times of PyTorch, and images are repeated as they are"
        );
    }
    // Two that compute and one that lends samples.
    let hosts =
        Hosts::new(3, LINK_BITS_PER_S).map_err(|error| println!("no hosts, and nothing between nodes: {error:#}")).ok();
    let python = python.map(|python| (python, root.join("tools/lerat.py")));
    let lab = Lab { paceline: root.join("target/release/paceline"), python, folder: folder.to_owned(), hosts };
    lab.write_token()?;
    Ok(lab)
}

/// Both sets, and the mount.
struct Data {
    folder: PathBuf,
    is_augmented: bool,
}

impl Data {
    /// Copies the photographs, repeats them, and mounts them once more. Three images are left for evaluation, which nobody waits for.
    fn prepare(lab: &Lab, folder: &Path, times: usize) -> Result<Self> {
        let home =
            std::env::var("PACELINE_DATA").context("PACELINE_DATA is not set to a folder with flower_photos_3class")?;
        let source = Path::new(&home).join("flower_photos_3class");
        for work in WORKS {
            let target = folder.join(work.name);
            if target.join("whole").exists() {
                continue;
            }
            let _ = std::fs::remove_dir_all(&target);
            copy(&source.join("val"), &target.join("val"), |_, number| (number == 0).then_some(1))?;
            match (work.images, &lab.python) {
                (600, _) => copy(&source.join("train"), &target.join("train"), |_, _| Some(1))?,
                (_, Some((python, script))) => {
                    println!("repeating the images {times} times, with augmentation written out; once, for all runs");
                    let repeat = Command::new(python)
                        .arg(script)
                        .arg("repeat")
                        .args([&source, &target])
                        .arg(times.to_string())
                        .status()?;
                    if !repeat.success() {
                        bail!("{} could not repeat the images", script.display());
                    }
                    std::fs::write(target.join("augmented"), "")?;
                }
                (_, None) => copy(&source.join("train"), &target.join("train"), |_, _| Some(times))?,
            }
            std::fs::write(target.join("whole"), "")?;
        }
        let mount = folder.join("mount");
        std::fs::create_dir_all(&mount)?;
        let data = Self { folder: folder.to_owned(), is_augmented: folder.join("SimpleBig/augmented").exists() };
        // A mount that an earlier run left is of the same folders.
        let _ = hosts::run("umount", &format!("{}", mount.display()));
        if let Err(error) = hosts::run("mount", &format!("--bind {} {}", folder.display(), mount.display())) {
            println!("no mount: {error:#}");
        }
        Ok(data)
    }

    fn of(&self, cell: &Cell) -> PathBuf {
        let home = if cell.place == Place::Shared { self.folder.join("mount") } else { self.folder.clone() };
        home.join(cell.work.name)
    }
}

impl Drop for Data {
    fn drop(&mut self) {
        let _ = hosts::run("umount", &format!("{}", self.folder.join("mount").display()));
    }
}

/// Copies the images of each class as often as `times` says of a name and its number.
fn copy(source: &Path, target: &Path, times: impl Fn(&str, usize) -> Option<usize>) -> Result<()> {
    for class in std::fs::read_dir(source).with_context(|| format!("no photographs in {}", source.display()))? {
        let class = class?;
        let place = target.join(class.file_name());
        std::fs::create_dir_all(&place)?;
        let mut names: Vec<String> = std::fs::read_dir(class.path())?
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        for (number, name) in names.iter().enumerate() {
            for copy in 0..times(name, number).unwrap_or(0) {
                std::fs::copy(class.path().join(name), place.join(format!("{copy:02}-{name}")))?;
            }
        }
    }
    Ok(())
}
