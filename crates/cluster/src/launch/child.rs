//! What a process that a launcher started does first: it ends with its launcher, and takes the token from its standard
//! input, where nobody else can see it.

use std::io::{BufRead, Read, stdin};
use std::os::fd::AsFd;
use std::time::Duration;

use paceline_comm::Token;
use paceline_system::ready::{self, Interest};
use paceline_system::{process, signal, threads};

use crate::ClusterError;
use crate::error::refused;
use crate::spec::Variables;
use crate::token;

/// The variable with the launcher's process number, where it runs on the same machine.
pub const PARENT: &str = "PACELINE_PARENT";

/// How long the launcher may take to send the token.
const TOKEN_MAX: Duration = Duration::from_secs(30);

/// Ties this process to its launcher, if it has one on this machine: it ends when that ends, however that ends.
///
/// # Errors
/// When the launcher has ended already.
pub fn tie(variables: &Variables) -> Result<(), ClusterError> {
    if let Some(parent) = variables.get(PARENT).and_then(|text| text.parse().ok()) {
        let alive = process::end_with(parent)
            .map_err(|error| ClusterError::Failed(format!("cannot be tied to its launcher: {error}")))?;
        if !alive {
            return Err(ClusterError::Failed("its launcher has ended".into()));
        }
    }
    Ok(())
}

/// Ties this process to its launcher ([`tie`]), and finds the token ([`token::find`]). The line `stop` on standard
/// input, or its end, asks for a stop from then on. The token comes once: whoever meets the others twice keeps it.
///
/// # Errors
/// When the launcher has ended already, or there is no token.
pub fn begin(variables: &Variables, stop: &signal::Stop) -> Result<Token, ClusterError> {
    tie(variables)?;
    if variables.get(token::VARIABLE).is_none_or(|value| value != "stdin") {
        return token::find(variables);
    }
    let token = read_token()?;
    let stop = stop.clone();
    let watch = move || {
        let mut line = Vec::new();
        let mut byte = [0];
        while stdin().lock().read(&mut byte).is_ok_and(|count| count == 1) && line != b"stop" {
            match byte[0] {
                b'\n' => line.clear(),
                _ if line.len() < 16 => line.push(byte[0]),
                _ => {}
            }
        }
        stop.request();
    };
    // Without the thread Ctrl-C at the launcher does not save here; the run itself is not worse for it.
    let _ = threads::spawn("lifeline", watch);
    Ok(token)
}

fn read_token() -> Result<Token, ClusterError> {
    if ready::wait(&[Interest { fd: stdin().as_fd(), write: false }], TOKEN_MAX) != [true] {
        return refused(format!("PACELINE_TOKEN is stdin, and nothing came there within {TOKEN_MAX:?}"));
    }
    // The launcher writes the line at once, so what has begun to come is not waited for.
    let mut line = Vec::new();
    let read = stdin().lock().take(128).read_until(b'\n', &mut line);
    let text = String::from_utf8(line).unwrap_or_default();
    match Token::from_hex(&text).filter(|_| read.is_ok()) {
        Some(token) => Ok(token),
        None => refused("PACELINE_TOKEN is stdin, and no token of 64 hexadecimal digits came there"),
    }
}
