//! The secret of a run: whoever holds it may join. It is passed by the launcher and never sent over a connection.

use std::fmt;

use paceline_system::entropy;

const BYTES: usize = 32;

/// Thirty-two random bytes. Printing one for debugging does not reveal it; [`Token::to_hex`] does.
#[derive(Clone)]
pub struct Token([u8; BYTES]);

impl Token {
    /// A new one, from the operating system's entropy.
    pub fn random() -> Self {
        Self(entropy::bytes())
    }

    /// The token written as 64 hexadecimal digits, if that is what the text is.
    pub fn from_hex(text: &str) -> Option<Self> {
        let digits = text.trim().as_bytes();
        if digits.len() != 2 * BYTES {
            return None;
        }
        let mut bytes = [0; BYTES];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |digit: u8| char::from(digit).to_digit(16);
            *byte = (digit(pair[0])? * 16 + digit(pair[1])?) as u8;
        }
        Some(Self(bytes))
    }

    /// For the environment of a process that may join; not for logs.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Takes the same time wherever two tokens differ.
impl PartialEq for Token {
    fn eq(&self, other: &Self) -> bool {
        let difference = self.0.iter().zip(&other.0).fold(0, |seen, (a, b)| std::hint::black_box(seen | (a ^ b)));
        difference == 0
    }
}

impl Eq for Token {}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(hidden)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_survives_being_written_down() {
        let token = Token::random();
        assert_eq!(Token::from_hex(&token.to_hex()), Some(token.clone()));
        assert_ne!(token, Token::random());
        assert!(Token::from_hex("ab").is_none() && Token::from_hex(&"g".repeat(64)).is_none());
        assert!(Token::from_hex(&"é".repeat(32)).is_none());
    }

    #[test]
    fn debug_output_hides_it() {
        assert_eq!(format!("{:?}", Token::random()), "Token(hidden)");
    }
}
