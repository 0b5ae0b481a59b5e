//! Text from elsewhere (names of files, classes, runs and hosts, sentences of peers) as it may be shown.
//!
//! A terminal obeys control characters: a class named `\u{1b}]0;x\u{7}` would rename its window, and one with U+202E
//! would turn the rest of the line around. Here they become escapes that can be read, such as `\u{1b}`. Called by
//! everything that prints, by the report and by TensorBoard's files. Text that was escaped once stays as it is, so it
//! does no harm to escape a name and then the sentence that it stands in.

use std::borrow::Cow;
use std::fmt::{self, Display, Formatter, Write};
use std::path::Path;

/// Whether a terminal or a page would obey this character instead of showing it: controls (C0, DEL and C1), and those of
/// Unicode's format characters that change the direction of text, break lines or are not seen at all. The joiners
/// U+200C and U+200D stay: names in Persian and families of emoji are written with them.
pub fn is_obeyed(sign: char) -> bool {
    sign.is_control()
        || matches!(
            sign,
            '\u{61c}'
                | '\u{180e}'
                | '\u{200b}'
                | '\u{200e}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e007f}'
        )
}

/// A name on one line: whatever would be obeyed is an escape, line breaks too.
pub fn printable(text: &str) -> String {
    escaped(text, |_| false)
}

/// Sentences and tables: as [`printable`], with the line breaks and tabs that they are set with.
pub fn printable_lines(text: &str) -> String {
    escaped(text, |sign| matches!(sign, '\n' | '\t'))
}

fn escaped(text: &str, is_kept: fn(char) -> bool) -> String {
    let mut shown = String::with_capacity(text.len());
    for sign in text.chars() {
        if is_obeyed(sign) && !is_kept(sign) {
            shown.extend(sign.escape_default());
        } else {
            shown.push(sign);
        }
    }
    shown
}

/// JSON with the same meaning: JSON itself escapes only what is below U+0020.
pub fn printable_json(json: &str) -> Cow<'_, str> {
    let is_raw = |sign: char| is_obeyed(sign) && sign != '\n';
    if !json.chars().any(is_raw) {
        return json.into();
    }
    let mut shown = String::with_capacity(json.len() + 16);
    for sign in json.chars() {
        if is_raw(sign) {
            for unit in sign.encode_utf16(&mut [0; 2]) {
                let _ = write!(shown, "\\u{unit:04x}");
            }
        } else {
            shown.push(sign);
        }
    }
    shown.into()
}

/// A path as [`printable`] shows it, for a sentence.
#[derive(Clone, Copy, Debug)]
pub struct Shown<'a>(pub &'a Path);

impl Display for Shown<'_> {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        out.write_str(&printable(&self.0.to_string_lossy()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_shown() {
        assert_eq!(printable("a\x1b]0;x\x07b\n"), "a\\u{1b}]0;x\\u{7}b\\n");
        assert_eq!(printable("\u{9b}2J\u{7f}\u{202e}gpj\u{2066}"), "\\u{9b}2J\\u{7f}\\u{202e}gpj\\u{2066}");
        assert_eq!(printable_lines("one\ttwo\r\nthree"), "one\ttwo\\r\nthree");
        assert_eq!(Shown(Path::new("runs/\x1b[31m")).to_string(), "runs/\\u{1b}[31m");
    }

    #[test]
    fn ordinary_text_stays_as_it_is() {
        for text in ["", "größe 3×3", "می\u{200c}خواهم", "👩\u{200d}🚀", "back\\slash {} \u{301}"] {
            assert_eq!(printable(text), text);
        }
        let once = printable("x\x1b[0m");
        assert_eq!(printable(&once), once);
    }

    #[test]
    fn json_keeps_its_meaning() {
        let name = "\u{7f}\u{9b}\u{202e}\u{e0041}é\x1b\n";
        let json = serde_json::to_string(name).unwrap();
        let shown = printable_json(&json);
        assert!(!shown.chars().any(is_obeyed), "{shown:?}");
        assert_eq!(serde_json::from_str::<String>(&shown).unwrap(), name);
        assert!(matches!(printable_json("{\"a\": \"é\"}\n"), Cow::Borrowed(_)));
    }
}
