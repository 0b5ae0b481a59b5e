//! Frames over a socket: what control connections speak. Each direction counts its frames.

use super::frame::{Decoder, Frame, HEADER_BYTES, Header};
use super::stream::{Stream, Talk, read_exact, write_all};
use crate::error::CommError;
use crate::wait::Wait;

/// A connection that carries frames of a limited size.
#[derive(Debug)]
pub struct Framed<S> {
    stream: S,
    decoder: Decoder,
    sent: u64,
}

impl<S: Stream> Framed<S> {
    /// Frames over a stream at which both sides are at their first one; none longer than `limit` bytes is taken.
    pub const fn new(stream: S, limit: u32) -> Self {
        Self { stream, decoder: Decoder::new(limit), sent: 0 }
    }

    /// The stream below, to look at or to clone.
    pub const fn stream(&self) -> &S {
        &self.stream
    }

    /// Sends one frame.
    ///
    /// # Errors
    /// When the wait ends or the connection breaks first.
    ///
    /// # Panics
    /// For a payload of four gigabytes or more, which no receiver takes.
    pub fn send(&mut self, kind: u16, payload: &[u8], talk: &Talk, wait: &Wait) -> Result<(), CommError> {
        let length = u32::try_from(payload.len()).expect("a frame is shorter than four gigabytes");
        let header = Header { kind, sequence: self.sent, length }.encode();
        self.sent += 1;
        write_all(&mut self.stream, &[&header[..], payload].concat(), talk, wait)
    }

    /// Receives the next frame.
    ///
    /// # Errors
    /// When the wait ends, the connection breaks, or what comes is not the next frame.
    pub fn receive(&mut self, talk: &Talk, wait: &Wait) -> Result<Frame, CommError> {
        let mut head = [0; HEADER_BYTES];
        read_exact(&mut self.stream, &mut head, talk, wait)?;
        let header = self.decoder.check(&head).map_err(|error| talk.violation(error))?;
        let mut payload = vec![0; header.length as usize];
        read_exact(&mut self.stream, &mut payload, talk, wait)?;
        Ok(Frame { kind: header.kind, payload })
    }
}
