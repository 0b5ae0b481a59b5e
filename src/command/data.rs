//! `paceline data`: what is in a data set (`inspect`), and a set for those who train elsewhere (`serve`).

mod serve;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::data::inspect::{Inspection, contact_sheet, inspect};
use crate::data::{Dataset, OpenOptions, SampleKind, Spec, cifar10};
use crate::system::disk::Disk;
use crate::system::printable::{Shown, printable};
use crate::system::threads;
use crate::train::Registry;
use serde_json::json;

use super::{Outcome, check_target, grouped, print, print_json, surroundings};
use crate::arguments::{Data, DataCommand, Inspect};
use crate::failure::Failure;

/// Runs the command.
pub fn run(arguments: &Data, registry: &Registry) -> Outcome {
    match &arguments.command {
        DataCommand::Inspect(arguments) => inspection(arguments, registry),
        DataCommand::Serve(arguments) => serve::run(arguments, registry),
    }
}

/// Looks a set over.
fn inspection(arguments: &Inspect, registry: &Registry) -> Outcome {
    let around = surroundings(registry);
    if arguments.verify {
        verify(&registry.parse(&arguments.spec)?, around.data_home.as_deref(), &around.disk)?;
    }
    // Looking at damage is the point here, so none of it is refused.
    let options = OpenOptions {
        data_home: around.data_home,
        damaged_max: usize::MAX,
        threads: threads::available(),
        elsewhere: around.elsewhere,
        ..OpenOptions::default()
    };
    let (train, val) = registry.open_data(&arguments.spec, &options, &around.disk)?;
    // Looking at every image may take long; a file in the way is better heard of before.
    let sheet = sheet_path(arguments, &train);
    sheet.as_ref().map_or(Ok(()), |sheet| check_target(&around.disk, sheet, arguments.force))?;
    let halves = [inspect(&train)?, inspect(&val)?];
    if let Some(sheet) = &sheet {
        write_sheet(sheet, arguments.force, &train, &around.disk)?;
    }
    if arguments.json {
        print_json(
            &json!({"spec": arguments.spec, "halves": halves, "contact_sheet": sheet.map(|sheet| sheet.to_string_lossy().into_owned())}),
        );
    } else {
        halves.iter().for_each(|half| print(&describe(half)));
        if let Some(sheet) = sheet {
            print(&format!("contact sheet  {}\n", Shown(&sheet)));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Where the contact sheet goes; a text has none.
fn sheet_path(arguments: &Inspect, train: &Dataset) -> Option<PathBuf> {
    let SampleKind::Image { .. } = train.info().kind else { return None };
    let name: String = train.info().name.chars().map(|c| if c.is_alphanumeric() { c } else { '-' }).collect();
    Some(arguments.sheet.clone().unwrap_or_else(|| PathBuf::from(format!("{name}-contact-sheet.png"))))
}

fn write_sheet(path: &Path, force: bool, train: &Dataset, disk: &Disk) -> Result<(), Failure> {
    let Some(png) = contact_sheet(train, 12)? else { return Ok(()) };
    // Once more: it may have come meanwhile.
    check_target(disk, path, force)?;
    Ok(disk.write(path, &png)?)
}

fn verify(spec: &Spec, home: Option<&Path>, disk: &Disk) -> Result<(), Failure> {
    let Spec::Cifar10(place) = spec else {
        return Err(Failure::refused("--verify knows the published checksums of cifar10 only; leave it out"));
    };
    let sums = cifar10::verify(place.as_deref(), home, disk)?;
    for sum in &sums {
        print(&format!("{}  {}\n", if sum.holds() { "as published" } else { "DIFFERENT   " }, Shown(&sum.file)));
    }
    if sums.iter().all(|sum| sum.holds()) {
        Ok(())
    } else {
        Err(Failure::refused("a file differs from the published one; fetch it again"))
    }
}

fn half_name(half: &Inspection) -> String {
    printable(&format!("{} {:?}", half.name, half.split).to_lowercase())
}

fn describe(half: &Inspection) -> String {
    let mut text = format!("{}: {} samples", half_name(half), grouped(half.samples as u64));
    if let Some(sizes) = &half.sizes {
        let [height, width] = sizes.mean;
        let (least, greatest) = (sizes.least, sizes.greatest);
        text += &if least == greatest {
            format!(", {}×{}", least[1], least[0])
        } else {
            format!(", {}×{} to {}×{}, mean {width:.0}×{height:.0}", least[1], least[0], greatest[1], greatest[0])
        };
    }
    if !half.mean.is_empty() {
        let list = |values: &[f64]| values.iter().map(|value| format!("{value:.4}")).collect::<Vec<_>>().join(" ");
        text += &format!("\n  mean {}  deviation {}", list(&half.mean), list(&half.std));
    }
    text += &format!("\n  {} classes, largest / smallest {:.2}\n", half.classes.len(), half.imbalance());
    let shown = 20;
    for (name, count) in half.classes.iter().take(shown) {
        text += &format!("  {:>9}  {}\n", grouped(*count as u64), printable(name));
    }
    if half.classes.len() > shown {
        text += &format!("  … and {} more\n", half.classes.len() - shown);
    }
    for damage in &half.damaged {
        text += &format!("  damaged: {} ({})\n", Shown(&damage.file), printable(&damage.problem));
    }
    text
}
