//! A text for character language models: every character is a token, a sample is a window, its target the window one on.
//!
//! The vocabulary is the file's own characters in code-point order. The last tenth of the text is for evaluation.
//! Windows do not overlap, so an epoch reads every character once.

use std::path::Path;
use std::sync::Arc;

use paceline_system::disk::Disk;
use paceline_system::printable::Shown;

use crate::DataError;
use crate::dataset::{self, Info, OpenOptions, SampleKind, Source, Split};

/// The longest text: it is held in memory, several bytes for each character while its vocabulary is made.
const BYTES_MAX: u64 = 4 << 30;

/// One half of a text.
#[derive(Debug)]
pub struct Text {
    info: Info,
    tokens: Arc<[u16]>,
    /// Where this half begins; it ends after `len` windows and one token.
    start: usize,
    sequence: usize,
}

impl Text {
    /// Reads and encodes a file.
    ///
    /// # Errors
    /// When it is missing, not UTF-8, longer than 4 GiB, too short for one window per half, or has over 65,536 different
    /// characters.
    pub fn open(file: &Path, options: &OpenOptions, disk: &Disk) -> Result<(Self, Self), DataError> {
        let found = dataset::find(Some(file), options.data_home.as_deref(), &[], |path| disk.exists(path));
        let Some(found) = found else {
            return Err(DataError::refused(format!("there is no file {}; type --data text:FILE", Shown(file))));
        };
        let text = disk.read_text_within(&found, BYTES_MAX)?;
        Self::encode(&text, options.sequence)
            .map_err(|problem| DataError::refused(format!("{} cannot be used as text: {problem}", Shown(&found))))
    }

    /// Both halves of a text given as a string.
    ///
    /// # Errors
    /// What is wrong with it, and what to type.
    pub fn encode(text: &str, sequence: usize) -> Result<(Self, Self), String> {
        if sequence == 0 {
            return Err("a window of 0 characters holds nothing; type --sequence 1 or more".into());
        }
        let mut vocabulary: Vec<char> = text.chars().collect();
        vocabulary.sort_unstable();
        vocabulary.dedup();
        if vocabulary.len() > usize::from(u16::MAX) + 1 {
            return Err(format!("it has {} different characters, at most 65,536 are possible", vocabulary.len()));
        }
        let number =
            |letter: char| vocabulary.binary_search(&letter).expect("every character is in the vocabulary") as u16;
        let tokens: Arc<[u16]> = text.chars().map(number).collect();
        let val_start = tokens.len() - tokens.len() / 10;
        let windows = |tokens: usize| tokens.saturating_sub(1) / sequence;
        if windows(tokens.len() - val_start) == 0 {
            let longest = (tokens.len() / 10).saturating_sub(1);
            return Err(match longest {
                0 => format!("its {} characters are too few; type --data text:FILE with a longer text", tokens.len()),
                longest => format!(
                    "its last tenth, which is kept for evaluation, is shorter than one window; type --sequence {longest} or less"
                ),
            });
        }
        let half = |split, start, end| Self {
            info: Info {
                source: Source::Text,
                name: "text".into(),
                split,
                len: windows(end - start),
                kind: SampleKind::Tokens { sequence },
                classes: vocabulary.len(),
                class_names: vocabulary.iter().map(char::to_string).collect(),
                mean: Vec::new(),
                std: Vec::new(),
            },
            tokens: Arc::clone(&tokens),
            start,
            sequence,
        };
        Ok((half(Split::Train, 0, val_start), half(Split::Val, val_start, tokens.len())))
    }

    pub(crate) fn info(&self) -> &Info {
        &self.info
    }

    /// Bytes of this half's windows.
    pub(crate) fn held_bytes(&self) -> usize {
        self.info.len * self.sequence * size_of::<u16>()
    }

    pub(crate) fn read(&self, sample: usize, tokens: &mut [i32], targets: &mut [i32]) {
        assert!(sample < self.info.len, "window {sample} of {}", self.info.len);
        let start = self.start + sample * self.sequence;
        let window = &self.tokens[start..=start + self.sequence];
        for (at, pair) in window.windows(2).enumerate() {
            (tokens[at], targets[at]) = (i32::from(pair[0]), i32::from(pair[1]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(set: &Text, tokens: &[i32]) -> String {
        tokens.iter().map(|&token| set.info.class_names[token as usize].as_str()).collect()
    }

    #[test]
    fn targets_are_the_text_one_character_on() {
        let text: String = "the quick brown fox — über 😀 all. ".repeat(20);
        let letters: Vec<char> = text.chars().collect();
        let (train, val) = Text::encode(&text, 9).unwrap();
        let (mut tokens, mut targets) = (vec![0; 9], vec![0; 9]);
        for (set, offset) in [(&train, 0), (&val, letters.len() - letters.len() / 10)] {
            assert!(set.info.len > 1);
            for sample in 0..set.info.len {
                set.read(sample, &mut tokens, &mut targets);
                let at = offset + sample * 9;
                assert_eq!(decode(set, &tokens), letters[at..at + 9].iter().collect::<String>());
                assert_eq!(decode(set, &targets), letters[at + 1..at + 10].iter().collect::<String>());
            }
        }
    }

    #[test]
    fn training_never_sees_a_character_of_the_last_tenth() {
        let (train, _) = Text::encode(&("a".repeat(90) + &"b".repeat(10)), 4).unwrap();
        let (mut tokens, mut targets) = (vec![0; 4], vec![0; 4]);
        for sample in 0..train.info.len {
            train.read(sample, &mut tokens, &mut targets);
            assert_eq!(decode(&train, &targets), "aaaa");
        }
    }

    #[test]
    fn a_short_text_is_refused_with_what_to_type() {
        assert!(Text::encode(&"ab".repeat(100), 50).unwrap_err().contains("type --sequence 19 or less"));
        assert!(Text::encode(&"ab".repeat(100), 19).is_ok());
        assert!(Text::encode("", 5).unwrap_err().contains("longer text"));
        assert!(Text::encode("abc", 0).unwrap_err().contains("--sequence 1"));
    }
}
