//! Halving and doubling (Rabenseifner): partners at distance p/2, p/4, …, 1 exchange halves of what they still hold and
//! add, until rank r holds the sum of chunk r; then the same partners in reverse exchange what they have.
//!
//! Cost of an all-reduce for a power of two: 2·log p steps, 2(p−1)/p·S bytes sent per rank, 2·log p·α + 2(p−1)/p·Sβ.
//! For other worlds the extra ranks fold (`fold.rs`): two more steps and 2Sβ more. Reduce-scatter and all-gather are
//! the halves of it and need a power of two.

use std::ops::Range;

use super::fold::Fold;
use crate::rank::Rank;
use crate::transfer::{List, Transfer, chunk};

/// Elements of the chunks `first..last` of a buffer cut into `size`.
fn span(length: usize, size: usize, chunks: &Range<usize>) -> Range<usize> {
    if chunks.is_empty() {
        return 0..0;
    }
    chunk(length, size, chunks.start).start..chunk(length, size, chunks.end - 1).end
}

/// The chunks that a place and its partner hold at this distance.
fn sides(place: usize, distance: usize) -> (Range<usize>, Range<usize>) {
    let start = place / (2 * distance) * (2 * distance);
    let (low, high) = (start..start + distance, start + distance..start + 2 * distance);
    if place & distance == 0 { (low, high) } else { (high, low) }
}

fn halve(list: &mut List, fold: &Fold, place: usize, length: usize) {
    let mut distance = fold.size / 2;
    while distance > 0 {
        let (mine, theirs) = sides(place, distance);
        let partner = fold.rank_of(place ^ distance);
        list.send(partner, span(length, fold.size, &theirs));
        list.reduce(partner, span(length, fold.size, &mine));
        list.next_step();
        distance /= 2;
    }
}

fn double(list: &mut List, fold: &Fold, place: usize, length: usize) {
    let mut distance = 1;
    while distance < fold.size {
        let (mine, theirs) = sides(place, distance);
        let partner = fold.rank_of(place ^ distance);
        list.send(partner, span(length, fold.size, &mine));
        list.receive(partner, span(length, fold.size, &theirs));
        list.next_step();
        distance *= 2;
    }
}

/// The sum of all buffers in each.
pub fn all_reduce(rank: Rank, world: usize, length: usize) -> Vec<Transfer> {
    let fold = Fold::new(rank.index(), world);
    let mut list = List::default();
    fold.before(&mut list, length);
    if let Some(place) = fold.place() {
        halve(&mut list, &fold, place, length);
        double(&mut list, &fold, place, length);
    }
    fold.after(&mut list, length, fold.steps() + 2 * fold.size.ilog2());
    list.finish()
}

/// The sum of chunk r with rank r, for a power of two.
pub fn reduce_scatter(rank: Rank, world: usize, length: usize) -> Vec<Transfer> {
    let mut list = List::default();
    halve(&mut list, &Fold::new(rank.index(), world), rank.index(), length);
    list.finish()
}

/// Chunk r of rank r, for all, for a power of two.
pub fn all_gather(rank: Rank, world: usize, length: usize) -> Vec<Transfer> {
    let mut list = List::default();
    double(&mut list, &Fold::new(rank.index(), world), rank.index(), length);
    list.finish()
}
