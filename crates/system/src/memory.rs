//! Memory that may not be there: large buffers are asked for, and a no is an error like any other.
//!
//! Where a `Result` cannot pass, in the middle of a kernel, the error unwinds as it is and [`caught`] makes a `Result` of it
//! again. Small buffers are not asked for: the standard library ends the process when one of those is refused.

use std::panic::{AssertUnwindSafe, catch_unwind, panic_any, resume_unwind};

use crate::limits::in_words;

/// The system refused memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no memory for {what}: the system refused {}; type a smaller --batch, --memory low or fewer --workers, \
     or raise the limit that paceline doctor shows",
    in_words(*.bytes as u64)
)]
pub struct OutOfMemory {
    /// What it was for.
    pub what: &'static str,
    /// How much was asked for.
    pub bytes: usize,
}

impl OutOfMemory {
    /// Unwinds with the error, to where [`caught`] waits for it.
    pub fn unwind(self) -> ! {
        panic_any(self)
    }
}

/// Room for so many elements in all, or an error.
///
/// # Errors
/// When the system refuses; the elements that are there stay.
pub fn reserve<T>(vector: &mut Vec<T>, length: usize, what: &'static str) -> Result<(), OutOfMemory> {
    let more = length.saturating_sub(vector.len());
    let refused = |_| OutOfMemory { what, bytes: length.saturating_mul(size_of::<T>()) };
    vector.try_reserve_exact(more).map_err(refused)
}

/// So many zeros, or an error.
///
/// # Errors
/// When the system refuses.
pub fn zeros<T: Clone + Default>(length: usize, what: &'static str) -> Result<Vec<T>, OutOfMemory> {
    let mut vector = Vec::new();
    reserve(&mut vector, length, what)?;
    vector.resize(length, T::default());
    Ok(vector)
}

/// Does something in which memory may be refused; any other panic goes on.
///
/// # Errors
/// When memory was refused: what was being done is then half done, and must not be used.
pub fn caught<T>(work: impl FnOnce() -> T) -> Result<T, OutOfMemory> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| match panic.downcast::<OutOfMemory>() {
        Ok(refused) => *refused,
        Err(other) => resume_unwind(other),
    })
}

/// Has refused memory unwind without a message of its own: whoever catches it has a sentence.
pub fn unwind_silently() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !panic.payload().is::<OutOfMemory>() {
            usual(panic);
        }
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_not_there_is_an_error() {
        let error = zeros::<f32>(usize::MAX / 8, "a test").unwrap_err();
        assert_eq!(error, OutOfMemory { what: "a test", bytes: usize::MAX / 8 * 4 });
        assert!(error.to_string().starts_with("no memory for a test: the system refused "), "{error}");
        assert_eq!(zeros::<u8>(3, "a test"), Ok(vec![0; 3]));
        let mut some = vec![1, 2];
        assert!(reserve(&mut some, 1, "a test").is_ok() && reserve(&mut some, usize::MAX, "a test").is_err());
        assert_eq!(some, [1, 2]);
    }

    #[test]
    fn an_error_that_unwinds_is_caught_and_nothing_else_is() {
        let refused = OutOfMemory { what: "a test", bytes: 5 };
        let unwound = refused.clone();
        assert_eq!(caught(|| -> u8 { unwound.unwind() }), Err(refused));
        assert_eq!(caught(|| 7), Ok(7));
        assert!(catch_unwind(|| caught(|| -> u8 { panic!("another") })).is_err());
    }
}
