//! Boxes and regions as a program in C sees them. Every number that comes from there is looked at here, before it goes further.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use paceline_cluster::spec::Address;
use paceline_cluster::token;
use paceline_comm::memory_box::{BoxClient, ClientOptions, Key, StripedRegion, Stripes, Usage};
use paceline_comm::wire::Tls;
use paceline_comm::{CommError, Token};
use paceline_system::host;

use crate::problem::{Problem, Status};

/// More sockets to one box are of no use, and it has threads for a thousand in all.
const SOCKETS_MAX: u32 = 64;

/// Whoever waits longer waits for ever: 34 years.
const WAIT_MS_MAX: u64 = 1 << 40;

/// Which token it is.
#[derive(Clone, Copy, Debug)]
pub enum Secret<'a> {
    /// Its digits.
    Digits(&'a str),
    /// A file that has them.
    File(&'a str),
    /// As for `paceline serve memory`.
    Own,
}

/// How to reach boxes.
#[derive(Clone, Copy, Debug)]
pub struct Way<'a> {
    /// What both sides hold.
    pub secret: Secret<'a>,
    /// Connections for long data; 0 is one.
    pub sockets: u32,
    /// Whether connections are encrypted.
    pub is_secret: bool,
    /// Whether memory of this host is mapped.
    pub maps: bool,
}

/// Boxes that have been reached.
#[derive(Debug)]
pub struct Boxes {
    token: Token,
    boxes: Stripes,
}

/// A region, which keeps its boxes reached.
#[derive(Debug)]
pub struct Region {
    owner: Arc<Boxes>,
    lent: StripedRegion,
}

/// How a region comes to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Birth {
    /// It is made, and goes with the last client.
    Passing,
    /// It is made, and stays.
    Kept,
    /// It is there.
    Found,
}

impl Secret<'_> {
    fn token(self) -> Result<Token, Problem> {
        match self {
            Self::Digits(digits) => Token::from_hex(digits)
                .ok_or_else(|| Problem::invalid("the token is not one; a token is 64 hexadecimal digits")),
            Self::File(path) => {
                let named = BTreeMap::from([("PACELINE_TOKEN_FILE".to_owned(), path.to_owned())]);
                Ok(token::of_files(&named)?)
            }
            Self::Own => Ok(token::of_files(&host::variables())?),
        }
    }
}

/// One box, at the first of its name's addresses that answers.
fn reach(address: &Address, options: &ClientOptions) -> Result<BoxClient, Problem> {
    let unknown = |why: &str| Problem::new(Status::Lost, format!("the host of {address} is not known here: {why}"));
    let places = address.places().map_err(|error| unknown(&error.to_string()))?;
    let mut last = unknown("its name has no address");
    for place in places {
        match BoxClient::connect(place, options) {
            Ok(client) => return Ok(client),
            // Somebody is there: another address of the same host would say the same.
            Err(error) if error.is_refusal() => return Err(error.into()),
            Err(error) => last = error.into(),
        }
    }
    Err(last)
}

impl Boxes {
    /// Reaches all boxes of a list, `host:port` with commas between them.
    pub fn connect(addresses: &str, way: &Way<'_>) -> Result<Self, Problem> {
        let token = way.secret.token()?;
        if way.sockets > SOCKETS_MAX {
            return Err(Problem::invalid(format!("{} sockets; at most {SOCKETS_MAX}", way.sockets)));
        }
        let tls = way.is_secret.then(|| Tls::from_token(&token));
        let sockets = way.sockets.max(1) as usize;
        let options = ClientOptions { tls, sockets, maps: way.maps, ..ClientOptions::new(&token) };
        let addresses: Result<Vec<Address>, _> = addresses.split(',').map(|text| Address::parse(text.trim())).collect();
        let boxes: Result<Vec<BoxClient>, Problem> =
            addresses?.iter().map(|address| reach(address, &options)).collect();
        Ok(Self { token, boxes: Stripes::of(boxes?) })
    }

    /// Whether all boxes' memory is mapped.
    pub fn is_mapped(&self) -> bool {
        self.boxes.is_mapped()
    }

    /// The key of a name, which all who hold the token have.
    pub fn key(&self, name: &str) -> Key {
        Key::derive(&self.token, name)
    }

