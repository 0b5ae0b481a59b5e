//! Where the run's secret comes from: `PACELINE_TOKEN`, the file that `PACELINE_TOKEN_FILE` names, or the user's own
//! token file, which is drawn at random by whoever needs it first and which only the user can read.
//!
//! A job's number would be at hand in every launcher's environment, but anyone on the machine can list it: it is no
//! secret, and nothing here is derived from it.

use std::path::{Path, PathBuf};

use paceline_comm::Token;
use paceline_system::secret;

use crate::ClusterError;
use crate::error::refused;
use crate::spec::Variables;

/// The variable that holds a token, or `stdin` when a launcher sends it there.
pub const VARIABLE: &str = "PACELINE_TOKEN";

/// Finds the token of this run; the user's own is made if it is not there.
///
/// # Errors
/// When what is set is no token, the file can be read by others, or there is no home to keep one in.
pub fn find(variables: &Variables) -> Result<Token, ClusterError> {
    let set = |name: &str| variables.get(name).filter(|value| !value.is_empty());
    if let Some(text) = set(VARIABLE) {
        return parse(text, VARIABLE);
    }
    of_files(variables)
}

/// The token for what outlives a run, such as a server of samples: a launcher draws `PACELINE_TOKEN` anew for each run, so it is that of the
/// file that `PACELINE_TOKEN_FILE` names, or the user's own.
///
/// # Errors
/// As [`find`].
pub fn of_files(variables: &Variables) -> Result<Token, ClusterError> {
    let set = |name: &str| variables.get(name).filter(|value| !value.is_empty());
    if let Some(path) = set("PACELINE_TOKEN_FILE") {
        let path = Path::new(path);
        let text = read(path)?;
        return match text {
            Some(text) => parse(&text, &path.display().to_string()),
            None => refused(format!("PACELINE_TOKEN_FILE names {}, which is not there", path.display())),
        };
    }
    let config = set("XDG_CONFIG_HOME").map(PathBuf::from);
    let Some(config) = config.or_else(|| set("HOME").map(|home| Path::new(home).join(".config"))) else {
        return refused(
            "there is no HOME to keep a token in; set PACELINE_TOKEN to the same 64 hexadecimal digits for all",
        );
    };
    own(&config.join("paceline/token"))
}

/// The user's token: with a home that all machines share, all ranks find the same.
fn own(path: &Path) -> Result<Token, ClusterError> {
    let name = path.display().to_string();
    if let Some(text) = read(path)? {
        return parse(&text, &name);
    }
    let made = secret::create(path, &format!("{}\n", Token::random().to_hex()));
    made.map_err(|error| {
        ClusterError::Refused(format!("cannot write the token file {name}: {error}; set {VARIABLE}"))
    })?;
    match read(path)? {
        Some(text) => parse(&text, &name),
        None => refused(format!("the token file {name} is gone again; set {VARIABLE}")),
    }
}

fn read(path: &Path) -> Result<Option<String>, ClusterError> {
    secret::read(path)
        .map_err(|error| ClusterError::Refused(format!("cannot use the token file {}: {error}", path.display())))
}

fn parse(text: &str, place: &str) -> Result<Token, ClusterError> {
    let wrong = || ClusterError::Refused(format!("{place} holds no token; a token is 64 hexadecimal digits"));
    Token::from_hex(text).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(pairs: &[(&str, &str)]) -> Variables {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn all_processes_of_a_user_find_the_same_token() {
        let home = tempfile::tempdir().unwrap();
        let home = home.path().to_str().unwrap();
        let first = find(&variables(&[("HOME", home)])).unwrap();
        assert_eq!(find(&variables(&[("HOME", home)])).unwrap(), first);
        let other = tempfile::tempdir().unwrap();
        let other = find(&variables(&[("HOME", home), ("XDG_CONFIG_HOME", other.path().to_str().unwrap())])).unwrap();
        assert_ne!(other, first);
        let file = format!("{home}/.config/paceline/token");
        assert_eq!(find(&variables(&[("PACELINE_TOKEN_FILE", &file)])).unwrap(), first);
        assert_eq!(find(&variables(&[("PACELINE_TOKEN", &first.to_hex()), ("HOME", "/nowhere")])).unwrap(), first);
    }

    #[test]
    fn what_outlives_a_run_has_the_token_of_a_file() {
        let home = tempfile::tempdir().unwrap();
        let home = home.path().to_str().unwrap();
        let own = of_files(&variables(&[("HOME", home)])).unwrap();
        assert_eq!(of_files(&variables(&[("HOME", home), ("PACELINE_TOKEN", "stdin")])).unwrap(), own);
        assert_eq!(find(&variables(&[("HOME", home)])).unwrap(), own);
    }

    #[test]
    fn what_is_no_token_is_refused_without_showing_it() {
        let error = find(&variables(&[("PACELINE_TOKEN", "swordfish")])).unwrap_err().to_string();
        assert!(error.contains("64 hexadecimal digits") && !error.contains("swordfish"), "{error}");
        assert!(find(&variables(&[("PACELINE_TOKEN_FILE", "/no/such/file")])).is_err());
        assert!(find(&variables(&[])).unwrap_err().to_string().contains("set PACELINE_TOKEN"));
    }
}
