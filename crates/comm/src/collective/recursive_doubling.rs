//! Recursive doubling: partners at distance 1, 2, 4, … exchange everything they have and add it.
//!
//! Cost of an all-reduce for a power of two: log p steps, log p·S bytes sent per rank, log p·(α + Sβ); other worlds
//! fold (`fold.rs`). Both partners add the same two numbers, so all ranks hold the same bits. For small messages.
//! The same distances give a broadcast by a binomial tree, ⌈log p⌉(α + Sβ), and a barrier in ⌈log p⌉ steps, where each
//! rank signals the one 2^k after it and hears from the one 2^k before it (dissemination), for any world.

use super::fold::Fold;
use crate::rank::Rank;
use crate::transfer::{List, Transfer};

/// The sum of all buffers in each.
pub fn all_reduce(rank: Rank, world: usize, length: usize) -> Vec<Transfer> {
    let fold = Fold::new(rank.index(), world);
    let mut list = List::default();
    fold.before(&mut list, length);
    if let Some(place) = fold.place() {
        for distance in (0..fold.size.ilog2()).map(|bit| 1 << bit) {
            let partner = fold.rank_of(place ^ distance);
            list.send(partner, 0..length);
            list.reduce(partner, 0..length);
            list.next_step();
        }
    }
    fold.after(&mut list, length, fold.steps() + fold.size.ilog2());
    list.finish()
}

/// The root's buffer, for all: in step k everyone who has it passes it on to the rank 2^k after.
pub fn broadcast(rank: Rank, world: usize, length: usize, root: Rank) -> Vec<Transfer> {
    let place = (rank.index() + world - root.index()) % world;
    let rank_of = |place: usize| (place + root.index()) % world;
    let mut list = List::default();
    let mut distance = 1;
    while distance < world {
        if place < distance && place + distance < world {
            list.send(rank_of(place + distance), 0..length);
        } else if (distance..2 * distance).contains(&place) {
            list.receive(rank_of(place - distance), 0..length);
        }
        list.next_step();
        distance *= 2;
    }
    list.finish()
}

/// No rank leaves before all have come.
pub fn barrier(rank: Rank, world: usize) -> Vec<Transfer> {
    let mut list = List::default();
    let mut distance = 1;
    while distance < world {
        list.send((rank.index() + distance) % world, 0..1);
        list.receive((rank.index() + world - distance) % world, 0..1);
        list.next_step();
        distance *= 2;
    }
    list.finish()
}
