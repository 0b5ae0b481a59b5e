//! One connection between a client and a box: frames whose data is sent from where it is and received where it belongs.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use paceline_system::clock::Clock;
use paceline_system::{cores, ready};

use super::talk::Reply;
use crate::error::CommError;
use crate::stop::Stop;
use crate::wait::{SLICE_MAX, Wait};
use crate::wire::frame::{Decoder, HEADER_BYTES, Header};
use crate::wire::passing;
use crate::wire::stream::{Stream, Talk, is_retry};

/// The most data of one message.
pub(super) const DATA_BYTES_MAX: u64 = 1 << 30;

/// Data up to so many bytes goes out in one piece with its header.
const TOGETHER_MAX: usize = 16 << 10;

/// How long to look for what comes before sleeping: as long as a thread takes to be woken on a core that sleeps, twice.
const LOOKS_MAX: Duration = Duration::from_micros(60);

/// How long one message may take to pass once it has begun.
pub(super) const MESSAGE_MAX: Duration = Duration::from_secs(60);

/// A connection that has been greeted.
pub(super) struct Line {
    stream: Box<dyn Stream + Send>,
    /// The same, where files can be sent along.
    local: Option<UnixStream>,
    /// The same, to ask whether something has come.
    looks: Option<OwnedFd>,
    decoder: Decoder,
    sent: u64,
    is_broken: bool,
    room: Vec<u8>,
    pub talk: Talk,
    pub stop: Stop,
}

/// What has come: a kind, its fields, and how much data follows.
pub(super) struct Head {
    pub kind: u16,
    pub fields: Vec<u8>,
    pub data: u64,
}

