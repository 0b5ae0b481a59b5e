//! Buckets: which gradients travel and are applied together, and when.

use std::ops::Range;

use super::{Layout, Place};
use crate::dtype::DType;
use crate::graph::{Graph, Source, Value};
use crate::split::Part;

/// Consecutive gradients that travel in one message and are applied together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// The parameters, by number. Where a large tensor comes in parts, several buckets have it.
    pub parameters: Range<usize>,
    /// What they are of the flat layout of parameters, with the gaps between tensors.
    pub elements: Range<usize>,
    /// The size of the gradients, without gaps.
    pub bytes: usize,
    /// The node after which all of them are final.
    pub ready_after: usize,
    /// The node after which, besides, no node reads the parameters: they may be changed.
    pub apply_after: usize,
    /// The node that reads one of the parameters first: they have to be up to date before it.
    pub needed_before: usize,
    /// Where the gradients stand, one after the other as in `elements`: in the arena, or in the gradients from a
    /// parameter's on.
    pub place: Place,
    /// Which of the plan's parts of gradients they are.
    pub(super) parts: Range<usize>,
}

/// Groups gradients from the last to the first, because the last layer's gradient is usually final first; what a model
/// declares and uses in different orders is put right by the sort.
pub(super) fn buckets(graph: &Graph, layout: &Layout, parts: &[Part], bytes_max: usize) -> Vec<Bucket> {
    let readers = readers(graph);
    let mut buckets: Vec<Bucket> = Vec::new();
    for (index, &Part { parameter, ref elements, value }) in parts.iter().enumerate().rev() {
        let bytes = elements.len() * DType::F32.bytes();
        let first = layout.range(parameter).start;
        let ready_after = value.map_or(0, |value| match graph.info(value).source {
            Source::Node { node, .. } => node,
            _ => 0,
        });
        let apply_after = ready_after.max(readers[parameter].end.saturating_sub(1));
        let needed_before = readers[parameter].start;
        match buckets.last_mut() {
            Some(bucket) if bucket.bytes + bytes <= bytes_max => {
                bucket.parameters.start = parameter;
                bucket.elements.start = first + elements.start;
                bucket.bytes += bytes;
                bucket.ready_after = bucket.ready_after.max(ready_after);
                bucket.apply_after = bucket.apply_after.max(apply_after);
                bucket.needed_before = bucket.needed_before.min(needed_before);
                bucket.place = Place::Gradient(parameter);
                bucket.parts.start = index;
            }
            _ => buckets.push(Bucket {
                parameters: parameter..parameter + 1,
                elements: first + elements.start..first + elements.end,
                bytes,
                ready_after,
                apply_after,
                needed_before,
                place: Place::Gradient(parameter),
                parts: index..index + 1,
            }),
        }
    }
    buckets.sort_by_key(|bucket| bucket.ready_after);
    buckets
}

/// The gradients of buckets that have no part of a tensor: bucket, parameter and gradient.
pub(super) fn whole(buckets: &[Bucket], parts: &[Part], layout: &Layout) -> Vec<(usize, usize, Value)> {
    let is_whole = |part: &Part| part.elements.len() == layout.range(part.parameter).len();
    let found = buckets.iter().enumerate().filter(|(_, bucket)| parts[bucket.parts.clone()].iter().all(is_whole));
    let of = |(index, bucket): (usize, &Bucket)| {
        parts[bucket.parts.clone()]
            .iter()
            .filter_map(|part| Some((index, part.parameter, part.value?)))
            .collect::<Vec<_>>()
    };
    found.flat_map(of).collect()
}

/// From the node that reads each parameter first to behind the one that reads it last; if none does, from behind all nodes to 0.
fn readers(graph: &Graph) -> Vec<Range<usize>> {
    let mut readers = vec![graph.nodes().len()..0; graph.parameters().len()];
    let mut origin = vec![None; graph.values.len()];
    graph.parameters().iter().enumerate().for_each(|(index, value)| origin[value.index()] = Some(index));
    for (index, node) in graph.nodes().iter().enumerate() {
        for parameter in node.inputs.iter().filter_map(|input| origin[input.index()]) {
            let Range { start, end } = &mut readers[parameter];
            (*start, *end) = (index.min(*start), index + 1);
        }
        if node.op.is_view() {
            origin[node.outputs[0].index()] = origin[node.inputs[0].index()];
        }
    }
    readers
}

/// Something to be done with a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Due {
    /// After this node.
    pub node: usize,
    /// Whether it is to be applied, not only sent.
    pub apply: bool,
    /// Its number.
    pub bucket: usize,
}

/// What is to be done with the buckets, in order.
pub(super) fn dues(buckets: &[Bucket]) -> Vec<Due> {
    let due = |(bucket, at): (usize, &Bucket)| {
        [Due { node: at.ready_after, apply: false, bucket }, Due { node: at.apply_after, apply: true, bucket }]
    };
    let mut dues: Vec<Due> = buckets.iter().enumerate().flat_map(due).collect();
    dues.sort();
    dues
}

/// Which bucket is needed before which node, in order.
pub(super) fn needs(buckets: &[Bucket]) -> Vec<(usize, usize)> {
    let mut needs: Vec<_> = buckets.iter().enumerate().map(|(index, bucket)| (bucket.needed_before, index)).collect();
    needs.sort();
    needs
}

/// How many buckets later a bucket that could not be applied in time is offered again.
const OFFERS: usize = 2;

/// After which node which bucket is offered again, in order: when one of the next may be applied. Those who share a cache have its
/// gradients there still.
pub(super) fn offers(buckets: &[Bucket]) -> Vec<(usize, usize)> {
    let later = |(index, bucket): (usize, &Bucket)| {
        let next = buckets[index + 1..].iter().take(OFFERS);
        next.map(|next| (next.apply_after.max(bucket.apply_after), index)).collect::<Vec<_>>()
    };
    let mut offers: Vec<_> = buckets.iter().enumerate().flat_map(later).collect();
    offers.sort();
    offers
}
