//! Who shares bytes with whom, and where: liveness, in-place results, offsets.

use std::ops::{Range, RangeInclusive};

use super::bucket::Bucket;
use super::{ALIGNMENT_BYTES, Layout, Place, SHARED_ALIGNMENT_BYTES, Updates, Wanted};
use crate::dtype::DType;
use crate::graph::{Graph, Source, Value};
use crate::split::Part;

pub(super) struct Memory {
    pub places: Vec<Place>,
    pub arena_bytes: usize,
    /// Whether gradients stand at the beginning of the arena.
    pub has_gradients: bool,
    pub spans: Vec<Span>,
    storages: Vec<Storage>,
    storage_of: Vec<Option<usize>>,
}

/// Bytes of the arena that are in use between two nodes, both included.
#[derive(Clone, Debug)]
pub(super) struct Span {
    bytes: Range<usize>,
    nodes: RangeInclusive<usize>,
}

/// The longest run of bytes below `end` that no value occupies at any of some nodes, and that is not taken otherwise.
pub(super) fn longest_gap(spans: &[Span], nodes: &[usize], taken: &[Range<usize>], end: usize) -> Range<usize> {
    let is_used = |span: &&Span| nodes.iter().any(|node| span.nodes.contains(node));
    let mut used: Vec<&Range<usize>> = spans.iter().filter(is_used).map(|span| &span.bytes).chain(taken).collect();
    used.sort_by_key(|bytes| bytes.start);
    let (mut gap, mut from) = (0..0, 0);
    for next in used.into_iter().chain([&(end..end)]) {
        if next.start.saturating_sub(from) > gap.len() {
            gap = from..next.start;
        }
        from = from.max(next.end);
    }
    gap
}

/// Values that share bytes, from the first one's birth to the last one's death, in node numbers.
#[derive(Clone, Debug)]
struct Storage {
    birth: usize,
    death: usize,
    bytes: usize,
    /// Set for what does not live in the arena.
    fixed: Option<Place>,
    /// Nothing overwrites it while it lives. Inputs are filled by the host and may be read by several runs, so they live
    /// to the end; buckets of gradients live until they are applied.
    is_kept: bool,
}

/// Gives every value its place, and the buckets theirs.
pub(super) fn assign(
    graph: &Graph,
    (wanted, beside): (&Wanted, &[Option<usize>]),
    (parts, layout, buckets): (&[Part], &Layout, &mut [Bucket]),
) -> Memory {
    let mut work = Assignment::new(graph);
    let early = matches!(wanted.updates, Updates::Early { .. });
    if early {
        buckets.iter().for_each(|bucket| work.bucket(graph, bucket, &parts[bucket.parts.clone()], layout));
    } else {
        parts.iter().for_each(|part| work.gradient(part));
    }
    let death = deaths(graph, wanted, beside);
    graph.values().for_each(|value| work.given(graph, value, death[value.index()]));
    (0..graph.nodes().len()).for_each(|index| work.node(graph, index, &death));
    let Assignment { storages, storage_of, start_of } = work;
    let end = |spans: &[Span]| spans.iter().map(|span| span.bytes.end).max().unwrap_or(0);
    let (mut offsets, mut spans) = place_all(&storages, Vec::new(), ALIGNMENT_BYTES);
    let mut has_gradients = false;
    if wanted.updates == Updates::FromArena {
        let gradients = parts.iter().map(|part| gradient_span(graph, part, layout)).collect();
        let shared = place_all(&storages, gradients, SHARED_ALIGNMENT_BYTES);
        has_gradients = end(&shared.1) < end(&spans) + layout.length() * DType::F32.bytes();
        if has_gradients {
            (offsets, spans) = shared;
        }
    }
    let place = |index: usize| storages[index].fixed.unwrap_or(Place::Arena(offsets[index]));
    if early {
        buckets.iter_mut().enumerate().for_each(|(index, bucket)| bucket.place = place(index));
    }
    let places = storage_of
        .iter()
        .zip(&start_of)
        .map(|(storage, start)| match storage.map(place) {
            Some(Place::Arena(offset)) => Place::Arena(offset + start),
            other => other.unwrap_or(Place::None),
        })
        .collect();
    Memory { places, arena_bytes: end(&spans), has_gradients, spans, storages, storage_of }
}