    /// What is lent, of all boxes.
    pub fn usage(&self) -> Result<Usage, Problem> {
        Ok(self.boxes.usage()?)
    }

    /// A region; one that is there may be of whatever length it has if 0 is said.
    pub fn region(self: &Arc<Self>, key: &Key, bytes: u64, birth: Birth) -> Result<Region, Problem> {
        let lent = match birth {
            Birth::Found if bytes == 0 => self.boxes.find(key),
            Birth::Found => self.boxes.attach(key, bytes),
            Birth::Passing | Birth::Kept if bytes == 0 => return Err(Problem::invalid("a region of no bytes")),
            Birth::Passing => self.boxes.create(key, bytes),
            Birth::Kept => self.boxes.create_kept(key, bytes),
        };
        Ok(Region { owner: Arc::clone(self), lent: lent? })
    }
}

impl Region {
    /// Its length.
    pub const fn bytes(&self) -> u64 {
        self.lent.bytes()
    }

    /// The region, if that is inside of it: asked before memory of the caller's is taken for so long.
    pub fn inside(&self, at: u64, bytes: u64) -> Result<&Self, Problem> {
        let whole = self.bytes();
        if bytes > 0 && at.checked_add(bytes).is_some_and(|end| end <= whole) {
            return Ok(self);
        }
        Err(Problem::invalid(format!("{bytes} bytes at {at} are not inside of a region of {whole} bytes")))
    }

    fn check_multiple(of: u64, numbers: &[u64]) -> Result<(), Problem> {
        match numbers.iter().find(|number| !number.is_multiple_of(of)) {
            None => Ok(()),
            Some(number) => {
                Err(Problem::invalid(format!("numbers of {of} bytes are at multiples of {of}, not {number}")))
            }
        }
    }

    /// Takes the key away.
    pub fn free(&self) -> Result<(), Problem> {
        Ok(self.owner.boxes.free(&self.lent)?)
    }

    /// Bytes as they were at a version.
    pub fn read(&self, at: u64, bytes: &mut [u8]) -> Result<u64, Problem> {
        self.inside(at, bytes.len() as u64)?;
        Ok(self.owner.boxes.read(&self.lent, at, bytes)?)
    }

    /// Replaces bytes.
    pub fn write(&self, at: u64, bytes: &[u8]) -> Result<u64, Problem> {
        self.inside(at, bytes.len() as u64)?;
        Ok(self.owner.boxes.write(&self.lent, at, bytes)?)
    }

    /// Adds numbers.
    pub fn add(&self, at: u64, numbers: &[f32], scale: f32) -> Result<u64, Problem> {
        self.inside(at, size_of_val(numbers) as u64)?;
        Self::check_multiple(4, &[at])?;
        Ok(self.owner.boxes.add(&self.lent, at, numbers, scale)?)
    }

    /// Has the boxes add another region.
    pub fn accumulate(&self, at: u64, source: &Self, bytes: u64, scale: f32) -> Result<u64, Problem> {
        if !Arc::ptr_eq(&self.owner, &source.owner) {
            return Err(Problem::invalid("the two regions are not of one connection"));
        }
        self.inside(at, bytes)?;
        source.inside(at, bytes)?;
        Self::check_multiple(4, &[at, bytes])?;
        Ok(self.owner.boxes.accumulate(&self.lent, &source.lent, (at, bytes), scale)?)
    }

    /// Adds to a number of 64 bits; what it was.
    pub fn fetch_add(&self, at: u64, by: i64) -> Result<i64, Problem> {
        self.inside(at, 8)?;
        Self::check_multiple(8, &[at])?;
        Ok(self.owner.boxes.fetch_add(&self.lent, at, by)?)
    }

    /// A new version.
    pub fn notify(&self) -> Result<u64, Problem> {
        Ok(self.owner.boxes.notify(&self.lent)?)
    }

    /// Waits for a version; which it is, and whether that is enough.
    pub fn wait(&self, version: u64, limit_ms: u64) -> Result<u64, CommError> {
        let limit = Duration::from_millis(limit_ms.min(WAIT_MS_MAX));
        self.owner.boxes.wait(&self.lent, version, limit)
    }
}
