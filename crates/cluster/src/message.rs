//! What members say to each other after the greeting: JSON in bounded frames. Nothing that comes in is taken as it is:
//! ranks must exist, text is cut and made printable.

use paceline_comm::RunId;
use paceline_comm::transport::tcp::LIVES_MAX;
use paceline_system::printable::printable_lines;
use paceline_system::progress::Position;
use serde::{Deserialize, Serialize};

use crate::ledger::{Claim, Counted, Given, Take};
use crate::membership::{Cause, Verdict};
use crate::table::Entry;
use crate::waiting::Waiting;

/// The frame kind of these messages.
pub const KIND: u16 = 1;

/// The longest configuration that is compared.
pub const CONFIG_BYTES_MAX: usize = 64 << 10;

/// The longest path of a folder, as Linux has it.
pub const PATH_BYTES_MAX: usize = 4096;

/// The longest sentence from a peer that is shown.
const TEXT_BYTES_MAX: usize = 2048;

/// The longest account of where in the data a run is.
const PLACE_BYTES_MAX: usize = 4096;

/// The longest id of a run's folder.
const ID_BYTES_MAX: usize = 128;

/// Where the hub keeps a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Folder {
    /// Its path on the hub's machine.
    pub path: String,
    /// What tells it from another folder of that name.
    pub id: String,
}

/// Where in the data a rank that has come back takes part again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Admission {
    /// The number of the stretch.
    pub stretch: u64,
    /// The step that the run is at.
    pub step: u64,
    /// Steps of the run that rank 0 has made by its own count.
    pub steps: u64,
    /// Where the run was when the stretch began, in the caller's own words.
    pub place: String,
}

/// One message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "snake_case", deny_unknown_fields)]
pub enum Message {
    /// A rank's first words to the hub.
    Join {
        /// Who it is.
        entry: Entry,
        /// What it is going to do; all must be going to do the same.
        config: String,
        /// The run that rank 0 said this is.
        run: String,
    },
    /// The hub does not take a rank.
    Refused {
        /// The sentence to show.
        why: String,
    },
    /// The hub's answer once all are there.
    Table {
        /// All members, by rank.
        entries: Vec<Entry>,
        /// The run.
        run: String,
        /// For the so-manieth time that the receiver has come back, into a run that has begun; 0 at the beginning.
        #[serde(default)]
        life: u16,
    },
    /// The hub says that a rank that was lost is here again, and gets ready.
    Returned {
        /// The rank.
        rank: u32,
        /// Where it runs now.
        host: String,
        /// For the so-manieth time.
        life: u16,
    },
    /// A rank that has come back has links to all that it needs, and could take part.
    Ready,
    /// The hub says where it does.
    Admitted(Admission),
    /// The hub tells all where the run is kept, once it is there.
    Folder(Folder),
    /// I am alive.
    Beat {
        /// Where the sender is.
        position: Position,
        /// Whom it waits for.
        waiting: Waiting,
    },
    /// What is the next portion of the data?
    Take(Take),
    /// The hub's answer.
    Given(Given),
    /// I have computed a portion; does it count?
    Claim(Claim),
    /// The hub's answer.
    Counted(Counted),
    /// No more steps should begin in this stretch of the data.
    Close {
        /// Its number.
        stretch: u64,
    },
    /// The hub says that a rank is lost and that the others go on without it.
    Lost {
        /// Who, where it was, and why.
        verdict: Verdict,
    },
    /// I am through.
    Goodbye,
    /// I cannot go on.
    Failed {
        /// What is wrong.
        why: String,
        /// Whose fault it may be.
        suspect: Option<u32>,
        /// Whether the same would happen again if everything were started again: the input cannot work.
        #[serde(default)]
        in_vain: bool,
    },
    /// Everybody ends.
    Ended {
        /// What rank 0 has decided, with the culprit and the cause.
        verdict: Verdict,
    },
}

impl Message {
    /// The payload of a frame.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("messages hold nothing that JSON cannot")
    }

    /// The longest payload that a hub takes.
    pub fn limit_at_hub() -> u32 {
        // A configuration whose every byte has to be escaped, and an entry.
        (6 * CONFIG_BYTES_MAX + (8 << 10)) as u32
    }

    /// The longest payload that another rank takes: a table is the longest.
    pub fn limit_at_spoke(world: usize) -> u32 {
        u32::try_from(world.saturating_mul(2 << 10).saturating_add(32 << 10)).unwrap_or(u32::MAX)
    }

    /// Reads a payload, whatever it is.
    ///
    /// # Errors
    /// What is wrong with it, in words.
    pub fn decode(payload: &[u8], world: usize) -> Result<Self, String> {
        let mut message: Self = serde_json::from_slice(payload).map_err(|error| format!("no message: {error}"))?;
        let sound = match &mut message {
            Self::Join { entry, config, run } => {
                entry.host = printable(&entry.host);
                entry.is_sound() && config.len() <= CONFIG_BYTES_MAX && RunId::from_hex(run).is_some()
            }
            Self::Table { entries, run, life } => {
                entries.iter_mut().for_each(|entry| entry.host = printable(&entry.host));
                let sound = entries.len() == world && entries.iter().all(Entry::is_sound) && *life <= LIVES_MAX;
                sound && RunId::from_hex(run).is_some()
            }
            Self::Returned { rank, host, life } => {
                *host = printable(host);
                (*rank as usize) < world && (1..=LIVES_MAX).contains(life)
            }
            Self::Admitted(Admission { place, .. }) => place.len() <= PLACE_BYTES_MAX,
            Self::Folder(Folder { path, id }) => {
                let sane = |text: &str, most: usize| text.len() <= most && !text.contains('\0');
                sane(path, PATH_BYTES_MAX) && sane(id, ID_BYTES_MAX)
            }
            Self::Refused { why } => {
                *why = printable(why);
                true
            }
            Self::Failed { why, suspect, .. } => {
                *why = printable(why);
                suspect.is_none_or(|suspect| (suspect as usize) < world)
            }
            Self::Ended { verdict } | Self::Lost { verdict } => clean(verdict, world),
            Self::Beat { waiting, .. } => waiting.is_sound(world),
            Self::Goodbye | Self::Ready | Self::Take(_) | Self::Given(_) => true,
            Self::Claim(_) | Self::Counted(_) | Self::Close { .. } => true,
        };
        if sound { Ok(message) } else { Err("a message that cannot be meant for this run".into()) }
    }
}

