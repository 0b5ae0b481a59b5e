//! Words for a shell: whoever prints a line to be typed, or runs one elsewhere, writes each word so that it is read back as it was.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::printable::is_obeyed;

/// A word as a shell reads it back. Characters that a terminal would obey are escapes in `$'…'`, which bash, zsh and ksh read.
pub fn quote(word: &str) -> String {
    if word.chars().any(is_obeyed) {
        return escaped(word);
    }
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-./=:,+@%".contains(&byte);
    match !word.is_empty() && word.bytes().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

fn escaped(word: &str) -> String {
    let mut quoted = String::from("$'");
    for sign in word.chars() {
        match sign {
            '\'' | '\\' => quoted.extend(['\\', sign]),
            sign if is_obeyed(sign) => {
                let mut bytes = [0; 4];
                quoted.extend(sign.encode_utf8(&mut bytes).bytes().map(|byte| format!("\\x{byte:02x}")));
            }
            sign => quoted.push(sign),
        }
    }
    quoted + "'"
}

/// The line that goes on with a run, from its last checkpoint or from the one that is named.
pub fn resume_line(run: &Path) -> String {
    resume_line_of(&own_command(std::env::args_os()), run)
}

/// What a user types for the commands of this program: its name, where it was just told to train by them, so that a program with models of
/// its own names itself.
fn own_command(mut words: impl Iterator<Item = OsString>) -> String {
    let program = words.next().map(PathBuf::from);
    let name = program.as_ref().and_then(|program| program.file_name()).and_then(|name| name.to_str());
    match name.filter(|_| words.next().is_some_and(|word| word == "train")) {
        Some(name) => quote(name),
        None => "paceline".to_owned(),
    }
}

fn resume_line_of(command: &str, run: &Path) -> String {
    let run = run.display().to_string();
    // A folder that looks like a flag would be read as one.
    let run = if run.starts_with('-') { format!("./{run}") } else { run };
    format!("{command} train --resume {}", quote(&run))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_back_what_was_quoted() {
        let words = ["plain", "", "two words", "it's", "$HOME;`x`", "a\"b\\c", "--lr=0.1"];
        let script = format!("printf '%s\\n' {}", words.map(quote).join(" "));
        let output = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
        let read: Vec<&str> = std::str::from_utf8(&output.stdout).unwrap().lines().collect();
        assert_eq!(read, words);
    }

    #[test]
    fn what_a_terminal_would_obey_is_escaped_and_read_back() {
        assert_eq!(quote("a\u{1b}[2J'\u{202e}"), r"$'a\x1b[2J\'\xe2\x80\xae'");
        let script = format!("printf %s {}", quote("a\u{1b}]0;x\u{7}'\\\u{85}"));
        // Not every machine has bash; the form itself is held above.
        if let Ok(output) = std::process::Command::new("bash").args(["-c", &script]).output() {
            assert_eq!(String::from_utf8_lossy(&output.stdout), "a\u{1b}]0;x\u{7}'\\\u{85}");
        }
    }

    #[test]
    fn the_line_that_resumes_can_be_typed() {
        assert_eq!(resume_line(Path::new("runs/a")), "paceline train --resume runs/a");
        assert_eq!(resume_line(Path::new("my runs/it's")), r"paceline train --resume 'my runs/it'\''s'");
        assert_eq!(resume_line(Path::new("-x")), "paceline train --resume ./-x");
    }

    #[test]
    fn a_program_of_ones_own_names_itself() {
        let command = |words: &[&str]| own_command(words.iter().map(OsString::from));
        assert_eq!(command(&["/usr/bin/my trainer", "train", "--epochs", "2"]), "'my trainer'");
        assert_eq!(command(&["./paceline", "train"]), "paceline");
        assert_eq!(command(&["./together"]), "paceline");
    }
}
