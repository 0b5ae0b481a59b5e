//! Boxes of a run: those that it was given, or one of its own in each server, and how whoever needs them finds them.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::thread::JoinHandle;

use paceline_system::{entropy, threads};

use super::client::ClientOptions;
use super::server::{BoxServer, ServerOptions};
use super::state::Limits;
use super::stripes::Stripes;
use super::talk::Key;
use crate::error::CommError;
use crate::rank::Rank;
use crate::stop::Stop;
use crate::token::Token;
use crate::wire::Tls;

/// Where memory boxes are, and how they are reached.
#[derive(Clone, Debug)]
pub struct Lending {
    /// The secret of boxes and of those who use them.
    pub token: Token,
    /// Whether and how connections are secret.
    pub tls: Option<Tls>,
    /// Boxes that others have started. Without any, every server starts its own.
    pub boxes: Vec<SocketAddr>,
    /// Where a server's own box listens.
    pub listen: IpAddr,
}

/// Regions that a run has in a box: parts of the centre, and one for every worker, with some to spare for those that come
/// back.
const REGIONS_MAX: usize = 1 << 16;

/// Numbers that say where a server's part of the centre lies, each of sixteen bits.
pub const WHEREABOUTS: usize = 18;

/// Where a server's part of the centre lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Whereabouts {
    /// The server's own box, if there is one.
    address: Option<SocketAddr>,
    /// What the names of its regions begin with: drawn anew for every run.
    name: u128,
}

impl Whereabouts {
    /// Of a box of one's own, or of those that the run has been given.
    pub fn new(own: Option<&OwnBox>) -> Self {
        Self { address: own.map(|own| own.address), name: u128::from_le_bytes(entropy::bytes()) }
    }

    /// Whether it is a server's own box.
    pub const fn is_own(&self) -> bool {
        self.address.is_some()
    }

    /// As numbers that `f32` holds exactly.
    pub fn to_words(self) -> [f32; WHEREABOUTS] {
        let mut words = [0.0; WHEREABOUTS];
        if let Some(address) = self.address {
            let (ip, kind) = match address.ip() {
                IpAddr::V4(ip) => (u128::from(u32::from(ip)), 4.0),
                IpAddr::V6(ip) => (u128::from(ip), 6.0),
            };
            (words[0], words[1]) = (kind, f32::from(address.port()));
            write(ip, &mut words[2..10]);
        }
        write(self.name, &mut words[10..]);
        words
    }

    /// Of numbers that somebody told.
    pub fn from_words(words: &[f32; WHEREABOUTS]) -> Self {
        let (ip, port) = (read(&words[2..10]), words[1] as u16);
        let address = match words[0] as u8 {
            4 => Some(IpAddr::V4(Ipv4Addr::from(ip as u32))),
            6 => Some(IpAddr::V6(Ipv6Addr::from(ip))),
            _ => None,
        };
        Self { address: address.map(|ip| SocketAddr::new(ip, port)), name: read(&words[10..]) }
    }
}

fn write(number: u128, words: &mut [f32]) {
    words.iter_mut().enumerate().for_each(|(index, word)| *word = f32::from((number >> (16 * index)) as u16));
}

fn read(words: &[f32]) -> u128 {
    words.iter().enumerate().fold(0, |number, (index, &word)| number | u128::from(word as u16) << (16 * index))
}

impl Lending {
    /// Boxes of the servers' own, for processes of this host.
    pub const fn at_home(token: Token) -> Self {
        Self { token, tls: None, boxes: Vec::new(), listen: IpAddr::V4(Ipv4Addr::LOCALHOST) }
    }

    /// Whether every server has a box of its own.
    pub const fn is_own(&self) -> bool {
        self.boxes.is_empty()
    }

    /// Reaches the boxes; `rank` asks, as errors say it.
    ///
    /// # Errors
    /// When one of them does not answer.
    pub fn connect(&self, rank: Rank, whereabouts: &Whereabouts) -> Result<Stripes, CommError> {
        let options = ClientOptions { tls: self.tls.clone(), rank, ..ClientOptions::new(&self.token) };
        match whereabouts.address {
            Some(address) => Stripes::connect(&[address], &options),
            None => Stripes::connect(&self.boxes, &options),
        }
    }

    /// The key of a region that all of a run know.
    pub fn key(&self, whereabouts: &Whereabouts, what: &str) -> Key {
        Key::derive(&self.token, &format!("{:032x} {what}", whereabouts.name))
    }

    /// A key that nobody else has.
    pub fn key_of_nobody(&self) -> Key {
        Key::derive(&self.token, &format!("{:032x}", u128::from_le_bytes(entropy::bytes())))
    }
}

/// A box of this process; it ends with this value.
#[derive(Debug)]
pub struct OwnBox {
    address: SocketAddr,
    stop: Stop,
    thread: Option<JoinHandle<()>>,
}

impl OwnBox {
    /// Begins to lend.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn start(lending: &Lending) -> io::Result<Self> {
        // Whoever has the run's token is one of its workers: the model decides what they need.
        let limits = Limits { bytes_max: u64::MAX / 2, client_bytes_max: u64::MAX / 2, regions_max: REGIONS_MAX };
        let options = ServerOptions { token: lending.token.clone(), tls: lending.tls.clone(), pool_bytes: 0, limits };
        let server = BoxServer::bind(SocketAddr::new(lending.listen, 0), options)?;
        let (address, stop) = (server.address()?, server.stop());
        // Its stop ends it; who is turned away knows why.
        let thread = threads::spawn("memory box", move || server.serve(&mut || false, &mut |_| {}))?;
        Ok(Self { address, stop, thread: Some(thread) })
    }
}

impl Drop for OwnBox {
    fn drop(&mut self) {
        self.stop.set("the run is over");
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_a_centre_lies_survives_being_sent() {
        for address in [None, Some("127.0.0.1:65535"), Some("[fe80::1:ffff]:1")] {
            let address = address.map(|address| address.parse().unwrap());
            let whereabouts = Whereabouts { address, name: 0x0123_4567_89ab_cdef_ffff_0000_8000_7fff };
            assert_eq!(Whereabouts::from_words(&whereabouts.to_words()), whereabouts);
        }
    }

    #[test]
    fn words_that_mean_nothing_are_an_address_or_none() {
        for word in [f32::NAN, -1.0, f32::INFINITY, 4.5, 1e30] {
            let found = Whereabouts::from_words(&[word; WHEREABOUTS]);
            assert!(found.address.is_none() || word as u8 == 4, "{word}: {found:?}");
        }
    }
}
