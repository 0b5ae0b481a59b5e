//! The phases of a step: one list for whoever makes steps, times them, tells of them and reads of them.

use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// What a process is doing, in the order in which a run meets them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Before the first step: reading data, planning, connecting.
    #[default]
    Setup,
    /// Waiting for a batch.
    Data,
    /// The forward pass.
    Forward,
    /// The backward pass.
    Backward,
    /// Both passes, where they cannot be told apart: on a GPU they are one graph.
    Compute,
    /// Waiting for other ranks, and doing nothing else.
    Exchange,
    /// Changing the weights.
    Update,
    /// Measuring on the validation set.
    Evaluate,
    /// Saving.
    Checkpoint,
    /// Through with all steps.
    Done,
}

impl Phase {
    /// All phases, in order.
    pub const ALL: [Self; 10] = [
        Self::Setup,
        Self::Data,
        Self::Forward,
        Self::Backward,
        Self::Compute,
        Self::Exchange,
        Self::Update,
        Self::Evaluate,
        Self::Checkpoint,
        Self::Done,
    ];

    /// The name in messages, events and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Setup => "setup",
            Self::Data => "data",
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Compute => "compute",
            Self::Exchange => "exchange",
            Self::Update => "update",
            Self::Evaluate => "evaluate",
            Self::Checkpoint => "checkpoint",
            Self::Done => "done",
        }
    }

    /// The phase of a name in an event log. Logs of earlier versions call the exchange `wait`, and the clipping of
    /// gradients `clip`, which is part of the update.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "wait" => Some(Self::Exchange),
            "clip" => Some(Self::Update),
            _ => Self::ALL.into_iter().find(|phase| phase.name() == name),
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// Seconds by phase. A phase that was not entered has none.
///
/// In JSON an object of names and numbers. Names that this version does not know are left out when it is read: their
/// time then belongs to no phase.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PhaseTimes([Option<f64>; Phase::ALL.len()]);

impl PhaseTimes {
    /// The seconds of a phase, if it was entered.
    pub const fn get(&self, phase: Phase) -> Option<f64> {
        self.0[phase as usize]
    }

    /// Adds seconds to a phase.
    pub fn add(&mut self, phase: Phase, seconds: f64) {
        *self.0[phase as usize].get_or_insert(0.0) += seconds;
    }

    /// The phases that were entered, in order.
    pub fn iter(&self) -> impl Iterator<Item = (Phase, f64)> + '_ {
        Phase::ALL.into_iter().filter_map(|phase| Some((phase, self.get(phase)?)))
    }
}

impl FromIterator<(Phase, f64)> for PhaseTimes {
    fn from_iter<T: IntoIterator<Item = (Phase, f64)>>(times: T) -> Self {
        let mut all = Self::default();
        times.into_iter().for_each(|(phase, seconds)| all.add(phase, seconds));
        all
    }
}

impl Serialize for PhaseTimes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        self.iter().try_for_each(|(phase, seconds)| map.serialize_entry(phase.name(), &seconds))?;
        map.end()
    }
}

impl<'de> Deserialize<'de> for PhaseTimes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;

        impl<'de> Visitor<'de> for Names {
            type Value = PhaseTimes;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("an object of seconds by phase")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<PhaseTimes, A::Error> {
                let mut times = PhaseTimes::default();
                while let Some((name, seconds)) = map.next_entry::<String, Option<f64>>()? {
                    if let Some(phase) = Phase::from_name(&name) {
                        times.add(phase, seconds.unwrap_or(f64::NAN));
                    }
                }
                Ok(times)
            }
        }

        deserializer.deserialize_map(Names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_stand_in_order_and_are_found_by_name() {
        assert!(Phase::ALL.is_sorted() && Phase::ALL.iter().enumerate().all(|(index, phase)| *phase as usize == index));
        assert!(Phase::ALL.into_iter().all(|phase| Phase::from_name(phase.name()) == Some(phase)));
        let json = serde_json::to_string(&Phase::Exchange).unwrap();
        assert_eq!(json, "\"exchange\"", "the name is the same everywhere");
    }

    #[test]
    fn times_are_an_object_in_the_order_of_a_step() {
        let times: PhaseTimes = [(Phase::Update, 0.5), (Phase::Data, 0.25), (Phase::Update, 0.5)].into_iter().collect();
        let text = serde_json::to_string(&times).unwrap();
        assert_eq!(text, r#"{"data":0.25,"update":1.0}"#);
        assert_eq!(serde_json::from_str::<PhaseTimes>(&text).unwrap(), times);
    }

    #[test]
    fn logs_of_earlier_and_later_versions_are_read() {
        let old: PhaseTimes =
            serde_json::from_str(r#"{"compute":1.0,"wait":0.5,"clip":0.1,"update":0.2,"dreaming":3.0}"#).unwrap();
        assert_eq!(old.get(Phase::Compute), Some(1.0));
        assert_eq!(old.get(Phase::Exchange), Some(0.5));
        assert!((old.get(Phase::Update).unwrap() - 0.3).abs() < 1e-12);
        assert_eq!(old.iter().count(), 3);
    }
}
