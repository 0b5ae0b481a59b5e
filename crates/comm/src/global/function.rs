//! Calls of functions by other ranks: what is called, and how its arguments and its result travel.

use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::rc::Rc;

use super::active::Active;
use super::blocks::Blocks;
use super::handlers::Handlers;
use super::link::Request;
use super::message::{ARGUMENTS, Answer, PAYLOAD_BYTES_MAX};
use super::pending::Pending;
use super::together::Arrivals;
use crate::rank::Rank;

/// The functions that ranks may call on each other: written before a space begins, the same on all ranks.
#[derive(Debug)]
pub struct Functions {
    pub(super) handlers: Handlers,
    pub(super) blocks: Rc<Blocks>,
    pub(super) arrivals: Rc<RefCell<Arrivals>>,
}

impl Default for Functions {
    fn default() -> Self {
        Self::new()
    }
}

/// One of them, from its arguments to its result.
pub struct Function<A, R> {
    number: u16,
    types: PhantomData<fn(A) -> R>,
}

impl<A, R> Clone for Function<A, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A, R> Copy for Function<A, R> {}

impl<A, R> fmt::Debug for Function<A, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Function").field(&self.number).finish()
    }
}

impl Functions {
    /// None but those of global arrays.
    pub fn new() -> Self {
        let (mut handlers, blocks, arrivals) = (Handlers::new(), Rc::default(), Rc::default());
        Blocks::serve(&blocks, &mut handlers);
        Arrivals::serve(&arrivals, &mut handlers);
        Self { handlers, blocks, arrivals }
    }

    /// Adds a function under a name that is the same on all ranks. It is told who calls, and runs while its rank waits; it
    /// only computes. What it works on, it holds (`Rc<RefCell<…>>`).
    ///
    /// # Panics
    /// As [`Handlers::add`].
    pub fn add<A: Carried, R: Carried>(
        &mut self,
        name: &str,
        mut function: impl FnMut(Rank, A) -> R + 'static,
    ) -> Function<A, R> {
        let number = self.handlers.add(name, move |from, message| {
            let arguments = unpacked(message.payload).ok_or("its arguments cannot be read")?;
            Ok(Answer { arguments: [0; ARGUMENTS], payload: packed(&function(from, arguments)) })
        });
        Function { number, types: PhantomData }
    }

    /// The table below, for handlers of messages as they come, which [`Active::request`] asks for.
    pub fn handlers(&mut self) -> &mut Handlers {
        &mut self.handlers
    }
}

impl Active {
    /// Has a rank, or this one, run a function; its result.
    ///
    /// # Panics
    /// When there is no such rank, or the arguments take more than [`PAYLOAD_BYTES_MAX`] bytes: a bug.
    /// And as [`Pending::wait`].
    pub fn call<A: Carried, R: Carried>(&self, to: Rank, function: Function<A, R>, arguments: &A) -> Pending<R> {
        let payload = packed(arguments);
        assert!(payload.len() <= PAYLOAD_BYTES_MAX, "the arguments of a call take {} bytes", payload.len());
        let (pending, promise) = Pending::new(self, "call");
        promise.owe(to);
        let mut promise = Some(promise);
        let request = Request::new("call", (function.number, [0; ARGUMENTS], payload), move |outcome| {
            let result = match outcome.map(|message| unpacked(message.payload)) {
                Ok(None) => return Err("a result that cannot be read".into()),
                Ok(Some(result)) => Ok(result),
                Err(error) => Err(error),
            };
            if let Some(promise) = promise.take() {
                promise.complete(result);
            }
            Ok(())
        });
        self.ask(to, request);
        pending
    }
}

/// What travels as arguments and results: numbers, pairs, lists, text, perhaps nothing. Little endian where it is counted;
/// numbers as in memory, which all hosts of a run share.
pub trait Carried: Sized + 'static {
    /// Appends its bytes.
    fn pack(&self, bytes: &mut Vec<u8>);
    /// Takes it from the front, if it is there.
    fn unpack(bytes: &mut &[u8]) -> Option<Self>;
}