fn clean(verdict: &mut Verdict, world: usize) -> bool {
    verdict.host = printable(&verdict.host);
    let known = match &mut verdict.cause {
        Cause::NeverArrived { missing, .. } => missing.len() <= world && missing.iter().all(|rank| *rank < world),
        Cause::Disconnected { why } | Cause::Failed { why, .. } => {
            *why = printable(why);
            true
        }
        Cause::Silent { .. } => true,
    };
    known && verdict.rank < world
}

/// Text from elsewhere as it may be shown on a terminal: what a terminal would obey is escaped, and it is not too long.
pub fn printable(text: &str) -> String {
    let mut shown = printable_lines(text);
    let ends = shown.char_indices().map(|(start, sign)| start + sign.len_utf8());
    let cut = ends.take_while(|end| *end <= TEXT_BYTES_MAX).last().unwrap_or(0);
    shown.truncate(cut);
    shown
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_system::printable::is_obeyed;
    use proptest::prelude::*;

    fn verdict(rank: usize, why: &str) -> Message {
        let cause = Cause::Failed { why: why.into(), in_vain: false };
        Message::Ended { verdict: Verdict { rank, host: "h\x1b[2J".into(), position: Position::default(), cause } }
    }

    #[test]
    fn messages_survive_the_wire_and_lose_what_a_terminal_would_obey() {
        let read = Message::decode(&verdict(1, "a\x07b").encode(), 2).unwrap();
        let Message::Ended { verdict } = read else { panic!("{read:?}") };
        assert_eq!(verdict.host, "h\\u{1b}[2J");
        assert_eq!(verdict.cause, Cause::Failed { why: "a\\u{7}b".into(), in_vain: false });
        let beat = Message::Beat { position: Position::default(), waiting: Waiting::default() };
        assert_eq!(Message::decode(&beat.encode(), 2).unwrap(), beat);
    }

    #[test]
    fn ranks_that_do_not_exist_are_refused() {
        assert!(Message::decode(&verdict(2, "x").encode(), 2).is_err());
        let failed = Message::Failed { why: String::new(), suspect: Some(9), in_vain: false };
        assert!(Message::decode(&failed.encode(), 2).is_err());
        let table = Message::Table { entries: vec![], run: RunId::random().to_string(), life: 0 };
        assert!(Message::decode(&table.encode(), 2).is_err());
        let returned = |rank, life| Message::Returned { rank, host: "h\x07".into(), life };
        for (rank, life) in [(2, 1), (1, 0), (1, LIVES_MAX + 1)] {
            assert!(Message::decode(&returned(rank, life).encode(), 2).is_err(), "{rank}, {life}");
        }
        let Ok(Message::Returned { host, .. }) = Message::decode(&returned(1, 1).encode(), 2) else { panic!("sound") };
        assert_eq!(host, "h\\u{7}");
        let admitted =
            |length| Message::Admitted(Admission { stretch: 3, step: 44, steps: 40, place: "x".repeat(length) });
        assert_eq!(Message::decode(&admitted(20).encode(), 2), Ok(admitted(20)));
        assert!(Message::decode(&admitted(PLACE_BYTES_MAX + 1).encode(), 2).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes: Vec<u8>) {
            let _ = Message::decode(&bytes, 3);
        }

        #[test]
        fn a_message_with_any_byte_changed_is_a_message_or_an_error(at in 0usize..200, byte: u8) {
            let mut bytes = verdict(1, "something").encode();
            let length = bytes.len();
            bytes[at % length] = byte;
            if let Ok(Message::Ended { verdict }) = Message::decode(&bytes, 3) {
                prop_assert!(verdict.rank < 3);
            }
        }

        #[test]
        fn a_return_with_any_byte_changed_is_one_of_a_rank_that_exists_or_an_error(at in 0usize..200, byte: u8) {
            let mut bytes = Message::Returned { rank: 1, host: "here".into(), life: 7 }.encode();
            let length = bytes.len();
            bytes[at % length] = byte;
            if let Ok(Message::Returned { rank, life, .. }) = Message::decode(&bytes, 3) {
                prop_assert!(rank < 3 && (1..=LIVES_MAX).contains(&life));
            }
        }

        #[test]
        fn an_admission_with_any_byte_changed_is_bounded_or_an_error(at in 0usize..200, byte: u8) {
            let place = "{\"step\":40}".to_owned();
            let mut bytes = Message::Admitted(Admission { stretch: 3, step: 44, steps: 40, place }).encode();
            let length = bytes.len();
            bytes[at % length] = byte;
            if let Ok(Message::Admitted(admission)) = Message::decode(&bytes, 3) {
                prop_assert!(admission.place.len() <= PLACE_BYTES_MAX);
            }
        }

        #[test]
        fn text_is_cut_and_clean(text in "\\PC{0,40}[\\x00-\\x1f]{0,5}\\PC{0,3000}") {
            let shown = printable(&text);
            prop_assert!(shown.len() <= TEXT_BYTES_MAX && !shown.chars().any(|sign| is_obeyed(sign) && sign != '\n' && sign != '\t'));
        }
    }
}