/// The bytes of a gradient that stands at the beginning of the arena, where the layout has it, up to the end of the step. They are its own
/// from the node on that gives the last of what it is computed from, because a device may compute it together with that. One that does not
/// fill its last cache line has them always, and so has one that is not computed: zeros stay what they are.
fn gradient_span(graph: &Graph, part: &Part, layout: &Layout) -> Span {
    let Range { start, end } = layout.range(part.parameter);
    let bytes = start * DType::F32.bytes()..(end * DType::F32.bytes()).next_multiple_of(ALIGNMENT_BYTES);
    let node_of = |value: &Value| match graph.info(*value).source {
        Source::Node { node, .. } => Some(node),
        _ => None,
    };
    let is_full = end * DType::F32.bytes() == bytes.end;
    let node = part.value.as_ref().filter(|_| is_full).and_then(node_of);
    let birth = node.and_then(|node| graph.nodes()[node].inputs.iter().filter_map(node_of).max()).unwrap_or(0);
    Span { bytes, nodes: birth..=graph.nodes().len() }
}

struct Assignment {
    storages: Vec<Storage>,
    storage_of: Vec<Option<usize>>,
    /// The byte at which a value begins in its storage.
    start_of: Vec<usize>,
}

impl Assignment {
    fn new(graph: &Graph) -> Self {
        let count = graph.values.len();
        Self { storages: Vec::new(), storage_of: vec![None; count], start_of: vec![0; count] }
    }

    /// A gradient that stands in the store.
    fn gradient(&mut self, part: &Part) {
        let Some(value) = part.value else { return };
        self.storage_of[value.index()] = Some(self.storages.len());
        let fixed = Some(Place::Gradient(part.parameter));
        self.storages.push(Storage { birth: 0, death: 0, bytes: 0, fixed, is_kept: true });
    }

    /// Gradients that stand in the arena, from the first one's node to their application.
    fn bucket(&mut self, graph: &Graph, bucket: &Bucket, parts: &[Part], layout: &Layout) {
        let mut birth = bucket.apply_after;
        for part in parts {
            let value = part.value.expect("early updates are of parameters that have a gradient");
            let element = layout.range(part.parameter).start + part.elements.start - bucket.elements.start;
            self.storage_of[value.index()] = Some(self.storages.len());
            self.start_of[value.index()] = element * DType::F32.bytes();
            if let Source::Node { node, .. } = graph.info(value).source {
                birth = birth.min(node);
            }
        }
        let bytes = bucket.elements.len() * DType::F32.bytes();
        self.storages.push(Storage { birth, death: bucket.apply_after, bytes, fixed: None, is_kept: true });
    }

    /// A value that no node computes.
    fn given(&mut self, graph: &Graph, value: Value, death: usize) {
        let info = graph.info(value);
        let fixed = match info.source {
            Source::Input(_) => None,
            Source::Parameter(index) => Some(Place::Parameter(index)),
            Source::State(index) => Some(Place::State(index)),
            Source::Node { .. } => return,
        };
        self.storage_of[value.index()] = Some(self.storages.len());
        let is_kept = fixed.is_none();
        let death = if is_kept { graph.nodes().len() } else { death };
        self.storages.push(Storage { birth: 0, death, bytes: info.bytes(), fixed, is_kept });
    }

