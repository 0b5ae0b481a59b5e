//! Two levels: inside nodes, where links are fast, and between them, where every byte counts.
//!
//! With m the number of ranks of the smallest node, the buffer is cut into m shards, and in each node m ranks own one
//! each. Step 0, in each node: everyone sends each shard to its owner, who adds. Then the owners of one shard, one in
//! each of n nodes, all-reduce it around a ring. Last, in each node: owners give their shards to everyone.
//! Cost with equal nodes: 2 + 2(n−1) steps; per rank 2(m−1)/m·S bytes inside its node and 2(n−1)/n·S/m between nodes.

use super::Nodes;
use super::ring::Circle;
use crate::rank::Rank;
use crate::transfer::{List, Transfer, chunk};

/// The sum of all buffers in each.
pub fn all_reduce(rank: Rank, nodes: &Nodes, length: usize) -> Vec<Transfer> {
    let rank = rank.index();
    let groups = nodes.groups();
    let shards = groups.iter().map(Vec::len).min().unwrap_or(1);
    let group = groups.iter().find(|group| group.contains(&rank)).expect("every rank is on a node");
    let me = group.iter().position(|&member| member == rank).expect("the rank is in its own group");
    let owner = me < shards;
    let mut list = List::default();
    for (shard, &peer) in group.iter().enumerate().take(shards).filter(|&(shard, _)| shard != me) {
        list.send(peer, chunk(length, shards, shard));
    }
    if owner {
        for &peer in group.iter().filter(|&&peer| peer != rank) {
            list.reduce(peer, chunk(length, shards, me));
        }
    }
    list.next_step();
    if owner {
        let ranks: Vec<usize> = groups.iter().map(|group| group[me]).collect();
        let position = ranks.iter().position(|&member| member == rank).expect("an owner is among the owners");
        let circle = Circle { me: position, ranks: &ranks };
        let shard = chunk(length, shards, me);
        circle.reduce_scatter(&mut list, &shard);
        circle.all_gather(&mut list, &shard);
    }
    list.at_step(1 + 2 * (groups.len() as u32 - 1));
    if owner {
        for &peer in group.iter().filter(|&&peer| peer != rank) {
            list.send(peer, chunk(length, shards, me));
        }
    }
    for (shard, &peer) in group.iter().enumerate().take(shards).filter(|&(shard, _)| shard != me) {
        list.receive(peer, chunk(length, shards, shard));
    }
    list.finish()
}
