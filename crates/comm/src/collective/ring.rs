//! The ring: every rank talks to its two neighbours only.
//!
//! The buffer is cut into p chunks. In each of p−1 exchanges of the scatter-reduce a rank sends one chunk to the next
//! rank and adds the one that comes from the previous rank; chunk r starts at rank r+1 and, having met every rank, ends
//! at rank r. In each of p−1 exchanges of the all-gather it sends the chunk it got last.
//! Cost of an all-reduce: 2(p−1) steps, 2(p−1)/p·S bytes sent per rank, 2(p−1)α + 2(p−1)/p·Sβ: no algorithm moves less.
//! A broadcast is a chain from the root, cut into p chunks that follow each other: p−1 hops, 2p−3 steps after the
//! first chunk has left, about (2p−2)(α + S/p·β).

use std::ops::Range;

use crate::rank::Rank;
use crate::transfer::{List, Transfer, chunk};

/// The ranks around a ring, and which of them this one is.
pub(super) struct Circle<'a> {
    pub(super) me: usize,
    pub(super) ranks: &'a [usize],
}

impl Circle<'_> {
    fn next(&self) -> usize {
        self.ranks[(self.me + 1) % self.ranks.len()]
    }

    fn previous(&self) -> usize {
        self.ranks[(self.me + self.ranks.len() - 1) % self.ranks.len()]
    }

    /// The part of `range` that belongs to the member `back` places before this one.
    fn part(&self, range: &Range<usize>, back: usize) -> Range<usize> {
        let size = self.ranks.len();
        let part = chunk(range.len(), size, (self.me + 2 * size - back) % size);
        range.start + part.start..range.start + part.end
    }

    pub(super) fn reduce_scatter(&self, list: &mut List, range: &Range<usize>) {
        for step in 1..self.ranks.len() {
            list.send(self.next(), self.part(range, step));
            list.reduce(self.previous(), self.part(range, step + 1));
            list.next_step();
        }
    }

    pub(super) fn all_gather(&self, list: &mut List, range: &Range<usize>) {
        for step in 0..self.ranks.len() - 1 {
            list.send(self.next(), self.part(range, step));
            list.receive(self.previous(), self.part(range, step + 1));
            list.next_step();
        }
    }
}

fn around(rank: Rank, world: usize, write: impl FnOnce(&Circle<'_>, &mut List)) -> Vec<Transfer> {
    let ranks: Vec<usize> = (0..world).collect();
    let mut list = List::default();
    write(&Circle { me: rank.index(), ranks: &ranks }, &mut list);
    list.finish()
}

/// The sum of all buffers in each.
pub fn all_reduce(rank: Rank, world: usize, length: usize) -> Vec<Transfer> {
    around(rank, world, |circle, list| {
        circle.reduce_scatter(list, &(0..length));
        circle.all_gather(list, &(0..length));
    })
}

/// The sum of chunk r with rank r.
pub fn reduce_scatter(rank: Rank, world: usize, length: usize) -> Vec<Transfer> {
    around(rank, world, |circle, list| circle.reduce_scatter(list, &(0..length)))
}

/// Chunk r of rank r, for all.
pub fn all_gather(rank: Rank, world: usize, length: usize) -> Vec<Transfer> {
    around(rank, world, |circle, list| circle.all_gather(list, &(0..length)))
}

/// The root's buffer, for all: chunk c passes hop h at step c + h.
pub fn broadcast(rank: Rank, world: usize, length: usize, root: Rank) -> Vec<Transfer> {
    let place = (rank.index() + world - root.index()) % world;
    let mut list = List::default();
    let neighbour = |place: usize| (place + root.index()) % world;
    for step in 0..2 * world - 2 {
        list.at_step(step as u32);
        let chunk_at = |hop: usize| step.checked_sub(hop).filter(|&chunk| chunk < world);
        if place + 1 < world
            && let Some(index) = chunk_at(place)
        {
            list.send(neighbour(place + 1), chunk(length, world, index));
        }
        if place > 0
            && let Some(index) = chunk_at(place - 1)
        {
            list.receive(neighbour(place - 1), chunk(length, world, index));
        }
    }
    list.finish()
}
