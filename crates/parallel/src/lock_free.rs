//! One buffer of numbers that many threads read and write at once, without locks and without
//! compare-and-swap.
//!
//! Every element is an atomic word that is loaded and stored relaxed. A change is added by a load and a
//! store; what another thread stores between the two is lost, which is the method (Hogwild!) and not a fault:
//! where changes are sparse it is rare, and steps are noisy anyway. No value is torn: what is loaded is what
//! somebody has stored. Nothing more is promised, least of all an order between elements, so whoever needs
//! everybody's changes has all meet first.
//!
//! Called by [`crate::agree::hogwild`], and by programs of one's own (`examples/hogwild.rs`).

mod herds;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

#[cfg(not(test))]
use std::sync::atomic::AtomicU32 as Word;
#[cfg(test)]
use tests::Word;

pub use herds::{Leader, Place, ThreadMemory};

/// Numbers that many threads change.
#[derive(Debug)]
pub struct LockFreeBuffer {
    words: Box<[Word]>,
    /// Steps whose changes are all there.
    updates: AtomicU64,
}

impl LockFreeBuffer {
    /// One that begins with these numbers.
    pub fn new(values: &[f32]) -> Self {
        let words = values.iter().map(|value| Word::new(value.to_bits())).collect();
        Self { words, updates: AtomicU64::new(0) }
    }

    /// How many numbers there are.
    pub fn len(&self) -> usize {
        self.words.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// What an element is now.
    ///
    /// # Panics
    /// When there is no such element. So for the calls below.
    #[inline]
    pub fn load(&self, index: usize) -> f32 {
        f32::from_bits(self.words[index].load(Relaxed))
    }

    /// Makes an element this number.
    #[inline]
    pub fn store(&self, index: usize, value: f32) {
        self.words[index].store(value.to_bits(), Relaxed);
    }

    /// Adds to an element, or loses what others add to it meanwhile.
    #[inline]
    pub fn add(&self, index: usize, change: f32) {
        self.store(index, self.load(index) + change);
    }

    /// What all elements are, each at a moment of its own.
    ///
    /// # Panics
    /// When the lengths differ. So for the calls below.
    pub fn load_all(&self, values: &mut [f32]) {
        assert_eq!(self.len(), values.len(), "a buffer has one length");
        values.iter_mut().zip(&self.words).for_each(|(value, word)| *value = f32::from_bits(word.load(Relaxed)));
    }

    /// Makes all elements these numbers.
    pub fn store_all(&self, values: &[f32]) {
        assert_eq!(self.len(), values.len(), "a buffer has one length");
        values.iter().zip(&self.words).for_each(|(value, word)| word.store(value.to_bits(), Relaxed));
    }

    /// Adds what has become of `seen`, which was loaded before, in `own`; both are what is there afterwards.
    /// An element that did not change is not written, so that no other thread's change to it is lost.
    pub fn exchange(&self, seen: &mut [f32], own: &mut [f32]) {
        assert!(self.len() == seen.len() && self.len() == own.len(), "a buffer has one length");
        for ((word, seen), own) in self.words.iter().zip(seen).zip(own) {
            let mut now = f32::from_bits(word.load(Relaxed));
            if *own != *seen {
                now = added(now, *seen, *own);
                word.store(now.to_bits(), Relaxed);
            }
            (*seen, *own) = (now, now);
        }
    }

    /// Steps that were counted.
    pub fn updates(&self) -> u64 {
        self.updates.load(Relaxed)
    }

    /// Counts a step whose changes are there, and says how many were counted before.
    pub fn count_update(&self) -> u64 {
        self.updates.fetch_add(1, Relaxed)
    }
}

/// A number with the change from `seen` to `own`. Where nobody else has changed it this is `own` to the last
/// bit, which a rounded difference added again would not be: one thread by itself makes the steps that it
/// would make without a buffer.
fn added(now: f32, seen: f32, own: f32) -> f32 {
    if now == seen { own } else { now + (own - seen) }
}

#[cfg(test)]
pub(crate) mod tests;
