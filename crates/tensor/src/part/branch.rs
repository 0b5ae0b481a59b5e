//! Branches: what lies between a value that several layers read and the place where their results meet again.
//!
//! From a concatenation backwards, whatever was made last is replaced by what it was made from, until one value is left: everything then
//! went through it. Nodes on the way that read each other's results are one branch, with what is inside it. Each branch is one part's, so
//! that the part with the most arithmetic has as little as possible.

use std::collections::BTreeSet;

use super::form::{Form, maker};
use super::rule::{Facts, Way};
use crate::graph::Value;
use crate::op::Op;

/// So many ways to give branches to parts are tried; beyond, the largest branch goes to the part that has least.
const TRIALS_MAX: usize = 1 << 14;

/// A value, the branches that begin with it, and the concatenation where they meet.
struct Module {
    join: usize,
    /// The branch of each node; none outside.
    branch_of: Vec<Option<usize>>,
    /// The multiply-adds of each branch.
    work: Vec<u64>,
}

/// The ways of the nodes that are computed in branches.
pub(super) fn ways(facts: &Facts<'_>, forms: &[Option<Form>]) -> Vec<Option<Way>> {
    let nodes = facts.graph.nodes();
    let mut ways: Vec<Option<Way>> = vec![None; nodes.len()];
    for join in (0..nodes.len()).rev() {
        let is_join = matches!(nodes[join].op, Op::Concat { .. }) && forms[join] == Some(Form::Branch);
        if !is_join || ways[join].is_some() {
            continue;
        }
        let Some(module) = module(facts, join) else { continue };
        let inside = |index: &usize| module.branch_of[*index].is_some();
        let is_meant = (0..nodes.len()).filter(inside).all(|index| forms[index] == Some(Form::Branch));
        if !is_meant || module.work.len() < facts.parts {
            continue;
        }
        let owners = owners(&module.work, facts.parts);
        for index in (0..nodes.len()).filter(inside) {
            ways[index] = module.branch_of[index].map(|branch| Way::Branch { part: owners[branch] });
        }
        // What reaches the end by itself is any part's.
        let branch = |&input: &Value| maker(facts.graph, input).and_then(|node| module.branch_of[node]);
        let parts = nodes[join].inputs.iter().map(|input| branch(input).map_or(0, |branch| owners[branch])).collect();
        ways[module.join] = Some(Way::Join { parts });
    }
    ways
}

/// The branches that meet in a concatenation, if they begin with one value and nothing else reads what is inside.
fn module(facts: &Facts<'_>, join: usize) -> Option<Module> {
    let (graph, nodes) = (facts.graph, facts.graph.nodes());
    let mut open: BTreeSet<(Option<usize>, Value)> =
        facts.activations(&nodes[join]).map(|v| (maker(graph, v), v)).collect();
    let mut inside = vec![false; nodes.len()];
    while open.len() > 1 {
        let last = open.pop_last().expect("there are two");
        let index = last.0?;
        inside[index] = true;
        open.retain(|&(maker, _)| maker != Some(index));
        open.extend(facts.activations(&nodes[index]).map(|value| (maker(graph, value), value)));
    }
    let is_read_outside = |index: usize| {
        let reads = |value: &Value| nodes[index].inputs.contains(value);
        !inside[index]
            && index != join
            && nodes.iter().zip(&inside).any(|(node, inside)| *inside && node.outputs.iter().any(reads))
    };
    if (0..nodes.len()).any(is_read_outside) {
        return None;
    }
    // Each node begins a branch, and joins those whose results or parameters it reads too.
    let mut branch_of: Vec<Option<usize>> =
        inside.iter().enumerate().map(|(index, inside)| inside.then_some(index)).collect();
    for index in (0..nodes.len()).filter(|&index| inside[index]) {
        for other in 0..index {
            let shares = |value: &Value| {
                let read = !facts.is_activation(*value) && nodes[other].inputs.contains(value);
                read || nodes[other].outputs.contains(value)
            };
            if let (Some(here), Some(there)) = (branch_of[index], branch_of[other])
                && here != there
                && nodes[index].inputs.iter().any(shares)
            {
                branch_of.iter_mut().filter(|branch| **branch == Some(here)).for_each(|branch| *branch = Some(there));
            }
        }
    }
    let numbers: BTreeSet<usize> = branch_of.iter().copied().flatten().collect();
    let numbers: Vec<usize> = numbers.into_iter().collect();
    let mut work = vec![0; numbers.len()];
    for (index, branch) in branch_of.iter_mut().enumerate() {
        *branch = branch.and_then(|root| numbers.binary_search(&root).ok());
        if let Some(branch) = *branch
            && nodes[index].op.is_product()
        {
            work[branch] += graph.flops(&nodes[index]) / 2;
        }
    }
    Some(Module { join, branch_of, work })
}

/// Whose each branch is; every part has one.
fn owners(work: &[u64], parts: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..work.len()).collect();
    order.sort_by_key(|&branch| (std::cmp::Reverse(work[branch]), branch));
    let mut loads = vec![(0, 0); parts];
    let mut greedy = vec![0; work.len()];
    for branch in order {
        let part = (0..parts).min_by_key(|&part| (loads[part], part)).unwrap_or(0);
        greedy[branch] = part;
        loads[part] = (loads[part].0 + work[branch], loads[part].1 + 1);
    }
    let trials = parts.checked_pow(work.len() as u32).filter(|&trials| trials <= TRIALS_MAX).unwrap_or(0);
    let trial = |number: usize| (0..work.len()).map(move |branch| number / parts.pow(branch as u32) % parts);
    let most = |owners: &[usize]| {
        let mut loads = vec![None; parts];
        owners.iter().zip(work).for_each(|(&part, work)| *loads[part].get_or_insert(0) += work);
        loads.into_iter().collect::<Option<Vec<u64>>>().and_then(|loads| loads.into_iter().max())
    };
    let tried = (0..trials).map(|number| trial(number).collect::<Vec<_>>()).chain([greedy.clone()]);
    tried
        .filter_map(|owners| Some((most(&owners)?, owners)))
        .min_by_key(|(most, _)| *most)
        .map_or(greedy, |(_, owners)| owners)
}
