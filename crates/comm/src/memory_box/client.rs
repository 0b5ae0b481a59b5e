//! Whoever borrows: one box, by one connection or several, and by mapped memory where it is on the same host.

use std::net::{SocketAddr, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as LocalAddress, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use super::extent::past_caches;
use super::extent::{Extent, Places};
use super::line::{DATA_BYTES_MAX, Line, MESSAGE_MAX};
use super::talk::{Answer, Ask, Key, Message, No, Reply, Span, Usage, WATCH_MAX};
use super::{BORROWER, identity, local_name};
use crate::error::{CommError, Party};
use crate::rank::Rank;
use crate::stop::Stop;
use crate::token::Token;
use crate::wait::Wait;
use crate::wire::stream::{Stream, Talk};
use crate::wire::{Role, Socket, Tls, greet};

/// How long a connection may take to be there.
const DIAL_MAX: Duration = Duration::from_secs(5);
const GREETING_MAX: Duration = Duration::from_secs(10);

/// Longer data goes through mapped memory where there is some: below, one message is quicker than two.
const MAPPED_MIN: u64 = 32 << 10;

/// Longer data is divided among the sockets.
const DIVIDED_MIN: u64 = 1 << 20;

impl Key {
    /// The key of a name, for whoever has the secret: those who share a token derive the same.
    pub fn derive(token: &Token, name: &str) -> Self {
        let mac = |what: &[u8]| {
            let mut mac = Hmac::<Sha256>::new_from_slice(token.bytes()).expect("a key may have any length");
            mac.update(what);
            mac.update(name.as_bytes());
            mac.finalize().into_bytes()
        };
        let (name, secret) = (mac(b"the name of a region: "), mac(b"what opens a region: "));
        Self { name: name.into(), secret: *secret.first_chunk().expect("a digest has 32 bytes") }
    }

    /// The key of a name with an access token of one's own, for those who are told it.
    pub fn named(name: &str, secret: [u8; 16]) -> Self {
        Self { name: Sha256::digest(name.as_bytes()).into(), secret }
    }
}

/// How to reach a box.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// The secret that the box has too.
    pub token: Token,
    /// Whether and how connections are secret.
    pub tls: Option<Tls>,
    /// Connections, between which long data is divided.
    pub sockets: usize,
    /// Whether memory is mapped if the box is on this host.
    pub maps: bool,
    /// Who asks, as errors say it.
    pub rank: Rank,
    /// What ends every call early.
    pub stop: Stop,
}

impl ClientOptions {
    /// One connection, and mapped memory where that can be.
    pub fn new(token: &Token) -> Self {
        Self { token: token.clone(), tls: None, sockets: 1, maps: true, rank: BORROWER, stop: Stop::new() }
    }
}

/// A box, from outside. Threads may share it; each call has a connection for itself, as far as there are any: where memory
/// is mapped, and with more threads than sockets, calls wait for each other, and for [`BoxClient::wait`] too.
pub struct BoxClient {
    lines: Vec<Mutex<Line>>,
    talk: Talk,
    is_mapped: bool,
}

/// A region of a box.
#[derive(Clone, Debug)]
pub struct LentRegion {
    number: u64,
    bytes: u64,
    mapped: Option<(Arc<Extent>, u64)>,
}

impl LentRegion {
    /// Its length.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl std::fmt::Debug for BoxClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BoxClient").field("lines", &self.lines.len()).field("is_mapped", &self.is_mapped).finish()
    }
}

fn locked(line: &Mutex<Line>) -> MutexGuard<'_, Line> {
    line.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A connection that has been greeted and welcomed: what the box said.
struct Welcomed {
    line: Line,
    secret: [u8; 16],
    name: [u8; 16],
}