    /// The outputs of a node that have no place yet.
    fn node(&mut self, graph: &Graph, index: usize, death: &[usize]) {
        let node = &graph.nodes()[index];
        for (position, &output) in node.outputs.iter().enumerate() {
            if self.storage_of[output.index()].is_some() {
                continue;
            }
            let host = shared_input(graph, (index, position), &self.storages, &self.storage_of);
            if host.is_some() {
                let input = node.inputs[node.op.in_place().map_or(0, |(_, input)| input)];
                self.start_of[output.index()] = self.start_of[input.index()];
            }
            let storage = host.unwrap_or_else(|| {
                let bytes = graph.info(output).bytes();
                self.storages.push(Storage { birth: index, death: index, bytes, fixed: None, is_kept: false });
                self.storages.len() - 1
            });
            let end = &mut self.storages[storage].death;
            *end = death[output.index()].max(index).max(*end);
            self.storage_of[output.index()] = Some(storage);
        }
    }
}

/// Asserts that every wanted gradient can be given a place: a device writes it without asking whether it fits there.
pub(super) fn check_gradients(graph: &Graph, gradients: &[Option<Value>]) {
    let complete = gradients.is_empty() || gradients.len() == graph.parameters().len();
    assert!(complete, "gradients are wanted of every parameter or of none; one that is not computed is `None`");
    let mut seen = vec![false; graph.values.len()];
    for (gradient, &parameter) in gradients.iter().zip(graph.parameters()) {
        let Some(gradient) = *gradient else { continue };
        let (info, name) = (graph.info(gradient), &graph.info(parameter).name);
        let is_first = !std::mem::replace(&mut seen[gradient.index()], true);
        let is_node = matches!(info.source, Source::Node { .. });
        assert!(is_node && is_first, "each gradient is the output of a node of its own");
        assert_eq!(&info.shape, graph.shape(parameter), "the gradient of `{name}` has its shape");
        assert_eq!(info.dtype, DType::F32, "the gradient of `{name}` is of its type");
    }
}

/// The last node during which each value is read; wanted outputs live to the end.
fn deaths(graph: &Graph, wanted: &Wanted, beside: &[Option<usize>]) -> Vec<usize> {
    let mut death = vec![0; graph.values.len()];
    for (index, node) in graph.nodes().iter().enumerate() {
        // Where it has to be done, it is: a node there may overwrite what it read.
        let last = beside[index].unwrap_or(index);
        node.inputs.iter().for_each(|input| death[input.index()] = last.max(death[input.index()]));
    }
    wanted.outputs.iter().chain(&wanted.input_gradients).for_each(|output| death[output.index()] = graph.nodes().len());
    death
}

/// The storage that output `position` of node `index` may take over.
fn shared_input(
    graph: &Graph,
    (index, position): (usize, usize),
    storages: &[Storage],
    storage_of: &[Option<usize>],
) -> Option<usize> {
    let node = &graph.nodes()[index];
    let of = |value: Value| storage_of[value.index()];
    if node.op.is_view() {
        return of(node.inputs[0]);
    }
    let (_, input) = node.op.in_place().filter(|&(output, _)| output == position)?;
    let input = node.inputs[input];
    let storage = of(input)?;
    let Storage { death, fixed, is_kept, .. } = storages[storage];
    let same_type = graph.dtype(input) == graph.dtype(node.outputs[position]);
    let read_twice = node.inputs.iter().filter(|&&input| of(input) == Some(storage)).count() > 1;
    (fixed.is_none() && !is_kept && death == index && same_type && !read_twice).then_some(storage)
}

/// Offsets for the storages of the arena beside what is taken: largest first, each at the lowest free place, a multiple of `alignment`. Gives
/// all spans, too.
fn place_all(storages: &[Storage], mut spans: Vec<Span>, alignment: usize) -> (Vec<usize>, Vec<Span>) {
    let mut order: Vec<usize> = (0..storages.len()).filter(|&index| storages[index].fixed.is_none()).collect();
    order.sort_by_key(|&index| (std::cmp::Reverse(storages[index].bytes), index));
    let mut offsets = vec![0usize; storages.len()];
    spans.sort_by_key(|span| span.bytes.start);
    for index in order {
        let Storage { birth, death, bytes, .. } = storages[index];
        let bytes = bytes.next_multiple_of(alignment);
        // `spans` is kept sorted, so one sweep over the neighbours in time finds the lowest gap.
        let mut offset = 0;
        for span in &spans {
            if *span.nodes.start() <= death && birth <= *span.nodes.end() {
                if span.bytes.start.checked_sub(offset).is_some_and(|gap| gap >= bytes) {
                    break;
                }
                offset = offset.max(span.bytes.end.next_multiple_of(alignment));
            }
        }
        offsets[index] = offset;
        let end = offset.checked_add(bytes).expect("the arena is no larger than this machine can address");
        let position = spans.partition_point(|span| span.bytes.start <= offset);
        spans.insert(position, Span { bytes: offset..end, nodes: birth..=death });
    }
    (offsets, spans)
}

