//! What a worker says before anything else: what follows, and its report of the step.

use super::super::Between;
use super::super::report::{StepReport, WORDS};

/// Numbers of a header.
pub(super) const HEADER: usize = WORDS + 3;

/// Where the count of exchanges between steps begins: apart from the steps' own.
pub(super) const MEETS: u64 = 1 << 48;

/// What follows a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    /// The exchanges of a step.
    Step,
    /// Nothing any more.
    Goodbye,
    /// Something that all workers do together between steps.
    Between(Between),
    /// The first worker: one that was lost takes part again.
    Readmit,
    /// A worker that was lost asks for what it has missed.
    ComeBack,
}

const COMMANDS: [Command; 7] = [
    Command::Step,
    Command::Goodbye,
    Command::Between(Between::Sum),
    Command::Between(Between::Optimizer),
    Command::Between(Between::Weights),
    Command::Readmit,
    Command::ComeBack,
];

/// A header.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Header {
    pub command: Command,
    /// How many numbers are to be added up, or who is back.
    pub length: usize,
    pub report: StepReport,
}

impl Header {
    pub fn new(command: Command) -> Self {
        Self { command, length: 0, report: StepReport::default() }
    }

    /// As numbers that `f32` holds exactly.
    pub fn to_words(self) -> [f32; HEADER] {
        let Self { command, length, report } = self;
        let command = COMMANDS.iter().position(|&known| known == command).unwrap_or_default();
        let mut words = [0.0; HEADER];
        words[..WORDS].copy_from_slice(&report.to_words());
        words[WORDS..].copy_from_slice(&[command as f32, (length >> 20) as f32, (length & 0xF_FFFF) as f32]);
        words
    }

    /// Of numbers that a worker sent; none if there is no such command.
    pub fn from_words(words: &[f32; HEADER]) -> Option<Self> {
        let [report @ .., command, high, low] = *words;
        let known = |index: usize| COMMANDS.get(index).filter(|_| index as f32 == command).copied();
        let length = (high as usize).saturating_mul(1 << 20).saturating_add(low as usize);
        Some(Self { command: known(command as usize)?, length, report: StepReport::from_words(report) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_being_sent() {
        for command in COMMANDS {
            let report = StepReport { rows: 12, loss: 3.5, ..StepReport::default() };
            let header = Header { command, length: 123_456_789, report };
            assert_eq!(Header::from_words(&header.to_words()), Some(header));
        }
    }

    #[test]
    fn a_command_that_does_not_exist_is_none() {
        for word in [-1.0, 0.5, 7.0, f32::NAN, f32::INFINITY] {
            let mut words = Header::new(Command::Step).to_words();
            words[WORDS] = word;
            assert_eq!(Header::from_words(&words), None, "{word}");
        }
    }
}