fn packed(value: &impl Carried) -> Vec<u8> {
    let mut bytes = Vec::new();
    value.pack(&mut bytes);
    bytes
}

fn unpacked<T: Carried>(mut bytes: &[u8]) -> Option<T> {
    T::unpack(&mut bytes).filter(|_| bytes.is_empty())
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl Carried for $number {
            fn pack(&self, bytes: &mut Vec<u8>) {
                bytes.extend(self.to_le_bytes());
            }

            fn unpack(bytes: &mut &[u8]) -> Option<Self> {
                let (first, rest) = bytes.split_first_chunk()?;
                *bytes = rest;
                Some(Self::from_le_bytes(*first))
            }
        }
    )*};
}

numbers!(u8, u16, u32, u64, i32, i64, f32, f64);

impl Carried for () {
    fn pack(&self, _: &mut Vec<u8>) {}

    fn unpack(_: &mut &[u8]) -> Option<Self> {
        Some(())
    }
}

impl<A: Carried, B: Carried> Carried for (A, B) {
    fn pack(&self, bytes: &mut Vec<u8>) {
        self.0.pack(bytes);
        self.1.pack(bytes);
    }

    fn unpack(bytes: &mut &[u8]) -> Option<Self> {
        Some((A::unpack(bytes)?, B::unpack(bytes)?))
    }
}

impl<T: Carried> Carried for Option<T> {
    fn pack(&self, bytes: &mut Vec<u8>) {
        bytes.push(u8::from(self.is_some()));
        self.iter().for_each(|value| value.pack(bytes));
    }

    fn unpack(bytes: &mut &[u8]) -> Option<Self> {
        match u8::unpack(bytes)? {
            0 => Some(None),
            1 => T::unpack(bytes).map(Some),
            _ => None,
        }
    }
}

impl<T: Carried> Carried for Vec<T> {
    fn pack(&self, bytes: &mut Vec<u8>) {
        (self.len() as u64).pack(bytes);
        self.iter().for_each(|value| value.pack(bytes));
    }

    fn unpack(bytes: &mut &[u8]) -> Option<Self> {
        let count = u64::unpack(bytes)?;
        // A count is believed no further than there are bytes.
        if count > bytes.len() as u64 {
            return None;
        }
        (0..count).map(|_| T::unpack(bytes)).collect()
    }
}

impl Carried for String {
    fn pack(&self, bytes: &mut Vec<u8>) {
        (self.len() as u64).pack(bytes);
        bytes.extend(self.as_bytes());
    }

    fn unpack(bytes: &mut &[u8]) -> Option<Self> {
        let length = usize::try_from(u64::unpack(bytes)?).ok()?;
        let (text, rest) = bytes.split_at_checked(length)?;
        *bytes = rest;
        Self::from_utf8(text.to_vec()).ok()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Everything = (Vec<(u64, String)>, (Option<f64>, ()));

    proptest! {
        #[test]
        fn what_is_packed_is_unpacked(list: Vec<(u64, String)>, number in prop::option::of(-1e9..1e9f64)) {
            let value: Everything = (list, (number, ()));
            let bytes = packed(&value);
            prop_assert_eq!(unpacked::<Everything>(&bytes), Some(value));
            prop_assert_eq!(unpacked::<Everything>(&bytes[..bytes.len() - 1]), None);
        }

        #[test]
        fn garbage_is_nothing_or_takes_no_more_than_it_says(bytes: Vec<u8>) {
            if let Some(list) = unpacked::<Vec<u32>>(&bytes) {
                prop_assert_eq!(bytes.len(), 8 + 4 * list.len());
            }
            let _ = unpacked::<Everything>(&bytes);
        }
    }

    #[test]
    fn a_list_of_nothings_is_no_longer_than_its_bytes() {
        assert_eq!(unpacked::<Vec<()>>(&u64::MAX.to_le_bytes()), None);
    }
}
