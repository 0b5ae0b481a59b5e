//! Everyone with everyone. An all-reduce has two steps: rank r adds chunk r of all buffers, then gives it to all.
//!
//! Cost of an all-reduce: 2 steps, 2(p−1) messages and 2(p−1)/p·S bytes sent per rank, 2α + 2(p−1)/p·Sβ where messages
//! to different peers do not wait for each other. On shared memory no message is sent at all: a rank adds straight from
//! its peers' mapped buffers (`transport/shm/direct.rs`). Broadcast costs the root (p−1)·S bytes.

use crate::rank::Rank;
use crate::transfer::{List, Transfer, chunk};

/// The other ranks, beginning after this one, so that not everyone writes to rank 0 first.
fn others(rank: Rank, world: usize) -> impl Iterator<Item = usize> {
    (1..world).map(move |ahead| (rank.index() + ahead) % world)
}

fn scatter(list: &mut List, rank: Rank, world: usize, length: usize) {
    for peer in others(rank, world) {
        list.send(peer, chunk(length, world, peer));
    }
    for peer in others(rank, world) {
        list.reduce(peer, chunk(length, world, rank.index()));
    }
    list.next_step();
}

fn gather(list: &mut List, rank: Rank, world: usize, length: usize) {
    for peer in others(rank, world) {
        list.send(peer, chunk(length, world, rank.index()));
    }
    for peer in others(rank, world) {
        list.receive(peer, chunk(length, world, peer));
    }
    list.next_step();
}

/// The sum of all buffers in each.
pub fn all_reduce(rank: Rank, world: usize, length: usize) -> Vec<Transfer> {
    let mut list = List::default();
    scatter(&mut list, rank, world, length);
    gather(&mut list, rank, world, length);
    list.finish()
}

/// The sum of chunk r with rank r.
pub fn reduce_scatter(rank: Rank, world: usize, length: usize) -> Vec<Transfer> {
    let mut list = List::default();
    scatter(&mut list, rank, world, length);
    list.finish()
}

/// Chunk r of rank r, for all.
pub fn all_gather(rank: Rank, world: usize, length: usize) -> Vec<Transfer> {
    let mut list = List::default();
    gather(&mut list, rank, world, length);
    list.finish()
}

/// The root's buffer, for all.
pub fn broadcast(rank: Rank, world: usize, length: usize, root: Rank) -> Vec<Transfer> {
    let mut list = List::default();
    if rank == root {
        others(rank, world).for_each(|peer| list.send(peer, 0..length));
    } else {
        list.receive(root.index(), 0..length);
    }
    list.finish()
}

/// No rank leaves before all have come: everyone signals everyone.
pub fn barrier(rank: Rank, world: usize) -> Vec<Transfer> {
    let mut list = List::default();
    others(rank, world).for_each(|peer| list.send(peer, 0..1));
    others(rank, world).for_each(|peer| list.receive(peer, 0..1));
    list.finish()
}

/// Chunk j of rank i against chunk i of rank j: one step, (p−1)/p·S bytes sent per rank.
///
/// # Panics
/// When the length is not a multiple of the world's size: the chunks that change places must be equal.
pub fn all_to_all(rank: Rank, world: usize, length: usize) -> Vec<Transfer> {
    assert!(length.is_multiple_of(world), "an all-to-all of {length} elements cannot be cut for {world} ranks");
    let mut list = List::default();
    others(rank, world).for_each(|peer| list.send(peer, chunk(length, world, peer)));
    others(rank, world).for_each(|peer| list.receive(peer, chunk(length, world, peer)));
    list.finish()
}