impl BoxClient {
    /// Reaches the box at an address.
    ///
    /// # Errors
    /// When nobody answers there in time, or not as agreed.
    pub fn connect(address: SocketAddr, options: &ClientOptions) -> Result<Self, CommError> {
        let peer = Party::Address(format!("the memory box at {address}"));
        let talk = Talk { rank: options.rank, peer, phase: "borrowing memory" };
        let dial = || -> Result<Box<dyn Stream + Send>, CommError> {
            let gone = |error: std::io::Error| {
                talk.gone(format!("{error}; start `paceline serve memory --listen {address}` there"))
            };
            let stream = TcpStream::connect_timeout(&address, DIAL_MAX).map_err(gone)?;
            stream.set_nodelay(true).map_err(gone)?;
            Ok(Box::new(Socket::dialled(stream, options.tls.as_ref()).map_err(gone)?))
        };
        let Welcomed { line, secret, name } = welcome(dial()?, None, options, ([0; 16], &talk))?;
        if options.maps
            && let Some(stream) = neighbour(&name)
        {
            let files = stream.try_clone().map_err(|error| talk.gone(error))?;
            let local = welcome(Box::new(stream), Some(files), options, (secret, &talk))?.line;
            // The first connection stays open as long as the client: it is who the box knows it by.
            return Ok(Self { lines: vec![Mutex::new(local), Mutex::new(line)], talk, is_mapped: true });
        }
        let mut lines = vec![Mutex::new(line)];
        while lines.len() < options.sockets {
            lines.push(Mutex::new(welcome(dial()?, None, options, (secret, &talk))?.line));
        }
        Ok(Self { lines, talk, is_mapped: false })
    }

    /// Whether the box's memory is mapped, because it is on this host.
    pub const fn is_mapped(&self) -> bool {
        self.is_mapped
    }

    fn refused(&self, no: No) -> CommError {
        CommError::Failed { rank: self.talk.rank, phase: self.talk.phase, what: no.to_string() }
    }

    fn unexpected(&self, reply: &Reply) -> CommError {
        match reply {
            Reply::Answer(Answer::No(no)) => self.refused(*no),
            _ => self.talk.violation("a reply that was not asked for"),
        }
    }

    /// The same, where data has come with it that nobody reads.
    fn unexpected_on(&self, line: &mut Line, reply: &Reply, data: u64) -> CommError {
        if data > 0 {
            line.give_up();
        }
        self.unexpected(reply)
    }

