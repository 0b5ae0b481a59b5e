//! Who shares bytes with whom, and where: liveness, in-place results, offsets.

use super::{ALIGNMENT_BYTES, Place, Wanted};
use crate::dtype::DType;
use crate::graph::{Graph, Source, Value};
use crate::op::Op;

pub(super) struct Memory {
    pub places: Vec<Place>,
    pub arena_bytes: usize,
    storages: Vec<Storage>,
    storage_of: Vec<Option<usize>>,
}

/// Values that share bytes, from the first one's birth to the last one's death, in node numbers.
#[derive(Clone, Debug)]
struct Storage {
    birth: usize,
    death: usize,
    bytes: usize,
    /// Set for what does not live in the arena.
    fixed: Option<Place>,
    /// Inputs are filled by the host and may be read by several runs: they live to the end and nothing overwrites them.
    is_input: bool,
}

pub(super) fn assign(graph: &Graph, wanted: &Wanted) -> Memory {
    let death = deaths(graph, wanted);
    let fixed = gradient_places(graph, wanted);
    let mut storages: Vec<Storage> = Vec::new();
    let mut storage_of: Vec<Option<usize>> = vec![None; graph.values.len()];
    for value in graph.values() {
        let info = graph.info(value);
        let place = match info.source {
            Source::Input(_) => None,
            Source::Parameter(index) => Some(Place::Parameter(index)),
            Source::State(index) => Some(Place::State(index)),
            Source::Node { .. } => continue,
        };
        storage_of[value.index()] = Some(storages.len());
        let is_input = place.is_none();
        let death = if is_input { graph.nodes().len() } else { death[value.index()] };
        storages.push(Storage { birth: 0, death, bytes: info.bytes(), fixed: place, is_input });
    }
    for (index, node) in graph.nodes().iter().enumerate() {
        for (position, &output) in node.outputs.iter().enumerate() {
            let place = fixed[output.index()];
            let taken = shared_input(graph, (index, position), &storages, &storage_of).filter(|_| place.is_none());
            let storage = taken.unwrap_or_else(|| {
                let bytes = graph.info(output).bytes();
                storages.push(Storage { birth: index, death: index, bytes, fixed: place, is_input: false });
                storages.len() - 1
            });
            storages[storage].death = storages[storage].death.max(death[output.index()]).max(index);
            storage_of[output.index()] = Some(storage);
        }
    }
    let (offsets, arena_bytes) = offsets(&storages);
    let places = storage_of
        .iter()
        .map(|storage| {
            storage.map_or(Place::None, |index| storages[index].fixed.unwrap_or(Place::Arena(offsets[index])))
        })
        .collect();
    Memory { places, arena_bytes, storages, storage_of }
}

/// The places of the wanted gradients: a device writes them without asking whether they fit there.
fn gradient_places(graph: &Graph, wanted: &Wanted) -> Vec<Option<Place>> {
    let mut fixed: Vec<Option<Place>> = vec![None; graph.values.len()];
    let complete = wanted.gradients.is_empty() || wanted.gradients.len() == graph.parameters().len();
    assert!(complete, "gradients are wanted of every parameter or of none; one that is not computed is `None`");
    for (index, (gradient, &parameter)) in wanted.gradients.iter().zip(graph.parameters()).enumerate() {
        let Some(gradient) = *gradient else { continue };
        let (info, name) = (graph.info(gradient), &graph.info(parameter).name);
        let is_node = matches!(info.source, Source::Node { .. });
        assert!(is_node && fixed[gradient.index()].is_none(), "each gradient is the output of a node of its own");
        assert_eq!(&info.shape, graph.shape(parameter), "the gradient of `{name}` has its shape");
        assert_eq!(info.dtype, DType::F32, "the gradient of `{name}` is of its type");
        fixed[gradient.index()] = Some(Place::Gradient(index));
    }
    fixed
}

/// The node that reads each value last; wanted outputs live to the end.
fn deaths(graph: &Graph, wanted: &Wanted) -> Vec<usize> {
    let mut death = vec![0; graph.values.len()];
    for (index, node) in graph.nodes().iter().enumerate() {
        node.inputs.iter().for_each(|input| death[input.index()] = index);
    }
    wanted.outputs.iter().for_each(|output| death[output.index()] = graph.nodes().len());
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
    if matches!(node.op, Op::Reshape(_)) {
        return of(node.inputs[0]);
    }
    let (_, input) = node.op.in_place().filter(|&(output, _)| output == position)?;
    let input = node.inputs[input];
    let storage = of(input)?;
    let Storage { death, fixed, is_input, .. } = storages[storage];
    let same_type = graph.dtype(input) == graph.dtype(node.outputs[position]);
    let read_twice = node.inputs.iter().filter(|&&input| of(input) == Some(storage)).count() > 1;
    (fixed.is_none() && !is_input && death == index && same_type && !read_twice).then_some(storage)
}

/// Offsets for the storages of the arena: largest first, each at the lowest free place.
fn offsets(storages: &[Storage]) -> (Vec<usize>, usize) {
    let mut order: Vec<usize> = (0..storages.len()).filter(|&index| storages[index].fixed.is_none()).collect();
    order.sort_by_key(|&index| (std::cmp::Reverse(storages[index].bytes), index));
    let mut offsets = vec![0usize; storages.len()];
    let mut placed: Vec<usize> = Vec::new();
    let mut arena_bytes = 0;
    for index in order {
        let storage = &storages[index];
        let bytes = storage.bytes.next_multiple_of(ALIGNMENT_BYTES);
        // `placed` is kept sorted by offset, so one sweep over the neighbours in time finds the lowest gap.
        let mut offset = 0;
        for &other in &placed {
            let neighbour = &storages[other];
            if neighbour.birth <= storage.death && storage.birth <= neighbour.death {
                if offsets[other].checked_sub(offset).is_some_and(|gap| gap >= bytes) {
                    break;
                }
                offset = offset.max(offsets[other] + neighbour.bytes.next_multiple_of(ALIGNMENT_BYTES));
            }
        }
        offsets[index] = offset;
        let end = offset.checked_add(bytes).expect("the arena is no larger than this machine can address");
        arena_bytes = arena_bytes.max(end);
        let position = placed.partition_point(|&other| offsets[other] <= offset);
        placed.insert(position, index);
    }
    (offsets, arena_bytes)
}

/// Bytes of results of the forward pass that the backward pass reads.
pub(super) fn activation_bytes(graph: &Graph, memory: &Memory, forward_nodes: usize) -> usize {
    let backward = &graph.nodes()[forward_nodes..];
    let mut read = vec![false; memory.storages.len()];
    let inputs = backward.iter().flat_map(|node| &node.inputs);
    inputs.filter_map(|input| memory.storage_of[input.index()]).for_each(|storage| read[storage] = true);
    let is_activation =
        |storage: &Storage| storage.fixed.is_none() && !storage.is_input && storage.birth < forward_nodes;
    memory
        .storages
        .iter()
        .zip(read)
        .filter(|(storage, read)| *read && is_activation(storage))
        .map(|(s, _)| s.bytes)
        .sum()
}
