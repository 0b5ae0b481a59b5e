//! How messages shrink. Each codec is a file; adding one is adding a file and its name to the list below.
//!
//! A codec turns the values of a bucket into a message and back. It sees which parameters the bucket holds, as matrices, may keep
//! state from step to step (what it left out, for instance), which is saved with the run, and says how the messages of all ranks become
//! one result: as [`Round`]s, which one interpreter runs. A codec never knows who sends its messages.

use std::fmt::Debug;

use paceline_comm::{Action, CommError, Communicator, RegisteredBuffer, Transfer};
use paceline_system::memory;

/// Declares every codec's module, and lists what it offers.
macro_rules! codecs {
    ($($file:ident),* $(,)?) => {
        $(pub mod $file;)*

        /// Every codec, the one that changes nothing first.
        pub static ALL: &[&dyn Squeeze] = &[$(&$file::SQUEEZE),*];
    };
}

codecs! { none, bf16 }

/// A codec as the command line offers it.
pub trait Squeeze: Debug + Sync {
    /// The word in files and flags.
    fn name(&self) -> &'static str;

    /// A few words for `--help`.
    fn about(&self) -> &'static str;

    /// One for all buckets of a replica.
    fn codec(&self) -> Box<dyn Codec>;
}

/// The codec of this name.
pub fn find(name: &str) -> Option<&'static dyn Squeeze> {
    ALL.iter().copied().find(|squeeze| squeeze.name() == name)
}

/// A parameter, or a part of one, as a matrix: columns are its last dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Where it begins in the bucket.
    pub start: usize,
    /// Its rows.
    pub rows: usize,
    /// Their length.
    pub columns: usize,
}

/// What becomes of the messages of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Round {
    /// They are added up, element by element.
    Sum(Number),
}

/// What the elements of a message are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Number {
    /// 32-bit floating point.
    F32,
    /// Its upper half; sums are made in 32 bits and rounded at each hop.
    Bf16,
}

impl Number {
    /// Bytes of one.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// Turns values into messages and back.
pub trait Codec: Debug + Send {
    /// How messages become a result, in order.
    fn rounds(&self) -> &'static [Round];

    /// Whether messages are the values themselves: then nothing is copied.
    fn is_identity(&self) -> bool {
        false
    }

    /// The longest message of so many values.
    fn bytes_max(&self, elements: usize) -> usize;

    /// Writes the message of a round.
    fn encode(&mut self, round: usize, segments: &[Segment], values: &[f32], message: &mut Message);

    /// Reads what a round made of all messages: the values whose elements begin at `start` of the message.
    fn decode(&mut self, round: usize, segments: &[Segment], message: (&Message, usize), values: &mut [f32]);

    /// What is kept from step to step, to be saved with the run.
    fn state(&self) -> &[f32] {
        &[]
    }

    /// Takes over what was saved.
    fn restore(&mut self, _state: &[f32]) {}
}

/// The words of a message. Its memory is used again and again.
#[derive(Debug, Default)]
pub struct Message {
    halves: Vec<u16>,
}

impl Message {
    /// So many 16-bit words, to be written.
    pub fn halves_mut(&mut self, count: usize) -> &mut [u16] {
        if self.halves.len() < count {
            let more = count - self.halves.len();
            memory::reserve(&mut self.halves, more, "messages").unwrap_or_else(|refused| refused.unwind());
            self.halves.resize(count, 0);
        }
        &mut self.halves[..count]
    }

    /// So many of its 16-bit words.
    pub fn halves(&self, start: usize, count: usize) -> &[u16] {
        &self.halves[start..start + count]
    }
}

/// Replaces a range of a buffer by its sum over all ranks, by the rounds of a codec.
///
/// # Errors
/// When another rank, or the way to it, has failed.
pub fn all_reduce(
    codec: &mut dyn Codec,
    communicator: &mut Communicator,
    (buffer, range): (&mut RegisteredBuffer, std::ops::Range<usize>),
    segments: &[Segment],
    message: &mut Message,
) -> Result<(), CommError> {
    if codec.is_identity() {
        return communicator.all_reduce_registered(buffer, range);
    }
    let values = &mut buffer.as_mut_slice()[range];
    for (index, round) in codec.rounds().iter().enumerate() {
        codec.encode(index, segments, values, message);
        match round {
            Round::Sum(Number::F32) => communicator.all_reduce(values)?,
            Round::Sum(Number::Bf16) => communicator.all_reduce_bf16(message.halves_mut(values.len()))?,
        }
        codec.decode(index, segments, (message, 0), values);
    }
    Ok(())
}

/// Runs a list of transfers on encoded values, for those who exchange with servers: what is sent is encoded, what is received is
/// decoded, at the same positions.
///
/// # Errors
/// When another rank, or the way to it, has failed.
pub fn exchange(
    codec: &mut dyn Codec,
    communicator: &mut Communicator,
    (list, tag): (&[Transfer], u64),
    values: &mut [f32],
    message: &mut Message,
) -> Result<(), CommError> {
    if codec.is_identity() {
        return communicator.exchange(list, tag, values);
    }
    for (index, round) in codec.rounds().iter().enumerate() {
        codec.encode(index, &[], values, message);
        match round {
            Round::Sum(Number::F32) => communicator.exchange(list, tag, values)?,
            Round::Sum(Number::Bf16) => communicator.exchange_bf16(list, tag, message.halves_mut(values.len()))?,
        }
        // What was only sent keeps its exact values.
        for transfer in list.iter().filter(|transfer| transfer.action != Action::Send) {
            let range = transfer.start..transfer.start + transfer.length;
            codec.decode(index, &[], (message, range.start), &mut values[range]);
        }
    }
    Ok(())
}
