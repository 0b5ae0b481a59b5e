//! Starting the processes of a run: here (`local`), on other hosts (`ssh`), and through the launchers that clusters
//! have (`mpirun`, `slurm`, `kubernetes`). All of them end in processes that find out by [`crate::spec`] which member
//! they are. The token never stands in an argument, which every user of a machine can list.

pub mod child;
pub mod group;
pub mod kubernetes;
pub mod local;
pub mod mpirun;
mod output;
pub mod slurm;
pub mod ssh;

pub use group::{Ended, Start};
pub use output::Output;

/// A word as a POSIX shell reads it back.
pub fn quote(word: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-./=:,+@%".contains(&byte);
    match !word.is_empty() && word.bytes().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// Words as one line of a shell.
pub fn line(words: &[String]) -> String {
    words.iter().map(|word| quote(word)).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_back_what_was_quoted() {
        let words = ["plain", "", "two words", "it's", "$HOME;`x`", "a\"b\\c", "--lr=0.1"].map(str::to_owned);
        let script = format!("printf '%s\\n' {}", line(&words));
        let output = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
        let read: Vec<&str> = std::str::from_utf8(&output.stdout).unwrap().lines().collect();
        assert_eq!(read, words);
    }
}
