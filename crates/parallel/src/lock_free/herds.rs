//! What the ranks of a run share where they are threads of one process: a buffer of weights, or a copy of it
//! for each herd of them, between which changes go round a ring (HogWild++).
//!
//! A herd is near its copy: its workers write there alone. One of them, which leads it, holds a token for
//! some steps, then exchanges with the copy of the next herd and passes the token on: so only one exchanges
//! at a time, with one other, and nobody waits for it. With n herds and δ what a copy w has become since its
//! leader looked last (w_old):
//!
//! | | w becomes | the next copy, v | w_old becomes |
//! |---|---|---|---|
//! | \|δ\| > 0.01 | λv + (1−λ)w + (β+λ−1)δ | v + βδ | the new w |
//! | otherwise | λv + (1−λ)w + λδ | stays, so that its memory need not travel | the new w − δ: it is told later |
//!
//! βⁿ + β = 1 and λ = 1 − βⁿ⁻¹. A change of one herd comes to be the same in all copies: the whole change
//! where there are two, and 0.87, 0.78 and 0.71 of it where there are three, four and five and the others
//! change nothing (a test).

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use super::LockFreeBuffer;

/// Changes that are not more than this are not told the next herd yet: the paper's.
const TOLERANCE: f32 = 1e-2;

/// Copies of the weights that threads share. A clone is the same memory.
#[derive(Clone, Debug)]
pub struct ThreadMemory(Arc<Herds>);

#[derive(Debug)]
struct Herds {
    /// The herd of each rank; all are in the first where none is named.
    of: Vec<usize>,
    /// Each made by the first of its herd that comes, near which its memory is then.
    copies: Vec<OnceLock<LockFreeBuffer>>,
    /// The herd whose leader may exchange.
    token: AtomicUsize,
}

impl Default for ThreadMemory {
    /// All ranks are one herd.
    fn default() -> Self {
        Self::of_herds(Vec::new())
    }
}

impl ThreadMemory {
    /// For ranks of which each is in the herd that is named for it; herds have numbers from 0.
    pub fn of_herds(of: Vec<usize>) -> Self {
        let count = of.iter().max().map_or(1, |last| last + 1);
        let copies = (0..count).map(|_| OnceLock::new()).collect();
        Self(Arc::new(Herds { of, copies, token: AtomicUsize::new(0) }))
    }

    /// So many ranks in so many herds of neighbours, as equal as can be.
    pub fn of_neighbours(ranks: usize, herds: usize) -> Self {
        Self::of_herds((0..ranks).map(|rank| rank * herds / ranks).collect())
    }

    /// For ranks of which each stays on this NUMA node: those of a node are a herd.
    pub fn of_nodes(nodes: &[usize]) -> Self {
        let known: BTreeSet<usize> = nodes.iter().copied().collect();
        Self::of_herds(nodes.iter().map(|node| known.range(..node).count()).collect())
    }

    /// How many there are.
    pub fn herds(&self) -> usize {
        self.0.copies.len()
    }

    /// A rank's place.
    pub fn place(&self, rank: usize) -> Place {
        let of = &self.0.of;
        let herd = of.get(rank).copied().unwrap_or(0);
        let leads = of.iter().position(|&other| other == herd).unwrap_or(0) == rank;
        Place { herd, leads }
    }

    /// Sees to it that a herd has a copy, which begins with these weights: those of all.
    pub fn open(&self, herd: usize, weights: &[f32]) {
        self.0.copies[herd].get_or_init(|| LockFreeBuffer::new(weights));
    }

    /// The copy of a herd.
    ///
    /// # Panics
    /// When nobody has opened it.
    pub fn copy(&self, herd: usize) -> &LockFreeBuffer {
        self.0.copies[herd].get().expect("a herd has opened its copy")
    }

    /// The mean of all copies, once all are open.
    pub fn mean(&self, weights: &mut [f32]) {
        let herds = self.herds();
        self.copy(0).load_all(weights);
        if herds == 1 {
            return;
        }
        for (index, weight) in weights.iter_mut().enumerate() {
            let others = (1..herds).map(|herd| f64::from(self.copy(herd).load(index))).sum::<f64>();
            *weight = ((f64::from(*weight) + others) / herds as f64) as f32;
        }
    }
}

/// A rank's place among herds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Its herd.
    pub herd: usize,
    /// Whether it exchanges with the next one.
    pub leads: bool,
}

/// What the leader of a herd knows.
#[derive(Debug)]
pub struct Leader {
    herd: usize,
    /// Steps with the token before it exchanges.
    delay: u64,
    /// Steps with it by now.
    held: u64,
    /// What its copy was when it last exchanged, less what it has not told.
    old: Vec<f32>,
    beta: f32,
    lambda: f32,
}

impl Leader {
    /// Of one herd among several, which all begin with these weights.
    pub fn new(memory: &ThreadMemory, herd: usize, delay: u64, weights: &[f32]) -> Self {
        let (beta, lambda) = shares(memory.herds());
        Self { herd, delay, held: 0, old: weights.to_vec(), beta: beta as f32, lambda: lambda as f32 }
    }

    /// Its copy was made anew.
    pub fn begin_again(&mut self, weights: &[f32]) {
        self.old.copy_from_slice(weights);
    }

    /// It has made a step: exchanges, and passes the token on, if it has held it long enough.
    pub fn stepped(&mut self, memory: &ThreadMemory) {
        let Herds { copies, token, .. } = &*memory.0;
        // Who is given the token sees what was exchanged before.
        if token.load(Ordering::Acquire) != self.herd {
            return;
        }
        self.held += 1;
        let next = (self.herd + 1) % copies.len();
        // A herd that has not begun has missed nothing.
        let Some(next_copy) = copies[next].get().filter(|_| self.held >= self.delay) else { return };
        self.exchange(memory.copy(self.herd), next_copy);
        self.held = 0;
        token.store(next, Ordering::Release);
    }

    fn exchange(&mut self, own: &LockFreeBuffer, next: &LockFreeBuffer) {
        let Self { beta, lambda, .. } = *self;
        for (index, old) in self.old.iter_mut().enumerate() {
            let (w, v) = (own.load(index), next.load(index));
            let change = w - *old;
            let nearer = w + lambda * (v - w);
            if change.abs() > TOLERANCE {
                next.store(index, v + beta * change);
                *old = nearer + (beta + lambda - 1.0) * change;
                own.store(index, *old);
            } else {
                let new = nearer + lambda * change;
                *old = new - change;
                own.store(index, new);
            }
        }
    }
}

/// β and λ for so many herds.
fn shares(herds: usize) -> (f64, f64) {
    let n = herds as i32;
    // βⁿ + β grows from 0 to 2.
    let (mut low, mut high) = (0.0f64, 1.0f64);
    for _ in 0..64 {
        let middle = low.midpoint(high);
        if middle.powi(n) + middle < 1.0 { low = middle } else { high = middle }
    }
    (low, 1.0 - low.powi(n - 1))
}

#[cfg(test)]
mod tests;