    /// One of the connections: a free one if there is.
    fn line(&self) -> MutexGuard<'_, Line> {
        let ways = if self.is_mapped { &self.lines[..1] } else { &self.lines[..] };
        ways.iter().find_map(|line| line.try_lock().ok()).unwrap_or_else(|| locked(&self.lines[0]))
    }

    fn ask(&self, ask: Ask) -> Result<Reply, CommError> {
        let mut line = self.line();
        line.say(Message::Ask(ask).encode())?;
        Ok(line.reply(MESSAGE_MAX)?.0)
    }

    fn ask_version(&self, ask: Ask) -> Result<u64, CommError> {
        match self.ask(ask)? {
            Reply::Answer(Answer::Done { version }) => Ok(version),
            other => Err(self.unexpected(&other)),
        }
    }

    fn region(&self, ask: Ask) -> Result<LentRegion, CommError> {
        let reply = self.ask(ask)?;
        let Reply::Answer(Answer::Region { region, bytes, .. }) = reply else { return Err(self.unexpected(&reply)) };
        let mapped = if self.is_mapped { Some(self.map(region)?) } else { None };
        Ok(LentRegion { number: region, bytes, mapped })
    }

    fn map(&self, region: u64) -> Result<(Arc<Extent>, u64), CommError> {
        let mut line = self.line();
        line.say(Message::Map { region }.encode())?;
        match line.reply(MESSAGE_MAX)?.0 {
            Reply::Mapped { bytes, page } if page.is_power_of_two() => {
                let file = line.receive_file()?;
                let extent = Extent::open(file, bytes);
                let extent =
                    extent.ok_or_else(|| self.talk.violation("its memory is not as long as it said, or not sealed"))?;
                Ok((Arc::new(extent), page))
            }
            other => Err(self.unexpected(&other)),
        }
    }

    /// Makes a region full of zeros. It is there until it is freed, or the last client that has it is gone.
    ///
    /// # Errors
    /// When the name is taken, or the box is full.
    pub fn create(&self, key: &Key, bytes: u64) -> Result<LentRegion, CommError> {
        self.region(Ask::Create { key: *key, bytes, keeps: false })
    }

    /// The same; it stays until it is freed.
    ///
    /// # Errors
    /// As [`BoxClient::create`].
    pub fn create_kept(&self, key: &Key, bytes: u64) -> Result<LentRegion, CommError> {
        self.region(Ask::Create { key: *key, bytes, keeps: true })
    }

    /// The region of a key.
    ///
    /// # Errors
    /// When there is none, or the key is wrong.
    pub fn attach(&self, key: &Key) -> Result<LentRegion, CommError> {
        self.region(Ask::Attach { key: *key })
    }

    /// Takes the key away. Whoever reads or writes may finish.
    ///
    /// # Errors
    /// When it is gone already.
    pub fn free(&self, region: &LentRegion) -> Result<(), CommError> {
        self.ask_version(Ask::Free { region: region.number }).map(drop)
    }

    /// Reads bytes as they were at one version, which is returned.
    ///
    /// # Errors
    /// When they are not inside of the region, or the box is gone.
    pub fn read(&self, region: &LentRegion, at: u64, bytes: &mut [u8]) -> Result<u64, CommError> {
        let span = Span { at, bytes: bytes.len() as u64 };
        if let Some((extent, page)) = region.mapped.as_ref().filter(|_| span.bytes >= MAPPED_MIN) {
            return self.read_mapped((region.number, extent, *page), span, bytes);
        }
        if span.bytes > DATA_BYTES_MAX || (self.lines.len() > 1 && !self.is_mapped && span.bytes >= DIVIDED_MIN) {
            return self.read_divided(region.number, span, bytes);
        }
        let mut line = self.line();
        line.say(Message::Read { region: region.number, span }.encode())?;
        match line.reply(MESSAGE_MAX)? {
            (Reply::Data { version }, data) if data == span.bytes => line.receive(bytes).map(|()| version),
            (other, data) => Err(self.unexpected_on(&mut line, &other, data)),
        }
    }

    fn open(&self, region: u64, span: Span) -> Result<(u64, u64, Arc<[u32]>), CommError> {
        match self.ask(Ask::Open { region, span })? {
            Reply::Answer(Answer::Held { number, version, places }) => Ok((number, version, places)),
            other => Err(self.unexpected(&other)),
        }
    }

    fn close(&self, held: u64) -> Result<(), CommError> {
        self.line().say(Message::Ask(Ask::Close { held }).encode())
    }

    fn places(&self, extent: &Arc<Extent>, page: u64, span: Span, places: &Arc<[u32]>) -> Result<Places, CommError> {
        Places::new(extent, page, span, places).ok_or_else(|| self.talk.violation("places outside of the region"))
    }

    fn read_mapped(
        &self,
        (region, extent, page): (u64, &Arc<Extent>, u64),
        span: Span,
        bytes: &mut [u8],
    ) -> Result<u64, CommError> {
        let (view, version, places) = self.open(region, span)?;
        let places = self.places(extent, page, span, &places)?;
        let mut rest = bytes;
        let shown = places.look(span, |piece| {
            let (now, later) = std::mem::take(&mut rest).split_at_mut(piece.len());
            now.copy_from_slice(piece);
            rest = later;
            Ok::<(), CommError>(())
        });
        shown.unwrap_or(Ok(()))?;
        self.close(view)?;
        Ok(version)
    }

    /// Parts by all connections at once, of one view.
    fn read_divided(&self, region: u64, span: Span, bytes: &mut [u8]) -> Result<u64, CommError> {
        let (view, version, _) = self.open(region, span)?;
        let part = part_bytes(span.bytes, self.lines.len());
        let parts: Vec<&mut [u8]> = bytes.chunks_mut(part).collect();
        let mut at = span.at;
        let mut shares: Vec<Vec<(u64, &mut [u8])>> = self.lines.iter().map(|_| Vec::new()).collect();
        let count = shares.len();
        for (nth, piece) in parts.into_iter().enumerate() {
            let length = piece.len() as u64;
            shares[nth % count].push((at, piece));
            at += length;
        }
        self.on_all_lines(shares, |line, share| {
            for (at, piece) in &share {
                let span = Span { at: *at, bytes: piece.len() as u64 };
                line.say(Message::Look { held: view, span }.encode())?;
            }
            for (_, piece) in share {
                match line.reply(MESSAGE_MAX)? {
                    (Reply::Data { .. }, data) if data == piece.len() as u64 => line.receive(piece)?,
                    (other, _) => {
                        // Replies to what else was asked for are still to come.
                        line.give_up();
                        return Err(self.unexpected(&other));
                    }
                }
            }
            Ok(())
        })?;
        self.close(view)?;
        Ok(version)
    }

    /// Does something with every connection, each on a thread of its own.
    fn on_all_lines<T: Send>(
        &self,
        shares: Vec<T>,
        work: impl Fn(&mut Line, T) -> Result<(), CommError> + Sync,
    ) -> Result<(), CommError> {
        let with = |(line, share): (&Mutex<Line>, T)| work(&mut locked(line), share);
        paceline_system::threads::all(self.lines.iter().zip(shares), with).into_iter().collect()
    }

    /// Replaces bytes, all at once: whoever reads sees all of them or none. The version that they are of.
    ///
    /// # Errors
    /// When they are not inside of the region, or the box is gone.
    pub fn write(&self, region: &LentRegion, at: u64, bytes: &[u8]) -> Result<u64, CommError> {
        self.bring(region, at, bytes, None)
    }

    /// Adds numbers, so many times, in the box: nobody's are lost. The version with which they are there.
    ///
    /// # Errors
    /// As [`BoxClient::write`].
    pub fn add(&self, region: &LentRegion, at: u64, numbers: &[f32], scale: f32) -> Result<u64, CommError> {
        self.bring(region, at, bytemuck::cast_slice(numbers), Some(scale))
    }

    fn bring(&self, region: &LentRegion, at: u64, bytes: &[u8], scale: Option<f32>) -> Result<u64, CommError> {
        let span = Span { at, bytes: bytes.len() as u64 };
        let mapped = region.mapped.as_ref().filter(|_| span.bytes >= MAPPED_MIN);
        let divided =
            span.bytes > DATA_BYTES_MAX || (self.lines.len() > 1 && !self.is_mapped && span.bytes >= DIVIDED_MIN);
        if mapped.is_some() || divided {
            let (draft, places) = match self.ask(Ask::Draft { region: region.number, span })? {
                Reply::Answer(Answer::Held { number, places, .. }) => (number, places),
                other => return Err(self.unexpected(&other)),
            };
            let landed = if let Some((extent, page)) = mapped {
                self.fill_mapped(&self.places(extent, *page, span, &places)?, span, bytes);
                0
            } else {
                self.land_divided(draft, span, bytes)?;
                span.bytes
            };
            return self.ask_version(Ask::Commit { draft, bytes: landed, scale }).inspect_err(|_| {
                // It may be gone with the box.
                let _ = self.close(draft);
            });
        }
        let mut line = self.line();
        let message = Message::Write { region: region.number, span, scale }.encode();
        line.send(message, span.bytes, |piece| piece(bytes))?;
        match line.reply(MESSAGE_MAX)?.0 {
            Reply::Answer(Answer::Done { version }) => Ok(version),
            other => Err(self.unexpected(&other)),
        }
    }

    fn fill_mapped(&self, places: &Places, span: Span, bytes: &[u8]) {
        let mut rest = bytes;
        let filled = places.fill(span, |piece| {
            let (now, later) = rest.split_at(piece.len());
            past_caches::copy(now, piece);
            rest = later;
            Ok::<(), std::convert::Infallible>(())
        });
        assert!(filled.is_some(), "the places are of this span");
    }

    fn land_divided(&self, draft: u64, span: Span, bytes: &[u8]) -> Result<(), CommError> {
        let part = part_bytes(span.bytes, self.lines.len());
        let mut shares: Vec<Vec<(u64, &[u8])>> = self.lines.iter().map(|_| Vec::new()).collect();
        let count = shares.len();
        for (nth, piece) in bytes.chunks(part).enumerate() {
            shares[nth % count].push((span.at + (nth * part) as u64, piece));
        }
        self.on_all_lines(shares, |line, share| {
            share.into_iter().try_for_each(|(at, piece)| {
                let span = Span { at, bytes: piece.len() as u64 };
                line.send(Message::Land { held: draft, span }.encode(), span.bytes, |say| say(piece))
            })
        })
    }

    /// Has the box add numbers of one region to another's, so many times. The version with which they are there.
    ///
    /// # Errors
    /// When they are not inside of the regions, or the box is gone.
    pub fn accumulate(
        &self,
        (target, at): (&LentRegion, u64),
        (source, from): (&LentRegion, u64),
        bytes: u64,
        scale: f32,
    ) -> Result<u64, CommError> {
        let target = (target.number, Span { at, bytes });
        self.ask_version(Ask::Accumulate { target, source: source.number, from, scale })
    }

    /// Adds to a number of 64 bits, and tells what it was.
    ///
    /// # Errors
    /// As [`BoxClient::write`].
    pub fn fetch_add(&self, region: &LentRegion, at: u64, by: i64) -> Result<i64, CommError> {
        match self.ask(Ask::Count { region: region.number, at, by })? {
            Reply::Counted { before, .. } => Ok(before),
            other => Err(self.unexpected(&other)),
        }
    }

    /// A new version without a change, for those who wait for one.
    ///
    /// # Errors
    /// When the region or the box is gone.
    pub fn notify(&self, region: &LentRegion) -> Result<u64, CommError> {
        self.ask_version(Ask::Notify { region: region.number })
    }

    /// Waits until the region has this version, at most so long; the version that it has then.
    ///
    /// # Errors
    /// When the region or the box is gone.
    pub fn wait(&self, region: &LentRegion, version: u64, limit: Duration) -> Result<u64, CommError> {
        let wait = Wait::new(limit, &self.line().stop);
        loop {
            let limit = wait.left().min(WATCH_MAX);
            let found = self.ask_version(Ask::Watch { region: region.number, version, limit })?;
            if found >= version || wait.left().is_zero() {
                return Ok(found);
            }
            self.talk.check(&wait)?;
        }
    }

    /// How much the box has lent.
    ///
    /// # Errors
    /// When it is gone.
    pub fn usage(&self) -> Result<Usage, CommError> {
        match self.ask(Ask::Usage)? {
            Reply::Answer(Answer::Usage(usage)) => Ok(usage),
            other => Err(self.unexpected(&other)),
        }
    }
}

