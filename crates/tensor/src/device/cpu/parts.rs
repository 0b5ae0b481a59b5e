//! What the parts of a layer do together: the host is asked for what the others have, where it stands.

use super::context::Context;
use super::elementwise::GRAIN;
use super::memory::Operands;
use crate::execute::{Progress, Turn};
use crate::op::{Gather, Together};

/// Runs a node of several parts; gives whether to go on.
pub(super) fn together(
    context: &Context<'_>,
    at: &Operands<'_>,
    op: &Together,
    watch: &mut dyn FnMut(Progress<'_>) -> bool,
) -> bool {
    match op {
        Together::Sum => {
            let y = at.output::<f32>(0);
            if let Some(x) = at.input_unless_shared::<f32>(0) {
                y.copy_from_slice(x);
            }
            watch(Progress::Turn(Turn::SumParts { numbers: y }))
        }
        Together::Gather(gather) => {
            let (x, y) = (at.input::<f32>(0), at.output::<f32>(0));
            let mut ask = |numbers: &mut [f32]| {
                numbers[gather.range(gather.own)].copy_from_slice(x);
                watch(Progress::Turn(Turn::GatherParts { numbers, lengths: &gather.lengths, own: gather.own }))
            };
            if at.outputs() == 1 {
                return ask(y);
            }
            let pieces = at.output::<f32>(1);
            let goes_on = ask(pieces);
            let shape = at.input_shape(0);
            join(context, gather, shape[gather.dim + 1..].iter().product(), pieces, y);
            goes_on
        }
        Together::Fork => unreachable!("a fork only moves elements"),
    }
}

/// Puts the segments of all pieces where they belong; each is a run of `inner` times its length for every index of the dims before.
fn join(context: &Context<'_>, gather: &Gather, inner: usize, pieces: &[f32], y: &mut [f32]) {
    let row = gather.total() * inner;
    let rows = GRAIN.div_ceil(row);
    context.pool.chunks(y, rows * row, |task, y| {
        for (index, y) in y.chunks_exact_mut(row).enumerate() {
            for part in 0..gather.lengths.len() {
                let width = gather.extent(part) * inner;
                let mut from = gather.range(part).start + (task * rows + index) * width;
                for (start, length) in gather.of(part) {
                    let run = length * inner;
                    y[start * inner..start * inner + run].copy_from_slice(&pieces[from..from + run]);
                    from += run;
                }
            }
        }
    });
}
