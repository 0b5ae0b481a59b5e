//! Two binary trees over the same ranks, each for one half of the buffer (Sanders, Speck and Träff, 2009).
//!
//! In the first tree the parent of a rank is found from its lowest set bit, so every odd rank is a leaf; the second is
//! the first mirrored (even worlds) or shifted by one (odd worlds), so that a rank is inner in one tree only (in an odd
//! world rank 0 has one child in each, for want of a rank). Sums climb to the two roots, results come down again. The
//! interpreter forwards a range while it still arrives, so a step costs its latency and not its length.
//! Cost of an all-reduce: at most 2·⌈log p⌉ steps; a rank sends at most 2S bytes, once up and twice down in the tree it
//! is inner in, once up in the other: 2·⌈log p⌉α + ~2Sβ.

use crate::rank::Rank;
use crate::transfer::{Action, List, Transfer, chunk};

/// The parent of a place in the first tree: the lowest set bit goes, and the next one comes if that stays inside.
fn parent(place: usize, world: usize) -> Option<usize> {
    if place == 0 {
        return None;
    }
    let bit = place & place.wrapping_neg();
    let up = (place ^ bit) | (bit << 1);
    Some(if up < world { up } else { place ^ bit })
}

/// Those whose parent this place is: they lie a smaller power of two before or after it.
fn children(place: usize, world: usize) -> Vec<usize> {
    let reach = if place == 0 { world.next_power_of_two() } else { place & place.wrapping_neg() };
    let mut found = Vec::new();
    let mut bit = reach / 2;
    while bit > 0 {
        let sides = [place.checked_sub(bit), Some(place + bit)];
        let is_child = |&side: &usize| side < world && parent(side, world) == Some(place);
        found.extend(sides.into_iter().flatten().filter(is_child));
        bit /= 2;
    }
    found
}

/// One of the two trees: how its places are numbered.
#[derive(Clone, Copy)]
enum Tree {
    First,
    Mirrored,
    Shifted,
}

impl Tree {
    fn place(self, rank: usize, world: usize) -> usize {
        match self {
            Self::First => rank,
            Self::Mirrored => world - 1 - rank,
            Self::Shifted => (rank + world - 1) % world,
        }
    }

    fn rank(self, place: usize, world: usize) -> usize {
        match self {
            Self::First => place,
            Self::Mirrored => world - 1 - place,
            Self::Shifted => (place + 1) % world,
        }
    }
}

/// The sum of all buffers in each.
pub fn all_reduce(rank: Rank, world: usize, length: usize) -> Vec<Transfer> {
    let levels = world.next_power_of_two().ilog2();
    let second = if world.is_multiple_of(2) { Tree::Mirrored } else { Tree::Shifted };
    let mut moves: Vec<(u32, Action, usize, usize)> = Vec::new();
    for (half, tree) in [Tree::First, second].into_iter().enumerate() {
        let place = tree.place(rank.index(), world);
        // An edge is climbed at the step of its lower end's level, and descended as late as it was climbed early.
        let mut edge = |child: usize, up: Action, down: Action, peer: usize| {
            let level = child.trailing_zeros();
            moves.push((level, up, peer, half));
            moves.push((2 * levels - 1 - level, down, peer, half));
        };
        for child in children(place, world) {
            edge(child, Action::Reduce, Action::Send, tree.rank(child, world));
        }
        if let Some(parent) = parent(place, world) {
            edge(place, Action::Send, Action::Receive, tree.rank(parent, world));
        }
    }
    moves.sort_by_key(|&(step, _, _, half)| (step, half));
    let mut list = List::default();
    for (step, action, peer, half) in moves {
        list.at_step(step);
        list.push(action, peer, chunk(length, 2, half));
    }
    list.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_trees_reach_everyone_and_nobody_is_inner_in_both() {
        for world in 2..200 {
            let second = if world % 2 == 0 { Tree::Mirrored } else { Tree::Shifted };
            for place in 0..world {
                for child in children(place, world) {
                    assert_eq!(parent(child, world), Some(place));
                    assert!(child.trailing_zeros() < place.trailing_zeros());
                }
                assert!(children(place, world).len() <= 2);
            }
            assert_eq!((0..world).map(|place| children(place, world).len()).sum::<usize>(), world - 1);
            let inner = |tree: Tree, rank: usize| !children(tree.place(rank, world), world).is_empty();
            let odd_one = world % 2;
            assert!((odd_one..world).all(|rank| !(inner(Tree::First, rank) && inner(second, rank))), "world {world}");
            let count = |tree: Tree| children(tree.place(0, world), world).len();
            assert!(odd_one == 0 || (count(Tree::First) == 1 && count(second) <= 1));
        }
    }
}
