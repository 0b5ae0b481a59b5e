//! How messages shrink. Each codec is a file; adding one is adding a file and its name to the list below.
//!
//! A codec turns the values of a bucket into a message and back. It sees which parameters the bucket holds,
//! as matrices, may keep state from step to step (what it left out, for instance), which is saved with the
//! run, and says how the messages of all ranks become one result: as [`Round`]s, which one interpreter runs.
//! A codec never knows who sends its messages.

use std::fmt::Debug;
use std::ops::Range;

use bytemuck::{cast_slice, cast_slice_mut};
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

/// Which values a message is made of.
#[derive(Clone, Debug)]
pub struct Span<'a> {
    /// Which round of the codec.
    pub round: usize,
    /// The bucket, if it is one's.
    pub bucket: Option<usize>,
    /// Which of its elements.
    pub range: Range<usize>,
    /// The parameters that it holds; begin where the bucket does. Servers know parts of buckets and give
    /// none.
    pub segments: &'a [Segment],
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

    /// Writes the message of a round, from this element of it on.
    fn encode(&mut self, span: &Span<'_>, values: &[f32], message: (&mut Message, usize));

    /// Reads what a round made of all messages, from this element of it on.
    fn decode(&mut self, span: &Span<'_>, message: (&Message, usize), values: &mut [f32]);

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
    words: Vec<u32>,
}

impl Message {
    /// Makes it long enough for so many bytes.
    fn reserve(&mut self, bytes: usize) {
        let words = bytes.div_ceil(4);
        if self.words.len() < words {
            let more = words - self.words.len();
            memory::reserve(&mut self.words, more, "messages").unwrap_or_else(|refused| refused.unwind());
            self.words.resize(words, 0);
        }
    }

    /// Some of its elements as 16-bit words, to be written.
    pub fn halves_mut(&mut self, range: Range<usize>) -> &mut [u16] {
        &mut cast_slice_mut(&mut self.words)[range]
    }

    /// Some of its elements as 16-bit words.
    pub fn halves(&self, range: Range<usize>) -> &[u16] {
        &cast_slice(&self.words)[range]
    }

    /// Some of its elements as 32-bit numbers, to be written.
    pub fn numbers_mut(&mut self, range: Range<usize>) -> &mut [f32] {
        &mut cast_slice_mut(&mut self.words)[range]
    }
}

/// Replaces a range of a bucket by its sum over all ranks, by the rounds of a codec.
///
/// # Errors
/// When another rank, or the way to it, has failed.
pub fn all_reduce(
    codec: &mut dyn Codec,
    communicator: &mut Communicator,
    (bucket, buffer): (usize, &mut RegisteredBuffer),
    (range, segments): (Range<usize>, &[Segment]),
    message: &mut Message,
) -> Result<(), CommError> {
    if codec.is_identity() {
        return communicator.all_reduce_registered(buffer, range);
    }
    let values = &mut buffer.as_mut_slice()[range.clone()];
    let all = 0..values.len();
    message.reserve(codec.bytes_max(values.len()));
    for (round, kind) in codec.rounds().iter().enumerate() {
        let span = Span { round, bucket: Some(bucket), range: range.clone(), segments };
        codec.encode(&span, values, (message, 0));
        match kind {
            Round::Sum(Number::F32) => communicator.all_reduce(message.numbers_mut(all.clone()))?,
            Round::Sum(Number::Bf16) => communicator.all_reduce_bf16(message.halves_mut(all.clone()))?,
        }
        codec.decode(&span, (message, 0), values);
    }
    Ok(())
}

/// Leaves the sum over all ranks in this rank's chunk of some values of a bucket, by the rounds of a codec; the
/// rest is spoilt.
///
/// # Errors
/// When another rank, or the way to it, has failed.
pub fn reduce_scatter(
    codec: &mut dyn Codec,
    communicator: &mut Communicator,
    (bucket, values): (usize, &mut [f32]),
    (range, segments): (Range<usize>, &[Segment]),
    message: &mut Message,
) -> Result<(), CommError> {
    let values = &mut values[range.clone()];
    if codec.is_identity() {
        return communicator.reduce_scatter(values);
    }
    let all = 0..values.len();
    message.reserve(codec.bytes_max(values.len()));
    for (round, kind) in codec.rounds().iter().enumerate() {
        let span = Span { round, bucket: Some(bucket), range: range.clone(), segments };
        codec.encode(&span, values, (message, 0));
        match kind {
            Round::Sum(Number::F32) => communicator.reduce_scatter(message.numbers_mut(all.clone()))?,
            Round::Sum(Number::Bf16) => communicator.reduce_scatter_bf16(message.halves_mut(all.clone()))?,
        }
        codec.decode(&span, (message, 0), values);
    }
    Ok(())
}

/// Whose values an exchange sends and receives.
#[derive(Clone, Copy, Debug, Default)]
pub struct Buckets {
    /// Their number in the plan.
    pub sent: Option<usize>,
    /// The same.
    pub received: Option<usize>,
}

/// Runs a list of transfers on encoded values, for those who exchange with servers: what is sent is encoded,
/// what is received is decoded, at the same positions, each once.
///
/// # Errors
/// When another rank, or the way to it, has failed.
pub fn exchange(
    codec: &mut dyn Codec,
    communicator: &mut Communicator,
    (list, tag): (&[Transfer], u64),
    buckets: Buckets,
    (values, message): (&mut [f32], &mut Message),
) -> Result<(), CommError> {
    if codec.is_identity() {
        return communicator.exchange(list, tag, values);
    }
    message.reserve(codec.bytes_max(values.len()));
    let span = |round, bucket, range: &Range<usize>| Span { round, bucket, range: range.clone(), segments: &[] };
    for (round, kind) in codec.rounds().iter().enumerate() {
        for range in distinct(list, |action| action == Action::Send) {
            codec.encode(&span(round, buckets.sent, &range), &values[range.clone()], (message, range.start));
        }
        match kind {
            Round::Sum(Number::F32) => communicator.exchange(list, tag, message.numbers_mut(0..values.len()))?,
            Round::Sum(Number::Bf16) => communicator.exchange_bf16(list, tag, message.halves_mut(0..values.len()))?,
        }
        for range in distinct(list, |action| action != Action::Send) {
            codec.decode(&span(round, buckets.received, &range), (message, range.start), &mut values[range]);
        }
    }
    Ok(())
}

/// The ranges of some transfers of a list, each once.
fn distinct(list: &[Transfer], takes: impl Fn(Action) -> bool) -> impl Iterator<Item = Range<usize>> {
    let range = |transfer: &Transfer| transfer.start..transfer.start + transfer.length;
    list.iter().enumerate().filter_map(move |(index, transfer)| {
        let new = !list[..index].iter().any(|other| takes(other.action) && range(other) == range(transfer));
        (takes(transfer.action) && new).then(|| range(transfer))
    })
}