impl Line {
    /// Of a socket that blocks.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn new(
        stream: Box<dyn Stream + Send>,
        local: Option<UnixStream>,
        (talk, stop): (Talk, Stop),
    ) -> Result<Self, CommError> {
        stream.set_timeouts(SLICE_MAX).map_err(|error| talk.gone(error))?;
        let decoder = Decoder::new(DATA_BYTES_MAX as u32 + 64);
        let looks = stream.looks().filter(|_| cores::online() > 1);
        Ok(Self { stream, local, looks, decoder, sent: 0, is_broken: false, room: Vec::new(), talk, stop })
    }

    pub const fn is_local(&self) -> bool {
        self.local.is_some()
    }

    fn wait(&self) -> Wait {
        Wait::new(MESSAGE_MAX, &self.stop)
    }

    /// What was given up in the middle leaves the two ends at different messages.
    fn write(&mut self, bytes: &[u8], wait: &Wait) -> Result<(), CommError> {
        self.check()?;
        let written = self.write_all(bytes, wait);
        self.is_broken |= written.is_err();
        written
    }

    fn check(&self) -> Result<(), CommError> {
        if self.is_broken { Err(self.talk.gone("a call before was given up")) } else { Ok(()) }
    }

    /// The other end has said something else than was expected, so that nothing can be expected any more.
    pub fn give_up(&mut self) {
        self.is_broken = true;
    }

    fn write_all(&mut self, bytes: &[u8], wait: &Wait) -> Result<(), CommError> {
        let mut written = 0;
        while written < bytes.len() {
            match self.stream.write(&bytes[written..]) {
                Ok(0) => return Err(self.talk.gone("it takes no more bytes")),
                Ok(count) => written += count,
                Err(error) if is_retry(&error) => self.talk.check(wait)?,
                Err(error) => return Err(self.talk.ended(error)),
            }
        }
        Ok(())
    }

    fn read(&mut self, bytes: &mut [u8], wait: &Wait) -> Result<(), CommError> {
        self.check()?;
        let read = self.read_all(bytes, wait);
        self.is_broken |= read.is_err();
        read
    }

    fn read_all(&mut self, bytes: &mut [u8], wait: &Wait) -> Result<(), CommError> {
        let mut filled = 0;
        while filled < bytes.len() {
            match self.stream.read(&mut bytes[filled..]) {
                Ok(0) => return Err(self.talk.gone("it closed the connection")),
                Ok(count) => filled += count,
                Err(error) if is_retry(&error) => self.talk.check(wait)?,
                Err(error) => return Err(self.talk.ended(error)),
            }
        }
        Ok(())
    }

    /// Sends a message; `pieces` is called to say its data, which is as long as was said.
    pub fn send(
        &mut self,
        (kind, fields): (u16, Vec<u8>),
        data: u64,
        pieces: impl FnOnce(&mut dyn FnMut(&[u8]) -> Result<(), CommError>) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let wait = self.wait();
        let length = fields.len() as u64 + data;
        let header = Header { kind, sequence: self.sent, length: u32::try_from(length).unwrap_or(u32::MAX) };
        self.sent += 1;
        let mut room = std::mem::take(&mut self.room);
        room.clear();
        room.extend_from_slice(&header.encode());
        room.extend_from_slice(&fields);
        let sent = if data as usize <= TOGETHER_MAX {
            pieces(&mut |piece| {
                room.extend_from_slice(piece);
                Ok(())
            })
            .and_then(|()| self.write(&room, &wait))
        } else {
            self.write(&room, &wait).and_then(|()| pieces(&mut |piece| self.write(piece, &wait)))
        };
        self.room = room;
        sent?;
        while self.stream.is_sending() {
            self.talk.check(&wait)?;
            // Encrypted bytes that the network did not take at once.
            let _ = self.stream.flush();
        }
        Ok(())
    }

    /// Sends a message without data.
    pub fn say(&mut self, message: (u16, Vec<u8>)) -> Result<(), CommError> {
        self.send(message, 0, |_| Ok(()))
    }

    /// The next message up to its data, for as long as nothing comes; `fields` says how many bytes of fields a kind has.
    pub fn hear(
        &mut self,
        limit: Duration,
        fields: impl FnOnce(u16, usize) -> Option<usize>,
    ) -> Result<Head, CommError> {
        let mut head = [0; HEADER_BYTES];
        let wait = Wait::new(limit, &self.stop);
        self.look();
        self.read(&mut head, &wait)?;
        let header = self.decoder.check(&head).map_err(|error| self.talk.violation(error))?;
        let length = header.length as usize;
        let count = fields(header.kind, length).filter(|&count| count <= length);
        let Some(count) = count else {
            return Err(self.talk.violation(format!("a message of kind {} with {length} bytes", header.kind)));
        };
        let mut fields = vec![0; count];
        let wait = self.wait();
        self.read(&mut fields, &wait)?;
        Ok(Head { kind: header.kind, fields, data: (length - count) as u64 })
    }

    /// Looks for a moment whether something comes: being woken takes longer than most answers do.
    fn look(&self) {
        let Some(looks) = &self.looks else { return };
        let clock = Clock::real();
        while clock.now() < LOOKS_MAX && !ready::is(looks.as_fd()) {
            std::hint::spin_loop();
        }
    }

    /// The next reply.
    pub fn reply(&mut self, limit: Duration) -> Result<(Reply, u64), CommError> {
        // Fields of a reply are bounded as a whole frame is.
        let head = self.hear(limit, |kind, length| Some(Reply::fields(kind, length)))?;
        let reply = Reply::decode(head.kind, &head.fields).map_err(|what| self.talk.violation(what))?;
        Ok((reply, head.data))
    }

    /// Receives data where it belongs.
    pub fn receive(&mut self, bytes: &mut [u8]) -> Result<(), CommError> {
        let wait = self.wait();
        self.read(bytes, &wait)
    }

    /// Receives data that belongs nowhere.
    pub fn skip(&mut self, mut data: u64) -> Result<(), CommError> {
        let mut room = [0; 4096];
        while data > 0 {
            let count = data.min(room.len() as u64) as usize;
            self.receive(&mut room[..count])?;
            data -= count as u64;
        }
        Ok(())
    }

    /// Sends a file behind a reply.
    pub fn send_file(&mut self, file: BorrowedFd<'_>) -> Result<(), CommError> {
        let Some(local) = &self.local else { return Err(self.talk.violation("files pass on one host only")) };
        passing::send(local, file).map_err(|error| self.talk.gone(error))
    }

    /// Receives it.
    pub fn receive_file(&mut self) -> Result<OwnedFd, CommError> {
        let wait = self.wait();
        let Some(local) = &self.local else { return Err(self.talk.violation("files pass on one host only")) };
        loop {
            match passing::receive(local) {
                Ok(file) => return file.ok_or_else(|| self.talk.gone("it sent no memory")),
                Err(error) if is_retry(&error.into()) => self.talk.check(&wait)?,
                Err(error) => return Err(self.talk.gone(error)),
            }
        }
    }
}