/// Parts that are a few for every connection and no longer than a message.
fn part_bytes(bytes: u64, lines: usize) -> usize {
    let even = bytes.div_ceil(2 * lines as u64).next_multiple_of(4096);
    even.clamp(256 << 10, DATA_BYTES_MAX) as usize
}

/// The socket of a box on this host.
fn neighbour(name: &[u8; 16]) -> Option<UnixStream> {
    UnixStream::connect_addr(&LocalAddress::from_abstract_name(local_name(name)).ok()?).ok()
}

/// Greets the box on a connection, and says who this is.
fn welcome(
    mut stream: Box<dyn Stream + Send>,
    files: Option<UnixStream>,
    options: &ClientOptions,
    (secret, talk): ([u8; 16], &Talk),
) -> Result<Welcomed, CommError> {
    let wait = Wait::new(GREETING_MAX, &options.stop);
    greet(&mut *stream, &identity(&options.token, Role::Dialler), &wait)?;
    let mut line = Line::new(stream, files, (talk.clone(), options.stop.clone()))?;
    line.say(Message::Hello { secret }.encode())?;
    match line.reply(GREETING_MAX)?.0 {
        Reply::Welcome { secret, name, .. } => Ok(Welcomed { line, secret, name }),
        _ => Err(talk.violation("a reply where a welcome belongs")),
    }
}
