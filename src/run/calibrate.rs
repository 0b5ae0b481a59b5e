//! The measured choice of convolution algorithms, kept in a cache from one command to the next.
//!
//! A trainer by itself follows its rule; a run measures once on each machine what a rule can only guess. The cache is
//! `$PACELINE_CACHE`, else `$XDG_CACHE_HOME/paceline`, else `~/.cache/paceline`, with a file for each kind of processor.

use std::path::PathBuf;

use crate::system::disk::Disk;
use crate::system::host::Host;
use crate::system::printable::Shown;
use crate::tensor::Plan;
use crate::tensor::device::cpu::Cpu;
use crate::tensor::device::cpu::choice::{Calibration, Choices};
use clap::ValueEnum;

use crate::output::note;

/// Where choices come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Calibrate {
    /// Measure what the cache does not know
    On,
    /// Take what the cache knows, measure nothing
    Known,
    /// By rule, whatever the cache knows
    Off,
}

/// Chooses the algorithms for some plans on a device. What goes wrong with the cache is said on standard error and stops
/// nothing.
pub fn calibrate<'a>(cpu: &Cpu, plans: impl Iterator<Item = &'a Plan>, how: Calibrate) -> Calibration {
    let mut total = Calibration::default();
    if how == Calibrate::Off {
        return total;
    }
    let (disk, folder, processor) = (Disk::real(), folder(), Host::look().cpu);
    let mut choices = Choices::new(&processor);
    if let Some(folder) = &folder {
        match Choices::load(&disk, folder, &processor) {
            Ok(known) => choices = known,
            Err(error) => {
                note(&format!("warning: {} is not used: {error}", Shown(&choices.path(folder))));
            }
        }
    }
    for plan in plans {
        let Calibration { known, measured, by_rule, seconds } = cpu.calibrate(plan, &mut choices, how == Calibrate::On);
        total.known += known;
        total.measured += measured;
        total.by_rule += by_rule;
        total.seconds += seconds;
    }
    if let Some(folder) = folder.filter(|_| total.measured > 0)
        && let Err(error) = choices.save(&disk, &folder)
    {
        note(&format!("warning: what was measured is not kept: {error}"));
    }
    total
}

/// Says that something was measured, since it took its time.
pub fn tell(calibration: &Calibration) {
    if calibration.measured > 0 {
        let Calibration { measured, seconds, .. } = calibration;
        note(&format!("measured the algorithms of {measured} convolution passes in {seconds:.1} s"));
    }
}

/// The folder of the cache.
pub fn folder() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("PACELINE_CACHE")
        .or_else(|| variable("XDG_CACHE_HOME").map(|cache| cache.join("paceline")))
        .or_else(|| variable("HOME").map(|home| home.join(".cache/paceline")))
}
