//! Words for a shell: whoever prints a line to be typed, or runs one elsewhere, writes each word so that it is read back as it was.

use std::path::Path;

/// A word as a POSIX shell reads it back.
pub fn quote(word: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-./=:,+@%".contains(&byte);
    match !word.is_empty() && word.bytes().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// The line that goes on with a run, from its last checkpoint or from the one that is named.
pub fn resume_line(run: &Path) -> String {
    let run = run.display().to_string();
    // A folder that looks like a flag would be read as one.
    let run = if run.starts_with('-') { format!("./{run}") } else { run };
    format!("paceline train --resume {}", quote(&run))
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
    fn the_line_that_resumes_can_be_typed() {
        assert_eq!(resume_line(Path::new("runs/a")), "paceline train --resume runs/a");
        assert_eq!(resume_line(Path::new("my runs/it's")), r"paceline train --resume 'my runs/it'\''s'");
        assert_eq!(resume_line(Path::new("-x")), "paceline train --resume ./-x");
    }
}
