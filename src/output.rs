//! What this program says: on standard output, and beside it on standard error.

use std::io::Write;

use serde::Serialize;

use crate::system::printable::{printable_json, printable_lines};

/// A number with commas between thousands.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Prints to standard output; a closed pipe (`paceline models | head`) ends quietly. Whatever text came from elsewhere,
/// nothing in it is obeyed by a terminal; a name that must not break its line is escaped where it is put into one.
pub fn print(text: &str) {
    write(&mut std::io::stdout(), &printable_lines(text));
}

/// Prints one JSON value to standard output, on a line of its own.
pub fn print_json(value: &impl Serialize) {
    let json = serde_json::to_string(value).expect("what is printed has a JSON form");
    write(&mut std::io::stdout(), &format!("{}\n", printable_json(&json)));
}

/// Says something beside the command's output, on standard error.
pub fn note(text: &str) {
    write(&mut std::io::stderr(), &format!("{}\n", printable_lines(text)));
}

fn write(target: &mut impl Write, text: &str) {
    let _ = target.write_all(text.as_bytes()).and_then(|()| target.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_grouped() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(138_357_544), "138,357,544");
    }
}
