//! Cuts flat buffers into pieces that different threads can update at the same time.
//!
//! The size of a piece is a constant and a piece never spans two segments, so neither the cut nor the bits depend on
//! the number of threads.

use std::sync::Mutex;

use super::{Buffers, Segment};

/// Elements of a piece: 64 KiB of weights, so that weights, gradients and two states of it stay in a core's cache.
pub const PIECE: usize = 16 * 1024;

/// A part of one segment.
#[derive(Debug)]
pub struct Piece<'a> {
    pub weights: &'a mut [f32],
    pub gradients: &'a [f32],
    /// The rule's state; slots that it does not have are empty.
    pub state: [&'a mut [f32]; 2],
    /// λ of weight decay, 0 where the segment is left out.
    pub decay: f32,
    /// What multiplies the learning rate: LARS' own rate of the layer, 1 for every other rule.
    pub rate: f32,
}

/// Cuts the segments of the buffers into pieces, in order.
pub fn cut<'a>(
    segments: &[Segment],
    rates: &[f32],
    decay: f32,
    buffers: Buffers<'a>,
    slots: usize,
) -> Vec<Mutex<Piece<'a>>> {
    let Buffers { mut weights, gradients, state } = buffers;
    assert_eq!(weights.len(), gradients.len(), "one gradient for each weight");
    assert_eq!(state.len(), slots, "the optimizer's number of state buffers");
    assert!(state.iter().all(|slot| slot.len() == gradients.len()), "one state for each weight");
    let mut slots = state.iter_mut().map(Vec::as_mut_slice);
    let mut state = [slots.next().unwrap_or_default(), slots.next().unwrap_or_default()];
    let mut pieces = Vec::with_capacity(segments.iter().map(|segment| segment.range.len().div_ceil(PIECE)).sum());
    let mut position = 0;
    for (segment, &rate) in segments.iter().zip(rates) {
        assert!(position <= segment.range.start, "segments are disjoint and in ascending order");
        let skipped = segment.range.start - position;
        take(&mut weights, skipped);
        state.iter_mut().for_each(|slot| _ = take(slot, skipped));
        for start in segment.range.clone().step_by(PIECE) {
            let length = PIECE.min(segment.range.end - start);
            pieces.push(Mutex::new(Piece {
                weights: take(&mut weights, length),
                gradients: &gradients[start..start + length],
                state: state.each_mut().map(|slot| take(slot, length)),
                decay: if segment.decay { decay } else { 0.0 },
                rate,
            }));
        }
        position = segment.range.end;
    }
    pieces
}

/// Takes the first `length` elements off; an empty slice, a slot that the rule does not have, stays empty.
fn take<'a>(slice: &mut &'a mut [f32], length: usize) -> &'a mut [f32] {
    if slice.is_empty() {
        return &mut [];
    }
    slice.split_off_mut(..length).expect("segments lie inside the buffers")
}