/// Bytes of results of the forward pass that the backward pass reads.
pub(super) fn activation_bytes(graph: &Graph, memory: &Memory, forward_nodes: usize) -> usize {
    let backward = &graph.nodes()[forward_nodes..];
    let mut read = vec![false; memory.storages.len()];
    let inputs = backward.iter().flat_map(|node| &node.inputs);
    inputs.filter_map(|input| memory.storage_of[input.index()]).for_each(|storage| read[storage] = true);
    let is_activation =
        |storage: &Storage| storage.fixed.is_none() && !storage.is_kept && storage.birth < forward_nodes;
    memory
        .storages
        .iter()
        .zip(read)
        .filter(|(storage, read)| *read && is_activation(storage))
        .map(|(s, _)| s.bytes)
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gradient;
    use crate::op::Op;
    use crate::plan::Plan;
    use crate::unary::Unary;

    #[test]
    fn the_longest_gap_is_free_at_every_node() {
        let span = |bytes: Range<usize>, nodes| Span { bytes, nodes };
        let spans = [span(0..10, 0..=9), span(30..40, 2..=4), span(12..20, 3..=5), span(35..60, 0..=2)];
        let gap = |nodes: &[usize]| longest_gap(&spans, nodes, &[], 100);
        assert_eq!(gap(&[9]), 10..100);
        assert_eq!(gap(&[2]), 60..100);
        assert_eq!(gap(&[4]), 40..100);
        assert_eq!(longest_gap(&spans, &[9], &[50..70, 65..90], 100), 10..50);
        assert_eq!(longest_gap(&spans, &[4], &[], 45), 20..30);
        assert_eq!(longest_gap(&spans, &[2, 3], &[], 64), 20..30);
        assert_eq!(longest_gap(&spans[..1], &[0], &[], 10), 0..0, "all is used");
    }

    #[test]
    fn gaps_of_a_plan_miss_what_its_nodes_read_and_write() {
        let mut graph = Graph::new();
        let x = graph.input("x", [32, 8], DType::F32);
        let mut y = x;
        for layer in 0..6 {
            let one = graph.push_one("one", Op::Unary(Unary::Relu), &[y]).unwrap();
            let other = graph.push_one("other", Op::Unary(Unary::Tanh), &[y]).unwrap();
            y = graph.push_one("product", if layer % 2 == 0 { Op::Mul } else { Op::Add }, &[one, other]).unwrap();
        }
        let seed = graph.input("dy", [32, 8], DType::F32);
        let dx = gradient::differentiate(&mut graph, y, seed, &[x]).unwrap().of(x).unwrap();
        let plan = Plan::new(graph, &Wanted { outputs: vec![y, dx], ..Wanted::default() });
        let mut largest = 0;
        for (index, node) in plan.graph().nodes().iter().enumerate() {
            let gap = plan.free_arena(&[index], &[]);
            let outputs = plan.outputs().iter().filter(|_| index > plan.forward_nodes());
            for &value in node.inputs.iter().chain(&node.outputs).chain(outputs) {
                let used = plan.arena_range(value).unwrap();
                assert!(gap.end <= used.start || used.end <= gap.start, "{gap:?} and {used:?} at node {index}");
            }
            largest = largest.max(gap.len());
        }
        assert!(largest >= 32 * 8 * 4 && largest < plan.arena_bytes());
    }
}
