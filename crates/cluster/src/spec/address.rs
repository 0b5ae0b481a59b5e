//! `host:port`, with `[...]` around the host when it is an IPv6 address. Names are resolved when somebody connects.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};

use crate::ClusterError;
use crate::error::refused;

/// Where a process listens.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Address {
    /// A name or an IP address, without brackets.
    pub host: String,
    /// A TCP port, not 0.
    pub port: u16,
}

impl Address {
    /// The longest name that DNS allows.
    const HOST_BYTES_MAX: usize = 253;

    /// Reads `host:port`.
    ///
    /// # Errors
    /// When a part is missing or cannot be one; the sentence says what to write.
    pub fn parse(text: &str) -> Result<Self, ClusterError> {
        let wrong = |why: &str| refused(format!("`{text}` {why}; write HOST:PORT, such as 10.0.0.1:29400"));
        let Some((host, port)) = text.rsplit_once(':') else { return wrong("has no port") };
        let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        if bracketed.is_none() && host.contains(':') {
            return refused(format!("`{text}` is ambiguous; write an IPv6 address in brackets: [::1]:29400"));
        }
        let host = bracketed.unwrap_or(host);
        if !Self::is_host(host) {
            return wrong("has no host that could be one");
        }
        match port.parse::<u16>() {
            Ok(port) if port > 0 => Ok(Self { host: host.to_owned(), port }),
            _ => wrong("has no port from 1 to 65535"),
        }
    }

    /// Where that is, by the system's names.
    ///
    /// # Errors
    /// When the host is not known here.
    pub fn places(&self) -> std::io::Result<Vec<SocketAddr>> {
        (self.host.as_str(), self.port).to_socket_addrs().map(Iterator::collect)
    }

    /// Whether text can be a host: letters, digits and the signs of names and IP addresses. It is given to ssh and
    /// written into scripts, so it must not start with a dash or hold anything a shell would read.
    pub fn is_host(text: &str) -> bool {
        let sign = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_' | b':' | b'%');
        !text.is_empty() && text.len() <= Self::HOST_BYTES_MAX && !text.starts_with('-') && text.bytes().all(sign)
    }

    /// Whether the host is this machine to itself, and nobody else can reach it.
    pub fn is_loopback(&self) -> bool {
        self.host == "localhost" || self.host.parse::<core::net::IpAddr>().is_ok_and(|address| address.is_loopback())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(formatter, "[{}]:{}", self.host, self.port),
            false => write!(formatter, "{}:{}", self.host, self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_read_as_they_are_written() {
        for text in ["a:1", "10.0.0.1:29400", "[::1]:65535", "node-07.cluster_a.example:2222"] {
            assert_eq!(Address::parse(text).unwrap().to_string(), text);
        }
        assert!(Address::parse("localhost:1").unwrap().is_loopback());
        assert!(Address::parse("[::1]:1").unwrap().is_loopback());
        assert!(!Address::parse("a:1").unwrap().is_loopback());
    }

    #[test]
    fn what_cannot_be_an_address_is_refused() {
        for text in ["", "a", "a:", ":1", "a:0", "a:65536", "a:-1", "::1:5", "a b:1", "-o:1", "$(x):1", "a;b:1", "[]:1"]
        {
            let error = Address::parse(text).unwrap_err();
            assert!(error.is_refusal() && error.to_string().contains("write"), "{text}: {error}");
        }
        assert!(Address::parse(&format!("{}:1", "a".repeat(300))).is_err());
    }
}
